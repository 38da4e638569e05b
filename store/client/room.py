"""Shell: callers that are held back while there is no room for another request, first come first served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Room"]


class Room:
    """Who waits for room, and whose turn it is.

    Args:
        has_room: Whether one more may ask, beside so many who were let in and have not asked yet.
    """

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room
        self._turns: dict[asyncio.Future[None], None] = {}
        self._given = 0  # turns, to callers that have not asked yet

    @property
    def free(self) -> bool:
        """Whether a caller may ask at once."""
        return not self._turns and self._has_room(self._given)

    async def wait(self, timeout: float | None) -> bool:
        """Wait for a turn; False if none came in time."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[turn] = None
        its_turn = False
        try:
            with anyio.move_on_after(timeout):
                await turn
                its_turn = True
        finally:
            self._turns.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self._given -= 1
            if not its_turn:
                self.changed()  # for the next one
        return its_turn

    def changed(self) -> None:
        """There may be more room than there was."""
        while self._turns and self._has_room(self._given):
            self._let_in()

    def let_all_in(self) -> None:
        """Nobody need wait any longer."""
        while self._turns:
            self._let_in()

    def _let_in(self) -> None:
        turn = next(iter(self._turns))
        del self._turns[turn]
        if not turn.done():
            self._given += 1
            turn.set_result(None)
