"""A served store: its parts, its periodic work, and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from store.engine.engine import Engine
from store.errors import NotPicklable, StoreUsageError
from store.net.address import Address, join_host_port, token_bytes
from store.net.callers import register_served_store, unregister_served_store
from store.net.process import process_identity
from store.net.sockets import close_in_children, files_needed, forget_sockets, is_ctrl_c, listen_on, raised_file_limit
from store.net.standard_streams import reserve_streams_if_uvloop
from store.net.tasks import cancel_and_wait, require_loop
from store.net.threads import in_thread
from store.protocol import wire
from store.protocol.wire import Rejection
from store.records import brief
from store.server.accept.connection_table import ConnectionTable
from store.server.accept.exposure import check_exposure
from store.server.accept.listener import EndWhenAlone, TcpListener
from store.server.accept.tls import TlsLayer
from store.server.durability import STOP_WITHIN, Durability
from store.server.handshakes import Handshakes
from store.server.log_lines import LimitWarnings
from store.server.peer import LEAVE_WITHIN, Peer
from store.server.peers import Peers
from store.server.request_scheduler import RequestScheduler

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from store.limits import Limits
    from store.protocol.connection import Secret
    from store.server.journal import Journal

log: logging.Logger = logging.getLogger(__name__)

WARN_EVERY = 5.0  # seconds between checks of the limits
LOOK_EVERY = 0.1  # seconds, at most, between lease checks. Keep well below `leases.STALL_AFTER`.
LOOK_LEAST = 0.001  # seconds; a shorter sleep may be below the clock's resolution
SPEAKS_TLS = Rejection("protocol", "this port speaks TLS, and the client does not: use tcps:// with ca=")


class Server(NotPicklable):
    """A served store; made by `store.serve`.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
        store_id: The store's random identity.
        table: All connections, including those of HTTP listeners.
        end_when_alone: Lets another thread end the server once no client is connected.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token: Secret = None,
        clock: Callable[[], float],
        secure: bool = False,
        journal: Journal | None = None,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = in_thread,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._secure = secure
        self._limits = engine.limits
        self._last_peer = 0
        self._limit_warnings = LimitWarnings()
        self._failure: BaseException | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._timer: asyncio.Task[None] | None = None
        self.table: ConnectionTable = ConnectionTable(engine.limits, clock)
        # Tests pass `in_thread` and `stopwatch`: their virtual time has no threads, and stands still during requests.
        self._durability = Durability(
            engine,
            journal,
            clock=clock,
            in_thread=in_thread,
            on_durable=lambda number: self._scheduler.note_durable(number),  # noqa: PLW0108 - made below
            on_restored=self._include_connection_memory,
            close_all=lambda: self._peers.abort(),  # noqa: PLW0108 - made below
            ended=self._stop_if_task_failed,
        )
        self._peers = Peers(engine.limits, self._durability, self.table)
        self._handshakes = Handshakes(self._peers, token=token, clock=clock)
        self._scheduler = RequestScheduler(
            self._peers, handshakes=self._handshakes, clock=clock, stopwatch=stopwatch, figures=self.figures
        )
        self.host: str = ""
        self.port: int = 0
        self.store_id: str = engine.store_id
        self.end_when_alone: EndWhenAlone = self._handshakes.end_when_alone
        self._include_connection_memory(engine)

    @property
    def _engine(self) -> Engine:
        """The store's engine; after a failed write, one read back from the disk replaces it."""
        return self._durability.engine

    @property
    def url(self) -> str:
        """The address for clients."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
        host = everywhere.get(self.host, self.host)
        return str(Address(host=host, port=self.port, secure=self._secure))

    @property
    def connections(self) -> int:
        """The number of peers, unauthenticated ones included."""
        return len(self._peers.by_id)

    def protocol(self, *, is_internal: bool = False) -> Peer:
        """Return the protocol of a new connection, which does not keep the server running if `is_internal`."""
        self._last_peer += 1
        outboxes, inboxes = self._peers.outboxes, self._peers.inboxes
        return Peer(self._scheduler, self._last_peer, outboxes=outboxes, inboxes=inboxes, is_internal=is_internal)

    def figures(self) -> dict[str, Any]:
        """Return the counters of `stats()`."""
        journal = self._durability.journal
        return {
            **self._engine.figures(),
            **dataclasses.asdict(self._limits),
            "connections_max": self.table.connections_max,
            "uptime": self._clock() - self._began,
            "connections": len(self._peers.by_id),
            "strangers": self.table.unauthenticated_count,
            "connections_refused": self.table.refused,
            "bytes_in": self._scheduler.bytes_in,
            "bytes_out": self._handshakes.bytes_out + sum(peer.bytes_out for peer in self._peers.by_id.values()),
            "outbox_bytes": self._peers.outboxes.bytes,
            "inbox_bytes": self._peers.inboxes.bytes,
            "journal_bytes": self._durability.pending_commits.bytes,
            "connection_bytes": self.table.bytes,
            "memory_bytes": self._engine.state.memory_bytes + self._peers.held_bytes,
            "log_bytes": 0 if journal is None else journal.log_bytes,
            "commits": 0 if journal is None else journal.commits,
            "commit_seconds": 0.0 if journal is None else journal.commit_seconds,
        }

    def _include_connection_memory(self, engine: Engine) -> None:
        engine.state.held_elsewhere = lambda: self._peers.unfreeable_bytes

    def add_request_callback(self, callback: Callable[[str, str, float], None]) -> None:
        """Call `callback` after each request with its kind, "ok" or the kind of error, and the seconds it took."""
        self._scheduler.on_request = callback

    def start(self) -> None:
        """Start the journal and the timer that lets leases lapse; `shut_down` stops both."""
        self.end_when_alone.note_loop(asyncio.get_running_loop())
        self._durability.start()
        self._timer = asyncio.create_task(self._run_periodic_checks(), name=f"timer of store {self.store_id}")
        self._timer.add_done_callback(self._stop_if_task_failed)

    async def _run_periodic_checks(self) -> None:
        warn_at = drop_at = self._clock()
        while True:
            due_in = self._engine.state.leases.seconds_to_next_expiry() if self._may_expire_leases() else None
            await anyio.sleep(LOOK_EVERY if due_in is None else min(max(due_in, LOOK_LEAST), LOOK_EVERY))
            now = self._clock()
            if self._engine.advance_lease_clock(now=now):
                await self._expire_leases()
            self._peers.close_slowest_readers()  # new keys may have used the memory left for outboxes
            self._peers.close_oldest_listing_reader()
            if now >= drop_at:
                drop_at = now + self._limits.frame_timeout / 2
                self._close_stalled_senders(now)
            if now >= warn_at + WARN_EVERY:
                warn_at = now
                for line in self._limit_warnings.lines_to_log(self.figures(), self._engine.state.keys.groups):
                    log.warning("store %s: %s", self.store_id, line)

    async def _expire_leases(self) -> None:
        """Let due leases lapse, except those that pending requests may renew."""
        unheard = self._scheduler.seconds_waiting_by_peer(self._clock())
        # Two passes of the event loop read every socket, so that a keep-alive that has arrived counts.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        # First serve peers that wait for a turn: after a reconnect, they may renew their old connection's leases.
        await self._scheduler.wait_for_first_turns()
        if not self._may_expire_leases():
            return
        now = self._clock()
        deliveries = self._engine.tick(now=now, unheard=unheard | self._scheduler.seconds_waiting_by_peer(now))
        self._durability.record_changes()
        self._scheduler.deliverer.deliver(deliveries)
        self._scheduler.deliverer.flush()

    def _may_expire_leases(self) -> bool:
        """Return False during a shutdown, and while the disk has failed or is so slow that requests wait."""
        return self._engine.read_only is None and not self._handshakes.leaving and not self._durability.is_overloaded

    def _close_stalled_senders(self, now: float) -> None:
        silent_since = now - self._limits.frame_timeout
        why = f"half a frame and {self._limits.frame_timeout:g} s of silence (frame_timeout)"
        for peer in list(self._peers.by_id.values()):
            if peer.connection.held_bytes and peer.received_at < silent_since and not peer.reading_paused:
                self._peers.disconnect_peer(peer, Rejection("limit", why))

    async def shut_down(self) -> None:
        """Stop the journal; then send goodbyes, and close every connection within `LEAVE_WITHIN` seconds."""
        self._handshakes.leaving = True
        try:
            with anyio.CancelScope(shield=True):
                await self._durability.stop()
            for peer in list(self._peers.by_id.values()):
                if peer.connection.is_welcomed:
                    self._scheduler.deliverer.send(peer, wire.encode_bye("the server is leaving"))
                    peer.close()
                else:  # before its welcome, a client cannot decode a goodbye; a refusal makes it retry
                    peer.refuse(Rejection("limit", "the server is leaving"))
            with anyio.move_on_after(LEAVE_WITHIN, shield=True):
                await self._handshakes.empty.wait()
        finally:  # also after a cancellation by asyncio, which ignores anyio's shield
            self._peers.abort()
            if self._timer is not None:
                await cancel_and_wait(self._timer)

    def _stop_if_task_failed(self, timer: asyncio.Task[None]) -> None:
        """Stop serving if a background task failed, because of a defect or unreadable data."""
        if not timer.cancelled() and (error := timer.exception()) is not None:
            log.critical("store %s stops serving: %s", self.store_id, error, exc_info=error)
            self._failure = error
            self._handshakes.leaving = self._durability.leaving = True
            self._peers.abort()
            for callback in self._on_failure:
                callback()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the server fails; `serve` then raises the error at its end."""
        self._on_failure.append(callback)


def _check_host_port(host: object, port: object) -> None:
    if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise StoreUsageError(f"host={brief(host)}, port={brief(port)}: give a name, and a port from 0 to 65535")


def _make_token_reader(token: Callable[[], bytes | None], last: bytes | None) -> Callable[[], bytes | None]:
    """Return a function that returns the user's token; if the user's function fails, the last token."""

    def current_token() -> bytes | None:
        nonlocal last
        try:
            last = token_bytes(token()) or last
        except BaseException as error:  # the user's function may raise anything
            if is_ctrl_c(error):
                raise
            log.warning("the function for the token failed, so the last one counts: %s", type(error).__name__)
        return last

    return current_token


def _open_journal(data_dir: str | os.PathLike[str]) -> Journal:
    """Open the journal of a directory. sqlite3 is imported only here, as a store in memory does not need it."""
    if str(data_dir) == "":  # perhaps from an unset variable of a shell
        raise StoreUsageError("data_dir is empty; name a directory, or leave it out for a store in memory")
    try:
        from store.server import journal
    except ImportError as error:
        raise StoreUsageError(
            f"data_dir= needs Python's module {error.name}, which this Python does not have ({sys.platform}): use one "
            f"that has sqlite3 and fcntl, on Linux or macOS, or serve the store in memory or from another machine"
        ) from error
    return journal.Journal(data_dir, new_id=secrets.token_hex(8))


@contextlib.asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | Secret = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    sock: socket.socket | Sequence[socket.socket] | None = None,
) -> AsyncIterator[Server]:
    """Serve a store while the context lasts.

    Args:
        host: The address; "" is all interfaces. Beyond loopback a token or mutual TLS is required.
        port: The port; 0 lets the system choose one, see `Server.port`.
        data_dir: The directory of a store that survives restarts and power loss.
        token: The secret of the clients, or a function that returns it for each connection; if the function fails, or
            returns None, the last token counts.
        tls: A server-side context; with `CERT_REQUIRED` clients need a certificate.
        insecure: Listen beyond loopback without token or mutual TLS.
        limits: Limits on requests.
        sock: Instead of `host` and `port`: a bound socket, or several with one port.

    Raises:
        StoreUsageError: The store would be open to strangers, or `data_dir` cannot be used.
        OSError: The address cannot be bound.
    """
    _check_host_port(host, port)
    socks = [sock] if isinstance(sock, socket.socket) else list(sock or ())
    addresses: list[str] = [one.getsockname()[0] for one in socks] or [host]
    bound_host = addresses[0] if len(addresses) == 1 else host

    secret = token_bytes(token() if callable(token) else token)
    if secret == b"" or (secret is None and callable(token)):
        raise StoreUsageError("the token is empty; leave it out, or give one")
    wanted = _make_token_reader(token, secret) if callable(token) else secret
    for address in addresses:
        check_exposure(address, token=secret, tls=tls, insecure=insecure)
    loop = require_loop()
    reserve_streams_if_uvloop(loop)
    async with contextlib.AsyncExitStack() as stack:
        files = stack.enter_context(raised_file_limit())
        journal = None
        if data_dir is None:
            # Random, so that conditions on an earlier store's revisions fail (R9); small, to take few bytes.
            first = secrets.randbits(31)
            engine = Engine(store_id=secrets.token_hex(8), limits=limits, first_revision=first)
        else:
            journal = _open_journal(data_dir)
            stack.callback(journal.close, within=STOP_WITHIN / 3)
            engine = Engine.restore(journal.load(), limits=limits, now=loop.time())
        server = Server(engine, token=wanted, clock=loop.time, secure=tls is not None, journal=journal)
        allowed = files - files_needed(0)
        server.table.set_max_connections(allowed)
        # Do not let uvloop resolve the host: it would start libuv's threads, which crash a forked child at its end.
        listening = socks or await anyio.to_thread.run_sync(listen_on, host, port)
        async with _accept_clients(server, listening, bound_host, tls):
            log.info(
                "serving store %s on %s, %s; %d files allow about %d connections",
                server.store_id,
                join_host_port(bound_host or "*", server.port),
                "in memory only: it ends with this process" if data_dir is None else f"kept in {data_dir}",
                files,
                allowed,
            )
            yield server
        if server._failure is not None:
            raise server._failure


@contextlib.asynccontextmanager
async def _accept_clients(
    server: Server, listening: Sequence[socket.socket], host: str, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    loop, made_in = asyncio.get_running_loop(), process_identity()
    farewell = wire.encode_rejection(SPEAKS_TLS)

    def protocol() -> asyncio.BaseProtocol:
        inner = server.protocol()
        return inner if tls is None else TlsLayer(inner, tls, server.table, farewell=farewell)

    listener = TcpListener(server.table, listening, protocol)
    listener.open()
    close_in_children(server, *listening)
    server.host = host
    server.port = listening[0].getsockname()[1]
    register_served_store(host, server.port, server.store_id)
    server.start()
    try:
        yield
    finally:
        if made_in is process_identity():  # a forked child leaves the server to its parent
            listener.close()
            unregister_served_store(server.port)
            forget_sockets(server)
            if asyncio.get_running_loop() is not loop:  # connections and timers are of a loop that no longer runs
                raise StoreUsageError("close the server in the event loop that opened it: its clients were not told")
            try:
                await listener.wait_closed()
            finally:
                for newcomer in server.table.all:
                    if isinstance(newcomer, TlsLayer):
                        newcomer.abort()
                await server.shut_down()
        elif server._timer is not None:
            server._timer.cancel()
