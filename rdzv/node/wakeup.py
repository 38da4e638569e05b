"""Shell: the timers of a rendezvous as coroutines: sleep until told otherwise.

Nothing here decides how long. `decide` says until when there is nothing to do, `JoinClock` when a node's patience ends;
a coroutine sleeps until then, or until something has changed, whichever comes first. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Listeners", "Wakeup"]


class Wakeup:
    """Where one task sleeps, and others wake it."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something has happened: whoever sleeps here looks again. Told while nobody sleeps, it is not forgotten."""
        self._changed.set()

    async def sleep_until(self, deadline: float | None) -> bool:
        """Sleep until `deadline` on the loop's clock (None: for ever), or until something has changed.

        Returns:
            True if something has changed, False if the time is over.
        """
        with anyio.CancelScope(deadline=float("inf") if deadline is None else deadline):
            await self._changed.wait()
        changed = self._changed.is_set()
        if changed:
            self._changed = asyncio.Event()
        return changed


class Listeners:
    """Wakeups that are woken together, and groups of them."""

    def __init__(self) -> None:
        self._listeners: dict[Wakeup | Listeners, None] = {}

    def changed(self) -> None:
        """Wake all of them."""
        for listener in list(self._listeners):
            listener.changed()

    @contextlib.contextmanager
    def listening(self, listener: Wakeup | Listeners) -> Iterator[None]:
        """Wake this one, too, for as long as the context lasts."""
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]
