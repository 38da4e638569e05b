"""Tasks that run together, in a scope of anyio that is cancelled."""

import asyncio
import gc

import anyio
import pytest

from store.net.tasks import run_to_completion

pytestmark = pytest.mark.virtual_time


async def ends_well(steps: int) -> int:
    """Swallow its cancellation, and take some more steps."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        for _ in range(steps):
            await asyncio.sleep(0)
    return steps


@pytest.mark.parametrize("steps", [(0,), (0, 0), (3, 0), (0, 3)])
async def test_a_cancelled_scope_ends_at_its_block_whatever_its_tasks_do(steps: tuple[int, ...]) -> None:
    """Regression: `asyncio.gather` of tasks that end well raised an error that the scope did not know as its own. So a
    coordinator that was paused until its lease had lapsed was no candidate any more, and a node alone waited for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    with anyio.move_on_after(1) as scope:
        await run_to_completion(*map(ends_well, steps))
    assert scope.cancelled_caught
    assert not task.cancelling()


async def test_all_run_to_their_end_and_the_first_error_is_raised() -> None:
    ended: list[str] = []

    async def runs(name: str, seconds: float, error: Exception | None = None) -> str:
        await asyncio.sleep(seconds)
        ended.append(name)
        if error is not None:
            raise error
        return name

    assert await run_to_completion(runs("a", 2), runs("b", 1)) == ("a", "b")
    assert await run_to_completion() == ()
    with pytest.raises(OSError, match="first"):
        await run_to_completion(runs("c", 3, OSError("first")), runs("d", 1, ValueError("second")), runs("e", 4))
    assert ended == ["b", "a", "d", "c", "e"]


async def test_the_errors_that_are_not_raised_are_logged_by_nobody() -> None:
    """Regression: on a full disk a coordinator logged "Task exception was never retrieved"."""

    async def fails(name: str) -> None:
        raise OSError(name)

    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    with pytest.raises(OSError, match="first"):
        await run_to_completion(fails("first"), fails("second"))
    gc.collect()
    assert said == []
