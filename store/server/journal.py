"""Shell: what was applied, made durable: SQLite, one writer thread, group commit (promise S3).

The server appends the facts of each step and gets a sequence number; whatever it says from then on waits in the
outboxes until that number is durable. The writer takes everything that has been appended meanwhile, writes it in one
transaction, and reports the last number of it: while one fsync runs, the next group gathers, so that a hundred callers
share one.

SQLite runs in WAL mode with `synchronous=FULL` (https://sqlite.org/pragma.html#pragma_synchronous): a commit has
reached the disk when it returns. A lock file keeps a second server out; another version's file is refused; a damaged
one is reported, and never emptied, nor changed in any byte: it is opened for writing only once all of it has been read.
SQLite itself has no checksums outside its write-ahead log, so each row carries one of its own. What cannot be told from
an earlier, whole state is not noticed: the log cut short, or taken away.

When a write fails, because the disk is full, say, the group is rolled back as a whole and the journal stops: nothing of
it was said to anybody yet, so the server can go back to what is on disk (`load`) and refuse writes until `try_again`
succeeds.

When it is the last step that fails, which is to make the group durable (fsync), nobody knows whether it is: the group
is in the file as a whole, and a server that starts on it would find it there. Then the journal is `in_doubt`, and
neither a state with that group nor one without it may be told to anybody until a later commit, written over it, is
durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.engine.changeset import Facts, Saved, SavedLease, SavedSession
from store.errors import StoreUsageError
from store.messages import Entry, Event
from store.net.sockets import let_go_in_children
from store.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO

__all__ = ["Journal"]

log = logging.getLogger(__name__)

FORMAT = 1  # of the tables below; PRAGMA user_version
FILE = "store.sqlite3"
UNFINISHED = "store.sqlite3.new"  # while it is being made: an empty file of the right name is a damaged one
LOCK = "lock"
# A write that failed left a group without its end, which nobody reads; after all else, the group may be there whole.
_WITHOUT_ITS_END = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
PROBE_BYTES = 64 * 1024  # what must be writable again before writes are taken again

# The last column of each is the checksum of the others; see `_sealed`.
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value, seal INTEGER) WITHOUT ROWID;
CREATE TABLE entries (
    key TEXT PRIMARY KEY, value BLOB, created INTEGER, changed INTEGER, lease INTEGER, seal INTEGER
) WITHOUT ROWID;
CREATE TABLE history (revision INTEGER PRIMARY KEY, events BLOB, seal INTEGER);
CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl REAL, disconnect_ttl REAL, anonymous INTEGER, seal INTEGER);
CREATE TABLE sessions (id BLOB PRIMARY KEY, number INTEGER, seal INTEGER) WITHOUT ROWID;
CREATE TABLE replies (
    session BLOB, request INTEGER, response BLOB, seal INTEGER, PRIMARY KEY (session, request)
) WITHOUT ROWID;
"""


class Journal:
    """The durable half of a store; opened by one server at a time.

    Args:
        directory: Where it lives; made if it is not there.
        new_id: The identity of the store, should it be a new one.

    Attributes:
        commits: How many groups have been written.
        in_doubt: Whether it is unknown if the last group is on disk.

    Raises:
        StoreUsageError: Another server has it, another version wrote it, it is damaged, or it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], *, new_id: str) -> None:
        self._directory = Path(directory)
        self._path = self._directory / FILE
        self._pid = os.getpid()
        self._database: sqlite3.Connection | None = None  # for writing; opened when it has been read
        self._pending: list[Facts] = []
        self._appended = 0
        self._durable = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._probing = threading.Lock()  # held while it is probed whether the disk takes anything
        self._closed = False
        self.commits = 0
        self.in_doubt = False
        self._lock_file = _take_lock(self._directory)
        let_go_in_children(self, self._lock_file)  # or a forked child would keep the lock when this process is gone
        try:
            with self._reporting():
                if not self._path.exists():
                    self._create(new_id)
                self._check()
        except BaseException:
            self._lock_file.close()
            raise

    # ------------------------------------------------------------------------------------------ opening

    def _create(self, new_id: str) -> None:
        """Make an empty store under another name, and let it appear whole."""
        partial = self._directory / UNFINISHED
        for left_over in self._directory.glob(f"{UNFINISHED}*"):
            left_over.unlink()
        with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as database:
            database.executescript(f"PRAGMA fullfsync=ON; BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT};")
            database.execute("INSERT INTO meta VALUES (?, ?, ?)", _sealed("store_id", new_id))
            database.execute("COMMIT")
            database.execute("PRAGMA journal_mode=WAL")
        os.replace(partial, self._path)
        _sync_directory(self._directory)

    def _check(self) -> None:
        """Refuse another version's file, and a damaged one."""
        with contextlib.closing(self._open_to_read()) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0 and not database.execute("SELECT 1 FROM sqlite_schema").fetchone():
                raise sqlite3.DatabaseError("it is empty")
            if version != FORMAT:
                raise StoreUsageError(
                    f"{self._path} has format {version}, and this release reads format {FORMAT}: use the release that "
                    f"wrote it, or another data_dir"
                )
            (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise sqlite3.DatabaseError(health)

    def _open_to_read(self) -> sqlite3.Connection:
        """A connection that changes nothing, not even when it is closed: one that could write would then tidy up."""
        return sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)

    def _open_to_write(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone does not reach the platters
        return database

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Say of whatever a damaged file leads to what is wrong, and what to do."""
        try:
            yield
        except StoreUsageError:
            raise
        except Exception as error:
            raise StoreUsageError(
                f"{self._path} is damaged or cannot be used ({error}); nothing in it was changed: restore it from a "
                f"backup, or move it away to begin with an empty store"
            ) from error

    def load(self) -> Saved:
        """Everything that is durable. To be called before `start`, and while no writer runs.

        Raises:
            StoreUsageError: It is damaged.
        """
        with self._reporting():
            with contextlib.closing(self._open_to_read()) as database:
                saved = _load(database)
            if self._database is None:
                self._database = self._open_to_write()
        return saved

    # ------------------------------------------------------------------------------------------ writing

    @property
    def appended(self) -> int:
        """The number of the last facts appended."""
        return self._appended

    @property
    def durable(self) -> int:
        """Up to which number they are durable."""
        return self._durable

    def append(self, facts: Facts) -> int:
        """Have these facts written with the next group; their number. Never waits."""
        with self._wake:
            self._appended += 1
            self._pending.append(facts)
            self._wake.notify()
            return self._appended

    def start(self, *, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        """Start the writer thread, after `load`. Both callbacks come from it.

        Args:
            on_durable: Everything up to this number is durable.
            on_failure: A group could not be written, for this reason; the writer has ended.
        """
        assert self._database is not None, "what is there is read before anything is added"
        self._stopping = False
        self._thread = threading.Thread(
            target=self._write, args=(on_durable, on_failure), name="store journal", daemon=True
        )
        self._thread.start()

    def stop(self, *, within: float | None = None) -> bool:
        """Write what is pending, and end the writer; False if a disk that hangs keeps it for longer than `within`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(within)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def try_again(self) -> bool:
        """After a failure: whether there is room to write again. What was pending has been given up by its server."""
        assert self._database is not None, "it has been written to before"
        with self._wake:
            self._pending.clear()
            self._durable = self._appended
        with self._probing:
            return not self._closed and self._probe(self._database)

    def _probe(self, database: sqlite3.Connection) -> bool:
        """Write something as large as a group may be, and take it away again."""
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?), 0)", (PROBE_BYTES,))
            database.execute("COMMIT")
            database.execute("DELETE FROM meta WHERE name = 'probe'")
        except sqlite3.Error as error:
            log.debug("%s cannot be written yet: %s", self._directory, error)
            self._roll_back()
            return False
        self.in_doubt = False
        return True

    def close(self, *, within: float | None = None) -> None:
        """Write what is pending, and let go of the directory.

        If a disk that hangs keeps the writer for longer than `within`, it keeps the directory, too, for as long as this
        process lives. In a forked child nothing is done: it has neither the writer nor the lock.
        """
        if os.getpid() != self._pid:
            return
        # A probe may hang like a write; the database is in its hands then.
        idle = self.stop(within=within) and self._probing.acquire(timeout=-1 if within is None else within)
        if not idle:
            log.error("%s takes nothing: what was not acknowledged is given up", self._directory)
            return
        self._closed = True
        if self._database is not None:
            self._database.close()
        if not self._lock_file.closed:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # a child that was forked a moment ago may still have it, too
        self._lock_file.close()
        self._probing.release()

    def _write(self, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._stopping:
                    self._wake.wait()
                group, self._pending, last = self._pending, [], self._appended
            if not group:
                return
            try:
                self._commit(group)
            except Exception as error:  # whatever it is: a writer that is silently gone stops everybody
                self._roll_back()
                # Those that Python raises, and not SQLite, have no code, and prove nothing.
                code = getattr(error, "sqlite_errorcode", None)
                if isinstance(error, sqlite3.Error) and code not in _WITHOUT_ITS_END:
                    self.in_doubt = True
                if not isinstance(error, sqlite3.Error):
                    log.exception("a group of facts cannot be written, which is a defect")
                on_failure(str(error))
                return
            self._durable = last
            on_durable(last)

    def _commit(self, group: list[Facts]) -> None:
        """Write a group in one transaction. Of several words on one thing, the last is what is kept."""
        assert self._database is not None, "the writer runs on an open file"
        changed: dict[str, Event] = {}
        sessions: dict[bytes, int | None] = {}
        replies: dict[bytes, dict[int, Any]] = {}
        acknowledged: dict[bytes, int] = {}
        history: list[tuple[Any, ...]] = []
        granted: list[tuple[Any, ...]] = []
        ended: list[tuple[int]] = []
        revision = compacted = last_lease = last_session = 0
        for facts in group:
            for events in facts.revisions:
                revision = events[0].revision
                changed.update((event.key, event) for event in events)
                history.append(_sealed(revision, wire.encode_events(events)))
            compacted = max(compacted, facts.compacted)
            for lease in facts.granted:
                last_lease = max(last_lease, lease.id)
                soon = None if lease.disconnect_ttl is None else float(lease.disconnect_ttl)
                granted.append(_sealed(lease.id, float(lease.ttl), soon, int(lease.anonymous)))
            ended.extend((lease_id,) for lease_id in facts.ended)
            for session_id, number in facts.sessions.items():  # before the replies: in one step they are of the new one
                sessions[session_id] = number
                replies.pop(session_id, None)
                acknowledged.pop(session_id, None)
            last_session = max(last_session, facts.last_session)
            for reply in facts.replies:
                replies.setdefault(reply.session_id, {})[reply.request_id] = reply.response
                acknowledged[reply.session_id] = reply.acknowledged
        written = [
            _sealed(event.key, event.value, event.create_revision, event.revision, event.lease)
            for event in changed.values()
            if event.kind == "put"
        ]
        deleted = [(event.key,) for event in changed.values() if event.kind == "delete"]
        kept = [
            _sealed(session_id, request_id, wire.encode_response(request_id, response))
            for session_id, of_session in replies.items()
            for request_id, response in of_session.items()
            if request_id > acknowledged[session_id]
        ]
        highest = {"revision": revision, "compacted": compacted, "last_lease": last_lease, "last_session": last_session}
        many = self._database.executemany
        self._database.execute("BEGIN IMMEDIATE")
        many("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", written)
        many("DELETE FROM entries WHERE key = ?", deleted)
        many("INSERT INTO history VALUES (?, ?, ?)", history)
        many("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", granted)
        many("DELETE FROM leases WHERE id = ?", ended)
        many("DELETE FROM replies WHERE session = ?", [(id,) for id in sessions])
        many("DELETE FROM sessions WHERE id = ?", [(id,) for id in sessions])
        many(
            "INSERT INTO sessions VALUES (?, ?, ?)",
            [_sealed(id, number) for id, number in sessions.items() if number is not None],
        )
        many("DELETE FROM replies WHERE session = ? AND request <= ?", acknowledged.items())
        many("INSERT INTO replies VALUES (?, ?, ?, ?)", kept)
        many(
            "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)",
            [_sealed(name, value) for name, value in highest.items() if value],
        )
        if compacted:
            self._database.execute("DELETE FROM history WHERE revision <= ?", (compacted,))
        self._database.execute("COMMIT")
        self.commits += 1

    def _roll_back(self) -> None:
        assert self._database is not None, "something was written to be rolled back"
        with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            self._database.execute("ROLLBACK")


# ------------------------------------------------------------------------------------------------------- the rows


def _sealed(*fields: Any) -> tuple[Any, ...]:
    """A row, and its checksum: CRC-32, which tells damage, and is no proof against malice."""
    seal = 0
    for field in fields:
        seal = zlib.crc32(field if isinstance(field, bytes) else str(field).encode(), seal)
    return (*fields, seal)


def _whole(table: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table without their checksums, as far as these are right."""
    for row in rows:
        if row != _sealed(*row[:-1]):
            raise ValueError(f"a row of {table!r} is not as it was written")
        yield row[:-1]


def _load(database: sqlite3.Connection) -> Saved:
    """A whole store, read and found consistent; `ValueError`, or whatever else, if not."""

    def rows(table: str, which: str = "") -> Iterator[tuple[Any, ...]]:
        return _whole(table, database.execute(f"SELECT * FROM {table} {which}"))  # noqa: S608 - our own names

    meta = dict(rows("meta", "WHERE name != 'probe'"))
    numbers: dict[bytes, int] = dict(rows("sessions"))
    replies: dict[bytes, list[tuple[int, Any]]] = {id: [] for id in numbers}
    for session_id, request_id, response in rows("replies", "ORDER BY session, request"):
        replies[session_id].append((request_id, _response_from(response)))
    saved = Saved(
        store_id=str(meta["store_id"]),
        revision=int(meta.get("revision", 0)),
        compacted=int(meta.get("compacted", 0)),
        last_lease=int(meta.get("last_lease", 0)),
        last_session=int(meta.get("last_session", 0)),
        entries=tuple(
            Entry(key=key, value=value, create_revision=created, mod_revision=changed, lease=lease)
            for key, value, created, changed, lease in rows("entries")
        ),
        leases=tuple(
            SavedLease(id=id, ttl=ttl, disconnect_ttl=disconnect_ttl, anonymous=bool(anonymous))
            for id, ttl, disconnect_ttl, anonymous in rows("leases")
        ),
        sessions=tuple(SavedSession(id=id, number=numbers[id], replies=tuple(kept)) for id, kept in replies.items()),
        history=tuple(wire.decode_events(events) for _, events in rows("history", "ORDER BY revision")),
    )
    revisions = [events[0].revision for events in saved.history]
    if revisions != list(range(saved.compacted + 1, saved.revision + 1)):
        raise ValueError(f"not every change from {saved.compacted + 1} to {saved.revision} is there")
    leases = {None, *(lease.id for lease in saved.leases)}
    if not all(entry.lease in leases and entry.mod_revision <= saved.revision for entry in saved.entries):
        raise ValueError("a key is on a lease that is not there, or later than the last change")
    return saved


def _response_from(frame: bytes) -> Any:
    """The response in a frame that was written by `_commit`."""
    reply = wire.decode_server_frame(frame[4:])
    assert isinstance(reply, wire.Reply), "only responses are kept"
    return reply.response


# -------------------------------------------------------------------------------------------------- the directory


def _take_lock(directory: Path) -> IO[str]:
    """Keep other servers out of a directory for as long as the file is open.

    Raises:
        StoreUsageError: One is there already, or the directory cannot be used.
    """
    try:
        _make(directory)
        file = open(directory / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held open on purpose
    except OSError as error:
        raise StoreUsageError(f"data_dir {directory} cannot be used: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        os.write(
            file.fileno(), b"%d\n" % os.getpid()
        )  # not through a buffer, which closing it would try to write again
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StoreUsageError(
            f"data_dir {directory} is in use by another server (process {holder}): stop that one, or use another "
            f"directory"
        ) from None
    except OSError as error:  # a network's file system without locks, say: not to be taken for another server
        file.close()
        raise StoreUsageError(f"data_dir {directory} cannot be locked: {error.strerror or error}") from error
    return file


def _make(directory: Path) -> None:
    """Make a directory and those above it, so that they, too, survive a power loss."""
    if not directory.exists():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, which the files' own fsync does not."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
