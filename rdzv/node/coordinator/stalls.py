"""Shell: reads the notes of the members' keep-alives periodically, to find stuck members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rdzv.core.stuck.judging import StallRules, Stalls
from rdzv.core.view import Standstill, Stuck
from rdzv.node.run.beats import read_beats
from store import StoreError
from store.keeping import RENEWALS_PER_TTL

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.node.coordinator.office import Office

LOOKS_EVERY = 0.5  # seconds ...
LOOKS_EVERY_PER_NODE = 0.0005  # ... or per node, if longer: a response has some 60 bytes of each


async def look_for_stalls(office: Office, settings: Settings) -> None:
    """Report stuck members, and a standstill of all, to the deciding task, until cancelled."""
    rules = StallRules(
        stall_timeout=settings.stall_timeout,
        first_step_timeout=settings.first_step_timeout,
        notes_every=settings.ttl / RENEWALS_PER_TTL,
    )
    stalls, view = Stalls(rules), office.view
    while rules.on:
        every = max(LOOKS_EVERY, LOOKS_EVERY_PER_NODE * len(view.members))
        await anyio.sleep(every)
        round, members = view.round, view.members
        if round is None or not view.synced or not view.live:
            continue
        try:
            beats = await read_beats(office.store, office.keys)
        except StoreError:
            continue  # the next look finds the outage
        heard = {node_id: one for node_id, one in beats.items() if node_id in view.live}
        verdict = stalls.look(heard, round=round.number, now=office.store.time(), every=every)
        if verdict.standstill != view.standstill:
            office.bring(Standstill(round.number, verdict.standstill))
        if verdict.stuck:
            found = verdict.stuck.items()
            office.bring(*(Stuck(round.number, members[node_id].arrival, node_id, why) for node_id, why in found))
