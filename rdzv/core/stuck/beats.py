"""Pure: the progress of one member, and the note of it that goes with its keep-alives.

A member's code calls `beat(step)` at each step, and `busy` before long operations. Its node, in a thread of its own,
sends the last report with the keep-alives. Only durations are sent, as clocks differ.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rdzv.core.stopping import step_of
from rdzv.core.stored import Prose, Stored, check_prose

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import SupportsIndex

__all__ = ["BeatNote", "Beats"]

FINISHED: Final = -1  # the round of a member that has finished
WAITS_AFTER: Final = 0.5  # seconds after which a wait counts as a wait for an absent peer
LABEL_BYTES_MOST: Final = 64  # of the text that says why a member is busy: a note has at most 128 bytes


class BeatNote(Stored, kw_only=True):
    """A member's progress at the time of sending."""

    called = "how far a member has come"
    by_place = True

    round: int
    step: int | None  # the last begun step; None before the first
    age: float  # seconds since then; without a step, since the round began for it
    first: bool = False  # still in its first step: it may compile and load
    busy: float = 0.0  # seconds for which it will be busy; 0 if it is not
    what: Prose = ""  # the reason, in words; of a member that waits and is not busy, the key
    rate: float = 0.0  # recent steps per second
    away: bool = False  # it was disconnected from the store until a moment ago
    waits: bool = False  # it waits for others in the round's shared store
    waited: float = 0.0  # the seconds for which it has waited there


class _Waiting:
    """One wait of a member; a class, as each `get` of a shared store is one and a generator is far slower."""

    def __init__(self, beats: Beats, what: Callable[[], str]) -> None:
        self._beats = beats
        self.what: Callable[[], str] = what

    def __enter__(self) -> None:
        beats = self._beats
        beats.waits[self] = beats.clock()
        if not beats.wait_is_watched:
            beats.wait_is_watched = True
            beats.on_wait()

    def __exit__(self, *_: object) -> None:
        del self._beats.waits[self]


class Beats:
    """The progress of one member in one round: written by its own thread, and read by its node's.

    Each thread writes its own attributes, a whole tuple at once, so that the other never sees half of it.

    Attributes:
        clock: Seconds on the member's clock, from any thread.
        counts: True if there is a report to send: the member has made one, or must.
        on_wait: Called at the begin of a wait in the round's store, in the waiting thread.
        waits: The begin of each current wait there.
        wait_is_watched: True if the node looks at the waits without a further `on_wait`, which is then not called.
    """

    def __init__(self, number: int, clock: Callable[[], float], *, expected: bool = False) -> None:
        self._number = number
        self.on_wait: Callable[[], None] = lambda: None
        self.clock: Callable[[], float] = clock
        self.counts: bool = expected
        self._last: tuple[int | None, float, int] = (None, clock(), 0)  # step, time, number of beats
        self._busy: tuple[tuple[object, float, str], ...] = ()  # of each stretch: token, end, label
        self._busy_ended = -math.inf
        self._rated: tuple[int, float] | None = None  # at the last note: step, its begin
        self._rate = 0.0
        self.waits: dict[_Waiting, float] = {}
        self.wait_is_watched: bool = False

    @property
    def step(self) -> int | None:
        """The last begun step."""
        return self._last[0]

    def beat(self, step: SupportsIndex) -> int:
        """Record that the member begins this step, and return it as a plain number; see `step_of`."""
        before, step = self._last, step_of(step)
        if step != before[0]:
            self._last = (step, self.clock(), before[2] + 1)
            self.counts = True
        return step

    def be_busy(self, seconds: float, label: str) -> object:
        """Record that the member is busy for at most `seconds`; return a token for `be_free`. Stretches may overlap."""
        token = object()
        stretch = (token, self.clock() + float(seconds), check_prose("label", label, most=LABEL_BYTES_MOST))
        self._busy = (*self._busy, stretch)
        self.counts = True
        return token

    def be_free(self, token: object) -> None:
        """End one stretch; others may continue."""
        self._busy_ended = self.clock()
        self._busy = tuple(one for one in self._busy if one[0] is not token)

    @property
    def _busy_longest(self) -> tuple[float, str]:
        """Return the end and the label of the stretch that ends last."""
        return max(((until, label) for _, until, label in self._busy), default=(-math.inf, ""))

    @property
    def longest_wait(self) -> tuple[float, str] | None:
        """The seconds of the member's longest wait in the round's shared store, and the key; None if it has none."""
        for wait, since in tuple(self.waits.items()):
            return self.clock() - since, wait.what()
        return None

    def waiting(self, what: Callable[[], str]) -> _Waiting:
        """Mark the member as waiting for a key in the round's shared store, while in this context; `what` names it."""
        return _Waiting(self, what)

    def finish(self) -> None:
        """Record that the member has finished and begins no step any more: it is not judged."""
        self._number = FINISHED

    def quiet_since(self) -> float:
        """The time, on this clock, of the member's last expected report."""
        return max(self._last[1], self._busy_ended, self._busy_longest[0])

    @property
    def got_on(self) -> bool:
        """True if the member has finished a step in this round, or its body."""
        return self._last[2] > 1 or self._number == FINISHED

    @property
    def first(self) -> bool:
        """True if it is not beyond its first step."""
        return self._last[2] <= 1

    def note(self, *, away: bool) -> BeatNote:
        """Return the note to send now; `away`: the node was disconnected from the store until a moment ago."""
        now = self.clock()
        step, at, count = self._last
        busy_until, what = self._busy_longest
        busy = max(busy_until - now, 0.0)
        if step is not None:
            if self._rated is not None and at > self._rated[1]:
                self._rate = (step - self._rated[0]) / (at - self._rated[1])
            if self._rated is None or at > self._rated[1]:
                self._rated = (step, at)
        waited, key = self.longest_wait or (0.0, "")
        waits = waited >= WAITS_AFTER
        age = max(now - max(at, self._busy_ended, min(busy_until, now)), 0.0)
        return BeatNote(
            round=self._number if self.counts else FINISHED,
            step=step,
            age=age,
            first=count <= 1,
            busy=busy,
            what=what if busy else check_prose("key", key, most=LABEL_BYTES_MOST) if waits else "",
            rate=self._rate,
            away=away,
            waits=waits,
            waited=waited if waits else 0.0,
        )
