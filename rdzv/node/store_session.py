"""Shell: what belongs to one connection of a node to one store, and ends with it.

When the store is replaced, all of this is of no more use at once: the client, the follower of the head, the lease, the
readiness to coordinate. So it is made and ended as one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.node.follower import Follower
from store.client.keepalive import TaskKeeper

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rdzv.core.keys import Keys
    from rdzv.node.coordinator import Candidacy
    from store import Store
    from store.client.keepalive import HeldLease, Keeper

__all__ = ["Link"]

log = logging.getLogger(__name__)


class Link:
    """What belongs to one connection to one store."""

    def __init__(self, store: Store, keeper: Keeper, keys: Keys) -> None:
        self.store = store
        self.keeper = keeper
        self.follower = Follower(store, keys)
        self.leadership = TaskKeeper(store)
        self.lease: HeldLease | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._candidacy: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something until the link is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report_defect)
        return task

    def stand(self, candidacy: Candidacy) -> None:
        """Be ready to coordinate from now on."""
        if self._candidacy is None:
            self._candidacy = self.start(candidacy.run(), "candidacy")

    async def step_down(self) -> None:
        """Coordinate no more."""
        task, self._candidacy = self._candidacy, None
        if task is not None:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])

    async def aclose(self) -> None:
        """End everything, the lease last: with it the node's record goes."""
        await self.step_down()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            if tasks:
                await asyncio.wait(tasks)
            await self.leadership.aclose()
            await self.keeper.aclose()


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has failed: %r", task.get_name(), error, exc_info=error)
