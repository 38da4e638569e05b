"""Measures the store's answer times, except the time during which this process itself was stopped.

A node's lease is longer if the store answers slowly. If a stopped process counted its own pause as the store's answer
time, its next lease would be far too long, and its death would be noticed late.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

STOOD_STILL = 1.0  # if a timer is this many seconds late, the process was stopped; a busy machine delays timers less
LOOKS_EVERY = 0.1  # seconds between timers: the precision of the stopped time


class Stopwatch:
    """Measures the seconds until a block ends or calls `stop`, except those during which this process was stopped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: float = 0.0

    def __enter__(self) -> Self:
        self._began = self._looked_at = self._clock()
        self._still = 0.0
        self._check_for_pause()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> float:
        """Stop measuring, and return the seconds; later calls return the same number."""
        if not self._next.cancelled():
            self._next.cancel()
            self._check_for_pause()
            self._next.cancel()
            self.seconds = self._looked_at - self._began - self._still
        return self.seconds

    def _check_for_pause(self) -> None:
        late = self._clock() - self._looked_at - LOOKS_EVERY
        self._looked_at += late + LOOKS_EVERY
        if late >= STOOD_STILL:
            self._still += late
        self._next = asyncio.get_running_loop().call_later(LOOKS_EVERY, self._check_for_pause)
