"""Short constructors for the input of a journal, and readers of its output."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store import Event
from store.engine.changeset import ChangeSet, KeptReply, SavedLease, SavedSession, SavedStore
from store.messages import Written
from store.server.journal import Journal

__all__ = [
    "A",
    "B",
    "Outcome",
    "change",
    "delete",
    "forgotten",
    "granted",
    "kept",
    "lease",
    "opened",
    "put",
    "replied",
    "saved_in",
    "session",
    "writing",
]

A, B = b"a" * 16, b"b" * 16


class Outcome:
    """Collects the reports of the writer, so that a test can wait for them."""

    def __init__(self) -> None:
        self.durable: list[int] = []
        self.failures: list[str] = []
        self._changed = threading.Condition()

    def start(self, journal: Journal) -> None:
        journal.start(on_durable=self._on_durable, on_failure=self._on_failure)

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.durable and self.durable[-1] >= number, timeout=60)

    def wait_for_failure(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failures, timeout=60)
        return self.failures[-1]

    def _on_durable(self, number: int) -> None:
        with self._changed:
            self.durable.append(number)
            self._changed.notify_all()

    def _on_failure(self, reason: str) -> None:
        with self._changed:
            self.failures.append(reason)
            self._changed.notify_all()


@contextlib.contextmanager
def writing(directory: Path, *, new_id: str = "id") -> Iterator[Journal]:
    """A journal that has been read and is written to."""
    journal = Journal(directory, new_id=new_id)
    try:
        journal.load()
        Outcome().start(journal)
        yield journal
    finally:
        journal.close()


def saved_in(directory: Path) -> SavedStore:
    journal = Journal(directory, new_id="another")
    try:
        return journal.load()
    finally:
        journal.close()


def kept(directory: Path, *groups: list[ChangeSet]) -> SavedStore:
    """Write each group in a transaction of its own, read the journal again, and return its contents."""
    journal = Journal(directory, new_id="id")
    journal.load()
    for group in groups:
        journal._commit(group)
    journal.close()
    return saved_in(directory)


def put(revision: int, key: str, value: bytes = b"", *, created: int | None = None, lease: int | None = None) -> Event:
    return Event(kind="put", revision=revision, key=key, value=value, create_revision=created or revision, lease=lease)


def delete(revision: int, key: str) -> Event:
    return Event(kind="delete", revision=revision, key=key)


def change(*events: Event, **more: Any) -> ChangeSet:
    return ChangeSet(revisions=[events], **more)


def lease(id: int, *, ttl: float = 10.0, disconnect_ttl: float | None = None, anonymous: bool = False) -> SavedLease:
    return SavedLease(id=id, ttl=ttl, disconnect_ttl=disconnect_ttl, anonymous=anonymous)


def granted(*leases: SavedLease) -> dict[str, Any]:
    """Return the facts of newly granted leases."""
    return {"leases": {each.id: each for each in leases}, "last_lease": max(each.id for each in leases)}


def opened(session_id: bytes, number: int) -> ChangeSet:
    facts = ChangeSet()
    facts.note_session_opened(session_id, number)
    return facts


def forgotten(session_id: bytes) -> ChangeSet:
    facts = ChangeSet()
    facts.note_session_ended(session_id)
    return facts


def replied(session_id: bytes, request_id: int, *, acknowledged: int = 0) -> ChangeSet:
    reply = KeptReply(
        session_id=session_id, acknowledged=acknowledged, request_id=request_id, response=Written(revision=request_id)
    )
    return ChangeSet(replies=[reply])


def session(session_id: bytes, number: int, *request_ids: int) -> SavedSession:
    return SavedSession(id=session_id, number=number, replies=tuple((id, Written(revision=id)) for id in request_ids))
