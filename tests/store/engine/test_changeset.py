"""Facts: what one step adds, and what of it has the last word."""

from __future__ import annotations

import pytest

from store.engine.changeset import Facts, KeptReply, SavedLease
from store.messages import Done, Event

A, B = b"a" * 16, b"b" * 16


def test_a_step_that_added_nothing_need_not_be_made_durable() -> None:
    assert not Facts()


@pytest.mark.parametrize(
    "facts",
    [
        Facts(revisions=[(Event(kind="delete", revision=1, key="k"),)]),
        Facts(leases={1: SavedLease(id=1, ttl=1.0)}),
        Facts(leases={1: None}),
        Facts(replies=[KeptReply(session_id=A, acknowledged=0, request_id=1, response=Done())]),
        Facts(sessions={A: 1}),
        Facts(sessions={A: None}),
    ],
)
def test_whatever_was_added_must_be_made_durable(facts: Facts) -> None:
    assert facts


def test_sessions_that_came_and_went_in_one_step_leave_nothing_but_their_numbers() -> None:
    """However many: while a disk is full they used to be kept, each of them."""
    facts = Facts()
    for number in range(1, 1001):
        facts.opened(b"%016d" % number, number)
        facts.forgotten(b"%016d" % number)
    assert facts.sessions == {}
    assert not facts._new
    assert facts.last_session == 1000, "they are used up"
    assert facts, "which must be made durable"


def test_a_session_that_went_came_again_and_went_in_one_step_is_gone() -> None:
    facts = Facts()
    facts.forgotten(A)
    facts.opened(A, 7)
    facts.forgotten(A)
    assert facts.sessions == {A: None}


def test_a_session_that_went_and_came_again_in_one_step_is_the_new_one() -> None:
    facts = Facts()
    facts.forgotten(A)
    facts.opened(A, 8)
    facts.opened(B, 9)
    assert facts.sessions == {A: 8, B: 9}
    assert facts.last_session == 9
