"""Processes on virtual time: each has an event loop and a clock, and can be stopped and killed.

    timeline = SimulatedTime(seed=7)
    a = timeline.new_host("a", rate=1.01)       # its clock gains one second in a hundred
    a.start_task(main())
    timeline.run_until_time(60.0)
    a.pause()                               # as SIGSTOP; its clock goes on
    a.resume()                              # it first reads its sockets, then late timers fire
    a.die()                                 # as SIGKILL: its code, also its clean-up, has no more effect on others

All processes run in one thread. Processes with work take turns, in an order that the seed decides; a turn takes no
time. If no process has work, time jumps to the next timer.

A `SimulatedLoop` is an asyncio event loop without sockets and threads (see `network` and `SimulatedLoop.in_thread`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import random
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

import anyio

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START = 1000.0  # not 0, to find code that takes 0 for "never"
BUSY_TURNS = 2_000  # after this many turns at one time, a process must be polling: each further turn takes time
BUSY_TURNS_EACH = 20  # turns per process; their sum replaces `BUSY_TURNS` if larger
BUSY_SECONDS = 1e-4  # virtual seconds of each further turn
BUSY_BEYOND = 1.0  # virtual seconds by which busy tasks may push the clock beyond `until`
BURIAL_STEPS_MAX = 100_000

NO_THREADS = (
    "virtual time has no threads, whose work would come at a random moment. What computes takes no time there: it "
    "needs no thread; test code that needs threads with rdzv.testing.processes"
)


class SimulatedTime:
    """The true time, and the order of all events."""

    def __init__(self, seed: int = 0, *, kind: type[SimulatedLoop] | None = None) -> None:
        self._kind = kind or SimulatedLoop
        self.now: float = START  # the true time, in seconds
        self.thread: int = threading.get_ident()
        self.rng: random.Random = random.Random(f"timeline {seed}")  # chooses which process runs next
        self.problem: BaseException | None = None  # an error, which `run_until_time` raises
        self.hosts: list[SimulatedLoop] = []
        self._timers: list[tuple[float, int, SimulatedLoop, asyncio.Handle]] = []
        self._numbers = 0
        self.runnable: list[SimulatedLoop] = []
        self.corpses: list[SimulatedLoop] = []

    def new_host(self, name: str, *, rate: float = 1.0) -> SimulatedLoop:
        """Return a new process, whose clock counts `rate` seconds per true second."""
        host = self._kind(self, name, rate)
        self.hosts.append(host)
        return host

    def run_until_time(self, until: float) -> None:
        """Play all events up to a moment; raise a host's error, if any."""
        with _without_running_loop():
            self._run(until)

    def _run(self, until: float) -> None:
        spins, busy = 0, max(BUSY_TURNS, BUSY_TURNS_EACH * len(self.hosts))
        while True:
            while self.runnable or self.corpses:
                self._remove_dead_hosts()
                if self.runnable:
                    self._run_random_host()
                    self._fire_due_timers()
                if self.problem is not None:
                    raise self.problem
                spins += 1
                if spins > busy:
                    break
            if spins > busy and self.runnable:
                if self.now >= until + BUSY_BEYOND:  # a task polls without a pause, as anyio does around a shield
                    return  # the polling continues in the next call
                self.now += BUSY_SECONDS
                self._fire_due_timers()
                continue
            if not self._timers or self._timers[0][0] > until:
                self.now = max(self.now, until)
                return
            if self._timers[0][0] > self.now:
                self.now, spins = self._timers[0][0], 0
            self._fire_due_timers()

    def end_processes(self) -> None:
        """End all processes."""
        for host in list(self.hosts):
            host.die()
        with _without_running_loop():
            self._remove_dead_hosts()
        self._timers.clear()

    def set_timer(self, when: float, host: SimulatedLoop, handle: asyncio.Handle) -> None:
        """Set a timer; hosts call this."""
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, host, handle))

    def _fire_due_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            _, _, host, handle = heapq.heappop(self._timers)
            if not handle.cancelled() and not host.dead:
                host.fire_timer(handle)

    def _remove_dead_hosts(self) -> None:
        while self.corpses:
            host = self.corpses.pop(0)  # the oldest first: a process's main loop, then its threads
            if host in self.runnable:
                self.runnable.remove(host)
            self.hosts.remove(host)
            host.close_coroutines()

    def _run_random_host(self) -> None:
        count = len(self.runnable)
        self.runnable.pop(self.rng.randrange(count) if count > 1 else 0).run_turn()


@contextlib.contextmanager
def _without_running_loop() -> Iterator[None]:
    """Hide the running loop of a test, so that hosts can run inside it."""
    outer = asyncio._get_running_loop()
    # Python before 3.12 lacks this function and needs no swap, as each loop has its own current task.
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    task = swap(outer, None) if outer is not None and swap is not None else None
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if task is not None and swap is not None:
            swap(outer, task)


class SimulatedLoop(asyncio.BaseEventLoop):
    """One process, or one thread of it, with an event loop."""

    late: float = 1e-9  # seconds added to timers: rounding between two clocks must make no timer early
    _ready: deque[asyncio.Handle]
    _asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]]

    def __init__(self, timeline: SimulatedTime, name: str, rate: float) -> None:
        super().__init__()
        self._timeline = timeline
        self.name = name
        self.rate = rate
        self._epoch = START - START * rate  # all clocks begin at `START`
        self._late: list[asyncio.Handle] = []  # timers that fired while this process was stopped
        self._grave: list[tuple[float, int, asyncio.TimerHandle]] | None = (
            None  # a heap of the dead process's timers, while its coroutines are closed
        )
        self._grave_time = 0.0
        self._queued = False
        # The tasks in order of creation, in which `close_coroutines` cancels them.
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None] = weakref.WeakKeyDictionary()
        self.paused: bool = False
        self.dead: bool = False

    def __del__(self) -> None:
        """Give no warning: there are no sockets."""

    def __repr__(self) -> str:
        return f"<host {self.name}>"

    def start_task(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        return self.create_task(work, name=name)

    def pause(self) -> None:
        """Suspend this process, as SIGSTOP does."""
        self.paused = True

    def resume(self) -> None:
        """Continue: first with the events since `pause`, then with late timers, as a real loop does."""
        if self.paused and not self.dead:
            self.paused = False
            self._ready.extend(self._late)
            self._late.clear()
            self._queue_if_runnable()

    def die(self) -> None:
        """Kill the process: at once, or at its next await if it calls this itself.

        The caller cuts the process off from the network in the same turn. Before the next turn of any process, the dead
        process's coroutines are closed; their clean-up runs on a separate clock.
        """
        if not self.dead:
            self.dead = True
            self._timeline.corpses.append(self)

    def close_coroutines(self) -> None:
        """Close all coroutines of a dead process."""
        self._grave_time, self._grave = self.time(), []
        self.paused = False
        for step in range(BURIAL_STEPS_MAX):
            tasks = self.unfinished() if step % 1000 == 0 or not (self._ready or self._grave) else []
            for task in tasks:
                task.cancel()
            if self._ready and step % 100 != 99:
                self._run_ready()
            elif self._grave:
                when, _, handle = heapq.heappop(self._grave)
                self._grave_time = max(self._grave_time, when)
                self._ready.append(handle)
            elif not tasks:
                return
        raise AssertionError(f"{self.name} cannot be buried: {self.unfinished()}")

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Return the unfinished tasks."""
        return [task for task in list(self._tasks) if not task.done()]

    def fire_timer(self, handle: asyncio.Handle) -> None:
        """Make a due timer's callback ready; while paused, only after `resume`."""
        if self.paused:
            self._late.append(handle)
        else:
            self._ready.append(handle)
            self._queue_if_runnable()

    def run_turn(self) -> None:
        """Run all ready callbacks; those that they add run in the next turn."""
        self._queued = False
        if self.paused or self.dead:
            return
        self._run_ready()
        if self._ready:
            self._queue_if_runnable()

    def _run_ready(self) -> None:
        ready = self._ready
        asyncio._set_running_loop(self)
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgens.add, finalizer=self._close_generator)
        try:
            for _ in range(len(ready)):
                if self.paused or (self.dead and self._grave is None):  # a callback has stopped or killed this process
                    break
                handle = ready.popleft()
                if not handle.cancelled():
                    self._run_handle(handle)
        finally:
            sys.set_asyncgen_hooks(*before)
            asyncio._set_running_loop(None)

    def _run_handle(self, handle: asyncio.Handle) -> None:
        handle._run()

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self.is_closed():
            self.create_task(generator.aclose())

    def _queue_if_runnable(self) -> None:
        if not self._queued and not self.paused and not self.dead and self._ready:
            self._queued = True
            self._timeline.runnable.append(self)

    def time(self) -> float:
        """Return the seconds of this process's clock."""
        return self._grave_time if self._grave is not None else self._epoch + self._timeline.now * self.rate

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in one of the next turns."""
        handle = super().call_soon(callback, *args, context=context)
        self._queue_if_runnable()
        return handle

    def _write_to_self(self) -> None:
        """Enqueue the loop after `call_soon_threadsafe` has queued a callback; thread-safe."""
        if threading.get_ident() != self._timeline.thread:
            self._timeline.problem = RuntimeError(NO_THREADS)
        self._queue_if_runnable()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time of this process's clock."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self._grave is not None:
            heapq.heappush(self._grave, (when, len(self._grave), handle))
        elif when != float("inf"):
            true = max((when - self._epoch) / self.rate, self._timeline.now)
            self._timeline.set_timer(true + self.late, self, handle)
        return handle

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a new task of this loop."""
        task = super().create_task(coro, **options)
        self._tasks[task] = None
        return task

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Call `work` after a moment; a real process calls it in a thread."""
        await anyio.sleep(0.0005)
        return work()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """End the simulation: an uncaught error is a defect of the code or the test."""
        if not self.dead and self._timeline.problem is None:
            error = context.get("exception")
            said = f"{self.name}: {context.get('message')}"
            problem = error if isinstance(error, AssertionError) else AssertionError(f"{said}: {error!r}")
            if problem is not error:
                problem.__cause__ = error
            self._timeline.problem = problem

    def run_in_executor(self, *_: object) -> NoReturn:
        """Refuse: a thread would answer at a random moment."""
        raise RuntimeError(NO_THREADS)

    def set_debug(self, enabled: bool) -> None:
        """Set asyncio's debug mode, without the origins of coroutines, which are slow."""
        self._debug = enabled

    def is_running(self) -> bool:
        """Return True until the process dies."""
        return not self.dead


def _raise_unsupported(_: SimulatedLoop, what: str, *__: object, **___: object) -> NoReturn:
    raise RuntimeError(
        f"virtual time has no {what}: they would come at a random moment. In a body of rdzv.testing.cluster, leave "
        f"them out; test code that needs them with rdzv.testing.processes"
    )


for _what, _names in {
    "signals": "add_signal_handler remove_signal_handler",
    "processes": "subprocess_exec subprocess_shell connect_read_pipe connect_write_pipe",
    "threads": "set_default_executor",
    "sockets": (
        "create_connection create_server create_datagram_endpoint create_unix_connection create_unix_server start_tls "
        "connect_accepted_socket getaddrinfo getnameinfo add_reader add_writer sock_accept sock_connect sock_recv "
        "sock_recv_into sock_recvfrom sock_recvfrom_into sock_sendall sock_sendfile sock_sendto sendfile"
    ),
}.items():
    for _name in _names.split():
        setattr(SimulatedLoop, _name, functools.partialmethod(_raise_unsupported, _what))
