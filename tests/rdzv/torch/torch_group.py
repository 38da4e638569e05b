"""A program for `test_init_method`: it imports PyTorch once, and forks a process for each rank, to be quicker.

python -m tests.rdzv.torch.torch_group store URL SIZE      gloo over a TorchStore
python -m tests.rdzv.torch.torch_group init URL SIZE       gloo over init_process_group("rdzv://..."), twice
python -m tests.rdzv.torch.torch_group rpc URL SIZE        PyTorch's RPC, which takes such URLs, too
"""

from __future__ import annotations

import operator
import os
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

import rdzv.torch
from rdzv.torch.pytorch import RELEASE, destroy_process_groups
from rdzv.torch.state import broadcast_state


def over_a_store(url: str, rank: int, size: int) -> None:
    """Run one rank through all that a process group does with its store."""
    store = rdzv.torch.TorchStore(url, timedelta(seconds=120))
    calls = counted(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # One request for all peers' addresses. Regression: a `wait` and a `get` for each took twice TCPStore's time.
    if RELEASE >= (2, 8):
        assert calls["multi_get"] == 1, calls
        assert calls["get"] + calls["wait"] <= 2, calls
    collectives(rank, size)
    odd = dist.new_group(list(range(1, size, 2)))
    if rank % 2:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=odd)
        assert int(total) == sum(range(1, size, 2))
    dist.monitored_barrier()
    state_of_all_kinds(rank, size)
    destroy_process_groups()


class AllKinds(torch.nn.Module):  # type: ignore[misc]  # PyTorch is read without its types
    """A model with tensors of types that gloo does not know, tensors outside its state, and state that is no tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.linear.weight, number)
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64):
            self.register_buffer(str(dtype).rpartition(".")[2], torch.full((3,), number % 2).to(dtype))
        self.register_buffer("not_in_state", torch.full((), number), persistent=False)
        self.register_buffer("images", torch.full((1, 2, 3, 3), number).to(memory_format=torch.channels_last))
        self.extra: Any = {"calls": number, "sizes": torch.full((number + 1,), number)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def same_as(self, other: AllKinds) -> bool:
        """Return True if all is equal but the bias, which each process initializes at random."""
        mine, its = ([*one.buffers(), one.linear.weight, one.extra["sizes"]] for one in (self, other))
        equal = all(torch.equal(a.double().real, b.double().real) for a, b in zip(mine, its, strict=True))
        return equal and self.extra["calls"] == other.extra["calls"]


def state_of_all_kinds(rank: int, size: int) -> None:
    """Bring all members to the state of the last rank, whose values differ."""
    model, newest = AllKinds(rank), AllKinds(size - 1)
    optimizer = torch.optim.SGD(model.parameters())
    for lags in (False, rank == 0):
        assert broadcast_state(size - 1, rank=rank, lags=lags, model=model, optimizer=optimizer, extra=rank) == size - 1
    assert model.same_as(newest)


def counted(store: rdzv.torch.TorchStore) -> Counter[str]:
    """Count the calls to a store from now on."""
    calls: Counter[str] = Counter()

    def count(name: str, method: Any) -> None:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)

        setattr(store, name, call)

    for name in ("get", "wait", "multi_get"):
        count(name, getattr(store, name))
    return calls


def over_rpc(url: str, rank: int, size: int) -> None:
    """Call PyTorch's RPC, which meets once over our store, and once over a TCPStore."""
    rdzv.torch.register_init_method()
    for query in ("", "?torch_store=tcp"):
        options = rpc.TensorPipeRpcBackendOptions(init_method=url.replace("appended", f"appended{query}"))
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        assert rpc.rpc_sync(f"worker{(rank + 1) % size}", operator.add, args=(1, rank)) == 1 + rank
        rpc.shutdown()
        if not query:
            url = url.replace("/appended", "-tcp/appended")


def over_an_init_method(url: str, rank: int, size: int) -> None:
    """Make two groups, one after the other. Each is a round of the run."""
    rdzv.torch.register_init_method()
    rdzv.torch.register_init_method()
    ranks = []
    for _ in range(2):
        dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=120))
        ranks.append(dist.get_rank())
        assert dist.get_world_size() == size
        collectives(dist.get_rank(), size)
        destroy_process_groups()
    assert ranks[0] == ranks[1], "survivors keep their order"
    again = f"{url}-with-ranks".replace("?", "%3F")  # with explicit ranks, as with env:// and tcp://
    dist.init_process_group("gloo", init_method=again, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    assert dist.get_rank() == rank
    assert not isinstance(bottom_store(), dist.TCPStore)
    destroy_process_groups()
    native = f"{url}&torch_store=tcp".replace("?", "-native/with/segments?", 1)
    dist.init_process_group("gloo", init_method=native, timeout=timedelta(seconds=120))
    default = dist.distributed_c10d._get_default_store()
    assert isinstance(bottom_store(), dist.TCPStore)
    if RELEASE >= (2, 8):
        default.queue_push(f"to {dist.get_rank()}", "hello")
        assert default.queue_pop(f"to {dist.get_rank()}") == b"hello"
    collectives(dist.get_rank(), size)
    destroy_process_groups()


def bottom_store() -> Any:
    """Return the store below the prefix stores of PyTorch."""
    return dist.distributed_c10d._get_default_store()._underlying_non_prefix_store


def collectives(rank: int, size: int) -> None:
    """Run some collectives and verify their results."""
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
    """Fork a process for each rank, and verify that each exits with 0."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            {"store": over_a_store, "init": over_an_init_method, "rpc": over_rpc}[way](url, rank, size)
            sys.exit()
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(statuses), statuses
    print(f"all {size} are done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
