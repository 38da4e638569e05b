"""Pure: a round's life for one of its members, from its first step to the next round, or to an error of one's own.

Whoever drives a member (a body under `rounds()`, the processes of `rdzv run`) tells what has happened (`Fact`), and is
told what to do next (`Act`). All changes there are stand in one table, `TRANSITIONS`:

    AT_WORK         the member takes its steps
    AT_END          it has come to the end of its work, and waits for the others to come to theirs
    ASKING          it has failed, and asks who was the first of the round to fail, or to end it
    AWAITING_NEWS   it was the first, and waits for news of a loss: who was killed cannot say that it was first
    OVER            it meets the others again, or raises its error

**Whose error it is.** When a member dies, the others fail, too: their peer has hung up, and mostly sooner than anybody
is told of the death. So who fails writes its name into the round's store, before it lets go of what others wait for: of
several that fail, the first is to blame, and the others meet again. A member that was killed has written nothing. So
the first one waits until a death would have been announced; once a loss is known, the error is taken to have come of
it.

How a round ends for a member is an `Ending`; the first one counts, but for one thing: who has not come out yet since
all have agreed to leave may be waiting for somebody who goes meanwhile, and must hear of that. It may come at any time,
from another thread, and is looked at when the member has come out of its work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from rdzv.errors import GiveUp, MembersLostError, RoundChanged, RoundSupersededError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ASK_WITHIN", "TRANSITIONS", "Act", "EndKind", "Ending", "Fact", "RoundLife", "State", "news_within"]

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


class State(Enum):
    """Where a member is; see the module."""

    AT_WORK = "at work"
    AT_END = "at its end"
    ASKING = "asking"
    AWAITING_NEWS = "awaiting news"
    OVER = "over"


class Fact(Enum):
    """What has happened."""

    FINISHED = "finished"  # the work has come to its end, and the round had not ended before
    WENT_ALONG = "went along"  # the member has come out since the round has ended
    GAVE_UP = "gave up"  # it wants nobody to go on
    FAILED = "failed"  # it has failed, and that nobody has gone is all that is known
    INTERRUPTED = "interrupted"  # somebody wants this very process to stop
    WAS_FIRST = "was first"  # to fail, of all members
    WAS_NOT_FIRST = "was not first"  # or it cannot be known: who is cut off has that against it, and not its work
    WAS_ALONE = "was alone"  # in its round
    WAS_LAST = "was last"  # to come to its end, of all members
    WAS_NOT_LAST = "was not last"
    CLOSED = "closed"  # by this member, as was told
    ENDED = "ended"  # the round has, while the member waited
    NO_NEWS = "no news"  # nobody has gone in the time in which that would be known


class Act(Enum):
    """What to do next; what comes of it is the next fact."""

    COUNT_IN = "count in"  # among those that have come to their end
    CLOSE = "close"  # the run, which has done what it was for
    AWAIT_END = "await end"  # until the run is closed, or something else ends the round
    ASK_WHO_WAS_FIRST = "ask who was first"  # and be it, if nobody was
    AWAIT_NEWS = "await news"  # of a loss, having let go of what others wait for
    GIVE_UP = "give up"  # close the run, and raise
    MEET_AGAIN = "meet again"
    RAISE = "raise"


# Every change there is.
TRANSITIONS: Final[Mapping[State, Mapping[Fact, tuple[State, Act]]]] = {
    State.AT_WORK: {
        Fact.FINISHED: (State.AT_END, Act.COUNT_IN),
        Fact.WENT_ALONG: (State.OVER, Act.MEET_AGAIN),
        Fact.GAVE_UP: (State.OVER, Act.GIVE_UP),
        Fact.FAILED: (State.ASKING, Act.ASK_WHO_WAS_FIRST),
        Fact.INTERRUPTED: (State.OVER, Act.RAISE),
    },
    State.AT_END: {
        Fact.WAS_LAST: (State.AT_END, Act.CLOSE),
        Fact.WAS_NOT_LAST: (State.AT_END, Act.AWAIT_END),
        Fact.CLOSED: (State.AT_END, Act.AWAIT_END),
        Fact.ENDED: (State.OVER, Act.MEET_AGAIN),
    },
    State.ASKING: {
        Fact.WAS_FIRST: (State.AWAITING_NEWS, Act.AWAIT_NEWS),
        Fact.WAS_NOT_FIRST: (State.OVER, Act.MEET_AGAIN),
        Fact.WAS_ALONE: (State.OVER, Act.RAISE),
    },
    State.AWAITING_NEWS: {
        Fact.ENDED: (State.OVER, Act.MEET_AGAIN),
        Fact.NO_NEWS: (State.OVER, Act.RAISE),
    },
    State.OVER: {},
}


class RoundLife:
    """One member's life in one round."""

    def __init__(self) -> None:
        self.state: State = State.AT_WORK
        self.ending: Ending | None = None  # why the round has ended for it; None while it goes on
        self.blames_others: bool = False  # an error of its own work was found to be others' fault
        self.all_have_finished: bool = False  # it was the last to come to its end

    def ends(self, ending: Ending) -> bool:
        """The round has ended; False if that is no news. From any thread."""
        is_news = self.ending is None or (ending.others_have_gone and not self.ending.others_have_gone)
        if is_news:
            self.ending = ending
        return is_news

    def happens(self, fact: Fact, *, failure: BaseException | str | None = None) -> Act:
        """Go on by one fact; what to do next.

        Args:
            fact: What has happened.
            failure: What the member has failed with, where it has.
        """
        after = TRANSITIONS[self.state].get(fact)
        assert after is not None, f"of a member that is {self.state.value} it cannot be told: {fact.value}"
        was, (self.state, act) = self.state, after
        self.blames_others |= was in (State.ASKING, State.AWAITING_NEWS) and act is Act.MEET_AGAIN
        self.all_have_finished |= fact is Fact.WAS_LAST
        if fact is Fact.WAS_NOT_FIRST:
            reason = f"others have failed before, as this member has: {failure!r}"
            self.ends(Ending(kind=EndKind.FAILED, reason=reason))
        return act

    def comes_out(self, failure: BaseException | str | None) -> Act:
        """The work of the member is over, by this error, or failed in these words, if it is; what to do next."""
        return self.happens(self._what_it_means(failure))

    def _what_it_means(self, failure: BaseException | str | None) -> Fact:
        match failure:
            case None:
                return Fact.FINISHED if self.ending is None else Fact.WENT_ALONG
            case GiveUp():
                return Fact.GAVE_UP
            case RoundChanged() | MembersLostError() | RoundSupersededError():
                return Fact.WENT_ALONG
            case Exception() | str():
                return Fact.WENT_ALONG if self.others_have_gone else Fact.FAILED
            case _:
                return Fact.INTERRUPTED

    @property
    def others_have_gone(self) -> bool:
        """Whether the round has ended since somebody has gone."""
        return self.ending is not None and self.ending.others_have_gone

    @property
    def news(self) -> Fact:
        """What the wait for news has come to."""
        return Fact.ENDED if self.others_have_gone else Fact.NO_NEWS

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by a failure or a loss, and not by anything that was announced."""
        gone = (EndKind.LOST, EndKind.LEFT, EndKind.FAILED, EndKind.DROPPED)
        return self.blames_others or (self.ending is not None and self.ending.kind in gone)


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
