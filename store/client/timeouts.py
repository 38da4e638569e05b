"""The times that a client waits for an answer, for an attempt to connect, and between two attempts.

TCP retransmits after 0.2, 0.4, ... 3.3, 6.5 s, so a connection may stay silent long after a network cut has healed, or
for ever behind a firewall that forgot it. So after a second of silence the client tries a fresh connection (R8).

If a server is silent, but its system acknowledges all data, it may be busy, and the client waits longer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

BACKOFF_FIRST = 0.1  # seconds; the limit of the first pause between attempts to connect, doubled with each pause
BACKOFF_MOST = 2.0  # seconds; the limit of all pauses, which are drawn between 0 and their limit
LASTED = 0.25  # seconds; after a connection that lasted less, pause before reconnecting
SOON = 1.0  # seconds of short pauses after a connection's loss: a lease's `disconnect_ttl` may be short
BACKOFF_SOON = 0.25  # seconds; the limit of a pause in the first `SOON` seconds
BACKOFF_RECENT = 0.5  # seconds; the limit in the first `RECENT` seconds, and always if the client keeps a lease
RECENT = 30.0  # seconds after a connection's loss; the store may be restarting

HEARTBEAT = 5.0  # seconds until an idle connection is pinged, and a silent or stuck one closed (later if busy)
SILENCE = 1.0  # seconds without an answer or first bytes before a fresh connection is tried
SILENCE_MOST = 5.0  # seconds; the limit of the wait for an answer: `SILENCE`, doubled by each unanswered connection
BUSY_FACTOR = 10.0  # a server whose system acknowledges all data may be silent this many times as long
BUSY_SHARE_OF_LEASE = 0.75  # the share of a lease's remaining time to wait for a busy server or first bytes
SLOW_FACTOR = 3.0  # a busy server may also be silent for this multiple of its longest recent silence
SLOW_FOR = 15.0  # seconds after which the longest recent silence counts only half
ATTEMPT = 0.5  # seconds for the peer's system to accept a connection
FIRST_ATTEMPT = 5.0  # seconds; replaces `ATTEMPT` until the round-trip time is known
WORD_MOST = 64.0  # seconds; the longest wait for a server's first bytes, after many failed attempts
# The least time for an answer, an attempt or a greeting, in multiples of the shortest time to connect.
ROUND_TRIPS = 3
SHARE_OF_LEASE = 4  # most waits take at most a quarter of a lease's remaining time
FAREWELL_WITHIN = 0.2  # seconds that a closing client waits for answers to abandoned grants, whose leases it revokes
LEAST = 0.05  # seconds; the shortest limit by a lease: an expired one causes no busy loop


class Timeouts:
    """The waiting times of one client."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._leases: list[Callable[[], float]] = []
        self._round_trip: float | None = None
        self._unanswered_changes = 0  # fresh connections since the last answer
        self._slow, self._slow_at = 0.0, 0.0  # the longest recent silence, and when it ended

    def limit_by_leases(self, remaining: Callable[[], float]) -> None:
        """Limit waits by `remaining`, which returns the seconds until the first lease may expire, or infinity."""
        self._leases.append(remaining)

    def note_connect_time(self, took: float) -> None:
        """Note the seconds that connecting took."""
        self._round_trip = took if self._round_trip is None else min(took, self._round_trip)

    def note_answer(self) -> None:
        """Note that the server has answered a request."""
        self._unanswered_changes = 0

    def note_silent_replaced(self) -> None:
        """Note that a fresh connection replaces one on which the server was silent."""
        self._unanswered_changes += 1

    def note_silence(self, seconds: float, *, now: float) -> None:
        """Note that the server was silent for `seconds` after a request."""
        if seconds >= self._decayed_slowness(now):
            self._slow, self._slow_at = seconds, now

    @property
    def large_packets_seem_lost(self) -> bool:
        """True if the next attempt should use small packets, because the last connection got no answer."""
        return self._unanswered_changes > 0

    def answer_timeout(self, now: float, *, acknowledged: bool = False) -> float:
        """Return the seconds to wait for an answer before reconnecting; longer if all data is `acknowledged`."""
        longest = min(SILENCE * 2.0 ** min(self._unanswered_changes, 8), SILENCE_MOST)
        share = 1 / SHARE_OF_LEASE
        if acknowledged:
            longest, share = max(longest * BUSY_FACTOR, SLOW_FACTOR * self._decayed_slowness(now)), BUSY_SHARE_OF_LEASE
        return self._cap_by_leases(longest, share)

    def connect_timeout(self) -> float:
        """Return the seconds that an attempt to connect may take."""
        return FIRST_ATTEMPT if self._round_trip is None else self._cap_by_leases(ATTEMPT, 1 / SHARE_OF_LEASE)

    def first_bytes_timeout(self) -> float:
        """Return the seconds to wait for a server's first bytes: doubled per failure, as a busy server needs long."""
        first = 2 * HEARTBEAT if self._round_trip is None else SILENCE
        longest = min(first * 2.0 ** min(self._unanswered_changes, 8), WORD_MOST)
        return max(self._cap_by_leases(longest, BUSY_SHARE_OF_LEASE), SILENCE)

    def retry_pause(self, attempt: int, *, away: float = math.inf) -> float:
        """Return the seconds to sleep before another attempt, `away` seconds after the connection was lost."""
        most = BACKOFF_SOON if away < SOON else BACKOFF_RECENT if away < RECENT else BACKOFF_MOST
        longest = min(BACKOFF_FIRST * 2.0 ** min(attempt, 16), most)
        left = self._lease_time_left()
        if left < math.inf:
            longest = min(longest, BACKOFF_RECENT, max(left / SHARE_OF_LEASE, LEAST))
        return self._rng.uniform(0, longest)

    def _lease_time_left(self) -> float:
        return min((remaining() for remaining in self._leases), default=math.inf)

    def _cap_by_leases(self, longest: float, share: float) -> float:
        """Return `longest` or, if less, `share` of the leases' remaining time; at least `ROUND_TRIPS` round trips."""
        return max(min(longest, max(self._lease_time_left() * share, LEAST)), ROUND_TRIPS * (self._round_trip or 0.0))

    def _decayed_slowness(self, now: float) -> float:
        return self._slow * math.exp2((self._slow_at - now) / SLOW_FOR)
