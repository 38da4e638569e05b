"""Shell: reads how far each node has come, from what came with its keep-alives; for the status and the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.keys import Keys
    from store import Store

__all__ = ["read_beats"]


async def read_beats(store: Store, keys: Keys) -> Mapping[str, Heard]:
    """How far each node has come that has said so."""
    heard = {}
    for one in await store.notes(keys.nodes):
        if one.note:
            try:
                note = BeatNote.unpack(one.note)
            except RendezvousStateError:
                continue  # not of a node of ours
            heard[one.key.removeprefix(keys.nodes)] = Heard(note=note, ago=one.age)
    return heard
