"""PyTorch's process groups over a `TorchStore` and over TCPStore: `init_process_group`, then `new_group`s.

    python -m benchmarks.torch_groups [--sizes 8,16,24] [--pairs 7] [--groups 40]

Every measurement has new processes, forked from one that has imported PyTorch, and a new server. The contenders take
turns, so that a busy moment hits both of a pair; a figure is the median of the pairs' ratios, and of the times. Times
go from the moment all ranks are told to begin to the moment the last is done. The server of ours has a process of its
own, as `rdzv serve` has; TCPStore lives in the process of rank 0, as PyTorch does it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from benchmarks import support
from benchmarks.support import ratio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATIENCE = 120.0  # seconds for any one thing
TIMEOUT = timedelta(seconds=60)
WHAT = "connect", "init_process_group", "new_group"


def member(pipe: Connection, url: str, rank: int, size: int, groups: int) -> None:
    """One rank: tells when it has its group, and when it has all the new ones."""
    import torch
    import torch.distributed as dist

    from rdzv.torch import TorchStore

    torch.set_num_threads(1)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not url and rank == 0 else None
    pipe.send(served.port if served is not None else 0)
    port = pipe.recv()
    if url:
        shared = TorchStore(f"{url}/groups", TIMEOUT)
    else:
        shared = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    pipe.send(time.monotonic())
    pipe.recv()
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=TIMEOUT)
    pipe.send(time.monotonic())
    pipe.recv()
    for _ in range(groups):
        dist.new_group()
    pipe.send(time.monotonic())
    pipe.recv()


def measure(ours: bool, size: int, groups: int) -> tuple[float, ...]:
    """Milliseconds until the last rank is connected, has its group, and has all the new ones."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(support.serving()) if ours else ""
        ranks = stack.enter_context(support.workers(*((member, url, rank, size, groups) for rank in range(size))))
        port = sum(rank.hear(PATIENCE) for rank in ranks)  # of the one that serves TCPStore
        took = []
        for _ in WHAT:
            began = time.monotonic()
            for rank in ranks:
                rank.pipe.send(port)
            took.append((max(rank.hear(PATIENCE) for rank in ranks) - began) * 1000)
    return tuple(took)


def main() -> None:
    """Measure, and print."""
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
        for column, what in enumerate(WHAT):
            ours, theirs = (support.median([pair[side][column] for pair in pairs]) for side in (True, False))
            times = support.median([pair[True][column] / pair[False][column] for pair in pairs])
            rows.append((size, what, f"{ours:.0f}", f"{theirs:.0f}", ratio(times, 1)))
    support.table("Milliseconds, medians", ("ranks", "", "TorchStore", "TCPStore", "ours/theirs"), rows)


if __name__ == "__main__":
    main()
