"""Shell: a store that is being served: who connects and who leaves, the lease timer, and the way down.

What peers ask is carried out in `conversations`, and what they are told is in `telling`; what waits for the disk is in
`durability`; what all of them may hold in `memory`. Leases lapse after the sockets have been read once more, and what
was read has had its turn: a keep-alive that has arrived always counts (S5).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from store.engine.engine import Engine
from store.errors import StoreUsageError
from store.net.address import Address, host_and_port
from store.net.callers import serves, serves_no_more
from store.net.sockets import bound_sockets, forget, let_go_in_children, open_files, raised_file_limit
from store.net.threads import in_thread
from store.protocol import wire
from store.protocol.connection import ServerConnection
from store.protocol.wire import Hello, Sorry
from store.server.conversations import Conversations
from store.server.durability import STOP_WITHIN, Durability
from store.server.entry.door import Door, WayOut
from store.server.entry.exposure import check_exposure, token_bytes
from store.server.entry.table import Table
from store.server.entry.tls import TLS_BYTES, TlsLayer
from store.server.log_lines import SILENT_AFTER, Complaints, LimitWarnings, SessionLog
from store.server.memory import Memory
from store.server.outbox import PIECE_BYTES
from store.server.peer import LEAVE_WITHIN, PEER_BYTES, Peer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from store.engine.leases import LeaseRecord
    from store.limits import Limits
    from store.server.journal import Journal

__all__ = ["LEAVE_WITHIN", "PIECE_BYTES", "Server", "serve"]

log: logging.Logger = logging.getLogger(__name__)

SILENCE_EVERY = 1.0  # seconds; how late it may be noticed that a lease is not renewed
WARN_EVERY = 5.0  # seconds; how late it may be noticed that a limit is near
LOOK_EVERY = 0.1  # seconds; how late a lease may lapse, and a third of what counts as a stall
LOOK_LEAST = 0.001  # seconds; a lease due in less than a clock can tell apart would be looked at for ever
SPARE_FILES = 64  # for the rest of the process
STRANGERS_LEAST = 16  # so many may connect at once also where there is room for few
SPEAKS_TLS = Sorry("protocol", "this port speaks TLS, and the client does not: use tcps:// and the server's authority")


class Server:
    """A store that is being served.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
        durability: Its journal, if it has one, and what waits for that.
        table: All connections, those included that are no conversations yet, and those over HTTP.
        way_out: How it ends once nobody needs it any more.
        store_id: The store's random identity.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token: bytes | None = None,
        clock: Callable[[], float],
        secure: bool = False,
        journal: Journal | None = None,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = in_thread,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._token = token
        self._clock = clock
        self._began = clock()
        self._secure = secure
        self._limits = engine.limits
        self._peers: dict[int, Peer] = {}
        self._last_peer = 0
        self._bytes_out = 0
        self._refused = 0
        self._refuses = False  # connections, since the last one that was taken in
        self._complaints = Complaints()
        self._limit_warnings = LimitWarnings()
        self._session_log = SessionLog() if log.isEnabledFor(logging.INFO) else None
        # On virtual time there are no threads, and its clock stands still while requests are carried out.
        self.durability: Durability = Durability(
            engine, journal, limits=self._limits, clock=clock, in_thread=in_thread, host=self
        )
        self._memory = Memory(self._limits, self._peers, self)
        self.conversations: Conversations = Conversations(
            engine,
            self._peers,
            limits=self._limits,
            durability=self.durability,
            memory=self._memory,
            complaints=self._complaints,
            clock=clock,
            stopwatch=stopwatch,
            host=self,
        )
        self._hear_of_lapses(engine)
        self._leaving = False
        self._failure: BaseException | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._nobody_left = asyncio.Event()
        self.way_out: WayOut = WayOut(self._is_alone)
        self.table: Table = Table(
            most=0,
            per_address_max=self._limits.address_connections_max,
            within=self._limits.handshake_timeout,
            clock=clock,
            turned_away=self.turned_away,
        )
        self.limit_connections(self._limits.connections_max)
        self.host: str = ""
        self.port: int = 0
        self.store_id: str = engine.store_id

    @property
    def engine(self) -> Engine:
        """The store; another one, once it has been read from its disk again."""
        return self.conversations.engine

    def start_journal(self) -> None:
        """Have the journal write from now on."""
        self.durability.start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
        host = everywhere.get(self.host, self.host)
        return str(Address(host=host, port=self.port, secure=self._secure))

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._peers)

    def turned_away(self) -> bool:
        """Somebody is refused or hung up on; whether the log has a line for it."""
        self._refused += 1
        if not self._complaints.say(self._clock()):
            return False
        self._say_how_many_more()
        return True

    def _say_how_many_more(self) -> None:
        unsaid = self._complaints.take_unsaid()
        if unsaid:
            log.warning("%d more were refused or hung up on than the log has taken lines for", unsaid)

    def protocol(self) -> asyncio.BufferedProtocol:
        """A protocol object for a connection that has been accepted."""
        self._last_peer += 1
        return Peer(self.conversations, self._last_peer, outboxes=self._memory.outboxes, inboxes=self._memory.inboxes)

    def protocol_over(self, tls: ssl.SSLContext) -> TlsLayer:
        """The same, for a connection that speaks TLS."""
        within, farewell = self._limits.handshake_timeout, wire.encode_sorry(SPEAKS_TLS)
        return TlsLayer(self.protocol(), tls, self.table, within=within, farewell=farewell)

    def protocol_beside(self) -> asyncio.BufferedProtocol:
        """The same for a connection of this very process, which keeps no server from ending."""
        peer = self.protocol()
        assert isinstance(peer, Peer)
        peer.is_of_ours = True
        return peer

    def _is_alone(self) -> bool:
        """Whether no client is connected but of this process; the first of the others answers it."""
        return all(peer.is_of_ours for peer in self._peers.values())

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        return {
            **self.engine.figures(),
            **dataclasses.asdict(self._limits),
            "connections_max": self.table.connections_max,
            "uptime": self._clock() - self._began,
            "connections": len(self._peers),
            "strangers": len(self.table),
            "connections_refused": self._refused,
            "bytes_in": self.conversations.bytes_in,
            "bytes_out": self._bytes_out + sum(peer.bytes_out for peer in self._peers.values()),
            "outbox_bytes": self._memory.outboxes.bytes,
            "inbox_bytes": self._memory.inboxes.bytes,
            "journal_bytes": self.unwritten_bytes,
            "connection_bytes": self.table.bytes,
            "memory_bytes": self.engine.memory_bytes + self._memory.held_bytes,
            "commits": self.durability.commits,
            "commit_seconds": self.durability.commit_seconds,
        }

    # ------------------------------------------------------------------------------------------ called by its parts

    @property
    def connection_bytes(self) -> int:
        """What the connections take that are open, whatever they do."""
        return self.table.bytes

    @property
    def unwritten_bytes(self) -> int:
        """What is held for the disk."""
        return self.durability.unwritten.bytes

    def became_durable(self, number: int) -> None:
        """Everything up to this number is on disk: what waited for it may be said."""
        self.conversations.became_durable(number)

    def restored(self, engine: Engine) -> None:
        """Serve this store from now on: it is what is on disk."""
        self.conversations.restored(engine)
        self._hear_of_lapses(engine)

    def guessed_wrong(self, peer: Peer, sorry: Sorry) -> None:
        """A peer has not proven what is wanted: it is told so, late if others of its address have guessed, too."""
        wait = self.table.guessed_wrong(peer.address, self._clock())
        if not wait:
            self.hang_up(peer, sorry)
            return
        peer.pause_reading()
        self.table.expect(peer, wait, partial(self.hang_up, peer, sorry))

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        now = self._clock()
        refusal = self._refusal() or self.table.refusal(peer.address)
        if refusal is not None:
            self._refused += 1
            if not self._refuses and not self._leaving and self._complaints.say(self._clock()):
                log.warning("store %s refuses connections, from %s on: %s", self.store_id, peer.name, refusal)
            self._refuses = True
            peer.refuse(Sorry("limit", refusal))
            return
        self._refuses = False
        self.table.came(peer, peer.address, now, cost=PEER_BYTES + (TLS_BYTES if peer.secure else 0))
        self._peers[peer.id] = peer
        self._nobody_left.clear()
        self.table.expect(peer, self._limits.handshake_timeout, partial(self._hang_up_on_mute, peer), patiently=True)
        nonce = os.urandom(16)  # as `secrets.token_bytes`, which takes twice as long to ask for them
        peer.open(ServerConnection(store_id=self.store_id, nonce=nonce, token=self._token, limits=self._limits))

    def _refusal(self) -> str | None:
        """Why nobody is taken in now, if so; it may be otherwise soon."""
        if self._leaving or self.way_out.taken:
            return "the server is leaving"
        refusal = self.durability.refusal()
        if refusal is not None:
            return refusal
        if not self.table.has_room:
            return (
                f"it has {self.table.connections} connections, the most it takes (connections_max, or the file limit)"
            )
        return None

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        if self._peers.pop(peer.id, None) is None:
            return
        self.table.went(peer)
        self._bytes_out += peer.bytes_out
        session = self.engine.session_of(peer.id)
        if self._session_log is not None and session is not None and not self._leaving:
            kept, now = self.engine.kept_by(peer.id), self._clock()
            _log_line(self._session_log.closed(session, peer.name, peer.closing, kept, now=now))
        self.engine.disconnect(peer.id, now=self._clock(), how=peer.closing)
        self.durability.record()
        if not self._peers:
            self._nobody_left.set()
        if self._is_alone():
            self.way_out.note()

    # ------------------------------------------------------------------------------------------ comings and goings

    def take_in(self, peer: Peer, hello: Hello, now: float) -> None:
        """A peer has said hello, and proven what is wanted."""
        opened = self.engine.connect(peer.id, session_id=hello.session_id, process=hello.process, now=now)
        self.durability.record()
        if opened is None:
            self.hang_up(
                peer, Sorry("limit", f"the server has {self._limits.sessions_max} sessions (sessions_max): come again")
            )
            return
        session, previous = opened
        if self._session_log is not None:
            old = self._peers.get(previous) if previous is not None else None
            replaces = None if old is None else old.name
            _log_line(self._session_log.opened(session, peer.name, replaces=replaces, now=now))
        if previous is not None and previous in self._peers:
            # The client came back before its old connection was seen to end; it renews its leases on the new one. At
            # once: what waits there is for nobody, and a network that was cut would take it for half a minute more.
            self._peers[previous].abort()
        self.table.proved(peer, now)
        assert peer.connection is not None
        self.conversations.telling.say(
            peer,
            peer.connection.welcome(session=session, address=peer.address, revision=self.engine.revision),
        )

    def hang_up(self, peer: Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and nobody else anything (S7)."""
        if self.turned_away():
            log.warning("%s is disconnected: %s", peer.name, sorry.message)
        peer.refuse(sorry)

    def _hang_up_on_mute(self, peer: Peer) -> None:
        """End a connection that has said no hello; an honest client on a busy machine is slow, too, and tries again."""
        if not peer.gone:
            within = self._limits.handshake_timeout
            self.hang_up(peer, Sorry("limit", f"no hello within {within:g} s (handshake_timeout)"))

    # ------------------------------------------------------------------------------------------ time

    async def keep_time(self) -> None:
        """Let leases lapse when they are due, for as long as the server runs."""
        while True:
            due_in = self.engine.next_tick_in() if self._may_lapse() else None
            await anyio.sleep(LOOK_EVERY if due_in is None else min(max(due_in, LOOK_LEAST), LOOK_EVERY))
            self._memory.make_room_in_listings()
            if self.engine.look(now=self._clock()):
                await self._let_lapse()

    async def _let_lapse(self) -> None:
        """Let leases lapse that are due, but for those that may have been renewed by what was not carried out yet."""
        # They are not read now; who is among them only later will have been.
        unheard = self.conversations.unheard(self._clock())
        # Two turns of the loop, the second of which comes after every other socket has been read once more.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        # What was read then may wait for its turn. If it renews the leases of another connection, as that of a client
        # which has just come back does, nobody knows that before.
        await self.conversations.hear_newcomers()
        if not self._may_lapse():
            return
        now = self._clock()
        deliveries = self.engine.tick(now=now, unheard=unheard | self.conversations.unheard(now))
        self.durability.record()
        self.conversations.telling.deliver(deliveries)
        self.conversations.telling.flush()

    def _hear_of_lapses(self, engine: Engine) -> None:
        if self._session_log is not None:
            engine.on_lapse = self._say_lapsed

    def _say_lapsed(self, lease: LeaseRecord) -> None:
        assert self._session_log is not None, "it asked to be told"
        _log_line(self._session_log.lapsed(lease, now=self._clock()))

    async def tell_of_silence(self) -> None:
        """Log which sessions do not renew their leases, for as long as the server runs, if anybody reads that."""
        while self._session_log is not None:
            await anyio.sleep(SILENCE_EVERY)
            now, silent = self._clock(), self.engine.silent_leases(SILENT_AFTER)
            self._session_log.heard({lease.id for _, lease, _ in silent})
            for peer_id, lease, remaining in silent:
                peer, session = self._peers.get(peer_id), self.engine.session_of(peer_id)
                if peer is not None and session is not None:
                    _log_line(self._session_log.silent(session, peer.name, lease, remaining=remaining, now=now))

    def _may_lapse(self) -> bool:
        """Whether a lapse could be written down: on a full disk, and when leaving, leases stay until it can.

        On a disk that is far behind, too: keep-alives may have come on connections that are not read for its sake.
        """
        return self.engine.read_only is None and not self._leaving and not self.durability.behind

    async def warn_of_limits(self) -> None:
        """Log which limits are nearly reached, and by whom, for as long as the server runs."""
        while True:
            await anyio.sleep(WARN_EVERY)
            for line in self._limit_warnings.look(self.figures(), self.engine.groups):
                log.warning("store %s: %s", self.store_id, line)

    async def drop_the_silent(self) -> None:
        """Disconnect peers that stopped in the middle of a frame, for as long as the server runs."""
        while True:
            await anyio.sleep(self._limits.frame_timeout / 2)
            self._say_how_many_more()
            silent_since = self._clock() - self._limits.frame_timeout
            why = f"half a frame and {self._limits.frame_timeout:g} s of silence (frame_timeout)"
            for peer in list(self._peers.values()):
                stuck = peer.connection is not None and peer.connection.held_bytes > 0
                if stuck and peer.received_at < silent_since and not peer.reading_paused and not peer.gone:
                    self.hang_up(peer, Sorry("limit", why))

    # ------------------------------------------------------------------------------------------ leaving

    async def leave(self) -> None:
        """Tell everyone, let the last frames through, and close every connection, within `LEAVE_WITHIN` seconds."""
        self._leaving = True
        with anyio.CancelScope(shield=True):
            await self.durability.stop()
        for peer in list(self._peers.values()):
            if peer.connection is not None and peer.connection.greeted:
                self.conversations.telling.say(peer, wire.encode_bye("the server is leaving"))
                peer.close()
            else:  # a farewell is no welcome; this it understands, and tries again
                peer.refuse(Sorry("limit", "the server is leaving"))
        if self._peers:
            with anyio.move_on_after(LEAVE_WITHIN, shield=True):
                await self._nobody_left.wait()
        self.abort()

    def abort(self) -> None:
        """Cut every connection that is left, at once."""
        for peer in list(self._peers.values()):
            peer.abort()

    def limit_connections(self, most: int) -> None:
        """Take no more connections than the system allows."""
        room = min(self._limits.connections_max, max(most, 1))
        self.table.connections_max = room
        # Half of it is kept for those who prove themselves, unless there is hardly any.
        self.table.most = min(self._limits.handshakes_max, max(room // 2, STRANGERS_LEAST))

    def timer_ended(self, timer: asyncio.Task[None]) -> None:
        """A timer ends only by a defect of ours. A store whose leases never lapse must not pass for one."""
        if not timer.cancelled() and (error := timer.exception()) is not None:
            self.stop_serving(error)

    def stop_serving(self, error: BaseException) -> None:
        """Serve no more, for a reason that is raised where the server is left."""
        log.critical("store %s stops serving: %s", self.store_id, error, exc_info=error)
        self._failure = error
        self._leaving = self.durability.leaving = True
        self.abort()
        for callback in self._on_failure:
            callback()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call back when this server stops serving by itself; leaving its context then raises why."""
        self._on_failure.append(callback)

    def check_timers(self) -> None:
        """Raise what a timer has failed of."""
        if self._failure is not None:
            raise self._failure


def _log_line(line: str | None) -> None:
    if line is not None:
        log.info("%s", line)


# ---------------------------------------------------------------------------------------------------- starting one


def _open_journal(data_dir: str | os.PathLike[str]) -> Journal:
    """The journal of a directory, with what it needs of Python loaded only now: a store in memory does without."""
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
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    sock: socket.socket | Sequence[socket.socket] | None = None,
) -> AsyncIterator[Server]:
    """Serve a store for as long as the context lasts.

    Args:
        host: The address to listen on; "" is all interfaces. Anything but loopback wants a token or mutual TLS.
        port: The port; 0 lets the system choose one, see `Server.port`.
        data_dir: Where the store is kept, so that it survives restarts and power loss; without it, in memory only.
        token: What clients must prove to know.
        tls: A server-side context; with `CERT_REQUIRED` clients need a certificate.
        insecure: Listen beyond loopback without token or mutual TLS.
        limits: What clients may ask.
        sock: A bound socket to listen on, or several with one port, instead of `host` and `port`.

    Raises:
        StoreUsageError: It would be open to strangers, or `data_dir` cannot be used; the message says why.
        OSError: The address cannot be bound.
    """
    socks = [sock] if isinstance(sock, socket.socket) else list(sock or ())
    addresses: list[str] = [one.getsockname()[0] for one in socks] or [host]
    bound_host = addresses[0] if len(addresses) == 1 else host
    secret = token_bytes(token)
    for address in addresses:
        check_exposure(address, token=secret, tls=tls, insecure=insecure)
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        files = stack.enter_context(raised_file_limit())
        journal = None
        if data_dir is None:
            engine = Engine(store_id=secrets.token_hex(8), limits=limits)
        else:
            journal = _open_journal(data_dir)
            stack.callback(journal.close, within=STOP_WITHIN / 3)  # it has been stopped by then, or the disk hangs
            engine = Engine.restore(journal.load(), limits=limits, now=loop.time())
        server = Server(engine, token=secret, clock=loop.time, secure=tls is not None, journal=journal)
        allowed = files - open_files() - SPARE_FILES
        server.limit_connections(allowed)
        # The loop is given sockets, not the host: uvloop would ask threads of libuv's what that stands for, and those
        # make a forked child crash when it ends.
        listening = socks or await anyio.to_thread.run_sync(bound_sockets, host, port)
        async with _timers_of(server), _door_of(server, listening, bound_host, tls):
            log.info(
                "serving store %s on %s, %s; %d files allow about %d connections",
                server.store_id,
                host_and_port(bound_host or "*", server.port),
                "in memory only: it ends with this process" if data_dir is None else f"kept in {data_dir}",
                files,
                allowed,
            )
            server.start_journal()
            yield server
        server.check_timers()


@contextlib.asynccontextmanager
async def _door_of(
    server: Server, listening: Sequence[socket.socket], host: str, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Take connections in; afterwards no more, and tell those there are."""
    door = Door(server.table, listening, server.protocol if tls is None else partial(server.protocol_over, tls))
    door.open()
    let_go_in_children(server, *listening)
    server.way_out.open(asyncio.get_running_loop())
    server.host = host
    server.port = listening[0].getsockname()[1]
    serves(host, server.port)
    try:
        yield
    finally:
        door.close()
        serves_no_more(server.port)
        forget(server)
        await door.wait_closed()
        for newcomer in server.table.all:
            if isinstance(newcomer, TlsLayer):
                newcomer.abort()
        await server.leave()


@contextlib.asynccontextmanager
async def _timers_of(server: Server) -> AsyncIterator[None]:
    """Have the server do what it does from time to time; in the end nobody is left with it."""
    timers = [
        asyncio.create_task(timer)
        for timer in (server.keep_time(), server.drop_the_silent(), server.warn_of_limits(), server.tell_of_silence())
    ]
    for timer in timers:
        timer.add_done_callback(server.timer_ended)
    try:
        yield
    finally:
        server.abort()
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)
