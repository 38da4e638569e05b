"""Pure: how a round ends for one of its members, and which member's error it is.

**Blame.** When a member dies, the others fail too: their peer's connections close, mostly before the death is
announced. So a member that fails writes its name into the round's store before it releases the others. The first of
several is to blame; the others meet again. A killed member writes nothing. So the first one waits until a death would
have been announced; if a loss becomes known, the loss is taken as the cause of the error.

A round ends for a member by an `Ending`. The first one counts, with one exception: a member that is still in its work
after all agreed to leave may wait for a member that is lost meanwhile, and must be told.
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

ASK_WITHIN: Final = 2.0  # seconds for one call to the round's store, before a member continues without
# Seconds until a death is known after its lease's end: expiry takes 0.1 s, a new coordinator less than the rest.
NEWS_OF_A_LOSS: Final = 1.0


class EndKind(Enum):
    """The kinds of a round's end for a member."""

    LOST = "lost"  # a member has died
    LEFT = "left"  # others have failed as this member has; the lost member is not known yet
    FAILED = "failed"  # a member has left elsewhere than at the agreed step
    DROPPED = "dropped"  # this member was dropped
    CLOSED = "closed"  # the run is closed
    AGREED = "agreed"  # all leave before the same step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a round for a member."""

    kind: EndKind  # see `EndKind`
    reason: str  # in words
    node_ids: tuple[str, ...] = ()  # the members that have gone, as far as they are known

    @property
    def others_have_gone(self) -> bool:
        """True if any failure of the work comes from the members that have gone; False after an agreement."""
        return self.kind is not EndKind.AGREED


class Phase(Enum):
    """The phase of a member in its round."""

    AT_WORK = "at work"  # it works on its steps
    AT_END = "at its end"  # its work is done, and it waits for the others to finish
    FAILED = "failed"  # it asks which member failed first, and if it did, waits for news of a loss


class Outcome(Enum):
    """The consequence of the end of a member's work."""

    MEET_AGAIN = "meet again"
    RAISE = "raise"  # the error is its own
    GIVE_UP = "give up"  # raise; the run is closed with its verdict


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, at any depth."""
    if isinstance(failure, BaseExceptionGroup):
        for one in failure.exceptions:
            yield from _leaves(one)
    else:
        yield failure


def gave_up(failure: BaseException | str | None) -> GiveUp | None:
    """Return the first `GiveUp` of the work's failure, also in an exception group."""
    if not isinstance(failure, BaseException):
        return None
    return next((leaf for leaf in _leaves(failure) if isinstance(leaf, GiveUp)), None)


def own_failure(failure: BaseException | str) -> bool | None:
    """Return True if the work has failed by more than the round's end; None if this process must stop."""
    leaves = () if isinstance(failure, str) else tuple(_leaves(failure))
    if not all(isinstance(leaf, Exception) for leaf in leaves):
        return None
    return not leaves or not all(
        isinstance(leaf, RoundChanged | MembersLostError | RoundSupersededError) for leaf in leaves
    )


def news_within(*, disconnect_ttl: float, ttl: float, back_for: float = math.inf) -> float:
    """Return for how many seconds the first member to fail waits for news of a loss.

    A death is normally announced after `gone_ttl`; if many seem dead at once, `disconnect_ttl` decides. But a store
    that restarted (this node reconnected `back_for` seconds ago) gives each lease its full `ttl` again, also of dead
    members.
    """
    return max(disconnect_ttl, ttl - back_for) + NEWS_OF_A_LOSS
