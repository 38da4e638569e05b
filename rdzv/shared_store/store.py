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
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import anyio

from rdzv.config.config_errors import shown
from rdzv.errors import RendezvousStateError
from rdzv.shared_store.company import Company
from rdzv.shared_store.fencing import Fencing
from rdzv.shared_store.operations import Operations
from store.calls import blocking
from store.errors import ConnectionLost, WaitEnded
from store.messages import Response, waits

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from store.interface import BlockingStore, Store
    from store.messages import Condition, Request

__all__ = ["BlockingSharedStore", "ClientAtFirstUse", "SharedStore"]

R = TypeVar("R", bound=Response)
C = TypeVar("C", "Caller", "BlockingStore")

DEFAULT_TIMEOUT: Final = 300.0
"""In seconds, as in PyTorch."""

TIMEOUT_MAX: Final = 1e9
"""In seconds, 31 years: what event loops and sockets still take."""


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


class _Twin(ABC, Generic[C]):
    """What both twins have.

    Args:
        client: Whose keys these are.
        prefix: What all its keys begin with; it ends in "/".
        fence: What holds for as long as this node is a member of the round.
        lease: What everything written goes with, if with anything.
        timeout: How long a wait may take, in seconds.
        company: What is known here of this member and of the others.
    """

    def __init__(
        self,
        client: C,
        *,
        prefix: str,
        fence: tuple[Condition, ...],
        lease: int | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        company: Company | None = None,
    ) -> None:
        self._client: C = client
        self._prefix, self._fence, self._lease = prefix, fence, lease
        self._timeout = _seconds(timeout)
        self._company = company or Company()
        self._under_way: dict[anyio.CancelScope, bool] = {}  # by whether a loss ends it; shared by all clones

    @abstractmethod
    async def _ask(self, request: Request[Any], left: float) -> Response:
        """Make one request, and give its response within so many seconds."""

    def _begin(self, timeout: timedelta | float | None = None) -> Fencing:
        return Fencing(
            self._ask,
            prefix=self._prefix,
            fence=self._fence,
            company=self._company,
            seconds=self._timeout if timeout is None else _seconds(timeout),
            now=self._client.time,
        )

    def _unique(self) -> str:
        return secrets.token_hex(16)

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
        copied._company = replace(self._company, lost=None)
        return copied

    def listening(self) -> Self:
        """Return another such object for who only listens: a wait of its own is not one for others that hold it up."""
        copied = self.clone()
        copied._company = replace(self._company, lost=None, waiting=nullcontext)
        return copied


class ClientAtFirstUse:
    """A client of the store that is made when it is first asked for something, and again if it is of no more use.

    Args:
        open_client: Makes one; it is entered in the loop of whoever asks first.
    """

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[Store]]) -> None:
        self._open = open_client
        self._opened: AsyncExitStack | None = None  # what ends the client
        self._client: Store | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that the client lives in
        self._opening = asyncio.Lock()

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request, and give its response.

        Raises:
            RendezvousStateError: Another event loop has made the client.
        """
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RendezvousStateError(
                "this round's store is used by another event loop already: use it there, by "
                "asyncio.run_coroutine_threadsafe, or use rdzv.sync in a thread without a loop"
            )
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
                self._loop, self._opened = asyncio.get_running_loop(), AsyncExitStack()
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
        self._client = self._loop = None
        opened, self._opened = self._opened, None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.aclose()


class SharedStore(_Twin[Caller], Operations):
    """One round's store, for async callers; its arguments are those of its base.

    Every call raises `RoundSupersededError` once this node is no longer in the round. A call that waits raises
    `MembersLostError` when a member is lost, and `SharedStoreTimeoutError` when its time is over.
    """

    def blocking(self, client: BlockingStore) -> BlockingSharedStore:
        """Return the blocking twin, for the same keys under the same fence, on a client of its own."""
        return BlockingSharedStore(
            client,
            prefix=self._prefix,
            fence=self._fence,
            lease=self._lease,
            timeout=self._timeout,
            company=self._company,
        )

    def end_waits(self) -> None:
        """End what waits, since members were lost, with `MembersLostError`; from the event loop. Clones included.

        Waits that begin later end as `lost` says. What is there already is given all the same.
        """
        for scope, ends_on_loss in tuple(self._under_way.items()):
            if ends_on_loss:
                scope.cancel()

    def end_calls(self, _: object = None) -> None:
        """End every call under way, with `RoundSupersededError` once `superseded` gives a reason; from the event loop.

        Clones included.
        """
        for scope in tuple(self._under_way):
            scope.cancel()

    async def _ask(self, request: Request[Any], left: float) -> Response:
        is_wait = waits(request)
        under_way = self._under_way
        with anyio.CancelScope() as scope:
            under_way[scope] = is_wait and self._company.lost is not None
            try:
                with self._company.waiting() if is_wait else nullcontext():
                    response: Response = await self._client.call(request, timeout=left)
                return response
            finally:
                del under_way[scope]
        raise WaitEnded("members were lost")  # or this node was dropped, as is known by then


class BlockingSharedStore(_Twin["BlockingStore"]):
    """The blocking twin of `SharedStore`, with the same arguments and errors; safe to use from several threads.

    A call under way is ended from another thread by `client.interrupt(...)`; if `superseded` then gives a reason, the
    call ends with `RoundSupersededError`. What waits is ended by `client.end_waits`, if `lost` names somebody.
    """

    set = blocking(Operations.set)
    get = blocking(Operations.get)
    add = blocking(Operations.add)
    append = blocking(Operations.append)
    wait = blocking(Operations.wait)
    check = blocking(Operations.check)
    compare_set = blocking(Operations.compare_set)
    delete_key = blocking(Operations.delete_key)
    num_keys = blocking(Operations.num_keys)
    list_keys = blocking(Operations.list_keys)
    multi_get = blocking(Operations.multi_get)
    multi_set = blocking(Operations.multi_set)
    queue_push = blocking(Operations.queue_push)
    queue_pop = blocking(Operations.queue_pop)
    queue_len = blocking(Operations.queue_len)
    barrier = blocking(Operations.barrier)

    @property
    def _awaited(self) -> Operations:
        return _AtOnce(self)

    async def _ask(self, request: Request[R], left: float) -> R:
        if not waits(request):
            return self._client.call(request, timeout=left)
        with self._company.waiting():
            return self._client.call(request, timeout=left)

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


class _AtOnce(Operations):
    """The operations of a blocking store: whatever they ask for is there before they would wait for it."""

    def __init__(self, twin: BlockingSharedStore) -> None:
        self._twin = twin
        self._prefix, self._lease, self._company = twin._prefix, twin._lease, twin._company

    def _begin(self, timeout: timedelta | float | None = None) -> Fencing:
        return self._twin._begin(timeout)

    def _unique(self) -> str:
        return self._twin._unique()
