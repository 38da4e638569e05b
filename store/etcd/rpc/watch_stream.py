"""All watches of one client at one etcd server, a member of the cluster, over one stream.

A member opens watches in order. The answer to a rejected watch has no id, so it is for the first unanswered request.
Messages for a slow reader are held, up to `HELD_BYTES_MAX`. Above this bound, the reader's watches are cancelled; the
reader opens them again when it has read the held messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from store.errors import AuthenticationError
from store.etcd.codec import Failure, FailureKind, classify_error
from store.etcd.rpc.grpc_import import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from store.etcd.codec import Fields

HELD_BYTES_MAX: Final = 32 * 1024 * 1024  # the most bytes of messages, if several, held for one reader


class WatchStream:
    """The watches that share a stream, which is opened with `token`, if any."""

    def __init__(self, *, name: str, token: str | None) -> None:
        self._name = name
        self.token: str | None = token
        self._queue: asyncio.Queue[pb.WatchRequest | None] = asyncio.Queue()  # a create and a cancel per watch, at most
        self._last_id = 0
        self._opening: deque[int] = deque()  # ids of watches that wait for an answer, in order
        self.subscriptions: dict[int, Subscription] = {}  # by watch id, also of watches not open yet
        self.ended: Exception | None = None  # why the stream has ended, or None

    async def requests(self) -> AsyncIterator[pb.WatchRequest]:
        """Yield the requests to send to the member, until the stream ends."""
        while (request := await self._queue.get()) is not None:
            yield request

    def subscribe(self, requests: Sequence[Fields]) -> Subscription:
        """Open watches that are read together."""
        first = self._last_id + 1
        self._last_id += len(requests)
        subscription = Subscription(self, range(first, self._last_id + 1))
        if self.ended is not None:
            subscription.fail(self.ended)
            return subscription
        for id, request in zip(subscription.ids, requests, strict=True):
            self.subscriptions[id] = subscription
            self._opening.append(id)
            self._queue.put_nowait(pb.WatchRequest(create_request=pb.WatchCreateRequest(watch_id=id, **request)))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """End the watches of one reader, also at the member."""
        for id in subscription.ids:
            if self.subscriptions.pop(id, None) is not None and self.ended is None:
                self._queue.put_nowait(pb.WatchRequest(cancel_request=pb.WatchCancelRequest(watch_id=id)))

    def dispatch(self, message: pb.WatchResponse) -> None:
        """Pass a message on to its reader."""
        id = self._opening.popleft() if message.created and self._opening else message.watch_id
        subscription = self.subscriptions.get(id)
        if subscription is None:
            return  # the watch has ended
        if message.canceled:
            del self.subscriptions[id]
            self.unsubscribe(subscription)  # end the reader's other watches, too
            subscription.fail(self._cancel_error(message))
        elif not subscription.buffer_message(message):
            self.unsubscribe(subscription)
            subscription.fail(Failure("its reader has fallen behind", FailureKind.REOPEN))

    def _cancel_error(self, message: pb.WatchResponse) -> Exception:
        if message.compact_revision:
            return Failure("what the watch asked for is no longer kept", FailureKind.COMPACTED)
        reason = message.cancel_reason or "it ended the watch"
        verdict = classify_error(0, reason, name=self._name)
        if isinstance(verdict, AuthenticationError) and self.token is not None:
            verdict = FailureKind.TOKEN  # etcd reports an expired token as a missing permission
        if isinstance(verdict, FailureKind):
            return Failure(reason, verdict if verdict is FailureKind.TOKEN else FailureKind.UNDONE)
        return verdict

    def end(self, problem: Exception) -> None:
        """End the stream with an error for its readers; a second call has no effect."""
        if self.ended is not None:
            return
        self.ended = problem
        self._queue.put_nowait(None)  # ends `requests`, and with it the stream at the member
        for subscription in set(self.subscriptions.values()):
            subscription.fail(problem)
        self.subscriptions.clear()


class Subscription:
    """The watches of one reader."""

    def __init__(self, stream: WatchStream, ids: range) -> None:
        self.stream = stream
        self.ids = ids
        self._opened = 0
        self._messages: list[pb.WatchResponse] = []
        self._held_bytes = 0
        self._problem: Exception | None = None
        self._news = asyncio.Event()

    async def wait_until_open(self) -> None:
        """Wait until the member has opened every watch; raise `Failure` if it refuses, e.g. a compacted revision."""
        while self._opened < len(self.ids) or self._problem is not None:
            await self._wait_for_more()

    async def read(self) -> list[pb.WatchResponse]:
        """Return the next messages, or raise `Failure`."""
        while not self._messages:
            await self._wait_for_more()
        messages, self._messages, self._held_bytes = self._messages, [], 0
        return messages

    async def _wait_for_more(self) -> None:
        if self._problem is not None:
            raise self._problem
        self._news.clear()
        await self._news.wait()

    def buffer_message(self, message: pb.WatchResponse) -> bool:
        """Hold a message for the reader; return False if the held messages are too large."""
        if message.created:
            self._opened += 1
        else:
            self._held_bytes += message.ByteSize()
            if self._messages and self._held_bytes > HELD_BYTES_MAX:
                return False
            self._messages.append(message)
        self._news.set()
        return True

    def fail(self, problem: Exception) -> None:
        """Raise an error in the reader once it has read the held messages."""
        self._problem = self._problem or problem
        self._news.set()

    def close(self) -> None:
        """End the watches, also at the member."""
        self.stream.unsubscribe(self)
