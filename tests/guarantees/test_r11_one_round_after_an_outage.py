"""Promise R11 after an outage: the nodes that return form one round, not several.

All nodes, the coordinator included, are cut off for longer than their leases last, and return one after the other.
"""

import pytest

import rdzv
from rdzv.testing import ClusterNode, cluster


async def train(node: ClusterNode) -> None:
    async with rdzv.connect(node.url) as handler:
        while True:
            await handler.next_rendezvous()
            async with handler.changes() as changes:
                async for change in changes:
                    if not isinstance(change, rdzv.NodesWaiting) or change.count:
                        break


@pytest.mark.parametrize(
    ("seed", "outage", "order", "apart"),
    [
        (1, 25, (2, 3, 0, 1), 2.0),  # the former coordinator comes last
        (1, 25, (3, 1, 2, 0), 0.3),
        (2, 15, (2, 0, 1, 3), 2.0),
        (3, 25, (0, 2, 3, 1), 0.3),
        (4, 40, (3, 0, 2, 1), 2.0),
    ],
)
def test_r11_nodes_that_return_one_by_one_from_an_outage_form_one_round(
    seed: int, outage: float, order: tuple[int, ...], apart: float
) -> None:
    """The last node left the round at once, although it had been waited for, and all met again. It had asked for its
    lease during the outage; counted from that time, the lease had expired before it was granted.
    """
    with cluster(4, seed=seed, min_nodes=2, ttl=10) as town:
        town.run(train)
        town.advance(3)
        assert [one.world_size for one in town.rounds] == [4]
        for node in order:
            town.cut(node)
        town.advance(outage)
        for node in order:
            town.heal(node)
            town.advance(apart)
        town.advance(60)
        assert [one.world_size for one in town.rounds] == [4, 4], town.story
