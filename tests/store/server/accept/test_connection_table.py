"""All connections: which unauthenticated may stay, for how long, which are closed for others; with one timer."""

import asyncio
import weakref
from collections.abc import Callable

import pytest

from store.server.accept.connection_table import LATELY, YIELD_AFTER, YIELD_FACTOR, YIELD_MOST, ConnectionTable
from tests.support.limits import limits_with

WITHIN = 3.0


class Somebody:
    """A connection that can be closed."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Scene:
    """A table with a clock that the test sets."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.table = ConnectionTable(limits_with(handshake_timeout=WITHIN, **limits), self.clock)

    def clock(self) -> float:
        return self.now

    def comes(self, address: str = "10.0.0.1", *, at: float | None = None) -> Somebody:
        self.now = self.now if at is None else at
        who = Somebody()
        self.table.register(who, address, cost=100)
        return who

    def has_room(self, *, at: float) -> bool:
        self.now = at
        return self.table.make_room()


def test_an_authenticated_client_makes_room_and_all_connections_count_until_they_end() -> None:
    scene = Scene(handshakes_max=2)
    first = scene.comes()
    assert scene.has_room(at=0.0)
    second = scene.comes()
    assert not scene.has_room(at=0.0)
    scene.table.mark_authenticated(first)
    assert scene.has_room(at=0.0)
    assert (scene.table.unauthenticated_count, len(scene.table.all), scene.table.bytes) == (1, 2, 200)
    for _ in range(2):
        scene.table.unregister(first)
    scene.table.unregister(second)
    assert (scene.table.unauthenticated_count, len(scene.table.all), scene.table.bytes) == (0, 0, 0)


async def test_nothing_is_kept_of_the_handshake_timeout_after_authentication() -> None:
    """Regression: each connection kept its timeout's callback and log message until it ended."""
    scene = Scene()
    who, hangs_up = scene.comes(), Somebody()
    kept = weakref.ref(hangs_up)
    scene.table.limit_handshake(who, WITHIN, hangs_up.abort)
    del hangs_up
    assert kept() is not None
    scene.table.mark_authenticated(who)
    assert kept() is None
    scene.table.unregister(who)


def test_the_longest_silent_connection_of_the_busiest_address_makes_way_but_not_early() -> None:
    scene = Scene(handshakes_max=4)
    alone = scene.comes("10.0.0.1")
    oldest, other = (scene.comes("10.0.0.2", at=at) for at in (0.1, 0.2))
    assert scene.has_room(at=59.9)
    newest = scene.comes("10.0.0.2")
    assert scene.has_room(at=60.0)
    assert [who.aborted for who in (alone, oldest, other, newest)] == [False, True, False, False]
    hasty = Scene(handshakes_max=1)
    hasty.comes()
    assert not hasty.has_room(at=YIELD_AFTER * 0.9)
    assert hasty.has_room(at=YIELD_AFTER)


def test_where_honest_clients_take_long_all_are_given_longer_before_they_make_way() -> None:
    """On a busy machine a client may take seconds to say hello. If it is refused, it connects again, and adds load."""
    scene = Scene(handshakes_max=1)
    slow = scene.comes()
    scene.now = 2.0
    scene.table.mark_authenticated(slow)
    scene.comes(at=10.0)
    assert not scene.has_room(at=10.0 + YIELD_AFTER)
    assert scene.has_room(at=10.0 + 2.0 * YIELD_FACTOR)
    scene.comes(at=2.0 + LATELY)
    assert scene.has_room(at=2.1 + LATELY + YIELD_AFTER), "that was long ago"
    slow = scene.comes(at=100.0)
    scene.now = 200.0
    scene.table.mark_authenticated(slow)
    scene.comes()
    assert scene.has_room(at=200.0 + YIELD_MOST), "there is an end to it"


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}  # the last one as a server on "::" sees it


def test_one_address_has_so_many_connections_and_loopback_any() -> None:
    scene = Scene(address_connections_max=2)
    there = {address: [scene.comes(address), scene.comes(address)] for address in LOOPBACK | {"10.0.0.1"}}
    assert "address_connections_max" in (scene.table.refusal_reason("10.0.0.1") or "")
    for address in LOOPBACK | {"10.0.0.2"}:
        assert scene.table.refusal_reason(address) is None
    scene.table.unregister(there["10.0.0.1"][0])
    assert scene.table.refusal_reason("10.0.0.1") is None


class Timed:
    """The connections that timed out, with the time, on the loop's own clock."""

    def __init__(self) -> None:
        self.given_up: dict[Somebody, float] = {}
        self.timers = 0
        self.loop = asyncio.get_running_loop()
        call_later: Callable[..., asyncio.TimerHandle] = self.loop.call_later

        def counted(delay: float, *arguments: object) -> asyncio.TimerHandle:
            self.timers += getattr(arguments[0], "__name__", "") == "_close_overdue"
            return call_later(delay, *arguments)

        self.loop.call_later = counted  # type: ignore[method-assign,assignment]
        self.table = ConnectionTable(limits_with(handshakes_max=10_000, handshake_timeout=WITHIN), self.loop.time)
        self._began = self.loop.time()

    def comes(self, *, within: float = WITHIN) -> Somebody:
        who = Somebody()
        self.table.register(who, "10.0.0.1")
        give_up = lambda: self.given_up.update({who: self.loop.time() - self._began})  # noqa: E731
        self.table.limit_handshake(who, within, give_up, patiently=True)
        return who


@pytest.mark.virtual_time
async def test_each_connection_times_out_on_its_own_in_any_order() -> None:
    scene = Timed()
    first = scene.comes()
    await asyncio.sleep(1.0)
    second, quick = scene.comes(), scene.comes(within=0.5)
    await asyncio.sleep(10.0)
    assert list(scene.given_up) == [quick, first, second]
    assert [*scene.given_up.values()] == pytest.approx([1.5, 3.0, 4.0])
    third = scene.comes()
    await asyncio.sleep(10.0)
    assert scene.given_up[third] == pytest.approx(14.0), "who comes after all others have gone is waited for anew"


@pytest.mark.virtual_time
async def test_a_thousand_that_say_hello_have_one_timer_and_none_is_given_up() -> None:
    scene = Timed()
    thousand = [scene.comes() for _ in range(1000)]
    for who in thousand:
        scene.table.mark_authenticated(who)
    for who in thousand:
        scene.table.unregister(who)
    await asyncio.sleep(10.0)
    assert (scene.given_up, scene.timers) == ({}, 1)


@pytest.mark.virtual_time
async def test_where_honest_clients_take_long_all_are_given_more_time_each_its_own_and_not_for_ever() -> None:
    scene = Timed()
    scene.table.mark_authenticated(scene.comes())  # a quick one just before does not count
    honest, first = scene.comes(), scene.comes()
    await asyncio.sleep(1.0)
    second = scene.comes()
    await asyncio.sleep(1.5)
    scene.table.mark_authenticated(honest)
    await asyncio.sleep(30.0)
    assert [scene.given_up[who] for who in (first, second)] == pytest.approx([7.5, 8.5])
    slowest, last = scene.comes(within=60.0), scene.comes(within=50.0)
    await asyncio.sleep(40.0)
    scene.table.mark_authenticated(slowest)
    await asyncio.sleep(20.0)
    assert scene.given_up[last] == pytest.approx(32.5 + 50.0), "six times its time was over"


@pytest.mark.virtual_time
async def test_a_connection_that_is_served_does_not_make_way_until_afterwards() -> None:
    table = ConnectionTable(limits_with(handshakes_max=1), asyncio.get_running_loop().time)
    page = Somebody()
    table.register(page, "10.0.0.1", beside=True)
    table.begin_request(page)
    await asyncio.sleep(2.0)
    assert table.make_room()
    table.mark_unauthenticated(page)
    assert not table.make_room(), "it has been of use a moment ago"
    await asyncio.sleep(2.0)
    assert table.make_room()
    assert page.aborted
    assert table.all == ()


@pytest.mark.parametrize(
    ("strangers", "of_pages", "coming", "beside", "has_room"),
    [
        (7, 0, 0, False, True),
        (8, 0, 0, False, False),
        (6, 0, 1, False, True),
        (6, 0, 2, False, False),
        (7, 1, 0, True, True),
        (7, 2, 0, True, False),
        (7, 2, 0, False, True),
        (6, 0, 1, True, True),
        (5, 0, 2, True, False),
    ],
)
def test_a_stranger_more_is_accepted_below_the_bound_and_a_page_below_its_share(
    strangers: int, of_pages: int, coming: int, beside: bool, has_room: bool
) -> None:
    """Of eight strangers, two may be connections to pages."""
    table = Scene(handshakes_max=8).table
    for number in range(strangers):
        table.register(Somebody(), "10.0.0.1", beside=number < of_pages)
    assert table.make_room(coming=coming, beside=beside) is has_room
