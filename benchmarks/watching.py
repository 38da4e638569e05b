"""The cost of reading a busy store: a scrape, the page, `rdzv status`, `rdzv runs`, in bytes, time and processor.

    python -m benchmarks.watching                               # 10,000 runs that are over, 1,000 that are not
    python -m benchmarks.watching --ended 1000 --live 100

The store is `rdzv serve --http-port` in a process of its own. One run of one node was closed, one is live; all others
have the keys of one of these. The first look reads values that later ones only check.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import aiohttp
import anyio

import rdzv
import store
from benchmarks import support

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ALONE = "min_nodes=1&last_call_timeout=0"
PATIENCE = 120.0  # seconds per look


async def copy(client: store.Client, name: str, count: int, lease: int | None = None) -> None:
    """Copy a run `count` times: the same keys under other names."""
    root = f"/rdzv/{name}/"
    there = await client.list(root)
    for number in range(1, count):
        writes = [
            store.Put(f"/rdzv/{name}-{number}/{entry.key.removeprefix(root)}", entry.value, lease=lease)
            for entry in there
        ]
        await client.transact(then=writes)


async def measure(ended: int, live: int) -> None:
    command = [sys.executable, "-m", "rdzv", "serve", "--port", "0", "--http-port", "0"]
    served = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert served.stdout is not None
    lines = [(await served.stdout.readline()).decode() for _ in range(2)]
    page = next(line for line in lines if "HTTP at" in line).rpartition(" ")[2].strip()
    at = next(line for line in lines if "listens on" in line).partition("listens on ")[2].partition(",")[0]
    url = f"tcp://{at}"
    rows: list[tuple[str, ...]] = []

    async def look(what: str, way: Callable[[], Awaitable[int]]) -> None:
        for which in ("first", "again"):
            before, began = support.cpu_seconds(served.pid), time.perf_counter()
            size = await way()
            seconds, spent = time.perf_counter() - began, support.cpu_seconds(served.pid) - before
            rows.append((f"{what}, {which}", f"{size:,}", support.ms(seconds), support.ms(spent)))
            await anyio.sleep(1.0 + 5 * seconds)  # an answer is cached for four times its cost

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(store.connect(url))
        lease = await stack.enter_async_context(client.kept_lease(ttl=600))
        async with rdzv.connect(f"{url}/ended?{ALONE}", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.set_closed("done")
        await copy(client, "ended", ended)
        handler = await stack.enter_async_context(rdzv.connect(f"{url}/live?{ALONE}", is_host=False))
        await handler.next_rendezvous()
        await anyio.sleep(1.0)  # its coordinator writes its state
        await copy(client, "live", live, lease.id)
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        session = await stack.enter_async_context(aiohttp.ClientSession(page, timeout=timeout))

        async def get(path: str) -> int:
            async with session.get(path) as answer:
                answer.raise_for_status()
                return len(await answer.read())

        async def event() -> int:
            async with session.get("/api/events") as answer:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        return len(line)
            raise AssertionError("the stream has ended")

        async def run(*words: str) -> int:
            running = [sys.executable, "-m", "rdzv", *words, "--timeout", str(PATIENCE)]
            child = await asyncio.create_subprocess_exec(*running, stdout=subprocess.PIPE)
            told, _ = await child.communicate()
            assert child.returncode == 0, words
            return len(told)

        await look("GET /metrics", lambda: get("/metrics"))
        await look("GET /api/runs", lambda: get("/api/runs"))
        await look("the page's first event", event)
        await look("rdzv status of one run", lambda: run("status", f"{url}/live-1"))
        await look("rdzv runs", lambda: run("runs", url))
    served.terminate()
    await served.wait()
    title = f"Looking at {ended:,} runs that are over and {live:,} that are not"
    support.table(title, ("look", "bytes", "time", "processor of the store"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ended", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000)
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.ended, chosen.live))


if __name__ == "__main__":
    main()
