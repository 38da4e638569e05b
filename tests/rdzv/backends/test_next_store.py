"""A store whose host has left rejects newcomers, so the next job starts a store of its own and is not dropped."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import rdzv
import store
import store.sync
from rdzv.backends.hosting import CALL_TIMEOUT
from rdzv.core.keys import Keys
from rdzv.core.state import NodesWaiting
from rdzv.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError
from tests.support.processes import Child, free_port, start_python
from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.some_here(3)

ENDING = Keys("/rdzv", "job").ending
PATIENCE = 60.0  # seconds, for a busy machine; no test needs that long, and none measures time

NODE = """
import asyncio, logging, signal, sys, rdzv
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
async def main():
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, done.set)
    async with rdzv.connect(sys.argv[1], node_id=sys.argv[2], close_timeout=600) as handler:
        info = await handler.next_rendezvous()
        print("rank", info.rank, "of", info.world_size, "hosts", int(handler.node.hosts_store()), flush=True)
        await done.wait()
        print("done", flush=True)
asyncio.run(main())
"""


def start_node(url: str, name: str) -> contextlib.AbstractAsyncContextManager[Child]:
    return start_python("-c", NODE, url, name)


def done(child: Child) -> None:
    child.send_signal(signal.SIGUSR1)


async def until(said: str, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE):
        while said not in caplog.text:  # noqa: ASYNC110  another thread logs it
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def lingering_store(**parameters: Any) -> AsyncIterator[tuple[str, asyncio.Task[None], store.Client]]:
    """Yield a store whose host has left and which runs on for one client: URL, closing task, that client."""
    url = f"tcp://127.0.0.1:{free_port()}"
    host = await rdzv.connect(f"{url}/job?min_nodes=1&close_timeout=600", node_id="host", **parameters)
    async with store.connect(url) as client:
        await host.next_rendezvous()
        closing = asyncio.create_task(host.aclose())
        await client.wait([ENDING], timeout=PATIENCE)
        yield url, closing, client
    await asyncio.wait_for(closing, PATIENCE)


async def test_the_nodes_of_the_next_job_wait_for_an_ending_store_and_start_their_own() -> None:
    """Regression: they joined the store of the previous job, and were dropped when it ended."""
    server = f"tcp://127.0.0.1:{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        observer = store.connect(server, timeout=PATIENCE)
        host = await stack.enter_async_context(start_node(f"{server}/job?min_nodes=1", "host"))
        await host.line("rank 0 of 1 hosts 1")
        async with observer as client:  # the store runs on until this client has disconnected
            done(host)
            await client.wait([ENDING], timeout=PATIENCE)
            newcomers = [
                await stack.enter_async_context(start_node(f"{server}/next?min_nodes=2&max_nodes=2", name))
                for name in ("a", "b")
            ]
            for one in newcomers:
                await one.says("the node that hosts it is done; it waits for the next one")
        assert await host.wait() == 0
        ranks = [(await one.line(" of 2 hosts ")).split() for one in newcomers]
        assert sorted((words[1], words[3]) for words in ranks) == [("0", "2"), ("1", "2")]
        assert sorted(hosts for *_, hosts in ranks) == ["0", "1"], "one of them has founded the next store"
        for one in newcomers:
            done(one)
        assert [await one.wait() for one in newcomers] == [0, 0]
        assert not [line for one in newcomers for line in one.output if "dropped" in line]


async def test_a_node_with_is_host_waits_for_the_port_only_if_its_store_is_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with lingering_store() as (url, closing, client):
        joining = asyncio.create_task(met(f"{url}/job?min_nodes=1", is_host=True))  # the same job, started again
        await until("the node that hosts it is done; it waits for the next one", caplog)
        assert not joining.done()
        await client.aclose()
        await asyncio.wait_for(closing, PATIENCE)
        assert await asyncio.wait_for(joining, PATIENCE), "it hosts the next store"
    async with store.serve() as server:
        with pytest.raises(RendezvousConnectionError, match=r"is_host is set, but .* the port is already in use"):
            await met(f"{server.url}/next?min_nodes=1", is_host=True)


async def met(url: str, **parameters: Any) -> bool:
    """Join one round and leave. Return True if the store was hosted here."""
    async with rdzv.connect(url, **parameters) as handler:
        await handler.next_rendezvous()
        return handler.node.hosts_store()


@pytest.mark.parametrize("prefix", ["/rdzv", "/elsewhere", "/team/x", "/rdzv/x"])
async def test_a_second_run_keeps_the_store_open_for_itself_and_its_newcomers(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: that run was dropped `close_timeout` after the host had left; with any other prefix, at once."""
    monkeypatch.setattr("rdzv.backends.hosting.LOOK_AGAIN_AFTER", 0.05)
    url = f"tcp://127.0.0.1:{free_port()}"
    other = f"{url}/other?min_nodes=1&max_nodes=2&last_call_timeout=0&prefix={prefix}"
    host = await rdzv.connect(f"{url}/job?min_nodes=1&close_timeout=0.05", node_id="host")
    await host.next_rendezvous()
    async with rdzv.connect(other, node_id="a") as a, rdzv.connect(other, node_id="b") as b:
        await a.next_rendezvous()
        closing = asyncio.create_task(host.aclose())
        await until("1 of run other use it: its process stays", caplog)
        async with a.changes() as changes:
            joining = asyncio.create_task(b.next_rendezvous())
            async for change in changes:
                if change == NodesWaiting(1):
                    break
        assert_one_round(await asyncio.gather(a.next_rendezvous(), joining))
        await until("2 of run other use it", caplog)
        assert not closing.done()
    await asyncio.wait_for(closing, PATIENCE)


async def test_a_durable_store_is_open_again_once_a_node_hosts_it_again(tmp_path: Path) -> None:
    async with lingering_store(data_dir=str(tmp_path)) as (url, _, _):
        pass
    assert await asyncio.wait_for(met(f"{url}/next?min_nodes=1", data_dir=str(tmp_path)), PATIENCE)


@pytest.mark.virtual_time
async def test_a_newcomer_to_an_ending_store_gives_the_reason_and_its_join_timeout_runs() -> None:
    async with VirtualRun(min_nodes=1, join_timeout=CALL_TIMEOUT) as run:
        late = run.handler("late")
        async with run.handler("observer") as observer:
            await observer.node.call_store(lambda client: client.put(ENDING, b""))
        with pytest.raises(RendezvousTimeoutError, match="is ending: the node that hosts it is done; waiting for the"):
            await late.next_rendezvous()
        joining = await run.join(late)
        assert not joining.done()
        async with run.handler("observer") as observer:
            await observer.node.call_store(lambda client: client.delete(ENDING))
        assert (await joining).world_size == 1, "as in the store that comes next"


@pytest.mark.virtual_time
async def test_a_member_can_join_again_while_its_store_is_ending() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        a, b = await run.met("ab")
        await a.node.call_store(lambda client: client.put(ENDING, b""))
        assert_one_round(await run.meet(a, b))
        await b.leave()
        joining = await run.join(b)  # it has withdrawn its record, so it counts as a newcomer
        await asyncio.sleep(5)
        assert "is ending" in b.node.part.wait_reason
        assert not joining.done()


@pytest.mark.virtual_time
@pytest.mark.parametrize("closed_first", [True, False])
async def test_a_newcomer_is_told_that_its_run_is_closed_not_that_its_store_is_ending(closed_first: bool) -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, late = run.handler("a"), run.handler("late")
        await a.node.call_store(lambda client: client.put(ENDING, b""))
        if closed_first:
            await a.set_closed("all done")
        joining = run.start(late.next_rendezvous())
        if not closed_first:
            await asyncio.sleep(10)
            assert not joining.done()
            await a.set_closed("all done")
        with pytest.raises(RendezvousClosedError, match="all done"):
            await joining


@pytest.mark.in_ci
async def test_a_durable_store_accepts_newcomers_again_once_rdzv_serve_runs_it(tmp_path: Path) -> None:
    """Regression: only a hosting node deleted the key that rejects newcomers. `rdzv serve` knows nothing of runs."""
    async with lingering_store(data_dir=str(tmp_path), insecure=True) as (url, _, client):
        assert await client.get(ENDING) is not None
    with store.sync.serve("127.0.0.1", int(url.rpartition(":")[2]), data_dir=tmp_path):
        async with asyncio.timeout(PATIENCE), rdzv.connect(f"{url}/job?min_nodes=1", is_host=False) as newcomer:
            assert (await newcomer.next_rendezvous()).world_size == 1
