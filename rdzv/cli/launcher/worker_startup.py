"""Shell: what a Python process of the command does first, so that its launcher can ask it for its stacks.

`rdzv run` puts a copy of this file, named `sitecustomize.py`, in front of PYTHONPATH. Each Python interpreter imports
that name as it starts. It opens a file of its own in the folder that `RDZV_STACKS_DIR` names, and has the interpreter
write the stacks of all its threads there whenever SIGNAL comes: in C, within the signal handler, whatever Python is
waiting for meanwhile. Then it locks the file. By that lock the launcher knows which processes it may send the signal
to: a lock ends with its process and with `exec`, and tells the number that the process has in the launcher's own view.

A `sitecustomize` of the user's is imported after this one, as if this one were not there. The processes may run any
version of Python, so this file speaks an old one, imports the standard library only, and never fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import os
import signal
import sys

__all__ = ["FOLDER", "SIGNAL", "register"]

FOLDER = "RDZV_STACKS_DIR"  # the environment variable with the folder

SIGNAL = getattr(signal, "SIGRTMAX", 0) - 6 if hasattr(signal, "SIGRTMAX") else int(getattr(signal, "SIGINFO", 0))
"""A real-time signal, of which neither Slurm nor any language's runtime makes use; macOS has none, but has SIGINFO."""


def register() -> None:
    """Let this process write its stacks at a signal, and each process that is forked from it."""
    folder = os.environ.get(FOLDER)
    if folder and SIGNAL and hasattr(faulthandler, "register"):
        own = [_open(folder)]

        def in_child() -> None:
            if own[0] is not None:
                os.close(own[0])
            own[0] = _open(folder)

        os.register_at_fork(after_in_child=in_child)


def _open(folder: str) -> int | None:
    """Register a file of this process; None if it cannot be made: then nobody will ask."""
    faulthandler.unregister(SIGNAL)
    path = os.path.join(folder, f"{os.environ.get('RANK', 'none')}.{os.getpid()}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)  # closed by exec, as Python opens all files
    except OSError:
        return None
    with contextlib.suppress(OSError):
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # last: whoever finds it locked may send the signal
    return file


def _import_the_next() -> None:
    """Import the `sitecustomize` that would have been imported without this one, if there is any."""
    this = sys.modules.pop("sitecustomize")
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)  # whoever imports this one looks it up once more


if __name__ == "sitecustomize":
    register()
    _import_the_next()
