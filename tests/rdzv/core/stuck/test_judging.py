"""Judging of members: stuck, excused, or at a standstill in which none is dropped."""

from typing import Any

import pytest

from rdzv.core.stuck.judging import LastStepNote, StallDetector, StallRules, StuckVerdict
from rdzv.core.stuck.step_log import FINISHED, StepNote

EVERY = 0.5


class Watch:
    """A coordinator that checks twice a second, and has done so for a long time."""

    def __init__(self, **rules: Any) -> None:
        self.stalls = StallDetector(StallRules(**{"stall_timeout": 30.0, "notes_every": 3.0, **rules}))
        self.now = 1000.0
        self.look()
        self.pass_quietly(100)

    def pass_quietly(self, seconds: float, **of: LastStepNote) -> None:
        for _ in range(int(seconds / EVERY)):
            self.now += EVERY
            self.look(**of)

    def look(self, **of: LastStepNote) -> StuckVerdict:
        return self.stalls.judge(of, round=0, now=self.now, every=EVERY)

    def then(self, **of: LastStepNote) -> StuckVerdict:
        self.now += EVERY
        return self.look(**of)


def heard(step: int | None, age: float, *, ago: float = 0.1, round: int = 0, **more: Any) -> LastStepNote:
    return LastStepNote(note=StepNote(round=round, step=step, age=age, **more), ago=ago)


def test_the_member_behind_is_stuck_and_those_that_wait_for_it_are_not() -> None:
    verdict = Watch().then(a=heard(1203, 31), b=heard(1204, 30.5), c=heard(1204, 30.4))
    assert verdict == StuckVerdict(stuck={"a": "no step since 31 s, others are at 1,204; it is at 1,203"})


def test_a_member_that_begins_no_step_while_others_do_is_stuck_even_if_it_is_ahead() -> None:
    verdict = Watch().then(a=heard(900, 250), b=heard(7, 2), c=heard(20, 1))
    assert verdict.stuck == {"a": "no step since 4 min 10 s, others are at 7 to 20; it is at 900"}


def test_if_no_member_makes_progress_a_standstill_is_reported_and_none_is_dropped() -> None:
    verdict = Watch().then(a=heard(97, 30.1), b=heard(97, 30.2))
    assert verdict == StuckVerdict(standstill="no member has begun a step for 30 s, all are at 97; nobody is dropped")
    assert Watch().then(a=heard(97, 300)) == StuckVerdict(
        standstill="no member has begun a step for 30 s, all are at 97; nobody is dropped"
    )


def test_a_member_is_stuck_if_all_others_wait_in_the_rounds_store() -> None:
    verdict = Watch().then(a=heard(97, 31), b=heard(97, 31, waits=True), c=heard(97, 31, waits=True))
    assert verdict.stuck == {"a": "no step since 31 s, others wait for it at 97"}
    still = Watch().then(a=heard(97, 31, waits=True), b=heard(97, 31, waits=True)).standstill
    assert still == "no member has begun a step for 30 s, all are at 97; nobody is dropped"
    apart = Watch(notes_every=20.0).then(a=heard(96, 31), b=heard(97, 40, ago=18))
    assert apart.standstill == "no member has begun a step for 30 s; nobody is dropped", "a may wait for b"
    behind = Watch().then(a=heard(97, 31), b=heard(97, 31, waits=True), c=heard(98, 31, waits=True))
    assert list(behind.stuck) == ["a"], "b waits, for a perhaps"


def test_no_member_is_stuck_before_the_timeout() -> None:
    assert Watch().then(a=heard(1, 29.9, ago=2.0), b=heard(100, 0)) == StuckVerdict(), "it may have gone on since"
    assert [*Watch().then(a=heard(1, 30.0, ago=2.0), b=heard(100, 0)).stuck] == ["a"]


@pytest.mark.parametrize(("until_look", "stuck"), [(30.0, []), (30.5, ["a"])])
def test_an_excuse_holds_for_the_stall_timeout(until_look: float, stuck: list[str]) -> None:
    watch = Watch()
    watch.then(a=heard(100, 60), b=heard(101, 3, away=True))
    watch.pass_quietly(until_look - EVERY, a=heard(100, 60, ago=0.5), b=heard(101, 3))
    assert [*watch.then(a=heard(100, 90, ago=0.5), b=heard(101, 3)).stuck] == stuck


def test_a_first_step_has_its_own_limit_or_none() -> None:
    slow, fast = heard(0, 300, first=True), heard(50, 1)
    assert Watch().then(a=slow, b=fast) == StuckVerdict()
    assert list(Watch(first_step_timeout=200.0).then(a=slow, b=fast).stuck) == []
    patient = Watch(first_step_timeout=200.0)
    patient.pass_quietly(120)
    assert patient.then(a=slow, b=fast).stuck == {"a": "no step since 5 min, others are at 50; it is at 0"}
    patient = Watch(first_step_timeout=100.0, stall_timeout=None)
    loads = heard(None, 150, first=True)
    patient.pass_quietly(60, a=loads, b=fast)
    assert patient.then(a=loads, b=fast).stuck == {"a": "no step since 2 min 30 s, others are at 50"}


@pytest.mark.parametrize(
    "excuse",
    [heard(101, 3, busy=40.0, what="checkpoint"), heard(101, 3, away=True), heard(101, 3, ago=4.5)],
    ids=["busy", "away", "silent"],
)
def test_no_member_is_judged_while_one_is_busy_or_disconnected_and_shortly_after(excuse: LastStepNote) -> None:
    watch = Watch()
    quiet = heard(100, 60, waits=False)
    assert watch.then(a=quiet, b=excuse) == StuckVerdict()
    watch.pass_quietly(25, a=quiet, b=heard(101, 5))
    assert watch.then(a=heard(100, 85), b=heard(101, 5)) == StuckVerdict()
    watch.pass_quietly(5, a=quiet, b=heard(101, 5))
    assert list(watch.then(a=heard(100, 90), b=heard(101, 5)).stuck) == ["a"]


@pytest.mark.parametrize("almost", [heard(101, 3, ago=4.0), heard(101, 3, ago=4.0, busy=4.0, what="checkpoint")])
def test_a_member_whose_report_is_just_in_time_excuses_none(almost: LastStepNote) -> None:
    assert list(Watch().then(a=heard(100, 60), b=almost).stuck) == ["a"]


def test_no_member_is_judged_after_a_pause_of_the_coordinator() -> None:
    watch = Watch()
    watch.now += 60
    assert watch.look(a=heard(1, 90), b=heard(2, 1)) == StuckVerdict()


def test_each_round_is_judged_by_its_own_steps() -> None:
    watch = Watch()
    assert watch.then(a=heard(1, 90, round=7), b=heard(2, 1)) == StuckVerdict()
    assert watch.then(a=heard(1, 90), b=heard(2, 90, round=FINISHED)).stuck == {}
    assert (
        watch.stalls.judge({"a": heard(1, 90, round=1), "b": heard(2, 1, round=1)}, round=1, now=watch.now, every=9)
        == StuckVerdict()
    )


def test_a_member_for_which_the_others_wait_in_the_next_round_is_stuck() -> None:
    """The others had left at the agreed step: they waited until `join_timeout`, and no one was dropped."""
    watch = Watch()
    watch.then(a=heard(3, 90))
    verdict = watch.stalls.judge({"a": heard(3, 90)}, round=0, now=watch.now, every=EVERY, awaited=True)
    assert verdict == StuckVerdict(stuck={"a": "no step since 1 min 30 s, others wait for it at 3"})
