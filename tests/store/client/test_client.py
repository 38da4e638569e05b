"""The async client: connecting, reconnecting, the errors that callers get, and waits for room."""

import asyncio
import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store.client import client as client_room
from store.client.client import Client
from store.client.timeouts import BACKOFF_RECENT, HEARTBEAT
from store.errors import ConnectionLost, LimitExceeded, StoreTimeoutError, StoreUsageError, UsedAfterFork
from store.limits import MIB, Limits
from store.net import process
from store.net.threads import new_loop
from tests.support.processes import free_port, require
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import VirtualTimeLoop, now

virtual_time = pytest.mark.virtual_time


async def gathered(*calls: Awaitable[Any]) -> list[Any]:
    """Return the outcomes of calls, errors among them."""
    return await asyncio.gather(*calls, return_exceptions=True)


def changes_of(client: Client) -> list[bool]:
    """Return a list to which the client's changes between connected and disconnected are appended."""
    changes: list[bool] = []
    client.on_connection_change(changes.append)
    return changes


@virtual_time
async def test_bytes_that_arrive_before_the_dial_returns_are_read() -> None:
    network = MemoryNetwork()

    async def slow_to_return(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        dialed = await network.dial("store", factory)
        await asyncio.sleep(1.0)  # the greeting comes meanwhile, as it may with TLS
        return dialed

    async with serve_in_memory(network), Client(slow_to_return, name="store", timeout=3.0) as client:
        assert await client.put("a", b"") == 1


@virtual_time
async def test_a_connection_that_has_ended_before_its_greeting_is_answered_is_followed_by_another() -> None:
    """On a busy machine, uvloop raises at a write to a closed transport, and the client could not be used any more."""
    network = MemoryNetwork()
    dialed: list[asyncio.Transport] = []

    async def ended_at_first(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        transport, protocol = await network.dial("store", factory)
        dialed.append(transport)
        if len(dialed) == 1:
            await asyncio.sleep(1.0)  # the greeting comes meanwhile, and then the end
            transport.abort()
            cast("Any", transport).write = refuse
            await asyncio.sleep(1.0)
        return transport, protocol

    def refuse(_: object) -> NoReturn:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async with serve_in_memory(network), Client(ended_at_first, name="store", timeout=10.0) as client:
        assert await client.put("a", b"") == 1
    assert len(dialed) == 2


@virtual_time
async def test_a_defect_while_connecting_reaches_callers_and_is_raised_at_the_end() -> None:
    async def defective(_: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        raise TypeError("a defect")

    with pytest.raises(TypeError, match="a defect") as caught:
        async with Client(defective, name="store"):
            raise AssertionError("never connected")
    assert isinstance(caught.value.__context__, ConnectionLost)


@pytest.mark.in_ci
@virtual_time
async def test_a_client_comes_back_after_hours_of_outage() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        changes = changes_of(client)
        network.refuse("store")
        network.reset("client")
        await asyncio.sleep(2 * 3600.0)
        assert changes == [False]
        network.stop_refusing("store")
        assert await client.put("a", b"") == 1
        assert changes == [False, True]


@pytest.mark.in_ci
@virtual_time
async def test_thousands_of_clients_do_not_come_back_at_once_after_a_restart() -> None:
    """R8, and thundering herds: of thousands of clients without a server only few reconnect at any one moment.

    Set RDZV_RECONNECTS=10000 for as many clients.
    """
    count, down_for = int(os.environ.get("RDZV_RECONNECTS", "1000")), 3.0
    loop = asyncio.get_running_loop()
    back_at = loop.time() + down_for
    came: list[float] = []

    async def dial(_: object) -> NoReturn:
        if loop.time() < back_at:
            raise ConnectionRefusedError
        came.append(loop.time() - back_at)
        await asyncio.Event().wait()
        raise AssertionError

    clients = [Client(dial, name="store", rng=random.Random(seed)) for seed in range(count)]
    tasks = [asyncio.create_task(client.__aenter__()) for client in clients]
    await asyncio.sleep(down_for + BACKOFF_RECENT + 0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(came) == count, "all come within the longest pause"
    crowd = max(Counter(int(at / 0.01) for at in came).values())
    assert crowd < count / 15, "they are spread over half a second"


@virtual_time
async def test_where_connections_are_taken_and_nothing_is_said_each_is_given_longer() -> None:
    """A busy server welcomes clients in the order of their connections. A client that gave up early and connected again
    was never welcomed.
    """
    network, came, mute = MemoryNetwork(), list[float](), asyncio.Event()

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        came.append(now())
        return await network.dial("mute" if mute.is_set() else "store", factory, source="client")

    network.listen("mute", asyncio.Protocol)
    async with serve_in_memory(network), Client(dial, name="store", rng=random.Random(0)) as client:
        mute.set()
        network.reset("client")
        await asyncio.sleep(20.0)
        assert [at - came[1] for at in came[1:]] == pytest.approx([0, 1, 3, 7, 15], abs=0.2)
        mute.clear()
        await client.ping(timeout=60.0)
        assert now() - came[1] == pytest.approx(31, abs=0.5)


@virtual_time
async def test_an_idle_connection_is_kept_and_asked_after_now_and_then() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        changes = changes_of(client)
        before = server.figures()["requests"]
        await asyncio.sleep(600.0)
        assert changes == []
        assert 600 / HEARTBEAT / 2 - 1 <= server.figures()["requests"] - before <= 600 / HEARTBEAT


@virtual_time
async def test_a_loop_that_was_blocked_does_not_hang_up_before_it_has_asked() -> None:
    network = MemoryNetwork()
    loop = cast("VirtualTimeLoop", asyncio.get_running_loop())
    async with serve_in_memory(network), connect_in_memory(network) as client:
        changes = changes_of(client)
        await asyncio.sleep(1.0)
        loop.timeline.now += 60.0  # a training step
        await asyncio.sleep(60.0)
        assert changes == []


@virtual_time
async def test_a_large_value_that_takes_its_time_is_no_silence() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        changes = changes_of(client)
        (link,) = network.links("client")
        link.server.pause_reading()
        putting = asyncio.create_task(client.put("large", bytes(16 * 1024 * 1024), timeout=600.0))
        started = now()
        while not putting.done():
            link.server.resume_reading()
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # one delivery
            link.server.pause_reading()
            await asyncio.sleep(0.95)  # the server reads a little at a time
        assert now() - started > 55.0
        assert changes == []
        assert await putting == 1


@virtual_time
async def test_a_call_without_an_answer_says_whether_it_may_have_been_applied() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        network.partition("client")
        put, get = await gathered(client.put("a", b"", timeout=2.0), client.get("a", timeout=2.0))
        assert (type(put), put.maybe_applied) == (StoreTimeoutError, True)
        assert (type(get), get.maybe_applied) == (StoreTimeoutError, False)
        network.reset("client")
        await asyncio.sleep(0.1)
        put, get = await gathered(client.put("b", b"", timeout=2.0), client.get("a", timeout=2.0))
        assert (type(put), put.maybe_applied) == (ConnectionLost, False), "it was never sent"
        assert (type(get), get.maybe_applied) == (ConnectionLost, False)
        assert "the connection is lost" in str(put)


@virtual_time
async def test_a_watch_whose_opening_is_given_up_or_cancelled_does_not_stay_open_at_the_server() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network, timeout=3.0) as client:
        network.partition("client")
        cancelled = asyncio.create_task(client.watch("").__aenter__())
        with pytest.raises(StoreTimeoutError):
            await client.watch("").__aenter__()
        network.heal("client")
        cancelled.cancel()
        await gathered(cancelled)
        await client.put("a", b"")
        assert server.figures()["watches"] == 0


@virtual_time
async def test_a_closed_or_forked_client_is_of_no_use_and_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network):
        async with connect_in_memory(network) as client:
            with monkeypatch.context() as child:
                child.setattr(process, "_id", b"the id of a child")
                with pytest.raises(UsedAfterFork, match="make a new one in the child"):
                    await client.get("a")
                with pytest.raises(UsedAfterFork):
                    await client.watch("").__aenter__()
        started = now()
        with pytest.raises(ConnectionLost, match="is closed"):
            await client.get("a")
        with pytest.raises(ConnectionLost, match="is closed"):
            await client.watch("").__aenter__()
        assert now() == started


@virtual_time
async def test_an_invalid_request_fails_for_its_caller_only() -> None:
    network = MemoryNetwork()
    limits = Limits(frame_bytes_max=8192, value_bytes_max=4096)
    async with serve_in_memory(network, limits=limits), connect_in_memory(network) as client:
        changes = changes_of(client)
        with pytest.raises(StoreUsageError, match="Put"):
            await client.put("a", cast("bytes", object()))
        with pytest.raises(StoreUsageError, match="Add"):
            await client.add("a", 2**70)
        with pytest.raises(LimitExceeded, match="frame_bytes_max"):
            await client.put("a", bytes(10_000))
        assert await client.put("a", b"") == 1
        assert changes == []


@virtual_time
async def test_callbacks_hear_of_each_welcome_each_loss_and_the_end() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network):
        async with connect_in_memory(network) as client:
            changes = changes_of(client)
            network.reset("client")
            await client.ping()
            assert client.failure is None
        assert changes[:2] == [False, True]
        assert set(changes[2:]) == {False}
        assert isinstance(client.failure, ConnectionLost)


@virtual_time
async def test_callers_that_find_no_room_wait_no_longer_than_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_room, "IN_FLIGHT_MAX", 10)
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        network.partition("client")
        in_flight = [asyncio.create_task(client.add("count", 1, timeout=60.0)) for _ in range(10)]
        started = now()
        outcomes = await gathered(*[client.add("count", 1, timeout=3.0) for _ in range(10)])
        assert now() - started == pytest.approx(3.0, abs=0.01)
        assert {(type(error), error.maybe_applied) for error in outcomes} == {(StoreTimeoutError, False)}
        assert "no room" in str(outcomes[0])
        network.heal("client")
        assert await asyncio.gather(*in_flight) == list(range(1, 11))
        assert await client.add("count", 0) == 10
        assert server.figures()["requests"] < 20


@virtual_time
async def test_a_caller_that_waits_for_room_keeps_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it had its whole timeout once more: a call with a timeout of 3 s took 5.9 s."""
    monkeypatch.setattr(client_room, "IN_FLIGHT_MAX", 1)
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        network.partition("client")
        first, second = [asyncio.create_task(client.add("count", 1, timeout=timeout)) for timeout in (60.0, 3.0)]
        started = now()
        await asyncio.sleep(2.9)
        network.heal("client")
        await first
        network.partition("client")
        with pytest.raises(StoreTimeoutError, match="within 3 s"):
            await second
        assert now() - started == pytest.approx(3.0, abs=0.01)


@virtual_time
async def test_the_turn_of_a_caller_that_left_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_room, "IN_FLIGHT_MAX", 1)
    network = MemoryNetwork(latency=0.1)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        tasks = [asyncio.create_task(client.add("count", 1)) for _ in range(50)]
        rng = random.Random(7)
        for task in rng.sample(tasks[1:], 25):
            asyncio.get_running_loop().call_later(rng.uniform(0, 4.0), task.cancel)
        outcomes = await gathered(*tasks)
        sums = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(sums) >= 25
        assert sums == sorted(sums)
        assert await client.add("count", 0) >= len(sums)


@virtual_time
async def test_waits_do_not_use_up_the_room_of_the_calls_that_answer_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_room, "IN_FLIGHT_MAX", 4)
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        waits = [asyncio.create_task(client.wait([f"key/{number}"])) for number in range(20)]
        await asyncio.sleep(1.0)
        network.reset("client")
        await asyncio.gather(*[client.put(f"key/{number}", b"", timeout=5.0) for number in range(20)])
        assert [entries[0].key for entries in await asyncio.gather(*waits)] == [f"key/{n}" for n in range(20)]
        assert client._parked == set()


@virtual_time
async def test_a_socket_that_takes_no_more_holds_callers_back_until_it_does() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        (link,) = network.links("client")
        link.server.pause_reading()
        calls = [asyncio.create_task(client.put(f"{number}", bytes(100_000))) for number in range(2)]
        await asyncio.sleep(0.1)
        calls += [asyncio.create_task(client.put(f"{number}", bytes(100_000))) for number in range(2, 20)]
        await asyncio.sleep(0.1)
        assert link.client.get_write_buffer_size() < 300_000
        link.server.resume_reading()
        assert await asyncio.gather(*calls) == list(range(1, 21))


@virtual_time
async def test_waiting_callers_are_released_when_the_connection_is_lost() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        (link,) = network.links("client")
        link.server.pause_reading()
        calls = [asyncio.create_task(client.put(f"{number}", bytes(100_000))) for number in range(5)]
        await asyncio.sleep(0.1)
        held_back = asyncio.create_task(client.put("held back", b""))
        await asyncio.sleep(0.1)
        network.reset("client")
        await asyncio.gather(*calls, held_back)
        assert {entry.key for entry in await client.list("")} == {"0", "1", "2", "3", "4", "held back"}


def test_client_and_server_run_on_uvloop_too() -> None:
    require("uvloop")
    import uvloop

    async def talk() -> None:
        async with store.serve() as server:
            for host in ("127.0.0.1", "localhost"):  # localhost may mean ::1 first, where no server listens
                async with store.connect(f"tcp://{host}:{server.port}", timeout=60.0) as client:
                    async with client.watch("") as watch:
                        await client.put("large", bytes(5_000_000))
                        assert len((await anext(aiter(watch))).value) == 5_000_000
                    await asyncio.gather(*[client.add("count", 1) for _ in range(100)])
            with pytest.raises(ConnectionLost, match="nobody listens there"):
                async with store.connect("tcp://127.0.0.1:1", timeout=0.2):
                    raise AssertionError("there is no server")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())


@virtual_time
async def test_a_client_whose_loop_ends_does_not_delay_the_end() -> None:
    """At the end of a loop, the clean-up revoked leases over that loop, and waited two seconds for no answer."""
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        lease, at = await client.grant(10), now()
        assert client._task is not None
        client._task.cancel()  # as the end of a loop does to all its tasks
        with pytest.raises(ConnectionLost, match="has ended with its event loop"):
            await lease.revoke(timeout=2)
        assert now() - at < 1


def test_a_request_while_the_connection_ends_is_sent_on_the_next_one_without_a_log_line() -> None:
    """uvloop raises at a write to a closing connection, which asyncio ignores. Each such was logged as a defect."""
    defects: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context["message"]))
        async with store.serve() as server, store.connect(server.url) as client:
            assert isinstance(client, Client)
            for number in range(3):
                link = client._link
                assert link is not None
                asking = asyncio.create_task(client.put(f"key/{number}", b""))
                await asyncio.sleep(0)
                link.abort()
                await asking

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert defects == []


async def test_the_addresses_that_were_tried_stand_in_every_error_of_connecting() -> None:
    """`no store at tcp://head:29400: nobody listens there` did not say which of its addresses had been tried."""
    port = free_port()
    with pytest.raises(store.ConnectionLost, match=r"nobody listens there \(localhost is .*127\.0\.0\.1.* here\)"):
        async with store.connect(f"tcp://localhost:{port}", timeout=0.3):
            pass
    with pytest.raises(store.ConnectionLost, match=r"nobody listens there \(localhost is .* here\)"):  # noqa: SIM117
        with store.sync.connect(f"tcp://localhost:{port}", timeout=0.3):
            pass


@pytest.mark.parametrize("given_up", ["timeout", "cancelled"])
async def test_nothing_waits_for_the_rest_of_a_large_request_that_was_given_up(given_up: str) -> None:
    """On a link of 320 kB/s keep-alives waited for the rest of a put that had timed out, and their leases were lost."""
    passed, has_begun, relaying = 0, asyncio.Event(), set[Any]()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        relaying.add(asyncio.current_task())
        back, on = await asyncio.open_connection("127.0.0.1", server.port)
        answering = asyncio.create_task(carry(back, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                passed += len(data)
                if passed > MIB:
                    has_begun.set()
                on.write(data)
                await asyncio.sleep(0.001)
        on.close()
        await answering

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    ours = socket.create_server(("127.0.0.1", 0))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    async with (
        store.serve() as server,
        await asyncio.start_server(slowly, sock=ours, limit=16 * 1024),
        store.connect(f"tcp://127.0.0.1:{ours.getsockname()[1]}", timeout=60.0) as client,
    ):
        large = asyncio.create_task(
            client.put("large", bytes(30 * MIB), timeout=1.0 if given_up == "timeout" else 60.0)
        )
        if given_up == "timeout":
            with pytest.raises(StoreTimeoutError) as late:
                await large
            assert late.value.maybe_applied
        else:
            await has_begun.wait()
            large.cancel()
        await client.put("small", b"")
        assert passed < 15 * MIB
        assert await client.get("large") is None
    await asyncio.wait(relaying)


async def test_a_forked_child_that_closes_an_inherited_client_ends_nothing_of_its_parents() -> None:
    """Regression: it wrote a farewell to its parent's connection, and hung."""
    async with store.serve() as server, store.connect(server.url) as client:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                closing = client.aclose()
                try:
                    closing.send(None)
                except StopIteration:
                    os._exit(0)
            os._exit(1)
        ended = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        await client.put("a", b"")
        assert server.figures()["sessions"] == 1
        assert client.connected


async def test_a_use_in_another_event_loop_is_refused_and_not_applied() -> None:
    """Regression: the write was applied, and its caller got a RuntimeError from inside asyncio."""
    async with store.serve() as server, store.connect(server.url) as client:

        async def watch() -> None:
            async with client.watch("word"):
                pass

        for use in (lambda: client.put("word", b"v"), lambda: client.get("word"), watch):
            with pytest.raises(StoreUsageError, match="outside the event loop that it was opened in"):
                await asyncio.to_thread(asyncio.run, use())
        assert await client.get("word") is None
        await client.put("word", b"v")
