"""The connection of an awaited client. One task connects, and reconnects after loss or silence (`ConnectionHealth`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import anyio

from store import interface
from store.calls import DisconnectNotifier
from store.client.connection_health import ConnectionHealth, HealthAction, SocketState
from store.client.timeouts import LASTED, Timeouts
from store.errors import AuthenticationError, ConnectionLost
from store.net.absence import OutageLog, warn_if_silent
from store.net.dialing import (
    NEVER_ANSWERED,
    SAYS_NOTHING,
    TcpDialer,
    error_text,
    exhausted_limit,
    silent_close_error,
    untrusted_error,
)
from store.net.process import process_identity
from store.net.sockets import close_in_children, forget_sockets, unacknowledged
from store.net.tasks import cancel_and_wait, require_loop
from store.protocol.connection import ClientConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from store.net.dialing import Dial
    from store.net.racing import Addresses
    from store.protocol.connection import Secret

log: logging.Logger = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """One connection, which measures the server's silence, and buffers received bytes until `deliver_early_bytes`."""

    def __init__(self, owner: ReconnectingClient) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self.transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._early: list[bytes] | None = []
        # True once the server has sent bytes, False if the connection ended without any
        self.spoken: asyncio.Future[bool] = self._loop.create_future()
        self.over: bool = False
        self.changed: asyncio.Event = asyncio.Event()  # set once the connection is over, or the server is silent
        self.search: anyio.CancelScope | None = None  # cancels the search for another connection; None without a search
        self.farewell: str = ""
        self._error: Exception | None = None
        self.health: ConnectionHealth = ConnectionHealth(owner.timeouts, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._look_due = 0.0  # the time of the next `_check_health`, which uvloop's timers do not tell
        self._looks_soon = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connected transport."""
        self.transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            close_in_children(self, self._socket)

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the owner, or buffer them until `deliver_early_bytes`."""
        if self._early is None:
            self._owner.handle_bytes(self, data)
            return
        self._early.append(data)
        if not self.spoken.done():
            self.spoken.set_result(True)

    def deliver_early_bytes(self) -> None:
        """Give the connection to the client, with the bytes received so far."""
        self.expect_answer()
        early, self._early = self._early or [], None
        for data in early:
            self._owner.handle_bytes(self, data)

    def write(self, data: bytes) -> None:
        """Send data; do nothing if the transport is closing, as uvloop's `write` would raise an error."""
        assert self.transport is not None, "it was made before anybody has something to say on it"
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self._owner.set_writable(self, writable=False)

    def resume_writing(self) -> None:
        """Resume writing."""
        self._owner.set_writable(self, writable=True)

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection."""
        forget_sockets(self)
        self._socket, self._error = None, error
        if not self.spoken.done():
            self.spoken.set_result(False)
        self.stop_checks()

    def stop_checks(self) -> None:
        """Stop the timer and the search: the connection has ended, or was replaced."""
        if self._timer is not None:
            self._timer.cancel()
        self.over = True
        self.changed.set()
        self.stop_reconnect_search()

    def stop_reconnect_search(self) -> None:
        """End the search for a fresh connection."""
        search, self.search = self.search, None
        if search is not None:
            search.cancel()

    def close_when_sent(self, reason: str) -> None:
        """Close the connection, after the written data was sent."""
        self.farewell = reason
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.stop_checks()
        if self.transport is not None:
            self.transport.abort()

    @property
    def error(self) -> Exception:
        """The error that ended the connection."""
        error = self._error or ConnectionResetError()
        spoken = self.spoken.done() and self.spoken.result()
        if spoken or not isinstance(error, ConnectionResetError):
            return error
        return silent_close_error(secure=self._owner._secure, met=self._owner.has_met_store)

    @property
    def socket_addresses(self) -> tuple[str, str] | None:
        """The addresses of this end and of the peer, or None without a socket."""
        if self.transport is None:
            return None
        ours, theirs = (self.transport.get_extra_info(which) for which in ("sockname", "peername"))
        return (ours[0], theirs[0]) if ours and theirs else None

    def expect_answer(self) -> None:
        """Begin to measure the server's silence, if not begun yet."""
        if self.health.asked_at is None:
            self.health.expect_answer(self._loop.time())
            self._schedule_first_check()

    def note_received(self, *, expecting: bool) -> None:
        """Note received bytes; `expecting`: another answer is due."""
        self.health.note_received(self._loop.time(), expecting=expecting)
        if expecting:
            self._schedule_first_check()

    def _schedule_first_check(self) -> None:
        if not self._looks_soon:
            self._looks_soon = True
            self._schedule_check(self.health.first_check_at(self._loop.time()))

    def _schedule_check(self, at: float) -> None:
        if self.over or (self._timer is not None and self._look_due <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._look_due, self._timer = at, self._loop.call_at(at, self._check_health)

    def _check_health(self) -> None:
        now = self._loop.time()
        late, self._timer = now - self._look_due, None
        buffered = 0 if self.transport is None else self.transport.get_write_buffer_size()
        line = SocketState(*unacknowledged(self._socket, buffered), self._owner.connected, bool(self._owner.watches))
        say, until = self.health.next_action(now, line, late=late)
        if say is HealthAction.PING:
            self._owner.send_ping()
        elif say is HealthAction.SEEK:
            self.changed.set()
        elif say is HealthAction.HANG_UP:
            self.farewell = f"it has been silent for {now - self.health.heard_at:.0f} s"
            self.abort()
        self._schedule_check(until)
        self._looks_soon = self.health.asked_at is not None and not self.health.seeking


class ReconnectingClient(interface.Store):
    """The part of a `Client` that connects and reconnects to the server."""

    connected: bool = False  # True from welcome to loss: requests may be sent
    watches: Mapping[int, object]  # the watches open at the server, by request id

    def __init__(
        self,
        dial: Dial,
        *,
        name: str,
        token: Secret = None,
        rng: random.Random | None = None,
        process: bytes | None = None,
        generation: int = 1,
    ) -> None:
        self._dial = dial
        self._made_in = process_identity()
        self._secure = isinstance(dial, TcpDialer) and dial.secure
        self.name = name
        self.timeouts: Timeouts = Timeouts(rng or random.Random(secrets.randbits(64)))
        id, process = secrets.token_bytes(16), process or self._made_in
        self._connection = ClientConnection(
            session_id=id, process=process, token=token, name=name, generation=generation
        )
        self._link: Connection | None = None
        self._previous: Connection | None = None  # the replaced connection; open until the new one's welcome (R20)
        self._trying: Connection | None = None  # a new connection on which the server has not sent bytes yet
        self._parked: set[int] = set()  # ids of the waits in flight, which `IN_FLIGHT_MAX` does not count
        self._writable = True
        self._eased = asyncio.Event()  # set when calls that wait for room to send must check again
        self._attempt = 0  # pauses since a welcomed connection last ended
        self._away_since = 0.0
        self.last_problem: str = NEVER_ANSWERED
        self._outages = OutageLog(name, self._problem_text, log)
        self._cuts = DisconnectNotifier(self.time)
        self.cuts: DisconnectNotifier | None = self._cuts

    @abstractmethod
    def handle_bytes(self, link: Connection, data: bytes) -> None:
        """Handle bytes received on a connection."""

    @abstractmethod
    def _handle_disconnect(self) -> None: ...

    @abstractmethod
    def send_ping(self) -> None:
        """Ping the server, if connected."""

    def _start_connecting(self) -> None:
        self._loop = require_loop()
        self._met_or_failed = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected(), name=f"store client of {self.name}")
        self._task.add_done_callback(self._handle_task_end)

    async def _wait_for_first_welcome(self, within: float, ended_by: str) -> None:
        told = warn_if_silent(self.name, self._problem_text, within=within, ended_by=ended_by)
        with anyio.move_on_after(within), told:
            await self._met_or_failed.wait()
        if self._failed is not None:
            raise self._failed
        if not self._met_or_failed.is_set():
            why = f"no store at {self.name} within {within:g} s: {self._problem_text()}"
            raise ConnectionLost(why, maybe_applied=False)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        why = "has ended with its event loop" if error is None else f"has failed: {error!r}"
        self.fail(ConnectionLost(f"the client of {self.name} {why}", maybe_applied=False))

    async def _stop_connecting(self) -> None:
        self._outages.note_end()
        await cancel_and_wait(self._task)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    def _problem_text(self) -> str:
        mute = self._trying is not None and self.last_problem == NEVER_ANSWERED
        problem = SAYS_NOTHING[self._secure] if mute else self.last_problem
        return problem + ("" if self._addresses is None else self._addresses.in_parentheses())

    @property
    def _addresses(self) -> Addresses | None:
        return self._dial.addresses if isinstance(self._dial, TcpDialer) else None

    @property
    def has_met_store(self) -> bool:
        """True once the store was reached: its identity and protocol are known."""
        return self._connection.store_id is not None

    @property
    def store_id(self) -> str | None:
        """The store's identity, once connected."""
        return self._connection.store_id

    @property
    def observed_address(self) -> str | None:
        """This client's address as the store sees it."""
        welcomed = self._connection.welcomed
        return welcomed.address if welcomed else None

    @property
    def socket_addresses(self) -> tuple[str, str] | None:
        """This client's address, and the server's."""
        return self._link.socket_addresses if self._link is not None else None

    def cap_retry_pauses(self, remaining: Callable[[], float]) -> None:
        """Limit pauses between attempts by the seconds that `remaining` returns."""
        self.timeouts.limit_by_leases(remaining)

    def time(self) -> float:
        """Return seconds on the clock of the client's event loop."""
        return self._loop.time()

    async def _stay_connected(self) -> None:
        self._away_since = self.time()
        successor: Connection | None = None
        with contextlib.suppress(AuthenticationError):  # `_connect_with_retries` has called `fail` with this error
            while self._failed is None:
                link = successor or await self._connect_with_retries()
                began = self.time()
                welcomed, successor = await self._run_connection(link)
                if welcomed:
                    self._attempt, self._away_since = 0, self.time()
                # Reconnect at once after a loss, or the server counts this process as dead (R20).
                at_once = welcomed and not link.farewell and self._away_since - began >= LASTED
                if successor is None and not at_once and self._failed is None:
                    await self._pause_before_retry()

    async def _pause_before_retry(self) -> None:
        await anyio.sleep(self.timeouts.retry_pause(self._attempt, away=self.time() - self._away_since))
        self._attempt += 1

    async def _connect_with_retries(self) -> Connection:
        """Try to connect until a server sends bytes; raise an error that another attempt cannot remedy."""
        while True:
            if self._addresses is not None:
                self._addresses.set_small_packets(self.timeouts.large_packets_seem_lost)
            try:
                link = await self._try_to_connect()
            except (OSError, UnicodeError) as error:
                if isinstance(error, ssl.SSLCertVerificationError) and not self.has_met_store:
                    self.fail(untrusted_error(self.name, error))
                    raise untrusted_error(self.name, error) from None
                self.last_problem = error_text(error)
                self._cuts.note_connect_attempt(error)
                if exhausted_limit(error) and not self.has_met_store:  # this process has no file or thread left
                    lost = ConnectionLost(f"{self.name} cannot be asked: {self.last_problem}", maybe_applied=False)
                    self.fail(lost)
                    raise lost from None
                await self._pause_before_retry()
            else:
                self._cuts.note_connect_attempt(None)
                if link is not None:
                    return link

    async def _try_to_connect(self) -> Connection | None:
        """Connect, and wait for the server's first bytes; return None if the server is late."""
        began, links = self.time(), list[Connection]()

        def make_connection() -> Connection:
            # TCP is connected now; the TLS handshake follows
            scope.deadline = self.time() + self.timeouts.first_bytes_timeout()
            self.timeouts.note_connect_time(self.time() - began)
            self._trying = link = Connection(self)
            links.append(link)
            return link

        try:
            with anyio.CancelScope(deadline=began + self.timeouts.connect_timeout()) as scope:
                await self._dial(make_connection)
                if await links[0].spoken:
                    return links.pop()
                raise links[0].error
        finally:
            self._trying = None
            for link in links:
                link.abort()
        if links:
            self.timeouts.note_silent_replaced()
        self.last_problem = (
            SAYS_NOTHING[self._secure] if links and not self.has_met_store else error_text(TimeoutError())
        )
        return None

    async def _run_connection(self, link: Connection) -> tuple[bool, Connection | None]:
        """Use a connection to its end. Return True if it was welcomed, and the connection that replaces it, if any."""
        self._link = link
        self._connection.start_connection(nonce=secrets.token_bytes(16))
        successor: Connection | None = None
        try:
            link.deliver_early_bytes()
            while successor is None and not link.over:
                await link.changed.wait()
                link.changed.clear()
                if link.health.seeking and not link.over:
                    with anyio.CancelScope() as link.search:
                        successor = await self._connect_with_retries()
        finally:
            link.stop_checks()
            if successor is None:
                link.abort()
            else:
                link.farewell = link.farewell or "it was silent, and a fresh connection was not"
            self.last_problem = link.farewell or error_text(link.error)
            welcomed, self.connected = self.connected, False
            self._drop_previous()
            self._link, self._writable = None, True
            self._eased.set()
            self._connection.end_connection()
            self._handle_disconnect()
            if welcomed:
                log.debug("the connection to %s is lost: %s", self.name, self.last_problem)
                self._cuts.note_disconnect()
                self.notify_connection_change(False)
                if self._failed is None:
                    self._outages.note_loss(self._loop)
        if successor is not None:
            self._previous = link
            self.timeouts.note_silent_replaced()
        return welcomed, successor

    def _drop_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.abort()

    def set_writable(self, link: Connection, *, writable: bool) -> None:
        """Note whether a connection's write buffer has room."""
        if link is self._link:
            self._writable = writable
            self._eased.set()
