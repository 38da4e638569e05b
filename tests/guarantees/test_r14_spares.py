"""R14 **Spares.** Nodes beyond `max_nodes` (or beyond the unit) stay as hot spares, keep no one waiting, survive rounds
without failing, and are taken in the moment there is room.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

from rdzv.core.decision import Parked, Refused
from tests.support.hand_fed import HandFed


def is_spare(run: HandFed, name: str) -> bool:
    """Whether a node that every round so far has passed over is told that it is a spare."""
    answer = run.follow(name, passed_over=run.round.revision if run.round else 0)
    return isinstance(answer, Parked) and answer.suspended and answer.reason.startswith("a spare")


# What is decided.


def test_r14_nodes_beyond_max_nodes_stay_as_spares_and_keep_no_one_waiting() -> None:
    """Promise: "Nodes beyond `max_nodes` ... stay as hot spares, keep no one waiting"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "c", "d")
    assert run.commit() == ["a", "b"]
    assert run.progress.waiting == 0
    assert is_spare(run, "c")
    assert is_spare(run, "d")


def test_r14_nodes_beyond_the_unit_stay_as_spares() -> None:
    """Promise: "(or beyond the unit)"."""
    run = HandFed(needed=2, capacity=8, unit=2, last_call=30)
    run.arrive("a", "b", "c")
    run.now += 30
    assert run.commit() == ["a", "b"]
    assert is_spare(run, "c")


def test_r14_spares_survive_rounds_without_failing() -> None:
    """Promise: "survive rounds without failing"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "spare")
    run.commit()
    for _ in range(3):
        run.arrive("a", "b")
        assert run.commit() == ["a", "b"]
        assert is_spare(run, "spare")


def test_r14_a_spare_is_taken_in_the_moment_there_is_room() -> None:
    """Promise: "are taken in the moment there is room"; whoever waits longest comes first."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "later in the alphabet", "earlier")
    run.commit()
    run.die("a")
    assert run.progress.waiting == 1
    assert not is_spare(run, "later in the alphabet")
    assert is_spare(run, "earlier")
    run.arrive("b")
    assert run.completes() == ["b", "later in the alphabet"]


def test_r14_the_same_spare_is_taken_in_by_a_successor() -> None:
    """Promise: "are taken in the moment there is room", whoever coordinates."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "z", "y")
    run.commit()
    run.die("a")
    run.succeed(run.progress)
    run.arrive("b")
    assert run.completes() == ["b", "z"]


def test_r14_a_spare_of_a_closed_run_is_told_that_it_was_one() -> None:
    """Promise R6: "spares leave gracefully"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "spare")
    run.commit()
    run.closed = True
    assert run.round is not None
    answer = run.follow("spare", passed_over=run.round.revision)
    assert isinstance(answer, Refused)
    assert answer.spare
