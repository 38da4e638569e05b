"""R2 **Exclusive.** One round of a run is current at a time.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

import pytest

from tests.support.hand_fed import HandFed


def two_of_three() -> HandFed:
    """A round of a and b, with room for a third."""
    run = HandFed(needed=2, capacity=3, last_call=1)
    run.arrive("a", "b")
    run.now += 1
    assert run.commit() == ["a", "b"]
    return run


# What is decided.


def test_r2_a_late_node_waits_announced_until_no_live_member_remains() -> None:
    """Promise: "A late node waits, announced, until no live member of the completed round remains in it"."""
    run = two_of_three()
    run.arrive("late")
    assert run.progress.waiting == 1
    run.now += 3600
    assert run.completes() is None
    run.arrive("a")
    run.now += 3600
    assert run.completes() is None, "b remains"
    run.arrive("b")
    assert run.completes() == ["a", "b", "late"]


@pytest.mark.parametrize("way", ["comes again", "leaves", "lapses"])
def test_r2_each_way_of_leaving_lets_the_others_go_on(way: str) -> None:
    """Promise: "A member leaves it by calling `next_rendezvous` again, by `leave()`, ... or by lapsing"."""
    run = two_of_three()
    run.arrive("late", "a")
    match way:
        case "comes again":
            run.arrive("b")
        case "leaves":
            run.leave("b")
        case _:
            run.die("b")
    run.now += 1
    assert run.completes() == (["a", "b", "late"] if way == "comes again" else ["a", "late"])


def test_r2_nodes_waiting_are_those_a_regroup_now_would_admit() -> None:
    """Promise: "`num_nodes_waiting` counts the arrivals that a regroup now would admit"."""
    run = two_of_three()
    run.arrive("x")
    assert run.progress.waiting == 1
    run.arrive("y")
    assert run.progress.waiting == 1, "there is room for one"


def test_r2_members_that_left_to_regroup_are_waiting() -> None:
    """Promise: "members that already left in order to regroup included"."""
    run = two_of_three()
    run.arrive("a")
    assert run.progress.waiting == 1


def test_r2_a_failed_member_that_rejoins_is_noticed() -> None:
    """Promise: "(else a failed member that rejoins is noticed by nobody)"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    run.commit()
    run.die("b")
    assert run.progress.waiting == 0
    run.arrive("b")
    assert run.progress.waiting == 1


def test_r2_spares_and_incomplete_units_are_not_waiting() -> None:
    """Promise: "spares and incomplete units count 0"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "spare")
    run.commit()
    assert run.progress.waiting == 0
    units = HandFed(needed=2, capacity=4, unit=2, last_call=0)
    units.arrive("a", "b")
    units.commit()
    units.arrive("half")
    assert units.progress.waiting == 0
    units.arrive("other half")
    assert units.progress.waiting == 2


def test_r2_each_round_has_a_number_above_the_last() -> None:
    """Promise: "One round of a run is current at a time"."""
    run = two_of_three()
    numbers = []
    for _ in range(3):
        run.arrive("a", "b")
        run.commit()
        numbers.append(run.view.number)
    assert numbers == [1, 2, 3]
