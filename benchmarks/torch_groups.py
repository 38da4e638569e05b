"""PyTorch's process groups over a `TorchStore` and over TCPStore: `init_process_group`, then `new_group`s.

    python -m benchmarks.torch_groups [--sizes 8,16,24] [--pairs 7] [--groups 40]

Every measurement has new processes, forked from one that has imported PyTorch, and a new server. The contenders take
turns, so that a busy moment hits both of a pair; a figure is the median of the pairs' ratios, and of the times. Times
run from the word to all ranks until the last is done; the processor time is that of all ranks and of the server, per
rank. Our server has a process of its own, as `rdzv serve` has; TCPStore lives in the process of rank 0, as PyTorch does
it.

A forked process copies a page of memory when it writes to it, and Python writes to all that it reads: each rank of ours
would copy some thousand pages, 5 ms, unlike a worker that was started by itself. So each rank of ours opens a store and
uses it once before the measurement. TCPStore is C++, and copies few pages.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING

from benchmarks import support
from benchmarks.support import ratio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATIENCE = 120.0  # seconds for any one thing
TIMEOUT = timedelta(seconds=60)
PHASES = "connect", "init_process_group", "new_group"


def member(pipe: Connection, url: str, rank: int, size: int, groups: int) -> None:
    """Run one rank; report the end of each phase, and the processor time used."""
    import torch
    import torch.distributed as dist

    from rdzv.torch import TorchStore

    torch.set_num_threads(1)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not url and rank == 0 else None
    pipe.send(served.port if served is not None else 0)
    port = pipe.recv()

    def connect(run: str) -> dist.Store:
        if url:
            return TorchStore(f"{url}/{run}", TIMEOUT)
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)

    if url:
        before = connect("before")
        before.set(f"before {rank}", "1")
        before.multi_get([f"before {rank}"])
    pipe.send(None)
    pipe.recv()
    used = time.process_time()
    shared = connect("groups")
    used = _tell(pipe, used)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=TIMEOUT)
    used = _tell(pipe, used)
    for _ in range(groups):
        dist.new_group()
    _tell(pipe, used)


def _tell(pipe: Connection, used: float) -> float:
    """Report the end of a phase and its cost, and wait for the next; return the processor time so far."""
    pipe.send((time.monotonic(), time.process_time() - used))
    pipe.recv()
    return time.process_time()


@dataclass(frozen=True)
class Cost:
    """The cost of a phase.

    Attributes:
        wall: Milliseconds until the last rank was done.
        cpu: Milliseconds of processor per rank, the server's share included.
    """

    wall: float
    cpu: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)


def measure(ours: bool, size: int, groups: int) -> dict[str, Cost]:
    """Return the cost of each phase, and of the first two together."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(support.served()) if ours else None
        url = "" if server is None else server.url
        ranks = stack.enter_context(support.workers(*((member, url, rank, size, groups) for rank in range(size))))
        port = sum(rank.hear(PATIENCE) for rank in ranks)  # of the rank that serves TCPStore
        for rank in ranks:
            rank.ask(port, PATIENCE)
        costs = {}
        for phase in PHASES:
            of_server = 0.0 if server is None else support.cpu_seconds(server.pid)
            began = time.monotonic()
            for rank in ranks:
                rank.pipe.send(None)
            told = [rank.hear(PATIENCE) for rank in ranks]
            used = sum(used for _, used in told)
            used += 0.0 if server is None else support.cpu_seconds(server.pid) - of_server
            costs[phase] = Cost((max(at for at, _ in told) - began) * 1000, used / size * 1000)
    return {"both": costs["connect"] + costs["init_process_group"], **costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,16,24", help="how many ranks")
    parser.add_argument("--pairs", type=int, default=7, help="how often to measure both")
    parser.add_argument("--groups", type=int, default=40, help="how many new groups")
    options = parser.parse_args()
    print(support.describe_machine())
    if not support.HAS_TORCH:
        raise SystemExit("PyTorch is not installed")
    rows = []
    for size in map(int, options.sizes.split(",")):
        pairs = [
            {ours: measure(ours, size, options.groups) for ours in ((True, False) if turn % 2 else (False, True))}
            for turn in range(options.pairs)
        ]
        for phase in (*PHASES, "both"):
            cells = []
            for of in (attrgetter("wall"), attrgetter("cpu")):
                ours, theirs = (support.median([of(pair[side][phase]) for pair in pairs]) for side in (True, False))
                times = support.median([of(pair[True][phase]) / of(pair[False][phase]) for pair in pairs])
                cells += [f"{ours:.1f}", f"{theirs:.1f}", ratio(times, 1)]
            rows.append((size, phase if phase != "both" else "the first two", *cells))
    contenders = ("TorchStore", "TCPStore", "ours/theirs")
    support.table(
        "Milliseconds, medians; then those of the processor, for each rank",
        ("ranks", "", *contenders, *contenders),
        rows,
    )


if __name__ == "__main__":
    main()
