"""Slow or stuck members of a round, by their steps, for `rdzv status`, the metrics and the page.

A member is shown as stuck by the coordinator's rule (`rdzv.core.stuck.judging`), but after half of `stall_timeout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

from rdzv.core.stuck.judging import FRESH_PART

if TYPE_CHECKING:
    from collections.abc import Mapping

NODE_STATES: Final = (
    *("lost", "never seen", "left", "unfit", "banned", "stuck", "accused", "slow", "draining"),
    *("waiting", "spare", "busy", "in the round"),
)
"""The states of a node in words, the most urgent first."""

SHOWN_PART: Final = 0.5  # a member is shown as stuck after this share of `stall_timeout`
# Without `stall_timeout`, a member is stuck after these seconds, or `STUCK_STEPS` at the median rate if longer.
STUCK_AFTER: Final = 30.0
STUCK_STEPS: Final = 10
SLOW_PART: Final = 0.8  # a member with less than this share of the median rate is slow
BEHIND: Final = 10.0  # a member is also slow if it is behind by more steps than the median rate makes in these seconds
BEHIND_STEPS: Final = 3  # a lag of at most these steps makes no member slow, as notes are of different moments


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOf:
    """A member's progress, for displays."""

    step: int | None  # the last begun step; None before the first
    age: float  # seconds since the step (else the round) began, or the member was last busy, if later
    report_age: float = 0.0  # seconds since its last note was received
    rate: float  # recent steps per second; 0: unknown
    busy: str = ""  # why the member is busy, else empty
    waits: bool = False  # see `StepNote`
    away: bool = False  # see `StepNote`
    first: bool = False  # see `StepNote`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsOverview:
    """A round's progress over all its members."""

    told: int = 0  # the number of members that report steps
    step: int | None = None  # the largest begun step
    age: float = 0.0  # seconds since any member last began a step or was busy
    rate: float = 0.0  # the median, in steps per second; 0 if unknown
    limit: float = STUCK_AFTER  # seconds without a step after which a member is stuck, if others make progress
    stuck: Mapping[str, str]  # the stuck members, and why
    slow: Mapping[str, str]  # the slow members, and why
    stands: bool = False  # True: no member makes progress, so none is stuck


def steps_overview(steps: Mapping[str, StepOf], *, stall_timeout: float | None = None) -> StepsOverview:
    """Return a round's progress over all its members."""
    at = {node_id: one.step for node_id, one in steps.items() if one.step is not None}
    if not at:
        return StepsOverview(told=len(steps), stuck={}, slow={})
    begun = {node_id: steps[node_id] for node_id in at}
    newest, age = max(at.values()), min(one.age for one in begun.values())
    rates = [one.rate for one in begun.values() if one.rate > 0]
    rate = median_low(rates) if rates else 0.0
    longest = max(STUCK_AFTER, STUCK_STEPS / rate) if rate else STUCK_AFTER
    limit = SHOWN_PART * stall_timeout if stall_timeout else longest
    # While a member is busy, or its keep-alives are late, no member is stuck: others may wait for that member.
    excused = any(one.busy or one.away for one in steps.values())
    quiet = {} if excused else {name: one for name, one in begun.items() if one.age >= limit and not one.first}
    others_fresh = age < FRESH_PART * limit
    waits = sum(one.waits for one in steps.values())
    stuck = {
        name: one
        for name, one in quiet.items()
        if at[name] < newest or others_fresh or (not one.waits and waits == len(steps) - 1 > 0)
    }
    stuck = {name: one for name, one in stuck.items() if not one.waits} or stuck
    stands = not stuck and not excused and len(quiet) == len(begun)
    behind = max(BEHIND_STEPS, BEHIND * rate) if rate else math.inf
    slow = {
        name: f"{one.rate:.3g} steps/s, the median is {rate:.3g}"
        if 0 < one.rate < SLOW_PART * rate
        else f"{newest - at[name]:,} steps behind"
        for name, one in begun.items()
        if name not in stuck
        and not one.busy
        and age < limit
        and (0 < one.rate < SLOW_PART * rate or newest - at[name] > behind)
    }
    return StepsOverview(
        told=len(steps),
        step=newest,
        age=age,
        rate=rate,
        limit=limit,
        stuck={name: f"at step {at[name]:,}, others are at {newest:,}" for name in stuck},
        slow=slow,
        stands=stands,
    )
