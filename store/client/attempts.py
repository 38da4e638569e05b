"""Pure: which attempts to come back to a store there are at a time; for callers who await and for callers who block.

An attempt that nobody answers is given up after half a second: after a cut the next one passes at once, while the
system would repeat its first packet only after seconds. One that was taken by the other side's system is kept while
others are made, since a server that is busy greets in the order of coming: who gave up there and came again would
never get his turn, and keep the server busy with taking and losing connections. Those attempts become rarer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store.client.patience import Patience

__all__ = ["KEPT_MOST", "Attempts", "Move"]

KEPT_MOST = 4  # attempts that were taken and have heard nothing; beyond, the oldest makes room
SOON = 0.001  # seconds by which a timer may be early


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What is to be done now.

    Attributes:
        begin: The number of an attempt to begin, if it is time for one.
        small_packets: Whether that one is to do without large packets.
        give_up: Attempts to be given up.
        until: When to look again, unless an attempt has come further before.
    """

    begin: int | None = None
    small_packets: bool = False
    give_up: tuple[int, ...] = ()
    until: float


class Attempts:
    """The attempts to come back, by number; whoever makes them says how far each has come.

    Args:
        patience: How long to wait for what.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._taken: dict[int, bool] = {}  # those under way, in order: whether the other side's system has answered
        self._newest = 0
        self._failed = 0
        self._next_at = -math.inf

    def was_taken(self, number: int) -> bool:
        """The other side's system has answered it; whether that is news."""
        before, self._taken[number] = self._taken[number], True
        return not before

    def has_failed(self, number: int, now: float) -> None:
        """It has failed, or was hung up on without a word."""
        del self._taken[number]
        if number == self._newest:
            self._next_at = now + self._patience.pause(self._failed)  # it was refused: at once would be too soon
            self._failed += 1

    def look(self, now: float) -> Move:
        """Say what is to be done now."""
        if now + SOON < self._next_at:
            return Move(until=self._next_at)
        give_up = []
        if self._taken.get(self._newest) is False:  # no answer, not even from a system: the next may pass
            give_up.append(self._newest)
        elif len(self._taken) > KEPT_MOST:
            give_up.append(next(iter(self._taken)))
        for number in give_up:
            del self._taken[number]
        small_packets = self._patience.large_packets_seem_lost(len(self._taken))
        self._next_at = now + self._patience.attempt(len(self._taken))
        self._newest += 1
        self._taken[self._newest] = False
        return Move(begin=self._newest, small_packets=small_packets, give_up=tuple(give_up), until=self._next_at)
