"""Pure: whose requests are carried out next, so that nobody waits for long behind somebody who asks much (promise S11).

Whoever asks little is served at once. Whoever has used up its turn stands in a ring, and gets another one when all
others in it have had theirs. In one pass of the event loop no more is done than `PASS` allows; who comes after that
stands in front of those who have used up a turn, since it may ask little.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["PASS", "TURN", "Turns"]

TURN = 0.002  # seconds of one peer, before others have theirs
PASS = 0.008  # seconds of all peers together, before the loop looks at its sockets again

P = TypeVar("P")


class Turns(Generic[P]):
    """The ring."""

    __slots__ = ("_fresh", "_used", "spent")

    def __init__(self) -> None:
        self._fresh: OrderedDict[P, None] = OrderedDict()  # those who have not had a turn for what they ask
        self._used: OrderedDict[P, None] = OrderedDict()  # those who have used up one
        self.spent = 0.0  # seconds of this pass

    def __len__(self) -> int:
        return len(self._fresh) + len(self._used)

    def __contains__(self, who: P) -> bool:
        return who in self._fresh or who in self._used

    @property
    def over(self) -> bool:
        """Whether this pass has had its time."""
        return self.spent >= PASS

    @property
    def length(self) -> float:
        """Seconds that a turn lasts now: the more there are who have not had any, the shorter."""
        return min(TURN, max(PASS / (1 + len(self._fresh)), TURN / 20))

    def wait(self, who: P, *, used: bool) -> None:
        """Stand in the ring; `used` is whether a turn was used up."""
        (self._used if used else self._fresh)[who] = None

    def leave(self, who: P) -> None:
        """Stand in it no longer."""
        self._fresh.pop(who, None)
        self._used.pop(who, None)

    def next(self) -> P | None:
        """Whose turn it is; it stands in the ring no longer."""
        ring = self._fresh or self._used
        return ring.popitem(last=False)[0] if ring else None
