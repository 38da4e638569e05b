"""Shell: the recipes for those who await; see `store.recipes`. What blocks is made of them, in `blocking`.

Nothing polls. Who waits sends one `Wait` for a key that never comes, guarded by the conditions under which waiting
makes sense: the place ahead still exists, and so does one's own. The store answers with `ConditionFailed` the moment
one of them ceases to hold. Each place is a key on its holder's lease, made once and never made again: its
`create_revision` is the order of arrival, and the fence.

Keys, under the recipe's name: `line/<kind><lease>` for locks and elections, `bell` for elections.
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
    Entry,
    Get,
    Guarded,
    List,
    Listing,
    Put,
    Request,
    Response,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from store.calls import Calls, LeaseLike

R = TypeVar("R", bound=Response)

TTL = 10.0  # seconds for which a holder that has died is still taken for one


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
            raise StoreUsageError("the name of a lock or an election is empty; give it one")
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
