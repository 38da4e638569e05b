# Made from store/calls/awaited.py by tools/blocking.py: change that file, and run `python -m tools.blocking`.
"""What any store can do: every named call, said once over one `call`.

The half that blocks is made from the one that awaits, by `tools/blocking.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from store.calls.arguments import compare_and_set, entries_of, guarded, id_of, keys_of
from store.errors import LimitExceeded
from store.messages import (
    GONE_TTL,
    Add,
    Append,
    CompareAndSetResult,
    Count,
    Delete,
    DeletePrefix,
    Get,
    GetMany,
    Grant,
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
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from store.calls.arguments import Entries, KeyGroups, Keys, LeaseLike, MaybeEntries, Notes
    from store.messages import Condition, Entry, KeyGroup, Note, Operation

__all__ = ["BlockingCalls", "BlockingLease"]

DELETED_AT_ONCE = 4096  # keys, by `delete_prefix`; a server that takes fewer deletes fewer

R = TypeVar("R", bound=Response)


class BlockingCalls(ABC):
    """Every named call, over `call`."""

    @abstractmethod
    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response.

        Raises:
            ConnectionLost: The connection broke and did not come back in time.
            StoreTimeoutError: The server did not answer in time.
            StoreError: The request was refused; the class says why.
        """

    @abstractmethod
    def close(self) -> None:
        """Hang up. Leases that this client kept lapse as agreed."""

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
        request = Put(key, value, ttl, id_of(lease))
        return (self.call(guarded(request, when), timeout=timeout)).revision

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return what a key holds, or None."""
        return (self.call(Get(key), timeout=timeout)).entry

    def get_many(self, keys: Keys, *, timeout: float | None = None) -> MaybeEntries:
        """Return what several keys hold at one revision, in the order asked."""
        return list((self.call(GetMany(keys=keys_of(keys)), timeout=timeout)).entries)

    def list(self, prefix: str, *, keys_only: bool = False, timeout: float | None = None) -> Entries:
        """Return all entries whose keys start with `prefix`, sorted by key; with `keys_only` their values are empty."""
        return entries_of((self.call(List(prefix=prefix, keys_only=keys_only), timeout=timeout)).entries)

    def count(self, prefix: str, *, timeout: float | None = None) -> int:
        """Count the keys that start with `prefix`."""
        return (self.call(Count(prefix=prefix), timeout=timeout)).count

    def delete(self, key: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> bool:
        """Delete a key; False if it was not there."""
        return (self.call(guarded(Delete(key), when), timeout=timeout)).count > 0

    def delete_prefix(self, prefix: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Delete all keys that start with `prefix`; how many there were.

        At one revision, unless there are more than the server changes at once (`writes_max`): then in several steps.
        """
        total, at_most = 0, None
        while True:
            request = DeletePrefix(prefix=prefix, at_most=at_most)
            try:
                count = (self.call(guarded(request, when), timeout=timeout)).count
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
        """Write a key if its mod_revision (0: it must not exist) or its value is as expected.

        Losing is an answer, not an error: it carries what is there now.

        Raises:
            StoreUsageError: Not exactly one expectation was given (it is a `ValueError`, too).
        """
        request = compare_and_set(key, value, expected_revision, expected_value, ttl, lease)
        return self.call(guarded(request, when), timeout=timeout)

    def add(self, key: str, amount: int, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Add to the number a key holds as decimal ASCII, a missing key counting from 0; the sum."""
        return (self.call(guarded(Add(key, amount, None), when), timeout=timeout)).value

    def append(self, key: str, value: bytes, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Append to what a key holds, a missing key counting as empty; the new length in bytes."""
        return (self.call(guarded(Append(key, value), when), timeout=timeout)).value

    def transact(
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
        return self.call(request, timeout=timeout)

    def wait(self, keys: Keys, *, when: Iterable[Condition] = (), timeout: float | None = None) -> Entries:
        """Wait until all keys exist, and give what they hold then; without `timeout`, for as long as it takes.

        Raises:
            ConditionFailed: One of `when` ceased to hold.
        """
        return entries_of((self.call(guarded(Wait(keys=keys_of(keys)), when), timeout=timeout)).entries)

    def grant(
        self,
        ttl: float,
        *,
        disconnect_ttl: float | None = None,
        gone_ttl: float | None = GONE_TTL,
        timeout: float | None = None,
    ) -> BlockingLease:
        """Grant a lease of `ttl` seconds, which lapses `disconnect_ttl` after a disconnection if that is sooner.

        Then it also lapses `gone_ttl` after its process seems to have died: all of its connections closed, no goodbye.
        """
        granted = self.call(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl), timeout=timeout)
        return BlockingLease(self, id=granted.lease, ttl=granted.ttl)

    def ping(self, *, timeout: float | None = None) -> float:
        """Measure how many seconds an answer takes."""
        started = perf_counter()  # not the loop's clock: uvloop's counts whole milliseconds
        self.call(Ping(), timeout=timeout)
        return perf_counter() - started

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the server's counters, by name."""
        return (self.call(Stats(), timeout=timeout)).figures

    def groups(self, *, timeout: float | None = None) -> KeyGroups:
        """Return how much each group of keys takes, by name; see `Limits.group_parts`.

        Raises:
            Unsupported: The store keeps no such account: an etcd cluster.
        """
        found: list[KeyGroup] = []
        more = True
        while more:  # a page at a time, so that nobody has to wait for a store of many groups
            page = self.call(ListGroups(after=found[-1].name if found else ""), timeout=timeout)
            found += page.groups
            more = page.more
        return found

    def notes(self, prefix: str, *, timeout: float | None = None) -> Notes:
        """Return what came with the last keep-alives of the leases of all keys under a prefix; see `BlockingLease`."""
        found: list[Note] = []
        more = True
        while more:  # a page at a time, as above
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
    """A lease: keys put on it go when it lapses. Nothing renews it unless somebody calls `keep_alive`."""

    __slots__ = ("_store", "id", "ttl")

    def __init__(self, store: BlockingCalls, *, id: int, ttl: float) -> None:
        self._store = store
        self.id: int = id
        self.ttl: float = ttl  # as granted

    def keep_alive(self, *, note: bytes = b"", timeout: float | None = None) -> None:
        """Give it its full TTL again, once.

        Args:
            note: At most 128 bytes that go with it, and are kept, in memory, until the next ones: see `notes`.
            timeout: Seconds.

        Raises:
            LeaseNotFound: It has lapsed.
        """
        self._store.call(KeepAlive(lease=self.id, note=note), timeout=timeout)

    def revoke(self, *, timeout: float | None = None) -> None:
        """End it now, and its keys with it."""
        self._store.call(Revoke(lease=self.id), timeout=timeout)

    def time_to_live(self, *, timeout: float | None = None) -> float:
        """Return how many seconds it has left."""
        return (self._store.call(TimeToLive(lease=self.id), timeout=timeout)).remaining
