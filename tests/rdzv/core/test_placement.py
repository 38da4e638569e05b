"""A unit never straddles two domains; what does not fill one waits as a spare. Over real handlers, in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio
from hypothesis import given
from hypothesis import strategies as st

import rdzv
from rdzv.core.decision import Complete, Rules
from rdzv.core.ranks import by_request, by_topology, in_units, survivors_first
from rdzv.core.state import NodeRecord
from rdzv.testing import cluster
from tests.support.hand_fed import HandFed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rdzv.testing import Cluster, ClusterNode


def record(number: int, rack: str | None) -> NodeRecord:
    attributes = {} if rack is None else {"rack": rack}
    return NodeRecord(node_id=f"n{number}", incarnation="", arrival=number, attributes=attributes)


def test_units_are_filled_in_order_within_a_domain() -> None:
    records = [record(number, rack) for number, rack in enumerate(["a", "b", "a", "c", "b", "a", None, None, "b"])]
    placed = in_units(records, unit=2, attribute="rack")
    assert [one.node_id for one in placed] == ["n0", "n2", "n1", "n4", "n6", "n7"]


racks_or_none = st.sampled_from(["a", "b", "c", None])
rounds_of_arrivals = st.lists(  # of each round: who comes, on which rack they say they are, and whom they want to be
    st.dictionaries(st.integers(0, 8), st.tuples(racks_or_none, st.integers(0, 3)), min_size=1), min_size=1, max_size=4
)
placing = st.builds(
    lambda unit, most, order: Rules(
        needed=unit, capacity=most * unit, unit=unit, last_call=1.0, order=order, unit_within="rack"
    ),
    unit=st.integers(1, 3),
    most=st.integers(1, 4),
    order=st.sampled_from([survivors_first, by_request, by_topology("rack")]),
)


@given(rules=placing, arrivals=rounds_of_arrivals)
def test_each_round_has_as_many_units_as_there_are_and_none_straddles(
    rules: Rules, arrivals: list[dict[int, tuple[str | None, int]]]
) -> None:
    run = HandFed()
    run.rules = rules
    run.succeed(None)
    for coming in arrivals:
        run.leave(*[name for name in run.stored if int(name[1:]) not in coming])
        for number, (rack, requested) in coming.items():
            known = {} if rack is None else {"rack": rack}
            run.arrive(f"n{number}", attributes=known, requested_rank=requested)
        run.now += rules.last_call
        decision = run.decide()
        counts = Counter(rack for rack, _ in coming.values())
        whole = sum(count - count % rules.unit for count in counts.values())
        if not isinstance(decision, Complete):
            assert whole == 0, "nothing but the want of a unit keeps them"
            continue
        members = decision.members
        assert len(members) == min(whole, rules.capacity)
        for at in range(0, len(members), rules.unit):
            assert len({one.attributes.get("rack") for one in members[at : at + rules.unit]}) == 1
        run.commit()


def body(racks: list[str]) -> Callable[[ClusterNode], Awaitable[None]]:
    async def be_a_member(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url, attributes={"rack": racks[node.index]}):
            async with round:
                for step in range(10_000):
                    await round.check(step)
                    await anyio.sleep(1)

    return be_a_member


def racks_of(made: Cluster, racks: list[str]) -> list[list[str]]:
    """The racks of the last round's members, by rank, in pairs."""
    by_rank = [racks[int(name.removeprefix("node-"))] for name in made.rounds[-1].members]
    return [by_rank[at : at + 2] for at in range(0, len(by_rank), 2)]


def test_a_unit_never_straddles_two_racks_and_what_fills_none_is_a_spare() -> None:
    racks = ["r1", "r1", "r1", "r2", "r2", "r3"]
    with cluster(6, seed=1, min_nodes=2, max_nodes=6, node_unit=2, unit_within="rack", last_call_timeout=3) as made:
        made.run(body(racks))
        made.advance(6)
        assert sorted(racks_of(made, racks)) == [["r1", "r1"], ["r2", "r2"]]
        member = next(name for name in made.rounds[-1].members if name in ("node-0", "node-1", "node-2"))
        made.kill(int(member.removeprefix("node-")))
        made.advance(6)
        assert sorted(racks_of(made, racks)) == [["r1", "r1"], ["r2", "r2"]], "the spare of that rack has come in"
        made.kill(3)
        made.advance(6)
        assert racks_of(made, racks) == [["r1", "r1"]]


def test_enough_nodes_that_fill_no_unit_are_told_why_they_wait() -> None:
    racks = ["r1", "r2", "r2", "r3"]
    with cluster(4, seed=1, min_nodes=4, node_unit=2, unit_within="rack", last_call_timeout=1) as made:
        made.run(body(racks))
        made.advance(5)
        assert made.rounds == []
        why = "lie within one rack each, and fewer than 4 nodes fill whole ones: 1 in r1, 2 in r2, 1 in r3"
        assert any(why in line for line in made.story)
