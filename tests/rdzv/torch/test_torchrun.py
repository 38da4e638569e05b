"""`torchrun --rdzv-backend=rdzv` with real agents and workers: nodes that die, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import rdzv
from rdzv import torchrun
from rdzv.node.handler import Handler
from tests.support.launched import TAKES_MASTER_PORT
from tests.support.processes import Child, free_port, require, start, start_python

WORKER = """
import json, os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
says = {"rank": rank, "size": size, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "pid": os.getpid()}
for step in range(10**6):
    total = torch.tensor([1.0, float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(total)
    assert total[0] == size
    if step == 0:
        print(json.dumps(says), flush=True)
    if total[1]:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""


def torchruns() -> tuple[str, str]:
    """Return the modules that can use our backend: torchrun itself, and ours, which PyTorch 2.4 needs."""
    from rdzv.torch.pytorch import RELEASE

    ours = "rdzv.torchrun"
    return ("torch.distributed.run" if RELEASE >= (2, 5) else ours), ours


def agents_of_2_4() -> bool:
    """Return True with PyTorch 2.4; without PyTorch, False."""
    return find_spec("torch") is not None and torchruns()[0] == "rdzv.torchrun"


class Job:
    """The agents of one run on this machine, and the file that tells their workers to end."""

    def __init__(self, folder: Path, endpoint: str, *, worker: str = WORKER) -> None:
        self._endpoint = endpoint
        self._stop = folder / "stop"
        self._script = folder / "train.py"
        self._script.write_text(worker, encoding="utf-8")
        self._stack = contextlib.AsyncExitStack()
        self._workers: set[int] = set()  # they lead sessions of their own, and survive their agents

    async def agent(self, *options: str, module: str = "", level: str = "INFO") -> Child:
        """Start an agent. `options` are torchrun's, besides those that all agents have."""
        # As a module, since torchrun itself may not be on the path.
        return await self._stack.enter_async_context(
            start(
                sys.executable,
                *("-m", module or torchruns()[0], "--rdzv-backend=rdzv", f"--rdzv-endpoint={self._endpoint}"),
                *("--rdzv-id=job", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *options),
                *(str(self._script), str(self._stop)),
                env={"OMP_NUM_THREADS": "1", "LOGLEVEL": level},
            )
        )

    def stop(self) -> None:
        """Tell the workers to end after their next step."""
        self._stop.touch()

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        await self._stack.aclose()

    async def first_step(self, agent: Child) -> dict[str, Any]:
        """Return the line that an agent's worker prints after its first step in the next round."""
        says: dict[str, Any] = json.loads(await agent.line(containing='{"rank"', timeout=60))
        self._workers.add(says["pid"])
        return says


def kill(agent: Child, worker: int) -> None:
    """Kill an agent and its worker at once, as if their machine had lost power."""
    agent.kill()
    os.kill(worker, signal.SIGKILL)


class Endpoint:
    """`rdzv serve` in a process of its own, which can be killed. With a data directory it can be started again."""

    def __init__(self, folder: Path | None = None) -> None:
        self._data = () if folder is None else ("--data-dir", str(folder))
        self._stack = contextlib.AsyncExitStack()
        self.port = 0

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"tcp://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Endpoint:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def die_and_come_back(self) -> None:
        """Kill the server and start it again."""
        await self.die()
        await self._start()

    async def die(self) -> None:
        """Kill the server."""
        self._process.kill()
        await self._process.wait()

    async def _start(self) -> None:
        command = ("-m", "rdzv", "serve", *self._data, "--port", str(self.port))
        self._process = await self._stack.enter_async_context(start_python(*command))
        said = await self._process.says("listens on")
        self.port = int(said.partition("listens on ")[2].partition(",")[0].rpartition(":")[2])


def test_without_pytorch_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(SystemExit, match=r"there is no PyTorch .*pip install 'rdzv\[torch\]'"):
        torchrun.main()


@pytest.mark.timeout(400)  # six agents and nine workers, each of which imports PyTorch
async def test_a_job_outlives_its_agents_and_the_process_that_serves_the_store(tmp_path: Path) -> None:
    """A single story, since every agent takes seconds: kills, a replacement, a spare, SIGTERM, and success."""
    require("torch")
    async with Endpoint(tmp_path / "data") as server, Job(tmp_path, f"127.0.0.1:{server.port}") as job:
        pair = [await job.agent() for _ in range(2)]
        began = [await job.first_step(agent) for agent in pair]
        assert sorted(step["rank"] for step in began) == [0, 1]
        assert {(step["size"], step["restarts"]) for step in began} == {(2, 0)}

        # The agent of rank 0 is killed, whose worker hosted the workers' store. The other agent continues alone.
        first = 0 if began[0]["rank"] == 0 else 1
        kill(pair[first], began[first]["pid"])
        survivor = pair[1 - first]
        alone = await job.first_step(survivor)
        assert (alone["rank"], alone["size"]) == (0, 1)

        # The store's server is killed in the middle of a step, and restarted. No round ends because of that.
        await server.die_and_come_back()

        # A replacement joins, and the survivor keeps its rank.
        replacement = await job.agent()
        assert (await job.first_step(replacement))["rank"] == 1
        grown = await job.first_step(survivor)
        assert (grown["rank"], grown["size"]) == (0, 2)
        spare = await job.agent()
        await until_a_spare_waits(server.url)
        # SIGTERM ends one agent but not the run: the spare becomes a member.
        replacement.terminate()
        assert await replacement.wait(timeout=60) != 0
        again = [await job.first_step(survivor), await job.first_step(spare)]
        assert [step["size"] for step in again] == [2, 2]
        assert again[0]["rank"] == 0

        # An agent that is a spare when the job is done ends well, too.
        another = await job.agent("--rdzv-conf=join_timeout=60")
        await until_a_spare_waits(server.url)
        job.stop()
        for agent in (survivor, spare, another):
            assert await agent.wait(timeout=60) == 0, agent.written()
        assert "Traceback" not in replacement.written()
        assert "this agent ends, since it was told to end by SIGTERM; the run goes on" in replacement.written()
        assert re.search(r"left: .*: it was told to end by SIGTERM; meeting again", survivor.written())


async def until_a_spare_waits(url: str) -> None:
    async with asyncio.timeout(30), rdzv.connect(f"{url}/job", is_host=False) as observer:
        assert isinstance(observer, Handler)
        async with contextlib.aclosing(observer.statuses()) as statuses:
            async for status in statuses:
                if status.spares:
                    return


async def test_an_agent_can_host_the_store(tmp_path: Path) -> None:
    require("torch")
    async with Job(tmp_path, f"127.0.0.1:{free_port()}") as job:
        pair = [await job.agent("--nnodes=2", "--max-restarts=0", module=module) for module in torchruns()]
        for agent in pair:
            assert (await job.first_step(agent))["size"] == 2
            # LOGLEVEL=INFO works as in PyTorch: the lines of all our modules are there, with its prefix.
            line = await agent.says("has rank ")
            prefix = r"(I\d{4} [\d:.]+ \d+ rdzv\] |INFO:[a-z._]+:)"  # the second form is that of PyTorch 2.4
            assert re.search(rf"{prefix}run job, round 0: node \S+ has rank [01] of 2$", line), line
        job.stop()
        for agent in pair:
            assert await agent.wait(timeout=60) == 0, agent.written()


SLEEPER = """
import json, os, time; print(json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid()}), flush=True)
time.sleep(3600)
"""


async def test_agents_report_the_loss_of_a_store_in_memory_at_once_and_end(tmp_path: Path) -> None:
    """Regression: they waited for `join_timeout`, ten minutes, although every member has to begin again then."""
    require("torch")
    gone_within = 3.0
    async with Endpoint() as server, Job(tmp_path, f"127.0.0.1:{server.port}", worker=SLEEPER) as job:
        options = ("--nnodes=2", f"--rdzv-conf=store_gone_timeout={gone_within}")
        pair = [await job.agent(*options) for _ in range(2)]
        workers = [(await job.first_step(agent))["pid"] for agent in pair]
        await server.die()
        killed_at = time.monotonic()
        for agent in pair:
            await agent.says("no process listens at", timeout=2)
        for agent in pair:
            assert await agent.wait(timeout=30) == 1, agent.written()
            line = next(line for line in agent.output if line.startswith("E"))
            assert "its process is gone" in line and "start all nodes again" in line, line
            assert "Traceback" not in agent.written()
        took = time.monotonic() - killed_at
        assert gone_within <= took < gone_within + 12, "agents ask ten times a second; workers get SIGTERM, and end"
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
async def test_the_other_agents_are_told_of_a_killed_worker_before_its_agent_looks(tmp_path: Path) -> None:
    """Its agent looks once an hour, so only the watcher of workers can have told them."""
    require("torch")
    async with Job(tmp_path, f"127.0.0.1:{free_port()}", worker=SLEEPER) as job:
        pair = [await job.agent("--nnodes=2", "--monitor-interval=3600") for _ in range(2)]
        began = [await job.first_step(agent) for agent in pair]
        os.kill(began[0]["pid"], signal.SIGKILL)
        line = await pair[1].says("was killed")
        assert re.search(r"run job: \S+: worker 0 was killed by signal 9; meeting again$", line), line


RAISES = """
import json, os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    rank = int(os.environ["RANK"])
    print(json.dumps({"rank": rank, "pid": os.getpid()}), flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    if rank:
        raise ValueError("shard 17 is damaged")
    time.sleep(3600)

main()
"""


async def test_the_other_agents_are_told_the_exception_of_a_recorded_worker(tmp_path: Path) -> None:
    require("torch")
    async with Job(tmp_path, f"127.0.0.1:{free_port()}", worker=RAISES) as job:
        pair = [await job.agent("--nnodes=2", "--max-restarts=0") for _ in range(2)]
        ranks = [(await job.first_step(agent))["rank"] for agent in pair]
        job.stop()
        await pair[ranks.index(0)].says("worker 0 ended with status 1: ValueError: shard 17 is damaged")


@pytest.mark.in_ci
@pytest.mark.skipif(agents_of_2_4(), reason="the agents of this release do not serve the workers' store")
async def test_a_worker_that_finds_its_port_taken_is_reported_with_the_remedy(tmp_path: Path) -> None:
    """Regression: without a restart, which is PyTorch's default, the line had no remedy."""
    require("torch")
    async with Job(tmp_path, "localhost:0", worker=TAKES_MASTER_PORT) as job:
        agent = await job.agent("--nnodes=1", "--max-restarts=0")
        await agent.says("at MASTER_PORT rank 0's agent listens; agent_store=0")
        assert await agent.wait() == 1


PRIVATE_GROUP = """
import os, sys
from datetime import timedelta
import torch.distributed as dist

where = f"tcp://127.0.0.1:{sys.argv[1].rpartition('-')[2]}"
dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=3))
dist.destroy_process_group()
"""


@pytest.mark.in_ci
@pytest.mark.parametrize("agent_store", ["0", "1"])
async def test_up_to_2_13_a_private_group_of_a_worker_needs_agent_store_0(agent_store: str, tmp_path: Path) -> None:
    """As the page says: there the worker takes the variable of c10d's agents to mean its own store, too."""
    require("torch")
    from rdzv.torch.pytorch import RELEASE

    if RELEASE > (2, 13):
        pytest.skip("later releases do not take the variable so")
    script, port = tmp_path / "private.py", free_port()
    script.write_text(PRIVATE_GROUP, encoding="utf-8")
    words = (
        "--rdzv-backend=rdzv",
        "--rdzv-endpoint=localhost:0",
        "--nnodes=1",
        f"--rdzv-conf=agent_store={agent_store}",
    )
    async with start_python("-m", "rdzv.torchrun", *words, str(script), f"at-{port}") as agent:
        assert await agent.wait() == (1 if RELEASE >= (2, 5) and agent_store == "1" else 0)


async def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    require("torch")
    async with Job(tmp_path, "localhost:0") as job:
        agent = await job.agent("--nnodes=1", "--rdzv-conf=regroup_on_loss=maybe", level="WARNING")
        assert await agent.wait() == 1
        _, line = agent.written().splitlines()  # the first names the command
        assert line.endswith("write for example regroup_on_loss=true")


async def test_torchruns_own_example_of_an_endpoint_works(tmp_path: Path) -> None:
    require("torch")
    async with Job(tmp_path, "localhost:0") as job:
        jobs = [await job.agent("--nnodes=1") for _ in range(2)]  # of one id, and each has its own store
        job.stop()
        assert [(await job.first_step(agent))["size"] for agent in jobs] == [1, 1]
        assert [await agent.wait() for agent in jobs] == [0, 0]


FAILS_LAST = """
import json, os, pathlib, sys, time

rank = int(os.environ["RANK"])
print(json.dumps({"rank": rank, "pid": os.getpid()}), flush=True)
while rank and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
sys.exit(rank)
"""


async def test_an_agent_whose_workers_have_succeeded_does_not_claim_to_meet_again(tmp_path: Path) -> None:
    """It stays in PyTorch's exit barrier, which ends after 300 s, or when the others end."""
    require("torch")
    async with Job(tmp_path, f"127.0.0.1:{free_port()}", worker=FAILS_LAST) as job:
        pair = [await job.agent("--nnodes=2") for _ in range(2)]
        ranks = [(await job.first_step(agent))["rank"] for agent in pair]
        done = pair[ranks.index(0)]
        await done.says("Waiting 300")
        job.stop()
        line = await done.says("worker 0 ended with status 1")
        assert line.endswith("; the workers here have succeeded, and this agent does not come again")


BEATING = """
import json, os, pathlib, sys, time

beat = pathlib.Path(os.environ["RDZV_BEAT_DIR"], os.environ["LOCAL_RANK"])
print(json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid()}), flush=True)
for step in range(10**6):
    beat.write_text(str(step))
    if step == 50 and os.environ["RANK"] == "1" and not os.path.exists(sys.argv[1]):
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(3600)  # once
    time.sleep(0.02)
"""


async def test_an_agent_whose_worker_is_stuck_is_dropped_and_restarts_it(tmp_path: Path) -> None:
    require("torch")
    async with Job(tmp_path, f"127.0.0.1:{free_port()}", worker=BEATING) as job:
        pair = [await job.agent("--nnodes=2", "--rdzv-conf=stall_timeout=3") for _ in range(2)]
        began = {step["rank"]: agent for agent in pair for step in [await job.first_step(agent)]}
        line = await began[0].says("no step since", timeout=60)
        assert re.search(r"no step since \d+ s, others are at \d+", line), line
        for agent in pair:
            await job.first_step(agent)


# Without PyTorch.


def test_torchrun_finds_the_entry_point() -> None:
    (found,) = {point.value: point for point in entry_points(group="torchrun.handlers", name="rdzv")}.values()
    assert found.load()() is torchrun.create_handler


async def test_without_torch_the_entry_point_loads_and_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import rdzv.torchrun as it; create = it.get_handler_creator();"
        "assert 'rdzv.torch' not in sys.modules; create(None)"
    )
    async with start_python("-c", program) as child:
        assert await child.wait(timeout=20) == 1
    assert "ImportError: rdzv.torch needs PyTorch" in child.output[-1]
    assert "pip install 'rdzv[torch]'" in child.output[-1]
