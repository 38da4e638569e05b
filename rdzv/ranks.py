"""Pure: in which order the members of a round get their ranks (promise R12).

An order is a function from the nodes that will be members, in order of arrival, and the ranks of the last round, to the
same nodes in order of rank. The coordinator alone calls it, so all members agree whatever it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from rdzv.state import NodeRecord

__all__ = [
    "RankOrder",
    "by_arrival",
    "by_name",
    "by_request",
    "by_topology",
    "natural",
    "order_named",
    "survivors_first",
]

RankOrder = Callable[[Sequence["NodeRecord"], Mapping[str, int]], Sequence["NodeRecord"]]


def survivors_first(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Survivors of the last round keep their order, newcomers fill in behind, as they came.

    Rank 0 is then always one who was there before, if anybody was: it has the state that the newcomers lack.
    """
    survivors = sorted(
        (record for record in arrivals if record.node_id in previous), key=lambda record: previous[record.node_id]
    )
    return [*survivors, *(record for record in arrivals if record.node_id not in previous)]


def by_arrival(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG001
    """First come, first ranked, every round anew."""
    return list(arrivals)


def by_name(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG001
    """By the node's name, in natural order: host10 comes after host2."""
    return sorted(arrivals, key=lambda record: natural(record.node_id))


def by_request(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """By `requested_rank` where it can be had, first come first served; the others fill the gaps as `survivors_first`.

    A rank beyond the world size, or one that somebody else asked for earlier, cannot be had.
    """
    places: list[NodeRecord | None] = [None] * len(arrivals)
    rest = []
    for record in arrivals:
        wanted = record.requested_rank
        if wanted is not None and 0 <= wanted < len(places) and places[wanted] is None:
            places[wanted] = record
        else:
            rest.append(record)
    fill = iter(survivors_first(rest, previous))
    return [record if record is not None else next(fill) for record in places]


def by_topology(attribute: str) -> RankOrder:
    """Nodes of one domain get adjacent ranks: by the value of an attribute, in natural order, then by name."""

    def order(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG001
        return sorted(
            arrivals, key=lambda record: (natural(record.attributes.get(attribute, "")), natural(record.node_id))
        )

    return order


def natural(name: str) -> list[tuple[int, int, str, str]]:
    """A sort key in which numbers count as numbers: host2 before host10."""
    return [_natural(part) for part in re.findall("[0-9]+|[^0-9]+", name)]


def _natural(part: str) -> tuple[int, int, str, str]:
    """Numbers by length, then digit by digit: int() refuses thousands of digits, and names come from others."""
    if part[0] not in "0123456789":
        return (1, 0, part, part)
    digits = part.lstrip("0")
    return (0, len(digits), digits, part)


def order_named(name: str | RankOrder) -> RankOrder:
    """The order that a setting names: survivors, arrival, name, requested, or topology:ATTRIBUTE.

    Raises:
        RendezvousSettingsError: It names none.
    """
    if not isinstance(name, str):
        return name
    kind, _, attribute = name.partition(":")
    if kind == "topology":
        return by_topology(attribute or "domain")
    orders: dict[str, RankOrder] = {
        "survivors": survivors_first,
        "arrival": by_arrival,
        "name": by_name,
        "requested": by_request,
    }
    if name not in orders:
        raise RendezvousSettingsError(
            f"rank_order={name!r} is none of {', '.join(orders)} and topology:ATTRIBUTE; choose one of these"
        )
    return orders[name]
