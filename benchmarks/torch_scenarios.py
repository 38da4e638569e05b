"""A torchrun user's view of faults: the same script on `rdzv` and on `c10d`, side by side.

    python -m benchmarks.torch_scenarios [--backends rdzv,c10d] [--only NAME NAME] [--limit 75]

Two agents of one worker each train, with PyTorch's and our defaults but for `--max-restarts=5` and one to three nodes;
then a fault happens to one. The output is about the other agent: the longest time without a step, its counted restarts,
its exit status when the job is told to end afterwards, and the lines on its screen without its worker's. "not" means
not within the limit.

The first agent hosts the store, unless the scenario has a store of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
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
from benchmarks.torchrun import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

START = 120.0  # seconds until the first step together
END = 45.0  # seconds for the job to end
STEADY = 3.0  # seconds of steps until the state counts as steady
STEP = 0.05  # seconds

WORKER = """
import json, os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while True:
    total = torch.tensor([1.0, float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(total)
    print(json.dumps([time.monotonic(), int(total[0]), restarts, os.getpid()]), flush=True)
    if total[1]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""

SERVE_C10D = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(10**6)
"""


@dataclass
class Agent:
    """A torchrun: the steps of its worker, and the lines of its screen."""

    process: subprocess.Popen[str]
    steps: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, size, restarts, process
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Read to the end, in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.steps.append(tuple(json.loads(line)))

    def read_errors(self) -> None:
        """Read to the end, in a thread."""
        assert self.process.stderr is not None
        self.lines.extend(line for line in self.process.stderr if line.strip() and not line.startswith("[rank"))

    def signal(self, number: int, *, worker: bool = True) -> None:
        """Send a signal to it, and perhaps to its worker."""
        for pid in (self.process.pid, *([self.steps[-1][3]] if worker and self.steps else [])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Job:
    """One job on one backend."""

    def __init__(self, backend: str, folder: Path, limit: float) -> None:
        self._backend, self._folder, self._limit = backend, folder, limit
        self._script, self._stop = folder / "train.py", folder / "stop"
        self._script.write_text(WORKER, encoding="utf-8")
        self._port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self.agents: list[Agent] = []

    def start_agent(self) -> Agent:
        """Start one more."""
        own = ["--rdzv-conf=is_host=0"] if self._server is not None else []
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={self._backend}"),
                *(f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=job", "--nnodes=1:3", "--max-restarts=5"),
                *("--local-addr=127.0.0.1", *own, str(self._script), str(self._stop)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        agent = Agent(process)
        for read in (agent.read, agent.read_errors):
            threading.Thread(target=read, daemon=True).start()
        self.agents.append(agent)
        return agent

    def start_store(self) -> None:
        """Serve the store in a process of its own."""
        command = (
            ["-m", "rdzv", "serve", "--data-dir", str(self._folder / "data"), "--port", str(self._port)]
            if self._backend == "rdzv"
            else ["-c", SERVE_C10D, str(self._port)]
        )
        self._server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
        time.sleep(5)

    def kill_store(self) -> None:
        """End it at once."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def begin(self) -> tuple[Agent, Agent]:
        """Start two agents, and wait until they have trained together for a while."""
        first = self.start_agent()
        time.sleep(6)
        second = self.start_agent()
        if not self.until_steady(first, 2, within=START):
            raise TimeoutError("they did not begin: " + "".join(first.lines[-5:]))
        return first, second

    def until_steady(self, agent: Agent, size: int, *, after: float = 0.0, within: float | None = None) -> bool:
        """Wait until an agent's worker has made steps of this size for a while; False if it does not, or has ended."""
        deadline = time.monotonic() + (self._limit if within is None else within)
        while time.monotonic() < deadline and agent.process.poll() is None:
            recent = [step for step in agent.steps[-200:] if step[0] > max(after, time.monotonic() - STEADY - 1)]
            if len(recent) > STEADY / STEP / 4 and all(step[1] == size for step in recent):
                return True
            time.sleep(0.1)
        return False

    def end(self, agent: Agent) -> str:
        """Tell the job to end; return the agent's status, or that it does not end."""
        self._stop.touch()
        try:
            return str(agent.process.wait(END))
        except subprocess.TimeoutExpired:
            return "none"

    def close(self) -> None:
        """Kill all processes."""
        for agent in self.agents:
            agent.signal(signal.SIGCONT)
            agent.signal(signal.SIGKILL)
            agent.process.wait()
        if self._server is not None:
            self.kill_store()


# the size afterwards; the fault, which returns the agent that it spares
Scenario = tuple[int, "Callable[[Job, Agent, Agent], Agent]"]


def _killed_worker(_: Job, first: Agent, second: Agent) -> Agent:
    os.kill(second.steps[-1][3], signal.SIGKILL)
    return first


def _killed(_: Job, first: Agent, second: Agent) -> Agent:
    second.signal(signal.SIGKILL)
    return first


def _host_killed(_: Job, first: Agent, second: Agent) -> Agent:
    first.signal(signal.SIGKILL)
    return second


def _host_ended(_: Job, first: Agent, second: Agent) -> Agent:
    first.signal(signal.SIGTERM, worker=False)
    return second


def _terminated(_: Job, first: Agent, second: Agent) -> Agent:
    second.signal(signal.SIGTERM, worker=False)
    return first


def _interrupted(_: Job, first: Agent, second: Agent) -> Agent:
    second.signal(signal.SIGINT, worker=False)
    return first


def _paused(_: Job, first: Agent, second: Agent) -> Agent:
    second.signal(signal.SIGSTOP)
    time.sleep(15)
    second.signal(signal.SIGCONT)
    return first


def _another_comes(job: Job, first: Agent, _: Agent) -> Agent:
    job.start_agent()
    return first


def _replaced(job: Job, first: Agent, second: Agent) -> Agent:
    second.signal(signal.SIGKILL)
    time.sleep(1)
    job.start_agent()
    return first


def _store_restarted(job: Job, first: Agent, _: Agent) -> Agent:
    job.kill_store()
    time.sleep(2)
    job.start_store()
    return first


SCENARIOS: dict[str, Scenario] = {
    "worker killed": (2, _killed_worker),
    "agent killed": (1, _killed),
    "agent killed and replaced": (2, _replaced),
    "agent stopped for 15 s": (2, _paused),
    "another agent comes": (3, _another_comes),
    "SIGTERM to an agent": (1, _terminated),
    "SIGINT to an agent": (1, _interrupted),
    "own store restarted": (2, _store_restarted),
    "store's host killed": (0, _host_killed),
    "store's host ended (SIGTERM)": (0, _host_ended),
}
"""The faults, and the number of workers that train afterwards; 0: the others cannot continue."""


def play(backend: str, name: str, limit: float, say: bool) -> tuple[Any, ...]:
    """Return seconds without a step, counted restarts, status, and lines."""
    size, act = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(backend, Path(folder), limit)
        try:
            if name == "own store restarted":
                job.start_store()
            agents = job.begin()
            before = {id(agent): len(agent.lines) for agent in agents}
            began = time.monotonic()
            agent = act(job, *agents)
            if size:
                well = job.until_steady(agent, size, after=began + STEADY)
                at = [step[0] for step in agent.steps if step[0] > began - 1]
                longest = max((later - earlier for earlier, later in itertools.pairwise(at)), default=limit)
                without = f"{longest:.1f}" if well else "not"
                restarts, status = str(agent.steps[-1][2]) if well else "-", job.end(agent)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.process.wait(limit)
                without = f"ends after {time.monotonic() - began:.0f}"
                restarts, status = "-", str(agent.process.poll())
            time.sleep(0.5)
            lines = agent.lines[before[id(agent)] :]
            if say:
                print(f"---- {name}, {backend}\n" + "".join(lines), flush=True)
            return without, restarts, status, len(lines)
        except TimeoutError as error:
            print(f"{name}, {backend}: {error}", flush=True)
            return "-", "-", "-", "-"
        finally:
            job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="rdzv,c10d", help="which to compare")
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, default=[*SCENARIOS], metavar="NAME", help="the scenarios, by name"
    )
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for any one thing")
    parser.add_argument("--say", action="store_true", help="show the lines of the screens, too")
    options = parser.parse_args()
    print(support.describe_machine())
    backends = options.backends.split(",")
    rows = []
    for name in options.only:
        played = [play(backend, name, options.limit, options.say) for backend in backends]
        print(name, played, flush=True)
        rows.append((name, *(" / ".join(map(str, one)) for one in played)))
    support.table("seconds without a step / restarts counted / status / lines", ("what happens", *backends), rows)


if __name__ == "__main__":
    main()
