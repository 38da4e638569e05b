"""The whole store as one state machine.

The engine is given the time and a request, and returns the messages to send. Each request takes effect in one step, so
the store is linearizable (promise S1). `Engine.apply` works in this order:

    1. If a client repeats a request that was carried out, it gets the kept reply, and no key changes (S2).
    2. The request is checked against every limit before anything changes (S6).
    3. The changes are made, all at the next revision.
    4. Events for watches and answers to parked waits are collected.

Leases expire only in `tick`. Before each `tick`, the server reads its sockets: arrived keep-alives count (S5).
"""

from __future__ import annotations

import math
from collections import deque
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from store.engine.applied import ApplyResult, EventBatch, LongRead, WaitEnd, WatchLost
from store.engine.changes import OpenRevision
from store.engine.changeset import ChangeSet, KeptReply
from store.engine.keyspace import events_of
from store.engine.processes import DisconnectKind
from store.engine.requests import RequestExecutor
from store.engine.state import StoreState
from store.errors import LimitExceeded, StoreError
from store.limits import Limits
from store.messages import ERRORS, TAKE_AWAY, Failed, FailureKind, Granted, Request, Response, mutates, operations_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from store.engine.changeset import SavedStore
    from store.engine.sessions import Session
    from store.engine.waits import PostponedWaits
    from store.engine.watches import Watcher

EMPTY: Final = MappingProxyType[int, float]({})
PAGES_BYTES = 4 * 4096  # bytes of the database pages that a write of one key changes
LAPSES_AT_ONCE = 256  # leases that one tick may end; the next tick follows in a millisecond
WAITS_AT_ONCE = 512  # waits checked with their change; if a change affects more, all are postponed
WAITED_KEYS_AT_ONCE = 16_384  # the same limit, of these waits' keys and conditions


ENDED = object()

_make_result = tuple.__new__  # twice as fast as `ApplyResult(...)`

_KINDS = {error: kind for kind, error in ERRORS.items()}


class Engine:
    """The state of a store. A `durable` engine collects a `ChangeSet` for the journal (promise S3)."""

    def __init__(
        self, *, store_id: str, limits: Limits | None = None, durable: bool = False, first_revision: int = 0
    ) -> None:
        self.store_id = store_id
        self.limits: Limits = limits or Limits()
        self.read_only: str | None = None  # why no write is accepted, or None
        self.state: StoreState = StoreState(self.limits)
        state = self.state
        self._keys, self._leases, self._sessions = state.keys, state.leases, state.sessions
        self._watches, self._waits = state.watches, state.waits
        self.postponed: PostponedWaits = state.postponed
        self._history, self._snapshots = state.history, state.snapshots
        self._keys.revision = first_revision
        self._history.restart_after(first_revision)
        self._session_of: dict[int, Session] = {}
        self._changes = OpenRevision(state, facts=ChangeSet() if durable else None)
        self._asked = RequestExecutor(state, self._changes, figures=self.figures)
        self._ends: deque[Iterator[None]] = deque()  # unfinished cleanups of closed peers
        self.has_chores: bool = False
        self._works: dict[int, LongRead] = {}  # by peer: the unfinished part of its long request
        self._requests = 0
        self._now = -math.inf
        self._lapsed = 0

    @property
    def revision(self) -> int:
        """The revision of the last change."""
        return self._keys.revision

    @classmethod
    def restore(cls, saved: SavedStore, *, limits: Limits | None = None, now: float) -> Engine:
        """Return an engine that continues a saved store."""
        engine = cls(store_id=saved.store_id, limits=limits, durable=True)
        engine._keys.revision = saved.revision
        engine._keys.groups.now = now
        engine._leases.restore(saved.leases, last=saved.last_lease)
        for entry in saved.entries:
            engine._keys.put(entry, None)
            lease = engine._leases.get_even_if_ending(entry.lease) if entry.lease is not None else None
            if lease is not None:
                lease.keys[entry.key] = None
        engine._history.restore(saved.history, compacted=saved.compacted)
        engine._sessions.restore(saved.sessions, last=saved.last_session, now=now)
        return engine

    def take_changeset(self) -> ChangeSet | None:
        """Return the changes since the last call, for the journal; None if there are none."""
        facts = self._changes.facts
        if not facts:
            return None
        self._changes.facts = ChangeSet()
        return facts

    def connect(
        self, peer: int, *, session_id: bytes, now: float, process: bytes = b""
    ) -> tuple[int, int | None] | None:
        """Open or resume a session; return its number, and its earlier peer if any; None if there is no room."""
        self._note_forgotten_sessions(self._sessions.expire(now) + self._sessions.evict_for_session(session_id, now))
        made = self._sessions.made
        opened = self._sessions.open_session(session_id, peer=peer)
        if opened is None:
            return None
        session, previous = opened
        self._leases.processes.note_connected(peer, process, previous=previous)
        if self._changes.facts is not None and self._sessions.made != made:
            self._changes.facts.note_session_opened(session.id, session.number)
        self._session_of[peer] = session
        return session.number, previous

    def disconnect(self, peer: int, *, now: float, how: DisconnectKind) -> None:
        """End a peer's connection, and after a goodbye its session, too."""
        self._leases.advance_clock(now)
        work = self._works.pop(peer, None)
        snapshot = None if work is None else work.snapshot
        if snapshot is not None:
            self._snapshots.unregister(snapshot)
        leases = self._leases.shorten_after_close(peer, how)
        unread = () if snapshot is None else snapshot.free_in_steps()
        end = chain(leases, self._watches.remove_peer_in_steps(peer), self._waits.remove_peer_in_steps(peer), unread)
        if self._ends or next(end, ENDED) is not ENDED:  # clean up later, in steps: thousands of peers may end at once
            self._ends.append(end)
        self.has_chores = bool(self.has_chores or self._ends or self.state.past)
        session = self._session_of.pop(peer, None)
        if session is not None:
            if how is DisconnectKind.GOODBYE:
                self._note_forgotten_sessions(self._sessions.end(session, peer=peer))
            else:
                self._sessions.keep_for_reconnect(session, peer=peer, now=now)

    def _note_forgotten_sessions(self, forgotten: list[bytes]) -> None:
        if self._changes.facts is not None:
            for session_id in forgotten:
                self._changes.facts.note_session_ended(session_id)

    def apply(self, request: Request[Any], peer: int, request_id: int, acknowledged: int, now: float) -> ApplyResult:
        """Carry out one request, at `now` on the server's monotonic clock.

        Request ids ascend per client, and identify watches and waits. The client got the replies up to `acknowledged`.
        """
        self._requests += 1
        if now != self._now:  # requests that arrived together have the same `now`
            self._now = self._keys.groups.now = now
            self._leases.advance_clock(now)
        session = self._session_of[peer]
        if session.held_bytes:  # the session keeps replies that may be freed
            session.acknowledge(acknowledged)
        changes = mutates(request)
        if changes:
            if request_id <= session.highest:
                return ApplyResult(response=self._replayed_reply(session, request_id, peer))
            try:
                self._check_mutation(session, request)
            except LimitExceeded as error:  # this refusal is not kept as a reply: kept replies may be at their limit
                return ApplyResult(response=_failed_response(error))
        try:
            response = self._asked.carry_out(request, peer, request_id)
        except StoreError as error:
            assert not self._changes.made, "a refused request has changed nothing"
            response = _failed_response(error)
        if self._changes.made:
            self._publish_changes()
        work = self._asked.work
        if work is not None:
            self._works[peer], self._asked.work = work, None
        if changes and response is not None:
            session.keep_reply(request_id, response)
            if self._changes.facts is not None:
                self._changes.facts.replies.append(
                    KeptReply(
                        session_id=session.id, acknowledged=acknowledged, request_id=request_id, response=response
                    )
                )
        return _make_result(ApplyResult, (response, self._take_deliveries() if self._asked.deliveries else (), work))

    def continue_long_request(self, work: LongRead) -> ApplyResult:
        """Do the next step of a long request."""
        response = self._asked.continue_long_request(work)
        more, self._asked.work = self._asked.work, None
        if more is None:
            del self._works[work.watcher[0]]
            self.has_chores = self.has_chores or bool(self.state.past)
        return _make_result(ApplyResult, (response, self._take_deliveries(), more))

    def _check_mutation(self, session: Session, request: Request[Any]) -> None:
        if self.read_only is not None:
            raise LimitExceeded(
                f"nothing was written, because the store takes no writes now: {self.read_only}; reading goes on"
            )
        state = self.state
        is_short = state.why_only_deletes is not None
        writes = [each for each in operations_of(request) if type(each) not in TAKE_AWAY] if is_short else []
        if writes:
            size = state.bytes_written_by(request)
            cost = size + len(writes) * PAGES_BYTES
            is_coordination_key = self._keys.groups.is_coordination_key
            if cost <= state.steering_bytes and all(is_coordination_key(getattr(each, "key", "")) for each in writes):
                state.steering_bytes -= cost
            elif size > state.writable_bytes:
                small = f" and writes of {state.writable_bytes} bytes" if state.writable_bytes else ""
                raise LimitExceeded(
                    f"nothing was written, because the store takes only deletes{small} now, and this has {size}: "
                    f"{state.why_only_deletes}; delete something"
                )
        full = self._sessions.budget.bytes >= self.limits.replies_bytes_max
        if full:
            self._note_forgotten_sessions(self._sessions.evict_for_replies(self.limits.replies_bytes_max))
        if full or session.held_bytes:
            state.check_reply_room(session, request)

    def _take_deliveries(self) -> tuple[EventBatch | WaitEnd | WatchLost, ...]:
        deliveries, self._asked.deliveries = tuple(self._asked.deliveries), []
        return deliveries

    def _replayed_reply(self, session: Session, request_id: int, peer: int) -> Response:
        replayed = session.kept_reply(request_id)
        if replayed is None:
            message = f"request {request_id} was applied before the connection broke, but its reply is no longer kept"
            return Failed(kind=FailureKind.FORGOTTEN, message=message)
        if isinstance(replayed, Granted):
            lease = self._leases.get_if_live(replayed.lease)  # a client that repeats a grant renews the lease
            if lease is not None:
                self._leases.keep_alive(lease, peer=peer)
        return replayed

    def tick(self, *, now: float, unheard: Mapping[int, float] = EMPTY) -> tuple[EventBatch | WaitEnd | WatchLost, ...]:
        """End expired leases, no two at one revision, and sessions that were abandoned for too long.

        `unheard` maps each peer with waiting requests to the seconds that they have waited. A lease that expired while
        its keeper's requests waited is not ended yet: one of these requests may renew the lease.
        """
        self._leases.advance_clock(now)
        room = self.state.writes_max
        for lease in self._leases.expired(most=LAPSES_AT_ONCE):
            if room < min(len(lease.keys), self.state.writes_max):  # what fits in one revision is not split (S11)
                self._leases.make_due_again(lease)
                continue
            if lease.keeper is not None and self._leases.overdue_by(lease) < unheard.get(lease.keeper, 0.0):
                self._leases.recheck_soon(lease)
                continue
            self._lapsed += not lease.ending
            most = self._watches.changeable_key_count([*islice(lease.keys, room)])
            ended = self._changes.end_lease(lease, most=most, cause=lease.cause)
            room = room - ended if self._watches.is_lookup_cheap else 0
            if lease.keys:
                self._leases.make_due_again(lease)
            self._publish_changes()
        self._note_forgotten_sessions(self._sessions.expire(now))
        return self._take_deliveries()

    def advance_lease_clock(self, *, now: float) -> bool:
        """Advance the leases' clock; return True if a lease may have expired."""
        self._leases.advance_clock(now)
        due = self._leases.seconds_to_next_expiry()
        return due is not None and due <= 0

    def figures(self) -> dict[str, Any]:
        """Return the counters of `stats()`."""
        return {
            "store_id": self.store_id,
            "revision": self.revision,
            "keys": len(self._keys.entries),
            "stored_bytes": self._keys.bytes,
            "groups": len(self._keys.groups.by_name),
            "history_bytes": self._history.bytes,
            "compacted_revision": self._history.compacted,
            "leases": len(self._leases),
            "leases_lapsed": self._lapsed,
            "watches": len(self._watches),
            "waits": len(self._waits.parked),
            "parked_bytes": self._watches.bytes + self._waits.bytes,
            "sessions": len(self._sessions),
            "replies_bytes": self._sessions.budget.bytes,
            "unread_bytes": self._snapshots.held_bytes,
            "memory_bytes": self.state.memory_bytes,
            "requests": self._requests,
        }

    def _publish_changes(self) -> None:
        if not self._changes.made:
            return
        changes = self._changes.finish()
        self._history.append(changes)
        if self._changes.facts is not None:
            self._changes.facts.revisions.append(events_of(changes))
            self._changes.facts.compacted = self._history.compacted
        if self._watches.by_prefix:
            for watches, about in self._watches.match_watches(changes):
                self._asked.deliveries.append(EventBatch(watches=watches, events=events_of(about)))
        if self._waits.parked and (stirred := self._waits.find_affected_waits(changes)):
            self._check_waits(stirred)

    def _check_waits(self, stirred: list[tuple[dict[str, dict[Watcher, None]], str]]) -> None:
        if sum(len(standing[key]) for standing, key in stirred) <= WAITS_AT_ONCE:
            watchers = {watcher: None for standing, key in stirred for watcher in standing[key]}
            if self._waits.cost_of_checking(watchers) <= WAITED_KEYS_AT_ONCE:
                if self.postponed:
                    # Leave out postponed waits: they are checked later, first against the keys at earlier revisions.
                    watchers = {watcher: None for watcher in watchers if self._waits.is_registered(watcher)}
                for standing, key in stirred:
                    del standing[key]
                self._asked.check_waits(watchers)
                return
        self.postponed.add([standing.pop(key) for standing, key in stirred], self.revision)
        self.has_chores = True

    def do_postponed_work(self) -> tuple[EventBatch | WaitEnd | WatchLost, ...]:
        """Do a part of the postponed work: check waits, and clean up after closed peers."""
        if self.postponed:
            self._asked.check_postponed_waits()
        if self._ends and next(self._ends[0], ENDED) is ENDED:
            self._ends.popleft()
        is_past_left = self.state.free_old_entries()
        self.has_chores = bool(self.postponed or self._ends or is_past_left)
        return self._take_deliveries()


def _failed_response(error: StoreError) -> Failed:
    return Failed(kind=_KINDS[type(error)], message=str(error))
