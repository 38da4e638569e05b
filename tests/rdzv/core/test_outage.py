"""Nodes that return one by one after an outage meet in one round (promise R11, early_last_call)."""

from tests.support.hand_fed import HandFed


def four() -> HandFed:
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b", "c", "d")
    assert run.commit() == ["a", "b", "c", "d"]
    return run


def test_nodes_lost_in_the_same_outage_as_the_first_to_return_are_waited_for() -> None:
    """Regression: there were rounds of 2, 3 and 4 nodes, each a restart of the whole job."""
    run = four()
    run.die("a", "b", "c", "d")
    run.succeed(None)  # no node coordinated meanwhile
    run.arrive("c", "b", lapsed_in=0)
    assert run.completes() is None
    run.arrive("a", lapsed_in=0)
    assert run.completes() is None
    run.arrive("d", lapsed_in=0)
    assert run.commit() == ["a", "b", "c", "d"]


def test_a_node_that_does_not_return_is_waited_for_until_the_last_call_ends() -> None:
    run = four()
    run.die("a", "b", "c", "d")
    run.arrive("b", "c", lapsed_in=0)
    assert run.progress.last_call_left == 30
    run.now += 30
    assert run.commit() == ["b", "c"]


def test_survivors_that_met_without_them_accept_them_all_at_once() -> None:
    run = four()
    run.die("c", "d")
    run.arrive("a", "b")
    assert run.commit() == ["a", "b"], "after a death, no node is waited for"
    run.arrive("d", arrived_after=0, lapsed_in=0)
    run.arrive("a", "b")
    assert run.completes() is None, "c is known to be coming"
    run.arrive("c", arrived_after=0, lapsed_in=0)
    assert run.commit() == ["a", "b", "d", "c"]


def test_a_node_that_had_left_is_not_waited_for() -> None:
    run = four()
    run.leave("d")
    run.die("a", "b", "c")
    run.arrive("a", "b", "c", lapsed_in=0)
    assert run.commit() == ["a", "b", "c"]
