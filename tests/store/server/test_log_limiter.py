"""Strangers cannot fill a log, and what it left out is counted."""

from __future__ import annotations

from store.server.log_limiter import AT_ONCE, PER_SECOND, Complaints


def test_a_flood_gets_so_many_lines_and_then_few_a_second() -> None:
    complaints = Complaints()
    said = sum(complaints.say(number / 3000) for number in range(30_000))  # ten seconds of it
    assert AT_ONCE + 9 * PER_SECOND <= said <= AT_ONCE + 11 * PER_SECOND
    assert complaints.take_unsaid() == 30_000 - said
    assert complaints.take_unsaid() == 0


def test_what_is_said_now_and_then_is_always_said() -> None:
    complaints = Complaints()
    assert all(complaints.say(number / PER_SECOND) for number in range(5 * AT_ONCE))
    assert complaints.take_unsaid() == 0


def test_after_a_quiet_hour_there_is_no_more_than_at_first() -> None:
    complaints = Complaints()
    assert sum(complaints.say(0.0) for _ in range(2 * AT_ONCE)) == AT_ONCE
    assert sum(complaints.say(3600.0) for _ in range(2 * AT_ONCE)) == AT_ONCE


def test_a_clock_that_stands_still_gives_nothing() -> None:
    complaints = Complaints()
    for _ in range(AT_ONCE):
        complaints.say(5.0)
    assert not complaints.say(5.0)
    assert not complaints.say(4.0)
