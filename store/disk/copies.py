"""Checks, copies and restores durable stores: `rdzv check`, `backup` and `restore`.

Checks and copies change nothing, and work while a server runs. A copy is one file; if it is not valid, it is deleted.
A restored store gets a new identity. With the old identity, clients would assume that writes after the copy
still exist, and two clients might hold one lock.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from store.disk import rows
from store.disk.diagnosis import explaining_errors
from store.disk.directory import FILE, UNFINISHED, create_file, release_lock, rename_durably, serving_process, take_lock
from store.disk.verification import check_format, migrate, open_read_only, verify
from store.errors import StoreUsageError

if TYPE_CHECKING:
    from store.engine.changeset import SavedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """A verified store, the size of its files, and the process that serves it."""

    saved: SavedStore
    file_bytes: int
    served_by: str | None = None


def create_store(path: Path, store_id: str) -> None:
    """Create an empty store under a temporary name, and rename it when it is complete."""
    partial = _clear_temporary_path(path)
    create_file(partial)
    with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as database:
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")  # must be set before the first table is made
        database.executescript(f"PRAGMA fullfsync=ON; BEGIN; {rows.SCHEMA} PRAGMA user_version={rows.FORMAT};")
        database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", store_id))
        database.execute("COMMIT")
        database.execute("PRAGMA journal_mode=WAL")
    rename_durably(partial, path)


def _clear_temporary_path(path: Path) -> Path:
    for left_over in path.parent.glob(f"{UNFINISHED}*"):
        left_over.unlink()
    return path.with_name(UNFINISHED)


def check(directory: Path) -> StoreReport:
    """Verify all of a store; raise `StoreUsageError` with the problem and the remedy."""
    path = directory / FILE
    with explaining_errors(path), serving_process(directory) as process:
        _check_store_exists(path)
        version = verify(directory, served=process is not None)
        if version != rows.FORMAT:
            raise StoreUsageError(f"{path} is whole, of format {version}: the next start of a server carries it over")
        report = _read_store_report(path, served_by=process)
    files = [file.stat().st_size for file in directory.iterdir() if file.name.startswith(FILE)]
    return replace(report, file_bytes=sum(files))


def back_up(directory: Path, target: Path) -> StoreReport:
    """Copy a store, as of one moment, into one file; `StoreUsageError` if that is impossible."""
    path = directory / FILE
    with explaining_errors(path, written=target), serving_process(directory) as process:
        _check_store_exists(path)
        if target.exists():
            raise StoreUsageError(f"{target} exists: name a file that does not, or move it away")
        verify(directory, served=process is not None)
        _copy_database(path, target)
        try:
            return _read_store_report(target, served_by=process)
        except BaseException:
            target.unlink()
            raise


def restore(source: Path, directory: Path, *, new_id: str) -> StoreReport:
    """Create a store from a copy, or raise `StoreUsageError`. Sessions are dropped, as no client can resume them."""
    with explaining_errors(source):
        if not source.is_file():
            raise StoreUsageError(f"{source} is no file: name one that rdzv backup has made")
    lock = take_lock(directory)
    try:
        path = directory / FILE
        if source.name.startswith(UNFINISHED) and source.parent.samefile(directory):
            raise StoreUsageError(f"{source} has an unfinished store's name, and would be deleted: rename it")
        if path.exists():
            raise StoreUsageError(f"{directory} holds a store: restore into another directory, or move {path} away")
        partial = _clear_temporary_path(path)
        with explaining_errors(source, written=path):
            _copy_database(source, partial)
            with contextlib.closing(open_read_only(partial)) as database:
                (version,) = database.execute("PRAGMA user_version").fetchone()
            check_format(version, source)
            if version != rows.FORMAT:
                migrate(partial, version)
            with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as database:
                _load_verified(database)  # check the copy's checksums before the first write
                database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", new_id))
                database.execute("DELETE FROM sessions")
                database.execute("DELETE FROM replies")
                database.execute("COMMIT")
            report = _read_store_report(partial)
        rename_durably(partial, path)
    finally:
        release_lock(lock)
    return report


def _copy_database(source: Path, target: Path) -> None:
    number, name = tempfile.mkstemp(".new", f"{target.name}.", target.parent)  # only its owner may open the file
    os.close(number)
    partial = Path(name)
    try:
        with (
            contextlib.closing(open_read_only(source)) as whole,
            contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as taken,
        ):
            whole.backup(taken)  # in one step; its read lock does not delay writers
            taken.execute("PRAGMA journal_mode=DELETE")  # no separate log file
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        rename_durably(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read_store_report(path: Path, *, served_by: str | None = None) -> StoreReport:
    with contextlib.closing(open_read_only(path)) as database:
        return StoreReport(saved=_load_verified(database), file_bytes=path.stat().st_size, served_by=served_by)


def _check_store_exists(path: Path) -> None:
    if not path.exists():
        raise StoreUsageError(f"there is no store in {path.parent}: name the directory given as --data-dir")


def _load_verified(database: sqlite3.Connection) -> SavedStore:
    database.execute("BEGIN")  # read the state of one moment, while a server may write
    (health,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if health != "ok":
        raise sqlite3.DatabaseError(health)
    return rows.load_store(database)
