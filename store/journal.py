"""Shell: what was applied, made durable: SQLite, one writer thread, group commit (promise S3).

The server appends the facts of each step and gets a sequence number; whatever it says from then on waits in the outboxes
until that number is durable. The writer takes everything that has been appended meanwhile, writes it in one transaction,
and reports the last number of it: while one fsync runs, the next group gathers, so that a hundred callers share one.

SQLite runs in WAL mode with `synchronous=FULL` (https://sqlite.org/pragma.html#pragma_synchronous): a commit has reached
the disk when it returns. A lock file keeps a second server out; another version's file is refused; a damaged one is
reported, and never emptied.

When a write fails, because the disk is full, say, the group is rolled back as a whole and the journal stops: nothing of
it was said to anybody yet, so the server can go back to what is on disk (`load`) and refuse writes until `try_again`
succeeds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store import wire
from store.errors import StoreUsageError
from store.facts import Facts, Saved, SavedLease, SavedSession
from store.messages import Entry, Event
from store.sockets import let_go_in_children

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

__all__ = ["Journal"]

log = logging.getLogger(__name__)

FORMAT = 1  # of the tables below; PRAGMA user_version
FILE = "store.sqlite3"
LOCK = "lock"
PROBE_BYTES = 64 * 1024  # what must be writable again before writes are taken again

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB, created INTEGER, changed INTEGER, lease INTEGER) WITHOUT ROWID;
CREATE TABLE history (revision INTEGER PRIMARY KEY, events BLOB);
CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl REAL, disconnect_ttl REAL, anonymous INTEGER);
CREATE TABLE sessions (id BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE replies (session BLOB, request INTEGER, response BLOB, PRIMARY KEY (session, request)) WITHOUT ROWID;
"""


class Journal:
    """The durable half of a store; opened by one server at a time.

    Args:
        directory: Where it lives; made if it is not there.
        new_id: The identity of the store, should it be a new one.

    Raises:
        StoreUsageError: Another server has it, another version wrote it, it is damaged, or it cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, new_id: str) -> None:
        self._directory = Path(directory)
        self._lock_file = _take_lock(self._directory)
        let_go_in_children(self, self._lock_file)  # or a forked child would keep the lock when this process is gone
        try:
            self._database = self._open(new_id)
        except BaseException:
            self._lock_file.close()
            raise
        self._pending: list[Facts] = []
        self._appended = 0
        self._durable = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._failed: str | None = None
        self._thread: threading.Thread | None = None
        self.commits = 0

    # ------------------------------------------------------------------------------------------ opening

    def _open(self, new_id: str) -> sqlite3.Connection:
        path = self._directory / FILE
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone does not reach the platters
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0 and not database.execute("SELECT 1 FROM sqlite_schema").fetchone():
                database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT};")
                database.execute("INSERT INTO meta VALUES ('store_id', ?)", (new_id,))
                database.execute("COMMIT")
            elif version != FORMAT:
                raise StoreUsageError(
                    f"{path} has format {version}, and this release reads format {FORMAT}: use the release that wrote it, or "
                    f"another data_dir"
                )
            (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if health != "ok":
                raise sqlite3.DatabaseError(health)
        except sqlite3.Error as error:
            raise StoreUsageError(
                f"{path} is damaged or cannot be used ({error}); nothing in it was changed: restore it from a backup, or move "
                f"it away to begin with an empty store"
            ) from error
        return database

    def load(self) -> Saved:
        """Everything that is durable. To be called while no writer runs.

        Raises:
            StoreUsageError: It is damaged.
        """
        query = self._database.execute
        try:
            meta = dict(query("SELECT name, value FROM meta"))
            numbers: dict[bytes, int] = dict(query("SELECT id, number FROM sessions"))
            replies: dict[bytes, list[tuple[int, Any]]] = {id: [] for id in numbers}
            for session, request, response in query("SELECT session, request, response FROM replies ORDER BY request"):
                replies[session].append((request, _response_from(response)))
            return Saved(
                store_id=str(meta["store_id"]),
                revision=int(meta.get("revision", 0)),
                compacted=int(meta.get("compacted", 0)),
                last_lease=int(meta.get("last_lease", 0)),
                last_session=int(meta.get("last_session", 0)),
                entries=tuple(
                    Entry(key=key, value=value, create_revision=created, mod_revision=changed, lease=lease)
                    for key, value, created, changed, lease in query("SELECT * FROM entries")
                ),
                leases=tuple(
                    SavedLease(id=id, ttl=ttl, disconnect_ttl=disconnect_ttl, anonymous=bool(anonymous))
                    for id, ttl, disconnect_ttl, anonymous in query("SELECT * FROM leases")
                ),
                sessions=tuple(
                    SavedSession(id=id, number=numbers[id], replies=tuple(kept)) for id, kept in replies.items()
                ),
                history=tuple(
                    wire.decode_events(events) for (events,) in query("SELECT events FROM history ORDER BY revision")
                ),
            )
        except Exception as error:  # whatever a damaged file leads to
            raise StoreUsageError(
                f"{self._directory / FILE} is damaged ({error}); nothing in it was changed: restore it from a backup, or "
                f"move it away to begin with an empty store"
            ) from error

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
        """Start the writer thread. Both callbacks come from it.

        Args:
            on_durable: Everything up to this number is durable.
            on_failure: A group could not be written, for this reason; the writer has ended.
        """
        self._failed = None
        self._stopping = False
        self._thread = threading.Thread(
            target=self._write, args=(on_durable, on_failure), name="store journal", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Write what is pending, and end the writer."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def try_again(self) -> bool:
        """After a failure: whether there is room to write again. What was pending has been given up by its server."""
        with self._wake:
            self._pending.clear()
            self._durable = self._appended
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?))", (PROBE_BYTES,))
            self._database.execute("COMMIT")
            self._database.execute("DELETE FROM meta WHERE name = 'probe'")
        except sqlite3.Error as error:
            log.debug("%s cannot be written yet: %s", self._directory, error)
            self._roll_back()
            return False
        return True

    def close(self) -> None:
        """Write what is pending, and let go of the directory."""
        self.stop()
        self._database.close()
        self._lock_file.close()

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
            except sqlite3.Error as error:
                self._roll_back()
                on_failure(str(error))
                return
            self._durable = last
            on_durable(last)

    def _commit(self, group: list[Facts]) -> None:
        """Write a group in one transaction. Of several changes to a key, the last is what is kept."""
        changed: dict[str, Event] = {}
        sessions: dict[bytes, int | None] = {}
        history: list[tuple[int, bytes]] = []
        granted: list[tuple[Any, ...]] = []
        ended: list[tuple[int]] = []
        replies: list[tuple[bytes, int, bytes]] = []
        acknowledged: list[tuple[bytes, int]] = []
        revision = compacted = last_lease = last_session = 0
        for facts in group:
            for events in facts.revisions:
                revision = events[0].revision
                changed.update((event.key, event) for event in events)
                history.append((revision, wire.encode_events(events)))
            compacted = max(compacted, facts.compacted)
            for lease in facts.granted:
                last_lease = max(last_lease, lease.id)
                granted.append((lease.id, lease.ttl, lease.disconnect_ttl, lease.anonymous))
            ended.extend((lease_id,) for lease_id in facts.ended)
            sessions.update((id, None) for id in facts.forgotten)  # one that had expired may come again at once
            sessions.update(facts.opened)
            last_session = max((last_session, *(number for _, number in facts.opened)))
            for reply in facts.replies:
                if sessions.get(reply.session_id, 0) is None:
                    continue  # its session has ended since
                acknowledged.append((reply.session_id, reply.acknowledged))
                replies.append(
                    (reply.session_id, reply.request_id, wire.encode_response(reply.request_id, reply.response))
                )
        written = [
            (event.key, event.value, event.create_revision, event.revision, event.lease)
            for event in changed.values()
            if event.kind == "put"
        ]
        deleted = [(event.key,) for event in changed.values() if event.kind == "delete"]
        highest = {"revision": revision, "compacted": compacted, "last_lease": last_lease, "last_session": last_session}
        many = self._database.executemany
        self._database.execute("BEGIN IMMEDIATE")
        many("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", written)
        many("DELETE FROM entries WHERE key = ?", deleted)
        many("INSERT INTO history VALUES (?, ?)", history)
        many("INSERT INTO leases VALUES (?, ?, ?, ?)", granted)
        many("DELETE FROM leases WHERE id = ?", ended)
        many("DELETE FROM replies WHERE session = ?", [(id,) for id in sessions])
        many("DELETE FROM sessions WHERE id = ?", [(id,) for id in sessions])
        many(
            "INSERT INTO sessions VALUES (?, ?)",
            [(id, number) for id, number in sessions.items() if number is not None],
        )
        many("INSERT INTO replies VALUES (?, ?, ?)", replies)
        many("DELETE FROM replies WHERE session = ? AND request <= ?", acknowledged)
        many("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(name, value) for name, value in highest.items() if value])
        if compacted:
            self._database.execute("DELETE FROM history WHERE revision <= ?", (compacted,))
        self._database.execute("COMMIT")
        self.commits += 1

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            self._database.execute("ROLLBACK")


def _take_lock(directory: Path) -> IO[str]:
    """Keep other servers out of a directory for as long as the file is open.

    Raises:
        StoreUsageError: One is there already, or the directory cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held open on purpose
    except OSError as error:
        raise StoreUsageError(f"data_dir {directory} cannot be used: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StoreUsageError(
            f"data_dir {directory} is in use by another server (process {holder}): stop that one, or use another directory"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _response_from(frame: bytes) -> Any:
    """The response in a frame that was written by `_commit`."""
    reply = wire.decode_server_frame(frame[4:])
    assert isinstance(reply, wire.Reply), "only responses are kept"
    return reply.response
