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

from typing import TYPE_CHECKING, Any

from store.engine.admission import Admission, shown, sum_of
from store.engine.applied import Answer, Applied, Delivery, Overtaken, Work
from store.engine.changes import Changes
from store.engine.changeset import Facts, KeptReply
from store.engine.keyspace import Keyspace, answer_bytes, put_event
from store.engine.leases import Leases
from store.engine.reply_size import reply_cost
from store.engine.scans import PART_BYTES, Scan
from store.engine.sessions import Forgotten, Session, Sessions
from store.engine.waits import Parked, Waits, wait_bytes
from store.engine.watches import History, Watcher, Watches, watch_bytes
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
    GroupPage,
    Guarded,
    KeepAlive,
    KeyGroup,
    LeaseState,
    List,
    ListGroups,
    Listing,
    ListingPart,
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
    Unknown,
    Wait,
    Watch,
    Watching,
    Written,
    mutates,
    only_takes_away,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from store.engine.changeset import Saved
    from store.engine.keyspace import Groups

__all__ = ["Answer", "Applied", "Delivery", "Engine", "Overtaken", "Work"]

REPLAY_REVISIONS = 2048  # of history, looked at in one step: about half a millisecond
GROUPS_AT_ONCE = 512  # of one page: about half a millisecond
LAPSES_AT_ONCE = 256  # leases that one tick ends; the next one comes a millisecond later


# Of what almost every request makes.
_make_applied, _make_entry = constructor(Applied), constructor(Entry)
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
        only_deletes: Why nothing but deletes can be written now; None if more can.
    """

    def __init__(self, *, store_id: str, limits: Limits | None = None, durable: bool = False) -> None:
        self.store_id = store_id
        self.limits = limits or Limits()
        self.read_only: str | None = None
        self.only_deletes: str | None = None
        self._keys = Keyspace(self.limits)
        self._leases = Leases()
        self._watches = Watches()
        self._history = History(self.limits.history_bytes_max)
        self._sessions = Sessions(ttl=self.limits.session_ttl, sessions_max=self.limits.sessions_max)
        self._session_of: dict[int, Session] = {}
        self._waits = Waits()
        self._changes = Changes(self._keys, self._leases, facts=Facts() if durable else None)
        self._admission = Admission(
            self.limits,
            keys=self._keys,
            leases=self._leases,
            watches=self._watches,
            waits=self._waits,
            sessions=self._sessions,
        )
        self._peer = self._request_id = 0  # whose request is being carried out, and which
        self._when: tuple[Condition, ...] = ()  # on what condition
        self._deliveries: list[Delivery | Answer | Overtaken] = []
        self._work: Work | None = None  # what is left to do of the request being carried out
        self._works: dict[int, Work] = {}  # by peer, each of which has one at most
        self._requests = 0
        self._lapsed = 0

    @property
    def groups(self) -> Groups:
        """What each group of keys takes."""
        return self._keys.groups

    @property
    def revision(self) -> int:
        """How many changes there have been."""
        return self._keys.revision

    @classmethod
    def restore(cls, saved: Saved, *, limits: Limits | None = None, now: float) -> Engine:
        """A durable store as it was saved; it goes on from there."""
        engine = cls(store_id=saved.store_id, limits=limits, durable=True)
        engine._keys.revision = saved.revision
        engine._keys.groups.now = now
        engine._leases.restore(saved.leases, last=saved.last_lease)
        for entry in saved.entries:
            engine._keys.put(entry, None)
            lease = engine._leases.get(entry.lease) if entry.lease is not None else None
            if lease is not None:
                lease.keys[entry.key] = None
        engine._history.restore(saved.history, compacted=saved.compacted)
        engine._sessions.restore(saved.sessions, last=saved.last_session, now=now, cost=reply_cost)
        return engine

    def take_facts(self) -> Facts | None:
        """What must be made durable before anything of it is said; None if there is nothing."""
        facts = self._changes.facts
        if not facts:
            return None
        self._changes.facts = Facts()
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
        if self._changes.facts is not None and self._sessions.made != made:
            self._changes.facts.opened(session.id, session.number)
        self._session_of[peer] = session
        return session.number, previous

    def disconnect(self, peer: int, *, now: float, for_good: bool = False) -> None:
        """The connection of `peer` has closed; `for_good` if its client said that it will not come back."""
        self._leases.advance(now)
        self._leases.peer_closed(peer)
        self._watches.peer_closed(peer)
        work = self._works.pop(peer, None)
        if work is not None and work.scan is not None:
            del self._changes.scans[work.scan]
        self._waits.peer_closed(peer)
        session = self._session_of.pop(peer, None)
        if session is not None:
            if for_good:
                if self._sessions.end(session, peer=peer) and self._changes.facts is not None:
                    self._changes.facts.forgotten(session.id)
            else:
                self._sessions.close(session, peer=peer, now=now)

    def _expire_sessions(self, now: float) -> None:
        self._note_forgotten(self._sessions.expire(now))

    def _note_forgotten(self, forgotten: list[bytes]) -> None:
        if self._changes.facts is not None:
            for session_id in forgotten:
                self._changes.facts.forgotten(session_id)

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
        self._keys.groups.now = now
        session = self._session_of[peer]
        session.acknowledge(acknowledged)
        changes = mutates(request)
        if changes:
            replayed = session.replay(request_id)
            if isinstance(replayed, Forgotten):
                return Applied(response=_forgotten(request_id))
            if replayed is not None:
                self._keep_again(replayed, peer)
                return Applied(response=replayed)
            refusal = self._refuse_mutation(session, request)
            if refusal is not None:
                return Applied(response=refusal)  # not kept: there is no room for it, and it says that nothing was done
        try:
            self._peer, self._request_id = peer, request_id
            response = self._dispatch(request)
        except StoreError as error:
            assert not self._changes.begun, "a refused request has changed nothing"
            response = Failed(kind=_FAILURES[type(error)], message=str(error))
        self._announce()
        work, self._work = self._work, None
        if work is not None:
            self._works[peer] = work
        if changes and response is not None:
            session.keep(request_id, response, reply_cost(response))
            if self._changes.facts is not None:
                self._changes.facts.replies.append(
                    KeptReply(
                        session_id=session.id, acknowledged=acknowledged, request_id=request_id, response=response
                    )
                )
        return _make_applied(response, self._take_deliveries(), work)

    def go_on(self, work: Work) -> Applied:
        """Do the next step of a request that takes several. What others have done meanwhile is not seen by it."""
        response: Response | None = None
        if work.prefix is None:
            response = self._list_part(work)
        else:
            self._open_watch(work)
        if self._work is None:
            del self._works[work.watcher[0]]
        more, self._work = self._work, None
        return _make_applied(response, self._take_deliveries(), more)

    def _refuse_mutation(self, session: Session, request: Request[Any]) -> Failed | None:
        """What to answer a mutation that cannot be made, or whose reply could not be kept; None if it may be made."""
        if self.read_only is not None:
            message = f"nothing can be written now, and nothing was: {self.read_only}; reading goes on"
            return Failed(kind=FailureKind.LIMIT, message=message)
        if self.only_deletes is not None and not only_takes_away(request):
            message = f"only deletes can be written now, and nothing was: {self.only_deletes}; delete something"
            return Failed(kind=FailureKind.LIMIT, message=message)
        refusal = self._admission.check_session(session)
        if refusal is None and self._sessions.held_bytes >= self.limits.replies_bytes_max:
            self._note_forgotten(self._sessions.make_room(self.limits.replies_bytes_max))
            refusal = self._admission.check_reply(session, request)
        return refusal

    def _take_deliveries(self) -> tuple[Delivery | Answer | Overtaken, ...]:
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

    def tick(self, *, now: float) -> tuple[Delivery | Answer | Overtaken, ...]:
        """Let leases lapse whose time is over, each at a revision of its own, and sessions that were abandoned.

        One with more than `writes_max` keys goes in several revisions, and it and whatever else is due in several
        ticks, so that others are served in between: it is due again at once.
        """
        self._leases.advance(now)
        room = self.limits.writes_max
        for lease in self._leases.due(most=LAPSES_AT_ONCE):
            if room <= 0:
                self._leases.due_again(lease)
                continue
            self._lapsed += not lease.ending
            room -= len(lease.keys)
            if not self._changes.end_lease(lease, most=self.limits.writes_max):
                self._leases.due_again(lease)
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
            "keys": len(self._keys.entries),
            "stored_bytes": self._keys.bytes,
            "groups": len(self._keys.groups),
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

    @property
    def _asker(self) -> Watcher:
        return self._peer, self._request_id

    def _dispatch(self, request: Request[Any]) -> Response | None:
        """Carry out one request; None if it is parked."""
        self._when = ()
        if type(request) is Guarded:
            self._when, request = request.when, request.request
            self._admission.check_count(len(self._when), "conditions")
            self._require(self._when)
        handle = _HANDLERS.get(type(request))
        if handle is None:
            raise StoreUsageError(f"{type(request).__name__} cannot be asked of this store")
        return handle(self, request)

    # -------------------------------------------------------------------------------------- reads

    def _get(self, request: Get) -> Found:
        return _make_found(self._keys.get(request.key))

    def _get_many(self, request: GetMany) -> Listing:
        self._admission.check_count(len(request.keys), "keys")
        return self._entries_of(request.keys)

    def _entries_of(self, keys: tuple[str, ...]) -> Listing:
        return self._listing(tuple(map(self._keys.get, keys)))

    def _listing(self, entries: tuple[Entry | None, ...]) -> Listing:
        self._admission.check_answer(sum(map(answer_bytes, entries)))
        return _make_listing(entries, self.revision)

    def _list(self, request: List) -> Listing | ListingPart:
        scan = Scan(self._keys, request.prefix)
        return self._list_part(Work(watcher=self._asker, scan=scan, keys_only=request.keys_only))

    def _list_part(self, work: Work) -> Listing | ListingPart:
        scan = work.scan
        assert scan is not None, "what is listed is read"
        entries = scan.part()
        if work.keys_only:
            entries = [
                _make_entry(each.key, b"", each.create_revision, each.mod_revision, each.lease) for each in entries
            ]
        if self._scans_on(work):
            return ListingPart(entries=tuple(entries))
        return _make_listing(tuple(entries), scan.revision)

    def _scans_on(self, work: Work) -> bool:
        """Whether a scan has not come to its end; then it is told of changes from now on, and goes on later."""
        assert work.scan is not None
        if work.scan.done:
            self._changes.scans.pop(work.scan, None)
            return False
        self._changes.scans[work.scan] = None
        self._work = work
        return True

    def _count(self, request: Count) -> Counted:
        return Counted(count=self._keys.index.count(request.prefix), revision=self.revision)

    def _ping(self, _: Ping) -> Pong:
        return Pong(revision=self.revision)

    def _stats(self, _: Stats) -> Figures:
        return Figures(figures=self.figures())

    def _list_groups(self, request: ListGroups) -> GroupPage:
        self._admission.check_size(request.after, "name")
        groups = self._keys.groups
        page = groups.page(after=request.after, most=GROUPS_AT_ONCE + 1)
        return GroupPage(
            groups=tuple(
                KeyGroup(name=group.name, keys=group.keys, bytes=group.bytes, age=max(groups.now - group.since, 0.0))
                for group in page[:GROUPS_AT_ONCE]
            ),
            more=len(page) > GROUPS_AT_ONCE,
        )

    def _excessive(self, request: Excessive) -> Response:
        raise LimitExceeded(
            f"the request holds more than {request.elements_max} elements, and operations_max is "
            f"{self.limits.operations_max}: split it"
        )

    def _unknown(self, request: Unknown) -> Failed:
        message = f"this server does not know {request.what}: it is of an older release than the client; upgrade it"
        return Failed(kind=FailureKind.UNSUPPORTED, message=message)

    # -------------------------------------------------------------------------------------- writes

    def _put(self, request: Put) -> Written:
        self._admission.check_put(request.key, request.value, ttl=request.ttl, lease=request.lease)
        self._admission.check_room(((request.key, len(request.value)),))
        return _make_written(self._changes.put(request))

    def _delete(self, request: Delete) -> Counted:
        return Counted(count=int(self._changes.erase(request.key)), revision=self._changes.revision)

    def _delete_prefix(self, request: DeletePrefix) -> Counted:
        most = self.limits.writes_max
        if request.at_most is None:
            self._admission.check_writes(self._keys.index.count(request.prefix))
        else:
            most = max(min(most, request.at_most), 0)
        keys = self._keys.index.stretch(request.prefix, after=None, most=most)
        for key in keys:
            self._changes.erase(key)
        return Counted(count=len(keys), revision=self._changes.revision)

    def _compare_and_set(self, request: CompareAndSet) -> CompareAndSetResult:
        if (request.expected_revision is None) == (request.expected_value is None):
            raise StoreUsageError(
                f"compare_and_set of {shown(request.key)} takes exactly one expectation: expected_revision or "
                f"expected_value"
            )
        self._admission.check_put(request.key, request.value, ttl=request.ttl, lease=request.lease)
        entry = self._keys.get(request.key)
        if request.expected_revision is not None:
            as_expected = (entry.mod_revision if entry else 0) == request.expected_revision
        else:
            as_expected = entry is not None and entry.value == request.expected_value
        if not as_expected:
            return _make_compared(False, entry)
        self._admission.check_room(((request.key, len(request.value)),))
        self._changes.put(request)
        return _make_compared(True, self._keys.entries[request.key])

    def _add(self, request: Add) -> Added:
        self._admission.check_rewrite(request)
        value = sum_of(request, self._keys.get(request.key))
        self._admission.check_room(((request.key, len(value)),))
        return _make_added(*self._changes.add(request))

    def _append(self, request: Append) -> Added:
        self._admission.check_rewrite(request)
        self._admission.check_room(((request.key, self._admission.check_append(request)),))
        return _make_added(*self._changes.append(request))

    def _transact(self, request: Transact) -> TransactionResult:
        self._admission.check_count(len(request.when), "conditions")
        for branch in (request.then, request.otherwise):
            self._admission.check_count(len(branch), "operations")
        succeeded = all(map(self._holds, request.when))
        operations = request.then if succeeded else request.otherwise
        self._admission.check_operations(operations)
        results = tuple(map(self._changes.operate, operations))
        return TransactionResult(succeeded=succeeded, results=results, revision=self._changes.revision)

    # -------------------------------------------------------------------------------------- leases

    def _grant(self, request: Grant) -> Granted:
        self._admission.check_ttl(request.ttl)
        if request.disconnect_ttl is not None:
            self._admission.check_ttl(request.disconnect_ttl, name="disconnect_ttl")
        self._admission.check_lease_room()
        lease = self._changes.grant(request.ttl, disconnect_ttl=request.disconnect_ttl, peer=self._peer)
        return Granted(lease=lease.id, ttl=lease.ttl)

    def _keep_alive(self, request: KeepAlive) -> Granted:
        lease = self._admission.lease(request.lease)
        self._leases.keep_alive(lease, peer=self._peer)
        return Granted(lease=lease.id, ttl=lease.ttl)

    def _revoke(self, request: Revoke) -> Done:
        lease = self._admission.lease(request.lease)
        self._admission.check_writes(len(lease.keys))
        self._changes.end_lease(lease, most=self.limits.writes_max)
        return Done()

    def _time_to_live(self, request: TimeToLive) -> LeaseState:
        lease = self._admission.lease(request.lease)
        self._admission.check_count(len(lease.keys), "keys, those of the lease")
        self._admission.check_answer(sum(map(len, lease.keys)))
        return LeaseState(remaining=self._leases.remaining(lease), ttl=lease.ttl, keys=tuple(sorted(lease.keys)))

    # -------------------------------------------------------------------------------------- watches and waits

    def _cancel(self, request: Cancel) -> Done:
        target = self._peer, request.target
        if not self._watches.remove(*target) and target in self._waits:
            self._waits.remove(target)
        return Done()

    def _watch(self, request: Watch) -> Response:
        if request.snapshot and request.start_revision is not None:
            raise StoreUsageError("a watch starts with a snapshot or at start_revision, not both")
        start = self.revision + 1 if request.start_revision is None else max(request.start_revision, 1)
        if start > self.revision + 1:
            raise StoreUsageError(f"a watch cannot start at revision {start}: the store is at {self.revision}")
        self._admission.check_size(request.prefix, "prefix")
        self._admission.check_open(self._peer, watch_bytes(request.prefix))
        scan = Scan(self._keys, request.prefix) if request.snapshot else None
        if start <= self._history.compacted:
            return Failed(
                kind=FailureKind.COMPACTED,
                message=f"the changes from revision {start} on are no longer kept: history begins "
                f"at {self._history.compacted + 1}, since history_bytes_max is "
                f"{self.limits.history_bytes_max}; watch with snapshot=True to be told of a reset instead",
            )
        self._open_watch(Work(watcher=self._asker, scan=scan, prefix=request.prefix, next_revision=start))
        return Watching(revision=self.revision)

    def _open_watch(self, work: Work) -> None:
        """Tell a watch what is there, or what has happened since; once it knows all, it is told of every change."""
        watcher = (work.watcher,)
        assert work.prefix is not None
        if work.scan is not None:
            events = list(map(put_event, work.scan.part()))
            if self._scans_on(work):
                self._deliveries.append(Delivery(watchers=watcher, events=tuple(events)))
                return
            events.append(Event(kind="synced", revision=work.scan.revision))
            self._deliveries.append(Delivery(watchers=watcher, events=tuple(events)))
            work.scan = None
        past = self._history.page(work.next_revision, work.prefix, most=REPLAY_REVISIONS, bytes_max=PART_BYTES)
        if past is None:
            self._deliveries.append(Overtaken(watcher=work.watcher, revision=work.next_revision - 1))
            return
        found, work.next_revision = past
        self._deliveries.extend(Delivery(watchers=watcher, events=events) for events in found)
        if work.next_revision <= self.revision:
            self._work = work
        else:
            self._watches.add(*work.watcher, work.prefix)

    def _wait(self, request: Wait) -> Listing | None:
        peer, when = self._peer, self._when
        self._admission.check_count(len(request.keys), "keys")
        entries = tuple(map(self._keys.get, request.keys))
        if all(entries):
            return self._listing(entries)
        for key in request.keys:
            self._admission.check_key(key)
        cost = wait_bytes(request.keys, when)
        self._admission.check_open(peer, cost)
        self._admission.check_waits(peer, cost)
        parked = Parked(keys=request.keys, missing=entries.index(None), when=when)
        self._waits.add((peer, self._request_id), parked, cost=cost)
        return None

    def _answer_parked(self, watcher: Watcher, parked: Parked) -> None:
        """Answer a wait that has come to its end, either way."""
        peer, request_id = watcher
        response: Response
        if not all(map(self._holds, parked.when)):
            response = Failed(kind=FailureKind.CONDITION, message=self._broken(parked.when))
        elif (missing := parked.next_missing(self._keys.entries)) is not None:
            self._waits.move(watcher, missing)
            return
        else:
            try:
                response = self._entries_of(parked.keys)
            except LimitExceeded as error:
                response = Failed(kind=FailureKind.LIMIT, message=str(error))
        self._waits.remove(watcher)
        self._deliveries.append(Answer(peer=peer, request_id=request_id, response=response))

    # -------------------------------------------------------------------------------------- making a change

    def _announce(self) -> None:
        """Close the revision being made, if anything changed, and collect who must hear of it."""
        events = self._changes.close()
        if not events:
            return
        self._history.append(events)
        if self._changes.facts is not None:
            self._changes.facts.revisions.append(events)
            self._changes.facts.compacted = self._history.compacted
        for watchers, about in self._watches.interested(events):
            self._deliveries.append(Delivery(watchers=watchers, events=about))
        if self._waits:
            for watcher, parked in self._waits.stirred(events).items():
                self._answer_parked(watcher, parked)

    # -------------------------------------------------------------------------------------- conditions and limits

    def _holds(self, condition: Condition) -> bool:
        return condition.holds(self._keys.get(condition.key))

    def _require(self, when: Sequence[Condition]) -> None:
        if not all(map(self._holds, when)):
            raise ConditionFailed(self._broken(when))

    def _broken(self, when: Sequence[Condition]) -> str:
        broken = next(condition for condition in when if not self._holds(condition))
        return f"{broken.target.name.lower()} of {shown(broken.key)} is no longer {shown(broken.expected)}"


def _forgotten(request_id: int) -> Failed:
    return Failed(
        kind=FailureKind.FORGOTTEN,
        message=f"request {request_id} was applied before the connection broke, but its reply is no longer kept",
    )


_HANDLERS: dict[type, Callable[[Engine, Any], Response | None]] = {
    Get: Engine._get,
    GetMany: Engine._get_many,
    List: Engine._list,
    Count: Engine._count,
    Ping: Engine._ping,
    Stats: Engine._stats,
    ListGroups: Engine._list_groups,
    Excessive: Engine._excessive,
    Unknown: Engine._unknown,
    Put: Engine._put,
    Delete: Engine._delete,
    DeletePrefix: Engine._delete_prefix,
    CompareAndSet: Engine._compare_and_set,
    Add: Engine._add,
    Append: Engine._append,
    Transact: Engine._transact,
    Revoke: Engine._revoke,
    TimeToLive: Engine._time_to_live,
    Grant: Engine._grant,
    KeepAlive: Engine._keep_alive,
    Watch: Engine._watch,
    Wait: Engine._wait,
    Cancel: Engine._cancel,
}
