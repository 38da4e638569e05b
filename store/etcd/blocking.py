"""The blocking twin of the etcd client: it runs that client in a thread.

A call that Ctrl-C or a signal's handler interrupts ends at once, and is cancelled in the thread.
"""

from __future__ import annotations

import contextlib
import threading
from asyncio import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from store import interface
from store.errors import ConnectionLost, StoreError, WaitEndedError, unsent_error
from store.etcd import client as etcd
from store.interface import DEFAULT_TIMEOUT
from store.messages import Request, Response, waits
from store.net.process import check_not_forked, process_identity
from store.net.threads import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Self

    from store.etcd.codec import Endpoints
    from store.etcd.watch import Watch as AsyncWatch
    from store.messages import Event
    from store.net.threads import Call

R = TypeVar("R", bound=Response)
T = TypeVar("T")

CLOSE_WITHIN = 3.0  # seconds for the thread to close the connection


class Client(interface.BlockingStore):
    """The blocking client of an etcd cluster; safe to use from several threads."""

    operations_max: int = etcd.Client.operations_max
    writes_max: int = etcd.Client.writes_max

    def __init__(self, cluster: Endpoints, *, timeout: float = DEFAULT_TIMEOUT, **options: Any) -> None:
        self.name: str = str(cluster)
        self.timeout = timeout
        self._cluster, self._options = cluster, options
        self._client = etcd.Client(cluster, timeout=timeout, **options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()
        self._failed: StoreError | None = None
        self._waiting: set[Call[Any]] = set()  # pending waits; each access is atomic
        self._waits_ended = False
        self._made_in = process_identity()

    @property
    def failure(self) -> StoreError | None:
        """See `Calls.failure`."""
        return self._client.failure

    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """See `Calls.call`."""
        call = self._start_call(partial(self._client.call, request, timeout=timeout))
        if not waits(request):
            return self._wait_for_result(call)
        self._waiting.add(call)
        if self._waits_ended:  # `end_waits` may have run before this call was in `_waiting`
            call.cancel()
        try:
            return self._wait_for_result(call)
        except CancelledError:
            if self._waits_ended:
                raise WaitEndedError("waits were ended here") from None
            raise
        finally:
            self._waiting.discard(call)

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """See `Store.watch`."""
        return Watch(self, self._client.watch(prefix, start_revision=start_revision, snapshot=snapshot))

    def close(self) -> None:
        """Close the connection; calls in other threads raise `ConnectionLost`."""
        self.interrupt(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and self._made_in is process_identity():
            thread.stop(within=CLOSE_WITHIN)

    def __copy__(self) -> Client:
        # a forked child needs its own connection
        return Client(self._cluster, timeout=self.timeout, **self._options)

    def interrupt(self, error: StoreError) -> None:
        """See `BlockingStore.interrupt`."""
        failed = self._failed = self._failed or error
        if self._thread is not None and self._made_in is process_identity():
            self._thread.call_soon(lambda: self._client.fail(failed))

    def end_waits(self) -> None:
        """See `BlockingStore.end_waits`."""
        self._waits_ended = True
        for call in tuple(self._waiting):
            call.cancel()

    def _run_in_loop_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._wait_for_result(self._start_call(work))

    def _start_call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        check_not_forked(self._made_in, self.name)
        with self._starting:
            if self._failed is not None:
                raise unsent_error(self._failed)
            if self._thread is None:
                self._thread = self._start_thread()
            thread = self._thread
        try:
            return thread.start_call(work())
        except RuntimeError:
            raise ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False) from None

    def _start_thread(self) -> LoopThread:
        thread = LoopThread(f"client of {self.name}", end=self._client.aclose)
        try:
            thread.start_call(self._client.open()).wait()
        except BaseException:
            thread.stop()
            raise
        return thread

    def _wait_for_result(self, call: Call[T]) -> T:
        try:
            return call.wait()
        except BaseException:
            call.cancel()
            raise


class Watch(interface.BlockingWatch):
    """A watch in the client's thread."""

    def __init__(self, client: Client, watch: AsyncWatch) -> None:
        self._client = client
        self._watch = watch
        self._reading: Call[None] | None = None
        self._given: list[Event] | None = None  # the batch that the reader got last
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._client._run_in_loop_thread(self._watch.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with contextlib.suppress(StoreError):  # raised if the client is closed, which has ended the watch
            self._client._run_in_loop_thread(partial(self._watch.__aexit__, None, None, None))

    def close(self) -> None:
        """End the watch and its iteration; any thread may call this."""
        self._closed.set()
        if self._reading is not None:
            self._reading.cancel()

    def batches(self) -> Iterator[list[Event]]:
        """See `interface.Watch.batches`."""
        for event in self._rest:
            yield [event]
        ready = self._watch.ready
        while not self._closed.is_set():
            # Remove a batch only after its `yield`: an error raised by a signal handler must not lose the batch.
            if ready and ready[0] is self._given:
                ready.popleft()
            if ready:
                self._given = batch = ready[0]
                yield batch
                continue
            self._reading = self._client._start_call(self._watch.wait_for_batch)
            if self._closed.is_set():  # `close` ran in another thread before `_reading` was set
                self._reading.cancel()
            try:
                self._client._wait_for_result(self._reading)
            except CancelledError:
                if self._closed.is_set():
                    return
                raise
