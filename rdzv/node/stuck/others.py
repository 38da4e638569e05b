"""Shell: a coordinator's look at what came with the keep-alives of all members, now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard, StallRules, Stalls, Verdict
from rdzv.errors import RendezvousStateError
from store import StoreError
from store.keeping import RENEWALS_PER_TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from rdzv.core.view import View
    from rdzv.node.wakeup import Wakeup
    from store import Store

__all__ = ["StallWatch", "read_beats"]

LOOKS_EVERY = 0.5  # seconds ...
LOOKS_EVERY_PER_NODE = 0.0005  # ... and with many nodes so many for each: an answer has some 60 bytes of each


class StallWatch:
    """Looks for members that are stuck, for as long as a coordinator is in office.

    Args:
        store: The client.
        keys: The run's keys.
        view: Who is a live member.
        settings: When a member is stuck.
        expel: Has a member taken out of the round whose lease stands, and says why.
        wakeup: Wakes the coordinator when there is something to report.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        view: View,
        settings: Settings,
        *,
        expel: Callable[[str, str], None],
        wakeup: Wakeup,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        rules = StallRules(
            stall_timeout=settings.stall_timeout,
            first_step_timeout=settings.first_step_timeout,
            notes_every=settings.ttl / RENEWALS_PER_TTL,
        )
        self._stalls = Stalls(rules)
        self._on = rules.on
        self._expel = expel
        self._wakeup = wakeup

    async def run(self) -> None:
        """Look now and then."""
        while self._on:
            every = max(LOOKS_EVERY, LOOKS_EVERY_PER_NODE * len(self._view.members))
            await anyio.sleep(every)
            round = self._view.round
            if round is None or not self._view.synced or not self._view.live:
                continue
            try:
                beats = await read_beats(self._store, self._keys)
            except StoreError:
                continue  # that it was away is seen at the next look
            heard = {node_id: one for node_id, one in beats.items() if node_id in self._view.live}
            verdict = self._stalls.look(heard, round=round.number, now=self._store.time(), every=every)
            if self._view.round is round:  # it was read of this one
                self._heed(verdict)

    def _heed(self, verdict: Verdict) -> None:
        """Take members out of the round that are stuck; say it if nobody gets on."""
        if verdict.standstill != self._view.standstill:
            self._view.standstill = verdict.standstill
            self._wakeup.changed()
        for node_id, why in verdict.stuck.items():
            self._expel(node_id, why)


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
