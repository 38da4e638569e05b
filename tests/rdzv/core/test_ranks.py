"""Rank orders: each gives every node one rank, and is documented by a sentence that these tests hold it to."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.ranks import RankOrder, arrival_order, by_topology, keep_in_place, natsort_key, rank_order_named
from rdzv.core.state import NodeRecord


def came(*names: str) -> list[NodeRecord]:
    """Parse records in order of arrival: a/r2@3 is node "a" in rack r2, which asks for rank 3."""
    records = []
    for arrival, name in enumerate(names, start=1):
        rest, _, rank = name.partition("@")
        node_id, _, rack = rest.partition("/")
        attributes = {"domain": rack} if rack else {}
        wanted = int(rank) if rank else None
        records.append(
            NodeRecord(node_id=node_id, incarnation="1", arrival=arrival, attributes=attributes, requested_rank=wanted)
        )
    return records


def names_of(order: RankOrder, arrivals: list[NodeRecord], previous: dict[str, int] | None = None) -> list[str]:
    return [record.node_id for record in order(arrivals, previous or {})]


arrivals_and_previous = st.lists(
    st.builds(
        NodeRecord,
        node_id=st.text("ab01٣", min_size=1, max_size=4),
        incarnation=st.just("1"),
        requested_rank=st.none() | st.integers(-2, 9),
        attributes=st.dictionaries(st.just("domain"), st.text("r019", max_size=3), max_size=1),
    ),
    max_size=8,
    unique_by=lambda record: record.node_id,
).flatmap(
    lambda arrivals: st.tuples(
        st.just(arrivals), st.permutations([record.node_id for record in arrivals] + ["gone"]), st.integers(0, 9)
    )
)


@pytest.mark.some_of(3)
@pytest.mark.parametrize(
    "name", ["survivors", "in_place", "arrival", "name", "requested", "topology", "topology:domain"]
)
@given(case=arrivals_and_previous)
def test_every_order_gives_every_node_one_rank(name: str, case: tuple[list[NodeRecord], list[str], int]) -> None:
    arrivals, permuted, survivors = case
    previous = {node_id: rank for rank, node_id in enumerate(permuted[:survivors])}
    ordered = rank_order_named(name)(arrivals, previous)
    assert sorted(record.node_id for record in ordered) == sorted(record.node_id for record in arrivals)


@pytest.mark.parametrize(
    ("order", "arrivals", "previous", "ranks"),
    [
        # Survivors keep their order. Newcomers follow, in order of arrival or by name.
        ("survivors", "y d x c a", "a b c d", "a c d y x"),
        ("survivors", "new old", "- - old", "old new"),
        ("survivors", "x y h g f d c a", "a b c d e f g h", "a c d f g h x y"),
        ("survivors_then_name", "host10 host2 b host1 a", "", "a b host1 host2 host10"),
        ("survivors_then_name", "host10 host2 b host1 a", "host10 - - b", "host10 b a host1 host2"),
        # In place: newcomers take the ranks of lost nodes. Only members whose rank no longer exists move.
        ("in_place", "y d x b", "a b c d", "y b x d"),
        ("in_place", "e new c b", "a b c d e", "e b c new"),
        ("arrival", "b a", "a b", "b a"),
        ("name", "host10 host2 host1", "", "host1 host2 host10"),
        # Requested ranks: first come, first served; survivors come first in the gaps.
        ("requested", "a@2 b c@2 d@0", "", "d b a c"),
        ("requested", "a@5 b@0 c@-1", "", "b a c"),
        ("requested", "new old chosen@1", "- - - old", "old chosen new"),
        # Nodes of one domain are adjacent. A node without a domain is a domain of its own.
        ("topology", "a/r10 b/r2 c/r10 d/r2", "", "b d a c"),
        ("topology:domain", "a/r1 z", "", "z a"),
    ],
)
def test_an_order_gives_the_expected_ranks(order: str, arrivals: str, previous: str, ranks: str) -> None:
    before = {name: rank for rank, name in enumerate(previous.split()) if name != "-"}
    assert names_of(rank_order_named(order), came(*arrivals.split()), before) == ranks.split()
    assert rank_order_named(arrival_order) is arrival_order, "one's own is taken as it is"


@given(case=arrivals_and_previous)
def test_in_place_changes_only_the_necessary_ranks(case: tuple[list[NodeRecord], list[str], int]) -> None:
    arrivals, permuted, survivors = case
    previous = {node_id: rank for rank, node_id in enumerate(permuted[:survivors])}
    ordered = names_of(keep_in_place, arrivals, previous)
    for record in arrivals:
        rank = previous.get(record.node_id)
        if rank is not None and rank < len(arrivals):
            assert ordered[rank] == record.node_id


def test_natural_order_takes_numbers_of_any_length() -> None:
    # int() rejects more than 4,300 digits. Regression: a node with such a name would have stopped every coordinator.
    assert natsort_key("a" + "9" * 5000) < natsort_key("a1" + "0" * 5000)


def in_racks(racks: str) -> list[NodeRecord]:
    return [
        NodeRecord(node_id=f"{rack}{number}", incarnation="1", arrival=number, attributes={"rack": rack})
        for number, rack in enumerate(racks, start=1)
    ]


@pytest.mark.parametrize(
    ("racks", "count", "kept", "chosen"),
    [
        # Whole domains come before earlier arrivals ...
        ("aabbbb", 4, "", "bbbb"),
        ("abcabca", 3, "", "aaa"),
        ("aaabbccc", 5, "", "aaabb"),
        # ... domains of members come first, then those of earlier arrivals ...
        ("aabbcc", 4, "", "aabb"),
        ("aabbcc", 4, "cc", "ccaa"),
        # ... and a domain is divided only if the number cannot be reached otherwise.
        ("aaabbb", 4, "", "aaab"),
        ("aaaa", 2, "", "aa"),
        ("aaaabbbb", 2, "b", "bb"),
    ],
)
def test_choice_by_topology(racks: str, count: int, kept: str, chosen: str) -> None:
    taken = by_topology("rack").choose(in_racks(racks), in_racks(kept), count)
    assert "".join(record.attributes["rack"] for record in taken) == chosen


@given(racks=st.text("abcd", max_size=12), kept=st.text("abcd", max_size=3), share=st.floats(0, 1))
def test_of_the_domains_each_is_taken_whole_or_left_whole_but_for_one_at_most(
    racks: str, kept: str, share: float
) -> None:
    candidates = in_racks(racks)
    count = int(len(candidates) * share)
    chosen = by_topology("rack").choose(candidates, in_racks(kept), count)
    assert len({record.arrival for record in chosen}) == len(chosen) == count
    sizes = Counter(racks)
    taken = Counter(record.attributes["rack"] for record in chosen)
    divided = [rack for rack, size in sizes.items() if taken[rack] not in (0, size)]
    comes_out = any(
        sum(sizes[rack] for rack in some) == count
        for length in range(len(sizes) + 1)
        for some in itertools.combinations(sizes, length)
    )
    assert len(divided) == (0 if comes_out else 1)
