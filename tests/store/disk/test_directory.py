"""The data directory: readable by its owner, locked by one server, and with a mark of the last durable revision."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.disk.directory import (
    MARK,
    RESERVE,
    RESERVE_BYTES,
    LastGroupMark,
    Reserve,
    release_lock,
    serving_process,
    take_lock,
)
from store.server.journal import Journal
from tests.support.facts import change, put


@pytest.fixture
def everybody_may_read() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("everybody_may_read")
def test_directory_and_files_are_made_for_their_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "data", new_id="id")
    journal.load()
    journal._commit([change(put(1, "k"))])
    assert mode(tmp_path / "data") == 0o700
    modes = {path.name: mode(path) for path in (tmp_path / "data").iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert "store.sqlite3-wal" in modes
    journal.close()
    assert "may look into" not in caplog.text


def test_a_directory_readable_by_others_is_left_as_it_is_and_named_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(tmp_path / "data", new_id="id").close()
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "data" / "store.sqlite3").chmod(0o644)
    Journal(tmp_path / "data", new_id="id").close()
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert "data has mode 0755" in said
    assert "store.sqlite3 has mode 0644" in said
    assert "chmod 700" in said
    assert mode(tmp_path / "data") == 0o755


def test_the_owner_of_a_locked_directory_is_named_and_no_other_server_gets_it(tmp_path: Path) -> None:
    with serving_process(tmp_path) as process:
        assert process is None, "there is not even a lock"
    lock = take_lock(tmp_path)
    code = """import sys, pathlib
from store.disk.directory import serving_process
with serving_process(pathlib.Path(sys.argv[1])) as process:
    print(process)"""
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(os.getpid())
    in_child = os.dup(lock.fileno())  # as a forked child has it
    for _ in range(2):
        release_lock(lock)
        assert lock.closed
        with serving_process(tmp_path) as process:
            assert process is None
    os.close(in_child)


def test_a_mark_names_the_last_write(tmp_path: Path) -> None:
    mark = LastGroupMark(tmp_path)
    assert mark.read() is None
    for number in (9, 10, 100):
        mark.write("store-1", number)
        assert LastGroupMark(tmp_path).read() == ("store-1", number)
    mark.close()
    mark.close()
    assert LastGroupMark(tmp_path).read() == ("store-1", 100)


@pytest.mark.parametrize(
    "what", [b"", b"store-1 7 00000000\n", b"store-1 seven 00000000\n", b"\xff" * 100, b"1 2 3 4 5"]
)
def test_a_mark_that_is_damaged_proves_nothing_and_is_written_anew(
    tmp_path: Path, what: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / MARK).write_bytes(what)
    mark = LastGroupMark(tmp_path)
    assert mark.read() is None
    assert "is damaged" in caplog.text
    mark.write("store-1", 8)
    assert mark.read() == ("store-1", 8)
    mark.close()


def test_a_mark_that_cannot_be_written_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / MARK).mkdir()
    mark = LastGroupMark(tmp_path)
    mark.write("store-1", 1)
    assert mark.read() is None


def test_the_reserve_takes_room_and_gives_it_back(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    for least, kept in ((1, 1), (RESERVE_BYTES, RESERVE_BYTES), (1, RESERVE_BYTES), (9 << 20, 9 << 20), (5, 8 << 20)):
        assert reserve.allocate(least)
        assert reserve.bytes == kept, "no more than the usual once more is not asked for"
        assert (tmp_path / RESERVE).stat().st_size == kept
    assert (tmp_path / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES, "really taken, and not a hole"
    reserve.free()
    assert (tmp_path / RESERVE).stat().st_size == 0


def test_a_reserve_there_is_no_room_for_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    reserve = Reserve(tmp_path)
    assert reserve.allocate(1000)
    monkeypatch.setattr("store.disk.directory.allocate", no_room)
    assert not reserve.allocate(1001)
    assert (reserve.bytes, (tmp_path / RESERVE).stat().st_size) == (1000, 1000), "what there was is still kept back"
