"""Pure: the members of a round agree on one step, before which all of them leave.

A member that stops alone leaves the others in a collective that cannot complete. So when a node has to join or leave,
the members agree on a step: the largest that any member has begun, plus one.

    coordinator: a node must join or leave          >  asks         >  each member's node sees the question
    member:      the largest step it has begun      >  answers, and begins no further step until the decision
    coordinator: every live member has answered     >  `stop_of`    >  each member's node sees the step

A member's node answers at once, while the member computes. The member passes the `StepGate` at each step, and its node
closes the gate. No member may begin a step that its answer does not cover, so both sides write first and read second:
the member writes its step and reads whether it was asked; the node writes that it asked and reads the step. At least
one of them sees the other; if the member does, it waits for the decision. (CPython's interpreter lock, or its
per-object locks, keep these single accesses in one order.)

A member that has begun no step answers None. If all answer None, all may leave at once. A body may make newcomers
wait; so if all were to leave at once for newcomers only, a stronger reason leads to a second decision. No other second
decision exists.

A member that leaves before the agreed step, with its body unfinished, counts as a loss for the others. Its record says
so (`StepGate.has_stopped`).
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


STEP_MOST = 2**63  # the largest that a message can carry


class Stop(Stored, kw_only=True):
    """The question to the members of a round, later replaced by the decision, in the same key."""

    called = "the step to stop at"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    round: int  # the number of the round
    # True for the decision; False while each member's node is asked for its largest begun step.
    decided: bool = False
    step: int | None = None  # the step before which all leave; None: at once, as no member has begun any
    why: Prose = ""  # the reason, in words
    for_newcomers: bool = False  # True if waiting nodes are the only reason
    revision: int = 0  # of this write; the next write is conditional on it


class Drain(Stored, kw_only=True):
    """A request that a node leaves."""

    called = "a drain"

    within: float  # seconds from this write, after which it leaves at any step
    reason: Prose = ""  # from the operator; may be empty


class Resized(Stored, kw_only=True):
    """New numbers of nodes of the run, in force from the next round on."""

    called = "a resize"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    min_nodes: int  #: the fewest nodes that a round may have
    max_nodes: int  #: the most
    reason: Prose = ""  #: from the operator; may be empty
    by: Prose = ""  #: the operator's name
    revision: int = 0  #: the revision of this write


class Begun(Stored, kw_only=True):
    """A member's answer: the largest step that it has begun in a round, or None."""

    called = "a member's step"

    round: int
    step: int | None


def stop_of(answers: Mapping[str, int | None]) -> int | None:
    """Return the step before which all leave; None if no member has begun any, and all may leave at once."""
    begun = [step for step in answers.values() if step is not None]
    return max(begun) + 1 if begun else None


def step_of(step: SupportsIndex) -> int:
    """Return a step as a plain number; raise `RendezvousSettingsError` unless it is an integer of at most 64 bits."""
    with contextlib.suppress(TypeError):
        number = operator.index(step)
        if -STEP_MOST <= number < STEP_MOST:
            return number
    raise RendezvousSettingsError(f"step={step!r:.80} must be a whole number of at most 64 bits")


class Agreement:
    """The coordinator's side: the question to the members of its round, their answers, and the decision.

    Question and decision share a key. Each write is conditional on the last value seen: a node whose watch was reset
    reads the last value only, so there must not be two decisions. A new coordinator continues from the question and the
    answers in the store (promise R7).

    Attributes:
        listens: True once anything was asked, so that answers are read.
        hears: True once all earlier answers were read.
    """

    def __init__(self) -> None:
        self.listens: bool = False
        self.hears: bool = False
        self._answers: dict[str, Begun] = {}  # the last one of each node, of any round
        self._asked: Stop | None = None  # the last question or decision that this coordinator wrote

    def answered(self, node_id: str, begun: Begun | None) -> None:
        """Record a member's answer; None says that all earlier answers were read."""
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
        """Return the record to write, and the key's revision that it replaces, or None. Changes nothing.

        Args:
            round: The number of the current round.
            standing: The record in the store, as far as this node has seen.
            why: Why all should leave, in words; empty if no node has to join or leave.
            for_newcomers: True if waiting nodes are the only reason.
            closing: True if the run is closed. Members without a step leave at once; others would wait for them in a
                step.
            members: The members that are still in the round and will answer.
            some_have_gone: True if a member has gone.
        """
        if self._asked is not None and (standing is None or standing.revision < self._asked.revision):
            standing = self._asked  # the watch will deliver it soon
        seen = 0 if standing is None else standing.revision
        if standing is None or standing.round != round:
            return (Stop(round=round, why=why, for_newcomers=for_newcomers), seen) if why else None
        better = bool(why) and standing.for_newcomers and not for_newcomers  # a stronger reason has come up
        if standing.decided:
            # No member had begun a step, and none begins one now: bodies that make newcomers wait stop at once, too.
            return (Stop(round=round, decided=True, why=why), seen) if better and standing.step is None else None
        # The answer of a member that has left since counts too: it may have begun that step with the others.
        answers = {who: begun.step for who, begun in tuple(self._answers.items()) if begun.round == round}
        if not self.hears or any(node_id not in answers for node_id in members):
            return None
        step = stop_of(answers)
        if closing and (None in answers.values() or some_have_gone):
            step = None
        why, for_newcomers = (why, False) if better else (standing.why, standing.for_newcomers)
        return Stop(round=round, decided=True, step=step, why=why, for_newcomers=for_newcomers), seen

    def wrote(self, stop: Stop) -> None:
        """Record that this was written, with its revision."""
        self._answers = {who: begun for who, begun in self._answers.items() if begun.round == stop.round}
        self._asked, self.listens = stop, True


class StepGate:
    """The gate that a member passes at each step of a round, and that its node closes."""

    def __init__(self) -> None:
        self.begun: int | None = None  # the largest begun step; None before the first
        self.at_end: bool = False  # the body has finished, and with it the largest begun step
        self.decided: bool = False  # True once the members have agreed
        self.stop: int | None = None  # the agreed step before which all leave; None: at once
        self.why: str = ""  # the reason, in words
        self.for_newcomers: bool = False  # True if waiting nodes are the only reason
        self._asked = False

    # ------------------------------------------------------------------------------------------ the member's side

    def passes(self, step: int) -> bool:
        """Begin a step if the gate is open; return False if it was asked or has decided: see `leaves`."""
        self.begun = step  # before `_asked` is read: see the module
        return not self._asked

    def leaves(self, step: int) -> bool:
        """Return True if the member leaves before this step. Call it after the decision only."""
        assert self.decided, "whoever asks has waited for the decision"
        return self.stop is None or step >= self.stop

    @property
    def has_stopped(self) -> bool:
        """Return True if no member waits for it in a step: it is at the agreed step or past its body."""
        if self.at_end or not self.decided:
            return self.at_end
        if self.stop is None:
            return self.begun is None and not self.for_newcomers  # all leave at once
        return self.begun is not None and self.begun >= self.stop

    def finish(self) -> None:
        """Record the end of the body: the member begins no step any more and delays no agreement."""
        self.at_end = True

    # ------------------------------------------------------------------------------------------ the node's side

    def ask(self) -> int | None:
        """Close the gate until the decision; return the largest step that the member has begun, None after its body."""
        self._asked = True
        return None if self.at_end else self.begun

    def decide(self, stop: int | None, *, why: str = "", for_newcomers: bool = False) -> None:
        """Record the decision; a second one may follow if all were to leave at once for newcomers."""
        if not self.decided or (self.for_newcomers and not for_newcomers):
            self.stop, self.why, self.for_newcomers = stop, why, for_newcomers
            self.decided = self._asked = True
