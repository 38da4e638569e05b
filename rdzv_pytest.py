"""pytest's fixture `rdzv_cluster`: makes clusters of `rdzv.testing`, and ends them with the test.

    def test_training_survives(rdzv_cluster):
        cluster = rdzv_cluster(4, seed=1)
        cluster.run(train)

It is a module of its own, outside the package, so that a run of pytest in which no test asks for it imports nothing of
`rdzv`: an entry point inside the package would import that at every start.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rdzv.testing import Cluster


@pytest.fixture
def rdzv_cluster() -> Iterator[Callable[..., Cluster]]:
    """Make a cluster on virtual time, with the arguments of `rdzv.testing.cluster`; a failing test shows its story."""
    from rdzv.testing import cluster

    with contextlib.ExitStack() as stack:

        def make(nodes: int, **options: Any) -> Cluster:
            made = stack.enter_context(cluster(nodes, **options))
            # pytest shows what is printed here if the test fails, and nothing of it if it does not.
            stack.callback(lambda: print(f"rdzv_cluster, seed {made.seed}:", *made.story, sep="\n"))
            return made

        yield make
