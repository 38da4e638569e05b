"""The interface of any store: `Store`, awaited, and `BlockingStore`, with the same names and arguments.

A store on another system (etcd, a fake in tests) implements `call` and `watch` and inherits the rest.

Every call takes `timeout=` in seconds; the default is the client's own, but none for `wait`. Write calls take `when=`,
conditions made by `store.when`; if a condition is false, nothing is written.

An etcd cluster promises less (docs/promises.md, docs/operating.md), and differs:

- `Lease.ttl` is in whole seconds, rounded up. `disconnect_ttl` and `gone_ttl` are ignored.
- If the answer to a write is lost, and the cluster is out of reach for 40 s, the caller may get `ConnectionLost` with
  `maybe_applied=True`.
- `add` and `append` read, then write if the key has not changed; with many writers on one key, some retry.
- Revisions also advance for other users of the cluster, and sometimes for a write that changed nothing.
- `ping` asks the cluster's consensus, not one member. `stats` has the few figures that etcd gives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from store.calls import BlockingCalls, BlockingLease, Calls, Lease, LeaseLike
from store.errors import NotPicklable, unsent_error
from store.keeping import BlockingKeptLease, HeldLease, KeptLeases, kept_lease
from store.net.process import check_loop, check_not_forked

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import Self, Unpack

    from store.calls import LeaseTerms
    from store.errors import StoreError
    from store.messages import Event

__all__ = ["DEFAULT_TIMEOUT", "BlockingLease", "BlockingStore", "BlockingWatch", "Lease", "LeaseLike", "Store", "Watch"]

DEFAULT_TIMEOUT = 30.0  # seconds per call, unless the client or the call has another
NOT_OPEN = "the watch is not open: read it in `async with client.watch(prefix) as watch:`, or `with`"


class Watch(ABC):
    """The changes under a prefix, in order. A reader may leave the iteration and resume it, also within a revision."""

    _rest: Iterator[Event] = iter(())  # events of the last batch that the reader has not taken yet

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open the watch; no later event is missed."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Close the watch."""

    @abstractmethod
    def batches(self) -> AsyncIterator[list[Event]]:
        """Yield a list of events per revision. A large snapshot has several lists; the last ends with `synced`."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._rest:
            yield event
        async for events in self.batches():
            self._rest = iter(events)
            for event in self._rest:
                yield event


class Store(NotPicklable, Calls):
    """A key-value store, for async callers.

    A call raises `StoreTimeoutError` after `timeout` seconds, `ConnectionLost` without an answer, `StoreReplaced` if
    another store answers, `LimitExceeded` past a limit, `ConditionFailed` if one of `when=` is false, and
    `LeaseNotFound` if its `lease=` is gone.

    Attributes:
        tells_causes: True if the `delete` of a key says how its lease ended (`Event.cause`); not on etcd.
        operations_max: The most conditions of a transaction, or keys of a request.
        writes_max: The most operations of a transaction.
        lease_ttl_max: The longest lease, in seconds.
        fail_over: Seconds for which the store may be away while one of its servers replaces another.
        last_problem: The reason of the last failure to reach the store, if known.
        durable: True if the data survives the store's process, as far as known.
    """

    tells_causes: bool = True
    operations_max: int = 126  # allowed by every store; used until the store's own limit is known
    writes_max: int = 126
    lease_ttl_max: float = math.inf
    fail_over: float = 0.0
    last_problem: str = ""
    durable: bool = True
    name: str
    _made_in: bytes
    _loop: asyncio.AbstractEventLoop
    _keeping: KeptLeases | None = None

    def check_usable(self) -> None:
        """Raise an error if the client has failed, was made before a `fork()`, or belongs to another event loop."""
        check_not_forked(self._made_in, self.name)
        check_loop(getattr(self, "_loop", None), self.name)
        if self._failed is not None:
            raise unsent_error(self._failed)

    @property
    def connected(self) -> bool:
        """True if this client is connected, as far as known."""
        return True

    @property
    def store_id(self) -> str | None:
        """The identity of the store, once connected (promise S10)."""
        return None

    @property
    def observed_address(self) -> str | None:
        """This client's address as the store sees it, if known."""
        return None

    @property
    def socket_addresses(self) -> tuple[str, str] | None:
        """The addresses of both ends of the connection, this client's first, as this machine sees them."""
        return None

    @property
    def server(self) -> str:
        """The server at the other end of the connection; "" if the store has only one."""
        return ""

    def fail(self, error: StoreError) -> None:
        """Make present and later calls raise this error: the store will not come back."""

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`.

        Args:
            prefix: A whole key also matches the keys that begin with it.
            start_revision: The first revision to report; by default the next one after the watch was opened.
            snapshot: Begin with the present entries as `put` events, then `synced`. If changes are lost over a long
                disconnection, a `reset` and a new snapshot follow.
        """

    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> AbstractAsyncContextManager[HeldLease]:
        """Return a lease that is kept during `async with`; its loss cancels the block."""
        if self._keeping is None:
            self._keeping = KeptLeases(self)
        return kept_lease(self._keeping, ttl, **terms)


class BlockingWatch(ABC):
    """The blocking twin of `Watch`."""

    _rest: Iterator[Event] = iter(())

    @abstractmethod
    def __enter__(self) -> Self:
        """Open the watch; no later event is missed."""

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Close the watch."""

    @abstractmethod
    def batches(self) -> Iterator[list[Event]]:
        """See `Watch.batches`."""

    def __iter__(self) -> Iterator[Event]:
        # Make no call between taking and yielding an event: a signal's handler could raise there, and lose the event.
        yield from self._rest
        for rest in map(iter, self.batches()):
            self._rest = rest
            yield from rest


class BlockingStore(NotPicklable, BlockingCalls):
    """The blocking twin of `Store`; safe to use from several threads."""

    operations_max: int = Store.operations_max
    writes_max: int = Store.writes_max

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> BlockingWatch:
        """See `Store.watch`."""

    @abstractmethod
    def interrupt(self, error: StoreError) -> None:
        """Make every present and later call raise `error`."""

    @abstractmethod
    def end_waits(self) -> None:
        """Make every present and later wait raise `WaitEndedError`."""

    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> BlockingKeptLease:
        """Return a lease that a thread renews during `with`."""
        return BlockingKeptLease(self, ttl, **terms)
