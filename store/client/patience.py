"""Pure: how long a client waits: for an answer, for an attempt to connect, and between two attempts.

TCP repeats what was lost after 0.2, 0.4, ... 3.3, 6.5 s. So after a cut of 4 s an old connection may stay silent for
3 s more, and a firewall that has forgotten it keeps it silent for ever, while a new connection passes at once. Silence
of a second is therefore a reason to try a fresh connection (promise R8). A slow server is silent, too. So the old
connection is kept meanwhile, and after each change of connection that brought no answer the client waits twice as long.

Where the other side's system acknowledges what it is sent, the network works, and silence has two causes that look
alike. The server is busy: then thousands who come over fresh connections keep it busier still. Or what acknowledges is
a proxy behind which the connection has gone. So the client waits longer there, and longer than the server took lately.

Leases shorten all of it: who has one second left to renew a lease does not sleep for two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["HEARTBEAT", "LASTED", "SILENCE", "Patience"]

BACKOFF_FIRST = 0.1  # seconds; the first pause is up to so long, and each further one up to twice as long ...
BACKOFF_MOST = 2.0  # ... up to this. Full jitter, so that thousands do not come back at once
LASTED = 0.25  # seconds; a connection that was lost after so long is replaced without a pause
SOON = 1.0  # seconds after a loss in which coming back matters most: leases may lapse sooner while we are away (S5) ...
BACKOFF_SOON = 0.25  # ... so that the pauses are at most so long at first
BACKOFF_RECENT = 0.5  # seconds; the longest pause of a client that holds a lease, and for a while of any: a store ...
RECENT = 30.0  # ... that was restarted is back within so many seconds

HEARTBEAT = 5.0  # seconds of silence before we ask, where nothing was asked, and again before we hang up
SILENCE = 1.0  # seconds without an answer after which a fresh connection is tried
SILENCE_MOST = 5.0  # and after several fresh connections on which there was none, either
BUSY_FACTOR = 10.0  # times as long is waited for a server whose system acknowledges what it is sent ...
BUSY_SHARE_OF_LEASE = 0.75  # ... but no longer than for this part of what is left of a lease
SLOW_FACTOR = 3.0  # times as long as such a server was silent lately, though it was asked, it may be silent again ...
SLOW_FOR = 15.0  # ... seconds, after which half of that is remembered: by then it may be quick again
ATTEMPT = 0.5  # seconds for the other side's system to answer, before another attempt begins: the next one may pass
FIRST_ATTEMPT = 5.0  # the same before it is known how far away the store is
WORD_MOST = 64.0  # seconds that a server which takes connections has to say its first word, after many that heard none
ROUND_TRIPS = 3  # times what connecting took at best, that an answer, and an attempt and its greeting, have at least
SHARE_OF_LEASE = 4  # so many attempts are to fit into what is left of a lease
LEAST = 0.05  # seconds; a lease that has run out makes nobody spin


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
        """A fresh connection has been, or is to be, taken in place of one on which the server said nothing."""
        self._unanswered_changes += 1

    def was_silent(self, seconds: float, *, now: float) -> None:
        """The server was silent for so long though something was asked."""
        if seconds >= self._slowness(now):
            self._slow, self._slow_at = seconds, now

    @property
    def large_packets_seem_lost(self) -> bool:
        """Whether the next attempt is to do without large packets.

        Some networks drop them, and the word that they are too large ("MTU black hole"). Then a fresh connection, too,
        is greeted, which takes small packets only, and falls silent; or TLS is never agreed on, whose first packets
        are large.
        """
        return self._unanswered_changes > 0

    def silence(self, now: float, *, acknowledged: bool = False) -> float:
        """Seconds without an answer after which a fresh connection is tried.

        Args:
            now: On the clock of `was_silent`.
            acknowledged: Whether the other side's system has acknowledged all that was sent.
        """
        longest = min(SILENCE * 2.0 ** min(self._unanswered_changes, 8), SILENCE_MOST)
        share = 1 / SHARE_OF_LEASE
        if acknowledged:
            longest, share = max(longest * BUSY_FACTOR, SLOW_FACTOR * self._slowness(now)), BUSY_SHARE_OF_LEASE
        return self._within_leases(longest, share)

    def attempt(self) -> float:
        """Seconds that the other side's system has to answer an attempt to connect."""
        return FIRST_ATTEMPT if self._round_trip is None else self._within_leases(ATTEMPT, 1 / SHARE_OF_LEASE)

    def first_word(self) -> float:
        """Seconds that a server has to say its first word, once its system has answered.

        A busy one greets in the order of coming: who gives up and comes again stands last. So each time it has longer.
        """
        first = 2 * HEARTBEAT if self._round_trip is None else SILENCE
        longest = min(first * 2.0 ** min(self._unanswered_changes, 8), WORD_MOST)
        return max(self._within_leases(longest, BUSY_SHARE_OF_LEASE), SILENCE)

    def pause(self, attempt: int, *, away: float = math.inf) -> float:
        """Seconds to sleep before another attempt.

        Args:
            attempt: How many have failed; in an outage that may be thousands.
            away: Seconds since the connection was lost.
        """
        most = BACKOFF_SOON if away < SOON else BACKOFF_RECENT if away < RECENT else BACKOFF_MOST
        longest = min(BACKOFF_FIRST * 2.0 ** min(attempt, 16), most)
        left = self._remaining()
        if left < math.inf:
            longest = min(longest, BACKOFF_RECENT, max(left / SHARE_OF_LEASE, LEAST))
        return self._rng.uniform(0, longest)

    def _remaining(self) -> float:
        return min((remaining() for remaining in self._leases), default=math.inf)

    def _within_leases(self, longest: float, share: float) -> float:
        """At most this share of what is left of a lease; but no answer could have come before a few round trips."""
        return max(min(longest, max(self._remaining() * share, LEAST)), ROUND_TRIPS * (self._round_trip or 0.0))

    def _slowness(self, now: float) -> float:
        return self._slow * math.exp2((self._slow_at - now) / SLOW_FOR)
