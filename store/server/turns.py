"""Pure: whose turn it is, so that nobody waits for long behind somebody who asks much (promise S11).

Whoever asks little is served at once. Whoever has used up its turn stands in a ring, and gets another one when all
others in it have had theirs. In one pass of the event loop no more is done than `PASS` allows; who comes after that
stands in front of those who have used up a turn, since it may ask little.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PASS", "TURN", "Turns"]

TURN = 0.002  # seconds of one peer, before others have theirs
PASS = 0.008  # seconds of all peers together, before the loop looks at its sockets again

P = TypeVar("P")


class Turns(Generic[P]):
    """The ring.

    Attributes:
        came: How many have come to stand in it for something new.
        spent: Seconds that this pass has taken so far.
    """

    __slots__ = ("_fresh", "_used", "came", "spent")

    def __init__(self) -> None:
        self._fresh: OrderedDict[P, int] = OrderedDict()  # those who have had no turn yet; as which they came
        self._used: OrderedDict[P, None] = OrderedDict()  # those who have used up one
        self.came: int = 0
        self.spent: float = 0.0

    def __iter__(self) -> Iterator[P]:
        return chain(self._fresh, self._used)

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
        if used:
            self._used[who] = None
        else:
            self.came += 1
            self._fresh[who] = self.came

    def waits(self, came: int) -> bool:
        """Whether somebody who came as one of the first so many has not had a turn."""
        return bool(self._fresh) and next(iter(self._fresh.values())) <= came

    def leave(self, who: P) -> None:
        """Stand in it no longer."""
        self._fresh.pop(who, None)
        self._used.pop(who, None)

    def next(self) -> P | None:
        """Whose turn it is; it stands in the ring no longer."""
        ring: OrderedDict[P, Any] = self._fresh or self._used
        return ring.popitem(last=False)[0] if ring else None
