"""What a round offers to a member's body, awaited or blocking: who it is, what has changed, and how the body ends.

Both twins of the loop share it. `SoFar` is where a node stands between two rounds. What follows from the end of a body
is `RoundLife`'s to say; `MemberOfRound` does it, over a few things that each twin does in its own way.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from rdzv.config.config_errors import shown
from rdzv.core.round_life import Act, Ending
from rdzv.core.stopping import step_of
from rdzv.core.stuck.tally import Tally
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RendezvousStateError,
    RunGivenUpError,
)
from rdzv.loop.life import Life
from rdzv.membership import Membership, Previous
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import SupportsIndex

    from rdzv.core.stopping import StepGate
    from rdzv.node.node import Node

__all__ = ["MemberOfRound", "OnWaiting", "Options", "SoFar", "change_nothing"]

log: logging.Logger = escaping(logging.getLogger(__name__))

OnWaiting = Literal["now", "wait"]
"""What becomes of a body that never calls `check` when nodes wait to come in."""

NO_PROGRESS_STATUS: Final = 93  # as `--give-up-status` of `rdzv run`, which it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a loop was asked for; `rdzv.rounds` says what each means.

    Raises:
        RendezvousSettingsError: It is nothing that a loop can do.
    """

    on_waiting: OnWaiting = "now"
    progress: Callable[[], SupportsIndex] | None = None
    no_progress: int = 0

    def __post_init__(self) -> None:
        if self.on_waiting not in get_args(OnWaiting):
            raise RendezvousSettingsError(f'on_waiting={shown(self.on_waiting)} must be "now" or "wait"')
        if self.no_progress < 0:
            raise RendezvousSettingsError(
                f"no_progress={shown(self.no_progress)} must be a number of rounds, or 0 for as many as it takes"
            )


def change_nothing(tally: bytes) -> bytes:
    """What `change_tally` is given by who only reads it."""
    return tally


class SoFar:
    """Where a node stands between the rounds of a run, for both twins of the loop.

    Args:
        node: Whose rounds they are.
        options: What the loop was asked for.
        was_open: The run was not closed when the loop began, so that a closing is the end of the loop, and no error.
    """

    def __init__(self, node: Node, options: Options, *, was_open: bool) -> None:
        self.node: Node = node
        self.options: Options = options
        self._was_open = was_open
        self._finished: int | None = None  # the last step, if it is known
        self._last: MemberOfRound | None = None
        self._has_got_on = False

    def goes_on(self) -> bool:
        """Whether to meet again: then the node says how far it has come, in its arrival."""
        if self.node.is_draining:
            return False
        self.node.part.progress = -1 if self._finished is None else self._finished
        return True

    def end(self, error: RendezvousGracefulExitError | RendezvousClosedError) -> None:
        """The run is closed: the loop ends, with this call's error if there is one.

        Raises:
            RunGivenUpError: A member has given the run up.
            RendezvousClosedError: The run was closed before the loop began.
        """
        if not isinstance(error, RendezvousClosedError):
            return
        if error.given_up:
            raise RunGivenUpError(str(error), reason=error.reason, given_up=True, status=error.status) from None
        if not self._was_open:
            raise error

    @property
    def membership(self) -> Membership:
        """Of the round that this node has just become a member of."""
        membership = self.node.membership
        assert membership is not None, "next_rendezvous has just made this node a member"
        return membership

    @property
    def last_rank(self) -> int | None:
        """Which rank this node had in the round before; None if there was none."""
        return None if self._last is None else self._last.rank

    def left(self, round: MemberOfRound) -> None:
        """The loop has come back from this round, which it should have entered."""
        self._last = round
        before, gate, progress = self._finished, round.gate, self.options.progress
        if progress is not None:
            self._finished = step_of(progress())
        elif gate.begun is not None:
            self._finished = max(gate.begun - 1, -1)
        elif gate.finished is not None:
            self._finished = gate.finished
        self._has_got_on = round.has_got_on or (progress is not None and self._finished != before)

    # ------------------------------------------------------------------------------------------ rounds without a step

    @property
    def counts(self) -> bool:
        """Whether rounds in which no step was finished are counted."""
        return self.options.no_progress > 0

    def count(self, tally: bytes) -> bytes:
        """What the run has counted, with the round that this member has just left."""
        last = self._last
        assert last is not None, "it has left one"
        return Tally.of(tally).after(last.number, failed=last.life.has_failed, achieved=self._has_got_on).pack()

    def check(self, tally: bytes) -> RunGivenUpError | None:
        """What this loop ends with, if the run has had as many rounds without a step as it may.

        To be asked once the members have met, and so all of the last round have counted it: all come to one answer.
        """
        fruitless = Tally.of(tally).fruitless
        if fruitless < self.options.no_progress:
            return None
        reason = (
            f"the last rounds have failed before a step was finished: {fruitless} of them, one after the other "
            f"(no_progress={self.options.no_progress})"
        )
        message = f"run {self.node.run_id} is given up: {reason}"
        return RunGivenUpError(message, reason=reason, given_up=True, status=NO_PROGRESS_STATUS)


class Busy:
    """A stretch of time in which a member is not expected to begin a step; enter it with `with` or `async with`."""

    def __init__(self, node: Node, membership: Membership, seconds: float, what: str) -> None:
        self._node = node
        self._beats = membership.beats
        self._seconds = seconds
        self._what = what

    def __enter__(self) -> None:
        self._beats.be_busy(self._seconds, self._what)
        self._node.part.own_beats.send_from(self._node.loop)

    def __exit__(self, *_: object) -> None:
        self._beats.be_free()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class MemberOfRound(ABC):
    """What both twins of a round have.

    Attributes:
        store: What the members share.
        number: The round's number, from 0.
        rank: This member's place, from 0.
        world_size: How many members there are.
        node_id: This member.
        run_id: Which run.
        bootstrap_address: Host and port on rank 0, the same for every member.
        previous: What has changed since the last round this node was in; None in its first.
        newest: Rank and last finished step of the member who has finished the most; None if nobody has finished any.
        lags: Whether this member has finished steps, but fewer than the newest.
        gate: What this member passes at each step.
        life: What ends it, and what follows.
    """

    store: Any
    _handler: Any

    def __init__(self, so_far: SoFar) -> None:
        node, membership, last_rank = so_far.node, so_far.membership, so_far.last_rank
        round = membership.round
        self.number: int = round.number
        self.rank: int = membership.rank
        self.world_size: int = round.size
        self.node_id: str = node.node_id
        self.run_id: str = node.run_id
        self.bootstrap_address: tuple[str, int] = (round.host, round.port)
        self.previous: Previous | None = None if last_rank is None else Previous(last_rank, *round.since)
        newest = round.newest
        self.newest: tuple[int, int] | None = newest
        self.gate: StepGate = membership.gate
        finished = node.part.progress  # as this member's arrival said, and as `newest` was chosen by
        self.lags: bool = newest is not None and finished is not None and 0 <= finished < newest[1]
        self._node = node
        self._membership = membership
        self._is_entered = False
        waits = so_far.options.on_waiting == "wait"
        self.life: Life = Life(node, membership, self._ended, lets_newcomers_wait=waits)

    def _enter(self) -> None:
        if self._is_entered:
            raise RendezvousStateError("a round is entered once: the loop gives the next one")
        self._is_entered = True

    def check_entered(self) -> None:
        """Complain of a loop that asks for the next round before it has entered this one."""
        if not self._is_entered:
            raise RendezvousStateError(
                "a round is to be entered: write `async with round:` or `with round:` in the loop"
            )

    @property
    def ending(self) -> Ending | None:
        """Why the round has ended for this member; None while it goes on."""
        return self.life.ending

    @property
    def has_got_on(self) -> bool:
        """Whether this member has finished a step in it, as far as `check` and `beat` say, or come to its end."""
        return self._membership.beats.got_on

    def beat(self, step: SupportsIndex) -> None:
        """Say that this member begins a step, where there is nothing to agree upon; `check` says it, too.

        It costs no message: it goes with the node's next keep-alive. With `stall_timeout`, a member that begins no step
        for so long while others do is lost.
        """
        self._membership.beats.beat(step)

    def busy(self, seconds: float, what: str = "") -> Busy:
        """Expect no step for at most so long: `async with round.busy(600, "checkpoint"):`, or `with`.

        Nobody of the round is taken for stuck meanwhile: the others may be waiting for this member.
        """
        return Busy(self._node, self._membership, seconds, what)

    @abstractmethod
    def _ended(self, ending: Ending) -> None:
        """Get the body out of the round; from the node's thread."""

    @abstractmethod
    async def _in_node(self, work: Coroutine[Any, Any, Act]) -> Act:
        """Do something in the node's loop. For those who block it is over before there is anything to wait for."""

    async def _release(self) -> None:  # noqa: B027  as a rule there is nothing
        """Let go of what `begin` has made ready, at the round's end, be it cancelled or not; perhaps twice."""

    async def _conclude(self, error: BaseException | None) -> bool:
        """Draw the consequence of the body's end; whether its error goes no further."""
        try:
            act = await self.life.conclude(error, in_node=self._in_node, let_go=self._release)
            if act is not Act.MEET_AGAIN:
                return False
        finally:
            try:
                await self._release()
            finally:
                self.life.stop()
        log.info("%s", self._closing_word(error))
        return True

    def _closing_word(self, error: BaseException | None) -> str:
        """What the log says of the end of the body."""
        ending = self.ending
        why = ending.reason if ending is not None else error or "this member has finished"
        whose = f"; {error!r} has come of that" if self.life.blames_others else ""
        return f"{self!r} is over: {why}{whose}"

    def __repr__(self) -> str:
        return f"<round {self.number} of run {self.run_id}: rank {self.rank} of {self.world_size}>"
