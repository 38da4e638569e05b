"""SQLite's log: damage in the middle is distinguished from an end that a crash cut off."""

import io
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from store.disk import wal

FRAME = 24 + 4096


@pytest.fixture
def log(tmp_path: Path) -> bytes:
    """Return the log of some transactions, of two frames or more each."""
    database = sqlite3.connect(tmp_path / "x", isolation_level=None)
    database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE t (v)")
    for number in range(20):
        database.execute("BEGIN")
        database.executemany("INSERT INTO t VALUES (zeroblob(?))", [(3000,)] * 2)
        database.execute("UPDATE t SET v = zeroblob(2999) WHERE rowid = ?", (number,))
        database.execute("COMMIT")
    data = (tmp_path / "x-wal").read_bytes()
    database.close()
    return data


def read_by_sqlite(tmp_path: Path, log: bytes) -> int:
    """Return the number of frames of a log that SQLite accepts, as its index says."""
    path = tmp_path / "y"
    shutil.copy(tmp_path / "x", path)
    (tmp_path / "y-wal").write_bytes(log)
    database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    frames = wal.frames_sqlite_reads((tmp_path / "y-shm").read_bytes())
    database.close()
    for name in ("y-wal", "y-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    assert frames is not None
    return frames


def damaged(tmp_path: Path, log: bytes) -> bool:
    return wal.is_wal_damaged(io.BytesIO(log), size=len(log), frames_sqlite_reads=read_by_sqlite(tmp_path, log))


def commits(log: bytes) -> list[int]:
    """Return the frames that end a transaction."""
    return [
        index for index in range((len(log) - 32) // FRAME) if any(log[32 + index * FRAME + 4 : 32 + index * FRAME + 8])
    ]


def test_a_log_that_is_whole_is_not_damaged(tmp_path: Path, log: bytes) -> None:
    assert not damaged(tmp_path, log)
    assert not damaged(tmp_path, b"")
    assert not damaged(tmp_path, bytes(32 + 5 * FRAME)), "a file system may show zeros for what was never written"


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_log_that_a_crash_cut_off_is_not_damaged(tmp_path: Path, log: bytes, part: float) -> None:
    assert not damaged(tmp_path, log[: int(len(log) * part)])


def test_the_last_transaction_may_be_torn_in_any_order(tmp_path: Path, log: bytes) -> None:
    """It was never synced: its end may be on the disk, and its beginning not."""
    *_, before, last = commits(log)
    for index in range(before + 1, last + 1):
        torn = bytearray(log)
        torn[32 + index * FRAME : 32 + (index + 1) * FRAME] = bytes(FRAME)
        assert not damaged(tmp_path, bytes(torn))


def test_a_flipped_byte_in_any_frame_before_the_last_transaction_is_damage(tmp_path: Path, log: bytes) -> None:
    *_, before, _ = commits(log)
    for index in range(before + 1):
        for offset in (0, 9, 17, 24 + 100):  # its page's number, a salt, its checksum, the page
            flipped = bytearray(log)
            flipped[32 + index * FRAME + offset] ^= 1
            if index == before and offset in {9, 17}:
                continue  # then nothing proves which frames followed it, except the mark
            assert damaged(tmp_path, bytes(flipped)), (index, offset)


def test_a_damaged_head_of_a_log_is_damage(tmp_path: Path, log: bytes) -> None:
    for offset in (0, 17, 25):
        flipped = bytearray(log)
        flipped[offset] ^= 1
        assert damaged(tmp_path, bytes(flipped))


@pytest.mark.usefixtures("log")
def test_frames_from_before_a_restart_of_the_log_are_no_damage(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "x", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    for number in range(60):
        database.execute("INSERT INTO t VALUES (zeroblob(3000))")
        if number == 50:
            database.execute("PRAGMA wal_checkpoint(RESTART)")
    began_anew = (tmp_path / "x-wal").read_bytes()
    assert len(commits(began_anew)) > 20
    assert read_by_sqlite(tmp_path, began_anew) < 30
    assert not damaged(tmp_path, began_anew)
    database.close()


def test_an_index_that_says_nothing_is_no_number() -> None:
    assert wal.frames_sqlite_reads(b"") is None
    assert wal.frames_sqlite_reads(os.urandom(19)) is None
