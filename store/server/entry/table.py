"""Shell: the one table of connections that were accepted, over TCP, TLS and HTTP, with one timer for all of them.

Who is in it, what each costs, and who must go, is `strangers`' to say. Here is the clock: a timer of its own for each
newcomer was one of the dearer parts of taking a thousand in at once, so only the one that is due first is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from store.server.entry.strangers import Strangers

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.server.entry.strangers import Stranger

__all__ = ["Table"]

log: logging.Logger = logging.getLogger(__name__)

SOON = 0.001  # seconds; a timer for less than a clock can tell apart would go off for ever
RAW_BYTES = 64 * 1024


class Table(Strangers):
    """The connections of one server, in one event loop.

    Args:
        most: How many there may be that have proved nothing.
        per_address_max: How many connections, proven or not, one address may have.
        within: Seconds in which a connection must become a conversation (`handshake_timeout`).
        clock: The server's.
        turned_away: Counts one that is refused or hung up on; whether the log has a line for it.

    Attributes:
        clock: As given.
        turned_away: As given.
        raw: Where bytes arrive that are still to be decrypted, whoever sends them.
        plain: Where they are decrypted to, for those who have no buffer for that.
    """

    def __init__(
        self,
        *,
        most: int,
        per_address_max: int,
        within: float,
        clock: Callable[[], float],
        turned_away: Callable[[], bool],
    ) -> None:
        super().__init__(most=most, per_address_max=per_address_max, within=within)
        self.clock = clock
        self.turned_away = turned_away
        self.raw: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self.plain: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, who: Stranger, seconds: float, give_up: Callable[[], None], *, patiently: bool = False) -> None:
        """Give it so many seconds to go on, or else up; `patiently`: more, where honest clients take long."""
        self.give_time(who, self.clock() + seconds, give_up, patiently=patiently)
        if self._timer is None or self._timer.when() > asyncio.get_running_loop().time() + seconds + SOON:
            self._look_in(seconds)

    def went(self, who: Stranger) -> None:
        """It has gone."""
        super().went(who)
        if not self and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def make_room(self, *, coming: int = 0, beside: bool = False) -> bool:
        """Whether one more may come, if need be in the place of one who has been silent for long."""
        while (silent := self.to_make_way(self.clock(), beside=beside)) is not None:
            self.went(silent)
            if self.turned_away():
                log.warning(
                    "a connection is hung up on: it has proved nothing, and %d such connections wait (handshakes_max)",
                    self.most,
                )
            silent.abort()
        return not self.is_full(coming=coming, beside=beside)

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, SOON), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self.clock()
        for give_up in self.overdue(now + SOON):
            give_up()
        first = self.first_due()
        if first is not None and self._timer is None:
            self._look_in(first - now)
