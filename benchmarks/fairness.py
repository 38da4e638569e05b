"""The delay of other clients while one client sends the largest legal requests (promise S11).

One process sends each kind of request at its limit, repeatedly; a bystander in another one reads one small key all the
while. The output is the bystander's delay: median, 99th percentile and worst, in milliseconds, beside the delay alone.

    python -m benchmarks.fairness [--seconds 3] [--only count,list]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from typing import Any

import anyio

import store
from store import when
from store.limits import Limits
from store.messages import (
    Add,
    Append,
    Count,
    Delete,
    DeletePrefix,
    Get,
    GetMany,
    Grant,
    List,
    Put,
    Request,
    Transact,
    Wait,
    Watch,
)
from tests.support.stores import Peer

KEYS = 20_000
MIB = 2**20
HEAP = 2_000  # small requests sent together


async def prepare(client: store.Client) -> None:
    """Fill a store: many small keys, and a large value."""
    for first in range(0, KEYS, 1000):
        await client.transact(then=[Put(f"k/{number:06}", b"value") for number in range(first, first + 1000)])
    await client.put("large", bytes(16 * MIB))
    await client.put("appended", bytes(Limits().append_bytes_max))
    await client.put("small", b"")


def requests() -> dict[str, tuple[Request[Any], ...]]:
    """Return the requests that are sent together, by kind."""
    writes, conditions = range(Limits().writes_max), range(Limits().operations_max)
    return {
        "nobody else": (),
        "count": (Count(prefix="k"),) * HEAP,
        "list": (List(prefix="k"),) * 20,
        "list, keys only": (List(prefix="k", keys_only=True),) * 20,
        "get, 16 MiB": (Get("large"),) * 4,
        "put, 16 MiB": (Put("p", bytes(16 * MIB)),),
        "append to 1 MiB": (Append("appended", b""),) * 300,
        "get_many": (GetMany(keys=tuple(f"k/{n:06}" for n in conditions)),),
        "transact, puts": (Transact(when=(), then=tuple(Put(f"t/{n}", b"v") for n in writes)),),
        "transact, adds": (Transact(when=(), then=tuple(Add(f"a/{n}", 1) for n in writes)),),
        "transact, gets": (Transact(when=(), then=tuple(Get(f"k/{n:06}") for n in writes)),),
        "transact, conditions": (
            Transact(when=tuple(when.missing(f"q/{n}") for n in conditions), then=(Put("c", b""),)),
        ),
        "delete_prefix": (Transact(when=(), then=tuple(Put(f"d/{n}", b"") for n in writes)), DeletePrefix(prefix="d/")),
        "wait": (Wait(keys=tuple(f"w/{n}" for n in conditions)),),
        "waits on one key": (*[Wait(keys=("w", f"w/{n}")) for n in range(1000)], *(Put("w", b""), Delete("w")) * 50),
        "watch with a snapshot": (Watch(prefix="k", snapshot=True),) * 5,
        "watch from the beginning": (Watch(prefix="k", start_revision=1),) * 5,
        "watches of all lengths": (*[Watch(prefix="k" * n) for n in range(1, 2000)], *[Put("k", b"")] * HEAP),
        "put": (Put("k/000000", b""),) * HEAP,
        "grant": (Grant(ttl=0.5),) * HEAP,
    }


async def ask_at_the_limit(port: int, kind: str) -> None:
    """Send the requests, read all answers, and repeat until killed."""
    loop = asyncio.get_running_loop()
    while True:
        _, peer = await loop.create_connection(Peer, "127.0.0.1", port)
        await peer.until(lambda peer=peer: peer.connection.welcomed)  # type: ignore[misc]
        asked = requests()[kind]
        ids = [one for start in range(0, len(asked), 1000) for one in peer.ask(*asked[start : start + 1000])]
        waits = {number for number, request in zip(ids, asked, strict=True) if isinstance(request, Wait)}
        last = max((number for number in ids if number not in waits), default=None)
        if last is None:
            await anyio.sleep(0.05)
        else:
            await peer.answer(last)
        peer.transport.abort()
        await peer.lost.wait()


def _asker(port: int, kind: str) -> None:
    asyncio.run(ask_at_the_limit(port, kind))


def _server(pipe: Any) -> None:
    async def serve() -> None:
        async with store.serve() as server:
            async with store.connect(server.url) as client:
                await prepare(client)
            pipe.send(server.port)
            await anyio.sleep(3600)

    asyncio.run(serve())


async def stand_by(port: int, seconds: float) -> list[float]:
    """Return the delays of a bystander."""
    waits = []
    async with store.connect(f"tcp://127.0.0.1:{port}") as client:
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            await client.get("small")
            waits.append(time.perf_counter() - began)
            await anyio.sleep(0.001)
    return waits


def measure(kind: str, seconds: float) -> list[float]:
    """Return the delays of a bystander beside this kind of request."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_server, args=(theirs,), daemon=True)
    server.start()
    asker = None
    try:
        port = ours.recv()
        if requests()[kind]:
            asker = context.Process(target=_asker, args=(port, kind), daemon=True)
            asker.start()
            time.sleep(1.0)  # it imports and begins
        return asyncio.run(stand_by(port, seconds))
    finally:
        for process in (asker, server):
            if process is not None:
                process.kill()
                process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kind")
    parser.add_argument("--only", default="", help="kinds that contain one of these words, separated by commas")
    given = parser.parse_args()
    words = [word for word in given.only.split(",") if word]
    print("| at its limit | median, ms | 99 % | worst |\n| --- | --- | --- | --- |")
    for kind in requests():
        if words and not any(word in kind for word in words):
            continue
        waits = sorted(measure(kind, given.seconds))
        p99 = waits[int(len(waits) * 0.99)]
        figures = (1e3 * each for each in (statistics.median(waits), p99, waits[-1]))
        print(f"| {kind} | {' | '.join(f'{each:.1f}' for each in figures)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
