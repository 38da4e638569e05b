"""R4 **A crash before completion** drops that node and the rest complete without it.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

import pytest

from tests.support.hand_fed import HandFed

# What is decided.


@pytest.mark.parametrize("way", ["dies", "withdraws"])
def test_r4_the_rest_complete_without_a_node_that_goes_before(way: str) -> None:
    """Promise: "A crash before completion drops that node and the rest complete without it"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b", "c")
    run.now += 20
    if way == "dies":
        run.die("a")
    else:
        run.leave("a")
    run.now += 10
    assert run.completes() == ["b", "c"]


def test_r4_a_node_that_goes_does_not_begin_the_last_call_anew_while_enough_remain() -> None:
    """Promise: "the rest complete without it", when they would have."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b", "c")
    run.now += 29
    run.die("b")
    run.now += 1
    assert run.completes() == ["a", "c"]


def test_r4_too_few_that_remain_wait_for_more() -> None:
    """Promise: "drops that node": a round below the minimum does not complete."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    run.die("a")
    run.now += 3600
    assert run.completes() is None
    run.arrive("c")
    assert run.completes() == ["b", "c"]


def test_r4_a_node_that_came_again_is_taken_in_as_it_is_now() -> None:
    """Promise: "A completed round holds no node whose lapse or withdrawal precedes the commit"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    run.die("a")
    run.arrive("a")
    run.commit()
    assert {member.node_id: member.arrival for member in run.members} == {"a": 4, "b": 2}


# That a commit is refused if a member lapses while it is on its way is shown by `tests/sim`, at the commit's revision.
