"""Shell: the event loops of our own threads, uvloop's where it is installed, and the threads that run them.

`LoopThread` is for work that the end of the process may cut short, `PortalThread` for what is to be seen to its end.

Both are daemon threads, so that a process whose main thread is done can end; but no event loop may still run while
Python finalizes. A loop that then wants the interpreter lock finds no thread state, and the process dies of SIGSEGV
(seen with uvloop). So whatever loops are left when the process ends are stopped and joined, for at most `END_WITHIN`
seconds. This is done by `atexit`, which comes before finalization, and after the threads that Python itself waits for:
a program whose main thread ends first may go on in others, and they may go on using us.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal

from store.net.callers import check_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

__all__ = [
    "Call",
    "LoopThread",
    "PortalThread",
    "backend_options",
    "in_thread",
    "loop_factory",
    "until_result",
    "until_set",
]

T = TypeVar("T")

END_WITHIN = 3.0  # seconds that the end of the process waits for its loops; longer than it takes to revoke a lease

LOOK = 0.5  # seconds; how late a signal is heard at worst by a thread that waits for another one


def until_result(future: Future[T]) -> T:
    """Wait for what another thread does; Ctrl-C is heard in any case.

    A thread that waits for a lock hears of a signal only if that interrupts its system call. One that comes just before
    that call, after the interpreter's last look, does not; nor does one that the system hands to another thread. It
    would be heard when the wait is over: never, perhaps. So the wait is cut into short ones.
    """
    while not future.done():
        with contextlib.suppress(TimeoutError):  # of this wait, or the future's own, which is raised below
            return future.result(LOOK)
    return future.result()


def until_set(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for another thread in the same way; False if so many seconds have passed first."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not event.wait(LOOK if deadline is None else min(max(deadline - time.monotonic(), 0.0), LOOK)):
        if deadline is not None and time.monotonic() >= deadline:
            return False
    return True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loops of our threads and commands."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def backend_options() -> dict[str, Any]:
    """The same, as anyio's portals take it."""
    return {"loop_factory": loop_factory()}


class Call(Generic[T]):
    """A coroutine that is under way in another loop, for somebody who awaits its end in his own.

    It does what `asyncio.run_coroutine_threadsafe` and `asyncio.wrap_future` do at a fifth of their cost, since only
    loops are at both of its ends: a future that a thread may block on has a lock of its own.

    Args:
        work: The coroutine. It is closed if there is no such loop any more.
        there: The loop in which it is to run.

    Raises:
        RuntimeError: That loop has ended.
    """

    __slots__ = ("_here", "_over", "_task", "_there", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], there: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._there = there
        self._here = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._here.create_future()
        try:
            there.call_soon_threadsafe(self._begin)
        except RuntimeError:
            work.close()
            raise

    def _begin(self) -> None:
        self._task = self._there.create_task(self._work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # so that none is reported as never seen, though its caller has gone
        with contextlib.suppress(RuntimeError):  # the caller's loop has closed: nobody waits
            self._here.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def end(self) -> None:
        """Wait until it is over, however it ended; once. Being cancelled here does not cancel it."""
        await self._over

    def cancel(self) -> None:
        """End it, if it is not over; nobody is told whether it was."""
        with contextlib.suppress(RuntimeError):  # that loop has ended, and has cancelled it
            self._there.call_soon_threadsafe(self._cancel_there)

    def _cancel_there(self) -> None:
        self._task.cancel()  # it has begun by now: what one thread asks of a loop is done in order

    def result(self) -> T:
        """What came of it, once it is over; `CancelledError` if it was cancelled there."""
        return self._task.result()


class LoopThread:
    """A thread with an event loop; a daemon, so that a process whose main thread is done can end.

    Args:
        name: What the thread is called.
        start: Awaited there first.
        end: Awaited there last.

    Raises:
        RuntimeError: There is no loop to be had.
    """

    def __init__(
        self,
        name: str,
        *,
        start: Callable[[], Coroutine[Any, Any, None]] | None = None,
        end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        check_threads()
        self._start, self._end = start, end
        self._stop = asyncio.Event()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name=name, daemon=True)
        try:
            # Made here, so that it can be given work at once: nobody waits until the thread has come to run it.
            self._loop = loop_factory()()
            self._begin()
            if start is not None:
                until_result(started)
        except Exception as error:
            raise RuntimeError(f"the thread {name!r} could not start: {error}") from error

    def _begin(self) -> None:
        _running[self._thread] = self.stop
        try:
            self._thread.start()
        except BaseException:
            _running.pop(self._thread)
            self._loop.close()
            raise

    def _main(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(started))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)  # whoever waits must not wait for ever
        finally:
            _running.pop(threading.current_thread(), None)  # what ends it holds it, and its loop: 300 kB

    async def _serve(self, started: Future[None]) -> None:
        if self._start is not None:
            await self._start()
        started.set_result(None)
        try:
            await self._stop.wait()
        finally:
            if self._end is not None:
                await self._end()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine there; cancelling the future cancels it.

        Raises:
            RuntimeError: The thread has ended.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Start the same work, for a caller that awaits the result in its own event loop.

        Raises:
            RuntimeError: The thread has ended.
        """
        return Call(work, self._loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Call something there, from any thread; if the thread has ended, there is nothing to call it for."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def stop(self, *, within: float = 0.0) -> None:
        """End it, and wait so many seconds until it has."""
        self.soon(self._stop.set)
        if within and threading.current_thread() is not self._thread:
            self._thread.join(within)


async def in_thread(work: Callable[[], T]) -> T:
    """Do some work in a thread of its own, which keeps nobody: neither who is cancelled, nor a process from its end.

    A thread of anyio's or asyncio's would: a process that ends waits for those, and may wait for a disk for ever.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for who waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has gone meanwhile
            loop.call_soon_threadsafe(report, result, failure)

    threading.Thread(target=run, name="store work", daemon=True).start()
    return await done


class PortalThread(contextlib.AbstractContextManager[BlockingPortal]):
    """A thread with an event loop, and the portal to it.

    It is anyio's `start_blocking_portal`, but no generator: those clean up when they are let go of, too, and at the end
    of a process that never left the context, or in a forked child, that is to wait for ever for a thread that does not
    run any more. A forked child leaves the context without a word: thread and loop are its parent's.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    def __enter__(self) -> BlockingPortal:
        check_threads()
        started: Future[BlockingPortal] = Future()
        loop: asyncio.AbstractEventLoop
        serving: anyio.CancelScope

        async def serve() -> None:
            nonlocal loop, serving
            loop = asyncio.get_running_loop()
            with anyio.CancelScope() as serving:
                async with BlockingPortal() as portal:
                    started.set_result(portal)
                    await portal.sleep_until_stopped()

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(serving.cancel)

        def run() -> None:
            try:
                anyio.run(serve, backend_options=backend_options())
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        self._portal = until_result(started)
        _running[self._thread] = end
        _portals.add(self._thread)
        return self._portal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._pid != os.getpid():
            return
        with contextlib.suppress(RuntimeError):  # it has stopped already
            until_result(self._portal.start_task_soon(self._portal.stop, kind is not None))
        while self._thread.is_alive():
            self._thread.join(LOOK)  # as in `until_result`


_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
"""The threads that run loops, each with what ends it; a thread that nobody holds any more has ended."""

_portals: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those among them that have a portal."""


def _end_all() -> None:
    """Stop every loop that still runs, and wait for them, but not for ever.

    Stores that are served from here come last: to whom they are served here, they are to be gone only after him.
    """
    deadline = time.monotonic() + END_WITHIN
    # A forked child has inherited the table, and none of the threads.
    running = [(thread, end) for thread, end in list(_running.items()) if thread.is_alive()]
    portals = [one for one in running if one[0] in _portals]
    for stage in ([one for one in running if one not in portals], portals):
        for _, end in stage:
            end()
        for thread, _ in stage:
            thread.join(max(deadline - time.monotonic(), 0.0))


atexit.register(_end_all)
