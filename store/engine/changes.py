"""Pure: the change being made: keys written and deleted, leases made and ended, all at the next revision.

What is asked has been checked by then (`admission`), so that nothing here can fail half way. `close` ends the revision
and gives what has changed, which the engine announces: of a key that was written, the entry that is there now, of which
an event is made only if anybody is told (`events_of`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from store.engine.changeset import SavedLease
from store.messages import Add, Append, CompareAndSet, Delete, Entry, Event, Get, Grant, Operation, Put

if TYPE_CHECKING:
    from store.engine.changeset import Facts
    from store.engine.keyspace import Change
    from store.engine.leases import LeaseRecord
    from store.engine.state import State, Write
    from store.messages import Cause

__all__ = ["Changes"]


class Changes:
    """What changes keys and leases.

    Attributes:
        facts: What a journal must be told; None if nobody keeps it.
        made: What has changed since the last revision, in order.
    """

    def __init__(self, state: State, *, facts: Facts | None) -> None:
        self._keys, self._leases = state.keys, state.leases
        self._snapshots, self._postponed, self._past = state.snapshots, state.postponed, state.past
        self.facts = facts
        self.made: list[Change] = []

    @property
    def revision(self) -> int:
        """The revision that the store will be at when this change is closed."""
        return self._keys.revision + bool(self.made)

    def close(self) -> tuple[Change, ...]:
        """End the revision being made, in which something has changed; its changes."""
        made = tuple(self.made)
        self.made.clear()
        self._keys.revision += 1
        return made

    def operate(self, operation: Operation, value: bytes | None) -> int | bool | Entry | None:
        """Do one admitted operation of a transaction, which is to leave this value, if any; its result."""
        if isinstance(operation, Get):
            return self._keys.get(operation.key)
        if isinstance(operation, Delete):
            return self.erase(operation.key)
        if value is None:  # a `Create` of what is there
            return self._keys.get(operation.key)
        entry = self.write(operation, value)
        if isinstance(operation, Add):
            return int(value)
        return len(value) if isinstance(operation, Append) else entry.mod_revision

    def write(self, asked: Write, value: bytes) -> Entry:
        """Carry out an admitted write, which is to leave this value."""
        key, lease, revision = asked.key, asked.lease, self._keys.revision + 1
        before = self._keys.get(key)
        if isinstance(asked, Put) or isinstance(asked, CompareAndSet):  # noqa: SIM101 - a union takes twice as long
            if asked.ttl is not None:
                lease = self.grant(Grant(ttl=asked.ttl), anonymous=True).id
        elif before is not None:
            lease = before.lease  # an `Add` or an `Append` leaves it where it is
        if self._snapshots.unread or self._postponed.heaps:
            self._changing(key, before, index_changes=before is None)
        if before is None:
            created = revision
        else:
            created = before.create_revision
            if before.lease != lease:
                self._detach(key, before.lease)
        entry = Entry(key=key, value=value, create_revision=created, mod_revision=revision, lease=lease)
        self._keys.put(entry, before)
        if lease is not None:
            record = self._leases.with_keys(lease)  # an `Add` may meet a key of a lease that is ending
            assert record is not None, "a put on a lease that is gone was refused"
            record.keys[key] = None
        self.made.append(entry)
        return entry

    def erase(self, key: str, *, cause: Cause = "") -> bool:
        """Delete a key, if it is there; `cause` is how its lease ended, if that is why."""
        entry = self._keys.get(key)
        if entry is None:
            return False
        if self._snapshots.unread or self._postponed.heaps:
            self._changing(key, entry, index_changes=True)
        self._keys.pop(key)
        if entry.lease is not None:
            self._detach(key, entry.lease)
        self.made.append(Event(kind="delete", revision=self._keys.revision + 1, key=key, cause=cause))
        return True

    def _changing(self, key: str, before: Entry | None, *, index_changes: bool) -> None:
        """Keep what a key holds for readers of earlier revisions."""
        unread = self._snapshots.unread
        is_read = unread and self._snapshots.changing(key, before, index_changes=index_changes)
        if is_read or self._postponed.heaps:
            self._past.note(key, before, self._keys.revision + 1)

    def _detach(self, key: str, lease_id: int | None) -> None:
        lease = None if lease_id is None else self._leases.with_keys(lease_id)
        if lease is not None:
            lease.keys.pop(key, None)
            if lease.anonymous and not lease.keys:
                self._forget_lease(lease)

    # -------------------------------------------------------------------------------------- leases

    def grant(self, asked: Grant, *, peer: int | None = None, anonymous: bool = False) -> LeaseRecord:
        """Make a lease, of the id that is asked for, if one is."""
        terms = SavedLease(
            id=self._leases.next_id() if asked.id is None else asked.id,
            ttl=asked.ttl,
            disconnect_ttl=asked.disconnect_ttl,
            gone_ttl=asked.gone_ttl,
            anonymous=anonymous,
        )
        if self.facts is not None:
            self.facts.leases[terms.id] = terms
            if asked.id is None:
                self.facts.last_lease = terms.id
        return self._leases.grant(terms, peer=peer)

    def end_lease(self, lease: LeaseRecord, *, most: int, cause: Cause = "") -> int:
        """End a lease, and delete `most` of its keys; how many went. The lease is due until the last has gone.

        `cause` is how it ended, unless it was revoked.
        """
        going = sorted(islice(lease.keys, most))
        for key in going:
            self.erase(key, cause=cause)
        if lease.keys and not lease.ending:
            self._leases.begin_to_end(lease)
            if self.facts is not None:
                self.facts.leases[lease.id] = SavedLease(id=lease.id, ttl=0.0)
        elif not lease.keys and self._leases.with_keys(lease.id) is not None:  # else it was an anonymous one
            self._forget_lease(lease)
        return len(going)

    def _forget_lease(self, lease: LeaseRecord) -> None:
        self._leases.end(lease)
        if self.facts is not None:
            self.facts.leases[lease.id] = None
