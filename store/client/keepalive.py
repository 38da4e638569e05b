"""Shell: the keeper: every lease of this process, on its own loop and connection.

Membership must not depend on how busy the caller is. So leases are kept by one thread per process, with a small event
loop of its own and one connection per holder, for async and blocking callers alike: a training step that blocks the
caller's loop for a minute does not look like a death. Only a caller that keeps the interpreter lock (a C extension that
does not release it) for longer than the TTL lets the lease lapse; it is then told so, like anybody else who was away.

A lease is known to be ours until its TTL has passed since the *sending* of the last keep-alive that was acknowledged,
on our own clock (promise R9). From then on it may be gone, whatever the network says later, and its holder is told.

The same keeping runs as a plain task (`TaskKeeper`) for tests on virtual time, where threads do not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import anyio

from store.errors import LeaseNotFound, StoreError, UsedAfterFork
from store.net.tasks import cancel_and_wait
from store.net.threads import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from store.interface import Lease, Store

    StoreFactory = Callable[[], AbstractAsyncContextManager[Store]]

__all__ = ["HeldLease", "Keeper", "TaskKeeper", "ThreadKeeper"]

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3  # two may be lost before the lease is
RELEASE_WITHIN = 2.0  # seconds to revoke a lease whose holder is leaving; else it lapses by itself

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
    async def hold(self, *, ttl: float, disconnect_ttl: float | None, on_lapse: Callable[[str], None]) -> HeldLease:
        """Grant a lease and keep it until it is released.

        Args:
            ttl: Seconds.
            disconnect_ttl: Seconds it may outlive the keeper's connection; None: the TTL alone decides.
            on_lapse: Called once, in the caller's event loop, with the reason, when it must be taken for lost.
        """

    @abstractmethod
    async def release(self, lease: int) -> None:
        """Stop keeping a lease, and revoke it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything."""


class _Keeping:
    """The leases kept over one store client, in the loop that client lives in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: dict[int, tuple[Lease, asyncio.Task[None]]] = {}
        self._ours_until: dict[int, float] = {}  # by lease: when we may no longer believe in it
        self._news = asyncio.Event()  # of the connection
        on_connection = getattr(store, "on_connection", None)
        if on_connection is not None:  # the embedded store's client tells; etcd's has no connection to lose
            on_connection(self._connection_changed)
        bound_pauses = getattr(store, "bound_pauses", None)
        if bound_pauses is not None:
            bound_pauses(self._remaining)

    def _connection_changed(self, connected: bool) -> None:
        if connected or self._failure is not None:
            self._news.set()
            self._news = asyncio.Event()

    @property
    def _failure(self) -> StoreError | None:
        """Why the store is lost to this client for good, if so."""
        failure: StoreError | None = getattr(self._store, "failure", None)
        return failure

    def _remaining(self) -> float:
        """Seconds until the first lease may lapse; infinity if there is none."""
        return min(self._ours_until.values(), default=math.inf) - self._store.time()

    async def hold(self, ttl: float, disconnect_ttl: float | None, on_lapse: Callable[[str], None]) -> Lease:
        sent_at = self._store.time()
        lease = await self._store.grant(ttl, disconnect_ttl=disconnect_ttl)
        self._ours_until[lease.id] = sent_at + lease.ttl
        task = asyncio.create_task(self._keep(lease, on_lapse), name=f"keep lease {lease.id}")
        task.add_done_callback(lambda _: self._ours_until.pop(lease.id, None))
        self._tasks[lease.id] = lease, task
        return lease

    async def _keep(self, lease: Lease, on_lapse: Callable[[str], None]) -> None:
        """Renew until it is lost."""
        reason = ""
        ours_until = self._ours_until[lease.id]
        pause = (ours_until - self._store.time()) / RENEWALS_PER_TTL
        while not reason:
            with anyio.CancelScope(deadline=ours_until):
                with anyio.move_on_after(pause):
                    await self._news.wait()  # a new connection must say at once that it keeps the lease
                sent_at = self._store.time()
                if sent_at < ours_until:
                    try:
                        await lease.keep_alive(timeout=max(ours_until - sent_at, 0.001))
                        self._ours_until[lease.id] = ours_until = sent_at + lease.ttl
                        # Of what is left: that may be little, if the answer was long under way.
                        pause = (ours_until - self._store.time()) / RENEWALS_PER_TTL
                    except LeaseNotFound:
                        reason = "the store has let its lease lapse"
                    except StoreError as error:
                        log.debug("lease %d was not renewed: %s", lease.id, error)
                        pause = min(0.1, lease.ttl / 10)  # and again, still listening for a new connection
                        reason = "" if self._failure is None else str(self._failure)
            if not reason and self._store.time() >= ours_until:
                reason = f"its lease of {lease.ttl:g} s could not be renewed in time"
        self._tasks.pop(lease.id, None)
        on_lapse(reason)

    async def release(self, lease_id: int) -> None:
        lease, task = self._tasks.pop(lease_id, (None, None))
        if lease is None or task is None:
            return
        with anyio.move_on_after(RELEASE_WITHIN, shield=True), contextlib.suppress(StoreError):
            await cancel_and_wait(task)
            await lease.revoke(timeout=RELEASE_WITHIN)

    async def release_all(self) -> None:
        """Release every lease, all at once: an unreachable store costs its time limit one time, not one per lease."""
        await asyncio.gather(*map(self.release, list(self._tasks)))


class TaskKeeper(Keeper):
    """Keeps leases in the caller's own loop, over a client that is the caller's to close."""

    def __init__(self, store: Store) -> None:
        self._keeping = _Keeping(store)

    async def hold(self, *, ttl: float, disconnect_ttl: float | None, on_lapse: Callable[[str], None]) -> HeldLease:
        """Grant a lease and keep it; see `Keeper.hold`."""
        lease = await self._keeping.hold(ttl, disconnect_ttl, on_lapse)
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
        self._keeping: _Keeping | None = None

    async def hold(self, *, ttl: float, disconnect_ttl: float | None, on_lapse: Callable[[str], None]) -> HeldLease:
        """Grant a lease and keep it; see `Keeper.hold`."""
        self._check_not_forked()
        if self._thread is None:
            self._thread = self._join()
        here = asyncio.get_running_loop()

        def lapsed(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the holder's loop has closed: nobody to tell
                here.call_soon_threadsafe(on_lapse, reason)

        lease = await self._thread.run(self._hold(ttl, disconnect_ttl, lapsed))
        return HeldLease(self, id=lease.id, ttl=lease.ttl)

    async def _hold(self, ttl: float, disconnect_ttl: float | None, on_lapse: Callable[[str], None]) -> Lease:
        async with self._connecting:
            if self._keeping is None:
                self._keeping = _Keeping(await self._clients.enter_async_context(self._connect()))
        return await self._keeping.hold(ttl, disconnect_ttl, on_lapse)

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
