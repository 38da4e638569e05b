"""Which knowledge of a lost store stands, and for whom."""

from __future__ import annotations

import pytest

from rdzv.core.hosts.lost_store import survivor_ranks
from rdzv.core.state import LostStore, NodeRecord


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
    assert survivor_ranks(records, lost) == {"a": 1}
    assert survivor_ranks(records, None) == {}
