"""Processes on virtual time stop, die and keep time as real ones do. All simulated tests rely on that."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from rdzv.testing.network import MemoryNetwork
from rdzv.testing.timeline import SimulatedTime


async def note_each_second(noted: list[float], clock: SimulatedTime) -> None:
    while True:
        await anyio.sleep(1.0)
        noted.append(round(clock.now - 1000, 3))


def test_time_jumps_and_each_clock_has_its_own_rate() -> None:
    timeline = SimulatedTime()
    true: list[float] = []
    fast: list[float] = []
    timeline.new_host("a").start_task(note_each_second(true, timeline))
    host = timeline.new_host("b", rate=1.25)
    host.start_task(note_each_second(fast, timeline))
    timeline.run_until_time(1004.5)
    assert (true, fast) == ([1.0, 2.0, 3.0, 4.0], [0.8, 1.6, 2.4, 3.2, 4.0])
    assert host.time() == pytest.approx(1000 + 4.5 * 1.25)
    timeline.end_processes()


def test_a_resumed_process_reads_first_and_runs_its_timers_then() -> None:
    timeline = SimulatedTime()
    host, other = timeline.new_host("a"), timeline.new_host("b")
    happened: list[str] = []
    host.call_later(1.0, happened.append, "a timer")
    host.pause()
    other.call_later(2.0, lambda: host.call_soon(happened.append, "what came"))
    timeline.run_until_time(1003.0)
    assert happened == []
    host.resume()
    timeline.run_until_time(1003.0)
    assert happened == ["what came", "a timer"]
    timeline.end_processes()


def test_clean_up_code_of_a_dead_process_has_no_effect() -> None:
    timeline = SimulatedTime()
    network = MemoryNetwork(loop=timeline.new_host("network"))
    heard: list[bytes] = []

    class Server(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            heard.append(data)

        def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
            heard.append(b"lost")

    server, client = timeline.new_host("server"), timeline.new_host("client")
    network.listen("store", Server, loop=server)

    async def speak() -> None:
        transport, _ = await network.dial("store", asyncio.Protocol, source="client")
        try:
            transport.write(b"hello")
            await asyncio.sleep(1000)
        finally:
            transport.write(b"goodbye")
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)

    client.start_task(speak())
    timeline.run_until_time(1001.0)
    assert heard == [b"hello"]
    client.die()
    network.end_process("client")
    timeline.run_until_time(1002.0)
    assert heard == [b"hello", b"lost"], "its system has closed the connection, and it has said nothing more"
    timeline.end_processes()


def test_a_machine_without_power_says_nothing_until_tcp_gives_up() -> None:
    timeline = SimulatedTime()
    network = MemoryNetwork(loop=timeline.new_host("network"))
    lost: list[float] = []

    class Server(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            assert isinstance(error, TimeoutError)
            lost.append(timeline.now)

    server, client = timeline.new_host("server"), timeline.new_host("client")
    network.listen("store", Server, loop=server)
    client.start_task(network.dial("store", asyncio.Protocol, source="client"))
    timeline.run_until_time(1001.0)
    client.die()
    network.end_process("client", silently=True)
    timeline.run_until_time(1029.0)
    assert lost == []
    timeline.run_until_time(1032.0)
    assert lost == [pytest.approx(1031.0)]
    timeline.end_processes()


def test_a_paused_server_still_accepts_connections() -> None:
    timeline = SimulatedTime()
    network = MemoryNetwork(loop=timeline.new_host("network"))
    accepted: list[float] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: ARG002
            accepted.append(timeline.now)

    server, client = timeline.new_host("server"), timeline.new_host("client")
    network.listen("store", Server, loop=server)
    server.pause()
    dialing = client.start_task(network.dial("store", asyncio.Protocol, source="client"))
    timeline.run_until_time(1003.0)
    assert dialing.done()
    assert accepted == []
    server.resume()
    timeline.run_until_time(1003.0)
    assert accepted == [1003.0]
    timeline.end_processes()


def test_an_error_in_a_process_is_raised_by_the_call_that_advances_time() -> None:
    timeline = SimulatedTime()
    timeline.new_host("a").call_soon(lambda: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        timeline.run_until_time(1001.0)
    timeline.end_processes()


def test_work_in_many_processes_takes_no_virtual_time() -> None:
    """Otherwise a simulated barrier of a thousand nodes would take three seconds of virtual time."""
    timeline = SimulatedTime()
    done: list[float] = []

    async def begin_busy() -> None:
        for _ in range(10):
            await asyncio.sleep(0)  # one turn of the loop, and no time
        done.append(timeline.now)

    hosts = [timeline.new_host(f"{number}") for number in range(250)]
    for host in hosts:
        host.start_task(begin_busy())
    timeline.run_until_time(1000.0)
    assert done == [1000.0] * 250
    timeline.end_processes()


def test_time_does_not_advance_for_a_process_that_never_waits() -> None:
    """Otherwise a body that polls without waiting would hang its test instead of failing it."""
    timeline = SimulatedTime()
    turns = 0

    async def spin() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    timeline.new_host("a").start_task(spin())
    timeline.run_until_time(1000.1)
    assert 1000.1 <= timeline.now < 1002.0
    before = turns
    timeline.run_until_time(1003.0)
    assert turns > before, "it goes on, as before"
    timeline.end_processes()


@pytest.mark.parametrize("in_thread", [asyncio.to_thread, anyio.to_thread.run_sync])
def test_threads_are_refused_with_a_remedy(in_thread: Callable[..., Any]) -> None:
    """anyio starts threads itself, not through the loop. Regression: their results came at a random virtual time."""
    timeline = SimulatedTime()
    working = timeline.new_host("a").start_task(in_thread(int))
    with pytest.raises(RuntimeError, match=r"no threads.*rdzv\.testing\.processes"):
        while not working.done():
            timeline.run_until_time(timeline.now + 1.0)
        working.result()
    timeline.end_processes()


def test_the_death_of_a_process_ends_only_its_own_tasks() -> None:
    timeline = SimulatedTime()
    ended: list[str] = []

    async def live(name: str) -> None:
        try:
            await anyio.sleep(5.0)
        except asyncio.CancelledError:
            ended.append(f"{name} is cancelled")
            raise
        ended.append(f"{name} has slept")

    one, other = timeline.new_host("a"), timeline.new_host("b")
    one.start_task(live("a"))
    other.start_task(live("b"))
    timeline.run_until_time(1001.0)
    one.die()
    timeline.run_until_time(1006.0)
    assert ended == ["a is cancelled", "b has slept"]
    timeline.end_processes()


def test_a_body_may_use_task_groups_and_factories_exception_handlers_and_debugging() -> None:
    """From anyio 4.9, a task group asks its loop for the task factory. Regression: that raised NotImplementedError."""
    timeline = SimulatedTime()
    done: list[object] = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        loop.set_exception_handler(lambda _, context: done.append(context["message"]))
        loop.call_exception_handler({"message": "heard"})
        loop.set_task_factory(lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1)
        done.append((loop.get_debug(), loop.get_task_factory() is not None))

    timeline.new_host("a").start_task(body())
    timeline.run_until_time(1002.0)
    assert done == ["heard", (True, True)]
    timeline.end_processes()


@pytest.mark.parametrize(
    "forbidden", [lambda: asyncio.open_connection("127.0.0.1", 1), lambda: asyncio.create_subprocess_exec("true")]
)
def test_features_that_virtual_time_lacks_are_refused_with_a_remedy(forbidden: Callable[[], Awaitable[object]]) -> None:
    timeline = SimulatedTime()
    refused: list[str] = []

    async def body() -> None:
        try:
            await forbidden()
        except RuntimeError as error:
            refused.append(str(error))

    timeline.new_host("a").start_task(body())
    timeline.run_until_time(1002.0)
    assert len(refused) == 1
    assert "rdzv.testing.processes" in refused[0]
    timeline.end_processes()
