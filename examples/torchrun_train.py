"""A script for torchrun, which continues from a checkpoint after an agent was killed, or a new one has come.

    torchrun --rdzv-backend=rdzv --rdzv-endpoint=head:29400 --rdzv-id=job-7 --nnodes=1:2 --max-restarts=3
    examples/torchrun_train.py /shared/checkpoint.pt

    python examples/torchrun_train.py

Without arguments it plays this on one machine: two agents train, one is killed with SIGKILL together with its worker,
the other continues alone from the last checkpoint, and then with a replacement. `train` does not use rendezvous:
torchrun starts it in each round, with its rank and the address of rank 0 in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import anyio
import torch
import torch.distributed as dist

import store

STEPS = 240
STEP_TIME = 0.04  # seconds; without it the example would end before the kill
STEPS_PER_CHECKPOINT = 20


def train(path: Path) -> None:
    """Fit a line by gradient descent as one worker, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # torchrun sets rank, world size and rank 0's address
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(1, 1)
    first = load(path, model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)  # copies the parameters of rank 0 to all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    say(f"rank {rank} of {size}, pid {os.getpid()}: from step {first}")
    x = torch.linspace(-1, 1, 64)[rank::size].unsqueeze(1)
    for step in range(first, STEPS):
        loss = torch.nn.functional.mse_loss(parallel(x), 3 * x - 2)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients of all workers
        optimizer.step()
        time.sleep(STEP_TIME)
        if rank == 0 and (step + 1) % STEPS_PER_CHECKPOINT == 0:
            save(path, model, step + 1)
            say(f"checkpoint at step {step + 1}")
    dist.barrier()
    if rank == 0:
        say(f"trained: {model.weight.item():.3f} x + {model.bias.item():.3f} after {STEPS} steps")
    dist.destroy_process_group()


def load(path: Path, model: torch.nn.Module) -> int:
    """Load the checkpoint into the model; return the next step, which all workers take from rank 0."""
    step = torch.zeros(1, dtype=torch.int64)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        step[0] = saved["step"]
    dist.broadcast(step, src=0)  # a worker on another node may have read another checkpoint
    return int(step)


def save(path: Path, model: torch.nn.Module, step: int) -> None:
    """Replace the checkpoint at once, as this process may be killed at any moment."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "step": step}, unfinished)
    unfinished.replace(path)


def say(line: str) -> None:
    """Print a line for the reader of the agent's output."""
    print(line, flush=True)


# ---------------------------------------------------------------------------------- starting and killing the agents


class Agent:
    """A torchrun on this machine, and the lines of its workers."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.worker = 0  # its process id

    @classmethod
    async def start(cls, name: str, url: str, checkpoint: Path, ending: contextlib.AsyncExitStack) -> Agent:
        """Start an agent, which ends with this process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=rdzv", f"--rdzv-endpoint={url}"),
            *("--rdzv-id=job-7", "--nnodes=1:2", "--max-restarts=3", __file__, str(checkpoint)),
            stdout=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        print(f"started agent {name}")
        agent = cls(name, process)
        ending.callback(agent.end)
        return agent

    async def hear(self, containing: str) -> str:
        """Return the next line that contains this text; it must come soon."""
        assert self.process.stdout is not None
        with anyio.fail_after(60):
            while line := (await self.process.stdout.readline()).decode().rstrip():
                print(f"{self.name}: {line}", flush=True)
                if ", pid " in line:
                    self.worker = int(line.partition(", pid ")[2].partition(":")[0])
                if containing in line:
                    return line
        raise AssertionError(f"agent {self.name} has ended without {containing!r}")

    def end(self) -> None:
        """End the agent if it still runs."""
        if self.process.returncode is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the agent and its worker at once, as a power failure would."""
        self.process.kill()
        os.kill(self.worker, signal.SIGKILL)
        print(f"SIGKILL for agent {self.name} and its worker")


def number_in(line: str) -> int:
    """Return the step in a line."""
    return int(line.rpartition("step ")[2])


async def main() -> None:
    """Train with two agents, kill one, replace it, and check that no step was lost or repeated."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        async with store.serve() as server, contextlib.AsyncExitStack() as ending:
            one, other = [await Agent.start(name, server.url, checkpoint, ending) for name in ("one", "other")]
            zero_in_one, _ = await one.hear(" of 2"), await other.hear(" of 2")
            victim, survivor = (one, other) if zero_in_one.startswith("rank 0") else (other, one)
            saved = number_in(await victim.hear("checkpoint at step 40"))
            victim.kill()
            resumed = number_in(await survivor.hear("rank 0 of 1"))
            assert resumed in (saved, saved + STEPS_PER_CHECKPOINT), "it goes on from the last checkpoint"
            third = await Agent.start("third", server.url, checkpoint, ending)
            saved = number_in(await survivor.hear("checkpoint"))
            assert saved == resumed + STEPS_PER_CHECKPOINT
            together = number_in(await third.hear("rank 1 of 2"))
            assert together >= saved
            assert number_in(await survivor.hear("rank 0 of 2")) == together
            trained = await survivor.hear("trained")
            statuses = [await agent.process.wait() for agent in (victim, survivor, third)]
    assert "3.000 x + -2.000" in trained, trained
    assert statuses == [-signal.SIGKILL, 0, 0], statuses
    print(f"verified: resumed at step {resumed} alone and at step {together} with a replacement; {trained}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        asyncio.run(main())
