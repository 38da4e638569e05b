"""Shell: the blocking twin of the etcd client.

It is the async client, in a thread with an event loop of its own; each call here waits for the same call there. The
first call starts the thread, so that a client which nobody uses costs nothing. A call that is interrupted, by Ctrl-C or
by a signal handler that raises, gets out at once, and is cancelled there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from asyncio import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from store import interface
from store.errors import ConnectionLost, StoreError, UsedAfterFork, WaitEnded, unsent
from store.etcd import client as etcd
from store.interface import DEFAULT_TIMEOUT
from store.messages import Request, Response, waits
from store.net.threads import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import TracebackType
    from typing import Self

    from store.etcd.codec import Cluster
    from store.etcd.watch import Watch as AsyncWatch
    from store.messages import Event
    from store.net.threads import Call

__all__ = ["Client", "Watch"]

R = TypeVar("R", bound=Response)
T = TypeVar("T")

CLOSE_WITHIN = 3.0  # seconds for the thread to hang up


class Client(interface.BlockingStore):
    """The blocking client of an etcd cluster; safe to use from several threads.

    Args:
        cluster: Where it is.
        options: As for the async client.
    """

    operations_max: int = etcd.Client.operations_max
    writes_max: int = etcd.Client.writes_max

    def __init__(self, cluster: Cluster, *, timeout: float = DEFAULT_TIMEOUT, **options: Any) -> None:
        self.name: str = str(cluster)
        self.timeout = timeout
        self._cluster, self._options = cluster, options
        self._client = etcd.Client(cluster, timeout=timeout, **options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()
        self._failed: StoreError | None = None
        self._waiting: set[Call[Any]] = set()  # adding, discarding and copying are atomic, so threads need no lock
        self._waits_ended = False
        self._pid = os.getpid()

    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `BlockingStore.call`."""
        return self._run(self._client.call(request, timeout=timeout), is_wait=waits(request))

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`."""
        return Watch(self, self._client.watch(prefix, start_revision=start_revision, snapshot=snapshot))

    def time(self) -> float:
        """Return seconds on this machine's monotonic clock."""
        return time.monotonic()

    def close(self) -> None:
        """Hang up for good; calls under way in other threads get `ConnectionLost`."""
        self.interrupt(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
            thread.stop(within=CLOSE_WITHIN)
            _open.discard(self)

    def __copy__(self) -> Client:
        """Return another client of the same cluster, with a thread of its own: for a forked child, say."""
        return Client(self._cluster, timeout=self.timeout, **self._options)

    def interrupt(self, error: StoreError) -> None:
        """Make this client useless: every call under way, and every later one, raises `error`. From any thread."""
        if self._failed is None:
            self._failed = error
        self._soon(functools.partial(self._client.fail, self._failed))

    def end_waits(self) -> None:
        """End every wait, now and later; see `BlockingStore.end_waits`."""
        self._waits_ended = True
        for call in tuple(self._waiting):
            call.cancel()

    def _soon(self, callback: Callable[[], None]) -> None:
        if self._thread is not None and self._pid == os.getpid():
            self._thread.soon(callback)

    def _run(self, work: Coroutine[Any, Any, T], *, is_wait: bool = False) -> T:
        try:
            thread = self._started()
        except BaseException:
            work.close()
            raise
        try:
            call = thread.run(work)
        except RuntimeError:  # another thread has closed it
            raise ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False) from None
        if is_wait:
            self._waiting.add(call)
            if self._waits_ended:  # once this is known to wait, so that `end_waits` misses nobody
                call.cancel()
        try:
            return call.wait()
        except CancelledError:
            if is_wait and self._waits_ended:
                raise WaitEnded("waits were ended here") from None
            raise
        except BaseException:
            call.cancel()  # whoever gets out of here by force ends it there, too
            raise
        finally:
            self._waiting.discard(call)

    def _started(self) -> LoopThread:
        if self._pid != os.getpid():
            raise UsedAfterFork(f"this client of {self.name} was made before fork(); make a new one in the child")
        if self._failed is not None:
            raise unsent(self._failed)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    name = f"client of {self.name}"
                    self._thread = LoopThread(name, start=self._client.open, end=self._client.aclose)
                    _open.add(self)
        return self._thread


class Watch(interface.BlockingWatch):
    """A watch in the client's thread; see `interface.BlockingWatch`."""

    def __init__(self, client: Client, watch: AsyncWatch) -> None:
        self._client = client
        self._watch = watch
        self._scope: anyio.CancelScope | None = None  # of the reading, in the client's thread
        self._closed = False

    def __enter__(self) -> Self:
        self._client._run(self._watch.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        with contextlib.suppress(StoreError):  # a client that is closed has closed it
            self._client._run(self._watch.__aexit__(None, None, None))

    def close(self) -> None:
        """End it from another thread: its reader's loop ends."""
        self._closed = True
        scope = self._scope
        if scope is not None:
            self._client._soon(scope.cancel)

    def batches(self) -> Iterator[list[Event]]:
        """Return one list of events per revision; see `interface.BlockingWatch`."""
        while not self._closed:
            batch = self._client._run(self._next())
            if batch is not None:
                yield batch

    async def _next(self) -> list[Event] | None:
        with anyio.CancelScope() as self._scope:
            if not self._closed:  # perhaps since a moment ago, in another thread
                return await self._watch.next_batch()
        return None


_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Hang up before the interpreter goes: the threads are daemons, and would be stopped in mid-sentence."""
    for client in list(_open):
        client.close()
