"""R12 **Ranks** come from one pure pluggable function.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.ranks import order_named
from tests.support.hand_fed import HandFed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rdzv.state import NodeRecord

# What is decided.


def test_r12_survivors_keep_their_order_and_newcomers_fill_in_behind() -> None:
    """Promise: "Default: survivors keep their order, newcomers fill in behind"."""
    run = HandFed(needed=4, capacity=4)
    run.arrive("a", "b", "c", "d")
    assert run.commit() == ["a", "b", "c", "d"]
    run.die("a")
    run.arrive("new", "d", "c", "b")
    assert run.commit() == ["b", "c", "d", "new"]


def test_r12_survivors_keep_their_order_also_under_a_successor() -> None:
    """Promise: "survivors keep their order", whoever coordinates."""
    run = HandFed(needed=3, capacity=3)
    run.arrive("c", "a", "b")
    assert run.commit() == ["c", "a", "b"]
    run.succeed(run.progress)
    run.arrive("a", "b", "c")
    assert run.commit() == ["c", "a", "b"]


def test_r12_ranks_by_arrival() -> None:
    """Promise: "Others: by arrival"."""
    run = HandFed(needed=2, capacity=2, order=order_named("arrival"))
    run.arrive("a", "b")
    assert run.commit() == ["a", "b"]
    run.arrive("b", "a")
    assert run.commit() == ["b", "a"]


def test_r12_ranks_by_node_name_in_natural_order() -> None:
    """Promise: "by node name (natural order: host10 after host2)"."""
    run = HandFed(needed=3, capacity=3, order=order_named("name"))
    run.arrive("host10", "host2", "host1")
    assert run.commit() == ["host1", "host2", "host10"]


def test_r12_ranks_by_request() -> None:
    """Promise: "by a requested rank"."""
    run = HandFed(needed=3, capacity=3, order=order_named("requested"))
    run.arrive("a", requested_rank=2)
    run.arrive("b")
    run.arrive("c", requested_rank=0)
    assert run.commit() == ["c", "b", "a"]


def test_r12_ranks_by_topology() -> None:
    """Promise: "by a topology attribute (nodes of one domain adjacent)"."""
    run = HandFed(needed=4, capacity=4, order=order_named("topology:rack"))
    for name, rack in (("a", "r2"), ("b", "r1"), ("c", "r2"), ("d", "r1")):
        run.arrive(name, attributes={"rack": rack})
    assert run.commit() == ["b", "d", "a", "c"]


def test_r12_an_order_can_be_brought_along() -> None:
    """Promise: "Ranks come from one pure pluggable function"."""

    def largest_first(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
        assert previous == {}
        return sorted(arrivals, key=lambda record: -record.payload)

    run = HandFed(needed=2, capacity=2, order=largest_first)
    run.arrive("small", payload=1)
    run.arrive("large", payload=8)
    assert run.commit() == ["large", "small"]
