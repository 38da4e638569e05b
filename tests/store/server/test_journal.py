"""The journal: appended facts are read back, complete and in order."""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from store.disk.directory import DELETES_BYTES, FILE
from store.engine.changeset import ChangeSet, SavedStore
from store.errors import StoreUsageError
from store.messages import Entry, Failed, Written
from store.server.journal import Journal
from tests.support.facts import (
    A,
    B,
    Outcome,
    change,
    delete,
    forgotten,
    granted,
    kept,
    lease,
    opened,
    put,
    replied,
    saved_in,
    session,
)
from tests.support.journals import HeldBack


def test_a_new_directory_is_made_and_holds_an_empty_store_of_the_given_identity(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    assert kept(directory) == SavedStore(store_id="id")
    assert saved_in(directory).store_id == "id", "and keeps it, whatever a later server would have called it"


def test_keys_and_values_of_every_sort_come_back(tmp_path: Path) -> None:
    keys = ["k", "k\0", "k\0\0x", "\0", "ключ", "\U0001f600", "K", "a/b", "'; DROP TABLE entries; --", "x" * 2048]
    values = [b"", b"\0", bytes(range(256)), b"x" * 1_000_000]
    events = tuple(put(1, key, values[number % len(values)]) for number, key in enumerate(keys))
    saved = kept(tmp_path, [change(*events)])
    assert {entry.key: entry.value for entry in saved.entries} == {event.key: event.value for event in events}
    assert saved.history == (events,)


STEPS = [
    change(put(1, "k", b"1")),
    change(delete(2, "k")),
    change(put(3, "k", b"3"), put(3, "gone", b"")),
    change(put(4, "k", b"4", created=3)),
    change(delete(5, "gone")),
]
LAST_OF_STEPS = {
    "entries": (Entry(key="k", value=b"4", create_revision=3, mod_revision=4),),
    "revision": 5,
    "history": tuple(step.revisions[0] for step in STEPS),
}
GROUPS: dict[str, tuple[list[list[ChangeSet]], dict[str, object]]] = {
    "of changes in one group the last counts": ([STEPS], LAST_OF_STEPS),
    "and so it does of a group each": ([[step] for step in STEPS], LAST_OF_STEPS),
    "a lease that is granted and ends in one group is gone, and its number used up": (
        [
            [
                ChangeSet(**granted(lease(1), lease(2))),
                change(put(1, "k", lease=1)),
                change(delete(2, "k"), leases={1: None}),
            ],
            [ChangeSet(leases={2: None})],
        ],
        {"leases": (), "entries": (), "last_lease": 2},
    ),
    "history goes up to where it was compacted": (
        [
            [change(put(number, "k")) for number in range(1, 6)],
            [change(put(6, "k"), compacted=2), change(put(7, "k"), compacted=3)],
            [change(put(8, "k"), compacted=3)],
        ],
        {"compacted": 3, "revision": 8, "history": tuple((put(number, "k"),) for number in range(4, 9))},
    ),
    "a change that no history has room for is still made": (
        [[change(put(1, "k", b"large"), compacted=1)]],
        {"history": (), "revision": 1, "compacted": 1},
    ),
    "replies that were acknowledged are pruned": (
        [
            [opened(A, 1), opened(B, 2)],
            [replied(A, 1), replied(A, 2), replied(B, 1)],
            [replied(A, 3, acknowledged=1)],
            [replied(A, 4, acknowledged=1), replied(A, 5, acknowledged=4)],
        ],
        {"sessions": (session(A, 1, 5), session(B, 2, 1))},
    ),
    # A client put and hung up while the disk was busy. Its reply outlived its session, and the file was called damaged.
    "a session that ends in the group of its last reply takes that with it": (
        [[opened(A, 1)], [replied(A, 1), forgotten(A)]],
        {"sessions": (), "last_session": 1},
    ),
    "a session that ends and comes again in one group has only its new replies": (
        [[opened(A, 1), replied(A, 1)], [replied(A, 2), forgotten(A), opened(A, 2), replied(A, 9)]],
        {"sessions": (session(A, 2, 9),)},
    ),
    "a session that expired and came again in one step is a new one": (
        [[opened(A, 1), replied(A, 1)], [ChangeSet(sessions={A: 2}, last_session=2)]],
        {"sessions": (session(A, 2),)},
    ),
    "a session that came and went in one step leaves its number behind": (
        [[ChangeSet(sessions={A: None}, last_session=3)]],
        {"sessions": (), "last_session": 3},
    ),
}


@pytest.mark.parametrize("what", GROUPS)
def test_several_groups_are_read_back(tmp_path: Path, what: str) -> None:
    groups, expected = GROUPS[what]
    saved = kept(tmp_path, *groups)
    assert {name: getattr(saved, name) for name in expected} == expected


def test_a_disk_that_hangs_does_not_keep_a_server_from_leaving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = HeldBack(tmp_path, new_id="id")
    journal.load()
    Outcome().start(journal)
    journal.append(change(put(1, "k")))
    assert journal.begun.acquire(timeout=60)
    assert not journal.stop(within=0.01)
    journal.close(within=0.01)
    assert "cannot be written: " in caplog.text
    with pytest.raises(StoreUsageError, match="in use"):
        Journal(tmp_path, new_id="id")
    journal.may_commit.release()
    journal.close()
    assert saved_in(tmp_path).revision == 1


def begun(directory: Path) -> tuple[Journal, Outcome]:
    """Return a journal that has been read and is written to, and what its writer reports."""
    journal, outcome = Journal(directory, new_id="id"), Outcome()
    journal.load()
    outcome.start(journal)
    return journal, outcome


def fill(journal: Journal, pages: int = 0) -> None:
    """Let the file grow by so many pages and no more; all of the reserve is used."""
    assert journal._database is not None
    (count,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count={count + pages}")


def tried(journal: Journal) -> str:
    """Return which writes are possible after a failure."""
    if not journal.try_to_recover():
        return "nothing"
    return "everything" if journal.try_to_accept_writes() else "only deletes"


def empty_out(journal: Journal) -> None:
    assert journal._database is not None
    journal._database.execute("PRAGMA max_page_count=1000000")


def test_a_group_that_does_not_fit_is_rolled_back_whole_and_the_journal_goes_back_and_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, new_id="id")
    journal.load()
    journal._commit([opened(A, 1), change(put(1, "before"))])
    fill(journal, pages=3)
    outcome = Outcome()
    journal.append(change(put(2, "small")))
    journal.append(change(put(3, "large", bytes(1_000_000)), **granted(lease(1))))
    outcome.start(journal)
    assert "full" in outcome.wait_for_failure()
    assert outcome.durable == [1], "up to what does not fit"
    saved = journal.load()
    assert [entry.key for entry in saved.entries] == ["before", "small"]
    assert (saved.revision, saved.last_lease) == (2, 0)
    empty_out(journal)
    assert tried(journal) == "everything"
    outcome.start(journal)
    outcome.wait_for(journal.append(change(put(3, "after"))))
    journal.close()
    saved = saved_in(tmp_path)
    assert [entry.key for entry in saved.entries] == ["after", "before", "small"]
    assert (saved.revision, saved.sessions) == (3, (session(A, 1),))


def test_the_reserve_is_for_deletes_and_for_a_store_that_takes_only_deletes(tmp_path: Path) -> None:
    journal = Journal(tmp_path, new_id="id")
    groups = [[change(put(1, "a"))], [change(delete(1, "a"))], [change(delete(1, "a")), change(put(2, "a"))]]
    for only_deletes, may in ((False, [False, True, False]), (True, [True, True, True])):
        journal.only_deletes = only_deletes
        assert [journal._may_use_reserve(group) for group in groups] == may
    journal.close()


@pytest.mark.parametrize(
    ("free", "reserve", "grows", "rate"),
    [
        (DELETES_BYTES, 0, 0, DELETES_BYTES * 3 // 32),
        (0, DELETES_BYTES, 0, DELETES_BYTES * 3 // 32),
        (DELETES_BYTES, DELETES_BYTES, DELETES_BYTES, DELETES_BYTES * 3 // 32),
        (DELETES_BYTES // 2, 0, 0, 0),
    ],
)
def test_a_store_that_takes_only_deletes_keeps_most_room_for_them(
    free: int, reserve: int, grows: int, rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, new_id="id")
    monkeypatch.setattr("store.server.journal.free_bytes", lambda _: free)
    with monkeypatch.context() as patch:
        patch.setattr(journal._reserve, "bytes", reserve)
        patch.setattr(journal, "_grows", grows)
        assert journal.coordination_byte_rate() == rate
    journal.close()


def test_the_row_of_a_probe_is_no_part_of_the_store(tmp_path: Path) -> None:
    journal = Journal(tmp_path, new_id="id")
    before = journal.load()
    assert journal.try_to_recover()
    assert journal._database is not None
    journal._database.execute("INSERT INTO meta VALUES ('probe', zeroblob(9), 0)")  # killed before it was deleted
    assert journal.load() == before
    assert journal.try_to_recover()
    journal.close()


def test_a_writer_that_fails_for_any_other_reason_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, outcome = begun(tmp_path)
    journal.append(replied(A, 2**63))
    assert "too large" in outcome.wait_for_failure()
    assert "can never be written" in caplog.text
    assert journal.try_to_recover()
    outcome.start(journal)
    outcome.wait_for(journal.append(change(put(1, "k"))))
    journal.close()


def test_an_error_of_which_sqlite_says_nothing_leaves_the_group_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no error code. The writer ended silently at it, and all clients waited."""

    def fail(*_: object) -> None:
        raise sqlite3.ProgrammingError("made by Python")

    monkeypatch.setattr(Journal, "_commit", fail)
    journal, outcome = begun(tmp_path)
    journal.append(change(put(1, "k")))
    assert outcome.wait_for_failure() == "made by Python"
    assert journal.in_doubt
    journal.close()


def test_a_write_that_sqlite_always_refuses_fails_for_its_sender_only(tmp_path: Path) -> None:
    """Regression: it was read back and sent again for ever, and every connection was dropped each time."""
    journal = Journal(tmp_path, new_id="id")
    journal.load()
    journal._commit([opened(A, 1), opened(B, 2)])
    assert journal._database is not None
    journal._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
    outcome = Outcome()
    journal.append(ChangeSet(revisions=[(put(1, "before"),)], replies=replied(A, 1).replies))
    large = put(2, "large", bytes(200_000))
    journal.append(ChangeSet(revisions=[(large,)], replies=replied(B, 1).replies))
    journal.append(change(put(3, "rests upon it")))
    outcome.start(journal)
    assert "too big" in outcome.wait_for_failure()
    assert journal.answered
    assert not journal.in_doubt
    assert outcome.durable == [1]
    # Before its server is notified of the failure: the group was written after all, and the store could not be read any
    # more.
    journal.append(change(put(4, "rests upon it, too")))
    saved = journal.load()
    assert [entry.key for entry in saved.entries] == ["before"]
    (first, second) = sorted(saved.sessions, key=lambda session: session.number)
    assert first.replies == ((1, Written(revision=1)),)
    ((request_id, answer),) = second.replies
    assert request_id == 1
    assert isinstance(answer, Failed)
    assert "nothing was done: string or blob too big" in answer.message
    journal.start(on_durable=print, on_failure=print)
    journal.append(change(put(2, "goes on")))
    journal.close()
    assert saved_in(tmp_path).revision == 2


def test_a_log_that_another_program_keeps_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """155 MB of it for contents of 500 kB were not reported."""
    journal, outcome = begun(tmp_path)
    outcome.wait_for(journal.append(change(put(1, "large", bytes(12_000_000)))))
    outcome.wait_for(journal.append(change(put(2, "k"))))
    assert "another program" not in caplog.text, "the log of one large group is long, too"
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        for revision in range(3, 43):
            outcome.wait_for(journal.append(change(put(revision, "k", bytes(400_000)))))
    journal.close()
    (told,) = (record.getMessage() for record in caplog.records if "another program" in record.getMessage())
    assert f"{FILE}-wal is " in told
    assert journal.log_bytes > 16_000_000


def test_a_log_that_is_long_because_each_group_is_large_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Appends to values of 8 MB were said to be the fault of a program that reads the database."""
    journal, outcome = begun(tmp_path)
    for revision in range(1, 6):
        journal.append(change(put(revision, "large", bytes(9_000_000 + 10_000 * revision)), compacted=revision))
        outcome.wait_for(revision)
    assert journal.log_bytes > 18_000_000
    journal.close()
    assert "another program" not in caplog.text


def test_an_idle_journal_gives_back_unused_space_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """320 MiB that were put and deleted left files of 700 MB, also after a restart."""
    monkeypatch.setattr("store.server.journal.IDLE_SECONDS", 0.05)
    journal, outcome = begun(tmp_path)
    for revision in range(1, 21):
        journal.append(change(put(revision, f"k{revision}", bytes(1_000_000)), compacted=revision))
    outcome.wait_for(20)
    assert (tmp_path / FILE).stat().st_size + (tmp_path / f"{FILE}-wal").stat().st_size > 20_000_000
    for revision in range(21, 41):
        journal.append(change(delete(revision, f"k{revision - 20}"), compacted=revision))
    outcome.wait_for(40)
    journal.stop()  # it may be about to give it back: it has the time to begin anew
    journal.start(on_durable=print, on_failure=print)
    log = tmp_path / f"{FILE}-wal"
    wait_until(lambda: (tmp_path / FILE).stat().st_size < 200_000 and log.stat().st_size < 5_000_000)
    journal.close()
    assert saved_in(tmp_path).revision == 40


def test_an_idle_journal_does_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is given back once after a write, and not repeatedly."""
    tidied: list[float] = []
    tidy_up = Journal._shrink_files

    def noted(self: Journal) -> None:
        tidied.append(time.monotonic())
        tidy_up(self)

    monkeypatch.setattr(Journal, "_shrink_files", noted)
    monkeypatch.setattr("store.server.journal.IDLE_SECONDS", 0.01)
    with contextlib.closing(Journal(tmp_path, new_id="id")) as journal:
        journal.load()
        journal.start(on_durable=print, on_failure=print)
        while not tidied or not cast("Any", journal._wake)._waiters:
            assert len(tidied) < 100
            time.sleep(0.001)


def test_a_journal_short_of_room_goes_on_emptying_its_log_without_further_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one failure it waited for the next write, while the store refused each write for lack of space."""
    tried = threading.Semaphore(0)
    tidy_up = Journal._shrink_files

    def counted(self: Journal) -> None:
        tidy_up(self)
        tried.release()

    monkeypatch.setattr(Journal, "_shrink_files", counted)
    monkeypatch.setattr("store.server.journal.IDLE_SECONDS", 0.01)
    with contextlib.closing(Journal(tmp_path, new_id="id")) as journal:
        journal.load()
        statements: list[str] = []
        assert journal._database is not None
        journal._database.set_trace_callback(statements.append)
        journal.short_of_room = True
        outcome = Outcome()
        outcome.start(journal)
        outcome.wait_for(journal.append(change(put(1, "k", bytes(3_000_000)))))
        with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM entries").fetchone()
            outcome.wait_for(journal.append(change(delete(2, "k"), compacted=2)))
            for _ in range(2):
                assert tried.acquire(timeout=10)  # the log cannot be emptied beside a reader
        wait_until(
            lambda: (tmp_path / f"{FILE}-wal").stat().st_size == 0 and (tmp_path / FILE).stat().st_size < 200_000
        )
    assert "VACUUM" not in statements, "it writes the whole file once more, first into the log"


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
