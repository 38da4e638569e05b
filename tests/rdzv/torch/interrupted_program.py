"""A program for `test_r25_equal_after_a_loss`: two members train, and one is killed or drained, and replaced.

python -m tests.rdzv.torch.interrupted_program URL WAY TWIN

WAY is what happens at step 5 to the second member: `calm` (nothing), `killed` or `drained`. TWIN is `blocking` or
`awaited`. Gradients are dropped after the optimizer's step, and each step has two batches: what an interrupted step
leaves, the next one would count. A line of JSON for each member that has come to its end says its weights, its
buffers, and how many batches each of its layers has counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import rdzv
import rdzv.sync
import rdzv.torch
from rdzv.node.blocking_handler import Handler

STEPS = 10
AT = 5
BATCHES = 2


class Count(torch.nn.Module):  # type: ignore[misc]  # PyTorch is read without its types
    """Counts batches in two buffers that are made anew at each, of which one grows."""

    batches: torch.Tensor
    growing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.register_buffer("growing", torch.zeros(0))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.batches = self.batches + 1
        self.growing = torch.zeros(int(self.batches) % 2)
        return data


class Member:
    """What one member trains."""

    def __init__(self, url: str, way: str, name: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), Count(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=True)
        self.step = 0
        self.url, self.way, self.name = url, way, name

    def make_step(self, wrapped: Any, rank: int) -> None:
        """Make one step of two batches; the data depend on the step and the rank alone."""
        torch.manual_seed(self.step * 10 + rank)
        for batch in range(BATCHES):
            wrapped.require_backward_grad_sync = batch == BATCHES - 1
            wrapped(torch.randn(8, 4)).pow(2).mean().backward()
            if (self.step, batch, self.name) == (AT, 0, "b") and self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if (self.step, self.name, self.way) == (AT, "a", "drained"):
            with rdzv.sync.connect(self.url, is_host=False) as handler:
                assert isinstance(handler, Handler)
                handler.drain(within=600, reason="its turn", node_id="b")

    def train(self) -> None:
        """Train in a loop that blocks."""
        for round in rdzv.torch.rounds(self.url, node_id=self.name):
            with round:
                self.step = round.sync_state(self.model, self.optimizer, extra=self.step)
                wrapped = DistributedDataParallel(self.model)
                while self.step < STEPS:
                    round.check(self.step)
                    self.make_step(wrapped, round.rank)

    async def train_awaited(self) -> None:
        """Train in a loop that awaits."""
        async for round in rdzv.torch.rounds(self.url, node_id=self.name):
            async with round:
                self.step = await round.sync_state(self.model, self.optimizer, extra=self.step)
                wrapped = await round.in_thread(DistributedDataParallel, self.model)
                while self.step < STEPS:
                    await round.check(self.step)
                    await round.in_thread(self.make_step, wrapped, round.rank)

    def told(self) -> str:
        """What it has come to."""
        counted = [int(self.model[1].num_batches_tracked), int(self.model[2].batches)]
        weights, buffers = (
            [tensor.flatten().tolist() for tensor in them] for them in (self.model.parameters(), self.model.buffers())
        )
        return json.dumps({"name": self.name, "counted": counted, "weights": weights, "buffers": buffers})


def forked(url: str, way: str, twin: str, name: str) -> int:
    """Fork one member; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        member = Member(url, way, name)
        if twin == "awaited":
            asyncio.run(member.train_awaited())
        else:
            member.train()
        if member.step == STEPS:
            os.write(1, f"{member.told()}\n".encode())
        status = 0
    finally:
        os._exit(status)


def main(url: str, way: str, twin: str) -> None:
    """Fork two members, and a third one in the place of the second."""
    members = {forked(url, way, twin, name) for name in "ab"}
    while members:
        pid, _ = os.wait()
        members.remove(pid)
        if way != "calm":
            members.add(forked(url, way, twin, "c"))
            way = "calm"


if __name__ == "__main__":
    main(*sys.argv[1:])
