"""The reasons why a file of a store cannot be read or written, with their remedies.

SQLite's error codes do not suffice: SQLite reports a full tmpfs or a limit on file sizes as an I/O error, and too few
descriptors or a read-only mount as a file that cannot be opened. Only an error about contents means damage. After any
other error, a test write beside the files finds the system's reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from typing import TYPE_CHECKING

from store.disk.directory import FILE, MARK, allocate, with_remedy
from store.errors import StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # SQLITE_ERROR: a missing table
FILES = 10  # descriptors that SQLite needs to copy one database into another
PROBE_BYTES = 64 * 1024
FULL = (errno.ENOSPC, errno.EDQUOT)


def probe_write_error(path: Path, size: int = PROBE_BYTES) -> OSError | None:
    """Try to open a file and `FILES` more, and to write `size` bytes beside it; return the error, or None."""
    probe, numbers = path.with_name(f".{path.name}.probe"), []
    try:
        if path.exists():
            numbers.append(os.open(path, os.O_RDONLY))
        numbers.append(os.open(probe, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            numbers += [os.dup(numbers[-1]) for _ in range(FILES)]
            allocate(numbers[-1], size)
        finally:
            probe.unlink()
    except OSError as error:
        return error
    finally:
        for number in numbers:
            os.close(number)
    return None


def free_bytes(directory: Path) -> int:
    """Return the free bytes of a disk."""
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def is_disk_full(path: Path) -> bool:
    """Return True if the disk of a file is full."""
    error = probe_write_error(path)
    return error is not None and error.errno in FULL


def disk_error_text(error: Exception, path: Path) -> str:
    """Return an error's text; if the system rejects a test write, add the system's reason."""
    refused = probe_write_error(path)
    return f"{error}: {with_remedy(refused)}" if refused is not None else str(error)


@contextlib.contextmanager
def explaining_errors(path: Path, *, written: Path | None = None) -> Iterator[None]:
    """Replace an error by one that names the file (`path`, or the copy `written`), the reason and the remedy."""
    try:
        yield
    except StoreUsageError:
        raise
    except Exception as error:
        if _means_damage(error):
            raise StoreUsageError(
                f"{path} is damaged ({error}); nothing in it was changed: restore it from a backup, or move it away, "
                f"with all that begins with {FILE} or {MARK} beside it, to begin with an empty store"
            ) from error
        raise StoreUsageError(_explain_disk_error(error, path, written)) from error


def _means_damage(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):  # an error without a code counts as damage
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        return code & 0xFF in DAMAGE
    return not isinstance(error, OSError | MemoryError)


def _explain_disk_error(error: Exception, path: Path, written: Path | None) -> str:
    size = 0
    with contextlib.suppress(OSError):
        size = path.stat().st_size
    unchanged = f"nothing in {path} was changed"
    for place in filter(None, (written, path)):
        refused = probe_write_error(place, size if place is written else PROBE_BYTES)
        if refused is not None:
            return f"{place} cannot be {'written' if place is written else 'used'}: {with_remedy(refused)}; {unchanged}"
    return (
        f"{written or path} cannot be used ({error}), and the system takes a write beside it; {unchanged}: try again, "
        f"and look for errors of the disk in the system's log"
    )
