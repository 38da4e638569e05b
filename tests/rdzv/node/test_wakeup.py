"""`Wakeup`: a sleep until a notification or a moment; no notification is missed, and it does not poll."""

import asyncio

import pytest

from rdzv.listeners import Listeners
from rdzv.node.link.wakeup import Wakeup

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_nothing_polls_while_it_sleeps() -> None:
    wakeup, loop = Wakeup(), asyncio.get_running_loop()
    sleeping = asyncio.create_task(wakeup.sleep_until(None))
    await asyncio.sleep(1)
    assert not loop._scheduled, "a poll would be a timer"  # type: ignore[attr-defined]
    wakeup.notify()
    assert await sleeping is True


async def test_a_change_wakes_all_current_listeners() -> None:
    listeners, first, second, began = Listeners(), Wakeup(), Wakeup(), now()
    with listeners.subscribed(first):
        with listeners.subscribed(second):
            listeners.notify()
        assert await second.sleep_until(began + 1) is True
        listeners.notify()
    listeners.notify()
    assert await first.sleep_until(began + 1) is True
    assert await first.sleep_until(began + 1) is False
    assert await second.sleep_until(began + 1) is False


async def test_a_listener_may_unregister_while_it_is_called() -> None:
    listeners, wakeup = Listeners(), Wakeup()

    class Stopping(Wakeup):
        def notify(self) -> None:
            listening.__exit__(None, None, None)

    stopping = Stopping()
    listening = listeners.subscribed(stopping)
    listening.__enter__()
    with listeners.subscribed(wakeup):
        listeners.notify()
    assert await wakeup.sleep_until(now() - 1) is True


@pytest.mark.parametrize(("changes_after", "wakes_after"), [(None, 600), (7, 7), (0, 0)])
async def test_it_wakes_once_after_a_change_or_at_its_time(changes_after: float | None, wakes_after: float) -> None:
    wakeup, began = Wakeup(), now()
    if changes_after is not None:
        for _ in range(2):
            asyncio.get_running_loop().call_later(changes_after, wakeup.notify)
    if changes_after == 0:
        await asyncio.sleep(0.0)
        began = now()
    assert await wakeup.sleep_until(began + 600) is (changes_after is not None)
    assert now() == began + wakes_after
    assert await wakeup.sleep_until(now() + 5) is False


async def test_nested_listeners_are_woken() -> None:
    inner, outer, wakeup = Listeners(), Listeners(), Wakeup()
    with outer.subscribed(inner), inner.subscribed(wakeup):
        outer.notify()
        assert await wakeup.sleep_until(now())
    outer.notify()
    assert not await wakeup.sleep_until(now())
