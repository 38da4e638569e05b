"""Shell: the lease of the role of coordinator: how long it is, and how it is taken together with the role.

It is short, so that a coordinator which is cut off is replaced soon. It must not be shorter than its holder needs to do
anything within it: a store that answers slowly, and many nodes, make it longer, and so does each term that was lost.
Else, under load, terms begin and end, and nothing is ever decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from store import Grant
from store.keeping import RENEWALS_PER_TTL

if TYPE_CHECKING:
    from rdzv.node.link import Link
    from store.client.keepalive import HeldLease

__all__ = ["ELECTION_MOST", "RoleGrant", "TakenRole", "busy_ttl", "election_pause", "role_ttl"]

ROLE_TTL = 3.0  # seconds; how long a coordinator that is paused or cut off may hold the others up
ROUND_TRIPS_PER_TERM = 10  # at least; taking over takes three, and a renewal must be back before the lease is over
SECONDS_PER_NODE = 0.001  # at least; a store and a coordinator that serve so many nodes at once are busy for as long
RENEWALS_PER_SECOND = 100  # of leases, by one process at most: a few hundredths of its processor
TERM_MOST = 30.0  # seconds; a store that takes longer to answer than a tenth of that is of no use
ELECTION_PER_NODE = 0.001  # seconds of random pause per known node, so that few try at once ...
ELECTION_MOST = 1.0  # ... and at most so long
LOST_TERMS_MOST = 4  # beyond so many in a row nothing becomes longer
ROLE_DISCONNECT_TTL = 0.4  # below a member's: a coordinator is replaced before its own death is to be announced


def busy_ttl(neighbours: int) -> float:
    """Return for how long a process that carries so many nodes has its leases granted at least, in seconds.

    Where the processor is busy with other things, too, renewing thousands of them takes all that the process gets of
    it. A process that dies is heard of by its connections, however long its leases are (R20).
    """
    return neighbours * RENEWALS_PER_TTL / RENEWALS_PER_SECOND


def role_ttl(link: Link, nodes: int, *, lost_terms: int = 0, neighbours: int = 1) -> float:
    """Return for how long the role is taken, in seconds.

    Args:
        link: The way to the store, which knows how slowly that answers.
        nodes: How many are, or will be, in the run.
        lost_terms: How many terms in a row this node has lost since its lease was over.
        neighbours: How many nodes live in this process.
    """
    needed = max(ROLE_TTL, busy_ttl(neighbours), ROUND_TRIPS_PER_TERM * link.round_trip, SECONDS_PER_NODE * nodes)
    # A store that was away for so long must not cost the role as well.
    wanted = min(needed * 2.0 ** min(lost_terms, LOST_TERMS_MOST), TERM_MOST) + link.store.fail_over
    return min(wanted, link.store.lease_ttl_max)


def election_pause(nodes: int, *, lost_terms: int) -> float:
    """Return the longest random pause before taking the role; the arguments are those of `role_ttl`."""
    # Whoever has lost the role since its lease was over lets others try first: they may be less busy.
    return min(ELECTION_PER_NODE * nodes, ELECTION_MOST) * 2.0 ** min(lost_terms, LOST_TERMS_MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenRole:
    """The role of coordinator, which this node has.

    Attributes:
        term: The revision that made its key.
        lease: What that is on, once it is kept.
        sent_at: When it was asked for, on this node's clock.
    """

    term: int
    lease: HeldLease
    sent_at: float


class RoleGrant:
    """The lease with which a transaction takes the role, if the role is free.

    Args:
        link: The way to the store.
        ttl: See `role_ttl`.
        disconnect_ttl: How long a member's lease outlives its connection. The role outlives it no longer, however slow
            the store was when this node connected: a death is announced by whoever coordinates next.
        gone_ttl: How long a member's lease outlives its process.
    """

    def __init__(self, link: Link, *, ttl: float, disconnect_ttl: float, gone_ttl: float) -> None:
        self.lease: HeldLease = link.keeper.prepare(id=link.choose_lease(), ttl=ttl)
        self.grant: Grant = Grant(
            ttl=ttl,
            disconnect_ttl=max(ROLE_DISCONNECT_TTL, min(link.reconnects_in, disconnect_ttl)),
            gone_ttl=max(gone_ttl, link.reconnects_in),
            id=self.lease.id,
        )

    def taken(self, *, term: int, sent_at: float) -> TakenRole:
        """The role, now that the transaction which was sent then has taken it."""
        return TakenRole(term=term, lease=self.lease, sent_at=sent_at)
