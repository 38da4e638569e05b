"""`decide` returns only the first act that is due, and does not change the picture."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from rdzv.core.decision import Act, ApplyResize, CommitRound, Expel, Idle, WriteRoundProgress, WriteRoundStop, decide
from rdzv.core.state import MOVES, AnnouncedDrain, Closed, Head, NodeRecord, Progress, Unban
from rdzv.core.stopping import LastBegun, Resized, RoundStop
from rdzv.core.stuck.accusing import Accusation
from rdzv.core.view import CommitRejection, Picture, StandstillReport, StopAnswer, StuckMember
from store import Event
from store.errors import LimitExceeded
from tests.support.hand_fed import NODES, HandFed

RESIZED = Head(resized=Resized(min_nodes=2, max_nodes=4, revision=90))
UNBANNED = Head(unbans={"x": Unban(who="x", revision=91)})


def in_steps() -> HandFed:
    """A run whose round 0 has the members a, b and c, which call `check`."""
    run = HandFed(needed=3, capacity=6)
    run.arrive("a", "b", "c", progress=0)
    run.now += run.rules.last_call
    run.commit()
    assert run.round is not None
    run.view.note_round(run.round.replace(in_steps=True), run.members, now=run.now)
    run.snapshot()
    return run


def arrival(run: HandFed, name: str) -> int:
    return next(member.arrival for member in run.members if member.node_id == name)


def stuck(run: HandFed, *names: str, **other: Any) -> None:
    for name in names:
        run.view.apply_fact(StuckMember(0, arrival(run, name), name, "stuck")._replace(**other))


def act_of(run: HandFed, **of_the_picture: Any) -> Act:
    """Decide twice, and verify that the picture is unchanged."""
    picture = Picture(view=run.view, **({"head": Head()} | of_the_picture))
    before = pickle.dumps(run.view)
    act = decide(picture, run.rules, now=run.now)
    assert pickle.dumps(run.view) == before
    assert act == decide(picture, run.rules, now=run.now)
    return act


def told(run: HandFed, **of_the_picture: Any) -> dict[str, Any]:
    """Return the fields of a picture whose whole progress has been reported."""
    act = act_of(run, **of_the_picture)
    assert isinstance(act, WriteRoundProgress)
    return {"told": act.progress, "told_at": run.now, **of_the_picture}


def test_only_the_first_due_act_is_returned() -> None:
    run = in_steps()
    run.view.accusations.clear()
    stuck(run, "c")
    run.arrive("d")
    everything = replace(RESIZED, unbans=UNBANNED.unbans)
    assert isinstance(act_of(run, head=everything), ApplyResize)
    assert isinstance(act_of(run, head=everything, resized_at=90), Expel)
    run.die("c")
    assert isinstance(act_of(run, head=UNBANNED), WriteRoundProgress)
    assert isinstance(act_of(run, **told(run)), WriteRoundStop)


def test_a_round_is_completed_without_a_report_before_it() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    act = act_of(run, head=UNBANNED)
    assert isinstance(act, CommitRound)
    assert [record.node_id for record in act.members] == ["a", "b"]


def test_a_report_that_is_not_due_does_not_delay_a_question() -> None:
    run = in_steps()
    run.arrive("d")
    said = told(run)
    run.arrive("e")  # the arrival of a second newcomer is reported a moment later
    act = act_of(run, **said)
    assert isinstance(act, WriteRoundStop)
    assert act.stop.why == "2 nodes waiting to join"
    run.view.agreement.note_written(act.stop.replace(revision=70))
    wait = act_of(run, **said)
    assert isinstance(wait, Idle)
    assert wait.until == run.now + 0.05


def test_the_members_are_asked_and_then_told() -> None:
    run = in_steps()
    run.arrive("d")
    said = told(run)
    question = act_of(run, **said)
    assert isinstance(question, WriteRoundStop)
    run.view.agreement.note_written(question.stop.replace(revision=70))
    assert isinstance(act_of(run, **said), Idle), "it is not asked again before the watch brings it"
    run.view.apply_fact(StopAnswer())
    for name, step in (("a", 4), ("b", 5), ("c", None)):
        run.view.apply_fact(StopAnswer(name, LastBegun(round=0, step=step)))
    decision = act_of(run, **said)
    assert isinstance(decision, WriteRoundStop)
    assert (decision.stop.step, decision.over) == (6, 70)
    run.view.agreement.note_written(decision.stop.replace(revision=71))
    assert isinstance(act_of(run, **said), Idle)


CLOSED = {"closed": Closed(reason="done")}


@pytest.mark.parametrize(
    ("story", "head", "capacity", "why", "for_newcomers"),
    [
        ("arrive d", {}, 6, "1 node waiting to join", True),
        ("arrive d", {"drains": {"d": AnnouncedDrain(until=2000.0, reason="")}}, 6, "1 node waiting to join", True),
        ("arrive d", {"drains": {"a": AnnouncedDrain(until=2000.0, reason="")}}, 6, "a to leave", False),
        ("arrive d", {"moves": True}, 6, MOVES, False),
        ("arrive d", CLOSED, 6, "the run is closed: done", False),
        ("arrive d", {}, 2, "the run was resized to at most 2 nodes", False),
    ],
)
def test_why_the_members_are_asked_to_leave(
    story: str, head: dict[str, Any], capacity: int, why: str, for_newcomers: bool
) -> None:
    run = in_steps()
    run.play(story)
    run.rules = replace(run.rules, needed=2, capacity=capacity)
    act = act_of(run, **told(run, head=Head(**head)))
    assert isinstance(act, WriteRoundStop)
    assert (act.stop.why, act.stop.for_newcomers) == (why, for_newcomers)


@pytest.mark.parametrize(
    ("story", "head", "step"),
    [("", {}, 6), ("leave c", {}, 6), ("", CLOSED, 6), ("leave c", CLOSED, None), ("die c", CLOSED, None)],
)
def test_in_a_closing_run_all_leave_at_once_if_one_has_gone(story: str, head: dict[str, Any], step: int | None) -> None:
    run = in_steps()
    run.arrive("d")
    run.play(story)
    run.view.apply_fact(StopAnswer())
    for name in "abc":
        run.view.apply_fact(StopAnswer(name, LastBegun(round=0, step=5)))
    said = told(run, head=Head(stop=RoundStop(round=0, why="why", revision=70), **head))
    act = act_of(run, **said)
    assert isinstance(act, WriteRoundStop)
    assert (act.stop.decided, act.stop.step) == (True, step)


@pytest.mark.parametrize(("noted_at", "first", "count"), [(0, 1, 16), (3, 4, 16), (10, 11, 10), (20, 0, 0)])
def test_lifted_bans_are_noted_in_order_and_some_at_once(noted_at: int, first: int, count: int) -> None:
    unbans = {f"{30 - number}": Unban(who="x", revision=number) for number in range(1, 21)}
    run = in_steps()
    said = told(run)
    act = act_of(run, **said | {"head": Head(unbans=unbans), "unbanned_at": noted_at})
    noted = [unban.revision for unban in act.unbans.values()] if isinstance(act, WriteRoundProgress) else []
    assert noted == [*range(first, first + count)]
    run = HandFed()
    act = act_of(run, head=Head(unbans=unbans))
    assert isinstance(act, WriteRoundProgress)
    assert act.unbans == {}, "the history begins with the first round"


def test_two_members_are_expelled_one_by_one_and_both_losses_stay_reported() -> None:
    run, lost = in_steps(), []
    stuck(run, "b", "c")
    said: dict[str, Any] = {}
    while isinstance(act := act_of(run, **said), Expel):
        run.view.why_lost[act.node_id] = act.why
        said = {"told": act.progress, "told_at": run.now}
        run.die(act.node_id)
        lost.append(act.progress.lost_ids)
    assert lost == [("b",), ("b", "c")]
    assert run.view.why_gone == {"b": "stuck", "c": "stuck"}
    assert isinstance(act, WriteRoundStop | WriteRoundProgress | Idle)
    assert act.progress.lost_ids == ("b", "c")


def test_two_accusers_are_believed() -> None:
    run = in_steps()
    for by in "ab":
        said = Accusation(round=0, accused="c", by=by, why="it is silent").pack()
        run.feed(Event(kind="put", revision=80, key=f"{NODES}/accused/c/{by}", value=said))
    act = act_of(run)
    assert isinstance(act, Expel)
    assert (act.node_id, act.arrival) == ("c", arrival(run, "c"))


@pytest.mark.parametrize("other", [{"round": 1}, {"arrival": 1000}, {"node_id": "x"}])
def test_a_fact_of_another_round_or_arrival_changes_nothing(other: dict[str, Any]) -> None:
    run = in_steps()
    stuck(run, "c", **other)
    run.view.apply_fact(StandstillReport(1, "no member gets on"))
    act = act_of(run)
    assert isinstance(act, WriteRoundProgress)
    assert act.progress.standstill == ""


def test_an_old_fact_about_a_member_that_joined_again_does_not_expel_it() -> None:
    run = in_steps()
    stuck(run, "c")
    run.put("c", NodeRecord(node_id="c", incarnation="2", address="c", port=1, arrived_after=0).pack())
    assert isinstance(act_of(run), WriteRoundProgress)
    run.arrive("a", "b")
    run.commit()
    assert isinstance(act_of(run), WriteRoundProgress)


def test_a_full_store_is_retried_later_and_the_problem_is_reported() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    obstacle = CommitRejection(run.now + 1.0, LimitExceeded("no room"))
    act = act_of(run, obstacle=obstacle)
    assert isinstance(act, WriteRoundProgress)
    assert act.progress.problem == "the store does not take it: no room"
    wait = act_of(run, obstacle=obstacle, told=act.progress, told_at=run.now)
    assert isinstance(wait, Idle)
    assert (wait.until, wait.error) == (run.now + 1.0, obstacle.error)
    run.now += 1.0
    assert isinstance(act_of(run, obstacle=obstacle), CommitRound)


def test_a_wait_lasts_until_the_first_due_moment() -> None:
    run = HandFed(needed=2, capacity=4, last_call=30.0)
    run.arrive("a", "b")
    said = told(run)
    wait = act_of(run, **said)
    assert isinstance(wait, Idle)
    assert wait.until == run.now + 3.0, "a last call is told anew each tenth of it"
    old: Progress = said["told"]
    assert act_of(run, told=old, told_at=run.now) == wait
