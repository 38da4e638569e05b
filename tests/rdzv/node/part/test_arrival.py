"""A node's arrival: every row of its table, the meaning of each answer, and answers that come too late."""

import pytest

from rdzv.core.state import NodeRecord
from rdzv.node.member.arrival import TRANSITIONS, Arrival, ArrivalEvent, ArrivalState

RECORD = NodeRecord(node_id="a", incarnation="one", address="host", port=1)


def arrival(*, in_state: ArrivalState) -> Arrival[str]:
    """Return an arrival in this state, reached by possible transitions."""
    made: Arrival[str] = Arrival()
    made.lease = "lease"
    if in_state is not ArrivalState.ABSENT:
        made.on_send(RECORD)
    if in_state not in (ArrivalState.ABSENT, ArrivalState.SENT):
        assert made.on_written(7)
    if in_state in (ArrivalState.TAKEN_IN, ArrivalState.WITHDRAWN):
        made.on_accepted()
    if in_state is ArrivalState.WITHDRAWN:
        made.on_withdraw()
    return made


def test_expiry_and_withdrawal_are_possible_in_every_state_and_final() -> None:
    for state in ArrivalState:
        assert TRANSITIONS[ArrivalEvent.GONE][state] is ArrivalState.ABSENT
        assert TRANSITIONS[ArrivalEvent.WITHDRAW][state] in (ArrivalState.ABSENT, ArrivalState.WITHDRAWN)
    for state in (ArrivalState.ABSENT, ArrivalState.WITHDRAWN):
        for answer in (ArrivalEvent.WRITTEN, ArrivalEvent.REFUSED, ArrivalEvent.KEPT):
            assert TRANSITIONS[answer][state] is state


@pytest.mark.parametrize("state", ArrivalState)
@pytest.mark.parametrize("happening", ArrivalEvent)
def test_a_transition_outside_the_table_is_an_error_and_changes_nothing(
    state: ArrivalState, happening: ArrivalEvent
) -> None:
    one = arrival(in_state=state)
    after = TRANSITIONS[happening].get(state)
    if after is None:
        with pytest.raises(AssertionError, match=f"an arrival that is {state.value} cannot {happening.value}"):
            one._apply(happening)
    else:
        one._apply(happening)
    assert one.state is (after or state)


def test_a_record_is_sent_only_on_a_lease_that_is_kept() -> None:
    one: Arrival[str] = Arrival()
    with pytest.raises(AssertionError, match="on a lease that is kept"):
        one.on_send(RECORD)
    assert one.state is ArrivalState.ABSENT


def test_a_written_record_is_current_at_its_revision_until_it_is_withdrawn() -> None:
    one = arrival(in_state=ArrivalState.STANDING)
    assert one.record == RECORD.replace(arrival=7)
    assert (one.revision, one.is_recorded(7), one.is_recorded(6)) == (7, True, False)
    one.on_withdraw()
    assert not one.is_recorded(7)


@pytest.mark.parametrize("how", ["on_lease_lost", "on_withdraw"])
def test_the_answer_is_ignored_if_the_arrival_ended_while_the_record_was_under_way(how: str) -> None:
    one = arrival(in_state=ArrivalState.SENT)
    assert one.is_in_doubt
    getattr(one, how)()
    assert not one.on_written(7)
    assert (one.state, one.lease) == (
        (ArrivalState.ABSENT, None) if how == "on_lease_lost" else (ArrivalState.WITHDRAWN, "lease")
    )
    assert one.record is None


def test_a_member_whose_arrival_is_refused_is_still_a_member() -> None:
    one = arrival(in_state=ArrivalState.TAKEN_IN)
    one.on_send(RECORD)
    one.on_write_refused()
    assert one.state is ArrivalState.TAKEN_IN
    assert one.is_recorded(7)
