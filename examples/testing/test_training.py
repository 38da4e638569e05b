"""Tests of a training loop on clusters in virtual time: minutes of timeouts take a second on one machine.

Run it beside `training.py`: `python -m pytest`. The fixture `rdzv_cluster` comes with rdzv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import all_reduce, train

import rdzv
import rdzv.testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.testing import Cluster, ClusterNode

    MakeCluster = Callable[..., Cluster]


async def body(node: ClusterNode) -> None:
    """Train as one node of a cluster."""
    await train(node.url)


async def body_in_which_rank_0_skips_checks(node: ClusterNode) -> None:
    """Train with a mistake: rank 0 calls `check` at every tenth step only, "to save time"."""
    async for round in rdzv.rounds(node.url):
        async with round:
            step = int(await round.restore("step") or 0)
            while step < 20:
                if round.rank != 0 or step % 10 == 0:
                    await round.check(step)
                await all_reduce(round, step)
                step += 1
                if round.rank == 0:
                    await round.keep("step", str(step).encode())


def test_training_goes_on_with_a_replacement(rdzv_cluster: MakeCluster) -> None:
    cluster = rdzv_cluster(4, seed=1)
    cluster.run(body)
    cluster.advance(5)
    cluster.kill(2)
    cluster.advance(60)
    assert len(cluster.rounds) == 1, "three of four nodes are too few"
    cluster.restart(2)
    cluster.finish()
    assert [one.world_size for one in cluster.rounds] == [4, 4]


def test_training_goes_on_with_fewer(rdzv_cluster: MakeCluster) -> None:
    cluster = rdzv_cluster(4, seed=1, min_nodes=2)
    cluster.run(body)
    cluster.advance(5)
    cluster.kill(2, power=True)  # its connections stay open: it is lost after its ttl, 10 s
    cluster.finish()
    assert [one.world_size for one in cluster.rounds] == [4, 3]


def test_training_outlives_a_store_that_is_away(rdzv_cluster: MakeCluster) -> None:
    cluster = rdzv_cluster(3, seed=1)
    cluster.run(body)
    cluster.advance(5)
    cluster.stop_store(4)
    cluster.finish()
    assert len(cluster.rounds) == 1, "nobody has died, so nobody meets again"


def test_training_survives_whatever_happens(rdzv_cluster: MakeCluster) -> None:
    rdzv_cluster(3, min_nodes=2).explore(body, seeds=range(5), during=15)


def test_the_mistake_is_found(rdzv_cluster: MakeCluster) -> None:
    """When a node is to leave, the others stop before the same step; rank 0 does not, and waits for them for ever."""
    with pytest.raises(rdzv.testing.ClusterError) as found:
        rdzv_cluster(3).explore(body_in_which_rank_0_skips_checks, seeds=range(20), during=15)
    assert "the barrier 'step 2' timed out" in found.value.what
    assert any("is to leave" in line for line in found.value.story)
