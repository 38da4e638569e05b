"""Acknowledged puts per second, and the time of one put to many watchers.

    python -m benchmarks.throughput

The server has a process of its own. There is no peer: PyTorch's TCPStore acknowledges no `set`, and its Python calls
block, so that 256 at once would be 256 threads; it has no watches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import store
from benchmarks import support
from benchmarks.support import ms

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

VALUE = b"x" * 100
PATIENCE = 60.0


def putters(pipe: Connection, url: str, name: str, callers: int, seconds: float) -> None:
    """Put over one connection from `callers` callers at once for `seconds`; report the number of acknowledged puts."""

    async def caller(client: store.Client, key: str, until: float) -> int:
        count = 0
        while time.monotonic() < until:
            await client.put(key, VALUE)
            count += 1
        return count

    async def main() -> None:
        async with store.connect(url) as client:
            pipe.send("connected")
            until = await support.hear(pipe) + seconds
            counts = await asyncio.gather(*(caller(client, f"{name}/{one}", until) for one in range(callers)))
            pipe.send(sum(counts))
            await support.hear(pipe)

    support.run(main())


def measure_puts(clients: int, callers: int, seconds: float) -> float:
    """Return puts per second, with callers spread over processes."""
    with support.serving() as url:
        calls = [(putters, url, f"client-{one}", callers // clients, seconds) for one in range(clients)]
        with support.workers(*calls) as processes:
            for process in processes:
                assert process.hear(PATIENCE) == "connected"
            began = time.monotonic()
            for process in processes:
                process.pipe.send(began)
            return float(sum(process.hear(PATIENCE) for process in processes)) / seconds


def watchers(pipe: Connection, url: str, count: int) -> None:
    """Watch one key over `count` connections; report when the last has received each change."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            watches = []
            for _ in range(count):
                client = await stack.enter_async_context(store.connect(url))
                watches.append(await stack.enter_async_context(client.watch("watched")))
            iterators = [watch.batches() for watch in watches]
            pipe.send("watching")
            while True:
                await asyncio.gather(*(anext(iterator) for iterator in iterators))
                pipe.send(time.monotonic())

    support.run(main())


def measure_fan_out(count: int, processes: int, puts: int) -> list[float]:
    """Return, per put, the seconds from just before it until the last watcher has it."""
    with support.serving() as url, store.sync.connect(url) as client:
        calls = [(watchers, url, len(share)) for share in support.shares(count, processes)]
        with support.workers(*calls) as all_watchers:
            for worker in all_watchers:
                assert worker.hear(PATIENCE) == "watching"
            times = []
            for _ in range(puts):
                began = time.monotonic()
                client.put("watched", VALUE)
                times.append(max(worker.hear(PATIENCE) for worker in all_watchers) - began)
            return times


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=summary)
    parser.add_argument("--callers", type=int, default=256)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=2.0, help="that each run of puts takes")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--watchers", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--processes", type=int, default=2, help="that the watchers are spread over")
    options = parser.parse_args()

    print(support.describe_machine())
    rows = []
    for clients in options.clients:
        rates = [measure_puts(clients, options.callers, options.seconds) for _ in range(options.runs)]
        rows.append((clients, f"{support.median(rates):.0f}", f"{min(rates):.0f}", f"{max(rates):.0f}"))
    header = ("client processes", "median", "least", "most")
    support.table(f"Acknowledged puts per second from {options.callers} concurrent callers", header, rows)

    rows = []
    for count in options.watchers:
        times = measure_fan_out(count, options.processes, puts=30)
        rows.append((str(count), ms(support.median(times)), ms(min(times)), ms(max(times))))
    header = ("watchers", "median, ms", "least", "most")
    support.table("From one put until the last watcher has it", header, rows)


if __name__ == "__main__":
    main()
