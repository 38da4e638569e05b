"""Orders: each gives every node one rank, and says which in words one can hold it to."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.ranks import (
    RankOrder,
    by_arrival,
    by_name,
    by_request,
    by_topology,
    in_place,
    natural,
    order_named,
    survivors_first,
    survivors_then_name,
)
from rdzv.core.state import NodeRecord
from rdzv.errors import RendezvousSettingsError


def came(*names: str, **fields: Any) -> list[NodeRecord]:
    return [
        NodeRecord(node_id=name, incarnation="1", arrival=arrival, **fields)
        for arrival, name in enumerate(names, start=1)
    ]


def wanting(**wanted: int | None) -> list[NodeRecord]:
    return [
        NodeRecord(node_id=name, incarnation="1", arrival=arrival, requested_rank=rank)
        for arrival, (name, rank) in enumerate(wanted.items(), start=1)
    ]


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


@pytest.mark.parametrize(
    "name", ["survivors", "in_place", "arrival", "name", "requested", "topology", "topology:domain"]
)
@given(case=arrivals_and_previous)
def test_every_order_gives_every_node_one_rank(name: str, case: tuple[list[NodeRecord], list[str], int]) -> None:
    arrivals, permuted, survivors = case
    previous = {node_id: rank for rank, node_id in enumerate(permuted[:survivors])}
    ordered = order_named(name)(arrivals, previous)
    assert sorted(record.node_id for record in ordered) == sorted(record.node_id for record in arrivals)


# Survivors.


def test_survivors_keep_their_order_and_newcomers_fill_in_behind_as_they_came() -> None:
    previous = {"a": 0, "b": 1, "c": 2, "d": 3}
    assert names_of(survivors_first, came("y", "d", "x", "c", "a"), previous) == ["a", "c", "d", "y", "x"]


def test_survivors_keep_their_order_and_newcomers_come_by_name() -> None:
    arrivals = came("host10", "host2", "b", "host1", "a")
    assert names_of(survivors_then_name, arrivals, {}) == ["a", "b", "host1", "host2", "host10"]
    assert names_of(survivors_then_name, arrivals, {"b": 3, "host10": 0}) == ["host10", "b", "a", "host1", "host2"]


def test_rank_zero_was_there_before_if_anybody_was() -> None:
    assert names_of(survivors_first, came("new", "old"), {"old": 7}) == ["old", "new"]


def test_survivors_move_down_by_as_many_as_were_lost_below_them() -> None:
    previous = {name: rank for rank, name in enumerate("abcdefgh")}
    ordered = names_of(survivors_first, came(*"xyhgfdca"), previous)  # b and e are gone
    moved = {name: previous[name] - ordered.index(name) for name in "acdfgh"}
    assert moved == {"a": 0, "c": 1, "d": 1, "f": 2, "g": 2, "h": 2}


# In place.


def test_in_place_newcomers_take_the_ranks_that_were_lost_and_nobody_else_moves() -> None:
    previous = {"a": 0, "b": 1, "c": 2, "d": 3}
    assert names_of(in_place, came("y", "d", "x", "b"), previous) == ["y", "b", "x", "d"]


def test_in_place_only_those_move_whose_rank_there_is_no_more() -> None:
    previous = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    assert names_of(in_place, came("e", "new", "c", "b"), previous) == ["e", "b", "c", "new"]


@given(case=arrivals_and_previous)
def test_in_place_changes_no_rank_that_it_need_not(case: tuple[list[NodeRecord], list[str], int]) -> None:
    arrivals, permuted, survivors = case
    previous = {node_id: rank for rank, node_id in enumerate(permuted[:survivors])}
    ordered = names_of(in_place, arrivals, previous)
    for record in arrivals:
        rank = previous.get(record.node_id)
        if rank is not None and rank < len(arrivals):
            assert ordered[rank] == record.node_id


# Arrival and name.


def test_by_arrival_asks_nothing_but_who_came_first() -> None:
    assert names_of(by_arrival, came("b", "a"), {"a": 0, "b": 1}) == ["b", "a"]


def test_by_name_knows_that_host10_comes_after_host2() -> None:
    assert names_of(by_name, came("host10", "host2", "host1")) == ["host1", "host2", "host10"]


def test_natural_order_takes_numbers_for_numbers_wherever_they_stand() -> None:
    names = ["", "2", "2a", "10", "a", "a1b2", "a1b10", "a2", "a02b", "a2b", "a10", "b"]
    shuffled = random.Random(1).sample(names, len(names))
    ordered = sorted(shuffled, key=natural)
    assert ordered == ["", "2", "2a", "10", "a", "a1b2", "a1b10", "a02b", "a2", "a2b", "a10", "b"]


def test_natural_order_takes_numbers_of_any_length() -> None:
    # int() refuses more than 4,300 digits: one node of that name would have stopped every coordinator.
    assert natural("a" + "9" * 5000) < natural("a1" + "0" * 5000)


@given(st.lists(st.text("ab019", max_size=4), max_size=6, unique=True))
def test_natural_order_does_not_depend_on_the_order_given(names: list[str]) -> None:
    assert sorted(names, key=natural) == sorted(random.Random(1).sample(names, len(names)), key=natural)


# Requests.


def test_requested_ranks_are_had_first_come_first_served_and_the_others_fill_the_gaps() -> None:
    assert names_of(by_request, wanting(a=2, b=None, c=2, d=0)) == ["d", "b", "a", "c"]


def test_a_rank_that_there_is_not_cannot_be_had() -> None:
    assert names_of(by_request, wanting(a=5, b=0, c=-1)) == ["b", "a", "c"]


def test_gaps_are_filled_by_survivors_first() -> None:
    assert names_of(by_request, wanting(new=None, old=None, chosen=1), {"old": 3}) == ["old", "chosen", "new"]


# Topology.


def test_nodes_of_one_domain_are_adjacent() -> None:
    racks = {"a": "r10", "b": "r2", "c": "r10", "d": "r2"}
    arrivals = [NodeRecord(node_id=name, incarnation="1", attributes={"rack": rack}) for name, rack in racks.items()]
    assert names_of(by_topology("rack"), arrivals) == ["b", "d", "a", "c"]


def test_nodes_that_say_nothing_of_their_domain_are_one_domain_of_their_own() -> None:
    silent = NodeRecord(node_id="z", incarnation="1")
    told = NodeRecord(node_id="a", incarnation="1", attributes={"rack": "r1"})
    assert names_of(by_topology("rack"), [told, silent]) == ["z", "a"]


def in_racks(racks: str) -> list[NodeRecord]:
    return [
        NodeRecord(node_id=f"{rack}{number}", incarnation="1", arrival=number, attributes={"rack": rack})
        for number, rack in enumerate(racks, start=1)
    ]


def chosen_of(racks: str, count: int, *, kept: str = "") -> str:
    chosen = by_topology("rack").choose(in_racks(racks), in_racks(kept), count)
    return "".join(record.attributes["rack"] for record in chosen)


def test_whole_domains_are_preferred_to_those_who_came_first() -> None:
    assert chosen_of("aabbbb", 4) == "bbbb"
    assert chosen_of("abcabca", 3) == "aaa"
    assert chosen_of("aaabbccc", 5) == "aaabb"


def test_domains_that_members_are_from_come_first_and_then_those_that_came_first() -> None:
    assert chosen_of("aabbcc", 4) == "aabb"
    assert chosen_of("aabbcc", 4, kept="cc") == "ccaa"


def test_a_domain_is_divided_only_if_it_does_not_come_out_otherwise() -> None:
    assert chosen_of("aaabbb", 4) == "aaab"
    assert chosen_of("aaaa", 2) == "aa"
    assert chosen_of("aaaabbbb", 2, kept="b") == "bb"


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


# Names of orders.


def test_orders_are_chosen_by_name_or_brought_along() -> None:
    assert order_named("survivors") is survivors_first
    assert order_named("survivors_then_name") is survivors_then_name
    assert order_named("in_place") is in_place
    assert order_named("arrival") is by_arrival
    assert order_named("name") is by_name
    assert order_named("requested") is by_request
    assert order_named(by_arrival) is by_arrival
    by_domain = order_named("topology")
    arrivals = [
        NodeRecord(node_id=name, incarnation="1", attributes={"domain": domain})
        for name, domain in (("a", "2"), ("b", "1"))
    ]
    assert names_of(by_domain, arrivals) == ["b", "a"]


@pytest.mark.parametrize("name", ["", "random", "topolog", "survivors:x"])
def test_a_name_of_no_order_is_refused_naming_those_there_are(name: str) -> None:
    with pytest.raises(
        RendezvousSettingsError, match="survivors, in_place, arrival, name, requested and topology:ATTRIBUTE"
    ):
        order_named(name)
