"""Stores of other formats: carried over with a copy kept, or refused with a sentence that says which side is older.

Nothing was released yet, so the next format is made here, by a patch: entries get one more column.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from store.disk import copies, migrations, rows
from store.disk.directory import FILE
from store.errors import StoreUsageError
from store.server.journal import Journal
from tests.support.facts import change, put, saved_in

if TYPE_CHECKING:
    from pathlib import Path

NOW = rows.FORMAT
COPY = f"{FILE}.format-{NOW}"


def note_a_column(database: sqlite3.Connection) -> None:
    """What the next release would do."""
    database.execute("ALTER TABLE leases ADD COLUMN note TEXT")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of this release."""
    journal = Journal(tmp_path, new_id="id")
    journal.load()
    journal._commit([change(put(1, "k", b"v"))])
    journal.close()
    return tmp_path


@pytest.fixture
def next_release(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `old` was made, this is the next one."""
    assert old.exists()
    monkeypatch.setattr(rows, "FORMAT", NOW + 1)
    monkeypatch.setitem(migrations.MIGRATIONS, NOW, note_a_column)


def columns(path: Path) -> tuple[int, list[str]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        return version, [row[1] for row in database.execute("PRAGMA table_info(leases)")]


@pytest.mark.usefixtures("next_release")
def test_a_store_of_an_older_release_is_carried_over_and_the_copy_kept_until_the_first_clean_stop(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(old, new_id="another")
    assert columns(old / FILE)[0] == NOW + 1
    assert columns(old / FILE)[1][-1] == "note"
    assert columns(old / COPY) == (NOW, ["id", "ttl", "disconnect_ttl", "gone_ttl", "anonymous", "seal"])
    assert f"carried over from format {NOW} to {NOW + 1}" in caplog.text
    assert [entry.key for entry in journal.load().entries] == ["k"]
    journal.close()
    assert not (old / COPY).exists()
    assert saved_in(old).store_id == "id"


@pytest.mark.usefixtures("next_release")
def test_the_copy_stays_until_a_stop_that_is_clean(old: Path) -> None:
    journal = Journal(old, new_id="another")
    journal._lock_file.close()  # killed
    assert (old / COPY).exists()


def test_the_copy_brings_the_older_release_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "FORMAT", NOW + 1)
        patch.setitem(migrations.MIGRATIONS, NOW, note_a_column)
        Journal(old, new_id="another")._lock_file.close()
    with pytest.raises(StoreUsageError, match=f"older than the one that wrote it.*rdzv restore {old / COPY} DIR"):
        Journal(old, new_id="another")
    copies.restore(old / COPY, old / "older", new_id="another")
    assert [entry.key for entry in saved_in(old / "older").entries] == ["k"]


def fail_halfway(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE replies")
    raise ValueError("halfway")


def lose_something(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM history")


@pytest.mark.parametrize("step", [fail_halfway, lose_something])
def test_a_migration_that_fails_leaves_the_store_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch, step: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "FORMAT", NOW + 1)
        patch.setitem(migrations.MIGRATIONS, NOW, step)
        with pytest.raises(StoreUsageError, match="nothing in it was changed"):
            Journal(old, new_id="another")
    assert [entry.key for entry in saved_in(old).entries] == ["k"]


@pytest.mark.usefixtures("next_release")
def test_every_step_from_an_old_format_is_taken(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(rows, "FORMAT", NOW + 3)
    for step in (1, 2):

        def take(_: sqlite3.Connection, step: int = step) -> None:
            taken.append(step)

        monkeypatch.setitem(migrations.MIGRATIONS, NOW + step, take)
    Journal(old, new_id="another").close()
    assert taken == [1, 2]
    assert columns(old / FILE)[0] == NOW + 3


def test_a_format_from_before_the_first_release_is_refused(old: Path) -> None:
    with contextlib.closing(sqlite3.connect(old / FILE, isolation_level=None)) as database:
        database.execute("PRAGMA user_version=1")
    with pytest.raises(StoreUsageError, match="has format 1, of a time before the first release"):
        Journal(old, new_id="another")
