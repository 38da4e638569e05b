"""The handlers of requests, one method per kind."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from store import messages
from store.engine.applied import EventBatch, LongRead, WaitEnd, WatchLost
from store.engine.keyspace import entry_answer_bytes
from store.engine.snapshots import PART_BYTES, STEP_KEYS, Snapshot
from store.engine.waits import ParkedWait, wait_bytes
from store.engine.watches import Watcher, watch_bytes
from store.errors import ConditionFailed, LeaseNotFound, LimitExceeded, StoreError, StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from store.engine.changes import OpenRevision
    from store.engine.leases import LeaseRecord
    from store.engine.state import StoreState
    from store.messages import Condition, Entry, Operation, Request, Response

REPLAY_REVISIONS = 2048  # revisions of the history read in one step: 0.5 ms
GROUPS_AT_ONCE = 512  # groups in one answer: 0.5 ms
NOTES_AT_ONCE = 512
LOOKS_A_STEP = 2048  # keys looked up for postponed waits in one step: 0.5 ms
LOOKS_OF_A_WAIT = 32  # the fixed cost of checking a wait, counted in looked-up keys
PUTS_ON_LEASE = (messages.Put, messages.Create, messages.Add, messages.Append)  # these may put a key on a lease


class RequestExecutor:
    """Carries out requests; `deliveries` are the messages besides the response."""

    def __init__(self, state: StoreState, changes: OpenRevision, *, figures: Callable[[], dict[str, Any]]) -> None:
        self._limits, self._keys, self._leases = state.limits, state.keys, state.leases
        self._watches, self._waits, self._postponed = state.watches, state.waits, state.postponed
        self._history, self._snapshots, self._past = state.history, state.snapshots, state.past
        self._state, self._changes, self._figures = state, changes, figures
        # The current request's peer, (peer, request id), and conditions.
        self._peer = 0
        self._asker: Watcher = (0, 0)
        self._when: tuple[Condition, ...] = ()
        self.deliveries: list[EventBatch | WaitEnd | WatchLost] = []
        self.work: LongRead | None = None

    def carry_out(self, request: Request[Any], peer: int, request_id: int) -> Response | None:
        """Carry out one request; return None if it waits for missing keys."""
        self._peer, self._asker, self._when = peer, (peer, request_id), ()
        return _HANDLERS.get(type(request), RequestExecutor._refuse_unknown_type)(self, request)

    def _refuse_unknown_type(self, request: Any) -> Response | None:
        raise StoreUsageError(f"{type(request).__name__} is no request that this store takes")

    def _run_if_conditions_hold(self, request: messages.Guarded[Any]) -> Response | None:
        self._state.check_limit("operations_max", len(request.when), "conditions")
        if not _all_hold(request.when, self._keys.entries):
            raise ConditionFailed(_failure_text(request.when, self._keys.entries))
        self._when, inner = request.when, request.request
        handle = _HANDLERS.get(type(inner), RequestExecutor._refuse_unknown_type)
        return handle(self, inner) if type(inner) is not messages.Guarded else self._refuse_unknown_type(inner)

    def continue_long_request(self, work: LongRead) -> Response | None:
        """See `Engine.continue_long_request`."""
        if work.prefix is None:
            return self._next_list_part(work)
        self._open_watch(work)
        return None

    def _get(self, request: messages.Get) -> messages.Found:
        if not request.key:
            self._state.check_key(request.key)
        return messages.Found(self._keys.get(request.key))

    def _get_many(self, request: messages.GetMany) -> messages.Listing | messages.ListingPart:
        self._state.check_limit("operations_max", len(request.keys), "keys")
        if "" in request.keys:
            self._state.check_key("")
        listing = self._make_listing(tuple(map(self._keys.get, request.keys)), self._keys.revision)
        if len(request.keys) <= STEP_KEYS:
            return listing
        snapshot = Snapshot.of_keys(self._keys, self._past, request.keys, list(listing.entries))
        return self._next_list_part(LongRead(watcher=self._asker, snapshot=snapshot))

    def _make_listing(self, entries: tuple[Entry | None, ...], revision: int) -> messages.Listing:
        if len(entries) * self._keys.answer_bytes_max > self._limits.frame_bytes_max:
            self._state.check_limit("frame_bytes_max", sum(map(entry_answer_bytes, entries)))
        return messages.Listing(entries, revision)

    def _list(self, request: messages.List) -> messages.Listing | messages.ListingPart:
        snapshot = Snapshot.from_prefix(self._keys, self._past, request.prefix)
        return self._next_list_part(LongRead(watcher=self._asker, snapshot=snapshot, keys_only=request.keys_only))

    def _next_list_part(self, work: LongRead) -> messages.Listing | messages.ListingPart:
        snapshot = work.snapshot
        assert snapshot is not None, "what is listed is read"
        entries = snapshot.next_part()
        if work.keys_only:
            entries = [each and each.replace(value=b"") for each in entries]
        if self._continue_read_later(work, snapshot):
            return messages.ListingPart(entries=tuple(entries))
        return messages.Listing(tuple(entries), snapshot.revision)

    def _continue_read_later(self, work: LongRead, snapshot: Snapshot) -> bool:
        if not snapshot.left:
            self._snapshots.unregister(snapshot)
            return False
        self._snapshots.register(snapshot, reader=work.watcher[0])
        self.work = work
        return True

    def _count(self, request: messages.Count) -> messages.Counted:
        return messages.Counted(count=self._keys.index.count(request.prefix), revision=self._keys.revision)

    def _ping(self, _: messages.Ping) -> messages.Pong:
        return messages.Pong(revision=self._keys.revision)

    def _stats(self, _: messages.Stats) -> messages.Figures:
        return messages.Figures(figures=self._figures())

    def _list_groups(self, request: messages.ListGroups) -> messages.KeyGroupsPage:
        self._state.check_key_size(request.after, "name")
        groups = self._keys.groups
        page = groups.page(after=request.after, most=GROUPS_AT_ONCE + 1)
        return messages.KeyGroupsPage(
            groups=tuple(
                messages.KeyGroup(
                    name=group.name, keys=group.keys, bytes=group.bytes, age=max(groups.now - group.since, 0.0)
                )
                for group in page[:GROUPS_AT_ONCE]
            ),
            more=len(page) > GROUPS_AT_ONCE,
        )

    def _list_lease_notes(self, request: messages.ListNotes) -> messages.NotePage:
        self._state.check_key_size(request.prefix, "prefix")
        self._state.check_key_size(request.after, "key")
        keys = self._keys.index.page(request.prefix, after=request.after or None, most=NOTES_AT_ONCE + 1)
        return messages.NotePage(
            notes=tuple(map(self._lease_note_of_key, keys[:NOTES_AT_ONCE])), more=len(keys) > NOTES_AT_ONCE
        )

    def _lease_note_of_key(self, key: str) -> messages.Note:
        lease = self._leases.get_if_live(self._keys.entries[key].lease or 0)
        if lease is None or not lease.note:
            return messages.Note(key=key, note=b"", age=0.0)
        return messages.Note(key=key, note=lease.note, age=self._leases.age_of_note(lease))

    def _refuse_too_many_elements(self, request: messages.TooLargeRequest) -> Response:
        raise LimitExceeded(
            f"the request holds more than {request.elements_max} elements, and operations_max is "
            f"{self._limits.operations_max}: split it"
        )

    def _reply_unsupported(self, request: messages.UndecodableRequest) -> messages.Failed:
        message = f"this server does not know {request.what}: it is of an older release than the client; upgrade it"
        return messages.Failed(kind=messages.FailureKind.UNSUPPORTED, message=message)

    def _put(self, request: messages.Put) -> messages.Written:
        return messages.Written(self._changes.write(request, self._check_write_and_room(request)).mod_revision)

    def _check_write_and_room(self, write: messages.Write) -> bytes:
        value = self._state.check_write(write)
        self._state.check_room_for_write(write, len(value))
        return value

    def _delete(self, request: messages.Delete) -> messages.Counted:
        if not request.key:
            self._state.check_key(request.key)
        return messages.Counted(count=int(self._changes.erase(request.key)), revision=self._changes.revision)

    def _delete_prefix(self, request: messages.DeletePrefix) -> messages.Counted:
        most = self._state.writes_max
        if request.at_most is None:
            self._state.check_limit("writes_max", self._keys.index.count(request.prefix), "keys to be deleted")
        else:
            most = max(min(most, request.at_most), 0)
        keys = self._keys.index.page(request.prefix, after=None, most=most)
        if request.at_most is None:
            self._state.check_watch_search_cost(keys)
        keys = keys[: self._watches.changeable_key_count(keys)]
        for key in keys:
            self._changes.erase(key)
        return messages.Counted(count=len(keys), revision=self._changes.revision)

    def _delete_older(self, request: messages.DeleteOlder) -> messages.DeletedOlder:
        # If the reply named a revision after the store's, clients would reject the store as an old copy (S10).
        newest = self._keys.revision if request.revision is None else min(self._keys.revision, request.revision)
        most, entries = self._state.writes_max, self._keys.entries
        looked_at = self._keys.index.page(request.prefix, after=request.after or None, most=most)
        keys = [key for key in looked_at if entries[key].mod_revision <= newest]
        count = self._watches.changeable_key_count(keys)
        after = keys[count - 1] if count < len(keys) else looked_at[-1] if len(looked_at) == most else ""
        for key in keys[:count]:
            self._changes.erase(key)
        return messages.DeletedOlder(count=count, revision=newest, after=after)

    def _compare_and_set(self, request: messages.CompareAndSet) -> messages.CompareAndSetResult:
        entry = self._keys.get(request.key)
        if request.expected_revision is not None:
            as_expected = (entry.mod_revision if entry else 0) == request.expected_revision
        else:
            as_expected = entry is not None and entry.value == request.expected_value
        value = self._state.check_write(request)
        if not as_expected:
            return messages.CompareAndSetResult(False, entry)
        self._state.check_room_for_write(request, len(value))
        return messages.CompareAndSetResult(True, self._changes.write(request, value))

    def _add_or_append(self, request: messages.Add | messages.Append) -> messages.Added:
        value = self._check_write_and_room(request)
        revision = self._changes.write(request, value).mod_revision
        return messages.Added(value=int(value) if type(request) is messages.Add else len(value), revision=revision)

    def _transact(self, request: messages.Transact) -> messages.TransactionResult:
        self._state.check_limit("operations_max", len(request.when), "conditions")
        self._state.check_limit("writes_max", len(request.then) + len(request.otherwise), "operations")
        succeeded = _all_hold(request.when, self._keys.entries)
        operations = request.then if succeeded else request.otherwise
        granted = self._grant_leases(operations, request.grants) if request.grants else ()
        try:
            values = self._state.check_branch(operations)
        except StoreError:
            for lease in granted:
                self._changes.end_lease(lease, most=0)  # undo the grant: the lease has no keys yet
            raise
        results = tuple(map(self._changes.execute_operation, operations, values))
        return messages.TransactionResult(succeeded, results, self._changes.revision)

    def _grant_leases(self, operations: tuple[Operation, ...], grants: tuple[messages.Grant, ...]) -> list[LeaseRecord]:
        self._state.check_limit("operations_max", len(grants), "leases")
        used = {
            operation.lease: operation.key
            for operation in operations
            if isinstance(operation, PUTS_ON_LEASE)
            and (type(operation) is messages.Put or self._keys.get(operation.key) is None)
        }
        wanted = [grant for grant in grants if grant.id in used and self._leases.get_if_live(grant.id or 0) is None]
        for grant in wanted:
            if self._leases.get_even_if_ending(grant.id or 0) is not None:
                raise LeaseNotFound(
                    f"lease {grant.id} has lapsed, and its keys are being deleted: try again in a moment"
                )
        self._state.check_grants(wanted, used.values())
        return [self._changes.grant(grant, peer=self._peer) for grant in wanted]

    def _grant(self, request: messages.Grant) -> messages.Granted:
        if request.id is not None:
            raise StoreUsageError("a transaction that grants a lease of a chosen id must put a key on it")
        self._state.check_grant_ttls(request)
        self._state.check_lease_room()
        lease = self._changes.grant(request, peer=self._peer)
        return messages.Granted(lease=lease.id, ttl=lease.terms.ttl)

    def _keep_alive(self, request: messages.KeepAlive) -> messages.Granted:
        lease = self._state.find_lease(request.lease)
        if request.note:
            if len(request.note) > messages.NOTE_BYTES_MAX:
                raise LimitExceeded(
                    f"the note of a keep-alive has {len(request.note)} bytes, and at most {messages.NOTE_BYTES_MAX} "
                    f"are kept: shorten it"
                )
            self._leases.set_note(lease, request.note)
        self._leases.keep_alive(lease, peer=self._peer)
        return messages.Granted(lease=lease.id, ttl=lease.terms.ttl)

    def _revoke(self, request: messages.Revoke) -> messages.Done:
        lease = self._state.find_lease(request.lease)
        self._changes.end_lease(
            lease, most=self._watches.changeable_key_count([*islice(lease.keys, self._state.writes_max)])
        )
        return messages.Done()

    def _time_to_live(self, request: messages.TimeToLive) -> messages.LeaseState:
        lease = self._state.find_lease(request.lease)
        self._state.check_limit("operations_max", len(lease.keys), "keys, those of the lease")
        self._state.check_limit("frame_bytes_max", sum(map(len, lease.keys)))
        return messages.LeaseState(
            remaining=self._leases.remaining(lease), ttl=lease.terms.ttl, keys=tuple(sorted(lease.keys))
        )

    def _cancel(self, request: messages.Cancel) -> messages.Done:
        target = self._peer, request.target
        if not self._watches.remove(*target) and target in self._waits.parked:
            self._waits.remove(target)
        return messages.Done()

    def _watch(self, request: messages.Watch) -> Response:
        if request.snapshot and request.start_revision is not None:
            raise StoreUsageError("a watch starts with a snapshot or at start_revision, not both")
        start = self._keys.revision + 1
        if request.start_revision is not None:
            start = max(request.start_revision, self._history.began + 1)  # at the earliest, the store's first change
        if start > self._keys.revision + 1:
            raise StoreUsageError(f"a watch cannot start at revision {start}: the store is at {self._keys.revision}")
        self._state.check_key_size(request.prefix, "prefix")
        self._state.check_watch_room(self._peer, watch_bytes(request.prefix), (request.prefix,))
        snapshot = Snapshot.from_prefix(self._keys, self._past, request.prefix) if request.snapshot else None
        if start <= self._history.compacted:
            return messages.Failed(
                kind=messages.FailureKind.COMPACTED,
                message=f"the changes from revision {start} on are no longer kept: history begins "
                f"at {self._history.compacted + 1}, since history_bytes_max is "
                f"{self._limits.history_bytes_max}; watch with snapshot=True to be told of a reset instead",
            )
        self._open_watch(LongRead(watcher=self._asker, snapshot=snapshot, prefix=request.prefix, next_revision=start))
        return messages.Watching(revision=self._keys.revision)

    def _open_watch(self, work: LongRead) -> None:
        peer, watch_id = work.watcher
        watches = {peer: (watch_id,)}
        assert work.prefix is not None
        snapshot = work.snapshot
        if snapshot is not None:
            events = [entry.event for entry in snapshot.next_part() if entry is not None]
            if self._continue_read_later(work, snapshot):
                self.deliveries.append(EventBatch(watches=watches, events=tuple(events)))
                return
            events.append(messages.Event(kind="synced", revision=snapshot.revision))
            self.deliveries.append(EventBatch(watches=watches, events=tuple(events)))
            work.snapshot = None
        past = self._history.page(work.next_revision, work.prefix, most=REPLAY_REVISIONS, bytes_max=PART_BYTES)
        if past is None:
            self.deliveries.append(WatchLost(watcher=work.watcher, revision=work.next_revision - 1))
            return
        found, work.next_revision = past
        self.deliveries.extend(EventBatch(watches=watches, events=events) for events in found)
        if work.next_revision <= self._keys.revision:
            self.work = work
        else:
            self._watches.add(*work.watcher, work.prefix)

    def _wait(self, request: messages.Wait) -> messages.Listing | None:
        peer, when = self._peer, self._when
        self._state.check_limit("operations_max", len(request.keys), "keys")
        entries = tuple(map(self._keys.get, request.keys))
        if all(entries):
            return self._make_listing(entries, self._keys.revision)
        for key in request.keys:
            self._state.check_key(key)
        cost = wait_bytes(request.keys, when)
        self._state.check_watch_room(peer, cost, request.keys)
        self._state.check_limit("waits_bytes_max", self._waits.bytes_of(peer) + cost)
        parked = ParkedWait(keys=request.keys, missing=entries.index(None), when=when)
        self._waits.add(self._asker, parked, cost=cost)
        return None

    def check_waits(self, watchers: Iterable[Watcher]) -> None:
        """Answer the waits that have ended; register every other wait at a missing key."""
        for watcher in watchers:
            missing = self._answer_wait_if_ended(watcher, self._keys.entries, self._keys.revision)
            if missing is not None:
                self._waits.move_to_key(watcher, missing)

    def check_postponed_waits(self) -> None:
        """Check some postponed waits, each as of the revision that affected it, then as of each later change."""
        left = LOOKS_A_STEP
        while left > 0 and self._postponed:
            watcher, since = self._postponed.next()
            if watcher in self._waits.parked:
                left -= LOOKS_OF_A_WAIT + self._answer_ended_wait(watcher, since)
            else:  # the wait was cancelled
                left -= 1

    def _answer_ended_wait(self, watcher: Watcher, since: int) -> int:
        """Answer a wait if it ended at revision `since` or a later one; return the number of keys looked at."""
        parked = self._waits.parked[watcher]
        keys = {*parked.keys}
        names = keys.union(condition.key for condition in parked.when)
        entries = {name: entry for name in names if (entry := self._past.entry_at(name, since)) is not None}
        looks = len(parked.keys) + len(parked.when)
        if self._answer_wait_if_ended(watcher, entries, since) is None:
            return looks
        later = self._past.changed_keys_after(names, since)
        missing = keys - entries.keys()
        conditions: dict[str, list[Condition]] = {}
        for condition in parked.when:
            conditions.setdefault(condition.key, []).append(condition)
        most = 2 * looks + LOOKS_A_STEP
        for revision in sorted(later):
            affected = [condition for name in later[revision] for condition in conditions.get(name, ())]
            looks += len(later[revision]) + len(affected)
            for name in later[revision]:
                if (entry := self._past.entry_at(name, revision)) is not None:
                    entries[name] = entry
                    missing.discard(name)
                else:
                    entries.pop(name, None)
                    if name in keys:
                        missing.add(name)
            if not (missing and _all_hold(affected, entries)):
                self._answer_wait_if_ended(watcher, entries, revision)
                return looks
            if looks > most:  # the next step continues from this revision
                self._postponed.requeue(watcher, revision)
                return looks
        place = parked.missing_index(self._keys.entries)
        assert place is not None, "it is not over"
        self._waits.move_to_key(watcher, place)
        return looks

    def _answer_wait_if_ended(self, watcher: Watcher, entries: Mapping[str, Entry], revision: int) -> int | None:
        """Answer a wait if it has ended at `revision`; if not, return the index of a missing key."""
        peer, request_id = watcher
        parked = self._waits.parked[watcher]
        response: Response
        if not _all_hold(parked.when, entries):
            response = messages.Failed(kind=messages.FailureKind.CONDITION, message=_failure_text(parked.when, entries))
        elif (missing := parked.missing_index(entries)) is not None:
            return missing
        else:
            try:
                response = self._make_listing(tuple(map(entries.get, parked.keys)), revision)
            except LimitExceeded as error:
                response = messages.Failed(kind=messages.FailureKind.LIMIT, message=str(error))
        self._waits.remove(watcher)
        self.deliveries.append(WaitEnd(peer=peer, request_id=request_id, response=response))
        return None


def _all_hold(when: Sequence[Condition], entries: Mapping[str, Entry]) -> bool:
    for condition in when:  # noqa: SIM110 - twice as fast as a generator
        if not condition.holds(entries.get(condition.key)):
            return False
    return True


def _failure_text(when: Sequence[Condition], entries: Mapping[str, Entry]) -> str:
    return next(condition.failure_message for condition in when if not condition.holds(entries.get(condition.key)))


_HANDLERS: dict[type, Callable[[RequestExecutor, Any], Response | None]] = {
    messages.Guarded: RequestExecutor._run_if_conditions_hold,
    messages.Get: RequestExecutor._get,
    messages.GetMany: RequestExecutor._get_many,
    messages.List: RequestExecutor._list,
    messages.Count: RequestExecutor._count,
    messages.Ping: RequestExecutor._ping,
    messages.Stats: RequestExecutor._stats,
    messages.ListGroups: RequestExecutor._list_groups,
    messages.ListNotes: RequestExecutor._list_lease_notes,
    messages.TooLargeRequest: RequestExecutor._refuse_too_many_elements,
    messages.UndecodableRequest: RequestExecutor._reply_unsupported,
    messages.Put: RequestExecutor._put,
    messages.Delete: RequestExecutor._delete,
    messages.DeletePrefix: RequestExecutor._delete_prefix,
    messages.DeleteOlder: RequestExecutor._delete_older,
    messages.CompareAndSet: RequestExecutor._compare_and_set,
    messages.Add: RequestExecutor._add_or_append,
    messages.Append: RequestExecutor._add_or_append,
    messages.Transact: RequestExecutor._transact,
    messages.Revoke: RequestExecutor._revoke,
    messages.TimeToLive: RequestExecutor._time_to_live,
    messages.Grant: RequestExecutor._grant,
    messages.KeepAlive: RequestExecutor._keep_alive,
    messages.Watch: RequestExecutor._watch,
    messages.Wait: RequestExecutor._wait,
    messages.Cancel: RequestExecutor._cancel,
}
