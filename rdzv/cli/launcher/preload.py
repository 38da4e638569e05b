"""Preloaded workers, forked from a process that has imported their modules.

Each launcher starts such a process (`preload_server`), which imports while the nodes first meet. A command that cannot
be forked starts as without `--preload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import anyio

from rdzv.cli.launcher import guard, preload_server
from rdzv.loop import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rdzv.cli.launcher.job import Job

log: logging.Logger = logging.getLogger(__name__)

END_WITHIN: Final = 5.0  # seconds for the preload server to end before it is killed; 0 while it imports
START_WITHIN: Final = 10.0  # seconds to fork a worker, which takes milliseconds, before the server is killed
SLOW_AFTER: Final = 30.0  # seconds until a log line says that the modules are still being imported
WITHOUT_VALUE: Final = frozenset("bBdEIOPqsSuv")  # letters of the interpreter's options without a value
WITH_VALUE: Final = frozenset("WX")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """A Python command: the interpreter's options, and `sys.argv` for the script or, with `-m`, the module."""

    command: tuple[str, ...]
    options: tuple[str, ...]
    argv: tuple[str, ...]
    module: bool

    @property
    def folder(self) -> str:
        """The folder that the interpreter puts first in `sys.path`."""
        return "" if self.module else os.path.dirname(os.path.realpath(self.argv[0]))


def parse_python_command(command: Sequence[str]) -> PythonCommand | str:
    """Parse a command; return a reason as text if the command cannot be forked from a preloaded process."""
    program, rest = command[0], list(command[1:])
    found = shutil.which(program)
    if found is None or not _is_this_python(found):
        return f"{program} is not the Python that runs rdzv ({sys.executable})"
    options: list[str] = []
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        option = rest.pop(0)
        if option == "-m" and rest:
            return PythonCommand(command=tuple(command), options=tuple(options), argv=tuple(rest), module=True)
        if option[1] in WITH_VALUE:
            options += [option] if len(option) > 2 else [option, *rest[:1]]
            rest = rest if len(option) > 2 else rest[1:]
        elif set(option[1:]) <= WITHOUT_VALUE:
            options.append(option)
        else:
            return f"Python's option {option} needs an interpreter of its own"
    if not rest or not Path(rest[0]).is_file():
        return f"{rest[0] if rest else 'standard input'} is not a file with Python code"
    if rest[0].endswith(".pyc") or zipfile.is_zipfile(rest[0]):
        return f"{rest[0]} is not Python's source code"
    return PythonCommand(command=tuple(command), options=tuple(options), argv=tuple(rest), module=False)


def _is_this_python(found: str) -> bool:
    """Return True if `found` is this interpreter, in the same folder: virtual environments link to one interpreter."""
    here = Path(sys.executable)
    return Path(found).parent.absolute() == here.parent.absolute() and Path(found).resolve() == here.resolve()


class ForkedWorker:
    """A forked worker behind its guard, with what the launcher uses of `asyncio.subprocess.Process`."""

    def __init__(self, report: int, pid: int) -> None:
        self.returncode: int | None = None
        self.pid: Final = pid  # the guard's
        self._report = report
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(report, self._read_exit_status)

    async def wait(self) -> int:
        """Wait until the worker has ended; return its exit status, or minus the signal that ended it."""
        return await asyncio.shield(self._ended)

    def _read_exit_status(self) -> None:
        written = os.read(self._report, 4)
        asyncio.get_running_loop().remove_reader(self._report)
        os.close(self._report)
        # If the guard reports no status, it was killed, and the worker with it.
        status = int.from_bytes(written, sys.byteorder) if len(written) == 4 else int(signal.SIGKILL)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


@dataclass(slots=True)
class PreloadServer:
    """The process from which workers are forked."""

    _process: asyncio.subprocess.Process
    _requests: socket.socket
    _command: PythonCommand
    _modules: Sequence[str]
    _is_ready: bool | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, command: PythonCommand, modules: Sequence[str], *, standby: int = 0, unbuffered: bool = False
    ) -> AsyncIterator[Self]:
        """Start a process that imports `modules` and forks `standby` workers ahead; raise OSError on failure."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command.options,
                    *(preload_server.__file__, str(theirs.fileno()), command.folder, ",".join(modules), str(standby)),
                    guard.signal_state(),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **({"PYTHONUNBUFFERED": "1"} if unbuffered else {})},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C reaches only the launcher, which passes it on
                )
            guard.STARTED.add(process.pid)
            ours.setblocking(False)
            server = cls(process, ours, command, modules)
            try:
                yield server
            finally:
                ours.close()  # ends the process and its standby workers, but no running workers
                with anyio.CancelScope(shield=True), contextlib.suppress(ProcessLookupError):
                    with anyio.move_on_after(0.0 if server._is_ready is None else END_WITHIN):
                        await process.wait()
                    process.kill()  # the process still imports, or is stopped
                    await process.wait()

    async def wait_until_ready(self) -> bool:
        """Wait until the modules are imported; log a warning and return False if no worker can be forked."""
        if self._is_ready is None:
            slow = ("--preload %s: not imported after %g s; nothing starts before", ",".join(self._modules), SLOW_AFTER)
            saying = asyncio.get_running_loop().call_later(SLOW_AFTER, log.warning, *slow)
            said = b""
            try:
                while not said.endswith(b"\n"):
                    chunk = await asyncio.get_running_loop().sock_recv(self._requests, 1024)
                    said += chunk or b"the modules could not be imported; see above\n"
            finally:
                saying.cancel()
            self._is_ready = said == preload_server.READY
            if not self._is_ready:
                _warn_no_preload(self._modules, said.decode(errors="replace").strip())
        return self._is_ready

    async def start_worker(
        self, environment: Mapping[str, str], *, control: int, streams: tuple[int, int, int], files: int
    ) -> ForkedWorker | None:
        """Fork a worker with three streams, whose guard reads signals from `control`; return None on failure."""
        request = json.dumps({**asdict(self._command), "env": dict(environment), "files": files}).encode()
        reading, writing = os.pipe()
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, reading)  # a guard that starts too late ends: its report fails
            with anyio.move_on_after(START_WITHIN), contextlib.suppress(ConnectionError):
                with contextlib.ExitStack() as sent:
                    sent.callback(os.close, writing)
                    length = len(request).to_bytes(4, sys.byteorder)
                    socket.send_fds(self._requests, [length], [control, writing, *streams])
                    await asyncio.get_running_loop().sock_sendall(self._requests, request)
                await anyio.wait_readable(reading)
                if pid := os.read(reading, 4):
                    failed.pop_all()
                    return ForkedWorker(reading, int.from_bytes(pid, sys.byteorder))
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # `Process.kill` may reap the process; asyncio then warns
        self._is_ready = False
        _warn_no_preload(self._modules, "the process that has imported them was ended, or forks none")
        return None


@contextlib.asynccontextmanager
async def run_preload_server(job: Job) -> AsyncIterator[PreloadServer | None]:
    """Yield the preload server of a job; yield None without `--preload`, or if the command cannot be forked."""
    command = await in_thread(lambda: parse_python_command(job.command)) if job.preload else None
    if isinstance(command, PythonCommand):
        starting = PreloadServer.start(command, job.preload, standby=job.standby, unbuffered=job.forwards_output)
        async with starting as server:
            yield server
        return
    if command is not None:
        _warn_no_preload(job.preload, command)
    yield None


def _warn_no_preload(modules: Sequence[str], why: str) -> None:
    log.warning("--preload %s has no effect, the command starts as ever: %s", ",".join(modules), why)
