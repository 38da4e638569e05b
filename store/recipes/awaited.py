"""Shell: the recipes for those who await; see `store.recipes`.

The half that blocks is made from the one that awaits, by `tools/blocking.py`. What blocks cannot be cancelled from
outside. So a block of it that lost its lock goes on to its end, and only then learns of it by `LeaseNotFound`: what it
writes must be fenced by `held.fence`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from store.errors import StoreError, StoreTimeoutError
from store.recipes import steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from store.interface import Store
    from store.messages import Entry
    from store.recipes.steps import Held, Item, Steps

__all__ = ["Queue", "double_barrier", "leader", "leaders", "leadership", "lock", "read_lock", "write_lock"]

T = TypeVar("T")

TTL = 10.0  # seconds for which a holder that has died is still taken for one


async def _carry_out(store: Store, recipe: Steps[T], what: str = "", timeout: float | None = None) -> T:
    """Ask the store what a recipe wants to know, until it is done."""
    deadline = None if timeout is None else store.time() + timeout
    try:
        request = next(recipe)
        while True:
            remaining = None if deadline is None else max(deadline - store.time(), 0.001)
            try:
                response = await store.call(request, timeout=remaining)
            except StoreTimeoutError:
                if deadline is None or store.time() < deadline:
                    raise
                raise StoreTimeoutError(f"{what} within {timeout:g} s") from None
            except StoreError as error:
                request = recipe.throw(error)
            else:
                request = recipe.send(response)
    except StopIteration as done:
        result: T = done.value
        return result


@contextlib.asynccontextmanager
async def lock(
    store: Store, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
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
        wanted = steps.hold_lock(name, lease.id, value)
        yield await _carry_out(store, wanted, f"the lock {name!r} was not free", timeout)


def write_lock(
    store: Store, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
) -> contextlib.AbstractAsyncContextManager[Held]:
    """Hold a read-write lock alone: once all readers and writers who came earlier have gone; see `lock`."""
    return lock(store, name, ttl=ttl, value=value, timeout=timeout)


@contextlib.asynccontextmanager
async def read_lock(
    store: Store, name: str, *, ttl: float = TTL, value: bytes = b"", timeout: float | None = None
) -> AsyncIterator[Held]:
    """Hold a read-write lock together with other readers, once the writers who came earlier have gone; see `lock`."""
    async with store.kept_lease(ttl) as lease:
        wanted = steps.hold_read_lock(name, lease.id, value)
        yield await _carry_out(store, wanted, f"the lock {name!r} was not free of writers", timeout)


@contextlib.asynccontextmanager
async def leadership(
    store: Store, name: str, candidate: bytes, *, ttl: float = TTL, timeout: float | None = None
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
        wanted = steps.lead(name, lease.id, candidate)
        yield await _carry_out(store, wanted, f"another led in {name!r}: this one was not elected", timeout)


async def leader(store: Store, name: str) -> bytes | None:
    """Return what the leader of an election gave as its value, or None if nobody leads."""
    entry = await _carry_out(store, steps.first_in_line(name))
    return entry.value if entry is not None else None


async def leaders(store: Store, name: str) -> AsyncIterator[bytes | None]:
    """Yield the leader's value, or None while nobody leads, and again at each change; quick ones may be missed."""
    current: Entry | None = await _carry_out(store, steps.first_in_line(name))
    while True:
        yield current.value if current is not None else None
        current = await _carry_out(store, steps.leader_changed(name, current))


@contextlib.asynccontextmanager
async def double_barrier(
    store: Store, name: str, count: int, *, ttl: float = TTL, timeout: float | None = None
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
        wanted = steps.enter_barrier(name, count, lease.id)
        held, ready = await _carry_out(store, wanted, f"fewer than {count} came to the barrier {name!r}", timeout)
        yield held
        leaving = steps.leave_barrier(name, held, ready)
        await _carry_out(store, leaving, f"others have not left the barrier {name!r}", timeout)


class Queue:
    """A queue of values, first in, first out; made for up to some thousand items, since each look lists their keys.

    Args:
        store: The client.
        name: The queue's name: the keys it uses start with it.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    async def put(self, value: bytes) -> int:
        """Put a value at the end; its number."""
        return await _carry_out(self._store, steps.put_item(self._name, value))

    async def get(self, *, timeout: float | None = None) -> bytes:
        """Wait for the first value and take it out, for exactly one caller: who dies after that takes it along."""
        return await _carry_out(self._store, steps.take_item(self._name), self._nothing, timeout)

    @contextlib.asynccontextmanager
    async def take(self, *, ttl: float = TTL, timeout: float | None = None) -> AsyncIterator[Item]:
        """Have the first item for the length of a block. It goes if the block ends well, else it is another's.

        Raises:
            LeaseNotFound: The claim was lost; who awaits is cancelled for it.
        """
        async with self._store.kept_lease(ttl) as lease:
            item = await _carry_out(self._store, steps.claim_item(self._name, lease.id), self._nothing, timeout)
            yield item
            await _carry_out(self._store, steps.finish_item(self._name, item))

    async def count(self) -> int:
        """Count the items that are there, claimed ones included."""
        return await _carry_out(self._store, steps.count_items(self._name))

    @property
    def _nothing(self) -> str:
        return f"nothing came in the queue {self._name!r}"
