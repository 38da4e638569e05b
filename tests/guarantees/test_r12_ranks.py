"""R12 **Ranks** come from one pure pluggable function.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rdzv.core.decision import Parked
from rdzv.core.ranks import order_named
from tests.support.hand_fed import HandFed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rdzv.core.state import NodeRecord

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


def test_r12_newcomers_can_take_the_ranks_that_were_lost_so_that_nobody_else_moves() -> None:
    run = HandFed(needed=4, capacity=4, order=order_named("in_place"))
    run.arrive("a", "b", "c", "d")
    assert run.commit() == ["a", "b", "c", "d"]
    run.die("b")
    run.arrive("new", "d", "c", "a")
    assert run.commit() == ["a", "new", "c", "d"]


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


def arrive_in_racks(run: HandFed, *names: str) -> None:
    """Nodes that are called by their rack and a number."""
    for name in names:
        run.arrive(name, attributes={"rack": name[0]})


def spares_of(run: HandFed, *names: str) -> list[str]:
    """Who of these is told that it is a spare."""
    passed_over = run.round.revision if run.round else 0
    answers = {name: run.follow(name, node_id=name, passed_over=passed_over) for name in names}
    return [name for name, it in answers.items() if isinstance(it, Parked) and it.reason.startswith("a spare")]


@pytest.mark.parametrize("forced_by", ["max_nodes", "node_unit"])
def test_r12_by_topology_whole_domains_are_taken_in_when_not_all_can_be(forced_by: str) -> None:
    """Promise: "nodes of one domain adjacent"; a node alone of its rack is of less use than a rack."""
    unit = 4 if forced_by == "node_unit" else 1
    run = HandFed(needed=4, capacity=4 if unit == 1 else 8, unit=unit, last_call=1, order=order_named("topology:rack"))
    arrive_in_racks(run, "a1", "b1", "c1", "b2", "c2")
    assert spares_of(run, "a1", "b1", "c1", "b2", "c2") == ["a1"], "who waits is told right away"
    run.now += 1
    assert run.commit() == ["b1", "b2", "c1", "c2"]
    assert spares_of(run, "a1") == ["a1"]


def test_r12_by_topology_members_stay_and_the_domains_they_are_from_come_first() -> None:
    run = HandFed(needed=2, capacity=4, last_call=1, order=order_named("topology:rack"))
    arrive_in_racks(run, "a1", "b1")
    run.now += 1
    assert run.commit() == ["a1", "b1"]
    arrive_in_racks(run, "c1", "c2", "c3", "b2", "a2")
    assert run.progress.waiting == 2
    assert spares_of(run, "c1", "c2", "c3", "b2", "a2") == ["c1", "c2", "c3"]
    arrive_in_racks(run, "a1", "b1")
    assert run.commit() == ["a1", "a2", "b1", "b2"]
    assert spares_of(run, "c1", "c2", "c3") == ["c1", "c2", "c3"]


def test_r12_more_spares_than_can_be_named_have_their_time_stand_still_like_all_newcomers() -> None:
    run = HandFed(needed=2, capacity=2, order=order_named("topology:rack"))
    arrive_in_racks(run, *(f"a{number}" for number in range(70)), "b1", "b2")
    assert run.progress.spare_ids == ()
    assert spares_of(run, "a1", "b1") == ["a1", "b1"]
    assert run.commit() == ["b1", "b2"]


def test_r12_an_order_can_be_brought_along() -> None:
    """Promise: "Ranks come from one pure pluggable function"."""

    def largest_first(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
        assert previous == {}
        return sorted(arrivals, key=lambda record: -record.payload)

    run = HandFed(needed=2, capacity=2, order=largest_first)
    run.arrive("small", payload=1)
    run.arrive("large", payload=8)
    assert run.commit() == ["large", "small"]
