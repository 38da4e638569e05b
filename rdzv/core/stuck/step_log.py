"""One member's progress, and notes about it in keep-alives. Notes have durations instead of times, as clocks differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rdzv.core.stopping import as_step
from rdzv.core.stored import Prose, Stored, checked_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import SupportsIndex

FINISHED: Final = -1  # `StepNote.round` of a member that has finished, or reports no steps
WAITS_AFTER: Final = 0.5  # seconds; shorter waits for keys are not reported
LABEL_BYTES_MOST: Final = 64  # limit of `StepNote.what`, as a note has at most 128 bytes


class StepNote(Stored, kw_only=True):
    """A member's progress when the note was sent."""

    called = "how far a member has come"
    by_place = True

    round: int
    step: int | None  # the last begun step; None before the first
    age: float  # seconds since it began a step (else the round), or was last busy, if later
    first: bool = False  # True until the second step begins: in the first step, a member may compile
    busy: float = 0.0  # seconds, at most, that the member stays busy; else 0
    what: Prose = ""  # why the member is busy, or the key for which it waits; else empty
    rate: float = 0.0  # recent steps per second; 0: unknown
    away: bool = False  # True: this keep-alive is late, as after a lost connection
    waits: bool = False  # True: the member waits for a key in the round's store
    waited: float = 0.0  # seconds waited for the key; 0 unless `waits`


@dataclass(slots=True, eq=False)
class _WaitMark:
    """One wait of a member. Each `get` of a shared store makes one, so it is no generator, which would be slower."""

    beats: StepLog
    what: Callable[[], str]

    def __enter__(self) -> None:
        beats = self.beats
        beats.waits[self] = beats.clock()
        if not beats.wait_is_watched:
            beats.wait_is_watched = True
            beats.on_wait()

    def __exit__(self, *_: object) -> None:
        del self.beats.waits[self]


class StepLog:
    """One member's progress in one round.

    The member's thread and its node's thread write different attributes, each by one assignment, so neither
    reads half a change.
    """

    def __init__(self, number: int, clock: Callable[[], float], *, expected: bool = False) -> None:
        self._number = number
        # Called in the waiting thread when a wait in the round's store begins, unless `wait_is_watched`.
        self.on_wait: Callable[[], None] = lambda: None
        self.clock: Callable[[], float] = clock  # may be called in any thread
        self.counts: bool = expected  # True: the member has reported progress, or is expected to
        self._last: tuple[int | None, float, int] = (None, clock(), 0)  # last begun step, when it began, steps begun
        self._busy: tuple[tuple[object, float, str], ...] = ()  # token, end, label
        self._busy_ended = -math.inf
        self._rated: tuple[int, float] | None = None  # for the next rate: the last noted step, and its beginning
        self._rate = 0.0
        self.waits: dict[_WaitMark, float] = {}  # when each current wait in the round's store began
        self.wait_is_watched: bool = False  # True: the node checks `waits`, or was just asked to

    @property
    def last_step(self) -> int | None:
        """The last begun step."""
        return self._last[0]

    def beat(self, step: SupportsIndex) -> int:
        """Record that the member begins this step; return the step as an `int` (see `as_step`)."""
        before, step = self._last, as_step(step)
        if step != before[0]:
            self._last = (step, self.clock(), before[2] + 1)
            self.counts = True
        return step

    def begin_busy(self, seconds: float, label: str) -> object:
        """Record that the member is busy for at most `seconds`; return a token for `end_busy`. Calls may overlap."""
        token = object()
        stretch = (token, self.clock() + seconds, checked_text("what", label, most=LABEL_BYTES_MOST))
        self._busy = (*self._busy, stretch)
        self.counts = True
        return token

    def end_busy(self, token: object) -> None:
        """Record the end of a busy time."""
        self._busy_ended = self.clock()
        self._busy = tuple(one for one in self._busy if one[0] is not token)

    @property
    def _latest_busy_period(self) -> tuple[float, str]:
        return max(((until, label) for _, until, label in self._busy), default=(-math.inf, ""))

    @property
    def longest_store_wait(self) -> tuple[float, str] | None:
        """The member's longest wait in the round's store: seconds so far, and the key."""
        for wait, since in tuple(self.waits.items()):
            return self.clock() - since, wait.what()
        return None

    def mark_wait(self, what: Callable[[], str]) -> _WaitMark:
        """Mark the member as waiting in the round's store, inside this context; `what` returns the key."""
        return _WaitMark(self, what)

    def finish_all_steps(self) -> None:
        """Record that the member begins no further step, and is not judged any more."""
        self._number = FINISHED

    def quiet_since(self) -> float:
        """Return since when, on `clock`, the member has been quiet: no step, and not busy."""
        return max(self._last[1], self._busy_ended, self._latest_busy_period[0])

    @property
    def has_progressed(self) -> bool:
        """True if the member has finished a step in this round, or its body."""
        return self._last[2] > 1 or self._number == FINISHED

    @property
    def is_first_step(self) -> bool:
        """True if the member is not beyond its first step."""
        return self._last[2] <= 1

    def current_note(self, *, away: bool) -> StepNote:
        """Return the note to send now."""
        now = self.clock()
        step, at, count = self._last
        busy_until, what = self._latest_busy_period
        busy = max(busy_until - now, 0.0)
        if step is not None:
            if self._rated is not None and at > self._rated[1]:
                self._rate = (step - self._rated[0]) / (at - self._rated[1])
            if self._rated is None or at > self._rated[1]:
                self._rated = (step, at)
        waited, key = self.longest_store_wait or (0.0, "")
        waits = waited >= WAITS_AFTER
        age = max(now - max(at, self._busy_ended, min(busy_until, now)), 0.0)
        return StepNote(
            round=self._number if self.counts else FINISHED,
            step=step,
            age=age,
            first=count <= 1,
            busy=busy,
            what=what if busy else checked_text("key", key, most=LABEL_BYTES_MOST) if waits else "",
            rate=self._rate,
            away=away,
            waits=waits,
            waited=waited if waits else 0.0,
        )
