"""Event loops in threads, uvloop's if installed.

The threads are daemons, so that a process can end. An event loop that runs while Python finalizes may crash (seen with
uvloop). So an `atexit` function stops the remaining loops and joins their threads, within `END_WITHIN` seconds, after
Python has joined all other threads.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import concurrent.futures
import contextlib
import importlib.util
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from store.net.callers import reject_green_threads
from store.net.dialing import exhausted_limit
from store.net.standard_streams import reserve_standard_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

T = TypeVar("T")

END_WITHIN = 3.0  # seconds for all loops to end; longer than revoking a lease takes

LOOK = 0.5  # seconds, at most, until a waiting main thread handles a signal


class Flag:
    """An event for threads and event loops which an exception of a signal's handler cannot break.

    The threads that wait for a `threading.Event` or a future share a lock with the thread that sets it. If a handler
    raises just after a thread has acquired such a lock, nothing unlocks it. Each waiter of a `Flag` has its own lock.
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], object]] = []  # callbacks of waiters; each access is atomic

    def is_set(self) -> bool:
        """Return True if the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake all waiters, from any thread."""
        self._is_set = True  # set before the loop, so that a new waiter sees the flag or is in the list
        while self._waiting:
            with contextlib.suppress(IndexError):  # another thread has taken the last waiter
                self._waiting.pop()()

    def call_when_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the flag is set: now, or later in the thread that sets it."""
        self._waiting.append(callback)
        if self._is_set:
            self.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set; return False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        opened = _thread.allocate_lock()
        opened.acquire()
        wake = opened.release
        self._waiting.append(wake)
        try:
            # Wait for short times: a signal just before the wait, or in another thread, does not interrupt the wait.
            while not self._is_set:
                left = LOOK if deadline is None else min(deadline - time.monotonic(), LOOK)
                if opened.acquire(timeout=max(left, 0.0)):
                    break
                if left <= 0:
                    return self._is_set
            return True
        finally:
            with contextlib.suppress(ValueError):  # `set` has removed `wake` from the list
                self._waiting.remove(wake)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, uvloop's if installed."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    reserve_standard_streams()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Call(Generic[T]):
    """A coroutine in another thread's loop. Await the call, or block on `wait`; `over` is set at its end.

    A `Call` costs a fifth of `asyncio.run_coroutine_threadsafe`, and signals cannot break it: see `Flag`. Cancelling
    the awaiting task does not cancel the coroutine. The constructor raises `RuntimeError` if the loop has ended.
    """

    __slots__ = ("_task", "_there", "_work", "over")

    def __init__(self, work: Coroutine[Any, Any, T], there: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._there = there
        self._task: asyncio.Task[T] | None = None
        self.over: Flag = Flag()
        try:
            there.call_soon_threadsafe(self._start_task)
        except BaseException:
            if there.is_closed():
                work.close()
            else:
                self.cancel()
            raise

    def _start_task(self) -> asyncio.Task[T]:
        if self._task is None:
            self._task = self._there.create_task(self._work)
            self._task.add_done_callback(self._handle_task_end)
        return self._task

    def _handle_task_end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # or asyncio logs the error as never retrieved
        self.over.set()

    async def until_over(self) -> None:
        """Wait until the call is over."""
        here, over = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):
                here.call_soon_threadsafe(over.set)

        self.over.call_when_set(wake)
        await over.wait()

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.until_over().__await__()
        return self.result()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the call is over; return its result, or raise `TimeoutError` after `timeout` seconds."""
        if not self.over.wait(timeout):
            raise TimeoutError(f"not over after {timeout:g} s")
        return self.result()

    def mark_loop_closed(self) -> None:
        """Mark the call as over, since its loop has closed; close the coroutine if it did not begin."""
        if self._task is None:
            self._work.close()
        self.over.set()

    def cancel(self) -> None:
        """Cancel the call, if it is not over."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._there.call_soon_threadsafe(lambda: self._start_task().cancel())

    @property
    def has_failed(self) -> bool:
        """True if the coroutine has raised an exception; False if it was cancelled."""
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is not None

    def result(self) -> T:
        """Return the coroutine's result once the call is over; `CancelledError` if it was cancelled."""
        if self._task is None:
            raise asyncio.CancelledError
        return self._task.result()


class LoopThread:
    """A daemon thread with an event loop, which awaits `end` before it stops; `RuntimeError` if it cannot start."""

    def __init__(
        self, name: str, *, end: Callable[[], Coroutine[Any, Any, None]] | None = None, last: bool = False
    ) -> None:
        reject_green_threads()
        self._end = end
        self._stop = asyncio.Event()
        self._last = last  # True if the thread ends after others at the process's end
        self._ready = Flag()
        self._failure: Exception | None = None
        self._calls: set[Call[Any]] = set()  # the calls under way
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        try:
            # Call `Thread.start` in another thread, where no signal's handler can interrupt it.
            _thread.start_new_thread(self._start_thread, ())
            self._ready.wait()
        except BaseException:
            self._ready.call_when_set(lambda: self.stop() if self._failure is None else None)
            raise
        if self._failure is not None:
            raise RuntimeError(
                f"the thread {name!r} could not start: {exhausted_limit(self._failure) or self._failure}"
            ) from self._failure

    def _start_thread(self) -> None:
        try:
            self._loop = new_loop()  # made before the thread starts, so that `start_call` works at once
            _running[self._thread] = self._last, self.stop
            try:
                self._thread.start()
            except BaseException:
                del _running[self._thread]
                self._loop.close()
                raise
        except Exception as error:  # noqa: BLE001  any error must end the constructor's wait
            self._failure = error
        self._ready.set()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._wait_for_stop())
        finally:
            # Remove the `_running` entry: it would keep the thread and its loop in memory (300 kB).
            _running.pop(self._thread, None)
            for call in tuple(self._calls):
                call.mark_loop_closed()

    async def _wait_for_stop(self) -> None:
        try:
            await self._stop.wait()
        finally:
            if self._end is not None:
                await self._end()

    def start_call(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Start a coroutine in the thread's loop; raise `RuntimeError` if the thread has ended."""
        call = Call(work, self._loop)
        self._calls.add(call)
        call.over.call_when_set(partial(self._calls.discard, call))
        if self.has_ended:
            call.mark_loop_closed()
        return call

    @property
    def is_current(self) -> bool:
        """True if the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def has_ended(self) -> bool:
        """True if the thread's loop is closed."""
        return self._loop.is_closed()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the thread's loop, from any thread; do nothing if the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def stop(self, *, within: float = 0.0) -> None:
        """End the thread, and wait at most `within` seconds for its end."""
        self.call_soon(self._stop.set)
        deadline = time.monotonic() + within
        if not self.is_current:
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._thread.join(min(left, LOOK))  # for short times, as in `Flag.wait`


class ContextInThread(contextlib.AbstractContextManager[T]):
    """An async context entered in a thread's loop, for a blocking caller.

    One task enters and leaves the context, as anyio's scopes require. This is a class, as a garbage-collected generator
    would wait for ever for a dead thread.
    """

    def __init__(self, thread: LoopThread, context: contextlib.AbstractAsyncContextManager[T]) -> None:
        self._thread = thread
        self._context = context
        self._left = asyncio.Event()
        self._entered = Flag()

    def __enter__(self) -> T:
        self._holding = self._thread.start_call(self._hold_context())
        self._holding.over.call_when_set(self._entered.set)
        try:
            self._entered.wait()
        except BaseException:
            self._holding.cancel()
            raise
        if self._holding.over.is_set():
            self._holding.result()
        return self._entered_as

    async def _hold_context(self) -> None:
        with anyio.CancelScope() as scope:
            async with self._context as self._entered_as:
                self._entered.set()
                try:
                    await self._left.wait()
                except asyncio.CancelledError:
                    scope.cancel()
                    raise

    def __exit__(self, *_: object) -> None:
        self._thread.call_soon(self._left.set)
        with contextlib.suppress(asyncio.CancelledError):
            self._holding.wait()


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a daemon thread, and return its result; a cancelled caller does not wait for the thread."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run_work_once() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - any error is the caller's
            done.set_exception(error)

    threading.Thread(target=run_work_once, name="store work", daemon=True).start()
    return await asyncio.wrap_future(done)


_running: weakref.WeakKeyDictionary[threading.Thread, tuple[bool, Callable[[], object]]] = weakref.WeakKeyDictionary()
"""For each thread that runs a loop: if it ends last, and the function that ends it."""


def _stop_all_loops() -> None:
    """Stop every loop and join its thread; loops that serve stores are last, as clients in this process need them."""
    deadline = time.monotonic() + END_WITHIN
    # Skip threads that are not alive: in a forked child, all threads of the parent.
    running = [(thread, *what) for thread, what in list(_running.items()) if thread.is_alive()]
    for comes_last in (False, True):
        ending = [(thread, end) for thread, last, end in running if last is comes_last]
        for _, end in ending:
            end()
        for thread, _ in ending:
            thread.join(max(deadline - time.monotonic(), 0.0))


atexit.register(_stop_all_loops)
