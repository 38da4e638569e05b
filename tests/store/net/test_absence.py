"""A client reports that its store cannot be reached, while it waits."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

import store
import store.sync
from store.engine.engine import Engine
from store.net.absence import OutageLog, warn_if_silent
from store.printable import time_text
from tests.support.processes import free_port
from tests.support.stores import MemoryNetwork, connect_in_memory, serve_in_memory

pytestmark = pytest.mark.filterwarnings("error")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines so far, which threads write."""
    for thread in threading.enumerate():
        if thread.name == "log":
            thread.join()
    return caplog.messages


@pytest.mark.virtual_time
async def test_it_is_said_after_three_seconds_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    with warn_if_silent("tcp://head:29400", lambda: "no such name", within=600, ended_by="join_timeout"):
        await anyio.sleep(2.9)
        assert said(caplog) == []
        for _ in range(596):
            await anyio.sleep(1)
            said(caplog)
    after = [message.split(" after ")[1].split(":")[0] for message in caplog.messages]
    assert after == ["3 s", "10 s", "30 s", "1 min", "2 min", "4 min", "8 min"]
    assert caplog.messages[1] == (
        "still no store at tcp://head:29400 after 10 s: no such name; join_timeout ends this in 9 min 50 s"
    )
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.virtual_time
async def test_of_many_clients_that_wait_for_one_store_one_logs_and_another_after_it_has_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process with 359 nodes reported it 359 times."""

    async def wait(seconds: float) -> None:
        with anyio.move_on_after(seconds), warn_if_silent("tcp://head:1", str, within=600, ended_by="join_timeout"):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        for seconds in (12, *[40] * 20):
            tasks.start_soon(wait, seconds)
        for _ in range(40):
            await anyio.sleep(1)
            said(caplog)
    assert [message.split(" after ")[1].split(":")[0] for message in caplog.messages] == ["3 s", "10 s", "30 s"]


@pytest.mark.virtual_time
async def test_nothing_is_said_once_the_wait_is_over_however_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="as it was"), warn_if_silent("x", str, within=9, ended_by="y"):
        raise ValueError("as it was")
    with anyio.move_on_after(1):
        with warn_if_silent("x", str, within=9, ended_by="y"):
            await anyio.sleep_forever()
    await anyio.sleep(100)
    assert said(caplog) == []


async def test_a_client_says_why_it_is_not_connected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.net.absence.FIRST", (0.05, 60.0))
    port = free_port()
    with pytest.raises(store.ConnectionLost):
        async with store.connect(f"tcp://127.0.0.1:{port}", timeout=0.3):
            pass
    (line,) = said(caplog)
    assert f"still no store at tcp://127.0.0.1:{port} after 0 s: nobody listens there; the timeout ends" in line


def test_durations_are_said_in_hours_minutes_and_seconds() -> None:
    assert [time_text(seconds) for seconds in (0, 9.6, 60, 590, 3600, 86_401)] == [
        *("0 s", "10 s", "1 min", "9 min 50 s", "1 h", "24 h 1 s")
    ]


# before


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    said(caplog)
    return [record.getMessage() for record in caplog.records if record.name.startswith("store.client")]


@pytest.mark.virtual_time
async def test_an_awaited_client_tells_of_an_outage_once_and_of_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """A waiting call or a watch reported nothing, however long the store was away."""
    caplog.set_level(logging.INFO)
    network = MemoryNetwork()
    async with contextlib.AsyncExitStack() as stack:
        engine = Engine(store_id="the store", limits=None)
        async with serve_in_memory(network, engine=engine):
            client = await stack.enter_async_context(connect_in_memory(network))
            waiting = asyncio.create_task(client.wait(["k"]))
            await anyio.sleep(1)
        await anyio.sleep(2.9)
        assert lines(caplog) == []
        await anyio.sleep(300)
        (told,) = lines(caplog)
        assert "has been out of reach for 3 s" in told
        async with serve_in_memory(network, engine=engine):
            await client.put("k", b"")
            await waiting
            assert "is back after 5 min" in lines(caplog)[1]
            assert len(lines(caplog)) == 2


class Stuck(logging.Handler):
    """A handler that blocks, as a terminal or a pipe may."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.goes_on, self.was_let_go = threading.Event(), threading.Event(), list[bool]()

    def emit(self, _: logging.LogRecord) -> None:
        self.reached.set()
        self.was_let_go.append(self.goes_on.wait(10))


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    logger, stuck = logging.getLogger("store"), Stuck()
    level = logger.level
    logger.addHandler(stuck)
    logger.setLevel(logging.INFO)
    yield stuck
    stuck.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "log":
            thread.join(10)  # or the next test sees its line
    logger.setLevel(level)
    logger.removeHandler(stuck)


@pytest.mark.virtual_time
async def test_a_log_that_takes_no_line_delays_no_loop(stuck: Stuck) -> None:
    network, engine = MemoryNetwork(), Engine(store_id="the store", limits=None)
    async with contextlib.AsyncExitStack() as stack:
        async with serve_in_memory(network, engine=engine):
            client = await stack.enter_async_context(connect_in_memory(network))
        await anyio.sleep(10)
        assert stuck.reached.wait(60)
        async with serve_in_memory(network, engine=engine):
            await client.put("k", b"", timeout=60)
            assert stuck.was_let_go == [], "the loop has waited for it"


@pytest.mark.virtual_time
async def test_a_log_that_takes_no_line_delays_no_loop_whose_store_was_never_there(stuck: Stuck) -> None:
    """Regression: the first line was written in the loop."""
    with warn_if_silent("tcp://head:1", str, within=600, ended_by="join_timeout"):
        await anyio.sleep(10)
        assert stuck.reached.wait(60)
        assert stuck.was_let_go == [], "the loop has waited for it"


def test_a_blocking_client_tells_of_an_outage_once_for_all_of_its_connections(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    with contextlib.ExitStack() as stack:
        with store.sync.serve(data_dir=tmp_path) as server:
            client = stack.enter_context(store.sync.connect(server.url))
            threads = [threading.Thread(target=client.wait, args=[["k"]]) for _ in range(5)]
            for thread in threads:
                thread.start()
            while client.stats()["waits"] < 5:
                pass
        while not lines(caplog):
            time.sleep(0.05)
        stack.enter_context(store.sync.serve(port=server.port, data_dir=tmp_path))
        client.put("k", b"")
        for thread in threads:
            thread.join()
        until = time.monotonic() + 10
        while len(lines(caplog)) < 2 and time.monotonic() < until:
            time.sleep(0.01)  # it is logged in a thread
        told = lines(caplog)
        assert "has been out of reach for" in told[0]
        assert "is back after" in told[1]
        assert len(told) == 2


def test_threads_that_find_the_store_back_at_once_tell_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_together = threading.Barrier(4)
    outages = OutageLog("tcp://head:1", lambda: "why", logging.getLogger("store.client"))

    class Slow(float):
        """A number that lets other threads run when it is compared, as any bytecode can."""

        def __lt__(self, other: float) -> bool:
            time.sleep(0.05)
            return float(self) < other

    def find_back() -> None:
        run_together.wait()
        outages.note_end(Slow(4.0))

    outages.note_end(0.0)
    outages.note_failure(0.0)
    outages.note_failure(3.0)
    threads = [threading.Thread(target=find_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 5
    while len(lines(caplog)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    told = lines(caplog)
    assert (len(told), "back after 4 s" in told[1]) == (2, True)


def test_a_call_long_after_one_that_failed_tells_nothing_of_the_time_between(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outages = OutageLog("tcp://head:1", lambda: "why", logging.getLogger("store.client"))
    outages.note_end(0.0)
    for now in (0.0, 1.0, 2.9, 3600.0, 3602.0):
        outages.note_failure(now)
    assert lines(caplog) == []
    outages.note_failure(3603.0)
    assert "for 3 s: why" in lines(caplog)[0]
