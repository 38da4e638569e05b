"""Errors that a body raises in a task group count as if raised without one: a verdict, a loss, an own error."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from rdzv import GiveUp, MembersLostError, RoundChanged, RoundSupersededError, RunGivenUpError
from tests.support.runs import VirtualRun, rounds_of

pytestmark = pytest.mark.virtual_time


async def _fails(error: BaseException) -> None:
    await asyncio.sleep(0.1)
    raise error


async def in_asyncio(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(3600))
        group.create_task(_fails(error))


async def in_anyio(error: BaseException) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        group.start_soon(_fails, error)


async def nested(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(3600))
        group.create_task(in_anyio(error))


GROUPS = [_fails, in_asyncio, in_anyio, nested]


async def ends_of(run: VirtualRun, group: Callable[[BaseException], Awaitable[None]], error: BaseException) -> Any:
    """Return the ends of three loops, one of which raises `error` in round 1, and the rounds of each."""
    rounds = dict.fromkeys("abc", 0)

    async def live(name: str) -> None:
        async for round in rounds_of(run.handler(name)):
            rounds[name] += 1
            async with round:
                if round.number:
                    return
                if name == "a":
                    await group(error)
                await asyncio.sleep(3600)

    async with asyncio.timeout(100):
        ends = await asyncio.gather(*map(live, rounds), return_exceptions=True)
    return ends, rounds


@pytest.mark.parametrize("group", GROUPS)
async def test_a_verdict_in_a_group_of_tasks_ends_the_run_everywhere(group: Any) -> None:
    """Regression: the others went on, met again, and closed the run as a success."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        verdict = GiveUp("loss is NaN", status=93)
        (own, *others), _ = await ends_of(run, group, verdict)
        assert own is verdict
        assert isinstance(own.__cause__, ExceptionGroup) == (group is not _fails)
        assert [(type(end), end.reason, end.status) for end in others] == [(RunGivenUpError, "loss is NaN", 93)] * 2


async def test_of_two_verdicts_in_a_group_of_tasks_the_first_one_counts() -> None:
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:

        async def both(error: BaseException) -> None:
            assert isinstance(error, GiveUp)
            raise ExceptionGroup("both", [KeyError(1), ExceptionGroup("inner", [error, GiveUp("second", status=7)])])

        verdict = GiveUp("first", status=93)
        (own, *others), _ = await ends_of(run, both, verdict)
        assert own is verdict
        assert [(end.reason, end.status) for end in others] == [("first", 93)] * 2


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("error", [MembersLostError("b"), RoundChanged("over"), RoundSupersededError("over")])
async def test_a_member_whose_task_group_raises_a_loss_meets_the_others_again(group: Any, error: Exception) -> None:
    """Regression: it was blamed, and its loop ended with the error that reports the loss."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        ends, rounds = await ends_of(run, group, error)
        assert ends == [None, None, None]
        assert set(rounds.values()) == {2}


@pytest.mark.parametrize("group", GROUPS[1:])
async def test_a_group_with_a_base_exception_is_raised_and_its_verdict_is_still_announced(group: Any) -> None:
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:

        class Stop(BaseException):
            pass

        async def both(error: BaseException) -> None:
            try:
                await group(error)
            except BaseExceptionGroup as raised:
                raise BaseExceptionGroup("both", [raised, Stop()]) from None

        (own, *others), _ = await ends_of(run, both, GiveUp("loss is NaN"))
        assert isinstance(own, BaseExceptionGroup)
        assert [type(end) for end in others] == [RunGivenUpError] * 2


async def _ends_well() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)


@pytest.mark.parametrize("gathered", [0, 1, 2])
async def test_a_loss_ends_a_body_whose_tasks_swallow_their_cancellation(gathered: int) -> None:
    """Regression: `asyncio.gather` raises an error of its own, which left the loop. Without it, the body spun."""
    rounds: list[int] = []

    async def careful() -> None:
        async for round in rounds_of(run.handler("a")):
            rounds.append(round.number)
            async with round:
                if round.number:
                    return
                for step in range(0 if gathered else 100):
                    with contextlib.suppress(asyncio.CancelledError):
                        await round.check(step)
                        await asyncio.sleep(0.1)
                await asyncio.gather(*(_ends_well() for _ in range(gathered)))
                rounds.append(-1)  # gather itself, or each `check`, let the cancellation be swallowed

    async def fails() -> None:
        async for round in rounds_of(run.handler("b")):
            async with round:
                if not round.number:
                    await _fails(ValueError("own"))

    async with VirtualRun(min_nodes=1, max_nodes=2) as run, asyncio.timeout(100):
        ends = await asyncio.gather(careful(), fails(), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), ValueError]
    assert rounds == [0, 1]


async def test_a_cancellation_from_outside_beside_a_loss_still_cancels_the_body() -> None:
    async def live() -> None:
        async for round in rounds_of(run.handler("a")):
            async with round:
                round._scope.cancel()  # as a loss does
                task.cancel()
                await asyncio.gather(_ends_well(), _ends_well())

    async with VirtualRun(min_nodes=1, max_nodes=1) as run:
        task = asyncio.create_task(live())
        await asyncio.wait([task], timeout=100)
        assert task.cancelled()
