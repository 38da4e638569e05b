"""`rdzv.node.link.stopwatch` measures the time of an answer, without the time in which this process stood still."""

import asyncio
import time

import pytest

from rdzv.node.link.stopwatch import STOOD_STILL, Stopwatch


@pytest.mark.anyio
async def test_a_slow_answer_is_measured_in_full() -> None:
    clock = asyncio.get_running_loop().time
    with Stopwatch(clock) as stopwatch:
        await asyncio.sleep(0.25)
    assert 0.25 <= stopwatch.seconds < 0.25 + STOOD_STILL


@pytest.mark.anyio
@pytest.mark.parametrize("after", [0.0, 0.15])
async def test_time_in_which_this_process_stood_still_does_not_count(after: float) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    with Stopwatch(clock) as stopwatch:
        await asyncio.sleep(after)
        time.sleep(STOOD_STILL + 0.3)  # noqa: ASYNC251  blocks like SIGSTOP
        await asyncio.sleep(0)
    assert clock() - began > STOOD_STILL + 0.3
    assert stopwatch.seconds < after + 0.2 + STOOD_STILL / 2
