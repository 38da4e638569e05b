"""Shell: what ends a round for one of its members, noticed in the node's thread the moment that its node knows.

A loss, a departure elsewhere than where all had agreed to stop, and being dropped end it at once. A closing ends it
where the members agree to stop, as all that was wished for does; at once where no step has been begun, and where it is
a verdict not to go on: whoever gave that has left in the middle of its step, and the others would wait for it in
theirs. An agreement is no news here: the member meets it at its next `check`, unless all may leave at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rdzv.core.absent import named
from rdzv.core.round_life import Ending, EndKind, State
from rdzv.core.state import Closed, Dropped, NodesLeft, NodesLost
from rdzv.membership import changes_since

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.round_life import RoundLife
    from rdzv.core.stopping import StepGate
    from rdzv.membership import Membership
    from rdzv.node.node import Node

__all__ = ["DONE", "EndWatcher", "names_of"]

DONE: Final = "rdzv.rounds/done"  # key in the round's shared store: how many members have come to the end of their body


class EndWatcher:
    """Notices the end of a round.

    Args:
        node: Who is a member of it.
        membership: Of which round.
        life: Is told of the end.
        on_end: Called once, in the node's thread, or here if it has ended by now.
        lets_newcomers_wait: A body that begins no step is not interrupted by nodes that wait to come in.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        life: RoundLife,
        on_end: Callable[[Ending], None],
        *,
        lets_newcomers_wait: bool,
    ) -> None:
        self._node = node
        self._membership = membership
        self._life = life
        self._on_end = on_end
        self._lets_newcomers_wait = lets_newcomers_wait

    @property
    def gate(self) -> StepGate:
        """What the member passes at each step."""
        return self._membership.gate

    def start(self) -> None:
        """Listen from now on."""
        self._node.listeners.add(self)
        self.changed()

    def stop(self) -> None:
        """Listen no more."""
        self._node.listeners.remove(self)

    def changed(self) -> None:
        """Look whether it has ended; from any thread."""
        if self._life.ending is None:
            ending = self._look()
            if ending is not None:
                self.end(ending)

    def end(self, ending: Ending) -> None:
        """It has ended; the first reason counts."""
        if self._life.ends(ending):
            self._on_end(ending)

    def _look(self) -> Ending | None:
        membership, gate = self._membership, self._membership.gate
        if membership.over is not None:
            return Ending(kind=EndKind.DROPPED, reason=membership.over)
        head, me = self._node.head, self._node.node_id
        for change in changes_since([], head, round=membership.round, dropped=None, node_id=me):
            match change:
                case NodesLost(node_ids=ids) as lost:
                    return Ending(kind=EndKind.LOST, reason=f"lost: {names_of(lost)}", node_ids=ids)
                case NodesLeft(node_ids=ids) as left if not gate.decided or self._left_early:
                    return Ending(kind=EndKind.LEFT, reason=f"left: {names_of(left)}", node_ids=ids)
                case Dropped(reason=reason):
                    return Ending(kind=EndKind.DROPPED, reason=reason)
                case Closed(reason=reason, given_up=given_up) if given_up or self._stops_nowhere(gate):
                    return Ending(kind=EndKind.CLOSED, reason=f"the run is closed: {reason}")
        if gate.decided and gate.stop is None and not (gate.for_newcomers and self._lets_newcomers_wait):
            # All leave at once, since nobody has begun a step; or since the run is closed, and not all have: then who
            # has begun its first may wait in it for somebody who has gone.
            return Ending(kind=EndKind.AGREED if gate.begun is None else EndKind.CLOSED, reason=gate.why)
        if self._is_at_end and gate.decided and self._others_stop():
            # It does not come to that step any more: either all come to their ends, and the run is closed, or the
            # others stop there, and it goes on with them.
            return Ending(kind=EndKind.AGREED, reason=gate.why)
        return None

    def _others_stop(self) -> bool:
        """Whether a member has come to where all have agreed to stop: it waits for the next round, or has gone."""
        progress, round = self._node.head.progress, self._membership.round
        return progress is not None and progress.round == round.number and progress.live < round.size

    @property
    def _is_at_end(self) -> bool:
        return self._life.state is State.AT_END

    def _stops_nowhere(self, gate: StepGate) -> bool:
        """Whether the body comes to no step where all may stop: it has begun none, or is at its end."""
        return self._is_at_end or (gate.begun is None and gate.stop is None)

    @property
    def _left_early(self) -> bool:
        """Whether somebody has left elsewhere than where all had agreed to stop: the others wait for it in their step.

        Who has left where all do is no reason: a body that waits for it in a later step has gone on without `check`,
        and must hear of that.
        """
        progress = self._node.head.progress
        return progress is not None and progress.left_early


def names_of(gone: NodesLost | NodesLeft) -> str:
    """Name the nodes that have gone, where they were, and why they went; count those that are not named."""
    why = {node_id: f": {reason}" for node_id, reason in gone.reasons.items()}
    names = ", ".join(named(one, gone.addresses.get(one)) + why.get(one, "") for one in gone.node_ids)
    more = gone.count - len(gone.node_ids)
    return f"{names} and {more} more" if more > 0 else names
