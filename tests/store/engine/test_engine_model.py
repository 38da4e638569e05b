"""The engine as a whole: against a plain dictionary, and restored from the facts of a durable one."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import when
from store.disk import rows
from store.engine import engine, keyspace, requests, snapshots, waits, watches
from store.engine.applied import ApplyResult, LongRead
from store.engine.changeset import ChangeSet, SavedStore
from store.engine.engine import Engine
from store.engine.processes import DisconnectKind
from store.limits import Limits
from store.messages import (
    CHOSEN_LEASE_LEAST,
    Add,
    Added,
    Append,
    Cancel,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Create,
    Delete,
    DeletedOlder,
    DeleteOlder,
    DeletePrefix,
    Entry,
    Event,
    FailureKind,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    List,
    ListGroups,
    Listing,
    Operation,
    Put,
    Request,
    Response,
    Revoke,
    Target,
    Transact,
    TransactionResult,
    Wait,
    Watch,
    Watching,
    Written,
    mutates,
)
from store.messages import waits as is_wait
from tests.support.by_hand import Desk, entry, grant
from tests.support.limits import limits_with

USAGE, LIMIT, LEASE, CONDITION, COMPACTED, FORGOTTEN, *_ = FailureKind


@dataclass
class Model:
    """A dictionary, its revision, and the changes of each revision: the whole store except leases."""

    entries: dict[str, Entry] = field(default_factory=dict)
    revision: int = 0
    log: list[tuple[Event, ...]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def ask(self, request: Request[Any]) -> Response | FailureKind:
        outcome = self.carry_out(request)
        if self.events:
            self.revision += 1
            self.log.append(tuple(self.events))
            self.events = []
        return outcome

    def put(self, key: str, value: bytes) -> int:
        before = self.entries.get(key)
        revision = self.revision + 1
        self.entries[key] = entry(key, value, before.create_revision if before else revision, revision)
        self.events.append(
            Event(
                kind="put", revision=revision, key=key, value=value, create_revision=self.entries[key].create_revision
            )
        )
        return revision

    def delete(self, key: str) -> bool:
        if self.entries.pop(key, None) is None:
            return False
        self.events.append(Event(kind="delete", revision=self.revision + 1, key=key))
        return True

    def under(self, prefix: str) -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def holds(self, condition: Condition) -> bool:
        found = self.entries.get(condition.key)
        seen: object = {
            Target.MOD_REVISION: found.mod_revision if found else 0,
            Target.CREATE_REVISION: found.create_revision if found else 0,
            Target.VALUE: found.value if found else None,
            Target.EXISTS: found is not None,
            Target.VALUE_IF_ANY: found.value if found else condition.expected,
        }[condition.target]
        return seen == condition.expected

    def operate(self, operation: Operation) -> int | bool | Entry | None:
        held = self.entries.get(operation.key)
        match operation:
            case Put(key=key, value=value):
                return self.put(key, value)
            case Get(key=key):
                return held
            case Delete(key=key):
                return self.delete(key)
            case Add(key=key, amount=amount):
                total = int(held.value if held else 0) + amount
                self.put(key, str(total).encode())
                return total
            case Append(key=key, value=value):
                joined = (held.value if held else b"") + value
                self.put(key, joined)
                return len(joined)
            case Create(key=key, value=value):
                return self.put(key, value) if held is None else held

    def possible(self, operation: Operation) -> bool:
        if not isinstance(operation, Add) or operation.key not in self.entries:
            return True
        try:
            int(self.entries[operation.key].value)
        except ValueError:
            return False
        return True

    def carry_out(self, request: Request[Any]) -> Response | FailureKind:
        match request:
            case Guarded(when=conditions, request=inner):
                return self.carry_out(inner) if all(map(self.holds, conditions)) else CONDITION
            case Get(key=key):
                return Found(entry=self.entries.get(key))
            case Put(key=key, value=value):
                return Written(revision=self.put(key, value))
            case Delete(key=key):
                deleted = self.delete(key)
                return Counted(count=deleted, revision=self.revision + deleted)
            case Add() | Append():
                if not self.possible(request):
                    return USAGE
                result = self.operate(request)
                assert isinstance(result, int)
                return Added(value=result, revision=self.revision + 1)
            case GetMany(keys=keys):
                return Listing(entries=tuple(map(self.entries.get, keys)), revision=self.revision)
            case List(prefix=prefix, keys_only=keys_only):
                found = [self.entries[key] for key in self.under(prefix)]
                if keys_only:
                    found = [each.replace(value=b"") for each in found]
                return Listing(entries=tuple(found), revision=self.revision)
            case Count(prefix=prefix):
                return Counted(count=len(self.under(prefix)), revision=self.revision)
            case DeletePrefix(prefix=prefix, at_most=at_most):
                count = sum(map(self.delete, self.under(prefix)[: None if at_most is None else max(at_most, 0)]))
                return Counted(count=count, revision=self.revision + bool(count))
            case DeleteOlder(prefix=prefix, after=after, revision=asked):
                newest = self.revision if asked is None else min(asked, self.revision)
                older = [key for key in self.under(prefix) if self.entries[key].mod_revision <= newest and key > after]
                return DeletedOlder(count=sum(map(self.delete, older)), revision=newest, after="")
            case Wait(keys=keys):
                return Listing(entries=tuple(map(self.entries.get, keys)), revision=self.revision)
            case CompareAndSet(key=key, value=value, expected_revision=revision, expected_value=expected):
                held = self.entries.get(key)
                if revision is not None:
                    succeeded = (held.mod_revision if held else 0) == revision
                else:
                    succeeded = held is not None and held.value == expected
                if succeeded:
                    self.put(key, value)
                return CompareAndSetResult(succeeded=succeeded, entry=self.entries.get(key))
            case Transact(when=conditions, then=then, otherwise=otherwise):
                succeeded = all(map(self.holds, conditions))
                branch = then if succeeded else otherwise
                written = [operation.key for operation in branch if not isinstance(operation, Get)]
                if len(written) > len(set(written)) or not all(map(self.possible, branch)):
                    return USAGE
                results = tuple(map(self.operate, branch))
                changed = bool(self.events)
                return TransactionResult(succeeded=succeeded, results=results, revision=self.revision + changed)
        raise AssertionError(request)

    def since(self, revision: int, prefix: str) -> list[Event]:
        """Return the events that a watch from this revision must have received."""
        return [event for events in self.log[revision:] for event in events if event.key.startswith(prefix)]

    def ends(self, wait: Wait | Guarded[Any]) -> bool:
        """Return True if a wait is answered now."""
        inner, when = (wait.request, wait.when) if isinstance(wait, Guarded) else (wait, ())
        assert isinstance(inner, Wait)
        return not all(map(self.holds, when)) or all(key in self.entries for key in inner.keys)


# Some keys are in groups (`/r/t/`, `a/1/`), some are not; prefixes with and without a group have the same lengths.
KEYS = st.sampled_from(["a", "a/1", "a/1/", "b", "b/1", "/r/t", "/r/t/", "/r/t/x", "/r/u/é", "///"])
PREFIXES = st.sampled_from(["", "a", "a/", "c", "/", "/r/t", "a/1/", "/r/t/", "none/", "///"])
VALUES = st.sampled_from([b"", b"1", b"22", b"text"])
REVISIONS = st.integers(0, 12)
CONDITIONS = st.one_of(
    st.builds(lambda key, n: when.mod_revision(key) == n, KEYS, REVISIONS),
    st.builds(lambda key, n: when.create_revision(key) == n, KEYS, REVISIONS),
    st.builds(lambda key, value: when.value(key) == value, KEYS, VALUES),
    st.builds(when.exists, KEYS),
    st.builds(when.missing, KEYS),
    st.builds(lambda key, value: when.value_if_any(key) == value, KEYS, VALUES),
)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, VALUES),
    st.builds(Get, KEYS),
    st.builds(Delete, KEYS),
    st.builds(Add, KEYS, st.integers(-3, 3)),
    st.builds(Append, KEYS, VALUES),
)
SOME_OPERATIONS = st.lists(OPERATIONS | st.builds(Create, KEYS, VALUES), max_size=3).map(tuple)
PLAIN = st.one_of(
    OPERATIONS,
    st.builds(GetMany, keys=st.lists(KEYS, max_size=3).map(tuple)),
    st.builds(List, prefix=PREFIXES, keys_only=st.booleans()),
    st.builds(Count, prefix=PREFIXES),
    st.builds(DeletePrefix, prefix=PREFIXES, at_most=st.none() | st.integers(-1, 2)),
    st.builds(DeleteOlder, prefix=PREFIXES, after=st.just("") | KEYS, revision=st.none() | REVISIONS),
    st.builds(CompareAndSet, key=KEYS, value=VALUES, expected_revision=REVISIONS),
    st.builds(CompareAndSet, key=KEYS, value=VALUES, expected_value=VALUES),
)
REQUESTS = st.one_of(
    PLAIN,
    st.builds(Guarded, when=st.lists(CONDITIONS, max_size=2).map(tuple), request=PLAIN),
    st.builds(
        Transact, when=st.lists(CONDITIONS, max_size=2).map(tuple), then=SOME_OPERATIONS, otherwise=SOME_OPERATIONS
    ),
)
WATCHES = st.one_of(
    st.builds(Watch, prefix=PREFIXES),
    st.builds(Watch, prefix=PREFIXES, snapshot=st.just(value=True)),
    st.builds(Watch, prefix=PREFIXES, start_revision=REVISIONS),
)
PLAIN_WAITS = st.builds(Wait, keys=st.lists(KEYS, max_size=3).map(tuple))
WAITS = PLAIN_WAITS | st.builds(Guarded, when=st.lists(CONDITIONS, max_size=2).map(tuple), request=PLAIN_WAITS)
AGAIN = "again"  # send the last request once more
CHORES = "chores"  # do a part of the postponed work
READ = "read"  # send the next part of a watch's beginning
CANCEL = "cancel"
CUT = "cut"
# Drawn in two steps, as `one_of` would draw one of its many requests far more often than a watch.
OTHERS = st.sampled_from([AGAIN, CHORES, CHORES, READ, CANCEL, CUT])
STEPS: st.SearchStrategy[Request[Any] | str] = st.sampled_from(
    [REQUESTS, REQUESTS, REQUESTS, st.builds(Put, KEYS, VALUES), WATCHES, WATCHES, WAITS, OTHERS]
).flatmap(lambda kind: kind)


class LateDesk(Desk):
    """A desk that postpones all work that can be postponed, until it is told to do a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[int, LongRead] = {}  # the beginnings of watches, by peer

    def do_chores(self) -> None:
        """Leave the chores for later."""

    def open(self, watch: Watch, peer: int) -> Response | None:
        """Open a watch; leave later parts of its beginning unread."""
        self.last_id[peer] += 1
        applied = self.engine.apply(
            watch, peer=peer, request_id=self.last_id[peer], acknowledged=self.last_id[peer] - 1, now=self.now
        )
        self.read(peer, applied)
        return applied.response

    def read(self, peer: int, applied: ApplyResult | None = None) -> None:
        """Send the next part, if any, of the beginning of a watch of this peer."""
        work = self.works.pop(peer, None)
        if applied is None and work is not None:
            applied = self.engine.continue_long_request(work)
        if applied is not None:
            self.take(applied.deliveries)
            if applied.work is not None:
                self.works[peer] = applied.work


@contextmanager
def small_steps() -> Iterator[None]:
    """Let a step do very little, so that short histories have postponed work of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyspace, "CHUNK_MAX", 4)
        patch.setattr(snapshots, "STEP_KEYS", 2)
        patch.setattr(snapshots, "FORGOTTEN_AT_ONCE", 1)
        patch.setattr(requests, "STEP_KEYS", 2)
        patch.setattr(requests, "REPLAY_REVISIONS", 2)
        patch.setattr(requests, "LOOKS_A_STEP", 1)
        patch.setattr(engine, "WAITS_AT_ONCE", 1)
        patch.setattr(waits, "FORGOTTEN_AT_ONCE", 1)
        patch.setattr(watches, "CLOSED_AT_ONCE", 1)
        yield


@given(st.lists(st.lists(st.tuples(st.sampled_from([0, 1]), STEPS), max_size=16), max_size=12))  # about 30 steps
@small_steps()
def test_the_store_is_a_dictionary_that_counts_its_revisions(
    stories: list[list[tuple[int, Request[Any] | str]]],
) -> None:
    desk, model = LateDesk(), Model()
    peers = [1, 2]
    expected: dict[tuple[int, int], list[Event]] = {}  # the snapshot of each watch
    opened: dict[tuple[int, int], tuple[int, str]] = {}  # open watches
    waiting: dict[tuple[int, int], Wait | Guarded[Any]] = {}
    ended: dict[tuple[int, int], Response | FailureKind] = {}
    last: dict[int, tuple[Request[Any], Any]] = {}

    def same(response: Any, answer: Response | FailureKind) -> bool:
        return response == answer if isinstance(answer, Response) else getattr(response, "kind", None) is answer

    def check(watcher: tuple[int, int]) -> None:
        revision, prefix = opened.pop(watcher)
        events = [event for part in desk.told[watcher] for event in part]
        assert events == expected[watcher] + model.since(revision, prefix)

    def end_waits() -> None:
        for each in [each for each, wait in waiting.items() if model.ends(wait)]:
            ended[each] = model.ask(waiting.pop(each))

    for peer in peers:
        desk.connect(peer)
    for who, step in chain.from_iterable(stories):
        peer = peers[who]
        if step == CHORES:
            desk.take(desk.engine.do_postponed_work())
            continue
        if step == READ:
            desk.read(peer)
            continue
        if step == CUT:
            desk.works.pop(peer, None)
            desk.disconnect(peer, how=DisconnectKind.DROPPED)
            for each in [each for each in opened if each[0] == peer]:
                del opened[each]
            for each in [each for each in (*waiting, *ended) if each[0] == peer]:
                waiting.pop(each, None)
                ended.pop(each, None)
            peers[who] = max(peers) + 1
            desk.connect(peers[who])
            continue
        while peer in desk.works:  # a peer's next request is carried out after its last one
            desk.read(peer)
        if step == AGAIN:
            if peer in last and mutates(last[peer][0]):  # a read is repeated, and may find another change
                again = desk.ask(last[peer][0], peer=peer, request_id=desk.last_id[peer], acknowledged=0)
                assert isinstance(last[peer][0], Guarded) or again == last[peer][1]
            continue
        last.pop(peer, None)
        if step == CANCEL:
            for each in [each for each in opened if each[0] == peer][:1]:
                check(each)
                told = desk.told[each].copy()
                desk.ask(Cancel(target=each[1]), peer=peer)
                desk.ask(Put("a", b""), peer=peer)
                model.ask(Put("a", b""))
                end_waits()
                assert desk.told[each] == told
            continue
        watcher = peer, desk.last_id[peer] + 1
        assert isinstance(step, Request)
        if isinstance(step, Watch):
            response = desk.open(step, peer)
            if (step.start_revision or 0) > model.revision + 1:
                assert same(response, USAGE)
                continue
            assert response == Watching(revision=model.revision)
            expected[watcher] = []
            opened[watcher] = (model.revision, step.prefix)
            if step.start_revision is not None:
                opened[watcher] = (max(step.start_revision - 1, 0), step.prefix)
            elif step.snapshot:
                puts = [model.entries[key].event for key in model.under(step.prefix)]
                expected[watcher] = [*puts, Event(kind="synced", revision=model.revision)]
            continue
        response = desk.ask(step, peer=peer)
        if is_wait(step) and not model.ends(step):  # type: ignore[arg-type]
            assert response is None
            waiting[watcher] = step  # type: ignore[assignment]
            continue
        assert same(response, model.ask(step))
        last[peer] = step, response
        assert desk.engine.revision == model.revision
        end_waits()
    for peer in tuple(desk.works):
        while peer in desk.works:
            desk.read(peer)
    super(LateDesk, desk).do_chores()
    assert desk.engine._keys.index.page("", after=None, most=100) == sorted(model.entries)
    assert desk.engine._keys.entries == model.entries
    figures = desk.engine.figures()
    assert (figures["watches"], figures["waits"]) == (len(opened), len(waiting))
    for watcher in tuple(opened):
        check(watcher)
    assert all(same(desk.answers[each], answer) for each, answer in ended.items())
    assert not any(each in desk.answers for each in waiting)
    groups = {key: desk.engine.state.keys.groups.group_name_of(key) for key in model.entries}
    counted = {each.name: each.keys for each in desk.ask(ListGroups(after=""), peer=peers[0]).groups}
    assert counted == {name: list(groups.values()).count(name) for name in groups.values() if name is not None}


@given(
    st.lists(st.one_of(OPERATIONS, st.builds(lambda key: Put(key, b"", ttl=0.05), KEYS), st.just(AGAIN)), max_size=40)
)
def test_the_contents_of_the_store_are_counted_exactly(steps: list[Request[Any] | str]) -> None:
    desk = Desk()
    for step in steps:
        if isinstance(step, str):
            desk.pass_time(0.06)
        else:
            desk.ask(step)
    recount = Desk()
    for each in desk.engine._keys.entries.values():
        recount.ask(Put(each.key, each.value))
    now, then = desk.engine.figures(), recount.engine.figures()
    assert (now["keys"], now["stored_bytes"]) == (then["keys"], then["stored_bytes"])
    desk.ask(DeletePrefix(prefix=""))
    figures = desk.engine.figures()
    assert (figures["keys"], figures["stored_bytes"], figures["leases"]) == (0, 0, 0)


class Disk:
    """The facts of a durable engine, written in groups as a journal writes them, and read again."""

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.executescript(rows.SCHEMA)
        self._database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", "store-1"))
        self._group: list[ChangeSet] = []
        self._groups = 0

    def write(self, facts: ChangeSet | None) -> None:
        if facts is not None:
            self._group.append(facts)

    def commit(self) -> None:
        if self._group:
            self._groups += 1
            rows.write_group(self._database, self._group, number=self._groups)
            self._group = []

    def saved(self) -> SavedStore:
        self.commit()
        return rows.load_store(self._database)


CHOSEN = st.sampled_from([CHOSEN_LEASE_LEAST, CHOSEN_LEASE_LEAST + 1])
COMING_AGAIN = st.one_of(
    st.builds(
        lambda key, lease, ttl: Transact(
            when=(), then=(Put(key, b"", lease=lease),), grants=(Grant(ttl=ttl, id=lease),)
        ),
        KEYS,
        CHOSEN,
        st.sampled_from([1.0, 100.0]),
    ),
    st.builds(Revoke, lease=CHOSEN),
)
LEASED = st.one_of(
    st.builds(lambda key, lease: Put(key, b"", lease=lease), KEYS, st.integers(1, 6)),
    st.builds(lambda key, ttl: Put(key, b"", ttl=ttl), KEYS, st.sampled_from([1.0, 100.0])),
    st.builds(lambda key, lease: Append(key, b"x", lease=lease), KEYS, st.integers(1, 6)),
    st.builds(lambda key, lease: Add(key, 1, lease=lease), KEYS, st.integers(1, 6)),
    st.builds(Grant, ttl=st.sampled_from([1.0, 100.0]), disconnect_ttl=st.none() | st.just(1.0)),
    st.builds(Revoke, lease=st.integers(1, 6)),
    COMING_AGAIN,
)
HAPPENINGS = st.one_of(
    REQUESTS,
    LEASED,
    st.sampled_from(["time passes", "reconnect", "another client", "goodbye", "a long time passes", "full", "free"]),
    st.just("the disk takes a group"),
)


@settings(max_examples=200)
@given(st.lists(HAPPENINGS, max_size=40) | st.lists(COMING_AGAIN, max_size=20), st.sampled_from([10**6, 1500]))
@pytest.mark.in_ci
def test_a_durable_store_goes_on_as_if_it_had_not_stopped(
    happenings: list[Request[Any] | str], history_bytes_max: int
) -> None:
    limits = Limits(history_bytes_max=history_bytes_max, session_ttl=300.0)
    desk, disk = Desk(Engine(store_id="store-1", limits=limits, durable=True)), Disk()
    client, peer = 1, 1
    request_ids = {1: 0}

    def record() -> None:
        """Record the facts, as a server does after a step, unless the disk is full: then no reply is kept, either."""
        if desk.engine.read_only is None:
            disk.write(desk.engine.take_changeset())

    def connect() -> None:
        nonlocal peer
        record()
        peer += 1
        desk.connect(peer, session=b"client %09d" % client)

    connect()
    record()
    for happening in happenings:
        if isinstance(happening, Request):
            request_ids[client] += 1
            desk.ask(happening, peer=peer, request_id=request_ids[client], acknowledged=request_ids[client] - 2)
            record()
            continue
        match happening:
            case "time passes":
                desk.pass_time(0.6)
            case "a long time passes":
                desk.disconnect(peer)
                client = 3 - client
                request_ids.setdefault(client, 0)
                desk.now += 301.0
                desk.engine.tick(now=desk.now)
                connect()
            case "reconnect":
                desk.disconnect(peer)
                connect()
            case "goodbye":
                desk.disconnect(peer, how=DisconnectKind.GOODBYE)
                client = 3 - client
                request_ids.setdefault(client, 0)
                connect()
            case "another client":
                client = 3 - client
                request_ids.setdefault(client, 0)
                connect()
            case "full":
                desk.engine.read_only = "the disk is full"
            case "free":
                desk.engine.read_only = None
            case "the disk takes a group":
                disk.commit()
        record()
    disk.write(desk.engine.take_changeset())
    assert desk.engine.take_changeset() is None

    saved = disk.saved()
    before, after = desk.engine, Engine.restore(saved, limits=limits, now=50_000.0)
    assert saved.compacted == before._history.compacted
    assert after._keys.entries == before._keys.entries
    assert after._keys.index.chunks_under("") == before._keys.index.chunks_under("")
    counted = ("revision", "keys", "stored_bytes", "history_bytes", "compacted_revision", "leases", "sessions")
    figures = before.figures(), after.figures()
    assert [figures[1][name] for name in counted] == [figures[0][name] for name in counted]
    start = before._history.compacted + 1
    old, new = (each._history.page(start, "", most=10**6, bytes_max=10**9) for each in (before, after))
    assert old == new
    for lease_id, lease in before._leases._leases.items():
        restored = after._leases.get_if_live(lease_id)
        assert restored is not None
        assert (restored.terms, restored.keys, restored.keeper) == (lease.terms, lease.keys, None)
        assert after._leases.remaining(restored) == lease.terms.ttl
    for session_id, session in before._sessions._sessions.items():
        again = after._sessions._sessions[session_id]
        assert again.number == session.number
        assert again.highest == session.highest, "applied again, or lost"
        for request_id, response, _ in session.replies:
            assert again.kept_reply(request_id) == response

    # And it goes on: used numbers are not used again.
    assert after.connect(1, session_id=b"somebody else...", now=50_000.0) == (before._sessions.made + 1, None)
    next_lease = after.apply(Grant(ttl=1.0), peer=1, request_id=1, acknowledged=0, now=50_000.0).response
    assert next_lease == Granted(lease=before._leases._last_id + 1, ttl=1.0)


def test_a_store_that_cannot_write_now_says_why_and_can_be_read() -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    desk.engine.read_only = "the disk is full"
    refused = desk.fails(Put("a", b"2"))
    assert refused.kind is LIMIT
    assert "the disk is full; reading goes on" in refused.message
    assert desk.ask(Get("a")).entry.value == b"1"
    present = Condition(key="a", target=Target.MOD_REVISION, expected=1)
    reading = desk.ask(Transact(when=(present,), then=(Get("a"),), otherwise=(Get("b"),)))
    assert reading.results[0].value == b"1", "a transaction that only reads, as of a round's store, is reading"
    assert desk.fails(Transact(when=(present,), then=(Get("a"),), otherwise=(Delete("b"),))).kind is LIMIT
    desk.engine.read_only = None
    assert desk.ask(Put("a", b"2"), request_id=desk.last_id[1]) == Written(revision=2)  # it may be tried again


@pytest.mark.parametrize("make", [lambda lease: Add("a", 1, lease=lease), lambda lease: Append("a", b"1", lease=lease)])
def test_a_key_that_is_made_by_adding_or_appending_may_be_put_on_a_lease(make: Any) -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    assert desk.fails(make(99)).kind is LEASE
    assert desk.fails(Transact(when=(), then=(make(99),))).kind is LEASE
    desk.ask(make(lease))
    assert desk.ask(Get("a")).entry.lease == lease
    desk.ask(make(None))
    desk.ask(make(99))  # the key does not move to this lease, so it need not exist, as on etcd
    assert desk.ask(Get("a")).entry.lease == lease
    desk.ask(Put("a", b"1"))
    desk.ask(make(lease))
    assert desk.ask(Get("a")).entry.lease is None  # it keeps its state: no lease
    desk.pass_time(2.0)
    assert desk.keys() == ["a"]


@pytest.mark.parametrize("request_", [Add("k/24", 1), Append("k/24", b"0")])
def test_adding_to_a_key_whose_lease_is_ending_counts_once_and_goes_with_it(request_: Request[Any]) -> None:
    """Regression: the server failed halfway: no watch was notified, and each retry of the request added again."""
    desk = Desk(writes_max=10)
    lease = desk.ask(Grant(ttl=60.0)).lease
    for number in range(25):
        desk.ask(Put(f"k/{number:02}", b"1", lease=lease))
    desk.ask(Watch(prefix="k/24"), request_id=100)
    desk.ask(Revoke(lease=lease))
    assert desk.ask(request_) == Added(value=2, revision=27)
    assert desk.ask(Get("k/24")).entry.mod_revision == 27
    desk.look()
    desk.look()
    assert desk.keys() == []
    ((changed,), (gone,)) = desk.told[1, 100]
    assert (changed.revision, gone.kind, gone.revision) == (27, "delete", 29)


def test_a_lease_that_was_ending_when_its_server_died_goes_on_ending() -> None:
    """Its holder had been notified that it had expired, half of its keys were gone: it must not be renewed again."""
    limits = limits_with(writes_max=10)
    desk, disk = Desk(Engine(store_id="store-1", limits=limits, durable=True)), Disk()
    lease = desk.ask(Grant(ttl=60.0)).lease
    for number in range(25):
        desk.ask(Put(f"k/{number:02}", b"", lease=lease))
    desk.ask(Revoke(lease=lease))
    disk.write(desk.engine.take_changeset())
    again = Desk(Engine.restore(disk.saved(), limits=limits, now=desk.now))
    assert len(again.keys()) == 15
    again.fails(KeepAlive(lease=lease))
    assert again.engine.state.leases.seconds_to_next_expiry() == 0.0
    again.look()
    again.look()
    assert again.keys() == []
    disk.write(again.engine.take_changeset())
    assert disk.saved().leases == (), "and nothing of it is left"
