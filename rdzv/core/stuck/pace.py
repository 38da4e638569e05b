"""Pure: slow or stuck members of a round, by their steps, and the words for the state of a run and a node.

`rdzv status`, `rdzv top`, the metrics and the page share these words and rules. The rule for stuck members is the
coordinator's (`rdzv.core.stuck.judging`) at half of its time, so that a member is shown before it is dropped. It takes
one pass, as every display calls it again and again.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

from rdzv.core.stuck.judging import FRESH_PART

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NODE_STATES", "WELL_FROM", "Pace", "StepOf", "pace_of"]

NODE_STATES: Final = (
    *("lost", "never seen", "left", "unfit", "banned", "stuck", "accused", "slow", "draining"),
    *("waiting", "spare", "busy", "in the round"),
)
"""The most urgent first."""

WELL_FROM: Final = NODE_STATES.index("waiting")  # from here on, an operator need do nothing
SHOWN_PART: Final = 0.5  # of `stall_timeout`: a member is shown as stuck after this part; if it is unset, ...
STUCK_AFTER: Final = 30.0  # ... after these seconds, ...
STUCK_STEPS: Final = 10  # ... or the time of this many steps, if longer
SLOW_PART: Final = 0.8  # of the median rate: a member below it is slow
BEHIND: Final = 10.0  # also slow: a member behind by the steps that all make in these seconds ...
BEHIND_STEPS: Final = 3  # ... and by more than these: notes of members in lock-step are of different times


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOf:
    """The progress of a member."""

    step: int | None  # the last begun step; None before the first
    age: float  # seconds since then
    report_age: float = 0.0  # seconds since its last report, which comes with a keep-alive
    rate: float  # recent steps per second
    busy: str = ""  # the reason why it is busy, as it said; empty if it is not
    waits: bool = False  # true if it waits for others in the store of its round
    away: bool = False  # true if it was disconnected from the store until a moment ago
    first: bool = False  # true if it is not beyond its first step: it may compile and load


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The progress of a round's members."""

    told: int = 0  # the number of members that report steps
    step: int | None = None  # the newest step; None if no member has begun one
    age: float = 0.0  # seconds since the last member began a step
    rate: float = 0.0  # the median rate, in steps per second; 0 if unknown
    limit: float = STUCK_AFTER  # seconds without a step after which a member counts as stuck, if others progress
    stuck: Mapping[str, str]  # the stuck members, and why, in words
    slow: Mapping[str, str]  # the slow members, and why, in words
    stands: bool = False  # no member progresses: then none can be blamed


def pace_of(steps: Mapping[str, StepOf], *, stall_timeout: float | None = None) -> Pace:
    """Return how the members progress, by the steps that they report."""
    begun = {node_id: one for node_id, one in steps.items() if one.step is not None}
    if not begun:
        return Pace(told=len(steps), stuck={}, slow={})
    numbers = Counter(one.step for one in begun.values() if one.step is not None)
    newest, age = max(numbers), min(one.age for one in begun.values())
    rates = [one.rate for one in begun.values() if one.rate > 0]
    rate = median_low(rates) if rates else 0.0
    limit = SHOWN_PART * stall_timeout if stall_timeout else max(STUCK_AFTER, STUCK_STEPS / rate if rate else 0.0)
    # A member that waits for a busy or disconnected one progresses as little as that one.
    excused = any(one.busy or one.away for one in steps.values())
    quiet = {} if excused else {name: one for name, one in begun.items() if one.age >= limit and not one.first}
    others_fresh = age < FRESH_PART * limit
    waits = sum(one.waits for one in steps.values())
    stuck = {
        name: one
        for name, one in quiet.items()
        if (one.step or 0) < newest or others_fresh or (not one.waits and waits == len(steps) - 1 > 0)
    }
    stuck = {name: one for name, one in stuck.items() if not one.waits} or stuck
    stands = not stuck and not excused and len(quiet) == len(begun)
    behind = max(BEHIND_STEPS, BEHIND * rate) if rate and age < limit else math.inf
    slow = {
        name: f"{one.rate:.3g} steps/s, the median is {rate:.3g}"
        if 0 < one.rate < SLOW_PART * rate
        else f"{newest - (one.step or 0):,} steps behind"
        for name, one in begun.items()
        if name not in stuck
        and not one.busy
        and age < limit
        and (0 < one.rate < SLOW_PART * rate or newest - (one.step or 0) > behind)
    }
    return Pace(
        told=len(steps),
        step=newest,
        age=age,
        rate=rate,
        limit=limit,
        stuck={name: f"at step {one.step:,}, others are at {newest:,}" for name, one in stuck.items()},
        slow=slow,
        stands=stands,
    )
