"""Shell: the client for blocking callers, on sockets of its own, and the server in a thread.

A blocking call writes to its socket and reads from it: one round trip, no event loop, no other thread. The protocol,
and what happens after a reconnect, is `connection`'s, exactly as for the async client. A call takes a free channel, or
makes another one, so threads do not wait for each other's waits. A call that is interrupted, by Ctrl-C or by a signal
handler that raises, gets out at once; its channel is closed, since nobody knows how far it had come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import socket
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, cast

from store import interface
from store.client import client as async_client
from store.client import patience
from store.client.outcomes import with_doubt
from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    StoreUsageError,
    UsedAfterFork,
    WaitEnded,
    WatchCompacted,
    unsent,
)
from store.interface import DEFAULT_TIMEOUT
from store.messages import Cancel, Event, Ping, Pong, Request, Response, waits
from store.net import dialing
from store.net.callers import check_blocking_caller
from store.net.process import process_id
from store.net.sockets import let_go_in_children, prepare
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from store.net.address import Address


__all__ = ["Client", "Watch"]

RECEIVE_BYTES = 64 * 1024
HEARTBEAT = async_client.HEARTBEAT
CONNECT_TIMEOUT = 10.0  # seconds for one attempt; there may be several within a call's timeout

R = TypeVar("R", bound=Response)


class _Expired(Exception):
    """The caller's time is over; it becomes one of the public errors before it leaves this room."""


class _Channel:
    """One socket and its conversation, used by one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._name = client.name
        self.connection = ClientConnection(
            session_id=secrets.token_bytes(16), process=process_id(), token=client.token, name=client.name
        )
        self.sock: socket.socket | None = None
        self.pushed: deque[Events | Lagged | Pong] = deque()  # what came for a watch, in order
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._attempt = 0
        self._problem = "it has never answered"

    def call(self, request: Request[R], timeout: float | None) -> tuple[R, int]:
        """Ask, and wait for the answer through as many connections as it takes; the answer, and the request's id."""
        deadline = None if timeout is None else time.monotonic() + timeout
        item = self.connection.ask(request, None)
        try:
            while True:
                try:
                    self._connect_if_needed(item, deadline)
                    self._send(self.connection.encode(item), deadline)
                    return cast("R", self._answer_to(item, deadline)), item.request_id
                except OSError as error:
                    self.disconnected(error)
                    self._client.check_wait(request)
        except _Expired:
            late = self._out_of_time(item, cast("float", timeout))
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

    def _connect_if_needed(self, item: InFlight, deadline: float | None) -> None:
        if self.sock is not None:
            return
        self._pause(deadline)
        self._client.check_usable()
        welcome = self._connect(deadline)
        self._attempt = 0
        if not welcome.resumed and item in self.connection.lost_for_good():
            raise ConnectionLost(
                f"the connection to {self._name} broke, and the server has since forgotten this client's session",
                maybe_applied=True,
            )

    def _pause(self, deadline: float | None) -> None:
        """Before another attempt: up to twice as long as before the last, with full jitter."""
        if self._attempt:
            pause = self._client.rng.uniform(0, patience.backoff(self._attempt))
            if deadline is not None and time.monotonic() + pause >= deadline:
                time.sleep(max(deadline - time.monotonic(), 0))
                raise _Expired
            time.sleep(pause)
        self._attempt += 1

    def _connect(self, deadline: float | None) -> Welcome:
        address, tls = self._client.address, self._client.tls
        check_blocking_caller(address.host, address.port)
        within = CONNECT_TIMEOUT if deadline is None else max(min(deadline - time.monotonic(), CONNECT_TIMEOUT), 0.001)
        sock = socket.create_connection((address.host, address.port), timeout=within)
        try:
            prepare(sock)
            if address.secure:
                context = tls or ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=address.host)
            sock.settimeout(HEARTBEAT)
            let_go_in_children(self, sock)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise self._client.fail(
                AuthenticationError(f"{self._name} has no certificate that we trust: {error.verify_message}")
            ) from None
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        self.connection.store_id = self._client.store_id
        self.connection.seen_revision = self._client.seen_revision()
        self.connection.connected(nonce=secrets.token_bytes(16))
        try:
            return self._shake_hands(deadline)
        except ConnectionResetError as error:
            without_a_word = error.errno == errno.ECONNRESET and not self.connection.met
            self.close()
            if without_a_word and address.secure:
                raise dialing.HungUp from None
            if without_a_word and self._client.store_id is None:
                raise dialing.LeftWithoutAWord from None
            raise
        except _Expired:
            if not self.connection.met and not address.secure:
                self._problem = dialing.SAYS_NOTHING
            self.close()
            raise
        except BaseException:
            self.close()  # half a handshake is no connection that the next call could use
            raise

    def _shake_hands(self, deadline: float | None) -> Welcome:
        while True:
            for item in self.receive(deadline):
                if isinstance(item, bytes):
                    self._send(item)
                elif isinstance(item, Welcome):
                    self._client.store_id = self.connection.store_id
                    return item

    def _answer_to(self, item: InFlight, deadline: float | None) -> Response:
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
        failure = error_of(answer)
        if failure is not None:
            raise failure
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
        now = silent_since = time.monotonic()
        asked = False
        while True:
            patience = HEARTBEAT
            if deadline is not None and deadline - now < HEARTBEAT:
                patience = deadline - now
                if patience <= 0:
                    raise _Expired
            if patience != self.sock.gettimeout():
                self.sock.settimeout(patience)
            try:
                count = self.sock.recv_into(self._buffer)
            except TimeoutError:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise _Expired from None
                silence = now - silent_since
                # Silence counts only after a question: before it, it may be ours, if this process was stopped.
                if silence >= 2 * HEARTBEAT and (asked or self.connection.welcomed is None):
                    raise ConnectionResetError(f"it has been silent for {silence:.0f} s") from None
                if silence >= HEARTBEAT and not asked and self.connection.welcomed is not None:
                    asked = True
                    self._tell(Ping())
            else:
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
                return count

    def _send(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a frame within the caller's time, as long as the server takes some of it every now and then.

        Raises:
            _Expired: The caller's time is over. The connection is closed: half a frame is on it.
        """
        assert self.sock is not None
        rest = memoryview(frame)
        while rest:  # not sendall(), whose timeout is for all of it: a large value may take longer
            patience_left = HEARTBEAT  # a server that takes nothing for so long is as good as gone
            if deadline is not None:
                patience_left = max(min(deadline - time.monotonic(), HEARTBEAT), 0.001)
            if self.sock.gettimeout() != patience_left:
                self.sock.settimeout(patience_left)
            try:
                rest = rest[self.sock.send(rest) :]
            except TimeoutError as error:
                if deadline is None or time.monotonic() < deadline:
                    raise
                self.disconnected(error)
                raise _Expired from None
            if rest and deadline is not None and time.monotonic() >= deadline:
                self.disconnected(TimeoutError())
                raise _Expired

    def _tell(self, request: Request[Response]) -> None:
        """Make a request whose answer nobody waits for."""
        item = self.connection.ask(request, None)
        frame = self.connection.encode(item)
        self.connection.abandon(item)
        self._send(frame)

    def _out_of_time(self, item: InFlight, timeout: float) -> StoreError:
        what = f"{type(item.request).__name__} at {self._name}"
        maybe = item.mutates and item.sent
        if self.sock is not None and self.connection.welcomed is not None:
            return StoreTimeoutError(f"no answer to {what} within {timeout:g} s", maybe_applied=maybe)
        return ConnectionLost(
            f"{what} was not answered within {timeout:g} s: {self._what_is_wrong()}",
            maybe_applied=maybe,
        )

    def _what_is_wrong(self) -> str:
        if self.connection.store_id is not None:
            return f"the connection is lost, {self._problem}"
        return self._problem

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
        """The connection is gone; the next call makes another one."""
        self._problem = dialing.describe(error)
        self.close()

    def close(self, *, farewell: bool = False) -> None:
        """Close the socket. The conversation can go on over another one."""
        sock, self.sock = self.sock, None
        if sock is not None:
            if farewell:
                with contextlib.suppress(OSError):
                    sock.sendall(wire.encode_bye("done"))
            sock.close()
        self.pushed.clear()
        self.connection.disconnected()

    def interrupt(self) -> None:
        """From another thread: whoever reads here gets out."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class Client(interface.BlockingStore):
    """The blocking client of a store; safe to use from several threads, and reconnecting by itself.

    Args:
        address: Where the store is.
        token: What is proven to the server, and asked of it.
        tls: A client-side context for `tcps`; without it the system's certificates are trusted.
        timeout: Seconds that the first connection, and every call without its own `timeout`, may take.
        rng: For the jitter of reconnecting.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        rng: random.Random | None = None,
    ) -> None:
        self.address = address
        self.name = str(address)
        self.token = token
        self.tls = tls
        self.timeout = timeout
        self.rng = rng or random.Random()
        self.store_id: str | None = None
        self._free: list[_Channel] = []  # appending and popping are atomic, so threads need no lock
        self._all: list[_Channel] = []
        self._seen_revision = 0  # by channels that are gone
        self._failed: StoreError | None = None
        self._waiting: set[_Channel] = set()  # adding, discarding and copying are atomic, so threads need no lock
        self._waits_ended = False
        self._pid = os.getpid()

    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `BlockingStore.call`."""
        self.check_usable()
        if timeout is None and not waits(request):
            timeout = self.timeout
        channel = self.take_channel()
        if waits(request):
            self._waiting.add(channel)
        try:
            self.check_wait(request)  # once this is known to wait, so that `end_waits` misses nobody
            return channel.call(request, timeout)[0]
        finally:
            self._waiting.discard(channel)
            self._free.append(channel)
            if self._failed is not None:
                self._close_free()

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`. Each watch has a connection of its own."""
        return Watch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))

    def time(self) -> float:
        """Seconds on this machine's monotonic clock."""
        return time.monotonic()

    def close(self) -> None:
        """Hang up for good; calls under way in other threads get `ConnectionLost`."""
        self.interrupt(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        self._close_free()

    def __copy__(self) -> Client:
        """Return another client of the same store, on sockets of its own: for a forked child, say."""
        client = Client(self.address, token=self.token, tls=self.tls, timeout=self.timeout)
        client.store_id = self.store_id
        return client

    def interrupt(self, error: StoreError) -> None:
        """Make this client useless: every call under way, and every later one, raises `error`. From any thread."""
        self.fail(error)
        for channel in list(self._all):
            if channel not in self._free:
                channel.interrupt()

    def end_waits(self) -> None:
        """End every wait, now and later; see `BlockingStore.end_waits`."""
        self._waits_ended = True
        for channel in tuple(self._waiting):
            channel.interrupt()  # should it have been answered meanwhile, the next call makes another connection

    # The channels and watches of this room call these.

    def check_wait(self, request: Request[Any]) -> None:
        """Raise `WaitEnded` if this request waits, and none may any more."""
        if self._waits_ended and waits(request):
            raise WaitEnded("waits were ended here")

    def seen_revision(self) -> int:
        """The latest revision that the store has shown on any channel: it must not go back behind it."""
        channels = [channel.connection.seen_revision for channel in list(self._all)]
        return max([self._seen_revision, *channels])

    def fail(self, error: StoreError) -> StoreError:
        """This client is of no more use; the first reason counts."""
        if self._failed is None:
            self._failed = error
        return error

    def check_usable(self) -> None:
        """Raise what this client failed of, or that it was inherited over `fork()`."""
        if self._pid != os.getpid():
            raise UsedAfterFork(f"this client of {self.name} was made before fork(); make a new one in the child")
        if self._failed is not None:
            raise unsent(self._failed)

    def take_channel(self) -> _Channel:
        """A free channel, or a new one."""
        try:
            return self._free.pop()
        except IndexError:
            channel = _Channel(self)
            self._all.append(channel)
            return channel

    def _close_free(self) -> None:
        with contextlib.suppress(IndexError):  # another thread closes them, too
            while True:
                self._free.pop().close(farewell=True)

    def drop_channel(self, channel: _Channel) -> None:
        """A watch no longer needs its channel."""
        channel.close(farewell=True)
        self._seen_revision = self.seen_revision()
        with contextlib.suppress(ValueError):
            self._all.remove(channel)


class Watch(interface.BlockingWatch):
    """A watch with a connection of its own; see `interface.BlockingWatch`."""

    def __init__(self, client: Client, cursor: WatchCursor) -> None:
        self._client = client
        self._cursor = cursor
        self._channel = _Channel(client)
        self._id = 0
        self._reset: Event | None = None  # what the reader must be told once it is open again
        self._closed = False

    def __enter__(self) -> Self:
        self._client.check_usable()
        self._client._all.append(self._channel)
        try:
            self._open()
        except BaseException:
            self._client.drop_channel(self._channel)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._client.drop_channel(self._channel)

    def close(self) -> None:
        """End it from another thread: its reader's loop ends."""
        self._closed = True
        self._channel.interrupt()

    def batches(self) -> Iterator[list[Event]]:
        """One list of events per revision; see `interface.BlockingWatch`."""
        while not self._closed:
            while self._channel.pushed:
                pushed = self._channel.pushed.popleft()
                if isinstance(pushed, Pong):
                    # Every event up to this revision was sent before it: it need not be asked for again.
                    self._cursor.nothing_before(pushed.revision)
                elif pushed.request_id != self._id:
                    continue  # of an earlier opening
                elif isinstance(pushed, Events):
                    self._cursor.delivered(pushed.events)
                    yield list(pushed.events)
                else:
                    self._cursor.nothing_before(pushed.revision)
                    yield from self._reopen()
            try:
                if self._channel.sock is None:
                    yield from self._reopen()
                    continue
                for item in self._channel.receive(None):
                    if isinstance(item, (Events, Lagged)):
                        self._channel.pushed.append(item)
                    elif isinstance(item, Reply):
                        self._channel.connection.answered(item.request_id)
                        if isinstance(item.response, Pong):
                            self._channel.pushed.append(item.response)
            except OSError as error:
                self._channel.disconnected(error)

    def _reopen(self) -> Iterator[list[Event]]:
        """Open it again, however long that takes; a `reset` comes out first if history is gone."""
        while not self._closed:
            try:
                self._open()
            except WatchCompacted:
                if not self._cursor.compacted():
                    raise
            except ConnectionLost:
                self._client.check_usable()
            except StoreTimeoutError:
                self._channel.close()  # the server may open it yet, and would then send everything twice
            else:
                reset, self._reset = self._reset, None
                if reset is not None:
                    yield [reset]
                return

    def _open(self) -> None:
        request, reset = self._cursor.opening()
        self._reset = reset or self._reset  # kept until it is told: this attempt may fail, and the next knows of none
        watching, self._id = self._channel.call(request, self._client.timeout)
        self._cursor.opened(watching.revision)
