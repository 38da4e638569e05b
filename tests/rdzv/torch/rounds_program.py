"""A program for `test_rounds`: one process per node, which trains a small model in the loop of `rdzv.torch.rounds`.

python -m tests.rdzv.torch.rounds_program URL a,b*,+c STEPS     forks these nodes; one with a * awaits its rounds by
                                                                `async for`; one with a + waits for SIGUSR1 first

All nodes train for at least STEPS steps, and until every node with a + has been in a round for `TOGETHER` steps. So the
run is still open when such a node joins, however long that takes.

Each line is one JSON object: an event, its node, and its time (on the clock that all processes of a machine share).
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
import time

import torch

import rdzv.torch

TOGETHER = 20  # steps in a round with all late nodes

EVERY = 0.02  # seconds of a step, so that events can happen within it


def say(what: str, name: str, **more: object) -> None:
    """Write one line with a single write."""
    os.write(1, f"{json.dumps({'what': what, 'name': name, 'at': time.monotonic(), **more})}\n".encode())


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the state of a model."""
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()[:16]


class Job:
    """The training of one node, and its progress."""

    def __init__(self, name: str, steps: int, newcomers: set[str]) -> None:
        torch.manual_seed(len(name))
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = 0
        self.last = 0
        self._name, self._steps, self._newcomers = name, steps, newcomers

    def enter(self, round: rdzv.torch.TorchRound | rdzv.torch.AsyncTorchRound, here: set[str]) -> None:
        """Set the last step when a round begins."""
        # All members decide from the same round and the same first step, so they all end at the same step.
        self.last = max(self._steps, self.step + TOGETHER) if self._newcomers <= here else sys.maxsize
        say("round", self._name, number=round.number, rank=round.rank, size=round.world_size, step=self.step)

    def make_step(self, round: int, size: int) -> None:
        """Make one step, which takes `EVERY` seconds."""
        began = time.monotonic()
        torch.manual_seed(self.step)
        data = torch.randn(32, 8)
        loss = ((self.model(data).squeeze() - data.sum(dim=1)) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= size
        self.optimizer.step()
        self.step += 1
        told = {"step": self.step, "loss": round_to(float(loss)), "digest": digest(self.model)}
        say("step", self._name, **told, round=round)
        time.sleep(max(EVERY - (time.monotonic() - began), 0))

    def done(self) -> None:
        """Report that the loop has ended."""
        say("done", self._name, step=self.step)


def train(url: str, name: str, job: Job) -> None:
    """Train until all steps are done and all late nodes have joined."""
    for round in rdzv.torch.rounds(url, node_id=name):
        with round:
            job.step = round.sync_state(job.model, job.optimizer, job.step)
            job.enter(round, {who.node_id for who in round.participants()})
            while job.step < job.last:
                round.check(job.step)
                job.make_step(round.number, round.world_size)
    job.done()


async def train_awaited(url: str, name: str, job: Job) -> None:
    """Train in an awaited loop, with every feature of a round."""
    async for round in rdzv.torch.rounds(url, node_id=name):
        async with round:
            job.step = await round.sync_state(job.model, job.optimizer, job.step)
            job.enter(round, {who.node_id for who in await round.participants()})
            await round.keep("last", str(job.step).encode())
            assert await round.restore("last") is not None
            async with round.busy(60, "the first step"):
                round.beat(job.step)
            while job.step < job.last:
                await round.check(job.step)
                await round.in_thread(job.make_step, round.number, round.world_size)
    job.done()
    say("threads", name, left=[one.name for one in threading.enumerate() if one.name.startswith("rdzv round")])


def round_to(number: float) -> float:
    """Round for display."""
    return float(f"{number:.4f}")


def main() -> None:
    """Fork the nodes, and print a line with the process id of each. Exit with an error if one of them does."""
    url, given, steps = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    newcomers = {name.strip("+*") for name in given if name.startswith("+")}
    torch.set_num_threads(1)  # there are more processes than cores
    # the first optimizer step makes PyTorch import much: do it once, not in each process
    Job("", 0, set()).optimizer.step()
    children = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for one in given:
        name = one.strip("+*")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if name in newcomers:
                    signal.sigwait({signal.SIGUSR1})
                job = Job(name, steps, newcomers)
                if one.endswith("*"):
                    asyncio.run(train_awaited(url, name, job))
                else:
                    train(url, name, job)
                status = 0
            except BaseException as error:  # noqa: BLE001  a forked child must not continue as its parent
                say("error", name, error=repr(error))
            finally:
                os._exit(status)
        children[pid] = name
        say("started", name, pid=pid)
    while children:
        pid, status = os.wait()
        say("ended", children.pop(pid), status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
