"""Shell: whether a data directory holds a whole store, and one that has lost nothing."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

from store.disk import migrations, rows, wal
from store.disk.directory import FILE, Mark
from store.errors import StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["open_to_read", "reporting", "verify"]


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, not even when it is closed: one that could write would then tidy up."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=30)


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Say of whatever a damaged file leads to what is wrong, and what to do."""
    try:
        yield
    except StoreUsageError:
        raise
    except Exception as error:
        raise StoreUsageError(
            f"{path} is damaged or cannot be used ({error}); nothing in it was changed: restore it from a backup, or "
            f"restore what can still be read of it (rdzv restore --damaged {path} NEWDIR), or move it away, with what "
            f"lies beside it, to begin with an empty store"
        ) from error


def verify(directory: Path, *, served: bool = False) -> int:
    """Refuse a database that is no whole store, and one that has lost changes which were durable; its format.

    Args:
        directory: The data directory.
        served: A server writes to it meanwhile, so that its log is not to be looked at.
    """
    path = directory / FILE
    marked = Mark(directory).read()  # before the database: a server may write to both
    with contextlib.closing(open_to_read(path)) as database:
        database.execute("BEGIN")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if not database.execute("SELECT 1 FROM sqlite_schema").fetchone():
            raise sqlite3.DatabaseError("it is empty")
        if not served and _log_is_damaged(path):
            raise _lost(directory, "a change in its log is not as it was written, and others come after it")
        migrations.check_format(version, path)
        (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if health != "ok":
            raise sqlite3.DatabaseError(health)
        store_id, group = rows.last_group(database)
    if marked is not None and marked[0] == store_id and marked[1] > group:
        raise _lost(directory, f"it ends with write {group}, and write {marked[1]} was on the disk")
    return int(version)


def _log_is_damaged(path: Path) -> bool:
    """Whether SQLite, which has read the log by now, has left out what was durable."""
    written, index = path.with_name(f"{FILE}-wal"), path.with_name(f"{FILE}-shm")
    if not written.exists() or not index.exists():
        return False
    frames = wal.frames_read(index.read_bytes()[:32])
    if frames is None:
        return False
    with written.open("rb") as file:
        return wal.is_damaged(file, size=written.stat().st_size, frames_read=frames)


def _lost(directory: Path, what: str) -> StoreUsageError:
    path = directory / FILE
    return StoreUsageError(
        f"{path} has lost changes that were acknowledged: {what}; nothing in it was changed: restore a backup (rdzv "
        f"restore FILE DIR), or go on with what is left under a new identity (rdzv restore {path} NEWDIR)"
    )
