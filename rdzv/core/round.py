"""Pure: a round that was completed: who is in it with which rank, and how it travels, to and from plain data.

The round itself is small, and told to every member. Who has which rank and what each brought is beside it, in buckets.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rdzv.core.plain_data import attributes_of, maybe, names_of, of, pack, unpack
from store.fast_init import constructor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "ARRIVALS_MOST",
    "BUCKET_SIZE",
    "GONE_MOST",
    "RUNS_MOST",
    "SINCE_MOST",
    "Arrivals",
    "Kept",
    "Member",
    "Participant",
    "Round",
    "bucket_of",
    "pack_members",
    "pack_roster",
    "place",
    "unpack_members",
    "unpack_roster",
]

BUCKET_SIZE = 16  # nodes in one bucket: what a node reads to learn its rank stays below a kilobyte
SINCE_MOST = 16  # node ids of each kind that a round itself names: every node gets them
ARRIVALS_MOST = 512  # members up to which a round itself says who has which rank, in two bytes each ...
GONE_MOST = 64  # members of the last round that are named by rank because they are not in this one
RUNS_MOST = 128  # ... or in so many runs of arrivals one after the other, however many members: in a kilobyte, too


def bucket_of(node_id: str, buckets: int) -> int:
    """Return which bucket of ranks a node is in; the same on every machine."""
    return zlib.crc32(node_id.encode()) % buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's place in a completed round: its rank, and which arrival of it was taken in."""

    node_id: str
    rank: int
    arrival: int


def pack_members(members: Sequence[Member]) -> bytes:
    """Pack one bucket of ranks."""
    return pack([(member.node_id, member.rank, member.arrival) for member in members])


def unpack_members(value: bytes) -> list[Member]:
    """Unpack one bucket of ranks."""

    def build(plain: Sequence[Any]) -> list[Member]:
        return [
            Member(node_id=of(str, node_id), rank=of(int, rank), arrival=of(int, arrival))
            for node_id, rank, arrival, *_ in plain
        ]

    return unpack("a bucket of ranks", value, build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A member of a round, as every member may read it.

    Attributes:
        node_id: What it is called.
        rank: Its place, from 0.
        address: Where the others reach it.
        payload: What it brought.
        attributes: What it said of itself.
    """

    node_id: str
    rank: int
    address: str
    payload: Any = None
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def pack_roster(participants: Sequence[Participant]) -> bytes:
    """Pack one bucket of the roster."""
    return pack([(one.node_id, one.rank, one.address, one.payload, dict(one.attributes)) for one in participants])


def unpack_roster(value: bytes) -> list[Participant]:
    """Unpack one bucket of the roster."""

    def build(plain: Sequence[Any]) -> list[Participant]:
        return [
            Participant(
                node_id=of(str, node_id),
                rank=of(int, rank),
                address=of(str, address),
                payload=payload,
                attributes=attributes_of(attributes),
            )
            for node_id, rank, address, payload, attributes, *_ in plain
        ]

    return unpack("a bucket of the roster", value, build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Which arrival has which rank in a round, as far as the round itself says so: every member is sent this.

    Those who come for the first time are ranked as they came, and came one after the other: a few runs say it, however
    many they are. Members of the last round come again in any order, and keep their ranks.

    Attributes:
        runs: The first arrival of each run, and how many follow it one by one, in order of rank.
        least: Else, the least arrival, and ...
        after: ... by how much each is above it, in order of rank, in two bytes.
    """

    runs: tuple[tuple[int, int], ...] = ()
    least: int = 0
    after: bytes = b""

    @classmethod
    def of(cls, arrivals: Sequence[int]) -> Arrivals:
        """Return these, in order of rank; none, if they are too many for either way, or too far apart."""
        runs = tuple(_runs(arrivals))
        if len(runs) <= min(RUNS_MOST, len(arrivals) // 4):  # else two bytes for each member are less
            return cls(runs=runs)
        least = min(arrivals, default=0)
        if not 0 < len(arrivals) <= ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
            return cls()
        return cls(least=least, after=struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals)))

    def __bool__(self) -> bool:
        return bool(self.runs or self.after)

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival; None: it has none, or it is not said here."""
        rank = 0
        for first, count in self.runs:
            if first <= arrival < first + count:
                return rank + arrival - first
            rank += count
        with contextlib.suppress(ValueError):
            return struct.unpack(f">{len(self.after) // 2}H", self.after).index(arrival - self.least)
        return None

    def plain(self) -> dict[str, object]:
        """Return it as plain data: fields of the round."""
        if self.runs:
            return {"runs": self.runs}
        return {"arrivals": (self.least, self.after)} if self.after else {}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Arrivals:
        """Return what the fields of a round say."""
        if "runs" in plain:
            return cls(runs=tuple((of(int, first), of(int, count)) for first, count in plain["runs"]))
        least, after = plain.get("arrivals", (0, b""))
        if len(of(bytes, after)) % 2:
            raise ValueError("half of an arrival")
        return cls(least=of(int, least), after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which members of the last round are in this one, too, in the same order and before all others: all but a few.

    Each of them knows its rank by that, whatever their number. It is said only of processes that were members
    themselves, and where the commit was conditional on the arrival of each: else one that does not know yet that its
    lease has lapsed would take itself for the process that has come under its name.

    Attributes:
        revision: That of the last round.
        count: How many they are.
        gone: The ranks in it of those who are not, upwards.
    """

    revision: int
    count: int
    gone: tuple[int, ...] = ()

    def rank_of(self, rank: int) -> int | None:
        """Return the rank in this round of who had a rank in the last one; None if it is not one of these."""
        below = bisect_left(self.gone, rank)
        return None if rank in self.gone[below : below + 1] else rank - below

    def plain(self) -> object:
        """Return it as plain data, by position."""
        return self.revision, self.count, self.gone


def place(
    members: Sequence[Member], last: Round | None, before: Mapping[str, Member], same: Collection[str]
) -> tuple[Kept | None, Arrivals]:
    """Return who is known by its rank in the last round, and by its arrival who is not.

    Args:
        members: Of this round, by rank.
        last: The last round, if there was one.
        before: Its members.
        same: The ids of those nodes whose process was a member of it, as far as is known.
    """
    ranks: list[int] = []
    for member in members:
        there = before.get(member.node_id)
        if there is None or member.node_id not in same or (ranks and there.rank < ranks[-1]):
            break
        ranks.append(there.rank)
    if last is None or not ranks or len(before) != last.size or last.size - len(ranks) > GONE_MOST:
        return None, Arrivals.of([member.arrival for member in members])
    kept = Kept(revision=last.revision, count=len(ranks), gone=tuple(sorted(set(range(last.size)).difference(ranks))))
    return kept, Arrivals.of([member.arrival for member in members[len(ranks) :]])


def _runs(arrivals: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of those that follow one another, and how many they are."""
    first = count = 0
    for arrival in arrivals:
        if count and arrival == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = arrival, 1
    if count:
        yield first, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A completed round.

    Attributes:
        number: Counted from 0.
        term: The coordinator that completed it; its buckets lie under this.
        size: How many members it has.
        buckets: Over how many buckets their ranks are spread.
        host: Where rank 0 is reached.
        port: A port that was free there.
        lease: That of what its members share, which goes soon after nobody coordinates any more.
        newest: Rank and last finished step of the member who has finished the most; None if nobody has finished any.
        in_steps: Whether any member goes from round to round by `rounds()`.
        since: Who has been lost, has left and is new since the round before, at most `SINCE_MOST` of each by name.
        checked: Its members check that they reach rank 0 before they take it.
        kept: Who was a member of the last round, and how its rank follows from that; None if that is not said.
        arrivals: Which arrival has which rank, of those who are not kept and come after them, so that no member need
            read its bucket; empty where that takes too much.
        revision: The revision of its commit.
    """

    number: int
    term: int
    size: int
    buckets: int
    host: str
    port: int
    lease: int | None = None
    newest: tuple[int, int] | None = None
    in_steps: bool = False
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False
    kept: Kept | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    revision: int = 0

    def rank_of(self, arrival: int, *, last: tuple[int, int] | None = None) -> int | None:
        """Return the rank of an arrival; None: it has none, or the round itself does not say so.

        Args:
            arrival: Which stands since before the round.
            last: The revision of the round that the same node was a member of last, and its rank there.
        """
        kept = self.kept
        if kept is not None and last is not None and last[0] == kept.revision:
            rank = kept.rank_of(last[1])
            if rank is not None:
                return rank
        rank = self.arrivals.rank_of(arrival)
        return None if rank is None else rank + (0 if kept is None else kept.count)

    def names_all(self, *, last: tuple[int, int] | None) -> bool:
        """Return whether a node that finds no rank of its own here has none; else its bucket tells."""
        kept = self.kept
        if kept is None:
            return bool(self.arrivals)
        is_known = last is not None and last[0] == kept.revision  # it may be kept, and not know what it was
        return is_known and (bool(self.arrivals) or kept.count == self.size)

    def pack(self) -> bytes:
        """Pack it into bytes."""
        kept = self.kept
        return pack(
            {
                # Apart: who knows nothing of those who are kept must not take the first of the others for rank 0.
                **(self.arrivals.plain() if kept is None else {"kept": kept.plain(), "others": self.arrivals.plain()}),
                **({"checked": True} if self.checked else {}),
                "number": self.number,
                "term": self.term,
                "size": self.size,
                "buckets": self.buckets,
                "host": self.host,
                "port": self.port,
                "lease": self.lease,
                **({"newest": self.newest} if self.newest is not None else {}),
                **({"in_steps": True} if self.in_steps else {}),
                **({"since": self.since} if any(self.since) else {}),
            }
        )

    @classmethod
    def unpack(cls, value: bytes, *, revision: int) -> Round:
        """Unpack what the key holds; `revision` is that at which it was written."""

        def build(plain: Mapping[str, Any]) -> Round:
            return _new_round(
                number=of(int, plain["number"]),
                term=of(int, plain["term"]),
                size=of(int, plain["size"]),
                buckets=of(int, plain["buckets"]),
                host=of(str, plain["host"]),
                port=of(int, plain["port"]),
                lease=maybe(int, plain.get("lease")),
                newest=_newest(plain.get("newest")),
                in_steps=of(bool, plain.get("in_steps", False)),
                since=_since(plain.get("since")),
                checked=of(bool, plain.get("checked", False)),
                kept=_kept(plain.get("kept")),
                arrivals=Arrivals.of_plain(plain.get("others", plain)),
                revision=revision,
            )

        return unpack("the round", value, build)


_new_round = constructor(Round)


def _kept(plain: Any) -> Kept | None:
    if plain is None:
        return None
    revision, count, gone, *_ = plain
    return Kept(revision=of(int, revision), count=of(int, count), gone=tuple(of(int, rank) for rank in gone))


def _newest(plain: Any) -> tuple[int, int] | None:
    return None if plain is None else (of(int, plain[0]), of(int, plain[1]))


def _since(plain: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    return ((), (), ()) if plain is None else (names_of(plain[0]), names_of(plain[1]), names_of(plain[2]))
