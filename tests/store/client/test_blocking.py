"""The blocking client: channels, threads, interruptions, and callers' errors; and the server in a thread."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

import store
from store import sync
from store.client import blocking, connection_health, timeouts
from store.client import channel as rooms
from store.errors import ConnectionLost, StoreReplaced, StoreTimeoutError, WaitEndedError
from store.limits import Limits
from store.messages import Watch
from store.net.address import Address
from store.net.dialing import NEVER_ANSWERED, error_text
from store.net.racing import Addresses, connect_blocking
from store.server.server import Server
from tests.support.interrupts import Torn, alarms
from tests.support.limits import limits_with
from tests.support.processes import require
from tests.support.proxy import Proxy

MIB = 1024 * 1024


async def until(condition: Callable[[], Any], *, timeout: float = 10.0) -> None:
    """Wait for a condition that other threads bring about."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - other threads bring it about
            await asyncio.sleep(0.005)


def in_thread(function: Callable[[], Any]) -> asyncio.Task[Any]:
    """Call a blocking function in a thread."""
    return asyncio.create_task(asyncio.to_thread(function))


@contextlib.asynccontextmanager
async def through_proxy(limits: Limits | None = None) -> AsyncIterator[tuple[Server, Proxy, sync.Client]]:
    """A server, a proxy in front of it, and a blocking client that connects through the proxy."""
    async with store.serve(limits=limits) as server, Proxy("127.0.0.1", server.port) as proxy:
        client = sync.Client(Address(host="127.0.0.1", port=proxy.port), timeout=5.0)
        try:
            await asyncio.to_thread(client.ping)
            yield server, proxy, client
        finally:
            proxy.heal()
            await asyncio.to_thread(client.close)


@pytest.fixture
def server() -> Iterator[Server]:
    with store.sync.serve() as server:
        yield server


def test_calls_one_after_the_other_use_one_connection(server: Server) -> None:
    with store.sync.connect(server.url) as client:
        first = client.put("key/0", b"")
        for number in range(1, 10):
            assert client.put(f"key/{number}", b"") == first + number
        assert server.connections == 1
        assert client.stats()["requests"] == 12
        assert client.store_id == server.store_id
        assert client._free[0]._timeouts.connect_timeout() == timeouts.ATTEMPT, (
            "it has met the server: a later attempt is shorter than the first one"
        )
    with store.sync.connect(server.url) as client:
        assert client.stats()["sessions"] == 1, "the first client said that it will not come back"


def test_the_connections_of_the_busiest_moment_are_given_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they were kept until the client was closed."""
    with sync.connect(server.url) as client:
        run_together = threading.Barrier(12)

        def wait() -> None:
            run_together.wait()
            client.wait(["go"])

        threads = [threading.Thread(target=wait) for _ in range(11)]
        for thread in threads:
            thread.start()
        run_together.wait()
        while client.stats()["connections"] < 12:
            pass
        client.put("go", b"")
        for thread in threads:
            thread.join()
        for _ in range(3):
            client.ping()
        assert len(client.shared.channels) == 12, "it may be about to be as busy again"
        monkeypatch.setattr(blocking, "IDLE_MOST", 0.0)
        for left in (4, 1, 1):
            client.ping()
            assert len(client.shared.channels) == left
        monkeypatch.undo()
        assert client.add("count", 1) == 1
        while client.stats()["connections"] > 1:
            pass


def when_its_time_is_over(server: Server, disconnect_ttl: float) -> None:
    """Return once a lease has ended whose connection breaks now."""
    with sync.connect(server.url) as other, sync.connect(server.url) as broken:
        broken.put("clock", b"", lease=broken.grant(600, disconnect_ttl=disconnect_ttl, gone_ttl=None))
        broken._free[0].close()
        with other.watch("clock", snapshot=True) as watch:
            assert any(event.kind == "delete" for event in watch)


@pytest.mark.some_of(0)
def test_leases_that_have_ended_are_not_kept_by_the_connection_that_granted_them(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.connect(server.url) as client:
        for _ in range(31):
            client.grant(60, disconnect_ttl=5)
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "monotonic", lambda: later)
        client.grant(60, disconnect_ttl=5)
        assert sum(len(channel.leases) for channel in client.shared.channels) == 1


def test_leases_outlive_the_connections_of_the_busiest_moment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ended 60 s after its grant, together with the connection that had granted it."""
    with sync.connect(server.url) as client:
        run_together = threading.Barrier(50)

        def grant(number: int) -> None:
            client.wait(["go"])  # on a connection of its own
            lease = client.grant(600, disconnect_ttl=0.3)
            run_together.wait()
            client.put(f"mine/{number}", b"", lease=lease)

        threads = [threading.Thread(target=grant, args=[number]) for number in range(50)]
        for thread in threads:
            thread.start()
        while client.stats()["waits"] < 50:
            pass
        client.put("go", b"")
        for thread in threads:
            thread.join()
        assert client.stats()["connections"] > 40
        monkeypatch.setattr(blocking, "IDLE_MOST", 0.0)
        for _ in range(8):
            client.ping()
        monkeypatch.undo()
        while client.stats()["connections"] > 2:
            pass
        when_its_time_is_over(server, 0.3)
        assert client.count("mine/") == 50


def test_a_value_may_take_longer_than_a_heartbeat_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "HEARTBEAT", 0.2)
    monkeypatch.setattr(rooms, "LOOK", 0.05)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    received = bytearray()
    begun = time.monotonic()

    def read_slowly() -> None:
        pause = threading.Event()
        while data := theirs.recv(20_000):
            received.extend(data)
            pause.wait(0.02)

    with ours, theirs:
        reader = threading.Thread(target=read_slowly)
        reader.start()
        channel = rooms.Channel(sync.Client(Address(host="nowhere", port=1)).shared)
        channel.sock = ours
        frame = os.urandom(400_000)
        channel._send(frame)
        assert time.monotonic() - begun > 0.25, "longer than the heartbeat"
        ours.shutdown(socket.SHUT_WR)
        reader.join(10.0)
        assert received == frame


def test_a_server_that_takes_nothing_is_as_good_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "HEARTBEAT", 0.1)
    monkeypatch.setattr(rooms, "LOOK", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = rooms.Channel(sync.Client(Address(host="nowhere", port=1)).shared)
        channel.sock = ours
        with pytest.raises(TimeoutError):
            channel._send(bytes(10 * MIB))


def outcome_within(seconds: float, call: Callable[[], Any]) -> BaseException | None:
    """Return the error of a call in a thread of its own, which is left behind if the call takes longer."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test returns it
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it has not come back within {seconds:g} s"
    return failed[0] if failed else None


def test_a_tls_port_that_never_finishes_its_handshake_gets_one_connection_within_the_callers_time() -> None:
    """Regression: it got 1,937 connections in 14 s, with a timeout of 2: an attempt without time left ended at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcps://127.0.0.1:{listener.getsockname()[1]}"
        error = outcome_within(20.0, lambda: sync.connect(url, timeout=0.3).__enter__())
        assert isinstance(error, ConnectionLost)
        listener.accept()[0].close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_host_that_answers_no_packet_costs_the_callers_time_and_no_more() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # they fill its queue: later ones are dropped silently
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        error = outcome_within(20.0, lambda: sync.connect(url, timeout=0.3).__enter__())
        assert isinstance(error, ConnectionLost)


@pytest.mark.parametrize(
    ("error", "left", "raised", "known", "problem"),
    [
        (TimeoutError(), 9.0, TimeoutError, NEVER_ANSWERED, NEVER_ANSWERED),  # it has time for another attempt
        (TimeoutError(), -1.0, rooms._TimedOut, NEVER_ANSWERED, error_text(TimeoutError())),
        (TimeoutError(), -1.0, rooms._TimedOut, "it hung up", "it hung up"),
        (ConnectionRefusedError(), -1.0, ConnectionRefusedError, NEVER_ANSWERED, NEVER_ANSWERED),
        (ConnectionRefusedError(), 9.0, ConnectionRefusedError, NEVER_ANSWERED, NEVER_ANSWERED),
    ],
)
def test_an_attempt_without_a_connection_ends_the_call_once_its_time_is_over(
    error: OSError, left: float, raised: type[Exception], known: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(rooms, "connect_blocking", fail)
    channel = sync.Client(Address(host="127.0.0.1", port=1))._acquire_channel()
    channel._problem = known
    outcome = outcome_within(20.0, lambda: channel._open_socket(time.monotonic() + left, lambda: None))
    assert (type(outcome), channel._problem) == (raised, problem)


def test_a_server_that_welcomes_and_hangs_up_each_time_is_asked_with_pauses(server: Server) -> None:
    """The client connected 600 times per second."""
    came: list[socket.socket] = []

    def forward(theirs: socket.socket) -> None:
        """Carry one conversation to the server and back, until the client says more than its hello."""
        with theirs, socket.create_connection(("127.0.0.1", server.port)) as ours:
            ours.settimeout(10.0)
            theirs.settimeout(10.0)
            theirs.sendall(ours.recv(65536))
            ours.sendall(theirs.recv(65536))
            theirs.sendall(ours.recv(65536))
            theirs.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):  # it is closed in the end
                while True:
                    came.append(listener.accept()[0])
                    forward(came[-1])

        threading.Thread(target=accept, daemon=True).start()
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        error = outcome_within(20.0, lambda: sync.connect(url, timeout=1.0).__enter__())
        assert isinstance(error, (ConnectionLost, StoreTimeoutError)), "it is asked just then, or is not"
        assert 1 < len(came) < 100


class Soon(random.Random):
    """A source of randomness that returns nearly 0, so that there is hardly a pause between attempts."""

    def uniform(self, a: float, b: float) -> float:
        return min(a + 0.01, b)


def test_an_outage_of_thousands_of_attempts_is_still_only_an_outage() -> None:
    client = sync.Client(Address(host="127.0.0.1", port=1), rng=Soon())
    channel = client._acquire_channel()
    channel._attempt = 100_000
    client._free.append(channel)
    with pytest.raises(ConnectionLost, match="nobody listens there"):
        client.get("a", timeout=0.5)
    assert channel._attempt > 100_000
    client.close()


async def test_a_call_without_an_answer_says_whether_it_may_have_been_applied() -> None:
    async with through_proxy() as (_, proxy, client):
        proxy.black_hole()
        with pytest.raises(StoreTimeoutError) as written:
            await asyncio.to_thread(client.put, "a", b"", timeout=0.2)
        assert written.value.maybe_applied
        with pytest.raises(StoreTimeoutError) as read:
            await asyncio.to_thread(client.get, "a", timeout=0.2)
        assert not read.value.maybe_applied
        await proxy.refuse()
        proxy.cut()
        with pytest.raises(ConnectionLost) as unsent:
            await asyncio.to_thread(client.put, "b", b"", timeout=0.2)
        proxy.heal()
        await proxy.accept()
        assert await asyncio.to_thread(client.get, "b") is None
        assert isinstance(unsent.value, ConnectionLost)


async def test_a_call_that_gives_up_in_mid_handshake_leaves_a_client_that_works() -> None:
    async with through_proxy() as (_, proxy, client):
        proxy.cut()
        proxy.black_hole()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await asyncio.to_thread(client.put, "a", b"", timeout=0.2)
        proxy.heal()
        assert await asyncio.to_thread(client.add, "count", 1) == 1


async def test_writes_given_up_without_a_connection_do_not_keep_later_replies_from_being_acknowledged() -> None:
    async with through_proxy(limits_with(session_replies_max=10)) as (server, proxy, client):
        proxy.black_hole()
        putting = in_thread(lambda: client.put("a", b"", timeout=0.5))
        await until(
            lambda: any(
                item.sent for channel in client.shared.channels for item in channel.connection.in_flight.values()
            )
        )
        await proxy.refuse()
        proxy.cut()
        with pytest.raises(ConnectionLost) as caught:
            await putting
        assert caught.value.maybe_applied
        proxy.heal()
        await proxy.accept()

        def count() -> int:
            return [client.add("count", 1) for _ in range(50)][-1]

        assert await asyncio.to_thread(count) == 50
        assert server.connections == 1


async def test_a_wait_that_is_given_up_ends_at_the_server_too() -> None:
    async with through_proxy() as (server, _, client):
        with pytest.raises(StoreTimeoutError):
            await asyncio.to_thread(client.wait, ["never"], timeout=0.1)
        await asyncio.to_thread(client.ping)
        assert server.figures()["waits"] == 0
        assert server.connections == 1


async def test_a_write_that_was_under_way_when_its_client_was_closed_is_in_doubt() -> None:
    async with through_proxy() as (_, proxy, client):
        proxy.black_hole()
        putting = in_thread(lambda: client.put("a", b"", timeout=30.0))
        await until(
            lambda: any(
                item.sent for channel in client.shared.channels for item in channel.connection.in_flight.values()
            )
        )
        await asyncio.to_thread(client.close)
        with pytest.raises(ConnectionLost, match="is closed") as caught:
            await putting
        assert caught.value.maybe_applied


async def test_silence_is_asked_after_and_then_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_health, "HEARTBEAT", 0.1)
    monkeypatch.setattr(rooms, "LOOK", 0.05)
    async with through_proxy() as (server, proxy, client):
        waiting = in_thread(lambda: client.wait(["later"]))
        await until(lambda: server.figures()["requests"] > 5)
        assert proxy.connections == 1, "a quiet server that answers pings is left alone"
        proxy.black_hole()
        await until(lambda: proxy.connections > 1)
        proxy.heal()
        async with store.connect(server.url) as other:
            await other.put("later", b"")
        assert (await waiting)[0].key == "later"
        (channel,) = client.shared.channels
        assert channel.connection.in_flight == {}, "questions that were never answered are forgotten"


def test_a_signal_handler_that_raises_gets_out_at_once_and_the_client_goes_on(server: Server) -> None:
    with alarms(), store.sync.connect(server.url) as client:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Torn):
                client.wait(["never"])
        assert client.add("count", 1) == 1
        assert client.add("count", 1) == 2
        assert client.stats()["waits"] == 0


def test_a_lease_outlives_an_interrupted_call(server: Server) -> None:
    """Regression: the connection was closed, and its lease ended with it, or at once, as if the process had died."""
    with alarms(), store.sync.connect(server.url) as client:
        client.put("mine", b"", lease=client.grant(600, disconnect_ttl=0.3))
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Torn):
                client.wait(["never"])
            when_its_time_is_over(server, 0.3)
            assert client.get("mine") is not None
        when_its_time_is_over(server, 0.3)
        assert client.get("mine") is not None
        assert client.stats()["waits"] == 0


async def test_a_reset_is_reported_even_if_the_attempt_that_noticed_it_failed() -> None:
    limits = Limits(history_bytes_max=2000)
    async with through_proxy(limits) as (server, proxy, client), store.connect(server.url) as other:
        await other.put("a", b"")
        watch = await asyncio.to_thread(client.watch("", snapshot=True).__enter__)
        events = iter(watch)
        assert [(await asyncio.to_thread(next, events)).kind for _ in range(2)] == ["put", "synced"]
        await proxy.refuse()
        proxy.cut()
        for _ in range(20):
            await other.put("b", b"")
        call, failures = watch._channel.call, 2

        def failing(request: Any, timeout: float | None) -> Any:
            nonlocal failures
            if isinstance(request, Watch) and request.snapshot and failures:
                failures -= 1
                if failures:
                    raise ConnectionLost("cut again", maybe_applied=False)
                raise StoreTimeoutError("too slow")
            return call(request, timeout)

        watch._channel.call = failing  # type: ignore[method-assign]
        await proxy.accept()
        kinds = [(await asyncio.to_thread(next, events)).kind for _ in range(4)]
        assert kinds == ["reset", "put", "put", "synced"]
        watch.__exit__(None, None, None)


async def test_a_watch_that_is_closed_while_its_store_is_away_ends_at_once() -> None:
    """Regression: its reader went on until the timeout of an attempt to open it again had passed."""
    async with through_proxy() as (_, proxy, client):
        client.timeout = 60.0
        watch = await asyncio.to_thread(client.watch("").__enter__)
        reading = in_thread(lambda: list(watch))
        await proxy.refuse()
        proxy.cut()
        await until(lambda: watch._channel._attempt > 0)
        watch.close()
        async with asyncio.timeout(20.0):
            assert await reading == []
        watch.__exit__(None, None, None)


async def test_a_quiet_watch_hears_how_far_the_store_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_health, "HEARTBEAT", 0.05)
    monkeypatch.setattr(rooms, "LOOK", 0.025)
    limits = Limits(history_bytes_max=2000)
    async with through_proxy(limits) as (server, proxy, client), store.connect(server.url) as other:
        watch = await asyncio.to_thread(client.watch("quiet/").__enter__)
        events = iter(watch)
        reading = in_thread(lambda: next(events))
        connected_at = watch._channel._welcomed_at
        for _ in range(3):
            for _ in range(20):
                revision = await other.put("busy", b"")
            await until(lambda revision=revision: cast("int", watch._cursor._next) > revision)  # type: ignore[misc]
        assert watch._channel._welcomed_at == connected_at, "each ping was answered, and no more is expected of it"
        proxy.cut()
        await other.put("quiet/a", b"")
        assert (await reading).key == "quiet/a"
        watch.__exit__(None, None, None)


def test_the_server_in_a_thread_accepts_the_arguments_of_the_async_one() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    with (
        store.sync.serve(sock=sock, token="a token of 16 bytes", limits=Limits(keys_max=1)) as server,
        store.sync.connect(server.url, token="a token of 16 bytes") as client,
    ):
        client.put("a", b"")
        with pytest.raises(store.LimitExceeded, match="keys_max"):
            client.put("b", b"")


def test_a_watch_that_is_refused_leaves_no_connection() -> None:
    limits = limits_with(key_bytes_max=8)
    with store.sync.serve(limits=limits) as server, store.sync.connect(server.url) as client, client.watch("a"):
        channels, connections = len(client.shared.channels), server.connections
        for _ in range(3):
            with pytest.raises(store.LimitExceeded, match="key_bytes_max"), client.watch("k" * 9):
                pass
        assert len(client.shared.channels) == channels
        while server.connections > connections:  # the limit of every test ends this
            time.sleep(0.001)


def test_the_latest_revision_seen_outlives_watches_that_end_at_once(server: Server) -> None:
    """The watch that ended first could overwrite the revision with an older one. Then the client did not notice that
    the store had gone back in time.
    """
    with store.sync.connect(server.url) as client:
        first, second = client.watch("a"), client.watch("b")
        first.__enter__()
        second.__enter__()
        latest = client.shared.seen_revision() + 5
        second._channel.connection.seen_revision = latest - 1
        seen, ending = client.shared.seen_revision, threading.Thread(target=lambda: second.__exit__(None, None, None))

        def seen_before() -> int:
            revision = seen()
            client.shared.seen_revision = seen  # type: ignore[method-assign]
            second._channel.connection.seen_revision = latest  # an event comes, and then this one ends, too
            ending.start()
            ending.join(0.2)
            return revision

        client.shared.seen_revision = seen_before  # type: ignore[method-assign]
        first.__exit__(None, None, None)
        ending.join()
        assert client.shared.seen_revision() == latest


def test_a_wait_that_begins_after_waits_were_ended_does_not_begin() -> None:
    with sync.serve() as server, sync.connect(server.url) as client:
        client.end_waits()
        with pytest.raises(WaitEndedError):
            client.wait(["missing"], timeout=20.0)
        assert client.get("missing") is None


def test_data_after_an_interruption_is_decrypted_as_before() -> None:
    """If a wait was interrupted just as its answer arrived, encrypted bytes were read as protocol, and it failed."""
    require("trustme")
    import trustme

    authority, serving = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with serving.wrap_socket(theirs, server_side=True) as server:
            server.sendall(b"an answer")

    answering = threading.Thread(target=answer)
    answering.start()
    channel = rooms.Channel(sync.Client(Address(host="nowhere", port=1)).shared)
    with trusting.wrap_socket(ours, server_hostname="127.0.0.1") as channel.sock:
        answering.join()
        channel.interrupt()
        assert channel.sock.recv(100) == b"an answer"
    channel.interrupt()  # it is closed


def test_a_call_keeps_its_time_limit_while_it_sends() -> None:
    """A server that read a little at a time made a `put` with a timeout of 2 s last for 32 s."""
    with sync.serve() as server, sync.connect(server.url) as client:
        channel = client._free[0]
        assert channel.sock is not None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
        channel.sock.close()
        channel.sock = ours
        done = threading.Event()
        taken = []

        def take_a_little() -> None:
            while not done.wait(0.05):
                taken.append(theirs.recv(4096))

        taking = threading.Thread(target=take_a_little)
        taking.start()
        with pytest.raises((StoreTimeoutError, ConnectionLost)) as caught:
            client.put("large", bytes(20_000_000), timeout=0.5)
        done.set()
        taking.join()
        theirs.close()
        assert caught.value.maybe_applied
        assert sum(map(len, taken)) < 10_000_000, "it did not wait until all of it was sent"
        assert client.put("a", b"") >= 1, "over a connection of its own"


def test_an_impostor_does_not_end_a_client_that_has_met_its_store() -> None:
    with sync.serve() as server, sync.connect(server.url) as client, socket.create_server(("127.0.0.1", 0)) as impostor:
        right, client.shared.addresses = client.shared.addresses, Addresses("127.0.0.1", impostor.getsockname()[1])

        def answer() -> None:
            connection, _ = impostor.accept()
            connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            connection.close()
            client.shared.addresses = right

        answering = threading.Thread(target=answer)
        answering.start()
        client._free[0].close()
        assert client.put("a", b"") == client.stats()["revision"]
        answering.join()


@pytest.mark.parametrize(
    ("get_out", "error"),
    [
        (lambda client: client.end_waits(), WaitEndedError),
        (lambda client: client.interrupt(ConnectionLost("the round is over", maybe_applied=False)), ConnectionLost),
    ],
)
def test_a_call_interrupted_while_its_channel_connects_does_not_wait_afterwards(
    get_out: Callable[[sync.Client], None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no socket to break yet, and so a wait for a member that was gone went on for its whole timeout."""
    with sync.serve() as server:
        client = sync.Client(Address(host="127.0.0.1", port=server.port))

        def connect_slowly(*args: Any) -> Any:
            sock = connect_blocking(*args)
            get_out(client)
            return sock

        monkeypatch.setattr(rooms, "connect_blocking", connect_slowly)
        with contextlib.closing(client), pytest.raises(error):
            client.wait(["never"], timeout=10)


def test_a_channel_that_met_the_store_first_speaks_for_all_of_its_client() -> None:
    """Otherwise a thread that connects only after the replacement would take the new store for the old one."""
    with contextlib.ExitStack() as stack:
        with sync.serve() as server:
            client = stack.enter_context(sync.connect(server.url))
            held = stack.enter_context(contextlib.closing(client._acquire_channel()))
        assert held.sock is not None
        with sync.serve("127.0.0.1", server.port), pytest.raises(StoreReplaced):
            client.get("a")


@contextlib.asynccontextmanager
async def silent_connection(
    monkeypatch: pytest.MonkeyPatch, *, acknowledged: bool = False
) -> AsyncIterator[tuple[Server, Proxy, sync.Client]]:
    """A client with a short timeout. Its proxy acknowledges all data that it drops; the client relies on this only if a
    test asks for it.
    """
    monkeypatch.setattr(rooms, "LOOK", 0.02)
    monkeypatch.setattr(rooms, "unacknowledged", lambda _: (0, False, acknowledged))
    monkeypatch.setattr(timeouts, "SILENCE", 0.1)
    async with through_proxy() as (server, proxy, client):
        client.timeout = 30.0
        yield server, proxy, client


@pytest.mark.parametrize("cut", [False, True])
async def test_a_silent_connection_is_left_for_a_fresh_one_on_which_the_server_speaks(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the client waited for ten seconds, or used the first new connection. It is applied once."""
    async with silent_connection(monkeypatch) as (server, proxy, client):
        assert await asyncio.to_thread(client.add, "count", 1) == 1
        proxy.swallow()
        if cut:
            proxy.cut()
        adding = in_thread(lambda: client.add("count", 1))
        await proxy.until(lambda: proxy.connections == 3, timeout=30.0)
        proxy.pass_new()
        assert await adding == 2
        assert server.figures()["sessions"] == 1
        made = proxy.connections
        with pytest.raises(StoreTimeoutError):
            await asyncio.to_thread(client.wait, ["later"], timeout=0.3)
        assert proxy.connections == made, "who waits for what comes later is not answered, and none the worse for it"


async def test_a_server_whose_system_acknowledges_is_taken_for_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection would be as slow, and add load."""
    async with silent_connection(monkeypatch, acknowledged=True) as (_, proxy, client):
        proxy.black_hole()
        with pytest.raises(StoreTimeoutError):
            await asyncio.to_thread(client.put, "a", b"", timeout=0.25)
        assert proxy.connections == 1


async def test_a_caller_gets_out_while_it_looks_for_a_fresh_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent_connection(monkeypatch) as (_, proxy, client):
        proxy.swallow()
        putting = in_thread(lambda: client.put("b", b""))
        await proxy.until(lambda: proxy.connections > 1, timeout=30.0)
        await asyncio.to_thread(client.close)
        with pytest.raises(ConnectionLost, match="is closed"):
            await putting
