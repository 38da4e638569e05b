"""Pure: whether one connection lives, by when something was asked and heard; for callers who await and who block.

Who has something to answer and has been silent for half of the client's patience is asked once more: whoever answers
that is only slow with the rest. After all of it a fresh connection is looked for beside the old one, which is kept:
whichever speaks first is used. Where the other side's system has acknowledged all that was sent, the server may only be
busy, and thousands who come back over fresh connections would keep it busier still: so the search begins much later, or
once the server has answered a newcomer that asked later than we. Nobody asks until the server has been silent for much
longer than it was lately, since that costs it time, too. Bytes that the other side's system still takes count as an
answer: a large value over a slow network is no silence. Time in which this process was too busy to look is not the
server's silence, either.

Where nothing was asked, there is a heartbeat: a server that has said nothing for one is asked, and hung up on if it
answers nothing for another; later if its system acknowledges, since another connection would not help it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.client.patience import HEARTBEAT, HEARTBEATS_OF_BUSY, WATCHES_HEAR_EVERY

if TYPE_CHECKING:
    from store.client.patience import Patience

__all__ = ["Line", "Pulse", "Say", "Verdict"]

LATE = 0.1  # seconds; a look that comes so late finds that its own loop was held up
LOOKS = 8  # that are taken within the patience at most, where it has become shorter meanwhile
SOON = 0.001  # seconds by which a timer may be early


class Say(enum.Enum):
    """What is to be done about a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()  # ask what any server answers at once
    SEEK = enum.auto()  # look for a fresh connection beside it
    HANG_UP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How a connection stands just now.

    Attributes:
        unsent_bytes: What we have to send and the other side's system has not acknowledged.
        held_back: Whether it only waits for the other side to read on: while that is so, the network works.
        acknowledged: Whether all of it was certainly acknowledged, and nothing that came back was lost.
        greeted: Whether the server has welcomed us, so that it can be asked.
        has_watches: Whether any watch is open, and wants to hear how far the store has come.
    """

    unsent_bytes: int = 0
    held_back: bool = False
    acknowledged: bool = False
    greeted: bool = True
    has_watches: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done, and when to look again.

    Attributes:
        say: What is to be done.
        until: When to look again, whatever happens.
        busy_for: For how many seconds the server may only be busy: until then a fresh connection is looked for only
            once it has answered another.
    """

    say: Say
    until: float
    busy_for: float = 0.0


class Pulse:
    """How long one connection has been silent.

    Args:
        patience: How long it may be.
        now: When it began; on whichever clock all later moments are.
        heartbeats: How many of them a server that greets nobody is given: more each time, since whoever hangs up on one
            that is busy stands last in its queue again.
        probes: Whether its owner can ask a busy server on another connection; else it waits for as long as a busy
            server is given.

    Attributes:
        began: When it began.
        heard_at: When the server last said something.
        asked_at: Since when there is something to answer, and nothing has been heard; None if there is nothing.
        seeking: Whether a fresh connection is looked for.
    """

    def __init__(self, patience: Patience, now: float, *, heartbeats: float = 1.0, probes: bool = True) -> None:
        self._patience, self._heartbeats, self._probes = patience, heartbeats, probes
        self.began: float = now
        self.heard_at: float = now
        self.asked_at: float | None = None
        self.seeking: bool = False
        self._pinged = False  # since then
        self._unanswered_at: float | None = None  # when the heartbeat asked
        self._stale_since = now  # since when watches have not heard how far the store has come
        self._unsent_bytes: int | None = None  # at the last look
        self._postponed = False  # the last look: its own loop had been held up, and may not have read what has come
        self._beat_at = now + HEARTBEAT

    def expect(self, now: float) -> None:
        """Something was asked: from now on silence counts, if it does not yet. Look when `first_look_in` says."""
        if self.asked_at is None:
            self.asked_at, self._pinged = now, False

    def first_look_in(self) -> float:
        """Seconds after which to look, at the latest, once something was asked."""
        return self._patience.silence() / 2

    def heard(self, now: float, *, expecting: bool) -> None:
        """The server has said something; `expecting` if it still has something to answer."""
        self.heard_at = now
        if self.asked_at is not None:
            self._patience.was_silent(now - self.asked_at, now=now)
            self.asked_at, self._pinged = now if expecting else None, False
        self.seeking = False

    def look(self, now: float, line: Line, *, late: float = 0.0) -> Verdict:
        """Judge the connection.

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
                return Verdict(Say.NOTHING, now)
        self._postponed = False
        verdict = self._judge_silence(now, line)
        if now + SOON < self._beat_at:
            return verdict if verdict.until <= self._beat_at else Verdict(verdict.say, self._beat_at, verdict.busy_for)
        beat = self._beat(now, line)
        if verdict.say is Say.NOTHING or beat is Say.HANG_UP:
            return Verdict(beat, min(verdict.until, self._beat_at))
        return verdict

    def _judge_silence(self, now: float, line: Line) -> Verdict:
        """Whether what was asked should have been answered by now."""
        if self.asked_at is None or self.seeking:
            return Verdict(Say.NOTHING, self._beat_at)
        silence, longest = now - self.asked_at, self._patience.silence()
        busy = self._patience.silence(acknowledged=True) if line.acknowledged else 0.0
        if line.acknowledged:
            longest = self._patience.busy_silence(now=now) if self._probes else max(longest, busy)
        if silence >= longest and (self._pinged or not line.acknowledged):
            self.seeking = True
            return Verdict(Say.SEEK, self._beat_at, max(busy - silence, 0.0))
        say = Say.NOTHING
        if not self._pinged and silence >= longest / 2:
            self._pinged, say = True, Say.PING
            self._unanswered_at = now  # the heartbeat need not ask as well
        return Verdict(say, now + max((longest if self._pinged else longest / 2) - silence, longest / LOOKS))

    def _beat(self, now: float, line: Line) -> Say:
        """Ask if it is time to, or hang up."""
        self._beat_at = now + HEARTBEAT
        silence = now - self.heard_at
        if self._unanswered_at is not None and self._unanswered_at <= self.heard_at:
            self._unanswered_at = None
        asked_at = self._unanswered_at if line.greeted else self.heard_at  # to come is to ask for a welcome
        unanswered = 0.0 if asked_at is None else now - asked_at
        # Where the system acknowledges, its server is busy, or stopped: another connection would not help it.
        patient = self._heartbeats if not line.greeted else HEARTBEATS_OF_BUSY if line.acknowledged else 1.0
        if unanswered + SOON >= HEARTBEAT * patient and silence + SOON >= 2 * HEARTBEAT * patient:
            return Say.HANG_UP
        # Watches want to hear how far the store has come, also while others keep the connection busy.
        stale = line.has_watches and now - self._stale_since >= WATCHES_HEAR_EVERY
        if line.greeted and self._unanswered_at is None and (silence + SOON >= HEARTBEAT or stale):
            self._unanswered_at = self._stale_since = now
            return Say.PING
        return Say.NOTHING
