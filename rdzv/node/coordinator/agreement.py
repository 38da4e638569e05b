"""Shell: hears what the members of a round answer when they are asked at which step to stop (`core.stopping`).

Question and decision stand in one key below the head, which every node watches, and are written only while the round is
still the one that they are about. A member that lives answers at once, since its node (`Steps`) does so while it
computes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rdzv.core.stopping import Begun
from rdzv.core.view import Answered
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    import asyncio

    from rdzv.node.coordinator.office import Office

__all__ = ["gather"]


async def gather(office: Office, asking: asyncio.Event) -> None:
    """Bring what the members answer, from the first question on."""
    await asking.wait()
    begun = office.keys.begun
    async with office.store.watch(begun, snapshot=True) as watch:
        async for event in watch:
            if event.kind == "synced":
                office.bring(Answered())
            elif event.kind == "put":
                with contextlib.suppress(RendezvousStateError):  # no answer of ours
                    office.bring(Answered(event.key.removeprefix(begun), Begun.unpack(event.value)))
