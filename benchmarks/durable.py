"""The cost of durability: acknowledged puts per second, with a data directory and without, in one run.

    python -m benchmarks.durable [--directory DIR]

The server has a process of its own. The output also has the puts per commit, and the disk's own rate of small appends,
each with an `fsync`. A single caller cannot be faster than that; many callers share commits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING

import store
import store.sync
from benchmarks import support
from benchmarks.throughput import PATIENCE, VALUE, putters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection


def server(pipe: Connection, directory: str | None) -> None:
    """Serve a store, durable if there is a directory for it; report its URL."""

    async def serve() -> None:
        async with store.serve(data_dir=directory) as serving:
            pipe.send(serving.url)
            await asyncio.Event().wait()

    support.run(serve())


@contextlib.contextmanager
def serving(parent: str | None) -> Iterator[str]:
    """Serve a new store and yield its URL."""
    with contextlib.ExitStack() as stack:
        directory = None if parent is None else stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
        (process,) = stack.enter_context(support.workers((server, directory)))
        yield process.hear(PATIENCE)


def measure_puts(parent: str | None, *, callers: int, clients: int, seconds: float) -> tuple[float, float]:
    """Return puts per second, and puts per commit (0 in memory)."""
    clients = min(clients, callers)
    with serving(parent) as url, store.sync.connect(url) as observer:
        calls = [(putters, url, f"client-{one}", callers // clients, seconds) for one in range(clients)]
        with support.workers(*calls) as processes:
            for process in processes:
                assert process.hear(PATIENCE) == "connected"
            commits = observer.stats()["commits"]
            began = time.monotonic()
            for process in processes:
                process.pipe.send(began)
            puts = sum(process.hear(PATIENCE) for process in processes)
            commits = observer.stats()["commits"] - commits
    return puts / seconds, puts / commits if commits else 0.0


def measure_disk(parent: str, *, seconds: float) -> float:
    """Return appends of one value per second, each followed by `fsync`."""
    with tempfile.NamedTemporaryFile(dir=parent) as file:
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            os.write(file.fileno(), VALUE)
            os.fsync(file.fileno())
            count += 1
    return count / seconds


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durable", description=summary)
    parser.add_argument("--directory", default=".", metavar="DIR", help="where the disk is (default: here)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--clients", type=int, default=1, help="processes that the callers are spread over")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each run takes")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()

    print(support.describe_machine())
    print(f"{measure_disk(options.directory, seconds=options.seconds):.0f} appends with fsync per second")
    rows = []
    for callers in options.callers:
        durable, shared, memory = [], [], []
        for _ in range(options.runs):
            how = {"callers": callers, "clients": options.clients, "seconds": options.seconds}
            rate, per_commit = measure_puts(options.directory, **how)
            durable.append(rate)
            shared.append(per_commit)
            memory.append(measure_puts(None, **how)[0])
        rate, in_memory, per_commit = map(support.median, (durable, memory, shared))
        rows.append(
            (
                callers,
                f"{rate:.0f}",
                f"{rate / per_commit:.0f}",
                f"{per_commit:.1f}",
                f"{in_memory:.0f}",
                support.ratio(in_memory, rate),
            )
        )
    header = ("callers", "durable", "commits/s", "puts per commit", "in memory", "as many times")
    support.table("Acknowledged puts per second, medians", header, rows)


if __name__ == "__main__":
    main()
