"""The processes of `rdzv run`, each the leader of a process group under a `guard`, and their output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import signal
import sys
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import quote

import anyio
import anyio.to_thread

from rdzv.cli.launcher import guard
from rdzv.display.standard_error import write_all
from rdzv.loop import in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.cli.launcher.job import Job
    from rdzv.cli.launcher.preload import ForkedWorker, PreloadServer

log: logging.Logger = logging.getLogger(__name__)

DRAIN_WITHIN: Final = 5.0  # seconds to wait until a process's remaining output is passed on
PROMPT_AFTER: Final = 200  # milliseconds until a terminal shows an incomplete line
LINE_BYTES_MAX: Final = 65_536  # the most bytes per read; incomplete lines this long are split
CUT: Final = "%s cannot be written: %s; the job goes on without it"


@dataclass(eq=False)
class Process:
    """One process of the command, with its output, and its `rank` among the processes of all nodes."""

    rank: int
    _guarded: asyncio.subprocess.Process | ForkedWorker
    _control: int | None
    _output: list[_Relay]
    _asked: bool = False  # True after `ask_to_end`

    @classmethod
    async def start(
        cls, job: Job, environment: dict[str, str], log: FileIO | None, *, files: int, preloaded: PreloadServer | None
    ) -> Process:
        """Start a process with these environment variables and this log; fork it from `preloaded` if given."""
        rank = int(environment["RANK"])
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, told = _open_pipe(theirs, ours)
            output: list[tuple[int, int]] = []  # pairs of a pipe to read from and a stream to write to
            streams: dict[int, int] = {}
            if job.forwards_output:
                for target in (1, 2):
                    source, streams[target] = _open_pipe(ours, theirs)
                    output.append((source, target))
                environment = {"PYTHONUNBUFFERED": "1", **environment}  # a SIGKILL would lose buffered lines
            # Several processes, each with a thread per core, would compete for the cores; torchrun sets this, too.
            defaults = {"OMP_NUM_THREADS": "1"} if job.nproc > 1 else {}
            environment = {**defaults, **os.environ, **environment}
            reads_ours = environment["LOCAL_RANK"] == "0"  # only local rank 0 reads the launcher's standard input
            guarded: asyncio.subprocess.Process | ForkedWorker | None = None
            if preloaded is not None and await preloaded.wait_until_ready():
                source = os.dup(0) if reads_ours else os.open(os.devnull, os.O_RDONLY)
                theirs.callback(os.close, source)
                three = (source, streams.get(1, 1), streams.get(2, 2))
                guarded = await preloaded.start_worker(environment, control=control, streams=three, files=files)
            if guarded is None:
                guarded = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", "-S", str(Path(guard.__file__))),
                    *(str(control), f"{files}/{guard.signal_state()}"),
                    *job.command,
                    stdin=None if reads_ours else asyncio.subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(control,),
                    start_new_session=True,
                    stdout=streams.get(1),
                    stderr=streams.get(2),
                )
                guard.STARTED.add(guarded.pid)
            ours.pop_all()
            label = f"[{rank}] ".encode() if job.prefix else b""
            return cls(rank, guarded, told, [_Relay(source, target, label, log) for source, target in output])

    @property
    def status(self) -> int | None:
        """The exit status, or minus the signal that ended the process; None while it runs."""
        return self._guarded.returncode

    async def wait(self) -> None:
        """Wait until the process has ended; if its guard was killed, kill the rest of the guard's session."""
        if await self._guarded.wait() == -signal.SIGKILL:
            _kill_session(self._guarded.pid)

    def ask_to_end(self, number: int) -> None:
        """Ask the process's group once to end, by this signal: some programs abort at a second one."""
        if not self._asked:
            self._asked = True
            self.send_signal(number)

    def forward_signal(self, number: int) -> None:
        """Send the process's group a signal that is not meant to end the group."""
        self.send_signal(number | guard.IN_PASSING)

    def send_signal(self, number: int) -> None:
        """Send the process's group a signal; `ask_to_end` can still follow."""
        if self._control is not None and self.status is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, bytes([number]))
            self.continue_guard()

    def continue_guard(self) -> None:
        """Continue a stopped guard, which would not notice the end of its process."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._guarded.pid, signal.SIGCONT)

    async def finish_output(self) -> None:
        """Pass on the rest of the process's output, and close its files."""
        control, self._control = self._control, None
        if control is None:
            return
        os.close(control)
        for output in self._output:
            output.finish()
        with anyio.move_on_after(DRAIN_WITHIN):  # a slow reader of the output must not delay the next round
            for output in self._output:
                await anyio.to_thread.run_sync(output.join, abandon_on_cancel=True)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(name)) == leader:
                    os.kill(int(name), signal.SIGKILL)


async def open_log(folder: str | None, environment: Mapping[str, str]) -> FileIO | None:
    """Open a process's log file, if any; return None on an error: a full or hung disk must not end a healthy node."""
    if folder is None:
        return None
    run, round = quote(environment["RDZV_RUN_ID"], safe=""), environment["RDZV_ROUND"]
    run = run if run.strip(".") else run.replace(".", "%2E")  # `quote` keeps dots, and `..` is another folder
    path = Path(folder) / run / f"round-{round}" / f"rank-{environment['RANK']}.log"

    def open_to_append() -> FileIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Do not block on a pipe without a reader.
        return FileIO(str(path), "ab", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666))

    try:
        return await in_thread(open_to_append)
    except OSError as error:
        log.warning(CUT, f"--log-dir: {path}", error.strerror or error)
        return None


def _open_pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing


class _Relay(threading.Thread):
    """Passes on one output stream of a process, with a label before each line, in a thread, as a terminal may block."""

    _locks: Final = {1: threading.Lock(), 2: threading.Lock()}  # a lock per stream, lest processes' lines mix
    _unfinished: ClassVar[dict[int, _Relay | None]] = {1: None, 2: None}  # by stream: the writer of an unfinished line

    def __init__(self, source: int, target: int, label: bytes, log: FileIO | None = None) -> None:
        super().__init__(name=f"output {label.decode()}")  # no daemon: at exit, Python waits for this thread
        self._cut: set[str] = set()  # names of the files that could not be written
        self._log = None if log is None else (os.dup(log.fileno()), log.name)  # a process's two streams share this file
        self._from = source
        self._to = target
        self._label = label
        self._finish_reading, self._finish_writing = os.pipe()
        self.start()

    def finish(self) -> None:
        """End this thread once the pipe is empty, even if a process that has left the group may still write to it."""
        os.close(self._finish_writing)

    def run(self) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):  # the reader of the output has closed it
                self._forward_lines()
        finally:
            os.close(self._from)
            os.close(self._finish_reading)
            if self._log is not None:
                os.close(self._log[0])

    def _forward_lines(self) -> None:
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        poll.register(self._finish_reading, select.POLLIN)
        rest, shows_prompts = b"", os.isatty(self._to)
        while True:
            ready = {file for file, _ in poll.poll(PROMPT_AFTER if rest and shows_prompts else None)}
            if not ready:  # after a pause: the incomplete line may be a prompt
                self._write_output(self._label + rest, unfinished=True)
                rest = b""
                continue
            if self._from not in ready:
                break  # `finish` was called, and nothing is left
            chunk = os.read(self._from, LINE_BYTES_MAX)
            if not chunk:
                break
            if self._log is not None:
                self._write_or_drop(self._log[0], chunk, f"--log-dir: {self._log[1]}")
            if self._unfinished[self._to] is self:  # this thread's incomplete line was written last
                end = chunk.find(b"\n") + 1 or len(chunk)
                self._write_output(chunk[:end], unfinished=not chunk[:end].endswith(b"\n"))
                chunk = chunk[end:]
            labelled, rest = label_lines(rest + chunk, self._label)
            if labelled:
                self._write_output(labelled)
        if rest:
            self._write_output(self._label + rest + b"\n")

    def _write_output(self, data: bytes, *, unfinished: bool = False) -> None:
        with self._locks[self._to]:
            if self._unfinished[self._to] not in (None, self):
                data = b"\n" + data
            self._unfinished[self._to] = self if unfinished else None
            self._write_or_drop(self._to, data, "standard output" if self._to == 1 else "standard error")

    def _write_or_drop(self, file: int, data: bytes, name: str) -> None:
        """Write data, or drop it: a full disk must neither end a healthy process nor hide its other output."""
        try:
            write_all(file, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            log.log(logging.DEBUG if name in self._cut else logging.WARNING, CUT, name, error.strerror)
            self._cut.add(name)


_LINE_ENDS = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def label_lines(text: bytes, label: bytes) -> tuple[bytes, bytes]:
    """Put a label before each complete line; also return the incomplete rest. A lone carriage return ends a line."""
    labelled: list[bytes] = []
    begin = 0
    for line_end in _LINE_ENDS.finditer(text):
        labelled += label, text[begin : line_end.end()]
        begin = line_end.end()
    rest = text[begin:]
    if len(rest) >= LINE_BYTES_MAX:
        labelled += label, rest, b"\n"
        rest = b""
    return b"".join(labelled), rest
