"""The orders in which a round's members get their ranks (promise R12).

A rank order is a function that gets the next members, in order of arrival, and the last round's ranks, and returns
these members in order of rank. Only the coordinator calls a rank order, so all members get the same ranks.

If more nodes have arrived than a round may have, members of the last round are admitted first. A rank order may have a
method that chooses among the other nodes, the candidates, in order of arrival:

    choose(candidates, kept, count)

`choose` returns `count` of the candidates; the nodes in `kept` become members in any case. Without `choose`, the first
candidates are admitted. If even the last round's members are too many, they are the candidates, by rank, and `kept` is
empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdzv.core.state import NodeRecord

DOMAINS_NAMED_MOST = 8

RankOrder = Callable[[Sequence["NodeRecord"], Mapping[str, int]], Sequence["NodeRecord"]]


def survivors_first(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Return survivors by last rank, then newcomers by arrival, so that rank 0 has the state that newcomers lack."""
    survivors = sorted(
        (record for record in arrivals if record.node_id in previous), key=lambda record: previous[record.node_id]
    )
    return [*survivors, *(record for record in arrivals if record.node_id not in previous)]


def survivors_then_name(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Return survivors by last rank, then newcomers by name as `name_order` does."""
    return survivors_first(name_order(arrivals, previous), previous)


def keep_in_place(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Return survivors at their last ranks, and newcomers, by arrival, at the free ranks: a newcomer may be rank 0.

    In a smaller round, survivors whose last ranks no longer exist get free ranks before newcomers do.
    """
    return _fill_wanted_places(arrivals, previous, lambda record: previous.get(record.node_id))


def arrival_order(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG001
    """Return the nodes by arrival."""
    return list(arrivals)


def name_order(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG001
    """Return the nodes in the natural order of their names: host10 after host2."""
    return sorted(arrivals, key=lambda record: natsort_key(record.node_id))


def by_requested_rank(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Return the nodes at their `requested_rank`; the other nodes fill the gaps in the order of `survivors_first`.

    If several nodes request one rank, the first to arrive gets it. A requested rank beyond the world size is ignored.
    """
    return _fill_wanted_places(arrivals, previous, lambda record: record.requested_rank)


def _fill_wanted_places(
    arrivals: Sequence[NodeRecord], previous: Mapping[str, int], place_of: Callable[[NodeRecord], int | None]
) -> Sequence[NodeRecord]:
    places: list[NodeRecord | None] = [None] * len(arrivals)
    rest = []
    for record in arrivals:
        wanted = place_of(record)
        if wanted is not None and 0 <= wanted < len(places) and places[wanted] is None:
            places[wanted] = record
        else:
            rest.append(record)
    fill = iter(survivors_first(rest, previous))
    return [record if record is not None else next(fill) for record in places]


@dataclass(frozen=True, slots=True)
class by_topology:  # noqa: N801  used like the functions above; `choose` also selects
    """The order by an attribute's value (the domain), then by name, both in natural order.

    If not all nodes can be members, at most one domain is split. As far as the count allows, domains of current members
    are chosen first, then the domains that arrived first. Nodes without the attribute form one domain.
    """

    attribute: str

    def __call__(self, arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG002
        """Return the nodes in order of rank."""
        return sorted(arrivals, key=lambda record: (natsort_key(self._domain(record)), natsort_key(record.node_id)))

    def choose(self, candidates: Sequence[NodeRecord], kept: Sequence[NodeRecord], count: int) -> Sequence[NodeRecord]:
        """Return `count` of the candidates."""
        inhabited = {self._domain(record) for record in kept}
        domains: dict[str, list[NodeRecord]] = {}
        for record in candidates:
            domains.setdefault(self._domain(record), []).append(record)
        groups = sorted(domains.values(), key=lambda group: self._domain(group[0]) not in inhabited)
        sums = [1]  # bit n of sums[i] is 1 if some of groups[i:] have n nodes together
        for group in reversed(groups):
            sums.append((sums[-1] | sums[-1] << len(group)) & ((1 << count + 1) - 1))
        sums.reverse()
        chosen: list[NodeRecord] = []
        left_out: list[NodeRecord] = []
        whole = sums[0].bit_length() - 1
        for group, later in zip(groups, sums[1:], strict=True):
            rest = whole - len(chosen) - len(group)
            (chosen if rest >= 0 and later >> rest & 1 else left_out).extend(group)
        return [*chosen, *left_out[: count - whole]]

    def _domain(self, record: NodeRecord) -> str:
        return record.attributes.get(self.attribute, "")


def natsort_key(name: str) -> list[tuple[int, int, str, str]]:
    """Return a sort key in which numbers compare as numbers: host2 before host10."""
    return [_part_sort_key(part) for part in re.findall("[0-9]+|[^0-9]+", name)]


def _part_sort_key(part: str) -> tuple[int, int, str, str]:
    """Return a sort key: numbers compare by length, then digits, as `int` rejects a number of thousands of digits."""
    if part[0] not in "0123456789":
        return (1, 0, part, part)
    digits = part.lstrip("0")
    return (0, len(digits), digits, part)


def rank_order_named(name: str | RankOrder) -> RankOrder:
    """Return the order that a valid setting names."""
    if not isinstance(name, str):
        return name
    kind, _, attribute = name.partition(":")
    if kind == "topology":
        return by_topology(attribute or "domain")
    orders: dict[str, RankOrder] = {
        "survivors_then_name": survivors_then_name,
        "survivors": survivors_first,
        "in_place": keep_in_place,
        "arrival": arrival_order,
        "name": name_order,
        "requested": by_requested_rank,
    }
    return orders[name]


def member_with_most_steps(records: Sequence[NodeRecord]) -> tuple[int, int] | None:
    """Return the rank of the member that has finished the largest step, and that step; None if no step is finished."""
    progress = [-1 if record.progress is None else record.progress for record in records]
    most = max(progress)
    return (progress.index(most), most) if most >= 0 else None


def fill_units(records: Sequence[NodeRecord], *, unit: int, attribute: str) -> list[NodeRecord]:
    """Return the records that fill complete units: each unit has `unit` nodes with the same value of the attribute.

    The units are in order of their first records. Nodes without the attribute count as nodes with the same value.
    """
    open_units: dict[str | None, list[NodeRecord]] = {}
    units: list[tuple[int, list[NodeRecord]]] = []
    places = {record.arrival: place for place, record in enumerate(records)}
    for record in records:
        domain = record.attributes.get(attribute)
        members = open_units.setdefault(domain, [])
        members.append(record)
        if len(members) == unit:
            units.append((places[members[0].arrival], members))
            del open_units[domain]
    return [record for _, members in sorted(units, key=lambda one: one[0]) for record in members]


def describe_domain_counts(records: Iterable[NodeRecord], *, attribute: str) -> str:
    """Return the number of nodes per value of an attribute: "1 in r1, 2 in r2, 1 without it"."""
    counts = Counter(record.attributes.get(attribute) for record in records)
    named = [f"{count} in {domain}" for domain, count in sorted(counts.items(), key=str) if domain is not None]
    return ", ".join([*named[:DOMAINS_NAMED_MOST], *([f"{counts[None]} without it"] if None in counts else [])])
