"""The coordinator's view: after any events it has the live, waiting and missing nodes, and the times of changes."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.state import NAMED_MOST, LastCoordinator, NodeRecord, Phase, Progress
from rdzv.core.view import UNSEEN, TermView
from store.messages import Cause, Event
from tests.support.hand_fed import NODES, HandFed, round_of


def standing(view: TermView) -> tuple[Any, ...]:
    """Return the parts of a view that do not depend on the order of events."""
    return view.live, list(view.waiting.items()), view.next_number, view.synced, view.records


# Live and waiting nodes.


@pytest.mark.parametrize(
    ("story", "live", "waiting", "lost", "departed"),
    [
        pytest.param("arrive a, leave b, die c", "d", "a", "c", "b", id="written anew, left, gone"),
        pytest.param("arrive x y, die x, leave y", "abcd", "", "", "", id="a node that was no member is not missing"),
        pytest.param("die a, arrive a, leave a, arrive a, die a", "bcd", "", "a", "", id="each is missed once"),
        pytest.param("arrive a, die a", "bcd", "", "a", "", id="also while it waits for the next round"),
        pytest.param("arrive b a x, arrive b", "cd", "axb", "", "", id="they wait in the order in which they came"),
    ],
)
def test_the_states_of_nodes_after_events(story: str, live: str, waiting: str, lost: str, departed: str) -> None:
    run = round_of("a", "b", "c", "d")
    run.play(story)
    view = run.view
    assert (view.live, "".join(view.waiting)) == ({*live}, waiting)
    assert (view.lost, view.lost_count, view.departed, view.departed_count) == (
        *([*lost], len(lost)),
        *([*departed], len(departed)),
    )


def test_a_record_that_becomes_unreadable_counts_as_removed() -> None:
    # Regression: it stayed alive in the view. Every commit named its old revision and was refused, for ever.
    run = HandFed()
    run.arrive("a", "b")
    run.put("a", msgpack.packb({"incarnation": 7}))
    run.put("x", b"not ours")
    assert list(run.view.waiting) == ["b"]
    run.die("x")
    assert run.view.lost_count == 0
    run = round_of("a", "b")
    run.put("a", b"")
    assert run.view.live == {"b"}
    assert run.view.lost == ["a"]


# Numbers.


def test_the_next_round_number_is_above_any_that_a_waiting_node_knows() -> None:
    run = HandFed()
    assert (run.view.last_number, run.view.next_number) == (-1, 0)
    run.arrive("a")
    run.arrive("b", arrived_after=6)
    assert run.view.next_number == 7
    run.die("b")
    assert run.view.next_number == 0
    run = round_of("a", "b")
    assert (run.view.last_number, run.view.next_number) == (0, 1)


# The time since which there are enough nodes.


# Any order of events leads to the same view.

happenings = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "leave", "say", "die", "spoil", "reset"]), st.sampled_from("abcd")),
    max_size=25,
)


def happen(run: HandFed, what: str, name: str) -> None:
    match what:
        case "arrive":
            run.arrive(name, arrived_after=run.revision % 3)
        case "leave":
            run.leave(name)
        case "say":
            run.put(name, NodeRecord(node_id=name, incarnation="1", left=True).pack())
        case "die" if name in run.stored:
            run.die(name)
        case "spoil":
            run.put(name, b"spoilt")
        case "reset":
            run.reset()


@given(before=happenings, after=happenings)
def test_folding_all_events_gives_the_same_view_as_folding_a_snapshot(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    run = HandFed(needed=1, capacity=3)
    for what, name in before:
        happen(run, what, name)
    if run.view.waiting:
        run.now += 60
        run.commit()
    for what, name in after:
        happen(run, what, name)
    seen = run.view
    run.succeed(run.progress)
    assert standing(run.view) == standing(seen)
    assert run.view.enough_since == seen.enough_since or run.progress.last_call_left is None
    assert (run.view.lost, run.view.departed) == (seen.lost, seen.departed)
    assert (run.view.lost_count, run.view.departed_count) == (seen.lost_count, seen.departed_count)


@given(happenings)
def test_no_node_is_both_live_and_waiting(after: list[tuple[str, str]]) -> None:
    run = round_of("a", "b", needed=1)
    for what, name in after:
        happen(run, what, name)
        view = run.view
        assert not view.live & view.waiting.keys()
        assert view.live | view.waiting.keys() == view.records.keys()
        assert [record.arrival for record in view.waiting.values()] == sorted(
            record.arrival for record in view.waiting.values()
        )
        assert view.lost_count + view.departed_count <= len(view.members)


# A watch that begins again.


def test_a_node_missing_from_the_snapshot_counts_as_lost() -> None:
    run = round_of("a", "b", "c")
    del run.stored["b"]
    run.feed(Event(kind="reset", revision=0))
    assert not run.view.lost, "during a snapshot, missing nodes do not count as lost"
    run.snapshot()
    assert run.view.live == {"a", "c"}
    assert run.view.lost == ["b"]


# Taking over as coordinator.


@pytest.mark.parametrize(
    ("story", "meanwhile", "away", "began_ago"),
    [
        pytest.param("arrive a b", "", 3, 13, id="it continues with the time that was left"),
        pytest.param("arrive a b", "", 100, 30, id="one that has run out meanwhile is over"),
        # Regression: all nodes had died meanwhile. Those that returned inherited a last call that was long over, and a
        # third node a moment later was left out.
        pytest.param("arrive a b", "die a b, arrive a b", 100, 0, id="not with others than it began with"),
        pytest.param("arrive a", "arrive b", 3, 0, id="it did not run"),
    ],
)
def test_a_successor_continues_a_last_call(story: str, meanwhile: str, away: float, began_ago: float) -> None:
    run = HandFed(needed=2, last_call=30)
    run.play(story)
    run.now += 10
    said, said_at = run.progress, run.now
    run.now += away
    run.play(meanwhile)
    run.succeed(said, said_at=said_at)
    assert run.view.enough_since == run.now - began_ago


def test_an_implausible_last_call_begins_again_and_a_running_one_survives_a_reset() -> None:
    run = HandFed(last_call=30)
    run.arrive("a", "b")
    run.succeed(Progress(phase=Phase.LAST_CALL, last_call_left=99.0, last_arrival=run.revision))
    assert run.view.enough_since == run.now
    began = run.now
    run.now += 5
    run.reset()
    assert run.view.enough_since == began


def test_progress_of_another_round_is_not_inherited() -> None:
    run = round_of("a", "b")
    run.succeed(Progress(phase=Phase.TRAINING, round=-1, lost=1, lost_ids=("a",), last_call_left=3.0))
    assert run.view.lost_count == 0


@pytest.mark.parametrize(
    ("cause", "tells_causes", "moves", "why"),
    [
        ("gone", True, False, {"a": "its process ended", "b": UNSEEN}),
        ("", True, False, {"a": UNSEEN, "b": UNSEEN}),
        ("", False, False, {"a": "nothing was heard of it for its ttl", "b": UNSEEN}),
        ("gone", True, True, {"a": "its process ended"}),
        ("", True, True, {}),
    ],
)
def test_a_successor_has_a_reason_for_the_loss_of_its_predecessor_and_of_other_members(
    cause: Cause, tells_causes: bool, moves: bool, why: dict[str, str]
) -> None:
    """Regression: the coordinator's own death had no reason, neither in the status nor in the history. Members that
    left an ending store behind their coordinator were announced as lost, to one that was not yet at the agreed step.
    """
    run = round_of("a", "b", "c")
    assert run.view.round is not None
    view = TermView(NODES, needed=3, tells_causes=tells_causes)
    members = list(run.view.members.values())
    before = LastCoordinator(node_id="a", cause=cause)
    view.take_over(run.view.round, members, None, progress_at=0.0, before=before, moves=moves)
    view.apply_node_event(run.put_event("c"), now=1.0, last_call_timeout=10.0)
    view.apply_node_event(Event(kind="synced", revision=99), now=1.0, last_call_timeout=10.0)
    assert (view.lost, view.why_gone) == ([*why], why)
    assert view.departed == [name for name in "ab" if name not in why]


def test_a_member_that_is_leaving_at_a_takeover_counts_as_departed() -> None:
    # Regression: its record still existed, marked as leaving, and it was announced as lost.
    run = round_of("a", "b")
    run.put("a", NodeRecord(node_id="a", incarnation="1", left=True).pack())
    run.succeed(None)
    assert (run.view.departed, run.view.lost) == (["a"], [])


def test_unnamed_departures_are_told_from_losses_by_number() -> None:
    names = [f"n{index:03}" for index in range(NAMED_MOST + 10)]
    run = round_of(*names)
    run.leave(*names[: NAMED_MOST + 4])
    said = run.progress
    run.die(names[-1])
    run.succeed(said)
    assert (run.view.departed_count, run.view.lost_count) == (NAMED_MOST + 4, 1)
    assert run.view.departed == names[:NAMED_MOST]
    assert run.view.lost == names[-1:]


def test_unnamed_losses_stay_counted_after_the_nodes_return() -> None:
    names = [f"n{index:03}" for index in range(NAMED_MOST + 10)]
    run = round_of(*names)
    run.die(*names)
    said = run.progress
    run.arrive(*names[-4:])
    run.succeed(said)
    assert (run.view.lost_count, len(run.view.lost)) == (NAMED_MOST + 10, NAMED_MOST)


@pytest.mark.parametrize("kind", ["put", "delete"])
def test_the_minimum_is_not_reached_before_the_snapshot_is_complete(kind: str) -> None:
    view = TermView(NODES, needed=1)
    value = NodeRecord(node_id="a", incarnation="1").pack()
    view.apply_node_event(Event(kind="put", revision=1, key=NODES + "a", value=value), now=5.0, last_call_timeout=1.0)
    assert view.enough_since is None
    if kind == "delete":
        view.apply_node_event(Event(kind="delete", revision=2, key=NODES + "a"), now=6.0, last_call_timeout=1.0)
    view.apply_node_event(Event(kind="synced", revision=2), now=7.0, last_call_timeout=1.0)
    assert view.enough_since == (7.0 if kind == "put" else None)


@pytest.mark.parametrize("fields", [{"arrived_after": -1}, {"lapsed_in": 0}], ids=["never heard of it", "was dropped"])
@pytest.mark.parametrize("looked", [True, False])
def test_a_member_that_comes_back_without_its_round_counts_as_lost(*, fields: dict[str, Any], looked: bool) -> None:
    """Regression: no coordinator had seen it go, since it was back before the next one began. The others waited for it
    in their step.
    """
    run = round_of("a", "b", "c")
    if looked:
        run.arrive("c", **fields)
    else:
        run.revision += 1
        run.stored["c"] = (
            run.revision,
            NodeRecord(node_id="c", incarnation="1", **{"arrived_after": 0, **fields}).pack(),
        )
        run.succeed(run.progress)
    assert (run.view.lost, run.view.lost_count, list(run.view.waiting)) == (["c"], 1, ["c"])
    run.arrive("c", **fields)
    assert run.view.lost_count == 1
