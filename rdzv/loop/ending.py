"""Shell: what ends a round for one of its members, noticed in the node's thread the moment that its node knows.

A loss, a departure elsewhere than where all had agreed to stop, and being dropped end it at once. A closing ends it
where the members agree to stop, as all that was wished for does; at once where no step has been begun, and where it is
a verdict not to go on: whoever gave that has left in the middle of its step, and the others would wait for it in
theirs. An agreement is no news here: the member meets it at its next `check`, unless all may leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from rdzv.core.absent import named
from rdzv.core.state import Closed, Dropped, NodesLeft, NodesLost
from rdzv.membership import changes_since

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.stopping import StepGate
    from rdzv.membership import Membership
    from rdzv.node.node import Node

__all__ = ["BLAME", "DONE", "EndKind", "EndWatcher", "Ending", "names_of"]

BLAME: Final = "rdzv.rounds/ended_by"
"""Key in the round's shared store: who has ended it first, by an error of its own."""

DONE: Final = "rdzv.rounds/done"
"""Key in the round's shared store: how many members have come to the end of their body."""


class EndKind(Enum):
    """How a round has ended for a member."""

    LOST = "lost"  # a member has died
    LEFT = "left"  # a member has left elsewhere than where all had agreed to
    FAILED = "failed"  # others have failed as this member has; who has gone is not known yet
    DROPPED = "dropped"  # this member was dropped from it
    CLOSED = "closed"  # the run is closed
    AGREED = "agreed"  # all leave before the same step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a round is over for a member.

    Attributes:
        kind: See `EndKind`.
        reason: In words.
        node_ids: Who has gone, as far as they are named.
    """

    kind: EndKind
    reason: str
    node_ids: tuple[str, ...] = ()


class EndWatcher:
    """Notices the end of a round.

    Args:
        node: Who is a member of it.
        membership: Of which round.
        on_end: Called once, in the node's thread, or here if it has ended by now.
        lets_newcomers_wait: A body that begins no step is not interrupted by nodes that wait to come in.

    Attributes:
        ending: Why it has ended; None while it goes on.
    """

    def __init__(
        self, node: Node, membership: Membership, on_end: Callable[[Ending], None], *, lets_newcomers_wait: bool
    ) -> None:
        self._node = node
        self._membership = membership
        self._on_end = on_end
        self._lets_newcomers_wait = lets_newcomers_wait
        self.ending: Ending | None = None
        self._has_finished = False

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
        if self.ending is None:
            ending = self._look()
            if ending is not None:
                self.end(ending)

    def has_finished(self) -> None:
        """The body has come to its end, and waits for the others, perhaps after an agreement on where to stop.

        It does not come to that step any more. So either all come to their ends, and the run is closed, or the others
        stop there, and it goes on with them.
        """
        self._has_finished = True
        self.changed()

    def end(self, ending: Ending) -> None:
        """It has ended; the first reason counts."""
        if self.ending is None:
            self.ending = ending
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
        if self._has_finished and gate.decided and self._others_stop():
            return Ending(kind=EndKind.AGREED, reason=gate.why)
        return None

    def _others_stop(self) -> bool:
        """Whether a member has come to where all have agreed to stop: it waits for the next round, or has gone."""
        progress, round = self._node.head.progress, self._membership.round
        return progress is not None and progress.round == round.number and progress.live < round.size

    def _stops_nowhere(self, gate: StepGate) -> bool:
        """Whether the body comes to no step where all may stop: it has begun none, or is at its end."""
        return self._has_finished or (gate.begun is None and gate.stop is None)

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
