"""The engine's watches and parked waits: their events and answers, and the recipients."""

import pytest

from store import when
from store.messages import (
    Cancel,
    Delete,
    Done,
    Failed,
    FailureKind,
    Guarded,
    Listing,
    Put,
    Stats,
    Transact,
    Wait,
    Watch,
)
from tests.support.by_hand import Desk

USAGE, LIMIT, LEASE, CONDITION, COMPACTED, FORGOTTEN, *_ = FailureKind


def test_a_watch_that_was_cancelled_or_dropped_hears_no_more() -> None:
    desk = Desk()
    desk.ask(Watch(prefix=""), request_id=5)
    desk.ask(Watch(prefix=""), request_id=6)
    assert desk.ask(Cancel(target=5)) == Done()
    assert desk.engine.state.watches.remove(1, 6)
    assert not desk.engine.state.watches.remove(1, 6)
    assert desk.ask(Cancel(target=99)) == Done()
    desk.ask(Put("a", b""))
    assert desk.told == {}


def test_closing_a_connection_that_never_said_hello_is_no_matter() -> None:
    desk = Desk()
    desk.disconnect(77)
    assert desk.ask(Stats()).figures["sessions"] == 1


@pytest.mark.parametrize("there_first", [False, True])
def test_a_key_that_goes_while_others_are_missing_is_waited_for_again(there_first: bool) -> None:
    """A key that existed when the wait began and was deleted meanwhile was answered as None."""
    desk = Desk()
    if there_first:
        desk.ask(Put("a", b""))
    desk.ask(Wait(keys=("a", "b")), request_id=5)
    if not there_first:
        desk.ask(Put("a", b""))
    desk.ask(Delete("a"))
    desk.ask(Put("b", b""))
    assert desk.answers == {}
    desk.ask(Put("a", b""))
    answer = desk.answers[1, 5]
    assert isinstance(answer, Listing)
    assert None not in answer.entries


def test_a_wait_sees_a_revision_as_a_whole() -> None:
    """If one revision wrote the last key and deleted another, the wait was answered between the two."""
    desk = Desk()
    desk.ask(Put("b", b""))
    desk.ask(Wait(keys=("a", "b")), request_id=5)
    desk.ask(Transact(when=(), then=(Put("a", b""), Delete("b"))))
    assert desk.answers == {}
    desk.ask(Put("b", b""))
    assert (1, 5) in desk.answers


def test_a_guarded_wait_that_ends_and_is_fulfilled_at_once_has_ended() -> None:
    desk = Desk()
    desk.ask(Guarded(when=(when.missing("closed"),), request=Wait(keys=("a",))), request_id=5)
    desk.ask(Transact(when=(), then=(Put("a", b""), Put("closed", b""))))
    answer = desk.answers[1, 5]
    assert isinstance(answer, Failed)
    assert answer.kind is CONDITION


def test_nothing_is_kept_of_waits_that_are_over() -> None:
    desk = Desk()
    for number in range(4):
        desk.ask(Guarded(when=(when.missing("x"),), request=Wait(keys=("a", f"b{number}"))), peer=number)
    desk.ask(Put("a", b""), peer=9)
    desk.ask(Put("b0", b""), peer=9)
    desk.ask(Cancel(target=1), peer=1)
    desk.disconnect(2)
    desk.ask(Put("x", b""), peer=9)
    waits = desk.engine._waits
    assert (waits.parked, waits._at, waits._under, waits._by, waits.bytes) == ({}, {}, {}, {}, 0)
