"""The simulated disk compared with a real one: the data that the same facts leave, and the data that a crash loses."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.testing.disk import SimulatedJournal
from rdzv.testing.timeline import SimulatedTime
from store.engine.changeset import ChangeSet, KeptReply, SavedLease
from store.messages import Event, Written
from store.server.journal import Journal
from tests.store.server.test_journal import tried
from tests.support.faults import FaultyDisk, FaultyJournal

SESSION = b"s" * 16


def put(revision: int, key: str, *, lease: int | None = None) -> tuple[Event, ...]:
    event = Event(kind="put", revision=revision, key=key, value=b"v", create_revision=revision, lease=lease)
    return (event,)


def story() -> list[ChangeSet]:
    """Return facts of every kind."""
    opened = ChangeSet(leases={1: SavedLease(id=1, ttl=3.0, disconnect_ttl=0.5)})
    opened.note_session_opened(SESSION, 1)
    replies = [
        KeptReply(session_id=SESSION, acknowledged=number - 1, request_id=number, response=Written(revision=number))
        for number in (1, 2, 3)
    ]
    gone = (Event(kind="delete", revision=3, key="a"),)
    return [
        opened,
        ChangeSet(revisions=[put(1, "a", lease=1)], replies=replies[:1]),
        ChangeSet(revisions=[put(2, "b")], replies=replies[1:2]),
        ChangeSet(revisions=[gone], leases={1: None}, replies=replies[2:]),
        ChangeSet(revisions=[put(4, "c")], compacted=2),
    ]


class Machine:
    """A process with a journal on a simulated disk."""

    def __init__(self) -> None:
        self.timeline = SimulatedTime()
        self.written: list[ChangeSet] = []
        self.disk = FaultyDisk(
            random.Random(0), store_id="one", on_commit=self.written.extend, now=lambda: self.timeline.now
        )
        self.durable: list[int] = []
        self.failures: list[str] = []
        self.journal = self.open_journal()

    def open_journal(self) -> SimulatedJournal:
        journal = self.disk.open_journal(self.timeline.new_host("store"), kind=FaultyJournal)
        journal.load()
        journal.start(on_durable=self.durable.append, on_failure=self.failures.append)
        return journal


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.disk.close()


def test_the_same_facts_leave_the_same_data_on_a_real_and_a_simulated_disk(tmp_path: Path, machine: Machine) -> None:
    real = Journal(tmp_path, new_id="one")
    real.load()
    real.start(on_durable=lambda _: None, on_failure=lambda _: None)
    for facts in story():
        real.append(facts)
        machine.journal.append(facts)
    machine.timeline.run_until_time(1001.0)
    real.close()
    reopened = Journal(tmp_path, new_id="other")
    assert machine.journal.load() == reopened.load()
    assert machine.durable[-1] == len(story())
    reopened.close()


def test_a_crash_loses_exactly_the_uncommitted_facts(machine: Machine) -> None:
    machine.journal.append(story()[0])
    machine.timeline.run_until_time(1001.0)
    machine.disk.stalled_until = 1010.0
    machine.journal.append(ChangeSet(revisions=[put(1, "in hand")]))
    machine.journal.append(ChangeSet(revisions=[put(2, "pending")]))
    machine.disk.crash_journal()
    saved = machine.open_journal().load()
    assert saved.revision == len(machine.written) - 1, "the group in hand got there, or it did not; the other did not"
    assert machine.durable == [1]


def test_a_full_disk_refuses_writes_until_there_is_space(machine: Machine) -> None:
    machine.disk.fill()
    for revision in range(1, 200):
        machine.journal.append(ChangeSet(revisions=[put(revision, f"key {revision}" * 50)]))
    machine.timeline.run_until_time(1001.0)
    assert machine.failures == ["database or disk is full"]
    assert tried(machine.journal) == "only deletes"
    machine.disk.make_room()
    assert tried(machine.journal) == "everything"
    machine.disk.fail_next = 1
    machine.journal.start(on_durable=machine.durable.append, on_failure=machine.failures.append)
    machine.journal.append(ChangeSet(revisions=[put(machine.journal.load().revision + 1, "a")]))
    machine.timeline.run_until_time(1002.0)
    assert machine.failures == ["database or disk is full", "disk I/O error"]
