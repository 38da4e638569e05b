"""Makes steps durable: SQLite, one writer thread, group commit (promise S3).

The server appends each step's changes (`ChangeSet`), and gets the step's number. Replies wait in the outboxes until
their step is on disk. The writer thread commits all appended changes, a *group*, at once, and reports its last number.

SQLite runs in WAL mode with `synchronous=FULL` (https://sqlite.org/pragma.html#pragma_synchronous): a commit returns
once it is on the disk. A damaged file is never changed: a file is opened for writing only after all of it was read.

When a write fails, the group is rolled back; then the error decides:

- If another program holds SQLite's lock, the writer waits for it.
- If SQLite refuses a row for its content or size, the steps before the row's step are written (`_write_group`), the
  error is stored as that step's reply, and the journal stops.
- If the disk is full, SQLite's log is emptied into the database, which holds each page once. If that is not enough, the
  steps before the first one that does not fit are written, and the journal stops.
- After other errors, the journal stops, and the server returns to the disk's state (`durability`).

`Reserve` keeps room for deletes on a full disk (`RESERVE_BYTES`), and for a few writes of keys that coordinate a run
(`coordination_byte_rate`). A group is committed only if SQLite's log can be emptied after it (`_check_disk_room`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from store.disk import rows
from store.disk.copies import create_store
from store.disk.diagnosis import disk_error_text, explaining_errors, free_bytes, is_disk_full
from store.disk.directory import (
    DELETES_BYTES,
    FILE,
    RESERVE_BYTES,
    LastGroupMark,
    Reserve,
    release_lock,
    take_lock,
    warn_if_open_to_others,
)
from store.disk.verification import migrate, open_read_only, verify
from store.net.sockets import close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.engine.changeset import ChangeSet, SavedStore

log: logging.Logger = logging.getLogger(__name__)

# Only after these errors is it certain that SQLite's log lacks the end of the group. SQLite then ignores the group.
_WITHOUT_ITS_END = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
MARGIN_BYTES = 1024 * 1024  # bytes that must be free, besides the reserve, before other writes than deletes resume
# Target seconds of writing a group; if longer, three times a small group's, so that fixed costs are only a third.
GROUP_SECONDS = 0.02
SMALL_GROUP_BYTES = 64 * 1024
GROUP_BYTES = 1024 * 1024  # target bytes of the first groups; later targets follow from the groups' times
GROUP_BYTES_LEAST, GROUP_BYTES_MOST = 16 * 1024, 64 * 1024 * 1024
BUSY_SECONDS = 1.0  # seconds that an attempt to write waits for another program's lock
LOG_BYTES = 4 * 1024 * 1024  # an idle writer empties SQLite's log if it is longer
PAGE_BYTES = 4096  # SQLite's default
LONG_LOG_BYTES = 4 * LOG_BYTES  # a longer log that still grows shows that another program reads the database
LONG_LOG = (
    "%s is %d bytes long, and grows with each write, since another program reads the database all the while: end that "
    "program, a backup or a shell of SQLite"
)
GROUPS_LONG = 3  # consecutive groups that lengthen a long log before a warning
IDLE_SECONDS = 1.0  # seconds without writes before files are shrunk; if `short_of_room`, between attempts, too
FREE_PAGES_KEPT = 1024  # unused pages kept, or a quarter of the file if more; if `short_of_room`, none
FREE_PAGES_AT_ONCE = 64  # unused pages returned to the disk in one step: some 50 ms in a file of a gigabyte
PAGES_WRITTEN_ANEW = 1024  # a file of at most this many used pages is shrunk by VACUUM (100 ms), unless `short_of_room`


class UnstorableRowError(Exception):
    """SQLite or Python refused a row for its content, so nothing of its group was written."""


class Journal:
    """A store's files, and the thread that writes them."""

    group_bytes: int = GROUP_BYTES  # the target size of the next group
    _least_seconds = 0.0  # average seconds to write a small group

    def __init__(self, directory: str | os.PathLike[str], *, new_id: str) -> None:
        self._directory = Path(os.path.abspath(directory))  # the program may `chdir`
        self._path, self._log = self._directory / FILE, self._directory / f"{FILE}-wal"
        self._pid = os.getpid()
        self._database: sqlite3.Connection | None = None
        self._pending: list[ChangeSet] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._probing = threading.Lock()  # held by `try_to_recover` and `close`
        self._closed = False
        self._mark, self._reserve = LastGroupMark(self._directory), Reserve(self._directory)
        self._long_for = 0  # consecutive groups that lengthened a long log
        self._grows = self._free_bytes = 0  # bytes that the log will add to the database; the database's unused bytes
        self.appended: int = 0
        self.commits: int = 0
        self.commit_seconds: float = 0.0
        self.in_doubt: bool = False  # the last group may be on disk or not
        self.log_bytes: int = 0
        self.short_of_room: bool = False  # some writes are refused, so all unused pages are returned to the disk
        self.answered: bool = False  # SQLite refused a step's content: the disk works, and the step's reply is an error
        self._lock_file = take_lock(Path(directory))
        close_in_children(self, self._lock_file)  # so that a forked child does not keep the lock
        try:
            with explaining_errors(self._path):
                if not self._path.exists():
                    self._mark.refuse_missing_database(self._path)
                    create_store(self._path, new_id)
                warn_if_open_to_others(self._directory)
                try:
                    version = verify(self._directory)
                except sqlite3.OperationalError:
                    if not is_disk_full(self._path):
                        raise
                    self._reserve.free()  # SQLite needs room for its log's index
                    version = verify(self._directory)
                if version != rows.FORMAT:
                    migrate(self._path, version)
        except BaseException:
            self._lock_file.close()
            raise
        # True: only deletes, and a few keys that coordinate a run, are written
        self.only_deletes: bool = not self._reserve.allocate(RESERVE_BYTES)

    def _open_read_only(self) -> sqlite3.Connection:  # a simulated journal overrides this
        return open_read_only(self._path)

    def _open_to_write(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone does not reach the disk
        database.execute(f"PRAGMA journal_size_limit={LOG_BYTES}")
        database.execute("PRAGMA secure_delete=OFF")  # by default, SQLite on Debian overwrites deleted data
        return database

    def load(self) -> SavedStore:
        """Return the store on the disk; `StoreUsageError` if the file is damaged. The writer thread must not run."""
        with self._wake:
            self._pending.clear()  # pending changes may depend on lost writes
        with explaining_errors(self._path):
            with contextlib.closing(self._open_read_only()) as database:
                saved = rows.load_store(database)
                self._store_id, self._group = rows.read_id_and_last_group(database)  # `_group`: the last group on disk
            if self._database is None:
                self._database = self._open_to_write()
        return saved

    def append(self, facts: ChangeSet) -> int:
        """Add a step's changes to the next group; return the step's number."""
        with self._wake:
            self.appended += 1
            self._pending.append(facts)
            self._wake.notify()
            return self.appended

    def start(self, *, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        """Start the writer thread, after `load`; it reports the last step on disk, or its final error."""
        assert self._database is not None, "what is there is read before anything is added"
        self._stopping, self._untidy = False, True  # `_untidy`: there may be unused pages to return to the disk
        self._thread = threading.Thread(
            target=self._run_writer, args=(on_durable, on_failure), name="store journal", daemon=True
        )
        self._thread.start()

    def stop(self, *, within: float | None = None) -> bool:
        """Write pending changes and end the writer; return False if the disk hangs for longer than `within`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(within)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def try_to_recover(self) -> bool:
        """Try to write after a failure; return whether deletes, at least, can be written."""
        with self._probing:
            if self._closed:
                return False
            was_full, self.only_deletes = self.only_deletes, True
            self._checkpoint_wal()
            taken = self._probe_disk() or (self._try_to_free_reserve([]) and self._probe_disk())
            if taken and not was_full:
                self.try_to_accept_writes()
            return taken

    def try_to_accept_writes(self) -> bool:
        """Return whether other writes than deletes are possible."""
        least = max(RESERVE_BYTES, self._grows + DELETES_BYTES)
        if self.only_deletes and self._reserve.allocate(least + MARGIN_BYTES):
            self.only_deletes = not self._reserve.allocate(least)  # free the margin, for other writes
        return not self.only_deletes

    def write_bytes_max(self) -> int:
        """Return the most bytes of one write, which is stored as an entry and as history, each also in the log."""
        free = free_bytes(self._directory)
        return min(free // 2, (free + self._free_bytes) // 4)

    def coordination_byte_rate(self) -> int:
        """Return how many bytes per second may go to keys that coordinate a run, while `only_deletes`."""
        room = free_bytes(self._directory) + self._reserve.bytes - self._grows - DELETES_BYTES * 5 // 8
        return max(room, 0) // 4

    def _probe_disk(self) -> bool:
        assert self._database is not None, "it has been written to before"
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT OR REPLACE INTO meta VALUES ('probe', 0, 0)")
            self._check_disk_room(0)
            self._database.execute("COMMIT")
            self._database.execute("DELETE FROM meta WHERE name = 'probe'")
        except sqlite3.Error as error:
            log.debug("%s cannot be written yet: %s", self._directory, error)
            self._roll_back()
            return False
        self.in_doubt = False
        return True

    def close(self, *, within: float | None = None) -> None:
        """Write pending changes, and release the directory; do nothing in a forked child.

        If the disk hangs for longer than `within`, the directory stays locked until the process ends.
        """
        if os.getpid() != self._pid:
            return
        # A probe of the disk uses the database, too.
        idle = self.stop(within=within) and self._probing.acquire(timeout=-1 if within is None else within)
        if not idle:
            log.error("%s cannot be written: changes that were not acknowledged are given up", self._directory)
            return
        self._closed = True
        self._mark.close()
        if self._database is not None:
            self._database.close()
        release_lock(self._lock_file)
        self._probing.release()

    def _run_writer(self, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        while (taken := self._take_group()) is not None:
            try:
                self._write_group(*taken, on_durable)
            except Exception as error:  # noqa: BLE001 - a writer must not end silently
                self._handle_write_failure(error)
                on_failure(disk_error_text(error, self._path) if isinstance(error, sqlite3.Error) else str(error))
                return

    def _take_group(self) -> tuple[list[ChangeSet], int] | None:
        """Wait for changes, and shrink files meanwhile. Return a group and its last number; None after `stop`."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, IDLE_SECONDS if self._untidy or self.short_of_room else None)
                if self._pending:
                    break
                if self._stopping:
                    return None
            self._untidy |= self.short_of_room  # try again: the disk may have room now
            while self._untidy and not self._has_work():
                self._shrink_files()
        count = size = 0
        for facts in self._pending.copy():  # the server may append meanwhile
            size += facts.size
            if count and size > self.group_bytes * 3 // 2:  # a group may exceed `group_bytes` by half
                break
            count += 1
        with self._wake:
            group = self._pending[:count]
            del self._pending[:count]
            return group, self.appended - len(self._pending)

    def _has_work(self) -> bool:
        return bool(self._pending) or self._stopping

    def _write_group(self, group: list[ChangeSet], last: int, on_durable: Callable[[int], None]) -> None:
        """Write a group; if a step is refused or does not fit, find it by halving, and write the steps before it.

        Later steps, which may depend on the failed one, are dropped; clients repeat their requests.
        """
        self.answered = False
        try:
            self._commit_with_remedies(group)
        except (UnstorableRowError, sqlite3.OperationalError) as why:
            if not isinstance(why, UnstorableRowError) and not _has_sqlite_code(why, *_WITHOUT_ITS_END):
                raise
            if half := len(group) // 2:
                self._write_group(group[:half], last - len(group) + half, on_durable)
                self._write_group(group[half:], last, on_durable)
                return
            if isinstance(why, UnstorableRowError):
                log.exception("a change is refused, since it can never be written")
                self._commit_with_remedies([rows.error_change_set(group[0], str(why))])
                self.answered = True
            raise
        on_durable(last)

    def _commit_with_remedies(self, group: list[ChangeSet]) -> None:
        said = False
        remedies = iter((self._checkpoint_wal, partial(self._try_to_free_reserve, group)))
        while True:
            try:
                self._commit(group)
            except sqlite3.OperationalError as error:
                self._roll_back()
                if _has_sqlite_code(error, sqlite3.SQLITE_BUSY) and not self._stopping:
                    if not said:
                        said = True
                        log.warning("%s waits: another process holds SQLite's lock on it", self._path)
                elif not _has_sqlite_code(error, *_WITHOUT_ITS_END) or not any(remedy() for remedy in remedies):
                    raise
            else:
                return

    def _handle_write_failure(self, error: Exception) -> None:
        self._roll_back()
        self.only_deletes = _has_sqlite_code(error, *_WITHOUT_ITS_END)
        if isinstance(error, sqlite3.Error):
            # An error without a code is one of Python's `sqlite3`: the group may be on disk or not.
            code = getattr(error, "sqlite_errorcode", None)
            if code not in (*_WITHOUT_ITS_END, sqlite3.SQLITE_BUSY):
                self.in_doubt = True
        elif not isinstance(error, UnstorableRowError):
            log.exception("a group of facts cannot be written, which is a defect")

    def _commit(self, group: list[ChangeSet]) -> None:
        """Write a group in one transaction; raise `UnstorableRowError` if a row is refused, or `sqlite3.Error`."""
        assert self._database is not None, "the writer runs on an open file"
        began, log_bytes = time.perf_counter(), self.log_bytes
        size = sum(facts.size for facts in group)
        self._database.execute("BEGIN IMMEDIATE")
        try:
            rows.write_group(self._database, group, number=self._group + 1)
        except (sqlite3.DataError, sqlite3.IntegrityError, OverflowError, UnicodeError) as error:
            self._roll_back()
            raise UnstorableRowError(str(error)) from error
        self._check_disk_room(0 if self._may_use_reserve(group) else DELETES_BYTES)
        self._database.execute("COMMIT")
        self._group += 1
        self.commits += 1
        took = time.perf_counter() - began
        self.commit_seconds += took
        self._untidy = True
        self._measure_wal()
        # Unless another program reads the log, SQLite starts it again at its beginning, so the file stays short.
        grew = self.log_bytes > LONG_LOG_BYTES and 8 * (self.log_bytes - log_bytes) > size
        self._long_for = self._long_for + 1 if grew else 0
        if self._long_for == GROUPS_LONG:
            log.warning(LONG_LOG, self._log, self.log_bytes)
        self._mark.write(self._store_id, self._group)
        self._adapt_group_size(size, took)

    def _adapt_group_size(self, size: int, took: float) -> None:
        if size <= SMALL_GROUP_BYTES:
            self._least_seconds += (took - self._least_seconds) / 8
        most = max(GROUP_SECONDS, 3 * self._least_seconds)
        # Adapt also after a slow group that was not full: it may be one large transaction.
        enough = self.group_bytes if took < most else min(self.group_bytes, 2 * SMALL_GROUP_BYTES)
        if 2 * size >= enough and not 0.8 * most < took < most:
            wanted = int(self.group_bytes * min(max(0.9 * most / took, 0.5), 2.0))
            self.group_bytes = min(max(wanted, GROUP_BYTES_LEAST), GROUP_BYTES_MOST)

    def _roll_back(self) -> None:
        assert self._database is not None, "something was written to be rolled back"
        with contextlib.suppress(sqlite3.Error):  # raised if SQLite has rolled back by itself
            self._database.execute("ROLLBACK")

    def _check_disk_room(self, beside: int) -> None:
        """Raise SQLITE_FULL if the disk lacks room to empty the log, and for `beside` bytes more."""
        if not self._reserve.allocate(self._predict_growth() + beside):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    def _predict_growth(self) -> int:
        """Return by how many bytes the log, with the current transaction, will enlarge the database."""
        assert self._database is not None, "the writer runs on an open file"
        (pages,) = self._database.execute("PRAGMA page_count").fetchone()
        (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
        self._free_bytes = free * PAGE_BYTES
        with contextlib.suppress(FileNotFoundError):  # SQLite still writes to a moved directory
            self._grows = max(pages * PAGE_BYTES - self._path.stat().st_size, 0)
        self._measure_wal()
        return self._grows

    def _measure_wal(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.log_bytes = self._log.stat().st_size

    def _checkpoint_wal(self) -> bool:
        """Move SQLite's log into the database; return whether the log is empty."""
        assert self._database is not None, "it has been written to before"
        for _ in range(2):
            with contextlib.suppress(sqlite3.Error):
                (busy, *_) = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                return not busy
            self._reserve.free()  # the database may need the reserve to grow
        return False

    def _try_to_free_reserve(self, group: list[ChangeSet]) -> bool:
        may = self._may_use_reserve(group)
        if may:
            self._reserve.free()  # the database may grow into this space; `try_to_accept_writes` reserves it anew
        return may

    def _may_use_reserve(self, group: list[ChangeSet]) -> bool:
        return self.only_deletes or all(facts.only_frees_space for facts in group)

    def _shrink_files(self) -> None:
        assert self._database is not None, "the writer runs on an open file"
        try:
            (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
            (pages,) = self._database.execute("PRAGMA page_count").fetchone()
            self._predict_growth()
            spare = free - (0 if self.short_of_room else max(FREE_PAGES_KEPT, pages // 4))
            anew = spare > 0 and pages - free <= PAGES_WRITTEN_ANEW and not self.short_of_room
            if anew:
                self._database.execute("VACUUM")
            elif spare > 0:
                self._database.execute(f"PRAGMA incremental_vacuum({min(spare, FREE_PAGES_AT_ONCE)})").fetchall()
            self._untidy = spare > FREE_PAGES_AT_ONCE and not anew
            full = self.log_bytes > (LOG_BYTES // 4 if self.short_of_room else LOG_BYTES)
            if (self.short_of_room and full) or (not self._untidy and (spare > 0 or full)):
                self._database.execute("PRAGMA busy_timeout=0")  # waiting for a reader would delay the next group
                self._checkpoint_wal()
                self._predict_growth()
        except (sqlite3.Error, OSError) as error:  # retried after the next write, or in 1 s if `short_of_room`
            log.debug("%s could not be made smaller: %s", self._path, error)
            self._untidy = False
        finally:
            self._database.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")


def _has_sqlite_code(error: Exception, *codes: int) -> bool:
    """Return True if an error has one of these codes, or an extended code of one."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code in codes or code & 0xFF in codes)
