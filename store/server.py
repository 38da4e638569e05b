"""Shell: the listener, one protocol object per peer, bounded outboxes, and the lease timer.

The hot path is plain asyncio: bytes arrive in one buffer that all peers share, `connection` cuts them into requests,
`engine` applies them, and what is to be said is queued with each peer and written once per batch. From the first byte
of a request to the queueing of everything it causes there is no `await`: nothing slips between a change and its
announcement.

A peer that reads too slowly fills only its own outbox. Past `outbox_bytes_max` its watches end, each with the last
revision sent, and its client resumes from the next; while its replies pile up, its requests are not read.

Leases lapse after the sockets have been read once more, so that a keep-alive that has arrived always counts (S5).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any, cast

import anyio

from store import wire
from store.address import Address, host_and_port
from store.connection import ServerConnection
from store.engine import Answer, Delivery, Engine
from store.errors import AuthenticationError, ProtocolError, StoreUsageError
from store.limits import Limits
from store.messages import Stats
from store.sockets import let_go_in_children, prepare, raise_file_limit
from store.wire import Bye, Hello, Sorry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from store.messages import Event, Request

__all__ = ["Server", "serve"]

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024  # one buffer for all peers; larger frames are put together from pieces
LOOK_EVERY = 0.1  # seconds; how late a lease may lapse, and a third of what counts as a stall
LEAVE_WITHIN = 5.0  # seconds for the last frames to reach their readers; S9 promises 10 in all
BACKLOG = 4096  # connections waiting to be accepted: a whole job reconnecting at once


class Server:
    """A store that is being served.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
        store_id: The store's random identity.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token: bytes | None = None,
        clock: Callable[[], float],
        secure: bool = False,
    ) -> None:
        self._engine = engine
        self._token = token
        self._clock = clock
        self._secure = secure
        self._limits = engine.limits
        self._peers: dict[int, _Peer] = {}
        self._dirty: dict[_Peer, None] = {}  # peers with something queued in this batch
        self._last_peer = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._refused = 0
        self._leaving = False
        self._nobody_left = asyncio.Event()
        self._alone = threading.Event()
        self._alone.set()
        self._connections_max = self._limits.connections_max
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.host = ""
        self.port = 0
        self.store_id = engine.store_id

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return str(Address(host=host, port=self.port, secure=self._secure))

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._peers)

    def protocol(self) -> asyncio.BufferedProtocol:
        """A protocol object for a connection that has been accepted."""
        self._last_peer += 1
        return _Peer(self, self._last_peer)

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        return {
            **self._engine.figures(),
            "connections": len(self._peers),
            "connections_refused": self._refused,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "outbox_bytes": sum(peer.backlog for peer in self._peers.values()),
        }

    # -------------------------------------------------------------------------------------- called by peers

    def accepted(self, peer: _Peer) -> None:
        """A connection was made."""
        if self._leaving or len(self._peers) >= self._connections_max:
            self._refused += 1
            peer.refuse(
                Sorry(
                    "limit",
                    "the server is leaving"
                    if self._leaving
                    else f"it has {len(self._peers)} connections, the most it takes (connections_max, or the file limit)",
                )
            )
            return
        self._peers[peer.id] = peer
        self._nobody_left.clear()
        self._alone.clear()
        peer.open(
            ServerConnection(
                store_id=self.store_id, nonce=secrets.token_bytes(16), token=self._token, limits=self._limits
            ),
            asyncio.get_running_loop().call_later(self._limits.handshake_timeout, self._check_greeted, peer),
        )
        self._flush()

    def received(self, peer: _Peer, data: memoryview) -> None:
        """Bytes have come. No await here: a change and its announcements are one step."""
        self._bytes_in += len(data)
        now = self._clock()
        assert peer.connection is not None, "only peers that were taken in are read"
        try:
            for item in peer.connection.receive(data):
                match item:
                    case (request_id, acknowledged, request):
                        self._apply(peer, request_id, acknowledged, request, now)
                    case Hello():
                        self._take_in(peer, item, now)
                    case Bye():
                        peer.says_goodbye = True
                        peer.close()
                        break
                if peer.gone:
                    break
        except AuthenticationError as error:
            self._hang_up(peer, Sorry("authentication", str(error)))
        except ProtocolError as error:
            self._hang_up(peer, Sorry("protocol", str(error)))
        self._flush()

    def lost(self, peer: _Peer) -> None:
        """A connection has ended."""
        if self._peers.pop(peer.id, None) is None:
            return
        self._dirty.pop(peer, None)
        self._engine.disconnect(peer.id, now=self._clock(), for_good=peer.says_goodbye)
        if not self._peers:
            self._nobody_left.set()
            self._alone.set()

    def wrote(self, count: int) -> None:
        """So many bytes were handed to the system."""
        self._bytes_out += count

    # ------------------------------------------------------------------------------------------ one request

    def _apply(self, peer: _Peer, request_id: int, acknowledged: int, request: Request[Any], now: float) -> None:
        applied = self._engine.apply(request, peer=peer.id, request_id=request_id, acknowledged=acknowledged, now=now)
        response = applied.response
        if response is not None:
            if type(request) is Stats:
                response = type(response)(figures=self.figures())  # type: ignore[call-arg]
            self._say(peer, wire.encode_response(request_id, response))
        self._deliver(applied.deliveries)

    def _deliver(self, deliveries: tuple[Delivery | Answer, ...]) -> None:
        """Queue what a change means to others. A watched event is encoded once, however many watch."""
        for delivery in deliveries:
            match delivery:
                case Answer(peer=peer_id, request_id=request_id, response=response):
                    self._say(self._peers[peer_id], wire.encode_response(request_id, response))
                case Delivery(watchers=watchers, events=events):
                    encoded = wire.encode_events(events)
                    for peer_id, watch_id in watchers:
                        self._tell(self._peers[peer_id], watch_id, encoded, events)

    def _tell(self, peer: _Peer, watch_id: int, encoded: bytes, events: tuple[Event, ...]) -> None:
        """Queue events for one watch, or end it if its reader is too far behind."""
        if peer.backlog + len(encoded) <= self._limits.outbox_bytes_max:
            self._say(peer, wire.frame_events(watch_id, encoded))
        elif self._engine.end_watch(peer.id, watch_id):
            log.warning("%s reads too slowly: its watch has ended, and may resume later", peer.name)
            self._say(peer, wire.encode_lagged(watch_id, events[0].revision - 1))

    def _say(self, peer: _Peer, frame: bytes) -> None:
        peer.queue(frame)
        self._dirty[peer] = None

    def _flush(self) -> None:
        """Write what this batch has queued, one write per peer."""
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for peer in dirty:
                peer.flush()

    # ------------------------------------------------------------------------------------------ comings and goings

    def _take_in(self, peer: _Peer, hello: Hello, now: float) -> None:
        opened = self._engine.connect(peer.id, session_id=hello.session_id, now=now)
        if opened is None:
            self._hang_up(peer, Sorry("limit", f"the server has {self._limits.sessions_max} sessions (sessions_max)"))
            return
        resumed, previous = opened
        if previous is not None and previous in self._peers:
            # The client came back before its old connection was seen to end; it renews its leases on the new one.
            self._peers[previous].close()
        peer.greeted()
        assert peer.connection is not None
        self._say(
            peer,
            peer.connection.welcome(resumed=resumed, address=peer.address, revision=self._engine.revision),
        )

    def _hang_up(self, peer: _Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and nobody else anything (S7)."""
        log.warning("%s is disconnected: %s", peer.name, sorry.message)
        self._refused += 1
        peer.refuse(sorry)

    def _check_greeted(self, peer: _Peer) -> None:
        if peer.connection is not None and not peer.connection.greeted and not peer.gone:
            self._hang_up(peer, Sorry("protocol", f"no hello within {self._limits.handshake_timeout:g} s"))

    # ------------------------------------------------------------------------------------------ time

    async def keep_time(self) -> None:
        """Let leases lapse when they are due, for as long as the server runs."""
        while True:
            due_in = self._engine.next_tick_in()
            await anyio.sleep(LOOK_EVERY if due_in is None else min(due_in, LOOK_EVERY))
            if self._engine.look(now=self._clock()):
                # Two turns of the loop, the second of which comes after every socket has been read once more.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                self._deliver(self._engine.tick(now=self._clock()))
                self._flush()

    async def drop_the_silent(self) -> None:
        """Disconnect peers that stopped in the middle of a frame, for as long as the server runs."""
        while True:
            await anyio.sleep(self._limits.frame_timeout / 2)
            silent_since = self._clock() - self._limits.frame_timeout
            for peer in list(self._peers.values()):
                stuck = peer.connection is not None and peer.connection.half_a_frame
                if stuck and peer.received_at < silent_since and not peer.reading_paused:
                    self._hang_up(
                        peer, Sorry("protocol", f"half a frame and {self._limits.frame_timeout:g} s of silence")
                    )

    # ------------------------------------------------------------------------------------------ leaving

    async def leave(self) -> None:
        """Tell everyone, let the last frames through, and close every connection, within `LEAVE_WITHIN` seconds."""
        self._leaving = True
        for peer in list(self._peers.values()):
            self._say(peer, wire.encode_bye("the server is leaving"))
        self._flush()
        for peer in list(self._peers.values()):
            peer.close()
        if self._peers:
            with anyio.move_on_after(LEAVE_WITHIN, shield=True):
                await self._nobody_left.wait()
        self.abort()

    def wait_until_alone(self, within: float) -> bool:
        """From another thread: wait until no client is connected; False if some still are after `within` seconds."""
        return self._alone.wait(within)

    def stop_waiting(self) -> None:
        """From any thread: whoever waits to be alone need wait no longer."""
        self._alone.set()

    def abort(self) -> None:
        """Cut every connection that is left, at once."""
        for peer in list(self._peers.values()):
            peer.abort()

    def limit_connections(self, most: int) -> None:
        """Take no more connections than the system allows."""
        self._connections_max = min(self._limits.connections_max, most)


class _Peer(asyncio.BufferedProtocol):
    """One connection as asyncio sees it: it carries bytes and counts them, and decides nothing."""

    def __init__(self, server: Server, id: int) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._blocked = False  # the transport asked us to stop writing
        self._handshake: asyncio.TimerHandle | None = None
        self.id = id
        self.connection: ServerConnection | None = None
        self.gone = False
        self.says_goodbye = False
        self.reading_paused = False
        self.received_at = 0.0
        self.address = ""
        self.name = f"peer {id}"

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        if peername:
            self.address = str(peername[0])
            self.name = f"{host_and_port(peername[0], peername[1])} (peer {self.id})"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)
            let_go_in_children(self, sock)
        self._server.accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer is as large as it is
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self.gone:
            self.received_at = self._server._clock()
            self._server.received(self, self._server.buffer[:nbytes])

    def eof_received(self) -> bool:
        return False  # close: a client that has stopped sending has nothing to wait for

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self.flush()
        if self.reading_paused and not self._blocked:
            self.reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - how it ended makes no difference
        self.gone = True
        if self._handshake is not None:
            self._handshake.cancel()
        self._server.lost(self)

    # the server calls these

    @property
    def backlog(self) -> int:
        """Bytes that wait for this peer to read."""
        held = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._out_bytes + held

    def open(self, connection: ServerConnection, handshake: asyncio.TimerHandle) -> None:
        """Begin the conversation."""
        self.connection, self._handshake = connection, handshake
        self.queue(connection.greeting())
        self.flush()

    def greeted(self) -> None:
        """The client has said hello in time."""
        if self._handshake is not None:
            self._handshake.cancel()

    def queue(self, frame: bytes) -> None:
        """Put a frame into the outbox."""
        self._out.append(frame)
        self._out_bytes += len(frame)

    def flush(self) -> None:
        """Hand the outbox to the transport, unless that is full; then stop reading what would fill it further."""
        if not self._out or self._transport is None or self._transport.is_closing():
            return
        if self._blocked:
            if not self.reading_paused:
                self.reading_paused = True
                self._transport.pause_reading()
            return
        out, self._out, size, self._out_bytes = self._out, [], self._out_bytes, 0
        self._server.wrote(size)
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def refuse(self, sorry: Sorry) -> None:
        """Say why, and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._out, self._out_bytes = [], 0
            self._transport.write(wire.encode_sorry(sorry))
        self.close()

    def close(self) -> None:
        """Close once what was written has been read."""
        self.gone = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.gone = True
        if self._transport is not None:
            self._transport.abort()


# ---------------------------------------------------------------------------------------------------- starting one


def _check_exposure(host: str, *, token: bytes | None, tls: ssl.SSLContext | None, insecure: bool) -> None:
    """Refuse to listen to strangers (promise S8)."""
    if insecure or token is not None or (tls is not None and tls.verify_mode is ssl.CERT_REQUIRED):
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise StoreUsageError(
            f"a store on {host or 'all interfaces'} would let anybody in: give it a token (token= or --token-file) or mutual "
            f"TLS (tls= with CERT_REQUIRED, or --cert, --key and --ca); or say insecure to have it open all the same"
        )


def _token_bytes(token: str | bytes | None) -> bytes | None:
    """A token as bytes; an empty one is a mistake, not a token."""
    if token is None:
        return None
    if not token:
        raise StoreUsageError("the token is empty; leave it out, or give one")
    return token.encode() if isinstance(token, str) else token


@contextlib.asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    sock: socket.socket | None = None,
) -> AsyncIterator[Server]:
    """Serve a new store for as long as the context lasts.

    Args:
        host: The address to listen on; "" is all interfaces. Anything but loopback wants a token or mutual TLS.
        port: The port; 0 lets the system choose one, see `Server.port`.
        token: What clients must prove to know.
        tls: A server-side context; with `CERT_REQUIRED` clients need a certificate.
        insecure: Listen beyond loopback without token or mutual TLS.
        limits: What clients may ask.
        sock: A bound socket to listen on, instead of `host` and `port`.

    Raises:
        StoreUsageError: It would be open to strangers.
        OSError: The address cannot be bound.
    """
    bound_host = sock.getsockname()[0] if sock is not None else host
    secret = _token_bytes(token)
    _check_exposure(bound_host, token=secret, tls=tls, insecure=insecure)
    files = raise_file_limit()
    loop = asyncio.get_running_loop()
    engine = Engine(store_id=secrets.token_hex(8), limits=limits)
    server = Server(engine, token=secret, clock=loop.time, secure=tls is not None)
    server.limit_connections(files - 64)  # the rest of the process needs some, too
    listener = await (
        loop.create_server(server.protocol, sock=sock, ssl=tls, backlog=BACKLOG)
        if sock is not None
        else loop.create_server(server.protocol, host or None, port, ssl=tls, backlog=BACKLOG)
    )
    let_go_in_children(server, listener.sockets[0])
    server.host = bound_host
    server.port = listener.sockets[0].getsockname()[1]
    log.info(
        "serving store %s on %s, in memory only: it ends with this process; %d files allow about %d connections",
        server.store_id,
        host_and_port(bound_host or "*", server.port),
        files,
        files - 64,
    )
    tasks = [asyncio.create_task(server.keep_time()), asyncio.create_task(server.drop_the_silent())]
    try:
        yield server
    finally:
        listener.close()  # not wait_closed(): on Python 3.12 and later that waits for the clients to leave first
        try:
            await server.leave()
        finally:
            server.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
