"""Shell: keeps the event loop awake for a moment after an answer, when the next request has been coming that soon.

The loop looks at its sockets in every pass, and sleeps in none of them while something is to be called in the next. So
nobody else waits for longer: who asks meanwhile is served as ever. It stays awake for one who asks again and again,
alone: many who ask in turn keep it awake themselves, or need the core that it would burn (64 callers on two cores get
8 % fewer answers if it does).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from store.net.spinning import SPIN, Spin

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Spinner"]


class Spinner:
    """What keeps a server's loop awake.

    Args:
        clock: One that does not stand still while the loop is awake.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spin = Spin()
        self._spins = False
        self._until = 0.0
        self._passes = 0  # of the loop, since the last answer
        self._peer = 0  # who was answered last

    def answered(self, peer: int) -> None:
        """A request of this peer's was answered at once."""
        if peer != self._peer:
            self._peer = peer
            return
        if self._spins:
            if self._passes > 1:  # else it had come already: the loop would not have slept
                self._spin.paid()
        elif self._spin.is_due():
            self._spins = True
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            return
        self._passes = 0
        self._until = self._clock() + SPIN

    def _go_on(self) -> None:
        if self._clock() < self._until:
            self._passes += 1
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._spins = False
            self._spin.failed()
