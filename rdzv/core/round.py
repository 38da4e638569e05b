"""Pure: a completed round as records: `Round`, small, as every node receives it, and its members, in buckets."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.core.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET_SIZE = 16  # nodes per bucket: a node reads less than a kilobyte to learn its rank
ARRIVALS_MOST = 1024  # members; the record of a larger round does not list arrivals, of two bytes each
SINCE_MOST = 16  # node ids in each part of `Round.since`


def bucket_of(node_id: str, buckets: int) -> int:
    """Return the bucket of a node's rank; every machine computes the same."""
    return zlib.crc32(node_id.encode()) % buckets


class Member(Stored, kw_only=True):
    """A node's rank in a completed round, and the arrival by which it is a member."""

    called = "a bucket of ranks"

    node_id: str
    rank: int
    arrival: int


class Participant(Stored, kw_only=True):
    """A member of a round, for the other members."""

    called = "a bucket of the roster"

    node_id: str
    rank: int
    address: str  #: where the others reach it
    payload: Any = None  #: its data for the others
    attributes: Mapping[str, str] = MappingProxyType({})


class Round(Stored, kw_only=True):
    """A completed round."""

    called = "the round"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    number: int  # counted from 0
    term: int  # its coordinator's term, in the names of the buckets' keys
    size: int
    buckets: int
    host: str  # rank 0's address
    port: int  # free at that address
    lease: int | None = None  # of the round's store; the lease expires soon after the run's last coordinator has gone
    # Rank and last finished step of the member that has finished the most; None if no step is finished.
    newest: tuple[int, int] | None = None
    in_steps: bool = False  # a member uses `rounds()`, so members agree where to stop
    # The lost, departed and new nodes since the round before, at most `SINCE_MOST` of each.
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False  # its members check that they reach rank 0 before they accept it
    least: int = 0  # the earliest arrival
    # Each arrival minus `least`, in two bytes, by rank, so that members need not read buckets; empty if too many.
    arrivals: bytes = b""
    revision: int = 0  # of its commit

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival, if `arrivals` has it."""
        after = arrival - self.least
        if not 0 <= after < 1 << 16:
            return None
        two_bytes = struct.pack(">H", after)  # a search in the bytes is twenty times faster than unpacking them
        at = self.arrivals.find(two_bytes)
        while at > 0 and at % 2:  # the match lies across two entries
            at = self.arrivals.find(two_bytes, at + 1)
        return at // 2 if at >= 0 else None

    def unfit(self) -> str | None:
        """Return why the record is invalid, if it is."""
        return "ends with half of an arrival" if len(self.arrivals) % 2 else None


def name_arrivals(arrivals: Sequence[int]) -> dict[str, Any]:
    """Return `least` and `arrivals` of a round, from its arrivals by rank; empty if they do not fit."""
    least = min(arrivals)
    if len(arrivals) > ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
        return {}
    return {"least": least, "arrivals": struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals))}
