"""The parts of a round, and of the loop over rounds, that the async and the blocking twin share."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, SupportsIndex, TypeVar, get_args

from rdzv.config.config_errors import brief
from rdzv.config.parameters import Parameter
from rdzv.config.value_types import duration, whole_number
from rdzv.core.round_life import Ending, EndKind, NextAfterWork, find_give_up_error
from rdzv.core.stopping import as_step
from rdzv.core.stuck.tally import RunCounts
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RendezvousStateError,
    RunGivenUpError,
)
from rdzv.loop.round_monitor import RoundMonitor
from rdzv.membership import Membership, Previous
from store.errors import NotPicklable
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.round import Participant
    from rdzv.core.stopping import StepGate
    from rdzv.node.node import Node

log: Final = make_logger(__name__)

T = TypeVar("T")
SomeRound = TypeVar("SomeRound", bound="MemberOfRound")

OnWaiting = Literal["now", "wait"]
"""How a body that never calls `check` is treated when nodes wait to join."""

NO_PROGRESS_STATUS: Final = 93  # the exit status of a run that `no_progress` ended; `--give-up-status`'s default
HAS_FAILED: Final = "an error or a cancellation has ended these rounds, and this node has left: call `rounds` again"
NO_PROGRESS: Final = Parameter("no_progress", whole_number(0))
SECONDS: Final = Parameter("seconds", duration())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The options of a loop; see `rdzv.rounds`. Invalid ones raise RendezvousSettingsError."""

    on_waiting: OnWaiting = "now"
    progress: Callable[[], SupportsIndex] | None = None
    no_progress: int = 0

    def __post_init__(self) -> None:
        if self.on_waiting not in get_args(OnWaiting):
            raise RendezvousSettingsError(f'on_waiting={brief(self.on_waiting)} must be "now" or "wait"')
        object.__setattr__(self, "no_progress", NO_PROGRESS.read(self.no_progress))


async def await_if_async(work: Awaitable[T] | T) -> T:
    """Await an async handler's result; return a blocking handler's unchanged."""
    return await work if isinstance(work, Awaitable) else work


class RoundLoop(Generic[SomeRound]):
    """The loop over a run's rounds, for both twins. With a blocking handler, the loop's coroutines never suspend."""

    def __init__(self, make: Callable[..., SomeRound], handler: Any, node: Node, options: LoopOptions) -> None:
        self.node: Node = node
        self.options: LoopOptions = options
        self._make = make
        self._handler = handler
        # If the run was open at the start, its closing ends the loop without an error. None: not known yet.
        self._was_open: bool | None = None
        self._finished = -1  # the last step that this node has finished; -1: none
        self.last: SomeRound | None = None  # this node's last round

    async def next(self) -> SomeRound | None:
        """Leave the last round, join the next, and return it; None once the run is over for this node."""
        if self.last is None:
            self._was_open = not await await_if_async(self._handler.is_closed())
            if self.options.progress is not None:
                self._finished = as_step(self.options.progress(), "progress()")
        else:
            self.last.require_left()
            await self._record_progress(self.last)
        while not self.node.is_draining:
            self.node.finished_step = self._finished  # other members read this value in this node's record
            try:
                info = await await_if_async(self._handler.next_rendezvous())
            except RendezvousGracefulExitError:
                return None
            except RendezvousClosedError as error:
                if error.given_up:
                    raise RunGivenUpError(str(error), reason=error.reason, given_up=True, status=error.status) from None
                if not self._was_open:
                    raise
                return None
            await self._give_up_without_progress()
            round = self._make(self._handler, info, self)
            if await round.prepare():
                self.last = round
                return round
            await self._record_progress(round)
        return None

    async def release(self) -> None:
        """Release the last round's preparations; needed if the loop was left before the round's block began."""
        if self.last is not None and not sys.is_finalizing():  # at Python's exit, other threads have ended
            await self.last._release_resources()

    async def _record_progress(self, round: SomeRound) -> None:
        """Record the last step that this node finished; with `no_progress`, count rounds without progress."""
        self.last = round
        gate, progress = round.gate, self.options.progress
        # Steps that another member had finished before this round do not count as progress in this round.
        before = max(self._finished, -1 if round.newest is None else round.newest[1])
        if progress is not None:
            self._finished = as_step(progress(), "progress()")
        elif gate.last_finished_step is not None:
            self._finished = gate.last_finished_step
        achieved = round.monitor.membership.beats.has_progressed or (progress is not None and self._finished > before)

        def count_round(tally: bytes) -> bytes:
            return RunCounts.of(tally).after(round.number, failed=round.monitor.has_failed, achieved=achieved).pack()

        if self.options.no_progress:
            with contextlib.suppress(RendezvousError):  # if the store stays unreachable, `next_rendezvous` raises
                await await_if_async(self._handler.change_counts(count_round))

    async def _give_up_without_progress(self) -> None:
        """Give the run up if too many rounds in a row failed without a finished step."""
        if not self.options.no_progress:
            return
        value = await await_if_async(self._handler.change_counts(bytes))  # `bytes` returns the tally unchanged
        fruitless = RunCounts.of(value).fruitless
        if fruitless < self.options.no_progress:
            return
        reason = (
            f"the last rounds have failed before a step was finished: {fruitless} of them, one after the other "
            f"(no_progress={self.options.no_progress})"
        )
        await await_if_async(self._handler.give_up(reason, status=NO_PROGRESS_STATUS))
        message = f"run {self.node.run_id} is given up: {reason}"
        raise RunGivenUpError(message, reason=reason, given_up=True, status=NO_PROGRESS_STATUS)


class Busy:
    """A period in which no member is judged by its steps, as one is busy; entered by `with` or `async with`."""

    def __init__(self, node: Node, membership: Membership, seconds: float, what: str) -> None:
        self._node = node
        self._beats = membership.beats
        self._seconds = seconds
        self._what = what
        self._tokens: list[object] = []

    def __enter__(self) -> None:
        self._tokens.append(self._beats.begin_busy(self._seconds, self._what))
        self._node.send_step_report()

    def __exit__(self, *_: object) -> None:
        self._beats.end_busy(self._tokens.pop())

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class MemberOfRound(NotPicklable, ABC):
    """The part of a round that the async and the blocking twin share.

    Attributes:
        store: The round's shared store.
        number: The round's number, from 0.
        rank: This member's rank, from 0.
        world_size: The number of members.
        node_id: This member's id.
        run_id: The run's id.
        bootstrap_address: Host and port on rank 0, the same for every member.
        previous: This node's last rank, and the changes since the run's previous round; None in the loop's first.
        newest: Rank and last finished step of the member that has finished the most; None if no step is finished.
        lags: True if this member has finished steps, but fewer than the member in `newest`.
        gate: Decides at each step if this member may begin the step.
        monitor: Watches for the round's end.
    """

    store: Any
    _handler: Any

    def __init__(self, handler: Any, info: Any, loop: RoundLoop[Any]) -> None:
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
        self.newest: tuple[int, int] | None = round.newest
        self.gate: StepGate = membership.gate
        finished = node.finished_step  # as in this member's record; `newest` is computed from all members' records
        self.lags: bool = round.newest is not None and finished is not None and 0 <= finished < round.newest[1]
        self.store = info.store
        self._info = info
        self._handler = handler
        self._node = node
        self._membership = membership
        self._is_entered = False
        self._misuse: RendezvousStateError | None = None  # set if the loop continued before this block was left
        waits = loop.options.on_waiting == "wait"
        self.monitor: RoundMonitor = RoundMonitor(node, membership, self._interrupt_body, lets_newcomers_wait=waits)

    async def prepare(self) -> bool:
        """Prepare the round before the loop yields it (torch: a process group); return False if the round has ended."""
        return True

    def _enter(self) -> None:
        if self._is_entered:
            raise RendezvousStateError("a round is entered once: the loop gives the next one")
        self._is_entered = True
        self.monitor.start()

    def require_left(self) -> None:
        """Raise an error unless this round was entered and left."""
        if not self._is_entered:
            raise RendezvousStateError("enter each round: write `async with round:` or `with round:` in the loop")
        if not self.monitor.stopped:
            self._misuse = RendezvousStateError(
                f"leave the block of {self!r} first: the loop gives one round at a time"
            )
            raise self._misuse

    @property
    def ending(self) -> Ending | None:
        """The round's ending for this member; None while the round continues."""
        return self.monitor.ending

    def beat(self, step: SupportsIndex) -> None:
        """Report that this member begins a step, as `check` does, but without agreeing on a stop.

        The report costs no message: it is sent with the node's next keep-alive. With `stall_timeout`, a member is
        lost if it begins no step for that long while others do.
        """
        self._membership.beats.beat(step)

    def busy(self, seconds: float, what: str = "") -> Busy:
        """Expect no step of any member for `seconds`: `async with round.busy(600, "checkpoint"):`, or `with`."""
        return Busy(self._node, self._membership, SECONDS.read(seconds), what)

    @abstractmethod
    def _interrupt_body(self, ending: Ending) -> None:
        """End the body's work, by cancellation or by errors of its waits; called in the node's thread."""

    async def _release_resources(self) -> None:
        """Release the preparations of `prepare` at the round's end, also if cancelled; may be called twice."""

    async def _handle_body_end(self, error: BaseException | None) -> bool:
        """Act on the body's end; return True to swallow its error. A `GiveUp` in an error group is raised alone."""
        try:
            outcome = await self.monitor.on_work_end(
                error, in_node=lambda work: await_if_async(self._handler.call(work)), release=self._release_resources
            )
            if outcome is not NextAfterWork.MEET_AGAIN:
                verdict = find_give_up_error(error)
                if verdict is not None and isinstance(error, ExceptionGroup):
                    raise verdict from error
                return False
        finally:
            try:
                await self._release_resources()
            finally:
                self.monitor.stop()
        if self._misuse is not None:  # the misuse has ended the loop, so there is no next round
            raise self._misuse
        why = self.ending.reason if self.ending is not None else error or "this member has finished"
        log.info("%s is over: %s%s", repr(self), why, f"; that caused {error!r}" if self.monitor.blames_others else "")
        return True

    def __repr__(self) -> str:
        return f"<round {self.number} of run {self.run_id}: rank {self.rank} of {self.world_size}>"


class MethodsForBody(MemberOfRound):
    """The methods that a round's body calls. In the blocking twin they never suspend, and become plain methods."""

    @abstractmethod
    async def _wait_for_stop_decision(self) -> None:
        """Wait until the members have agreed, or the round has ended."""

    @abstractmethod
    async def _leave_body(self) -> NoReturn:
        """End the body at this call, as the round is over."""

    async def check(self, step: SupportsIndex) -> None:
        """Begin a step, or leave the round together with all other members, before the same step.

        If no change is pending, the call costs no message. If the round is over, or ends at this step, the call cancels
        the body. The blocking twin, and a call from a task other than the body's, raise `RoundChanged` instead, which
        leaving the block swallows.

        Args:
            step: The step about to begin: an integer of any type, larger each time.
        """
        if self.monitor.stopped:
            await self._leave_body()
        if self.monitor.ending is None:
            step = self._membership.beats.beat(step)
            if self.gate.try_begin_step(step):
                return
            if not self.gate.decided:
                self._handler.check_usable()  # raises in a forked child, where no node would report the decision
                await self._wait_for_stop_decision()
            if self.gate.decided:  # otherwise the round ended without a decision
                if not (self.gate.must_leave(step) or self.monitor.has_ended_abruptly):
                    return
                self.monitor.note_ending(Ending(kind=EndKind.AGREED, reason=self.gate.why))
        self.gate.refused = as_step(step)
        await self._leave_body()

    async def keep(self, key: str, data: bytes) -> None:
        """Keep a small state of the run for later rounds; raise RoundSupersededError if this node is out of the round.

        The store keeps the data until the run ends, and limits its size.
        """
        await await_if_async(self._handler.keep(key, data, in_round=self.number))

    async def restore(self, key: str) -> bytes | None:
        """Return the data that any member has kept last under this key."""
        kept: bytes | None = await await_if_async(self._handler.restore(key))
        return kept

    async def accuse(self, rank: int, why: str) -> None:
        """Accuse another member of not answering, for example after a failed collective; see `Handler.accuse`."""
        await await_if_async(self._handler.accuse(rank, why, in_round=self.number))

    async def participants(self) -> list[Participant]:
        """Return all members, by rank, with address, payload and attributes; the cost grows with their number."""
        members: list[Participant] = await await_if_async(self._info.participants())
        return members
