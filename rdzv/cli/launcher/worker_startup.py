"""The startup code of the command's Python processes, which writes their stacks for the launcher.

`rdzv run` puts a copy of this file, as `sitecustomize.py`, first in PYTHONPATH, so every Python interpreter imports it.
The copy opens a file in `RDZV_STACKS_DIR` and registers a handler of SIGNAL, in C, which writes the stacks of all
threads to that file, even if Python is blocked. Then the copy locks the file. The lock shows the launcher that the
process handles the signal, and the process's pid in the launcher's namespace. The lock ends with the process or at an
`exec`.

A user's own `sitecustomize` is imported after this one. The processes may run any version of Python, so this file keeps
to old syntax and the standard library, and never fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import os
import signal
import sys

FOLDER = "RDZV_STACKS_DIR"

SIGNAL = getattr(signal, "SIGRTMAX", 0) - 6 if hasattr(signal, "SIGRTMAX") else int(getattr(signal, "SIGINFO", 0))
"""A real-time signal that neither Slurm nor a language's runtime uses; on macOS, which has no such signal, SIGINFO."""


def register_stack_dumps() -> None:
    """Make this process and its forks write their stacks when they receive SIGNAL."""
    folder = os.environ.get(FOLDER)
    if folder and SIGNAL and hasattr(faulthandler, "register"):
        own = [_open_dump_file(folder)]

        def reopen_dump_file() -> None:
            if own[0] is not None:
                os.close(own[0])
            own[0] = _open_dump_file(folder)

        os.register_at_fork(after_in_child=reopen_dump_file)


def _open_dump_file(folder: str) -> int | None:
    faulthandler.unregister(SIGNAL)
    path = os.path.join(folder, f"{os.environ.get('RANK', 'none')}.{os.getpid()}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)  # exec closes this file
    except OSError:
        return None
    with contextlib.suppress(OSError):
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the launcher sends SIGNAL only once the file is locked
    return file


def _import_next_sitecustomize() -> None:
    this = sys.modules.pop("sitecustomize")
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)  # the import system requires this entry


if __name__ == "sitecustomize":
    register_stack_dumps()
    _import_next_sitecustomize()
