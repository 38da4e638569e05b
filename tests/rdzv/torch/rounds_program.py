"""A program for `test_rounds`: one process per node, which trains a small model in the loop of `rdzv.torch.rounds`.

python -m tests.rdzv.torch.rounds_program URL a,b,+c STEPS     forks these nodes; one with a + waits for SIGUSR1 first

All train for so many steps at least, and on until every one with a + has been in a round for `TOGETHER` steps: so it
finds the run open, however long it takes to come.

Each line is one JSON object: what happened, at which node, when (on the clock that all processes of a machine share).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch

import rdzv.torch

TOGETHER = 20  # steps in a round with all who come later

EVERY = 0.02  # seconds of a step, so that there is time for something to happen in it


def say(what: str, name: str, **more: object) -> None:
    """Write one line, in one piece."""
    os.write(1, f"{json.dumps({'what': what, 'name': name, 'at': time.monotonic(), **more})}\n".encode())


def digest(model: torch.nn.Module) -> str:
    """What tells two states of a model apart."""
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()[:16]


def train(url: str, name: str, steps: int, newcomers: set[str]) -> None:
    """Train until all steps are done, and the newcomers have come."""
    torch.manual_seed(len(name))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = 0
    for round in rdzv.torch.rounds(url, node_id=name):
        with round:
            step = round.sync_state(model, optimizer, step)
            # All members judge by the same round, and the same step at its beginning: so they end at the same one.
            all_here = newcomers <= {who.node_id for who in round.participants()}
            last = max(steps, step + TOGETHER) if all_here else sys.maxsize
            say("round", name, number=round.number, rank=round.rank, size=round.world_size, step=step)
            while step < last:
                round.check(step)
                began = time.monotonic()
                torch.manual_seed(step)
                data = torch.randn(32, 8)
                loss = ((model(data).squeeze() - data.sum(dim=1)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= round.world_size
                optimizer.step()
                step += 1
                say("step", name, step=step, loss=round_to(float(loss)), digest=digest(model), round=round.number)
                time.sleep(max(EVERY - (time.monotonic() - began), 0))
    say("done", name, step=step)


def round_to(number: float) -> float:
    """Round for the eye."""
    return float(f"{number:.4f}")


def main() -> None:
    """Fork the nodes, and end as they do; a line for each says its process id."""
    url, names, steps = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    newcomers = {name.removeprefix("+") for name in names if name.startswith("+")}
    children = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for name in names:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if name.startswith("+"):
                    signal.sigwait({signal.SIGUSR1})
                train(url, name.removeprefix("+"), steps, newcomers)
                status = 0
            except BaseException as error:  # noqa: BLE001  a forked child must not go on as its parent
                say("error", name, error=repr(error))
            finally:
                os._exit(status)
        children[pid] = name
        say("started", name.removeprefix("+"), pid=pid)
    while children:
        pid, status = os.wait()
        say("ended", children.pop(pid), status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
