"""The HTTP server of a real `rdzv serve`: health, metrics, JSON, events, the page in a real browser."""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import trustme

import rdzv
import store
from rdzv.core.state import Ban
from rdzv.http import app, listening, run_reader
from store.server.accept.connection_table import BESIDE_SHARE, YIELD_AFTER
from tests.rdzv.core.test_report import SCHEMA
from tests.support.limits import limits_with
from tests.support.processes import start_python
from tools.pictures import CHROMIUM, Page, browser, write_timeline

pytestmark = pytest.mark.some_here(3)

LIMIT = 30.0  # seconds
HOSTILE = "<img src=x onerror=document.title='hacked'>"
TOKEN = "correct horse battery staple"


@contextlib.asynccontextmanager
async def served(
    token: str | None = None, *, tls: ssl.SSLContext | None = None, limits: store.Limits | None = None
) -> AsyncIterator[tuple[store.Server, str]]:
    """Yield a store with an HTTP server, and the URL of the latter."""
    secret = token.encode() if token is not None else None
    async with (
        store.serve(token=token, limits=limits) as server,
        app.serve(server, "127.0.0.1", 0, token=secret, tls=tls, prefix="/rdzv") as url,
    ):
        yield server, url


@contextlib.asynccontextmanager
async def node(server: store.Server, node_id: str, **settings: Any) -> AsyncIterator[Any]:
    """Yield a node of the run `job`, whose rounds may have one member."""
    url = f"{server.url}/job?min_nodes=1&max_nodes=4&last_call_timeout=0.1"
    async with rdzv.connect(url, node_id=node_id, is_host=False, **settings) as handler:
        yield handler


async def read_events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in stream:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


METRICS = """
rdzv_store_uptime_seconds ·
rdzv_store_requests_total ·
rdzv_store_limit{limit="keys_max"} ·
rdzv_store_request_seconds_count{kind="Transact",outcome="ok"} ·
rdzv_loop_lag_seconds_count ·
rdzv_build_info{python=·
process_resident_memory_bytes ·
process_open_fds ·
rdzv_run_members{run="job"} 1.0
rdzv_run_phase{phase="training",run="job"} 1.0
rdzv_run_seconds_total{run="job",spent="training"} ·
rdzv_run_last_meeting_seconds{run="job"} ·
rdzv_run_step{node="NODE",run="job"} 1204.0
rdzv_run_step_age_seconds{node="NODE",run="job"} ·
rdzv_run_step_rate{node="NODE",run="job"} ·
"""


async def test_health_metrics_and_runs_are_answered() -> None:
    async with served() as (server, url), aiohttp.ClientSession(url) as session, asyncio.timeout(LIMIT):
        for path in ("/healthz", "/readyz"):
            assert await answered(session, path) == "ok\n"
        assert json.loads(await answered(session, "/api/runs")) == {"version": 1, "runs": []}
        async with node(server, HOSTILE, ttl=1.5) as handler, store.connect(server.url) as client:
            await handler.next_rendezvous()
            for step in (1203, 1204):
                handler.node.membership.beats.beat(step)
            for key in ("head/banned/z", "settings", "unfit/z"):  # these values cannot be read
                await client.put(f"/rdzv/job/{key}", b"\xff\xc1")
            text = ""
            while "} 1204.0" not in text:
                await asyncio.sleep(0.2)  # steps come with the next keep-alive, and answers are cached for a moment
                text = await answered(session, "/metrics")
            shown = text.replace(HOSTILE, "NODE").splitlines()
            for line in METRICS.strip().splitlines():
                assert any(each.startswith(line.rstrip("·")) for each in shown), line
            assert [line for line in shown if line.endswith("of rdzv stats.")] == [], "each figure has a description"
            (run,) = json.loads(await answered(session, "/api/runs"))["runs"]
            assert (run["run_id"], run["phase"], run["members"], run["missing"]) == ("job", "training", 1, 0)
            told = json.loads(await answered(session, "/api/runs/job"))
            jsonschema.validate(told, SCHEMA)
            assert told["members"][0]["node_id"] == HOSTILE
            rows = json.loads(await answered(session, "/api/runs/job/timeline"))
            assert [row[0] for row in rows["nodes"]] == [HOSTILE]
        assert await answered(session, "/api/runs/jbo", status=404) == "the store has no run 'jbo'\n"


async def test_the_closing_of_a_run_is_told_in_fields_and_open_runs_come_first() -> None:
    async with served() as (server, url), aiohttp.ClientSession(url) as session, asyncio.timeout(LIMIT):
        for run_id, verdict in (("{aaa}", {}), ("bbb", {"status": 93})):
            async with rdzv.connect(f"{server.url}/{run_id}?min_nodes=1&max_nodes=1", is_host=False) as handler:
                await handler.next_rendezvous()
                await (handler.give_up("NaN", **verdict) if verdict else handler.set_closed("done"))
            over = json.loads(await answered(session, f"/api/runs/{run_id}"))
            jsonschema.validate(over, SCHEMA)
            assert (over["closing"]["given_up"], over["closing"]["status"]) == (bool(verdict), 93 if verdict else 0)
            assert over["closing"]["at"] == pytest.approx(over["now"], abs=LIMIT)
            assert over["state"]["words"] == ("Given up" if verdict else "Closed: done")
        history = json.loads(await answered(session, "/api/runs/bbb/history"))
        assert [one["size"] for one in history["rounds"]] == [1]
        for path in ("ccc/history", "bbb%2Fnodes", "bbb%2Fnodes/history"):
            await answered(session, f"/api/runs/{path}", status=404)
        assert (await session.head("/api/events")).status == 405
        async with session.get("/api/events?run=bbb%2Fhead") as answer:
            assert (await anext(read_events(answer.content)))["run"] is None
        async with node(server, "a") as handler:
            await handler.next_rendezvous()
            await asyncio.sleep(app.LOOK_EVERY)  # answers are cached for a moment
            async with session.get("/api/events") as answer:
                assert (await anext(read_events(answer.content)))["chosen"] == "job"
            runs = json.loads(await answered(session, "/api/runs"))["runs"]
            assert "steps" not in runs[0], "by member they are in the report of a run"


async def test_events_of_an_idle_run_are_beats_and_later_events_hold_only_changes() -> None:
    async with served() as (server, url), node(server, "a") as a, node(server, "b") as b, asyncio.timeout(LIMIT):
        await asyncio.gather(a.next_rendezvous(), b.next_rendezvous())
        async with aiohttp.ClientSession(url) as session, session.get("/api/events?run=job") as answer:
            events: list[tuple[str, Any]] = []
            kind, asked = "message", 0
            async for line in answer.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    events.append((kind, json.loads(value)))
                    kind = "message"
                    if len(events) == 3:
                        asked = server.figures()["requests"]
                    if len(events) == 5:
                        # Each look asks for the list of runs, for their steps, and whether they have nodes.
                        assert server.figures()["requests"] - asked < 2 * 8, "the run itself is not read again"
                        await b.aclose()
                    if kind != "beat" and "left" in value:
                        break
            kinds = [one for one, _ in events]
            assert kinds[0] == "message"
            assert kinds[2:5] == ["beat"] * 3, "nothing has happened"
            assert events[4][1] == pytest.approx(time.time(), abs=LIMIT), "a beat bears the hour"
            told = events[-1][1]["changed"]
            assert told["members"]["gone"] == ["b"]
            assert "settings" not in told
            assert "attributes" not in json.dumps(told["members"]["changed"])


async def test_a_change_just_after_another_is_sent_at_the_end_of_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read after a change is followed by a pause. A change during the pause is read at its end."""
    monkeypatch.setattr(run_reader, "SPACED", 0.4)  # the pause after a read that takes 0.1 s
    async with (
        served() as (server, url),
        node(server, "a") as a,
        store.connect(server.url) as client,
        aiohttp.ClientSession(url) as session,
        asyncio.timeout(LIMIT),
    ):
        await a.next_rendezvous()
        async with session.get("/api/events?run=job") as answer:
            events = read_events(answer.content)
            while not isinstance(await anext(events), float):
                pass
            began = 0.0
            for ban in ("first", "second"):
                began = time.monotonic()
                await client.put(f"/rdzv/job/head/banned/{ban}", Ban(reason="", by="").pack())
                while ban not in json.dumps(await anext(events)):
                    pass
        assert time.monotonic() - began < 0.9


async def answered(session: aiohttp.ClientSession, path: str, *, status: int = 200) -> str:
    async with session.get(path) as answer:
        assert answer.status == status
        return await answer.text()


async def test_events_name_a_departed_node() -> None:
    async with (
        served() as (server, url),
        aiohttp.ClientSession(url) as session,
        asyncio.timeout(LIMIT),
        node(server, "stays") as stays,
        node(server, "goes") as goes,
    ):
        await asyncio.gather(stays.next_rendezvous(), goes.next_rendezvous())
        async with session.get("/api/events") as answer:
            assert answer.content_type == "text/event-stream"
            events = read_events(answer.content)
            assert (await anext(events))["run"]["members"]
            await goes.aclose()
            async for event in events:
                if any(one["node_id"] == "goes" for one in event["changed"].get("missing", ())):
                    break


async def test_a_token_that_is_no_text_is_delayed_like_any_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each such request logged a traceback, 984 of them in 3 s."""
    async with served(TOKEN) as (_, url), asyncio.timeout(LIMIT):
        port = int(url.rpartition(":")[2])
        for secret in (b"Bearer \xff\xfe", b"Basic \xff\xfe", b"\xff"):
            began = asyncio.get_running_loop().time()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: " + secret + b"\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"401"
            assert asyncio.get_running_loop().time() - began >= listening.WRONG_GUESS_COSTS * 0.9
            writer.close()
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("secure", [False, True], ids=["HTTP", "HTTPS"])
async def test_silent_connections_are_counted_and_bounded_and_do_not_block_the_store(secure: bool) -> None:
    """Regression: with a limit of 1,024 files, 1,100 of them kept clients from the store, and none was counted."""
    tls = None
    if secure:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    limits = limits_with(handshakes_max=20)
    async with (
        served(tls=tls, limits=limits) as (server, url),
        asyncio.timeout(LIMIT),
        contextlib.AsyncExitStack() as stack,
    ):
        port, share = int(url.rpartition(":")[2]), limits.handshakes_max // BESIDE_SHARE
        before = server.figures()["memory_bytes"]
        for number in range(20):
            writer = await stack.enter_async_context(silent(port))
            writer.write(b"\x16\x03\x01" if secure else b"GET / HTTP/1.1\r\n"[: number % 10])
        while server.figures()["strangers"] < share:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.01)
        assert server.figures()["memory_bytes"] - before > share * 10_000
        async with store.connect(server.url, timeout=LIMIT) as client:
            await client.put("a", b"")
        assert server.figures()["strangers"] <= share
        async with aiohttp.ClientSession(url) as session, session.get("/healthz", ssl=False) as answer:
            assert answer.status == 200, "in its turn"


async def test_a_client_that_guesses_the_token_counts_as_unauthenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: while a wrong guess waited, its connection was not counted as unauthenticated, and had no limit."""
    monkeypatch.setattr(listening, "WRONG_GUESS_COSTS", 600.0)
    limits = limits_with(handshakes_max=20)
    async with (
        served(TOKEN, limits=limits) as (server, url),
        asyncio.timeout(LIMIT),
        contextlib.AsyncExitStack() as stack,
    ):
        before = server.figures()["connections"]
        for _ in range(20):
            writer = await stack.enter_async_context(silent(int(url.rpartition(":")[2])))
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n")
        while not server.figures()["connections_refused"]:
            assert server.figures()["connections"] <= before + limits.handshakes_max // BESIDE_SHARE
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def silent(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    """Yield a connection that is never read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield writer
    finally:
        assert reader is not None, "or asyncio would close it"
        writer.transport.abort()


async def test_an_open_page_is_not_closed_for_newcomers() -> None:
    limits = limits_with(handshakes_max=2)
    async with (
        served(limits=limits) as (server, url),
        asyncio.timeout(LIMIT),
        aiohttp.ClientSession(url) as session,
        session.get("/api/events") as answer,
    ):
        await answer.content.readany()
        await asyncio.sleep(YIELD_AFTER * 1.1)
        for _ in range(4):
            async with store.connect(server.url, timeout=LIMIT) as client:
                await client.ping()
        assert b"event: beat" in await answer.content.readany()


async def test_ended_runs_are_counted_and_add_almost_nothing_to_a_scrape() -> None:
    """Regression: each scrape read a thousand ended runs again, which took 3 s of processor time."""
    ended = 300
    async with served() as (server, url), aiohttp.ClientSession(url) as session, asyncio.timeout(2 * LIMIT):
        async with store.connect(server.url) as client:
            for number in range(ended):
                await client.put(f"/rdzv/old-{number}/head/closed", b"")
                await client.put(f"/rdzv/old-{number}/settings", b"")

        async def scrape() -> tuple[list[str], int]:
            before = server.figures()["requests"]
            lines = (await answered(session, "/metrics")).splitlines()
            return lines, server.figures()["requests"] - before

        lines, _ = await scrape()
        assert f"rdzv_runs_ended {ended}.0" in lines
        assert not [line for line in lines if 'run="old-' in line]
        async with node(server, "a") as handler:
            await handler.next_rendezvous()
            while 'rdzv_run_members{run="job"} 1.0' not in lines:  # answers are cached for a moment
                await asyncio.sleep(app.LOOK_EVERY)
                lines, _ = await scrape()
            assert f"rdzv_runs_ended {ended}.0" in lines
            asked = 0
            while not asked:
                await asyncio.sleep(app.LOOK_EVERY)
                lines, asked = await scrape()
            assert asked < 40, "one run is read"
            await handler.set_closed("done")
        while f"rdzv_runs_ended {ended + 1}.0" not in lines:
            await asyncio.sleep(app.LOOK_EVERY)
            lines, asked = await scrape()
        async with session.get("/api/runs") as answer:
            runs = (await answer.json())["runs"]
        assert {run["phase"] for run in runs if run["run_id"] != "job"} == {"closed"}, (
            "what cannot be read is passed over"
        )
        assert [run["closed"] for run in runs if run["run_id"] == "job"] == ["done"]


async def test_the_page_may_load_nothing_and_run_only_its_own_script() -> None:
    async with served() as (_, url), aiohttp.ClientSession(url) as session, session.get("/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "innerHTML" not in page
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.parametrize("secure", [False, True], ids=["HTTP", "HTTPS"])
async def test_rdzv_serve_serves_http_with_the_address_and_tls_of_the_store(tmp_path: Path, secure: bool) -> None:
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    pair = authority.issue_cert("127.0.0.1")
    cert, key, token = tmp_path / "cert", tmp_path / "key", tmp_path / "token"
    pair.cert_chain_pems[0].write_to_path(cert)
    pair.private_key_pem.write_to_path(key)
    token.write_text(TOKEN)
    files = ("--cert", str(cert), "--key", str(key), "--token-file", str(token)) if secure else ()
    headers = {"Authorization": f"Bearer {TOKEN}"} if secure else {}
    async with start_python("-m", "rdzv", "serve", "--port", "0", "--http-port", "0", *files) as child:
        url = (await child.says("HTTP")).partition(" at ")[2].strip()
        assert secure or url.startswith("http://127.0.0.1:")
        url = f"http{'s' if secure else ''}://127.0.0.1:{url.rpartition(':')[2]}/api/runs"
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url, ssl=context) as answer:
            assert answer.status == 200
        child.terminate()
        assert await child.wait() == 0


UNTIL_DRAWN = """new Promise((done) => {
    const look = () => {
        const canvas = document.querySelector("#timeline canvas");
        if (canvas) done(canvas.getAttribute("aria-label"));
    };
    new MutationObserver(look).observe(document.getElementById("timeline"), {childList: true, subtree: true});
    look();
})"""


PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
SCROLLED = f"timeline.scrollTop = %s; {PAINTED}"
HAS_RED = """(() => {
    const canvas = document.querySelector("#timeline canvas"), copy = document.createElement("canvas");
    copy.width = canvas.width; copy.height = canvas.height;
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    const dots = pen.getImageData(0, 0, copy.width, copy.height).data;
    for (let at = 0; at < dots.length; at += 4) {
        if (dots[at] === 0xc6 && dots[at + 1] === 0x28 && dots[at + 2] === 0x28) return true;
    }
    return false;
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_timelines_of_4_to_1000_nodes_scroll_and_draw_only_visible_rows(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * LIMIT), browser() as page:
        await page.call("Page.enable")
        await page.resize(1440)
        await show_timelines(page, tmp_path)


async def show_timelines(page: Page, folder: Path) -> None:
    for nodes in (4, 64, 1000):
        write_timeline(folder / "timeline.html", nodes, 24)
        await page.call("Page.navigate", url=(folder / "timeline.html").as_uri())
        await page.evaluate("new Promise((done) => document.readyState == 'complete' ? done() : onload = done)")
        assert await page.evaluate(UNTIL_DRAWN) == f"timeline of job-7: {nodes} nodes"
        assert await page.evaluate("document.querySelector('#timeline canvas').clientHeight") <= 800
        assert await page.evaluate("document.querySelector('#timeline').scrollHeight") >= nodes * 18
        # A lost node is red, also at the end of the rows.
        await page.evaluate(
            "timeline.scrollTop = 1e9; new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        )
        assert await page.evaluate(HAS_RED) is (nodes < 1000)
        await page.evaluate(
            "timeline.scrollTop = 0; new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        )
        assert await page.evaluate(HAS_RED)
