"""Promise R5 through a slow network: who leaves is told to the others as one that has left."""

from __future__ import annotations

import pytest

import rdzv
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time


async def test_r5_who_leaves_takes_its_record_back_however_slowly_the_store_answers() -> None:
    """At 3 s the time for that was over before the store had answered: the node gave up its lease, and with it the way
    back, and the others learned by that.
    """
    async with VirtualRun(latency=1.5, min_nodes=2, max_nodes=3) as run:
        one, other = run.handler("a"), run.handler("b")
        await run.meet(one, other)
        lease = one.node.part.arrival.lease
        async with other.changes() as changes:
            await one.leave()
            async for change in changes:
                assert not isinstance(change, rdzv.NodesLost)
                if isinstance(change, rdzv.NodesLeft):
                    break
        assert one.node.part.arrival.lease is lease is not None
