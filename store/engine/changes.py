"""Pure: the change being made: keys written and deleted, leases made and ended, all at the next revision.

What is asked has been checked by then (`admission`), so that nothing here can fail half way. `close` ends the revision
and gives what has changed, which the engine announces: of a key that was written, the entry that is there now, of which
an event is made only if anybody is told (`events_of`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

from store.engine.admission import sum_of
from store.engine.changeset import SavedLease
from store.engine.keyspace import appended
from store.messages import Add, Append, CompareAndSet, Create, Delete, Entry, Event, Get, Operation, Put

if TYPE_CHECKING:
    from store.engine.changeset import Facts
    from store.engine.keyspace import Change
    from store.engine.leases import LeaseRecord
    from store.engine.state import State
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
        self._snapshots, self._postponed = state.snapshots, state.postponed
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

    def operate(self, operation: Operation) -> int | bool | Entry | None:
        """Do one checked operation of a transaction; its result."""
        match operation:
            case Put():
                return self.put(operation)
            case Get():
                return self._keys.get(operation.key)
            case Delete():
                return self.erase(operation.key)
            case Add():
                return self.add(operation)[0]
            case Append():
                return self.append(operation)[0]
            case Create():
                there = self._keys.get(operation.key)
                return self._write(operation.key, operation.value, operation.lease) if there is None else there

    def put(self, request: Put | CompareAndSet) -> int:
        """Write a checked put, and move the key to the lease it asks for; the revision."""
        lease = request.lease
        if request.ttl is not None:
            lease = self.grant(request.ttl, anonymous=True).id
        return self._write(request.key, request.value, lease)

    def add(self, request: Add) -> tuple[int, int]:
        """Write a sum; the sum and the revision."""
        value = sum_of(request, self._keys.get(request.key))
        return int(value), self.rewrite(request, value)

    def append(self, request: Append) -> tuple[int, int]:
        """Write a longer value; its length and the revision."""
        entry = self._keys.get(request.key)
        value = cast("bytes", appended(entry.value if entry else b"", request.value))  # what stands for bytes here
        return len(value), self.rewrite(request, value)

    def rewrite(self, request: Add | Append, value: bytes) -> int:
        """Write a new value and leave the key on the lease it is on; a new key goes on the lease that was asked for."""
        entry = self._keys.get(request.key)
        return self._write(request.key, value, entry.lease if entry else request.lease)

    def _write(self, key: str, value: bytes, lease: int | None) -> int:
        revision = self._keys.revision + 1
        before = self._keys.get(key)
        if self._snapshots or self._postponed:
            self._changing(key, before)
        if before is None:
            created = revision
        else:
            created = before.create_revision
            if before.lease != lease:
                self._detach(key, before.lease)
        entry = Entry(key=key, value=value, create_revision=created, mod_revision=revision, lease=lease)
        self._keys.put(entry, before)
        if lease is not None:
            record = self._leases.get(lease)
            assert record is not None, "a put on a lease that is gone was refused"
            record.keys[key] = None
        self.made.append(entry)
        return revision

    def erase(self, key: str, *, cause: Cause = "") -> bool:
        """Delete a key, if it is there; `cause` is how its lease ended, if that is why."""
        entry = self._keys.get(key)
        if entry is None:
            return False
        if self._snapshots or self._postponed:
            self._changing(key, entry)
        self._keys.pop(key)
        if entry.lease is not None:
            self._detach(key, entry.lease)
        self.made.append(Event(kind="delete", revision=self._keys.revision + 1, key=key, cause=cause))
        return True

    def _changing(self, key: str, before: Entry | None) -> None:
        """Keep what a key holds for those who are to find it as it was."""
        if self._snapshots:
            self._snapshots.changing(key, before)
        if self._postponed:
            self._postponed.note(key, before, self._keys.revision + 1)

    def _detach(self, key: str, lease_id: int | None) -> None:
        lease = None if lease_id is None else self._leases.with_keys(lease_id)
        if lease is not None:
            lease.keys.pop(key, None)
            if lease.anonymous and not lease.keys:
                self._forget_lease(lease)

    # -------------------------------------------------------------------------------------- leases

    def grant(
        self,
        ttl: float,
        *,
        disconnect_ttl: float | None = None,
        gone_ttl: float | None = None,
        peer: int | None = None,
        anonymous: bool = False,
        id: int | None = None,
    ) -> LeaseRecord:
        """Make a lease, of this id if it is given."""
        lease = self._leases.grant(
            ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl, peer=peer, anonymous=anonymous, id=id
        )
        if self.facts is not None:
            self.facts.leases[lease.id] = SavedLease(
                id=lease.id, ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl, anonymous=anonymous
            )
            if id is None:
                self.facts.last_lease = lease.id
        return lease

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
