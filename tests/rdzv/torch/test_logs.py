"""Logs of earlier rounds stay under torchrun: PyTorch empties the folder of a restart count when it starts workers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import Child, free_port, require, start

require("torch")

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: E402
from torch.distributed.elastic.rendezvous import api  # noqa: E402

from rdzv.torch import TorchRendezvousHandler  # noqa: E402
from rdzv.torch.pytorch import Agent  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

LINES = 5000
WORKER = f"""
import os, signal, sys, time

def end(*_):
    print("\\n".join(f"line {{number}} of {{this}}" for number in range({LINES})), flush=True)
    sys.exit(0)

this = os.environ["GROUP_WORLD_SIZE"] + "/" + os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGTERM, end)
print("begins", this, os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
os.remove(sys.argv[1])
sys.exit(5)
"""
AGENT = """
import runpy
from rdzv.torch.pytorch import Agent

keep = Agent.preserve_round_logs

def say_and_keep(agent, round):
    context = agent.itself._pcontext
    tails = getattr(context, "_tail_logs", None) or [context._stdout_tail, context._stderr_tail]  # the latter in 2.4
    print("tails have ended:", all(future.done() for tail in tails for future in tail._futs), flush=True)
    keep(agent, round)

Agent.preserve_round_logs = say_and_keep
runpy.run_module("rdzv.torchrun", run_name="__main__")
"""


@pytest.mark.in_ci
@pytest.mark.timeout(240)
async def test_the_logs_of_earlier_rounds_are_renamed_once_they_have_been_read(tmp_path: Path) -> None:
    """A loss, a worker that fails, and a newcomer. PyTorch counts only the failure as a restart."""
    (tmp_path / "train.py").write_text(WORKER, encoding="utf-8")
    logs, port = tmp_path / "logs", free_port()

    async def agent(name: str) -> Child:
        named = ("--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--nnodes=1:2")
        options = (*named, "--max-restarts=3", f"--log-dir={logs / name}", "--tee=3")
        command = (sys.executable, "-c", AGENT, *options, str(tmp_path / "train.py"), str(tmp_path / f"fail-{name}"))
        return await stack.enter_async_context(start(*command, env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}))

    async def begins(child: Child, what: str) -> int:
        return int((await child.line(containing=f"begins {what} ")).split()[-1])

    async with contextlib.AsyncExitStack() as stack:
        a = await agent("a")
        await a.says("joining at")
        b = await agent("b")
        await begins(a, "2/0")
        worker = await begins(b, "2/0")
        b.kill()
        os.kill(worker, signal.SIGKILL)
        await begins(a, "1/0")
        (tmp_path / "fail-a").touch()
        await begins(a, "1/1")
        c = await agent("c")
        await begins(a, "2/1")
        for ending in (a, c):  # a killed agent would leave its worker
            ending.terminate()
            await ending.wait()
    assert [line for line in a.stdout if "tails" in line] == ["tails have ended: True"] * 3
    (run,) = (logs / "a").iterdir()
    kept = {folder.name: (folder / "0" / "stdout.log").read_text().splitlines() for folder in run.iterdir()}
    assert {name: (lines[0].split()[1], len(lines)) for name, lines in kept.items()} == {
        "attempt_0.round_0": ("2/0", 1 + LINES),
        "attempt_0": ("1/0", 1),
        "attempt_1.round_2": ("1/1", 1 + LINES),
        "attempt_1": ("2/1", 1 + LINES),
    }
    assert len([line for line in a.stdout if line.endswith("of 2/0")]) == LINES


class OtherSpecs:
    """Logs of another kind than PyTorch's."""

    def __init__(self, run: Path) -> None:
        self._run_log_dir = str(run)


def agent_with(specs: object) -> Agent:
    group = SimpleNamespace(spec=SimpleNamespace(max_restarts=3))
    return Agent("", group, SimpleNamespace(_logs_specs=specs, _remaining_restarts=3))


def handler() -> TorchRendezvousHandler:
    """Return a handler that has started workers in round 7."""
    it = TorchRendezvousHandler(api.RendezvousParameters("rdzv", "127.0.0.1", "job", 1, 2))
    it._logs_of = 7
    return it


def specs_of(run: Path) -> Any:
    specs = DefaultLogsSpecs(log_dir=str(run))
    specs._run_log_dir = str(run)
    return specs


def test_nothing_is_renamed_of_logs_of_another_kind_or_without_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "attempt_0").mkdir()
    for specs in (OtherSpecs(tmp_path), DefaultLogsSpecs()):
        handler()._preserve_round_logs(agent_with(specs), 8)
    assert [one.name for one in tmp_path.iterdir()] == ["attempt_0"]
    assert caplog.text == ""
    handler()._preserve_round_logs(agent_with(specs_of(tmp_path)), 8)
    assert [one.name for one in tmp_path.iterdir()] == ["attempt_0.round_7"]


@pytest.mark.parametrize("why", ["another release", "the name is taken"])
def test_logs_that_cannot_be_kept_are_warned_of_once_and_the_job_goes_on(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "attempt_0").mkdir()
    for number in (7, 8):
        (tmp_path / f"attempt_0.round_{number}" / "0").mkdir(parents=True)
    specs, it = specs_of(tmp_path), handler()
    if why == "another release":
        del specs._run_log_dir
    for number in (8, 9):
        it._preserve_round_logs(agent_with(specs), number)
    assert caplog.text.count("PyTorch may delete the logs of earlier rounds: ") == 1
    assert (tmp_path / "attempt_0").exists()
