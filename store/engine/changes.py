"""The change in progress: keys written and deleted, leases granted and ended, all at the next revision.

`StoreState` checks a request before `OpenRevision` carries it out, so no change fails half way.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from store.engine.changeset import SavedLease
from store.messages import Add, Append, CompareAndSet, Delete, Entry, Event, Get, Grant, Operation, Put

if TYPE_CHECKING:
    from store.engine.changeset import ChangeSet
    from store.engine.keyspace import Change
    from store.engine.leases import LeaseRecord
    from store.engine.state import StoreState
    from store.messages import Cause, Write


class OpenRevision:
    """The revision in progress: the changes `made` so far, and `facts` for the journal (None without a journal)."""

    def __init__(self, state: StoreState, *, facts: ChangeSet | None) -> None:
        self._keys, self._leases = state.keys, state.leases
        self._snapshots, self._postponed, self._past = state.snapshots, state.postponed, state.past
        self.facts = facts
        self.made: list[Change] = []

    @property
    def revision(self) -> int:
        """The store's revision after the changes `made` so far."""
        return self._keys.revision + bool(self.made)

    def finish(self) -> tuple[Change, ...]:
        """End the revision in progress; return its changes."""
        made = tuple(self.made)
        self.made.clear()
        self._keys.revision += 1
        return made

    def execute_operation(self, operation: Operation, value: bytes | None) -> int | bool | Entry | None:
        """Carry out a checked operation of a transaction; `value` is the key's new value, if any."""
        if isinstance(operation, Get):
            return self._keys.get(operation.key)
        if isinstance(operation, Delete):
            return self.erase(operation.key)
        if value is None:  # a `Create` of an existing key writes nothing
            return self._keys.get(operation.key)
        entry = self.write(operation, value)
        if isinstance(operation, Add):
            return int(value)
        return len(value) if isinstance(operation, Append) else entry.mod_revision

    def write(self, asked: Write, value: bytes) -> Entry:
        """Carry out a checked write; `value` is the key's new value."""
        key, lease, revision = asked.key, asked.lease, self._keys.revision + 1
        before = self._keys.get(key)
        if isinstance(asked, Put) or isinstance(asked, CompareAndSet):  # noqa: SIM101 - a union takes twice as long
            if asked.ttl is not None:
                lease = self.grant(Grant(ttl=asked.ttl), anonymous=True).id
        elif before is not None:
            lease = before.lease  # `Add` and `Append` keep the key's lease
        if self._snapshots.unread or self._postponed.heaps:
            self._keep_old_entry(key, before, index_changes=before is None)
        if before is None:
            created = revision
        else:
            created = before.create_revision
            if before.lease != lease:
                self._detach_from_lease(key, before.lease)
        entry = Entry(key=key, value=value, create_revision=created, mod_revision=revision, lease=lease)
        self._keys.put(entry, before)
        if lease is not None:
            record = self._leases.get_even_if_ending(lease)  # `Add` and `Append` may keep an ending lease
            assert record is not None, "a put on a lease that is gone was refused"
            record.keys[key] = None
        self.made.append(entry)
        return entry

    def erase(self, key: str, *, cause: Cause = "") -> bool:
        """Delete a key; return False if it does not exist. `cause`: why its lease expired, if that deletes it."""
        entry = self._keys.get(key)
        if entry is None:
            return False
        if self._snapshots.unread or self._postponed.heaps:
            self._keep_old_entry(key, entry, index_changes=True)
        self._keys.remove(key)
        if entry.lease is not None:
            self._detach_from_lease(key, entry.lease)
        self.made.append(Event(kind="delete", revision=self._keys.revision + 1, key=key, cause=cause))
        return True

    def _keep_old_entry(self, key: str, before: Entry | None, *, index_changes: bool) -> None:
        unread = self._snapshots.unread
        is_read = unread and self._snapshots.preserve_for_snapshots(key, before, index_changes=index_changes)
        if is_read or self._postponed.heaps:
            self._past.keep(key, before, self._keys.revision + 1)

    def _detach_from_lease(self, key: str, lease_id: int | None) -> None:
        lease = None if lease_id is None else self._leases.get_even_if_ending(lease_id)
        if lease is not None:
            lease.keys.pop(key, None)
            if lease.terms.anonymous:  # its only key
                self._remove_empty_lease(lease)

    def grant(self, asked: Grant, *, peer: int | None = None, anonymous: bool = False) -> LeaseRecord:
        """Grant a lease."""
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
        """End a lease; delete up to `most` of its keys, and return their number. Later ticks delete the others."""
        going = sorted(islice(lease.keys, most))
        for key in going:
            self.erase(key, cause=cause)
        if lease.keys and not lease.ending:
            self._leases.mark_ending(lease, cause)
            if self.facts is not None:
                self.facts.leases[lease.id] = SavedLease(id=lease.id, ttl=0.0)
        elif not lease.keys and self._leases.get_even_if_ending(lease.id) is not None:  # unless `erase` has ended it
            self._remove_empty_lease(lease)
        return len(going)

    def _remove_empty_lease(self, lease: LeaseRecord) -> None:
        self._leases.remove_empty_lease(lease)
        if self.facts is not None:
            self.facts.leases[lease.id] = None
