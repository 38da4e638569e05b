"""A process's temporary folder, removed at its end or, after SIGKILL, by another process that makes such a folder.

The process holds a lock on a file in the folder: a process id is unique only within a container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK: Final = ".lock"
LEFT_AFTER: Final = 60.0  # seconds; a younger folder without a lock may be under construction


def make_process_folder(prefix: str) -> Path:
    """Make a folder, which the caller removes, and remove the folders of dead processes."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except FileNotFoundError as error:
        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] in range(4):  # `tempfile` tests folders by writing four bytes
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG)) from error
        why = "no folder for temporary files can be written to; set TMPDIR to one that can"
        raise OSError(errno.EROFS, why) from error
    _lock_folder(folder)  # the lock lasts until the process ends: no code closes the descriptor
    for other in folder.parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = other.stat(follow_symlinks=False)
            if other != folder and found.st_uid == os.getuid() and abs(time.time() - found.st_mtime) > LEFT_AFTER:
                os.close(_lock_folder(other))
                shutil.rmtree(other, ignore_errors=True)
    return folder


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder by `make_process_folder`, and remove it after the block."""
    folder = make_process_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock_folder(folder: Path) -> int:
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
