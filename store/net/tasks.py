"""Cancels tasks, and finishes work although its caller is cancelled."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio

from store.errors import StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
U = TypeVar("U")

LOOK_AGAIN = 0.01  # seconds between two checks whether a task has left a shielded scope


def require_loop(package: str = "store") -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop, or raise `StoreUsageError`, which names the caller's `package`."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise StoreUsageError(
            f"{package} runs on asyncio, and no loop of asyncio's runs here; on trio, use {package}.sync in a thread"
        ) from None


async def cancel_and_wait(*tasks: asyncio.Task[Any], within: float | None = None) -> None:
    """Cancel tasks, and wait for their end even if the caller is cancelled; do not raise their errors."""
    for task in tasks:
        task.cancel()
    if tasks:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks, timeout=within)


@overload
async def run_to_completion(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U], /) -> tuple[T, U]: ...
@overload
async def run_to_completion(*work: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...
async def run_to_completion(*work: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Run coroutines concurrently, each to its end; return their results, or raise the first error.

    `asyncio.gather` may raise a new `CancelledError`, without the message by which an anyio scope recognizes its own:
    such an error would reach outer scopes, too.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        await cancel_and_wait(*tasks)
        raise
    for task in tasks:
        if not task.cancelled():
            task.exception()  # or asyncio logs this error as never retrieved: only the first one is raised
    return tuple(task.result() for task in tasks)


async def run_shielded(work: Coroutine[Any, Any, T], *, within: float | None = None) -> T | None:
    """Run work in its own task to its end, even if the caller is cancelled; return its result.

    After `within` seconds, return None; the work goes on.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    deadline = None if within is None else loop.time() + within
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done() and (deadline is None or loop.time() < deadline):
            try:
                await asyncio.wait([task], timeout=None if deadline is None else deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result() if task.done() else None


class RepeatedCancel:
    """Cancels its creator's task at each await, from `begin` until `end`, except in shielded anyio scopes."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "it is made in a task"
        self._task = task
        self._before = task.cancelling()
        self._outer = _innermost_scope(task)
        self._count = 0
        self._next: asyncio.Handle | None = None

    def begin(self, why: str) -> None:
        """Cancel the task from now on."""
        task = self._task
        if task.done():
            return
        loop = asyncio.get_running_loop()
        if self._is_shielded():
            self._next = loop.call_later(LOOK_AGAIN, self.begin, why)
            return
        waits_for: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
        if task is not asyncio.current_task() and not (waits_for is not None and waits_for.done()):
            task.cancel(why)
            self._count += 1
        self._next = loop.call_soon(self.begin, why)

    def end(self) -> None:
        """Stop cancelling the task."""
        if self._next is not None:
            self._next.cancel()
        for _ in range(self._count):
            self._task.uncancel()

    @property
    def was_only_cause(self) -> bool:
        """True if this object, and nothing else, has cancelled the current task."""
        return self._count > 0 and self._task is asyncio.current_task() and self._task.cancelling() <= self._before

    def _is_shielded(self) -> bool:
        scope = _innermost_scope(self._task)
        while scope is not None and scope is not self._outer:
            if scope.shield:
                return True
            scope = getattr(scope, "_parent_scope", None)
        return False


def _innermost_scope(task: asyncio.Task[Any]) -> Any:
    """Return the innermost anyio scope of a task; None if anyio's internals are unknown."""
    states = getattr(sys.modules.get("anyio._backends._asyncio"), "_task_states", {})
    return getattr(states.get(task), "cancel_scope", None)
