"""Shell: all peers of a server, what they hold together, and who pays when it is too much (promise S6).

A peer that reads too slowly fills only its own outbox. When all that the server holds is past `memory_bytes_max`,
three are hung up on, whose clients come back and resume: who has most waiting for it; who has left a long listing
unread for longest, for what is kept of earlier revisions; and who has taken up most, for longest, by frames that have
come in part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.engine.sessions import Budget
from store.protocol.wire import Sorry

if TYPE_CHECKING:
    from store.limits import Limits
    from store.server.durability import Durability
    from store.server.entry.table import Table
    from store.server.peer import Peer

__all__ = ["Peers"]


class Peers:
    """All peers of a server, with what each room that deals with them asks for.

    Args:
        limits: What they may hold.
        durability: The store, and what is held for the disk.
        table: All connections, of which these are some, and where it is counted who is hung up on.

    Attributes:
        by_id: Those that have been taken in, by number.
        durability: As given.
        table: As given.
        outboxes: Counted by the peers, as they queue and send.
        inboxes: And as they receive.
    """

    def __init__(self, limits: Limits, durability: Durability, table: Table) -> None:
        self._limits = limits
        self.by_id: dict[int, Peer] = {}
        self.durability = durability
        self.table = table
        self.outboxes: Budget = Budget()
        self.inboxes: Budget = Budget()
        # What is kept back for them is theirs, whatever else is held: a store that is full must still be read from.
        self.outboxes_kept_back: int = limits.outbox_bytes_max

    def hang_up(self, peer: Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and nobody else anything (S7)."""
        if not peer.gone:
            self.table.turned_away("%s is disconnected: %s", peer.name, sorry.message)
            peer.refuse(sorry)

    def abort(self) -> None:
        """Cut every connection, at once."""
        for peer in list(self.by_id.values()):
            peer.abort()

    @property
    def held_bytes(self) -> int:
        """What is held for connections and for the disk."""
        return self.outboxes.bytes + self.inboxes.bytes + self.table.bytes + self.durability.unwritten.bytes

    @property
    def lasting_bytes(self) -> int:
        """The same, without what is given up as soon as a request needs the room: more than is kept back for them.

        Else a few who read nothing would fill the store, and every write of others would be refused for it.
        """
        outboxes = min(self.outboxes.bytes, self.outboxes_kept_back)
        inboxes = min(self.inboxes.bytes, self._limits.frame_bytes_max)
        return outboxes + inboxes + self.table.bytes + self.durability.unwritten.bytes

    @property
    def outboxes_hold_too_much(self) -> bool:
        """Whether somebody must be hung up on, unless what can be sent makes room."""
        return self._is_too_much(self.outboxes.bytes, self.outboxes_kept_back)

    def make_room_in_outboxes(self) -> None:
        """Let who is slowest pay for it.

        Not whoever is told something just now: that may be anybody, and a few who read nothing would cost all others
        their watches.
        """
        while self.outboxes_hold_too_much:
            slowest = max(self._there, key=lambda peer: peer.outbox.bytes, default=None)
            if slowest is None:
                return
            self.table.turned_away(
                "%s is hung up on: %d bytes wait in all outboxes, and memory_bytes_max is %d; it reads slowest, and "
                "%d of them are its",
                *(slowest.name, self.outboxes.bytes, self._limits.memory_bytes_max, slowest.outbox.bytes),
            )
            slowest.abort()

    def make_room_in_listings(self) -> None:
        """Let who has left its listing unread for longest pay for what is kept of earlier revisions.

        It is looked at ten times a second: what is kept grows with others' writes, and not with what is told.
        """
        engine = self.durability.engine
        if not self._is_too_much(engine.unread_bytes, self.outboxes_kept_back):
            return
        peer = None if engine.slowest_reader is None else self.by_id.get(engine.slowest_reader)
        if peer is not None and not peer.gone:
            self.table.turned_away(
                "%s is hung up on: %d bytes are kept for unread listings; its is oldest", peer.name, engine.unread_bytes
            )
            peer.abort()

    def make_room_in_inboxes(self, now: float) -> None:
        """What has come of unfinished requests takes too much: let who has held most of it for longest begin anew."""
        while self._is_too_much(self.inboxes.bytes, self._limits.frame_bytes_max):
            costliest = max(self._there, key=lambda peer: peer.inbox_cost(now))
            what = (
                f"{self.inboxes.bytes} bytes of unfinished requests wait in all inboxes, and memory_bytes_max is "
                f"{self._limits.memory_bytes_max}; yours have cost most, and for longest"
            )
            self.hang_up(costliest, Sorry("limit", what))

    @property
    def _there(self) -> list[Peer]:
        return [peer for peer in self.by_id.values() if not peer.gone]

    def _is_too_much(self, held: int, kept_back: int) -> bool:
        """Whether what is held of one sort is more than is kept back for it, and all memory together is too much."""
        return (
            held > kept_back and self.durability.engine.memory_bytes + self.held_bytes > self._limits.memory_bytes_max
        )
