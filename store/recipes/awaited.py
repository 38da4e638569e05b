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
from typing import TYPE_CHECKING, TypeVar

from store import when
from store.errors import ConditionFailed, ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError, StoreUsageError
from store.messages import (
    CompareAndSet,
    Condition,
    Entry,
    Get,
    Guarded,
    List,
    Put,
    Request,
    Response,
    Wait,
)
from store.records import shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Unpack

    from store.calls import Calls, LeaseLike, LeaseTerms

R = TypeVar("R", bound=Response)

TTL = 10.0  # seconds for which a holder that has died is still taken for one
SILENT_AFTER = 1.0  # seconds that each request of an attempt with `timeout=0` may take
EARLY = 0.01  # seconds by which a timer may be early


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
        timeout: Seconds for all of it, if there is a limit; with 0 each request has a second.
        late: What is said if the place was taken for all of that time.
    """

    def __init__(self, store: Calls, name: str, timeout: float | None = None, late: str = "") -> None:
        if name == "":
            raise StoreUsageError("the name of a lock or an election is empty; give it one")
        _check(isinstance(name, str), "a lock or an election", "name", name, "a str")
        _check(timeout is None or _is_above(-1e-9, timeout), name, "timeout", timeout, "seconds, or None")
        self.name = name
        self.store = store
        self._timeout, self._late = timeout, late
        self._began_at = store.time()
        self._seen_taken = False

    @property
    def left(self) -> float | None:
        """Seconds that the next request may take."""
        if not self._timeout:
            return None if self._timeout is None else SILENT_AFTER
        return max(self._began_at + self._timeout - self.store.time(), 0.001)

    async def __call__(self, request: Request[R]) -> R:
        return await self.store.call(request, timeout=self.left)

    def taken(self) -> None:
        """Note that another holds it. With `timeout=0`, that ends the attempt."""
        self._seen_taken = True
        if self._timeout == 0:
            raise StoreTimeoutError(self._late)

    def judged(self, error: StoreError) -> StoreError:
        """Return what an error means to the caller: if the caller's time is over, whether the place was taken."""
        late_after = SILENT_AFTER if self._timeout == 0 else self._timeout
        if late_after is None or self.store.time() < self._began_at + late_after - EARLY:
            return error
        if self._seen_taken:
            return StoreTimeoutError(f"{self._late} within {self._timeout:g} s" if self._timeout else self._late)
        silent = f"the store did not answer within {late_after:g} s, so {self.name!r} was not had: {error}"
        return StoreTimeoutError(silent, maybe_applied=error.maybe_applied)

    async def entry(self, key: str) -> Entry | None:
        """Return what a key holds."""
        return (await self(Get(key))).entry

    async def keys(self, prefix: str) -> list[Entry]:
        """Return all entries whose keys start with a prefix, without their values, in the order of their keys."""
        listing = await self(List(prefix=prefix, keys_only=True))
        return [entry for entry in listing.entries if entry is not None]

    async def until_changed(self, conditions: Sequence[Condition]) -> None:
        """Wait until one of the conditions does not hold any more."""
        with contextlib.suppress(ConditionFailed):
            await self(Guarded(when=tuple(conditions), request=Wait(keys=(f"{self.name}/nothing",))))


def _is_above(least: float, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > least


def _check(is_right: bool, name: str, what: str, value: object, wanted: str) -> None:
    if not is_right:
        raise StoreUsageError(f"the {what} of {shown(name)} is {shown(value)}; give {wanted}")


def _lost(held: Held) -> LeaseNotFound:
    return LeaseNotFound(f"the place {held.key!r} was lost while waiting: its lease has lapsed; come again")


def _as_it_is(entry: Entry) -> Condition:
    return when.create_revision(entry.key) == entry.create_revision


def lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a lock for the length of a block, one holder at a time, in the order in which they came.

    Args:
        store: The client.
        name: The lock's name: the keys it uses start with it.
        ttl: Seconds after which a holder that has died, or is cut off, counts as gone.
        value: What others may read of the holder, under its key.
        terms: `timeout=`: seconds that getting it may take, all in all; 0: take it only if it is free now.
            `disconnect_ttl=` and `gone_ttl=`: how soon it is free again after the holder's connection has ended, or its
            process has died; see `Store.grant`.

    Raises:
        StoreTimeoutError: It was not free in time, or the store did not answer in time.
        LeaseNotFound: The lock was lost; an awaiting holder is cancelled for it.
    """
    return _place(store, name, f"the lock {name!r} was not free", "w", value, ttl, terms)


def write_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a read-write lock alone: once all readers and writers who came earlier have gone; see `lock`."""
    return lock(store, name, ttl=ttl, value=value, **terms)


def read_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a read-write lock together with other readers, once the writers who came earlier have gone; see `lock`."""
    return _place(store, name, f"the lock {name!r} was not free of writers", "r", value, ttl, terms)


def leadership(
    store: Calls, name: str, candidate: bytes, *, ttl: float = TTL, **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Lead for the length of a block, once all earlier candidates have gone; its end resigns.

    Args:
        store: The client.
        name: The election's name: the keys it uses start with it.
        candidate: What `leader` returns while this one leads: an address, say.
        ttl: Seconds after which a leader that has died, or is cut off, counts as gone.
        terms: As of `lock`; with `timeout=0` it leads only if there is no other candidate now.
    """
    late = f"another led in {name!r}: this one was not elected"
    return _place(store, name, late, "w", candidate, ttl, terms, bell=True)


async def leader(store: Calls, name: str, *, timeout: float | None = None) -> bytes | None:
    """Return what the leader of an election gave as its `candidate`, or None if there is no leader."""
    ask = _Asking(store, name, timeout)
    try:
        entry = await _first_in_line(ask)
    except (StoreTimeoutError, ConnectionLost) as error:
        raise ask.judged(error) from None
    return entry.value if entry is not None else None


async def leaders(store: Calls, name: str) -> AsyncIterator[bytes | None]:
    """Yield the leader's value, or None while nobody leads, and again at each change; quick ones may be missed."""
    ask = _Asking(store, name)
    current = await _first_in_line(ask)
    while True:
        yield current.value if current is not None else None
        current = await _leader_changed(ask, current)


@contextlib.asynccontextmanager
async def _place(
    store: Calls, name: str, late: str, kind: str, value: bytes, ttl: float, terms: LeaseTerms, *, bell: bool = False
) -> AsyncIterator[Held]:
    """Have a place in a line, on a lease of its own, from the moment it is the first until the block is left."""
    ask = _Asking(store, name, terms.pop("timeout", None), late)
    _check(isinstance(value, bytes | bytearray | memoryview), name, "value", value, "bytes")
    for what, seconds in {"ttl": ttl, **terms}.items():
        _check(_is_above(0, seconds) or (seconds is None and what != "ttl"), name, what, seconds, "seconds, above 0")
    held: Held | None = None
    try:
        terms["timeout"] = ask.left
        async with store.kept_lease(ttl, **terms) as lease:
            place = await _stand_in_line(ask, kind, lease, bytes(value))
            if bell:  # watchers of an election without a leader cannot know the key that the next one writes
                await ask(Guarded(when=(place.fence,), request=Put(f"{name}/bell", b"")))
            held = place
            yield held
    except (StoreTimeoutError, ConnectionLost) as error:
        raise error if held else ask.judged(error) from None
    except ConditionFailed as error:
        raise error if held else LeaseNotFound(f"the lease of a place in {name!r} has lapsed; come again") from None


async def _stand_in_line(ask: _Asking, kind: str, lease: LeaseLike, value: bytes) -> Held:
    """Take a place in a line, and wait until those before it have gone: readers (`r`) for writers (`w`), else all."""
    prefix = f"{ask.name}/line/"
    key = f"{prefix}{kind}{lease.id:016x}"
    taken = (await ask(CompareAndSet(key=key, value=value, expected_revision=0, lease=lease.id))).entry
    if taken is None:
        raise LeaseNotFound(f"lease {lease.id} has lapsed before {key!r} was written; try again")
    held = Held(key=taken.key, token=taken.create_revision, lease=lease.id)
    while True:
        line = sorted(await ask.keys(prefix), key=lambda entry: entry.create_revision)
        before = [entry for entry in line if entry.create_revision < held.token]
        if len(before) == len(line) or line[len(before)].key != held.key:
            raise _lost(held)
        in_the_way = [entry for entry in before if kind == "w" or entry.key.startswith(f"{prefix}w")]
        if not in_the_way:
            return held
        ask.taken()
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
