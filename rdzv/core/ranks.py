"""Pure: in which order the members of a round get their ranks (promise R12).

An order is a function from the nodes that will be members, in order of arrival, and the ranks of the last round, to the
same nodes in order of rank. The coordinator alone calls it, so all members agree whatever it does.

How many ranks change for those who stay, when some go and as many newcomers come:

    survivors   keep their order and close ranks: everybody above the lowest rank that was lost moves down, by as many
                as were lost below. Rank 0 is one who was there before.
    survivors_then_name
                the same, but newcomers come in the natural order of their names: so does the first round.
    in_place    keep their very ranks, and newcomers take those that were lost: nobody moves, or, if the round has
                become smaller, only those whose rank there is no more. Nothing changes fewer. But a newcomer may get
                rank 0.

An order may also have a say in *who* is a member, when more nodes have come than a round takes: by a method

    choose(candidates, kept, count)

which gives `count` of the candidates, who come in order of arrival; `kept` are members in any case. An order without it
takes them as they came. Members of the last round come before newcomers, whatever the order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from rdzv.core.state import NodeRecord

__all__ = [
    "RankOrder",
    "by_arrival",
    "by_name",
    "by_request",
    "by_topology",
    "domains_of",
    "in_place",
    "in_units",
    "natural",
    "newest_of",
    "order_named",
    "survivors_first",
    "survivors_then_name",
]

DOMAINS_NAMED_MOST = 8

RankOrder = Callable[[Sequence["NodeRecord"], Mapping[str, int]], Sequence["NodeRecord"]]


def survivors_first(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Survivors of the last round keep their order, newcomers fill in behind, as they came.

    Rank 0 is then always one who was there before, if anybody was: it has the state that the newcomers lack.
    """
    survivors = sorted(
        (record for record in arrivals if record.node_id in previous), key=lambda record: previous[record.node_id]
    )
    return [*survivors, *(record for record in arrivals if record.node_id not in previous)]


def survivors_then_name(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """As `survivors_first`, with newcomers in the natural order of their names: host10 comes after host2."""
    return survivors_first(by_name(arrivals, previous), previous)


def in_place(arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:
    """Survivors keep their very ranks, and newcomers take those that were lost, from the lowest, as they came.

    Survivors whose rank there is no more, because the round has become smaller, take lost ones before newcomers do.
    """
    places: list[NodeRecord | None] = [None] * len(arrivals)
    rest = []
    for record in survivors_first(arrivals, previous):
        rank = previous.get(record.node_id, len(places))
        if rank < len(places):
            places[rank] = record
        else:
            rest.append(record)
    fill = iter(rest)
    return [record if record is not None else next(fill) for record in places]


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


@dataclass(frozen=True, slots=True)
class by_topology:  # noqa: N801  an order like the others, that also chooses
    """Nodes of one domain get adjacent ranks: by the value of an attribute, in natural order, then by name.

    If not all can be members, whole domains are preferred: of those that the candidates are from, each is taken whole
    or left whole, but for one at most. Domains that members are from already come first, then those that came first, as
    far as the count comes out. Nodes that say nothing of their domain are one of their own.
    """

    attribute: str

    def __call__(self, arrivals: Sequence[NodeRecord], previous: Mapping[str, int]) -> Sequence[NodeRecord]:  # noqa: ARG002
        """In order of rank."""
        return sorted(arrivals, key=lambda record: (natural(self._domain(record)), natural(record.node_id)))

    def choose(self, candidates: Sequence[NodeRecord], kept: Sequence[NodeRecord], count: int) -> Sequence[NodeRecord]:
        """Choose `count` of the candidates, in whole domains as far as possible."""
        inhabited = {self._domain(record) for record in kept}
        domains: dict[str, list[NodeRecord]] = {}
        for record in candidates:
            domains.setdefault(self._domain(record), []).append(record)
        groups = sorted(domains.values(), key=lambda group: self._domain(group[0]) not in inhabited)
        # Bit n of sums[i]: whether some of the groups from i on have n nodes together.
        sums = [1]
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
    """Return the order that a setting names: one of `RANK_ORDERS`, or topology:ATTRIBUTE.

    Raises:
        RendezvousSettingsError: It names none.
    """
    if not isinstance(name, str):
        return name
    kind, _, attribute = name.partition(":")
    if kind == "topology":
        return by_topology(attribute or "domain")
    orders: dict[str, RankOrder] = {
        "survivors_then_name": survivors_then_name,
        "survivors": survivors_first,
        "in_place": in_place,
        "arrival": by_arrival,
        "name": by_name,
        "requested": by_request,
    }
    if name not in orders:
        raise RendezvousSettingsError(
            f"rank_order={name!r} is none of {', '.join(orders)} and topology:ATTRIBUTE; choose one of these"
        )
    return orders[name]


def newest_of(records: Sequence[NodeRecord]) -> tuple[int, int] | None:
    """Rank and last finished step of the record that has finished the most; the lowest rank of several."""
    progress = [-1 if record.progress is None else record.progress for record in records]
    most = max(progress)
    return (progress.index(most), most) if most >= 0 else None


def in_units(records: Sequence[NodeRecord], *, unit: int, attribute: str) -> list[NodeRecord]:
    """Put records into whole units that do not straddle two domains, and leave out what does not fill one.

    A domain is a value of the attribute; nodes without it are one of their own. The units come in the order of their
    first records, and what was in order stays so within a unit.

    Args:
        records: In order of preference, or of rank.
        unit: How many make one.
        attribute: Whose value all nodes of a unit share.
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


def domains_of(records: Iterable[NodeRecord], *, attribute: str) -> str:
    """Return how many nodes are in each domain, in words: "1 in r1, 2 in r2, 1 without it"."""
    counts = Counter(record.attributes.get(attribute) for record in records)
    named = [f"{count} in {domain}" for domain, count in sorted(counts.items(), key=str) if domain is not None]
    shown = [*named[:DOMAINS_NAMED_MOST], *([f"{counts[None]} without it"] if None in counts else [])]
    return ", ".join(shown)
