"""Notes about a member's steps, sent with keep-alives, or at once if the member becomes quiet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rdzv.core.stuck.step_log import WAITS_AFTER
from store.keeping import RENEWALS_PER_TTL
from store.printable import make_logger, time_text

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.membership import Membership
    from rdzv.node.link.store_session import StoreSession

log: Final = make_logger(__name__)

SAY_WAIT_AFTER = 1.5  # seconds of a member's wait in the round's store before a log line; the most between checks
LOOKS_PER_LIMIT = 4  # checks per time limit of a member that has no limit yet, or was reported as quiet
NOTES_PER_LIMIT = 3  # the fewest notes about a member's steps within a time limit


class StepReporter:
    """A node's reports of its member's steps."""

    def __init__(self, settings: Settings) -> None:
        self._limits = (settings.stall_timeout, settings.first_step_timeout)
        # On etcd, where each note is a write, send notes only if the settings have a time limit for steps.
        self._on = settings.endpoint.scheme_info.family == "tcp" or any(limit is not None for limit in self._limits)
        self._link: StoreSession | None = None
        # The membership whose member was last reported as quiet, and the time since which it was quiet; None before.
        self._told: tuple[Membership, float] | None = None
        self._renewed_every = settings.ttl / RENEWALS_PER_TTL
        self._noted_at = -math.inf  # when `_report_quiet` last sent a note ahead of the next keep-alive
        self._say_wait_after = SAY_WAIT_AFTER
        self._waits = False  # True if the member waited at the last keep-alive

    def keep_alive_note(self, membership: Membership | None, *, away: bool) -> bytes:
        """Return the note for the next keep-alive."""
        if membership is None or membership.over is not None:
            return b""
        waited, _ = membership.beats.longest_store_wait or (0.0, "")
        was_waiting, self._waits = self._waits, waited >= WAITS_AFTER  # a note also reports a wait's end
        says = self._on and (membership.beats.counts or self._waits or was_waiting)
        return membership.beats.current_note(away=away).pack() if says else b""

    def send(self) -> None:
        """Send a keep-alive with a note now."""
        if self._link is not None:
            self._link.keeping.renew_now()

    def report_if_quiet(self, link: StoreSession, membership: Membership) -> float | None:
        """If the member waits or is quiet for too long, send a note at once; return when to check again."""
        self._link = link
        return earlier_time(self._report_store_wait(link, membership), self._report_quiet(link, membership))

    def _report_store_wait(self, link: StoreSession, membership: Membership) -> float | None:
        """Log a member's long wait in the round's store, and send a note of the wait at once."""
        beats = membership.beats
        beats.wait_is_watched = False  # so that a wait which begins after the next line calls `on_wait`
        wait = beats.longest_store_wait
        if wait is None:
            if self._waits:
                link.keeping.renew_now()  # the note reports the wait's end
            return None
        beats.wait_is_watched = True
        waited, key = wait
        if waited < SAY_WAIT_AFTER:
            self._say_wait_after = SAY_WAIT_AFTER
        elif waited >= self._say_wait_after:
            self._say_wait_after = 2 * waited
            where = f"round {membership.round.number}: node {membership.node_id}"
            log.info("%s has waited %s in the round's store, for %s", where, time_text(waited), key)
            link.keeping.renew_now()
        return link.store.time() + min(self._say_wait_after - waited, SAY_WAIT_AFTER)

    def _report_quiet(self, link: StoreSession, membership: Membership) -> float | None:
        beats, now = membership.beats, link.store.time()
        limits = [limit for limit in self._limits if limit is not None]
        if not limits:
            return None
        limit = self._limits[1 if beats.is_first_step else 0]
        if limit is None or not beats.counts:
            return now + min(limits) / LOOKS_PER_LIMIT  # no limit applies to the member yet, but may by then
        since, every = beats.quiet_since(), limit / NOTES_PER_LIMIT
        next_note = math.inf
        if every < self._renewed_every:  # keep-alives alone would bring notes too rarely
            if now >= self._noted_at + every:
                self._noted_at = now
                link.keeping.renew_now()
            next_note = self._noted_at + every
        if now < since + limit:
            return min(since + limit, next_note)
        if self._told != (membership, since):
            self._told = membership, since
            link.keeping.renew_now()
        # Look again: the member may continue, and later become quiet once more.
        return min(now + limit / LOOKS_PER_LIMIT, next_note)


def earlier_time(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times; None means never."""
    return min((time for time in (one, other) if time is not None), default=None)
