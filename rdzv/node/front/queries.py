"""`changes()`: the changes of a node's round, without a round trip; a cancelled reader misses no change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import anyio

from rdzv.core.state import Change, Closed
from rdzv.errors import RendezvousStateError
from rdzv.listeners import Listeners
from rdzv.membership import unreported_changes
from rdzv.node.link.wakeup import ThreadSafeWakeup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rdzv.membership import Membership
    from rdzv.node.node import Node


class Changes:
    """The changes of a node's round: first those until now, then others as they happen; for async callers.

    Enter the object, and iterate over it; or call `poll` for one change within a time limit. `NodesLost` and
    `NodesLeft` count all since the round completed. The iteration goes on in later rounds, and ends after `Closed`.
    """

    def __init__(self, node: Node, connect: Callable[[], Awaitable[object]]) -> None:
        self._node = node
        self._connect = connect
        self._seen: dict[type, Change] = {}
        self._of: Membership | None = None
        self._over = False  # `Closed` was returned
        self._is_entered = False
        self._readers = Listeners()

    async def __aenter__(self) -> Self:
        await self._connect()
        self._node.listeners.add(self._readers)
        self._is_entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_entered = False
        self._node.listeners.remove(self._readers)
        self._readers.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        wakeup = ThreadSafeWakeup()
        with self._readers.subscribed(wakeup):
            while True:
                if not self._is_entered:
                    raise RendezvousStateError("changes are read in `async with handler.changes() as changes:`")
                if self._over:
                    raise StopAsyncIteration
                change = self._find_new_change()
                if change is not None:
                    return change
                self._node.check_usable()
                await wakeup.sleep_until(None)

    def _find_new_change(self) -> Change | None:
        """Return a change that was not yet returned in this round, or None."""
        of = self._node.membership
        if of is not self._of:
            self._of = of
            self._seen = {kind: change for kind, change in self._seen.items() if kind is Closed}
        round = of.round if of is not None and of.over is None else None
        dropped = of.over if of is not None and of.dropped else None
        head, now = self._node.head, self._node.time()
        seen, me = list(self._seen.values()), self._node.node_id
        untold = unreported_changes(seen, head, round=round, dropped=dropped, node_id=me, now=now)
        if not untold:
            return None
        change = untold[0]
        self._seen[type(change)] = change
        self._over = isinstance(change, Closed)
        return change

    async def poll(self, timeout: float) -> Change | None:
        """Return the next change; None if none came within `timeout` seconds, or none will come."""
        with anyio.move_on_after(timeout), contextlib.suppress(StopAsyncIteration):
            return await anext(self)
        return None
