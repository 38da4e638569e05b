"""Names with several addresses: the order of the attempts, and that a dead address does not delay a client."""

import asyncio
import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import store
import store.sync
from store.net import racing
from store.net.racing import Addresses, ConnectRace, Resolved, connect_async
from tests.support.processes import require

V4, V6, STREAM = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM


def resolved(*addresses: Any) -> list[Resolved]:
    return [(V6 if ":" in one[0] else V4, STREAM, 6, "", one) for one in addresses]


@pytest.fixture
def dead() -> Iterator[tuple[str, int]]:
    """Yield an address without an answer: its queue is full, so that the system drops new connections."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.fixture
def live() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def refusing() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
        return address


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    require(request.param)
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(request.param).new_event_loop
    return factory


def segment_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


async def test_connections_are_made_that_carry_small_packets_both_ways(
    live: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "store.net.racing")
    addresses = Addresses(*live.getsockname())
    for small in (False, True, False, True):
        addresses.set_small_packets(small)
        with await connect_async(addresses) as ours, live.accept()[0] as theirs:
            assert [segment_of(one) <= racing.SMALL_SEGMENT for one in (ours, theirs)] == [small, small]
    (said,) = [line.getMessage() for line in caplog.records]
    assert "nothing comes on them, as where large packets are lost: trying with packets of at most 1024 bytes" in said


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Addresses]:
    """Return `Addresses` whose name has these addresses."""

    really = socket.getaddrinfo

    def name(*addresses: Any) -> Addresses:
        def look_up(host: bytes, port: int, *, type: int, flags: int = 0) -> Any:
            if host != b"head.test":
                return really(host, port, type=type, flags=flags)
            return [] if flags else resolved(*addresses)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        return Addresses("head.test", 1)

    return name


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each race, the number of sockets that were connecting when one of them won."""
    won, counts = ConnectRace.finish_attempt, []

    def counted(race: ConnectRace, sock: socket.socket) -> bool:
        under_way = len(race.connecting)
        if won(race, sock):
            counts.append(under_way)
            return True
        return False

    monkeypatch.setattr(ConnectRace, "finish_attempt", counted)
    monkeypatch.setattr(racing, "STAGGER", 0.02)
    return counts


def order(addresses: Addresses) -> list[Any]:
    return [one[4] for one in addresses.resolve() or ()]


def test_the_families_take_turns(names: Callable[..., Addresses]) -> None:
    addresses = names(("::1", 1), ("::2", 1), ("::3", 1), ("10.0.0.1", 1))
    assert order(addresses) == [("::1", 1), ("10.0.0.1", 1), ("::2", 1), ("::3", 1)]


def test_the_address_that_worked_comes_first_and_those_that_were_silent_last(names: Callable[..., Addresses]) -> None:
    a, b, c = ("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1)
    addresses = names(a, b, c)
    assert order(addresses) == [a, b, c]
    addresses.note_failures([a])
    assert order(addresses) == [b, c, a]
    addresses.note_success(c)
    assert order(addresses) == [c, b, a]
    addresses.note_failures([c])
    assert order(addresses) == [b, a, c]
    addresses.note_failures([b])
    assert order(addresses) == [a, b, c], "all are alike again"


def test_an_address_that_fails_in_another_thread_at_the_same_time_is_harmless(names: Callable[..., Addresses]) -> None:
    class Meanwhile(int):
        """The standing of an address; another thread changes the table during its comparison."""

        def __ne__(self, other: object) -> bool:
            addresses.note_failures([b])
            return super().__ne__(other)

        __hash__ = int.__hash__

    a, b = ("10.0.0.1", 1), ("10.0.0.2", 1)
    addresses = names(a, b)
    addresses._standing[a] = Meanwhile(racing.SILENT)
    addresses.note_success(a)
    assert order(addresses) == [a, b]


def test_a_name_without_addresses_says_so(names: Callable[..., Addresses]) -> None:
    with pytest.raises(OSError, match="has no address"):
        names().resolve()


def test_an_address_is_distinguished_from_a_name() -> None:
    assert Addresses("::1", 1).literal
    assert not Addresses("localhost", 1).literal


def test_the_addresses_of_a_name_are_shown_once_it_was_looked_up(names: Callable[..., Addresses]) -> None:
    addresses = names(("10.77.0.9", 1), ("fd77::9", 1))
    assert addresses.in_parentheses() == ""
    addresses.resolve()
    assert addresses.in_parentheses() == " (head.test is 10.77.0.9, fd77::9 here)"
    many = names(*((f"10.0.0.{last}", 1) for last in range(1, 8)))
    many.resolve()
    assert many.in_parentheses() == " (head.test is 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more here)"
    literal = Addresses("127.0.0.1", 1)
    literal.resolve()
    assert literal.in_parentheses() == ""


def test_a_race_without_a_winner_raises_the_most_informative_error(refusing: tuple[str, int]) -> None:
    addresses = Addresses("head.test", 1)
    race = ConnectRace(addresses, [(V4, STREAM, 6, "", refusing), (4711, STREAM, 6, "", ("nowhere", 1))])
    with pytest.raises(ConnectionRefusedError):
        while True:
            race.connect_next()
            for sock in list(race.connecting):
                race.finish_attempt(sock)
    race.close()


def test_a_dead_address_does_not_delay_an_async_client(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    names: Callable[..., Addresses],
    dead: tuple[str, int],
    live: socket.socket,
    at_once: list[int],
) -> None:
    """On uvloop the next one was tried only after 3 s."""
    addresses = names(dead, live.getsockname())

    async def connect_twice() -> None:
        for _ in range(2):
            with await connect_async(addresses) as sock:
                assert sock.getpeername() == live.getsockname()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(connect_twice())
    assert at_once == [2, 1], "the dead one was still being tried, and the second time the one that worked came first"


def test_a_dead_address_does_not_delay_a_blocking_client(
    names: Callable[..., Addresses], dead: tuple[str, int], at_once: list[int]
) -> None:
    """In every connect the next one was tried only after 10 s."""
    with store.sync.serve() as server:
        names(dead, ("127.0.0.1", server.port))
        with store.sync.connect(f"tcp://head.test:{server.port}") as client:
            first = client.put("a", b"")
            client._free[0].close()
            assert client.put("a", b"") == first + 1
    assert at_once == [2, 1]


def test_an_address_that_refuses_is_followed_at_once(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    names: Callable[..., Addresses],
    refusing: tuple[str, int],
    live: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racing, "STAGGER", 600.0)
    addresses = names(refusing, live.getsockname())

    async def connect() -> None:
        with await connect_async(addresses) as sock:
            assert sock.getpeername() == live.getsockname()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(connect())


@pytest.mark.filterwarnings("error::ResourceWarning")
async def test_a_race_that_is_cancelled_leaves_nothing_open(
    names: Callable[..., Addresses], dead: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "STAGGER", 0.0)
    addresses = names(dead, ("127.0.0.1", 1))
    made: list[ConnectRace] = []
    begun = asyncio.Event()
    connect_next = ConnectRace.connect_next

    def noted(race: ConnectRace) -> socket.socket | None:
        made.append(race)
        begun.set()
        return connect_next(race)

    monkeypatch.setattr(ConnectRace, "connect_next", noted)
    racing_task = asyncio.create_task(connect_async(addresses))
    await begun.wait()
    socks = list(made[0].connecting)
    racing_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing_task
    assert made[0].connecting == {}
    assert all(sock.fileno() == -1 for sock in socks)


@pytest.mark.parametrize("how", ["fails", "is slow"])
async def test_after_a_name_server_fails_the_address_that_worked_is_still_used(
    how: str, live: socket.socket, names: Callable[..., Addresses], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that were reset at such a moment stayed away until their leases had expired."""
    monkeypatch.setattr(racing, "LOOKED_UP_WITHIN", 0.05)
    over = threading.Event()
    addresses = names(live.getsockname())
    (await connect_async(addresses)).close()
    addresses._holds_until = 0.0

    def lookup(*_: Any, **__: Any) -> list[Resolved]:
        if how == "is slow":
            over.wait()
            return resolved(("127.0.0.9", 1))
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for _ in range(3):
        (await connect_async(addresses)).close()
    addresses.note_failures([live.getsockname()])
    (await connect_async(addresses)).close()
    if how == "is slow":
        looking = [one for one in threading.enumerate() if one.name.startswith("look up")]
        over.set()
        for one in looking:
            one.join()
        assert order(addresses) == [("127.0.0.9", 1)], "what came late holds from then on"


def have_slow_names(monkeypatch: pytest.MonkeyPatch, over: threading.Event, takes: float) -> None:
    """Let each name lookup take so many seconds, or until the event is set."""
    really = socket.getaddrinfo

    def look_up(host: bytes, port: int, *, type: int, flags: int = 0) -> Any:
        if host != b"head.test":
            return really(host, port, type=type, flags=flags)
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        over.wait(takes)
        return really("127.0.0.1", port, type=type)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("how", ["awaiting", "blocking"])
async def test_a_name_server_that_takes_longer_than_an_attempt_is_heard_out(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first of two name servers is dead, the other is asked after 5 s: no client ever connected."""
    have_slow_names(monkeypatch, threading.Event(), takes=0.3)
    monkeypatch.setattr("store.client.timeouts.FIRST_ATTEMPT", 0.2)

    def count_blocking() -> int:
        with store.sync.connect(url, timeout=5.0) as client:
            return client.count("")

    async with store.serve() as server:
        url = f"tcp://head.test:{server.port}"
        if how == "awaiting":
            async with store.connect(url, timeout=5.0) as client:
                assert await client.count("") == 0
        else:
            assert await asyncio.to_thread(count_blocking) == 0


def test_a_name_server_that_says_nothing_costs_a_blocking_caller_its_time_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, started = threading.Event(), time.monotonic()
    have_slow_names(monkeypatch, over, takes=20.0)
    with pytest.raises(store.ConnectionLost), store.sync.connect("tcp://head.test", timeout=0.3):
        raise AssertionError("there is none")
    assert time.monotonic() - started < 10.0
    over.set()
