"""Pure: whether one connection lives, by when something was asked and heard; for callers who await and who block.

Who has something to answer and has been silent for half of the client's patience is asked once more: whoever answers
that is only slow with the rest. After all of it a fresh connection is looked for beside the old one, which is kept:
whichever speaks first is used. Bytes that the other side's system still takes count as an answer: a large value over a
slow network is no silence. Time in which this process was too busy to look is not the server's silence, either.

A server that has said nothing for a heartbeat is asked, where nothing else was. One that answers nothing for another
heartbeat is hung up on; later if its system acknowledges, since another connection would not help it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from store.client.patience import HEARTBEAT

if TYPE_CHECKING:
    from store.client.patience import Patience

__all__ = ["Line", "Pulse", "Say"]

HEARTBEATS_OF_BUSY = 6.0  # times as long, where the other side's system acknowledges what it is sent
WATCHES_HEAR_EVERY = 20.0  # seconds; how far the store has come, so that a watch resumes there and not further back
LATE = 0.1  # seconds; a look that comes so late finds that its own loop was held up
LOOKS = 8  # that are taken within the patience at most, where it has become shorter meanwhile
SOON = 0.001  # seconds by which a timer may be early


class Say(enum.Enum):
    """What is to be done about a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()  # ask what any server answers at once
    SEEK = enum.auto()  # look for a fresh connection beside it
    HANG_UP = enum.auto()


class Line(NamedTuple):
    """How a connection stands just now.

    Attributes:
        unsent_bytes: What we have to send and the other side's system has not acknowledged.
        held_back: Whether it only waits for the other side to read on: while that is so, the network works.
        acknowledged: Whether all of it was certainly acknowledged, and nothing that came back was lost.
        welcomed: Whether the server has welcomed us, so that it can be asked.
        has_watches: Whether any watch is open, and wants to hear how far the store has come.
    """

    unsent_bytes: int = 0
    held_back: bool = False
    acknowledged: bool = False
    welcomed: bool = True
    has_watches: bool = False


class Pulse:
    """How long one connection has been silent.

    Args:
        patience: How long it may be.
        now: When it began; on whichever clock all later moments are.

    Attributes:
        heard_at: When the server last said something.
        asked_at: Since when there is something to answer, and nothing has been heard; None if there is nothing.
        seeking: Whether a fresh connection is looked for.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self.heard_at: float = now
        self.asked_at: float | None = None
        self.seeking: bool = False
        self._pinged = False  # since then
        self._watches_told_at = now  # how far the store has come
        self._unsent_bytes: int | None = None  # at the last look
        self._postponed = False  # the last look: its own loop had been held up, and may not have read what has come

    def expect(self, now: float) -> None:
        """Something was asked: from now on silence counts, if it does not yet. Look when `first_look_at` says."""
        if self.asked_at is None:
            self.asked_at, self._pinged = now, False

    def first_look_at(self, now: float) -> float:
        """When to look, at the latest, if something is asked now."""
        return now + self._patience.silence(now) / 2

    def heard(self, now: float, *, expecting: bool) -> None:
        """The server has said something; `expecting` if it still has something to answer."""
        self.heard_at = now
        if self.asked_at is not None:
            self._patience.was_silent(now - self.asked_at, now=now)
            self.asked_at, self._pinged = now if expecting else None, False
        self.seeking = False

    def look(self, now: float, line: Line, *, late: float = 0.0) -> tuple[Say, float]:
        """Say what is to be done, and when to look again, whatever happens.

        Args:
            now: When.
            line: How it stands.
            late: By how many seconds this look is later than it was to be.
        """
        before, self._unsent_bytes = self._unsent_bytes, line.unsent_bytes
        moved = before is not None and line.unsent_bytes < before
        if moved:
            self.heard_at = now
        if self.asked_at is not None and (moved or line.held_back):
            self.asked_at = now
        elif self.asked_at is not None and late >= LATE:  # what was answered meanwhile has not been read yet
            self.asked_at = min(self.asked_at + late, now)
            if not self._postponed:  # else a loop that is always busy would never look
                self._postponed = True
                return Say.NOTHING, now
        self._postponed = False
        if self.asked_at is None:
            say, until = Say.NOTHING, self.heard_at + HEARTBEAT
            if line.welcomed and now + SOON >= until:
                self.expect(now)
                self._pinged, say, until = True, Say.PING, self.first_look_at(now)
        else:
            say, until = self._judge(now, now - self.asked_at, line)
        if not (line.welcomed and line.has_watches):
            return say, until
        # Watches want to hear it also while others keep the connection busy.
        if say is Say.NOTHING and now + SOON >= self._watches_told_at + WATCHES_HEAR_EVERY:
            say = Say.PING
        if say is Say.PING:
            self._watches_told_at = now
        return say, min(until, self._watches_told_at + WATCHES_HEAR_EVERY)

    def _judge(self, now: float, silence: float, line: Line) -> tuple[Say, float]:
        """Whether what was asked should have been answered by now."""
        hang_up_after = HEARTBEAT * (HEARTBEATS_OF_BUSY if line.acknowledged else 1.0)
        quiet = min(silence, now - self.heard_at - hang_up_after)
        if quiet + SOON >= hang_up_after:
            return Say.HANG_UP, now
        until = now + hang_up_after - quiet
        if self.seeking:
            return Say.NOTHING, until
        longest = self._patience.silence(now, acknowledged=line.acknowledged)
        if silence + SOON >= longest and (self._pinged or not line.acknowledged):
            self.seeking = True
            self._patience.was_silent(silence, now=now)  # on a fresh connection it has longer
            return Say.SEEK, until
        say = Say.NOTHING
        if not self._pinged and silence + SOON >= longest / 2:
            self._pinged = True
            if line.welcomed:
                say = Say.PING
        return say, min(until, now + max((longest if self._pinged else longest / 2) - silence, longest / LOOKS))
