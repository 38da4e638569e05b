"""Pure: stuck members of a round: alive, and not progressing while others do.

The coordinator looks at the notes of the members' keep-alives (`beats`). A member is stuck if it has begun no new step
for `stall_timeout` (`first_step_timeout` up to its second step: it compiles and loads), and others progress: one is at
a later step, or has begun one within half of that time, or all of them wait in the round's store and it does not. If no
member progresses, none can be blamed; that is reported, and no member is dropped.

A member that waits for another in a collective progresses as little as that other. So no member is judged while

- a member has said that it is busy;
- a member, or the store, is or was just disconnected: its lease judges that member;

and for `stall_timeout` after that. A note counts by its ages at the time of sending: a member's node sends one exactly
when its member has been quiet for that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from store.printable import in_words as duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.stuck.beats import BeatNote

__all__ = ["Heard", "StallRules", "Stalls", "Verdict"]

FRESH_PART = 0.5  # of `stall_timeout`: a member that began a step within this part progresses

AWAY_AFTER = 1.0  # seconds by which a keep-alive may be late before its member counts as disconnected


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """A run's settings."""

    stall_timeout: float | None = None  # seconds without a step while others have one; None: no member is judged
    first_step_timeout: float | None = None  # the same for the first step of a round
    notes_every: float  # seconds between two keep-alives of a member

    @property
    def on(self) -> bool:
        """True if members are judged."""
        return self.stall_timeout is not None or self.first_step_timeout is not None

    def limit(self, *, first: bool) -> float:
        """Return for how many seconds a member may be quiet."""
        limit = self.first_step_timeout if first else self.stall_timeout
        return math.inf if limit is None else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The last note of a member, and its age in seconds."""

    note: BeatNote
    ago: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a look at all members."""

    stuck: Mapping[str, str] = field(default_factory=dict)  # each stuck member, and why, in words
    standstill: str = ""  # that no member progresses, in words; else empty


class Stalls:
    """A coordinator's state between two looks."""

    def __init__(self, rules: StallRules) -> None:
        self._rules = rules
        self._round = -1
        self._excused_at = -math.inf  # earlier times are not judged
        self._looked_at = -math.inf

    def look(self, heard: Mapping[str, Heard], *, round: int, now: float, every: float) -> Verdict:
        """Judge the live members of a round by their last notes; looks are normally `every` seconds apart."""
        late = now - self._looked_at > every + AWAY_AFTER  # the store was away, or this is the first look
        if round != self._round or late:
            self._round, self._excused_at = round, now
        self._looked_at = now
        members = {node_id: one for node_id, one in heard.items() if one.note.round == round}
        if any(self._excuses(one) for one in members.values()):
            self._excused_at = now
        quiet = {node_id: one for node_id, one in members.items() if self._is_quiet(one, now)}
        stuck = {
            node_id: _why(one, others)
            for node_id, one in quiet.items()
            if self._get_on(one, others := [other for name, other in members.items() if name != node_id])
            and all(self._was_heard_since(one, other) for other in others)
        }
        # Of the members behind, those that wait for others in the round's store do not delay the rest.
        stuck = {node_id: why for node_id, why in stuck.items() if not quiet[node_id].note.waits} or stuck
        if quiet and len(quiet) == len(members) and not stuck:
            return Verdict(standstill=self._standstill(list(members.values())))
        return Verdict(stuck=stuck)

    def _excuses(self, one: Heard) -> bool:
        return one.note.away or one.note.busy > one.ago or one.ago > self._rules.notes_every + AWAY_AFTER

    def _is_quiet(self, one: Heard, now: float) -> bool:
        limit = self._rules.limit(first=one.note.first)
        return one.note.age >= limit and now - one.ago - self._excused_at >= limit

    def _get_on(self, one: Heard, others: list[Heard]) -> bool:
        """Return True if another member progresses while this one does not."""
        if others and not one.note.waits and all(other.note.waits for other in others):
            return True
        step = -math.inf if one.note.step is None else one.note.step
        limit = self._rules.limit(first=one.note.first)
        return any(
            other.note.step is not None and (other.note.step > step or other.note.age < FRESH_PART * limit)
            for other in others
        )

    def _was_heard_since(self, one: Heard, other: Heard) -> bool:
        """Return True if `other`'s note is from the time in which `one` was quiet; else `one` may wait for it."""
        return other.ago <= one.ago + one.note.age - FRESH_PART * self._rules.limit(first=one.note.first)

    def _standstill(self, members: list[Heard]) -> str:
        steps = {one.note.step for one in members}
        (step,) = steps if len(steps) == 1 else (None,)
        limit = self._rules.limit(first=all(one.note.first for one in members))
        at = f", all are at {step:,}" if step is not None else ""
        return f"no member has begun a step for {duration(limit)}{at}; nobody is dropped"


def _why(one: Heard, others: list[Heard]) -> str:
    if all(other.note.waits for other in others) and not one.note.waits:
        at = "" if one.note.step is None else f" at {one.note.step:,}"
        return f"no step since {duration(one.note.age + one.ago)}, others wait for it{at}"
    steps = sorted(other.note.step for other in others if other.note.step is not None)
    others_at = f"{steps[0]:,}" if steps[0] == steps[-1] else f"{steps[0]:,} to {steps[-1]:,}"
    at = "" if one.note.step is None else f"; it is at {one.note.step:,}"
    return f"no step since {duration(one.note.age + one.ago)}, others are at {others_at}{at}"
