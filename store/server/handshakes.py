"""Accepts or refuses connections (promise S7), and opens their sessions. A goodbye ends the session."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from store.protocol.connection import ServerConnection
from store.protocol.wire import ENDED, Rejection
from store.server.accept.listener import EndWhenAlone
from store.server.accept.tls import TLS_BYTES
from store.server.peer import PEER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.protocol.connection import Secret
    from store.protocol.wire import Hello
    from store.server.peer import Peer
    from store.server.peers import Peers

HELD_MOST = 5.0  # seconds; at `sessions_max`, a new client waits for room expected this soon
SOON = 0.001  # seconds by which a timer may be early


@dataclass(eq=False, repr=False)
class Handshakes:
    """Accepts or refuses new connections. `token`: the secret, or a function that returns it; `leaving`: refuse all."""

    peers: Peers
    token: Secret
    clock: Callable[[], float]
    leaving: bool = False
    generation: int = 1  # 1 + the stores lost before; the highest that an authenticated client has sent
    bytes_out: int = 0  # bytes sent on accepted connections that have ended
    _refuses: bool = False  # the last connection was refused: do not log the next refusal

    def __post_init__(self) -> None:
        self._by_id, self._durability, self._table = self.peers.by_id, self.peers.durability, self.peers.table
        self.end_when_alone: EndWhenAlone = EndWhenAlone(self._has_no_clients)
        self.empty: asyncio.Event = asyncio.Event()
        self.empty.set()

    def _has_no_clients(self) -> bool:
        return all(peer.is_internal for peer in self._by_id.values())

    def handle_accept(self, peer: Peer) -> None:
        """Handle a new connection."""
        engine, table = self._durability.engine, self._table
        nonce = os.urandom(16)
        peer.connection = ServerConnection(
            store_id=engine.store_id, nonce=nonce, token=self.token, limits=engine.limits, generation=self.generation
        )
        if self.end_when_alone.hands_over:
            peer.refuse(Rejection(ENDED, "this store is ending, and another host may serve"))
            return
        leaving = "the server is leaving" if self.leaving or self.end_when_alone.rejects_clients else None
        refusal = leaving or self._durability.client_refusal_reason() or table.refusal_reason(peer.address)
        if refusal is not None:
            if self._refuses or leaving:
                table.refused += 1
            else:
                what = "store %s refuses connections, from %s on: %s"
                table.log_refusal(what, engine.store_id, peer.name, refusal)
            self._refuses = True
            peer.refuse(Rejection("limit", refusal))
            return
        self._refuses = False
        self._by_id[peer.id] = peer
        self.empty.clear()
        within = engine.limits.handshake_timeout
        # After a refusal for "limit", an honest client retries.
        why = Rejection("limit", f"no hello within {within:g} s (handshake_timeout)")
        table.register(peer, peer.address, cost=PEER_BYTES + (TLS_BYTES if peer.secure else 0))
        table.limit_handshake(peer, within, partial(self.peers.disconnect_peer, peer, why), patiently=True)
        peer.outbox.queue(peer.connection.encode_greeting())
        peer.flush()

    def open_session(self, peer: Peer, hello: Hello) -> bytes | None:
        """Open an authenticated peer's session, and return its welcome; None if it must wait, or was disconnected."""
        self.generation = max(self.generation, hello.generation)
        engine = self._durability.engine
        now = self.clock()
        opened = engine.connect(peer.id, session_id=hello.session_id, process=hello.process, now=now)
        self._durability.record_changes()
        if opened is None:
            most, place_in = engine.limits.sessions_max, engine.state.sessions.seconds_until_room(now)
            if place_in <= HELD_MOST:
                asyncio.get_running_loop().call_later(place_in + SOON, peer.resume_requests)
            else:
                full = f"the server has {most} sessions (sessions_max): come again"
                self.peers.disconnect_peer(peer, Rejection("limit", full))
            return None
        session, previous = opened
        replaced = None if previous is None else self._by_id.get(previous)
        if replaced is not None:
            replaced.abort()  # not `close`, which would wait if the old network path is cut
        self._table.mark_authenticated(peer)
        durable = self._durability.journal is not None
        return peer.connection.encode_welcome(
            session=session, address=peer.address, revision=engine.revision, durable=durable
        )

    def handle_disconnect(self, peer: Peer) -> None:
        """Handle the end of a connection."""
        if self._by_id.pop(peer.id, None) is None:
            return
        self._table.unregister(peer)
        self.bytes_out += peer.bytes_out
        engine = self._durability.engine
        engine.disconnect(peer.id, now=self.clock(), how=peer.closing)
        self._durability.record_changes()
        if not self._by_id:
            self.empty.set()
        if self._has_no_clients():
            self.end_when_alone.end_wait_if_alone()
