"""R13 **World size in units.** `node_unit=k` makes the world size a multiple of k.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

import pytest

from rdzv.config.settings import parse
from rdzv.errors import RendezvousSettingsError
from tests.support.hand_fed import HandFed

# What is decided.


@pytest.mark.parametrize(("there", "size"), [(2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (9, 6)])
def test_r13_the_world_size_is_a_multiple_of_the_unit(there: int, size: int) -> None:
    """Promise: "`node_unit=k` makes the world size a multiple of k"."""
    run = HandFed(needed=2, capacity=6, unit=2, last_call=30)
    run.arrive(*(f"n{index}" for index in range(there)))
    run.now += 30
    assert len(run.completes() or ()) == size


def test_r13_rounding_never_falls_below_the_minimum() -> None:
    """Promise: "the minimum is rounded up to a unit": DLRover once rounded down, even to zero."""
    settings = parse("tcp://head/job?min_nodes=3&max_nodes=8&node_unit=4", {}, {})
    assert (settings.needed, settings.capacity) == (4, 8)
    run = HandFed(needed=settings.needed, capacity=settings.capacity, unit=settings.node_unit, last_call=30)
    run.arrive("a", "b", "c")
    run.now += 30
    assert run.completes() is None
    run.arrive("d")
    run.now += 30
    assert run.completes() == ["a", "b", "c", "d"]


def test_r13_a_minimum_then_above_max_nodes_is_an_error() -> None:
    """Promise: "a minimum then above `max_nodes` is an error"."""
    with pytest.raises(RendezvousSettingsError, match="node_unit=4"):
        parse("tcp://head/job?min_nodes=3&max_nodes=3&node_unit=4", {}, {})
