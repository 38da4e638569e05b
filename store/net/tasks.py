"""Shell: how a task that is no longer wanted is ended: it is cancelled, and awaited to its end in any case."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from typing import Any

__all__ = ["cancel_and_wait"]


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, also if the caller itself is being cancelled.

    What they raise is theirs: ask them for their result.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
