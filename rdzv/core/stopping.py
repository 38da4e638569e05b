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

from rdzv.core.stored import Prose, Stored
from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import SupportsIndex

__all__ = ["Agreement", "Begun", "Drain", "Resized", "StepGate", "Stop", "step_of", "stop_of"]


STEP_MOST = 2**63  # what a message can carry


class Stop(Stored, kw_only=True):
    """The question to the members of a round, and then the answer to all of them; it stands in one key."""

    called = "the step to stop at"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    round: int  # the number of the round it is about
    # Whether this is the answer; until then each member's node is asked for the step it has begun.
    decided: bool = False
    step: int | None = None  # the step before which all leave; None: at once, since nobody has begun any
    why: Prose = ""  # what for, in words
    for_newcomers: bool = False  # whether nodes that wait to come in are the only reason
    revision: int = 0  # that of the writing, on which the next one is conditional


class Drain(Stored, kw_only=True):
    """A node is to leave."""

    called = "a drain"

    within: float  # seconds from when this was written; then it leaves, wherever the others are
    reason: Prose = ""  # as given by whoever wishes it, perhaps empty


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
    reason: Prose = ""
    by: Prose = ""
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


class Agreement:
    """The coordinator's side: what the members of its round are asked, what they have answered, and what follows.

    The question and the decision stand in one key. Each is written over what this coordinator has seen there: a node
    whose watch was reset reads but the last of what was written, so there must not be two decisions to choose from. A
    coordinator that takes over finds the question, and what has been answered, and goes on from there (promise R7).

    Attributes:
        listens: Whether anything was asked, so that answers are to be listened for.
        hears: Whether all that was answered before has been heard.
    """

    def __init__(self) -> None:
        self.listens: bool = False
        self.hears: bool = False
        self._answers: dict[str, Begun] = {}  # the last of each node, of whichever round
        self._asked: Stop | None = None  # the last question, or decision, that this coordinator has written

    def answered(self, node_id: str, begun: Begun | None) -> None:
        """Note what a member has answered; without an answer, that all earlier ones are known."""
        if begun is None:
            self.hears = True
        else:
            self._answers[node_id] = begun

    def next(
        self,
        round: int,
        standing: Stop | None,
        *,
        why: str,
        for_newcomers: bool,
        closing: bool,
        members: Collection[str],
        some_have_gone: bool,
    ) -> tuple[Stop, int] | None:
        """Return what is to be written, and over which revision of the key; None if nothing is. Change nothing.

        Args:
            round: The number of the round that stands.
            standing: What stands in the store, as far as this node has heard.
            why: Why all should leave, in words; empty if nobody wants in or out.
            for_newcomers: Whether nodes that wait to come in are the only reason.
            closing: Whether the run is closed. Who has begun no step leaves it at once: then so do all, since those who
                have begun their first would wait in it for the others.
            members: Who is still in the round, and answers; who has gone is not waited for.
            some_have_gone: Whether anybody of it has.
        """
        if self._asked is not None and (standing is None or standing.revision < self._asked.revision):
            standing = self._asked  # the watch is about to bring it
        seen = 0 if standing is None else standing.revision
        if standing is None or standing.round != round:
            return (Stop(round=round, why=why, for_newcomers=for_newcomers), seen) if why else None
        better = bool(why) and standing.for_newcomers and not for_newcomers  # a better reason has come up meanwhile
        if standing.decided:
            # Nobody had begun a step, and nobody begins one now: those who let newcomers wait stop at once, too.
            return (Stop(round=round, decided=True, why=why), seen) if better and standing.step is None else None
        # Also the answer of one who has left since counts: it may have begun that step with the others.
        answers = {who: begun.step for who, begun in tuple(self._answers.items()) if begun.round == round}
        if not self.hears or any(node_id not in answers for node_id in members):
            return None
        step = stop_of(answers)
        if closing and (None in answers.values() or some_have_gone):
            step = None
        why, for_newcomers = (why, False) if better else (standing.why, standing.for_newcomers)
        return Stop(round=round, decided=True, step=step, why=why, for_newcomers=for_newcomers), seen

    def wrote(self, stop: Stop) -> None:
        """It was written, at its revision."""
        self._answers = {who: begun for who, begun in self._answers.items() if begun.round == stop.round}
        self._asked, self.listens = stop, True


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

    # ------------------------------------------------------------------------------------------ the node's side

    def ask(self) -> int | None:
        """Close the gate; which step the member has begun. It begins no later one before the decision is there."""
        self._asked = True
        return self.begun

    def decide(self, stop: int | None, *, why: str = "", for_newcomers: bool = False) -> None:
        """The members have agreed; perhaps once more, if they were to leave at once, and for newcomers."""
        if not self.decided or (self.for_newcomers and not for_newcomers):
            self.stop, self.why, self.for_newcomers = stop, why, for_newcomers
            self.decided = self._asked = True
