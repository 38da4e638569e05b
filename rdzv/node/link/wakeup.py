"""Coroutines that sleep until a deadline or a change, so that none polls."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """An event for one task, which sleeps until the event or a deadline."""

    def __init__(self) -> None:
        self._told = False
        self._sleeping: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Wake the sleeping task; if it does not sleep, end its next sleep at once."""
        self._told = True
        if self._sleeping is not None:
            _wake(self._sleeping)

    async def sleep_until(self, deadline: float | None) -> bool:
        """Sleep until `deadline` on the loop's clock (None: for ever), or until `notify`; return True if notified."""
        loop = asyncio.get_running_loop()
        while not self._told:
            self._sleeping = loop.create_future()
            # Use a bare timer: an anyio scope would double the cost of each event that a node receives.
            timer = None if deadline is None else loop.call_at(deadline, _wake, self._sleeping)
            try:
                await self._sleeping
            finally:
                if timer is not None:
                    timer.cancel()
            if deadline is not None and loop.time() >= deadline:
                break  # a timer may fire slightly before the deadline: then sleep again
        told, self._told = self._told, False
        return told


class ThreadSafeWakeup(Wakeup):
    """A wakeup in the loop in which it was made; any thread may wake it."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        """Wake the sleeping task; thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop has closed, so no task sleeps there
            self._loop.call_soon_threadsafe(super().notify)


def _wake(sleeping: asyncio.Future[None]) -> None:
    if not sleeping.done():
        sleeping.set_result(None)
