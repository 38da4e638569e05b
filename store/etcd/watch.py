"""Watches on an etcd cluster, opened again from the next revision when their stream ends.

Compaction may delete the revision from which an idle watch would resume. So the watch counts its keys. If none is newer
than the last event, and the count is right, the watch resumes: it missed only keys created and deleted meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import anyio

from store import interface, messages
from store.errors import StoreUsageError, WatchCompacted
from store.etcd.codec import Failure, FailureKind, events_by_revision, key_spans, prefix_span, range_of, watch_requests
from store.interface import NOT_OPEN
from store.messages import Count, Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Self

    from store.etcd.reads import ReadOperations
    from store.etcd.rpc.watch_stream import Subscription
    from store.watch_cursor import WatchCursor

WhileUsable: TypeAlias = "Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]"


class Watch(interface.Watch):
    """A watch on an etcd cluster."""

    def __init__(
        self, reads: ReadOperations, prefix: str, cursor: WatchCursor, *, timeout: float, run_while_usable: WhileUsable
    ) -> None:
        self._reads = reads
        self._members = reads.members
        self._timeout = timeout
        self._while_usable = run_while_usable
        self._prefix = prefix
        self._cursor = cursor
        self._stream: Subscription | None = None
        self.ready: deque[list[Event]] = deque()
        self._reset: Event | None = None  # the reset event, kept until an attempt to open the watch succeeds
        self._closed = True
        self._population: int | None = None  # the number of keys under the prefix; None if unknown

    async def __aenter__(self) -> Self:
        deadline = anyio.current_time() + self._timeout
        self._closed = False
        try:
            await self._while_usable(lambda: self._open(deadline, first=True))
        except BaseException:
            self._close_stream()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._close_stream()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """See `interface.Watch.batches`."""
        for event in self._rest:
            yield [event]
        while True:
            await self.wait_for_batch()
            yield self.ready.popleft()

    async def wait_for_batch(self) -> None:
        """Wait until `ready` has a list of events."""
        while not self.ready:
            if self._closed:
                raise StoreUsageError(NOT_OPEN)
            await self._while_usable(self._read_more)

    async def _read_more(self) -> None:
        if self._stream is None:
            await self._open(math.inf)
            return
        try:
            messages = await self._stream.read()
        except Failure as failure:
            if failure.trouble is FailureKind.COMPACTED:
                await self._resume_after_compaction(math.inf)
            else:
                await self._members.handle_stream_failure(self._stream, failure)
            self._close_stream()
            return
        for message in messages:
            for batch in events_by_revision(message, self._reads.hidden):
                self._cursor.note_delivered(tuple(batch))
                self.ready.append(batch)
                if self._population is not None:
                    self._population += sum(map(_key_count_change, batch))
            if not message.events and not message.created:
                # a progress message: etcd has sent all events up to its revision
                self._cursor.note_progress(message.header.revision)

    async def _open(self, deadline: float, *, first: bool = False) -> None:
        while self._stream is None:
            request, reset = self._cursor.opening_request()
            messages.validate_request(request)
            self._reset = reset or self._reset
            try:
                await self._open_stream(request, deadline, first=first)
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
                await self._resume_after_compaction(deadline)

    async def _open_stream(self, request: messages.Watch, deadline: float, *, first: bool) -> None:
        batches: list[list[Event]] = []
        start = request.start_revision
        if start is not None:
            if first and start > self._members.identity.revision + 1:
                now = await self._members.current_revision(deadline)
                if start > now + 1:
                    raise StoreUsageError(f"a watch cannot start at revision {start}: the store is at {now}")
        elif request.snapshot:
            revision = 0
            async for entries, revision in self._reads.pages(self._prefix, (), deadline):  # noqa: B007  the last one counts
                batches.append([entry.event for entry in entries])
            self._population = sum(map(len, batches))
            batches[-1].append(Event(kind="synced", revision=revision))
            start = revision + 1
        else:
            counted = await self._reads.count(Count(prefix=self._prefix), (), deadline)
            self._population = counted.count
            start = counted.revision + 1
        asked = watch_requests([prefix_span(self._prefix)], start_revision=start)
        self._stream = await self._members.watch(asked, deadline=deadline, what="Watch")
        if request.start_revision is None and not request.snapshot:
            self._cursor.note_opened(start - 1)
        if self._reset is not None:
            self.ready.append([self._reset])
            self._reset = None
        for batch in filter(None, batches):
            self._cursor.note_delivered(tuple(batch))
            self.ready.append(batch)

    async def _resume_after_compaction(self, deadline: float) -> None:
        """Resume the watch if its keys are unchanged; otherwise restart it with a reset and a snapshot, or end it."""
        if await self._resume_if_keys_unchanged(deadline):
            return
        if not self._cursor.note_compacted():
            self._closed = True
            raise WatchCompacted(
                f"the changes under {self._prefix!r} that were to come next are no longer kept: {self._members.name} "
                f"has been compacted; watch with snapshot=True to be told of a reset instead"
            )

    async def _resume_if_keys_unchanged(self, deadline: float) -> bool:
        """Return True if no key has changed since the last event; if so, resume from the present revision."""
        if not self._cursor.is_resumable or self._population is None:
            return False
        request, _ = self._cursor.opening_request()
        asked = [
            range_of(span, min_mod_revision=request.start_revision, limit=1, keys_only=True)
            for span in key_spans(self._prefix, self._reads.hidden)
        ]
        replies, revision = await self._reads.read((), asked, deadline)
        if any(reply.kvs for reply in replies) or sum(reply.count for reply in replies) != self._population:
            return False
        self._cursor.note_progress(revision)
        return True

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _key_count_change(event: Event) -> int:
    if event.kind == "delete":
        return -1
    return 1 if event.create_revision == event.revision else 0
