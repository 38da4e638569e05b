"""Pure: how a round ends for one of its members, and whose error it is.

**Whose error it is.** When a member dies, the others fail, too: their peer has hung up, and mostly sooner than any of
them is told of the death. So a member that fails writes its name into the round's store before it releases what others
wait for. Of several that fail the first is to blame, and the others meet again. A member that was killed has written
nothing. So the first one waits until a death would have been announced; once a loss is known, the error is taken to
have come of it.

A round ends for a member by an `Ending`. The first one counts, but for one thing: a member that has not come out yet
since all have agreed to leave may be waiting for one that goes meanwhile, and must hear of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from rdzv.errors import GiveUp, MembersLostError, RoundChanged, RoundSupersededError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ASK_WITHIN", "EndKind", "Ending", "Outcome", "Phase", "gave_up", "news_within", "own_failure"]

ASK_WITHIN: Final = 2.0  # seconds for a word with the round's store, before one does without
# Seconds after its lease's end in which a member's death is known to the others: a lease goes within 0.1 s, and a
# coordinator is replaced in less.
NEWS_OF_A_LOSS: Final = 1.0


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

    @property
    def others_have_gone(self) -> bool:
        """Whether whatever fails has failed for that; after an agreement, nobody has left anybody."""
        return self.kind is not EndKind.AGREED


class Phase(Enum):
    """Where a member is in its round."""

    AT_WORK = "at work"  # it takes its steps
    AT_END = "at its end"  # its work has come to its end, and it waits for the others to come to theirs
    FAILED = "failed"  # it asks which member was the first to fail, and waits for news of a loss if it was that


class Outcome(Enum):
    """The consequence of the end of a member's work."""

    MEET_AGAIN = "meet again"
    RAISE = "raise"  # the error is its own
    GIVE_UP = "give up"  # raise; the run is closed with its verdict


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a group of tasks has ended by, at any depth."""
    if isinstance(failure, BaseExceptionGroup):
        for one in failure.exceptions:
            yield from _leaves(one)
    else:
        yield failure


def gave_up(failure: BaseException | str | None) -> GiveUp | None:
    """Return the verdict not to go on that the work has ended by, also in a group of tasks; of several, the first."""
    if not isinstance(failure, BaseException):
        return None
    return next((leaf for leaf in _leaves(failure) if isinstance(leaf, GiveUp)), None)


def own_failure(failure: BaseException | str) -> bool | None:
    """Return whether the work has failed by more than the round's end; None if this very process is to stop."""
    leaves = () if isinstance(failure, str) else tuple(_leaves(failure))
    if not all(isinstance(leaf, Exception) for leaf in leaves):
        return None
    return not leaves or not all(
        isinstance(leaf, RoundChanged | MembersLostError | RoundSupersededError) for leaf in leaves
    )


def news_within(*, disconnect_ttl: float, ttl: float, back_for: float = math.inf) -> float:
    """Return for how many seconds the first that fails waits for news of a loss.

    As a rule a death is announced after `gone_ttl`; where many seem to have died at once, `disconnect_ttl` decides. But
    a store that has just come back gives each lease its whole `ttl` anew: who died before it had come back, too, cannot
    be known to have died sooner.

    Args:
        disconnect_ttl: For how long a lease outlives its connection.
        ttl: For how long a lease outlives its last renewal.
        back_for: For how long this node has had its connection to the store, since that was away.
    """
    return max(disconnect_ttl, ttl - back_for) + NEWS_OF_A_LOSS
