"""Real processes of one run on this machine, and their store, for effects that virtual time lacks.

    with rdzv.testing.processes(4, "train.py") as processes:
        processes.kill(2)
        assert processes.wait(within=60) == [0, 0, -9, 0]

Each process finds the run in its environment: `RDZV_URL`, and settings as `RDZV_<NAME>`. The end of the block kills
the remaining processes and their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import store.sync

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOKS_EVERY = 0.02  # seconds between checks of processes
OUTPUT_IN_AN_ERROR = 4000  # the last characters per process


class ProcessesError(AssertionError):
    """A wait for processes has failed; the message ends with their output."""


class RealProcesses:
    """Processes of one run, and their store, during a block: `with rdzv.testing.processes(4, script)`.

    Args:
        count: The number of processes.
        script: A file for this Python, or a whole command as a list.
        arguments: Further arguments.
        env: Additions to the environment.
        settings: Parameters of the run; the default of `min_nodes` is `count`.

    Attributes:
        url: The run's URL.
    """

    def __init__(
        self,
        count: int,
        script: str | os.PathLike[str] | Sequence[str],
        *arguments: str,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        if count < 1:
            raise ValueError(f"processes({count!r}): start at least one")
        command = [sys.executable, os.fspath(script)] if isinstance(script, str | os.PathLike) else script
        self._count = count
        self._command = [*command, *arguments]
        self._env = dict(env or {})
        self._settings = {"min_nodes": count, "is_host": False, **settings}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self.url: str = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-processes-")))
            self.url = f"{stack.enter_context(store.sync.serve()).url}/test"
            stack.callback(self._kill_all)
            for index in range(self._count):
                self.start(index)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, index: int) -> None:
        """Start another process, or an ended one again; append its output to the earlier one's."""
        running = self._processes.get(index)
        if running is not None and running.poll() is None:
            raise RuntimeError(f"process {index} runs: kill it first")
        settings = {f"RDZV_{name.upper()}": str(value) for name, value in self._settings.items()}
        env = {**os.environ, "RDZV_NODE_ID": f"node-{index}", **settings, "RDZV_URL": self.url, **self._env}
        with self._log_path(index).open("ab") as log:
            self._processes[index] = subprocess.Popen(  # noqa: S603  the command is the test's own
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def kill(self, index: int) -> None:
        """Kill a process and its children."""
        self._send_signal(index, signal.SIGKILL)

    def terminate(self, index: int) -> None:
        """Send SIGTERM to a process and its children."""
        self._send_signal(index, signal.SIGTERM)

    def pause(self, index: int) -> None:
        """Send SIGSTOP to a process and its children."""
        self._send_signal(index, signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """Send SIGCONT to a process and its children."""
        self._send_signal(index, signal.SIGCONT)

    def pid(self, index: int) -> int:
        """Return the process id."""
        return self._processes[index].pid

    def output(self, index: int) -> str:
        """Return a process's output so far, of both streams."""
        return self._log_path(index).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, index: int, text: str, *, within: float = 60.0) -> None:
        """Wait until a process has written `text`; raise ProcessesError if it ends first, or after `within` seconds."""
        until = time.monotonic() + within
        while text not in self.output(index):
            ended = self._processes[index].poll() is not None
            if text not in self.output(index) and (ended or time.monotonic() > until):
                raise ProcessesError(f"process {index} has not written {text!r:.200}{self._all_output()}")
            time.sleep(LOOKS_EVERY)

    def wait(self, *, within: float = 60.0) -> list[int]:
        """Wait until all processes have ended; return their exit statuses, negative for a signal.

        After `within` seconds, raise ProcessesError.
        """
        until = time.monotonic() + within
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > until:
                running = [index for index, process in self._processes.items() if process.poll() is None]
                raise ProcessesError(f"processes {running} have not ended within {within:g} s{self._all_output()}")
            time.sleep(LOOKS_EVERY)
        return [self._processes[index].wait() for index in sorted(self._processes)]

    def _send_signal(self, index: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[index].pid, number)

    def _kill_all(self) -> None:
        for index, process in self._processes.items():
            self.kill(index)
            process.wait()

    def _log_path(self, index: int) -> Path:
        return self._folder / f"{index}.log"

    def _all_output(self) -> str:
        return "".join(
            f"\n--- process {index}:\n{self.output(index)[-OUTPUT_IN_AN_ERROR:]}" for index in self._processes
        )


processes: Final = RealProcesses  # the name that callers use
