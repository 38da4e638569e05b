"""The settings of a resized run: the new minimum and maximum of nodes, and a list of the earlier ones.

A node may be started with a minimum and maximum from before a resize. If the run's settings list the node's pair under
`RESIZED_FROM`, the node takes over the run's present pair; otherwise it gets an error (promise R18).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rdzv.config.rules import check_sizes, max_in_whole_units, min_in_whole_units
from rdzv.config.settings import PARAMETERS, describe_difference

if TYPE_CHECKING:
    from collections.abc import Mapping

RESIZED_FROM: Final = "resized_from"  # the key of the list of earlier [minimum, maximum] pairs in a run's settings
FORMER_MOST: Final = 16  # the most pairs kept in `RESIZED_FROM`: the first one, and the latest


def with_resize(agreed: Mapping[str, Any], *, min_nodes: int | None, max_nodes: int | None) -> dict[str, Any]:
    """Return a run's settings with new numbers of nodes (None: unchanged); raise an error if no round can complete."""
    old = [agreed["min_nodes"], agreed["max_nodes"]]
    given = {"min_nodes": min_nodes, "max_nodes": max_nodes}
    read = [None if value is None else PARAMETERS[name].read(value) for name, value in given.items()]
    new = least, most = [was if number is None else number for was, number in zip(old, read, strict=True)]
    check_sizes(least, most, agreed["node_unit"])
    if new == old:
        return dict(agreed)
    former = [list(pair) for pair in agreed.get(RESIZED_FROM, ()) if list(pair) not in (old, new)] + [old]
    if len(former) > FORMER_MOST:
        former = [former[0], *former[-FORMER_MOST + 1 :]]
    return {**agreed, "min_nodes": least, "max_nodes": most, RESIZED_FROM: former}


def differs_by_resize(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return True if the run's settings differ from a node's own only by resizes."""
    numbers = {name: ours[name] for name in ("min_nodes", "max_nodes")}
    if describe_difference(ours, {**theirs, **numbers}):
        return False
    return list(numbers.values()) in [list(pair) for pair in theirs.get(RESIZED_FROM, ())]


def unit_limits(agreed: Mapping[str, Any]) -> tuple[int, int]:
    """Return `min_nodes` rounded up, and `max_nodes` rounded down, to a multiple of `node_unit`."""
    unit = agreed["node_unit"]
    return min_in_whole_units(agreed["min_nodes"], unit), max_in_whole_units(agreed["max_nodes"], unit)


def describe_size(min_nodes: int, max_nodes: int) -> str:
    """Return numbers of nodes in words: "2 to 4 nodes"."""
    count = f"{min_nodes}" if min_nodes == max_nodes else f"{min_nodes} to {max_nodes}"
    return f"{count} node{'' if max_nodes == 1 else 's'}"
