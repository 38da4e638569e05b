"""Shell: the timers of a rendezvous as coroutines: sleep until told otherwise.

Nothing here decides how long. `decide` says until when there is nothing to do, `JoinClock` when a node's patience ends;
a coroutine sleeps until then, or until something has changed, whichever comes first. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Listener", "Listeners", "Wakeup"]


class Listener(Protocol):
    """Somebody who wants to be told."""

    def changed(self) -> None:
        """Something has happened."""


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
        if deadline is None:  # as a rule: a scope would cost as much as all the rest of being woken
            await self._changed.wait()
        else:
            with anyio.CancelScope(deadline=deadline):
                await self._changed.wait()
        changed = self._changed.is_set()
        self._changed.clear()
        return changed


class Listeners:
    """Wakeups that are woken together, and groups of them.

    Anybody may begin and end to listen, from any thread: each step on the table is a single one to the interpreter.
    Being woken is in the thread of whoever says that something has changed.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, None] = {}

    def changed(self) -> None:
        """Wake all of them."""
        for listener in list(self._listeners):
            listener.changed()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Wake this one, too, for as long as the context lasts."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    def add(self, listener: Listener) -> None:
        """Wake this one, too."""
        self._listeners[listener] = None

    def remove(self, listener: Listener) -> None:
        """Wake it no more."""
        self._listeners.pop(listener, None)
