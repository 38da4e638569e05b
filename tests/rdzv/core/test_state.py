"""Keys, the bucket of a node, and the rank of an arrival."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv import Phase
from rdzv.core.absent import AbsenceReport, Missing
from rdzv.core.keys import Keys
from rdzv.core.round import ARRIVALS_MOST, Round, pack_arrivals, rank_bucket_number
from rdzv.core.state import Ban, Progress
from store.engine.keyspace import COORDINATION_KEYS, KeyGroupTable

KEYS = Keys(prefix="/rdzv", run_id="job-7")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)

# Keys.


def test_the_keys_of_a_run() -> None:
    assert KEYS.settings == "/rdzv/job-7/settings"
    assert KEYS.node("a") == "/rdzv/job-7/nodes/a"
    assert KEYS.coordinator == "/rdzv/job-7/head/coordinator"
    assert KEYS.round == "/rdzv/job-7/head/round"
    assert KEYS.closed == "/rdzv/job-7/head/closed"
    assert KEYS.progress == "/rdzv/job-7/head/progress"
    assert KEYS.ranks(3, 17, 0) == "/rdzv/job-7/rounds/3/17/ranks/0"
    assert KEYS.roster(3, 17, 2) == "/rdzv/job-7/rounds/3/17/roster/2"
    assert KEYS.shared(3, 17) == "/rdzv/job-7/store/3/17/"


def test_a_prefix_covers_exactly_the_keys_under_it() -> None:
    head = (KEYS.coordinator, KEYS.round, KEYS.closed, KEYS.progress)
    assert all(key.startswith(KEYS.head) for key in head)
    assert not any(key.startswith(KEYS.head) for key in (KEYS.settings, KEYS.node("a"), KEYS.ranks(0, 1, 0)))
    assert KEYS.ranks(3, 17, 0).startswith(KEYS.ranks(3, 17))
    assert KEYS.roster(3, 17, 0).startswith(KEYS.roster(3, 17))
    assert not KEYS.round_prefix(30, 1).startswith(KEYS.round_prefix(3, 1)), "round 3 can be removed without round 30"
    assert all(key.startswith(KEYS.root) for key in (*head, KEYS.settings, KEYS.nodes, KEYS.rounds))


def test_runs_of_similar_names_share_no_key() -> None:
    assert not Keys(prefix="/rdzv", run_id="job-70").root.startswith(KEYS.root)


# Buckets.


@given(node_id=names, buckets=st.integers(1, 700))
def test_every_node_has_exactly_one_bucket(node_id: str, buckets: int) -> None:
    assert 0 <= rank_bucket_number(node_id, buckets) < buckets


def test_a_node_has_the_same_bucket_on_every_machine() -> None:
    assert [rank_bucket_number(name, 16) for name in ("host0", "host1", "host2")] == [3, 5, 15]


# Ranks.


def round_of(arrivals: Sequence[int]) -> Round:
    round = Round(number=0, term=1, size=len(arrivals), buckets=1, host="h", port=1, **pack_arrivals(arrivals))
    return Round.unpack(round.pack(), revision=0)


@given(st.integers(1, 1 << 60), st.sets(st.integers(0, 0xFFFF), min_size=1, max_size=ARRIVALS_MOST), st.randoms())
def test_a_round_gives_the_rank_of_each_arrival(least: int, after: set[int], rng: random.Random) -> None:
    arrivals = [least + one for one in after]
    rng.shuffle(arrivals)
    told = round_of(arrivals)
    assert [told.rank_of(arrival) for arrival in arrivals] == list(range(len(arrivals)))
    assert {told.rank_of(other) for other in (min(arrivals) - 1, max(arrivals) + 1, least + 0x10000)} == {None}


@pytest.mark.parametrize("arrivals", [range(1, ARRIVALS_MOST + 2), (1, 0x10001)], ids=["many", "far apart"])
def test_a_round_of_too_many_or_distant_arrivals_lists_none(arrivals: Sequence[int]) -> None:
    assert not round_of(arrivals).arrivals


def test_a_round_that_accepts_all_nodes_carries_the_progress_with_it() -> None:
    """Regression: each node got two messages, one for the round and one for the new phase."""
    waiting = Progress(phase=Phase.GATHERING, joined=4, needed=4, capacity=4, last_arrival=9)
    then = waiting.for_round_commit(7, size=4)
    assert then == Progress(phase=Phase.TRAINING, round=7, needed=4, capacity=4, live=4)
    assert waiting.replace(joined=5).for_round_commit(7, size=4) is None, "a node is left over"
    missing = AbsenceReport(missing=(Missing(node_id="e", how="never seen"),), count=1)
    assert waiting.replace(absent=missing).for_round_commit(7, size=4) is None, "a node is missing"


def test_the_store_keeps_room_for_the_keys_by_which_a_run_decides_and_for_no_others() -> None:
    names = {name for name, kind in vars(Keys).items() if type(kind).__name__ == "_Key"} - {"stores"}
    deciding = [getattr(KEYS, name) for name in names] + [KEYS.operator_answers("q"), KEYS.ranks(0, 1, 2)]
    groups = KeyGroupTable()
    assert [key for key in deciding if not groups.is_coordination_key(key)] == []
    assert {key.removeprefix(KEYS.root).partition("/")[0] for key in deciding} == COORDINATION_KEYS
    assert not any(
        map(groups.is_coordination_key, (KEYS.shared(0, 1) + "k/head/round", KEYS.kept_item("head/round"), KEYS.host))
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "banned: power"),
        ({"where": "rack=7"}, "banned, as all nodes with rack=7: power"),
        ({"where": "rack=7", "by": "ops"}, "banned, as all nodes with rack=7, by ops: power"),
        ({"where": "rack=7", "lasts": 2.0}, "banned, as all nodes with rack=7, for 2 s: power"),
    ],
)
def test_a_ban_in_words(fields: dict[str, Any], words: str) -> None:
    assert str(Ban(reason="power", **fields)) == words
