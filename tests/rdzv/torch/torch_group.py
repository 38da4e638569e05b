"""A program for `test_init_method`: it imports PyTorch once, and forks a process for each rank, to be quicker.

python -m tests.rdzv.torch.torch_group store URL SIZE      gloo over a TorchStore
python -m tests.rdzv.torch.torch_group init URL SIZE       gloo over init_process_group("rdzv://..."), twice
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import rdzv.torch


def over_a_store(url: str, rank: int, size: int) -> None:
    """One rank's part in everything that a process group does with its store."""
    store = rdzv.torch.TorchStore(url, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    collectives(rank, size)
    odd = dist.new_group(list(range(1, size, 2)))
    if rank % 2:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=odd)
        assert int(total) == sum(range(1, size, 2))
    dist.monitored_barrier()
    dist.destroy_process_group()


def over_an_init_method(url: str, rank: int, size: int) -> None:
    """Two groups, one after the other: each is a round of the run."""
    rdzv.torch.register()
    rdzv.torch.register()
    ranks = []
    for _ in range(2):
        dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=30))
        ranks.append(dist.get_rank())
        assert dist.get_world_size() == size
        collectives(dist.get_rank(), size)
        dist.destroy_process_group()
    assert ranks[0] == ranks[1], "survivors keep their order"
    again = f"{url}-with-ranks".replace("?", "%3F")  # ranks of one's own, as with env:// and tcp://
    dist.init_process_group("gloo", init_method=again, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    assert dist.get_rank() == rank
    dist.destroy_process_group()


def collectives(rank: int, size: int) -> None:
    """Look at what comes of some collectives."""
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert float(total) == size * (size + 1) / 2
    told = torch.tensor([rank])
    dist.broadcast(told, src=size - 1)
    assert int(told) == size - 1
    everybody: list[object] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": it} for it in range(size)]
    dist.barrier()


def main(way: str, url: str, size: int) -> None:
    """Fork a process for each rank, and see how each of them ends."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            (over_a_store if way == "store" else over_an_init_method)(url, rank, size)
            sys.exit()
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(statuses), statuses
    print(f"all {size} are done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
