"""Connections that say no hello in time are given up, each in its own time, by one timer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from store.server.entry.hellos import Hellos

if TYPE_CHECKING:
    from store.server.peer import Peer

pytestmark = pytest.mark.virtual_time

WITHIN = 3.0


class Scene:
    """Who has been given up, and when."""

    def __init__(self) -> None:
        self.given_up: dict[Peer, float] = {}
        self.more: dict[Peer, float] = {}  # until when some are given more time
        self.timers = 0
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def counted(delay: float, *arguments: object) -> asyncio.TimerHandle:
            self.timers += getattr(arguments[0], "__name__", "") == "_look"
            return call_later(delay, *arguments)  # type: ignore[arg-type]

        loop.call_later = counted  # type: ignore[method-assign,assignment]
        self.hellos = Hellos(
            within=WITHIN,
            clock=loop.time,
            time_left=lambda peer, now: self.more.get(peer, 0.0) - now,
            give_up=lambda peer: self.given_up.update({peer: loop.time()}),
        )

    def somebody(self) -> Peer:
        peer = cast("Peer", object())
        self.hellos.expect(peer)
        return peer


async def test_each_is_given_up_in_its_own_time() -> None:
    scene = Scene()
    began = anyio.current_time()
    first = scene.somebody()
    await anyio.sleep(1.0)
    second = scene.somebody()
    await anyio.sleep(10.0)
    assert list(scene.given_up) == [first, second]
    assert [at - began for at in scene.given_up.values()] == pytest.approx([3.0, 4.0])


async def test_a_thousand_that_say_hello_have_one_timer() -> None:
    scene = Scene()
    thousand = [scene.somebody() for _ in range(1000)]
    assert scene.timers == 1
    for peer in thousand:
        scene.hellos.expect_no_more(peer)
    await anyio.sleep(10.0)
    assert scene.given_up == {}
    assert scene.timers == 1


async def test_who_comes_after_all_others_have_gone_is_waited_for_anew() -> None:
    scene = Scene()
    scene.hellos.expect_no_more(scene.somebody())
    await anyio.sleep(2.0)
    began = anyio.current_time()
    second = scene.somebody()
    await anyio.sleep(10.0)
    assert scene.given_up[second] - began == pytest.approx(WITHIN)


async def test_who_is_given_more_time_has_it_and_the_next_is_given_up_in_its_turn() -> None:
    scene = Scene()
    began = anyio.current_time()
    first = scene.somebody()
    await anyio.sleep(1.0)
    second = scene.somebody()
    scene.more[first] = began + 7.5
    await anyio.sleep(5.0)
    assert scene.given_up == {}
    await anyio.sleep(5.0)
    assert [scene.given_up[peer] - began for peer in (first, second)] == pytest.approx([7.5, 7.5])
