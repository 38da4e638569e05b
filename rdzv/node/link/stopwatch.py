"""Shell: how long the store takes to answer, without the time for which this process itself stood still.

Leases grow with what an answer takes. A process that was stopped finds the answer when it goes on, and must not take
that for a slow store: its next lease would outlast its death, or its being cut off, by ten times as long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["STOOD_STILL", "Stopwatch"]

STOOD_STILL = 1.0  # seconds; a look that comes so late was held up by this process; less is what busy machines cost
LOOKS_EVERY = 0.1  # seconds: standing still is known to that part


class Stopwatch:
    """Measures a block on a client's clock, or until it is stopped in it.

    Attributes:
        seconds: How long it took, without what this process stood still; known when it has ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: float = 0.0

    def __enter__(self) -> Self:
        self._began = self._looked_at = self._clock()
        self._still = 0.0
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> float:
        """Measure no more; how long it took, also if that was known already."""
        if not self._next.cancelled():
            self._next.cancel()
            self._look()
            self._next.cancel()
            self.seconds = self._looked_at - self._began - self._still
        return self.seconds

    def _look(self) -> None:
        late = self._clock() - self._looked_at - LOOKS_EVERY
        self._looked_at += late + LOOKS_EVERY
        if late >= STOOD_STILL:
            self._still += late
        self._next = asyncio.get_running_loop().call_later(LOOKS_EVERY, self._look)
