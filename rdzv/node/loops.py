"""Shell: where nodes live: an event loop that their callers cannot hold up.

There is one such loop per process, in a thread of its own, for async and blocking callers alike. A caller may be busy
for as long as it likes: its node goes on following the run, keeping its leases, coordinating, and hearing who has died.
Only a caller that keeps the interpreter lock (a C extension that does not release it) holds its node up as well, and
after the TTL it is dropped, and told so.

Nothing in this loop waits for anything but the store. What users bring (a health check, an order of ranks) runs apart
from it: see `NodeLoop.apart`.

In tests on virtual time, where threads do not exist, nodes live in a loop that is there already.
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.errors import RendezvousStateError
from store.net.threads import LoopThread, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

__all__ = ["LoopAtHand", "NodeLoop", "NodeThread"]

T = TypeVar("T")


class NodeLoop(ABC):
    """A node's way to the loop that it lives in."""

    @abstractmethod
    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine there, from any thread; cancelling the future cancels it.

        Raises:
            RendezvousStateError: The loop has ended.
        """

    @abstractmethod
    async def apart(self, work: Callable[[], T]) -> T:
        """Run somebody else's code, which may take its time, where it holds up no lease."""

    def leave(self) -> None:  # noqa: B027  a loop that is somebody else's goes on without us
        """Make no more use of it."""


class LoopAtHand(NodeLoop):
    """A loop that is there already: the caller's own, or one that is given."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine there."""
        self._loop = self._loop or asyncio.get_running_loop()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def apart(self, work: Callable[[], T]) -> T:
        """Run it here: on virtual time, it takes none."""
        return work()


class NodeThread(NodeLoop):
    """The process's node thread: it starts with its first user, and ends with its last."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._left = False

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the thread."""
        try:
            if self._thread is None:
                if self._left:
                    raise RuntimeError("it was left")  # noqa: TRY301
                self._thread = _join()
            return self._thread.run(work)
        except RuntimeError as error:
            work.close()
            raise RendezvousStateError(f"the thread in which nodes live has ended: {error}") from None

    async def apart(self, work: Callable[[], T]) -> T:
        """Run it in a thread of its own."""
        return await in_thread(work)

    def leave(self) -> None:
        """Make no more use of the thread; from any thread, and once."""
        thread, self._thread, self._left = self._thread, None, True
        if thread is not None:
            _leave(thread)


_lock = threading.Lock()
_thread: LoopThread | None = None
_users = 0


def _join() -> LoopThread:
    """The process's node thread, for one more user."""
    global _thread, _users
    with _lock:
        if _thread is None:
            _thread, _users = LoopThread("rdzv node"), 0
        _users += 1
        return _thread


def _leave(thread: LoopThread) -> None:
    """One user fewer; the last one ends the thread."""
    global _thread, _users
    with _lock:
        if thread is not _thread:  # that of the process which forked
            return
        _users -= 1
        if not _users:
            _thread = None
            thread.stop()


def _forget_in_child() -> None:
    """A forked child has no thread but the one that forked; it starts its own if it needs one."""
    global _thread, _users, _lock
    _thread, _users, _lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
