"""All peers of a server, their total memory, and the choice of peers to close at the limit (promise S6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.engine.sessions import ByteCount
from store.protocol.wire import Rejection

if TYPE_CHECKING:
    from store.limits import Limits
    from store.server.accept.connection_table import ConnectionTable
    from store.server.durability import Durability
    from store.server.peer import Peer


class Peers:
    """All peers of a server, and the bytes of their outboxes and waiting requests."""

    def __init__(self, limits: Limits, durability: Durability, table: ConnectionTable) -> None:
        self._limits = limits
        self.by_id: dict[int, Peer] = {}
        self.durability = durability
        self.table = table
        self.outboxes: ByteCount = ByteCount()
        self.inboxes: ByteCount = ByteCount()
        # Outboxes may always hold this many bytes, so that a full store can still be read.
        self.outboxes_kept_back: int = limits.outbox_bytes_max

    def disconnect_peer(self, peer: Peer, rejection: Rejection) -> None:
        """Send a rejection to a peer, and disconnect it."""
        if not peer.gone:
            self.table.log_refusal("%s is disconnected: %s", peer.name, rejection.message)
            peer.refuse(rejection)

    def abort(self) -> None:
        """Close every connection at once."""
        for peer in list(self.by_id.values()):
            peer.abort()

    @property
    def held_bytes(self) -> int:
        """The bytes held for connections and for the disk."""
        return self.outboxes.bytes + self.inboxes.bytes + self.table.bytes + self.durability.pending_commits.bytes

    @property
    def unfreeable_bytes(self) -> int:
        """`held_bytes`, with outboxes and inboxes only up to their reserves: closing peers frees the rest."""
        outboxes = min(self.outboxes.bytes, self.outboxes_kept_back)
        inboxes = min(self.inboxes.bytes, self._limits.frame_bytes_max)
        return outboxes + inboxes + self.table.bytes + self.durability.pending_commits.bytes

    @property
    def outboxes_hold_too_much(self) -> bool:
        """True if outboxes take too much memory: a peer must be closed, unless sending makes room."""
        return self._exceeds_memory(self.outboxes.bytes, self.outboxes_kept_back)

    def close_slowest_readers(self) -> None:
        """While outboxes hold too much, close the slowest reader: the peer with the largest outbox."""
        while self.outboxes_hold_too_much:
            slowest = max(self._connected_peers, key=lambda peer: peer.outbox.bytes, default=None)
            if slowest is None:
                return
            self.table.log_refusal(
                "%s is disconnected: %d bytes wait in all outboxes, and memory_bytes_max is %d; it reads slowest, and "
                "%d of them are its",
                *(slowest.name, self.outboxes.bytes, self._limits.memory_bytes_max, slowest.outbox.bytes),
            )
            slowest.abort()

    def close_oldest_listing_reader(self) -> None:
        """Close the reader of the oldest unread listing if the entries kept for listings take too much."""
        snapshots = self.durability.engine.state.snapshots
        if not self._exceeds_memory(snapshots.held_bytes, self.outboxes_kept_back):
            return
        peer = None if snapshots.oldest_snapshot is None else self.by_id.get(snapshots.oldest_snapshot.reader)
        if peer is not None and not peer.gone:
            why = "%s is disconnected: %d bytes are kept for unread listings, its the oldest"
            self.table.log_refusal(why, peer.name, snapshots.held_bytes)
            peer.abort()

    def close_costliest_inboxes(self, now: float) -> None:
        """While unfinished requests take too much memory, close the peer with the highest bytes times age."""
        while self._exceeds_memory(self.inboxes.bytes, self._limits.frame_bytes_max):
            costliest = max(self._connected_peers, key=lambda peer: peer.slow_sender_score(now))
            what = (
                f"{self.inboxes.bytes} bytes of unfinished requests wait in all inboxes, and memory_bytes_max is "
                f"{self._limits.memory_bytes_max}; yours have cost most, and for longest"
            )
            self.disconnect_peer(costliest, Rejection("limit", what))

    @property
    def _connected_peers(self) -> list[Peer]:
        return [peer for peer in self.by_id.values() if not peer.gone]

    def _exceeds_memory(self, held: int, kept_back: int) -> bool:
        return (
            held > kept_back
            and self.durability.engine.state.memory_bytes + self.held_bytes > self._limits.memory_bytes_max
        )
