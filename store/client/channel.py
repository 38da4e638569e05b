"""Shell: one socket of a blocking caller and the conversation on it, used by one thread at a time.

A call writes and reads on its own thread: no event loop, and no thread beside it that would notice silence. So a read
looks up twice a second, and has `Pulse` judge what it sees. A fresh connection is tried beside a silent one (promise
R8). What was asked is then asked again, and the session answers what was applied already.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import socket
import ssl
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from store.client.connecting import Connecting, Stage, greeted
from store.client.outcomes import out_of_time, with_doubt
from store.client.patience import HEARTBEAT, LASTED, SILENCE, Patience
from store.client.pulse import Line, Pulse, Say
from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
    StoreUsageError,
)
from store.messages import Cancel, Failed, Ping, Pong, Request, Response, waits
from store.net import dialing
from store.net.callers import check_blocking_caller
from store.net.process import process_id
from store.net.sockets import (
    SYSTEM_TELLS,
    have_calls_wait,
    holds_unreadable,
    let_go_in_children,
    queued_bytes,
    send_at_once,
)
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from typing import Any

    from store.net.racing import Addresses

__all__ = ["Channel", "Host"]

RECEIVE_BYTES = 64 * 1024
CONNECT_TIMEOUT = 10.0  # seconds for an attempt to agree on TLS; there may be several within a call's timeout
LOOK = SILENCE / 2  # seconds; how often whoever reads or writes looks up. One figure for both: changing it costs time

R = TypeVar("R", bound=Response)


class _Expired(Exception):
    """The caller's time is over; it becomes one of the public errors before it leaves this room."""


class Host(Protocol):
    """What a channel needs of the client that it belongs to."""

    name: str
    token: bytes | None
    addresses: Addresses
    context: ssl.SSLContext | None
    rng: random.Random
    store_id: str | None

    def seen_revision(self) -> int:
        """The latest revision that the store has shown on any channel: it must not go back behind it."""
        ...

    def fail(self, error: StoreError) -> StoreError:
        """This client is of no more use; the first reason counts."""
        ...

    def check_usable(self) -> None:
        """Raise what this client failed of, or that it was inherited over `fork()`."""
        ...

    def check_wait(self, request: Request[Any]) -> None:
        """Raise `WaitEnded` if this request waits, and none may any more."""
        ...


class Channel:
    """One socket and its conversation, used by one thread at a time."""

    def __init__(self, client: Host) -> None:
        self._client = client
        self._name = client.name
        self.connection: ClientConnection = ClientConnection(
            session_id=secrets.token_bytes(16), process=process_id(), token=client.token, name=client.name
        )
        self.sock: socket.socket | None = None
        self._within = 0.0  # seconds that a call on it waits; none was told yet
        self.idle_since: float = 0.0  # when the last call on it was over
        self.pushed: deque[Events | Lagged | Pong] = deque()  # what came for a watch, in order
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._attempt, self._welcomed_at = 0, -math.inf
        self._problem = dialing.NEVER_ANSWERED
        self._patience = Patience(client.rng)
        self._fresh: Connecting | None = None  # on which the server spoke while it was silent on the old connection ...
        self._previous: socket.socket | None = None  # ... which is kept until we are welcomed: nobody has died (R20)
        self._early = b""  # what it said there

    def call(self, request: Request[R], timeout: float | None) -> tuple[R, int]:
        """Ask, and wait for the answer through as many connections as it takes; the answer, and the request's id."""
        deadline = None if timeout is None else time.monotonic() + timeout
        item = self.connection.ask(request, None)
        try:
            while True:
                try:
                    if self.sock is None:
                        self._connect_for(item, deadline)
                    self._send(self.connection.encode(item), deadline)
                    answer: R = self._answer_to(item, deadline)
                    self._patience.answered()
                    return answer, item.request_id
                except OSError as error:
                    self.disconnected(error)
                    self._client.check_wait(request)
        except _Expired:
            late = out_of_time(item, cast("float", timeout), self._name, self._trouble())
            self._give_up(item)
            raise late from None
        except StoreError as error:
            self._abandon(item)
            raise with_doubt(error, item) from None
        except (TypeError, ValueError, OverflowError) as error:
            self._abandon(item)
            self.close()
            raise StoreUsageError(f"{type(item.request).__name__} cannot be sent: {error}") from None
        except BaseException:  # Ctrl-C, or a signal handler: nobody knows how much was sent or read
            self.connection.abandon(item)
            self.close()
            raise

    def _connect_for(self, item: InFlight, deadline: float | None) -> None:
        self._pause(deadline)
        self._client.check_usable()
        self._connect(item, deadline)
        self._attempt, self._welcomed_at = 0, time.monotonic()
        if not self.connection.resumed and item in self.connection.lost_for_good():
            raise ConnectionLost(
                f"the connection to {self._name} broke, and the server has since forgotten this client's session",
                maybe_applied=True,
            )
        # Without a socket nobody could be got out of here (`interrupt`): whoever wanted that has left word meanwhile.
        self._client.check_usable()
        self._client.check_wait(item.request)

    def _pause(self, deadline: float | None) -> None:
        """Pause before another attempt."""
        now = time.monotonic()
        if deadline is not None and now >= deadline:  # an attempt without time would fail at once, and so the next
            raise _Expired
        # A server that welcomes us and hangs up each time is not to be asked without a pause, either.
        if (self._attempt or now - self._welcomed_at < LASTED) and self._fresh is None:
            pause = self._patience.pause(max(self._attempt - 1, 0))
            if deadline is not None and now + pause >= deadline:
                time.sleep(deadline - now)
                raise _Expired
            time.sleep(pause)
        self._attempt += 1

    def _connect(self, item: InFlight, deadline: float | None) -> Welcome:
        fresh, self._fresh = self._fresh, None
        try:
            if fresh is None:
                check_blocking_caller(self._client.addresses.host, self._client.addresses.port)
                fresh = self._dial(deadline) if self._client.store_id is None else self._dial_again(item, deadline)
            self._take(fresh)
            return self._begin(deadline)
        finally:
            self._close_previous()

    def _dial(self, deadline: float | None) -> Connecting:
        """Make one attempt to connect to a store that was never met."""
        fresh = Connecting(self._client.addresses, self._client.context)
        try:
            self._reach(fresh, Stage.TAKEN, self._patience.attempt(0), deadline)
            self._patience.connected(time.monotonic() - fresh.began)
            self._reach(fresh, Stage.SECURED, CONNECT_TIMEOUT, deadline)
        except ssl.SSLCertVerificationError as error:
            fresh.close()
            raise self._client.fail(
                AuthenticationError(f"{self._name} has no certificate that we trust: {error.verify_message}")
            ) from None
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _reach(self, fresh: Connecting, stage: Stage, within: float, deadline: float | None) -> None:
        until = time.monotonic() + within
        if not fresh.go_on(until if deadline is None else min(until, deadline), to=stage):
            self._attempt = 0  # it had its time: the next one may pass at once
            raise TimeoutError

    def _dial_again(self, item: InFlight, deadline: float | None) -> Connecting:
        def check() -> None:
            self._client.check_usable()
            self._client.check_wait(item.request)

        fresh = self._come_back(math.inf if deadline is None else deadline, check)
        if fresh is None:
            raise _Expired
        return fresh

    def _take(self, fresh: Connecting) -> None:
        """Converse on this connection from now on."""
        sock = fresh.take()
        try:
            have_calls_wait(sock, LOOK)
            let_go_in_children(self, sock)
        except BaseException:
            sock.close()
            raise
        self.sock, self._early, self._within = sock, fresh.first_word, LOOK

    def _begin(self, deadline: float | None) -> Welcome:
        """Shake hands on a new connection."""
        self.connection.store_id = self._client.store_id
        self.connection.seen_revision = self._client.seen_revision()
        self.connection.connected(nonce=secrets.token_bytes(16))
        secure = self._client.context is not None
        try:
            return self._shake_hands(deadline)
        except ConnectionResetError as error:
            without_a_word = error.errno == errno.ECONNRESET and not self.connection.met
            self._drop()
            if without_a_word and secure:
                raise dialing.HungUp from None
            if without_a_word and self._client.store_id is None:
                raise dialing.LeftWithoutAWord from None
            raise
        except _Expired:
            if not self.connection.met and not secure:
                self._problem = dialing.SAYS_NOTHING
            self._drop()
            raise
        except BaseException:
            self._drop()  # half a handshake is no connection that the next call could use
            raise

    def _shake_hands(self, deadline: float | None) -> Welcome:
        while True:
            for item in self.receive(deadline):
                if isinstance(item, bytes):
                    self._send(item)
                elif isinstance(item, Welcome):
                    self._client.store_id = self.connection.store_id
                    return item

    def _answer_to(self, item: InFlight, deadline: float | None) -> Any:
        answer: Response | None = None
        while answer is None:
            count = self._read(deadline)
            try:
                answer = self.connection.only_answer(self._buffer[:count], item)
            except ProtocolError as error:
                raise self._client.fail(error) from None
            if answer is not None:
                break
            for received in self._received(count):
                if isinstance(received, Reply):
                    if self.connection.answered(received.request_id) is item:
                        answer = received.response
                elif isinstance(received, (Events, Lagged)):
                    self.pushed.append(received)
                elif isinstance(received, Bye):
                    self._problem = received.reason
        if type(answer) is Failed:
            raise cast("StoreError", error_of(answer))
        return answer

    def receive(self, deadline: float | None) -> Iterator[bytes | Welcome | Reply | Events | Lagged | Bye]:
        """What the next bytes from the server say, waiting for them until the deadline.

        Raises:
            OSError: The connection is lost.
            _Expired: Nothing came in time.
        """
        yield from self._received(self._read(deadline))

    def _received(self, count: int) -> Iterator[bytes | Welcome | Reply | Events | Lagged | Bye]:
        try:
            yield from self.connection.receive(self._buffer[:count])
        except (AuthenticationError, ProtocolError) as error:
            if self._client.store_id is not None and self.connection.welcomed is None:
                # Whoever stands in the place of a store that was met has proved nothing: it may be back later.
                raise dialing.TurnedAway(str(error)) from None
            raise self._client.fail(error) from None
        except StoreReplaced as error:
            raise self._client.fail(error) from None
        except LimitExceeded as error:  # the server is full, and may have room later
            raise dialing.TurnedAway(str(error)) from None

    def _read(self, deadline: float | None) -> int:
        assert self.sock is not None
        if self._early:
            early, self._early = self._early, b""
            self._buffer[: len(early)] = early
            return len(early)
        now = time.monotonic()
        pulse: Pulse | None = None  # as a rule the answer is there sooner
        while True:
            within = LOOK
            if deadline is not None and deadline - now < LOOK:
                within = deadline - now
                if within <= 0:
                    raise _Expired
            if within != self._within:
                have_calls_wait(self.sock, within)
                self._within = within
            try:
                count = self.sock.recv_into(self._buffer)
            except (TimeoutError, BlockingIOError):
                if pulse is None:
                    pulse = self._pulse(now)
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise _Expired from None
                self._look_up(self.sock, pulse, now, deadline)
                now = time.monotonic()
            else:
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
                if pulse is not None:
                    pulse.heard(time.monotonic(), expecting=False)
                return count

    def _pulse(self, since: float) -> Pulse:
        """Begin to take the pulse of this connection, on which somebody has been reading since then."""
        greeted = self.connection.welcomed is not None
        heartbeats = 2.0 ** min(max(self._attempt - 1, 0), 4)
        pulse = Pulse(self._patience, since, heartbeats=heartbeats, probes=False)
        expected = not greeted or any(not waits(item.request) for item in self.connection.in_flight.values())
        if expected and self._client.store_id is not None:
            pulse.expect(since)
        return pulse

    def _look_up(self, sock: socket.socket, pulse: Pulse, now: float, deadline: float | None) -> None:
        """Nothing has come for a moment: ask for a word, look for a fresh connection, or give this one up.

        Raises:
            ConnectionResetError: A fresh connection was found, or this one has been silent for too long.
        """
        under_way, held_back = queued_bytes(sock)
        unsent = under_way + held_back
        greeted = self.connection.welcomed is not None
        line = Line(
            unsent_bytes=unsent,
            held_back=held_back > 0 and not under_way,
            acknowledged=SYSTEM_TELLS and not unsent and not holds_unreadable(sock),
            greeted=greeted,
        )
        verdict = pulse.look(now, line)
        if verdict.say is Say.PING:
            if not unsent:  # else that asks
                self._tell(Ping())
            if self._client.store_id is not None:
                pulse.expect(now)
        elif verdict.say is Say.HANG_UP:
            raise ConnectionResetError(f"it has been silent for {now - pulse.heard_at:.0f} s")
        elif verdict.say is Say.SEEK:
            until = now + HEARTBEAT
            fresh = self._come_back(min(until, deadline or until), self._client.check_usable, beside=sock)
            if fresh is None:
                pulse.seeking = False
                return
            self._fresh, self._previous, self.sock = fresh, sock, None
            self._patience.changed_connection()
            raise ConnectionResetError("it was silent, and a fresh connection was not")

    def _come_back(
        self, until: float, check: Callable[[], None], beside: socket.socket | None = None
    ) -> Connecting | None:
        """Connect until the store, which was met before, speaks on a connection; see `greeted`."""
        addresses, context, tell = self._client.addresses, self._client.context, partial(setattr, self, "_problem")
        return greeted(addresses, context, self._patience, until=until, check=check, on_problem=tell, beside=beside)

    def _send(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a frame within the caller's time, as long as the server takes some of it every now and then.

        Raises:
            _Expired: The caller's time is over. The connection is closed: half a frame is on it.
        """
        assert self.sock is not None
        sent = send_at_once(self.sock, frame)
        if sent == len(frame):
            return
        rest = memoryview(frame)[sent:]
        stuck = 0.0
        while rest:  # not sendall(), whose timeout is for all of it: a large value may take longer
            within = LOOK
            if deadline is not None:
                within = max(min(deadline - time.monotonic(), LOOK), 0.001)
            if within != self._within:
                have_calls_wait(self.sock, within)
                self._within = within
            try:
                rest = rest[self.sock.send(rest) :]
                stuck = 0.0
            except (TimeoutError, BlockingIOError):
                stuck += within
            if rest and deadline is not None and time.monotonic() >= deadline:
                self.disconnected(TimeoutError())
                raise _Expired
            if stuck >= HEARTBEAT:  # a server that takes nothing for so long is as good as gone
                raise TimeoutError

    def _tell(self, request: Request[Response]) -> None:
        """Make a request whose answer nobody waits for."""
        item = self.connection.ask(request, None)
        frame = self.connection.encode(item)
        self.connection.abandon(item)
        self._send(frame)

    def _trouble(self) -> str | None:
        """What is wrong with the connection, if anything is."""
        if self.sock is not None and self.connection.welcomed is not None:
            return None
        lost = "the connection is lost, " if self.connection.store_id is not None else ""
        return f"{lost}{self._problem}{self._client.addresses.where()}"

    def _give_up(self, item: InFlight) -> None:
        """Nobody waits for this answer any more; a parked wait is ended at the server, too."""
        self._abandon(item)
        if waits(item.request) and item.sent and self.connection.welcomed is not None:
            try:
                self._tell(Cancel(target=item.request_id))
            except OSError as error:
                self.disconnected(error)

    def _abandon(self, item: InFlight) -> None:
        self.connection.abandon(item)
        if self.sock is None:
            # Once more: what is abandoned while there is no connection will never be answered, and what stays
            # unanswered would keep all later replies from being acknowledged.
            self.connection.disconnected()

    def disconnected(self, error: OSError) -> None:
        """The connection is gone; the next call makes another one, or takes the fresh one that was found."""
        self._problem = dialing.describe(error)
        self._drop()

    def close(self, *, farewell: bool = False) -> None:
        """Close the socket. The conversation can go on over another one."""
        self._drop(farewell=farewell)
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            fresh.close()
        self._close_previous()

    def _drop(self, *, farewell: bool = False) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            if farewell:
                with contextlib.suppress(OSError):
                    sock.sendall(wire.encode_bye("done"))
            sock.close()
        self._early = b""
        self.pushed.clear()
        self.connection.disconnected()

    def _close_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.close()

    def interrupt(self) -> None:
        """From another thread: whoever reads here gets out."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
