"""The loop on virtual time jumps, keeps order, and reports tasks that wait without a timer."""

import asyncio
import itertools

import pytest

from tests.support.virtual_time import HORIZON, DeadlockError, VirtualTimeLoop


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
