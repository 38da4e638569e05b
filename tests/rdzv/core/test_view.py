"""The coordinator's picture: whatever happens to nodes, it says who lives, who waits, who is gone, and since when."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.state import NAMED_MOST, LastCoordinator, NodeRecord, Phase, Progress
from rdzv.core.view import View
from store.messages import Cause, Event
from tests.support.hand_fed import NODES, HandFed


def standing(view: View) -> tuple[Any, ...]:
    """What does not depend on the way that led there."""
    return view.live, list(view.waiting.items()), view.next_number, view.synced, view._records


def round_of(*names: str, **rules: Any) -> HandFed:
    """A run whose first round these nodes have just completed."""
    run = HandFed(**{"needed": len(names), "capacity": len(names), **rules})
    run.arrive(*names)
    assert run.commit() == list(names)
    return run


def began_at(run: HandFed) -> float | None:
    """When the last call began."""
    return run.view.enough_since


def synced(run: HandFed) -> bool:
    return run.view.synced


# Who lives and who waits.


def test_nodes_wait_in_the_order_in_which_they_came() -> None:
    run = HandFed()
    run.arrive("b", "a", "c")
    run.arrive("b")
    assert list(run.view.waiting) == ["a", "c", "b"]


def test_members_of_the_round_live_until_they_are_written_anew_or_gone() -> None:
    run = round_of("a", "b", "c", "d")
    assert run.view.live == {"a", "b", "c", "d"}
    run.arrive("a")
    run.leave("b")
    run.die("c")
    assert run.view.live == {"d"}
    assert list(run.view.waiting) == ["a"]
    assert (run.view.lost, run.view.departed) == (["c"], ["b"])


def test_whether_a_member_has_left_before_the_agreed_step_is_known_also_to_the_next_coordinator() -> None:
    run = round_of("a", "b", "c")
    stopped = NodeRecord(node_id="a", incarnation="1", left=True, stopped=True)
    run.put("a", stopped.pack())
    run.die("a")
    assert (run.view.departed, run.view.left_early) == (["a"], False)
    run.leave("b")
    assert run.view.left_early
    run.succeed(Progress.unpack(run.progress.pack()))
    assert run.view.left_early
    run.arrive("a", "b", "c")
    assert run.commit() == ["a", "b", "c"]
    assert not run.view.left_early, "that was another round"


def test_a_node_that_is_not_a_member_is_missed_by_nobody() -> None:
    run = round_of("a", "b")
    run.arrive("x", "y")
    run.die("x")
    run.leave("y")
    assert (run.view.lost_count, run.view.departed_count) == (0, 0)


def test_a_member_is_missed_once_however_often_it_comes_and_goes() -> None:
    run = round_of("a", "b")
    run.die("a")
    run.arrive("a")
    run.leave("a")
    run.arrive("a")
    run.die("a")
    assert (run.view.lost_count, run.view.departed_count) == (1, 0)


def test_a_member_that_dies_while_it_waits_for_the_next_round_is_missed_too() -> None:
    run = round_of("a", "b")
    run.arrive("a")
    run.die("a")
    assert run.view.lost == ["a"]


def test_a_completed_round_forgets_who_was_missed_in_the_last() -> None:
    run = round_of("a", "b", "c", needed=2)
    run.die("c")
    run.arrive("a", "b")
    assert run.commit() == ["a", "b"]
    assert (run.view.lost, run.view.lost_count, run.view.departed, run.view.departed_count) == ([], 0, [], 0)
    run.arrive("c", "a")
    run.die("b")
    run.now += run.rules.last_call
    assert run.commit() == ["a", "c"]
    run.die("c")
    assert (run.view.lost, run.view.lost_count) == (["c"], 1), "also one who was missed in an earlier round"


def test_only_the_first_are_named_but_all_are_counted() -> None:
    names = [f"n{index:03}" for index in range(NAMED_MOST + 6)]
    run = round_of(*names)
    run.die(*names[:-1])
    assert run.view.lost == names[:NAMED_MOST]
    assert run.view.lost_count == NAMED_MOST + 5


def test_a_record_that_is_not_ours_takes_part_in_nothing() -> None:
    run = HandFed()
    run.put("x", b"not ours")
    assert not run.view.waiting
    run.die("x")
    assert run.view.lost_count == 0


def test_a_record_that_has_become_unreadable_stands_no_more() -> None:
    # It was kept as alive, and every commit that named its old revision would have been refused, for ever.
    run = HandFed()
    run.arrive("a", "b")
    run.put("a", msgpack.packb({"incarnation": 7}))
    assert list(run.view.waiting) == ["b"]
    run = round_of("a", "b")
    run.put("a", b"")
    assert run.view.live == {"b"}
    assert run.view.lost == ["a"]


# Numbers.


def test_the_first_round_is_0_and_each_is_one_above_the_last() -> None:
    run = HandFed()
    assert (run.view.number, run.view.next_number) == (-1, 0)
    run = round_of("a", "b")
    assert (run.view.number, run.view.next_number) == (0, 1)


def test_the_next_round_is_above_any_that_somebody_who_waits_has_known() -> None:
    run = HandFed()
    run.arrive("a")
    run.arrive("b", arrived_after=6)
    assert run.view.next_number == 7
    run.die("b")
    assert run.view.next_number == 0


# Since when there are enough.


def test_enough_is_since_when_the_minimum_came_together() -> None:
    run = HandFed(needed=2)
    run.arrive("a")
    assert began_at(run) is None
    run.now += 5
    run.arrive("b")
    began = run.now
    run.now += 5
    run.arrive("c")
    run.die("c")
    run.arrive("a")
    assert run.view.enough_since == began
    run.die("a")
    assert began_at(run) is None
    run.now += 5
    run.arrive("d")
    assert began_at(run) == run.now


def test_spares_left_over_by_a_round_may_be_enough_already() -> None:
    # It was counted at whatever event came next, perhaps hours later.
    run = HandFed(needed=1, capacity=1)
    run.arrive("a", "b")
    run.commit()
    began = run.now
    run.now += 5
    run.arrive("c")
    assert run.view.enough_since == began


def test_members_who_remain_in_the_round_are_not_among_the_enough() -> None:
    run = round_of("a", "b", "c", needed=2)
    run.arrive("a")
    assert began_at(run) is None


# Any way leads to the same picture.

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
def test_folding_all_events_gives_the_same_view_as_folding_what_is_left_in_the_end(
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
def test_nobody_is_two_things_at_once(after: list[tuple[str, str]]) -> None:
    run = round_of("a", "b", needed=1)
    for what, name in after:
        happen(run, what, name)
        view = run.view
        assert not view.live & view.waiting.keys()
        assert view.live | view.waiting.keys() == view._records.keys()
        assert [record.arrival for record in view.waiting.values()] == sorted(
            record.arrival for record in view.waiting.values()
        )
        assert view.lost_count + view.departed_count <= len(view.members)


# A watch that begins anew.


def test_while_a_snapshot_comes_nothing_is_concluded_from_what_is_missing() -> None:
    run = round_of("a", "b")
    run.feed(Event(kind="reset", revision=0))
    assert not synced(run)
    assert not run.view.lost
    run.snapshot()
    assert synced(run)
    assert run.view.live == {"a", "b"}
    assert not run.view.lost


def test_who_is_missing_from_the_snapshot_has_gone_meanwhile() -> None:
    run = round_of("a", "b", "c")
    del run.stored["b"]
    run.reset()
    assert run.view.live == {"a", "c"}
    assert run.view.lost == ["b"]


def test_a_last_call_goes_on_over_a_reset() -> None:
    run = HandFed()
    run.arrive("a", "b")
    began = run.now
    run.now += 5
    run.reset()
    assert run.view.enough_since == began


def test_a_snapshot_comes_by_name_but_its_nodes_wait_by_arrival() -> None:
    # The first coordinator that took over admitted whoever came first in the alphabet.
    run = HandFed()
    run.arrive("c", "b", "a")
    run.succeed(None)
    assert list(run.view.waiting) == ["c", "b", "a"]


# Taking over.


def test_a_successor_goes_on_with_the_last_call_from_what_was_left_of_it() -> None:
    run = HandFed(last_call=30)
    run.arrive("a", "b")
    run.now += 10
    said, said_at = run.progress, run.now
    run.now += 3
    run.succeed(said, said_at=said_at)
    assert began_at(run) == run.now - 13


def test_a_last_call_that_has_run_out_meanwhile_is_over() -> None:
    run = HandFed(last_call=30)
    run.arrive("a", "b")
    said, said_at = run.progress, run.now
    run.now += 100
    run.succeed(said, said_at=said_at)
    assert began_at(run) == run.now - 30


def test_a_last_call_with_more_left_than_it_lasts_begins_now() -> None:
    run = HandFed(last_call=30)
    run.arrive("a", "b")
    run.succeed(Progress(phase=Phase.LAST_CALL, last_call_left=99.0, last_arrival=run.revision))
    assert began_at(run) == run.now


def test_a_last_call_is_not_continued_with_others_than_it_began_with() -> None:
    # Everybody had died meanwhile. Those who came back were taken to be in a last call long over, and a third, who came
    # back a moment later, was left out.
    run = HandFed(needed=2, last_call=30)
    run.arrive("a", "b")
    said, said_at = run.progress, run.now
    run.die("a", "b")
    run.now += 100
    run.arrive("a", "b")
    run.succeed(said, said_at=said_at)
    assert began_at(run) == run.now


def test_a_last_call_that_did_not_run_is_not_continued() -> None:
    run = HandFed(needed=2)
    run.arrive("a")
    said, said_at = run.progress, run.now
    run.now += 10
    run.arrive("b")
    run.succeed(said, said_at=said_at)
    assert began_at(run) == run.now


def test_what_was_said_of_another_round_is_not_inherited() -> None:
    run = round_of("a", "b")
    run.succeed(Progress(phase=Phase.COMPLETE, round=-1, lost=1, lost_ids=("a",), last_call_left=3.0))
    assert run.view.lost_count == 0


def test_members_who_are_missing_at_a_take_over_are_lost_unless_they_had_said_that_they_leave() -> None:
    run = round_of("a", "b", "c", "d")
    run.leave("b")
    said = run.progress
    run.die("c")
    run.succeed(said)
    assert (run.view.departed, run.view.lost) == (["b"], ["c"])


@pytest.mark.parametrize(
    ("cause", "tells_causes", "why"),
    [
        ("gone", True, "its process ended"),
        ("", True, "it went while nobody coordinated"),
        ("", False, "nothing was heard of it for its ttl"),
    ],
)
def test_a_successor_says_why_its_predecessor_has_gone_and_that_of_others_nobody_saw(
    cause: Cause, tells_causes: bool, why: str
) -> None:
    """The coordinator's own death had no reason, neither in the status nor in the history."""
    run = round_of("a", "b", "c")
    assert run.view.round is not None
    view = View(NODES, needed=3, tells_causes=tells_causes)
    members = list(run.view.members.values())
    view.took_over(run.view.round, members, None, progress_at=0.0, before=LastCoordinator(node_id="a", cause=cause))
    view.fold(run.put_event("c"), now=1.0, last_call_timeout=10.0)
    view.fold(Event(kind="synced", revision=99), now=1.0, last_call_timeout=10.0)
    assert view.lost == ["a", "b"]
    assert view.why == {"a": why, "b": "it went while nobody coordinated"}


def test_where_the_store_does_not_tell_how_a_lease_ended_a_record_that_goes_by_itself_has_lapsed() -> None:
    """On etcd, losses had no reason."""
    run = HandFed(needed=2, capacity=2, tells_causes=False)
    run.arrive("a", "b")
    run.commit()
    run.die("a")
    run.leave("b")
    assert run.view.why == {"a": "nothing was heard of it for its ttl"}


def test_a_member_caught_leaving_at_a_take_over_has_left() -> None:
    # Its record still stood, and said so; it was announced as lost.
    run = round_of("a", "b")
    run.put("a", NodeRecord(node_id="a", incarnation="1", left=True).pack())
    run.succeed(None)
    assert (run.view.departed, run.view.lost) == (["a"], [])


def test_what_was_announced_is_not_taken_back_by_a_successor_nor_reordered() -> None:
    run = round_of("a", "b", "c", "d")
    run.die("c", "a")
    said = run.progress
    assert said.lost_ids == ("c", "a")
    run.arrive("a")
    run.succeed(said)
    assert (run.progress.lost, run.progress.lost_ids) == (2, ("c", "a"))


def test_departures_that_were_not_named_are_told_from_losses_by_number() -> None:
    names = [f"n{index:03}" for index in range(NAMED_MOST + 10)]
    run = round_of(*names)
    run.leave(*names[: NAMED_MOST + 4])
    said = run.progress
    run.die(names[-1])
    run.succeed(said)
    assert (run.view.departed_count, run.view.lost_count) == (NAMED_MOST + 4, 1)
    assert run.view.departed == names[:NAMED_MOST]
    assert run.view.lost == names[-1:]


def test_losses_that_were_not_named_stay_counted_when_they_have_come_again() -> None:
    names = [f"n{index:03}" for index in range(NAMED_MOST + 10)]
    run = round_of(*names)
    run.die(*names)
    said = run.progress
    run.arrive(*names[-4:])
    run.succeed(said)
    assert (run.view.lost_count, len(run.view.lost)) == (NAMED_MOST + 10, NAMED_MOST)


@pytest.mark.parametrize("kind", ["put", "delete"])
def test_before_the_snapshot_is_whole_nothing_is_enough(kind: str) -> None:
    view = View(NODES, needed=1)
    value = NodeRecord(node_id="a", incarnation="1").pack()
    view.fold(Event(kind="put", revision=1, key=NODES + "a", value=value), now=5.0, last_call_timeout=1.0)
    assert view.enough_since is None
    if kind == "delete":
        view.fold(Event(kind="delete", revision=2, key=NODES + "a"), now=6.0, last_call_timeout=1.0)
    view.fold(Event(kind="synced", revision=2), now=7.0, last_call_timeout=1.0)
    assert view.enough_since == (7.0 if kind == "put" else None)


@pytest.mark.parametrize("fields", [{"arrived_after": -1}, {"lapsed_in": 0}], ids=["never heard of it", "was dropped"])
@pytest.mark.parametrize("looked", [True, False])
def test_a_member_that_comes_again_and_was_not_in_its_round_is_lost_to_the_others(
    *, fields: dict[str, Any], looked: bool
) -> None:
    """The others waited for it in their step. Nobody had seen it go: it was back before another coordinated."""
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


def test_a_member_that_goes_on_to_the_next_round_is_lost_to_nobody() -> None:
    run = round_of("a", "b", "c")
    run.arrive("c")
    run.succeed(run.progress)
    assert (run.view.lost_count, list(run.view.waiting)) == (0, ["c"])
