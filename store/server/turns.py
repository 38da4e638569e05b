"""Pure: whose turn it is, so that nobody waits for long behind somebody who asks much, or is told much (promise S11).

Whoever asks little is served at once. Whoever has used up its turn stands in a ring, and gets another one when all
others in it have had theirs. In one pass of the event loop no more is done than `PASS` allows; who comes after that
stands in front of those who have used up a turn, since it may ask little.

What one change means to many is told in slices, too. Somebody who is to be told anything else meanwhile is first told
what is still to come of earlier changes: for each of them the order stays.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["AT_ONCE", "PASS", "TURN", "Announcement", "Turns"]

TURN = 0.002  # seconds of one peer, before others have theirs
PASS = 0.008  # seconds of all peers together, before the loop looks at its sockets again

AT_ONCE = 64  # who are told of a change before others have a turn

P = TypeVar("P")
W = TypeVar("W")


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


class Announcement(Generic[W]):
    """What one change means to many, and who has not been told of it yet.

    Args:
        items: Who is to be told, in order: the number of a peer, and what of it is told.
    """

    __slots__ = ("_left",)

    def __init__(self, items: Iterable[tuple[int, W]]) -> None:
        self._left: OrderedDict[int, list[W]] = OrderedDict()
        for peer, what in items:
            self._left.setdefault(peer, []).append(what)

    @property
    def over(self) -> bool:
        """Whether all have been told."""
        return not self._left

    def next(self) -> tuple[int, list[W]]:
        """Who is to be told next, and what."""
        return self._left.popitem(last=False)

    def take(self, peer: int) -> list[W]:
        """What this peer is to be told, before it is told anything else."""
        return self._left.pop(peer, [])
