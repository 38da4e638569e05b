"""A soak test: runs that close, leave, die and time out, rounds, watches, leases and clients must not grow.

    python -m benchmarks.soak                     an hour, on a store in memory and on one with a disk
    python -m benchmarks.soak --seconds 90

One process serves each store, one is all the nodes, and each run that dies is a process of its own. Every second their
resident memory, descriptors, threads, keys, leases, sessions and files are read. The table shows them after a third of
the time, in the middle and at the end. The command fails if the last third has more than the one before, beyond noise,
or if the store still has a key or a lease `closed_ttl` after the load has stopped.

The stores have small limits, so that history and sessions have reached theirs in the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

import rdzv
import store
from benchmarks import support
from rdzv.node.coordinator import term
from rdzv.node.run import lease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

SETTLED_AFTER = 1 / 3  # of the time: caches, heaps and histories are full
LIMITS = store.Limits(history_bytes_max=256 * 1024, session_ttl=3.0)
CLOSED_TTL = 5.0  # shortened, so that a soak of a minute sees runs deleted
OF_RUNS = 0.6  # the number of runs varies with the machine's load; at the end it is 0
GONE_WITHIN = 30.0  # seconds until all keys and leases are gone, without load
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that must not grow, beyond `noise` and the share `growth` of its earlier value."""

    name: str
    noise: float
    growth: float = 0.05


FIGURES = (
    Figure("store MiB", 6.0),
    Figure("store descriptors", 12),
    Figure("store threads", 2),
    Figure("keys", 200, OF_RUNS),
    Figure("leases", 100, OF_RUNS),
    Figure("sessions", 60, OF_RUNS),
    Figure("files MiB", 8.0),
    Figure("nodes MiB", 8.0),
    Figure("nodes descriptors", 24),
    Figure("nodes threads", 8),
)


# ------------------------------------------------------------------------------------------------ the load


def serve(pipe: Connection, data_dir: str | None) -> None:
    """Serve a store, until killed."""

    async def main() -> None:
        async with store.serve(data_dir=data_dir, limits=LIMITS) as server:
            pipe.send((server.url, os.getpid()))
            await asyncio.Event().wait()

    support.run(main())


def nodes(pipe: Connection, url: str) -> None:
    """Run all nodes until told to stop; then report how often each kind of load has finished."""

    lease.RUN_TTL_LEAST = term.SHARED_TTL_LEAST = CLOSED_TTL

    async def main() -> None:
        pipe.send(os.getpid())
        stop = asyncio.create_task(support.hear(pipe))
        done = dict.fromkeys(KINDS, 0)
        names = map("run-{}".format, itertools.count())
        async with anyio.create_task_group() as group:
            for kind, live in KINDS.items():
                group.start_soon(_again_and_again, kind, live, done, stop, url, names)
        pipe.send(done)
        await asyncio.Event().wait()  # until killed, without releasing anything

    support.run(main())


async def _again_and_again(
    kind: str,
    live: Callable[[str, str], Awaitable[None]],
    done: dict[str, int],
    stop: asyncio.Task[object],
    url: str,
    names: Iterator[str],
) -> None:
    while not stop.done():
        await live(url, f"{kind}-{next(names)}")
        done[kind] += 1


def _run(url: str, run_id: str, *, nodes: int = 2) -> str:
    return f"{url}/{run_id}?min_nodes={nodes}&closed_ttl={CLOSED_TTL}&last_call_timeout=0.1&is_host=false"


async def _meet(url: str, finish: Callable[[int, rdzv.Handler], Awaitable[None]]) -> None:
    """Let two nodes meet, share a value, and finish each in its way."""

    async def node(number: int) -> None:
        async with rdzv.connect(url, node_id=f"node-{number}") as handler, handler.changes():
            info = await handler.next_rendezvous()
            await info.store.set(f"key-{info.rank}", bytes(1000))
            await info.store.barrier("start", 2)
            await finish(number, handler)

    async with anyio.create_task_group() as group:
        group.start_soon(node, 0)
        group.start_soon(node, 1)


async def _close(url: str, run_id: str) -> None:
    async def finish(number: int, handler: rdzv.Handler) -> None:
        if number == 0:
            await handler.set_closed("done")

    await _meet(_run(url, run_id), finish)


async def _leave(url: str, run_id: str) -> None:
    async def finish(_: int, handler: rdzv.Handler) -> None:
        await handler.leave()

    await _meet(_run(url, run_id), finish)


async def _time_out(url: str, run_id: str) -> None:
    with contextlib.suppress(rdzv.RendezvousTimeoutError, rdzv.RendezvousConnectionError):  # on a busy machine
        async with rdzv.connect(_run(url, run_id), join_timeout=0.2) as handler:
            await handler.next_rendezvous()


async def _fail_health_check(url: str, run_id: str) -> None:
    """Fail with a new name each time, in one run."""
    with contextlib.suppress(rdzv.RendezvousError):
        async with rdzv.connect(
            _run(url, "unfit", nodes=1), node_id=run_id, health_check=lambda: "no GPU", join_timeout=1.0
        ) as handler:
            await handler.next_rendezvous()
    await anyio.sleep(0.1)


async def _rounds(url: str, run_id: str) -> None:
    async with rdzv.connect(_run(url, run_id, nodes=1)) as handler:
        for _ in range(50):
            info = await handler.next_rendezvous()
            await info.store.set("step", bytes(100))


async def _watch_and_lease(url: str, run_id: str) -> None:
    """Use the store alone: a watch, a revoked lease, an expired one, values that are written and deleted."""
    async with store.connect(url) as client, client.watch(f"alone/{run_id}/", snapshot=True) as watch:
        lease = await client.grant(30.0)
        await client.put(f"alone/{run_id}/a", bytes(200_000), lease=lease)
        await client.put(f"alone/{run_id}/b", b"", ttl=1.0)
        seen = 0
        async for event in watch:
            seen += event.kind == "put"
            if seen == 2:
                break
        await lease.revoke()


async def _die(url: str, run_id: str) -> None:
    """Kill a process that is in a round."""
    with support.workers((_dying, _run(url, run_id, nodes=1))) as (worker,):
        await anyio.to_thread.run_sync(worker.hear, PATIENCE)
    await anyio.sleep(0.5)


def _dying(pipe: Connection, url: str) -> None:
    lease.RUN_TTL_LEAST = term.SHARED_TTL_LEAST = CLOSED_TTL

    async def main() -> None:
        async with rdzv.connect(url) as handler:
            await handler.next_rendezvous()
            pipe.send("in")
            await asyncio.Event().wait()

    support.run(main())


KINDS: dict[str, Callable[[str, str], Awaitable[None]]] = {
    "closed": _close,
    "left": _leave,
    "timed-out": _time_out,
    "unfit": _fail_health_check,
    "rounds": _rounds,
    "clients": _watch_and_lease,
    "killed": _die,
}


# ------------------------------------------------------------------------------------------------ looking at it


def of_process(pid: int) -> tuple[float, int, int]:
    """Return resident memory in MiB, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return (int(fields["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def look(server: int, load: int, client: store.sync.Client, data_dir: str | None) -> tuple[float, ...]:
    """Return all figures."""
    stats = client.stats()
    files = sum(path.stat().st_size for path in Path(data_dir).iterdir()) / 2**20 if data_dir else 0.0
    return (*of_process(server), stats["keys"], stats["leases"], stats["sessions"], files, *of_process(load))


def slopes(samples: list[tuple[float, ...]]) -> list[str]:
    """Return the figures that have grown in the last third."""
    third = len(samples) // 3
    found = []
    for at, figure in enumerate(FIGURES):
        before = statistics.median(sample[at] for sample in samples[third : 2 * third])
        after = statistics.median(sample[at] for sample in samples[2 * third :])
        if after > before * (1 + figure.growth) + figure.noise:
            found.append(f"{figure.name}: {before:.1f} in the second third, {after:.1f} in the last")
    return found


def soak(data_dir: str | None, seconds: float) -> list[str]:
    """Load a store for `seconds`; return the problems."""
    where = "memory" if data_dir is None else "disk"
    with support.workers((serve, data_dir)) as (server,):
        url, server_pid = server.hear(PATIENCE)
        with store.sync.connect(url) as client, support.workers((nodes, url)) as (load,):
            load_pid = load.hear(PATIENCE)
            samples = []
            began = time.monotonic()
            while (now := time.monotonic() - began) < seconds:
                samples.append(look(server_pid, load_pid, client, data_dir))
                time.sleep(max(0.0, began + min(seconds, now + 1.0) - time.monotonic()))
            done = load.ask("stop", timeout=PATIENCE)
            shown = [samples[int(len(samples) * part)] for part in (SETTLED_AFTER, 0.5)] + [samples[-1]]
            support.table(
                f"on {where}, {seconds:g} s: " + ", ".join(f"{count} {kind}" for kind, count in done.items()),
                ["", "at a third", "at half", "at the end"],
                [[figure.name, *(f"{sample[at]:.1f}" for sample in shown)] for at, figure in enumerate(FIGURES)],
            )
            wrong = [f"on {where}: {slope}" for slope in slopes(samples)]
            wrong += [f"on {where}: not once: {kind}" for kind, count in done.items() if not count]
            return wrong + [f"on {where}: {left}" for left in _what_is_left(client)]


def _what_is_left(client: store.sync.Client) -> list[str]:
    until = time.monotonic() + GONE_WITHIN
    while (left := client.stats())["keys"] or left["leases"]:
        if time.monotonic() > until:
            keys = [entry.key for entry in client.list("", keys_only=True)]
            return [f"{len(keys)} keys and {left['leases']} leases are left: {', '.join(keys[:8])}"]
        time.sleep(0.5)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description="Does anything grow?")
    parser.add_argument("--seconds", type=float, default=3600.0, help="on each store (default: %(default)g)")
    parser.add_argument("--stores", nargs="+", choices=["memory", "disk"], default=["memory", "disk"])
    options = parser.parse_args()
    print(support.describe_machine())
    wrong = []
    for kind in options.stores:
        with tempfile.TemporaryDirectory() as directory:
            wrong += soak(directory if kind == "disk" else None, options.seconds)
    for line in wrong:
        print(f"FAILED {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
