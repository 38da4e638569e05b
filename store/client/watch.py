"""Shell: a watch on the async client: an async iterator that survives reconnects, and holds a bounded number of bytes.

It asks, after a reconnect, for what came after the last revision it saw. When that is no longer kept, it tells its
reader to forget everything (`reset`) and begins with a snapshot again, or, if it was opened without one, ends with
`WatchCompacted`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from store import interface, messages
from store.errors import ConnectionLost, StoreError, StoreUsageError, WatchCompacted
from store.messages import Event, key_bytes
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType
    from typing import Self

    from store.messages import Watching
    from store.protocol.connection import InFlight
    from store.watch_cursor import WatchCursor

__all__ = ["Host", "Watch"]

WATCH_BUFFER_BYTES = 16 * 1024 * 1024  # events read but not yet taken by a watch's reader
EVENT_BYTES = 200  # that an event takes in memory, its key and value aside


class Host(Protocol):
    """What a watch needs of the client that it belongs to."""

    name: str

    @property
    def connected(self) -> bool:
        """Whether the store is in reach now."""
        ...

    def add_watch(self, watch: Watch) -> None:
        """Tell this watch of reconnects from now on.

        Raises:
            StoreError: The client is of no more use.
        """
        ...

    def remove_watch(self, watch: Watch) -> None:
        """Tell it nothing more."""
        ...

    def ask_to_watch(
        self, watch: Watch, request: messages.Watch, *, limited: bool
    ) -> tuple[InFlight, asyncio.Future[Watching]]:
        """Open it at the server; its events are delivered by the id of the request.

        Args:
            watch: It.
            request: How it is to be opened now.
            limited: The answer is to come within the client's time limit for a call.
        """
        ...

    def abandon(self, item: InFlight) -> None:
        """Nobody waits for this reply any more."""
        ...

    def awaits_answer(self, request_id: int) -> bool:
        """Whether this request has no answer yet."""
        ...

    def end_watch(self, request_id: int, *, at_server: bool) -> None:
        """Deliver no more events of this request, and end it at the server, too, if that is in reach."""
        ...


class Watch(interface.Watch):
    """A watch on one client; see `interface.Watch`. Events that its reader has not taken yet are bounded in bytes."""

    def __init__(self, client: Host, cursor: WatchCursor) -> None:
        self._client = client
        self._cursor = cursor
        self._id: int | None = None  # the request that it is open under, on this connection
        self._begun: tuple[InFlight, asyncio.Future[Watching]] | None = None  # asked for before anybody enters it
        self._opening: asyncio.Task[None] | None = None
        self._batches: deque[tuple[list[Event], int]] = deque()  # with their sizes
        self._held_bytes = 0
        self._overrun = False  # closed at the server until the reader has caught up
        self._news = asyncio.Event()
        self._ended: StoreError | None = None

    def begin(self) -> Self:
        """Ask for it now; whoever enters it waits for the answer. Otherwise `give_up` is to be called."""
        self._client.add_watch(self)
        self._begun = self._ask(limited=False)
        return self

    def give_up(self) -> None:
        """Nobody enters it, or hears what came of it."""
        assert self._begun is not None, "it was begun"
        (_, answer), self._begun = self._begun, None
        if not answer.cancel():
            answer.exception()

    async def __aenter__(self) -> Self:
        try:
            if self._begun is None:
                self._client.add_watch(self)
                await self._open(limited=True)
            else:
                begun, self._begun = self._begun, None
                await self._answer(*begun)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.remove_watch(self)
        self.end(StoreUsageError("the watch is closed"))
        opening, self._opening = self._opening, None
        if opening is not None:
            await cancel_and_wait(opening)
        self._release(at_server=True)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """One list of events per revision; see `interface.Watch`."""
        while True:
            while self._batches:
                events, size = self._batches.popleft()
                self._held_bytes -= size
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
            self._release(at_server=True)

    def lagged(self, revision: int) -> None:
        """The server has ended it because we read too slowly; what there was up to `revision` is here."""
        self._cursor.nothing_before(revision)
        self._release()
        self.resume()

    def nothing_before(self, revision: int) -> None:
        """Whatever there was up to this revision has come."""
        if self._id is not None and not self._client.awaits_answer(self._id):
            self._cursor.nothing_before(revision)

    def interrupted(self) -> None:
        """The connection is gone. If the server never answered, the request itself is sent again."""
        if self._id is not None and not self._client.awaits_answer(self._id):
            self._release()

    def resume(self) -> None:
        """Open it again if it is not open."""
        if self._id is None and self._ended is None and not self._overrun and self._client.connected:
            self._opening = asyncio.create_task(self._reopen(), name=f"reopen a watch at {self._client.name}")
            self._opening.add_done_callback(self._reopened)

    def end(self, error: StoreError) -> None:
        """Its reader gets this error, after what has come; the first one counts."""
        if self._ended is None:
            self._ended = error
        self._news.set()

    def _push(self, events: list[Event]) -> None:
        size = 0
        for event in events:
            size += EVENT_BYTES + key_bytes(event.key) + len(event.value)
        self._batches.append((events, size))
        self._held_bytes += size
        self._news.set()

    async def _reopen(self) -> None:
        """Open it again, however long the server takes: if that is too long, the connection ends, not the watch."""
        try:
            await self._open(limited=False)
        except WatchCompacted as error:
            if self._cursor.compacted():
                self.resume()
            else:
                self.end(error)
        except ConnectionLost:
            pass  # the client has failed, and has told this watch
        except StoreError as error:
            self.end(error)

    def _reopened(self, opening: asyncio.Task[None]) -> None:
        """A defect of ours must not leave the reader waiting."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self.end(ConnectionLost(f"a watch at {self._client.name} has failed: {error!r}", maybe_applied=False))

    async def _open(self, *, limited: bool) -> None:
        """Ask for it and wait until it is open."""
        await self._answer(*self._ask(limited=limited))

    def _ask(self, *, limited: bool) -> tuple[InFlight, asyncio.Future[Watching]]:
        """Ask for it. Events may come before the answer is heard: they are known by the id of the request."""
        request, reset = self._cursor.opening()
        if reset is not None:
            self._push([reset])
        item, answer = self._client.ask_to_watch(self, request, limited=limited)
        self._id = item.request_id
        return item, answer

    async def _answer(self, item: InFlight, answer: asyncio.Future[Watching]) -> None:
        try:
            await answer
        except asyncio.CancelledError:
            self._client.abandon(item)
            self._release()
            raise
        except StoreError:
            self._release()
            raise

    def _release(self, *, at_server: bool = False) -> None:
        """It is open no more, on this connection; with `at_server` it is yet to be ended there."""
        if self._id is not None:
            self._client.end_watch(self._id, at_server=at_server)
            self._id = None
