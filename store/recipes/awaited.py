"""The awaited recipes; see `store.recipes`. `blocking` wraps them.

Each client in a lock's queue writes one key on its own lease: its *place*. The queue is in the order of the keys'
`create_revision`. A waiting client sends one `Wait` for a key that is never written; this wait fails when the client's
own place or the place ahead is deleted. The keys of a recipe are `line/<kind><lease>`, and `bell` for elections.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from store import when
from store.calls import checked_timeout
from store.errors import ConditionFailed, ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError, StoreUsageError
from store.messages import CompareAndSet, Condition, Entry, Get, Guarded, List, Put, Request, Response, Wait
from store.records import brief

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Unpack

    from store.calls import Calls, LeaseLike, LeaseTerms

R = TypeVar("R", bound=Response)

TTL = 10.0  # default seconds until a dead or disconnected client loses its place
SILENT_AFTER = 1.0  # seconds per request if `timeout` is 0
EARLY = 0.01  # seconds by which a timer may be early


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lock or a leadership, held until its lease ends. Its `token` is higher than those of earlier holders."""

    key: str
    token: int
    lease: int

    @property
    def fence(self) -> Condition:
        """The condition, for `when=` of a write, that the lock is still held."""
        return when.create_revision(self.key) == self.token


class _TimedRequests:
    """Makes requests within one timeout. `late` is the message of a timeout while another client holds the lock."""

    def __init__(self, store: Calls, name: str, timeout: float | None = None, late: str = "") -> None:
        if name == "":
            raise StoreUsageError("the name of a lock or an election is empty; give it one")
        _check_argument(isinstance(name, str), "a lock or an election", "name", name, "a str")
        self._timeout, self._late = checked_timeout(timeout, None), late
        _check_argument((self._timeout or 0.0) >= 0, name, "timeout", timeout, "seconds, or None")
        self.name = name
        self.store = store
        self._began_at = store.time()
        self._seen_taken = False

    @property
    def seconds_left(self) -> float | None:
        if not self._timeout:
            return None if self._timeout is None else SILENT_AFTER
        return max(self._began_at + self._timeout - self.store.time(), 0.001)

    async def __call__(self, request: Request[R]) -> R:
        return await self.store.call(request, timeout=self.seconds_left)

    def note_held_by_other(self) -> None:
        """Note that another client holds the lock; with `timeout=0`, raise `StoreTimeoutError`."""
        self._seen_taken = True
        if self._timeout == 0:
            raise StoreTimeoutError(self._late)

    def timeout_error(self, error: StoreError) -> StoreError:
        """Return `error`; after the timeout, an error that says if another client held the lock."""
        late_after = SILENT_AFTER if self._timeout == 0 else self._timeout
        if late_after is None or self.store.time() < self._began_at + late_after - EARLY:
            return error
        if self._seen_taken:
            return StoreTimeoutError(f"{self._late} within {self._timeout:g} s" if self._timeout else self._late)
        silent = f"the store did not answer within {late_after:g} s, so {brief(self.name)} was not had: {error}"
        return StoreTimeoutError(silent, maybe_applied=error.maybe_applied)

    async def get_entry(self, key: str) -> Entry | None:
        return (await self(Get(key))).entry

    async def list_keys(self, prefix: str) -> list[Entry]:
        return [entry for entry in (await self(List(prefix=prefix, keys_only=True))).entries if entry is not None]

    async def wait_for_change(self, conditions: Sequence[Condition]) -> None:
        with contextlib.suppress(ConditionFailed):
            await self(Guarded(when=tuple(conditions), request=Wait(keys=(f"{self.name}/nothing",))))


def _check_argument(is_right: bool, name: str, what: str, value: object, wanted: str) -> None:
    if not is_right:
        raise StoreUsageError(f"the {what} of {brief(name)} is {brief(value)}; give {wanted}")


def _still_exists_condition(entry: Entry) -> Condition:
    return when.create_revision(entry.key) == entry.create_revision


def lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a lock during a block; first come, first served.

    Args:
        store: The client.
        name: A prefix of its keys.
        ttl: Seconds until a dead or disconnected holder loses it.
        value: The value of the holder's key.
        terms: See `LeaseTerms`; `timeout=`: seconds to wait for the lock; 0: take the lock only if it is free now.

    Raises:
        StoreTimeoutError: The lock was not free in time, or the store did not answer.
        LeaseNotFound: The lock was lost; an async block is cancelled first.
    """
    return _hold_place_in_queue(store, name, f"the lock {brief(name)} was not free", "w", value, ttl, terms)


def write_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a read-write lock alone, once all earlier readers and writers have released it; see `lock`."""
    return lock(store, name, ttl=ttl, value=value, **terms)


def read_lock(
    store: Calls, name: str, *, ttl: float = TTL, value: bytes = b"", **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Hold a read-write lock together with other readers, once all earlier writers have released it; see `lock`."""
    return _hold_place_in_queue(store, name, f"the lock {brief(name)} was not free of writers", "r", value, ttl, terms)


def leadership(
    store: Calls, name: str, candidate: bytes, *, ttl: float = TTL, **terms: Unpack[LeaseTerms]
) -> AbstractAsyncContextManager[Held]:
    """Lead during a block, once all earlier candidates have left.

    Args:
        store: The client.
        name: A prefix of the election's keys.
        candidate: The value that `leader` returns, for example an address.
        ttl: Seconds until a dead or disconnected leader loses its place.
        terms: The same as for `lock`; with `timeout=0`, lead only if there is no other candidate now.
    """
    late = f"another led in {brief(name)}: this one was not elected"
    return _hold_place_in_queue(store, name, late, "w", candidate, ttl, terms, bell=True)


async def leader(store: Calls, name: str, *, timeout: float | None = None) -> bytes | None:
    """Return the `candidate` value of the leader, or None."""
    ask = _TimedRequests(store, name, timeout)
    try:
        entry = await _first_in_line(ask)
    except (StoreTimeoutError, ConnectionLost) as error:
        raise ask.timeout_error(error) from None
    return entry.value if entry is not None else None


async def leaders(store: Calls, name: str) -> AsyncIterator[bytes | None]:
    """Yield the leader's value, or None, now and at each change; quick changes may be skipped."""
    ask = _TimedRequests(store, name)
    current = await _first_in_line(ask)
    while True:
        yield current.value if current is not None else None
        current = await _wait_for_new_leader(ask, current)


@contextlib.asynccontextmanager
async def _hold_place_in_queue(
    store: Calls, name: str, late: str, kind: str, value: bytes, ttl: float, terms: LeaseTerms, *, bell: bool = False
) -> AsyncIterator[Held]:
    ask = _TimedRequests(store, name, terms.pop("timeout", None), late)
    called = "candidate" if bell else "value"
    _check_argument(isinstance(value, bytes | bytearray | memoryview), name, called, value, "bytes")
    for what, seconds in {"ttl": ttl, **terms}.items():
        is_right = isinstance(seconds, int | float) and seconds is not True and seconds > 0
        _check_argument(is_right or (seconds is None and what != "ttl"), name, what, seconds, "seconds, above 0")
    held: Held | None = None
    try:
        terms["timeout"] = ask.seconds_left
        async with store.kept_lease(ttl, **terms) as lease:
            place = await _join_queue_and_wait(ask, kind, lease, bytes(value))
            if bell:  # writing the bell wakes watchers of an election that had no leader
                await ask(Guarded(when=(place.fence,), request=Put(f"{name}/bell", b"")))
            held = place
            yield held
    except (StoreTimeoutError, ConnectionLost) as error:
        raise error if held else ask.timeout_error(error) from None
    except ConditionFailed as error:
        raise error if held else LeaseNotFound(f"a place in {brief(name)} lapsed with its lease; come again") from None


async def _join_queue_and_wait(ask: _TimedRequests, kind: str, lease: LeaseLike, value: bytes) -> Held:
    """Join the queue, and wait until earlier places have ended; readers (`r`) wait for writers only."""
    prefix = f"{ask.name}/line/"
    key = f"{prefix}{kind}{lease.id:016x}"
    taken = (await ask(CompareAndSet(key=key, value=value, expected_revision=0, lease=lease.id))).entry
    if taken is None:
        raise LeaseNotFound(f"lease {lease.id} has lapsed before {brief(key)} was written; try again")
    held = Held(key=taken.key, token=taken.create_revision, lease=lease.id)
    while True:
        line = sorted(await ask.list_keys(prefix), key=lambda entry: entry.create_revision)
        before = [entry for entry in line if entry.create_revision < held.token]
        if len(before) == len(line) or line[len(before)].key != held.key:
            raise LeaseNotFound(f"the place {brief(key)} was lost while waiting: its lease has lapsed; come again")
        in_the_way = [entry for entry in before if kind == "w" or entry.key.startswith(f"{prefix}w")]
        if not in_the_way:
            return held
        ask.note_held_by_other()
        # Wait for the last place ahead only, so that each place that ends wakes one waiter.
        await ask.wait_for_change([held.fence, _still_exists_condition(in_the_way[-1])])


async def _first_in_line(ask: _TimedRequests) -> Entry | None:
    while line := await ask.list_keys(f"{ask.name}/line/"):
        first = min(line, key=lambda entry: entry.create_revision)
        entry = await ask.get_entry(first.key)
        if entry is not None and entry.create_revision == first.create_revision:
            return entry
    return None


async def _wait_for_new_leader(ask: _TimedRequests, known: Entry | None) -> Entry | None:
    if known is not None:
        await ask.wait_for_change([_still_exists_condition(known)])
        return await _first_in_line(ask)
    while True:
        # The next leader's key is unknown, so wait until a candidate writes the bell.
        bell = await ask.get_entry(f"{ask.name}/bell")
        current = await _first_in_line(ask)  # a candidate may have joined before the bell was read
        if current is not None:
            return current
        await ask.wait_for_change([when.mod_revision(f"{ask.name}/bell") == (bell.mod_revision if bell else 0)])
