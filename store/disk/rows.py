"""A store as rows of SQLite: the tables, the rows of a group of changes, and a whole store read back (S3).

SQLite has no checksums outside its write-ahead log, so the last column of each row is the CRC-32 of the others. The
checksum shows damage, but not forgery.

`FORMAT` is the version of the layouts: of the tables, and of the events and replies in them (encoded as on the wire). A
release that changes a layout increases `FORMAT`, and adds a function to `MIGRATIONS`.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from store.engine.changeset import ChangeSet, SavedLease, SavedSession, SavedStore
from store.messages import Entry, Event, Failed, FailureKind
from store.protocol import wire

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

FORMAT = 4  # stored as PRAGMA user_version

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value, seal INTEGER) WITHOUT ROWID;
CREATE TABLE entries (
    key TEXT PRIMARY KEY, value BLOB, created INTEGER, changed INTEGER, lease INTEGER, seal INTEGER
) WITHOUT ROWID;
CREATE TABLE history (place INTEGER PRIMARY KEY, events BLOB, seal INTEGER);
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, ttl REAL, disconnect_ttl REAL, gone_ttl REAL, anonymous INTEGER, seal INTEGER
);
CREATE TABLE sessions (id BLOB PRIMARY KEY, number INTEGER, seal INTEGER) WITHOUT ROWID;
CREATE TABLE replies (
    session BLOB, request INTEGER, response BLOB, seal INTEGER, PRIMARY KEY (session, request)
) WITHOUT ROWID;
"""

# A revision's events are split into rows of about this size, since SQLite accepts no row above 1 GB.
PART_BYTES = 8 * 1024 * 1024
PARTS = 1 << 12

DELETE_KNOWN_REPLIES = """WITH known (whose, last) AS (VALUES {})
DELETE FROM replies WHERE (session, request) IN (
    SELECT session, request FROM known CROSS JOIN replies ON session = whose AND request <= last
)"""

ROWS_AT_ONCE = 256  # the most rows of one statement: SQLite accepts 32,766 values
BYTES_AT_ONCE = 1024 * 1024  # the most bytes of a multi-row statement: SQLite copies them

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""For each older format, the function that migrates a store to the next format, in the caller's transaction."""


def with_checksum(*fields: Any) -> tuple[Any, ...]:
    """Return a row with its checksum."""
    checksum = 0
    for field in fields:
        checksum = zlib.crc32(field if isinstance(field, bytes) else str(field).encode(), checksum)
    return (*fields, checksum)


def write_group(database: sqlite3.Connection, group: Sequence[ChangeSet], *, number: int) -> None:
    """Write a group of changes, with its number, in the current transaction."""
    changed: dict[str, Event] = {}
    sessions: dict[bytes, int | None] = {}
    replies: dict[bytes, dict[int, Any]] = {}
    acknowledged: dict[bytes, int] = {}
    history: list[tuple[Any, ...]] = []
    leases: dict[int, SavedLease | None] = {}
    revision = compacted = last_lease = last_session = 0
    for facts in group:
        for events in facts.revisions:
            revision = events[0].revision
            changed.update((event.key, event) for event in events)
            history.extend(_revision_rows(revision, events))
        compacted = max(compacted, facts.compacted)
        leases.update(facts.leases)
        last_lease = max(last_lease, facts.last_lease)
        # Sessions before replies: if a step replaces a session, the step's replies belong to the new session.
        for session_id, session in facts.sessions.items():
            sessions[session_id] = session
            replies.pop(session_id, None)
            acknowledged.pop(session_id, None)
        last_session = max(last_session, facts.last_session)
        for reply in facts.replies:
            replies.setdefault(reply.session_id, {})[reply.request_id] = reply.response
            acknowledged[reply.session_id] = reply.acknowledged
    written = [
        with_checksum(event.key, event.value, event.create_revision, event.revision, event.lease)
        for event in changed.values()
        if event.kind == "put"
    ]
    deleted = [(key,) for key, event in changed.items() if event.kind == "delete"]
    granted = [
        with_checksum(
            lease.id,
            float(lease.ttl),
            *[ttl and float(ttl) for ttl in (lease.disconnect_ttl, lease.gone_ttl)],
            int(lease.anonymous),
        )
        for lease in leases.values()
        if lease is not None
    ]
    opened = [with_checksum(id, session) for id, session in sessions.items() if session is not None]
    kept = [
        with_checksum(session_id, request_id, wire.encode_response(request_id, response))
        for session_id, of_session in replies.items()
        for request_id, response in of_session.items()
        if request_id > acknowledged[session_id]
    ]
    highest = {"revision": revision, "compacted": compacted, "last_lease": last_lease, "last_session": last_session}
    counters = [with_checksum(name, value) for name, value in (*highest.items(), ("group", number)) if value]
    _execute_in_batches(database, "INSERT OR REPLACE INTO entries VALUES {}", written)
    _execute_in_batches(database, "DELETE FROM entries WHERE key IN (VALUES {})", deleted)
    _execute_in_batches(database, "INSERT INTO history VALUES {}", history)
    _execute_in_batches(database, "DELETE FROM leases WHERE id IN (VALUES {})", [(lease,) for lease in leases])
    _execute_in_batches(database, "INSERT INTO leases VALUES {}", granted)
    replaced = [(session,) for session in sessions]
    _execute_in_batches(database, "DELETE FROM replies WHERE session IN (VALUES {})", replaced)
    _execute_in_batches(database, "DELETE FROM sessions WHERE id IN (VALUES {})", replaced)
    _execute_in_batches(database, "INSERT INTO sessions VALUES {}", opened)
    _execute_in_batches(database, DELETE_KNOWN_REPLIES, acknowledged.items())
    _execute_in_batches(database, "INSERT INTO replies VALUES {}", kept)
    _execute_in_batches(database, "INSERT OR REPLACE INTO meta VALUES {}", counters)
    if compacted:
        database.execute("DELETE FROM history WHERE place < ?", ((compacted + 1) * PARTS,))


def _row_batches(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the placeholders and the fields of several rows, a power of two: few statements differ, and are cached.

    A statement has many rows, since Python's sqlite3 releases the GIL at each statement, and a busy event loop may then
    hold it for milliseconds.
    """
    rows, at = list(rows), 0
    while at < len(rows):
        count = ROWS_AT_ONCE
        sizes = [sum(len(field) for field in row if type(field) is bytes) for row in rows[at : at + count]]
        while count > 1 and (count > len(sizes) or sum(sizes[:count]) > BYTES_AT_ONCE):
            count //= 2
        placeholders = f"({', '.join('?' * len(rows[at]))})"
        yield ", ".join([placeholders] * count), list(chain.from_iterable(rows[at : at + count]))
        at += count


def _execute_in_batches(database: sqlite3.Connection, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
    for placeholders, fields in _row_batches(rows):
        database.execute(statement.format(placeholders), fields)


def _revision_rows(revision: int, events: tuple[Event, ...]) -> Iterator[tuple[Any, ...]]:
    part, begin, size = 0, 0, 0
    for index, event in enumerate(events):
        size += len(event.key) + len(event.value)
        if size > PART_BYTES or index == len(events) - 1:
            yield with_checksum(revision * PARTS + part, wire.encode_events(events[begin : index + 1]))
            part, begin, size = part + 1, index + 1, 0
    assert part <= PARTS, "a revision is bounded, and its parts with it"


def error_change_set(facts: ChangeSet, why: str) -> ChangeSet:
    """Return the changes to store instead of rejected ones: the sessions, and an error as each reply."""
    message = f"the disk cannot take it, and nothing was done: {why}; ask for less"
    answer = Failed(kind=FailureKind.LIMIT, message=message)
    replies = [replace(reply, response=answer) for reply in facts.replies]
    return ChangeSet(sessions=dict(facts.sessions), last_session=facts.last_session, replies=replies)


def read_id_and_last_group(database: sqlite3.Connection) -> tuple[str, int]:
    """Return the store's identity, and the number of its last group of changes."""
    meta = dict(database.execute("SELECT name, value FROM meta WHERE name IN ('store_id', 'group')").fetchall())
    return str(meta["store_id"]), int(meta.get("group", 0))


def load_store(database: sqlite3.Connection) -> SavedStore:
    """Return a whole store; raise `ValueError`, or another error, if it is inconsistent."""

    def rows(table: str, which: str = "") -> Iterator[tuple[Any, ...]]:
        for row in database.execute(f"SELECT * FROM {table} {which}"):  # noqa: S608 - the names are constants
            if row != with_checksum(*row[:-1]):
                raise ValueError(f"a row of {table!r} is not as it was written")
            yield row[:-1]

    meta = dict(rows("meta", "WHERE name != 'probe'"))
    numbers: dict[bytes, int] = dict(rows("sessions"))
    replies: dict[bytes, list[tuple[int, Any]]] = {id: [] for id in numbers}
    for session_id, request_id, response in rows("replies", "ORDER BY session, request"):
        replies[session_id].append((request_id, _decode_response(response)))
    saved = SavedStore(
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
            SavedLease(id=id, ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl, anonymous=bool(anonymous))
            for id, ttl, disconnect_ttl, gone_ttl, anonymous in rows("leases")
        ),
        sessions=tuple(SavedSession(id=id, number=numbers[id], replies=tuple(kept)) for id, kept in replies.items()),
        history=tuple(_history_from_rows(rows("history", "ORDER BY place"))),
    )
    revisions = [events[0].revision for events in saved.history]
    if revisions != list(range(saved.compacted + 1, saved.revision + 1)):
        raise ValueError(f"not every change from {saved.compacted + 1} to {saved.revision} is there")
    leases = {None, *(lease.id for lease in saved.leases)}
    if not all(entry.lease in leases and entry.mod_revision <= saved.revision for entry in saved.entries):
        raise ValueError("a key is on a lease that is not there, or later than the last change")
    return saved


def _history_from_rows(rows: Iterator[tuple[int, bytes]]) -> Iterator[tuple[Event, ...]]:
    for revision, parts in groupby(rows, key=lambda row: row[0] // PARTS):
        events: list[Event] = []
        for number, (place, part) in enumerate(parts):
            if place != revision * PARTS + number:
                raise ValueError(f"a part of the change {revision} is not there")
            events.extend(wire.decode_events(part))
        yield tuple(events)


def _decode_response(frame: bytes) -> Any:
    reply = wire.decode_server_frame(frame[4:])
    assert isinstance(reply, wire.Reply), "only responses are kept"
    return reply.response
