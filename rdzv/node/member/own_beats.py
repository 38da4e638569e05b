"""Shell: notes about a member's steps, sent with its node's keep-alives, and at once if the member becomes quiet."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from rdzv.core.stuck.beats import WAITS_AFTER
from store.keeping import RENEWALS_PER_TTL
from store.printable import escaping, in_words

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.membership import Membership
    from rdzv.node.link.link import Link


log: logging.Logger = escaping(logging.getLogger(__name__))

SAY_WAIT_AFTER = 1.5  # seconds of a wait in the round's store until it is logged
LOOKS_PER_LIMIT = 4  # checks per time limit, while none applies and after one was exceeded
NOTES_PER_LIMIT = 3  # the least notes per time limit: if others' notes show progress, a quiet member is stuck


class OwnBeats:
    """A node's reports of its member's steps."""

    def __init__(self, settings: Settings) -> None:
        self._limits = (settings.stall_timeout, settings.first_step_timeout)
        # etcd takes no note with a keep-alive: there a note is a write, sent only if a time limit needs it.
        self._on = settings.endpoint.info.family == "tcp" or any(limit is not None for limit in self._limits)
        self._link: Link | None = None
        # the membership whose member was reported as quiet, and since when the member has been quiet
        self._told: tuple[Membership, float] | None = None
        self._renewed_every = settings.ttl / RENEWALS_PER_TTL
        self._noted_at = -math.inf  # when `_attend_quiet` last sent a note between two keep-alives
        self._say_wait_after = SAY_WAIT_AFTER
        self._waits = False  # True if the last note said that the member waits

    def note(self, membership: Membership | None, *, away: bool) -> bytes:
        """Return the note for the next keep-alive."""
        if membership is None or membership.over is not None:
            return b""
        waited, _ = membership.beats.longest_wait or (0.0, "")
        was_waiting, self._waits = self._waits, waited >= WAITS_AFTER  # a note also says that a wait is over
        says = self._on and (membership.beats.counts or self._waits or was_waiting)
        return membership.beats.note(away=away).pack() if says else b""

    def send(self) -> None:
        """Send a note now, and not with the next keep-alive."""
        if self._link is not None:
            self._link.keeping.renew_now()

    def attend(self, link: Link, membership: Membership) -> float | None:
        """Send a note at once if the member waits or is quiet for too long; return when to look again, if ever."""
        self._link = link
        return earlier(self._attend_wait(link, membership), self._attend_quiet(link, membership))

    def _attend_wait(self, link: Link, membership: Membership) -> float | None:
        """Log a long wait in the round's store and send a note at once: keep-alives can be many seconds apart."""
        beats = membership.beats
        beats.wait_is_watched = False  # first, so that a wait that begins now calls `on_wait`
        wait = beats.longest_wait
        if wait is None:
            if self._waits:
                link.keeping.renew_now()  # its note says that the wait is over
            return None
        beats.wait_is_watched = True
        waited, key = wait
        if waited < SAY_WAIT_AFTER:
            self._say_wait_after = SAY_WAIT_AFTER
        elif waited >= self._say_wait_after:
            self._say_wait_after = 2 * waited
            where = f"round {membership.round.number}: node {membership.node_id}"
            log.info("%s has waited %s in the round's store, for %s", where, in_words(waited), key)
            link.keeping.renew_now()
        return link.store.time() + min(self._say_wait_after - waited, SAY_WAIT_AFTER)

    def _attend_quiet(self, link: Link, membership: Membership) -> float | None:
        beats, now = membership.beats, link.store.time()
        limits = [limit for limit in self._limits if limit is not None]
        if not limits:
            return None
        limit = self._limits[1 if beats.first else 0]
        if limit is None or not beats.counts:
            return now + min(limits) / LOOKS_PER_LIMIT  # a limit may apply by then
        since, every = beats.quiet_since(), limit / NOTES_PER_LIMIT
        next_note = math.inf
        if every < self._renewed_every:  # the keep-alives alone would be too rare
            if now >= self._noted_at + every:
                self._noted_at = now
                link.keeping.renew_now()
            next_note = self._noted_at + every
        if now < since + limit:
            return min(since + limit, next_note)
        if self._told != (membership, since):
            self._told = membership, since
            link.keeping.renew_now()
        # The member may continue, and become quiet again.
        return min(now + limit / LOOKS_PER_LIMIT, next_note)


def earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times; None is never."""
    return min((time for time in (one, other) if time is not None), default=None)
