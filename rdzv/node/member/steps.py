"""Shell: one node's answer to the question which step its member has begun (`core.stopping`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.core.stopping import Begun
from store import Put, when

if TYPE_CHECKING:
    from rdzv.membership import Membership
    from rdzv.node.link.link import Link
    from rdzv.node.member.part import Part

__all__ = ["Steps"]


class Steps:
    """Answers the question where to stop, once in each round."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._answered: Membership | None = None

    async def heed(self, link: Link, membership: Membership) -> None:
        """Answer the question, if one is open; raise StoreError if the answer could not be given yet."""
        part, stop, lease = self._part, membership.head.stop, self._part.arrival.lease
        if stop is None or stop.decided or stop.round != membership.round.number or not membership.round.in_steps:
            return
        if self._answered is not membership and lease is not None:
            begun = Begun(round=membership.round.number, step=membership.gate.ask())
            # A record that has changed is no longer in the round, and its answer would be of another one.
            await link.store.transact(
                when=(when.mod_revision(part.keys.node(part.node_id)) == membership.arrival,),
                then=(Put(part.keys.begun + part.node_id, begun.pack(), lease=lease.id),),
            )
            self._answered = membership
