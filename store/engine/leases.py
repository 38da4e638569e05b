"""The leases, their deadlines, and their keys (promises S5, R20).

Deadlines are in *served time*. Served time follows the server's monotonic clock, but advances by at most `STALL_AFTER`
between two readings: clients cannot renew leases while the server is stopped, swapped out or busy. Each lease is in a
*slot* of served time, about a millisecond long. `expired` checks a lease once its slot has come.

The *keeper* of a lease is the connection that last granted or renewed it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from store.engine.processes import DisconnectKind, Processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from store.engine.changeset import SavedLease
    from store.engine.processes import ClientProcess
    from store.messages import Cause

STALL_AFTER = 0.3  # served time advances by at most these seconds per reading, due every 0.1 s
SOONEST = 1e-6  # seconds; adding a shorter wait might leave a clock's time unchanged
LOOK_AGAIN_AFTER = 0.1  # seconds until an expired lease is checked again if its keeper has unread requests
LOOKED_AT_ONCE = 4096  # leases that `expired` looks at in one call: a few milliseconds
SHORTENED_AT_ONCE = 512  # leases that get an earlier deadline in one step: 0.5 ms
SLOTS_A_SECOND = 1024  # a power of two, so that a time in slots is exact
LEASE_OVERHEAD = 1024  # bytes counted per lease
UNTIDY = 64  # the heap may have this many more empty slots than used ones


@dataclass(slots=True, kw_only=True)
class LeaseRecord:
    """One lease, with deadlines in served time."""

    id: int
    terms: SavedLease
    lapses_at: float
    slot: int = -1  # -1: in no slot
    process: ClientProcess | None = None  # the last keeper's process, if `gone_ttl` is set
    keeper: int | None = None
    disconnected: bool = False  # `lapses_at` follows from `disconnect_ttl`
    ending: bool = False  # ended, but ticks still delete its keys
    ended_by: Cause = ""  # while `ending`: why the lease expired; "" after revoke or restart
    keys: dict[str, None] = field(default_factory=dict)
    note: bytes = b""  # the last note of a keep-alive; never saved to disk
    noted_at: float = 0.0  # when the note was set, on the server's clock

    @property
    def dead_process_deadline(self) -> float:
        """The deadline by `gone_ttl` if the keeper's process is dead; else infinity."""
        if self.process is None or self.process.died_at is None or self.terms.gone_ttl is None:
            return math.inf
        return self.process.died_at + self.terms.gone_ttl

    @property
    def ends_at(self) -> float:
        """The earlier of `lapses_at` and `dead_process_deadline`."""
        return min(self.lapses_at, self.dead_process_deadline)

    @property
    def cause(self) -> Cause:
        """The reason why the lease expires, or expired."""
        if self.ending:
            return self.ended_by
        if self.dead_process_deadline <= self.lapses_at:
            return "gone"
        return "disconnected" if self.disconnected else "silent"


class Leases:
    """All leases of a store, the bytes of leases and notes, and the served time."""

    def __init__(self) -> None:
        self.bytes: int = 0
        self._leases: dict[int, LeaseRecord] = {}
        self.processes: Processes = Processes()
        self._kept_by: dict[int, set[int]] = {}
        self._slots: dict[int, set[int]] = {}
        self._order: list[int] = []  # a heap of slot numbers; some slots may be empty
        self._last_id = 0
        self._served = 0.0
        self._looked_at = math.inf  # infinity, so that the first `advance_clock` adds no time

    def __len__(self) -> int:
        return len(self._leases)

    def restore(self, saved: Iterable[SavedLease], *, last: int) -> None:
        """Restore saved leases with their full TTL; the next keep-alive sets the keeper (S5, R20)."""
        self._last_id = last
        for one in saved:
            self.grant(one, peer=None).ending = not one.ttl

    def advance_clock(self, now: float) -> None:
        """Advance served time by the time since the last call, but at most by `STALL_AFTER`."""
        passed = now - self._looked_at
        if passed > 0:
            self._served += passed if passed < STALL_AFTER else STALL_AFTER
        self._looked_at = now

    def get_if_live(self, lease: int) -> LeaseRecord | None:
        """Return the lease of this id; None if it is missing or ending."""
        found = self._leases.get(lease)
        return None if found is None or found.ending else found

    def get_even_if_ending(self, lease: int) -> LeaseRecord | None:
        """Return the lease of this id, even if ending, or None."""
        return self._leases.get(lease)

    def next_id(self) -> int:
        """Return an unused id."""
        self._last_id += 1
        return self._last_id

    def grant(self, terms: SavedLease, *, peer: int | None) -> LeaseRecord:
        """Grant a lease; its keeper is `peer`, if any."""
        lease = LeaseRecord(id=terms.id, terms=terms, lapses_at=self._served + terms.ttl)
        self._leases[lease.id] = lease
        self.bytes += LEASE_OVERHEAD
        self._schedule(lease, _expiry_slot(lease.lapses_at))
        self._set_keeper(lease, peer)
        return lease

    def keep_alive(self, lease: LeaseRecord, *, peer: int) -> None:
        """Renew a lease; its keeper is now `peer`."""
        lease.lapses_at = self._served + lease.terms.ttl
        lease.disconnected = False
        self._set_keeper(lease, peer)
        self._schedule(lease, _expiry_slot(lease.ends_at))

    def mark_ending(self, lease: LeaseRecord, cause: Cause) -> None:
        """Mark a lease as ending: ticks delete its keys, and then the lease."""
        lease.ending, lease.ended_by = True, cause
        lease.lapses_at = self._served
        self.make_due_again(lease)
        self._detach_keeper(lease)

    def remove_empty_lease(self, lease: LeaseRecord) -> None:
        """Remove a lease that has no keys left."""
        del self._leases[lease.id]
        self.bytes -= LEASE_OVERHEAD + len(lease.note)
        self._unschedule(lease)
        self._detach_keeper(lease)

    def _detach_keeper(self, lease: LeaseRecord) -> None:
        self._set_keeper(lease, None)
        self.processes.note_lease_released(lease.id)

    def shorten_after_close(self, peer: int, how: DisconnectKind) -> Iterator[None]:
        """Set earlier deadlines, in steps, for the leases of a closed connection, and of its process if it died."""
        return self._shorten_leases(peer, self.processes.note_disconnect(peer, how, now=self._served), self._served)

    def _shorten_leases(self, peer: int, dead: ClientProcess | None, closed_at: float) -> Iterator[None]:
        kept = self._kept_by.get(peer, set())  # `kept` loses each lease that another peer renews between steps
        while kept:
            for _ in range(min(len(kept), SHORTENED_AT_ONCE)):
                lease = self._leases[kept.pop()]
                lease.keeper = None
                if lease.terms.disconnect_ttl is not None:
                    sooner = closed_at + lease.terms.disconnect_ttl
                    if sooner < lease.lapses_at:
                        lease.lapses_at, lease.disconnected = sooner, True
                        self._schedule(lease, _expiry_slot(sooner))
            if kept:
                yield
        self._kept_by.pop(peer, None)
        if dead is not None:
            of_the_dead = iter(tuple(dead.leases))
            while dead.died_at == closed_at and (some := [*islice(of_the_dead, SHORTENED_AT_ONCE)]):
                for lease in filter(None, map(self._leases.get, some)):
                    if _expiry_slot(lease.ends_at) < lease.slot:
                        self._schedule(lease, _expiry_slot(lease.ends_at))
                yield

    def set_note(self, lease: LeaseRecord, note: bytes) -> None:
        """Replace the note of a lease."""
        self.bytes += len(note) - len(lease.note)
        lease.note, lease.noted_at = note, self._looked_at

    def age_of_note(self, lease: LeaseRecord) -> float:
        """Return the seconds since the note was set."""
        return max(self._looked_at - lease.noted_at, 0.0)

    def remaining(self, lease: LeaseRecord) -> float:
        """Return the seconds until the lease expires."""
        return max(lease.ends_at - self._served, 0.0)

    def expired(self, *, most: int = 2**62) -> list[LeaseRecord]:
        """Return up to `most` expired leases, earliest first."""
        over: list[LeaseRecord] = []
        for _ in range(LOOKED_AT_ONCE):
            slot = self._first_slot()
            if slot is None or slot > self._served * SLOTS_A_SECOND or len(over) >= most:
                break
            lease = self._leases[self._slots[slot].pop()]
            lease.slot = -1
            if lease.ends_at > self._served:  # not expired: its process, assumed dead, has connected again
                self._schedule(lease, _expiry_slot(lease.ends_at))
            else:
                over.append(lease)
        return sorted(over, key=lambda lease: (lease.ends_at, lease.id))

    def overdue_by(self, lease: LeaseRecord) -> float:
        """Return the seconds since a lease expired."""
        return self._served - lease.ends_at

    def make_due_again(self, lease: LeaseRecord) -> None:
        """Let the next `expired` return an expired lease again."""
        self._schedule(lease, math.floor(self._served * SLOTS_A_SECOND))

    def recheck_soon(self, lease: LeaseRecord) -> None:
        """Let `expired` return an expired lease again in 0.1 s, unless a request that is still unread renews it."""
        self._schedule(lease, _expiry_slot(self._served + LOOK_AGAIN_AFTER))

    def seconds_to_next_expiry(self) -> float | None:
        """Return the seconds until the next lease may expire; None if there are no leases."""
        first = self._first_slot()
        if first is None:
            return None
        due_in = first / SLOTS_A_SECOND - self._served
        return max(due_in, SOONEST) if due_in > 0 else 0.0

    def _first_slot(self) -> int | None:
        order, slots = self._order, self._slots
        while order:
            if slots.get(order[0]):
                return order[0]
            slots.pop(heapq.heappop(order), None)
        return None

    def _schedule(self, lease: LeaseRecord, slot: int) -> None:
        if slot == lease.slot:
            return
        self._unschedule(lease)
        lease.slot = slot
        standing = self._slots.get(slot)
        if standing is None:
            self._slots[slot] = {lease.id}
            heapq.heappush(self._order, slot)
        else:
            standing.add(lease.id)

    def _unschedule(self, lease: LeaseRecord) -> None:
        if lease.slot < 0:
            return
        standing = self._slots[lease.slot]
        standing.remove(lease.id)
        if not standing:
            del self._slots[lease.slot]
            if len(self._order) > 2 * len(self._slots) + UNTIDY:
                self._order = list(self._slots)
                heapq.heapify(self._order)

    def _set_keeper(self, lease: LeaseRecord, peer: int | None) -> None:
        if lease.keeper == peer:
            return
        if lease.keeper is not None:
            kept = self._kept_by[lease.keeper]
            kept.discard(lease.id)
            if not kept:
                del self._kept_by[lease.keeper]
        lease.keeper = peer
        if peer is not None:
            self._kept_by.setdefault(peer, set()).add(lease.id)
            if lease.terms.gone_ttl is not None:
                lease.process = self.processes.note_lease_holder(peer, lease.id)


def _expiry_slot(at: float) -> int:
    return math.ceil(at * SLOTS_A_SECOND)
