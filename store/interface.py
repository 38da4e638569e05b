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
from typing import TYPE_CHECKING

from store.calls import BlockingCalls, BlockingLease, Calls, Lease, LeaseLike
from store.keeping import BlockingKeptLease, HeldLease, Keeping, kept_lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self, Unpack

    from store.calls import LeaseTerms
    from store.errors import StoreError
    from store.messages import Event

__all__ = ["DEFAULT_TIMEOUT", "BlockingLease", "BlockingStore", "BlockingWatch", "Lease", "LeaseLike", "Store", "Watch"]

DEFAULT_TIMEOUT = 30.0  # seconds for a call of any client, unless it is made or called with another


class Watch(ABC):
    """An ordered stream of the changes under a prefix; an async context manager, and an async iterator of events.

    Iteration can be left, also within a revision, and begun again: it goes on where it was.
    """

    _rest: Iterator[Event] = iter(())  # of a revision within which iteration was left

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
        for event in self._rest:
            yield event
        async for events in self.batches():
            self._rest = iter(events)
            for event in self._rest:
                yield event


class Store(Calls):
    """A key-value store, for async callers.

    Every call takes `timeout`, in seconds; then it raises `StoreTimeoutError`. It raises `ConnectionLost` if
    the answer did not come, `StoreReplaced` if another store answers, and `LimitExceeded` past a limit; with `when=`
    also `ConditionFailed`, with `lease=` also `LeaseNotFound`.

    Attributes:
        tells_causes: Whether the `delete` of a key says how its lease ended (`Event.cause`); etcd does not.
        operations_max: Conditions that one transaction may have, or keys that one request may name.
        writes_max: Operations that one transaction may have.
        lease_ttl_max: The longest lease that it grants, in seconds, as far as is known.
        fail_over: Seconds for which the store may be away while one of its own servers replaces another.
        last_problem: What was last in the way of reaching it, in words, as far as is known.
        durable: Whether what is in it outlives its process, as far as is known.
    """

    tells_causes: bool = True
    operations_max: int = 126  # what any store takes; a client knows better once its store has told
    writes_max: int = 126
    lease_ttl_max: float = math.inf
    fail_over: float = 0.0
    last_problem: str = ""
    durable: bool = True
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

    def fail(self, error: StoreError) -> None:
        """End whatever waits for the store with this error: somebody knows that it will not come back."""

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`.

        Args:
            prefix: What the keys start with; a key is a prefix of itself.
            start_revision: The first revision to hear of; without it, everything after the watch was opened.
            snapshot: First what is there now, as `put` events, then `synced`, then every later change. When history
                is lost over a long disconnection, a `reset` says so and a new snapshot follows.
        """

    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> AbstractAsyncContextManager[HeldLease]:
        """Return a lease that keeps itself for as long as `async with` lasts; its loss cancels the block.

        The arguments are those of `grant`.
        """
        if self._keeping is None:
            self._keeping = Keeping(self)
        return kept_lease(self._keeping, ttl, **terms)


class BlockingWatch(ABC):
    """The blocking twin of `Watch`: a context manager, and an iterator of events."""

    _rest: Iterator[Event] = iter(())  # of a revision within which iteration was left

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
        # No call between what takes an event and what gives it: a signal's handler could raise in one.
        yield from self._rest
        for rest in map(iter, self.batches()):
            self._rest = rest
            yield from rest


class BlockingStore(BlockingCalls):
    """The blocking twin of `Store`; safe to use from several threads."""

    @abstractmethod
    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> BlockingWatch:
        """Watch all keys that start with `prefix`, as `Store.watch` does."""

    @abstractmethod
    def interrupt(self, error: StoreError) -> None:
        """Make this client useless: every call under way, and every later one, raises `error`. From any thread."""

    @abstractmethod
    def end_waits(self) -> None:
        """End what waits under way, and every later wait, with `WaitEnded`. All else goes on. From any thread."""

    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> BlockingKeptLease:
        """Return a lease that a thread keeps for as long as `with` lasts; the arguments are those of `grant`."""
        return BlockingKeptLease(self, ttl, **terms)
