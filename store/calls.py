"""The methods of a store: each makes one kind of request by `call`.

Blocking calls run the same coroutines in one step (`run_synchronously`): over `BlockingAsAsync` they never wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from numbers import Real
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar

from store import messages
from store.errors import LimitExceeded, StoreError, StoreUsageError, Unsupported
from store.records import brief

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Self, Unpack

    from store.messages import Condition, Entry, KeyGroup, Note, Operation, Request

DELETED_AT_ONCE = 4096  # keys per step of `delete_prefix` at a server without `DeleteOlder`

R = TypeVar("R", bound=messages.Response)
T = TypeVar("T")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")

Keys: TypeAlias = "Iterable[str]"
Entries: TypeAlias = "list[Entry]"  # in the classes below, `list` is a method
KeyGroups: TypeAlias = "list[KeyGroup]"
Notes: TypeAlias = "list[Note]"
MaybeEntries: TypeAlias = "list[Entry | None]"


class LeaseLike(Protocol):
    """Any object with the id of a lease."""

    @property
    def id(self) -> int:
        """The id of the lease."""
        ...


class LeaseTerms(TypedDict, total=False):
    """The options of `grant` and `kept_lease`, in seconds.

    Attributes:
        disconnect_ttl: The longest that the lease may last after its connection has ended.
        gone_ttl: The longest that the lease may last after all connections of its process have closed without a
            goodbye; by default 0.1 for `grant` with `disconnect_ttl`, else off.
        timeout: The time for the grant.
    """

    disconnect_ttl: float | None
    gone_ttl: float | None
    timeout: float | None


def _lease_id_of(lease: LeaseLike | int | None) -> int | None:
    return getattr(lease, "id", lease)  # type: ignore[arg-type]  # the request rejects other types


def _with_conditions(request: Request[R], when: Iterable[Condition]) -> Request[R]:
    conditions = tuple(when)
    return messages.Guarded(when=conditions, request=request) if conditions else request


def checked_timeout(timeout: object, default: float | None) -> float | None:
    """Return the seconds that a call may take, or None; raise `StoreUsageError` if `timeout` is not a number."""
    seconds = default if timeout is None else timeout
    if seconds is None or (type(seconds) is float and not math.isnan(seconds)):
        return seconds
    if type(seconds) is int and abs(seconds) < 2**63:
        return seconds
    with contextlib.suppress(OverflowError):
        if not isinstance(seconds, bool) and isinstance(seconds, Real) and not math.isnan(seconds):
            return float(seconds)
    raise StoreUsageError(f"timeout is {brief(seconds)}; give seconds, or None")


def _as_keys(keys: Iterable[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise StoreUsageError(f"{keys!r} is one key where several are taken: write [{keys!r}]")
    return tuple(keys)


def _drop_none(entries: Iterable[Entry | None]) -> list[Entry]:
    return [entry for entry in entries if entry is not None]


class DisconnectNotifier:
    """Tells the renewers of a client's leases that a connection has ended. Safe to use from several threads.

    After the end of a connection the server may expire a lease early, so listeners are called with the time of the end.
    If an attempt to connect is refused, no server runs, and a restarted one gives each lease its full TTL. So listeners
    get infinity, and later the time of the first attempt that is not refused. `look` checks the connections of a client
    that reads only during calls.
    """

    def __init__(self, time: Callable[[], float], look: Callable[[], object] = lambda: None) -> None:
        self._time = time
        self.look: Callable[[], object] = look
        self.listeners: dict[Callable[[float], object], None] = {}  # each access is atomic
        self.last: float = -math.inf
        self._refused = False

    def note_disconnect(self) -> None:
        """Tell the listeners that a connection has ended."""
        self._notify_listeners(self._time())

    def note_connect_attempt(self, error: OSError | UnicodeError | None) -> None:
        """Note the error of an attempt to connect; None if it succeeded."""
        refused = type(error) is ConnectionRefusedError  # a subclass means that a running server rejects the client
        if refused != self._refused:
            self._refused = refused
            self._notify_listeners(math.inf if refused else self._time())

    def _notify_listeners(self, at: float) -> None:
        self.last = at
        for listener in list(self.listeners):
            listener(at)


class Calls(ABC):
    """The calls of a store. `cuts` reports ended connections; None if they end no lease early."""

    cuts: DisconnectNotifier | None = None
    _failed: StoreError | None = None
    _on_connection: tuple[Callable[[bool], None], ...] = ()

    @abstractmethod
    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and return its response; `interface.Store` lists the errors."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the client. Leases that the client kept expire by their terms."""

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
        """Write a key and return the revision; the key is deleted after `ttl` seconds, or when `lease` ends."""
        request = messages.Put(key, value, ttl, _lease_id_of(lease))
        return (await self.call(_with_conditions(request, when), timeout=timeout)).revision

    async def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return the entry of a key, or None."""
        return (await self.call(messages.Get(key), timeout=timeout)).entry

    async def get_many(self, keys: Keys, *, timeout: float | None = None) -> MaybeEntries:
        """Return the entries of several keys at one revision, in order."""
        return list((await self.call(messages.GetMany(keys=_as_keys(keys)), timeout=timeout)).entries)

    async def list(self, prefix: str, *, keys_only: bool = False, timeout: float | None = None) -> Entries:
        """Return the entries of all keys that start with `prefix`, sorted; `keys_only` leaves their values empty."""
        return _drop_none((await self.call(messages.List(prefix=prefix, keys_only=keys_only), timeout=timeout)).entries)

    async def count(self, prefix: str, *, timeout: float | None = None) -> int:
        """Count the keys that start with `prefix`."""
        return (await self.call(messages.Count(prefix=prefix), timeout=timeout)).count

    async def delete(self, key: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> bool:
        """Delete a key; return False if it did not exist."""
        return (await self.call(_with_conditions(messages.Delete(key), when), timeout=timeout)).count > 0

    async def delete_prefix(self, prefix: str, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Delete all keys that start with `prefix`; return their number.

        More keys than `writes_max` are deleted in several steps. `when` is checked at each step, and keys written after
        the first step stay (not at older servers). An error after the first step has `maybe_applied`, and says how many
        keys are gone.
        """
        left, when = self._timeout_countdown(timeout), tuple(when)
        with contextlib.suppress(LimitExceeded):
            return (await self.call(_with_conditions(messages.DeletePrefix(prefix=prefix), when), timeout=left())).count
        request: Request[messages.DeletedOlder | messages.Counted] = messages.DeleteOlder(prefix=prefix)
        total = 0
        while True:
            try:
                done = await self.call(_with_conditions(request, when), timeout=left())
            except Unsupported:  # an older server: delete the keys that exist at each step
                request = messages.DeletePrefix(prefix=prefix, at_most=DELETED_AT_ONCE)
                continue
            except StoreError as error:
                if total:
                    error.maybe_applied = True
                    error.args = (f"{error}; {total} keys that start with {prefix!r} are gone",)
                raise
            total += done.count
            if isinstance(done, messages.DeletedOlder):
                request = messages.DeleteOlder(prefix=prefix, after=done.after, revision=done.revision)
            if not (done.after if isinstance(done, messages.DeletedOlder) else done.count):
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
    ) -> messages.CompareAndSetResult:
        """Write a key if its mod_revision (0: it must not exist) or its value is as expected.

        If the key is not as expected, no error is raised, and the result has its present entry.

        Raises:
            StoreUsageError: Neither or both expectations were given; the error is a `ValueError`.
        """
        request = messages.CompareAndSet(
            key=key,
            value=value,
            expected_revision=expected_revision,
            expected_value=expected_value,
            ttl=ttl,
            lease=_lease_id_of(lease),
        )
        return await self.call(_with_conditions(request, when), timeout=timeout)

    async def add(self, key: str, amount: int, *, when: Iterable[Condition] = (), timeout: float | None = None) -> int:
        """Add to a key's decimal ASCII number, a missing key counting from 0; return the sum."""
        return (await self.call(_with_conditions(messages.Add(key, amount, None), when), timeout=timeout)).value

    async def append(
        self, key: str, value: bytes, *, when: Iterable[Condition] = (), timeout: float | None = None
    ) -> int:
        """Append to a key's value, a missing key counting as empty; return the new length in bytes."""
        return (await self.call(_with_conditions(messages.Append(key, value), when), timeout=timeout)).value

    async def transact(
        self,
        *,
        when: Iterable[Condition] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        grants: Iterable[messages.Grant] = (),
        timeout: float | None = None,
    ) -> messages.TransactionResult:
        """Do `then` if all conditions hold, else `otherwise`, at one revision.

        `grants` are leases whose ids the caller chooses at random, `CHOSEN_LEASE_LEAST` or above. A lease is granted if
        a key is put on it, and the lease does not exist yet.
        """
        request = messages.Transact(
            when=tuple(when), then=tuple(then), otherwise=tuple(otherwise), grants=tuple(grants)
        )
        return await self.call(request, timeout=timeout)

    async def wait(self, keys: Keys, *, when: Iterable[Condition] = (), timeout: float | None = None) -> Entries:
        """Wait until all keys exist, and return their entries; raise `ConditionFailed` once a condition is false."""
        return _drop_none(
            (await self.call(_with_conditions(messages.Wait(keys=_as_keys(keys)), when), timeout=timeout)).entries
        )

    async def grant(self, ttl: float, **terms: Unpack[LeaseTerms]) -> Lease:
        """Grant a lease of `ttl` seconds; see `LeaseTerms`."""
        disconnect_ttl = terms.get("disconnect_ttl")
        gone_ttl = terms.get("gone_ttl", None if disconnect_ttl is None else messages.GONE_TTL)
        request = messages.Grant(ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl)
        granted = await self.call(request, timeout=terms.get("timeout"))
        return Lease(self, id=granted.lease, ttl=granted.ttl)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Return the seconds that an answer takes."""
        started = perf_counter()  # the loop's clock is too coarse: uvloop's counts whole milliseconds
        await self.call(messages.Ping(), timeout=timeout)
        return perf_counter() - started

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the server's counters, by name."""
        return (await self.call(messages.Stats(), timeout=timeout)).figures

    async def groups(self, *, timeout: float | None = None) -> KeyGroups:
        """Return the size of each group of keys (those with the same first two parts); etcd raises `Unsupported`."""
        found: list[KeyGroup] = []
        more, left = True, self._timeout_countdown(timeout)
        while more:
            page = await self.call(messages.ListGroups(after=found[-1].name if found else ""), timeout=left())
            found += page.groups
            more = page.more
        return found

    async def notes(self, prefix: str, *, timeout: float | None = None) -> Notes:
        """Return the note of each lease with a key under a prefix; see `Lease.keep_alive`."""
        found: list[Note] = []
        more, left = True, self._timeout_countdown(timeout)
        while more:
            page = await self.call(
                messages.ListNotes(prefix=prefix, after=found[-1].key if found else ""), timeout=left()
            )
            found += page.notes
            more = page.more
        return found

    def _timeout_countdown(self, timeout: float | None) -> Callable[[], float | None]:
        within = checked_timeout(timeout, getattr(self, "timeout", None))
        until = None if within is None else self.time() + within
        return lambda: None if until is None else max(until - self.time(), 0.0)

    @abstractmethod
    def time(self) -> float:
        """Return seconds on this client's clock."""

    @abstractmethod
    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> AbstractAsyncContextManager[LeaseLike]:
        """Return a lease that is renewed during `async with`; arguments as in `grant`."""

    @property
    def failure(self) -> StoreError | None:
        """The error that made this client unusable, if any: the store was replaced, or rejected the client."""
        return self._failed

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` with True after each connect, and with False after each loss of a connection or a failure."""
        self._on_connection = (*self._on_connection, callback)

    def notify_connection_change(self, connected: bool) -> None:
        """Call the callbacks of `on_connection_change`."""
        for callback in self._on_connection:
            callback(connected)

    def cap_retry_pauses(self, remaining: Callable[[], float]) -> None:  # noqa: B027  not all stores need it
        """Limit the pauses between attempts to connect by the seconds that `remaining` returns."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Lease:
    """A lease; only `keep_alive` renews it."""

    __slots__ = ("_store", "id", "ttl")

    def __init__(self, store: Calls, *, id: int, ttl: float) -> None:
        self._store = store
        self.id: int = id
        self.ttl: float = ttl  # as granted

    async def keep_alive(self, *, note: bytes = b"", timeout: float | None = None) -> None:
        """Renew the lease. The store keeps a `note` (at most 128 bytes) until the next one: see `Calls.notes`."""
        await self._store.call(messages.KeepAlive(lease=self.id, note=note), timeout=timeout)

    async def revoke(self, *, timeout: float | None = None) -> None:
        """End the lease now, and delete its keys."""
        await self._store.call(messages.Revoke(lease=self.id), timeout=timeout)

    async def time_to_live(self, *, timeout: float | None = None) -> float:
        """Return the seconds left."""
        return (await self._store.call(messages.TimeToLive(lease=self.id), timeout=timeout)).remaining


def run_synchronously(work: Awaitable[T]) -> T:
    """Return the result of an awaitable that never waits."""
    try:
        next(work.__await__())
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a blocking call does not yield to an event loop")


class _HasTwin(Protocol[A_co]):
    @property
    def _async_view(self) -> A_co: ...


def blocking(call: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_HasTwin[A], P], T]:
    """Make a blocking method of an awaited call."""

    @functools.wraps(call)
    def blocking_method(self: _HasTwin[A], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return run_synchronously(call(self._async_view, *arguments, **keywords))

    return blocking_method


class BlockingContext(contextlib.AbstractContextManager[T]):
    """The blocking form of an async context that never waits."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context

    def __enter__(self) -> T:
        try:
            return run_synchronously(self._context.__aenter__())
        except BaseException as error:
            self._exit_after_error(error)
            raise

    def __exit__(self, *how: Any) -> bool | None:
        try:
            return run_synchronously(self._context.__aexit__(*how))
        except BaseException as other:
            self._exit_after_error(other)
            raise

    def _exit_after_error(self, error: BaseException) -> None:
        # If a signal's handler has raised the error, the context may still be entered: leave it.
        with contextlib.suppress(Exception):
            run_synchronously(self._context.__aexit__(type(error), error, error.__traceback__))


class BlockingAsAsync(Calls):
    """Offers a blocking store as `Calls`; the coroutines never wait."""

    def __init__(self, store: BlockingCalls) -> None:
        self.blocking = store
        self.timeout: float | None = getattr(store, "timeout", None)

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """See `BlockingCalls.call`."""
        return self.blocking.call(request, timeout=timeout)

    async def aclose(self) -> None:
        """Close the client."""
        self.blocking.close()

    def time(self) -> float:
        """Return seconds on the blocking client's clock."""
        return self.blocking.time()

    @contextlib.asynccontextmanager
    async def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> AsyncIterator[LeaseLike]:
        """Hold a lease that a thread renews."""
        with self.blocking.kept_lease(ttl, **terms) as lease:
            yield lease


class BlockingCalls(ABC):
    """The blocking twin of `Calls`."""

    cuts: DisconnectNotifier | None = None

    @property
    @abstractmethod
    def failure(self) -> StoreError | None:
        """See `Calls.failure`."""

    @abstractmethod
    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """See `Calls.call`."""

    @abstractmethod
    def close(self) -> None:
        """See `Calls.aclose`."""

    def time(self) -> float:
        """Return seconds on this machine's monotonic clock."""
        return monotonic()

    @abstractmethod
    def kept_lease(self, ttl: float, **terms: Unpack[LeaseTerms]) -> AbstractContextManager[LeaseLike]:
        """Return a lease that a thread renews during `with`; arguments as in `grant`."""

    @property
    def _async_view(self) -> Calls:
        return BlockingAsAsync(self)

    put = blocking(Calls.put)
    get = blocking(Calls.get)
    get_many = blocking(Calls.get_many)
    list = blocking(Calls.list)
    count = blocking(Calls.count)
    delete = blocking(Calls.delete)
    delete_prefix = blocking(Calls.delete_prefix)
    compare_and_set = blocking(Calls.compare_and_set)
    add = blocking(Calls.add)
    append = blocking(Calls.append)
    transact = blocking(Calls.transact)
    wait = blocking(Calls.wait)
    ping = blocking(Calls.ping)
    stats = blocking(Calls.stats)
    groups = blocking(Calls.groups)
    notes = blocking(Calls.notes)

    def grant(self, ttl: float, **terms: Unpack[LeaseTerms]) -> BlockingLease:
        """See `Calls.grant`."""
        granted = run_synchronously(self._async_view.grant(ttl, **terms))
        return BlockingLease(self, id=granted.id, ttl=granted.ttl)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingLease:
    """The blocking twin of `Lease`."""

    __slots__ = ("_async_view", "id", "ttl")

    def __init__(self, store: BlockingCalls, *, id: int, ttl: float) -> None:
        self._async_view = Lease(BlockingAsAsync(store), id=id, ttl=ttl)
        self.id: int = id
        self.ttl: float = ttl  # as granted

    keep_alive = blocking(Lease.keep_alive)
    revoke = blocking(Lease.revoke)
    time_to_live = blocking(Lease.time_to_live)
