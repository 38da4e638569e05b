"""The order of peers' turns, so that a small request does not wait long behind large ones (promise S11).

Peers that have used up a turn wait behind all others.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

TURN = 0.002  # seconds of one turn, at most
PASS = 0.008  # seconds for the turns of all peers together; then the loop reads its sockets

P = TypeVar("P")


class RoundRobin(Generic[P]):
    """Peers that wait for a turn. `came`: how many ever queued for a first turn; `spent`: seconds used in this pass."""

    __slots__ = ("_fresh", "_used", "came", "spent")

    def __init__(self) -> None:
        self._fresh: OrderedDict[P, int] = OrderedDict()  # peers that wait for their first turn, numbered by `came`
        self._used: OrderedDict[P, None] = OrderedDict()  # peers that have used up a turn
        self.came: int = 0
        self.spent: float = 0.0

    def __iter__(self) -> Iterator[P]:
        return chain(self._fresh, self._used)

    def __len__(self) -> int:
        return len(self._fresh) + len(self._used)

    def __contains__(self, who: P) -> bool:
        return who in self._fresh or who in self._used

    @property
    def is_pass_time_up(self) -> bool:
        """True if this pass has used all its time (`PASS`)."""
        return self.spent >= PASS

    @property
    def turn_seconds(self) -> float:
        """The seconds of a turn; shorter if many peers wait for their first turn."""
        return min(TURN, max(PASS / (1 + len(self._fresh)), TURN / 20))

    def enqueue(self, who: P, *, used: bool) -> None:
        """Queue a peer; `used` says that it used up a turn."""
        if used:
            self._used[who] = None
        else:
            self.came += 1
            self._fresh[who] = self.came

    def has_unserved_peers(self, came: int) -> bool:
        """Return whether one of the first `came` queued peers still waits for its first turn."""
        return bool(self._fresh) and next(iter(self._fresh.values())) <= came

    def remove(self, who: P) -> None:
        """Remove a peer."""
        self._fresh.pop(who, None)
        self._used.pop(who, None)

    def next(self) -> P | None:
        """Remove and return the next peer."""
        ring: OrderedDict[P, Any] = self._fresh or self._used
        return ring.popitem(last=False)[0] if ring else None
