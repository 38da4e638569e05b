"""Stores of other formats are converted completely or not at all, or refused with an error that says which side is
older.

Nothing was released yet, so the next format is made here, by a patch: leases get one more column.
"""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from store.disk import copies, rows
from store.disk.directory import FILE
from store.errors import StoreUsageError
from store.server.journal import Journal
from tests.support.facts import change, put, saved_in

NOW = rows.FORMAT


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of this release."""
    journal = Journal(tmp_path, new_id="id")
    journal.load()
    journal._commit([change(put(1, "k", b"v"))])
    journal.close()
    return tmp_path


@contextlib.contextmanager
def later(*steps: Any) -> Any:
    """Run the block as a release whose format is so many versions later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "FORMAT", NOW + len(steps))
        patch.setattr(rows, "MIGRATIONS", dict(enumerate(steps, NOW)))
        yield


def add_a_column(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE leases ADD COLUMN note TEXT")


def test_a_store_or_a_copy_of_an_older_release_is_carried_over_step_by_step(old: Path) -> None:
    taken: list[str] = []
    copies.back_up(old, old / "copy")
    with later(add_a_column, lambda _: taken.append("second"), lambda _: taken.append("third")):
        assert saved_in(old).store_id == "id"
        assert taken == ["second", "third"]
        report = copies.restore(old / "copy", old / "other", new_id="new")
        assert ([entry.key for entry in report.saved.entries], taken[2:]) == (["k"], ["second", "third"])
        assert [entry.key for entry in saved_in(old / "other").entries] == ["k"]
    with pytest.raises(StoreUsageError, match=f"has format {NOW + 3}, and this release, which is older"):
        saved_in(old)


def fail_halfway(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE replies")
    raise ValueError("halfway")


def lose_something(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM history")


@pytest.mark.parametrize("step", [fail_halfway, lose_something])
def test_a_migration_that_fails_leaves_the_store_as_it_was(old: Path, step: Any) -> None:
    with later(step), pytest.raises(StoreUsageError, match="nothing in it was changed"):
        saved_in(old)
    assert [entry.key for entry in saved_in(old).entries] == ["k"]


def test_a_format_from_before_the_first_release_is_refused(old: Path) -> None:
    with contextlib.closing(sqlite3.connect(old / FILE, isolation_level=None)) as database:
        database.execute("PRAGMA user_version=1")
    with pytest.raises(StoreUsageError, match="has format 1, from before the first release"):
        saved_in(old)
