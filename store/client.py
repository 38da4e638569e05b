"""Shell: connect, reconnect, requests as awaitables, watches as async iterators.

One task makes connections, one after the other, each with a jittered pause before it; bytes go between the socket and
the sans-I/O `ClientConnection`, which knows what must be sent again. A call is a future in its `InFlight` record, so a
caller neither sees nor minds a reconnect that happens while it waits. What it can see, at the end of its own timeout,
is `ConnectionLost`, which says whether the request may have been applied.

A watch survives reconnects by asking for what came after the last revision it saw. When that is no longer kept, it
tells its reader to forget everything (`reset`) and begins with a snapshot again, or, if it was opened without one, ends
with `WatchCompacted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import anyio

from store import interface, messages, wire
from store.address import Address
from store.connection import ClientConnection, InFlight, WatchCursor, error_of
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
    WatchCompacted,
)
from store.messages import Cancel, Event, Ping, Pong, Request, Response, Wait, Watching
from store.sockets import let_go_in_children, prepare
from store.wire import Bye, Events, Lagged, Reply, Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import TracebackType
    from typing import Self

__all__ = ["Client", "Dial", "connect"]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 30.0
HEARTBEAT = 5.0  # seconds of silence before we ask, and again before we hang up
BACKOFF_FIRST = 0.1  # seconds; the first pause is up to so long, and each further one up to twice as long ...
BACKOFF_MOST = 2.0  # ... up to this. Full jitter, so that thousands do not come back at once
IN_FLIGHT_MAX = 2048  # requests; below what a server keeps replies for, so that it never has to refuse one
WATCH_BUFFER_BYTES = 16 * 1024 * 1024  # events read but not yet taken by a watch's reader

R = TypeVar("R", bound=Response)


class Dial(Protocol):
    """How a connection is made; tests on virtual time bring their own."""

    def __call__(
        self, protocol_factory: Callable[[], asyncio.Protocol], /
    ) -> Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]:
        """Connect and give what `loop.create_connection` gives."""
        ...


def dial(address: Address, tls: ssl.SSLContext | None) -> Dial:
    """A way to connect to an address over TCP, with TLS if it asks for it."""
    context = (tls or ssl.create_default_context()) if address.secure else None

    async def dial_tcp(
        protocol_factory: Callable[[], asyncio.Protocol],
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        # A name may have a dead IPv6 address and a live IPv4 one; uvloop tries them one after the other by itself.
        options: dict[str, Any] = {"happy_eyeballs_delay": 0.25} if isinstance(loop, asyncio.BaseEventLoop) else {}
        return await loop.create_connection(protocol_factory, address.host, address.port, ssl=context, **options)

    return dial_tcp


class _Wire(asyncio.Protocol):
    """One connection as asyncio sees it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)
            let_go_in_children(self, sock)
        self._client._connected(self)

    def data_received(self, data: bytes) -> None:
        self._client._received(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)

    def pause_writing(self) -> None:
        self._client._writable.clear()

    def resume_writing(self) -> None:
        self._client._writable.set()


class Client(interface.Store):
    """A connection to a store that comes back by itself; use it as `async with store.connect(url) as client`.

    Args:
        dial: How to connect.
        name: The address, for error messages.
        token: What is proven to the server, and asked of it.
        timeout: Seconds that every call without its own `timeout` may take.
        connect_timeout: Seconds that the first connection may take; without it, as `timeout`.
        rng: For the jitter of reconnecting.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        name: str,
        token: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._dial = dial
        self._name = name
        self._timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._rng = rng or random.Random()
        self._connection = ClientConnection(session_id=secrets.token_bytes(16), token=token, name=name)
        self._wire: _Wire | None = None
        self._ready = False  # welcomed: requests may be written
        self._out: list[bytes] = []
        self._flushing = False
        self._watching: dict[Watch, None] = {}  # every watch between its opening and its closing
        self._watches: dict[int, Watch] = {}  # those open at the server, by request id
        self._failed: StoreError | None = None  # why this client is of no more use
        self._last_problem = "it has never answered"
        self._heard_at = 0.0
        self._pid = os.getpid()
        self._welcomed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._room = asyncio.Event()
        self._room.set()
        self._task: asyncio.Task[None] | None = None
        self._on_connection: list[Callable[[bool], None]] = []

    # ------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._stay_connected(), name=f"store client of {self._name}")
        self._task.add_done_callback(self._task_ended)
        try:
            await self._first_welcome()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _first_welcome(self) -> None:
        with anyio.move_on_after(self._connect_timeout):
            await self._welcomed.wait()
        if self._failed is not None:
            raise self._failed
        if not self._welcomed.is_set():
            raise ConnectionLost(
                f"no store at {self._name} within {self._connect_timeout:g} s: {self._last_problem}",
                maybe_applied=False,
            )

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A defect of ours must not leave callers waiting; `aclose` raises it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(ConnectionLost(f"the client of {self._name} has failed: {error!r}", maybe_applied=False))

    async def aclose(self) -> None:
        """Hang up for good; everything that still waits gets `ConnectionLost`."""
        if self._ready and self._wire is not None and self._wire.transport is not None:
            self._flush()
            self._wire.transport.write(wire.encode_bye("done"))
        self._fail(ConnectionLost(f"the client of {self._name} is closed", maybe_applied=False))
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def connected(self) -> bool:
        """Whether the store is in reach now."""
        return self._ready

    @property
    def store_id(self) -> str | None:
        """The identity of the store, once it has been met."""
        return self._connection.store_id

    @property
    def seen_as(self) -> str | None:
        """The address from which the store sees this client come."""
        welcomed = self._connection.welcomed
        return welcomed.address if welcomed else None

    @property
    def failure(self) -> StoreError | None:
        """Why this client is of no more use, if so: the store was replaced, say, or refused it."""
        return self._failed

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call back with True after each welcome, and with False after each loss."""
        self._on_connection.append(callback)

    def time(self) -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost, until the client is closed or of no use."""
        attempt = 0
        while self._failed is None:
            try:
                link = await self._open()
            except ssl.SSLCertVerificationError as error:
                self._fail(
                    AuthenticationError(f"{self._name} has no certificate that we trust: {error.verify_message}")
                )
            except (OSError, UnicodeError) as error:
                self._last_problem = in_words(error)
            else:
                welcomed = await self._converse(link)
                if welcomed:
                    attempt = 0
            if self._failed is None:
                most = min(BACKOFF_FIRST * 2**attempt, BACKOFF_MOST)
                attempt += 1
                await anyio.sleep(self._rng.uniform(0, most))

    async def _open(self) -> _Wire:
        """Make one connection, within the time limit of a call."""
        with anyio.fail_after(self._timeout):
            _, protocol = await self._dial(lambda: _Wire(self))
        return cast("_Wire", protocol)

    def _connected(self, link: _Wire) -> None:
        """The server speaks first, perhaps before the task that connects hears of the connection."""
        self._wire = link
        self._heard_at = self.time()
        self._connection.connected(nonce=secrets.token_bytes(16))

    async def _converse(self, link: _Wire) -> bool:
        """Carry one connection from its first byte to its last; whether it got as far as a welcome."""
        assert link.transport is not None
        try:
            while not link.closed.done():
                await asyncio.wait([link.closed], timeout=HEARTBEAT)
                silence = self.time() - self._heard_at
                if link.closed.done():
                    break
                if silence >= 2 * HEARTBEAT:
                    self._last_problem = f"it has been silent for {silence:.0f} s"
                    link.transport.abort()
                    break
                if silence >= HEARTBEAT and self._ready:
                    self._send(self._connection.ask(Ping(), None))
            if link.closed.done() and link.closed.result() is not None:
                self._last_problem = in_words(link.closed.result())
        finally:
            link.transport.abort()
            welcomed = self._ready
            self._disconnected(link)
        return welcomed

    def _disconnected(self, link: _Wire) -> None:
        if self._wire is not link:
            return
        self._wire = None
        was_ready, self._ready = self._ready, False
        self._out.clear()
        self._writable.set()
        self._connection.disconnected()
        self._make_room()
        for watch in self._watching:
            watch.interrupted()
        if was_ready:
            log.debug("the connection to %s is lost: %s", self._name, self._last_problem)
            for callback in self._on_connection:
                callback(False)

    def _fail(self, error: StoreError) -> None:
        """This client is of no more use: everyone who waits is told why."""
        if self._failed is not None:
            return
        self._failed = error
        self._welcomed.set()
        self._room.set()
        for item in list(self._connection.in_flight.values()):
            self._connection.answered(item.request_id)
            _settle(item, _with_doubt(error, item))
        for watch in self._watching:
            watch._end(error)
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.close()

    # ------------------------------------------------------------------------------------------ bytes in

    def _received(self, link: _Wire, data: bytes) -> None:
        if link is not self._wire:
            return
        self._heard_at = self.time()
        try:
            for item in self._connection.receive(data):
                match item:
                    case Reply(request_id=request_id, response=response):
                        self._replied(request_id, response)
                    case Events(request_id=watch_id, events=events):
                        if watch_id in self._watches:
                            self._watches[watch_id].deliver(events)
                    case Lagged(request_id=watch_id, revision=revision):
                        if watch_id in self._watches:
                            self._watches[watch_id].lagged(revision)
                    case Welcome():
                        self._take_welcome(item)
                    case Bye(reason=reason):
                        self._last_problem = reason
                    case bytes():
                        assert link.transport is not None
                        link.transport.write(item)
        except (AuthenticationError, StoreReplaced) as error:
            self._fail(error)
        except ProtocolError as error:
            self._fail(error)
        except LimitExceeded as error:
            # The server is full: it may have room later, so this is a reason to try again, within the caller's time.
            self._last_problem = str(error)
            assert link.transport is not None
            link.transport.close()

    def _take_welcome(self, welcome: Welcome) -> None:
        """The conversation begins: what was asked before, and has no answer, is asked again in the same order."""
        self._ready = True
        self._welcomed.set()
        if not welcome.resumed:
            for item in self._connection.lost_for_good():
                message = (
                    f"the connection to {self._name} broke, and the server has since forgotten this client's session"
                )
                _settle(item, ConnectionLost(message, maybe_applied=True))
        for item in self._connection.to_send_again():
            self._send(item)
        for watch in self._watching:
            watch.resume()
        for callback in self._on_connection:
            callback(True)

    def _replied(self, request_id: int, response: Response) -> None:
        item = self._connection.answered(request_id)
        self._make_room()
        if item is None:
            return
        if isinstance(response, Pong):
            # Every event up to this revision was sent before it: watches that saw none need not ask for them again.
            for watch in self._watches.values():
                watch.nothing_before(response.revision)
        if isinstance(response, Watching) and request_id in self._watches:
            self._watches[request_id].opened(response.revision)
        error = error_of(response)
        _settle(item, error if error is not None else response)

    # ------------------------------------------------------------------------------------------ bytes out

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `Store.call`."""
        if timeout is None and not waits(request):
            timeout = self._timeout
        self._check_usable()
        while len(self._connection.in_flight) >= IN_FLIGHT_MAX or not self._writable.is_set():
            await self._wait_for_room(timeout)
            self._check_usable()
        item, answer = self._ask(request, timeout)
        try:
            return await answer
        except asyncio.CancelledError:
            self._abandon(item)
            raise

    def _ask(self, request: Request[R], timeout: float | None) -> tuple[InFlight, asyncio.Future[R]]:
        """Send a request now, or as soon as there is a connection; its answer, or its error, is the future's."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        item = self._connection.ask(request, answer)
        if timeout is not None:
            timer = loop.call_later(timeout, self._time_out, item, timeout)
            answer.add_done_callback(lambda _: timer.cancel())
        if self._ready:
            self._send(item)
        return item, answer

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsedAfterFork(f"this client of {self._name} was made before fork(); make a new one in the child")
        if self._failed is not None:
            raise fresh(self._failed)

    async def _wait_for_room(self, timeout: float | None) -> None:
        """Hold a caller back while too much is in flight, or the socket takes no more."""
        with anyio.move_on_after(timeout) as scope:
            if not self._writable.is_set():
                await self._writable.wait()
            else:
                self._room.clear()
                await self._room.wait()
        if scope.cancelled_caught:
            raise StoreTimeoutError(
                f"{len(self._connection.in_flight)} requests to {self._name} are in flight, and none was answered within "
                f"{timeout:g} s",
                maybe_applied=False,
            )

    def _make_room(self) -> None:
        if not self._room.is_set() and len(self._connection.in_flight) < IN_FLIGHT_MAX:
            self._room.set()

    def _send(self, item: InFlight) -> None:
        """Queue a request; all that is asked in one turn of the loop is written at once."""
        try:
            self._out.append(self._connection.encode(item))
        except (LimitExceeded, StoreError) as error:
            _settle(item, error)
        except (TypeError, ValueError, OverflowError) as error:
            self._connection.abandon(item)
            self._connection.answered(item.request_id)
            _settle(item, StoreUsageError(f"{type(item.request).__name__} cannot be sent: {error}"))
        else:
            if not self._flushing:
                self._flushing = True
                asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self._wire is not None and self._wire.transport is not None:
            out, self._out = self._out, []
            self._wire.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _time_out(self, item: InFlight, timeout: float) -> None:
        """A caller's time is over."""
        maybe = item.mutates and item.sent
        what = f"{type(item.request).__name__} at {self._name}"
        if self._ready:
            error: StoreError = StoreTimeoutError(f"no answer to {what} within {timeout:g} s", maybe_applied=maybe)
        else:
            error = ConnectionLost(
                f"{what} was not answered within {timeout:g} s: the connection is lost, {self._last_problem}",
                maybe_applied=maybe,
            )
        self._abandon(item)
        _settle(item, error)

    def _abandon(self, item: InFlight) -> None:
        """Nobody waits for this reply any more."""
        self._connection.abandon(item)
        if item.sent and self._ready and waits(item.request):
            self._connection.answered(item.request_id)
            self._send(self._connection.ask(Cancel(target=item.request_id), None))
        self._make_room()

    # ------------------------------------------------------------------------------------------ watches

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`."""
        return Watch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))


class Watch(interface.Watch):
    """A watch on one client; see `interface.Watch`. Events that its reader has not taken yet are bounded in bytes."""

    def __init__(self, client: Client, cursor: WatchCursor) -> None:
        self._client = client
        self._cursor = cursor
        self._id: int | None = None  # the request that it is open under, on this connection
        self._opening: asyncio.Task[None] | None = None
        self._batches: deque[list[Event]] = deque()
        self._held_bytes = 0
        self._overrun = False  # closed at the server until the reader has caught up
        self._news = asyncio.Event()
        self._ended: StoreError | None = None

    async def __aenter__(self) -> Self:
        self._client._watching[self] = None
        try:
            await self._open()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._watching.pop(self, None)
        self._end(StoreUsageError("the watch is closed"))
        if self._opening is not None:
            self._opening.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._opening])
        self._close()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """One list of events per revision; see `interface.Watch`."""
        while True:
            while self._batches:
                events = self._batches.popleft()
                self._held_bytes -= _size(events)
                yield events
            if self._overrun:
                self._overrun = False
                self.resume()
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()

    # The client calls these, from the loop.

    def opened(self, revision: int) -> None:
        """The server has opened it."""
        self._cursor.opened(revision)

    def deliver(self, events: tuple[Event, ...]) -> None:
        """Events have come. If the reader is too far behind, no more are taken; the server has them."""
        self._cursor.delivered(events)
        self._push(list(events))
        if self._held_bytes > WATCH_BUFFER_BYTES and self._cursor.resumable:
            self._overrun = True
            self._close()

    def lagged(self, revision: int) -> None:
        """The server has ended it because we read too slowly; what there was up to `revision` is here."""
        self._cursor.nothing_before(revision)
        self._release()
        self.resume()

    def nothing_before(self, revision: int) -> None:
        """Whatever there was up to this revision has come."""
        if self._id is not None and self._id not in self._client._connection.in_flight:
            self._cursor.nothing_before(revision)

    def interrupted(self) -> None:
        """The connection is gone. If the server never answered, the request itself is sent again."""
        if self._id is not None and self._id not in self._client._connection.in_flight:
            self._release()

    def resume(self) -> None:
        """Open it again if it is not open."""
        if self._id is None and self._ended is None and not self._overrun and self._client.connected:
            self._opening = asyncio.create_task(self._reopen())

    def _end(self, error: StoreError) -> None:
        if self._ended is None:
            self._ended = error
        self._news.set()

    def _push(self, events: list[Event]) -> None:
        self._batches.append(events)
        self._held_bytes += _size(events)
        self._news.set()

    async def _reopen(self) -> None:
        try:
            await self._open()
        except WatchCompacted as error:
            if self._cursor.compacted():
                self.resume()
            else:
                self._end(error)
        except ConnectionLost:
            pass  # the next welcome resumes it
        except StoreError as error:
            self._end(error)

    async def _open(self) -> None:
        """Ask for it. Events may come before this returns: they are known by the id of the request."""
        client = self._client
        request, reset = self._cursor.opening()
        if reset is not None:
            self._push([reset])
        item, answer = client._ask(request, client._timeout)
        self._id = item.request_id
        client._watches[self._id] = self
        try:
            await answer
        except asyncio.CancelledError:
            client._abandon(item)
            self._close()
            raise
        except StoreError:
            self._release()
            raise

    def _close(self) -> None:
        """End it at the server, too."""
        if self._id is not None and self._client._ready:
            self._client._send(self._client._connection.ask(Cancel(target=self._id), None))
        self._release()

    def _release(self) -> None:
        if self._id is not None:
            self._client._watches.pop(self._id, None)
            self._id = None


def _settle(item: InFlight, outcome: Response | StoreError) -> None:
    """Give a waiting caller its response or its error, if it still waits."""
    future = item.waiter
    if future is None or future.done():
        return
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _with_doubt(error: StoreError, item: InFlight) -> StoreError:
    """The error for one caller: whether its own request may have been applied."""
    if isinstance(error, ConnectionLost):
        return type(error)(str(error), maybe_applied=item.mutates and item.sent)
    return error


def fresh(error: StoreError) -> StoreError:
    """The same error, for a request that was never sent, without the traceback of an earlier raise."""
    if isinstance(error, ConnectionLost):
        return type(error)(str(error), maybe_applied=False)
    return type(error)(str(error))


def waits(request: Request[Any]) -> bool:
    inner = request.request if isinstance(request, messages.Guarded) else request
    return isinstance(inner, Wait)


def _size(events: list[Event]) -> int:
    return sum(200 + len(event.key) + len(event.value) for event in events)


def in_words(error: BaseException) -> str:
    """An operating-system error as a person would say it."""
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, ConnectionResetError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def connect(
    url: str,
    *,
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> AsyncIterator[Client]:
    """Connect to a store, retrying within `timeout`, and stay connected for as long as the context lasts.

    Args:
        url: `tcp://host:port`, or `tcps://host:port` for TLS.
        token: What this client proves to know, and asks the server to prove.
        tls: A client-side context for `tcps`; without it the system's certificates are trusted.
        timeout: Seconds for connecting, and for every call that has no `timeout` of its own.

    Raises:
        ConnectionLost: Nobody answered in time.
        AuthenticationError: The server refused the token, or could not prove that it knows it.
        ProtocolError: What answers is not a store, or one of another version.
    """
    address = Address.parse(url)
    secret = token.encode() if isinstance(token, str) else token
    async with Client(dial(address, tls), name=str(address), token=secret, timeout=timeout) as client:
        yield client
