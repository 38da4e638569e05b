"""One suite for a class and its blocking twin: both are awaited, the blocking one in a thread of its own.

async with open_shared_store("blocking", server, prefix="/round/") as shared:
    await shared.set("key", "value")
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import store
from rdzv.shared_store import BlockingSharedStore, SharedStore
from store.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from store.server import Server

TWINS = ("awaited", "blocking")
THREADS = 32  # more than any test has waiting at once


class InThreads:
    """A blocking object whose methods are awaited. Properties and what returns at once are on `.blocking`."""

    def __init__(self, blocking: Any, pool: ThreadPoolExecutor) -> None:
        self.blocking = blocking
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.blocking, name)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: method(*arguments, **keywords))

        return call


@contextlib.asynccontextmanager
async def open_shared_store(twin: str, server: Server, **arguments: Any) -> AsyncIterator[Any]:
    """A shared store of either kind on a client of its own; a blocking call that is left behind is interrupted."""
    arguments = {"prefix": "/round/", "fence": (), **arguments}
    if twin == "awaited":
        async with store.connect(server.url) as client:
            yield SharedStore(client, **arguments)
        return
    with ThreadPoolExecutor(THREADS) as pool, contextlib.ExitStack() as stack:
        client_in_thread = await asyncio.to_thread(stack.enter_context, store.sync.connect(server.url))
        try:
            yield InThreads(BlockingSharedStore(client_in_thread, **arguments), pool)
        finally:
            client_in_thread.interrupt(ConnectionLost("the test is over", maybe_applied=False))


async def until_waits(client: store.Client, count: int) -> None:
    """Return once so many waits are parked at the server."""
    async with asyncio.timeout(10):
        waits = -1
        while waits != count:
            waits = (await client.stats())["waits"]
