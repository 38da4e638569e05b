"""torchrun, two agents of one worker each: from SIGKILL of one to the survivor's step, and from a replacement's start.

    python -m benchmarks.torchrun [--backends rdzv,c10d] [--runs 3] [--c10d-last-call-timeout 1] [--only host]

Each run starts two agents, waits for the first step of both, kills one agent with its worker, and measures the time
until the other has made a step alone; then it starts another agent, and measures the time until both have made a step
together. The floor of any backend is measured beside it: one worker's time from its start to its first step, and an
agent's imports.

Then, with a store that the first agent hosts, that agent is killed with its worker: the figures are the time until the
other has ended, its status, and the lines on its screen without its worker's.

PyTorch's c10d by default takes 44 s for the first, with its last call of 30 s: `last_call_timeout` limits that here,
while ours has its defaults, and ends a last call when no other node is known to come. By default it never gets to the
second, as a newcomer waits for an address that is not published again; here its sharing of the store is off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import support

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 120.0  # seconds for any one thing

WORKER = """
import json, os, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
for step in range(10**9):
    total = torch.ones(1)
    dist.all_reduce(total)
    if step == 0:
        said = {"size": dist.get_world_size(), "rank": dist.get_rank(), "at": time.monotonic(), "pid": os.getpid()}
        print(json.dumps(said), flush=True)
    time.sleep(0.02)
"""


@dataclass
class Agent:
    """A torchrun, or a worker alone, and its first steps."""

    process: subprocess.Popen[str]
    steps: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    pids: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # on standard error, without the worker's

    def read(self) -> None:
        """Read to the end, in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"size"'):
                said = json.loads(line)
                self.pids.append(said["pid"])
                self.steps.put(said)

    def read_errors(self) -> None:
        """Read to the end, in a thread."""
        assert self.process.stderr is not None
        self.lines.extend(line for line in self.process.stderr if line.strip() and not line.startswith("[rank"))

    def first_step(self, size: int) -> float:
        """Return the time of its first step with `size` workers."""
        while True:
            said = self.steps.get(timeout=PATIENCE)
            if said["size"] == size:
                at: float = said["at"]
                return at

    def kill(self) -> None:
        """End the agent and its worker at once."""
        for pid in (self.process.pid, *self.pids[-1:]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(*command: str, **env: str) -> Iterator[Agent]:
    """Run a command during the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    agent = Agent(process)
    reading = [threading.Thread(target=read, daemon=True) for read in (agent.read, agent.read_errors)]
    for thread in reading:
        thread.start()
    try:
        yield agent
    finally:
        agent.kill()
        process.wait()
        for thread in reading:
            thread.join(PATIENCE)


def measure(backend: str, script: str, last_call_timeout: float) -> tuple[float, float]:
    """Return seconds from the kill to the survivor's step, and from a replacement's start to the step of both."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        if backend == "rdzv":
            endpoint, conf = stack.enter_context(support.serving()), []
        else:
            endpoint, conf = f"127.0.0.1:{port}", [f"--rdzv-conf=last_call_timeout={last_call_timeout:g}"]

        def agent() -> Agent:
            return stack.enter_context(
                started(
                    *("-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"),
                    *("--rdzv-id=job", "--nnodes=1:2", "--max-restarts=5", "--local-addr=127.0.0.1", *conf, script),
                    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                )
            )

        survivor = agent()  # under c10d it hosts the store, so it must survive
        if backend == "c10d":
            time.sleep(8)
        victim = agent()
        survivor.first_step(2)
        victim.first_step(2)
        time.sleep(2)
        victim.kill()
        killed = time.monotonic()
        alone = survivor.first_step(1) - killed
        time.sleep(2)
        begun = time.monotonic()
        replacement = agent()
        both = max(replacement.first_step(2), survivor.first_step(2)) - begun
    return alone, both


def measure_host(backend: str, script: str) -> tuple[float, int, int]:
    """Return seconds from the kill of the store's host to the other agent's end, its status, and its lines."""
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}")
    options = ("--rdzv-id=job", "--nnodes=1:2", "--max-restarts=5", "--local-addr=127.0.0.1", script)
    with contextlib.ExitStack() as stack:
        agents = []
        for _ in range(2):
            agents.append(stack.enter_context(started(*common, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")))
            time.sleep(8)  # the first one hosts
        for agent in agents:
            agent.first_step(2)
        host, other = agents
        before = len(other.lines)
        host.kill()
        killed = time.monotonic()
        status = other.process.wait(PATIENCE)
        took = time.monotonic() - killed
    return took, status, len(other.lines) - before


def free_port() -> int:
    """Return a port that was free a moment ago, as c10d cannot listen on port 0."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def worker_start(script: str) -> float:
    """Return seconds from the start of a worker alone to its first step."""
    begun = time.monotonic()
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(script, **env) as worker:
        return worker.first_step(1) - begun


def agent_start() -> float:
    """Return the seconds of an agent's imports."""
    begun = time.monotonic()
    program = "import torch.distributed.run, torch.distributed.elastic.rendezvous.registry"
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="rdzv,c10d", help="which to compare")
    parser.add_argument("--runs", type=int, default=3, help="how many of each")
    parser.add_argument("--c10d-last-call-timeout", type=float, default=1.0, help="seconds; PyTorch's default is 30")
    parser.add_argument("--only", choices=("steps", "host"), help="measure one of the two alone")
    options = parser.parse_args()
    print(support.describe_machine())
    if not support.HAS_TORCH:
        raise SystemExit("PyTorch is not installed")
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder) / "train.py")
        Path(script).write_text(WORKER, encoding="utf-8")
        if options.only != "steps":
            ends = [(name, *measure_host(name, script)) for name in options.backends.split(",")]
            support.table(
                "The agent that hosts the store is killed",
                ("backend", "seconds to the other's end", "its status", "lines on its screen"),
                [(name, f"{took:.1f}", status, lines) for name, took, status, lines in ends],
            )
        if options.only == "host":
            return
        workers, agents = [], []
        measured: dict[str, list[tuple[float, float]]] = {}
        for backend in options.backends.split(","):
            figures = measured[backend] = []
            for _ in range(options.runs):
                workers.append(worker_start(script))
                agents.append(agent_start())
                try:
                    figures.append(measure(backend, script, options.c10d_last_call_timeout))
                except queue.Empty:
                    figures.append((float("inf"), float("inf")))  # not within PATIENCE
    worker, agent = support.median(workers), support.median(agents)
    rows = []
    for backend, figures in measured.items():
        lost, grown = (support.median(column) for column in zip(*figures, strict=True))
        rows.append((backend, f"{lost:.2f}", f"{lost - worker:+.2f}", f"{grown:.2f}", f"{grown - worker - agent:+.2f}"))
    support.table(
        f"Seconds, medians of {options.runs}; a worker's start takes {worker:.2f}, an agent's imports {agent:.2f}",
        ("backend", "kill to step alone", "less a worker", "start to step of both", "less agent and worker"),
        rows,
    )


if __name__ == "__main__":
    main()
