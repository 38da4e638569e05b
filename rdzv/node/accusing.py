"""Shell: accuses a member of the round, for another one; and takes out of it, as coordinator, whom two accuse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rdzv.core.stuck.accusing import Accusation
from rdzv.errors import RendezvousStateError
from store import Delete, Put, when
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.core.keys import Keys
    from rdzv.core.view import View
    from rdzv.membership import Membership
    from store import Condition, Store

__all__ = ["heed_accusations", "put_accusation", "read_accusations"]

log = escaping(logging.getLogger(__name__))


async def put_accusation(store: Store, keys: Keys, membership: Membership, *, by: str, accused: str, why: str) -> bool:
    """Write that one member accuses another, on the accuser's lease; False if it is not in the round any more."""
    record = await store.get(keys.node(by))
    if record is None:
        return False
    said = Accusation(round=membership.round.number, accused=accused, by=by, why=why)
    result = await store.transact(
        when=(
            when.mod_revision(keys.round) == membership.round.revision,
            when.mod_revision(record.key) == membership.arrival,
        ),
        then=(Put(keys.accusation(accused, by), said.pack(), lease=record.lease),),
    )
    if result.succeeded:
        log.warning("run %s, round %d: %s accuses %s: %s", keys.run_id, said.round, by, accused, why)
    return result.succeeded


async def heed_accusations(store: Store, keys: Keys, view: View, *, in_office: tuple[Condition, ...]) -> None:
    """Take a member out of the round whom enough others accuse: it is lost, and all are told why."""
    if view.round is None:
        return
    believed = view.accusations.believed(round=view.round.number, live=view.live)
    if believed is None or believed[0] in view.expelled:
        return
    node_id, why = believed
    view.expelled[node_id] = why
    key, arrival = keys.node(node_id), view.record(node_id).arrival
    result = await store.transact(when=(*in_office, when.mod_revision(key) == arrival), then=(Delete(key),))
    if result.succeeded:
        log.warning("run %s: node %s is taken out of the round: %s", keys.run_id, node_id, why)
    else:
        view.expelled.pop(node_id, None)  # it has just left, or come again, of which we shall hear


async def read_accusations(store: Store, keys: Keys, *, round: int) -> list[Accusation]:
    """All accusations that stand in a round."""
    found = []
    for entry in await store.list(keys.accusations):
        try:
            found.append(Accusation.unpack(entry.value))
        except RendezvousStateError:
            continue  # of a later release, perhaps
    return [one for one in found if one.round == round]
