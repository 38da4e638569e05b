"""Shell: the keeper: every lease of this process, on its own loop and connection.

Membership must not depend on how busy the caller is. So leases are kept by one thread per process, with a small event
loop of its own and one connection per holder, for async and blocking callers alike: a training step that blocks the
caller's loop for a minute does not look like a death. Only a caller that keeps the interpreter lock (a C extension that
does not release it) for longer than the TTL lets the lease lapse; it is then told so, like anybody else who was away.

How one lease is kept, and when it is known to be lost, is said in `store.keeping`.

The same keeping runs as a plain task (`TaskKeeper`) for tests on virtual time, where threads do not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import anyio

from store.errors import UsedAfterFork
from store.keeping import Keeping
from store.messages import GONE_TTL
from store.net.threads import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from store.interface import Store
    from store.keeping import AwaitedLease

    StoreFactory = Callable[[], AbstractAsyncContextManager[Store]]

__all__ = ["HeldLease", "Keeper", "TaskKeeper", "ThreadKeeper"]

T = TypeVar("T")


class HeldLease:
    """A lease that is being kept.

    Attributes:
        id: The lease's id, to put keys on.
        ttl: As granted, in seconds.
    """

    def __init__(self, keeper: Keeper, *, id: int, ttl: float) -> None:
        self._keeper = keeper
        self.id = id
        self.ttl = ttl

    async def release(self) -> None:
        """Stop keeping it and revoke it, within a short time; an unreachable store lets it lapse."""
        await self._keeper.release(self.id)


class Keeper(ABC):
    """What keeps leases for a holder."""

    @abstractmethod
    async def hold(
        self,
        *,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None = GONE_TTL,
        on_lapse: Callable[[str], None],
    ) -> HeldLease:
        """Grant a lease and keep it until it is released.

        Args:
            ttl: Seconds.
            disconnect_ttl: Seconds it may outlive the keeper's connection; None: the TTL alone decides.
            gone_ttl: Seconds it may outlive this process, as far as all of its connections tell; None: as many as
                `disconnect_ttl` gives it.
            on_lapse: Called once, in the caller's event loop, with the reason, when it must be taken for lost.
        """

    @abstractmethod
    async def release(self, lease: int) -> None:
        """Stop keeping a lease, and revoke it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything."""


class TaskKeeper(Keeper):
    """Keeps leases in the caller's own loop, over a client that is the caller's to close."""

    def __init__(self, store: Store) -> None:
        self._keeping = Keeping(store)

    async def hold(
        self,
        *,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None = GONE_TTL,
        on_lapse: Callable[[str], None],
    ) -> HeldLease:
        """Grant a lease and keep it; see `Keeper.hold`."""
        lease = await self._keeping.hold(ttl, disconnect_ttl, gone_ttl, on_lapse)
        return HeldLease(self, id=lease.id, ttl=lease.ttl)

    async def release(self, lease: int) -> None:
        """Stop keeping a lease, and revoke it."""
        await self._keeping.release(lease)

    async def aclose(self) -> None:
        """Release everything."""
        await self._keeping.release_all()


class ThreadKeeper(Keeper):
    """Keeps leases in the process's keeper thread, over a connection that is made there.

    Args:
        connect: Makes the client, as `store.connect` does; it is entered and left in the thread.
    """

    def __init__(self, connect: StoreFactory) -> None:
        self._connect = connect
        self._pid = os.getpid()
        self._thread: _KeeperThread | None = None
        self._connecting = asyncio.Lock()  # in the thread: two holders that come at once share one connection
        self._clients = AsyncExitStack()  # entered and left in the thread
        self._keeping: Keeping | None = None

    async def hold(
        self,
        *,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None = GONE_TTL,
        on_lapse: Callable[[str], None],
    ) -> HeldLease:
        """Grant a lease and keep it; see `Keeper.hold`."""
        self._check_not_forked()
        if self._thread is None:
            self._thread = self._join()
        here = asyncio.get_running_loop()

        def lapsed(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the holder's loop has closed: nobody to tell
                here.call_soon_threadsafe(on_lapse, reason)

        lease = await self._thread.run(self._hold(ttl, disconnect_ttl, gone_ttl, lapsed))
        return HeldLease(self, id=lease.id, ttl=lease.ttl)

    async def _hold(
        self, ttl: float, disconnect_ttl: float | None, gone_ttl: float | None, on_lapse: Callable[[str], None]
    ) -> AwaitedLease:
        async with self._connecting:
            if self._keeping is None:
                self._keeping = Keeping(await self._clients.enter_async_context(self._connect()))
        return await self._keeping.hold(ttl, disconnect_ttl, gone_ttl, on_lapse)

    async def release(self, lease: int) -> None:
        """Stop keeping a lease, and revoke it."""
        self._check_not_forked()
        if self._thread is not None and self._keeping is not None:
            await self._thread.run(self._keeping.release(lease))

    async def aclose(self) -> None:
        """Release everything and hang up. The thread ends with its last keeper."""
        thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():  # a forked child has nothing here to release
            try:
                with anyio.CancelScope(shield=True):
                    await thread.run(self._close())
            finally:
                self._leave(thread)

    def _join(self) -> _KeeperThread:
        """The thread; a simulation, which has none, has another loop of its process in its place."""
        return _join_thread()

    def _leave(self, thread: _KeeperThread) -> None:
        _leave_thread(thread)

    def _check_not_forked(self) -> None:
        if self._pid != os.getpid():
            raise UsedAfterFork(
                "this keeper of leases was made before fork(), and its thread stayed behind; make a new one"
            )

    async def _close(self) -> None:
        if self._keeping is not None:
            await self._keeping.release_all()
            self._keeping = None
        await self._clients.aclose()


class _KeeperThread:
    """The one thread, for as long as it has users."""

    def __init__(self) -> None:
        self.users = 0
        self._thread = LoopThread("rdzv keeper")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it here; cancelling here cancels it there."""
        return await asyncio.wrap_future(self._thread.run(work))

    def stop(self) -> None:
        """End it."""
        self._thread.stop()


_lock = threading.Lock()
_thread: _KeeperThread | None = None


def _join_thread() -> _KeeperThread:
    """The process's keeper thread, started if need be, for one more user."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = _KeeperThread()
        _thread.users += 1
        return _thread


def _leave_thread(thread: _KeeperThread) -> None:
    """One user fewer; the last one ends the thread."""
    global _thread
    with _lock:
        thread.users -= 1
        if not thread.users:
            thread.stop()
            if _thread is thread:
                _thread = None


def _forget_thread_in_child() -> None:
    """A forked child has no threads but the one that forked; it starts its own keeper if it needs one."""
    global _thread, _lock
    _thread = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_thread_in_child)
