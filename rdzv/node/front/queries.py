"""Shell: what a node's callers ask of it without a round trip: `changes()`.

A node's head and membership are frozen pieces of data, which it replaces as it learns of new ones; they are read here
from whichever thread the caller is in. What is news to that caller is worked out by the pure `changes_since`. A reader
that is cancelled, or whose time is over, has lost nothing: what it was not given yet is still to be told.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import anyio

from rdzv.core.state import Change, Closed
from rdzv.membership import changes_since
from rdzv.node.link.wakeup import WakeupHere

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from rdzv.membership import Membership
    from rdzv.node.node import Node

__all__ = ["Changes"]


class Changes:
    """What happens to a node's round, as it happens, beginning with what already holds; for those who await.

    Enter it, and iterate over it; or ask for one change within a time limit, by `poll`, or by any other way to limit
    `anext`. Counts are since the round completed. It goes on over rounds, and ends after `Closed`.
    """

    def __init__(self, node: Node, connect: Callable[[], Awaitable[object]]) -> None:
        self._node = node
        self._connect = connect
        self._seen: dict[type, Change] = {}
        self._of: Membership | None = None
        self._over = False  # the run is closed, and that was told
        self._wakeup: WakeupHere | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        self._wakeup = WakeupHere()
        self._node.listeners.add(self._wakeup)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wakeup is not None:
            self._node.listeners.remove(self._wakeup)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        assert self._wakeup is not None, "changes are entered first: async with handler.changes() as changes"
        while True:
            if self._over:
                raise StopAsyncIteration
            change = self._next()
            if change is not None:
                return change
            self._node.check_usable()
            await self._wakeup.sleep_until(None)

    def _next(self) -> Change | None:
        """One change that is news, or None.

        One at a time: by the time the next is asked for, the round may be another one, and the rest no news.
        """
        of = self._node.membership
        if of is not self._of:
            self._of = of
            self._seen = {kind: change for kind, change in self._seen.items() if kind is Closed}
        round = of.round if of is not None and of.over is None else None
        dropped = of.over if of is not None and of.dropped else None
        head, now = self._node.head, self._node.time()
        seen, me = list(self._seen.values()), self._node.node_id
        untold = changes_since(seen, head, round=round, dropped=dropped, node_id=me, now=now)
        if not untold:
            return None
        change = untold[0]
        self._seen[type(change)] = change
        self._over = isinstance(change, Closed)
        return change

    async def poll(self, timeout: float) -> Change | None:
        """The next change, or None if none has come within so many seconds, or none will."""
        with anyio.move_on_after(timeout), contextlib.suppress(StopAsyncIteration):
            return await anext(self)
        return None
