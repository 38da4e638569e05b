"""Facts: what one step adds, and what of it has the last word."""

from __future__ import annotations

import pytest

from store.facts import Facts, KeptReply, SavedLease
from store.messages import Done, Event

A, B = b"a" * 16, b"b" * 16


def test_a_step_that_added_nothing_need_not_be_made_durable() -> None:
    assert not Facts()


@pytest.mark.parametrize(
    "facts",
    [
        Facts(revisions=[(Event(kind="delete", revision=1, key="k"),)]),
        Facts(granted=[SavedLease(id=1, ttl=1.0, disconnect_ttl=None, anonymous=False)]),
        Facts(ended=[1]),
        Facts(replies=[KeptReply(session_id=A, acknowledged=0, request_id=1, response=Done())]),
        Facts(sessions={A: 1}),
        Facts(sessions={A: None}),
    ],
)
def test_whatever_was_added_must_be_made_durable(facts: Facts) -> None:
    assert facts


def test_a_session_that_came_and_went_in_one_step_is_gone() -> None:
    facts = Facts()
    facts.opened(A, 7)
    facts.forgotten(A)
    assert facts.sessions == {A: None}
    assert facts.last_session == 7, "its number is used up"


def test_a_session_that_went_and_came_again_in_one_step_is_the_new_one() -> None:
    facts = Facts()
    facts.forgotten(A)
    facts.opened(A, 8)
    facts.opened(B, 9)
    assert facts.sessions == {A: 8, B: 9}
    assert facts.last_session == 9
