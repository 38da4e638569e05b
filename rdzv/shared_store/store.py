"""The `torch.distributed.Store` API over one round's keys, for async and for blocking callers.

Names, order of arguments and meaning are those of PyTorch 2.13, except:

- `num_keys` and `list_keys` cover this round's keys only, where PyTorch's count the whole server's.
- A timeout is a `timedelta` or a number of seconds. It limits waits; for other requests, a timeout below a second
  counts as one second.
- A wait that times out raises `SharedStoreTimeoutError`, which names the missing keys. An empty queue raises
  `QueueEmptyError`, an argument of a wrong type `TypeError`, adding to a value that is no number `ValueError`.
- A key holds a queue or a value: a push to a value, or a blocking pop from it, raises `ValueError`. If `set` writes to
  a queue's key, the queue's items can still be popped, but no more pushed; until all are popped, `list_keys` omits the
  key.
"""

from __future__ import annotations

import asyncio
import copy
import math
import secrets
from abc import abstractmethod
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, cast

import anyio

from rdzv.config.config_errors import brief
from rdzv.errors import RendezvousStateError
from rdzv.shared_store.fencing import FencedCall, MembershipQueries, keys_in_words
from rdzv.shared_store.operations import Operations, RoundKeys
from store.calls import blocking
from store.errors import ConnectionLost, NotPicklable, WaitEndedError
from store.messages import Response, waits

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from store.interface import BlockingStore, Store
    from store.messages import Condition, Request

R = TypeVar("R", bound=Response)
C = TypeVar("C", "RequestClient", "BlockingStore")

DEFAULT_TIMEOUT: Final = 300.0  # seconds, as in PyTorch
TIMEOUT_MAX: Final = 1e9  # seconds, below the limit of sockets and threads


def _timeout_seconds(timeout: object) -> float:
    """Return a timeout in seconds; raise TypeError for another type, ValueError if negative or too large."""
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = float(timeout) if abs(timeout) <= TIMEOUT_MAX else math.inf
    else:
        raise TypeError(f"a timeout is a timedelta or a number of seconds, not {brief(timeout)}")
    if not 0 <= seconds <= TIMEOUT_MAX:  # false for NaN, too
        raise ValueError(f"the timeout {brief(timeout)} must be from 0 to {TIMEOUT_MAX:.0f} seconds")
    return seconds


class RequestClient(Protocol):
    """The methods of a client that a shared store needs."""

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request."""

    def time(self) -> float:
        """Return the time on the clock that `timeout` refers to."""


class _SharedStoreBase(RoundKeys, Generic[C]):
    """The part that the async and the blocking store share."""

    def __init__(
        self,
        client: C,
        *,
        prefix: str,
        fence: tuple[Condition, ...],
        lease: int | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        company: MembershipQueries | None = None,
    ) -> None:
        self._client: C = client
        self.prefix: str = prefix  # the prefix of all keys in this store; it ends in "/"
        self.fence: tuple[Condition, ...] = fence
        self.lease: int | None = lease  # the lease of every key written, if any
        self._timeout = _timeout_seconds(timeout)
        self._company: MembershipQueries = company or MembershipQueries()
        self._under_way: dict[anyio.CancelScope, bool] = {}  # running calls; True if a member's loss ends the call

    @abstractmethod
    async def _send_request(self, request: Request[Any], left: float) -> Response:
        """Make one request within `left` seconds."""

    def _new_fenced_call(self, timeout: timedelta | float | None = None) -> FencedCall:
        return FencedCall(
            self._send_request,
            prefix=self.prefix,
            fence=self.fence,
            company=self._company,
            seconds=self._timeout if timeout is None else _timeout_seconds(timeout),
            now=self._client.time,
        )

    def _reported_as_wait(self, request: Request[Any]) -> AbstractContextManager[object]:
        """Return a context that reports a request as a wait if the request waits for other members."""
        return self._company.waiting(partial(keys_in_words, self.prefix, request)) if waits(request) else nullcontext()

    def _new_queue_item_name(self) -> str:
        return secrets.token_hex(16)

    @property
    def timeout(self) -> timedelta:
        """The default limit of a wait."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the default limit of a wait."""
        self._timeout = _timeout_seconds(timeout)

    def clone(self) -> Self:
        """Return another object for the same keys, with its own timeout."""
        return copy.copy(self)

    def ignoring_losses(self) -> Self:
        """Return a clone whose waits continue when members are lost."""
        copied = self.clone()
        copied._company = replace(self._company, lost=None)
        return copied

    def without_wait_reports(self) -> Self:
        """Return a clone whose waits are not reported, and continue when members are lost."""
        copied = self.clone()
        copied._company = replace(self._company, lost=None, waiting=nullcontext)
        return copied


class LazyClient(NotPicklable):
    """A client that connects at its first request, in the caller's loop, and again after a failure."""

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[Store]]) -> None:
        self._open = open_client
        self._opened: AsyncExitStack | None = None  # holds the client's open context
        self._client: Store | None = None
        self._of_another_store = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()

    def expect_store(self, store_id: str | None) -> None:
        """At the next request, replace the client if it is of another store than `store_id`."""
        self._of_another_store = self._client is not None and self._client.store_id != store_id

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request; raise RendezvousStateError if another event loop uses the client."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RendezvousStateError(
                "this round's store is used by another event loop already: use it there, by "
                "asyncio.run_coroutine_threadsafe, or use rdzv.sync in a thread without a loop"
            )
        client = self._client
        if client is None or not self._is_usable(client):
            began = self.time()
            with anyio.move_on_after(timeout) as limit:
                client = await self._connect()
            if limit.cancelled_caught or client is None:
                assert timeout is not None, "without a limit, it connects or fails"
                raise ConnectionLost(f"no store answered within {timeout:g} s", maybe_applied=False)
            if timeout is not None:
                timeout = max(timeout - (self.time() - began), 0.001)
        return await client.call(request, timeout=timeout)

    def _is_usable(self, client: Store) -> bool:
        return client.failure is None and not self._of_another_store

    async def _connect(self) -> Store:
        async with self._opening:  # concurrent first requests share one connection
            if self._client is not None and not self._is_usable(self._client):
                await self._close()
            if self._client is None:
                self._loop, self._opened = asyncio.get_running_loop(), AsyncExitStack()
                self._client = await self._opened.enter_async_context(self._open())
            return self._client

    def time(self) -> float:
        """Return the loop's time in seconds."""
        return asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Disconnect, from any event loop; a later request makes a new client."""
        there = self._loop
        if there is None or there is asyncio.get_running_loop():
            async with self._opening:
                await self._close()
        elif there.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.aclose(), there))
        else:  # the loop has ended, and with it the client's connections
            self._client = self._loop = self._opened = None

    async def _close(self) -> None:
        self._client = self._loop = None
        self._of_another_store = False
        opened, self._opened = self._opened, None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.aclose()


class SharedStore(_SharedStoreBase[RequestClient], Operations):
    """One round's store, for async callers.

    Every call raises `RoundSupersededError` once this node is no longer in the round. A call that waits raises
    `MembersLostError` on a member's loss (unless `waits_end_on_loss=0`), and `SharedStoreTimeoutError` on timeout.
    """

    def blocking(self, client: BlockingStore) -> BlockingSharedStore:
        """Return the blocking twin, on this client."""
        return BlockingSharedStore(
            client, prefix=self.prefix, fence=self.fence, lease=self.lease, timeout=self._timeout, company=self._company
        )

    def end_waits(self) -> None:
        """End the waits that a member's loss ends, also of clones; called in the event loop."""
        for scope, ends_on_loss in tuple(self._under_way.items()):
            if ends_on_loss:
                scope.cancel()

    def end_calls(self, _: object = None) -> None:
        """End every call, also of clones; each raises `RoundSupersededError`, as this node is out of the round."""
        for scope in tuple(self._under_way):
            scope.cancel()

    async def _send_request(self, request: Request[Any], left: float) -> Response:
        with anyio.CancelScope() as scope:
            self._under_way[scope] = waits(request) and self._company.lost is not None
            try:
                with self._reported_as_wait(request):
                    response: Response = await self._client.call(request, timeout=left)
                return response
            finally:
                del self._under_way[scope]
        raise WaitEndedError("members were lost")  # `_translate_error` replaces this error if this node was dropped


class BlockingSharedStore(_SharedStoreBase["BlockingStore"]):
    """The blocking twin of `SharedStore`, with its arguments and errors; safe to use from several threads."""

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
    def _async_view(self) -> Operations:
        return cast("Operations", self)  # this object has all attributes that `Operations` needs

    async def _send_request(self, request: Request[R], left: float) -> R:
        with self._reported_as_wait(request):
            return self._client.call(request, timeout=left)

    @property
    def keys_max(self) -> int:
        """The most keys in one request, besides the fence's keys."""
        return min(self._client.operations_max, self._client.writes_max) - len(self.fence)

    def reopened(self) -> BlockingSharedStore:
        """Return the same store on another client, for a forked child."""
        copied = self.clone()
        copied._client = copy.copy(self._client)
        return copied

    def end_waits(self) -> None:
        """Let all waits, now and later, raise `MembersLostError`, or `RoundChanged` if none is lost; thread-safe."""
        self._client.end_waits()

    def close(self) -> None:
        """Disconnect this store and its clones."""
        self._client.close()
