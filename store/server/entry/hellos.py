"""Shell: gives up connections that say no hello in time, with one timer for all of them.

They come in order, and all are given the same time: so only the first of them is waited for. A timer of its own for
each was one of the dearer parts of taking a thousand in at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.server.peer import Peer

__all__ = ["Hellos"]

SOON = 0.001  # seconds; a timer for less than a clock can tell apart would go off for ever


class Hellos:
    """The connections that have said no hello yet.

    Args:
        within: Seconds that each is given.
        clock: The server's.
        time_left: Seconds that one still has, who has had those.
        give_up: Ends a connection.
    """

    def __init__(
        self,
        *,
        within: float,
        clock: Callable[[], float],
        time_left: Callable[[Peer, float], float],
        give_up: Callable[[Peer], None],
    ) -> None:
        self._within = within
        self._clock = clock
        self._time_left = time_left
        self._give_up = give_up
        self._since: dict[Peer, float] = {}  # in order of coming
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, peer: Peer) -> None:
        """Somebody has connected."""
        self._since[peer] = self._clock()
        if self._timer is None:
            self._look_in(self._within)

    def expect_no_more(self, peer: Peer) -> None:
        """It has said hello, or has gone."""
        self._since.pop(peer, None)
        if not self._since and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        while self._since:
            peer, since = next(iter(self._since.items()))
            left = since + self._within - now
            if left < SOON:
                left = self._time_left(peer, now)
            if left >= SOON:
                self._look_in(left)
                return
            del self._since[peer]
            self._give_up(peer)
