"""The stacks of workers: of real processes that hang, by a signal; and over the store, by `rdzv stacks`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import rdzv
import store
from rdzv.cli import main as command
from rdzv.cli.launcher import stacks as stacks_room
from rdzv.cli.launcher import worker_startup
from rdzv.cli.launcher.stacks import WorkerStacks
from rdzv.errors import RendezvousStateError, RendezvousTimeoutError
from tests.support.processes import start_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HANGS = """
import signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def wait_for_the_others():
    time.sleep(1000)

threading.Thread(target=wait_for_the_others, daemon=True).start()
print("up", flush=True)
sys.stdin.read() if "--stdin" in sys.argv else wait_for_the_others()
"""
LIMIT = 60.0


@contextlib.contextmanager
def worker(stacks: WorkerStacks, *command: str, rank: int = 0, **environment: str) -> Iterator[subprocess.Popen[str]]:
    told = {**os.environ, **stacks.environment(), "RANK": str(rank), **environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *command], env=told, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


async def test_all_threads_of_all_processes_are_shown_by_rank_and_the_processes_go_on(tmp_path: Path) -> None:
    stacks = WorkerStacks(tmp_path)
    named = worker(stacks, "-c", HANGS, RANK="gpu.3\x1b")  # also if a program gives its own RANK a meaning of its own
    with worker(stacks, "-c", HANGS, "--stdin", rank=10) as late, worker(stacks, "-c", HANGS, rank=2), named as third:
        async with asyncio.timeout(LIMIT):
            while (text := await stacks.collect([2, 3, 10])).count("in wait_for_the_others") < 5:
                pass  # a process that has just written "up" may not be waiting yet
        for _ in range(2):  # each dump holds only the current stacks
            text = await stacks.collect([2, 3, 10])
            assert text.count("in wait_for_the_others") == 5
            assert rf"rank gpu.3\x1b, process {third.pid}:" in text
            assert text.index("rank 2, process") < text.index(f"rank 10, process {late.pid}:")
            assert "rank 3: no Python process that could be asked" in text
        late.communicate("")
        assert late.returncode == 0
        assert "rank 10" not in await stacks.collect()


async def test_a_forked_child_answers_and_a_stopped_one_is_reported_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = WorkerStacks(tmp_path)
    forks = "import os, time\npid = os.fork()\npid and print('up', flush=True)\ntime.sleep(1000)"
    with worker(stacks, "-c", forks) as parent:
        async with asyncio.timeout(LIMIT):
            while (text := await stacks.collect()).count("rank 0, process") < 2:
                pass  # the parent may be up before its child is
        (child,) = {int(pid) for pid in re.findall(r"process (\d+):", text)} - {parent.pid}
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(stacks_room, "ANSWER_WITHIN", 0.3)
        try:
            text = await stacks.collect()
            assert f"process {child} does not answer" in text
            if sys.platform == "linux":
                assert "T (stopped)" in text
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_process_that_ends_during_the_request_is_reported_as_not_answering(tmp_path: Path) -> None:
    """Regression: the file of an ended process is removed. Then this request was never answered, nor any later one."""
    stacks = WorkerStacks(tmp_path)
    with worker(stacks, "-c", HANGS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(stacks.collect())
        await asyncio.sleep(0)  # the dump is under way now
        process.kill()
        process.wait()
        stacks.remove_ended_files()
        assert f"process {process.pid} does not answer" in await asked


async def test_a_process_that_has_executed_another_program_is_sent_no_signal(tmp_path: Path) -> None:
    stacks = WorkerStacks(tmp_path)
    becomes = "import os; os.execvp('sh', ['sh', '-c', 'echo up; cat; echo end'])"
    with worker(stacks, "-c", becomes) as process:
        assert "rank 0: no Python process" in await stacks.collect([0])
        output, _ = process.communicate("")
        assert (output, process.returncode) == ("end\n", 0)


def test_the_users_own_sitecustomize_is_imported_and_ours_is_invisible(tmp_path: Path) -> None:
    own, launcher = tmp_path / "own", tmp_path / "launcher"
    own.mkdir()
    launcher.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.mine = __file__")
    stacks = WorkerStacks(launcher)
    prints = "import sitecustomize, sys; print('up'); print(sys.mine, sitecustomize.__file__, *sys.path)"
    path = os.pathsep.join([stacks.environment()["PYTHONPATH"], str(own)])
    with worker(stacks, "-W", "error", "-c", prints, PYTHONPATH=path) as process:
        mine, imported, *paths = process.stdout.read().split()  # type: ignore[union-attr]
    assert mine == imported == str(own / "sitecustomize.py")
    assert not [folder for folder in paths if str(launcher) in folder]


def test_a_process_starts_also_if_the_folder_was_deleted(tmp_path: Path) -> None:
    stacks = WorkerStacks(tmp_path)
    (tmp_path / "stacks").rmdir()
    with worker(stacks, "-W", "error", "-c", "print('up')") as process:
        assert process.wait(LIMIT) == 0


def test_the_signal_for_stacks_is_none_that_is_passed_on() -> None:
    assert worker_startup.SIGNAL not in (0, *range(1, 32)) or sys.platform == "darwin"


async def asked(*arguments: str) -> int:
    """Run `rdzv stacks` in this process."""
    options = command._parse(["stacks", *arguments])
    assert options is not None
    return await command.command_named("stacks").run(options)


async def test_rdzv_stacks_shows_where_a_node_hangs_and_the_launcher_logs_it_before_it_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker is forked from a preloaded process. It imports no `sitecustomize`, and is registered all the same."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    async with asyncio.timeout(2 * LIMIT), store.serve("127.0.0.1", 0) as server:
        url = f"{server.url}/job"
        launching = ("-m", "rdzv", "run", f"{url}?min_nodes=1&node_id=gpu-1", "--grace", "0.2", "--preload", "json")
        async with start_python(*launching, "--", sys.executable, str(script)) as launcher:
            await launcher.says("up", timeout=LIMIT)
            assert await asked(url, "gpu-1", "--timeout", "30") == 0
            text = capsys.readouterr().out
            assert "rank 0, process" in text
            assert "in wait_for_the_others" in text
            with pytest.raises(RendezvousStateError, match="run job has no node gpu-2; it has gpu-1"):
                await asked(url, "gpu-2")
            launcher.terminate()
            await launcher.says("to be killed with these stacks", timeout=LIMIT)
            await launcher.says("in wait_for_the_others", timeout=LIMIT)
            assert await launcher.wait(timeout=LIMIT) == 128 + signal.SIGTERM


async def test_a_node_without_a_launcher_is_reported_as_not_answering() -> None:
    async with (
        store.serve("127.0.0.1", 0) as server,
        rdzv.connect(f"{server.url}/job?min_nodes=1", node_id="a") as node,
    ):
        await node.next_rendezvous()
        with pytest.raises(RendezvousTimeoutError, match=r"node a has not answered within 0\.2 s: only the launcher"):
            await asked(f"{server.url}/job", "a", "--timeout", "0.2")
