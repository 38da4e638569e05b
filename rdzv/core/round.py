"""Pure: a round that was completed: who is in it with which rank, and how it travels, to and from plain data.

The round itself is small, and told to every member. Who has which rank and what each brought is beside it, in buckets.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.core.stored import Stored
from store.records import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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
    "place",
]

BUCKET_SIZE = 16  # nodes in one bucket: what a node reads to learn its rank stays below a kilobyte
SINCE_MOST = 16  # node ids of each kind that a round itself names: every node gets them
ARRIVALS_MOST = 512  # members up to which a round itself says who has which rank, in two bytes each ...
GONE_MOST = 64  # members of the last round that are named by rank because they are not in this one
RUNS_MOST = 128  # ... or in so many runs of arrivals one after the other, however many members: in a kilobyte, too


def bucket_of(node_id: str, buckets: int) -> int:
    """Return which bucket of ranks a node is in; the same on every machine."""
    return zlib.crc32(node_id.encode()) % buckets


class Member(Stored, kw_only=True):
    """A node's place in a completed round: its rank, and which arrival of it was taken in."""

    called = "a bucket of ranks"

    node_id: str
    rank: int
    arrival: int


class Participant(Stored, kw_only=True):
    """A member of a round, as every member may read it.

    Attributes:
        node_id: What it is called.
        rank: Its place, from 0.
        address: Where the others reach it.
        payload: What it brought.
        attributes: What it said of itself.
    """

    called = "a bucket of the roster"

    node_id: str
    rank: int
    address: str
    payload: Any = None
    attributes: Mapping[str, str] = MappingProxyType({})


class Arrivals(Record, kw_only=True):
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

    def unfit(self) -> str | None:
        """Say whether it is cut off."""
        return "end with half of an arrival" if len(self.after) % 2 else None


class Kept(Record, kw_only=True):
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


class Round(Stored, kw_only=True):
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

    called = "the round"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("revision",)

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
    arrivals: Arrivals = Arrivals()
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
