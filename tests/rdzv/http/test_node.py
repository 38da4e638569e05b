"""`/metrics` of a node's own process, and the page of a store that a node hosts: over real sockets."""

import asyncio
import contextlib
import sys
from pathlib import Path

import aiohttp
import pytest

import rdzv
from rdzv.errors import RendezvousSettingsError
from tests.support.processes import free_port

LIMIT = 30.0  # seconds
TOKEN = "correct horse battery staple"


async def lines_of(session: aiohttp.ClientSession, url: str, **headers: str) -> list[str]:
    async with session.get(url, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.text()).splitlines()


async def serves(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the node listens: it begins to with its first arrival, and no call waits for that."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            async with session.get(url):
                return
        await asyncio.sleep(0.01)


async def test_a_node_serves_its_metrics_from_its_first_arrival_until_it_is_closed() -> None:
    metrics_port, http_port = free_port(), free_port()
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&max_nodes=2&last_call_timeout=0&ttl=2&disconnect_ttl=0.1"
    mine = f"http://127.0.0.1:{metrics_port}"
    async with asyncio.timeout(LIMIT), aiohttp.ClientSession() as session:
        async with (
            rdzv.connect(url, node_id="a", metrics_port=metrics_port, http_port=http_port) as a,
            rdzv.connect(url, node_id="b") as b,
        ):
            assert not await a.is_closed()
            with pytest.raises(aiohttp.ClientConnectorError):  # an observer of a run serves nothing
                await session.get(f"{mine}/healthz")
            await a.next_rendezvous()
            joining = asyncio.create_task(b.next_rendezvous())
            async with a.changes() as changes:
                await anext(changes)
            await asyncio.gather(a.next_rendezvous(), joining)
            await serves(session, f"{mine}/healthz")
            lines: list[str] = []
            while 'rdzv_node_rounds_total{node="a",run="job"} 2.0' not in lines:
                lines = await lines_of(session, f"{mine}/metrics")
            assert 'rdzv_node_world_size{node="a",run="job"} 2.0' in lines
            assert 'rdzv_node_member{node="a",run="job"} 1.0' in lines
            assert 'rdzv_node_hosts_store{node="a",run="job"} 1.0' in lines
            assert 'rdzv_node_store_in_reach{node="a",run="job"} 1.0' in lines
            for name in ("rdzv_node_seconds_total{doing=", "rdzv_build_info{", "process_cpu_seconds_total "):
                assert any(line.startswith(name) for line in lines), name
            assert await lines_of(session, f"{mine}/healthz") == ["ok"]
            # The same process hosts the store, so it also serves the page about its runs.
            page = f"http://127.0.0.1:{http_port}"
            assert 'rdzv_run_members{run="job"} 2.0' in await lines_of(session, f"{page}/metrics")
            assert "<!doctype html>" in (await lines_of(session, f"{page}/"))[0].lower()
            await b.aclose()
            while 'rdzv_node_missing_nodes{node="a",run="job"} 1.0' not in lines:
                lines = await lines_of(session, f"{mine}/metrics")
        for gone in (mine, page):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{gone}/healthz")


async def test_a_banned_node_counts_a_drop_and_the_other_member_counts_a_loss() -> None:
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&max_nodes=2&last_call_timeout=1"
    ports = {name: free_port() for name in "ab"}
    async with (
        asyncio.timeout(LIMIT),
        aiohttp.ClientSession() as session,
        rdzv.connect(url, node_id="a", metrics_port=ports["a"]) as a,
        rdzv.connect(url, node_id="b", metrics_port=ports["b"]) as b,
    ):
        await asyncio.gather(a.next_rendezvous(), b.next_rendezvous())
        await a.ban("b", "its memory fails", now=True)
        for name, counted in (("b", "dropped"), ("a", "members_lost")):
            await serves(session, f"http://127.0.0.1:{ports[name]}/healthz")
            lines: list[str] = []
            while f'rdzv_node_{counted}_total{{node="{name}",run="job"}} 1.0' not in lines:
                lines = await lines_of(session, f"http://127.0.0.1:{ports[name]}/metrics")


async def test_the_page_of_a_hosted_store_lives_as_long_as_the_store() -> None:
    """Regression: it ended when the host's node left, while the other nodes were still in the run."""
    page = f"http://127.0.0.1:{(http_port := free_port())}"
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=2"
    async with asyncio.timeout(LIMIT), aiohttp.ClientSession() as session:
        async with rdzv.connect(url, node_id="a", http_port=http_port, is_host=True) as a:
            async with rdzv.connect(url, node_id="b") as b:
                await asyncio.gather(a.next_rendezvous(), b.next_rendezvous())
                closing = asyncio.create_task(a.aclose())
                lines: list[str] = []
                while 'rdzv_run_missing{run="job"} 1.0' not in lines:
                    lines = await lines_of(session, f"{page}/metrics")
                assert not closing.done()
            await closing
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{page}/healthz")


async def test_both_need_the_runs_token_and_stay_on_loopback_without_tls(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    metrics_port, http_port = free_port(), free_port()
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&token_file={tmp_path / 'token'}"
    async with (
        asyncio.timeout(LIMIT),
        aiohttp.ClientSession() as session,
        rdzv.connect(f"{url}&metrics_port={metrics_port}&http_port={http_port}", node_id="a") as a,
    ):
        await a.next_rendezvous()
        for port in (http_port, metrics_port):
            asked = f"http://127.0.0.1:{port}/metrics"
            async with session.get(asked) as answer:
                assert answer.status == 401
                assert "Basic" in answer.headers["WWW-Authenticate"]
            assert await lines_of(session, asked, Authorization=f"Bearer {TOKEN}")
            async with session.get(asked, headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421


async def test_ports_in_use_disturb_neither_the_node_nor_the_run(caplog: pytest.LogCaptureFixture) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken, asyncio.timeout(LIMIT):
        url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&metrics_port={port}&http_port={port}"
        async with rdzv.connect(url) as handler:
            assert (await handler.next_rendezvous()).world_size == 1
            while f"metrics_port={port} serves nothing" not in caplog.text:
                await handler.status()
    assert f"http_port={port} serves nothing" in caplog.text


@pytest.mark.parametrize("parameter", ["metrics_port", "http_port"])
async def test_without_the_extra_the_parameter_that_needs_it_is_named(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("app", "node", "metrics"):
        monkeypatch.delitem(sys.modules, f"rdzv.http.{room}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&{parameter}=0"
    with pytest.raises(RendezvousSettingsError, match=rf"{parameter} needs aiohttp: pip install 'rdzv\[http\]'"):
        async with rdzv.connect(url):
            pass
