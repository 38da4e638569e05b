"""R3 **Consistent.** All members of a round agree on round number, members, ranks 0..n-1 once each, world size, and
rank 0's address.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.decision import Complete
from rdzv.core.ranks import order_named
from rdzv.core.round import Member, bucket_of
from tests.support.hand_fed import HandFed

# What is decided.


@pytest.mark.parametrize("order", ["survivors", "arrival", "name", "requested", "topology:rack"])
@given(
    names=st.lists(st.text("ab012", min_size=1, max_size=3), min_size=2, max_size=9, unique=True),
    wanted=st.lists(st.none() | st.integers(-1, 9), min_size=9, max_size=9),
)
def test_r3_ranks_are_0_to_n_minus_1_once_each(order: str, names: list[str], wanted: list[int | None]) -> None:
    """Promise: "ranks 0..n-1 once each", whatever the order."""
    run = HandFed(needed=len(names), capacity=len(names), order=order_named(order))
    for name, rank in zip(names, wanted, strict=False):
        run.arrive(name, requested_rank=rank, attributes={"rack": name[:1]})
    decision = run.decide()
    assert isinstance(decision, Complete)
    assert sorted(record.node_id for record in decision.members) == sorted(names)


def test_r3_the_same_view_gives_the_same_round_to_whoever_asks() -> None:
    """Promise: "All members of a round agree": a successor that sees the same decides the same."""
    run = HandFed(needed=3, capacity=3)
    run.arrive("c", "a", "b")
    first = run.decide()
    run.succeed(None)
    second = run.decide()
    assert isinstance(first, Complete)
    assert isinstance(second, Complete)
    assert first.members == second.members


# What each member reads.


@given(st.integers(1, 80))
def test_r3_every_member_finds_its_rank_in_its_one_bucket(size: int) -> None:
    """Promise: "All members of a round agree on ... ranks": one bucket tells each its own."""
    members = [Member(node_id=f"host{rank}", rank=rank, arrival=rank + 1) for rank in range(size)]
    buckets = -(-size // 16)
    stored = [
        Member.pack_all([member for member in members if bucket_of(member.node_id, buckets) == index])
        for index in range(buckets)
    ]
    for member in members:
        assert member in Member.unpack_all(stored[bucket_of(member.node_id, buckets)])


# Whole runs, with crashes, pauses and cuts, are in `tests/sim`: every node that learns of a round agrees with its
# commit.
