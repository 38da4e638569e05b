"""Changes of a round, as callers read them: none is lost by a timeout, a cancel, or a poll."""

import asyncio

import anyio
import pytest

from rdzv.core.state import Change, Closed, Draining, NodesWaiting
from rdzv.errors import RendezvousStateError
from rdzv.node.front.queries import Changes
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time


async def cancelled(changes: Changes, how: str) -> None:
    """Ask for a change that does not come, and stop asking."""
    if how == "anyio":
        with anyio.move_on_after(1) as limit:
            await anext(changes)
        assert limit.cancelled_caught
    elif how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(changes), 1)
    elif how == "poll":
        assert await changes.poll(1) is None
    else:
        asking = asyncio.create_task(anext(changes))
        await asyncio.sleep(1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()


@pytest.mark.parametrize("how", ["anyio", "wait_for", "poll", "cancel"])
async def test_a_caller_that_stopped_asking_for_changes_gets_them_later(how: str) -> None:
    """Regression: the stream was a generator. A cancelled `anext` ended it, and no later change was delivered."""
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        async with a.changes() as changes:
            await cancelled(changes, how)
            joining = await run.join(run.handler("b"))
            assert await anext(changes) == NodesWaiting(count=1)
            await cancelled(changes, how)
            await a.set_closed("enough")
            rest: list[Change] = [change async for change in changes]
            assert rest[-1] == Closed(reason="enough", by="a")
            assert await changes.poll(1) is None, "it has ended"
        await asyncio.wait([joining])


async def test_changes_are_read_only_while_they_are_entered() -> None:
    """Regression: a reader waited for ever after the end of the context, and if another task left it meanwhile."""
    async with VirtualRun(min_nodes=1) as run:
        changes = run.handler("a").changes()
        reading: list[asyncio.Task[Change]] = []
        for _ in range(2):
            with pytest.raises(RendezvousStateError, match="changes are read in `async with"):
                await asyncio.wait_for(anext(changes), 1)
            async with changes:
                reading.append(asyncio.create_task(anext(changes)))
                await asyncio.sleep(1)
        await asyncio.wait(reading, timeout=1)
        assert [type(each.exception()) for each in reading] == [RendezvousStateError] * 2


async def test_all_tasks_that_wait_for_changes_are_woken() -> None:
    """Regression: of two tasks that waited, the first was never woken."""
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        async with a.changes() as changes:
            reading = [asyncio.create_task(anext(changes)) for _ in range(2)]
            await run.join(run.handler("b"))
            await a.set_closed("enough")
            assert {type(change) for change in await asyncio.wait_for(asyncio.gather(*reading), 5)} == {
                NodesWaiting,
                Closed,
            }


async def test_who_waits_for_questions_learns_that_the_handler_is_closed() -> None:
    """Regression: the wait never ended."""
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        asking = asyncio.create_task(anext(a.questions()))
        await asyncio.sleep(1)
        await a.aclose()
        with pytest.raises(RendezvousStateError, match="connect again"):
            await asyncio.wait_for(asking, 5)


async def test_a_drain_that_is_read_late_has_less_time_left() -> None:
    async with VirtualRun(min_nodes=1) as run:
        handler = run.handler("a")
        await handler.next_rendezvous()
        async with handler.changes() as changes:
            await handler.drain(60, "maintenance")
            await asyncio.sleep(20)
            change = await changes.poll(1)
        assert isinstance(change, Draining)
        assert change.seconds_left == pytest.approx(40, abs=1)
