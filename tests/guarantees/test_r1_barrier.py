"""R1 **Barrier.** Completes at once at `max_nodes`; otherwise once `min_nodes` are in and the last call is over.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

from rdzv.core.decision import Parked
from tests.support.hand_fed import HandFed

# What is decided.


def test_r1_a_round_completes_at_once_at_max_nodes() -> None:
    """Promise: "Completes at once at `max_nodes`"."""
    run = HandFed(needed=2, capacity=4)
    run.arrive("a", "b", "c")
    assert run.completes() is None
    run.arrive("d")
    assert run.completes() == ["a", "b", "c", "d"]


def test_r1_otherwise_it_completes_once_min_nodes_are_in_and_the_last_call_is_over() -> None:
    """Promise: "otherwise once `min_nodes` are in and the last call is over"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a")
    run.now += 600
    assert run.completes() is None, "the last call has nothing to say before enough are in"
    run.arrive("b")
    assert run.completes() is None
    run.now += 30
    assert run.completes() == ["a", "b"]


def test_r1_the_timeout_counts_while_too_few_are_in() -> None:
    """Promise: "fails with `RendezvousTimeoutError` ... if that does not happen within `join_timeout`"."""
    run = HandFed(needed=2)
    clock = run.clock(600)
    run.arrive("a")
    answer = run.follow("a")
    assert isinstance(answer, Parked)
    clock.set(suspended=answer.suspended, now=run.now)
    assert clock.deadline(run.now) == run.now + 600
    run.now += 600
    assert clock.left(run.now) == 0


def test_r1_the_timeout_counts_while_too_few_are_in_also_in_units() -> None:
    """Promise: "fails ... if that does not happen within `join_timeout`": nobody is a spare of a round too small."""
    run = HandFed(needed=4, capacity=8, unit=4)
    run.arrive("a", "b", "c")
    answer = run.follow("c")
    assert isinstance(answer, Parked)
    assert not answer.suspended


def test_r1_the_timeout_counts_while_a_busy_old_member_is_waited_for() -> None:
    """Promise: "The timeout bounds the whole call, waiting for a busy old member included"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b")
    run.commit()
    run.arrive("a")
    answer = run.follow("a", known_round=0, was_member=True)
    assert isinstance(answer, Parked)
    assert not answer.suspended


def test_r1_the_timeout_stands_still_while_only_the_last_call_runs() -> None:
    """Promise: "it is suspended while `min_nodes` are in and only the last call runs, and for spares"."""
    run = HandFed(needed=2, capacity=4, last_call=3600)
    clock = run.clock(600)
    run.arrive("a", "b")
    answer = run.follow("a")
    assert isinstance(answer, Parked)
    clock.set(suspended=answer.suspended, now=run.now)
    run.now += 3000
    assert clock.left(run.now) == 600
    assert clock.deadline(run.now) is None


def test_r1_the_timeout_stands_still_for_spares() -> None:
    """Promise: "it is suspended ... for spares"."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "c")
    run.commit()
    assert run.round is not None
    answer = run.follow("c", passed_over=run.round.revision)
    assert isinstance(answer, Parked)
    assert answer.suspended
