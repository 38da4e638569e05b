"""A node's arrival: every line of its table, what each answer means, and what one that comes too late must not do."""

from __future__ import annotations

import pytest

from rdzv.core.state import NodeRecord
from rdzv.node.part.arrival import TRANSITIONS, Arrival, Happening, State

RECORD = NodeRecord(
    node_id="a",
    incarnation="one",
    arrived_after=-1,
    address="host",
    port=1,
    payload=None,
    attributes={},
    requested_rank=None,
)


def arrival(*, in_state: State) -> Arrival[str]:
    """One that has come to this state by what may really happen."""
    made: Arrival[str] = Arrival()
    made.lease = "lease"
    if in_state is State.ABSENT:
        return made
    made.send(RECORD)
    if in_state is State.SENT:
        return made
    assert made.written(7)
    if in_state is not State.STANDING:
        made.taken_in()
    if in_state is State.WITHDRAWN:
        made.withdraw()
    return made


def test_in_any_state_the_lease_may_lapse_and_the_caller_may_go() -> None:
    for changes in TRANSITIONS.values():
        assert changes[Happening.GONE] is State.ABSENT
        assert changes[Happening.WITHDRAW] in (State.ABSENT, State.WITHDRAWN)


@pytest.mark.parametrize("answer", [Happening.WRITTEN, Happening.REFUSED, Happening.KEPT])
def test_no_answer_brings_back_what_has_ended(answer: Happening) -> None:
    for state in (State.ABSENT, State.WITHDRAWN):
        assert TRANSITIONS[state][answer] is state


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("happening", Happening)
def test_what_is_not_in_the_table_is_a_defect_and_changes_nothing(state: State, happening: Happening) -> None:
    one = arrival(in_state=state)
    after = TRANSITIONS[state].get(happening)
    if after is not None:
        one._happens(happening)
        assert one.state is after
        return
    with pytest.raises(AssertionError, match=f"an arrival that is {state.value} cannot {happening.value}"):
        one._happens(happening)
    assert one.state is state


def test_a_record_is_sent_only_on_a_lease_that_is_kept() -> None:
    one: Arrival[str] = Arrival()
    with pytest.raises(AssertionError, match="on a lease that is kept"):
        one.send(RECORD)
    assert one.state is State.ABSENT


def test_what_was_written_stands_at_its_revision() -> None:
    one = arrival(in_state=State.STANDING)
    assert one.revision == 7
    assert one.stands(7)
    assert not one.stands(6)
    assert one.record is not None
    assert one.record.arrival == 7


def test_a_lease_that_lapses_while_the_record_is_under_way_makes_the_answer_count_for_nothing() -> None:
    one = arrival(in_state=State.SENT)
    one.lapsed()
    assert not one.written(7)
    assert (one.state, one.record, one.revision) == (State.ABSENT, None, 0)


def test_a_withdrawal_makes_the_answer_count_for_nothing() -> None:
    one = arrival(in_state=State.SENT)
    withdrawal = one.withdraw()
    assert withdrawal.needed
    assert withdrawal.in_doubt, "only ending the lease takes back what may stand"
    assert withdrawal.lease == "lease"
    assert not one.written(7)
    assert one.state is State.WITHDRAWN


def test_a_member_that_is_refused_is_a_member_still() -> None:
    one = arrival(in_state=State.TAKEN_IN)
    one.send(RECORD)
    one.refused()
    assert one.state is State.TAKEN_IN
    assert one.stands(7)


@pytest.mark.parametrize(
    ("state", "needed"), [(State.ABSENT, False), (State.SENT, True), (State.STANDING, True), (State.TAKEN_IN, True)]
)
def test_what_is_to_be_taken_back_is_what_may_stand(state: State, needed: bool) -> None:
    assert arrival(in_state=state).withdraw().needed is needed


def test_once_the_lease_has_lapsed_nothing_is_to_be_taken_back() -> None:
    one = arrival(in_state=State.STANDING)
    one.lapsed()
    withdrawal = one.withdraw()
    assert not withdrawal.needed
    assert withdrawal.record is None
