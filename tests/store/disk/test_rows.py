"""The rows: one number identifies the layout of all rows, and a revision of any size fits."""

import hashlib
import sqlite3

import pytest

from store import messages
from store.disk import rows
from store.engine.changeset import ChangeSet, KeptReply, SavedLease
from store.messages import Entry, Event, Failed, FailureKind, Response
from store.protocol import wire

LAYOUTS = {4: "ab39d93d1e79cceb"}
"""By format: a digest of all its layouts."""


ENTRY = Entry(key="k", value=b"v", create_revision=1, mod_revision=2, lease=3)
ANSWERS_TO_CHANGES: tuple[Response, ...] = (
    messages.Written(revision=7),
    messages.Counted(count=7, revision=7),
    messages.CompareAndSetResult(succeeded=True, entry=ENTRY),
    messages.Added(value=7, revision=7),
    messages.TransactionResult(succeeded=True, results=(1, True, ENTRY, None), revision=7),
    messages.Granted(lease=7, ttl=1.5),
    messages.Done(),
    messages.Failed(kind=FailureKind.LIMIT, message="words"),
)
"""One of each kind of answer that is kept, with a value in every field."""


def layout() -> str:
    """Return the digest of the layout of our database."""
    events = (
        Event(kind="put", revision=5, key="k", value=b"v", create_revision=3, lease=4),
        Event(kind="put", revision=5, key="l", value=b"", create_revision=5, lease=None),
        Event(kind="delete", revision=5, key="m"),
    )
    responses = [wire.encode_response(9, response) for response in ANSWERS_TO_CHANGES]
    parts = [rows.SCHEMA, str(rows.PARTS), repr(rows.with_checksum("a", b"b", 3, None, 1.5))]
    database = empty()
    lease = SavedLease(id=4, ttl=10.0, disconnect_ttl=None, gone_ttl=None, anonymous=True)
    facts = ChangeSet(
        revisions=[events],
        leases={4: lease},
        last_lease=4,
        replies=[
            KeptReply(
                session_id=b"s" * 16,
                acknowledged=0,
                request_id=9,
                response=Failed(kind=FailureKind.LIMIT, message="no"),
            )
        ],
    )
    facts.note_session_opened(b"s" * 16, 1)
    rows.write_group(database, [facts], number=1)
    for table in ("meta", "entries", "history", "leases", "sessions", "replies"):
        parts += map(repr, database.execute(f"SELECT * FROM {table}"))
    return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *responses])).hexdigest()[:16]


def empty() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.executescript(rows.SCHEMA)
    database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", "id"))
    return database


def test_the_format_number_stands_for_every_layout_in_a_row() -> None:
    found = layout()
    assert rows.FORMAT in LAYOUTS, f"note what format {rows.FORMAT} looks like: {rows.FORMAT}: {found!r}"
    assert found == LAYOUTS[rows.FORMAT], (
        f"something in the rows of the database is laid out in another way, and existing stores are taken for damaged: "
        f"raise FORMAT in store/disk/rows.py to {rows.FORMAT + 1}, note {rows.FORMAT + 1}: {found!r} here, and, if "
        f"format {rows.FORMAT} was ever released, add its migration to MIGRATIONS there"
    )


def test_a_revision_in_parts_comes_back_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", 50)
    database = empty()
    small = (Event(kind="put", revision=1, key="k", value=b"1", create_revision=1),)
    large = tuple(
        Event(kind="put", revision=2, key=f"k{number}", value=b"v" * number, create_revision=2) for number in range(60)
    )
    rows.write_group(database, [ChangeSet(revisions=[small, large])], number=1)
    assert database.execute("SELECT count(*) FROM history").fetchone()[0] > 10
    assert rows.load_store(database).history == (small, large)
    database.execute("DELETE FROM history WHERE place = ?", (2 * rows.PARTS + 3,))
    with pytest.raises(ValueError, match="a part of the change 2 is not there"):
        rows.load_store(database)


def test_history_that_is_forgotten_goes_with_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", 1)
    database = empty()
    events = [
        tuple(Event(kind="put", revision=revision, key=key, value=b"vv", create_revision=1) for key in "ab")
        for revision in (1, 2, 3)
    ]
    rows.write_group(database, [ChangeSet(revisions=events, compacted=2)], number=1)
    assert rows.load_store(database).history == (events[2],)
    assert database.execute("SELECT count(*) FROM history").fetchone() == (2,)


def test_a_refusal_is_kept_as_the_answer_to_its_request() -> None:
    reply = KeptReply(session_id=b"s" * 16, acknowledged=3, request_id=4, response=messages.Written(revision=9))
    facts = ChangeSet(revisions=[(Event(kind="delete", revision=1, key="k"),)], replies=[reply])
    refused = rows.error_change_set(facts, "too big")
    assert not refused.revisions
    (answer,) = refused.replies
    assert (answer.session_id, answer.acknowledged, answer.request_id) == (b"s" * 16, 3, 4)
    assert isinstance(answer.response, Failed)
    assert "too big" in answer.response.message


def test_the_last_word_on_a_lease_is_kept() -> None:
    """One that is ending is written again without its time, and a chosen id may come again, in one group or in two."""
    granted, ending = SavedLease(id=4, ttl=10.0), SavedLease(id=4, ttl=0.0)
    words: list[tuple[list[SavedLease | None], list[tuple[int, float]]]] = [
        ([granted, ending], [(4, 0.0)]),
        ([granted, None], []),
        ([granted, None, granted], [(4, 10.0)]),
    ]
    for said, kept in words:
        for size in (1, len(said)):
            database = empty()
            for number, at in enumerate(range(0, len(said), size), 1):
                rows.write_group(
                    database, [ChangeSet(leases={4: each}) for each in said[at : at + size]], number=number
                )
            assert database.execute("SELECT id, ttl FROM leases").fetchall() == kept


def test_a_statement_has_few_bytes_at_once() -> None:
    """SQLite has a copy of each value that a statement binds."""
    sizes = [10, 2_000_000, 600_000, 600_000, *[100] * 1000, 3_000_000]
    batches = [fields for _, fields in rows._row_batches((bytes(size),) for size in sizes)]
    assert [len(field) for fields in batches for field in fields] == sizes
    assert all(len(fields) == 1 or sum(map(len, fields)) <= rows.BYTES_AT_ONCE for fields in batches)
    assert len(batches) < 20


def test_a_group_of_any_size_takes_a_few_statements_and_is_written_whole() -> None:
    """Each execution releases the GIL, which a busy event loop gives back after milliseconds."""
    database, count, clients = empty(), 1000, 7
    numbers = range(1, count + 1)
    told: list[str] = []
    replies = [
        KeptReply(
            session_id=b"s%d" % (number % clients),
            acknowledged=number - 3 * clients,
            request_id=number,
            response=messages.Written(revision=number),
        )
        for number in numbers
    ]
    put = [Event(kind="put", revision=number, key=f"k{number}", create_revision=number) for number in numbers]
    deleted = tuple(Event(kind="delete", revision=count + 1, key=f"k{number}") for number in numbers[::2])
    first, later = ChangeSet(replies=replies[:-clients]), ChangeSet(replies=replies[-clients:])
    for number in range(clients):
        first.note_session_opened(b"s%d" % number, number)
    first.revisions, later.revisions = [(event,) for event in put], [deleted]
    database.set_trace_callback(told.append)
    rows.write_group(database, [first], number=1)
    rows.write_group(database, [later], number=2)
    assert len(told) < 100
    saved = rows.load_store(database)
    assert [entry.key for entry in saved.entries] == sorted(event.key for event in put[1::2])
    assert len(saved.history) == count + 1
    for session in saved.sessions:
        kept = [reply.request_id for reply in replies if reply.session_id == session.id][-3:]
        assert [request_id for request_id, _ in session.replies] == kept
