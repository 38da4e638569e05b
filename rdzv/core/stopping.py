"""Pure: at which step all members of a round stop together.

A member that stops by itself leaves the others in a collective that cannot complete. So when somebody wants in or out,
the members agree on one step, before which all of them leave: the largest step that any has begun, plus one.

    coordinator: somebody wants in or out    >  asks            >  every member's node hears of it
    member:      the largest step it has begun                  >  answers, and from now on begins none without asking
    coordinator: every live member has answered  >  `stop_of`   >  every member's node hears of the step

A member's answer comes from its node, at once, while the member computes. `StepGate` is where the two meet: the member
passes it at each step, and its node closes it. What must hold is that no step is begun that the answer does not know.
Both sides write first and read then: the member notes the step and looks whether it was asked; the node notes that it
has asked and looks at the step. So at least one of them sees the other, and if it is the member, it waits for the
decision. (CPython's interpreter lock, or without one its per-object locks, make these single accesses happen in one
order.)

A member that has begun no step (its body never calls `check`, or has not yet) answers None. If all do, there is nothing
to agree on, and all may stop at once. Bodies may let newcomers wait; so where all were to stop at once for newcomers
alone, a better reason that comes up later is decided on, too. There is no other second decision.

Who leaves before the agreed step, and has not come to its end, leaves the others in a step that they cannot complete:
to them that is a loss. Its record says which of both it is (`StepGate.has_stopped`).
"""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, ClassVar

from rdzv.core.stored import Stored
from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import SupportsIndex

__all__ = ["Begun", "Drain", "Resized", "StepGate", "Stop", "step_of", "stop_of"]


STEP_MOST = 2**63  # what a message can carry


class Stop(Stored, kw_only=True):
    """The question to the members of a round, and then the answer to all of them; it stands in one key."""

    called = "the step to stop at"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    round: int  # the number of the round it is about
    # Whether this is the answer; until then each member's node is asked for the step it has begun.
    decided: bool = False
    step: int | None = None  # the step before which all leave; None: at once, since nobody has begun any
    why: str = ""  # what for, in words
    for_newcomers: bool = False  # whether nodes that wait to come in are the only reason
    revision: int = 0  # that of the writing, on which the next one is conditional


class Drain(Stored, kw_only=True):
    """A node is to leave."""

    called = "a drain"

    within: float  # seconds from when this was written; then it leaves, wherever the others are
    reason: str = ""  # as given by whoever wishes it, perhaps empty


class Resized(Stored, kw_only=True):
    """The run has got other numbers of nodes, which are in force from the next round on.

    Attributes:
        min_nodes: The fewest nodes that a round may have.
        max_nodes: The most.
        reason: As given by whoever resized it, perhaps empty.
        by: Who did.
        revision: That of the writing.
    """

    called = "a resize"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    min_nodes: int
    max_nodes: int
    reason: str = ""
    by: str = ""
    revision: int = 0


class Begun(Stored, kw_only=True):
    """A member's answer: the largest step that it has begun in a round; None if none."""

    called = "a member's step"

    round: int
    step: int | None


def stop_of(answers: Mapping[str, int | None]) -> int | None:
    """The step before which all leave; None if nobody has begun any, and all may leave at once."""
    begun = [step for step in answers.values() if step is not None]
    return max(begun) + 1 if begun else None


def step_of(step: SupportsIndex) -> int:
    """Return a step as a plain number, which every member can read.

    Raises:
        RendezvousSettingsError: It is no whole number, or one of more than 64 bits.
    """
    with contextlib.suppress(TypeError):
        number = operator.index(step)
        if -STEP_MOST <= number < STEP_MOST:
            return number
    raise RendezvousSettingsError(f"step={step!r:.80} must be a whole number of at most 64 bits")


class StepGate:
    """What one member passes at each step of a round, and what its node closes."""

    def __init__(self) -> None:
        self.begun: int | None = None  # the largest step that it has begun; None before the first, and at its end
        self.finished: int | None = None  # at the end of its body, the largest that it had begun; None if it had none
        self._at_end = False
        self.decided: bool = False  # whether the members have agreed
        self.stop: int | None = None  # the step before which all leave, once they have agreed; None: at once
        self.why: str = ""  # what they have agreed for, in words
        self.for_newcomers: bool = False  # whether nodes that wait to come in are the only reason
        self._asked = False
        self._on_decision: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------ the member's side

    def passes(self, step: int) -> bool:
        """Begin a step if nobody has asked; False if the decision has to be waited for, or is there: see `leaves`."""
        self.begun = step  # before the look at `_asked`: see above
        return not self._asked

    def leaves(self, step: int) -> bool:
        """Whether the member leaves before this step. To be asked once the members have agreed."""
        assert self.decided, "whoever asks has waited for the decision"
        return self.stop is None or step >= self.stop

    @property
    def has_stopped(self) -> bool:
        """Whether the member leaves nobody in a step: it has come to where all leave, or to the end of its body."""
        if self._at_end or not self.decided:
            return self._at_end
        if self.stop is None:
            return self.begun is None and not self.for_newcomers  # all leave at once
        return self.begun is not None and self.begun >= self.stop

    def finish(self) -> None:
        """The body has come to its end: the member begins no step any more, and holds up nobody who stops."""
        self.finished, self.begun, self._at_end = self.begun, None, True

    def on_decision(self, callback: Callable[[], None] | None) -> None:
        """Call back once the members have agreed; here, if they have; from the node's thread, if not yet."""
        self._on_decision = callback
        if callback is not None and self.decided:
            callback()

    # ------------------------------------------------------------------------------------------ the node's side

    def ask(self) -> int | None:
        """Close the gate; which step the member has begun. It begins no later one before the decision is there."""
        self._asked = True
        return self.begun

    def decide(self, stop: int | None, *, why: str = "", for_newcomers: bool = False) -> None:
        """The members have agreed; perhaps once more, if they were to leave at once, and for newcomers."""
        self.stop, self.why, self.for_newcomers = stop, why, for_newcomers
        self.decided = self._asked = True
        callback = self._on_decision
        if callback is not None:
            callback()
