"""Promise R2: `num_nodes_waiting` counts the arrivals that a regroup now would admit.

`test_rendezvous_handlers` shows that a late node waits, announced, until all members have left.
"""

import asyncio

import pytest

import rdzv
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time


async def counted_by(handler: rdzv.RendezvousHandler) -> int:
    await asyncio.sleep(2)
    return await handler.num_nodes_waiting()


async def test_r2_no_more_are_counted_than_there_is_room_for() -> None:
    """Spares count 0."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        a, _ = await run.met("ab")
        for name in ("x", "y"):
            await run.join(run.handler(name))
            assert await counted_by(a) == 1


async def test_r2_a_failed_member_that_rejoins_is_noticed() -> None:
    """A member that left and rejoins is counted. Otherwise the others would not notice it."""
    async with VirtualRun(min_nodes=2) as run:
        a, _ = await run.met("ab")
        run.crash("b")
        assert await counted_by(a) == 0
        run.network.stop_refusing("b")
        await run.join(run.handler("b"))
        assert await counted_by(a) == 1


async def test_r2_an_incomplete_unit_is_not_counted() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=4, node_unit=2, last_call_timeout=0) as run:
        a, _ = await run.met("ab")
        for name, count in (("half", 0), ("the other half", 2)):
            await run.join(run.handler(name))
            assert await counted_by(a) == count
