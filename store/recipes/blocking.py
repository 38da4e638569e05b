"""The blocking recipes. A block that lost its lock raises `LeaseNotFound` only at its end: fence its writes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from store.calls import BlockingAsAsync, BlockingContext, run_synchronously
from store.recipes import awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from store.calls import BlockingCalls, Calls

__all__ = ["leader", "leaders", "leadership", "lock", "read_lock", "write_lock"]

P = ParamSpec("P")
T = TypeVar("T")


def _make_blocking(
    recipe: Callable[Concatenate[Calls, P], AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[BlockingCalls, P], AbstractContextManager[T]]:
    @functools.wraps(recipe)
    def blocking_recipe(store: BlockingCalls, /, *arguments: P.args, **keywords: P.kwargs) -> BlockingContext[T]:
        return BlockingContext(recipe(BlockingAsAsync(store), *arguments, **keywords))

    return blocking_recipe


lock = _make_blocking(awaited.lock)
write_lock = _make_blocking(awaited.write_lock)
read_lock = _make_blocking(awaited.read_lock)
leadership = _make_blocking(awaited.leadership)


def leader(store: BlockingCalls, name: str, *, timeout: float | None = None) -> bytes | None:
    """Return the value of the leader, or None."""
    return run_synchronously(awaited.leader(BlockingAsAsync(store), name, timeout=timeout))


def leaders(store: BlockingCalls, name: str) -> Iterator[bytes | None]:
    """See `awaited.leaders`."""
    told = awaited.leaders(BlockingAsAsync(store), name)
    while True:
        yield run_synchronously(anext(told))
