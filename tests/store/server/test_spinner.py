"""Staying awake for a moment after an answer (`store.server.spinner`)."""

from __future__ import annotations

import asyncio

import store
from store.net.spinning import SPIN
from store.server.spinner import Spinner


class Clock:
    """Tells the time, and how often it was asked: once for each answer after which we stay awake, and in each pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now

    async def passes(self, count: int) -> int:
        """Let the loop pass so often; how often the clock was asked meanwhile."""
        before = self.asked
        for _ in range(count):
            await asyncio.sleep(0)
        return self.asked - before


async def failed(spinner: Spinner, clock: Clock) -> int:
    """How many answers pass without staying awake, after one for which that is in vain."""
    spinner.answered(0)
    clock.now += 2 * SPIN
    await clock.passes(1)
    count = 0
    before = clock.asked
    while True:
        spinner.answered(0)
        if clock.asked > before:
            return count
        count += 1


async def test_the_loop_stays_awake_for_as_long_as_it_may_and_no_longer() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    spinner.answered(0)
    assert await clock.passes(5) == 5
    clock.now = SPIN / 2
    spinner.answered(0)
    clock.now = SPIN * 1.4
    assert await clock.passes(5) == 5, "each answer begins it anew"
    clock.now = SPIN * 1.6
    assert await clock.passes(5) == 1, "nothing has come: it goes to sleep"
    spinner.answered(0)
    assert await clock.passes(5) == 0, "and does not stay awake after the next answer"


async def test_it_stays_awake_ever_less_often_in_vain() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    assert [await failed(spinner, clock) for _ in range(4)] == [1, 3, 7, 15]


async def test_a_request_for_which_the_loop_stayed_awake_pays() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    assert [await failed(spinner, clock) for _ in range(3)] == [1, 3, 7]
    await clock.passes(2)
    spinner.answered(0)
    assert await failed(spinner, clock) == 3, "7, less two failures, was 1"


async def test_a_request_that_had_come_already_teaches_nothing() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    assert [await failed(spinner, clock) for _ in range(3)] == [1, 3, 7]
    for _ in range(5):
        spinner.answered(0)
        await clock.passes(1)
    assert await failed(spinner, clock) == 15


async def test_the_loop_does_not_stay_awake_for_those_who_ask_in_turn() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    for peer in (1, 2, 1, 2, 3):
        spinner.answered(peer)
        assert await clock.passes(2) == 0
    spinner.answered(3)
    assert await clock.passes(2) == 2


async def test_a_served_store_stays_awake_between_calls() -> None:
    async with store.serve() as server:
        clock = Clock()
        server.conversations.spinner = Spinner(clock)
        async with store.connect(server.url) as client:
            while not clock.asked:
                await client.ping()
            assert await clock.passes(3) >= 3
            clock.now += 2 * SPIN
            await clock.passes(2)
            assert await clock.passes(3) == 0
