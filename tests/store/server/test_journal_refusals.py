"""The journal refuses a directory of another server, in another format or damaged, says why, and changes nothing."""

import contextlib
import itertools
import os
import random
import signal
import sqlite3
from pathlib import Path

import pytest

from store.disk.directory import FILE, LOCK, RESERVE, UNFINISHED
from store.disk.rows import FORMAT
from store.engine.changeset import SavedStore
from store.errors import StoreUsageError
from store.server.journal import Journal
from tests.support.facts import change, granted, kept, lease, opened, put, replied, saved_in, writing

pytestmark = pytest.mark.some_here(9)


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files that hold data; the others are SQLite's index of its log, and our lock file."""
    names = (FILE, f"{FILE}-wal")
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}


def leave_behind(directory: Path, *, count: int = 50) -> None:
    """Create a store whose process was killed: its data is partly in the file, and partly in SQLite's log beside it."""
    if os.fork() == 0:
        journal = Journal(directory, new_id="id")
        journal.load()
        steps = [
            [
                opened(b"%016d" % number, number),
                change(put(number, f"key{number}", b"%d" % number * 40, lease=number), **granted(lease(number))),
                replied(b"%016d" % number, number),
            ]
            for number in range(1, count + 1)
        ]
        journal._commit(list(itertools.chain(*steps[: count // 2])))
        journal._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]
        journal._commit(list(itertools.chain(*steps[count // 2 :])))
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()


def test_a_second_server_is_refused_with_the_owner_of_the_directory(tmp_path: Path) -> None:
    with writing(tmp_path) as journal:
        with pytest.raises(StoreUsageError, match=f"in use by another server .process {os.getpid()}."):
            Journal(tmp_path, new_id="other")
        journal.append(change(put(1, "k")))
    assert saved_in(tmp_path).revision == 1, "the first was not disturbed, and has let go"


def test_a_forked_child_does_not_keep_the_lock_and_disturbs_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, new_id="id")
    journal.load()
    journal._commit([change(put(1, "k"))])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(write)
            os.read(read, 1)  # until the parent is done
            journal.close()  # it closes neither the parent's lock nor its file
        finally:
            os._exit(0)
    try:
        os.close(read)
        journal.close()
        with writing(tmp_path) as second:
            second.append(change(put(2, "k", created=1)))
    finally:
        os.close(write)
        os.waitpid(child, 0)
    assert saved_in(tmp_path).revision == 2


def test_another_versions_file_is_refused_and_not_changed(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.executescript(f"CREATE TABLE other (x); PRAGMA user_version={FORMAT + 1}")
    before = contents(tmp_path)
    with pytest.raises(
        StoreUsageError, match=f"format {FORMAT + 1}, and this release, which is older .* up to {FORMAT}:"
    ):
        Journal(tmp_path, new_id="id")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", [b"", b"SQLite format 3\0", b"this is a shopping list\n" * 1000])
def test_a_file_that_is_none_of_ours_is_refused_and_not_changed(tmp_path: Path, what: bytes) -> None:
    (tmp_path / FILE).write_bytes(what)
    with pytest.raises(StoreUsageError, match=r"is damaged .*; nothing in it was changed"):
        Journal(tmp_path, new_id="id")
    assert (tmp_path / FILE).read_bytes() == what


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_reported_and_not_changed(tmp_path: Path, part: float) -> None:
    leave_behind(tmp_path)
    saved_in(tmp_path)  # all of it is in the file now
    os.truncate(tmp_path / FILE, int((tmp_path / FILE).stat().st_size * part))
    before = contents(tmp_path)[FILE]
    with pytest.raises(StoreUsageError, match="restore it from a backup"):
        saved_in(tmp_path)
    assert contents(tmp_path)[FILE] == before


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_are_reported_and_not_changed_or_make_no_difference(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    leave_behind(tmp_path)
    whole = saved_in(tmp_path)
    data = bytearray((tmp_path / FILE).read_bytes())
    for _ in range(rng.choice([1, 1, 10])):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    (tmp_path / FILE).write_bytes(data)
    for name in (f"{FILE}-wal", f"{FILE}-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    try:
        saved = saved_in(tmp_path)
    except StoreUsageError:
        assert (tmp_path / FILE).read_bytes() == data
    else:
        assert saved == whole, "there are bytes that SQLite does not use"


@pytest.mark.parametrize(
    "what", [b"7777777777777777", b"key7", b"%016d" % 7], ids=["a value, and a change of it", "a key", "a session's id"]
)
def test_a_flipped_byte_in_clients_data_is_reported(tmp_path: Path, what: bytes) -> None:
    leave_behind(tmp_path)
    saved_in(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    assert what in data
    (tmp_path / FILE).write_bytes(data.replace(what, bytes([what[0] ^ 1]) + what[1:]))
    with pytest.raises(StoreUsageError, match="damaged"):
        saved_in(tmp_path)


def test_a_damaged_file_beside_a_log_is_not_changed_either(tmp_path: Path) -> None:
    leave_behind(tmp_path, count=300)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data.replace(b"key7", b"kez7"))  # also in pages of which the log has no later copy
    before = contents(tmp_path)
    assert f"{FILE}-wal" in before
    with pytest.raises(StoreUsageError, match="damaged"):
        saved_in(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("DELETE FROM history WHERE place / 4096 = 7", "not every change"),
        ("DELETE FROM history", "not every change"),
        ("DELETE FROM leases WHERE id = 7", "a lease that is not there"),
        ("DELETE FROM sessions WHERE number = 7", "damaged"),
        ("DELETE FROM meta WHERE name = 'store_id'", "store_id"),
        ("UPDATE meta SET value = 0 WHERE name = 'revision'", "not as it was written"),
        ("DROP TABLE replies", "replies"),
        ("UPDATE replies SET response = x'00'", "not as it was written"),
    ],
)
def test_inconsistent_contents_are_reported(tmp_path: Path, statement: str, complaint: str) -> None:
    leave_behind(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
        database.execute(statement)
    with pytest.raises(StoreUsageError, match=complaint):
        saved_in(tmp_path)


def test_a_store_that_was_not_finished_being_made_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_bytes(b"half")
    (tmp_path / f"{UNFINISHED}-journal").write_bytes(b"half")
    assert kept(tmp_path) == SavedStore(store_id="id")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FILE, LOCK, RESERVE])


def test_a_directory_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUsageError, match="cannot be used: "):
        Journal(tmp_path / "file", new_id="id")
    (tmp_path / "locked" / LOCK).mkdir(parents=True)
    with pytest.raises(StoreUsageError, match="cannot be used: Is a directory"):
        Journal(tmp_path / "locked", new_id="id")


def test_a_file_system_without_locks_is_not_taken_for_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("store.disk.directory.fcntl.flock", no_locks)
    with pytest.raises(StoreUsageError, match="cannot be locked: No locks available"):
        Journal(tmp_path, new_id="id")
