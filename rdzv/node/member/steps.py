"""Shell: what one node answers, and is told, of the step before which all of a round leave (`core.stopping`)."""

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
    """What one node answers, and is told, of the step before which all leave."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._answered: Membership | None = None

    async def heed(self, link: Link, membership: Membership) -> None:
        """Answer the question, or take the decision.

        Raises:
            StoreError: The answer could not be given yet.
        """
        part, stop, gate = self._part, link.follower.head.stop, membership.gate
        lease = part.arrival.lease
        if membership.round.in_steps and stop is not None and stop.round == membership.round.number:
            if stop.decided and (not gate.decided or (gate.for_newcomers and not stop.for_newcomers)):
                gate.decide(stop.step, why=stop.why, for_newcomers=stop.for_newcomers)
                link.follower.listeners.changed()
            elif not stop.decided and self._answered is not membership and lease is not None:
                begun = Begun(round=membership.round.number, step=gate.ask())
                # A record that has changed is no longer in the round, and its answer would be of another one.
                await link.store.transact(
                    when=(when.mod_revision(part.keys.node(part.node_id)) == membership.arrival,),
                    then=(Put(part.keys.begun + part.node_id, begun.pack(), lease=lease.id),),
                )
                self._answered = membership
