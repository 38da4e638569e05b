"""The lease of the role of coordinator, which a transaction grants together with the role.

The lease is short, so that a disconnected coordinator is soon replaced. The lease is longer if the store is slow, if
the run has many nodes, and after each lost term: otherwise, under load, terms would end before a decision.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rdzv.core.history import TimeOfDayNote
from store import Grant
from store.keeping import HeldLease

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.node.link.store_session import StoreSession

ROLE_TTL = 3.0  # the role's least TTL, in seconds: a paused coordinator may delay the run for that long
ROUND_TRIPS_PER_TERM = 10  # round trips that the role's TTL covers at least; taking over needs three
SECONDS_PER_NODE = 0.001  # the role's least TTL per node, in seconds: many nodes keep the coordinator busy
TERM_MOST = 30.0  # the role's longest TTL, in seconds, without the time that the store's own failover takes
ELECTION_PER_NODE = 0.001  # seconds per node of the longest pause before an election, so that few try at once
ELECTION_MOST = 1.0  # seconds; the longest pause after an election, and before one unless this node lost terms
LOST_TERMS_MOST = 4  # each lost term in a row doubles the TTL and the pause, up to this many terms
ROLE_DISCONNECT_TTL = 0.4  # seconds, at least, until a disconnected coordinator loses its role


class CoordinatorLease:
    """The role of coordinator, which a transaction gives to this node if no other node has it."""

    def __init__(self, link: StoreSession, settings: Settings, *, nodes: int, lost_terms: int = 0) -> None:
        needed = max(ROLE_TTL, ROUND_TRIPS_PER_TERM * link.round_trip, SECONDS_PER_NODE * nodes)
        # While the store fails over to another server, no coordinator can renew its lease: keep the role until then.
        wanted = min(needed * 2.0 ** min(lost_terms, LOST_TERMS_MOST), TERM_MOST) + link.store.fail_over
        ttl = min(wanted, link.store.lease_ttl_max)
        self.lease: HeldLease = HeldLease(link.keeping, id=link.new_lease_id(), ttl=ttl)
        self.grant: Grant = Grant(
            ttl=ttl,
            # Unless `disconnect_ttl` is very short, the role ends before the node record: a successor reports the loss.
            disconnect_ttl=max(ROLE_DISCONNECT_TTL, min(link.reconnect_seconds, settings.disconnect_ttl)),
            gone_ttl=max(settings.gone_ttl, link.reconnect_seconds),
            id=self.lease.id,
        )
        self.sent_at: float = link.store.time()  # when this node sent the request for the role, on its clock
        self.term: int = 0  # the revision that created the role's key; 0 until this node has the role
        self.day_offset: float = time.time() - self.sent_at  # run's time of day minus this node's clock, in seconds
        self._clock = link.store.time

    def time_of_day_now(self) -> float:
        """Return the run's present time of day."""
        return self._clock() + self.day_offset

    def time_of_day_note(self, _: bool) -> bytes:
        """Return the note for a keep-alive: the run's time of day, to which readers add the note's age."""
        return TimeOfDayNote(hour=self.time_of_day_now()).pack()


def election_pause_max(nodes: int, *, lost_terms: int) -> float:
    """Return the seconds of the longest random pause before an election in a run with this many nodes."""
    # If this node lost the role because its lease expired, let less busy nodes try first.
    return min(ELECTION_PER_NODE * nodes, ELECTION_MOST) * 2.0 ** min(lost_terms, LOST_TERMS_MOST)
