"""Shared by the benchmarks: processes with a pipe, a store in a process of its own, and plain tables.

Processes are forked from one that has done the imports, so that a hundred do not import a hundred times. All times are
`time.monotonic()`, one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import anyio.to_thread

import store
from store.net.collector import short_gc_pauses
from store.net.threads import new_loop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess, SpawnProcess

HAS_TORCH = importlib.util.find_spec("torch") is not None

# The resolver asks no name server. PyTorch looks up each peer's name for its log, which takes seconds without a server.
# Names in /etc/hosts are found.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

CONTEXT = multiprocessing.get_context("forkserver")
FRESH = multiprocessing.get_context("spawn")  # an interpreter with memory of its own
OURS = ["rdzv.backends.builtin", "rdzv.node.handler", "store.server.server"]  # else loaded at first use
CONTEXT.set_forkserver_preload([*OURS, *(["rdzv.torch"] if HAS_TORCH else [])])


def fork_without_torch() -> None:
    """Preload without PyTorch, whose import takes seconds; call it before any process is started."""
    CONTEXT.set_forkserver_preload(OURS)


@dataclass
class Worker:
    """A process, and the pipe to it."""

    process: ForkServerProcess | SpawnProcess
    pipe: Connection

    def ask(self, message: object, timeout: float) -> Any:
        """Send a message, and wait for the answer."""
        self.pipe.send(message)
        return self.hear(timeout)

    def hear(self, timeout: float) -> Any:
        """Wait for the next report; `TimeoutError` if that takes too long."""
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"a worker has said nothing for {timeout:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError("a worker has ended; its traceback is above") from None


def hear_all(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Wait for the next report of each; if one ends before that, do not wait for the others."""
    deadline = time.monotonic() + timeout
    heard: dict[int, Any] = {}
    by_pipe = {worker.pipe: number for number, worker in enumerate(workers)}
    while by_pipe:
        ready = wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(by_pipe)} of {len(workers)} workers have said nothing for {timeout:g} s")
        for pipe in ready:
            number = by_pipe.pop(pipe)  # type: ignore[call-overload]
            heard[number] = workers[number].hear(timeout)
    return [heard[number] for number in range(len(workers))]


@contextlib.contextmanager
def workers(*calls: tuple[Any, ...], fresh: bool = False) -> Iterator[list[Worker]]:
    """Run one process per call, a function and its arguments after the pipe; kill them at the end."""
    context = FRESH if fresh else CONTEXT
    started: list[Worker] = []
    try:
        for function, *arguments in calls:
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(theirs, *arguments))
            process.start()
            theirs.close()
            started.append(Worker(process, ours))
        yield started
    finally:
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.join()


@dataclass(frozen=True)
class Served:
    """A store in a process of its own."""

    url: str
    pid: int


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """Serve a new store in a process that was not forked, so that its memory is the store's."""
    with workers((_serve,), fresh=True) as (server,):
        assert server.process.pid is not None
        yield Served(server.hear(timeout=60), server.process.pid)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serve a new store in a process of its own; yield its URL."""
    with served() as server:
        yield server.url


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        async with store.serve() as server:
            pipe.send(server.url)
            await asyncio.Event().wait()

    with short_gc_pauses():  # as in `rdzv serve`
        run(serve())


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the loop of our commands; thousands of busy nodes do not log."""
    logging.disable(logging.WARNING)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work)


async def hear(pipe: Connection) -> Any:
    """Wait in a worker's event loop for the parent's next message."""
    return await anyio.to_thread.run_sync(pipe.recv)


def torch_server(pipe: Connection) -> None:
    """Serve PyTorch's TCPStore; report its port."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    pipe.recv()


def cpu_seconds(pid: int | None) -> float:
    """Return a process's processor seconds, with its ended threads (Linux)."""
    assert pid is not None, "it was started"
    return time.clock_gettime(~pid << 3 | 2)  # the clock of `clock_getcpuclockid`


def peak_memory(pid: int | None) -> int:
    """Return the peak bytes of a process (Linux)."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def as_in_a_process_of_its_own() -> None:
    """Keep the garbage collector from walking over all nodes that share this process.

    Nor over the one that joins: survivors of a collection are frozen. A node alone in its process makes too few
    objects, as it joins, for a single collection.
    """
    gc.collect()
    gc.freeze()
    if _freeze_what_survived not in gc.callbacks:
        gc.callbacks.append(_freeze_what_survived)


def _freeze_what_survived(phase: str, _: dict[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()


def shares(total: int, parts: int) -> list[range]:
    """Split 0 to `total` into nearly equal ranges, without empty ones."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(edges) if low < high]


def describe_machine(*, load: bool = True) -> str:
    """Describe the machine, and its other load."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} not installed"

    busy = f", load {os.getloadavg()[0]:.1f}" if load else ""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{busy}; Python "
        f"{platform.python_version()}, {of('uvloop')}, {of('torch')}"
    )


def median(values: Sequence[float]) -> float:
    """Return the median; not a number for no values."""
    return statistics.median(values) if values else float("nan")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, with numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    print(flush=True)


def ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def us(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:.1f}"


def ratio(theirs: float, ours: float) -> str:
    """Return how many times longer theirs takes."""
    return "-" if math.isnan(theirs / ours) else f"{theirs / ours:.2f}x"
