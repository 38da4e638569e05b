"""Judges whether a connection still works, by the server's silence; for awaited and blocking clients.

After half of `Timeouts.answer_timeout` without an answer, the client pings the server; after all of it, the client
opens a second connection, and uses whichever gets bytes first. If the peer's system acknowledges further bytes, or the
peer is slow to read, the silence starts anew. Time in which this process was busy does not count as silence.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from store.client.timeouts import HEARTBEAT

if TYPE_CHECKING:
    from store.client.timeouts import Timeouts

# `HEARTBEAT`s of silence until closing, if the last bytes came twice as long ago; one if not `acknowledged`.
HEARTBEATS_OF_BUSY = 6.0
WATCHES_HEAR_EVERY = 20.0  # seconds between pings whose answers tell watches the store's revision
LATE = 0.1  # if a call of `next_action` is late by this many seconds, the event loop was busy
LOOKS = 8  # the most calls of `next_action` during one wait for an answer
SOON = 0.001  # seconds by which a timer may fire early


class HealthAction(enum.Enum):
    """The action to take on a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()
    SEEK = enum.auto()  # keep this connection, and try a fresh one
    HANG_UP = enum.auto()


class SocketState(NamedTuple):
    """Unacknowledged bytes; `held_back` if the peer does not read them; `acknowledged` if its system has all."""

    unsent_bytes: int = 0
    held_back: bool = False
    acknowledged: bool = False
    welcomed: bool = True
    has_watches: bool = False


class ConnectionHealth:
    """Measures how long a server is silent. `asked_at` is when the silence began; None if no answer is due."""

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self.heard_at: float = now
        self.asked_at: float | None = None
        self.seeking: bool = False
        self._pinged = False  # True once a ping was due since `asked_at`
        self._watches_told_at = now  # when a ping for watches was last sent
        self._unsent_bytes: int | None = None  # at the last call of `next_action`
        self._postponed = False  # True if the last call of `next_action` was late, and judged nothing

    def expect_answer(self, now: float) -> None:
        """Note that an answer is due: silence counts from now on. The first check is due at `first_check_at`."""
        if self.asked_at is None:
            self.asked_at, self._pinged = now, False

    def first_check_at(self, now: float) -> float:
        """Return the time of the first `next_action` after a request that is made now."""
        return now + self._timeouts.answer_timeout(now) / 2

    def note_received(self, now: float, *, expecting: bool) -> None:
        """Note that bytes were received; `expecting` is True if another answer is due."""
        self.heard_at = now
        if self.asked_at is not None:
            self._timeouts.note_silence(now - self.asked_at, now=now)
            self.asked_at, self._pinged = now if expecting else None, False
        self.seeking = False

    def next_action(self, now: float, line: SocketState, *, late: float = 0.0) -> tuple[HealthAction, float]:
        """Return the action to take, and the time of the next call; this call is `late` seconds late."""
        before, self._unsent_bytes = self._unsent_bytes, line.unsent_bytes
        moved = before is not None and line.unsent_bytes < before
        if moved:
            self.heard_at = now
        if self.asked_at is not None and (moved or line.held_back):
            self.asked_at = now
        elif self.asked_at is not None and late >= LATE:  # the event loop was busy: answers may be unread
            self.asked_at = min(self.asked_at + late, now)
            if not self._postponed:  # postpone judging only once: in a busy loop every call is late
                self._postponed = True
                return HealthAction.NOTHING, now
        self._postponed = False
        if self.asked_at is None:
            say, until = HealthAction.NOTHING, self.heard_at + HEARTBEAT
            if line.welcomed and now + SOON >= until:
                self.expect_answer(now)
                self._pinged, say, until = True, HealthAction.PING, self.first_check_at(now)
        else:
            say, until = self._choose_action(now, now - self.asked_at, line)
        if not (line.welcomed and line.has_watches):
            return say, until
        # Ping for the watches also while other answers arrive: only a pong tells watches the store's revision.
        if say is HealthAction.NOTHING and now + SOON >= self._watches_told_at + WATCHES_HEAR_EVERY:
            say = HealthAction.PING
        if say is HealthAction.PING:
            self._watches_told_at = now
        return say, min(until, self._watches_told_at + WATCHES_HEAR_EVERY)

    def _choose_action(self, now: float, silence: float, line: SocketState) -> tuple[HealthAction, float]:
        hang_up_after = HEARTBEAT * (HEARTBEATS_OF_BUSY if line.acknowledged else 1.0)
        quiet = min(silence, now - self.heard_at - hang_up_after)
        if quiet + SOON >= hang_up_after:
            return HealthAction.HANG_UP, now
        until = now + hang_up_after - quiet
        if self.seeking:
            return HealthAction.NOTHING, until
        longest = self._timeouts.answer_timeout(now, acknowledged=line.acknowledged)
        if silence + SOON >= longest and (self._pinged or not line.acknowledged):
            self.seeking = True
            self._timeouts.note_silence(silence, now=now)  # so that a fresh connection waits longer for a slow server
            return HealthAction.SEEK, until
        say = HealthAction.NOTHING
        if not self._pinged and silence + SOON >= longest / 2:
            self._pinged = True
            if line.welcomed:
                say = HealthAction.PING
        return say, min(until, now + max((longest if self._pinged else longest / 2) - silence, longest / LOOKS))
