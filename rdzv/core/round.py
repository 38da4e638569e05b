"""Pure: a completed round: its members and ranks, and their form in the store.

The round itself is small, and every member gets it. Ranks and rosters are beside it, in buckets.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.core.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ARRIVALS_MOST", "BUCKET_SIZE", "SINCE_MOST", "Member", "Participant", "Round", "bucket_of", "name_arrivals"]

BUCKET_SIZE = 16  # nodes per bucket: a node reads less than a kilobyte to learn its rank
ARRIVALS_MOST = 1024  # members up to which the round itself has the ranks, in two kilobytes
SINCE_MOST = 16  # node ids of each kind that a round names


def bucket_of(node_id: str, buckets: int) -> int:
    """Return the bucket of a node's rank; equal on every machine."""
    return zlib.crc32(node_id.encode()) % buckets


class Member(Stored, kw_only=True):
    """A node's rank in a completed round, and the arrival that the round contains."""

    called = "a bucket of ranks"

    node_id: str
    rank: int
    arrival: int


class Participant(Stored, kw_only=True):
    """A member of a round, as every member may read it."""

    called = "a bucket of the roster"

    node_id: str  #: its name
    rank: int  #: its rank, from 0
    address: str  #: where the others reach it
    payload: Any = None  #: its data for the others
    #: Its attributes
    attributes: Mapping[str, str] = MappingProxyType({})


class Round(Stored, kw_only=True):
    """A completed round."""

    called = "the round"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    number: int  # counted from 0
    term: int  # of the coordinator that completed it; its buckets lie under it
    size: int  # the number of members
    buckets: int  # the number of buckets
    host: str  # rank 0's address
    port: int  # a port that was free there
    lease: int | None = None  # of the members' shared store; it ends soon after the last coordinator
    # Rank and last finished step of the member that has finished the most steps; None if none has finished any.
    newest: tuple[int, int] | None = None
    in_steps: bool = False  # a member uses `rounds()`
    # The lost, departed and new nodes since the round before, at most `SINCE_MOST` of each.
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False  # its members check that they reach rank 0 before they take it
    least: int = 0  # the earliest arrival in it
    # Each arrival less the earliest, in order of rank, in two bytes: then no member has to read its bucket.
    arrivals: bytes = b""  # empty if they are too many or too far apart
    revision: int = 0  # the revision of its commit

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival that the round names; else None."""
        after = arrival - self.least
        if not 0 <= after < 1 << 16:
            return None
        # A search in the bytes takes a twentieth of the time of unpacking them, at each node.
        two_bytes = struct.pack(">H", after)
        at = self.arrivals.find(two_bytes)
        while at > 0 and at % 2:  # a match across two entries
            at = self.arrivals.find(two_bytes, at + 1)
        return at // 2 if at >= 0 else None

    def unfit(self) -> str | None:
        """Return why it cannot be read; None if it can."""
        return "ends with half of an arrival" if len(self.arrivals) % 2 else None


def name_arrivals(arrivals: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a round for the arrivals of its members, in order of rank."""
    least = min(arrivals)
    if len(arrivals) > ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
        return {}
    return {"least": least, "arrivals": struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals))}
