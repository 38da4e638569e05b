"""Shell: writes accusations, also for `rdzv.loop`, which may not import `rdzv.node.member`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rdzv.core.stuck.accusing import SOMEBODY, WHY_MOST, Accusation
from store import Put
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.core.keys import Keys
    from rdzv.membership import Membership
    from store import Store

log: logging.Logger = escaping(logging.getLogger(__name__))


async def put_accusation(store: Store, keys: Keys, membership: Membership, *, by: str, accused: str, why: str) -> bool:
    """Write an accusation; return False if the accuser `by` is no longer in the round."""
    record = await store.get(keys.node(by))
    if record is None:
        return False
    said = Accusation(round=membership.round.number, accused=accused, by=by, why=why[:WHY_MOST])
    result = await store.transact(
        when=membership.fence(keys), then=(Put(keys.accusation(accused, by), said.pack(), lease=record.lease),)
    )
    if result.succeeded and accused != SOMEBODY:
        log.warning("run %s, round %d: %s accuses %s: %s", keys.run_id, said.round, by, accused, why)
    return result.succeeded
