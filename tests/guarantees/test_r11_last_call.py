"""R11 **Last call** starts when `min_nodes` is reached and is never extended by later joins.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.hand_fed import HandFed

# What is decided.


@given(st.lists(st.floats(0.1, 29.9), max_size=10))
def test_r11_last_call_is_never_extended_by_later_joins(joins: list[float]) -> None:
    """Promise: "starts when `min_nodes` is reached and is never extended by later joins"."""
    run = HandFed(needed=2, capacity=99, last_call=30)
    run.arrive("a")
    run.now += 100
    run.arrive("b")
    began = run.now
    for index, at in enumerate(sorted(joins)):
        run.now = began + at
        run.arrive(f"late{index}")
        assert run.completes() is None
    run.now = began + 30
    assert len(run.completes() or ()) == 2 + len(joins)


def test_r11_last_call_starts_anew_if_the_count_falls_below_the_minimum() -> None:
    """Promise: "It starts anew if the count falls below the minimum"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b")
    run.now += 29
    run.die("a")
    run.now += 10
    run.arrive("c")
    run.now += 29
    assert run.completes() is None
    run.now += 1
    assert run.completes() == ["b", "c"]


def test_r11_last_call_runs_also_while_members_block_and_completing_needs_both() -> None:
    """Promise: "It runs also while R2 still blocks; completing needs both"."""
    run = HandFed(needed=2, capacity=4, last_call=30, early_last_call=False)
    run.arrive("a", "b", "c", "d")
    run.commit()
    run.arrive("a", "b")
    run.die("c")
    run.now += 30
    assert run.completes() is None, "d is still in the round"
    run.die("d")
    assert run.completes() == ["a", "b"], "and the last call has run meanwhile"


def test_r11_in_a_re_rendezvous_it_ends_as_soon_as_nobody_else_is_known_to_be_coming() -> None:
    """Promise: "every live member of the last round and every waiting node is in"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b", "c", "d")
    run.commit()
    run.die("d")
    run.arrive("a", "b")
    assert run.completes() is None
    run.arrive("c")
    assert run.completes() == ["a", "b", "c"]


def test_r11_those_who_prefer_to_wait_for_a_replacement_can() -> None:
    """Promise: "`early_last_call=False` for those who prefer to wait for a replacement"."""
    run = HandFed(needed=2, capacity=4, last_call=30, early_last_call=False)
    run.arrive("a", "b", "c", "d")
    run.commit()
    run.die("d")
    run.arrive("a", "b", "c")
    run.now += 29
    assert run.completes() is None
    run.arrive("replacement")
    assert run.completes() == ["a", "b", "c", "replacement"]


def test_r11_a_successor_continues_a_last_call() -> None:
    """Promise R7: "a running last call is continued, not begun again"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b")
    run.now += 10
    said, said_at = run.progress, run.now
    run.now += 5
    run.succeed(said, said_at=said_at)
    run.now += 14.9
    assert run.completes() is None
    run.now += 0.2
    assert run.completes() == ["a", "b"]
