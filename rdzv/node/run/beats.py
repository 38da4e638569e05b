"""Shell: reads the notes of keep-alives: each node's steps, and the hour of the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rdzv.core.history import HourNote
from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.keys import Keys
    from store import Store

__all__ = ["read_beats", "read_hour"]


async def read_beats(store: Store, keys: Keys) -> Mapping[str, Heard]:
    """Return the last report of each node that has sent one."""
    heard = {}
    for one in await store.notes(keys.nodes):
        if one.note:
            try:
                note = BeatNote.unpack(one.note)
            except RendezvousStateError:
                continue  # not of a node of this program
            heard[one.key.removeprefix(keys.nodes)] = Heard(note=note, ago=one.age)
    return heard


async def read_hour(store: Store, keys: Keys) -> float:
    """Return the hour of the run, now; by this machine's clock if no coordinator has said it."""
    for one in await store.notes(keys.coordinator):
        if one.note and (said := HourNote.unpack_at(one.key, one.note)) is not None:
            return said.hour + one.age
    return time.time()
