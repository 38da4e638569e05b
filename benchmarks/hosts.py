"""Several hosts in the URL: from SIGKILL of the process that hosts the store to the next round or step of the others.

    python -m benchmarks.hosts                       every line, five runs each; ten minutes
    python -m benchmarks.hosts --only handlers one --runs 20

Each node may host the store, at one of three addresses of this machine. Four nodes of `2:4` wait for changes, make
steps in `rounds()`, or train over gloo in `rdzv.torch.rounds`, and with one worker each under `rdzv run` and torchrun.
The node that hosts the store is killed, with its worker; the figure is the time until all others have a next round, or
have made a step without it. Beside the launchers stands the start of three workers at once.

`one host` is the same with one host in the URL: the time until the others have ended.

`drained` drains the host: the time from the order to a step of all others in the next round, and the steps that were
made twice or by only some. `lost` stops the host, as a machine that has vanished is as silent: the time from
`rdzv lost` to the next round; nobody may end before. `stopped` stops the host for three times the TTL: the time from
its continuation to a round of all four, in the same store.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import support
from benchmarks.recovery import TELL, WORKER, step_after
from benchmarks.torchrun import Agent, free_port, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 120.0  # seconds for any one thing
SETTLE = 1.0  # seconds of steps before the kill
NODES = 4
TTL = 3.0  # seconds, of `lost` and `stopped`

HANDLERS = (
    TELL
    + """
import asyncio, logging
import rdzv

async def main():
    async with rdzv.connect(sys.argv[1]) as handler, handler.changes() as changes:
        while True:
            info = await handler.next_rendezvous()
            tell(info.world_size)
            async for change in changes:
                if change != rdzv.NodesWaiting(0):
                    break

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""
)

ROUNDS = (
    TELL
    + """
import asyncio, logging
import rdzv

async def main():
    step = 0
    async for round in rdzv.rounds(sys.argv[1]):
        async with round:
            step, first = step if round.newest is None else round.newest[1] + 1, True  # the same for all members
            while True:
                await round.check(step)
                await round.store.barrier(f"step {step}", round.world_size)
                step += 1
                if first:
                    tell(round.world_size, step)
                first = False
                await asyncio.sleep(0.01)
    tell(0, step)

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""
)

TORCH_ROUNDS = (
    TELL
    + """
import logging
import torch
import torch.distributed as dist
import rdzv.torch

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for round in rdzv.torch.rounds(sys.argv[1]):
    with round:
        step, first = round.sync_state(model, optimizer, step), True
        while True:
            round.check(step)
            dist.all_reduce(torch.ones(1))
            step += 1
            if first:
                tell(round.world_size, step)
            first = False
            time.sleep(0.01)
"""
)


class Line(NamedTuple):
    """One line of the table: the command of a node, the goals in seconds, and what is measured."""

    name: str
    command: Callable[[str, str, Path], tuple[str, ...]]  # of the hosts, the parameters and the folder of the scripts
    median: float
    worst: float
    measure: Callable[[Line, Path], float]
    of_launcher: bool = False  # the start of workers is added to the goals
    hosts: int = 3
    parameters: str = ""

    @contextlib.contextmanager
    def nodes(self, folder: Path) -> Iterator[tuple[str, list[Agent]]]:
        """Start all nodes; yield the URL without parameters, and the nodes, the host first."""
        hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(self.hosts))
        parameters = f"min_nodes=2&max_nodes={NODES}&last_call_timeout=60{self.parameters}"
        command = self.command(hosts, parameters, folder)
        with contextlib.ExitStack() as stack:
            env = {"LOGLEVEL": "INFO", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            nodes = [stack.enter_context(started(*command, **env)) for _ in range(NODES)]
            for node in nodes:
                step_after(node, NODES, 0.0)
            time.sleep(SETTLE)
            nodes.sort(key=lambda node: not any("hosts the store" in line for line in node.lines))
            assert "hosts the store" in "".join(nodes[0].lines)
            yield f"tcp://{hosts}/job", nodes


def kill(line: Line, folder: Path) -> float:
    """Return the seconds from the kill of the host to the next round or step of all others."""
    with line.nodes(folder) as (_, (host, *others)):
        host.kill()
        killed = time.monotonic()
        return max(float(step_after(node, NODES - 1, killed)["at"]) for node in others) - killed


def end(line: Line, folder: Path) -> float:
    """Return the seconds from the kill of the host to the end of all others."""
    with line.nodes(folder) as (_, (host, *others)):
        host.kill()
        killed = time.monotonic()
        for node in others:
            node.process.wait(PATIENCE)
        return time.monotonic() - killed


def drain(line: Line, folder: Path) -> float:
    """Return the seconds from the drain of the host to the next step of all others; raise if a step was lost."""
    with line.nodes(folder) as (url, (host, *others)):
        name = next(text for text in "".join(host.lines).split() if text.startswith(f"{platform.node()}-"))
        ordered = time.monotonic()
        order("drain", url, name.rstrip(":,"))
        left_at = step_after(host, 0, ordered)["last"]
        steps = [step_after(node, NODES - 1, ordered) for node in others]
        assert {step["last"] for step in steps} == {left_at + 1}, f"{left_at} steps were made, then {steps}"
        return max(float(step["at"]) for step in steps) - ordered


def lose(line: Line, folder: Path) -> float:
    """Return the seconds from an operator's word that the silent host is lost to the next round of all others."""
    with line.nodes(folder) as (url, (host, *others)):
        host.process.send_signal(signal.SIGSTOP)
        time.sleep(4 * TTL)
        assert [node.process.poll() for node in others] == [None] * len(others), "nobody ends"
        place = next(text.partition("tcp://")[2].rstrip(":,;") for text in host.lines if "hosts the store" in text)
        order("lost", url, place.split()[0].rstrip(":,;"))
        told = time.monotonic()
        return max(float(step_after(node, NODES - 1, told - TTL)["at"]) for node in others) - told


def stop(line: Line, folder: Path) -> float:
    """Return the seconds from the continuation of a host that was stopped for three TTLs to a round of all."""
    with line.nodes(folder) as (_, nodes):
        nodes[0].process.send_signal(signal.SIGSTOP)
        time.sleep(3 * TTL)
        nodes[0].process.send_signal(signal.SIGCONT)
        resumed = time.monotonic()
        at = max(float(step_after(node, NODES, resumed)["at"]) for node in nodes)
        hosts = [node for node in nodes if any("hosts the store" in text for text in node.lines)]
        assert hosts == nodes[:1], "no second store begins"
        return at - resumed


def order(*words: str) -> None:
    """Give an operator's command."""
    subprocess.run([sys.executable, "-m", "rdzv", *words], check=True, capture_output=True, timeout=PATIENCE)


def _script(name: str) -> Callable[[str, str, Path], tuple[str, ...]]:
    return lambda hosts, parameters, folder: (str(folder / name), f"tcp://{hosts}/job?{parameters}")


def _rdzv_run(hosts: str, parameters: str, folder: Path) -> tuple[str, ...]:
    run = ("-m", "rdzv", "-v", "run", f"tcp://{hosts}/job?{parameters}", "--no-prefix", "--max-restarts=9")
    return (*run, "--", sys.executable, str(folder / "worker.py"))


def _torchrun(hosts: str, _: str, folder: Path) -> tuple[str, ...]:
    agent = ("-m", "rdzv.torchrun", "--rdzv-backend=rdzv", f"--rdzv-endpoint={hosts}", "--rdzv-id=job")
    options = (f"--nnodes=2:{NODES}", "--max-restarts=9", "--local-addr=127.0.0.1")
    return (*agent, *options, str(folder / "worker.py"))


SHORT = f"&ttl={TTL:g}"
LINES = {
    "handlers": Line("next_rendezvous", _script("handlers.py"), 0.5, 1.0, kill),
    "rounds": Line("rounds()", _script("rounds.py"), 0.6, math.inf, kill),
    "torch": Line("rdzv.torch.rounds", _script("torch_rounds.py"), 0.6, math.inf, kill),
    "run": Line("rdzv run", _rdzv_run, 0.5, math.inf, kill, of_launcher=True),
    "torchrun": Line("torchrun", _torchrun, 0.5, math.inf, kill, of_launcher=True),
    "one": Line("one host: all end", _script("handlers.py"), math.inf, math.inf, end, hosts=1),
    "drained": Line("drained: no step lost", _script("rounds.py"), math.inf, math.inf, drain),
    "lost": Line("rdzv lost", _script("handlers.py"), 1.0, math.inf, lose, parameters=SHORT),
    "stopped": Line("stopped for 3 TTL", _script("handlers.py"), math.inf, math.inf, stop, parameters=SHORT),
}
TORCH = {"torch", "run", "torchrun"}


def start_of_workers(folder: Path) -> float:
    """Return the seconds from the start of the survivors' workers at once to the first step of all."""
    env = {"WORLD_SIZE": str(NODES - 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        script = str(folder / "worker.py")
        workers = [stack.enter_context(started(script, RANK=str(rank), **env)) for rank in range(NODES - 1)]
        return max(float(step_after(worker, NODES - 1, begun)["at"]) for worker in workers) - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each line (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*LINES], help="these lines; default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the nodes end, too
    only = [key for key in options.only or LINES if support.HAS_TORCH or key not in TORCH]
    print(support.describe_machine(), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script, text in {
            "worker.py": WORKER,
            "handlers.py": HANDLERS,
            "rounds.py": ROUNDS,
            "torch_rounds.py": TORCH_ROUNDS,
        }.items():
            (folder / script).write_text(text, encoding="utf-8")
        launches = any(LINES[key].of_launcher for key in only)
        start = support.median([start_of_workers(folder) for _ in range(options.runs)]) if launches else 0.0
        for key in only:
            line, figures = LINES[key], []
            for _ in range(options.runs):
                try:
                    figures.append(line.measure(line, folder))
                except (queue.Empty, subprocess.TimeoutExpired):
                    figures.append(math.inf)  # not within PATIENCE
            more = start if line.of_launcher else 0.0
            goals = [f"{goal + more:.2f}" if goal < math.inf else "-" for goal in (line.median, line.worst)]
            rows.append((line.name, f"{support.median(figures):.2f}", f"{max(figures):.2f}", *goals))
            print(*rows[-1], flush=True)
    support.table(
        f"Seconds, medians of {options.runs} and worst; the start of {NODES - 1} workers takes {start:.2f}",
        ("", "median", "worst", "goal", "goal for the worst"),
        rows,
    )


if __name__ == "__main__":
    main()
