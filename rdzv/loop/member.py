"""Shell: the loop over the rounds of a run, and a round for a member's body, as far as both twins share them.

`RoundLoop` goes from round to round. `MemberOfRound` is a round: the member in it, what has changed, and how the body
ends, over the few things that each twin does in its own way.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, get_args

from rdzv.config.config_errors import shown
from rdzv.core.round_life import Ending, EndKind, Outcome, gave_up
from rdzv.core.stopping import step_of
from rdzv.core.stuck.tally import Tally
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
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

    from rdzv.core.round import Participant
    from rdzv.core.stopping import StepGate
    from rdzv.node.node import Node

__all__ = ["BodyCalls", "MemberOfRound", "OnWaiting", "Options", "RoundLoop", "done"]

log: logging.Logger = escaping(logging.getLogger(__name__))

T = TypeVar("T")
SomeRound = TypeVar("SomeRound", bound="MemberOfRound")

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


async def done(work: Awaitable[T] | T) -> T:
    """Await what a handler has been asked for; what a blocking handler has answered is there already."""
    return await work if isinstance(work, Awaitable) else work


class RoundLoop(Generic[SomeRound]):
    """The loop over the rounds of a run, for both twins. Over a handler that blocks it is a coroutine that never waits.

    Args:
        make: Makes a round of the handler, of what `next_rendezvous` has given, and of this.
        handler: Either handler, which is connected.
        node: Its node.
        options: What the loop was asked for.
    """

    def __init__(self, make: Callable[..., SomeRound], handler: Any, node: Node, options: Options) -> None:
        self.node: Node = node
        self.options: Options = options
        self._make = make
        self._handler = handler
        self._was_open: bool | None = None  # so that a closing is the end of the loop, and no error; None before it
        self._finished = -1  # the last step of this node
        self.last: SomeRound | None = None  # the last round that it has given, or left

    async def next(self) -> SomeRound | None:
        """Leave the last round, meet again, and return the next one; None at the end of the loop.

        Raises:
            RunGivenUpError: A member has given the run up; or it has had as many rounds without a step as it may.
            RendezvousError: The next round was not reached, and a retry would not help.
        """
        if self.last is None:
            self._was_open = not await done(self._handler.is_closed())
            if self.options.progress is not None:
                self._finished = step_of(self.options.progress())
        else:
            self.last.check_entered()
            await self._leave(self.last)
        while not self.node.is_draining:
            self.node.progress = self._finished  # which the arrival tells the others
            try:
                info = await done(self._handler.next_rendezvous())
            except (RendezvousGracefulExitError, RendezvousClosedError) as error:
                self.end(error)
                return None
            await self._give_up_without_progress()
            round = self._make(self._handler, info, self)
            if await round.begin():
                self.last = round
                return round
            await self._leave(round)
        return None

    def end(self, error: RendezvousGracefulExitError | RendezvousClosedError) -> None:
        """End because the run is closed: without an error, unless it was given up, or closed before the loop began.

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

    async def _leave(self, round: SomeRound) -> None:
        """Note how far the round has brought this node and, if that is counted, the run."""
        self.last = round
        gate, progress = round.gate, self.options.progress
        # Coming up with a member that had finished more is no progress of the run.
        before = max(self._finished, -1 if round.newest is None else round.newest[1])
        if progress is not None:
            self._finished = step_of(progress())
        elif gate.begun is not None:
            self._finished = max(gate.begun - 1, -1)
        elif gate.finished is not None:
            self._finished = gate.finished
        achieved = round.has_got_on or (progress is not None and self._finished > before)

        def count(tally: bytes) -> bytes:
            return Tally.of(tally).after(round.number, failed=round.life.has_failed, achieved=achieved).pack()

        if self.options.no_progress:
            with contextlib.suppress(RendezvousError):  # the store is away; the next call says so, if it stays away
                await done(self._handler.change_tally(count))

    async def _give_up_without_progress(self) -> None:
        """Give the run up if it has had as many rounds without a step as it may.

        To be asked once the members have met, and so all of the last round have counted it: all come to one answer.
        """
        if not self.options.no_progress:
            return
        fruitless = Tally.of(await done(self._handler.change_tally(bytes))).fruitless  # which changes nothing
        if fruitless < self.options.no_progress:
            return
        reason = (
            f"the last rounds have failed before a step was finished: {fruitless} of them, one after the other "
            f"(no_progress={self.options.no_progress})"
        )
        await done(self._handler.give_up(reason, status=NO_PROGRESS_STATUS))
        message = f"run {self.node.run_id} is given up: {reason}"
        raise RunGivenUpError(message, reason=reason, given_up=True, status=NO_PROGRESS_STATUS)


class Busy:
    """A stretch of time in which a member is not expected to begin a step; enter it with `with` or `async with`."""

    def __init__(self, node: Node, membership: Membership, seconds: float, what: str) -> None:
        self._node = node
        self._beats = membership.beats
        self._seconds = seconds
        self._what = what
        self._tokens: list[object] = []

    def __enter__(self) -> None:
        self._tokens.append(self._beats.be_busy(self._seconds, self._what))
        self._node.send_steps()

    def __exit__(self, *_: object) -> None:
        self._beats.be_free(self._tokens.pop())

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
    _info: Any

    def __init__(self, handler: Any, loop: RoundLoop[Any]) -> None:
        node, membership, last = loop.node, loop.node.membership, loop.last
        assert membership is not None, "next_rendezvous has just made this node a member"
        round = membership.round
        self.number: int = round.number
        self.rank: int = membership.rank
        self.world_size: int = round.size
        self.node_id: str = node.node_id
        self.run_id: str = node.run_id
        self.bootstrap_address: tuple[str, int] = (round.host, round.port)
        self.previous: Previous | None = None if last is None else Previous(last.rank, *round.since)
        newest = round.newest
        self.newest: tuple[int, int] | None = newest
        self.gate: StepGate = membership.gate
        finished = node.progress  # as this member's arrival said, and as `newest` was chosen by
        self.lags: bool = newest is not None and finished is not None and 0 <= finished < newest[1]
        self._handler = handler
        self._node = node
        self._membership = membership
        self._is_entered = False
        waits = loop.options.on_waiting == "wait"
        self.life: Life = Life(node, membership, self._ended, lets_newcomers_wait=waits)

    async def begin(self) -> bool:
        """Make ready what the body needs, before the loop gives the round; False if it has ended meanwhile."""
        return True

    def _enter(self) -> None:
        """Enter the round, and hear from now on of what ends it."""
        if self._is_entered:
            raise RendezvousStateError("a round is entered once: the loop gives the next one")
        self._is_entered = True
        self.life.start()

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

    async def _in_node(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Do something in the node's loop."""
        return await done(self._handler.call(work))

    async def _release(self) -> None:  # noqa: B027  as a rule there is nothing
        """Let go of what `begin` has made ready, at the round's end, be it cancelled or not; perhaps twice."""

    async def _conclude(self, error: BaseException | None) -> bool:
        """Draw the consequence of the body's end; whether its error goes no further.

        A verdict not to go on that a group of tasks has raised is raised by itself, from the group.
        """
        try:
            outcome = await self.life.conclude(error, in_node=self._in_node, release=self._release)
            if outcome is not Outcome.MEET_AGAIN:
                verdict = gave_up(error)
                if verdict is not None and isinstance(error, ExceptionGroup):
                    raise verdict from error
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


class BodyCalls(MemberOfRound):
    """What a body may ask of its round. The blocking twin makes methods of these, which never have to wait."""

    @abstractmethod
    async def _until_decided(self) -> None:
        """Wait until the members have agreed, or the round has ended."""

    @abstractmethod
    async def _get_out(self) -> None:
        """End the body here, since the round is over."""

    async def check(self, step: SupportsIndex) -> None:
        """Begin a step, or leave the round together with all other members, before the same step.

        With nothing pending it costs no message. If the round is over, or ends here, the body is cancelled here; of the
        blocking twin, `RoundChanged` is raised, which leaving the block swallows.

        Args:
            step: The one that is about to begin; each time a larger one, any kind of whole number.
        """
        if self.life.ending is None:
            step = self._membership.beats.beat(step)
            if self.gate.passes(step):
                return
            if not self.gate.decided:
                await self._until_decided()
            if self.gate.decided:  # else the round has ended meanwhile
                if not (self.gate.leaves(step) or self.life.others_have_gone):
                    return
                self.life.end(Ending(kind=EndKind.AGREED, reason=self.gate.why))
        await self._get_out()

    async def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run, from round to round: the path of a checkpoint, a seed.

        Args:
            key: Its name in the run.
            data: A value of the store: within its limit, and kept until the run ends.

        Raises:
            RoundSupersededError: This node is no longer in the round.
        """
        await done(self._handler.keep(key, data, in_round=self.number))

    async def restore(self, key: str) -> bytes | None:
        """What any member has kept last under a name; None if nobody has."""
        kept: bytes | None = await done(self._handler.restore(key))
        return kept

    async def accuse(self, rank: int, why: str) -> None:
        """Say of another member that it does not answer, as a collective that has failed does; see `Handler.accuse`."""
        await done(self._handler.accuse(rank, why, in_round=self.number))

    async def participants(self) -> list[Participant]:
        """All members, by rank, with what each brought. This reads something of every member."""
        members: list[Participant] = await done(self._info.participants())
        return members
