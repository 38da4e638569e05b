"""From SIGKILL of a node to the survivors' next step, and from a replacement's start to the step of all.

    python -m benchmarks.recovery                  every way, five runs each; ten minutes
    python -m benchmarks.recovery --only rounds preload handlers

Three nodes of one worker each train together over gloo. One node, with its worker, is killed; the first figure is the
time until both survivors have made a step without it. Then a replacement starts; the second is the time until all three
have made a step together, and the third the longest pause of the survivors: a replacement's imports delay no other
node. The ways are torchrun with PyTorch's own backend and with ours, `rdzv run`, the same with `--preload torch`, and
`rdzv.torch.rounds`, which restarts nothing. Beside them is the floor of any launcher: the start of two workers at once,
to their first step.

`torchrun, stuck` is torchrun with our backend and a job that cannot be ended: it handles SIGTERM in Python, and its
main thread is in a collective, where Python runs no handler. The agent waits 30 s before it kills such a worker, and no
rendezvous can shorten that: PyTorch 2.13 applies `--shutdown-timeout` when the agent ends, but not when it restarts its
workers.

`rounds, untold` does not report a failed collective to the store, which then waits for `gone_ttl`.

`64 handlers` is the library alone, without PyTorch: 64 nodes, 8 per process but for the killed one; a step is a
survivor's next round.

PyTorch's c10d waits for `last_call_timeout`, 30 s by default and 1 s here; and its sharing of the store is off, with
which no replacement gets in (see `benchmarks.torchrun`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import queue
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import rdzv
from benchmarks import support
from benchmarks.torchrun import Agent, free_port, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

PATIENCE = 120.0  # seconds for any one thing
SETTLE = 1.0  # seconds of steps before a change
NODES = 3
HANDLERS = 64
PER_PROCESS = 8  # handlers
SHUTDOWN_TIMEOUT = 30  # seconds that torchrun waits for a stuck job, whatever `--shutdown-timeout` says

TELL = """
import json, os, sys, time

def tell(size, last=None):
    said = {"size": size, "at": time.monotonic(), "last": last, "pid": os.getpid()}
    print(json.dumps(said), flush=True)
"""

WORKER = (
    TELL
    + """
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    if step == 0:
        tell(dist.get_world_size())
    time.sleep(0.01)
"""
)

STUCK = (
    TELL
    + """
import signal
import torch
import torch.distributed as dist

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # "save, and end": it is not run while C++ waits
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 0:
        tell(size)
    time.sleep(0.01)
while size < 3:
    time.sleep(1)
if rank < 2:  # the ranks 0 and 1 wait for one another, in a collective that the third has no part in
    dist.recv(torch.ones(1), src=1 - rank)
time.sleep(1000)
"""
)

ROUNDS = (
    TELL
    + """
import torch
import torch.distributed as dist
import rdzv.torch

torch.set_num_threads(1)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, last = 0, None
if sys.argv[2:] == ["untold"]:
    from rdzv.loop import round_monitor

    async def say_nothing(node, membership, why):
        pass

    round_monitor.accuse_unknown_member = say_nothing
for round in rdzv.torch.rounds(sys.argv[1]):
    with round:
        step, first = round.sync_state(model, optimizer, step), True
        while True:
            round.check(step)
            dist.all_reduce(torch.ones(1))
            step += 1
            if first:
                tell(round.world_size, last)
            first, last = False, time.monotonic()
            time.sleep(0.01)
"""
)


@dataclass(frozen=True)
class Figures:
    """The seconds of one run; not a number if not measured.

    Attributes:
        alone: From the kill to the step of both survivors.
        all_of_them: From the replacement's start to the step of all.
        pause: The survivors' longest time without a step meanwhile.
    """

    alone: float
    all_of_them: float = math.nan
    pause: float = math.nan


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: As in the table.
        start: Starts one more node, given the store's endpoint and the folder of the scripts.
        target: Seconds from the kill to the step, beyond `start_counts` times the start of two workers.
        start_counts: 1 if workers are restarted, else 0.
        own_store: True if the first node hosts the store, rather than a store of ours.
        replaces: True if a replacement is measured, too.
    """

    name: str
    start: Callable[[str, Path], tuple[str, ...]]
    target: float
    start_counts: bool = False
    own_store: bool = False
    replaces: bool = True


def _torchrun(backend: str, *more: str, script: str = "worker.py") -> Callable[[str, Path], tuple[str, ...]]:
    common = ("--rdzv-id=job", f"--nnodes=2:{NODES}", "--max-restarts=9", "--local-addr=127.0.0.1", *more)
    return lambda endpoint, folder: (
        *("-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"),
        *(*common, str(folder / script)),
    )


def _rdzv_run(*more: str) -> Callable[[str, Path], tuple[str, ...]]:
    return lambda endpoint, folder: (
        *("-m", "rdzv", "run", f"{endpoint}/job?min_nodes=2&max_nodes={NODES}", "--no-prefix", "--max-restarts=9"),
        *("--grace=5", *more, "--", sys.executable, str(folder / "worker.py")),
    )


def _rounds(*more: str) -> Callable[[str, Path], tuple[str, ...]]:
    return lambda endpoint, folder: (str(folder / "rounds.py"), f"{endpoint}/job?min_nodes=2&max_nodes={NODES}", *more)


WAYS = {
    "c10d": Way("torchrun, c10d", _torchrun("c10d", "--rdzv-conf=last_call_timeout=1"), 0.2, True, own_store=True),
    "torchrun": Way("torchrun, rdzv", _torchrun("rdzv"), 0.2, True),
    "stuck": Way("torchrun, stuck", _torchrun("rdzv", script="stuck.py"), SHUTDOWN_TIMEOUT + 0.2, True, replaces=False),
    "run": Way("rdzv run", _rdzv_run(), 0.2, True),
    "preload": Way("rdzv run --preload", _rdzv_run("--preload=torch", "--standby=1"), 0.6),
    "untold": Way("rounds, untold", _rounds("untold"), 0.2),
    "rounds": Way("rdzv.torch.rounds", _rounds(), 0.2),
}


def measure(way: Way, folder: Path) -> Figures:
    """Kill one of three nodes, and replace it."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        endpoint = f"127.0.0.1:{port}" if way.own_store else stack.enter_context(support.serving())

        def start() -> Agent:
            command = way.start(endpoint, folder)
            return stack.enter_context(started(*command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))

        nodes = [start()]
        if way.own_store:  # its host must not be killed
            _until_listening(port)
        nodes += [start() for _ in range(NODES - 1)]
        for node in nodes:
            step_after(node, NODES, 0.0)
        time.sleep(SETTLE)
        if not way.replaces:
            time.sleep(2 * SETTLE)  # until they are stuck
        victim = nodes.pop()
        victim.kill()
        killed = time.monotonic()
        alone = max(step_after(node, NODES - 1, killed)["at"] for node in nodes) - killed
        if not way.replaces:
            return Figures(alone)
        time.sleep(SETTLE)
        begun = time.monotonic()
        nodes.append(start())
        steps = [step_after(node, NODES, begun) for node in nodes]
        pauses = [step["at"] - step["last"] for step in steps[:-1] if step["last"] is not None]
        return Figures(alone, max(step["at"] for step in steps) - begun, max(pauses, default=math.nan))


def step_after(node: Agent, size: int, moment: float) -> dict[str, Any]:
    """Return a node's report of its first step with `size` nodes after a moment."""
    while True:
        said = node.steps.get(timeout=PATIENCE)
        if said["size"] == size and said["at"] > moment:
            return said


def _until_listening(port: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at port {port}")


def start_of_workers(folder: Path) -> float:
    """Return seconds from the start of two workers at once to the first step of both."""
    port = str(free_port())
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                started(
                    str(folder / "worker.py"),
                    RANK=str(rank),
                    WORLD_SIZE=str(NODES - 1),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
            )
            for rank in range(NODES - 1)
        ]
        steps: list[float] = [step_after(worker, NODES - 1, begun)["at"] for worker in workers]
    return max(steps) - begun


# ------------------------------------------------------------------------------------------ without PyTorch


def handlers(pipe: Connection, url: str, names: list[str]) -> None:
    """Run several nodes in one process; report each round once all have it, until the pipe closes."""

    async def one(name: str, done: Callable[[int], None]) -> None:
        async with rdzv.connect(url, node_id=name, is_host=False) as handler, handler.changes() as changes:
            while True:
                info = await handler.next_rendezvous()
                done(info.world_size)
                async for change in changes:
                    if change != rdzv.NodesWaiting(0):
                        break

    async def main() -> None:
        met: dict[int, int] = {}

        def done(size: int) -> None:
            met[size] = met.get(size, 0) + 1
            if met[size] % len(names) == 0:
                pipe.send((size, time.monotonic()))

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(one, name, done)

    support.run(main())


def measure_handlers() -> Figures:
    """Kill one of 64 handlers, and replace it."""
    names = [f"node-{number:02}" for number in range(HANDLERS)]
    first, *others = names
    parts = [others[low : low + PER_PROCESS] for low in range(0, len(others), PER_PROCESS)]
    with support.serving() as server:
        url = f"{server}/job?min_nodes={HANDLERS - 1}&max_nodes={HANDLERS}"
        # The first to arrive coordinates, so a plain member is killed: `benchmarks.regroup` kills both.
        with support.workers(*((handlers, url, part) for part in parts)) as survivors:
            time.sleep(SETTLE)
            with support.workers((handlers, url, [first])) as (victim,):
                for worker in (*survivors, victim):
                    _round_of(worker, HANDLERS)
                time.sleep(SETTLE)
                victim.process.kill()
                killed = time.monotonic()
                alone = max(_round_of(worker, HANDLERS - 1) for worker in survivors) - killed
            time.sleep(SETTLE)
            begun = time.monotonic()
            with support.workers((handlers, url, [first])) as (replacement,):
                everybody = max(_round_of(worker, HANDLERS) for worker in (*survivors, replacement)) - begun
    return Figures(alone, everybody)


def _round_of(worker: support.Worker, size: int) -> float:
    """Return the time when all handlers of a process had a round of this size."""
    while True:
        got, at = worker.hear(PATIENCE)
        if got == size:
            return float(at)


# ------------------------------------------------------------------------------------------ the table


def _row(name: str, figures: list[Figures], target: float) -> Iterator[object]:
    yield name
    for column in ("alone", "all_of_them", "pause"):
        values = [getattr(one, column) for one in figures]
        if any(math.isnan(value) for value in values):
            yield "-"
            yield "-"
        else:
            yield f"{support.median(values):.2f}"
            yield f"{max(values):.2f}"
    yield f"{target:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*WAYS, "handlers"], help="these ways; default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the nodes end, too
    only = options.only or [*WAYS, "handlers"]
    print(support.describe_machine(), flush=True)
    if not support.HAS_TORCH:
        only = ["handlers"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script, text in (("worker.py", WORKER), ("stuck.py", STUCK), ("rounds.py", ROUNDS)):
            (folder / script).write_text(text, encoding="utf-8")
        starts = [start_of_workers(folder) for _ in range(options.runs)] if support.HAS_TORCH else [math.nan]
        start = support.median(starts)
        for key in only:
            figures = []
            for _ in range(1 if key == "stuck" else options.runs):
                try:
                    figures.append(measure_handlers() if key == "handlers" else measure(WAYS[key], folder))
                except (queue.Empty, TimeoutError):
                    figures.append(Figures(math.inf, math.inf, math.inf))  # not within PATIENCE
            way = WAYS.get(key)
            target = 0.2 if way is None else way.target + (start if way.start_counts else 0.0)
            rows.append(tuple(_row(f"{HANDLERS} handlers" if way is None else way.name, figures, target)))
            print(*rows[-1], flush=True)
    support.table(
        f"Seconds, medians of {options.runs} and worst; the start of two workers takes {start:.2f} ({max(starts):.2f})",
        ("", "kill to step", "worst", "replaced", "worst", "pause for it", "worst", "target"),
        rows,
    )


if __name__ == "__main__":
    main()
