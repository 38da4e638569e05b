"""A node that did not reach rank 0 although others did is left out: the others' rounds and messages about it."""

from typing import Any

from rdzv.core.decision import JoinerWaits, wait_reason_text
from tests.support.hand_fed import HandFed

WHY = "round 0 was given up: node a (rank 0): d (10.0.0.4), rank 3, did not come to a:1; the others go on"


def given_up(**rules: Any) -> HandFed:
    """Return a run whose round of a, b, c and d was given up, as d did not reach a. All four have arrived again."""
    run = HandFed(**{"needed": 2, "capacity": 4, **rules})
    run.arrive("a", "b", "c", "d")
    assert run.commit() == ["a", "b", "c", "d"]
    run.arrive("a", "b", "c", gave_up=WHY)
    assert run.completes() is None, "d is still in it, and may report that the others failed"
    run.arrive("d", gave_up=WHY, cut_off=("a",))
    return run


def test_the_others_continue_without_it_and_it_waits_as_a_named_spare() -> None:
    run = given_up()
    assert run.commit() == ["a", "b", "c"]
    assert (run.progress.spares, run.progress.spare_ids, run.progress.waiting) == (1, ("d",), 0)
    assert wait_reason_text(run.progress) == f"round 1 stands with 3 nodes, and 1 spare; {WHY}"
    parked = run.act_of_joiner("d", node_id="d", left_out=WHY, passed_over=run.revision)
    assert parked == JoinerWaits(reason=f"a spare: {WHY}", suspended=True)


def test_a_successor_of_the_coordinator_also_leaves_it_out() -> None:
    run = given_up()
    assert run.commit() == ["a", "b", "c"]
    run.succeed(run.progress)
    assert run.progress.spare_ids == ("d",)
    assert run.progress.waiting == 0


def test_it_is_accepted_if_the_others_are_too_few() -> None:
    run = given_up(needed=4)
    assert run.commit() == ["a", "b", "c", "d"]
    run = given_up()
    assert run.commit() == ["a", "b", "c"]
    run.die("b", "c")
    run.arrive("a")
    assert run.progress.joined == 2
    run.now += run.rules.last_call
    assert run.completes() == ["a", "d"]
    run.arrive("e")
    assert run.progress.spare_ids == ("d",), "there is another one again"
    run.now += run.rules.last_call
    assert run.completes() == ["a", "e"]


def test_it_may_join_if_another_node_is_rank_0() -> None:
    run = given_up()
    assert run.commit() == ["a", "b", "c"]
    run.die("a")
    run.arrive("b", "c")
    assert run.commit() == ["b", "c"]
    assert run.progress.waiting == 1
    run.arrive("d", gave_up=WHY, cut_off=("a", "b"))
    assert run.progress.waiting == 0, "it has tried that one, too"


def test_one_that_leaves_or_dies_is_no_spare_any_more() -> None:
    run = given_up()
    run.die("d")
    assert run.commit() == ["a", "b", "c"]
    assert (run.progress.spares, run.progress.joined) == (0, 0)


def test_if_no_rank_0_is_reached_each_node_has_its_turn() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    assert run.commit() == ["a", "b"]
    run.arrive("a", gave_up=WHY, unreached=True)
    run.arrive("b", gave_up=WHY)
    assert run.commit() == ["b", "a"]
    run.arrive("a", "b", gave_up=WHY, unreached=True)
    assert run.commit() == ["a", "b"], "which was in the run before, so that it goes on alone if one is enough"
