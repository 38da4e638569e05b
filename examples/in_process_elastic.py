"""Elastic training with PyTorch in process: no restart, no checkpoint, no lost step.

    python examples/in_process_elastic.py

Four processes train a small network with DistributedDataParallel, in the loop of `rdzv.torch.rounds`. One is killed
with SIGKILL: the others continue from memory, and repeat at most the step in flight. A replacement gets the state with
the most finished steps. One is drained, as before maintenance: all leave before the same step, and the others continue
without it. After each step every process reports a hash of its model; all of them must be equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

import rdzv
import rdzv.torch
import store

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

STEP_TIME = 0.02  # seconds; without it the example would end before the kill
POINTS = torch.linspace(-1, 1, 240).unsqueeze(1)
VALUES = torch.sin(3 * POINTS)  # to be learned


def train(pipe: Connection, url: str, name: str) -> None:
    """Train as one process; the loop, `sync_state` and `check` make it elastic."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    step = 0
    for round in rdzv.torch.rounds(url, node_id=name):
        with round:
            step = round.sync_state(model, optimizer, step)
            pipe.send(f"{name}: round {round.number}, rank {round.rank} of {round.world_size}, from step {step}")
            parallel = DistributedDataParallel(model)
            while True:
                round.check(step)  # all leave here together at a change of nodes, or when the run is closed
                mine = slice(round.rank, None, round.world_size)
                loss = torch.nn.functional.mse_loss(parallel(POINTS[mine]), VALUES[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                pipe.send((name, step, loss.item(), digest(model)))
                time.sleep(STEP_TIME)
        if round.ending is not None:
            pipe.send(f"{name}: after step {step}: {round.ending.reason}")


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the parameters."""
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()[:8]


# --------------------------------------------------------------------------------- starting and killing the processes


class Watcher:
    """Starts processes, and reads their reports."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "rdzv.torch", "__main__"])
        self.processes: dict[str, Any] = {}
        self.pipes: list[Connection] = []
        self.lines: list[str] = []
        self.steps: dict[int, dict[str, tuple[float, str]]] = {}  # by step, by name: loss and hash

    def start(self, name: str) -> None:
        """Start one more process."""
        ours, theirs = self.context.Pipe()
        self.processes[name] = self.context.Process(target=train, args=(theirs, self.url, name), daemon=True)
        self.processes[name].start()
        theirs.close()
        self.pipes.append(ours)

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Read reports until the condition holds."""
        while not condition():
            ready = wait(self.pipes, timeout=60)
            assert ready, "nobody says anything any more"
            for pipe in [pipe for pipe in self.pipes if pipe in ready]:
                try:
                    said: Any = pipe.recv()
                except EOFError:
                    self.pipes.remove(pipe)
                else:
                    self._take(said)

    def _take(self, said: str | tuple[str, int, float, str]) -> None:
        if isinstance(said, str):
            self.lines.append(said)
            print(said, flush=True)
            return
        name, step, loss, state = said
        told = self.steps.setdefault(step, {})
        told[name] = loss, state
        if step % 20 == 0 and len(told) == 1:
            print(f"step {step}: loss {loss:.4f}, state {state}", flush=True)

    def reached(self, step: int) -> Callable[[], bool]:
        """Return a condition: a process has made this step."""
        return lambda: any(made >= step for made in self.steps)

    def said(self, *words: str) -> Callable[[], bool]:
        """Return a condition: a line contains these words."""
        return lambda: any(all(word in line for word in words) for line in self.lines)


async def drain(url: str, name: str) -> None:
    """Do the same as `rdzv drain URL NAME --reason maintenance`."""
    async with rdzv.connect(url) as handler:
        await handler.drain(within=60, reason="maintenance", node_id=name)


async def close(url: str) -> None:
    """Do the same as `rdzv close URL --reason "learned enough"`."""
    async with rdzv.connect(url) as handler:
        await handler.set_closed("learned enough")


def main() -> None:
    """Start four, kill one, add one, drain one, and check the result."""
    with store.sync.serve() as server:
        watcher = Watcher(f"{server.url}/example?min_nodes=2&max_nodes=4&last_call_timeout=30")
        for name in ("ada", "ben", "cleo", "dan"):
            watcher.start(name)
        watcher.read_until(watcher.reached(30))
        print("SIGKILL for ben", flush=True)
        watcher.processes["ben"].kill()
        watcher.read_until(watcher.said("round 1, rank 2 of 3"))
        watcher.start("erin")
        watcher.read_until(watcher.said("erin: round 2, rank 3 of 4"))
        watcher.read_until(watcher.reached(max(watcher.steps) + 10))
        asyncio.run(drain(watcher.url, "cleo"))
        watcher.read_until(watcher.said("round 3", "of 3"))
        watcher.read_until(watcher.reached(max(150, max(watcher.steps) + 10)))
        asyncio.run(close(watcher.url))
        watcher.read_until(lambda: not watcher.pipes)  # all have ended
        statuses = {name: (process.join(), process.exitcode)[1] for name, process in watcher.processes.items()}

    assert statuses == {"ada": 0, "ben": -9, "cleo": 0, "dan": 0, "erin": 0}, statuses
    steps = max(watcher.steps)
    assert sorted(watcher.steps) == list(range(1, steps + 1)), "no step is lost"
    after_each = [{state for name, (_, state) in told.items() if name != "ben"} for told in watcher.steps.values()]
    assert all(len(states) == 1 for states in after_each), "after each step, all have the same state"
    left = [line for line in watcher.lines if "cleo to leave: maintenance" in line]
    assert len({line.partition(": ")[2] for line in left}) == 1, "all have left before the same step"
    losses = [next(iter(told.values()))[0] for _, told in sorted(watcher.steps.items())]
    assert losses[-1] < losses[0] / 20, "and the loss goes on falling"
    print(f"verified: {steps} steps, loss {losses[0]:.3f} to {losses[-1]:.4f}; one killed, one replaced, one drained")


if __name__ == "__main__":
    main()
