"""The records of a completed round: a small `Round`, which every node receives, and buckets of its members."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.core.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET_SIZE = 16  # average nodes per bucket: a node reads under a kilobyte to learn its rank
ARRIVALS_MOST = 1024  # the record of a round with more members does not list arrivals (two bytes each)
SINCE_MOST = 16  # node ids in each part of `Round.since`


def rank_bucket_number(node_id: str, buckets: int) -> int:
    """Return the number of the bucket with a node's rank, the same on every machine."""
    return zlib.crc32(node_id.encode()) % buckets


class Member(Stored, kw_only=True):
    """A node's rank in a completed round, and the arrival by which it is a member."""

    called = "a bucket of ranks"

    node_id: str
    rank: int
    arrival: int


class Participant(Stored, kw_only=True):
    """A member of a round, as other members see it."""

    called = "a bucket of the roster"

    node_id: str
    rank: int
    address: str  #: where the other members reach this member
    payload: Any = None  #: the member's data for the other members
    attributes: Mapping[str, str] = MappingProxyType({})


class Round(Stored, kw_only=True):
    """A completed round."""

    called = "the round"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    number: int  # from 0
    term: int  # the coordinator's term in which the round completed; the names of the round's keys contain it
    size: int
    buckets: int  # the number of keys with `Member`s; as many keys have `Participant`s
    host: str  # rank 0's address
    port: int  # a free port of `host`
    lease: int | None = None  # the lease of the round's store; each coordinator renews it
    newest: tuple[int, int] | None = None  # the rank with the largest finished step, and that step; None without steps
    in_steps: bool = False  # True: a member uses `rounds()`, so the members agree on the step to leave at
    # The lost, departed and new nodes since the previous round, at most `SINCE_MOST` of each.
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False  # True: the members check that they reach rank 0 before they accept the round
    least: int = 0  # the earliest arrival
    # Two bytes per rank: the member's arrival minus `least`. If `arrivals` is empty, members find ranks in the buckets.
    arrivals: bytes = b""
    revision: int = 0  # the revision of the round's commit

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival; None if `arrivals` lacks it."""
        after = arrival - self.least
        if not 0 <= after < 1 << 16:
            return None
        two_bytes = struct.pack(">H", after)  # a search in the bytes is twenty times faster than unpacking them
        at = self.arrivals.find(two_bytes)
        while at > 0 and at % 2:  # at an odd place, the match lies across two arrivals
            at = self.arrivals.find(two_bytes, at + 1)
        return at // 2 if at >= 0 else None

    def why_invalid(self) -> str | None:
        """Return why the record is invalid; None if valid."""
        return "ends with half of an arrival" if len(self.arrivals) % 2 else None


def pack_arrivals(arrivals: Sequence[int]) -> dict[str, Any]:
    """Return `least` and `arrivals` of a `Round`; {} if it has too many members, or arrivals too far apart."""
    least = min(arrivals)
    if len(arrivals) > ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
        return {}
    return {"least": least, "arrivals": struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals))}
