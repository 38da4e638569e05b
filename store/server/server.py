"""Shell: a store that is being served: what its parts are, what is done from time to time, and the way down.

Who is taken in is for `reception` to say; what peers ask is carried out in `conversations`, and what they are told is
in `telling`; what waits for the disk is in `durability`; what all of them may hold in `peers`. Leases lapse after the
sockets have been read once more, and what was read has had its turn: a keep-alive that has arrived always counts (S5).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
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
from store.net.standard_streams import open_before_uvloop
from store.net.tasks import cancel_and_wait
from store.net.threads import in_thread
from store.protocol import wire
from store.protocol.wire import Sorry
from store.server.conversations import Conversations
from store.server.durability import STOP_WITHIN, Durability
from store.server.entry.door import Door, WayOut
from store.server.entry.exposure import check_exposure, token_bytes
from store.server.entry.table import Table
from store.server.entry.tls import TlsLayer
from store.server.log_lines import LimitWarnings
from store.server.peer import LEAVE_WITHIN, Peer
from store.server.peers import Peers
from store.server.reception import Reception

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from store.limits import Limits
    from store.server.journal import Journal

__all__ = ["Server", "serve"]

log: logging.Logger = logging.getLogger(__name__)

WARN_EVERY = 5.0  # seconds; how late it may be noticed that a limit is near
LOOK_EVERY = 0.1  # seconds; how late a lease may lapse, and a third of what counts as a stall
LOOK_LEAST = 0.001  # seconds; a lease due in less than a clock can tell apart would be looked at for ever
SPARE_FILES = 64  # for the rest of the process
SPEAKS_TLS = Sorry("protocol", "this port speaks TLS, and the client does not: use tcps:// and the server's authority")


class Server:
    """A store that is being served; made by `store.serve`.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
        store_id: The store's random identity.
        table: For what is served beside it: all connections, those included that are no conversations yet.
        way_out: For who serves it in another thread: how it ends once nobody needs it any more.
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
        self._clock = clock
        self._began = clock()
        self._secure = secure
        self._limits = engine.limits
        self._last_peer = 0
        self._limit_warnings = LimitWarnings()
        self._failure: BaseException | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._timer: asyncio.Task[None] | None = None
        self.table: Table = Table(engine.limits, clock)
        # On virtual time there are no threads, and its clock stands still while requests are carried out.
        self._durability = Durability(
            engine,
            journal,
            clock=clock,
            in_thread=in_thread,
            on_durable=lambda number: self._conversations.became_durable(number),  # noqa: PLW0108 - made below
            on_restored=self._restored,
            cut=self._abort,
            ended=self._timer_ended,
        )
        self._peers = Peers(engine.limits, self._durability, self.table)
        self._reception = Reception(self._peers, token=token, clock=clock)
        self._conversations = Conversations(
            self._peers,
            reception=self._reception,
            clock=clock,
            stopwatch=stopwatch,
            figures=self.figures,
        )
        self.host: str = ""
        self.port: int = 0
        self.store_id: str = engine.store_id
        self.way_out: WayOut = self._reception.way_out
        self._restored(engine)

    @property
    def _engine(self) -> Engine:
        """The store; another one, once it has been read from its disk again."""
        return self._durability.engine

    @property
    def url(self) -> str:
        """Where clients find it."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
        host = everywhere.get(self.host, self.host)
        return str(Address(host=host, port=self.port, secure=self._secure))

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._peers.by_id)

    def protocol(self, *, is_of_ours: bool = False) -> Peer:
        """A protocol object for a connection that has been accepted.

        Args:
            is_of_ours: It is of this very process, and keeps no server from ending.
        """
        self._last_peer += 1
        return Peer(
            self._conversations,
            self._last_peer,
            outboxes=self._peers.outboxes,
            inboxes=self._peers.inboxes,
            is_of_ours=is_of_ours,
        )

    def _protocol_over(self, tls: ssl.SSLContext) -> TlsLayer:
        """The same, for a connection that speaks TLS."""
        return TlsLayer(self.protocol(), tls, self.table, farewell=wire.encode_sorry(SPEAKS_TLS))

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        journal = self._durability.journal
        return {
            **self._engine.figures(),
            **dataclasses.asdict(self._limits),
            "connections_max": self.table.connections_max,
            "uptime": self._clock() - self._began,
            "connections": len(self._peers.by_id),
            "strangers": self.table.strangers,
            "connections_refused": self.table.refused,
            "bytes_in": self._conversations.bytes_in,
            "bytes_out": self._reception.bytes_out + sum(peer.bytes_out for peer in self._peers.by_id.values()),
            "outbox_bytes": self._peers.outboxes.bytes,
            "inbox_bytes": self._peers.inboxes.bytes,
            "journal_bytes": self._durability.unwritten.bytes,
            "connection_bytes": self.table.bytes,
            "memory_bytes": self._engine.memory_bytes + self._peers.held_bytes,
            "log_bytes": 0 if journal is None else journal.log_bytes,
            "commits": 0 if journal is None else journal.commits,
            "commit_seconds": 0.0 if journal is None else journal.commit_seconds,
        }

    def _restored(self, engine: Engine) -> None:
        """This store is served from now on: it is what is on disk."""
        engine.count_elsewhere(lambda: self._peers.lasting_bytes)

    def on_request(self, callback: Callable[[str, str, float], None]) -> None:
        """Call back with each request that was begun: its kind, "ok" or how it failed, and how long that took."""
        self._conversations.on_request = callback

    # ------------------------------------------------------------------------------------------ time

    def begin(self) -> None:
        """Have the journal write from now on, and leases lapse, until `leave`."""
        self.way_out.open(asyncio.get_running_loop())
        self._durability.start()
        self._timer = asyncio.create_task(self._keep_time(), name=f"timer of store {self.store_id}")
        self._timer.add_done_callback(self._timer_ended)

    async def _keep_time(self) -> None:
        """Do what is to be done from time to time, for as long as the server runs: let leases lapse, above all."""
        warn_at = drop_at = self._clock()
        while True:
            due_in = self._engine.next_tick_in() if self._may_lapse() else None
            await anyio.sleep(LOOK_EVERY if due_in is None else min(max(due_in, LOOK_LEAST), LOOK_EVERY))
            now = self._clock()
            if self._engine.look(now=now):
                await self._let_lapse()
            self._peers.make_room_in_outboxes()  # others' writes may have taken what was free
            self._peers.make_room_in_listings()
            if now >= drop_at:
                drop_at = now + self._limits.frame_timeout / 2
                self._drop_the_silent(now)
            if now >= warn_at + WARN_EVERY:
                warn_at = now
                self._warn_of_limits()

    async def _let_lapse(self) -> None:
        """Let leases lapse that are due, but for those that may have been renewed by what was not carried out yet."""
        # They are not read now; who is among them only later will have been.
        unheard = self._conversations.unheard(self._clock())
        # Two turns of the loop, the second of which comes after every other socket has been read once more.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        # What was read then may wait for its turn. If it renews the leases of another connection, as that of a client
        # which has just come back does, nobody knows that before.
        await self._conversations.hear_newcomers()
        if not self._may_lapse():
            return
        now = self._clock()
        deliveries = self._engine.tick(now=now, unheard=unheard | self._conversations.unheard(now))
        self._durability.record()
        self._conversations.telling.deliver(deliveries)
        self._conversations.telling.flush()

    def _may_lapse(self) -> bool:
        """Whether a lapse could be written down: on a full disk, and when leaving, leases stay until it can.

        On a disk that is far behind, too: keep-alives may have come on connections that are not read for its sake.
        """
        return self._engine.read_only is None and not self._reception.leaving and not self._durability.behind

    def _drop_the_silent(self, now: float) -> None:
        """Disconnect peers that stopped in the middle of a frame."""
        silent_since = now - self._limits.frame_timeout
        why = f"half a frame and {self._limits.frame_timeout:g} s of silence (frame_timeout)"
        for peer in list(self._peers.by_id.values()):
            if peer.connection.held_bytes and peer.received_at < silent_since and not peer.reading_paused:
                self._peers.hang_up(peer, Sorry("limit", why))

    def _warn_of_limits(self) -> None:
        """Log which limits are nearly reached, and by whom."""
        for line in self._limit_warnings.look(self.figures(), self._engine.groups):
            log.warning("store %s: %s", self.store_id, line)

    # ------------------------------------------------------------------------------------------ leaving

    async def leave(self) -> None:
        """Tell everyone, let the last frames through, and close every connection, within `LEAVE_WITHIN` seconds."""
        self._reception.leaving = True
        try:
            with anyio.CancelScope(shield=True):
                await self._durability.stop()
            for peer in list(self._peers.by_id.values()):
                if peer.connection.greeted:
                    self._conversations.telling.say(peer, wire.encode_bye("the server is leaving"))
                    peer.close()
                else:  # a farewell is no welcome; this it understands, and tries again
                    peer.refuse(Sorry("limit", "the server is leaving"))
            with anyio.move_on_after(LEAVE_WITHIN, shield=True):
                await self._reception.empty.wait()
        finally:  # a task that is cancelled natively gets out of any scope
            self._abort()
            if self._timer is not None:
                await cancel_and_wait(self._timer)

    def _abort(self) -> None:
        """Cut every connection that is left, at once."""
        self._peers.abort()

    def _timer_ended(self, timer: asyncio.Task[None]) -> None:
        """A timer ends only by a defect of ours. A store whose leases never lapse must not pass for one."""
        if not timer.cancelled() and (error := timer.exception()) is not None:
            log.critical("store %s stops serving: %s", self.store_id, error, exc_info=error)
            self._failure = error
            self._reception.leaving = self._durability.leaving = True
            self._abort()
            for callback in self._on_failure:
                callback()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call back when this server stops serving by itself; leaving its context then raises why."""
        self._on_failure.append(callback)


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
    open_before_uvloop(loop)
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
        server.table.allow(allowed)
        # The loop is given sockets, not the host: uvloop would ask threads of libuv's what that stands for, and those
        # make a forked child crash when it ends.
        listening = socks or await anyio.to_thread.run_sync(bound_sockets, host, port)
        async with _running(server, listening, bound_host, tls):
            log.info(
                "serving store %s on %s, %s; %d files allow about %d connections",
                server.store_id,
                host_and_port(bound_host or "*", server.port),
                "in memory only: it ends with this process" if data_dir is None else f"kept in {data_dir}",
                files,
                allowed,
            )
            yield server
        if server._failure is not None:
            raise server._failure


@contextlib.asynccontextmanager
async def _running(
    server: Server, listening: Sequence[socket.socket], host: str, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Take connections in; afterwards no more, tell those there are, and leave nobody behind."""
    door = Door(server.table, listening, server.protocol if tls is None else partial(server._protocol_over, tls))
    door.open()
    let_go_in_children(server, *listening)
    server.host = host
    server.port = listening[0].getsockname()[1]
    serves(host, server.port)
    server.begin()
    try:
        yield
    finally:
        door.close()
        serves_no_more(server.port)
        forget(server)
        try:
            await door.wait_closed()
        finally:
            for newcomer in server.table.all:
                if isinstance(newcomer, TlsLayer):
                    newcomer.abort()
            await server.leave()
