"""The loop on virtual time jumps, keeps order, and says who waits for nothing."""

from __future__ import annotations

import asyncio
import itertools
import time

import anyio
import pytest

from tests.support.virtual_time import HORIZON, DeadlockError, VirtualTimeLoop


@pytest.mark.virtual_time
async def test_a_day_of_sleep_takes_no_time() -> None:
    loop = asyncio.get_running_loop()
    began, began_for_real = loop.time(), time.monotonic()

    await anyio.sleep(86400)

    assert loop.time() - began == 86400
    assert time.monotonic() - began_for_real < 60  # a bound no slow machine will miss: a day did not pass


@pytest.mark.virtual_time
async def test_timers_fire_in_order_of_their_deadlines() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, delay: float) -> None:
        await anyio.sleep(delay)
        woken.append((name, loop.time() - began))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 600))
        group.create_task(sleeper("early", 0.5))

    assert woken == [("early", 0.5), ("late", 600)]


@pytest.mark.virtual_time
async def test_a_timeout_runs_out_on_the_virtual_clock() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()


def test_waiting_for_nothing_is_a_deadlock_that_names_the_task_and_the_line() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_for_nothing(), name="the-stuck-one")

    runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
    with runner, pytest.raises(DeadlockError, match="no timer is set") as caught:
        runner.run(main())
    assert "the-stuck-one: " in str(caught.value)
    assert "wait_for_nothing" in str(caught.value)
    assert "await asyncio.Event().wait()" in str(caught.value)


def test_ticking_on_for_a_test_that_waits_forever_is_a_deadlock_too() -> None:
    async def keep_alive() -> None:
        for _ in itertools.count():
            await asyncio.sleep(HORIZON / 4)

    runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
    with runner, pytest.raises(DeadlockError, match="still not over"):
        runner.run(keep_alive())
