"""Shell: which connections are taken in, which are refused or hung up on, and what becomes of their sessions.

Whoever is hung up on costs nobody else anything, and the log one line, as long as it can bear that (promise S7).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING

from store.protocol.connection import ServerConnection
from store.protocol.wire import Sorry
from store.server.entry.door import WayOut
from store.server.entry.tls import TLS_BYTES
from store.server.peer import PEER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.protocol.wire import Hello
    from store.server.peer import Peer
    from store.server.peers import Peers

__all__ = ["Reception"]

HELD_MOST = 5.0  # seconds that a newcomer waits for a session; sooner than that a client does not come again, either
SOON = 0.001  # seconds that a clock may be behind


class Reception:
    """Who is taken in, and who is not.

    Args:
        peers: Those who are, and their store.
        token: What clients must prove to know, if anything.
        clock: The server's.

    Attributes:
        leaving: Nobody is taken in any more.
        way_out: How the server ends once nobody needs it any more.
        empty: Whether nobody is connected.
        bytes_out: What was sent to those who have gone.
    """

    def __init__(self, peers: Peers, *, token: bytes | None, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._by_id, self._durability, self._table = peers.by_id, peers.durability, peers.table
        self._token = token
        self._clock = clock
        self._refuses = False  # connections, since the last one that was taken in
        self.leaving: bool = False
        self.way_out: WayOut = WayOut(self._is_alone)
        self.empty: asyncio.Event = asyncio.Event()
        self.empty.set()
        self.bytes_out: int = 0

    def _is_alone(self) -> bool:
        """Whether no client is connected but of this process; the first of the others answers it."""
        return all(peer.is_of_ours for peer in self._by_id.values())

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        engine, table = self._durability.engine, self._table
        nonce = os.urandom(16)  # as `secrets.token_bytes`, which takes twice as long to ask for them
        peer.connection = ServerConnection(
            store_id=engine.store_id, nonce=nonce, token=self._token, limits=engine.limits
        )
        leaving = "the server is leaving" if self.leaving or self.way_out.taken else None
        refusal = leaving or self._durability.refusal() or table.refusal(peer.address)
        if refusal is not None:
            if self._refuses or leaving:
                table.refused += 1
            else:
                what = "store %s refuses connections, from %s on: %s"
                table.turned_away(what, engine.store_id, peer.name, refusal)
            self._refuses = True
            peer.refuse(Sorry("limit", refusal))
            return
        self._refuses = False
        self._by_id[peer.id] = peer
        self.empty.clear()
        within = engine.limits.handshake_timeout
        # An honest client on a busy machine is slow, too, and tries again.
        why = Sorry("limit", f"no hello within {within:g} s (handshake_timeout)")
        table.came(peer, peer.address, cost=PEER_BYTES + (TLS_BYTES if peer.secure else 0))
        table.expect(peer, within, partial(self._peers.hang_up, peer, why), patiently=True)
        peer.outbox.queue(peer.connection.greeting())
        peer.flush()

    def take_in(self, peer: Peer, hello: Hello, welcome: Callable[[Peer, bytes], None]) -> None:
        """Open the session of a peer that has said hello, and proven what is wanted, and say its welcome."""
        if peer.gone:
            return
        engine = self._durability.engine
        now = self._clock()
        opened = engine.connect(peer.id, session_id=hello.session_id, process=hello.process, now=now)
        self._durability.record()
        if opened is None:
            most, place_in = engine.limits.sessions_max, engine.place_in(now)
            if place_in <= HELD_MOST:
                asyncio.get_running_loop().call_later(place_in + SOON, self.take_in, peer, hello, welcome)
            else:
                self._peers.hang_up(peer, Sorry("limit", f"the server has {most} sessions (sessions_max): come again"))
            return
        session, previous = opened
        replaced = None if previous is None else self._by_id.get(previous)
        if replaced is not None:
            # The client came back before its old connection was seen to end; it renews its leases on the new one. At
            # once: what waits there is for nobody, and a network that was cut would take it for half a minute more.
            replaced.abort()
        self._table.proved(peer)
        durable = self._durability.journal is not None
        welcome(
            peer,
            peer.connection.welcome(session=session, address=peer.address, revision=engine.revision, durable=durable),
        )

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        if self._by_id.pop(peer.id, None) is None:
            return
        self._table.went(peer)
        self.bytes_out += peer.bytes_out
        engine = self._durability.engine
        engine.disconnect(peer.id, now=self._clock(), how=peer.closing)
        self._durability.record()
        if not self._by_id:
            self.empty.set()
        if self._is_alone():
            self.way_out.note()
