"""An error names the disk, the mount or the limit at fault; only a store with wrong contents is called damaged."""

import contextlib
import errno
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from store.disk import copies, diagnosis
from store.disk.diagnosis import explaining_errors
from store.disk.directory import FILE
from store.errors import StoreUsageError
from store.server.journal import Journal
from tests.store.server.test_journal_refusals import leave_behind
from tests.support.facts import saved_in

pytestmark = pytest.mark.some_here(30)

HERE = str(Path(__file__).parents[3])
LIES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)
TOLD = {
    errno.ENOSPC: "No space left on device (make room there)",
    errno.EDQUOT: "quota exceeded (make room there, or raise the quota)",
    errno.EFBIG: "File too large (raise the limit on the size of files",
    errno.EROFS: "Read-only file system (mount it writable",
    errno.EMFILE: "Too many open files (raise the limit on open files",
    errno.ENFILE: "Too many open files in system (raise the system's limit",
    errno.EACCES: "Permission denied (run this as the owner",
    errno.EIO: "Input/output error;",
    0: "and the system takes a write beside it",
}


@pytest.mark.parametrize("code", LIES)
@pytest.mark.parametrize("number", TOLD)
@pytest.mark.parametrize("written", [False, True])
def test_the_system_is_asked_for_any_error_code_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, number: int, written: bool
) -> None:
    def refuse(*_: object) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    path, target = tmp_path / "from" / FILE, tmp_path / "to" / "copy"
    path.parent.mkdir()
    target.parent.mkdir()
    path.write_bytes(b"")
    monkeypatch.setattr(diagnosis, "allocate", refuse)
    error = sqlite3.OperationalError("SQLite's own words")
    error.sqlite_errorcode = code
    with pytest.raises(StoreUsageError) as refused, explaining_errors(path, written=target if written else None):
        raise error
    said = str(refused.value)
    assert TOLD[number] in said
    assert said.startswith(str(target if written else path))
    assert f"nothing in {path} was changed" in said
    assert "damaged" not in said
    assert "away" not in said
    told = diagnosis.disk_error_text(error, path)
    assert told.startswith("SQLite's own words")
    assert (TOLD[number].rstrip(";") in told) is (number != 0)
    assert sorted(tmp_path.rglob("*.probe")) == []


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT_VTAB, None])
def test_wrong_contents_are_called_damage(tmp_path: Path, code: int | None) -> None:
    error = sqlite3.DatabaseError("malformed")
    if code is not None:
        error.sqlite_errorcode = code
    told = r"is damaged \(malformed\); .* move it away, with all that begins with"
    with pytest.raises(StoreUsageError, match=told), explaining_errors(tmp_path / FILE):
        raise error


OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
TROUBLES = {
    # Commands that create the cause, before the command "$@" runs; $D is the directory that has the problem.
    "full": 'rm -f "$D"/reserve "$D"/*-shm "$D"/*-wal && cp -a "$D" "$D.was" && '
    'mount -t tmpfs -o size=1200k none "$D" && cp -a "$D.was/." "$D" && '
    'dd if=/dev/zero of="$D/hog" bs=4k 2>/dev/null; "$@"',
    "read-only": 'mount --bind "$D" "$D" && mount -o remount,bind,ro "$D" && exec "$@"',
    "a limit on files": 'ulimit -f 32; exec "$@"',
}
COMMANDS = {
    "check": ("check", "{data}"),
    "backup": ("backup", "{data}", "{out}/copy"),
    "restore": ("restore", "{copies}/copy", "{out}/new"),
    "serve": ("serve", "--port", "0", "--data-dir", "{data}"),
}
SAID = {
    ("check", "data", "full"): "data/store.sqlite3 cannot be used: No space left on device",
    ("check", "data", "read-only"): "is whole",
    ("check", "data", "a limit on files"): "data/store.sqlite3 cannot be used: File too large",
    ("backup", "data", "full"): "data/store.sqlite3 cannot be used: No space left on device",
    ("backup", "data", "read-only"): "was copied to",
    ("backup", "out", "full"): "out/copy cannot be written: No space left on device",
    ("backup", "out", "read-only"): "out/copy cannot be written: Read-only file system",
    ("backup", "out", "a limit on files"): "out/copy cannot be written: File too large",
    ("restore", "copies", "full"): "is in",
    ("restore", "copies", "read-only"): "is in",
    ("restore", "out", "full"): "No space left on device",
    ("restore", "out", "read-only"): "out/new cannot be used: Read-only file system",
    ("restore", "out", "a limit on files"): "out/new/store.sqlite3 cannot be written: File too large",
    ("serve", "data", "read-only"): "data cannot be used: Read-only file system",
    ("serve", "data", "a limit on files"): "data/store.sqlite3 cannot be used: File too large",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of half a megabyte that was stopped properly, and a backup of it."""
    top = tmp_path_factory.mktemp("whole")
    leave_behind(top / "data", count=1000)
    saved_in(top / "data")
    (top / "copies").mkdir()
    copies.back_up(top / "data", top / "copies" / "copy")
    return top


@pytest.mark.in_ci
@pytest.mark.parametrize(("command", "where", "trouble"), SAID)
def test_each_command_names_the_obstacle_on_either_side(
    tmp_path: Path, whole: Path, command: str, where: str, trouble: str
) -> None:
    subprocess.run(["cp", "-a", *map(str, whole.iterdir()), str(tmp_path)], check=True)
    (tmp_path / "out").mkdir()
    places = {name: str(tmp_path / name) for name in ("data", "copies", "out")}
    arguments = [sys.executable, "-m", "rdzv", *(each.format(**places) for each in COMMANDS[command])]
    script = f"D={shlex.quote(places[where])}; {TROUBLES[trouble]}"
    done = subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", script, "sh", *arguments],
        env={**os.environ, "PYTHONPATH": HERE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"skipped, this system lets nobody mount anything: {done.stderr}")
    said = done.stdout + done.stderr
    assert SAID[command, where, trouble] in said
    assert "damaged" not in said
    assert "Traceback" not in said
    assert len(copies.check(tmp_path / "data").saved.entries) == 1000, "and all is as it was"


@pytest.mark.parametrize(("index", "said"), [(True, "is whole: revision 1000"), (False, "Read-only file system")])
def test_the_log_of_a_store_on_a_read_only_mount_is_not_left_out(tmp_path: Path, index: bool, said: str) -> None:
    leave_behind(tmp_path / "data", count=1000)  # half of it is in the log alone
    if not index:
        (tmp_path / "data" / f"{FILE}-shm").unlink()
    script = f"D={shlex.quote(str(tmp_path / 'data'))}; {TROUBLES['read-only']}"
    command = [*OWN_MOUNTS, "sh", "-c", script, "sh", sys.executable, "-m", "rdzv", "check", str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": HERE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"skipped, this system lets nobody mount anything: {done.stderr}")
    assert said in done.stdout + done.stderr
    assert "damaged" not in done.stderr


@pytest.mark.some_of(4)
@pytest.mark.parametrize("files", [10, 13, 16, 18, 20, 23])
@pytest.mark.parametrize("command", ["check", "backup", "restore", "serve"])
def test_too_few_descriptors_are_no_damage(tmp_path: Path, whole: Path, command: str, files: int) -> None:
    places = {"data": str(whole / "data"), "copies": str(whole / "copies"), "out": str(tmp_path)}
    line = shlex.join([sys.executable, "-m", "rdzv", *(each.format(**places) for each in COMMANDS[command])])
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            ["timeout", "2", "sh", "-c", f"ulimit -n {files}; exec {line}"],
            env={**os.environ, "PYTHONPATH": HERE},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "damaged" not in done.stderr
        assert done.returncode in (0, 124) or "open files" in done.stderr, done.stderr


AS_ANOTHER = """import os, sys, pathlib
from store.disk import copies
from store.errors import StoreUsageError
from store.server.journal import Journal
os.setuid(65534)
data, copy, out = map(pathlib.Path, sys.argv[2:])
try:
    {
        "check": lambda: copies.check(data),
        "backup": lambda: copies.back_up(data, out / "copy"),
        "restore": lambda: copies.restore(copy, out / "new", new_id="new"),
        "serve": lambda: Journal(data, new_id="new"),
    }[sys.argv[1]]()
except StoreUsageError as error:
    print(error)
"""


@pytest.mark.some_of(3)
@pytest.mark.skipif(os.geteuid() != 0, reason="skipped, only root becomes another user")
@pytest.mark.parametrize("command", ["check", "backup", "restore", "serve"])
@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_files_of_another_user_are_no_damage(whole: Path, command: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as top:  # pytest's own directory is closed to other users as a whole
        subprocess.run(["cp", "-a", *map(str, whole.iterdir()), top], check=True)
        (Path(top) / "out").mkdir()
        os.chmod(top, 0o755)
        for name in ("data", "copies"):
            (Path(top) / name).chmod(mode)
        places = (f"{top}/data", f"{top}/copies/copy", f"{top}/out")
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER, command, *places],
            env={**os.environ, "PYTHONPATH": HERE},
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    assert "Permission denied (run this as the owner of the files)" in done.stdout
    assert "damaged" not in done.stdout
    assert done.stderr == ""


def test_a_store_whose_database_was_deleted_after_a_clean_stop_does_not_begin_empty(tmp_path: Path) -> None:
    leave_behind(tmp_path)
    saved_in(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(StoreUsageError, match=r"store.sqlite3 is gone, and .*durable says that it held write \d+ "):
        Journal(tmp_path, new_id="id")
    assert not (tmp_path / FILE).exists()
