"""Connections that do not go on in time are given up, each in its own time, by one timer; and make way for others."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from store.server.entry.table import Table

pytestmark = pytest.mark.virtual_time

WITHIN = 3.0


class Somebody:
    """A connection that can be ended."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Scene:
    """Who has been given up, and when."""

    def __init__(self, *, most: int = 10_000) -> None:
        self.given_up: dict[Somebody, float] = {}
        self.timers = 0
        self.loop = asyncio.get_running_loop()
        call_later = self.loop.call_later

        def counted(delay: float, *arguments: object) -> asyncio.TimerHandle:
            self.timers += getattr(arguments[0], "__name__", "") == "_look"
            return call_later(delay, *arguments)  # type: ignore[arg-type]

        self.loop.call_later = counted  # type: ignore[method-assign,assignment]
        self.table = Table(
            most=most, per_address_max=10_000, within=WITHIN, clock=self.loop.time, turned_away=lambda: True
        )

    def somebody(self, *, within: float = WITHIN) -> Somebody:
        who = Somebody()
        self.table.came(who, "10.0.0.1", self.loop.time(), cost=100)
        give_up = lambda: self.given_up.update({who: self.loop.time()})  # noqa: E731
        self.table.expect(who, within, give_up, patiently=True)
        return who


async def test_each_is_given_up_in_its_own_time_whoever_came_first() -> None:
    scene = Scene()
    began = anyio.current_time()
    first = scene.somebody()
    await anyio.sleep(1.0)
    second, quick = scene.somebody(), scene.somebody(within=0.5)
    await anyio.sleep(10.0)
    assert list(scene.given_up) == [quick, first, second]
    assert [at - began for at in scene.given_up.values()] == pytest.approx([1.5, 3.0, 4.0])


async def test_a_thousand_that_say_hello_have_one_timer_and_are_counted_until_they_go() -> None:
    scene = Scene()
    thousand = [scene.somebody() for _ in range(1000)]
    assert scene.timers == 1
    for who in thousand:
        scene.table.proved(who, scene.loop.time())
    assert (len(scene.table), scene.table.connections, scene.table.bytes) == (0, 1000, 100_000)
    for who in thousand:
        scene.table.went(who)
        scene.table.went(who)
    assert (scene.table.connections, scene.table.bytes) == (0, 0)
    await anyio.sleep(10.0)
    assert scene.given_up == {}
    assert scene.timers == 1


async def test_who_comes_after_all_others_have_gone_is_waited_for_anew() -> None:
    scene = Scene()
    scene.table.went(scene.somebody())
    await anyio.sleep(2.0)
    began = anyio.current_time()
    second = scene.somebody()
    await anyio.sleep(10.0)
    assert scene.given_up[second] - began == pytest.approx(WITHIN)


async def test_where_honest_clients_take_long_all_are_given_more_time_each_its_own() -> None:
    scene = Scene()
    began = anyio.current_time()
    honest, first = scene.somebody(), scene.somebody()
    await anyio.sleep(1.0)
    second = scene.somebody()
    await anyio.sleep(1.5)
    scene.table.proved(honest, scene.loop.time())
    await anyio.sleep(30.0)
    assert [scene.given_up[who] - began for who in (first, second)] == pytest.approx([7.5, 8.5])


async def test_who_is_served_makes_no_way_and_stands_again_afterwards() -> None:
    scene = Scene(most=1)
    page = scene.somebody()
    scene.table.is_served(page)
    assert scene.table.make_room()
    scene.table.stands_again(page, scene.loop.time())
    assert not scene.table.make_room(), "it has been of use a moment ago"
    await anyio.sleep(2.0)
    assert scene.table.make_room()
    assert page.aborted
    assert scene.table.connections == 0
