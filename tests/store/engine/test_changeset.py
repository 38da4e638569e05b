"""Facts: the changes of one step, and which of several changes is the last."""

from store.engine.changeset import ChangeSet

A, B = b"a" * 16, b"b" * 16


def test_sessions_that_came_and_went_in_one_step_leave_nothing_but_their_numbers() -> None:
    """While a disk is full, every one of them was kept."""
    facts = ChangeSet()
    for number in range(1, 1001):
        facts.note_session_opened(b"%016d" % number, number)
        facts.note_session_ended(b"%016d" % number)
    assert facts.sessions == {}
    assert not facts._new
    assert facts.last_session == 1000, "they are used up"
    assert facts, "which must be made durable"


def test_a_session_that_went_came_again_and_went_in_one_step_is_gone() -> None:
    facts = ChangeSet()
    facts.note_session_ended(A)
    facts.note_session_opened(A, 7)
    facts.note_session_ended(A)
    assert facts.sessions == {A: None}
