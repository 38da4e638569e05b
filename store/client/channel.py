"""One connection of a blocking client; if the server is silent, a fresh one sends the request again (promise R8)."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from store.calls import DisconnectNotifier
from store.client.connection_health import ConnectionHealth, HealthAction, SocketState
from store.client.timeouts import FAREWELL_WITHIN, HEARTBEAT, LASTED, SILENCE, Timeouts
from store.errors import ProtocolError, StoreError, WaitEndedError, unsent_error
from store.messages import Cancel, Failed, KeepAlive, Ping, Pong, Request, Response, waits
from store.net import dialing
from store.net.absence import OutageLog
from store.net.callers import check_not_server_loop
from store.net.process import check_not_forked, process_identity
from store.net.racing import Addresses, connect_blocking
from store.net.sockets import close_in_children, raised_by_signal, set_tcp_options, unacknowledged
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator

    from store.protocol.connection import Secret

log: logging.Logger = logging.getLogger(__name__)

RECEIVE_BYTES = 64 * 1024
LOOK = SILENCE / 2  # seconds between checks for silence during a read or a write

LEAST = 0.001  # seconds; the shortest timeout of a socket: 0 would make it non-blocking

R = TypeVar("R", bound=Response)


class _TimedOut(Exception):
    """The caller's timeout is over; other modules never see this error."""


@dataclass(eq=False)
class ChannelsState:
    """The arguments and the state of all channels of one client."""

    addresses: Addresses
    tls: ssl.SSLContext | None
    name: str
    token: Secret
    renew: Callable[[], ssl.SSLContext | None] | None
    rng: random.Random
    store_id: str | None = None
    failed: StoreError | None = None  # the error that later calls raise; None while the client is usable
    waits_ended: bool = False
    channels: list[Channel] = field(default_factory=list)
    problem: str = dialing.NEVER_ANSWERED  # the last problem of any channel's connection
    outages: OutageLog = field(init=False)
    cuts: DisconnectNotifier = field(init=False)
    _closed: weakref.WeakSet[socket.socket] = field(default_factory=weakref.WeakSet)  # sockets whose end `cuts` knows
    _seen_revision: int = 0  # the latest revision seen when a channel was last closed
    _dropping: threading.Lock = field(default_factory=threading.Lock)
    _made_in: bytes = field(default_factory=process_identity)

    def __post_init__(self) -> None:
        self.outages = OutageLog(self.name, lambda: self.problem + self.addresses.in_parentheses(), log)
        self.cuts = DisconnectNotifier(time.monotonic, self._report_lost_connections)

    def seen_revision(self) -> int:
        """Return the latest revision seen on any channel."""
        return max([self._seen_revision, *[channel.connection.seen_revision for channel in list(self.channels)]])

    def discard_channel(self, channel: Channel) -> None:
        """Close a channel that is no longer needed."""
        channel.close(farewell=True)
        with self._dropping:  # without the lock, a thread could overwrite a newer revision
            self._seen_revision = self.seen_revision()
            with contextlib.suppress(ValueError):
                self.channels.remove(channel)

    def _report_lost_connections(self) -> None:
        for channel in tuple(self.channels):
            sock = channel.sock
            if sock is not None and sock not in self._closed and _has_peer_closed(sock):
                self._closed.add(sock)
                self.cuts.note_disconnect()

    def fail(self, error: StoreError) -> StoreError:
        """Make all later calls raise this error, unless the client has failed before; return the error."""
        if self.failed is None:
            self.failed = error
        return error

    def check_usable(self) -> None:
        """Raise an error if the client has failed, or was made before a `fork()`."""
        check_not_forked(self._made_in, self.name)
        if self.failed is not None:
            raise unsent_error(self.failed)

    def check_usable_for(self, request: Request[Any]) -> None:
        """Raise an error if the client is unusable, or if `request` is a wait, and waits were ended."""
        self.check_usable()
        if self.waits_ended and waits(request):
            raise WaitEndedError("waits were ended here")


def _has_peer_closed(sock: socket.socket) -> bool:
    looking = select.poll()
    with contextlib.suppress(ValueError):  # another thread has closed the socket
        looking.register(sock, getattr(select, "POLLRDHUP", 0))
    return bool(looking.poll(0))


class Channel:
    """One connection to the server, made again after a loss; used by one thread at a time."""

    def __init__(self, shared: ChannelsState) -> None:
        self._shared = shared
        self.connection: ClientConnection = ClientConnection(
            session_id=secrets.token_bytes(16), process=process_identity(), token=shared.token, name=shared.name
        )
        self.sock: socket.socket | None = None
        self.ended: bool = False  # True once the watch on this channel was closed, by any thread
        self.leases: dict[int, float] = {}  # by id: expiry times of leases that end early if this connection is lost
        self.idle_since: float = 0.0  # when the channel's last call ended, or its closing was postponed
        self.pushed: deque[Events | Lagged | Pong] = deque()  # messages for a watch
        self._attempt, self._welcomed_at = 0, -math.inf
        self._problem = dialing.NEVER_ANSWERED
        self._timeouts = Timeouts(shared.rng)
        # Close the replaced socket only after the next welcome: without a socket, this process counts as dead (R20).
        self._previous: socket.socket | None = None

    def call(self, request: Request[R], timeout: float | None) -> tuple[R, int]:
        """Make a request, reconnecting if necessary; return the answer and the request's id."""
        try:
            return self._call_with_retries(request, timeout)
        except BaseException as error:
            if not isinstance(error, StoreError) or raised_by_signal(error):
                self.abandon_connection()
            raise

    def _call_with_retries(self, request: Request[R], timeout: float | None) -> tuple[R, int]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        item = self.connection.register_request(request, None)
        try:
            while True:
                try:
                    if self.sock is None:
                        self._connect(item, deadline)
                    self._send(self.connection.encode(item), deadline)
                    if self._previous is not None:
                        self._renew_leases(self.leases)
                        self._close_previous()
                    answer: R = self._wait_for_answer(item, deadline)
                    self._timeouts.note_answer()
                    return answer, item.request_id
                except OSError as error:
                    self.note_disconnect(error)
                    self._shared.outages.note_failure(time.monotonic())
                    self._check_not_ended(request)
        except _TimedOut:
            late = item.timeout_error(cast("float", timeout), self._shared.name, self._problem_text())
            self._abandon_request(item)
            raise late from None
        except StoreError as error:
            if raised_by_signal(error):
                raise
            self.connection.abandon_request(item)
            raise item.error_for_request(error) from None

    def _check_not_ended(self, request: Request[Any]) -> None:
        if self.ended:
            raise WaitEndedError("it was ended here")
        self._shared.check_usable_for(request)

    def _connect(self, item: InFlight, deadline: float) -> None:
        check = partial(self._check_not_ended, item.request)
        self._pause_before_retry(deadline)
        try:
            self._open_socket(deadline, check)
            self._shake_hands(deadline)
        except BaseException as error:
            self._close_socket()
            if not isinstance(error, TimeoutError):  # a timeout, which may mean a slow server, lengthens no pause
                self._attempt += 1
            raise
        self._attempt, self._welcomed_at = 0, time.monotonic()
        self._shared.outages.note_end(self._welcomed_at)
        if item in self.connection.take_lost_requests():
            raise self.connection.session_forgotten_error
        # `interrupt` has no effect on a channel without a socket, so check again once there is one.
        check()
        for grant in self.connection.abandoned_grants:
            self._send(self.connection.encode(grant), deadline)

    def _pause_before_retry(self, deadline: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise _TimedOut
        # Pause also if the last connection ended early: a server may close each one soon after its welcome.
        if self._attempt or now - self._welcomed_at < LASTED:
            pause = self._timeouts.retry_pause(max(self._attempt - 1, 0), away=self._shared.outages.outage_seconds(now))
            if now + pause >= deadline:
                time.sleep(deadline - now)
                raise _TimedOut
            time.sleep(pause)

    def _open_socket(self, deadline: float, check: Callable[[], None]) -> None:
        addresses, began = self._shared.addresses, time.monotonic()
        check_not_server_loop(addresses.host, addresses.port)
        addresses.set_small_packets(self._timeouts.large_packets_seem_lost)
        if self._shared.renew is not None:
            renewed = self._shared.renew()
            self._shared.tls = self._shared.tls and (renewed or self._shared.tls)
        try:
            sock = connect_blocking(addresses, min(began + self._timeouts.connect_timeout(), deadline), check)
        except OSError as error:
            if raised_by_signal(error):
                raise
            self._shared.cuts.note_connect_attempt(error)
            if not isinstance(error, TimeoutError) or time.monotonic() < deadline:
                raise
            if self._problem == dialing.NEVER_ANSWERED:
                self._problem = dialing.error_text(TimeoutError())
            raise _TimedOut from None
        self._shared.cuts.note_connect_attempt(None)
        self._timeouts.note_connect_time(time.monotonic() - began)
        try:
            set_tcp_options(sock)
            if self._shared.tls is not None:
                sock = self._shared.tls.wrap_socket(sock, server_hostname=addresses.host, do_handshake_on_connect=False)
            close_in_children(self, sock)
        except BaseException:
            sock.close()
            raise
        self.sock = sock

    def _shake_hands(self, deadline: float) -> None:
        secure, met = self._shared.tls is not None, self._shared.store_id is not None
        self.connection.store_id = self._shared.store_id
        self.connection.seen_revision = self._shared.seen_revision()
        self.connection.start_connection(nonce=secrets.token_bytes(16))
        greeted_by = time.monotonic() + self._timeouts.first_bytes_timeout()
        try:
            while self.connection.welcomed is None:
                until = deadline if self.connection.has_greeting else min(greeted_by, deadline)
                for item in self.receive(until):
                    if isinstance(item, bytes):
                        self._send(item)
        except ssl.SSLCertVerificationError as error:
            if met:
                raise
            raise self._shared.fail(dialing.untrusted_error(self._shared.name, error)) from None
        except ConnectionResetError as error:
            if not (self.connection.has_greeting or raised_by_signal(error)):
                raise dialing.silent_close_error(secure=secure, met=met) from None
            raise
        except _TimedOut:
            if not self.connection.has_greeting and not met:
                self._problem = dialing.SAYS_NOTHING[secure]
            if time.monotonic() >= deadline:
                raise
            self._timeouts.note_silent_replaced()
            raise TimeoutError from None
        self._shared.store_id = self.connection.store_id

    def _wait_for_answer(self, item: InFlight, deadline: float) -> Any:
        answer: Response | None = None
        while answer is None:
            data = self._read(deadline)
            try:
                answer = self.connection.decode_exact_frame(data, item)
            except ProtocolError as error:
                raise self._error_to_raise(error) from None
            if answer is not None:
                break
            for received in self._decode_received(data):
                if isinstance(received, Reply):
                    answered = self.connection.take_request(received.request_id)
                    if answered is item:
                        answer = received.response
                    elif answered is not None and (revoke := answered.revoke_request(received.response)) is not None:
                        self._send_and_forget(revoke)
                elif isinstance(received, (Events, Lagged)):
                    self.pushed.append(received)
        if type(answer) is Failed:
            raise cast("StoreError", error_of(answer))
        return answer

    def receive(self, deadline: float = math.inf) -> Iterator[bytes | Welcome | Reply | Events | Lagged | Bye]:
        """Read once, and yield the messages; raise `OSError` if the connection is lost, `_TimedOut` at the deadline."""
        yield from self._decode_received(self._read(deadline))

    def _decode_received(self, data: bytes) -> Iterator[bytes | Welcome | Reply | Events | Lagged | Bye]:
        try:
            yield from self.connection.receive(data)
        except StoreError as error:
            raise self._error_to_raise(error) from None

    def _error_to_raise(self, error: StoreError) -> BaseException:
        for each in (error, error.__cause__):  # an error of a signal's handler may be the cause of the decoder's error
            if raised_by_signal(each):
                return cast("BaseException", each)
        if self.connection.is_error_retryable(error):
            return dialing.RefusedByStore(str(error))
        return self._shared.fail(error)

    def _read(self, deadline: float) -> bytes:
        assert self.sock is not None
        now = time.monotonic()
        health: ConnectionHealth | None = None  # measures silence; not made if the answer comes soon
        while True:
            if now >= deadline:
                raise _TimedOut
            self._set_timeout(self.sock, deadline - now)
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except TimeoutError as error:
                if raised_by_signal(error):
                    raise
                if health is None:
                    health = self._new_health_check(now)
                now = time.monotonic()
                if now < deadline:
                    self._check_connection(self.sock, health, now)
                    now = time.monotonic()
            else:
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
                if health is not None:
                    health.note_received(time.monotonic(), expecting=False)
                return data

    def _new_health_check(self, since: float) -> ConnectionHealth:
        health = ConnectionHealth(self._timeouts, since)
        in_flight = self.connection.in_flight.values()
        if self.connection.welcomed is None or any(not waits(item.request) for item in in_flight):
            health.expect_answer(since)
        return health

    def _check_connection(self, sock: socket.socket, health: ConnectionHealth, now: float) -> None:
        line = SocketState(*unacknowledged(sock), welcomed=self.connection.welcomed is not None)
        say, _ = health.next_action(now, line)
        if say is HealthAction.PING:
            if not line.unsent_bytes:  # unacknowledged bytes serve as a ping: the peer's system must answer
                self._send_and_forget(Ping())
        elif say is HealthAction.SEEK:
            if line.welcomed:
                self._previous, self.sock = sock, None
            self._timeouts.note_silent_replaced()
            raise TimeoutError
        elif say is HealthAction.HANG_UP:
            raise TimeoutError

    def _send(self, frame: bytes, deadline: float = math.inf) -> None:
        """Send a frame. Raise `TimeoutError` if the server stops reading.

        At `deadline`, disconnect and raise `_TimedOut`.
        """
        assert self.sock is not None
        rest, stuck = memoryview(frame), 0.0
        # Without TLS, use `os.write`, which does not wait: `socket.send` would poll first.
        send = self.sock.send if self._shared.tls is not None else partial(os.write, self.sock.fileno())
        while True:  # not `sendall`, whose timeout would cover the whole frame
            within = self._set_timeout(self.sock, deadline - time.monotonic())
            try:
                sent = send(rest)
                if sent == len(rest):
                    return
                rest, stuck = rest[sent:], 0.0
            except (BlockingIOError, TimeoutError) as error:
                if raised_by_signal(error):
                    raise
                stuck += within if isinstance(error, TimeoutError) else 0.0
            if time.monotonic() >= deadline:
                self.note_disconnect(TimeoutError())
                raise _TimedOut
            if stuck >= HEARTBEAT:
                raise TimeoutError
            send = self.sock.send

    def _set_timeout(self, sock: socket.socket, left: float) -> float:
        within = LOOK if left >= LOOK else max(left, LEAST)
        if within != sock.gettimeout():
            sock.settimeout(within)
        return within

    def _send_and_forget(self, request: Request[Response]) -> None:
        item = self.connection.register_request(request, None)
        frame = self.connection.encode(item)
        self.connection.abandon_request(item)
        self._send(frame)

    def renew_leases(self, leases: Iterable[int], within: float) -> bool:
        """Renew leases over this connection, which keeps them from now on; return True if the server confirms it."""
        self.call(Ping(), within)
        connection = self._welcomed_at
        try:
            self._renew_leases(leases)
        except OSError as error:
            self.note_disconnect(error)
        self.call(Ping(), within)  # the pong confirms the renewals: requests are answered in order
        return connection == self._welcomed_at

    def _renew_leases(self, leases: Iterable[int]) -> None:
        for lease in tuple(leases):
            self._send_and_forget(KeepAlive(lease=lease))

    def _problem_text(self) -> str | None:
        if self.sock is not None:
            return None
        lost = "the connection is lost, " if self.connection.store_id is not None else ""
        return f"{lost}{self._problem}{self._shared.addresses.in_parentheses()}"

    def _abandon_request(self, item: InFlight) -> None:
        self.connection.abandon_request(item)
        if waits(item.request) and item.sent and self.connection.welcomed is not None:
            try:
                self._send_and_forget(Cancel(target=item.request_id))
            except OSError as error:
                self.note_disconnect(error)

    def note_disconnect(self, error: OSError) -> None:
        """Note a lost connection; raise `error` if it came from a signal's handler."""
        if raised_by_signal(error):
            raise error
        self._problem = self._shared.problem = dialing.error_text(error)
        if self.connection.welcomed is not None:
            self._shared.cuts.note_disconnect()
        self._close_socket()

    def abandon_connection(self) -> None:
        """Abandon the connection after a signal's handler interrupted a call, whose progress is unknown."""
        for item in tuple(self.connection.in_flight.values()):
            self.connection.abandon_request(item)
        if not self.leases:
            self.close()
        elif self.sock is not None:  # keep the socket open until another connection has renewed the leases
            self._close_previous()
            self._previous, self.sock = self.sock, None
            self._close_socket()

    def close(self, *, farewell: bool = False) -> None:
        """Close the socket, after a goodbye if `farewell`; the next call opens another."""
        if farewell and self.sock is not None and self.connection.abandoned_grants:
            with contextlib.suppress(StoreError):
                self.call(Ping(), FAREWELL_WITHIN)  # reads late answers to grants, and revokes their leases
        self._close_socket(farewell=farewell)
        self._close_previous()

    def _close_socket(self, *, farewell: bool = False) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            if farewell:
                with contextlib.suppress(OSError):
                    sock.sendall(wire.encode_bye("done"))
            sock.close()
        self.connection.end_connection()

    def _close_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.close()

    def interrupt(self) -> None:
        """End a blocked read, from another thread."""
        sock = self.sock  # another thread may set the attribute to None
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not `SSLSocket.shutdown`, after which reads would return encrypted bytes.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
