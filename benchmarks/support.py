"""What the benchmarks share: processes with a pipe, a store in a process of its own, and plain tables.

Processes are forked from one that has imported what they need, so that a hundred of them cost no hundred imports. All
times are `time.monotonic()`, which is one clock for all processes of a machine.
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
from store.net.collector import short_collections
from store.net.threads import loop_factory

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess, SpawnProcess

HAS_TORCH = importlib.util.find_spec("torch") is not None

# The system's resolver asks no name server. PyTorch looks up the name of each socket's peer, for its log; where no
# server answers, that takes seconds, which are the machine's and not PyTorch's. Names in /etc/hosts are found as ever.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

CONTEXT = multiprocessing.get_context("forkserver")
FRESH = multiprocessing.get_context("spawn")  # an interpreter of its own, whose memory is its own, too
OURS = ["rdzv.backends.builtin", "rdzv.node.handler", "store.server.server"]  # loaded at first use otherwise
CONTEXT.set_forkserver_preload([*OURS, *(["rdzv.torch"] if HAS_TORCH else [])])


def fork_without_torch() -> None:
    """Before any process is started: none of them needs PyTorch, which takes seconds to import."""
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
        """Wait for what it says next; `TimeoutError` if that takes too long."""
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"a worker has said nothing for {timeout:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError("a worker has ended; its traceback is above") from None


def hear_all(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Wait for what each of them says next; if one ends before that, the others are not waited for."""
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
    """One process per call, which is a function and its arguments after the pipe; at the end they are killed."""
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
    """A new store in a process of its own, which was not forked: its memory is what a store needs."""
    with workers((_serve,), fresh=True) as (server,):
        assert server.process.pid is not None
        yield Served(server.hear(timeout=60), server.process.pid)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A new store in a process of its own; its URL."""
    with served() as server:
        yield server.url


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        async with store.serve() as server:
            pipe.send(server.url)
            await asyncio.Event().wait()

    with short_collections():  # as `rdzv serve` has it
        run(serve())


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the loop that our own commands use; thousands of nodes that say how busy it is stay silent."""
    logging.disable(logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


async def hear(pipe: Connection) -> Any:
    """In a worker's event loop: wait for what the parent says next."""
    return await anyio.to_thread.run_sync(pipe.recv)


def torch_server(pipe: Connection) -> None:
    """A process with PyTorch's TCPStore in it; tells its port."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    pipe.recv()


def cpu_seconds(pid: int | None) -> float:
    """What a process has used of the processors, with its threads that have ended (Linux)."""
    assert pid is not None, "it was started"
    return time.clock_gettime(~pid << 3 | 2)  # the clock that `clock_getcpuclockid` gives


def peak_memory(pid: int | None) -> int:
    """The most bytes of memory that a process has had (Linux)."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def as_in_a_process_of_its_own() -> None:
    """A node does not pay for the garbage collector's walks over all the others that happen to share its process.

    Nor for those that come while this one joins: what survives a collection is looked at no more. A node that is alone
    in its process makes fewer objects, as it joins, than it takes for a single collection.
    """
    gc.collect()
    gc.freeze()
    if _freeze_what_survived not in gc.callbacks:
        gc.callbacks.append(_freeze_what_survived)


def _freeze_what_survived(phase: str, _: dict[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()


def shares(total: int, parts: int) -> list[range]:
    """Numbers from 0 to `total`, in so many nearly equal ranges, without empty ones."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(edges) if low < high]


def describe_machine(*, load: bool = True) -> str:
    """Under what circumstances this was measured; what else it does now, too."""
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
    """Of an empty run of measurements: not a number."""
    return statistics.median(values) if values else float("nan")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    print(flush=True)


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def us(seconds: float) -> str:
    """Seconds as microseconds."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:.1f}"


def ratio(theirs: float, ours: float) -> str:
    """How many times longer theirs takes."""
    return "-" if math.isnan(theirs / ours) else f"{theirs / ours:.2f}x"
