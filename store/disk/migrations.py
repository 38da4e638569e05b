"""Shell: carry a store over from the format of an older release, with a copy kept of what was there (promise S12).

A release that changes a layout raises `rows.FORMAT` and adds one function here, which turns the rows of the format
before into its own; the functions of all formats that were ever released stay. Nothing has been released yet, so there
is none, and formats of the time before are refused.

The steps run in one transaction: after a crash the store is as it was. Before them the whole file is copied to
`store.sqlite3.format-N`, which goes at the first clean stop of the new release; until then, the older release can make
a store of it (`rdzv restore`). Moved into the place of `store.sqlite3` it would meet a log that is not its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from typing import TYPE_CHECKING

from store.disk import rows
from store.disk.directory import FILE, make_file, put_in_place
from store.errors import StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MIGRATIONS", "carry_over", "check_format", "copy", "forget_older_formats"]

log: logging.Logger = logging.getLogger(__name__)

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""By the format that is there, what turns it into the next one; within a transaction, and without ending it."""


def check_format(found: int, path: Path) -> None:
    """Refuse a format that this release neither reads nor carries over.

    Raises:
        StoreUsageError: It is of a newer release, or of one before the first; the message says which side is older.
    """
    if found > rows.FORMAT:
        kept = path.with_name(f"{FILE}.format-{rows.FORMAT}")
        back = f"; what was there before it can be had again: rdzv restore {kept} DIR" if kept.exists() else ""
        raise StoreUsageError(
            f"{path} has format {found}, and this release, which is older than the one that wrote it, reads formats up "
            f"to {rows.FORMAT}: use that release, or another data_dir{back}"
        )
    if not all(step in MIGRATIONS for step in range(found, rows.FORMAT)):
        raise StoreUsageError(
            f"{path} has format {found}, of a time before the first release; this release reads format {rows.FORMAT}: "
            f"use another data_dir"
        )


def carry_over(directory: Path, found: int) -> None:
    """Turn a store of an older format into one of ours, and keep a copy of what was there."""
    path, kept = directory / FILE, directory / f"{FILE}.format-{found}"
    copy(path, kept)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA fullfsync=ON")
        database.execute("BEGIN EXCLUSIVE")
        try:
            for step in range(found, rows.FORMAT):
                MIGRATIONS[step](database)
            rows.load(database)  # what came of it must be whole before it counts
            database.execute(f"PRAGMA user_version={rows.FORMAT}")
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise
    log.warning(
        "%s was carried over from format %d to %d; what was there is kept as %s until the first clean stop",
        *(path, found, rows.FORMAT, kept.name),
    )


def forget_older_formats(directory: Path) -> None:
    """After a clean stop: nobody goes back any more."""
    for kept in directory.glob(f"{FILE}.format-*"):
        with contextlib.suppress(OSError):
            kept.unlink()


def copy(source: Path, target: Path) -> None:
    """Copy a store as it is at one moment, also while a server writes to it; the copy appears whole, and durable.

    Raises:
        OSError: The copy cannot be written.
        sqlite3.Error: The source cannot be read, or the copy not be written.
    """
    partial = target.with_name(f"{target.name}.new")
    partial.unlink(missing_ok=True)
    try:
        make_file(partial)
        uri = f"{source.resolve().as_uri()}?mode=ro"
        with (
            contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)) as whole,
            contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as taken,
        ):
            whole.backup(taken)  # in one piece: its lock keeps nobody from writing
            taken.execute("PRAGMA journal_mode=DELETE")  # all of it is in the one file
        number = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
        put_in_place(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
