"""Which knowledge of a lost store stands, and for whom."""

from typing import Any

import pytest

from rdzv.core.hosts.lost_store import known_lost_store, ranks_in_lost_store
from rdzv.core.round import Round
from rdzv.core.state import AnnouncedDrain, Head, LostStore, NodeRecord, NodeWithStore, Phase, Progress

EARLIER = LostStore(generation=1, revision=9, round=8, round_at=50, awaited=3)


@pytest.mark.parametrize(
    ("better", "other"),
    [
        (LostStore(generation=2, revision=1, round=0), LostStore(generation=1, revision=9, round=7)),
        (LostStore(generation=1, revision=1, round=0), LostStore(generation=1, revision=9)),
        (LostStore(generation=1, revision=1, round=7), LostStore(generation=1, revision=9, round=6)),
        (LostStore(generation=1, revision=9, round=7), LostStore(generation=1, revision=1, round=7)),
    ],
    ids=["a later store", "a store that had a round", "a store that had more rounds", "a later view"],
)
def test_the_knowledge_of_the_run_that_has_gone_on_longer_stands(better: LostStore, other: LostStore) -> None:
    """Regression: of two stores of one generation the one with the larger revision counted, and these are random. A
    newcomer that had seen an empty store only overruled a survivor, whose fellow members were not waited for.
    """
    assert better.outranks(other)
    assert not other.outranks(better)
    assert not better.outranks(better)


def test_only_the_members_of_the_lost_stores_last_round_have_survived_it() -> None:
    lost = LostStore(generation=1, revision=9, round=7, round_at=5)
    lost_rank_of = {"a": (5, 1), "b": (4, 0), "c": None}
    records = [NodeRecord(node_id=name, incarnation="", lost_rank_of=it) for name, it in lost_rank_of.items()]
    assert ranks_in_lost_store(records, lost) == {"a": 1}
    assert ranks_in_lost_store(records, None) == {}


ROUND = Round(number=7, term=1, size=5, buckets=1, host="h", port=1, revision=90)
DRAINED = {"c": AnnouncedDrain(until=9.0, reason="")}
GONE = Progress(phase=Phase.TRAINING, round=7, lost=1, lost_ids=("b",), departed=1, departed_ids=("c",))
BEFORE = GONE.replace(departed=0, departed_ids=())
AT_7: dict[str, Any] = {"round": ROUND, "progress": GONE}


@pytest.mark.parametrize(
    ("head", "awaited", "round", "round_at"),
    [
        ({"round": ROUND}, 5, 7, 90),
        (AT_7, 3, 7, 90),
        (AT_7 | {"moves_over": BEFORE}, 4, 7, 90),
        (AT_7 | {"moves_over": BEFORE, "drains": DRAINED}, 3, 7, 90),
        (AT_7 | {"moves_over": GONE.replace(round=6), "drains": DRAINED}, 4, 7, 90),
        (AT_7 | {"progress": GONE.replace(round=6)}, 5, 7, 90),
        (AT_7 | {"hosted": {"d": NodeWithStore(1, 90), "b": NodeWithStore(1, 90)}}, 2, 7, 90),
        (AT_7 | {"hosted": {"d": NodeWithStore(1, 80)}}, 3, 7, 90),
        (AT_7 | {"progress": GONE.replace(lost=3), "hosted": {"d": NodeWithStore(1, 90)}}, 1, 7, 90),
        (AT_7 | {"progress": GONE.replace(lost=9)}, 0, 7, 90),
        ({}, 0, -1, 0),
        ({"lost_store": EARLIER}, 3, 8, 50),
        ({"lost_store": EARLIER, "hosted": {"d": NodeWithStore(1, 50), "e": NodeWithStore(1, 49)}}, 2, 8, 50),
        ({"lost_store": EARLIER, "round": ROUND}, 5, 8, 90),
    ],
)
def test_how_many_members_of_a_lost_store_are_awaited(
    head: dict[str, Any], awaited: int, round: int, round_at: int
) -> None:
    lost = known_lost_store(Head(**head), revision=99, settings=b"", host="h", now=0.0)
    assert (lost.awaited, lost.round, lost.round_at) == (awaited, round, round_at)
    assert lost.generation == (2 if "lost_store" in head else 1)
