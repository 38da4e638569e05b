"""Verifies that a data directory holds a whole store of a known format, without lost changes.

A store of an older format is migrated in one transaction (promise S12). Only a backup allows a return to the old
format.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from typing import TYPE_CHECKING

from store.disk import rows, wal
from store.disk.directory import FILE, LastGroupMark
from store.errors import StoreUsageError

if TYPE_CHECKING:
    from pathlib import Path

log: logging.Logger = logging.getLogger(__name__)


def open_read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that changes nothing, even when it is closed."""
    # On a read-only mount, SQLite cannot create its log's index. With `immutable=1`, it needs no index.
    read_only = os.statvfs(path).f_flag & os.ST_RDONLY and not path.with_name(f"{path.name}-wal").exists()
    how = "immutable=1" if read_only else "mode=ro"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, isolation_level=None, timeout=30)


def verify(directory: Path, *, served: bool = False) -> int:
    """Return a store's format; raise if it is damaged or has lost changes. A `served` store's log is not checked."""
    path = directory / FILE
    marked = LastGroupMark(directory).read()  # read before the database, as a server may write both meanwhile
    with contextlib.closing(open_read_only(path)) as database:
        database.execute("BEGIN")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if not database.execute("SELECT 1 FROM sqlite_schema").fetchone():
            raise sqlite3.DatabaseError("it is empty")
        if not served and _is_log_damaged(path):
            raise _lost_changes_error(path, "a change in its log is not as it was written, and others come after it")
        check_format(version, path)
        (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if health != "ok":
            raise sqlite3.DatabaseError(health)
        store_id, group = rows.read_id_and_last_group(database)
    if marked is not None and marked[0] == store_id and marked[1] > group:
        raise _lost_changes_error(path, f"it ends with write {group}, and write {marked[1]} was on the disk")
    return int(version)


def _is_log_damaged(path: Path) -> bool:
    written, index = path.with_name(f"{FILE}-wal"), path.with_name(f"{FILE}-shm")
    if not written.exists() or not index.exists():
        return False
    frames = wal.frames_sqlite_reads(index.read_bytes()[:32])
    if frames is None:
        return False
    with written.open("rb") as file:
        return wal.is_wal_damaged(file, size=written.stat().st_size, frames_sqlite_reads=frames)


def _lost_changes_error(path: Path, what: str) -> StoreUsageError:
    return StoreUsageError(
        f"{path} has lost changes that were acknowledged: {what}; nothing in it was changed: restore a backup (rdzv "
        f"restore FILE DIR), or go on with what is left under a new identity (rdzv restore {path} NEWDIR)"
    )


def check_format(found: int, path: Path) -> None:
    """Raise `StoreUsageError` for a format that this release neither reads nor migrates."""
    if found > rows.FORMAT:
        raise StoreUsageError(
            f"{path} has format {found}, and this release, which is older than the one that wrote it, reads formats up "
            f"to {rows.FORMAT}: use that release, or another data_dir"
        )
    if not all(step in rows.MIGRATIONS for step in range(found, rows.FORMAT)):
        raise StoreUsageError(
            f"{path} has format {found}, from before the first release; this release reads format {rows.FORMAT}: "
            f"use another data_dir"
        )


def migrate(path: Path, found: int) -> None:
    """Migrate a store of an older format."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript("PRAGMA synchronous=FULL; PRAGMA fullfsync=ON; BEGIN EXCLUSIVE;")
        for step in range(found, rows.FORMAT):
            rows.MIGRATIONS[step](database)
        rows.load_store(database)  # raises if the migrated store is inconsistent; closing the database then rolls back
        database.execute(f"PRAGMA user_version={rows.FORMAT}")
        database.execute("COMMIT")
    log.warning("%s was carried over from format %d to %d", path, found, rows.FORMAT)
