"""Pure: which leases exist, when each lapses, and which keys go with it (promises S5, R20).

Deadlines are kept in *served time*: a clock that follows the server's monotonic clock, but counts no more than
`STALL_AFTER` for any stretch between two looks at it. A server that was stopped, swapped out, or busy for a minute
therefore takes nothing from its clients' leases: they could not have renewed them.

A lease is kept by whichever connection last granted or renewed it. When that connection closes, a lease with a
`disconnect_ttl` has at most so long left, unless another connection renews it first. If by then the whole process has
died, as far as its connections tell (`processes`), a lease with a `gone_ttl`, too, has at most so long left, unless the
process comes back; then it has again what it had before.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from store.engine.processes import Closing, Processes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.engine.changeset import SavedLease
    from store.engine.processes import Process
    from store.messages import Cause

__all__ = ["STALL_AFTER", "LeaseRecord", "Leases"]

STALL_AFTER = 0.3  # seconds; the server looks at least every 0.1 s, so that more than this between two is a stall
SOONEST = 1e-6  # seconds; less may be lost when added to a clock's reading, and who waited would wait for ever
LOOK_AGAIN_AFTER = 0.1  # seconds; how late a lease lapses whose keeper was not heard out when it was due
PUT_RIGHT_AHEAD = 0.1  # seconds; the server looks again in so many, and need not for leases that were renewed
PUT_RIGHT_AT_ONCE = 4096  # out-of-date entries: a few milliseconds
UNTIDY = 64  # out-of-date entries that are not worth a tidying


@dataclass(slots=True, kw_only=True)
class LeaseRecord:
    """One lease; `lapses_at` and `gone_at` are served time, and the earlier one counts."""

    id: int
    ttl: float
    disconnect_ttl: float | None
    gone_ttl: float | None
    lapses_at: float
    gone_at: float = math.inf  # when it ends for the death of the process that keeps it
    keeper: int | None  # the peer whose closing shortens it
    anonymous: bool  # made by a put with `ttl=`: it ends with its one key
    disconnected: bool = False  # `lapses_at` is that of `disconnect_ttl`
    ending: bool = False  # its time is over; keys of it are left, which go in the ticks to come
    keys: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    note: bytes = b""  # what came with the last keep-alive; in memory only
    noted_at: float = 0.0  # on the server's clock, as `advance` was told it

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

    @property
    def judged_by_process(self) -> bool:
        """Whether it ends early with the process that keeps it."""
        return self.disconnect_ttl is not None and self.gone_ttl is not None and not self.anonymous


class Leases:
    """All leases of a store, and its served time."""

    def __init__(self) -> None:
        self._leases: dict[int, LeaseRecord] = {}
        self._processes = Processes()
        self._kept_by: dict[int, set[int]] = {}
        self._due: list[tuple[float, int]] = []  # a heap; entries may be out of date, `ends_at` decides
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
            lease = self._add(one.id, one.ttl, one.disconnect_ttl, one.gone_ttl, anonymous=one.anonymous)
            lease.ending = not one.ttl

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

    def grant(
        self,
        ttl: float,
        *,
        disconnect_ttl: float | None = None,
        gone_ttl: float | None = None,
        peer: int | None,
        anonymous: bool = False,
        id: int | None = None,
    ) -> LeaseRecord:
        """Make a lease that lapses in `ttl` seconds unless it is renewed; with an `id` that its client has chosen."""
        if id is None:
            id = self._last_id = self._last_id + 1
        lease = self._add(id, ttl, disconnect_ttl, gone_ttl, anonymous=anonymous)
        if not anonymous:
            self._keep(lease, peer)
        return lease

    def keep_alive(self, lease: LeaseRecord, *, peer: int) -> None:
        """Give the lease its full TTL again; `peer` keeps it from now on."""
        lease.lapses_at = self._served + lease.ttl  # its older, earlier place in the heap is put right when it comes up
        lease.gone_at = math.inf
        lease.disconnected = False
        self._keep(lease, peer)

    def begin_to_end(self, lease: LeaseRecord) -> None:
        """A lease has lapsed or was revoked, and has more keys than go at once: it is due until the last has gone."""
        lease.ending = True
        lease.lapses_at = self._served
        heapq.heappush(self._due, (lease.lapses_at, lease.id))
        self._let_go(lease)

    def end(self, lease: LeaseRecord) -> None:
        """Forget a lease that lapsed or was revoked. Its keys are the caller's to delete."""
        del self._leases[lease.id]
        self._let_go(lease)
        self._tidy()

    def _let_go(self, lease: LeaseRecord) -> None:
        self._keep(lease, None)
        self._processes.lets_go(lease.id)

    def peer_connected(self, peer: int, process: bytes, *, previous: int | None) -> None:
        """The connection of `peer` was made by this process, which is alive; it takes the place of `previous`."""
        back = self._processes.connected(peer, process, previous=previous)
        if back is not None:
            self._spare(back)

    def peer_closed(self, peer: int, how: Closing) -> None:
        """The connection of `peer` has closed: what it kept has at most its `disconnect_ttl` left, or less."""
        for id in self._kept_by.pop(peer, ()):
            lease = self._leases[id]
            lease.keeper = None
            if lease.disconnect_ttl is not None:
                sooner = self._served + lease.disconnect_ttl
                if sooner < lease.lapses_at:
                    lease.lapses_at, lease.disconnected = sooner, True
                    heapq.heappush(self._due, (sooner, id))
        verdict = self._processes.closed(peer, how, now=self._served)
        for process in verdict.dead:
            for id in process.leases:
                lease = self._leases[id]
                assert lease.gone_ttl is not None, "only such leases are judged by their process"
                lease.gone_at = self._served + lease.gone_ttl
                heapq.heappush(self._due, (lease.gone_at, id))
        for process in verdict.spared:
            self._spare(process)
        self._tidy()

    def kept_by(self, peer: int) -> list[LeaseRecord]:
        """The leases that this connection keeps, in the order in which they were granted."""
        return [self._leases[id] for id in sorted(self._kept_by.get(peer, ()))]

    def silent(self, fraction: float) -> list[tuple[int, LeaseRecord, float]]:
        """The leases that connections keep and have not renewed for this part of their TTL: by whom, and what is left.

        It looks at each lease there is.
        """
        return [
            (lease.keeper, lease, lease.lapses_at - self._served)
            for lease in self._leases.values()
            if lease.keeper is not None and lease.lapses_at - self._served < (1 - fraction) * lease.ttl
        ]

    def _spare(self, process: Process) -> None:
        """A process is not taken for dead any more."""
        for id in process.leases:
            self._leases[id].gone_at = math.inf

    def take_note(self, lease: LeaseRecord, note: bytes) -> None:
        """Keep what came with a keep-alive, in place of what came before."""
        lease.note, lease.noted_at = note, self._looked_at or 0.0

    def note_age(self, lease: LeaseRecord) -> float:
        """Seconds since its note came."""
        return max((self._looked_at or 0.0) - lease.noted_at, 0.0)

    def remaining(self, lease: LeaseRecord) -> float:
        """Seconds until the lease lapses."""
        return max(lease.ends_at - self._served, 0.0)

    def due(self, *, most: int = 2**62) -> list[LeaseRecord]:
        """The leases whose time is over, `most` of them, the first ones first; they are the caller's to end."""
        over: dict[int, LeaseRecord] = {}
        while self._due and self._due[0][0] <= self._served and len(over) < most:
            _, id = heapq.heappop(self._due)
            lease = self._leases.get(id)
            if lease is None:
                continue
            if lease.ends_at > self._served:
                heapq.heappush(self._due, (lease.ends_at, id))
            else:
                over[id] = lease
        return sorted(over.values(), key=lambda lease: (lease.ends_at, lease.id))

    def was_due_for(self, lease: LeaseRecord) -> float:
        """How many seconds ago a lease's time was over."""
        return self._served - lease.ends_at

    def due_again(self, lease: LeaseRecord) -> None:
        """A lease of those that were due has not come to its end yet."""
        heapq.heappush(self._due, (lease.ends_at, lease.id))

    def look_again(self, lease: LeaseRecord) -> None:
        """A lease of those that were due may have been renewed already, as will be seen in a moment."""
        heapq.heappush(self._due, (self._served + LOOK_AGAIN_AFTER, lease.id))

    def next_due_in(self) -> float | None:
        """Seconds of served time until `due` may have something, enough to wait for or 0; None if there is no lease.

        Thousands of members that renew in turn leave thousands of out-of-date entries, each of which comes up at a
        moment of its own: those that would soon are put right together, and nobody looks at a lease that is not due.
        """
        self._put_right(self._served + PUT_RIGHT_AHEAD)
        if not self._due:
            return None
        due_in = self._due[0][0] - self._served
        return max(due_in, SOONEST) if due_in > 0 else 0.0

    def _put_right(self, until: float) -> None:
        """Move the entries before `until` whose leases have been renewed, or are no more."""
        due = self._due
        for _ in range(PUT_RIGHT_AT_ONCE):
            if not due or due[0][0] > until:
                return
            at, id = due[0]
            lease = self._leases.get(id)
            if lease is None:
                heapq.heappop(due)
            elif lease.ends_at > at:
                heapq.heapreplace(due, (lease.ends_at, id))
            else:
                return

    def _tidy(self) -> None:
        """Throw out-of-date entries away before they outnumber the leases: else who grants and revokes fills memory."""
        if len(self._due) > 2 * len(self._leases) + UNTIDY:
            self._due = [(lease.ends_at, lease.id) for lease in self._leases.values()]
            heapq.heapify(self._due)

    def _add(
        self, id: int, ttl: float, disconnect_ttl: float | None, gone_ttl: float | None, *, anonymous: bool
    ) -> LeaseRecord:
        lease = LeaseRecord(
            id=id,
            ttl=ttl,
            disconnect_ttl=disconnect_ttl,
            gone_ttl=gone_ttl,
            lapses_at=self._served + ttl,
            keeper=None,
            anonymous=anonymous,
        )
        self._leases[id] = lease
        heapq.heappush(self._due, (lease.lapses_at, id))
        return lease

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
            if lease.judged_by_process:
                self._processes.keeps(peer, lease.id)
