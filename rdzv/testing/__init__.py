"""Tests of programs that use rdzv: clusters on virtual time, and real processes.

    async with rdzv.testing.cluster(4, seed=1) as cluster:
        cluster.run(train)  # async def train(node): async for round in rdzv.rounds(node.url): ...
        cluster.advance(5)
        cluster.kill(2)
        await cluster.finish()

pytest's fixture `rdzv_cluster` also makes clusters, and ends them with the test.
"""

from rdzv.testing.cluster import FAULTS, Cluster, cluster
from rdzv.testing.nodes import ClusterNode, ClusterRound
from rdzv.testing.processes import ProcessesError, RealProcesses, processes
from rdzv.testing.story import ClusterError, ClusterStuckError

__all__ = [
    "FAULTS",
    "Cluster",
    "ClusterError",
    "ClusterNode",
    "ClusterRound",
    "ClusterStuckError",
    "ProcessesError",
    "RealProcesses",
    "cluster",
    "processes",
]
