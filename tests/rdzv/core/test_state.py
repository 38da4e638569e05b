"""Keys, and who has which rank in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.keys import Keys
from rdzv.core.round import (
    ARRIVALS_MOST,
    GONE_MOST,
    RUNS_MOST,
    Arrivals,
    Member,
    Round,
    bucket_of,
    place,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = Keys(prefix="/rdzv", run_id="job-7")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)

# Keys.


def test_the_keys_of_a_run_are_where_the_module_says() -> None:
    assert KEYS.settings == "/rdzv/job-7/settings"
    assert KEYS.node("a") == "/rdzv/job-7/nodes/a"
    assert KEYS.coordinator == "/rdzv/job-7/head/coordinator"
    assert KEYS.round == "/rdzv/job-7/head/round"
    assert KEYS.closed == "/rdzv/job-7/head/closed"
    assert KEYS.progress == "/rdzv/job-7/head/progress"
    assert KEYS.ranks(3, 17, 0) == "/rdzv/job-7/rounds/3/17/ranks/0"
    assert KEYS.roster(3, 17, 2) == "/rdzv/job-7/rounds/3/17/roster/2"
    assert KEYS.shared(3, 17) == "/rdzv/job-7/store/3/17/"


def test_prefixes_cover_what_is_under_them_and_nothing_else() -> None:
    head = (KEYS.coordinator, KEYS.round, KEYS.closed, KEYS.progress)
    assert all(key.startswith(KEYS.head) for key in head)
    assert not any(key.startswith(KEYS.head) for key in (KEYS.settings, KEYS.node("a"), KEYS.ranks(0, 1, 0)))
    assert KEYS.ranks(3, 17, 0).startswith(KEYS.ranks(3, 17))
    assert KEYS.roster(3, 17, 0).startswith(KEYS.roster(3, 17))
    assert not KEYS.attempt(30, 1).startswith(KEYS.attempt(3, 1)), "round 3 can be removed without round 30"
    assert all(key.startswith(KEYS.root) for key in (*head, KEYS.settings, KEYS.nodes, KEYS.rounds))


def test_runs_of_similar_names_share_no_key() -> None:
    assert not Keys(prefix="/rdzv", run_id="job-70").root.startswith(KEYS.root)


# Buckets.


@given(node_id=names, buckets=st.integers(1, 700))
def test_every_node_has_one_bucket_among_those_there_are(node_id: str, buckets: int) -> None:
    assert 0 <= bucket_of(node_id, buckets) < buckets


def test_a_node_has_the_same_bucket_on_every_machine() -> None:
    assert [bucket_of(name, 16) for name in ("host0", "host1", "host2")] == [3, 5, 15]


# Who has which rank.

ROUND: dict[str, Any] = {"number": 0, "term": 1, "size": 1, "buckets": 1, "host": "h", "port": 1}


@given(st.lists(st.integers(1000, 1000 + 0xFFFF), unique=True, min_size=1, max_size=ARRIVALS_MOST))
def test_a_round_says_which_arrival_has_which_rank(arrivals: list[int]) -> None:
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    assert [told.rank_of(arrival) for arrival in arrivals] == list(range(len(arrivals)))
    assert told.rank_of(999) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(5, 300)), min_size=1, max_size=8))
def test_a_round_of_any_number_that_came_one_after_the_other_says_so_in_few_bytes(steps: list[tuple[int, int]]) -> None:
    """Of more than 512 nodes that came at once each read its rank: a request more, in the moment that all are busy."""
    arrivals: list[int] = []
    for gap, count in steps:
        first = (arrivals[-1] if arrivals else 1 << 40) + 1 + gap
        arrivals.extend(range(first, first + count))
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    assert len(round.pack()) <= len(Round(**ROUND).pack()) + 10 + 14 * len(steps)
    assert [told.rank_of(arrival) for arrival in arrivals] == list(range(len(arrivals)))
    gaps = set(range(arrivals[0] - 1, arrivals[-1] + 2)).difference(arrivals)
    assert {told.rank_of(arrival) for arrival in gaps} == {None}


@given(st.data())
def test_members_of_the_last_round_know_their_rank_by_the_one_they_had(data: st.DataObject) -> None:
    """Above 512 members each read its rank from the store at each round, though most had but kept the one they had."""
    size = data.draw(st.integers(1, 40))
    last = Round(**{**ROUND, "size": size}, revision=500)
    before = {f"n{rank}": Member(node_id=f"n{rank}", rank=rank, arrival=100 + rank) for rank in range(size)}
    names = data.draw(st.lists(st.sampled_from([*before, "x", "y", "z"]), unique=True, min_size=1))
    anew = data.draw(st.sets(st.sampled_from([*before]), max_size=3))  # in another process
    if data.draw(st.booleans()):
        names.sort(key=lambda name: before[name].rank if name in before else size)
    arrivals = data.draw(st.permutations(range(600, 600 + len(names))))
    members = [
        Member(node_id=name, rank=rank, arrival=arrival)
        for rank, (name, arrival) in enumerate(zip(names, arrivals, strict=True))
    ]
    kept, others = place(members, last, before, before.keys() - anew)
    round = Round(**{**ROUND, "size": len(members)}, kept=kept, arrivals=others)
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    for member in members:
        there = before.get(member.node_id) if member.node_id not in anew else None
        assert told.rank_of(member.arrival, last=(500, there.rank) if there else None) == member.rank
    if kept is None:
        return
    for there in (one for name, one in before.items() if name not in names or name in anew):
        assert told.rank_of(599, last=(500, there.rank)) is None
        assert told.names_all(last=(500, there.rank))
    for stranger in (None, (499, 0)):
        assert told.rank_of(599, last=stranger) is None
        assert not told.names_all(last=stranger), "a node that was a member may have come in another process"


def test_a_round_that_lost_many_or_follows_one_of_which_not_all_is_known_keeps_nobody() -> None:
    before = {f"n{rank}": Member(node_id=f"n{rank}", rank=rank, arrival=1) for rank in range(GONE_MOST + 2)}
    members = [Member(node_id="n0", rank=0, arrival=9)]
    last = Round(**{**ROUND, "size": len(before)}, revision=5)
    assert place(members, last, before, before)[0] is None
    assert place(members, None, before, before)[0] is None
    del before["n1"]
    assert place(members, last, before, before)[0] is None
    assert place(members, last.replace(size=len(before)), before, {"n1"})[0] is None
    kept, _ = place(members, last.replace(size=len(before)), before, before)
    assert kept is not None
    assert kept.rank_of(0) == 0


@pytest.mark.parametrize(
    "arrivals", [(), range(0, 2 * ARRIVALS_MOST + 2, 2), (1, 70_000), [n + n // 4 for n in range(4 * RUNS_MOST + 4)]]
)
def test_a_round_of_many_or_of_arrivals_far_apart_names_none(arrivals: Sequence[int]) -> None:
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    assert not Round.unpack(round.pack(), revision=1).arrivals
