"""R24 **Done means done.** A launcher, an agent or a loop reports success only if its own work ran to its end, or if it
was a spare of a run whose work did. A node that meets a run of the same name by accident never reports that run's
success as its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from tests.support.processes import Child, free_port, require, start

WORKER = """
import pathlib, sys, time

go, ran, status = sys.argv[1:]
pathlib.Path(ran).touch()
while not pathlib.Path(go).exists():
    time.sleep(0.02)
sys.exit(int(status))
"""


class Jobs:
    """Agents of torchrun whose workers wait for a file; each worker leaves a file as a sign that it has run."""

    def __init__(self, folder: Path, *options: str, status: int = 0) -> None:
        self._folder, self._options, self._status = folder, options, status
        (folder / "train.py").write_text(WORKER, encoding="utf-8")
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Jobs:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def agent(self, name: str) -> Child:
        worker = (str(self._folder / one) for one in ("train.py", "go", name))
        module = "rdzv.torchrun"  # which is PyTorch's, and good with any release of it
        options = ("--rdzv-backend=rdzv", "--nproc-per-node=1", *self._options)
        command = (sys.executable, "-m", module, *options, *worker, str(self._status))
        return await self._stack.enter_async_context(start(*command, env={"OMP_NUM_THREADS": "1"}))

    def go(self) -> None:
        (self._folder / "go").touch()

    def ran(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()} - {"train.py", "go"}


@pytest.fixture
def endpoint() -> str:
    require("torch")
    return f"--rdzv-endpoint=127.0.0.1:{free_port()}"


async def test_r24_jobs_without_endpoint_and_name_are_jobs_of_their_own(tmp_path: Path) -> None:
    require("torch")
    async with Jobs(tmp_path, "--nnodes=1") as jobs:
        agents = [await jobs.agent(name) for name in ("first", "second")]
        for agent in agents:
            await agent.says("has rank 0")
        jobs.go()
        assert [await agent.wait() for agent in agents] == [0, 0]
        assert jobs.ran() == {"first", "second"}


async def test_r24_a_job_that_meets_another_ones_run_by_accident_ends_with_an_error(
    tmp_path: Path, endpoint: str
) -> None:
    async with Jobs(tmp_path, endpoint, "--nnodes=1") as jobs:
        first = await jobs.agent("first")
        await first.says("has rank 0")
        second = await jobs.agent("second")
        await second.says("give each job a name: --rdzv-id=NAME")
        jobs.go()
        assert (await first.wait(), await second.wait()) == (0, 1)
        assert len([line for line in second.output if "give each job a name: --rdzv-id=NAME" in line]) == 1
        assert "--rdzv-id=NAME" in second.output[-1]
        assert jobs.ran() == {"first"}


async def test_r24_a_spare_of_a_run_without_a_name_ends_well_and_does_not_begin_anew(
    tmp_path: Path, endpoint: str
) -> None:
    async with Jobs(tmp_path, endpoint, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=30") as jobs:
        agents = [await jobs.agent(name) for name in "ab"]
        for agent in agents:
            await agent.says("has rank")
        spare = await jobs.agent("spare")
        await spare.says("this agent is a spare of a job without a name")
        await asyncio.sleep(4)  # the agent looks every 3 s whether its wait has another reason
        jobs.go()
        assert [await agent.wait() for agent in (*agents, spare)] == [0, 0, 0]
        (warning,) = [line for line in spare.output if "this agent is a spare of a job without a name" in line]
        assert warning.startswith("W"), "it is no mere line of the story"
        assert jobs.ran() == {"a", "b"}


async def test_r24_no_spare_reports_the_success_of_a_run_that_has_failed(tmp_path: Path, endpoint: str) -> None:
    async with Jobs(tmp_path, endpoint, "--rdzv-id=job", "--nnodes=1", status=7) as jobs:
        member = await jobs.agent("member")
        await member.says("has rank 0")
        spare = await jobs.agent("spare")
        await spare.says("1 spare")
        jobs.go()
        assert await member.wait() == 1
        assert await spare.wait() == 1
        assert "an agent has failed: worker 0 ended with status 7" in spare.output[-1]
