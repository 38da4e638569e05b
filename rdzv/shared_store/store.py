"""Shell: the `torch.distributed.Store` API over one round's keys, for those who await and those who block.

Names, order of arguments and meaning are those of PyTorch 2.13, with these differences:

- `num_keys` and `list_keys` speak of this round's keys only, where PyTorch's count the whole server's.
- A timeout is a `timedelta` or a number of seconds. It bounds waiting; what the store answers at once has at least a
  second to be answered.
- A wait that runs out raises `SharedStoreTimeoutError`, which names the keys that were missing, and an empty queue
  `QueueEmptyError`. A value that is no number cannot be added to: a `ValueError`, as is any other senseless argument.
- A queue's key cannot be that of a value as well.

Every request is conditional on this node's being a member of the round. Once it is not, whatever it asks, and whatever
it waits for, ends with `RoundSupersededError` (promises R9, R10). `operations` says what is done, once for both.
"""

from __future__ import annotations

import asyncio
import copy
import math
import secrets
from contextlib import AsyncExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import anyio

from rdzv.config.config_errors import shown
from rdzv.shared_store.blocking_calls import BlockingSharedCalls
from rdzv.shared_store.calls import SharedCalls
from rdzv.shared_store.fencing import Fencing, nobody
from rdzv.shared_store.operations import Plans
from store.errors import ConnectionLost, StoreError, WaitEnded
from store.messages import Response, waits

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Self

    from rdzv.shared_store.company import Company
    from rdzv.shared_store.fencing import Plan
    from store.interface import BlockingStore, Store
    from store.messages import Condition, Request

__all__ = ["BlockingSharedStore", "ClientAtFirstUse", "SharedStore"]

T = TypeVar("T")
R = TypeVar("R", bound=Response)
C = TypeVar("C")

DEFAULT_TIMEOUT: Final = 300.0
"""In seconds, as in PyTorch."""

TIMEOUT_MAX: Final = 1e9
"""In seconds, 31 years: what event loops and sockets still take."""


def _never() -> str | None:
    return None


def _unique_name() -> str:
    return secrets.token_hex(16)


def _seconds(timeout: object) -> float:
    """A timeout in seconds.

    Raises:
        TypeError: It is none.
        ValueError: It is negative, or beyond all measure.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = float(timeout) if abs(timeout) <= TIMEOUT_MAX else math.inf
    else:
        raise TypeError(f"a timeout is a timedelta or a number of seconds, not {shown(timeout)}")
    if not 0 <= seconds <= TIMEOUT_MAX:  # false for NaN, too
        raise ValueError(f"the timeout {shown(timeout)} must be from 0 to {TIMEOUT_MAX:.0f} seconds")
    return seconds


class Caller(Protocol):
    """What a shared store needs of a client."""

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request, and give its response."""
        raise NotImplementedError

    def time(self) -> float:
        """Seconds on the clock by which it waits."""
        raise NotImplementedError


class _Ending:
    """What ends the calls under way, shared by all clones of a store."""

    __slots__ = ("_superseded", "reason", "scopes", "waits")

    def __init__(self, superseded: Callable[[], str | None]) -> None:
        self._superseded = superseded
        self.reason: str | None = None
        self.scopes: set[anyio.CancelScope] = set()
        self.waits: set[anyio.CancelScope] = set()  # of the requests among them that wait for something

    def why(self) -> str | None:
        """Why this node is known here to be no member any more, by either way to know it."""
        return self.reason or self._superseded()


class _Twin(Generic[C]):
    """What both twins have.

    Args:
        client: Whose keys these are.
        prefix: What all its keys begin with; it ends in "/".
        fence: What holds for as long as this node is a member of the round.
        lease: What everything written goes with, if with anything.
        timeout: How long a wait may take, in seconds.
        superseded: Why this node is known here to be no member any more; None as long as it may be one.
        lost: Which members are known here to have died, if waits end because of that; see `SharedStore.end_waits`.
        company: Who this member is, and among whom, if a barrier is to name it to those who wait for it.
        waiting: Entered around each request that waits for others: who waits for them is not the one who holds them up.
    """

    def __init__(
        self,
        client: C,
        *,
        prefix: str,
        fence: tuple[Condition, ...],
        lease: int | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        superseded: Callable[[], str | None] = _never,
        lost: Callable[[], tuple[str, ...]] = nobody,
        company: Company | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._client = client
        self._waiting = waiting
        self._ending = _Ending(superseded)
        self._company = company
        self._prefix, self._fence, self._lease = prefix, fence, lease
        self._superseded = self._ending.why
        self._lost = lost
        self._plans = Plans(prefix=prefix, lease=lease, unique=_unique_name, company=company)
        self._fencing = self._make_fencing()
        self._timeout = _seconds(timeout)

    def _make_fencing(self) -> Fencing:
        return Fencing(prefix=self._prefix, fence=self._fence, superseded=self._superseded, lost=self._lost)

    @property
    def prefix(self) -> str:
        """What all its keys begin with."""
        return self._prefix

    @property
    def fence(self) -> tuple[Condition, ...]:
        """What holds for as long as this node is a member of the round."""
        return self._fence

    @property
    def lease(self) -> int | None:
        """What everything written goes with, if with anything."""
        return self._lease

    @property
    def timeout(self) -> timedelta:
        """How long a wait may take."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Say how long a wait may take, unless it says so itself."""
        self._timeout = _seconds(timeout)

    def clone(self) -> Self:
        """Return another object for the same keys, with a timeout of its own."""
        return copy.copy(self)

    def waiting_through_losses(self) -> Self:
        """Return another object for the same keys, whose waits go on when members are lost."""
        copied = self.clone()
        copied._lost = nobody
        copied._fencing = copied._make_fencing()
        return copied

    def listening(self) -> Self:
        """Return another such object for who only listens: a wait of its own is not one for others that hold it up."""
        copied = self.waiting_through_losses()
        copied._waiting = nullcontext
        return copied

    def _limit(self, timeout: timedelta | float | None) -> float:
        return self._timeout if timeout is None else _seconds(timeout)


class ClientAtFirstUse:
    """A client of the store that is made when it is first asked for something, and again if it is of no more use.

    Args:
        open_client: Makes one; it is entered in the loop of whoever asks first.
    """

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[Store]]) -> None:
        self._open = open_client
        self._opened: AsyncExitStack | None = None  # what ends the client
        self._client: Store | None = None
        self._opening = asyncio.Lock()

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request, and give its response."""
        client = self._client
        if client is None or client.failure is not None:
            began = self.time()
            with anyio.move_on_after(timeout) as limit:
                client = await self._connect()
            if limit.cancelled_caught or client is None:
                assert timeout is not None, "without a limit, it connects or fails"
                raise ConnectionLost(f"no store answered within {timeout:g} s", maybe_applied=False)
            if timeout is not None:
                timeout = max(timeout - (self.time() - began), 0.001)
        return await client.call(request, timeout=timeout)

    async def _connect(self) -> Store:
        async with self._opening:  # of several that come first at once, one connects
            if self._client is not None and self._client.failure is not None:
                await self._close()
            if self._client is None:
                self._opened = AsyncExitStack()
                self._client = await self._opened.enter_async_context(self._open())
            return self._client

    def time(self) -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Hang up; what is asked later makes a new client."""
        async with self._opening:
            await self._close()

    async def _close(self) -> None:
        self._client = None
        opened, self._opened = self._opened, None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.aclose()


class SharedStore(_Twin[Caller], SharedCalls):
    """One round's store, awaited; its arguments are those of its base."""

    def blocking(self, client: BlockingStore) -> BlockingSharedStore:
        """Return the blocking twin, for the same keys under the same fence, on a client of its own."""
        return BlockingSharedStore(
            client,
            prefix=self._prefix,
            fence=self._fence,
            lease=self._lease,
            timeout=self._timeout,
            superseded=self._superseded,
            lost=self._lost,
            company=self._company,
            waiting=self._waiting,
        )

    def end_waits(self) -> None:
        """End what waits, since members were lost, with `MembersLostError`; from the event loop. Clones included.

        Waits that begin later end as `lost` says. What is there already is given all the same.
        """
        for scope in tuple(self._ending.waits):
            scope.cancel()

    def supersede(self, reason: str) -> None:
        """End every call under way, and refuse every later one, with `RoundSupersededError`; from the event loop.

        Clones included. The first reason counts.
        """
        self._ending.reason = self._ending.reason or reason
        for scope in tuple(self._ending.scopes):
            scope.cancel()

    async def _run(self, plan: Plan[T], timeout: timedelta | float | None = None) -> T:
        steps = self._fencing.steps(plan, seconds=self._limit(timeout), now=self._client.time)
        with anyio.CancelScope() as scope:
            self._ending.scopes.add(scope)
            try:
                request, left = next(steps)
                while True:
                    try:
                        if waits(request):
                            response: Any = await self._wait(request, left)
                        else:
                            response = await self._client.call(request, timeout=left)
                    except StoreError as error:
                        request, left = steps.throw(error)
                    else:
                        request, left = steps.send(response)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self._ending.scopes.discard(scope)
        raise self._fencing.superseded_error(self._ending.reason or "it was dropped")

    async def _wait(self, request: Request[Any], left: float) -> Response:
        """Make a request that waits, until `end_waits`."""
        with anyio.CancelScope() as scope:
            if self._lost is not nobody:
                self._ending.waits.add(scope)
            try:
                with self._waiting():
                    response: Response = await self._client.call(request, timeout=left)
                return response
            finally:
                self._ending.waits.discard(scope)
        raise WaitEnded("members were lost")


class BlockingSharedStore(_Twin["BlockingStore"], BlockingSharedCalls):
    """The blocking twin of `SharedStore`, with the same arguments; safe to use from several threads.

    A call under way is ended from another thread by `client.interrupt(...)`; if `superseded` then gives a reason, the
    call ends with `RoundSupersededError`. What waits is ended by `client.end_waits`, if `lost` names somebody.
    """

    def reopened(self) -> BlockingSharedStore:
        """Return the same store on a client of its own: what a forked child uses instead of this one."""
        copied = self.clone()
        copied._client = copy.copy(self._client)
        return copied

    def end_waits(self) -> None:
        """End what waits, now and later, as if its time were over; all else goes on. From any thread."""
        self._client.end_waits()

    def close(self) -> None:
        """Hang up; clones too."""
        self._client.close()

    def _run(self, plan: Plan[T], timeout: timedelta | float | None = None) -> T:
        steps = self._fencing.steps(plan, seconds=self._limit(timeout), now=self._client.time)
        try:
            request, left = next(steps)
            while True:
                try:
                    if waits(request) and self._waiting is not nullcontext:
                        with self._waiting():
                            response: Any = self._client.call(request, timeout=left)
                    else:
                        response = self._client.call(request, timeout=left)
                except StoreError as error:
                    request, left = steps.throw(error)
                else:
                    request, left = steps.send(response)
        except StopIteration as done:
            result: T = done.value
            return result
