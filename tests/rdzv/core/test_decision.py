"""`decide`: the act and its reason, reports of progress, the answers to waiting nodes, and members' changes."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.decision import (
    LAST_CALL_GRACE,
    CommitRound,
    EndJoining,
    Idle,
    JoinClock,
    Joiner,
    JoinerWaits,
    Rules,
    act_of_joiner,
    decide_round,
    next_progress_write_at,
    wait_reason_text,
)
from rdzv.core.ranks import arrival_order, survivors_first
from rdzv.core.round import Round
from rdzv.core.state import (
    MOVES,
    Change,
    Closed,
    CurrentCoordinator,
    Dropped,
    Head,
    LostStore,
    NodeRecord,
    NodesLeft,
    NodesLost,
    NodesWaiting,
    Phase,
    Progress,
)
from rdzv.errors import RendezvousSettingsError
from rdzv.membership import unreported_changes
from store.messages import Event
from tests.support.hand_fed import HandFed, round_of


def until(run: HandFed) -> float | None:
    decision = run.decide()
    assert isinstance(decision, Idle)
    return decision.until


# Deciding.


@pytest.mark.parametrize(
    ("story", "at_once", "in_the_end", "rules"),
    [
        pytest.param("die a b, arrive x y c", "cxy", "cxy", {}, id="all there is room for complete at once"),
        pytest.param("die c, arrive b a", "ab", "ab", {}, id="a re-rendezvous does not wait for strangers"),
        pytest.param("die c, arrive b a", None, "ab", {"early_last_call": False}, id="unless it is told to"),
        pytest.param("die c, arrive x y b a", "abx", "abx", {}, id="members come before earlier newcomers"),
        pytest.param("die a b c, arrive x y", None, "xy", {}, id="strangers alone wait"),
    ],
)
def test_the_members_of_the_next_round_and_its_time(
    story: str, at_once: str | None, in_the_end: str, rules: dict[str, Any]
) -> None:
    run = round_of("a", "b", "c", needed=2, capacity=3, last_call=30, **rules)
    run.play(story)
    assert run.completes() == (at_once and [*at_once])
    if at_once is None:
        assert until(run) == run.now + 30
    run.now += 30
    assert run.completes() == [*in_the_end]


@pytest.mark.parametrize(
    ("names", "known"),
    [pytest.param("xy", 0, id="they waited for the last round to end"), pytest.param("ab", -1, id="the job restarts")],
)
def test_if_no_member_that_knew_the_last_round_is_back_the_last_call_is_waited_for(names: str, known: int) -> None:
    run = round_of("a", "b", "c", needed=2, capacity=4, last_call=30)
    run.die("a", "b", "c")
    run.arrive(*names, arrived_after=known)
    assert until(run) == run.now + 30
    run.arrive("c")
    assert run.completes() is not None


@pytest.mark.parametrize(
    ("awaited", "passed", "told", "number"),
    [
        (3, 9.9, None, None),
        (2, 9.9, None, 8),
        (3, 10.0, None, 8),
        (3, 9.9, 1, None),  # the lost store has completed a round since this one's
        (3, 9.9, 0, 1),  # this store has completed a round since it heard of the other's
    ],
)
def test_the_first_round_in_another_store_waits_for_each_member_of_the_lost_stores_round(
    awaited: int, passed: float, told: int | None, number: int | None
) -> None:
    run = HandFed(needed=2, capacity=2)
    if told is not None:
        run.arrive("a", "b")
        run.commit()
    run.arrive("a", "b", lost_rank_of=(5, 0))
    lost = LostStore(generation=1, revision=9, round=7, round_at=5, awaited=awaited)
    told = 1 if run.round is None or told is None else run.round.revision + told
    head = Head(lost_store=lost, lost_store_at=run.now, lost_store_told=told)
    decision = decide_round(run.view, dataclasses.replace(run.rules, ttl=10.0), head, now=run.now + passed)
    assert (decision.number if isinstance(decision, CommitRound) else None) == number
    assert decision.progress.problem == (
        "1 of 3 nodes of round 7, whose store was lost, may still be at work" if number is None else ""
    )


@pytest.mark.parametrize(
    ("early", "lost_rank_of", "is_first", "members"),
    [
        (True, (5, 1), True, "ba"),  # by the ranks in the lost store
        (False, (5, 1), True, None),
        (True, (4, 1), True, None),  # of an earlier round than the lost store's last one
        (True, (5, 1), False, "ab"),
    ],
)
def test_members_of_the_lost_stores_last_round_wait_for_no_others(
    early: bool, lost_rank_of: tuple[int, int], is_first: bool, members: str | None
) -> None:
    run = HandFed(needed=2, capacity=2)
    if not is_first:
        run.arrive("a", "b")
        run.commit()
    run.rules = dataclasses.replace(run.rules, capacity=3, early_last_call=early)
    run.arrive("a", lost_rank_of=lost_rank_of)
    run.arrive("b", lost_rank_of=(lost_rank_of[0], 0))
    lost = LostStore(generation=1, revision=9, round=7, round_at=5, awaited=0)
    head = Head(lost_store=lost, lost_store_at=run.now, lost_store_told=run.revision + 1)
    decision = decide_round(run.view, run.rules, head, now=run.now)
    completed = [record.node_id for record in decision.members] if isinstance(decision, CommitRound) else None
    assert completed == (members and [*members])


def test_no_round_is_completed_while_the_store_moves_or_makes_no_whole_units() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    assert decide_round(run.view, run.rules, Head(moves=True), now=run.now).progress.problem == MOVES
    for name in "ab":
        run.arrive(name, attributes={"rack": name})
    run.rules = dataclasses.replace(run.rules, unit=2, unit_within="rack")
    decision = run.decide()
    assert isinstance(decision, Idle)
    assert (decision.until, "rack" in decision.progress.problem) == (None, True)


def test_a_round_whose_rank_0_no_other_host_reaches_is_not_completed() -> None:
    run = HandFed(needed=2, capacity=2)
    for name in "ab":
        run.arrive(name, address="127.0.0.1", sends_from="127.0.0.1", store_at="127.0.0.1", machine=name)
    decision = run.decide()
    assert isinstance(decision, Idle)
    assert decision.until is None
    assert "node a would be rank 0 at 127.0.0.1, where no other host reaches it" in decision.progress.problem


def test_nothing_is_decided_during_a_reset() -> None:
    run = HandFed(needed=1, capacity=1)
    run.arrive("a")
    run.feed(Event(kind="reset", revision=0))
    with pytest.raises(AssertionError, match="the picture is complete"):
        run.decide()


def test_newcomers_are_accepted_in_order_of_arrival_also_by_a_successor() -> None:
    run = HandFed(needed=1, capacity=2)
    run.arrive("c", "b", "a")
    assert run.completes() == ["c", "b"]
    run.succeed(None)
    assert run.completes() == ["c", "b"]


def test_the_order_gets_the_chosen_nodes_by_arrival_and_the_last_ranks() -> None:
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


def choosing(chosen: Any) -> Any:
    def order(arrivals: Any, _: Any) -> Any:
        return arrivals

    order.choose = lambda candidates, kept, count: chosen(candidates)  # type: ignore[attr-defined]  # noqa: ARG005
    return order


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda arrivals, _: arrivals[1:], id="loses one"),
        pytest.param(lambda arrivals, _: [*arrivals, arrivals[0]], id="gives one two ranks"),
        pytest.param(lambda arrivals, _: [arrivals[0]] * len(arrivals), id="gives one all ranks"),
        pytest.param(choosing(lambda _: ()), id="chooses no node"),
        pytest.param(choosing(lambda them: them[:1] * 2), id="chooses one twice"),
        pytest.param(choosing(None), id="fails to choose"),
    ],
)
def test_an_order_that_loses_nodes_or_makes_some_up_is_refused(order: Any) -> None:
    run = HandFed(needed=2, capacity=2, order=order)
    run.arrive("a", "b", "c")
    decision = run.decide()
    assert isinstance(decision, Idle)
    assert isinstance(decision.error, RendezvousSettingsError | TypeError)
    assert decision.progress.problem
    assert decision.until == run.now + 1


def test_every_node_is_told_of_a_failing_order_and_its_join_timeout_runs() -> None:
    """Regression: enough nodes were there, so no join timeout ran, and the reason was in the log of one node only."""

    def order(*_: Any) -> Any:
        raise LookupError("no topology" + "!" * 9999)

    run = HandFed(needed=2, capacity=3, last_call=5, order=order)
    run.arrive("a", "b")
    run.now += 4
    assert run.progress.problem == ""
    run.now += 1
    answer = run.act_of_joiner("a")
    assert isinstance(answer, JoinerWaits)
    words = "2 nodes wait for a round, and it cannot be completed: rank_order fails with LookupError: no topology!"
    assert answer.reason.startswith(words)
    assert len(answer.reason) < 300, "every node is sent it"
    assert not answer.suspended
    assert next_progress_write_at(SAID, 0.0, SAID.replace(problem="new"), nodes=9, now=1.0) == 1.0, "at once"


# Numbers of waiting nodes and of spares.


@pytest.mark.parametrize(
    ("members", "story", "rules", "waiting", "spares", "after"),
    [
        ("ab", "", {"capacity": 3}, 0, 0, None),
        ("ab", "arrive x", {"capacity": 3}, 1, 0, None),
        ("ab", "arrive x, arrive y", {"capacity": 3}, 1, 1, "x"),
        ("ab", "arrive a", {}, 1, 0, None),  # a member that left in order to meet again counts as waiting
        ("abc", "die b c, arrive b", {}, 0, 0, None),  # below the minimum another round would accept no node
        ("abc", "die b c, arrive b, arrive c", {}, 2, 0, None),
        ("ab", "arrive x", {"capacity": 4, "unit": 2}, 0, 1, 0),  # an incomplete unit waits for its other nodes
        ("ab", "arrive x y", {"capacity": 4, "unit": 2}, 2, 0, None),
        # a member without a place in the round counts as not arrived
        ("abcd", "die a", {"needed": 2, "unit": 2}, 0, 0, None),
    ],
)
def test_nodes_that_the_next_round_would_accept_are_waiting_and_the_others_are_spares(
    members: str, story: str, rules: dict[str, Any], waiting: int, spares: int, after: str | int | None
) -> None:
    run = round_of(*members, **rules)
    run.play(story)
    last = run.stored[after][0] if isinstance(after, str) else after
    assert (run.progress.waiting, run.progress.spares, run.progress.spares_after) == (waiting, spares, last)


# Decisions keep to the agreed settings.

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
    order=st.sampled_from([survivors_first, arrival_order]),
)
happenings = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "arrive", "die", "leave", "wait", "succeed"]), st.integers(0, 7)),
    max_size=40,
)


@given(rules=rules, happenings=happenings)
def test_rounds_complete_only_as_agreed(rules: Rules, happenings: list[tuple[str, int]]) -> None:
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
        if isinstance(decision, Idle):
            assert decision.until is None or decision.until > run.now, "or it would spin"
            continue
        size = len(decision.members)
        assert not live
        assert rules.needed <= size <= rules.capacity
        assert size % rules.unit == 0
        assert len({record.node_id for record in decision.members}) == size
        assert all(waiting[record.node_id] == record for record in decision.members)
        assert len(waiting) - size < rules.unit or size == rules.capacity, "every node that fits is in"
        assert began is not None
        over = run.now >= began + rules.last_call
        assert over or size == rules.capacity or (rules.early_last_call and not first)
        assert decision.number > rounds
        rounds = decision.number
        run.commit()


@given(joins=st.lists(st.floats(0, 9.9), max_size=8), early=st.booleans())
def test_joins_never_extend_a_last_call(joins: list[float], early: bool) -> None:
    run = HandFed(needed=2, capacity=99, last_call=10, early_last_call=early)
    assert run.decide() == Idle(until=None, progress=Progress(phase=Phase.GATHERING, needed=2, capacity=99))
    run.arrive("a", "b")
    ends = run.now + 10
    assert (run.progress.phase, run.progress.last_call_left) == (Phase.LAST_CALL, 10)
    for index, at in enumerate(sorted(joins)):
        run.now = ends - 10 + at
        run.arrive(f"late{index}")
        assert until(run) == ends
        assert run.completes() is None
    run.now = ends
    assert len(run.completes() or ()) == 2 + len(joins)


# Texts.

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
        (SAID.replace(phase=Phase.TRAINING), "3 nodes waiting for round 7's 2 live members to leave"),
        (SAID.replace(phase=Phase.TRAINING, joined=1, live=1), "1 node waiting for round 7's 1 live member to leave"),
        (SAID.replace(phase=Phase.TRAINING, joined=0), "round 7 stands with 2 nodes"),
        (SAID.replace(phase=Phase.TRAINING, joined=1, spares=1), "round 7 stands with 2 nodes, and 1 spare"),
        (SAID.replace(phase=Phase.TRAINING, spares=3, live=1), "round 7 stands with 1 node, and 3 spares"),
        (SAID.replace(phase=Phase.TRAINING, spares=1), "2 nodes waiting for round 7's 2 live members to leave"),
        (SAID.replace(phase=Phase.CLOSED), "the run is closed"),
    ],
)
def test_every_phase_is_explained_in_words_and_numbers(progress: Progress | None, words: str) -> None:
    assert wait_reason_text(progress) == words
    said = SAID.replace(phase=Phase.LAST_CALL)
    assert wait_reason_text(said, elapsed=1.5) == "last call, 2.7 s left; 3 of at most 8 nodes", (
        "it is the time that is left now"
    )


# When progress is reported.

LAST = SAID.replace(waiting=2, lost=2, departed=2)
CALLED = SAID.replace(phase=Phase.LAST_CALL)


@pytest.mark.parametrize(
    ("last", "change", "nodes", "pause"),
    [
        (None, {}, 5, 0.0),
        (LAST, {}, 5, None),  # unchanged progress is not reported
        (LAST.replace(phase=Phase.TRAINING), {"last_call_left": 1.0}, 5, None),
        *(  # a change of kind is reported at once
            (SAID, change, 10_000, 0.0)
            for change in (
                *({"phase": Phase.LAST_CALL}, {"round": 8}, {"waiting": 1}, {"spares_after": 40}),
                *({"last_call_left": None}, {"lost": 1}, {"departed": 1}),
            )
        ),
        # The more nodes receive it, the less often a change of numbers is reported; a third as often if it needs no
        # action.
        (LAST, {"joined": 2}, 1, 0.05),
        (LAST, {"joined": 2}, 60, 0.06),
        (LAST, {"joined": 2}, 500, 1.5),
        (LAST, {"joined": 2}, 10_000, 15.0),
        (LAST, {"waiting": 3}, 500, 0.5),
        (LAST, {"lost": 3}, 1_000, 1.0),
        (LAST, {"departed": 3}, 10_000, 5.0),
        # A running last call is refreshed once a second, or at a tenth of its length.
        (CALLED.replace(last_call_left=31.0), {"last_call_left": 30.0}, 5, 3.0),
        (CALLED.replace(last_call_left=5.0), {"last_call_left": 4.0}, 5, 1.0),
    ],
)
def test_the_time_of_a_report(last: Progress | None, change: dict[str, Any], nodes: int, pause: float | None) -> None:
    new = (last or SAID).replace(**change)
    due = next_progress_write_at(last, 100.0, new, nodes=nodes, now=100.0)
    assert due == (None if pause is None else pytest.approx(100.0 + pause))
    assert next_progress_write_at(last, 80.0, new, nodes=nodes, now=100.0) == (None if pause is None else 100.0)


# Answers to nodes that follow the head.

ROUND = Round(number=3, term=9, size=2, buckets=1, host="h", port=1, revision=50)
HEAD = Head(coordinator=CurrentCoordinator(node_id="c", term=9), progress=SAID, progress_at=100.0)
CLOSED = Closed(reason="done", by="a")
LAST_CALL = SAID.replace(phase=Phase.LAST_CALL)
assert LAST_CALL.last_call_left is not None
UNTIL = HEAD.progress_at + LAST_CALL.last_call_left + LAST_CALL_GRACE
SPARES = SAID.replace(phase=Phase.TRAINING, round=3, live=2, joined=3, spares=3, spares_after=60, capacity=2)
LATE = Joiner(arrival=61)
FEW = JoinerWaits(reason="3 of at least 4 nodes")
COMING = JoinerWaits(reason="1 node waiting for round 3's 2 live members to leave")
SPARE = JoinerWaits(reason="a spare: all 2 nodes that a round takes are there", suspended=True)
CALLING = JoinerWaits(reason="last call, 3.2 s left; 3 of at most 8 nodes", suspended=True, until=UNTIL)
MEMBER = Joiner(arrival=61, was_member=True)


@pytest.mark.parametrize(
    ("me", "known", "answer"),
    [
        pytest.param(Joiner(arrival=40), {}, FEW, id="too few"),
        pytest.param(
            Joiner(arrival=40),
            {"coordinator": None, "progress": None},
            JoinerWaits(reason="waiting for a coordinator"),
            id="nothing is known",
        ),
        pytest.param(
            Joiner(arrival=40), {"progress": LAST_CALL}, CALLING, id="a last call does not count against the timeout"
        ),
        pytest.param(
            Joiner(arrival=40),
            {"coordinator": None},
            JoinerWaits(reason=f"waiting for a new coordinator; at last, {FEW.reason}"),
            id="the coordinator is gone",
        ),
        pytest.param(
            Joiner(arrival=40),
            {"coordinator": None, "progress": LAST_CALL},
            replace(CALLING, reason=f"waiting for a new coordinator; at last, {CALLING.reason}"),
            id="nor does a last call whose coordinator is being replaced",
        ),
        pytest.param(Joiner(arrival=40), {"round": ROUND}, ROUND, id="a later round"),
        pytest.param(Joiner(arrival=51), {"round": ROUND}, FEW, id="before"),
        pytest.param(Joiner(arrival=40, passed_over=50), {"round": ROUND}, FEW, id="a round that did not hold us"),
        pytest.param(Joiner(arrival=40), {"round": ROUND, "closed": CLOSED}, ROUND, id="the round came first"),
        pytest.param(Joiner(arrival=51), {"round": ROUND, "closed": CLOSED}, EndJoining(closed=CLOSED), id="closed"),
        pytest.param(LATE, {"progress": SPARES}, SPARE, id="a spare"),
        pytest.param(
            LATE,
            {"progress": SPARES.replace(capacity=8, spares=1)},
            JoinerWaits(reason="a spare: a round would take 4 of the 5 nodes that are there", suspended=True),
            id="a spare beyond the unit",
        ),
        pytest.param(
            LATE,
            {"progress": SPARES, "closed": CLOSED},
            EndJoining(closed=CLOSED, spare=True),
            id="a spare, and closed",
        ),
        pytest.param(
            Joiner(arrival=60), {"progress": SPARES.replace(spares=2)}, COMING, id="the last one there is room for"
        ),
        pytest.param(
            replace(MEMBER, known_round=3),
            {"progress": SPARES.replace(spares=2)},
            COMING,
            id="a member of the last round comes first",
        ),
        pytest.param(replace(MEMBER, known_round=2), {"progress": SPARES}, SPARE, id="but not one of an earlier round"),
        pytest.param(
            LATE,
            {"progress": SPARES.replace(joined=0, spares=0)},
            JoinerWaits(reason="round 3 stands with 2 nodes"),
            id="old progress about spares that are gone",
        ),
    ],
)
def test_a_node_follows_the_head(me: Joiner, known: dict[str, Any], answer: JoinerWaits | Round | EndJoining) -> None:
    assert act_of_joiner(me, replace(HEAD, **known), now=101.0) == answer


def test_members_beyond_the_unit_become_spares_after_a_round_without_them() -> None:
    # Regression: seven of eight members came back, in units of four. The other three were no spares since they had been
    # members, and failed at their join timeout.
    names = [f"n{index}" for index in range(8)]
    run = round_of(*names, needed=4, capacity=8, unit=4)
    run.die("n7")
    run.arrive(*names[:7])
    assert run.commit() == names[:4]
    assert run.round is not None
    answer = run.act_of_joiner("n6", known_round=run.round.number, passed_over=run.round.revision)
    assert isinstance(answer, JoinerWaits)
    assert answer.suspended
    assert answer.reason == "a spare: a round would take 4 of the 7 nodes that are there"


# The join timeout.


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=12))
def test_a_join_clock_excludes_suspended_time(spans: list[tuple[bool, float]]) -> None:
    now, used = 50.0, 0.0
    clock = JoinClock(20.0, now=now)
    for suspended, seconds in spans:
        clock.set_suspended(suspended=suspended, now=now)
        now += seconds
        used += 0.0 if suspended else seconds
        assert clock.deadline(now) == (None if suspended else pytest.approx(now + clock.seconds_left(now)))
    assert clock.seconds_left(now) == pytest.approx(max(20.0 - used, 0.0), abs=1e-6)


# Changes for members.

STANDS = Progress(phase=Phase.TRAINING, round=3, live=2)
TOLD = STANDS.replace(lost=1, lost_ids=("x",), departed=2, departed_ids=("y", "z"), waiting=4)


def told(seen: Sequence[Change], progress: Progress | None, **fields: Any) -> list[Change]:
    head = Head(progress=progress, closed=fields.pop("closed", None))
    return unreported_changes(seen, head, round=fields.pop("round", ROUND), dropped=fields.pop("dropped", None))


WAIT_2 = STANDS.replace(waiting=2)


@pytest.mark.parametrize(
    ("seen", "progress", "more", "news"),
    [
        ([], STANDS, {}, []),
        ([], None, {}, []),
        (
            [],
            TOLD,
            {"closed": CLOSED, "dropped": "away for too long"},
            [*(CLOSED, NodesLost(1, ("x",)), NodesLeft(2, ("y", "z")), NodesWaiting(4)), Dropped("away for too long")],
        ),
        # Each change is announced once, and again if it has changed.
        (TOLD, TOLD, {}, []),
        (TOLD, TOLD.replace(lost=2, lost_ids=("x", "w")), {}, [NodesLost(2, ("x", "w"))]),
        (TOLD, TOLD, {"closed": CLOSED}, [CLOSED]),
        # "0 waiting" is announced only after nodes have waited.
        ([], WAIT_2, {}, [NodesWaiting(2)]),
        (WAIT_2, STANDS, {}, [NodesWaiting(0)]),
        ([NodesWaiting(0)], STANDS, {}, []),
        # Progress of another round is not announced. A close or a drop is, in any round.
        ([], TOLD.replace(round=2), {}, []),
        ([], TOLD.replace(round=4), {}, []),
        ([], TOLD, {"round": None}, []),
        ([], None, {"round": None, "closed": CLOSED, "dropped": "banned"}, [CLOSED, Dropped("banned")]),
    ],
)
def test_the_changes_that_a_member_is_told(
    seen: list[Change] | Progress, progress: Progress | None, more: dict[str, Any], news: list[Change]
) -> None:
    assert told(seen if isinstance(seen, list) else told([], seen), progress, **more) == news


reports = st.builds(
    Progress,
    phase=st.just(Phase.TRAINING),
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


def reason(run: HandFed, name: str) -> str:
    """Return the reason that a waiting node reports."""
    answer = run.act_of_joiner(name, passed_over=run.round.revision if run.round else 0)
    assert isinstance(answer, JoinerWaits)
    return answer.reason


def test_until_the_next_round_waiting_nodes_name_the_round_that_was_given_up() -> None:
    """Regression: nodes that did not reach rank 0 waited "for a coordinator", and the status gave no reason."""
    run = HandFed(needed=3, last_call=0)
    run.arrive("a", "b", "c")
    run.commit()
    run.arrive("b", gave_up="round 0 was given up: node b (rank 1): rank 0 at a:1: it does not answer")
    run.arrive("a", unreached=True, gave_up="round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    reasons = [reason(run, name) for name in ("a", "b")]
    assert reasons[0] == reasons[1]
    assert reasons[0].endswith("; round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    run.die("c")
    assert reason(run, "a").startswith("2 of at least 3 nodes")
    assert "; round 0 was given up: node a (rank 0)" in reason(run, "a")
    run.arrive("c")
    assert run.commit()[0] != "a"
    assert run.progress.given_up == ""
