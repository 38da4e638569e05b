"""The changes that a store has really made, revision by revision, and whether the answers to its clients agree with
them.

The truth is the data that is on the disk (on a store without one: the changes of the engine). For every answer, it is
known at which revisions it would have been right. There must be one between the call and the return, and none may be
ahead of the disk. That checks S1 and S3 for every request, at once, and without a search. A watch is compared batch by
batch with the changes under its prefix (S4). A lease must not end sooner than its last acknowledged keep-alive allows,
and must never exist again (S5).

The clients here are the real ones, with hooks for their traffic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from rdzv.testing.timeline import SimulatedTime
from store.client import client as watch_room
from store.client.client import Client
from store.engine.changeset import ChangeSet
from store.engine.engine import Engine
from store.engine.keyspace import Change, events_of
from store.engine.leases import LeaseRecord
from store.errors import StoreError
from store.messages import (
    Add,
    Added,
    Append,
    Cause,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Create,
    Delete,
    DeletePrefix,
    Entry,
    Event,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    List,
    Listing,
    Operation,
    Put,
    Request,
    Response,
    Target,
    Transact,
    TransactionResult,
    Wait,
    Written,
)
from store.watch_cursor import WatchCursor
from tests.sim.checker import Violation

__all__ = ["Books", "HeardClient", "Truth", "Violation", "observe"]

R = TypeVar("R", bound=Response)

CLOCK_GRAIN = 0.002  # seconds; the error of comparing two clocks


@dataclass(slots=True)
class _Kept:
    """A lease as its keeper knows it. `sent_at` is the true time of the last request for it that was acknowledged."""

    sent_at: float
    least: float
    server_rate: float


class Truth:
    """The changes of all stores of a simulation. There are several, one after the other, if they are in memory only.

    Args:
        timeline: The timeline of the run.
        replay: The command that replays the story.
        on_revision: Called with every revision as soon as it is true.
        trace: Called with the lines of the story.
    """

    def __init__(
        self,
        timeline: SimulatedTime,
        *,
        replay: str,
        on_revision: Callable[[tuple[Event, ...]], None] | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.timeline = timeline
        self.replay = replay
        self.on_revision = on_revision
        self._trace = trace
        self.server_rate = 1.0
        self.checked = 0
        self.lapses = 0
        self._books: dict[str, Books] = {}

    def books_of(self, store_id: str | None) -> Books:
        """Return the books of a store; new books if it is new."""
        assert store_id is not None, "the client has connected to it"
        if store_id not in self._books:
            self._books[store_id] = Books(self)
        return self._books[store_id]

    def say(self, what: str) -> None:
        """Write one line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.timeline.now - 1000:9.4f}  {what}")

    def fail(self, what: str) -> NoReturn:
        """Fail the story. The error is also kept in the timeline, in case that the caller swallows it."""
        violation = Violation(f"{what} (at {self.timeline.now - 1000:.3f} s; replay with: {self.replay})")
        if self.timeline.problem is None:
            self.timeline.problem = violation
        raise violation

    def require(self, holds: bool, what: str) -> None:
        """Fail the story if a promise does not hold."""
        if not holds:
            self.fail(what)


class Books:
    """The changes of one store."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self.began: int = 0  # the revision of the empty store
        self._revisions: list[tuple[Event, ...]] = []
        self._times: list[float] = []
        self._by_key: dict[str, tuple[list[int], list[Entry | None]]] = {}
        self._ended: set[int] = set()
        self._kept: dict[int, _Kept] = {}
        self._first_on: dict[int, int] = {}  # by lease: the first revision that has put a key on it

    @property
    def revision(self) -> int:
        """The last revision that is true for good."""
        return self.began + len(self._revisions)

    def time_of(self, revision: int) -> float:
        """Return the time when a revision became true."""
        return self._times[revision - self.began - 1]

    def committed(self, group: list[ChangeSet]) -> None:
        """Enter data that is on the disk."""
        for facts in group:
            self._ended.difference_update(id for id, lease in facts.leases.items() if lease is not None)
            for events in facts.revisions:
                self.changed(events)
            self._ended.update(id for id, lease in facts.leases.items() if lease is None)

    def changed(self, events: tuple[Event, ...]) -> None:
        """Enter one revision, which is true from now on."""
        revision = events[0].revision
        self._truth.require(revision == self.revision + 1, f"revision {revision} came after revision {self.revision}")
        self._revisions.append(events)
        self._times.append(self._truth.timeline.now)
        for event in events:
            revisions, states = self._by_key.setdefault(event.key, ([], []))
            revisions.append(revision)
            states.append(_entry(event))
            if event.lease is not None:
                self._first_on.setdefault(event.lease, revision)
                self._truth.require(
                    event.lease not in self._ended, f"{event.key} was put on lease {event.lease}, long gone"
                )
        if self._truth.on_revision is not None:
            self._truth.on_revision(events)

    def lapsed(self, lease: LeaseRecord) -> None:
        """Check a lease that the server let expire."""
        self._truth.lapses += 1
        kept = self._kept.get(lease.id)
        if kept is not None:
            passed = (self._truth.timeline.now - kept.sent_at) * self._truth.server_rate
            self._truth.require(
                passed >= kept.least - CLOCK_GRAIN,
                f"lease {lease.id} lapsed {passed:.3f} s after it was renewed, though it had {kept.least:g} s (S5)",
            )

    def at(self, key: str, revision: int) -> Entry | None:
        """Return the entry of a key at a revision."""
        revisions, states = self._by_key.get(key, ((), ()))
        index = bisect_right(revisions, revision)
        return states[index - 1] if index else None

    def under(self, prefix: str, revision: int) -> dict[str, Entry]:
        """Return the entries of all keys with a prefix at a revision."""
        held = {key: self.at(key, revision) for key in self._by_key if key.startswith(prefix)}
        return {key: entry for key, entry in held.items() if entry is not None}

    def now_under(self, prefix: str) -> dict[str, Entry]:
        """Return the present entries of all keys with a prefix."""
        return self.under(prefix, self.revision)

    def next_change(self, prefix: str, revision: int) -> tuple[Event, ...] | None:
        """Return the first change under a prefix at or after a revision."""
        for events in self._revisions[max(revision - self.began - 1, 0) :]:
            about = tuple(event for event in events if event.key.startswith(prefix))
            if about:
                return about
        return None

    def check(self, who: str, request: Request[Any], response: Response, began: int, *, sent_at: float) -> None:
        """Check that an answer was right at some revision between the call, at revision `began`, and now."""
        self._truth.checked += 1
        if isinstance(request, Guarded):
            request = request.request
        problem = self._problem(request, response, began, sent_at)
        if problem:
            self._truth.fail(
                f"{who} asked {request} at revision {began} and was told {response} at {self.revision}: {problem}"
            )

    def _problem(self, request: Request[Any], response: Response, began: int, sent_at: float) -> str:
        match request, response:
            case Grant(), Granted(lease=lease):
                self._keep(lease, sent_at, _least(request))
            case KeepAlive(lease=lease), Granted():
                kept = self._kept.get(lease)
                if kept is not None:
                    self._keep(lease, sent_at, kept.least)
            case Get(key=key), Found(entry=entry):
                return self._read(key, entry, began)
            case ((GetMany() | Wait()), Listing(entries=entries, revision=revision)):
                right = tuple(self.at(key, revision) for key in request.keys)
                return self._at(revision, began) or _same(entries, right)
            case List(prefix=prefix, keys_only=keys_only), Listing(entries=entries, revision=revision):
                there = sorted(self.under(prefix, revision).items())
                right = tuple(entry.replace(value=b"") if keys_only else entry for _, entry in there)
                return self._at(revision, began) or _same(entries, right)
            case Count(prefix=prefix), Counted(count=count, revision=revision):
                return self._at(revision, began) or _same(count, len(self.under(prefix, revision)))
            case Put(key=key, value=value), Written(revision=revision):
                return self._wrote(key, value, revision, began)
            case ((Delete() | DeletePrefix()), Counted(count=count, revision=revision)):
                return self._deleted(request, count, revision, began)
            case Add(key=key, amount=amount), Added(value=value, revision=revision):
                before = self.at(key, revision - 1)
                total = int(before.value if before else b"0") + amount
                return self._wrote(key, b"%d" % value, revision, began) or _same(value, total)
            case Append(key=key, value=value), Added(value=size, revision=revision):
                before = self.at(key, revision - 1)
                whole = (before.value if before else b"") + value
                return self._wrote(key, whole, revision, began) or _same(size, len(whole))
            case CompareAndSet(), CompareAndSetResult():
                return self._compared(request, response, began)
            case Transact(), TransactionResult():
                for grant in self.granted_by(request, response):
                    assert grant.id is not None, "a transaction chooses the ids of its leases"
                    self._keep(grant.id, sent_at, _least(grant))
                return self._transacted(request, response, began)
        return ""

    def granted_by(self, request: Transact, response: TransactionResult) -> list[Grant]:
        """Return the leases that a transaction has granted: those on which it was the first to put a key."""
        return [one for one in request.grants if self._first_on.get(one.id or 0) == response.revision]

    def _keep(self, lease: int, sent_at: float, least: float) -> None:
        kept = self._kept.get(lease)
        if kept is None or kept.sent_at < sent_at:
            self._kept[lease] = _Kept(sent_at, least, self._truth.server_rate)

    def renewed(self, lease: int, *, gone_before: bool) -> None:
        """Check an answered keep-alive. With `gone_before`, the lease had ended, on the disk, before the request."""
        self._truth.require(not gone_before, f"lease {lease} had ended, and was renewed all the same (S5)")

    def has_ended(self, lease: int) -> bool:
        """Return True if a lease has ended for good."""
        return lease in self._ended

    def _at(self, revision: int, began: int) -> str:
        if revision > self.revision:
            return f"revision {revision} is ahead of the disk, which is at {self.revision} (S3)"
        return f"it is what was true at revision {revision}, before it was asked (S1)" if revision < began else ""

    def _read(self, key: str, entry: Entry | None, began: int) -> str:
        if entry is not None and entry.mod_revision > self.revision:
            return f"revision {entry.mod_revision} is ahead of the disk (S3)"
        revisions, states = self._by_key.get(key, ([], []))
        first = max(bisect_right(revisions, began) - 1, 0)
        right = [self.at(key, began), *states[first:]]
        return "" if entry in right else f"it was never so meanwhile; it was {right} (S1)"

    def _wrote(self, key: str, value: bytes, revision: int, began: int) -> str:
        if revision > self.revision:
            return f"revision {revision} is not on the disk, which is at {self.revision} (S3)"
        if revision <= began:
            return f"revision {revision} was there before it was asked (S1)"
        entry = self.at(key, revision)
        if entry is None or entry.mod_revision != revision or entry.value != value:
            return f"revision {revision} is something else: {self._revisions[revision - self.began - 1]} (S1)"
        return ""

    def _deleted(self, request: Delete | DeletePrefix, count: int, revision: int, began: int) -> str:
        if count and (revision > self.revision or revision <= began):
            return f"revision {revision} is not between {began} and {self.revision} (S1, S3)"
        if not count and (wrong := self._at(revision, began)):
            return wrong
        before = revision - 1 if count else revision
        if isinstance(request, Delete):
            there = int(self.at(request.key, before) is not None)
        else:
            there = len(self.under(request.prefix, before))
        return _same(count, there)

    def _compared(self, request: CompareAndSet, response: CompareAndSetResult, began: int) -> str:
        entry = response.entry
        if not response.succeeded:
            if self._expected(request, entry):
                return "it was as expected"
            return self._read(request.key, entry, began)
        assert entry is not None
        before = self.at(request.key, entry.mod_revision - 1)
        if not self._expected(request, before):
            return f"before it there was {before} (S1)"
        return self._wrote(request.key, request.value, entry.mod_revision, began)

    def _expected(self, request: CompareAndSet, entry: Entry | None) -> bool:
        if request.expected_revision is not None:
            return (entry.mod_revision if entry else 0) == request.expected_revision
        return entry is not None and entry.value == request.expected_value

    def _transacted(self, request: Transact, response: TransactionResult, began: int) -> str:
        operations = request.then if response.succeeded else request.otherwise
        revision = response.revision
        wrote = any(
            isinstance(operation, Put | Add | Append)
            or (isinstance(operation, Create) and isinstance(done, int))
            or (isinstance(operation, Delete) and done is True)
            for operation, done in zip(operations, response.results, strict=True)
        )
        if wrong := self._at(revision, began + 1 if wrote else began):
            return wrong
        before = revision - 1 if wrote else revision
        if all(self._holds(condition, before) for condition in request.when) != response.succeeded:
            return f"its conditions say otherwise at revision {before} (S1)"
        for operation, done in zip(operations, response.results, strict=True):
            if wrong := self._operated(operation, done, before, revision):
                return wrong
        return ""

    def _operated(self, operation: Operation, done: Any, before: int, revision: int) -> str:
        match operation:
            case Get(key=key):
                return "" if done in (self.at(key, before), self.at(key, revision)) else f"{key} was not {done} (S1)"
            case Put(key=key, value=value):
                return self._wrote(key, value, revision, before)
            case Delete(key=key):
                return _same(done, self.at(key, before) is not None)
            case Create(key=key, value=value):
                there = self.at(key, before)
                return _same(done, there) if there is not None else self._wrote(key, value, revision, before)
        return ""

    def _holds(self, condition: Condition, revision: int) -> bool:
        entry = self.at(condition.key, revision)
        match condition.target:
            case Target.MOD_REVISION:
                return (entry.mod_revision if entry else 0) == condition.expected
            case Target.CREATE_REVISION:
                return (entry.create_revision if entry else 0) == condition.expected
            case Target.VALUE:
                return entry is not None and entry.value == condition.expected
            case Target.EXISTS:
                return (entry is not None) == condition.expected
            case Target.VALUE_IF_ANY:
                return entry is None or entry.value == condition.expected


def _least(grant: Grant) -> float:
    """Return the shortest time that a lease lasts after a renewal, even if connections close."""
    ttl, soon = grant.ttl, grant.disconnect_ttl
    return min(ttl, soon or ttl, (soon and grant.gone_ttl) or ttl)


def _entry(event: Event) -> Entry | None:
    if event.kind == "delete":
        return None
    return Entry(
        key=event.key,
        value=event.value,
        create_revision=event.create_revision,
        mod_revision=event.revision,
        lease=event.lease,
    )


def _same(said: object, right: object) -> str:
    return "" if said == right else f"it was {right} (S1)"


@dataclass(slots=True)
class _Audit:
    """The state of a watch's audit."""

    prefix: str
    next: int | None  # the first revision that was not delivered yet; None until the snapshot is complete
    replica: dict[str, Event] = field(default_factory=dict)


class HeardWatch(watch_room.Watch):
    """A watch whose every batch is compared with the truth, in the order in which its reader gets them."""

    def __init__(self, client: HeardClient, cursor: WatchCursor) -> None:
        super().__init__(client, cursor)
        self._truth, self._who = client.truth, client.who
        self._heard_by = client
        self._audit = _Audit(cursor._prefix, cursor._next)
        self._snapshot = cursor._snapshot

    @property
    def books(self) -> Books:
        """The books of its store. The store is known once the client connected, which may be later than the watch."""
        return self._truth.books_of(self._heard_by.store_id)

    def note_opened(self, revision: int) -> None:
        """Begin the audit at the revision after the opening."""
        super().note_opened(revision)
        if self._audit.next is None and not self._snapshot:
            self._audit.next = revision + 1

    def _buffer_events(self, events: list[Event]) -> None:
        super()._buffer_events(events)
        self._compare(events)

    def unheard(self) -> tuple[Event, ...] | None:
        """Return the first change that it should have delivered, and has not."""
        if self._audit.next is None:
            return self.books.next_change(self._audit.prefix, 1)
        return self.books.next_change(self._audit.prefix, self._audit.next)

    def _compare(self, events: Sequence[Event]) -> None:
        truth, books, audit = self._truth, self.books, self._audit
        truth.checked += 1
        if events[0].kind == "reset":
            audit.next = None
            audit.replica.clear()
        elif audit.next is None:
            for event in events:
                if event.kind == "put":
                    audit.replica[event.key] = event
            if events[-1].kind == "synced":
                revision = events[-1].revision
                right = books.under(audit.prefix, revision)
                said = {key: _entry(event) for key, event in audit.replica.items()}
                truth.require(
                    revision <= books.revision and said == right,
                    f"{self._who} was given a snapshot of {audit.prefix!r} at {revision}: {said}; it was {right} (S4)",
                )
                audit.next = revision + 1
        else:
            right_events = books.next_change(audit.prefix, audit.next)
            truth.require(
                right_events == tuple(events),
                f"{self._who}, watching {audit.prefix!r} from {audit.next} on, was told {events}; the next change is "
                f"{right_events}, and the disk is at {books.revision} (S3, S4)",
            )
            audit.next = events[0].revision + 1


class HeardClient(Client):
    """A client whose every answer is compared with the truth.

    Attributes:
        truth: The books.
        who: The client's name in them.
        hook: Awaited before and after each request. Its effects, crashes included, happen right there.
        keep_alives: By lease, the time on its own clock when the last acknowledged keep-alive, or the grant, was sent.
        ttls: By lease, the granted ttl.
    """

    truth: Truth
    who = ""
    hook: Callable[[Request[Any], str], Awaitable[None]] | None = None

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> HeardWatch:
        """Open a watch whose events are checked for gaps."""
        return HeardWatch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))

    def __init__(self, *args: Any, truth: Truth, who: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.truth, self.who = truth, who
        self.keep_alives: dict[int, float] = {}
        self.ttls: dict[int, float] = {}

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request, and check the answer."""
        if self.hook is not None:
            await self.hook(request, "before")
        books = self.truth.books_of(self.store_id)
        began, sent_at, ours = books.revision, self.truth.timeline.now, self.time()
        gone_before = isinstance(request, KeepAlive) and books.has_ended(request.lease)
        try:
            response = await super().call(request, timeout=timeout)
        except StoreError:
            if self.hook is not None:
                await self.hook(request, "after")
            raise
        books.check(self.who, request, response, began, sent_at=sent_at)
        if isinstance(request, KeepAlive):
            books.renewed(request.lease, gone_before=gone_before)
            self.keep_alives[request.lease] = ours
        elif isinstance(response, Granted):
            self.keep_alives[response.lease], self.ttls[response.lease] = ours, response.ttl
        elif isinstance(request, Transact) and isinstance(response, TransactionResult):
            for grant in books.granted_by(request, response):
                assert grant.id is not None, "a transaction chooses the ids of its leases"
                self.keep_alives[grant.id], self.ttls[grant.id] = ours, grant.ttl
        if self.hook is not None:
            await self.hook(request, "after")
        return response


def observe(engine: Engine, books: Books, *, durable: bool) -> None:
    """Observe the leases that an engine lets expire, and, without a disk, its changes."""
    ticking = False
    if not durable:
        books.began = engine.revision
    changes = engine._changes
    tick, end_lease, close = engine.tick, changes.end_lease, changes.finish

    def observed_tick(*, now: float, unheard: Mapping[int, float] = MappingProxyType({})) -> Any:
        nonlocal ticking
        ticking = True
        try:
            return tick(now=now, unheard=unheard)
        finally:
            ticking = False

    def observed_end(lease: LeaseRecord, *, most: int, cause: Cause = "") -> int:
        if ticking:
            books.lapsed(lease)
        gone = end_lease(lease, most=most, cause=cause)
        if not durable and not lease.keys:
            books._ended.add(lease.id)
        return gone

    def observed_close() -> tuple[Change, ...]:
        made = close()
        books.changed(events_of(made))
        return made

    engine.tick = observed_tick  # type: ignore[method-assign]  # of this engine alone
    changes.end_lease = observed_end  # type: ignore[method-assign]
    if not durable:
        changes.finish = observed_close  # type: ignore[method-assign]
