"""What any store can do: every named call, said once over one `call`.

`Store` is for those who await, `BlockingStore` for those who block; the two have the same names and arguments. A store
on another system (an etcd cluster, a fake in tests) implements `call` and `watch` and inherits the rest.

Every call takes `timeout=` in seconds; without it the client's own default holds, except for `wait`, which waits.
Write calls take `when=`, conditions made by `store.when`: if one of them does not hold, `ConditionFailed` is raised and
nothing is written.

An etcd cluster is reached by the same calls, and they mean the same. What differs:

- Leases have whole seconds, rounded up, and at least what the cluster grants (2 s as it comes): see `Lease.ttl`. The
  keys of a lapsed lease go up to a second after their time. `disconnect_ttl` and `gone_ttl` are not heeded, since etcd
  does not know who keeps a lease: the TTL alone decides.
- A write whose answer was lost is settled by a receipt that it left. Should that be gone, after a minute out of reach,
  the caller gets `ConnectionLost` with `maybe_applied=True`.
- `add` and `append` read, and write on condition that nothing has changed: with many at once on one key, some do so
  again.
- One request may have 1.5 MiB, and a transaction `operations_max` conditions or operations: 126.
- Identity (S10) is the cluster's id, and that its revisions never go back. Data that was deleted, and has seen more
  changes since than before, is not told apart.
- Revisions also step for other users of the cluster, and where a write changed nothing after an answer was lost.
- `ping` asks the consensus, not one member; `stats` has the few figures that etcd gives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from store.errors import LimitExceeded, StoreError, StoreUsageError
from store.keeping import BlockingKeptLease, Keeping, KeptLease
from store.messages import (
    GONE_TTL,
    Add,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Count,
    Delete,
    DeletePrefix,
    Get,
    GetMany,
    Grant,
    Guarded,
    KeepAlive,
    List,
    ListGroups,
    ListNotes,
    Ping,
    Put,
    Request,
    Response,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from types import TracebackType
    from typing import Self

    from store.messages import Condition, Entry, Event, KeyGroup, Note, Operation

__all__ = ["DEFAULT_TIMEOUT", "BlockingLease", "BlockingStore", "BlockingWatch", "Lease", "LeaseLike", "Store", "Watch"]

DEFAULT_TIMEOUT = 30.0  # seconds for a call of any client, unless it is made or called with another
DELETED_AT_ONCE = 4096  # keys, by `delete_prefix`; a server that takes fewer deletes fewer

R = TypeVar("R", bound=Response)
Keys: TypeAlias = "Iterable[str]"
Entries: TypeAlias = "list[Entry]"  # inside the classes below, `list` is a method
KeyGroups: TypeAlias = "list[KeyGroup]"
Notes: TypeAlias = "list[Note]"
MaybeEntries: TypeAlias = "list[Entry | None]"


class LeaseLike(Protocol):
    """Anything that knows the id of a lease."""

    @property
    def id(self) -> int:
        """The id that the store gave it."""
        ...


def _id_of(lease: LeaseLike | int | None) -> int | None:
    return lease if lease is None or isinstance(lease, int) else lease.id


def _guarded(request: Request[R], when: Iterable[Condition]) -> Request[R]:
    conditions = tuple(when)
    return Guarded(when=conditions, request=request) if conditions else request


def _compare_and_set(
    key: str,
    value: bytes,
    expected_revision: int | None,
    expected_value: bytes | None,
    ttl: float | None,
    lease: LeaseLike | int | None,
) -> CompareAndSet:
    if (expected_revision is None) == (expected_value is None):
        raise StoreUsageError(
            f"compare_and_set of {key!r} takes exactly one of expected_revision and expected_value, "
            f"not {'both' if expected_value is not None else 'neither'}"
        )
    return CompareAndSet(
        key=key,
        value=value,
        expected_revision=expected_revision,
        expected_value=expected_value,
        ttl=ttl,
        lease=_id_of(lease),
    )


def _keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return several keys; refuse one string, which would be taken for its letters."""
    if isinstance(keys, str):
        raise StoreUsageError(f"{keys!r} is one key where several are taken: write [{keys!r}]")
    return tuple(keys)


def _entries(entries: Iterable[Entry | None]) -> list[Entry]:
    """Return the entries of a listing in which none can be missing."""
    return [entry for entry in entries if entry is not None]


class Watch(ABC):
    """An ordered stream of the changes under a prefix; an async context manager, and an async iterator of events."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open it: from here on nothing is missed."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""

    @abstractmethod
    def batches(self) -> AsyncIterator[list[Event]]:
        """Yield one list per revision. A large snapshot comes in several lists; the last ends in `synced`."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.batches():
            for event in events:
                yield event


class Store(ABC):
    """A key-value store, awaited.

    Attributes:
        tells_causes: Whether the `delete` of a key says how its lease ended (`Event.cause`); etcd does not.
        operations_max: Conditions that one transaction may have, or keys that one request may name.
        writes_max: Operations that one transaction may have.
        lease_ttl_max: The longest lease that it grants, in seconds, as far as is known.
        fail_over: Seconds for which the store may be away while one of its own servers replaces another.
        last_problem: What was last in the way of reaching it, in words, as far as is known.
        answered_in: Seconds that it took to answer when this client first came, as far as was noted.
    """

    tells_causes: bool = True
    operations_max: int = 126  # what any store takes; a client knows better once its store has told
    writes_max: int = 126
    lease_ttl_max: float = math.inf
    fail_over: float = 0.0
    last_problem: str = ""
    answered_in: float = 0.0
    _keeping: Keeping | None = None  # made for the first lease that keeps itself

    @property
    def connected(self) -> bool:
        """Whether the store is in reach now, as far as is known."""
        return True

    @property
    def store_id(self) -> str | None:
        """The identity of the store, once it has been met (promise S10)."""
        return None

    @property
    def seen_as(self) -> str | None:
        """The address at which others may reach this client, as far as the way to the store tells."""
        return None

    @property
    def ends(self) -> tuple[str, str] | None:
        """The addresses of the two ends of the connection, ours and the store's, as this system names them."""
        return None

    @property
    def server(self) -> str:
        """Which of the store's servers `ends` leads to, where it has several."""
        return ""

    @property
    def failure(self) -> StoreError | None:
        """Why this client is of no more use, if so."""
        return None

    def on_connection(self, callback: Callable[[bool], None]) -> None:  # noqa: B027  it need not have one to lose
        """Call back with True after each welcome, with False after each loss, and when the client is of no more use."""

    def fail(self, error: StoreError) -> None:  # noqa: B027  it need not be able to
        """End whatever waits for the store with this error: somebody knows that it will not come back."""

    @abstractmethod
    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response.

        Raises:
            ConnectionLost: The connection broke and did not come back in time.
            StoreTimeoutError: The server did not answer in time.
            StoreError: The request was refused; the class says why.
        """

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`.

        Args:
            prefix: What the keys start with; a key is a prefix of itself.
            start_revision: The first revision to hear of; without it, everything after the watch was opened.
            snapshot: First what is there now, as `put` events, then `synced`, then every later change. When history
                is lost over a long disconnection, a `reset` says so and a new snapshot follows.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Hang up. Leases that this client kept lapse as agreed."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        ttl: float | None = None,
        lease: LeaseLike | int | None = None,
        when: Iterable[Condition] = (),
        timeout: float | None = None,
    ) -> int:
        """Write a key and give the revision; with `ttl` it expires, with `lease` it goes when that lapses."""
        request = Put(key, value, ttl, _id_of(lease))
        return (await self.call(_guarded(request, when), timeout=timeout)).revision

    async def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return what a key holds, or None."""
        return (await self.call(Get(key), timeout=timeout)).entry

    async def get_many(self, keys: Keys, *, timeout: float | None = None) -> MaybeEntries:
        """Return what several keys hold at one revision, in the order asked."""
        return list((await self.call(GetMany(keys=_keys(keys)), timeout=timeout)).entries)

    async def list(self, prefix: str, *, keys_only: bool = False, timeout: float | None = None) -> Entries:
        """Return all entries whose keys start with `prefix`, sorted by key; with `keys_only` their values are empty."""
        return _entries((await self.call(List(prefix=prefix, keys_only=keys_only), timeout=timeout)).entries)

    async def count(self, prefix: str, *, timeout: float | None = None) -> int:
        """Count the keys that start with `prefix`."""
        return (await self.call(Count(prefix=prefix), timeout=timeout)).count

    async def delete(self, key: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> bool:
        """Delete a key; False if it was not there."""
        return (await self.call(_guarded(Delete(key), when), timeout=timeout)).count > 0

    async def delete_prefix(self, prefix: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Delete all keys that start with `prefix`; how many there were.

        At one revision, unless there are more than the server changes at once (`writes_max`): then in several steps.
        """
        total, at_most = 0, None
        while True:
            request = DeletePrefix(prefix=prefix, at_most=at_most)
            try:
                count = (await self.call(_guarded(request, when), timeout=timeout)).count
            except LimitExceeded:
                if at_most is not None:
                    raise
                at_most = DELETED_AT_ONCE
                continue
            total += count
            if at_most is None or count == 0:
                return total

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None = None,
        expected_value: bytes | None = None,
        ttl: float | None = None,
        lease: LeaseLike | int | None = None,
        when: Iterable[Condition] = (),
        timeout: float | None = None,
    ) -> CompareAndSetResult:
        """Write a key if its mod_revision (0: it must not exist) or its value is as expected.

        Losing is an answer, not an error: it carries what is there now.

        Raises:
            StoreUsageError: Not exactly one expectation was given (it is a `ValueError`, too).
        """
        request = _compare_and_set(key, value, expected_revision, expected_value, ttl, lease)
        return await self.call(_guarded(request, when), timeout=timeout)

    async def add(self, key: str, amount: int, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Add to the number a key holds as decimal ASCII, a missing key counting from 0; the sum."""
        return (await self.call(_guarded(Add(key, amount, None), when), timeout=timeout)).value

    async def append(
        self, key: str, value: bytes, *, when: Iterable[Condition] = (), timeout: float | None = None
    ) -> int:
        """Append to what a key holds, a missing key counting as empty; the new length in bytes."""
        return (await self.call(_guarded(Append(key, value), when), timeout=timeout)).value

    async def transact(
        self,
        *,
        when: Iterable[Condition] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        grants: Iterable[Grant] = (),
        timeout: float | None = None,
    ) -> TransactionResult:
        """If all conditions hold do `then`, else `otherwise`, all at one revision.

        Args:
            when: The conditions.
            then: What to do if they hold.
            otherwise: What to do if not.
            grants: Leases, each of an id chosen at random from `CHOSEN_LEASE_LEAST` on. Those that a key is put on, and
                that are not there, are granted with it.
            timeout: Seconds.
        """
        request = Transact(when=tuple(when), then=tuple(then), otherwise=tuple(otherwise), grants=tuple(grants))
        return await self.call(request, timeout=timeout)

    async def wait(self, keys: Keys, *, when: Iterable[Condition] = (), timeout: float | None = None) -> Entries:
        """Wait until all keys exist, and give what they hold then; without `timeout`, for as long as it takes.

        Raises:
            ConditionFailed: One of `when` ceased to hold.
        """
        return _entries((await self.call(_guarded(Wait(keys=_keys(keys)), when), timeout=timeout)).entries)

    async def grant(
        self,
        ttl: float,
        *,
        disconnect_ttl: float | None = None,
        gone_ttl: float | None = GONE_TTL,
        timeout: float | None = None,
    ) -> Lease:
        """Grant a lease of `ttl` seconds, which lapses `disconnect_ttl` after a disconnection if that is sooner.

        Then it also lapses `gone_ttl` after its process seems to have died: all of its connections closed, no goodbye.
        """
        granted = await self.call(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl), timeout=timeout)
        return Lease(self, id=granted.lease, ttl=granted.ttl)

    def kept_lease(self, ttl: float, *, disconnect_ttl: float | None = None) -> KeptLease:
        """Return a lease that keeps itself for as long as `async with` lasts; its loss cancels the block."""
        if self._keeping is None:
            self._keeping = Keeping(self)
        return KeptLease(self._keeping, ttl, disconnect_ttl)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Measure how many seconds an answer takes."""
        started = perf_counter()  # not the loop's clock: uvloop's counts whole milliseconds
        await self.call(Ping(), timeout=timeout)
        return perf_counter() - started

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the server's counters, by name."""
        return (await self.call(Stats(), timeout=timeout)).figures

    async def groups(self, *, timeout: float | None = None) -> KeyGroups:
        """Return how much each group of keys takes, by name; see `Limits.group_parts`.

        Raises:
            Unsupported: The store keeps no such account: an etcd cluster.
        """
        found: list[KeyGroup] = []
        more = True
        while more:  # a page at a time, so that nobody has to wait for a store of many groups
            page = await self.call(ListGroups(after=found[-1].name if found else ""), timeout=timeout)
            found += page.groups
            more = page.more
        return found

    async def notes(self, prefix: str, *, timeout: float | None = None) -> Notes:
        """Return what came with the last keep-alives of the leases of all keys under a prefix; see `Lease`."""
        found: list[Note] = []
        more = True
        while more:  # a page at a time, as above
            page = await self.call(ListNotes(prefix=prefix, after=found[-1].key if found else ""), timeout=timeout)
            found += page.notes
            more = page.more
        return found

    @abstractmethod
    def time(self) -> float:
        """Return seconds on this client's clock."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Lease:
    """A lease: keys put on it go when it lapses. Nothing renews it unless somebody calls `keep_alive`."""

    __slots__ = ("_store", "id", "ttl")

    def __init__(self, store: Store, *, id: int, ttl: float) -> None:
        self._store = store
        self.id: int = id
        self.ttl: float = ttl  # as granted

    async def keep_alive(self, *, note: bytes = b"", timeout: float | None = None) -> None:
        """Give it its full TTL again, once.

        Args:
            note: At most 128 bytes that go with it, and are kept, in memory, until the next ones: see `Store.notes`.
            timeout: Seconds.

        Raises:
            LeaseNotFound: It has lapsed.
        """
        await self._store.call(KeepAlive(lease=self.id, note=note), timeout=timeout)

    async def revoke(self, *, timeout: float | None = None) -> None:
        """End it now, and its keys with it."""
        await self._store.call(Revoke(lease=self.id), timeout=timeout)

    async def time_to_live(self, *, timeout: float | None = None) -> float:
        """Return how many seconds it has left."""
        return (await self._store.call(TimeToLive(lease=self.id), timeout=timeout)).remaining


class BlockingWatch(ABC):
    """The blocking twin of `Watch`: a context manager, and an iterator of events."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Open it: from here on nothing is missed."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""

    @abstractmethod
    def batches(self) -> Iterator[list[Event]]:
        """Yield one list per revision."""

    def __iter__(self) -> Iterator[Event]:
        for events in self.batches():
            yield from events


class BlockingStore(ABC):
    """The blocking twin of `Store`; safe to use from several threads."""

    @abstractmethod
    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; raises what `Store.call` raises."""

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> BlockingWatch:
        """Watch all keys that start with `prefix`, as `Store.watch` does."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. Leases that this client kept lapse as agreed."""

    @abstractmethod
    def interrupt(self, error: StoreError) -> None:
        """Make this client useless: every call under way, and every later one, raises `error`. From any thread."""

    @abstractmethod
    def end_waits(self) -> None:
        """End what waits under way, and every later wait, with `WaitEnded`. All else goes on. From any thread."""

    def put(
        self,
        key: str,
        value: bytes,
        *,
        ttl: float | None = None,
        lease: LeaseLike | int | None = None,
        when: Iterable[Condition] = (),
        timeout: float | None = None,
    ) -> int:
        """Write a key and give the revision; with `ttl` it expires, with `lease` it goes when that lapses."""
        request = Put(key, value, ttl, _id_of(lease))
        return self.call(_guarded(request, when), timeout=timeout).revision

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return what a key holds, or None."""
        return self.call(Get(key), timeout=timeout).entry

    def get_many(self, keys: Keys, *, timeout: float | None = None) -> MaybeEntries:
        """Return what several keys hold at one revision, in the order asked."""
        return list(self.call(GetMany(keys=_keys(keys)), timeout=timeout).entries)

    def list(self, prefix: str, *, keys_only: bool = False, timeout: float | None = None) -> Entries:
        """Return all entries whose keys start with `prefix`, sorted by key; with `keys_only` their values are empty."""
        return _entries(self.call(List(prefix=prefix, keys_only=keys_only), timeout=timeout).entries)

    def count(self, prefix: str, *, timeout: float | None = None) -> int:
        """Count the keys that start with `prefix`."""
        return self.call(Count(prefix=prefix), timeout=timeout).count

    def delete(self, key: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> bool:
        """Delete a key; False if it was not there."""
        return self.call(_guarded(Delete(key), when), timeout=timeout).count > 0

    def delete_prefix(self, prefix: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Delete all keys that start with `prefix`; how many there were.

        At one revision, unless there are more than the server changes at once (`writes_max`): then in several steps.
        """
        total, at_most = 0, None
        while True:
            request = DeletePrefix(prefix=prefix, at_most=at_most)
            try:
                count = self.call(_guarded(request, when), timeout=timeout).count
            except LimitExceeded:
                if at_most is not None:
                    raise
                at_most = DELETED_AT_ONCE
                continue
            total += count
            if at_most is None or count == 0:
                return total

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None = None,
        expected_value: bytes | None = None,
        ttl: float | None = None,
        lease: LeaseLike | int | None = None,
        when: Iterable[Condition] = (),
        timeout: float | None = None,
    ) -> CompareAndSetResult:
        """Write a key if its mod_revision (0: it must not exist) or its value is as expected; see `Store`."""
        request = _compare_and_set(key, value, expected_revision, expected_value, ttl, lease)
        return self.call(_guarded(request, when), timeout=timeout)

    def add(self, key: str, amount: int, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Add to the number a key holds as decimal ASCII, a missing key counting from 0; the sum."""
        return self.call(_guarded(Add(key, amount, None), when), timeout=timeout).value

    def append(self, key: str, value: bytes, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Append to what a key holds, a missing key counting as empty; the new length in bytes."""
        return self.call(_guarded(Append(key, value), when), timeout=timeout).value

    def transact(
        self,
        *,
        when: Iterable[Condition] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        grants: Iterable[Grant] = (),
        timeout: float | None = None,
    ) -> TransactionResult:
        """If all conditions hold do `then`, else `otherwise`, all at one revision."""
        request = Transact(when=tuple(when), then=tuple(then), otherwise=tuple(otherwise), grants=tuple(grants))
        return self.call(request, timeout=timeout)

    def wait(self, keys: Keys, *, when: Iterable[Condition] = (), timeout: float | None = None) -> Entries:
        """Wait until all keys exist, and give what they hold then; without `timeout`, for as long as it takes."""
        return _entries(self.call(_guarded(Wait(keys=_keys(keys)), when), timeout=timeout).entries)

    def grant(
        self,
        ttl: float,
        *,
        disconnect_ttl: float | None = None,
        gone_ttl: float | None = GONE_TTL,
        timeout: float | None = None,
    ) -> BlockingLease:
        """Grant a lease of `ttl` seconds; see `Store.grant`. This client comes back with its next call, not before."""
        granted = self.call(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl), timeout=timeout)
        return BlockingLease(self, id=granted.lease, ttl=granted.ttl)

    def kept_lease(self, ttl: float, *, disconnect_ttl: float | None = None) -> BlockingKeptLease:
        """Return a lease that a thread keeps for as long as `with` lasts."""
        return BlockingKeptLease(self, ttl, disconnect_ttl)

    def ping(self, *, timeout: float | None = None) -> float:
        """Measure how many seconds an answer takes."""
        started = perf_counter()
        self.call(Ping(), timeout=timeout)
        return perf_counter() - started

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the server's counters, by name."""
        return self.call(Stats(), timeout=timeout).figures

    def groups(self, *, timeout: float | None = None) -> KeyGroups:
        """Return how much each group of keys takes, by name; see `Store`."""
        found: list[KeyGroup] = []
        more = True
        while more:
            page = self.call(ListGroups(after=found[-1].name if found else ""), timeout=timeout)
            found += page.groups
            more = page.more
        return found

    def notes(self, prefix: str, *, timeout: float | None = None) -> Notes:
        """Return what came with the last keep-alives of the leases of all keys under a prefix; see `Store`."""
        found: list[Note] = []
        more = True
        while more:
            page = self.call(ListNotes(prefix=prefix, after=found[-1].key if found else ""), timeout=timeout)
            found += page.notes
            more = page.more
        return found

    @abstractmethod
    def time(self) -> float:
        """Return seconds on this client's clock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingLease:
    """The blocking twin of `Lease`."""

    __slots__ = ("_store", "id", "ttl")

    def __init__(self, store: BlockingStore, *, id: int, ttl: float) -> None:
        self._store = store
        self.id: int = id
        self.ttl: float = ttl

    def keep_alive(self, *, note: bytes = b"", timeout: float | None = None) -> None:
        """Give it its full TTL again, once; `LeaseNotFound` if it has lapsed."""
        self._store.call(KeepAlive(lease=self.id, note=note), timeout=timeout)

    def revoke(self, *, timeout: float | None = None) -> None:
        """End it now, and its keys with it."""
        self._store.call(Revoke(lease=self.id), timeout=timeout)

    def time_to_live(self, *, timeout: float | None = None) -> float:
        """Return how many seconds it has left."""
        return self._store.call(TimeToLive(lease=self.id), timeout=timeout).remaining
