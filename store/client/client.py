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
import logging
import os
import random
import secrets
import ssl
from collections import deque
from typing import TYPE_CHECKING, TypeVar, cast

import anyio

from store import interface, messages
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
    unsent,
)
from store.interface import DEFAULT_TIMEOUT
from store.messages import Cancel, Event, Ping, Pong, Request, Response, Watching, key_bytes, waits
from store.net.dialing import NEVER_ANSWERED, SAYS_NOTHING, HungUp, LeftWithoutAWord, backoff, describe
from store.net.sockets import forget, let_go_in_children, prepare
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType
    from typing import Self

    from store.net.dialing import Dial

__all__ = ["Client"]

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds of silence before we ask, and again before we hang up
IN_FLIGHT_MAX = 2048  # requests; below what a server keeps replies for, so that it never has to refuse one
WATCH_BUFFER_BYTES = 16 * 1024 * 1024  # events read but not yet taken by a watch's reader

R = TypeVar("R", bound=Response)


class _Wire(asyncio.Protocol):
    """One connection as asyncio sees it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._early: list[bytes] | None = []  # what came before the client took this connection up
        self._heard = False
        self._secure = False
        self.transport: asyncio.Transport | None = None
        self.farewell = ""  # why it is to end, as far as that was said
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._secure = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)
            let_go_in_children(self, sock)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._early is not None:
            self._early.append(data)
        else:
            self._client._received(self, data)

    def taken_up(self) -> None:
        """The client converses on this connection from now on.

        The server speaks first, and may have done so already: the last packet of a TLS handshake can bring its
        greeting, before whoever awaits the handshake gets to run.
        """
        early, self._early = self._early or [], None
        for data in early:
            self._client._received(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        forget(self)
        if not self.closed.done():
            self.closed.set_result(error)

    @property
    def mute(self) -> bool:
        """Whether a server without TLS has not said a word yet."""
        return not self._heard and not self._secure

    def reason(self) -> str:
        """Why it ended."""
        error: Exception = (self.closed.result() if self.closed.done() else None) or ConnectionResetError()
        if not self._heard and isinstance(error, ConnectionResetError):
            if self._secure:
                error = HungUp()
            elif self._client.store_id is None:
                error = LeftWithoutAWord()
        return self.farewell or describe(error)

    def pause_writing(self) -> None:
        self._client._may_write(self, writable=False)

    def resume_writing(self) -> None:
        self._client._may_write(self, writable=True)


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
        self._last_problem = NEVER_ANSWERED
        self._heard_at = 0.0
        self._pid = os.getpid()
        self._welcomed = asyncio.Event()
        self._writable = True  # the socket takes more
        self._parked: set[int] = set()  # the waits among the requests in flight: they may last, and hold up nobody
        self._turns: dict[asyncio.Future[None], None] = {}  # callers that wait for room, first come first served
        self._turns_given = 0  # to callers that have not asked yet
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
                f"no store at {self._name} within {self._connect_timeout:g} s: {self._what_is_wrong()}",
                maybe_applied=False,
            )

    def _what_is_wrong(self) -> str:
        """Why this client has not been welcomed. How an earlier connection ended says more than that this stands."""
        mute = self._wire is not None and self._wire.mute
        return SAYS_NOTHING if mute and self._last_problem == NEVER_ANSWERED else self._last_problem

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
        """Call back with True after each welcome, with False after each loss, and when the client is of no more use."""
        self._on_connection.append(callback)

    def time(self) -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost, until the client is closed or of no use."""
        attempt, away_since = 0, self.time()
        while self._failed is None:
            try:
                link = await self._open()
            except ssl.SSLCertVerificationError as error:
                self._fail(
                    AuthenticationError(f"{self._name} has no certificate that we trust: {error.verify_message}")
                )
            except (OSError, UnicodeError) as error:
                self._last_problem = describe(error)
            else:
                welcomed = await self._converse(link)
                if welcomed:
                    attempt, away_since = 0, self.time()
            if self._failed is None:
                await anyio.sleep(self._rng.uniform(0, backoff(attempt, away=self.time() - away_since)))
                attempt += 1

    async def _open(self) -> _Wire:
        """Make one connection, within the time limit of a call."""
        with anyio.fail_after(self._timeout):
            _, protocol = await self._dial(lambda: _Wire(self))
        return cast("_Wire", protocol)

    async def _converse(self, link: _Wire) -> bool:
        """Carry one connection from its first byte to its last; whether it got as far as a welcome."""
        self._wire = link
        self._heard_at = self.time()
        self._connection.connected(nonce=secrets.token_bytes(16))
        assert link.transport is not None
        asked_at: float | None = None
        held = 0
        try:
            link.taken_up()
            while not link.closed.done():
                await asyncio.wait([link.closed], timeout=HEARTBEAT)
                now = self.time()
                held_before, held = held, link.transport.get_write_buffer_size()
                if held != held_before:
                    self._heard_at = now  # it takes what we send, which may be a large value over a slow network
                silence = now - self._heard_at
                if asked_at is not None and asked_at <= self._heard_at:
                    asked_at = None
                # Silence counts only after a question: before it, it may be ours, who were busy and asked nothing.
                unanswered = now - asked_at if asked_at is not None else 0.0 if self._ready else silence
                if link.closed.done():
                    break
                if unanswered >= HEARTBEAT and silence >= 2 * HEARTBEAT:
                    hint = "; if it speaks TLS, write tcps://" if link.mute and self.store_id is None else ""
                    link.farewell = f"it has been silent for {silence:.0f} s{hint}"
                    link.transport.abort()
                    break
                # Watches want to hear how far the store has come, also while others keep the connection busy.
                if self._ready and asked_at is None and (silence >= HEARTBEAT or self._watches):
                    asked_at = now
                    self._send(self._connection.ask(Ping(), None))
        finally:
            link.transport.abort()
            self._last_problem = link.reason()
            welcomed = self._ready
            self._disconnected(link)
        return welcomed

    def _disconnected(self, link: _Wire) -> None:
        if self._wire is not link:
            return
        self._wire = None
        was_ready, self._ready = self._ready, False
        self._out.clear()
        self._writable = True
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
        while self._turns:
            self._give_turn()
        for item in list(self._connection.in_flight.values()):
            self._connection.answered(item.request_id)
            _settle(item, with_doubt(error, item))
        for watch in self._watching:
            watch._end(error)
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.close()
        for callback in self._on_connection:
            callback(False)

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
                        link.farewell = reason
                    case bytes():
                        assert link.transport is not None
                        link.transport.write(item)
        except (AuthenticationError, StoreReplaced) as error:
            self._fail(error)
        except ProtocolError as error:
            self._fail(error)
        except LimitExceeded as error:
            # The server is full: it may have room later, so this is a reason to try again, within the caller's time.
            link.farewell = str(error)
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
        self._parked.discard(request_id)
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
        if self._turns or not self._has_room():
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
        if waits(request):
            self._parked.add(item.request_id)
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
            raise unsent(self._failed)

    def _has_room(self) -> bool:
        asked = len(self._connection.in_flight) - len(self._parked)
        return self._writable and asked + self._turns_given < IN_FLIGHT_MAX

    async def _wait_for_room(self, timeout: float | None) -> None:
        """Hold a caller back while too much is in flight, or the socket takes no more."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[turn] = None
        its_turn = False
        try:
            with anyio.move_on_after(timeout):
                await turn
                its_turn = True
        finally:
            self._turns.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self._turns_given -= 1
            if not its_turn:
                self._make_room()  # for the next one
        if not its_turn:
            raise StoreTimeoutError(
                f"{len(self._connection.in_flight)} requests to {self._name} are in flight, and there was no room for "
                f"another within {timeout:g} s",
                maybe_applied=False,
            )

    def _make_room(self) -> None:
        while self._turns and self._has_room():
            self._give_turn()

    def _give_turn(self) -> None:
        turn = next(iter(self._turns))
        del self._turns[turn]
        if not turn.done():
            self._turns_given += 1
            turn.set_result(None)

    def _may_write(self, link: _Wire, *, writable: bool) -> None:
        """The socket takes no more, or takes more again."""
        if link is self._wire:
            self._writable = writable
            self._make_room()

    def _send(self, item: InFlight) -> None:
        """Queue a request; all that is asked in one turn of the loop is written at once."""
        try:
            self._out.append(self._connection.encode(item))
        except StoreError as error:
            self._parked.discard(item.request_id)
            _settle(item, error)
        except (TypeError, ValueError, OverflowError) as error:
            self._connection.abandon(item)
            self._connection.answered(item.request_id)
            self._parked.discard(item.request_id)
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
        if isinstance(item.request, messages.Watch) or item.request_id in self._parked:
            # It would stay at the server, and for ever if it were asked again after a reconnect.
            self._parked.discard(item.request_id)
            self._connection.answered(item.request_id)
            if item.sent and self._ready:
                self._send(self._connection.ask(Cancel(target=item.request_id), None))
        elif not self._ready:
            self._connection.disconnected()  # once more: what is abandoned meanwhile is not asked again, either
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
        self._client._check_usable()
        self._client._watching[self] = None
        try:
            await self._open(self._client._timeout)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._watching.pop(self, None)
        self._end(StoreUsageError("the watch is closed"))
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([opening])
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
            self._opening = asyncio.create_task(self._reopen(), name=f"reopen a watch at {self._client._name}")
            self._opening.add_done_callback(self._reopened)

    def _end(self, error: StoreError) -> None:
        if self._ended is None:
            self._ended = error
        self._news.set()

    def _push(self, events: list[Event]) -> None:
        self._batches.append(events)
        self._held_bytes += _size(events)
        self._news.set()

    async def _reopen(self) -> None:
        """Open it again, however long the server takes: if that is too long, the connection ends, not the watch."""
        try:
            await self._open(None)
        except WatchCompacted as error:
            if self._cursor.compacted():
                self.resume()
            else:
                self._end(error)
        except ConnectionLost:
            pass  # the client has failed, and has told this watch
        except StoreError as error:
            self._end(error)

    def _reopened(self, opening: asyncio.Task[None]) -> None:
        """A defect of ours must not leave the reader waiting."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._end(ConnectionLost(f"a watch at {self._client._name} has failed: {error!r}", maybe_applied=False))

    async def _open(self, timeout: float | None) -> None:
        """Ask for it. Events may come before this returns: they are known by the id of the request."""
        client = self._client
        request, reset = self._cursor.opening()
        if reset is not None:
            self._push([reset])
        item, answer = client._ask(request, timeout)
        self._id = item.request_id
        client._watches[self._id] = self
        try:
            await answer
        except asyncio.CancelledError:
            client._abandon(item)
            self._release()
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


def with_doubt(error: StoreError, item: InFlight) -> StoreError:
    """The error for one caller: whether its own request may have been applied."""
    if isinstance(error, ConnectionLost):
        return type(error)(str(error), maybe_applied=item.mutates and item.sent)
    return unsent(error)


def _size(events: list[Event]) -> int:
    return sum(200 + key_bytes(event.key) + len(event.value) for event in events)
