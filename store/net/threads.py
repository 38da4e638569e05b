"""Shell: the event loops of our own threads, uvloop's where it is installed, and the threads that run them.

They are daemon threads, so that a process whose main thread is done can end; but no event loop may still run while
Python finalizes. A loop that then wants the interpreter lock finds no thread state, and the process dies of SIGSEGV
(seen with uvloop). So whatever loops are left when the process ends are stopped and joined, for at most `END_WITHIN`
seconds. This is done by `atexit`, which comes before finalization, and after the threads that Python itself waits for:
a program whose main thread ends first may go on in others, and they may go on using us.

A signal's handler may raise between any two instructions of the main thread. Where a thread and a loop meet, nothing
may be left half done by that: see `Flag`.
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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from store.net.callers import check_threads
from store.net.standard_streams import open_standard_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType

__all__ = ["Call", "Flag", "Held", "LoopThread", "in_thread", "loop_factory"]

T = TypeVar("T")

END_WITHIN = 3.0  # seconds that the end of the process waits for its loops; longer than it takes to revoke a lease

LOOK = 0.5  # seconds; how late a signal is heard at worst by a thread that waits for another one


class Flag:
    """An event that threads and loops wait for, and that no exception out of a signal's handler can tear.

    `threading.Event` and `concurrent.futures.Future` have one lock for those who wait and for who wakes them, and take
    it in Python code. An exception that comes when it has just been taken leaves it taken: whoever is to wake the
    waiting one, as the loop in which all nodes of a process live, then waits for ever. Here whoever waits makes a lock
    of its own, which is locked from the beginning, and which setting the flag opens. Nobody else ever waits for it.
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], object]] = []  # who is to be told; one access at a time is atomic

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Tell all who wait, from any thread."""
        self._is_set = True  # first: who comes to wait now sees it, or is found in the list
        while self._waiting:
            with contextlib.suppress(IndexError):  # another thread sets it, too, and has told the last one
                self._waiting.pop()()

    def call(self, callback: Callable[[], object]) -> None:
        """Call back once it is set: here, if it is; else from the thread that sets it."""
        self._waiting.append(callback)
        if self._is_set:
            self.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False if so many seconds have passed first. Ctrl-C is heard in any case.

        A thread that waits for a lock hears of a signal only if that interrupts its system call. One that comes just
        before that call, after the interpreter's last look, does not; nor does one that the system hands to another
        thread. It would be heard when the wait is over: never, perhaps. So the wait is cut into short ones.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        opened = _thread.allocate_lock()
        opened.acquire()
        wake = opened.release
        self._waiting.append(wake)
        try:
            while not self._is_set:
                left = LOOK if deadline is None else min(deadline - time.monotonic(), LOOK)
                if opened.acquire(timeout=max(left, 0.0)):
                    break
                if left <= 0:
                    return self._is_set
            return True
        finally:
            with contextlib.suppress(ValueError):  # it was woken
                self._waiting.remove(wake)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loops of our threads and commands."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        def make_loop() -> asyncio.AbstractEventLoop:
            open_standard_streams()
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop

        return make_loop
    return asyncio.new_event_loop


class Call(Generic[T]):
    """A coroutine under way in the loop of another thread, for who awaits its end in a loop, or blocks until then.

    It does what `asyncio.run_coroutine_threadsafe` does at a fifth of the cost, and cannot be torn: see `Flag`.
    Awaiting it gives its result; being cancelled there does not cancel it.

    Args:
        work: The coroutine. It is closed if there is no such loop any more.
        there: The loop in which it is to run.

    Attributes:
        over: Set once it is over, however it ended.

    Raises:
        RuntimeError: That loop has ended.
    """

    __slots__ = ("_task", "_there", "_work", "over")

    def __init__(self, work: Coroutine[Any, Any, T], there: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._there = there
        self._task: asyncio.Task[T] | None = None
        self.over: Flag = Flag()
        try:
            there.call_soon_threadsafe(self._begin)
        except BaseException:
            if there.is_closed():
                work.close()
            else:  # a signal's handler has raised, and it may have been handed over: only its loop may touch it
                self.cancel()
            raise

    def _begin(self) -> asyncio.Task[T]:
        if self._task is None:
            self._task = self._there.create_task(self._work)
            self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # so that none is reported as never seen, though its caller has gone
        self.over.set()

    async def end(self) -> None:
        """Wait until it is over, however it ended. Being cancelled here does not cancel it."""
        here = asyncio.get_running_loop()
        over: asyncio.Future[None] = here.create_future()

        def tell() -> None:
            if not over.done():
                over.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has closed: nobody waits
                here.call_soon_threadsafe(tell)

        self.over.call(wake)
        await over

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.end().__await__()
        return self.result()

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is over, and return what came of it.

        Raises:
            TimeoutError: It is not over after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.over.wait(LOOK if deadline is None else min(max(deadline - time.monotonic(), 0.0), LOOK)):
            if self._there.is_closed():  # it has ended before this could begin
                raise asyncio.CancelledError
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"not over after {timeout:g} s")
        return self.result()

    def cancel(self) -> None:
        """End it, if it is not over; nobody is told whether it was."""
        with contextlib.suppress(RuntimeError):  # that loop has ended, and has cancelled it
            self._there.call_soon_threadsafe(self._cancel_there)

    def _cancel_there(self) -> None:
        self._begin().cancel()

    @property
    def has_failed(self) -> bool:
        """Whether it is over and has raised something; not, if it was cancelled."""
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is not None

    def result(self) -> T:
        """What came of it, once it is over; `CancelledError` if it was cancelled there."""
        assert self._task is not None, "it is asked for once it is over"
        return self._task.result()


class LoopThread:
    """A thread with an event loop; a daemon, so that a process whose main thread is done can end.

    Args:
        name: What the thread is called.
        end: Awaited there last.
        last: Whether others may need it up to their end: then the end of the process ends it after them.

    Raises:
        RuntimeError: There is no loop to be had.
    """

    def __init__(
        self,
        name: str,
        *,
        end: Callable[[], Coroutine[Any, Any, None]] | None = None,
        last: bool = False,
    ) -> None:
        check_threads()
        self._end = end
        self._stop = asyncio.Event()
        self._last = last
        self._ready = Flag()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            # `Thread.start` waits, in a way that a signal can tear: it is called where no signals are heard.
            _thread.start_new_thread(self._begin, ())
            self._ready.wait()
        except BaseException:
            self._ready.call(lambda: self.stop() if self._failure is None else None)
            raise
        if self._failure is not None:
            raise RuntimeError(f"the thread {name!r} could not start: {self._failure}") from self._failure

    def _begin(self) -> None:
        """Start the thread, from another one, and say how it went."""
        try:
            # Made before the thread runs, so that it can be given work at once.
            self._loop = loop_factory()()
            _running[self._thread] = self._last, self.stop
            try:
                self._thread.start()
            except BaseException:
                del _running[self._thread]
                self._loop.close()
                raise
        except Exception as error:  # noqa: BLE001  whatever it is, whoever waits must not wait for ever
            self._failure = error
        self._ready.set()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            # What ends it holds it, and its loop, which takes 300 kB.
            _running.pop(self._thread, None)

    async def _serve(self) -> None:
        try:
            await self._stop.wait()
        finally:
            if self._end is not None:
                await self._end()

    def run(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine there.

        Raises:
            RuntimeError: The thread has ended.
        """
        return Call(work, self._loop)

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be begun there any more."""
        return self._loop.is_closed()

    def soon(self, callback: Callable[[], object]) -> None:
        """Call something there, from any thread; if the thread has ended, there is nothing to call it for."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def stop(self, *, within: float = 0.0) -> None:
        """End it, and wait so many seconds until it has."""
        self.soon(self._stop.set)
        deadline = time.monotonic() + within
        if threading.current_thread() is not self._thread:
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._thread.join(min(left, LOOK))  # as in `Flag.wait`


class Held(contextlib.AbstractContextManager[T]):
    """An async context that is entered in the loop of a thread, for a caller who blocks.

    It is entered and left by one task there, as anyio's scopes want it. No generator: those clean up when they are let
    go of, too, and at the end of a process that never left the context, or in a forked child, that is to wait for ever
    for a thread that does not run any more.
    """

    def __init__(self, thread: LoopThread, context: contextlib.AbstractAsyncContextManager[T]) -> None:
        self._thread = thread
        self._context = context
        self._left = asyncio.Event()
        self._entered = Flag()

    def __enter__(self) -> T:
        self._holding = self._thread.run(self._hold())
        self._holding.over.call(self._entered.set)
        try:
            self._entered.wait()
        except BaseException:
            self._holding.cancel()
            raise
        if self._holding.over.is_set():
            self._holding.result()
        return self._entered_as

    async def _hold(self) -> None:
        with anyio.CancelScope() as scope:
            async with self._context as self._entered_as:
                self._entered.set()
                try:
                    await self._left.wait()
                except asyncio.CancelledError:
                    scope.cancel()  # the process ends: what leaving has to wait for is not waited for
                    raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._thread.soon(self._left.set)
        with contextlib.suppress(asyncio.CancelledError):  # the thread has ended already, with the process
            self._holding.wait()


async def in_thread(work: Callable[[], T]) -> T:
    """Do some work in a thread of its own, which keeps nobody: neither who is cancelled, nor a process from its end.

    A thread of anyio's or asyncio's would: a process that ends waits for those, and may wait for a disk for ever.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # so that whoever is cancelled does not take it from the thread

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for who waits
            done.set_exception(error)

    threading.Thread(target=run, name="store work", daemon=True).start()
    return await asyncio.wrap_future(done)


_running: weakref.WeakKeyDictionary[threading.Thread, tuple[bool, Callable[[], object]]] = weakref.WeakKeyDictionary()
"""The threads that run loops: whether others may need it up to their end, and what ends it."""


def _end_all() -> None:
    """Stop every loop that still runs, and wait for them, but not for ever.

    Stores that are served from here come last: to whom they are served here, they are to be gone only after him.
    """
    deadline = time.monotonic() + END_WITHIN
    # A forked child has inherited the table, and none of the threads.
    running = [(thread, *what) for thread, what in list(_running.items()) if thread.is_alive()]
    for comes_last in (False, True):
        ending = [(thread, end) for thread, last, end in running if last is comes_last]
        for _, end in ending:
            end()
        for thread, _ in ending:
            thread.join(max(deadline - time.monotonic(), 0.0))


atexit.register(_end_all)
