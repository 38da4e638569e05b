"""Shell: the recipes for those who await; see `store.recipes`. What blocks is made of them, in `blocking`.

Nothing polls. Who waits sends one `Wait` for a key that never comes, guarded by the conditions under which waiting
makes sense: the place ahead still exists, and so does one's own. The store answers with `ConditionFailed` the moment
one of them ceases to hold. Each place is a key on its holder's lease, made once and never made again: its
`create_revision` is the order of arrival, and the fence.

Keys, under the recipe's name: `line/<kind><lease>` for locks and elections, `bell` for elections; `members/<lease>` and
`ready` for a double barrier; `tail`, `items/<number>` and `claims/<number>` for a queue.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from store import when
from store.errors import ConditionFailed, LeaseNotFound, StoreTimeoutError, StoreUsageError
from store.messages import (
    CompareAndSet,
    Condition,
    Count,
    Delete,
    Entry,
    Get,
    Guarded,
    List,
    Listing,
    Put,
    Request,
    Response,
    Transact,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from store.calls import Calls, LeaseLike

R = TypeVar("R", bound=Response)

TTL = 10.0  # seconds for which a holder that has died is still taken for one

CLAIMS_WATCHED = 100
"""Claims that one wait of a queue looks at: an etcd transaction has at most 128 conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A place in the store that its holder has until its lease ends.

    Attributes:
        key: Where it is.
        token: Its revision: higher than that of every earlier holder.
        lease: The lease it is on.
    """

    key: str
    token: int
    lease: int

    @property
    def fence(self) -> Condition:
        """The condition that this is still held: for `when=` of a write."""
        return when.create_revision(self.key) == self.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Item(Held):
    """One item of a queue, held by whoever has claimed it.

    Attributes:
        number: Its number; items are numbered from 0 as they were put.
        value: What was put.
    """

    number: int
    value: bytes


class _Asking:
    """Asks the store for one recipe, until the time of its caller is over.

    Args:
        store: The client.
        name: The recipe's name: the keys it uses start with it.
        timeout: Seconds, if there is a limit.
        late: What is said once they are over.
    """

    def __init__(self, store: Calls, name: str, timeout: float | None = None, late: str = "") -> None:
        if not name:
            raise StoreUsageError("the name of a lock, an election, a barrier or a queue is empty; give it one")
        self.name = name
        self._store = store
        self._timeout, self._late = timeout, late
        self._deadline = None if timeout is None else store.time() + timeout

    async def __call__(self, request: Request[R]) -> R:
        remaining = None if self._deadline is None else max(self._deadline - self._store.time(), 0.001)
        try:
            return await self._store.call(request, timeout=remaining)
        except StoreTimeoutError:
            if self._deadline is None or self._store.time() < self._deadline:
                raise
            raise StoreTimeoutError(f"{self._late} within {self._timeout:g} s") from None

    async def entry(self, key: str) -> Entry | None:
        """Return what a key holds."""
        return (await self(Get(key))).entry

    async def keys(self, prefix: str) -> list[Entry]:
        """Return all entries whose keys start with a prefix, without their values, in the order of their keys."""
        return _there(await self(List(prefix=prefix, keys_only=True)))

    async def until_changed(self, conditions: Sequence[Condition]) -> None:
        """Wait until one of the conditions does not hold any more."""
        with contextlib.suppress(ConditionFailed):
            await self(Guarded(when=tuple(conditions), request=Wait(keys=(f"{self.name}/nothing",))))


def _there(listing: Listing) -> list[Entry]:
    return [entry for entry in listing.entries if entry is not None]


def _lost(held: Held) -> LeaseNotFound:
    return LeaseNotFound(f"the place {held.key!r} was lost while waiting: its lease has lapsed; come again")


def _as_it_is(entry: Entry) -> Condition:
    return when.create_revision(entry.key) == entry.create_revision


def _held(entry: object, lease: LeaseLike) -> Held:
    place = cast("Entry", entry)
    return Held(key=place.key, token=place.create_revision, lease=lease.id)


# ------------------------------------------------------------------------------------------- locks and elections


@contextlib.asynccontextmanager
async def lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
) -> AsyncIterator[Held]:
    """Hold a lock for the length of a block, one holder at a time, in the order in which they came.

    Args:
        store: The client.
        name: The lock's name: the keys it uses start with it.
        ttl: Seconds after which a holder that has died, or is cut off, counts as gone.
        value: What others may read of the holder, under its key.
        timeout: Seconds to wait for it at most.

    Raises:
        StoreTimeoutError: It was not free in time.
        LeaseNotFound: The lock was lost; who awaits is cancelled for it.
    """
    async with store.kept_lease(ttl) as lease:
        ask = _Asking(store, name, timeout, f"the lock {name!r} was not free")
        yield await _stand_in_line(ask, "w", lease, value)


def write_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
) -> AbstractAsyncContextManager[Held]:
    """Hold a read-write lock alone: once all readers and writers who came earlier have gone; see `lock`."""
    return lock(store, name, ttl=ttl, value=value, timeout=timeout)


@contextlib.asynccontextmanager
async def read_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
) -> AsyncIterator[Held]:
    """Hold a read-write lock together with other readers, once the writers who came earlier have gone; see `lock`."""
    async with store.kept_lease(ttl) as lease:
        ask = _Asking(store, name, timeout, f"the lock {name!r} was not free of writers")
        yield await _stand_in_line(ask, "r", lease, value)


@contextlib.asynccontextmanager
async def leadership(
    store: Calls, name: str, candidate: bytes, *, ttl: float = TTL, timeout: float | None = None
) -> AsyncIterator[Held]:
    """Lead for the length of a block, once all earlier candidates have gone; its end resigns.

    Args:
        store: The client.
        name: The election's name: the keys it uses start with it.
        candidate: What `leader` tells of this one: an address, say.
        ttl: Seconds after which a leader that has died, or is cut off, counts as gone.
        timeout: Seconds to wait for it at most.
    """
    async with store.kept_lease(ttl) as lease:
        ask = _Asking(store, name, timeout, f"another led in {name!r}: this one was not elected")
        held = await _stand_in_line(ask, "w", lease, candidate)
        try:  # those who watch an election in which nobody leads cannot know the key that somebody will write
            await ask(Guarded(when=(held.fence,), request=Put(f"{name}/bell", b"")))
        except ConditionFailed:
            raise _lost(held) from None
        yield held


async def leader(store: Calls, name: str) -> bytes | None:
    """Return what the leader of an election gave as its value, or None if nobody leads."""
    entry = await _first_in_line(_Asking(store, name))
    return entry.value if entry is not None else None


async def leaders(store: Calls, name: str) -> AsyncIterator[bytes | None]:
    """Yield the leader's value, or None while nobody leads, and again at each change; quick ones may be missed."""
    ask = _Asking(store, name)
    current = await _first_in_line(ask)
    while True:
        yield current.value if current is not None else None
        current = await _leader_changed(ask, current)


async def _stand_in_line(ask: _Asking, kind: str, lease: LeaseLike, value: bytes) -> Held:
    """Take a place in a line, and wait until those before it have gone: readers (`r`) for writers (`w`), else all."""
    prefix = f"{ask.name}/line/"
    key = f"{prefix}{kind}{lease.id:016x}"
    taken = (await ask(CompareAndSet(key=key, value=value, expected_revision=0, lease=lease.id))).entry
    if taken is None:
        raise LeaseNotFound(f"lease {lease.id} has lapsed before {key!r} was written; try again")
    held = _held(taken, lease)
    while True:
        line = sorted(await ask.keys(prefix), key=lambda entry: entry.create_revision)
        before = [entry for entry in line if entry.create_revision < held.token]
        if len(before) == len(line) or line[len(before)].key != held.key:
            raise _lost(held)
        in_the_way = [entry for entry in before if kind == "w" or entry.key.startswith(f"{prefix}w")]
        if not in_the_way:
            return held
        # Only the last of those ahead is waited for: who leaves wakes one, not all.
        await ask.until_changed([held.fence, _as_it_is(in_the_way[-1])])


async def _first_in_line(ask: _Asking) -> Entry | None:
    """Return the place of the one whose turn it is, with its value."""
    while line := await ask.keys(f"{ask.name}/line/"):
        first = min(line, key=lambda entry: entry.create_revision)
        entry = await ask.entry(first.key)
        if entry is not None and entry.create_revision == first.create_revision:
            return entry
    return None


async def _leader_changed(ask: _Asking, known: Entry | None) -> Entry | None:
    """Wait until another leads than the one that is known, or nobody does."""
    if known is not None:
        await ask.until_changed([_as_it_is(known)])
        return await _first_in_line(ask)
    while True:
        # Nobody leads. Who comes writes a key whose name is not known yet, so this waits for the bell it rings.
        bell = await ask.entry(f"{ask.name}/bell")
        current = await _first_in_line(ask)  # it may have come between the two looks
        if current is not None:
            return current
        await ask.until_changed([when.mod_revision(f"{ask.name}/bell") == (bell.mod_revision if bell else 0)])


# ------------------------------------------------------------------------------------------------ double barrier


@contextlib.asynccontextmanager
async def double_barrier(
    store: Calls, name: str, count: int, *, ttl: float = TTL, timeout: float | None = None
) -> AsyncIterator[Held]:
    """Begin a block once `count` are there, and end it once all have ended theirs.

    One that dies in its block counts as having ended it, after its TTL. A block that fails waits for nobody. The next
    meeting under the name begins when all have left the last one.

    Args:
        store: The client.
        name: The barrier's name: the keys it uses start with it.
        count: How many at least.
        ttl: Seconds after which one that has died, or is cut off, counts as gone.
        timeout: Seconds to wait for the others at most, at each end.
    """
    async with store.kept_lease(ttl) as lease:
        ask = _Asking(store, name, timeout, f"fewer than {count} came to the barrier {name!r}")
        held, ready = await _enter_barrier(ask, count, lease)
        yield held
        ask = _Asking(store, name, timeout, f"others have not left the barrier {name!r}")
        await ask(Delete(held.key))
        await _until_left(ask, ready)


async def _enter_barrier(ask: _Asking, count: int, lease: LeaseLike) -> tuple[Held, Entry]:
    """Wait until `count` are in; one's place, and the sign of the meeting that it belongs to."""
    if count < 1:
        raise StoreUsageError(f"a barrier is for at least 1, not for {count}")
    held = await _register(ask, lease)
    ready_key = f"{ask.name}/ready"
    members = await ask.keys(f"{ask.name}/members/")
    try:
        if len(members) >= count:
            # Whoever registers last sees all, so somebody always gets here; the first of several makes it ready.
            await ask(Guarded(when=(held.fence,), request=CompareAndSet(key=ready_key, value=b"", expected_revision=0)))
        (ready,) = _there(await ask(Guarded(when=(held.fence,), request=Wait(keys=(ready_key,)))))
    except ConditionFailed:
        raise _lost(held) from None
    return held, ready


async def _register(ask: _Asking, lease: LeaseLike) -> Held:
    """Take a place among the members, once the last meeting has been left by all."""
    ready_key = f"{ask.name}/ready"
    key = f"{ask.name}/members/{lease.id:016x}"
    while True:
        then = (Put(key, b"", lease=lease.id), Get(key))
        result = await ask(Transact(when=(when.missing(ready_key),), then=then))
        if result.succeeded:
            return _held(result.results[1], lease)
        ready = await ask.entry(ready_key)
        if ready is not None:
            await _until_left(ask, ready)


async def _until_left(ask: _Asking, ready: Entry) -> None:
    """Wait until all have left one meeting, and take away its sign, also for those who died in it."""
    while True:
        there = await ask.entry(ready.key)
        if there is None or there.create_revision != ready.create_revision:
            return
        # Nobody registers while the sign is up, so these are members of this meeting.
        members = await ask.keys(f"{ask.name}/members/")
        if not members:
            with contextlib.suppress(ConditionFailed):  # another has done it
                await ask(Guarded(when=(_as_it_is(ready),), request=Delete(ready.key)))
            return
        await ask.until_changed([_as_it_is(ready), _as_it_is(members[0])])


# --------------------------------------------------------------------------------------------------------- queue


class Queue:
    """A queue of values, first in, first out; made for up to some thousand items, since each look lists their keys.

    Args:
        store: The client.
        name: The queue's name: the keys it uses start with it.
    """

    def __init__(self, store: Calls, name: str) -> None:
        self._store = store
        self._name = name

    def _asking(self, timeout: float | None = None) -> _Asking:
        return _Asking(self._store, self._name, timeout, f"nothing came in the queue {self._name!r}")

    def _item(self, number: int) -> str:
        return f"{self._name}/items/{number:020d}"  # so that the order of keys is that of numbers

    def _claim(self, number: int) -> str:
        return f"{self._name}/claims/{number:020d}"

    async def put(self, value: bytes) -> int:
        """Put a value at the end; its number."""
        ask, tail_key = self._asking(), f"{self._name}/tail"
        while True:
            tail = await ask.entry(tail_key)
            number, revision = (int(tail.value), tail.mod_revision) if tail is not None else (0, 0)
            # Item and tail go together: a number that was given away, and no item under it, would be waited for for
            # ever.
            then = (Put(self._item(number), value), Put(tail_key, str(number + 1).encode()))
            if (await ask(Transact(when=(when.mod_revision(tail_key) == revision,), then=then))).succeeded:
                return number

    async def get(self, *, timeout: float | None = None) -> bytes:
        """Wait for the first value and take it out, for exactly one caller: who dies after that takes it along."""
        ask = self._asking(timeout)
        while True:
            number, free = await self._next_item(ask)
            key = self._item(number)
            result = await ask(Transact(when=free, then=(Get(key), Delete(key))))
            if result.succeeded:
                return cast("Entry", result.results[0]).value

    @contextlib.asynccontextmanager
    async def take(self, *, ttl: float = TTL, timeout: float | None = None) -> AsyncIterator[Item]:
        """Have the first item for the length of a block. It goes if the block ends well, else it is another's.

        Raises:
            LeaseNotFound: The claim was lost; who awaits is cancelled for it.
        """
        async with self._store.kept_lease(ttl) as lease:
            item = await self._claim_item(self._asking(timeout), lease)
            yield item
            then = (Delete(self._item(item.number)), Delete(item.key))
            if not (await self._asking()(Transact(when=(item.fence,), then=then))).succeeded:
                raise LeaseNotFound(
                    f"the claim on item {item.number} of {self._name!r} has lapsed before it was done; another may "
                    "have it now"
                )

    async def count(self) -> int:
        """Count the items that are there, claimed ones included."""
        return (await self._asking()(Count(prefix=f"{self._name}/items/"))).count

    async def _claim_item(self, ask: _Asking, lease: LeaseLike) -> Item:
        """Claim the first item; the claim goes with the lease, and then the item is free again."""
        while True:
            number, free = await self._next_item(ask)
            claim = self._claim(number)
            then = (Put(claim, b"", lease=lease.id), Get(claim), Get(self._item(number)))
            result = await ask(Transact(when=free, then=then))
            if result.succeeded:
                place, item = (cast("Entry", entry) for entry in result.results[1:])
                token, value = place.create_revision, item.value
                return Item(key=claim, token=token, lease=lease.id, number=number, value=value)

    async def _next_item(self, ask: _Asking) -> tuple[int, tuple[Condition, ...]]:
        """Wait for the first item that nobody has claimed; its number, and the conditions that this is so."""
        tail_key = f"{self._name}/tail"
        while True:
            # The tail is read first: if an item is put after that, the tail has changed, and the wait below ends at
            # once. Waiting for the next item itself would not do: it may have come, and been taken, before the wait
            # begins.
            tail = await ask.entry(tail_key)
            claims = await ask.keys(f"{self._name}/claims/")
            items = await ask.keys(f"{self._name}/items/")
            claimed = {entry.key.rpartition("/")[2] for entry in claims}
            for entry in items:
                number = entry.key.rpartition("/")[2]
                if number not in claimed:
                    return int(number), (_as_it_is(entry), when.missing(self._claim(int(number))))
            same_tail = when.mod_revision(tail_key) == (tail.mod_revision if tail is not None else 0)
            # A claim that ends makes its item free, or takes it away.
            await ask.until_changed([same_tail, *map(_as_it_is, claims[:CLAIMS_WATCHED])])
