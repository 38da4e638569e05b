"""Pure: how long a client waits: for an answer, for an attempt to connect, and between two attempts.

TCP repeats what was lost after 0.2, 0.4, ... 3.3, 6.5 s. So after a cut of 4 s an old connection may stay silent for
3 s more, and a firewall that has forgotten it keeps it silent for ever, while a new connection passes at once. Silence
of a second is therefore a reason to try a fresh connection (promise R8). A slow server is silent, too, so the old
connection is kept meanwhile, and after each change of connection that brought no answer the client waits twice as long.

Leases shorten all of it: who has one second left to renew a lease does not sleep for two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = [
    "ATTEMPT_MOST",
    "FIRST_ATTEMPT",
    "HEARTBEAT",
    "HEARTBEATS_OF_BUSY",
    "LASTED",
    "SILENCE",
    "WATCHES_HEAR_EVERY",
    "Patience",
    "backoff",
]

BACKOFF_FIRST = 0.1  # seconds; the first pause is up to so long, and each further one up to twice as long ...
BACKOFF_MOST = 2.0  # ... up to this. Full jitter, so that thousands do not come back at once
LASTED = 0.25  # seconds; a connection that was lost after so long is replaced without a pause
SOON = 1.0  # seconds after a loss in which coming back matters most: leases may lapse sooner while we are away (S5) ...
BACKOFF_SOON = 0.25  # ... so that the pauses are at most so long at first
BACKOFF_LEASED = 0.5  # seconds; the longest pause of who holds a lease, however long the store has been away

HEARTBEAT = 5.0  # seconds of silence before we ask, where nothing was asked, and again before we hang up
HEARTBEATS_OF_BUSY = 6.0  # times as long, where the other side's system acknowledges what it is sent
WATCHES_HEAR_EVERY = 20.0  # seconds; how far the store has come, so that a watch resumes there and not further back
SILENCE = 1.0  # seconds without an answer after which a fresh connection is tried
SILENCE_MOST = 5.0  # and after several fresh connections on which there was none, either
BUSY_FACTOR = 30.0  # times as long is waited for a server whose system acknowledges what it is sent ...
BUSY_SHARE_OF_LEASE = 0.75  # ... but no longer than for this part of what is left of a lease
SLOW_FACTOR = 3.0  # times as long as a server was silent lately, though it was asked, it may be silent once more ...
SLOW_FOR = 15.0  # ... seconds, after which half of that is remembered: by then it may be quick again
SPREAD = 0.5  # seconds over which those who wait for one server ask it on second connections
ATTEMPT = 0.5  # seconds for the other side's system to answer, before another attempt begins
FIRST_ATTEMPT = 5.0  # the same before it is known how far away the store is
ATTEMPT_MOST = 5.0  # seconds between attempts that were taken and heard nothing: more of them would not help the server
ROUND_TRIPS = 3  # times what connecting took at best, that an answer, and an attempt and its greeting, have at least
SHARE_OF_LEASE = 4  # so many attempts are to fit into what is left of a lease
LEAST = 0.05  # seconds; a lease that has run out makes nobody spin


def backoff(attempt: int, *, away: float = math.inf) -> float:
    """The longest pause before another attempt, after so many that failed. An outage may last for thousands of them.

    Args:
        attempt: How many have failed.
        away: Seconds since the connection was lost.
    """
    return min(BACKOFF_FIRST * 2.0 ** min(attempt, 16), BACKOFF_SOON if away < SOON else BACKOFF_MOST)


class Patience:
    """How patient one client is, given what it has seen so far.

    Args:
        rng: For the jitter of pauses.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._leases: list[Callable[[], float]] = []
        self._round_trip: float | None = None
        self._unanswered_changes = 0  # of connection, since the last answer
        self._slow, self._slow_at = 0.0, 0.0  # the longest silence lately, and when it ended

    def bound_by(self, remaining: Callable[[], float]) -> None:
        """Consider leases, too: `remaining` tells the seconds until the first of them may lapse, or infinity."""
        self._leases.append(remaining)

    def connected(self, took: float) -> None:
        """A connection was made, in so many seconds."""
        self._round_trip = took if self._round_trip is None else min(took, self._round_trip)

    def answered(self) -> None:
        """The server has answered a request."""
        self._unanswered_changes = 0

    def changed_connection(self) -> None:
        """A fresh connection has taken the place of a silent one."""
        self._unanswered_changes += 1

    def large_packets_seem_lost(self, unheard: int) -> bool:
        """Whether the next attempt is to do without large packets.

        Some networks drop them, and the word that they are too large ("MTU black hole"). Then a fresh connection, too,
        is greeted, which takes small packets only, and falls silent; or TLS is never agreed on, whose first packets
        are large.

        Args:
            unheard: How many attempts were taken by the other side and have heard nothing.
        """
        return self._unanswered_changes > 0 or unheard > 1

    def silence(self, *, acknowledged: bool = False) -> float:
        """Seconds without an answer after which a fresh connection is tried.

        Args:
            acknowledged: Whether the other side's system has acknowledged all that was sent. Then the network works,
                and the server is slow: a fresh connection would burden it with more, and be as slow.
        """
        longest = min(SILENCE * 2.0 ** min(self._unanswered_changes, 8), SILENCE_MOST)
        if acknowledged:
            return max(min(longest * BUSY_FACTOR, self._remaining() * BUSY_SHARE_OF_LEASE), self._least_attempt())
        return max(min(longest, self._share_of_lease()), self._least_attempt())

    def was_silent(self, seconds: float, *, now: float) -> None:
        """The server was silent for so long though something was asked, and then it was not."""
        if seconds >= self._slowness(now):
            self._slow, self._slow_at = seconds, now

    def _slowness(self, now: float) -> float:
        return self._slow * math.exp2((self._slow_at - now) / SLOW_FOR)

    def busy_silence(self, *, now: float) -> float:
        """Seconds of silence after which a server that may be busy is asked by another: longer than it took lately.

        Where thousands wait for it their asking would make it slower, and them ask more: none of them would be served.
        """
        return max(self.silence(), SLOW_FACTOR * self._slowness(now))

    def spread(self) -> float:
        """Seconds to wait before a server is asked by others that may be busy: thousands may be about to ask."""
        return self._rng.uniform(0.0, min(SPREAD, self._share_of_lease()))

    def attempt(self, unheard: int) -> float:
        """Seconds that an attempt has for itself before the next one begins.

        Args:
            unheard: How many attempts were taken by the other side and have heard nothing.
        """
        if self._round_trip is None:
            return FIRST_ATTEMPT
        longest = min(ATTEMPT * 2.0 ** min(unheard, 8), ATTEMPT_MOST)
        return max(min(longest, self._share_of_lease()), self._least_attempt())

    def pause(self, attempt: int, *, away: float = math.inf) -> float:
        """Seconds to sleep before another attempt; the arguments are those of `backoff`."""
        longest = backoff(attempt, away=away)
        left = self._remaining()
        if left < math.inf:
            longest = min(longest, BACKOFF_LEASED, max(left / SHARE_OF_LEASE, LEAST))
        return self._rng.uniform(0, longest)

    def _remaining(self) -> float:
        return min((remaining() for remaining in self._leases), default=math.inf)

    def _share_of_lease(self) -> float:
        return max(self._remaining() / SHARE_OF_LEASE, LEAST)

    def _least_attempt(self) -> float:
        """Seconds below which an answer could not have come yet."""
        return ROUND_TRIPS * (self._round_trip or 0.0)
