"""A unit never straddles two domains; the nodes that do not fill a unit are spares."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.decision import CommitRound, Rules
from rdzv.core.ranks import by_requested_rank, by_topology, fill_units, survivors_first
from rdzv.core.state import NodeRecord
from tests.support.hand_fed import HandFed


def record(number: int, rack: str | None) -> NodeRecord:
    attributes = {} if rack is None else {"rack": rack}
    return NodeRecord(node_id=f"n{number}", incarnation="", arrival=number, attributes=attributes)


def test_units_are_filled_in_order_within_a_domain() -> None:
    records = [record(number, rack) for number, rack in enumerate(["a", "b", "a", "c", "b", "a", None, None, "b"])]
    placed = fill_units(records, unit=2, attribute="rack")
    assert [one.node_id for one in placed] == ["n0", "n2", "n1", "n4", "n6", "n7"]


def test_units_have_the_order_of_their_first_records() -> None:
    records = [record(number, rack) for number, rack in ((9, "b"), (2, "a"), (1, "a"), (5, "b"))]
    assert [one.node_id for one in fill_units(records, unit=2, attribute="rack")] == ["n9", "n5", "n2", "n1"]


racks_or_none = st.sampled_from(["a", "b", "c", None])
rounds_of_arrivals = st.lists(  # for each round: the nodes that arrive, with the rack and the rank that each asks for
    st.dictionaries(st.integers(0, 8), st.tuples(racks_or_none, st.integers(0, 3)), min_size=1), min_size=1, max_size=4
)
placing = st.builds(
    lambda unit, most, order: Rules(
        needed=unit, capacity=most * unit, unit=unit, last_call=1.0, order=order, unit_within="rack"
    ),
    unit=st.integers(1, 3),
    most=st.integers(1, 4),
    order=st.sampled_from([survivors_first, by_requested_rank, by_topology("rack")]),
)


@given(rules=placing, arrivals=rounds_of_arrivals)
def test_each_round_has_all_units_that_can_be_filled_and_none_straddles(
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
        if not isinstance(decision, CommitRound):
            assert whole == 0, "nothing but the want of a unit keeps them"
            continue
        members = decision.members
        assert len(members) == min(whole, rules.capacity)
        for at in range(0, len(members), rules.unit):
            assert len({one.attributes.get("rack") for one in members[at : at + rules.unit]}) == 1
        run.commit()


def test_nodes_that_fill_no_unit_get_the_reason_of_the_wait() -> None:
    run = HandFed()
    run.rules = Rules(needed=4, capacity=4, unit=2, last_call=1.0, order=survivors_first, unit_within="rack")
    run.succeed(None)
    for name, rack in {"a": "r1", "b": "r2", "c": "r2", "d": "r3"}.items():
        run.arrive(name, attributes={"rack": rack})
    run.now += 1
    assert run.completes() is None
    assert "lie within one rack each, and fewer than 4 nodes fill whole ones: 1 in r1, 2 in r2, 1 in r3" in (
        run.progress.problem
    )
