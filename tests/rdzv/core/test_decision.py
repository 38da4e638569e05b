"""What should happen and why: `decide`, its words, when they are told, what a node makes of it, and what it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.decision import (
    LAST_CALL_GRACE,
    Complete,
    JoinClock,
    Me,
    Parked,
    Refused,
    RoundToCheck,
    Rules,
    Wait,
    explain,
    follow,
    report_due,
)
from rdzv.core.ranks import by_arrival, survivors_first
from rdzv.core.round import Round
from rdzv.core.state import (
    Change,
    Closed,
    Coordinator,
    Dropped,
    Head,
    NodeRecord,
    NodesLeft,
    NodesLost,
    NodesWaiting,
    Phase,
    Progress,
)
from rdzv.errors import RendezvousSettingsError
from rdzv.membership import changes_since
from store.messages import Event
from tests.support.hand_fed import HandFed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def round_of(*names: str, **rules: Any) -> HandFed:
    """A run whose first round these nodes have just completed."""
    run = HandFed(**{"needed": len(names), "capacity": len(names), **rules})
    run.arrive(*names)
    run.now += run.rules.last_call
    assert run.commit() == list(names)
    return run


def until(run: HandFed) -> float | None:
    decision = run.decide()
    assert isinstance(decision, Wait)
    return decision.until


# Deciding.


def test_too_few_nodes_wait_for_more_without_a_timer() -> None:
    run = HandFed(needed=2)
    assert run.decide() == Wait(until=None, progress=Progress(phase=Phase.GATHERING, needed=2, capacity=4))
    run.arrive("a")
    assert until(run) is None
    assert (run.progress.phase, run.progress.joined) == (Phase.GATHERING, 1)


def test_enough_nodes_wait_for_the_last_call_to_be_over() -> None:
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b")
    assert until(run) == run.now + 30
    assert run.progress.phase is Phase.LAST_CALL
    assert run.progress.last_call_left == 30
    run.now += 29.9
    assert run.completes() is None
    run.now += 0.1
    assert run.completes() == ["a", "b"]


def test_all_there_is_room_for_complete_at_once() -> None:
    run = HandFed(needed=2, capacity=3)
    run.arrive("a", "b", "c")
    assert run.completes() == ["a", "b", "c"]
    assert run.progress.last_call_left is None


def test_a_completed_round_waits_for_its_members_to_leave_it() -> None:
    run = round_of("a", "b", "c", needed=2, capacity=4)
    run.arrive("a", "b")
    assert run.progress.phase is Phase.COMPLETE
    assert run.completes() is None
    run.now += 600
    assert run.completes() is None
    assert until(run) is None
    run.arrive("c")
    assert run.completes() == ["a", "b", "c"]


def test_while_members_remain_it_looks_again_when_the_last_call_ends() -> None:
    run = round_of("a", "b", "c", needed=2, capacity=4, last_call=30)
    run.arrive("a", "b")
    assert until(run) == run.now + 30
    run.arrive("x", "y")
    assert until(run) is None, "full: no last call to wait for"


def test_a_re_rendezvous_does_not_wait_for_strangers() -> None:
    run = round_of("a", "b", "c", needed=2, capacity=4)
    run.die("c")
    run.arrive("b", "a")
    assert run.completes() == ["a", "b"]


def test_a_re_rendezvous_waits_for_strangers_if_told_to() -> None:
    run = round_of("a", "b", "c", needed=2, capacity=4, early_last_call=False, last_call=30)
    run.die("c")
    run.arrive("b", "a")
    assert run.completes() is None
    assert until(run) == run.now + 30
    run.now += 30
    assert run.completes() == ["a", "b"]


def test_the_first_round_has_its_last_call_even_if_early_ones_are_allowed() -> None:
    run = HandFed(needed=1, capacity=2, early_last_call=True)
    run.arrive("a")
    assert run.completes() is None


def test_a_closed_run_decides_nothing_ever() -> None:
    run = HandFed(needed=1, capacity=1)
    run.arrive("a")
    run.closed = True
    assert isinstance(run.decide(), Wait)
    assert until(run) is None
    assert run.progress.phase is Phase.CLOSED
    assert run.progress.last_call_left is None


def test_nothing_is_decided_on_half_a_picture() -> None:
    run = HandFed(needed=1, capacity=1)
    run.arrive("a")
    run.feed(Event(kind="reset", revision=0))
    with pytest.raises(AssertionError, match="half a picture"):
        run.decide()


def test_members_of_the_last_round_come_before_newcomers_who_were_earlier() -> None:
    run = round_of("a", "b", needed=2, capacity=2)
    run.arrive("x", "b", "a")
    assert run.completes() == ["a", "b"]


def test_newcomers_are_taken_in_as_they_came_also_by_a_successor() -> None:
    run = HandFed(needed=1, capacity=2)
    run.arrive("c", "b", "a")
    assert run.completes() == ["c", "b"]
    run.succeed(None)
    assert run.completes() == ["c", "b"]


def test_the_order_is_asked_with_the_chosen_in_order_of_arrival_and_the_last_ranks() -> None:
    asked: list[tuple[list[str], dict[str, int]]] = []

    def order(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
        asked.append(([record.node_id for record in arrivals], dict(previous)))
        return arrivals[::-1]

    run = HandFed(needed=2, capacity=2, order=order)
    run.arrive("a", "b")
    assert run.commit() == ["b", "a"]
    run.arrive("b", "x", "a")
    assert run.completes() == ["a", "b"]
    assert asked[-1] == (["b", "a"], {"b": 0, "a": 1})


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda arrivals, _: arrivals[1:], id="loses one"),
        pytest.param(lambda arrivals, _: [*arrivals, arrivals[0]], id="gives one two ranks"),
        pytest.param(lambda arrivals, _: [arrivals[0]] * len(arrivals), id="gives one all ranks"),
    ],
)
def test_an_order_that_loses_nodes_or_makes_some_up_is_refused(order: Any) -> None:
    run = HandFed(needed=2, capacity=2, order=order)
    run.arrive("a", "b")
    decision = run.decide()
    assert isinstance(decision, Wait)
    assert isinstance(decision.error, RendezvousSettingsError)
    assert "it must give each node it gets once" in decision.progress.problem
    assert decision.until == run.now + 1


@pytest.mark.parametrize(
    ("chosen", "said"), [(lambda _: (), "chose 0 nodes"), (lambda them: them[:1] * 2, "chose 2 nodes"), (None, "Type")]
)
def test_an_order_that_chooses_too_few_or_one_twice_is_refused(chosen: Any, said: str) -> None:
    def order(arrivals: Any, _: Any) -> Any:
        return arrivals

    order.choose = lambda candidates, kept, count: chosen(candidates)  # type: ignore[attr-defined]  # noqa: ARG005
    run = HandFed(needed=2, capacity=2, order=order)
    run.arrive("a", "b", "c")
    assert said in run.progress.problem


def test_an_order_that_fails_is_said_to_everybody_and_their_time_runs() -> None:
    """They waited for ever, because enough nodes were there, and the reason was in the log of one of them only."""

    def order(*_: Any) -> Any:
        raise LookupError("no topology" + "!" * 9999)

    run = HandFed(needed=2, capacity=3, last_call=5, order=order)
    run.arrive("a", "b")
    run.now += 4
    assert run.progress.problem == ""
    run.now += 1
    answer = run.follow("a")
    assert isinstance(answer, Parked)
    words = "2 nodes wait for a round, and it cannot be completed: rank_order fails with LookupError: no topology!"
    assert answer.reason.startswith(words)
    assert len(answer.reason) < 300, "every node is sent it"
    assert not answer.suspended
    assert report_due(SAID, 0.0, SAID.replace(problem="new"), nodes=9, now=1.0) == 1.0, "at once"


# Numbers of those who wait, and of spares.


def test_those_whom_a_regroup_would_admit_are_counted_as_waiting() -> None:
    run = round_of("a", "b", needed=2, capacity=3)
    assert run.progress.waiting == 0
    run.arrive("x")
    assert (run.progress.waiting, run.progress.spares, run.progress.spares_after) == (1, 0, None)
    run.arrive("y")
    assert (run.progress.waiting, run.progress.spares) == (1, 1)
    assert run.progress.spares_after == run.stored["x"][0]


def test_members_that_left_to_regroup_count_as_waiting() -> None:
    run = round_of("a", "b", needed=2, capacity=2)
    run.arrive("a")
    assert run.progress.waiting == 1


def test_below_the_minimum_a_regroup_would_admit_nobody() -> None:
    run = round_of("a", "b", "c", needed=3, capacity=3)
    run.die("b", "c")
    run.arrive("b")
    assert run.progress.waiting == 0
    run.arrive("c")
    assert run.progress.waiting == 2


def test_below_the_minimum_nobody_is_a_spare() -> None:
    # Three of four nodes, in units of four: all three were told that they were spares, and their join timeouts stood
    # still for ever.
    run = HandFed(needed=4, capacity=8, unit=4)
    run.arrive("a", "b", "c")
    assert (run.progress.spares, run.progress.spares_after) == (0, None)
    assert run.follow("a") == Parked(reason="3 of at least 4 nodes", suspended=False)


def test_an_incomplete_unit_is_spare_and_waits_for_the_rest_of_it() -> None:
    run = round_of("a", "b", needed=2, capacity=4, unit=2)
    run.arrive("x")
    assert (run.progress.waiting, run.progress.spares, run.progress.spares_after) == (0, 1, 0)
    assert isinstance(run.follow("x"), Parked)
    run.arrive("y")
    assert (run.progress.waiting, run.progress.spares, run.progress.spares_after) == (2, 0, None)


def test_members_left_without_room_do_not_count_as_spares_that_arrived() -> None:
    run = round_of("a", "b", "c", "d", needed=2, capacity=4, unit=2)
    run.die("a")
    assert (run.progress.live, run.progress.joined, run.progress.spares, run.progress.spares_after) == (3, 0, 0, None)


# Never what was not agreed on.

rules = st.builds(
    lambda unit, needed, more, early, order: Rules(
        needed=needed * unit,
        capacity=(needed + more) * unit,
        unit=unit,
        last_call=10.0,
        early_last_call=early,
        order=order,
    ),
    unit=st.integers(1, 3),
    needed=st.integers(1, 2),
    more=st.integers(0, 2),
    early=st.booleans(),
    order=st.sampled_from([survivors_first, by_arrival]),
)
happenings = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "arrive", "die", "leave", "wait", "succeed"]), st.integers(0, 7)),
    max_size=40,
)


@given(rules=rules, happenings=happenings)
def test_no_round_completes_otherwise_than_agreed(rules: Rules, happenings: list[tuple[str, int]]) -> None:
    run = HandFed()
    run.rules = rules
    run.succeed(None)
    rounds = -1
    for what, which in happenings:
        name = f"n{which}"
        match what:
            case "arrive":
                run.arrive(name)
            case "die" if name in run.stored:
                run.die(name)
            case "leave":
                run.leave(name)
            case "wait":
                run.now += which
            case "succeed":
                run.succeed(run.progress)
        live, waiting, began = set(run.view.live), dict(run.view.waiting), run.view.enough_since
        first = run.round is None
        decision = run.decide()
        if isinstance(decision, Wait):
            assert decision.until is None or decision.until > run.now, "or it would spin"
            continue
        size = len(decision.members)
        assert not live
        assert rules.needed <= size <= rules.capacity
        assert size % rules.unit == 0
        assert len({record.node_id for record in decision.members}) == size
        assert all(waiting[record.node_id] == record for record in decision.members)
        assert len(waiting) - size < rules.unit or size == rules.capacity, "whoever there is room for is in"
        assert began is not None
        over = run.now >= began + rules.last_call
        assert over or size == rules.capacity or (rules.early_last_call and not first)
        assert decision.number > rounds
        rounds = decision.number
        run.commit()


@given(joins=st.lists(st.floats(0, 9.9), max_size=8), early=st.booleans())
def test_joins_never_extend_a_last_call(joins: list[float], early: bool) -> None:
    run = HandFed(needed=2, capacity=99, last_call=10, early_last_call=early)
    run.arrive("a", "b")
    ends = run.now + 10
    for index, at in enumerate(sorted(joins)):
        run.now = ends - 10 + at
        run.arrive(f"late{index}")
        assert until(run) == ends
    run.now = ends
    assert len(run.completes() or ()) == 2 + len(joins)


# Words.

SAID = Progress(phase=Phase.GATHERING, round=7, joined=3, needed=4, capacity=8, live=2, last_call_left=4.2)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (None, "waiting for a coordinator"),
        (SAID, "3 of at least 4 nodes"),
        (SAID.replace(needed=1, joined=0), "0 of at least 1 node"),
        (SAID.replace(phase=Phase.LAST_CALL), "last call, 4.2 s left; 3 of at most 8 nodes"),
        (SAID.replace(phase=Phase.LAST_CALL, capacity=1), "last call, 4.2 s left; 3 of at most 1 node"),
        (SAID.replace(phase=Phase.LAST_CALL, last_call_left=None), "last call, 0.0 s left; 3 of at most 8 nodes"),
        (SAID.replace(phase=Phase.COMPLETE), "3 nodes waiting for round 7's 2 live members to leave"),
        (SAID.replace(phase=Phase.COMPLETE, joined=1, live=1), "1 node waiting for round 7's 1 live member to leave"),
        (SAID.replace(phase=Phase.COMPLETE, joined=0), "round 7 stands with 2 nodes"),
        (SAID.replace(phase=Phase.COMPLETE, joined=1, spares=1), "round 7 stands with 2 nodes, and 1 spare"),
        (SAID.replace(phase=Phase.COMPLETE, spares=3, live=1), "round 7 stands with 1 node, and 3 spares"),
        (SAID.replace(phase=Phase.COMPLETE, spares=1), "2 nodes waiting for round 7's 2 live members to leave"),
        (SAID.replace(phase=Phase.CLOSED), "the run is closed"),
    ],
)
def test_every_phase_is_explained_in_words_and_numbers(progress: Progress | None, words: str) -> None:
    assert explain(progress) == words


def test_the_words_say_what_is_left_of_the_last_call_now() -> None:
    said = SAID.replace(phase=Phase.LAST_CALL)
    assert explain(said, elapsed=1.5) == "last call, 2.7 s left; 3 of at most 8 nodes"
    assert explain(said, elapsed=99) == "last call, 0.0 s left; 3 of at most 8 nodes"


# When it is reported.


def test_the_first_report_is_due_at_once() -> None:
    assert report_due(None, 0.0, SAID, nodes=5, now=100.0) == 100.0


def test_what_is_not_new_is_not_reported() -> None:
    assert report_due(SAID, 90.0, SAID, nodes=5, now=100.0) is None
    blocked = SAID.replace(phase=Phase.COMPLETE)
    assert report_due(blocked, 90.0, blocked.replace(last_call_left=1.0), nodes=5, now=100.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.LAST_CALL},
        {"round": 8},
        {"waiting": 1},
        {"spares_after": 40},
        {"last_call_left": None},
        {"lost": 1},
        {"departed": 1},
    ],
)
def test_a_change_of_kind_is_reported_at_once(change: dict[str, Any]) -> None:
    assert report_due(SAID, 99.999, SAID.replace(**change), nodes=10_000, now=100.0) == 100.0


@pytest.mark.parametrize(
    ("nodes", "change", "pause"),
    [
        (1, {"joined": 2}, 0.05),
        (60, {"joined": 2}, 0.06),
        (500, {"joined": 2}, 1.5),  # nobody acts upon it: told a third as often
        (10_000, {"joined": 2}, 15.0),
        (500, {"waiting": 3}, 0.5),
        (1_000, {"lost": 3}, 1.0),
        (10_000, {"departed": 3}, 5.0),
    ],
)
def test_a_change_of_numbers_is_reported_the_less_often_the_more_nodes_hear_it(
    nodes: int, change: dict[str, Any], pause: float
) -> None:
    said = SAID.replace(waiting=2, lost=2, departed=2)
    more = said.replace(**change)
    assert report_due(said, 100.0, more, nodes=nodes, now=100.0) == pytest.approx(100.0 + pause)
    assert report_due(said, 80.0, more, nodes=nodes, now=100.0) == 100.0


@pytest.mark.parametrize(("left", "pause"), [(30.0, 3.0), (4.0, 1.0)])
def test_a_running_last_call_is_refreshed_every_second_or_tenth_of_it(left: float, pause: float) -> None:
    said = SAID.replace(phase=Phase.LAST_CALL, last_call_left=left + 1)
    now = said.replace(last_call_left=left)
    assert report_due(said, 100.0, now, nodes=5, now=100.1) == pytest.approx(100.0 + pause)
    assert report_due(said, 90.0, now, nodes=5, now=100.0) == 100.0


# Following.

ROUND = Round(number=3, term=9, size=2, buckets=1, host="h", port=1, revision=50)
HEAD = Head(coordinator=Coordinator(node_id="c", term=9), progress=SAID, progress_at=100.0)
CLOSED = Closed(reason="done", by="a")
LAST_CALL = SAID.replace(phase=Phase.LAST_CALL)
assert LAST_CALL.last_call_left is not None
UNTIL = HEAD.progress_at + LAST_CALL.last_call_left + LAST_CALL_GRACE
SPARES = SAID.replace(phase=Phase.COMPLETE, round=3, live=2, joined=3, spares=3, spares_after=60, capacity=2)
LATE = Me(arrival=61)


@pytest.mark.parametrize(
    ("me", "head", "answer"),
    [
        pytest.param(Me(arrival=40), Head(), Parked(reason="waiting for a coordinator"), id="nothing is known"),
        pytest.param(Me(arrival=40), HEAD, Parked(reason="3 of at least 4 nodes"), id="too few"),
        pytest.param(
            Me(arrival=40),
            replace(HEAD, progress=LAST_CALL),
            Parked(reason="last call, 3.2 s left; 3 of at most 8 nodes", suspended=True, until=UNTIL),
            id="a last call does not count against the timeout",
        ),
        pytest.param(
            Me(arrival=40),
            replace(HEAD, coordinator=None),
            Parked(reason="waiting for a new coordinator; at last, 3 of at least 4 nodes"),
            id="the coordinator is gone",
        ),
        pytest.param(
            Me(arrival=40),
            replace(HEAD, coordinator=None, progress=LAST_CALL),
            Parked(
                reason="waiting for a new coordinator; at last, last call, 3.2 s left; 3 of at most 8 nodes",
                suspended=True,
                until=UNTIL,
            ),
            id="nor does a last call whose coordinator is being replaced",
        ),
        pytest.param(Me(arrival=40), replace(HEAD, round=ROUND), RoundToCheck(round=ROUND), id="a later round"),
        pytest.param(Me(arrival=51), replace(HEAD, round=ROUND), Parked(reason="3 of at least 4 nodes"), id="before"),
        pytest.param(
            Me(arrival=40, passed_over=50),
            replace(HEAD, round=ROUND),
            Parked(reason="3 of at least 4 nodes"),
            id="a round that did not hold us",
        ),
        pytest.param(
            Me(arrival=40),
            replace(HEAD, round=ROUND, closed=CLOSED),
            RoundToCheck(round=ROUND),
            id="the round came first",
        ),
        pytest.param(Me(arrival=51), replace(HEAD, round=ROUND, closed=CLOSED), Refused(closed=CLOSED), id="closed"),
        pytest.param(Me(arrival=51), Head(closed=CLOSED), Refused(closed=CLOSED), id="closed, and nothing else"),
        pytest.param(
            LATE,
            replace(HEAD, progress=SPARES),
            Parked(reason="a spare: all 2 nodes that a round takes are there", suspended=True),
            id="a spare",
        ),
        pytest.param(
            LATE,
            replace(HEAD, progress=SPARES.replace(capacity=8, spares=1)),
            Parked(reason="a spare: a round would take 4 of the 5 nodes that are there", suspended=True),
            id="a spare beyond the unit",
        ),
        pytest.param(
            LATE,
            replace(HEAD, progress=SPARES, closed=CLOSED),
            Refused(closed=CLOSED, spare=True),
            id="a spare of a closed run",
        ),
        pytest.param(
            Me(arrival=60),
            replace(HEAD, progress=SPARES.replace(spares=2)),
            Parked(reason="1 node waiting for round 3's 2 live members to leave"),
            id="the last one for whom there is room",
        ),
        pytest.param(
            replace(LATE, known_round=3, was_member=True),
            replace(HEAD, progress=SPARES.replace(spares=2)),
            Parked(reason="1 node waiting for round 3's 2 live members to leave"),
            id="a member of the last round comes first",
        ),
        pytest.param(
            replace(LATE, known_round=2, was_member=True),
            replace(HEAD, progress=SPARES),
            Parked(reason="a spare: all 2 nodes that a round takes are there", suspended=True),
            id="but not a member of an earlier one",
        ),
        pytest.param(
            LATE,
            replace(HEAD, progress=SPARES.replace(joined=0, spares=0)),
            Parked(reason="round 3 stands with 2 nodes"),
            id="what was said of spares that are gone",
        ),
    ],
)
def test_a_node_follows_the_head(me: Me, head: Head, answer: Parked | RoundToCheck | Refused) -> None:
    assert follow(me, head, now=101.0) == answer


def test_members_beyond_the_unit_become_spares_once_a_round_has_passed_them_over() -> None:
    # Seven of eight came back, in units of four. The three left over were members once, so they were no spares, and
    # failed at the end of their join timeouts.
    names = [f"n{index}" for index in range(8)]
    run = round_of(*names, needed=4, capacity=8, unit=4)
    run.die("n7")
    run.arrive(*names[:7])
    assert run.commit() == names[:4]
    assert run.round is not None
    answer = run.follow("n6", known_round=run.round.number, was_member=True, passed_over=run.round.revision)
    assert isinstance(answer, Parked)
    assert answer.suspended
    assert answer.reason == "a spare: a round would take 4 of the 7 nodes that are there"


# The join timeout.


def test_a_join_clock_runs_out() -> None:
    clock = JoinClock(10.0, now=100.0)
    assert clock.deadline(100.0) == 110.0
    assert clock.left(104.0) == 6.0
    assert clock.deadline(104.0) == 110.0
    assert clock.left(110.0) == 0.0
    assert clock.left(999.0) == 0.0
    assert clock.deadline(999.0) == 999.0


def test_a_join_clock_stands_still_while_suspended() -> None:
    clock = JoinClock(10.0, now=100.0)
    clock.set(suspended=True, now=104.0)
    assert clock.deadline(200.0) is None
    assert clock.left(200.0) == 6.0
    clock.set(suspended=True, now=210.0)
    clock.set(suspended=False, now=300.0)
    clock.set(suspended=False, now=302.0)
    assert clock.left(303.0) == 3.0
    assert clock.deadline(303.0) == 306.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=12))
def test_a_join_clock_counts_the_time_that_was_not_suspended(spans: list[tuple[bool, float]]) -> None:
    now, used = 50.0, 0.0
    clock = JoinClock(20.0, now=now)
    for suspended, seconds in spans:
        clock.set(suspended=suspended, now=now)
        now += seconds
        used += 0.0 if suspended else seconds
    assert clock.left(now) == pytest.approx(max(20.0 - used, 0.0), abs=1e-6)


# Changes.

STANDS = Progress(phase=Phase.COMPLETE, round=3, live=2)
TOLD = STANDS.replace(lost=1, lost_ids=("x",), departed=2, departed_ids=("y", "z"), waiting=4)


def told(seen: Sequence[Change], progress: Progress | None, **fields: Any) -> list[Change]:
    head = Head(progress=progress, closed=fields.pop("closed", None))
    return changes_since(seen, head, round=fields.pop("round", ROUND), dropped=fields.pop("dropped", None))


def test_changes_begin_with_what_already_holds() -> None:
    assert told([], TOLD, closed=CLOSED, dropped="away for too long") == [
        CLOSED,
        NodesLost(1, ("x",)),
        NodesLeft(2, ("y", "z")),
        NodesWaiting(4),
        Dropped("away for too long"),
    ]


def test_where_nothing_has_happened_nothing_is_told() -> None:
    assert told([], STANDS) == []
    assert told([], None) == []


def test_each_thing_is_told_once_and_anew_when_it_has_changed() -> None:
    seen = told([], TOLD)
    assert told(seen, TOLD) == []
    assert told(seen, TOLD.replace(lost=2, lost_ids=("x", "w"))) == [NodesLost(2, ("x", "w"))]
    assert told(seen, TOLD, closed=CLOSED) == [CLOSED]


def test_it_is_told_when_nobody_waits_any_more_but_not_when_nobody_ever_did() -> None:
    seen = told([], STANDS.replace(waiting=2))
    assert seen == [NodesWaiting(2)]
    assert told(seen, STANDS) == [NodesWaiting(0)]
    assert told([NodesWaiting(0)], STANDS) == []


def test_what_is_said_of_another_round_is_not_told() -> None:
    assert told([], TOLD.replace(round=2)) == []
    assert told([], TOLD.replace(round=4)) == []
    assert told([], TOLD, round=None) == []


def test_closing_and_being_dropped_are_told_whatever_the_round() -> None:
    assert told([], None, round=None, closed=CLOSED, dropped="banned") == [CLOSED, Dropped("banned")]


reports = st.builds(
    Progress,
    phase=st.just(Phase.COMPLETE),
    round=st.integers(2, 4),
    waiting=st.integers(0, 2),
    lost=st.integers(0, 2),
    departed=st.integers(0, 2),
)


@given(st.lists(st.tuples(reports, st.booleans(), st.booleans()), max_size=10))
def test_no_change_is_told_twice_in_a_row(heard: list[tuple[Progress, bool, bool]]) -> None:
    seen: dict[type, Change] = {}
    for progress, closed, dropped in heard:
        news = told(
            list(seen.values()), progress, closed=CLOSED if closed else None, dropped="away" if dropped else None
        )
        for change in news:
            assert seen.get(type(change)) != change
            seen[type(change)] = change
        assert told(list(seen.values()), progress) == []
        if progress.round == ROUND.number:
            assert seen.get(NodesWaiting, NodesWaiting(0)) == NodesWaiting(progress.waiting)


def test_completing_carries_how_it_came_to_that() -> None:
    run = HandFed(needed=1, capacity=1)
    run.arrive("a")
    decision = run.decide()
    assert isinstance(decision, Complete)
    assert (decision.number, decision.progress.joined) == (0, 1)
