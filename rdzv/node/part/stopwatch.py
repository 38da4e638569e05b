"""Shell: how long the store takes to answer, without the time for which this process itself stood still.

Leases grow with what an answer takes. A process that was stopped finds the answer when it goes on, and must not take
that for a slow store: its next lease would outlast its death, or its being cut off, by ten times as long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

__all__ = ["Stopwatch"]

STOOD_STILL = 1.0  # seconds; a look that comes so late was held up by this process; less is what busy machines cost
FIRST_LOOK = 0.1  # seconds
LOOKS = 8  # a further look is taken when another eighth has passed: standing still is known to that part


class Stopwatch:
    """Measures a block, or what is between its start and its stop, on a client's clock.

    Attributes:
        seconds: How long it took, without what this process stood still; known when it has ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: float = 0.0
        self._look: asyncio.TimerHandle | None = None  # while it measures

    def start(self) -> None:
        """Begin to measure."""
        self._began = self._clock()
        self._still = 0.0
        self._look_in(FIRST_LOOK)

    def stop(self) -> float:
        """Measure no more; how long it took, also if that was known already."""
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
            self._note_late()
            self.seconds = self._clock() - self._began - self._still
        return self.seconds

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _look_in(self, seconds: float) -> None:
        self._due = self._clock() + seconds
        self._look = asyncio.get_running_loop().call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._note_late()
        self._look_in(max(FIRST_LOOK, (self._clock() - self._began - self._still) / LOOKS))

    def _note_late(self) -> None:
        late = self._clock() - self._due
        if late >= STOOD_STILL:
            self._still += late
