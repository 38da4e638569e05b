"""S13 under PyTorch: the process that hosts the store is killed, and the training of the survivors goes on.

Real processes, with three hosts in the list, all of them this machine.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import Child, free_port, require, start, start_python

require("torch")
pytestmark = [pytest.mark.some_here(1), pytest.mark.timeout(300)]

PATIENCE = 90.0  # seconds, for a busy machine; benchmarks measure

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
        print(json.dumps({"size": int(total), "pid": os.getpid()}), flush=True)
    time.sleep(0.02)
"""

LOOP = """
import json, logging, sys, time
import torch
import torch.distributed as dist
import rdzv.torch

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
model, step = torch.nn.Linear(4, 4), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for round in rdzv.torch.rounds(sys.argv[1]):
    with round:
        had, begun = step, True
        step = round.sync_state(model, optimizer, step)
        while True:
            round.check(step)
            total = torch.ones(1)
            dist.all_reduce(total)
            step += 1
            if begun:
                print(json.dumps({"size": int(total), "round": round.number, "had": had, "step": step}), flush=True)
            begun = False
            time.sleep(0.01)
"""


def hosts() -> str:
    return f"127.0.0.1,127.0.0.2,127.0.0.3:{free_port()}"  # the last port holds for all


async def of_size(node: Child, size: int) -> dict[str, int]:
    """Return the line of the next round of this size after its first step."""
    while True:
        said: dict[str, int] = json.loads(await node.line('{"size"', timeout=PATIENCE))
        if said["size"] == size:
            return said


def the_host(nodes: list[Child]) -> Child:
    (host,) = [node for node in nodes if "hosts the store" in node.written()]
    return host


@pytest.mark.in_ci
async def test_s13_agents_of_torchrun_survive_the_kill_of_the_one_that_hosts_the_store(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    agent: tuple[str, ...] = (
        sys.executable,
        "-m",
        "rdzv.torchrun",
        "--rdzv-backend=rdzv",
        f"--rdzv-endpoint={hosts()}",
    )
    agent += ("--rdzv-id=job", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=9", str(script))
    workers: dict[Child, int] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def add() -> Child:
            return await stack.enter_async_context(start(*agent, env={"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}))

        def end_workers() -> None:  # workers of torchrun lead sessions of their own
            for pid in workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        stack.callback(end_workers)
        agents = [await add() for _ in range(3)]
        for _ in range(2):
            for one in agents:
                workers[one] = (await of_size(one, 3))["pid"]
            host = the_host(agents)
            host.kill()
            os.kill(workers.pop(host), signal.SIGKILL)
            agents.remove(host)
            for one in agents:
                workers[one] = (await of_size(one, 2))["pid"]
            agents.append(await add())
        assert [one.returncode for one in agents] == [None] * 3


@pytest.mark.in_ci
async def test_s13_members_of_rounds_of_pytorch_survive_the_kill_of_the_one_that_hosts_the_store() -> None:
    url = f"tcp://{hosts()}/job?min_nodes=2&max_nodes=3&last_call_timeout=60"
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(start_python("-c", LOOP, url)) for _ in range(3)]
        for _ in range(2):
            began = [await of_size(node, 3) for node in nodes]
            await asyncio.sleep(0.5)  # some steps
            host = the_host(nodes)
            host.kill()
            nodes.remove(host)
            told = [await of_size(node, 2) for node in nodes]
            assert len({one["round"] for one in told}) == 1
            assert {one["step"] for one in told} == {max(one["had"] for one in told) + 1}, "no step is lost"
            assert told[0]["step"] > began[0]["step"] + 1
            nodes.append(await stack.enter_async_context(start_python("-c", LOOP, url)))
        assert [node.returncode for node in nodes] == [None] * 3
