"""The steps that a member reports, and the note with them on its lease."""

import pytest

from rdzv.core.stuck.step_log import FINISHED, StepLog, StepNote
from store.messages import NOTE_BYTES_MAX


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_note_has_the_step_its_age_and_the_rate() -> None:
    clock = Clock()
    beats = StepLog(3, clock)
    before = beats.counts
    beats.beat(10)
    assert (before, beats.counts) == (False, True)
    clock.now += 1
    first = beats.current_note(away=False)
    assert (first.round, first.step, first.age, first.first, first.rate) == (3, 10, 1.0, True, 0.0)
    for step in (11, 12, 12):
        clock.now += 1
        beats.beat(step)
    later = beats.current_note(away=True)
    assert (later.step, later.age, later.first, later.away) == (12, 1.0, False, True), "the same step again is no step"
    assert later.rate == pytest.approx(2 / 3)
    clock.now += 5
    assert beats.current_note(away=False).rate == later.rate, "it is that of the last steps"


def test_a_busy_member_counts_as_quiet_only_after_its_stretch() -> None:
    clock = Clock()
    beats = StepLog(0, clock)
    beats.beat(0)
    checkpoint = beats.begin_busy(60, "checkpoint " * 10)
    clock.now += 20
    note = beats.current_note(away=False)
    assert (note.busy, note.what, note.age) == (40.0, ("checkpoint " * 10)[:64], 0.0)
    assert beats.quiet_since() == clock.now + 40
    beats.end_busy(checkpoint)
    clock.now += 3
    note = beats.current_note(away=False)
    assert (note.busy, note.what, note.age) == (0.0, "", 3.0)
    beats.begin_busy(10, "")
    clock.now += 15
    assert beats.current_note(away=False).age == 5.0, "longer than it has said"


def test_the_end_of_one_busy_stretch_does_not_end_another() -> None:
    """Regression: the first of two stretches to end also ended the other, in which the member was then dropped."""
    beats = StepLog(0, Clock())
    longer = beats.begin_busy(60, "checkpoint")
    shorter = beats.begin_busy(10, "evaluation")
    assert beats.counts, "its notes are sent, although it has begun no step"
    assert (beats.current_note(away=False).busy, beats.current_note(away=False).what) == (60.0, "checkpoint")
    beats.end_busy(shorter)
    assert (beats.current_note(away=False).busy, beats.current_note(away=False).what) == (60.0, "checkpoint")
    beats.end_busy(longer)
    assert beats.current_note(away=False).busy == 0.0


def test_a_member_that_waits_for_others_reports_it_after_a_moment() -> None:
    clock = Clock()
    beats = StepLog(0, clock)
    with beats.mark_wait(lambda: "key 'a'"):
        assert not beats.current_note(away=False).waits
        clock.now += 1
        note = beats.current_note(away=False)
        assert (note.waits, note.waited, note.what) == (True, 1.0, "key 'a'")
        assert note.round == FINISHED, "it says no steps, and is not judged by them"
    assert not beats.current_note(away=False).waits


def test_a_member_that_has_finished_belongs_to_no_round() -> None:
    beats = StepLog(4, Clock(), expected=True)
    assert beats.counts
    assert beats.current_note(away=False).step is None
    beats.finish_all_steps()
    assert beats.current_note(away=False).round == FINISHED


def test_the_longest_note_fits_into_a_keep_alive() -> None:
    long = StepNote(
        round=2**53, step=2**53, age=1e9 / 3, first=True, busy=1e9 / 7, what="\U0001f600" * 16, rate=1e6 / 7,
        waits=True, waited=1e9 / 9,
    )  # fmt: skip
    assert len(long.pack()) <= NOTE_BYTES_MAX
