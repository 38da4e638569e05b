"""The judgement which members of a round are stuck: alive, but without progress while others make some.

The coordinator reads the notes that come with keep-alives (`step_log`). A member is stuck if it has begun no step for
`stall_timeout` (`first_step_timeout` before its second step, as it may compile), while other members make progress. The
other members make progress if one of them is at a later step, or has begun a step within half of the limit; or if all
other members wait in the round's store, and this member does not. If no member makes progress, none is dropped, but the
coordinator reports this.

A member that waits for another in a collective makes no progress either. So the coordinator judges no member while one
of these facts holds, nor for `stall_timeout` afterwards:

- a member has said that it is busy;
- a member or the store is disconnected, or was a moment ago: a disconnected member is judged by its lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from store.printable import time_text as duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.stuck.step_log import StepNote

FRESH_PART = 0.5  # a member that began a step within this share of the limit makes progress

AWAY_AFTER = 1.0  # seconds that a keep-alive, or `judge`, may be late before silence is excused


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """The settings of a run for `StallDetector`."""

    stall_timeout: float | None = None  # seconds that a member may begin no step; None: no limit
    first_step_timeout: float | None = None  # as `stall_timeout`, until the second step begins; None: no limit
    notes_every: float  # seconds between two keep-alives of a member

    @property
    def enabled(self) -> bool:
        """True if `stall_timeout` or `first_step_timeout` is set."""
        return self.stall_timeout is not None or self.first_step_timeout is not None

    def limit(self, *, first: bool) -> float:
        """Return the seconds that a member may begin no step; infinity: no limit."""
        limit = self.first_step_timeout if first else self.stall_timeout
        return math.inf if limit is None else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStepNote:
    """The last note of a member; `ago`: seconds since the store received it (0 on etcd, which does not tell)."""

    note: StepNote
    ago: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckVerdict:
    """The result of `StallDetector.judge`."""

    stuck: Mapping[str, str] = field(default_factory=dict)  # the stuck members, and why
    standstill: str = ""  # a sentence saying that no member makes progress, or empty


class StallDetector:
    """A coordinator's judge of its members."""

    def __init__(self, rules: StallRules) -> None:
        self._rules = rules
        self._round = -1
        self._excused_at = -math.inf  # time without a step counts only from this moment on
        self._looked_at = -math.inf

    def judge(
        self, heard: Mapping[str, LastStepNote], *, round: int, now: float, every: float, awaited: bool = False
    ) -> StuckVerdict:
        """Judge a round's live members by their last notes; call this about every `every` seconds.

        `awaited`: other members wait for the next round.
        """
        late = now - self._looked_at > every + AWAY_AFTER  # the last call is long past: excuse all silence until now
        if round != self._round or late:
            self._round, self._excused_at = round, now
        self._looked_at = now
        members = {node_id: one for node_id, one in heard.items() if one.note.round == round}
        if any(self._has_excuse(one) for one in members.values()):
            self._excused_at = now
        quiet = {node_id: one for node_id, one in members.items() if self._is_quiet(one, now)}
        stuck = {
            node_id: _explain_stuck_member(one, others)
            for node_id, one in quiet.items()
            if self._do_others_progress(
                one, others := [other for name, other in members.items() if name != node_id], awaited
            )
            and all(self._reported_later_than(one, other) for other in others)
        }
        # A stuck member that waits in the round's store is not the cause if another stuck member does not wait there.
        stuck = {node_id: why for node_id, why in stuck.items() if not quiet[node_id].note.waits} or stuck
        if quiet and len(quiet) == len(members) and not stuck:
            return StuckVerdict(standstill=self._describe_standstill(list(members.values())))
        return StuckVerdict(stuck=stuck)

    def _has_excuse(self, one: LastStepNote) -> bool:
        return one.note.away or one.note.busy > one.ago or one.ago > self._rules.notes_every + AWAY_AFTER

    def _is_quiet(self, one: LastStepNote, now: float) -> bool:
        limit = self._rules.limit(first=one.note.first)
        return one.note.age >= limit and now - one.ago - self._excused_at >= limit

    def _do_others_progress(self, one: LastStepNote, others: list[LastStepNote], awaited: bool) -> bool:
        if (others or awaited) and not one.note.waits and all(other.note.waits for other in others):
            return True
        step = -math.inf if one.note.step is None else one.note.step
        limit = self._rules.limit(first=one.note.first)
        return any(
            other.note.step is not None and (other.note.step > step or other.note.age < FRESH_PART * limit)
            for other in others
        )

    def _reported_later_than(self, one: LastStepNote, other: LastStepNote) -> bool:
        """Return True if `other` has reported well after `one` went quiet; else `one` may be waiting for `other`."""
        return other.ago <= one.ago + one.note.age - FRESH_PART * self._rules.limit(first=one.note.first)

    def _describe_standstill(self, members: list[LastStepNote]) -> str:
        steps = {one.note.step for one in members}
        (step,) = steps if len(steps) == 1 else (None,)
        limit = self._rules.limit(first=all(one.note.first for one in members))
        at = f", all are at {step:,}" if step is not None else ""
        return f"no member has begun a step for {duration(limit)}{at}; nobody is dropped"


def _explain_stuck_member(one: LastStepNote, others: list[LastStepNote]) -> str:
    if all(other.note.waits for other in others) and not one.note.waits:
        at = "" if one.note.step is None else f" at {one.note.step:,}"
        return f"no step since {duration(one.note.age + one.ago)}, others wait for it{at}"
    steps = sorted(other.note.step for other in others if other.note.step is not None)
    others_at = f"{steps[0]:,}" if steps[0] == steps[-1] else f"{steps[0]:,} to {steps[-1]:,}"
    at = "" if one.note.step is None else f"; it is at {one.note.step:,}"
    return f"no step since {duration(one.note.age + one.ago)}, others are at {others_at}{at}"
