"""Asks the running Python processes of a command for their stacks; see `worker_startup`.

A signal handler of each process writes the process's stacks to a file, which is complete once it has not grown for a
moment. A process that writes nothing is stopped, or stuck in the kernel: its state is read from /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.cli.launcher import worker_startup
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT_MOST: Final = 256 * 1024  # characters of all stacks of a node
TEXT_OF_ONE_MOST: Final = 64 * 1024  # characters of one process's stacks
ANSWER_WITHIN: Final = 2.0  # seconds for all answers; running processes handle signals at once
SETTLED_AFTER: Final = 0.1  # seconds without growth until all files count as complete
LOOK_EVERY: Final = 0.02


class WorkerStacks:
    """The files to which one node's processes write their stacks, in the launcher's folder."""

    def __init__(self, folder: Path) -> None:
        self._startup = folder / "startup"
        self._dumps = folder / "stacks"
        self._startup.mkdir()
        self._dumps.mkdir()
        shutil.copyfile(worker_startup.__file__, self._startup / "sitecustomize.py")

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a process can be asked for its stacks."""
        path = os.pathsep.join(filter(None, [str(self._startup), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, worker_startup.FOLDER: str(self._dumps)}

    async def collect(self, ranks: Iterable[int] = ()) -> str:
        """Return the stacks of all running Python processes, and name those of `ranks` that cannot be asked."""
        asked = {path: pid for path in sorted(self._dumps.glob("*"), key=_rank_pid_of) if (pid := _lock_holder(path))}
        for path, pid in asked.items():
            os.truncate(path, 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has ended, or changed its user
                os.kill(pid, worker_startup.SIGNAL)
        await self._wait_for_dumps(asked)
        told = [_describe_process(path, pid) for path, pid in asked.items()]
        answering = {_rank_of(path) for path in asked}
        silent = [str(rank) for rank in ranks if str(rank) not in answering]
        if silent:
            told.append(
                f"rank {', '.join(silent)}: no Python process that could be asked: the command is no Python program, "
                f"runs it with -I, -E or -S, or has replaced PYTHONPATH"
            )
        text = "\n".join(told) or "no process runs"
        return text if len(text) <= TEXT_MOST else f"{text[:TEXT_MOST]}\n(cut: {len(text) - TEXT_MOST:,} more letters)"

    async def _wait_for_dumps(self, files: Iterable[Path]) -> None:
        sizes: dict[Path, int] = {}
        grown_at = anyio.current_time()
        with anyio.move_on_after(ANSWER_WITHIN):
            while True:
                before, sizes = sizes, {path: _dump_size(path) for path in files}
                now = anyio.current_time()
                if sizes != before:
                    grown_at = now
                if all(sizes.values()) and now - grown_at >= SETTLED_AFTER:
                    return
                await anyio.sleep(LOOK_EVERY)

    def remove_ended_files(self) -> None:
        """Remove the files of ended processes; call this between rounds: a new file is not locked at once."""
        for path in list(self._dumps.glob("*")):
            with contextlib.suppress(OSError):
                if _lock_holder(path) is None:
                    path.unlink()


def _rank_of(path: Path) -> str:
    return path.name.rpartition(".")[0]  # any text


def _rank_pid_of(path: Path) -> tuple[int, int]:
    rank, _, pid = path.name.rpartition(".")
    return int(rank) if rank.isdecimal() else -1, int(pid)


_LOCK = ("qqihh", 2, 3) if sys.platform == "darwin" else ("hhqqi", 4, 0)
"""The layout of the system's `struct flock`, and the indices of its fields for the process and the lock type."""


def _lock_holder(path: Path) -> int | None:
    layout, pid_at, kind_at = _LOCK
    fields = [0] * 5
    fields[kind_at] = fcntl.F_WRLCK
    try:
        with open(path, "rb+") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(f"{layout}0q", *fields))
    except OSError:
        return None
    found = struct.unpack(f"{layout}0q", answer)
    return None if found[kind_at] == fcntl.F_UNLCK else found[pid_at] or None


def _dump_size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return -1  # the process has ended


def _describe_process(path: Path, pid: int) -> str:
    text = ""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(TEXT_OF_ONE_MOST)
    rank = printable(_rank_of(path))
    what = f"{'process' if rank == 'none' else f'rank {rank}, process'} {pid}"
    return f"{what}:\n{text.rstrip()}\n" if text else f"{what} does not answer{_kernel_state_of(pid)}\n"


def _kernel_state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        state = next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State:")), "")
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("0 \n")
        return f": its state is {state}{f', in the kernel at {where}' if where else ''}"
    return ""
