"""The members of a round agree on one step, before which all of them leave.

A member that stops alone leaves the others in a collective that cannot complete. So when a node has to join or leave,
the members agree on a step: the largest step that any member has begun, plus one.

    coordinator: a node must join or leave       >  writes the question: which is the largest step you have begun?
    member:      its node sees the question      >  answers; the member begins no further step before the decision
    coordinator: every live member has answered  >  writes the decision: all leave before step `agreed_stop_step`

The node's thread answers at once, while the member computes in its own thread. The two threads share a `StepGate`. No
member may begin a step beyond the one in its answer. So both threads write first and then read: the member writes its
step, then reads whether it was asked; the node writes that it asked, then reads the step. At least one thread sees the
other's write; if the member sees that it was asked, it waits for the decision. (CPython keeps these accesses in order.)

A member that has begun no step, or has finished its body, answers None. If all members answer None, all leave at once;
but if newcomers are the only reason, a member with `on_waiting="wait"` may first finish its body, unless a second
decision follows, for a stronger reason.

If a member leaves before the agreed step, with its body unfinished, the round ends at once (`is_at_stop`).
"""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, ClassVar

from rdzv.core.stored import Prose, Stored
from rdzv.errors import RendezvousSettingsError
from store.records import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import SupportsIndex


STEP_MOST = 2**63  # -2**63 <= step < 2**63: a message carries 64 bits


class RoundStop(Stored, kw_only=True):
    """The question which steps a round's members have begun; later, in the same key, the decision where to stop."""

    called = "the step to stop at"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    round: int
    decided: bool = False  # True: this is the decision; False: the question
    step: int | None = None  # the decision: all members leave before this step; None: at once
    why: Prose = ""
    for_newcomers: bool = False  # True: nodes that wait to join are the only reason to leave
    revision: int = 0  # this record's revision, on which the next write is conditional


class Drain(Stored, kw_only=True):
    """An operator's request that a node leave."""

    called = "a drain"

    within: float  # seconds from this write after which the node leaves even mid-step
    reason: Prose = ""


class Resized(Stored, kw_only=True):
    """New numbers of nodes for a run, in force from the next round on."""

    called = "a resize"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    min_nodes: int  #: the fewest nodes that a round may have
    max_nodes: int
    reason: Prose = ""  #: the operator's reason; may be empty
    by: Prose = ""  #: the operator's name
    revision: int = 0  #: the revision of this write


class LastBegun(Stored, kw_only=True):
    """A member's answer: the largest step that it has begun in a round."""

    called = "a member's step"

    round: int
    step: int | None


def agreed_stop_step(answers: Mapping[str, int | None]) -> int | None:
    """Return the step before which all leave; None: at once, as no answer has a step."""
    begun = [step for step in answers.values() if step is not None]
    return max(begun) + 1 if begun else None


def as_step(step: SupportsIndex, name: str = "step") -> int:
    """Return a step as an `int`; raise `RendezvousSettingsError` unless it is an integer of at most 64 bits."""
    with contextlib.suppress(TypeError):
        number = operator.index(step)
        if -STEP_MOST <= number < STEP_MOST:
            return number
    raise RendezvousSettingsError(f"{name}={brief(step)} must be a whole number of at most 64 bits")


class StopNegotiation:
    """The coordinator's side of the agreement: it writes the question, and makes the decision from the answers.

    Each write is conditional on the last record seen, so that no two coordinators decide. A new coordinator continues
    from the question and the answers in the store (promise R7).
    """

    def __init__(self) -> None:
        self.has_written: bool = False  # True: this coordinator has written a question or decision
        self.has_read_all: bool = False  # all answers in the store
        self._answers: dict[str, LastBegun] = {}  # the last answer of each node, of any round
        self._asked: RoundStop | None = None  # the last record that this coordinator wrote

    def note_answer(self, node_id: str, begun: LastBegun | None) -> None:
        """Record a member's answer; None: all answers in the store have been read."""
        if begun is None:
            self.has_read_all = True
        else:
            self._answers[node_id] = begun

    def next_stop_record(
        self,
        round: int,
        standing: RoundStop | None,
        *,
        why: str,
        for_newcomers: bool,
        closing: bool,
        members: Collection[str],
        some_have_gone: bool,
    ) -> tuple[RoundStop, int] | None:
        """Return the record to write, and the revision that it replaces; None if none is due. Change nothing.

        `round` is the last round's number, `standing` the last record that this node has seen in the store. `why` says
        why all should leave; else it is empty. `members` are the live members that use steps. If the run is `closing`,
        and a member answered None or has gone, all leave at once: the others would wait for it in their next step.
        """
        if self._asked is not None and (standing is None or standing.revision < self._asked.revision):
            standing = self._asked  # the watch has not delivered this coordinator's own write yet
        seen = 0 if standing is None else standing.revision
        if standing is None or standing.round != round:
            return (RoundStop(round=round, why=why, for_newcomers=for_newcomers), seen) if why else None
        better = bool(why) and standing.for_newcomers and not for_newcomers  # a stronger reason
        if standing.decided:
            # The second decision, too, is to leave at once, as no answer has a step.
            return (RoundStop(round=round, decided=True, why=why), seen) if better and standing.step is None else None
        # The answer of a member that has left meanwhile counts, too: it may have begun a step with the others.
        answers = {who: begun.step for who, begun in tuple(self._answers.items()) if begun.round == round}
        if not self.has_read_all or any(node_id not in answers for node_id in members):
            return None
        step = None if closing and (None in answers.values() or some_have_gone) else agreed_stop_step(answers)
        why, for_newcomers = (why, False) if better else (standing.why, standing.for_newcomers)
        return RoundStop(round=round, decided=True, step=step, why=why, for_newcomers=for_newcomers), seen

    def note_written(self, stop: RoundStop) -> None:
        """Record that this coordinator has written `stop`, at its `revision`."""
        self._answers = {who: begun for who, begun in self._answers.items() if begun.round == stop.round}
        self._asked, self.has_written = stop, True


class StepGate:
    """The gate that a member passes at each step, and that its node closes by `close_gate`: see the module."""

    def __init__(self) -> None:
        self.begun: int | None = None  # the last `try_begin_step`'s step, begun or not
        self.at_end: bool = False  # True: the member's body has finished, and so has its last step
        self.refused: int | None = None  # the step that was not begun or not finished because the round was over
        self.decided: bool = False
        self.stop: int | None = None  # see `RoundStop.step`
        self.why: str = ""
        self.for_newcomers: bool = False  # see `RoundStop`
        self._asked = False

    def try_begin_step(self, step: int) -> bool:
        """Begin this step; return False if the gate is closed: then wait for the decision, and call `must_leave`."""
        self.begun, self.refused = step, None  # write `begun` before reading `_asked`: see the module
        return not self._asked

    def must_leave(self, step: int) -> bool:
        """Return True if the member leaves before this step; call this only after the decision."""
        assert self.decided, "callers wait for the decision first"
        return self.stop is None or step >= self.stop

    @property
    def is_at_stop(self) -> bool:
        """True if this member is at the agreed step or past its body, so that no member waits for it in a step."""
        if self.at_end or not self.decided:
            return self.at_end
        if self.stop is None:
            return self.begun is None and not self.for_newcomers  # all leave at once
        return self.begun is not None and self.begun >= self.stop

    @property
    def is_waited_for(self) -> bool:
        """True if the other members wait for this member in a step before the agreed step."""
        return self.stop is not None and not self.is_at_stop

    @property
    def last_finished_step(self) -> int | None:
        """The last step that this member has finished: -1 without any; None before `try_begin_step`."""
        if self.refused is not None:
            return max(self.refused - 1, -1)
        return None if self.begun is None else max(self.begun - (not self.at_end), -1)

    def note_interrupted(self) -> None:
        """Record that a call in the body has failed because the round is over, so the begun step is not finished."""
        if not self.at_end:
            self.refused = self.begun

    def note_body_end(self) -> None:
        """Record the body's end."""
        self.at_end = True

    def close_gate(self) -> int | None:
        """Close the gate; return the largest step that the member has begun; None without any, or after its body."""
        self._asked = True
        return None if self.at_end else self.begun

    def note_decision(self, stop: int | None, *, why: str = "", for_newcomers: bool = False) -> None:
        """Record the decision; a second one counts if only the first was for newcomers."""
        if not self.decided or (self.for_newcomers and not for_newcomers):
            self.stop, self.why, self.for_newcomers = stop, why, for_newcomers
            self.decided = self._asked = True
