"""A run after an outage that was longer than its leases: its coordinator, its status and its cost."""

import anyio
import pytest

import rdzv
from rdzv.core.history import History
from rdzv.core.report import Account, RunStatus, run_cost
from rdzv.testing import ClusterNode, cluster

TTL, TRAINED, AWAY, AFTERWARDS = 10.0, 40.0, 30.0, 20.0  # seconds
APART = 1.0  # seconds between the return of one node and that of the next


class Told:
    """The status and the cost of the run, read by rank 0 of the second round some time later."""

    status: RunStatus
    cost: Account

    async def train(self, node: ClusterNode) -> None:
        async with rdzv.connect(node.url) as handler:
            while True:
                info = await handler.next_rendezvous()
                if (info.round, info.rank) == (1, 0):
                    await anyio.sleep(AFTERWARDS)
                    self.status = await handler.status()
                    self.cost = run_cost("job", History(chapters=tuple(await handler.history())))
                async with handler.changes() as changes:
                    async for change in changes:
                        if not isinstance(change, rdzv.NodesWaiting) or change.count:
                            break


@pytest.mark.parametrize("stays_in_reach", [False, True], ids=["all are cut off", "all but one are cut off"])
def test_returned_nodes_are_not_missing_and_the_outage_is_not_counted_as_training(stays_in_reach: bool) -> None:
    """Regression: present members were called missing, and 99.5 % of the time counted as training instead of 71 %."""
    told = Told()
    with cluster(4, seed=1, min_nodes=2, ttl=TTL, last_call_timeout=5) as town:
        town.run(told.train)
        town.advance(TRAINED)
        cut_off = [node for node in range(4) if not (stays_in_reach and node == 3)]
        for node in cut_off:
            town.cut(node)
        town.advance(AWAY)
        for node in cut_off:
            town.heal(node)
            town.advance(APART)
        town.advance(60)
        assert [one.world_size for one in town.rounds] == [4, 4], town.story
    assert (len(told.status.members), told.status.missing_count, told.status.missing) == (4, 0, ())
    # Until the second round, a member trains until its lease is over by its own clock, or it hears from the others.
    assert told.cost.spent.trained == pytest.approx(TRAINED + TTL, abs=TTL / 2), told.cost
    assert told.cost.seconds == pytest.approx(TRAINED + AWAY + len(cut_off) * APART, abs=2), told.cost


def test_after_a_pause_of_the_store_longer_than_a_term_there_is_a_coordinator_at_once() -> None:
    """Regression: there was no coordinator for three seconds. The store does not count the time in which it stood
    still; the coordinator does, and had resigned.

    A member that failed because of a peer that had died meanwhile waited in vain for news of that death, and ended with
    its own error.
    """

    async def train(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url):
            async with round:
                await anyio.sleep_forever()

    with cluster(3, seed=1, min_nodes=2) as town:
        town.run(train)
        town.advance(5)
        town.pause_store(4)
        town.advance(3.9)
        (coordinator,) = {node.handlers[-1].node.head.coordinator for node in town.nodes}
        assert coordinator is not None
        town.kill(next(node for node in town.nodes if node.name != coordinator.node_id))
        town.advance(1)
        assert [one.world_size for one in town.rounds] == [3, 2]
