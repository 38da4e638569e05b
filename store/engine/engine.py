"""Pure: the whole store as one state machine.

It is told the time and a request, and answers with what should now be said to whom; sockets, clocks and disks are the
server's. Every request takes effect at once and whole, which is all there is to its linearizability (promise S1).

The order of one `apply`:

    1. a mutation that this session has already made is answered with the reply kept for it, and nothing is done (S2);
    2. the request is checked against every limit, and refused before anything has changed (S6);
    3. its changes, if any, are made at the next revision, all at the same one;
    4. what they cause is collected: events for watches, answers to parked waits.

Leases lapse only in `tick`, which the server calls when `next_tick_in` says so, and after it has read what waited in
its sockets: a keep-alive that has arrived is never overtaken by its own lease (S5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, assert_never

from store.engine.changeset import Facts, KeptReply, SavedLease
from store.engine.leases import Leases
from store.engine.reply_size import reply_cost, reply_cost_at_most
from store.engine.sessions import Session, Sessions, _Forgotten
from store.engine.sorted_keys import SortedKeys
from store.engine.waits import Parked, Waits, wait_bytes
from store.engine.watches import History, Watcher, Watches, event_bytes, watch_bytes
from store.errors import ConditionFailed, LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.fast_init import constructor
from store.limits import Limits
from store.messages import (
    Add,
    Added,
    Append,
    Cancel,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Delete,
    DeletePrefix,
    Done,
    Entry,
    Event,
    Excessive,
    Failed,
    FailureKind,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    LeaseState,
    List,
    Listing,
    Operation,
    Ping,
    Pong,
    Put,
    Request,
    Response,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
    Watch,
    Watching,
    Written,
    key_bytes,
    mutates,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from store.engine.changeset import Saved
    from store.engine.leases import LeaseRecord

__all__ = ["Answer", "Applied", "Delivery", "Engine"]

ENTRY_OVERHEAD = 300  # bytes of bookkeeping per key: the entry, two dictionaries, the index
ADD_MAX = 2**63 - 1  # what torch.distributed.Store counts in
SMALL_REPLY_BYTES = 64 * 1024  # what one reply may take though all of them together take too much
SNAPSHOT_BATCH_BYTES = 256 * 1024  # a snapshot comes in pieces, so that its frames stay small


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Events of one revision, or a piece of a snapshot, for each of these watches."""

    watchers: tuple[Watcher, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request that had been parked."""

    peer: int
    request_id: int
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a request led to: the response (None while it is parked), and what others must now be told."""

    response: Response | None
    deliveries: tuple[Delivery | Answer, ...] = ()


# Of what almost every request makes.
_make_entry, _make_event, _make_applied = constructor(Entry), constructor(Event), constructor(Applied)
_make_found, _make_written, _make_added = constructor(Found), constructor(Written), constructor(Added)
_make_compared, _make_listing = constructor(CompareAndSetResult), constructor(Listing)


_FAILURES = {
    LimitExceeded: FailureKind.LIMIT,
    LeaseNotFound: FailureKind.LEASE,
    ConditionFailed: FailureKind.CONDITION,
    StoreUsageError: FailureKind.USAGE,
}


class Engine:
    """The state of a store.

    Args:
        store_id: The random identity of this store (promise S10).
        limits: What clients may ask of it.
        durable: Whether somebody takes the facts and keeps them (promise S3).

    Attributes:
        read_only: Why nothing can be written now; None if it can.
    """

    def __init__(self, *, store_id: str, limits: Limits | None = None, durable: bool = False) -> None:
        self.store_id = store_id
        self.limits = limits or Limits()
        self.read_only: str | None = None
        self._facts: Facts | None = Facts() if durable else None
        self.revision = 0
        self._entries: dict[str, Entry] = {}
        self._index = SortedKeys()
        self._stored_bytes = 0
        self._leases = Leases()
        self._watches = Watches()
        self._history = History(self.limits.history_bytes_max)
        self._sessions = Sessions(ttl=self.limits.session_ttl, sessions_max=self.limits.sessions_max)
        self._session_of: dict[int, Session] = {}
        self._waits = Waits()
        self._events: list[Event] = []  # of the change being made
        self._deliveries: list[Delivery | Answer] = []
        self._requests = 0
        self._lapsed = 0

    @classmethod
    def restore(cls, saved: Saved, *, limits: Limits | None = None, now: float) -> Engine:
        """A durable store as it was saved; it goes on from there."""
        engine = cls(store_id=saved.store_id, limits=limits, durable=True)
        engine.revision = saved.revision
        engine._leases.restore(saved.leases, last=saved.last_lease)
        for entry in saved.entries:
            engine._entries[entry.key] = entry
            engine._index.add(entry.key)
            engine._stored_bytes += ENTRY_OVERHEAD + key_bytes(entry.key) + len(entry.value)
            lease = engine._leases.get(entry.lease) if entry.lease is not None else None
            if lease is not None:
                lease.keys.add(entry.key)
        engine._history.restore(saved.history, compacted=saved.compacted)
        engine._sessions.restore(saved.sessions, last=saved.last_session, now=now, cost=reply_cost)
        return engine

    def take_facts(self) -> Facts | None:
        """What must be made durable before anything of it is said; None if there is nothing."""
        facts = self._facts
        if not facts:
            return None
        self._facts = Facts()
        return facts

    # --------------------------------------------------------------------------------------- connections

    def connect(self, peer: int, *, session_id: bytes, now: float) -> tuple[int, int | None] | None:
        """A client has said hello.

        Returns:
            The number of its session, and the peer that had it until now and should be closed; None if there are too
            many sessions.
        """
        self._expire_sessions(now)
        made = self._sessions.made
        opened = self._sessions.open(session_id, peer=peer)
        if opened is None:
            return None
        session, previous = opened
        if self._facts is not None and self._sessions.made != made:
            self._facts.opened(session.id, session.number)
        self._session_of[peer] = session
        return session.number, previous

    def disconnect(self, peer: int, *, now: float, for_good: bool = False) -> None:
        """The connection of `peer` has closed; `for_good` if its client said that it will not come back."""
        self._leases.advance(now)
        self._leases.peer_closed(peer)
        self._watches.peer_closed(peer)
        self._waits.peer_closed(peer)
        session = self._session_of.pop(peer, None)
        if session is not None:
            if for_good:
                if self._sessions.end(session, peer=peer) and self._facts is not None:
                    self._facts.forgotten(session.id)
            else:
                self._sessions.close(session, peer=peer, now=now)

    def _expire_sessions(self, now: float) -> None:
        self._note_forgotten(self._sessions.expire(now))

    def _note_forgotten(self, forgotten: list[bytes]) -> None:
        if self._facts is not None:
            for session_id in forgotten:
                self._facts.forgotten(session_id)

    def end_watch(self, peer: int, watch_id: int) -> bool:
        """The server drops a watch whose reader is too slow; False if it was closed already."""
        return self._watches.remove(peer, watch_id)

    # ------------------------------------------------------------------------------------------ requests

    def apply(self, request: Request[Any], *, peer: int, request_id: int, acknowledged: int, now: float) -> Applied:
        """Carry out one request at once.

        Args:
            request: What is asked.
            peer: The connection it came on, which has said hello.
            request_id: The number its client gave it, counting upwards; watches and waits are known by it.
            acknowledged: Up to which of its requests the client has all replies to mutations.
            now: Seconds on the server's monotonic clock; never less than in an earlier call.
        """
        self._requests += 1
        self._leases.advance(now)
        session = self._session_of[peer]
        session.acknowledge(acknowledged)
        changes = mutates(request)
        if changes:
            replayed = session.replay(request_id)
            if isinstance(replayed, _Forgotten):
                return Applied(response=_forgotten(request_id))
            if replayed is not None:
                self._keep_again(replayed, peer)
                return Applied(response=replayed)
            refusal = self._check_session(session, request)
            if refusal is not None:
                return Applied(response=refusal)  # not kept: there is no room for it, and it says that nothing was done
        try:
            response = self._dispatch(request, peer, request_id)
        except StoreError as error:
            assert not self._events, "a refused request has changed nothing"
            response = Failed(kind=_FAILURES[type(error)], message=str(error))
        self._announce()
        if changes and response is not None:
            session.keep(request_id, response, reply_cost(response))
            if self._facts is not None:
                self._facts.replies.append(
                    KeptReply(
                        session_id=session.id, acknowledged=acknowledged, request_id=request_id, response=response
                    )
                )
        return _make_applied(response, self._take_deliveries())

    def _take_deliveries(self) -> tuple[Delivery | Answer, ...]:
        if not self._deliveries:
            return ()
        deliveries, self._deliveries = tuple(self._deliveries), []
        return deliveries

    def _keep_again(self, replayed: Response, peer: int) -> None:
        """Who asks again for a lease it was granted has come back: it keeps that lease, as if it had renewed it."""
        if isinstance(replayed, Granted):
            lease = self._leases.get(replayed.lease)
            if lease is not None:
                self._leases.keep_alive(lease, peer=peer)

    def tick(self, *, now: float) -> tuple[Delivery | Answer, ...]:
        """Let leases lapse whose time is over, each at a revision of its own, and sessions that were abandoned."""
        self._leases.advance(now)
        for lease in self._leases.due():
            self._lapsed += 1
            self._end_lease(lease)
            self._announce()
        self._expire_sessions(now)
        return self._take_deliveries()

    def next_tick_in(self) -> float | None:
        """Seconds until the next lease may lapse; None if there is none."""
        return self._leases.next_due_in()

    def look(self, *, now: float) -> bool:
        """Keep served time up to date; True if a lease is due. The server looks at least every 0.1 s."""
        self._leases.advance(now)
        due = self._leases.next_due_in()
        return due is not None and due <= 0

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        return {
            "store_id": self.store_id,
            "revision": self.revision,
            "keys": len(self._entries),
            "stored_bytes": self._stored_bytes,
            "history_bytes": self._history.bytes,
            "compacted_revision": self._history.compacted,
            "leases": len(self._leases),
            "leases_lapsed": self._lapsed,
            "watches": len(self._watches),
            "waits": len(self._waits),
            "parked_bytes": self._watches.bytes + self._waits.bytes,
            "sessions": len(self._sessions),
            "replies_bytes": self._sessions.held_bytes,
            "requests": self._requests,
        }

    def _dispatch(self, request: Request[Any], peer: int, request_id: int) -> Response | None:
        """Carry out one request; None if it is parked."""
        when: tuple[Condition, ...] = ()
        if type(request) is Guarded:
            when, request = request.when, request.request
            self._check_count(len(when), "conditions")
            self._require(when)
        handle = _HANDLERS.get(type(request))
        if handle is not None:
            return handle(self, request)
        if type(request) is Wait:
            return self._wait(request, when, peer, request_id)
        if type(request) is Watch:
            return self._watch(request, peer, request_id)
        if type(request) is Cancel:
            if not self._watches.remove(peer, request.target) and (peer, request.target) in self._waits:
                self._waits.remove((peer, request.target))
            return Done()
        if type(request) is Grant:
            return self._grant(request, peer)
        if type(request) is KeepAlive:
            lease = self._lease(request.lease)
            self._leases.keep_alive(lease, peer=peer)
            return Granted(lease=lease.id, ttl=lease.ttl)
        raise StoreUsageError(f"{type(request).__name__} cannot be asked of this store")

    # -------------------------------------------------------------------------------------- reads

    def _get(self, request: Get) -> Found:
        return _make_found(self._entries.get(request.key))

    def _get_many(self, request: GetMany) -> Listing:
        self._check_count(len(request.keys), "keys")
        return self._entries_of(request.keys)

    def _entries_of(self, keys: tuple[str, ...]) -> Listing:
        return self._listing(tuple(map(self._entries.get, keys)))

    def _listing(self, entries: tuple[Entry | None, ...]) -> Listing:
        self._check_answer(sum(map(_entry_bytes, entries)))
        return _make_listing(entries, self.revision)

    def _list(self, request: List) -> Listing:
        entries = []
        room = self.limits.frame_bytes_max - 1024
        for key in self._index.with_prefix(request.prefix):
            entry = self._entries[key]
            if request.keys_only:
                entry = replace(entry, value=b"")
            room -= _entry_bytes(entry)
            if room < 0:
                raise LimitExceeded(
                    f"the keys under {request.prefix!r} do not fit in one frame of frame_bytes_max = "
                    f"{self.limits.frame_bytes_max} bytes; list longer prefixes one by one, or the keys only"
                )
            entries.append(entry)
        return Listing(entries=tuple(entries), revision=self.revision)

    def _count(self, request: Count) -> Counted:
        count = len(self._index) if not request.prefix else sum(1 for _ in self._index.with_prefix(request.prefix))
        return Counted(count=count, revision=self.revision)

    def _ping(self, _: Ping) -> Pong:
        return Pong(revision=self.revision)

    def _stats(self, _: Stats) -> Figures:
        return Figures(figures=self.figures())

    def _excessive(self, request: Excessive) -> Response:
        raise LimitExceeded(
            f"the request holds more than {request.elements_max} elements, and operations_max is "
            f"{self.limits.operations_max}: split it"
        )

    # -------------------------------------------------------------------------------------- writes

    def _put(self, request: Put) -> Written:
        self._check_put(request.key, request.value, ttl=request.ttl, lease=request.lease)
        self._check_room(((request.key, len(request.value)),))
        return _make_written(self._write_put(request))

    def _delete(self, request: Delete) -> Counted:
        return Counted(count=int(self._erase(request.key)), revision=self.revision + bool(self._events))

    def _delete_prefix(self, request: DeletePrefix) -> Counted:
        keys = list(self._index.with_prefix(request.prefix))
        for key in keys:
            self._erase(key)
        return Counted(count=len(keys), revision=self.revision + bool(keys))

    def _compare_and_set(self, request: CompareAndSet) -> CompareAndSetResult:
        if (request.expected_revision is None) == (request.expected_value is None):
            raise StoreUsageError(
                f"compare_and_set of {_shown(request.key)} takes exactly one expectation: expected_revision or "
                f"expected_value"
            )
        self._check_put(request.key, request.value, ttl=request.ttl, lease=request.lease)
        entry = self._entries.get(request.key)
        if request.expected_revision is not None:
            as_expected = (entry.mod_revision if entry else 0) == request.expected_revision
        else:
            as_expected = entry is not None and entry.value == request.expected_value
        if not as_expected:
            return _make_compared(False, entry)
        self._check_room(((request.key, len(request.value)),))
        self._write_put(request)
        return _make_compared(True, self._entries[request.key])

    def _add(self, request: Add) -> Added:
        self._check_rewrite(request)
        value = self._sum(request)
        self._check_room(((request.key, len(value)),))
        return _make_added(int(value), self._rewrite(request, value))

    def _append(self, request: Append) -> Added:
        self._check_rewrite(request)
        value = self._joined(request)
        self._check_room(((request.key, len(value)),))
        return Added(value=len(value), revision=self._rewrite(request, value))

    def _transact(self, request: Transact) -> TransactionResult:
        self._check_count(len(request.when), "conditions")
        for branch in (request.then, request.otherwise):
            self._check_count(len(branch), "operations")
        succeeded = all(map(self._holds, request.when))
        operations = request.then if succeeded else request.otherwise
        self._check_operations(operations)
        results = tuple(map(self._operate, operations))
        return TransactionResult(succeeded=succeeded, results=results, revision=self.revision + bool(self._events))

    def _operate(self, operation: Operation) -> int | bool | Entry | None:
        """Do one checked operation of a transaction."""
        match operation:
            case Put():
                return self._write_put(operation)
            case Get():
                return self._entries.get(operation.key)
            case Delete():
                return self._erase(operation.key)
            case Add():
                value = self._sum(operation)
                self._rewrite(operation, value)
                return int(value)
            case Append():
                value = self._joined(operation)
                self._rewrite(operation, value)
                return len(value)

    # -------------------------------------------------------------------------------------- leases

    def _grant(self, request: Grant, peer: int) -> Granted:
        self._check_ttl(request.ttl)
        if request.disconnect_ttl is not None:
            self._check_ttl(request.disconnect_ttl, name="disconnect_ttl")
        self._check_lease_room()
        lease = self._new_lease(request.ttl, disconnect_ttl=request.disconnect_ttl, peer=peer)
        return Granted(lease=lease.id, ttl=lease.ttl)

    def _new_lease(
        self, ttl: float, *, disconnect_ttl: float | None = None, peer: int | None = None, anonymous: bool = False
    ) -> LeaseRecord:
        lease = self._leases.grant(ttl, disconnect_ttl=disconnect_ttl, peer=peer, anonymous=anonymous)
        if self._facts is not None:
            self._facts.granted.append(
                SavedLease(id=lease.id, ttl=ttl, disconnect_ttl=disconnect_ttl, anonymous=anonymous)
            )
        return lease

    def _forget_lease(self, lease: LeaseRecord) -> None:
        self._leases.end(lease)
        if self._facts is not None:
            self._facts.ended.append(lease.id)

    def _revoke(self, request: Revoke) -> Done:
        self._end_lease(self._lease(request.lease))
        return Done()

    def _time_to_live(self, request: TimeToLive) -> LeaseState:
        lease = self._lease(request.lease)
        self._check_answer(sum(map(len, lease.keys)))
        return LeaseState(remaining=self._leases.remaining(lease), ttl=lease.ttl, keys=tuple(sorted(lease.keys)))

    def _lease(self, id: int) -> LeaseRecord:
        lease = self._leases.get(id)
        if lease is None:
            raise LeaseNotFound(f"lease {id} has lapsed or was revoked; grant a new one")
        return lease

    def _end_lease(self, lease: LeaseRecord) -> None:
        for key in sorted(lease.keys):
            self._erase(key)
        if self._leases.get(lease.id) is not None:  # an anonymous lease has already ended with its key
            self._forget_lease(lease)

    # -------------------------------------------------------------------------------------- watches and waits

    def _watch(self, request: Watch, peer: int, request_id: int) -> Response:
        if request.snapshot and request.start_revision is not None:
            raise StoreUsageError("a watch starts with a snapshot or at start_revision, not both")
        if request.start_revision is not None and request.start_revision > self.revision + 1:
            raise StoreUsageError(
                f"a watch cannot start at revision {request.start_revision}: the store is at {self.revision}"
            )
        self._check_size(request.prefix, "prefix")
        self._check_open(peer, watch_bytes(request.prefix))
        watcher = ((peer, request_id),)
        if request.snapshot:
            self._check_snapshot(request.prefix)
            self._deliveries.extend(
                Delivery(watchers=watcher, events=piece) for piece in self._snapshot(request.prefix)
            )
        elif request.start_revision is not None:
            past = self._history.since(request.start_revision, request.prefix)
            if past is None:
                return Failed(
                    kind=FailureKind.COMPACTED,
                    message=f"the changes from revision {request.start_revision} on are no longer kept: history begins "
                    f"at {self._history.compacted + 1}, since history_bytes_max is "
                    f"{self.limits.history_bytes_max}; watch with snapshot=True to be told of a reset instead",
                )
            self._deliveries.extend(Delivery(watchers=watcher, events=events) for events in past)
        self._watches.add(peer, request_id, request.prefix)
        return Watching(revision=self.revision)

    def _check_snapshot(self, prefix: str) -> None:
        size = sum(event_bytes(_put_event(self._entries[key])) for key in self._index.with_prefix(prefix))
        if size > self.limits.outbox_bytes_max:
            raise LimitExceeded(
                f"a snapshot of {prefix!r} takes {size} bytes; outbox_bytes_max is {self.limits.outbox_bytes_max}: "
                f"watch longer prefixes one by one"
            )

    def _snapshot(self, prefix: str) -> Iterable[tuple[Event, ...]]:
        """All keys under a prefix as puts, in pieces, the last one ending in `synced`."""
        piece: list[Event] = []
        size = 0
        for key in self._index.with_prefix(prefix):
            entry = self._entries[key]
            piece.append(_put_event(entry))
            size += key_bytes(key) + len(entry.value)
            if size >= SNAPSHOT_BATCH_BYTES:
                yield tuple(piece)
                piece, size = [], 0
        piece.append(Event(kind="synced", revision=self.revision))
        yield tuple(piece)

    def _wait(self, request: Wait, when: tuple[Condition, ...], peer: int, request_id: int) -> Listing | None:
        self._check_count(len(request.keys), "keys")
        entries = tuple(map(self._entries.get, request.keys))
        if all(entries):
            return self._listing(entries)
        for key in request.keys:
            self._check_key(key)
        names = frozenset(request.keys)
        missing = {key for key in names if key not in self._entries}
        cost = wait_bytes(request.keys, when)
        self._check_open(peer, cost)
        self._check_waits(peer, cost)
        parked = Parked(keys=request.keys, names=names, missing=missing, when=when)
        self._waits.add((peer, request_id), parked, cost=cost)
        return None

    def _answer_parked(self, watcher: Watcher, parked: Parked) -> None:
        """Answer a wait that has come to its end, either way."""
        peer, request_id = watcher
        response: Response
        if not all(map(self._holds, parked.when)):
            response = Failed(kind=FailureKind.CONDITION, message=self._broken(parked.when))
        elif not parked.missing:
            try:
                response = self._entries_of(parked.keys)
            except LimitExceeded as error:
                response = Failed(kind=FailureKind.LIMIT, message=str(error))
        else:
            return
        self._waits.remove(watcher)
        self._deliveries.append(Answer(peer=peer, request_id=request_id, response=response))

    # -------------------------------------------------------------------------------------- making a change

    def _write_put(self, request: Put | CompareAndSet) -> int:
        """Write a checked put at the next revision, and move the key to the lease it asks for."""
        lease = request.lease
        if request.ttl is not None:
            lease = self._new_lease(request.ttl, anonymous=True).id
        return self._write(request.key, request.value, lease)

    def _rewrite(self, request: Add | Append, value: bytes) -> int:
        """Write a new value and leave the key on the lease it is on; a new key goes on the lease that was asked for."""
        entry = self._entries.get(request.key)
        return self._write(request.key, value, entry.lease if entry else request.lease)

    def _write(self, key: str, value: bytes, lease: int | None) -> int:
        revision = self.revision + 1
        before = self._entries.get(key)
        if before is None:
            self._index.add(key)
            self._stored_bytes += ENTRY_OVERHEAD + key_bytes(key)
        else:
            self._stored_bytes -= len(before.value)
            if before.lease != lease:
                self._detach(key, before.lease)
        self._stored_bytes += len(value)
        entry = _make_entry(key, value, before.create_revision if before else revision, revision, lease)
        self._entries[key] = entry
        if lease is not None:
            self._lease(lease).keys.add(key)
        self._events.append(_put_event(entry))
        return revision

    def _erase(self, key: str) -> bool:
        """Delete a key at the next revision, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._index.remove(key)
        self._stored_bytes -= ENTRY_OVERHEAD + key_bytes(key) + len(entry.value)
        self._detach(key, entry.lease)
        self._events.append(Event(kind="delete", revision=self.revision + 1, key=key))
        return True

    def _detach(self, key: str, lease_id: int | None) -> None:
        lease = None if lease_id is None else self._leases.get(lease_id)
        if lease is not None:
            lease.keys.discard(key)
            if lease.anonymous and not lease.keys:
                self._forget_lease(lease)

    def _announce(self) -> None:
        """Close the revision being made, if anything changed, and collect who must hear of it."""
        if not self._events:
            return
        events, self._events = tuple(self._events), []
        self.revision += 1
        self._history.append(events)
        if self._facts is not None:
            self._facts.revisions.append(events)
            self._facts.compacted = self._history.compacted
        for watchers, about in self._watches.interested(events):
            self._deliveries.append(Delivery(watchers=watchers, events=about))
        if self._waits:
            for watcher, parked in self._waits.stirred(events).items():
                self._answer_parked(watcher, parked)

    # -------------------------------------------------------------------------------------- conditions and limits

    def _holds(self, condition: Condition) -> bool:
        return condition.holds(self._entries.get(condition.key))

    def _require(self, when: Sequence[Condition]) -> None:
        if not all(map(self._holds, when)):
            raise ConditionFailed(self._broken(when))

    def _broken(self, when: Sequence[Condition]) -> str:
        broken = next(condition for condition in when if not self._holds(condition))
        return f"{broken.target.name.lower()} of {_shown(broken.key)} is no longer {_shown(broken.expected)}"

    def _sum(self, request: Add) -> bytes:
        entry = self._entries.get(request.key)
        try:
            total = (_number(entry.value) if entry else 0) + request.amount
        except ValueError:
            raise StoreUsageError(
                f"{request.key!r} holds {entry.value[:40]!r}, which is no decimal number to add to"  # type: ignore[union-attr]
            ) from None
        if abs(total) > ADD_MAX:
            raise StoreUsageError(f"adding {request.amount} to {request.key!r} passes 64 bits")
        return b"%d" % total

    def _joined(self, request: Append) -> bytes:
        entry = self._entries.get(request.key)
        value = (entry.value if entry else b"") + request.value
        self._check_value(request.key, len(value))
        return value

    def _check_operations(self, operations: tuple[Operation, ...]) -> None:
        """Refuse a branch as a whole, before its first write."""
        room = []
        written: dict[str, int] = {}  # and the size that its value will have
        answer = leases = 0
        for operation in operations:
            if isinstance(operation, Get):
                entry = self._entries.get(operation.key)
                answer += max(_entry_bytes(entry), key_bytes(operation.key) + written.get(operation.key, 0))
                continue
            if operation.key in written:
                raise StoreUsageError(f"a transaction writes {_shown(operation.key)} twice; once is what it may")
            written[operation.key] = 0
            match operation:
                case Put():
                    leases += operation.ttl is not None
                    self._check_put(
                        operation.key, operation.value, ttl=operation.ttl, lease=operation.lease, leases=leases
                    )
                    size = len(operation.value)
                case Add():
                    self._check_rewrite(operation)
                    size = len(self._sum(operation))
                case Append():
                    self._check_rewrite(operation)
                    size = len(self._joined(operation))
                case Delete():
                    continue
                case _:
                    assert_never(operation)
            written[operation.key] = size
            room.append((operation.key, size))
        self._check_revision(sum(written.values()))
        self._check_room(room)
        self._check_answer(answer)

    def _check_session(self, session: Session, request: Request[Any]) -> Failed | None:
        """What to answer a mutation that could not be kept, or whose reply could not."""
        limits = self.limits
        if self.read_only is not None:
            message = f"nothing can be written now, and nothing was: {self.read_only}; reading goes on"
            return Failed(kind=FailureKind.LIMIT, message=message)
        if session.replies >= limits.session_replies_max:
            held = f"{session.replies} replies of this client"
            limit = f"session_replies_max is {limits.session_replies_max}"
        elif session.held_bytes >= limits.session_replies_bytes_max:
            held = f"{session.held_bytes} bytes of replies of this client"
            limit = f"session_replies_bytes_max is {limits.session_replies_bytes_max}"
        elif self._sessions.held_bytes >= limits.replies_bytes_max and not self._made_room(session, request):
            held = f"{self._sessions.held_bytes} bytes of replies, {session.held_bytes} of them of this client,"
            limit = f"replies_bytes_max is {limits.replies_bytes_max}"
        else:
            return None
        remedy = "read replies before sending more" if session.replies else "come again, or ask for no large values"
        message = f"{held} wait to be acknowledged; {limit}: {remedy}"
        return Failed(kind=FailureKind.LIMIT, message=message)

    def _made_room(self, session: Session, request: Request[Any]) -> bool:
        """Whether a reply to this session can be kept, though all of them together hold too much.

        Who has acknowledged everything is let through, unless that may take much more: what others do not read is not
        to keep it from working, and many who come for one large reply each are not to take all memory there is.
        """
        self._note_forgotten(self._sessions.make_room(self.limits.replies_bytes_max))
        if self._sessions.held_bytes < self.limits.replies_bytes_max:
            return True
        return not session.replies and reply_cost_at_most(request, self._entries) <= SMALL_REPLY_BYTES

    def _check_put(self, key: str, value: bytes, *, ttl: float | None, lease: int | None, leases: int = 1) -> None:
        """Refuse a put; `leases` is how many are being made with this one, if it makes one."""
        self._check_key(key)
        self._check_value(key, len(value))
        if ttl is not None:
            if lease is not None:
                raise StoreUsageError(f"a put of {_shown(key)} takes ttl or lease, not both")
            self._check_ttl(ttl)
            self._check_lease_room(leases)
        if lease is not None:
            self._check_lease(lease, key)

    def _check_rewrite(self, request: Add | Append) -> None:
        """Refuse an add or an append."""
        self._check_key(request.key)
        if request.lease is not None:
            self._check_lease(request.lease, request.key)

    def _check_lease(self, lease: int, key: str) -> None:
        """Refuse to put a key on a lease that is gone, or is another key's own."""
        record = self._lease(lease)
        if record.anonymous and key not in record.keys:
            # It ends with its one key, which may be about to go in this very transaction.
            raise StoreUsageError(
                f"lease {lease} was made by a put with ttl=, for that one key; grant one to put {_shown(key)} on"
            )

    def _check_key(self, key: str) -> None:
        if not key:
            raise StoreUsageError("a key has at least one character")
        self._check_size(key, "key")

    def _check_size(self, key: str, what: str) -> None:
        """Refuse a key that is too long; also as a prefix, since a longer one starts no key and only takes memory."""
        most = self.limits.key_bytes_max
        if len(key) * 4 > most and len(key.encode()) > most:
            raise LimitExceeded(
                f"the {what} {_shown(key)} has {len(key.encode())} bytes; key_bytes_max is {most}: use a shorter one"
            )

    def _check_value(self, key: str, size: int) -> None:
        if size > self.limits.value_bytes_max:
            raise LimitExceeded(
                f"the value for {_shown(key)} has {size} bytes; value_bytes_max is {self.limits.value_bytes_max}: "
                f"store a reference to it instead, or start the server with a higher limit"
            )

    def _check_room(self, writes: Iterable[tuple[str, int]]) -> None:
        """Refuse writes that the store has no room for; each is a key and the size its value will have."""
        keys, size = len(self._entries), self._stored_bytes
        for key, value_size in writes:
            before = self._entries.get(key)
            if before is None:
                keys += 1
                size += ENTRY_OVERHEAD + key_bytes(key) + value_size
            else:
                size += value_size - len(before.value)
        if keys > self.limits.keys_max and keys > len(self._entries):
            raise LimitExceeded(
                f"the store holds {len(self._entries)} keys; keys_max is {self.limits.keys_max}: delete some"
            )
        if size > self.limits.stored_bytes_max and size > self._stored_bytes:
            raise LimitExceeded(
                f"the store would hold {size} bytes; stored_bytes_max is {self.limits.stored_bytes_max}: delete some"
            )

    def _check_revision(self, size: int) -> None:
        """Refuse to change more at once than a disk takes in one piece, and than watchers take in one message."""
        if size > self.limits.revision_bytes_max:
            raise LimitExceeded(
                f"the transaction would write values of {size} bytes; revision_bytes_max is "
                f"{self.limits.revision_bytes_max}: write fewer keys at once (an append writes the whole value again)"
            )

    def _check_ttl(self, ttl: float, *, name: str = "ttl") -> None:
        if not ttl > 0:
            raise StoreUsageError(f"{name} is {ttl:g} s; it must be above 0")
        if ttl > self.limits.lease_ttl_max:
            raise LimitExceeded(
                f"{name} is {ttl:g} s; lease_ttl_max is {self.limits.lease_ttl_max:g} s: ask for less, and renew it"
            )

    def _check_lease_room(self, leases: int = 1) -> None:
        if len(self._leases) + leases > self.limits.leases_max:
            raise LimitExceeded(
                f"the store has {len(self._leases)} leases; leases_max is {self.limits.leases_max}: revoke some, or "
                f"start the server with a higher limit"
            )

    def _check_open(self, peer: int, cost: int) -> None:
        count = self._watches.of(peer) + self._waits.of(peer)
        if count >= self.limits.watches_max:
            raise LimitExceeded(
                f"this connection has {count} watches and waits; watches_max is {self.limits.watches_max}: end some"
            )
        size = self._watches.bytes + self._waits.bytes + cost
        if size > self.limits.parked_bytes_max:
            raise LimitExceeded(
                f"the watches and waits of all connections would take {size} bytes; parked_bytes_max is "
                f"{self.limits.parked_bytes_max}: end some, or wait for fewer keys at once"
            )

    def _check_waits(self, peer: int, cost: int) -> None:
        size = self._waits.bytes_of(peer) + cost
        if size > self.limits.waits_bytes_max:
            raise LimitExceeded(
                f"the waits of this connection would take {size} bytes; waits_bytes_max is "
                f"{self.limits.waits_bytes_max}: wait for fewer keys at once"
            )

    def _check_answer(self, size: int) -> None:
        """Refuse to answer with more than a message may have: one key may be asked for thousands of times."""
        if size > self.limits.frame_bytes_max:
            raise LimitExceeded(
                f"the answer would take {size} bytes; frame_bytes_max is {self.limits.frame_bytes_max}: ask for fewer "
                f"keys at once"
            )

    def _check_count(self, count: int, what: str) -> None:
        if count > self.limits.operations_max:
            raise LimitExceeded(
                f"the request names {count} {what}; operations_max is {self.limits.operations_max}: split it"
            )


def _put_event(entry: Entry) -> Event:
    return _make_event("put", entry.mod_revision, entry.key, entry.value, entry.create_revision, entry.lease)


def _entry_bytes(entry: Entry | None) -> int:
    """About how many bytes an entry takes in an answer."""
    return 1 if entry is None else key_bytes(entry.key) + len(entry.value) + 40


def _shown(value: object) -> str:
    """A key or a value as messages show it: they end up in logs, and a key that was refused may be megabytes long."""
    if isinstance(value, str | bytes) and len(value) > 40:
        return f"{value[:40]!r}..."
    return repr(value)


def _number(value: bytes) -> int:
    """A decimal number as `add` keeps it. Python's int() takes underscores and blanks; the store does not."""
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(digits) > 20:
        raise ValueError(value)
    return int(value)


def _forgotten(request_id: int) -> Failed:
    return Failed(
        kind=FailureKind.FORGOTTEN,
        message=f"request {request_id} was applied before the connection broke, but its reply is no longer kept",
    )


_HANDLERS: dict[type, Callable[[Engine, Any], Response]] = {
    Get: Engine._get,
    GetMany: Engine._get_many,
    List: Engine._list,
    Count: Engine._count,
    Ping: Engine._ping,
    Stats: Engine._stats,
    Excessive: Engine._excessive,
    Put: Engine._put,
    Delete: Engine._delete,
    DeletePrefix: Engine._delete_prefix,
    CompareAndSet: Engine._compare_and_set,
    Add: Engine._add,
    Append: Engine._append,
    Transact: Engine._transact,
    Revoke: Engine._revoke,
    TimeToLive: Engine._time_to_live,
}
