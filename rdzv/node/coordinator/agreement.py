"""Shell: collects the members' answers to the question at which step to stop; see `core.stopping`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rdzv.core.stopping import Begun
from rdzv.core.view import Answered
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    import asyncio

    from rdzv.node.coordinator.office import Office


async def gather(office: Office, asking: asyncio.Event) -> None:
    """Bring the members' answers to the deciding task, once the first question is asked."""
    await asking.wait()
    begun = office.keys.begun
    async with office.store.watch(begun, snapshot=True) as watch:
        async for event in watch:
            if event.kind == "synced":
                office.bring(Answered())
            elif event.kind == "put":
                with contextlib.suppress(RendezvousStateError):  # not an answer of this format
                    office.bring(Answered(event.key.removeprefix(begun), Begun.unpack(event.value)))
