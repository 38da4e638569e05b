"""Shell: reads the notes that come with keep-alives: each node's steps, and the run's time of day."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rdzv.core.history import HourNote
from rdzv.core.state import Progress
from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.keys import Keys
    from store import Store


async def read_beats(store: Store, keys: Keys) -> Mapping[str, Heard]:
    """Return the last note of each node that has sent one, by node id."""
    heard = {}
    for one in await store.notes(keys.nodes):
        if one.note:
            try:
                note = BeatNote.unpack(one.note)
            except RendezvousStateError:
                continue  # not a note of this program
            heard[one.key.removeprefix(keys.nodes)] = Heard(note=note, ago=one.age)
    return heard


async def read_hour(store: Store, keys: Keys) -> float:
    """Return the run's present time of day, from the coordinator's note, or else from the note on the run's lease.

    A restarted store has lost both notes: then return the time of day in the last progress, or this machine's.
    """
    for one in (*await store.notes(keys.coordinator), *await store.notes(keys.lease)):
        if one.note and (said := HourNote.unpack_at(one.key, one.note)) is not None:
            return said.hour + one.age
    entry = await store.get(keys.progress)
    progress = Progress.unpack_at(entry.key, entry.value) if entry is not None else None
    return (progress.absent.said_at if progress is not None else 0.0) or time.time()
