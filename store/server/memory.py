"""Shell: what all connections of a server hold together, and who pays when it is too much (promise S6).

A peer that reads too slowly fills only its own outbox. Past `outboxes_bytes_max`, which is for all of them together,
who has most waiting is hung up on; its client comes back and resumes. So is, at the same limit, who has left a long
listing unread for longest, for what is kept of earlier revisions. A frame that has come in part takes memory, too, for
as long as its sender likes: past `inboxes_bytes_max`, whoever has taken up most of it for longest is hung up on. Past
`memory_bytes_max`, which is for the store as well, all of them are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from store.protocol.wire import Sorry
from store.server.outbox import Budget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from store.engine.engine import Engine
    from store.limits import Limits
    from store.server.peer import Peer

__all__ = ["Host", "Memory"]

log: logging.Logger = logging.getLogger(__name__)


class Host(Protocol):
    """What it needs of its server."""

    @property
    def engine(self) -> Engine:
        """The store, which tells what it takes."""
        ...

    @property
    def connection_bytes(self) -> int:
        """What the connections take that are open, whatever they do."""
        ...

    @property
    def unwritten_bytes(self) -> int:
        """What is held for the disk."""
        ...

    def turned_away(self) -> bool:
        """Somebody is refused or hung up on; whether the log has a line for it."""
        ...

    def hang_up(self, peer: Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and say why."""
        ...


class Memory:
    """What all connections hold together.

    Attributes:
        outboxes: Counted by the peers, as they queue and send.
        inboxes: And as they receive.
        outboxes_free: What the outboxes may hold whatever else is held.
    """

    def __init__(self, limits: Limits, peers: Mapping[int, Peer], host: Host) -> None:
        self._limits = limits
        self._peers = peers
        self._host = host
        self.outboxes: Budget = Budget()
        self.inboxes: Budget = Budget()
        self.outboxes_free: int = min(limits.outbox_bytes_max, limits.outboxes_bytes_max)  # whatever else is held

    @property
    def held_bytes(self) -> int:
        """What is held for connections and for the disk."""
        return self.outboxes.bytes + self.inboxes.bytes + self._host.connection_bytes + self._host.unwritten_bytes

    @property
    def outboxes_hold_too_much(self) -> bool:
        """Whether somebody must be hung up on, unless what can be sent makes room."""
        return self.outboxes.bytes > self.outboxes_free and self._too_much(
            self.outboxes, self._limits.outboxes_bytes_max, self._limits.outbox_bytes_max
        )

    @property
    def inboxes_hold_too_much(self) -> bool:
        """The same of what has come."""
        return self._too_much(self.inboxes, self._limits.inboxes_bytes_max, self._limits.frame_bytes_max)

    def make_room_in_outboxes(self) -> None:
        """Let who is slowest pay for it.

        Not whoever is told something just now: that may be anybody, and a few who read nothing would cost all others
        their watches.
        """
        while self.outboxes_hold_too_much:
            slowest = max((peer for peer in self._peers.values() if not peer.gone), key=_backlog, default=None)
            if slowest is None:
                return
            if self._host.turned_away():
                log.warning(
                    "%s is hung up on: %d bytes wait in all outboxes, and %s; it reads slowest, and %d of them are its",
                    *(slowest.name, self.outboxes.bytes, self._bound(outboxes=True), slowest.outbox.bytes),
                )
            slowest.abort()

    def make_room_in_listings(self) -> None:
        """Let who has left its listing unread for longest pay for what is kept of earlier revisions.

        It is looked at ten times a second: what is kept grows with others' writes, and not with what is told.
        """
        unread, reader = self._host.engine.unread_bytes, self._host.engine.slowest_reader
        peer = None if reader is None else self._peers.get(reader)
        if peer is None or peer.gone:
            return
        if unread > self._limits.outboxes_bytes_max or (unread > self.outboxes_free and self._all_is_too_much):
            if self._host.turned_away():
                log.warning("%s is hung up on: %d bytes are kept for unread listings; its is oldest", peer.name, unread)
            peer.abort()

    def make_room_in_inboxes(self, now: float) -> None:
        """What has come of unfinished requests takes too much: let who has held most of it for longest begin anew."""
        while self.inboxes_hold_too_much:
            costliest = max(
                (peer for peer in self._peers.values() if not peer.gone),
                key=lambda peer: peer.inbox_cost(now),
            )
            what = (
                f"{self.inboxes.bytes} bytes of unfinished requests wait in all inboxes, and "
                f"{self._bound(outboxes=False)}; yours have cost most, and for longest"
            )
            self._host.hang_up(costliest, Sorry("limit", what))

    def _too_much(self, budget: Budget, most: int, kept_back: int) -> bool:
        """Whether all outboxes, or all inboxes, hold more than they may, or more than all else leaves of the memory.

        What is kept back for them is theirs in any case: a store that is full must still be read from.
        """
        if budget.bytes <= kept_back:
            return budget.bytes > most
        return budget.bytes > most or self._all_is_too_much

    @property
    def _all_is_too_much(self) -> bool:
        return self._host.engine.memory_bytes + self.held_bytes > self._limits.memory_bytes_max

    def _bound(self, *, outboxes: bool) -> str:
        """Which limit is passed, in words."""
        name = "outboxes_bytes_max" if outboxes else "inboxes_bytes_max"
        if (self.outboxes if outboxes else self.inboxes).bytes <= getattr(self._limits, name):
            name = "memory_bytes_max"
        return f"{name} is {getattr(self._limits, name)}"


def _backlog(peer: Peer) -> int:
    return peer.outbox.bytes
