"""The files of a data directory.

    store.sqlite3            everything that is durable, with SQLite's own -wal and -shm beside it
    lock                     held by the one server that has the directory
    durable                  the number of the last durable group; see `LastGroupMark`
    reserve                  disk space reserved for deletes; see `Reserve`
    store.sqlite3-wal.left-1 the log of a database that was moved away, when a new one took its place

The directory (0700) and its files (0600) are created for their owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import stat
import threading
import zlib
from functools import partial
from typing import TYPE_CHECKING

from store.errors import StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

log: logging.Logger = logging.getLogger(__name__)

FILE = "store.sqlite3"
UNFINISHED = "store.sqlite3.new"  # the name of a store until it is complete: an empty database counts as damaged
LOCK = "lock"
MARK = "durable"
RESERVE = "reserve"
RESERVE_BYTES = 8 * 1024 * 1024  # room to copy a log of 4 MiB into the database, plus DELETES_BYTES
DELETES_BYTES = 4 * 1024 * 1024  # the log's growth by deletes before it restarts
OTHERS = stat.S_IRWXG | stat.S_IRWXO
REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it writable, or copy the directory, with all files in it, to where it can be written",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files (fs.file-max)",
    errno.EACCES: "run this as the owner of the files",
    errno.EPERM: "run this as the owner of the files",
}


def with_remedy(error: OSError) -> str:
    """Return the text of a system error, with the remedy."""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({remedy})" if remedy else "")


def take_lock(directory: Path) -> IO[str]:
    """Lock a directory, created if missing, until the returned file is closed; `StoreUsageError` if this fails."""
    try:
        _make_directory(directory, mode=0o700)
        file = open(directory / LOCK, "a+", encoding="utf-8", opener=partial(os.open, mode=0o600))  # noqa: SIM115
    except OSError as error:
        raise StoreUsageError(f"data_dir {directory} cannot be used: {with_remedy(error)}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # a full disk must not prevent the lock
            file.truncate(0)
            # Write unbuffered: after an error, closing a buffered file would write again.
            os.write(file.fileno(), b"%d\n" % os.getpid())
    except BlockingIOError:
        with file, contextlib.suppress(BlockingIOError):
            file.seek(0)
            process = file.read().strip() or "unknown"
            why = f"is in use by another server (process {process}): stop that one, or use another directory"
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a server's lock is exclusive
            why = "is read by rdzv check or backup: start the server when that is over"
        raise StoreUsageError(f"data_dir {directory} {why}") from None
    except OSError as error:  # for example, a network file system without locks
        file.close()
        raise StoreUsageError(f"data_dir {directory} cannot be locked: {with_remedy(error)}") from error
    return file


def release_lock(file: IO[str]) -> None:
    """Release the lock, even if a forked child has the file open."""
    if not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


@contextlib.contextmanager
def serving_process(directory: Path) -> Iterator[str | None]:
    """Yield the id of the process that serves a directory. If none does, hold its lock, if any, and yield None."""
    try:
        file = open(directory / LOCK, encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError:
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield file.read().strip() or "unknown"
        else:
            yield None


def _make_directory(directory: Path, *, mode: int = 0o777) -> None:
    if not directory.exists():
        _make_directory(directory.parent)
        directory.mkdir(mode=mode, exist_ok=True)
        sync_directory(directory.parent)


def create_file(path: Path) -> None:
    """Create an empty file that only its owner may open; SQLite gives its log the same mode."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable; syncing the files does not do this."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def rename_durably(partial: Path, path: Path) -> None:
    """Give a complete file its final name, durably.

    If a database was moved away without its log, SQLite would apply that log to the new file. The old log may hold
    acknowledged changes, so it is renamed.
    """
    left = path.with_name(f"{path.name}-wal")
    if left.exists():
        names = (left.with_name(f"{left.name}.left-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        os.replace(left, aside)
        log.warning(
            "%s was left behind by a file that was moved away, and holds the last changes of that one: it is %s now; "
            "with -wal after that file's name, and beside it, it is read again",
            *(left, aside.name),
        )
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)  # only an index of the old log
    os.replace(partial, path)
    sync_directory(path.parent)


def warn_if_open_to_others(directory: Path) -> None:
    """Log a warning if other users may read a data directory or its files."""
    wider = [
        f"{path} has mode {mode:04o}"
        for path in (directory, directory / FILE)
        if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS
    ]
    if wider:
        log.warning(
            "other users of this machine may look into the store: %s; chmod 700 %s, and chmod 600 the files in it",
            *(", ".join(wider), directory),
        )


class LastGroupMark:
    """The file with the number of the last group of changes that is durable.

    SQLite cannot tell a damaged or missing end of its log from an end that was never written. The mark shows if the end
    is damaged, or the store is an old copy. It is written after a group is durable, and before the group's replies are
    sent. It is not synced, to save time, so it may be older after a power loss.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MARK
        self._file: int | None = None

    def read(self) -> tuple[str, int] | None:
        """Return the id of the store and the number of its last durable group; None if it cannot be read."""
        try:
            text, _, checksum = self._path.read_text(encoding="utf-8").strip().rpartition(" ")
            store_id, number = text.split()
            if int(checksum, 16) == zlib.crc32(text.encode()):
                return store_id, int(number)
        except FileNotFoundError:
            return None
        except (IsADirectoryError, ValueError) as error:
            log.debug("%s cannot be read: %s", self._path, error)
        log.warning("%s is damaged: it is ignored, and written again", self._path)
        return None

    def refuse_missing_database(self, path: Path) -> None:
        """For a directory without a database: raise `StoreUsageError` if a mark shows that it had one."""
        if (marked := self.read()) is not None:
            raise StoreUsageError(
                f"{path} is gone, and {self._path} says that it held write {marked[1]} of store {marked[0]}: put it "
                f"back, or a backup in its place (rdzv restore FILE {path.parent}), or move {self._path} away, too, "
                f"to begin with an empty store"
            )

    def write(self, store_id: str, number: int) -> None:
        """Write the number of a durable group; ignore errors, as an older number does no harm."""
        text = f"{store_id} {number}"
        line = f"{text} {zlib.crc32(text.encode()):08x}\n".encode().rjust(64)
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
                if os.fstat(self._file).st_size > len(line):
                    os.ftruncate(self._file, 0)  # too long for a mark: another program wrote the file
            os.pwrite(self._file, line, 0)

    def close(self) -> None:
        """Make the mark durable, and close its file."""
        number, self._file = self._file, None
        if number is not None:
            with contextlib.suppress(OSError):
                os.fsync(number)
            os.close(number)


class Reserve:
    """A file that reserves `bytes` of disk space for deletes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        self._at_work = threading.RLock()
        self.bytes: int = 0

    def allocate(self, least: int) -> bool:
        """Reserve `least` bytes, or keep a larger reserve up to `RESERVE_BYTES`; return False if the disk is full."""
        with self._at_work:
            size = max(least, min(self.bytes, RESERVE_BYTES))
            if size == self.bytes:
                return True
            try:
                number = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
                try:
                    if os.fstat(number).st_size < size:
                        allocate(number, size)
                    os.ftruncate(number, size)
                finally:
                    os.close(number)
            except OSError:
                self._resize(self.bytes)  # give back the part that was allocated
                return False
            self.bytes = size
            return True

    def free(self) -> None:
        """Release the reserved space."""
        self._resize(0)

    def _resize(self, size: int) -> None:
        with self._at_work, contextlib.suppress(OSError):
            self.bytes = size
            os.truncate(self._path, size)


def allocate(number: int, size: int) -> None:
    """Extend a file to this size, and allocate the disk space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:  # macOS
        os.pwrite(number, bytes(size), 0)
