"""The awaited client of a store. A call waits on a future in its `InFlight` record, and so outlives a reconnect."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from store import interface, messages
from store.calls import checked_timeout
from store.client.reconnecting import ReconnectingClient
from store.client.timeouts import FAREWELL_WITHIN
from store.errors import ConnectionLost, StoreError, StoreTimeoutError, StoreUsageError, WatchCompacted
from store.interface import DEFAULT_TIMEOUT, NOT_OPEN
from store.messages import Cancel, Event, Ping, Pong, Request, Response, Watching, key_size, waits
from store.net.process import process_identity
from store.net.tasks import cancel_and_wait
from store.protocol import wire
from store.protocol.connection import InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from typing import Self

    from store.client.reconnecting import Connection
    from store.net.dialing import Dial
    from store.protocol.connection import Secret

IN_FLIGHT_MAX = 2048  # the most unanswered requests, except waits; half of the replies that a server keeps per client
WATCH_BUFFER_BYTES = 16 * 1024 * 1024  # bytes of unread events above which a watch closes
LARGE = 1024 * 1024  # bytes; if an abandoned request has more unsent bytes, the client reconnects
EVENT_BYTES = 200  # memory per event, besides key and value

R = TypeVar("R", bound=Response)


class Watch(interface.Watch):
    """A watch on one client, with a bounded buffer."""

    def __init__(self, client: Client, cursor: WatchCursor) -> None:
        self._client = client
        self._cursor = cursor
        self._id: int | None = None  # the id of the request that opens the watch; None if closed
        self._opening: asyncio.Task[None] | None = None
        self._batches: deque[tuple[list[Event], int]] = deque()  # unread events, with their bytes
        self._held_bytes = 0
        self._overrun = False  # True if the watch is closed at the server until the reader has emptied the buffer
        self._news = asyncio.Event()
        self._ended: StoreError | None = StoreUsageError(NOT_OPEN)

    async def __aenter__(self) -> Self:
        self._client.check_usable()
        if self in self._client.watching:
            raise StoreUsageError("the watch is open already: call watch again for another")
        self._client.watching[self] = self._ended = None
        try:
            await self._open(self._client.timeout)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.watching.pop(self, None)
        self.end(StoreUsageError(NOT_OPEN))
        opening, self._opening = self._opening, None
        if opening is not None:
            await cancel_and_wait(opening)
        self._mark_closed(at_server=True)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """See `interface.Watch.batches`."""
        for event in self._rest:
            yield [event]
        while True:
            while self._batches:
                events, size = self._batches.popleft()
                self._held_bytes -= size
                yield events
            if self._overrun:
                self._overrun = False
                self.reopen_if_closed()
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()

    def note_opened(self, revision: int) -> None:
        """Note that the server has opened the watch."""
        self._cursor.note_opened(revision)

    def deliver(self, events: tuple[Event, ...]) -> None:
        """Buffer events. If the reader is too far behind, close the watch at the server, except during a snapshot."""
        self._cursor.note_delivered(events)
        self._buffer_events(list(events))
        if self._held_bytes > WATCH_BUFFER_BYTES and self._cursor.is_resumable:
            self._overrun = True
            self._mark_closed(at_server=True)

    def reopen_after_lag(self, revision: int) -> None:
        """Reopen the watch: the server closed it because this client reads too slowly."""
        self._cursor.note_progress(revision)
        self._mark_closed()
        self.reopen_if_closed()

    def note_progress(self, revision: int) -> None:
        """Note that all events up to this revision have arrived."""
        if self._is_open:
            self._cursor.note_progress(revision)

    def note_disconnect(self) -> None:
        """Note that the connection is lost. If the watch was not open yet, a reconnect repeats its request."""
        if self._is_open:
            self._mark_closed()

    def reopen_if_closed(self) -> None:
        """Reopen the watch if it is not open."""
        if self._id is None and self._ended is None and not self._overrun and self._client.connected:
            self._opening = asyncio.create_task(self._reopen(), name=f"reopen a watch at {self._client.name}")

    def end(self, error: StoreError) -> None:
        """Raise an error in the watch's reader, after the buffered events; the first error counts."""
        if self._ended is None:
            self._ended = error
        self._news.set()

    def _buffer_events(self, events: list[Event]) -> None:
        size = sum([EVENT_BYTES + key_size(event.key) + len(event.value) for event in events])
        self._batches.append((events, size))
        self._held_bytes += size
        self._news.set()

    async def _reopen(self) -> None:
        try:
            await self._open(None)
        except WatchCompacted as error:
            if self._cursor.note_compacted():
                self.reopen_if_closed()
            else:
                self.end(error)
        except ConnectionLost:
            pass  # `Client.fail` has ended this watch
        except StoreError as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 - raise any error in the reader, which waits
            self.end(ConnectionLost(f"a watch at {self._client.name} has failed: {error!r}", maybe_applied=False))

    async def _open(self, timeout: float | None) -> None:
        request, reset = self._cursor.opening_request()
        if reset is not None:
            self._buffer_events([reset])
        item, answer = self._client.start_request(request, timeout)
        self._id = item.request_id
        self._client.watches[self._id] = self
        try:
            await answer
        except asyncio.CancelledError:
            self._client.abandon_request(item)
            self._mark_closed()
            raise
        except StoreError:
            self._mark_closed()
            raise

    @property
    def _is_open(self) -> bool:
        return not self._client.is_pending(self._id)

    def _mark_closed(self, *, at_server: bool = False) -> None:
        """Note that the watch is closed; with `at_server`, close it at the server, too."""
        if self._id is not None:
            if at_server:
                self._client.send_and_forget(Cancel(target=self._id))
            self._client.watches.pop(self._id, None)
            self._id = None


class Client(ReconnectingClient):
    """The client of a store, as `async with store.connect(url) as client`; it reconnects by itself.

    `name` is the address, for messages. `token` may be a function, called for each connection. `connect_timeout`
    defaults to `timeout`, and log lines call it by its `timeout_name`. `generation`: see `Hello`.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        name: str,
        token: Secret = None,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float | None = None,
        timeout_name: str = "the timeout",
        rng: random.Random | None = None,
        process: bytes | None = None,
        generation: int = 1,
    ) -> None:
        super().__init__(dial, name=name, token=token, rng=rng, process=process, generation=generation)
        self.timeout: float = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._ended_by = timeout_name
        self.watching: dict[Watch, None] = {}  # the watches whose context is entered
        self.watches: dict[int, Watch] = {}  # the watches open or opening, by request id
        self._turns = asyncio.Lock()  # callers queue for this lock until there is room for a request
        self._out: list[bytes] = []
        self._flushing = False
        self._written = 0  # bytes of all frames so far
        self._large: dict[int, int] = {}  # by id of each request above `LARGE`: `_written` at its end

    async def __aenter__(self) -> Self:
        if not hasattr(self, "_task"):  # else it was entered before, as by `connect`
            self._start_connecting()
        try:
            await self._wait_for_first_welcome(self._connect_timeout, self._ended_by)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Close the client; pending calls raise `ConnectionLost`."""
        if self._made_in is not process_identity():
            return  # a forked child must not touch the parent's socket and task
        if self.connected and self._connection.abandoned_grants:
            with anyio.move_on_after(FAREWELL_WITHIN, shield=True), contextlib.suppress(StoreError):
                await self.call(Ping())  # before the pong, late grants arrive, and their leases are revoked
        if self.connected and self._link is not None:
            self._flush()
            self._link.write(wire.encode_bye("done"))
        self.fail(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        await self._stop_connecting()

    def fail(self, error: StoreError) -> None:
        """See `Store.fail`; the first error counts."""
        if self._failed is not None:
            return
        self._failed = error
        self._met_or_failed.set()
        self._eased.set()
        for item in self._connection.in_flight.values():
            item.settle(item.error_for_request(error))
        for watch in self.watching:
            watch.end(error)
        if self._link is not None and self._link.transport is not None:
            self._link.transport.close()
        self.notify_connection_change(False)

    def handle_bytes(self, link: Connection, data: bytes) -> None:
        """Decode bytes received on a connection, and handle the messages."""
        if link is not self._link:
            return
        try:
            for item in self._connection.receive(data):
                match item:
                    case Reply(request_id=request_id, response=response):
                        self._handle_reply(request_id, response)
                    case Events(request_id=watch_id, events=events) if watch_id in self.watches:
                        self.watches[watch_id].deliver(events)
                    case Lagged(request_id=watch_id, revision=revision) if watch_id in self.watches:
                        self.watches[watch_id].reopen_after_lag(revision)
                    case Welcome():
                        self._handle_welcome(item)
                    case Bye(reason=reason):
                        link.farewell = reason
                    case bytes():  # this client's hello, to be sent
                        link.write(item)
        except StoreError as error:
            if self._connection.is_error_retryable(error):
                link.close_when_sent(str(error))
            else:
                self.fail(error)
        link.note_received(expecting=not self.connected or len(self._connection.in_flight) > len(self._parked))
        link.stop_reconnect_search()

    def _handle_welcome(self, welcome: Welcome) -> None:
        self.connected = True
        self._outages.note_end(self.time())
        self._met_or_failed.set()
        self._drop_previous()
        self.limits: dict[str, Any] = dict(welcome.limits)
        self.durable: bool = welcome.durable
        self.operations_max: int = int(welcome.limits.get("operations_max", self.operations_max))
        self.writes_max: int = int(welcome.limits.get("writes_max", self.writes_max))
        self.lease_ttl_max: float = welcome.limits.get("lease_ttl_max", self.lease_ttl_max)
        for item in self._connection.take_lost_requests():
            item.settle(self._connection.session_forgotten_error)
        for item in list(self._connection.in_flight.values()):
            self._send(item)
        for watch in self.watching:
            watch.reopen_if_closed()
        self.notify_connection_change(True)

    def _handle_disconnect(self) -> None:
        self._out.clear()
        self._large.clear()
        for watch in self.watching:
            watch.note_disconnect()

    def send_ping(self) -> None:
        """See `ReconnectingClient.send_ping`."""
        if self.connected:
            self._send(self._connection.register_request(Ping(), None))

    def _handle_reply(self, request_id: int, response: Response) -> None:
        item = self._connection.take_request(request_id)
        self._parked.discard(request_id)
        self._large.pop(request_id, None)
        self._eased.set()
        self.timeouts.note_answer()
        if item is None:
            return
        if isinstance(response, Pong):
            # Before a pong, the server sends every event up to the pong's revision.
            for watch in self.watches.values():
                watch.note_progress(response.revision)
        if isinstance(response, Watching) and request_id in self.watches:
            self.watches[request_id].note_opened(response.revision)
        self._revoke_abandoned_grant(item, response)
        item.settle(error_of(response) or response)

    def _revoke_abandoned_grant(self, item: InFlight, response: Response) -> None:
        if (revoke := item.revoke_request(response)) is not None:
            self.send_and_forget(revoke)

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """See `Calls.call`."""
        timeout = checked_timeout(timeout, None if waits(request) else self.timeout)
        self.check_usable()
        if self._has_room_for_request and not self._turns.locked():
            item, answer = self.start_request(request, timeout)
        else:
            item, answer = await self._ask_when_room(request, timeout)
        try:
            return await answer
        except asyncio.CancelledError:
            self.abandon_request(item)
            if answer.done() and not answer.cancelled() and answer.exception() is None:  # it arrived just before
                self._revoke_abandoned_grant(item, answer.result())
            raise

    async def _ask_when_room(self, request: Request[R], timeout: float | None) -> tuple[InFlight, asyncio.Future[R]]:
        came_at = self.time()
        with anyio.move_on_after(timeout):
            async with self._turns:
                while not self._has_room_for_request:
                    self._eased.clear()
                    await self._eased.wait()
                self.check_usable()
                # Do not await after the request is sent: a caller cancelled there could not abandon it.
                return self.start_request(request, timeout, waited=self.time() - came_at)
        crowd = f"{len(self._connection.in_flight)} requests to {self.name} are in flight"
        raise StoreTimeoutError(f"{crowd}, and there was no room for another within {timeout:g} s")

    def start_request(
        self, request: Request[R], timeout: float | None, *, waited: float = 0.0
    ) -> tuple[InFlight, asyncio.Future[R]]:
        """Send a request now, or when connected; its caller has waited for `waited` seconds of `timeout`."""
        answer: asyncio.Future[R] = self._loop.create_future()
        item = self._connection.register_request(request, answer)
        if waits(request):
            self._parked.add(item.request_id)
        if timeout is not None:
            item.timer = self._loop.call_later(timeout - waited, self._time_out_request, item, timeout)
        if self.connected:
            self._send(item)
        return item, answer

    @property
    def _has_room_for_request(self) -> bool:
        most = self._connection.limits.get("session_replies_max", math.inf)  # the server's limit; use half of it
        asked = len(self._connection.in_flight) - len(self._parked)
        return self._failed is not None or (self._writable and asked < min(IN_FLIGHT_MAX, max(most // 2, 1)))

    def _send(self, item: InFlight) -> None:
        try:
            frame = self._connection.encode(item)
        except StoreError as error:
            self._parked.discard(item.request_id)
            item.settle(error)
        else:
            self._out.append(frame)
            self._written += len(frame)
            if len(frame) > LARGE:
                self._large[item.request_id] = self._written
            if self._link is not None and item.request_id not in self._parked:
                self._link.expect_answer()
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self._link is not None:
            self._link.write(b"".join(self._out))
            self._out.clear()

    def _time_out_request(self, item: InFlight, timeout: float) -> None:
        trouble = None if self.connected else f"the connection is lost, {self._problem_text()}"
        error = item.timeout_error(timeout, self.name, trouble)
        self.abandon_request(item)
        item.settle(error)

    def abandon_request(self, item: InFlight) -> None:
        """Drop a request that no caller waits for."""
        if item.timer is not None:
            item.timer.cancel()
        self._connection.abandon_request(item)
        if isinstance(item.request, messages.Watch) or item.request_id in self._parked:
            self._parked.discard(item.request_id)
            self._connection.take_request(item.request_id)
            if self.connected:
                self.send_and_forget(Cancel(target=item.request_id))
        elif self._link is not None and self._link.transport is not None and item.request_id in self._large:
            self._flush()
            unsent = self._link.transport.get_write_buffer_size() - self._written + self._large.pop(item.request_id)
            if unsent > LARGE:  # close the connection: lease renewals would wait for the rest of the frame
                self._link.abort()
        self._eased.set()

    def send_and_forget(self, request: Request[Any]) -> None:
        """Send a request now, or when connected; no caller waits for its answer."""
        item = self._connection.register_request(request, None)
        if self.connected:
            self._send(item)

    def is_pending(self, request_id: int | None) -> bool:
        """Return True if this request has no answer yet."""
        return request_id in self._connection.in_flight

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """See `Store.watch`."""
        return Watch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))
