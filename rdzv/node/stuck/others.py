"""Shell: a coordinator's look at what came with the keep-alives of all members, now and then."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import anyio

from rdzv.core.stuck.beats import BeatNote
from rdzv.core.stuck.judging import Heard, StallRules, Stalls, Verdict
from rdzv.errors import RendezvousStateError
from store import Delete, StoreError, when
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.keys import Keys
    from rdzv.core.view import View
    from rdzv.node.wakeup import Wakeup
    from store import Condition, Store

__all__ = ["StallWatch", "read_beats"]

log: logging.Logger = escaping(logging.getLogger(__name__))

LOOKS_EVERY = 0.5  # seconds ...
LOOKS_EVERY_PER_NODE = 0.0005  # ... and with many nodes so many for each: an answer has some 60 bytes of each


class StallWatch:
    """Looks for members that are stuck, for as long as a coordinator is in office.

    Args:
        store: The client.
        keys: The run's keys.
        view: Who is a live member.
        rules: When a member is stuck.
        in_office: What holds for as long as this node coordinates.
        wakeup: Wakes the coordinator when there is something to report.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        view: View,
        rules: StallRules,
        *,
        in_office: tuple[Condition, ...],
        wakeup: Wakeup,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        self._stalls = Stalls(rules)
        self._on = rules.on
        self._in_office = in_office
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
                await self._heed(verdict)

    async def _heed(self, verdict: Verdict) -> None:
        """Take members out of the round that are stuck; say it if nobody gets on."""
        if verdict.standstill != self._view.standstill:
            self._view.standstill = verdict.standstill
            self._wakeup.changed()
        for node_id, why in verdict.stuck.items():
            await self.expel(node_id, why)

    async def expel(self, node_id: str, why: str, *, seems_alive: bool = True) -> None:
        """Take a member out of the round though its lease stands; all are told why, and the node itself, too."""
        view = self._view
        if node_id not in view.live or node_id in view.why_lost:
            return  # it has gone, or is about to: of that we shall hear
        view.why_lost[node_id] = why
        arrival = when.mod_revision(self._keys.node(node_id)) == view.record(node_id).arrival
        deletion = (Delete(self._keys.node(node_id)),)
        with contextlib.suppress(StoreError):  # else it is tried at the next look
            result = await self._store.transact(when=(*self._in_office, arrival), then=deletion)
            if result.succeeded:
                level = logging.WARNING if seems_alive else logging.INFO
                log.log(level, "run %s: node %s is taken out of the round: %s", self._keys.run_id, node_id, why)
                return
        view.why_lost.pop(node_id, None)


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
