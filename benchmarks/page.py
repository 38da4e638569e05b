"""What open pages cost a store: bytes and processor time of a run in which nothing happens, and of one loss.

    python -m benchmarks.page                          # 10,000 nodes; 0, 1 and 4 pages
    python -m benchmarks.page --nodes 300 --steps      # all members say a step each second

The store is `rdzv serve --http-port` in a process of its own. The keys of the run are written as its coordinator would
write them; no node is behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack

import aiohttp
import anyio

import store
from benchmarks import support
from rdzv.core.keys import Keys
from rdzv.core.round import Member, Participant, Round, rank_bucket_number
from rdzv.core.state import NodeRecord, Phase, Progress
from rdzv.core.stuck.step_log import StepNote

BUCKET = 200  # members of one bucket of ranks
WATCHED = 10.0  # seconds


async def write_run(client: store.Client, keys: Keys, nodes: int, lease: int) -> None:
    """Write a complete round of so many nodes."""
    names = [f"gpu-{number:05}" for number in range(nodes)]
    arrivals: dict[str, int] = {}
    for at in range(0, nodes, BUCKET):
        some = names[at : at + BUCKET]
        attributes = {"rack": f"r{at // 64}"}
        records = [
            NodeRecord(node_id=name, incarnation="x", address="10.0.0.1", attributes=attributes, since=time.time())
            for name in some
        ]
        writes = [store.Put(keys.node(one.node_id), one.pack(), lease=lease) for one in records]
        done = await client.transact(then=writes)
        arrivals |= dict.fromkeys(some, done.revision)
    buckets = max(1, nodes // BUCKET)
    ranked: list[list[Member]] = [[] for _ in range(buckets)]
    for rank, name in enumerate(names):
        ranked[rank_bucket_number(name, buckets)].append(Member(node_id=name, rank=rank, arrival=arrivals[name]))
    for bucket, members in enumerate(ranked):
        await client.put(keys.ranks(0, 1, bucket), Member.pack_all(members), lease=lease)
        roster = [Participant(node_id=one.node_id, rank=one.rank, address="10.0.0.1") for one in members]
        await client.put(keys.roster(0, 1, bucket), Participant.pack_all(roster), lease=lease)
    round = Round(number=0, term=1, size=nodes, buckets=buckets, host="10.0.0.1", port=29500)
    await client.put(keys.round, round.pack(), lease=lease)
    await client.put(keys.progress, Progress(phase=Phase.TRAINING, round=0, live=nodes).pack(), lease=lease)


class Follower:
    """A page, as the store sees it."""

    def __init__(self) -> None:
        self.first = self.beats = self.changes = self.bytes = 0
        self.gone: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def run(self, session: aiohttp.ClientSession) -> None:
        async with session.get("/api/events?run=job") as answer:
            async for line in answer.content:
                self.bytes += len(line)
                self.first = self.first or len(line)
                self.beats += line == b"event: beat\n"
                self.changes += line == b"event: changed\n"
                if line.startswith(b"data: {") and not self.gone.done():
                    told = json.loads(line[6:]).get("changed", {}).get("members", {})
                    if told.get("gone"):
                        self.gone.set_result(time.perf_counter())


async def measure(nodes: int, pages: list[int], *, steps: bool) -> None:
    command = [sys.executable, "-m", "rdzv", "serve", "--port", "0", "--http-port", "0"]
    served = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert served.stdout is not None
    lines = [(await served.stdout.readline()).decode() for _ in range(2)]
    url = next(line for line in lines if "HTTP at" in line).rpartition(" ")[2].strip()
    at = next(line for line in lines if "listens on" in line).partition("listens on ")[2].partition(",")[0]
    keys = Keys("/rdzv", "job")
    rows: list[tuple[str, ...]] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(store.connect(f"tcp://{at}"))
        lease = await client.grant(600)
        await write_run(client, keys, nodes, lease.id)

        async def say_steps() -> None:
            for step in range(10**9):
                note = StepNote(round=0, step=step, age=0.0, rate=1.0)
                await lease.keep_alive(note=note.pack())
                await anyio.sleep(1.0)

        saying = asyncio.create_task(say_steps()) if steps else None
        session = await stack.enter_async_context(aiohttp.ClientSession(url, read_bufsize=2**24))
        for count in pages:
            followers = [Follower() for _ in range(count)]
            tasks = [asyncio.create_task(one.run(session)) for one in followers]
            while any(not one.beats + one.changes for one in followers):  # noqa: ASYNC110  they tell nobody
                await anyio.sleep(0.1)
            await anyio.sleep(3.0)
            before, sent = support.cpu_seconds(served.pid), [one.bytes for one in followers]
            await anyio.sleep(WATCHED)
            spent = support.cpu_seconds(served.pid) - before
            told = sum(one.bytes - had for one, had in zip(followers, sent, strict=True)) / WATCHED
            took = "-"
            if followers:
                began = time.perf_counter()
                await client.delete(keys.node(f"gpu-{count:05}"))
                took = support.ms(await followers[0].gone - began)
            first = f"{followers[0].first:,}" if followers else "-"
            rows.append((str(count), first, f"{told:,.0f}", f"{100 * spent / WATCHED:.2f} %", took))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if saying is not None:
            saying.cancel()
    served.terminate()
    await served.wait()
    doing = "a step each second" if steps else "nothing happens"
    heads = (
        "pages",
        "first message, bytes",
        "bytes a second, all pages",
        "of a core of the store",
        "a loss is told after",
    )
    support.table(f"A run of {nodes:,} nodes, {doing}", heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--pages", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--steps", action="store_true", help="each member says a step each second")
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.nodes, chosen.pages, steps=chosen.steps))


if __name__ == "__main__":
    main()
