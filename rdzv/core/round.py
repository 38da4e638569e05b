"""Pure: a round that was completed: who is in it with which rank, and how it travels, to and from plain data.

The round itself is small, and told to every member. Who has which rank and what each brought is beside it, in buckets.
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

BUCKET_SIZE = 16  # nodes in one bucket: what a node reads to learn its rank stays below a kilobyte
ARRIVALS_MOST = 1024  # members up to which a round itself says who has which rank: in two kilobytes, which all get
SINCE_MOST = 16  # node ids of each kind that a round itself names: every node gets them


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


class Round(Stored, kw_only=True):
    """A completed round."""

    called = "the round"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    number: int  # counted from 0
    term: int  # the coordinator that completed it; its buckets lie under this
    size: int  # how many members it has
    buckets: int  # over how many buckets their ranks are spread
    host: str  # where rank 0 is reached
    port: int  # a port that was free there
    lease: int | None = None  # that of what its members share, which goes soon after nobody coordinates any more
    # Rank and last finished step of the member who has finished the most; None if nobody has finished any.
    newest: tuple[int, int] | None = None
    in_steps: bool = False  # whether any member goes from round to round by `rounds()`
    # Who has been lost, has left and is new since the round before, at most `SINCE_MOST` of each by name.
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False  # its members check that they reach rank 0 before they take it
    least: int = 0  # the first arrival that it took in
    # By how much each arrival is above the least, in order of rank, two bytes for each: so nobody need read its bucket.
    arrivals: bytes = b""  # empty where they are too many or too far apart
    revision: int = 0  # the revision of its commit

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival, by the arrivals that the round names; None if it is none of them."""
        after = arrival - self.least
        if not 0 <= after < 1 << 16:
            return None
        # To look through the bytes takes a twentieth of the time that numbers made of them take, at each node.
        two_bytes = struct.pack(">H", after)
        at = self.arrivals.find(two_bytes)
        while at > 0 and at % 2:  # the end of one and the beginning of the next
            at = self.arrivals.find(two_bytes, at + 1)
        return at // 2 if at >= 0 else None

    def unfit(self) -> str | None:
        """Say whether it is cut off."""
        return "ends with half of an arrival" if len(self.arrivals) % 2 else None


def name_arrivals(arrivals: Sequence[int]) -> dict[str, Any]:
    """Return what a round says of the arrivals of its members, in order of rank."""
    least = min(arrivals)
    if len(arrivals) > ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
        return {}
    return {"least": least, "arrivals": struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals))}
