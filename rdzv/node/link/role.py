"""Shell: the lease of the role of coordinator: its length, and its grant together with the role.

The lease is short, so that a coordinator that is cut off is soon replaced. A slow store, many nodes, and each lost term
make it longer: otherwise, under load, terms would end without a decision.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rdzv.core.history import HourNote
from store import Grant
from store.keeping import HeldLease

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.node.link.link import Link

ROLE_TTL = 3.0  # seconds that a coordinator that is paused or cut off may delay the others
ROUND_TRIPS_PER_TERM = 10  # the least in a lease: taking over needs three, and a renewal must be answered in time
SECONDS_PER_NODE = 0.001  # the least TTL per node: the store and the coordinator may be busy that long with many nodes
TERM_MOST = 30.0  # seconds; a store that takes longer to answer than a tenth of that is too slow to use
ELECTION_PER_NODE = 0.001  # seconds of random pause per known node, so that few try at once ...
ELECTION_MOST = 1.0  # ... and at most this
LOST_TERMS_MOST = 4  # more lost terms in a row make the lease and the pause no longer
ROLE_DISCONNECT_TTL = 0.4  # seconds, less than a member's: a dead coordinator is replaced before its death is announced


class Role:
    """The role of coordinator, which a transaction takes if it is free."""

    def __init__(self, link: Link, settings: Settings, *, nodes: int, lost_terms: int = 0) -> None:
        needed = max(ROLE_TTL, ROUND_TRIPS_PER_TERM * link.round_trip, SECONDS_PER_NODE * nodes)
        # The role must outlast the store's own failover.
        wanted = min(needed * 2.0 ** min(lost_terms, LOST_TERMS_MOST), TERM_MOST) + link.store.fail_over
        ttl = min(wanted, link.store.lease_ttl_max)
        self.lease: HeldLease = HeldLease(link.keeping, id=link.new_lease_id(), ttl=ttl)
        self.grant: Grant = Grant(
            ttl=ttl,
            # After a disconnection the role ends no later than a member's lease: the next coordinator announces the
            # death.
            disconnect_ttl=max(ROLE_DISCONNECT_TTL, min(link.reconnects_in, settings.disconnect_ttl)),
            gone_ttl=max(settings.gone_ttl, link.reconnects_in),
            id=self.lease.id,
        )
        self.sent_at: float = link.store.time()  # when the request for the role was sent, on this node's clock
        self.term: int = 0  # the revision that created the role's key, once taken
        # Seconds that the run's time of day is ahead of this node's clock; see `rdzv.core.history`.
        self.hour_offset: float = time.time() - self.sent_at
        self._clock = link.store.time

    def hour(self) -> float:
        """Return the run's present time of day."""
        return self._clock() + self.hour_offset

    def note(self, _: bool) -> bytes:
        """Return the note for each keep-alive: readers, whose clocks differ, add its age for the run's time of day."""
        return HourNote(hour=self.hour()).pack()


def election_pause(nodes: int, *, lost_terms: int) -> float:
    """Return the longest random pause before taking the role; the arguments are those of `Role`."""
    # A node that lost the role by its lease's end lets others try first: they may be less busy.
    return min(ELECTION_PER_NODE * nodes, ELECTION_MOST) * 2.0 ** min(lost_terms, LOST_TERMS_MOST)
