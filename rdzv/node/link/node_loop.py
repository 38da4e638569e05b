"""The event loop that nodes live in, which their callers cannot block.

Each process has one loop for its nodes, in its own thread, for async and blocking callers alike. While a caller is
busy, its node follows the run, renews its leases, coordinates, and learns of losses. Only a C extension that does not
release the interpreter lock blocks the nodes of its process; after a lease's TTL, a blocked node is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.errors import RendezvousStateError
from store.net.threads import Call, LoopThread, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

T = TypeVar("T")

TURNS = 64  # the most nodes of a process that take a costly step at once; together they block the loop for some 20 ms
TURN_MOST = 5.0  # seconds after which a node in a costly step no longer keeps other nodes waiting


def wait_for_result(call: Call[T]) -> T:
    """Wait for a call, and return its result. In the node thread, or after its end, raise RendezvousStateError."""
    if _thread is not None and _thread.is_current and not call.over.is_set():
        raise RendezvousStateError(
            "a blocking call in the node thread, from a logging handler or a callback, would wait for itself; "
            "make it in another thread"
        )
    try:
        return call.wait()
    except asyncio.CancelledError:
        raise RendezvousStateError("the node thread has ended, with the process") from None


class NodeLoop:
    """A given event loop for nodes, as in tests. The subclass `NodeThread` has its own thread and loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    def spawn(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine in the loop; raise RendezvousStateError if the loop has ended. Thread-safe."""
        self._loop = self._loop or asyncio.get_running_loop()
        return Call(work, self._loop)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make a call in the loop; do nothing if the loop has ended. Thread-safe."""

        async def call_as_coroutine() -> None:
            call()

        with contextlib.suppress(RendezvousStateError):
            self.spawn(call_as_coroutine())

    async def run_in_new_thread(self, work: Callable[[], T]) -> T:
        """Run user code in this thread; `NodeThread` uses another thread, so that user code delays no lease renewal."""
        return work()

    def limit_concurrency(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context to enter in the loop; `NodeThread` limits how many nodes are in it at once."""
        return contextlib.nullcontext()

    def stop_using(self) -> None:
        """Stop using the loop, which continues."""


class NodeThread(NodeLoop):
    """The loop in the process's node thread, which starts with its first user and ends with its last."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._left = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine in the thread."""
        thread = self._thread
        try:
            if thread is None:
                if self._left:
                    raise RuntimeError("it was left")  # noqa: TRY301
                thread = self._thread = _acquire_thread(self)
            return thread.start_call(work)
        except RuntimeError as error:
            if thread is not None and not thread.has_ended:
                raise  # a signal handler has raised the error
            work.close()
            raise RendezvousStateError(f"the node thread has ended: {error}") from None

    async def run_in_new_thread(self, work: Callable[[], T]) -> T:
        """Run user code in a new thread."""
        return await in_thread(work)

    @contextlib.asynccontextmanager
    async def limit_concurrency(self) -> AsyncIterator[None]:
        """Limit how many nodes of this process take a costly step at once: connecting, arriving, reading the rank.

        If thousands of nodes took such a step together, the loop would be busy for seconds, and renew no lease.
        """
        held = [_turns]
        await held[0].acquire()

        def release_turn() -> None:
            if held:
                held.pop().release()

        over = asyncio.get_running_loop().call_later(TURN_MOST, release_turn)
        try:
            yield
        finally:
            over.cancel()
            release_turn()

    def stop_using(self) -> None:
        """Stop using the node thread; call this once. Thread-safe."""
        thread, self._thread, self._left = self._thread, None, True
        if thread is not None:
            _release_shared_thread(self, thread)


_lock = threading.Lock()
_thread: LoopThread | None = None
_turns = asyncio.Semaphore(TURNS)
_users: set[NodeThread] = set()


def _acquire_thread(user: NodeThread) -> LoopThread:
    global _thread, _turns
    with _lock:
        if _thread is None:
            _thread, _turns = LoopThread("rdzv node"), asyncio.Semaphore(TURNS)
        _users.add(user)
        return _thread


def _release_shared_thread(user: NodeThread, thread: LoopThread) -> None:
    global _thread
    with _lock:
        if thread is not _thread:  # in a forked child, the thread is the parent's
            return
        _users.discard(user)
        if not _users:
            _thread = None
            thread.stop()


def _reset_in_child() -> None:
    global _thread, _users, _lock, _turns
    _thread, _users, _lock, _turns = None, set(), threading.Lock(), asyncio.Semaphore(TURNS)


os.register_at_fork(after_in_child=_reset_in_child)
