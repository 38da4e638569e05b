"""Sleeping until told otherwise: nothing told is missed, no moment passed unseen, and nothing polls."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.node.wakeup import Listeners, Wakeup

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_it_sleeps_until_its_moment() -> None:
    began = now()
    assert await Wakeup().sleep_until(began + 600) is False
    assert now() == began + 600


async def test_it_wakes_when_something_has_changed() -> None:
    wakeup, began = Wakeup(), now()
    asyncio.get_running_loop().call_later(7, wakeup.changed)
    assert await wakeup.sleep_until(began + 600) is True
    assert now() == began + 7


async def test_nothing_polls_while_it_sleeps() -> None:
    wakeup, loop = Wakeup(), asyncio.get_running_loop()
    sleeping = asyncio.create_task(wakeup.sleep_until(None))
    await asyncio.sleep(1)
    assert not loop._scheduled, "a poll would be a timer"  # type: ignore[attr-defined]
    wakeup.changed()
    assert await sleeping is True


async def test_a_change_told_while_nobody_sleeps_is_not_forgotten() -> None:
    wakeup, began = Wakeup(), now()
    wakeup.changed()
    assert await wakeup.sleep_until(began + 600) is True
    assert now() == began


async def test_a_change_wakes_it_once() -> None:
    wakeup, began = Wakeup(), now()
    wakeup.changed()
    wakeup.changed()
    assert await wakeup.sleep_until(began + 5) is True
    assert await wakeup.sleep_until(began + 5) is False
    assert now() == began + 5


async def test_listeners_wake_all_who_listen_and_only_for_as_long() -> None:
    listeners, first, second, began = Listeners(), Wakeup(), Wakeup(), now()
    with listeners.listening(first):
        with listeners.listening(second):
            listeners.changed()
        assert await second.sleep_until(began + 1) is True
        listeners.changed()
    listeners.changed()
    assert await first.sleep_until(began + 1) is True
    assert await first.sleep_until(began + 1) is False
    assert await second.sleep_until(began + 1) is False


async def test_whoever_listens_may_stop_while_being_woken() -> None:
    listeners, wakeup = Listeners(), Wakeup()

    class Stopping(Wakeup):
        def changed(self) -> None:
            listening.__exit__(None, None, None)

    stopping = Stopping()
    listening = listeners.listening(stopping)
    listening.__enter__()
    with listeners.listening(wakeup):
        listeners.changed()
    assert await wakeup.sleep_until(now() - 1) is True
