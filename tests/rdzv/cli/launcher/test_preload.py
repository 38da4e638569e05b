"""Preloaded workers: a script that is forked from a process with its imports done runs as if started anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from rdzv.cli.launcher import preload
from rdzv.cli.launcher.job import Job
from rdzv.cli.launcher.preload import ForkedWorker, PreloadServer, PythonCommand, parse_python_command
from rdzv.cli.launcher.processes import Process
from tests.support.processes import require
from tests.support.stores import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.some_here(6)

PYTHON = sys.executable


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(code: str) -> str:
        path = tmp_path / "worker.py"
        path.write_text(code)
        return str(path)

    return write


@contextlib.asynccontextmanager
async def serving(
    *command: str, modules: tuple[str, ...] = ("decimal",), standby: int = 0
) -> AsyncIterator[PreloadServer]:
    taken_apart = parse_python_command((PYTHON, *command))
    assert isinstance(taken_apart, PythonCommand), taken_apart
    async with PreloadServer.start(taken_apart, modules, standby=standby) as server:
        assert await server.wait_until_ready()
        yield server


class Run:
    """A worker, its output, and the launcher's end of its control pipe."""

    def __init__(self, worker: ForkedWorker, output: int, control: int) -> None:
        self.worker = worker
        self._output = output
        self.control = control

    async def ends_with(self) -> tuple[int, str]:
        status = await self.worker.wait()
        os.close(self.control)
        return status, self._rest()

    def _rest(self) -> str:
        with open(self._output, "rb") as stream:
            return stream.read().decode()

    def first_line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._output, 1)
        return line.decode()


async def run(server: PreloadServer, *, stdin: int | None = None, **environment: str) -> Run:
    control, told = os.pipe()
    reading, writing = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    streams = (nothing if stdin is None else stdin, writing, writing)
    worker = await server.start_worker(environment, control=control, streams=streams, files=256)
    for file in (control, writing, nothing):
        os.close(file)
    assert worker is not None
    return Run(worker, reading, told)


def children(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()


LOOK_CLOSELY = """
import json, os, re, signal, sys, threading, traceback
streams = [sys.stdin, sys.stdout, sys.stderr]
print(json.dumps({
    "globals": {name: re.sub("0x[0-9a-f]+", "", str(value)) for name, value in sorted(globals().items())
                if name not in ("__builtins__", "streams") and not isinstance(value, type(sys))},
    "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "executable": sys.executable,
    "path": [sys.path[0] == os.getcwd(), *map(str, sys.path[1:])],
    "streams": [(one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through,
                 type(one.buffer).__name__, one.fileno()) for one in streams],
    "original": [sys.__stdin__ is sys.stdin, sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "signals": {str(one): str(signal.getsignal(one)) for one in signal.valid_signals() if one < 32},
    "ids": [threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
            threading.main_thread() is threading.current_thread(), os.getpgrp() == os.getpid()],
    "files": sorted(int(name) for name in os.listdir("/dev/fd")), "cwd": os.getcwd(), "umask": os.umask(0),
    "input": sys.stdin.read(), "environment": sorted(os.environ.items()), "wakeup": signal.set_wakeup_fd(-1),
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "ours": "rdzv" in sys.modules,
    "main": vars(sys.modules["__main__"]) is globals(),
}))
"""


@pytest.mark.parametrize(
    ("options", "standby"),
    [((), 0), ((), 1), (("-u", "-P", "-O", "-W", "error"), 0), (("-m",), 0)],
    ids=["script", "standby", "options", "-m"],
)
async def test_a_preloaded_script_finds_the_same_environment_as_a_started_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], standby: int
) -> None:
    """The script prints all that it can inspect. It is named by a relative path, so `sys.path[0]` is compared."""
    (tmp_path / "look.py").write_text(LOOK_CLOSELY)
    (tmp_path / "input").write_bytes(b"a\r\nb\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = (*options, "look" if "-m" in options else "look.py", "--lr")
    with (tmp_path / "input").open("rb") as given:
        cold = subprocess.run(  # noqa: ASYNC221  no other task runs here
            [PYTHON, *command],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            check=True,
        )
    async with serving(*command, standby=standby) as server:
        with (tmp_path / "input").open("rb") as given:
            status, output = await (await run(server, stdin=given.fileno(), **os.environ)).ends_with()
    assert status == 0, output
    assert json.loads(output) == json.loads(cold.stdout), command


def test_a_worker_holds_no_file_that_uvloop_has_left_open(script: Callable[[str], str]) -> None:
    """uvloop leaves copies of the streams open, among them the ends of pipes that other processes read."""
    require("uvloop")
    import uvloop

    path = script("import os; print(len(os.listdir('/dev/fd')))")

    async def main() -> tuple[int, str]:
        async with serving(path) as server:
            return await (await run(server)).ends_with()

    assert uvloop.run(main()) == (0, "4\n")  # three streams, and the listed directory itself


async def test_a_module_runs_as_with_python_dash_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; from . import steps; print(__name__, __spec__.name, sys.argv)")
    (package / "steps.py").write_text("")
    monkeypatch.chdir(tmp_path)
    async with serving("-m", "training", "7") as server:
        status, output = await (await run(server)).ends_with()
    assert (status, output) == (0, f"__main__ training.__main__ ['{package}/__main__.py', '7']\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("standby", [0, 1])
async def test_processes_start_as_ever_if_the_process_that_forks_them_is_killed_or_stopped(
    script: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    standby: int,
    number: signal.Signals,
) -> None:
    """Regression: the launcher ended with 0, as if its work was done, or waited for ever without a word.

    It is the standby worker that is killed or stopped, if there is one: it forks, too.
    """
    monkeypatch.setattr(preload, "START_WITHIN", 1.5)
    path, environment = script("print('works')"), {"RANK": "0", "LOCAL_RANK": "0"}
    job = Job(url="tcp://localhost/job", command=(PYTHON, path), prefix=False)
    async with serving(path, standby=standby) as server:
        pid = server._process.pid
        if standby:
            await until(lambda: bool(children(server._process.pid)))
            pid = int(children(pid)[0])
        os.kill(pid, number)
        try:
            for _ in range(2):
                with anyio.fail_after(20):
                    process = await Process.start(job, dict(environment), None, files=256, preloaded=server)
                    await process.wait()
                assert process.status == 0
                await process.finish_output()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    why = "the process that has imported them was ended, or forks none"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"--preload decimal has no effect, the command starts as ever: {why}"]


async def test_an_import_that_takes_long_is_said(
    script: Callable[[str], str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a stopped or hanging import held the node back without a word."""
    monkeypatch.setattr(preload, "SLOW_AFTER", 0.1)
    command = parse_python_command((PYTHON, script("")))
    assert isinstance(command, PythonCommand)
    async with PreloadServer.start(command, ("decimal",)) as server:
        os.kill(server._process.pid, signal.SIGSTOP)
        with anyio.move_on_after(0.5):
            await server.wait_until_ready()
        os.kill(server._process.pid, signal.SIGCONT)
        assert await server.wait_until_ready()
    assert "not imported after 0.1 s" in caplog.text


@pytest.mark.parametrize("when", ["before", "between two workers"])
async def test_a_preloaded_script_runs_in_a_folder_that_was_deleted(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """As a started one does. Regression: the launcher ended with "No such file or directory"."""
    path, folder = script("print('works')"), tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if when == "before":
        folder.rmdir()
    async with serving(path) as server:
        if folder.exists():
            assert await (await run(server)).ends_with() == (0, "works\n")
            folder.rmdir()
        assert await (await run(server)).ends_with() == (0, "works\n")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'bye')", 0, "bye\n"),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", 0, "late\n"),
        ("print(__import__('random').random() == 1)", 0, "False\n"),
    ],
)
async def test_a_preloaded_script_exits_as_a_started_one(
    script: Callable[[str], str], code: str, status: int, said: str
) -> None:
    async with serving(script(code)) as server:
        assert await (await run(server)).ends_with() == (status, said)


SHOWS = "import sys; sys.excepthook = lambda _, __, trace: print(trace.tb_frame.f_code.co_name, trace.tb_lineno)\n"


@pytest.mark.parametrize(("hook", "shown"), [("", "  File "), (SHOWS, "<module> ")])
async def test_a_traceback_begins_in_the_script(script: Callable[[str], str], hook: str, shown: str) -> None:
    path = script(f"{hook}def fail():\n    raise ValueError('no such step')\nfail()\n")
    async with serving(path) as server:
        status, output = await (await run(server)).ends_with()
    assert status == 1
    (first,) = [line for line in output.splitlines() if line.startswith(shown)][:1]
    assert first == (f"<module> {4}" if hook else f'  File "{path}", line 3, in <module>')


async def test_signals_reach_a_preloaded_worker_and_the_end_of_its_launcher_kills_it(
    script: Callable[[str], str],
) -> None:
    async with serving(script("import os, signal; os.write(1, b'here\\n'); signal.pause()")) as server:
        asked = await run(server)
        asked.first_line()
        os.write(asked.control, bytes([signal.SIGTERM]))
        assert (await asked.ends_with())[0] == -signal.SIGTERM
        left = await run(server)
        left.first_line()
        os.close(left.control)
        assert await left.worker.wait() == -signal.SIGKILL


async def test_a_guard_notices_the_end_of_its_worker_although_a_module_has_blocked_child_signals(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """Regression: the launcher waited for ever."""
    (tmp_path / "blocks.py").write_text("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])")
    async with serving(script("raise SystemExit(3)"), modules=("blocks",)) as server:
        with anyio.fail_after(20):
            assert await (await run(server)).worker.wait() == 3


async def test_more_workers_are_started_than_the_socket_holds_requests(script: Callable[[str], str]) -> None:
    """The start of a worker failed with `BlockingIOError` if the preload process had not read the requests before."""
    async with serving(script("pass")) as server:
        os.kill(server._process.pid, signal.SIGSTOP)

        async def start() -> list[Run]:
            return [await run(server, BALLAST="x" * 30_000) for _ in range(16)]

        starting = asyncio.create_task(start())
        await asyncio.wait([starting], timeout=0.5)
        os.kill(server._process.pid, signal.SIGCONT)
        assert [await one.ends_with() for one in await starting] == [(0, "")] * 16


async def test_spawned_processes_find_the_script(script: Callable[[str], str]) -> None:
    code = """
import multiprocessing
def work(number): return number * 2
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [21]))
"""
    async with serving(script(code)) as server:
        assert await (await run(server, PATH=os.environ["PATH"])).ends_with() == (0, "[42]\n")


async def test_workers_do_not_draw_the_same_random_numbers(script: Callable[[str], str]) -> None:
    require("numpy")
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    async with serving(script(code), modules=("numpy", "random")) as server:
        draws = {(await (await run(server)).ends_with())[1] for _ in range(2)}
    numbers = [number for draw in draws for number in draw.split()]
    assert len(set(numbers)) == 4


async def test_a_module_that_starts_a_thread_is_named_and_nothing_is_forked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, name='busy one', daemon=True).start()"
    )
    (tmp_path / "worker.py").write_text("")
    command = parse_python_command((PYTHON, str(tmp_path / "worker.py")))
    assert isinstance(command, PythonCommand)
    async with PreloadServer.start(command, ("busy",)) as server:
        assert not await server.wait_until_ready()
    assert "busy one" in caplog.text


async def test_a_missing_module_is_named(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    command = parse_python_command((PYTHON, script("")))
    assert isinstance(command, PythonCommand)
    async with PreloadServer.start(command, ("no_such_module",)) as server:
        assert not await server.wait_until_ready()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (("worker.py", "-m", "x"), ((), ("worker.py", "-m", "x"), False)),
        (("-u", "-Werror", "-X", "dev", "worker.py"), (("-u", "-Werror", "-X", "dev"), ("worker.py",), False)),
        (("-u", "-m", "training", "-u"), (("-u",), ("training", "-u"), True)),
        (("-uW", "error", "worker.py"), "-uW needs an interpreter of its own"),
        (("-c", "pass"), "-c needs an interpreter of its own"),
        (("-i", "worker.py"), "-i needs an interpreter of its own"),
        (("nowhere.py",), "nowhere.py is not a file with Python code"),
        ((), "standard input is not a file"),
        (("app",), "app is not Python's source code"),
        (("app.pyc",), "app.pyc is not Python's source code"),
    ],
)
def test_a_command_line_is_parsed_as_python_does_or_the_reason_is_given(
    words: tuple[str, ...], taken: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text("")
    (tmp_path / "app.pyc").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "app", "w") as archive:
        archive.writestr("__main__.py", "")
    command = parse_python_command((PYTHON, *words))
    if isinstance(command, PythonCommand):
        assert (command.options, command.argv, command.module) == taken
    else:
        assert str(taken) in command


def test_a_program_other_than_this_python_is_not_preloaded() -> None:
    assert "sh is not the Python that runs rdzv" in str(parse_python_command(("sh", "-c", "true")))
