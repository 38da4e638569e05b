"""Pure: which leases exist, when each lapses, and which keys go with it (promises S5, R20).

Deadlines are kept in *served time*: a clock that follows the server's monotonic clock, but counts no more than
`STALL_AFTER` for any stretch between two looks at it. A server that was stopped, swapped out, or busy for a minute
therefore takes nothing from its clients' leases: they could not have renewed them.

A lease is kept by whichever connection last granted or renewed it. When that connection closes, a lease with a
`disconnect_ttl` has at most so long left, unless another connection renews it first. If by then the whole process has
died, as far as its connections tell (`processes`), a lease with a `gone_ttl`, too, has at most so long left, unless the
process comes back; then it has again what it had before.

Which leases are to be looked at when is kept by slots of about a millisecond, in one of which each of them stands.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from store.engine.processes import Closing, Processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from store.engine.changeset import SavedLease
    from store.engine.processes import Process
    from store.messages import Cause

__all__ = ["LEASE_OVERHEAD", "STALL_AFTER", "LeaseRecord", "Leases"]

STALL_AFTER = 0.3  # seconds; the server looks at least every 0.1 s, so that more than this between two is a stall
SOONEST = 1e-6  # seconds; less may be lost when added to a clock's reading, and who waited would wait for ever
LOOK_AGAIN_AFTER = 0.1  # seconds; how late a lease lapses whose keeper was not heard out when it was due
LOOKED_AT_ONCE = 4096  # leases: a few milliseconds
SHORTENED_AT_ONCE = 512  # when their connection or process has gone: half a millisecond
SLOTS_A_SECOND = 1024  # a power of two, so that nothing is lost in rounding
LEASE_OVERHEAD = 1024  # bytes of bookkeeping per lease: its record, its slot, and who keeps it
UNTIDY = 64  # slots that are empty by now and not worth a tidying


@dataclass(slots=True, kw_only=True)
class LeaseRecord:
    """One lease; its times are served time, and the earliest counts."""

    id: int
    ttl: float
    disconnect_ttl: float | None
    gone_ttl: float | None
    anonymous: bool  # made by a put with `ttl=`: it ends with its one key
    lapses_at: float
    slot: int = -1  # in which it stands; -1: in none
    process: Process | None = None  # which keeps it, if it ends early with that
    keeper: int | None = None  # the peer whose closing shortens it
    disconnected: bool = False  # `lapses_at` is that of `disconnect_ttl`
    ending: bool = False  # its time is over; keys of it are left, which go in the ticks to come
    keys: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    note: bytes = b""  # what came with the last keep-alive; in memory only
    noted_at: float = 0.0  # on the server's clock, as `advance` was told it

    @property
    def gone_at(self) -> float:
        """When it ends for the death of the process that keeps it."""
        if self.process is None or self.process.died_at is None or self.gone_ttl is None:
            return math.inf
        return self.process.died_at + self.gone_ttl

    @property
    def ends_at(self) -> float:
        """When its time is over."""
        return min(self.lapses_at, self.gone_at)

    @property
    def cause(self) -> Cause:
        """Why its time is over, once it is; nothing if it was ending already."""
        if self.ending:
            return ""
        if self.gone_at <= self.lapses_at:
            return "gone"
        return "disconnected" if self.disconnected else "silent"


class Leases:
    """All leases of a store, and its served time.

    Attributes:
        bytes: About how many bytes they take, without their keys.
    """

    def __init__(self) -> None:
        self.bytes: int = 0
        self._leases: dict[int, LeaseRecord] = {}
        self._processes = Processes()
        self._kept_by: dict[int, set[int]] = {}
        self._slots: dict[int, set[int]] = {}  # the leases that stand in each
        self._order: list[int] = []  # a heap of their numbers; some may be empty by now
        self._last_id = 0
        self._served = 0.0
        self._looked_at = math.inf  # nothing has passed at the first look

    def __len__(self) -> int:
        return len(self._leases)

    def restore(self, saved: Iterable[SavedLease], *, last: int) -> None:
        """Take up the leases of an earlier life of this store, each with its full TTL.

        Nobody keeps them yet, so that `disconnect_ttl` and `gone_ttl` mean nothing until the first keep-alive (promises
        S5, R20).
        """
        self._last_id = last
        for one in saved:
            self.grant(one, peer=None).ending = not one.ttl

    def advance(self, now: float) -> None:
        """Let served time follow the server's clock, whose reading is `now`, but not through a stall."""
        passed = now - self._looked_at
        if passed > 0:
            self._served += passed if passed < STALL_AFTER else STALL_AFTER
        self._looked_at = now

    def get(self, lease: int) -> LeaseRecord | None:
        """The lease of this id, or None if it has lapsed, was revoked, or never was."""
        found = self._leases.get(lease)
        return None if found is None or found.ending else found

    def with_keys(self, lease: int) -> LeaseRecord | None:
        """The lease of this id, also if it is ending and only its keys are left."""
        return self._leases.get(lease)

    def next_id(self) -> int:
        """An id for a lease that has none of its client's choice."""
        self._last_id += 1
        return self._last_id

    def grant(self, terms: SavedLease, *, peer: int | None) -> LeaseRecord:
        """Make a lease that lapses unless it is renewed, and that `peer` keeps, if anybody does."""
        lease = LeaseRecord(
            id=terms.id,
            ttl=terms.ttl,
            disconnect_ttl=terms.disconnect_ttl,
            gone_ttl=terms.gone_ttl,
            anonymous=terms.anonymous,
            lapses_at=self._served + terms.ttl,
        )
        self._leases[lease.id] = lease
        self.bytes += LEASE_OVERHEAD
        self._stand(lease, _slot_of(lease.lapses_at))
        self._keep(lease, peer)
        return lease

    def keep_alive(self, lease: LeaseRecord, *, peer: int) -> None:
        """Give the lease its full TTL again; `peer` keeps it from now on."""
        lease.lapses_at = self._served + lease.ttl
        lease.disconnected = False
        self._keep(lease, peer)
        self._stand(lease, _slot_of(lease.ends_at))

    def begin_to_end(self, lease: LeaseRecord) -> None:
        """A lease has lapsed or was revoked, and has more keys than go at once: it is due until the last has gone."""
        lease.ending = True
        lease.lapses_at = self._served
        self.due_again(lease)
        self._let_go(lease)

    def end(self, lease: LeaseRecord) -> None:
        """Forget a lease that lapsed or was revoked. Its keys are the caller's to delete."""
        del self._leases[lease.id]
        self.bytes -= LEASE_OVERHEAD + len(lease.note)
        self._step_away(lease)
        self._let_go(lease)

    def _let_go(self, lease: LeaseRecord) -> None:
        self._keep(lease, None)
        self._processes.lets_go(lease.id)
        lease.process = None

    def peer_connected(self, peer: int, process: bytes, *, previous: int | None) -> None:
        """The connection of `peer` was made by this process, which is alive; it takes the place of `previous`."""
        self._processes.connected(peer, process, previous=previous)

    def peer_closed(self, peer: int, how: Closing) -> Iterator[None]:
        """The connection of `peer` has closed: what it kept has at most its `disconnect_ttl` left, or less.

        What is to be done for each of these leases is done in steps, as far as the caller takes them.
        """
        return self._shorten(peer, self._processes.closed(peer, how, now=self._served), self._served)

    def _shorten(self, peer: int, dead: Process | None, closed_at: float) -> Iterator[None]:
        kept = self._kept_by.get(peer, set())  # whoever renews one of them meanwhile takes it out
        while kept:
            for _ in range(min(len(kept), SHORTENED_AT_ONCE)):
                lease = self._leases[kept.pop()]
                lease.keeper = None
                if lease.disconnect_ttl is not None:
                    sooner = closed_at + lease.disconnect_ttl
                    if sooner < lease.lapses_at:
                        lease.lapses_at, lease.disconnected = sooner, True
                        self._stand(lease, _slot_of(sooner))
            if kept:
                yield
        self._kept_by.pop(peer, None)
        if dead is not None:
            of_the_dead = iter(tuple(dead.leases))
            while dead.died_at == closed_at and (some := [*islice(of_the_dead, SHORTENED_AT_ONCE)]):
                for lease in filter(None, map(self._leases.get, some)):
                    if _slot_of(lease.ends_at) < lease.slot:
                        self._stand(lease, _slot_of(lease.ends_at))
                yield

    def take_note(self, lease: LeaseRecord, note: bytes) -> None:
        """Keep what came with a keep-alive, in place of what came before."""
        self.bytes += len(note) - len(lease.note)
        lease.note, lease.noted_at = note, self._looked_at or 0.0

    def note_age(self, lease: LeaseRecord) -> float:
        """Seconds since its note came."""
        return max((self._looked_at or 0.0) - lease.noted_at, 0.0)

    def remaining(self, lease: LeaseRecord) -> float:
        """Seconds until the lease lapses."""
        return max(lease.ends_at - self._served, 0.0)

    def due(self, *, most: int = 2**62) -> list[LeaseRecord]:
        """The leases whose time is over, `most` of them, the first ones first; they are the caller's to end."""
        over: list[LeaseRecord] = []
        for _ in range(LOOKED_AT_ONCE):
            slot = self._first_slot()
            if slot is None or slot > self._served * SLOTS_A_SECOND or len(over) >= most:
                break
            lease = self._leases[self._slots[slot].pop()]
            lease.slot = -1
            if lease.ends_at > self._served:  # its process seemed to have died, and has come back
                self._stand(lease, _slot_of(lease.ends_at))
            else:
                over.append(lease)
        return sorted(over, key=lambda lease: (lease.ends_at, lease.id))

    def was_due_for(self, lease: LeaseRecord) -> float:
        """How many seconds ago a lease's time was over."""
        return self._served - lease.ends_at

    def due_again(self, lease: LeaseRecord) -> None:
        """A lease that is due has not come to its end yet."""
        self._stand(lease, math.floor(self._served * SLOTS_A_SECOND))

    def look_again(self, lease: LeaseRecord) -> None:
        """A lease of those that were due may have been renewed already, as will be seen in a moment."""
        self._stand(lease, _slot_of(self._served + LOOK_AGAIN_AFTER))

    def next_due_in(self) -> float | None:
        """Seconds of served time until `due` may have something, enough to wait for or 0; None if there is no lease."""
        first = self._first_slot()
        if first is None:
            return None
        due_in = first / SLOTS_A_SECOND - self._served
        return max(due_in, SOONEST) if due_in > 0 else 0.0

    def _first_slot(self) -> int | None:
        """The first slot in which any lease stands."""
        order, slots = self._order, self._slots
        while order:
            if slots.get(order[0]):
                return order[0]
            slots.pop(heapq.heappop(order), None)
        return None

    def _stand(self, lease: LeaseRecord, slot: int) -> None:
        """Have a lease looked at then, and not when it was to be looked at before."""
        if slot == lease.slot:
            return
        self._step_away(lease)
        lease.slot = slot
        standing = self._slots.get(slot)
        if standing is None:
            self._slots[slot] = {lease.id}
            heapq.heappush(self._order, slot)
        else:
            standing.add(lease.id)

    def _step_away(self, lease: LeaseRecord) -> None:
        if lease.slot < 0:
            return
        standing = self._slots[lease.slot]
        standing.remove(lease.id)
        if not standing:
            del self._slots[lease.slot]
            if len(self._order) > 2 * len(self._slots) + UNTIDY:  # else who grants and revokes fills memory
                self._order = list(self._slots)
                heapq.heapify(self._order)
        lease.slot = -1

    def _keep(self, lease: LeaseRecord, peer: int | None) -> None:
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
            if lease.gone_ttl is not None and not lease.anonymous:
                lease.process = self._processes.keeps(peer, lease.id)


def _slot_of(at: float) -> int:
    """The first slot that is not before this time."""
    return math.ceil(at * SLOTS_A_SECOND)
