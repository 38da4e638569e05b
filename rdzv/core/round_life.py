"""The end of a round for one of its members, and the member whose error ended it.

**Blame.** When a member dies, the others fail too: their connections to it close, mostly before its death is announced.
So a member that fails writes its name into the round's store before it ends its own connections. The member named first
is to blame, and the others meet again. A killed member writes nothing. So the first member that writes its name waits
as long as the announcement of a death takes. If a death is announced, it is the cause, and no member is to blame.

For each member, the first `Ending` of a round counts. But after an agreement to leave, the first ending of another kind
counts, too: a member that still works may wait for a member that has gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from rdzv.errors import GiveUp, MembersLostError, RoundChanged, RoundSupersededError

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK_WITHIN: Final = 2.0  # seconds to claim a round's end; without an answer, another member's claim counts
# Seconds from a dead member's lease end until others know: 0.1 to expire the lease, the rest to replace a coordinator.
LOSS_KNOWN_AFTER: Final = 1.0


class EndKind(Enum):
    """The kinds of `Ending`."""

    LOST = "lost"  # a member is dead, stuck or cut off
    LEFT = "left"  # a member has left or rejoined without agreement, or before the agreed step
    FAILED = "failed"  # another member failed first, or the store is silent
    DROPPED = "dropped"  # this node is out of the round, or leaves by itself
    CLOSED = "closed"
    AGREED = "agreed"  # without a fault: all members leave before the same step, or at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a round for a member."""

    kind: EndKind
    reason: str
    node_ids: tuple[str, ...] = ()  # the known ids of members that caused the end

    @property
    def is_abrupt(self) -> bool:
        """True unless all members agreed to leave. An abrupt end may make work fail that has no defect."""
        return self.kind is not EndKind.AGREED


class MemberPhase(Enum):
    """The phases of a member in its round."""

    AT_WORK = "at work"
    AT_END = "at its end"  # the member's work is done; it waits for the others to finish
    FAILED = "failed"  # the member's work failed; it asks which member failed first


class NextAfterWork(Enum):
    """What a member does once its work has ended."""

    MEET_AGAIN = "meet again"
    RAISE = "raise"  # raise the work's error
    GIVE_UP = "give up"  # raise the work's `GiveUp`, which closes the run


def _leaf_exceptions(failure: BaseException) -> Iterator[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        for one in failure.exceptions:
            yield from _leaf_exceptions(one)
    else:
        yield failure


def find_give_up_error(failure: BaseException | str | None) -> GiveUp | None:
    """Return the first `GiveUp` in the work's failure, also inside exception groups."""
    if not isinstance(failure, BaseException):
        return None
    return next((leaf for leaf in _leaf_exceptions(failure) if isinstance(leaf, GiveUp)), None)


def is_genuine_failure(failure: BaseException | str, run_id: str) -> bool | None:
    """Return False if this failure only reports the round's end, else True.

    Return None if the failure must end the process, or reports the end of another run's round.
    """
    leaves = () if isinstance(failure, str) else tuple(_leaf_exceptions(failure))
    if not all(isinstance(leaf, Exception) and getattr(leaf, "of_run", None) in {None, run_id} for leaf in leaves):
        return None
    return not leaves or not all(
        isinstance(leaf, RoundChanged | MembersLostError | RoundSupersededError) for leaf in leaves
    )


def loss_known_within(*, disconnect_ttl: float, ttl: float, connected_for: float = math.inf) -> float:
    """Return the longest that the announcement of a loss may take, in seconds.

    A death is announced after `gone_ttl`, or after the longer `disconnect_ttl` if many seem dead at once. But a store
    that restarts renews each lease for its full `ttl`, also leases of dead members. `connected_for` has the seconds
    since this node reconnected to the store; infinity if it did not.
    """
    return max(disconnect_ttl, ttl - connected_for) + LOSS_KNOWN_AFTER
