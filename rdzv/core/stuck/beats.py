"""Pure: how far one member has come, and the note of it that travels with its keep-alives.

A member's code says `beat(step)` whenever it gets on, and `busy` before what is known to take long. Its node, which
lives in a thread of its own, sends what was said last along with the keep-alives that it sends anyway. Only durations
travel: each clock is its own.
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

FINISHED: Final = -1  # stands for the round of a member that has come to its end
WAITS_AFTER: Final = 0.5  # seconds after which a wait is one for somebody who does not come
LABEL_BYTES_MOST: Final = 64  # of the text that says why a member is busy: a note has at most 128 bytes


class BeatNote(Stored, kw_only=True):
    """How far a member has come, when it was sent."""

    called = "how far a member has come"
    by_place = True

    round: int  # of which round it is
    step: int | None  # the last step that it has begun; None before the first
    age: float  # seconds since then; without a step, since the round began for it
    first: bool = False  # it has not come beyond its first step: it compiles and loads, perhaps
    busy: float = 0.0  # seconds for which it is known to be busy yet; 0 if it is not
    what: Prose = ""  # what with, in words
    rate: float = 0.0  # steps a second, lately
    away: bool = False  # the store was out of its reach until a moment ago
    waits: bool = False  # it waits in the round's shared store, for others


class _Waiting:
    """One wait of a member; a class, since every `get` of a shared store is one, and a generator takes far longer."""

    def __init__(self, waits: dict[object, float], clock: Callable[[], float]) -> None:
        self._waits, self._clock = waits, clock

    def __enter__(self) -> None:
        self._waits[self] = self._clock()

    def __exit__(self, *_: object) -> None:
        del self._waits[self]


class Beats:
    """How far a member has come in one round: said by its own thread, and read by its node's.

    Each of them writes attributes of its own, a whole tuple at once, so that the other never sees half of it.

    Args:
        number: The round's.
        clock: Seconds, from any thread.

    Attributes:
        clock: Seconds on the member's clock, from any thread.
        counts: Whether there is anything to send: the member has said something, or is expected to.
    """

    def __init__(self, number: int, clock: Callable[[], float], *, expected: bool = False) -> None:
        self._number = number
        self.clock: Callable[[], float] = clock
        self.counts: bool = expected
        self._last: tuple[int | None, float, int] = (None, clock(), 0)  # step, when, how many there were
        self._busy: tuple[tuple[object, float, str], ...] = ()  # each stretch: its own token, until when, and the label
        self._busy_ended = -math.inf
        self._rated: tuple[int, float] | None = None  # when a note was made: step, when it was begun
        self._rate = 0.0
        self._waits: dict[object, float] = {}  # each wait that is under way, and since when

    @property
    def step(self) -> int | None:
        """The last step that was begun."""
        return self._last[0]

    def beat(self, step: SupportsIndex) -> int:
        """The member begins this step; which is returned as a plain number.

        Raises:
            RendezvousSettingsError: It is none.
        """
        before, step = self._last, step_of(step)
        if step != before[0]:
            self._last = (step, self.clock(), before[2] + 1)
            self.counts = True
        return step

    def be_busy(self, seconds: float, label: str) -> object:
        """Note that the member is busy for at most so many seconds, also while it is busy with something else.

        Returns:
            A token that ends this stretch, for `be_free`.

        Raises:
            RendezvousSettingsError: The label is no text.
        """
        token = object()
        stretch = (token, self.clock() + float(seconds), check_prose("label", label, most=LABEL_BYTES_MOST))
        self._busy = (*self._busy, stretch)
        self.counts = True
        return token

    def be_free(self, token: object) -> None:
        """End one stretch; the member may be busy with something else."""
        self._busy_ended = self.clock()
        self._busy = tuple(one for one in self._busy if one[0] is not token)

    @property
    def _busy_longest(self) -> tuple[float, str]:
        """Until when the member is busy, and the label of the stretch that ends last."""
        return max(((until, label) for _, until, label in self._busy), default=(-math.inf, ""))

    @property
    def waits(self) -> bool:
        """Whether the member waits in the round's shared store now."""
        return bool(self._waits)

    def waiting(self) -> _Waiting:
        """Meanwhile the member waits in the round's shared store, for others."""
        return _Waiting(self._waits, self.clock)

    def finish(self) -> None:
        """The member has come to its end, and begins no step any more: nobody judges it by that."""
        self._number = FINISHED

    def quiet_since(self) -> float:
        """Since when, on this clock, nothing was heard of the member that it had to say."""
        return max(self._last[1], self._busy_ended, self._busy_longest[0])

    @property
    def got_on(self) -> bool:
        """Whether the member has finished a step in this round, or come to its end."""
        return self._last[2] > 1 or self._number == FINISHED

    @property
    def first(self) -> bool:
        """Whether it has not come beyond its first step."""
        return self._last[2] <= 1

    def note(self, *, away: bool) -> BeatNote:
        """What to send now.

        Args:
            away: The store was out of reach until a moment ago.
        """
        now = self.clock()
        step, at, count = self._last
        busy_until, what = self._busy_longest
        busy = max(busy_until - now, 0.0)
        if step is not None:
            if self._rated is not None and at > self._rated[1]:
                self._rate = (step - self._rated[0]) / (at - self._rated[1])
            if self._rated is None or at > self._rated[1]:
                self._rated = (step, at)
        age = max(now - max(at, self._busy_ended, min(busy_until, now)), 0.0)
        return BeatNote(
            round=self._number,
            step=step,
            age=age,
            first=count <= 1,
            busy=busy,
            what=what if busy else "",
            rate=self._rate,
            away=away,
            waits=any(now - since >= WAITS_AFTER for since in tuple(self._waits.values())),
        )
