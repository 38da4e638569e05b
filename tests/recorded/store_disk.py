"""The store's files: rows of a table, on a new folder; what is written for the changes of a walk; damage."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from store.disk import rows
from store.engine.changeset import ChangeSet
from store.engine.engine import Engine
from store.messages import Event
from tests.recorded import store_engine, tables
from tests.recorded.store_engine import Book, Walk
from tests.recorded.tables import evaluated, logged, sections, text
from tests.support.limits import limits_with

SMALL = {"PART_BYTES": 50, "ROWS_AT_ONCE": 4, "BYTES_AT_ONCE": 150}
TABLES = ("meta", "entries", "history", "leases", "sessions", "replies")


def facts() -> list[ChangeSet]:
    """Return the changes of a walk."""
    book = Book(Engine(store_id="store", durable=True, limits=limits_with(history_bytes_max=2500)), [])
    walk = Walk(8, book, store_engine.KEYS[::2])
    for _ in range(130):
        walk.step()
    return book.saved


def files() -> list[str]:
    """Return the table's rows."""
    if sys.platform != "linux":
        pytest.skip("the system's errors are those of Linux")
    lines: list[str] = []
    frees = ChangeSet(revisions=[(Event(kind="delete", revision=99, key="k"),)])
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        stack.enter_context(mock.patch.multiple(rows, **dict[str, Any](SMALL)))
        stack.enter_context(logged(lambda line: lines.append(f"  {line}")))
        old = os.umask(0o022)
        stack.callback(os.umask, old)
        told = {str(place): "DIR", f"(process {os.getpid()})": "(process PID)"}
        stack.enter_context(mock.patch.dict(tables.hidden, told))
        stack.enter_context(mock.patch.object(tables, "LONGEST", 900))
        names = {**store_engine.NAMES, "DIR": place, "FACTS": facts(), "FREES": frees}
        for table in sections(__file__).values():
            asyncio.run(evaluated(table, names, lines))
    return lines


def written() -> list[str]:
    """Return the statements and the rows of a walk's changes, in groups, and what is read of them."""
    lines: list[str] = []
    before: set[str] = set()
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)))
        stack.enter_context(mock.patch.multiple(rows, **dict[str, Any](SMALL)))
        database.executescript(rows.SCHEMA)
        database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.checksummed("store_id", "store"))
        changes = facts()
        for number, at in enumerate(range(0, len(changes), 4), 1):
            rows.write(database, changes[at : at + 4], number=number)
            there = {f"{table} {text(row)}" for table in TABLES for row in database.execute(f"SELECT * FROM {table}")}
            lines += [f"{number} + {row}" for row in sorted(there - before)]
            lines += [f"{number} - {row[:60]}" for row in sorted(before - there)]
            before = there
        saved = rows.load(database)
        lines += [f"{name.name} {text(getattr(saved, name.name))}" for name in dataclasses.fields(saved)]
        lines.append(text(rows.last_group(database)))
        refused = rows.with_refused_replies(changes[-1], "why")
        lines.append(text([refused.replies, refused.sessions, refused.last_session, refused.revisions]))
    return lines


RECORDINGS = {"files": files, "written": written}
