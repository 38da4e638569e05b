"""The room `rdzv.config.resizing`."""

from typing import Any

import pytest

from rdzv.config.resizing import FORMER_MOST, RESIZED_FROM, describe_size, differs_by_resize, unit_limits, with_resize
from rdzv.config.settings import parse
from rdzv.errors import RendezvousSettingsError


def shared(query: str = "min_nodes=2&max_nodes=4") -> dict[str, Any]:
    return parse(f"tcp://127.0.0.1:29400/job?{query}", {}, {}).shared()


def test_a_resize_changes_the_numbers_and_keeps_the_former_ones() -> None:
    once = with_resize(shared(), min_nodes=4, max_nodes=8)
    assert (once["min_nodes"], once["max_nodes"], once[RESIZED_FROM]) == (4, 8, [[2, 4]])
    twice = with_resize(once, min_nodes=None, max_nodes=6)
    assert (twice["min_nodes"], twice["max_nodes"], twice[RESIZED_FROM]) == (4, 6, [[2, 4], [4, 8]])
    assert with_resize(twice, min_nodes=4, max_nodes=None) == twice
    assert {name: twice[name] for name in twice if "nodes" not in name and name != RESIZED_FROM} == {
        name: value for name, value in shared().items() if "nodes" not in name
    }


def test_a_node_with_any_former_size_takes_that_of_the_run() -> None:
    run = with_resize(with_resize(shared(), min_nodes=4, max_nodes=8), min_nodes=1, max_nodes=2)
    assert differs_by_resize(run, shared())
    assert differs_by_resize(run, shared("min_nodes=4&max_nodes=8"))
    assert not differs_by_resize(run, shared("min_nodes=3&max_nodes=8"))
    assert not differs_by_resize(run, shared("min_nodes=2&max_nodes=4&last_call_timeout=7")), "that was not resized"
    assert not differs_by_resize(shared("min_nodes=1&max_nodes=2"), shared())


def test_the_first_numbers_are_kept_after_any_number_of_resizes() -> None:
    run = shared()
    for most in range(5, 50):
        run = with_resize(run, min_nodes=None, max_nodes=most)
    assert len(run[RESIZED_FROM]) == FORMER_MOST
    assert differs_by_resize(run, shared())
    assert differs_by_resize(run, shared("min_nodes=2&max_nodes=48"))
    assert [2, 4] not in with_resize(run, min_nodes=2, max_nodes=4)[RESIZED_FROM], "these are its numbers now"


@pytest.mark.parametrize(
    ("least", "most", "query", "says"),
    [
        (5, None, "min_nodes=2&max_nodes=4", "max_nodes=4 must not be less than min_nodes=5"),
        (0, None, "min_nodes=2&max_nodes=4", "min_nodes=0 must be a whole number from 1"),
        (3, 3, "min_nodes=2&max_nodes=4&node_unit=2", "node_unit=2 is 4, and must not be more than max_nodes=3"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(least: int, most: int | None, query: str, says: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=says):
        with_resize(shared(query), min_nodes=least, max_nodes=most)


def test_sizes_are_in_units_and_have_words() -> None:
    assert unit_limits(with_resize(shared("min_nodes=2&max_nodes=4&node_unit=2"), min_nodes=3, max_nodes=7)) == (4, 6)
    assert [describe_size(*pair) for pair in ((1, 1), (2, 2), (1, 4))] == ["1 node", "2 nodes", "1 to 4 nodes"]
