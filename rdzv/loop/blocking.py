"""One loop over a run's rounds, for blocking callers: `rdzv.sync.rounds`.

A body that blocks cannot be cancelled. So when a round has ended, the next `check` raises `RoundChanged`. Unless the
members agreed to leave, every wait in `round.store` raises `MembersLostError`, or `RoundChanged` if no member is lost.
Leaving the round's `with` block swallows `RoundChanged` and `MembersLostError`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RoundChanged, mark_run
from rdzv.loop.member import HAS_FAILED, LoopOptions, MemberOfRound, MethodsForBody, RoundLoop
from store.calls import blocking, run_synchronously
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rdzv.core.round_life import Ending
    from rdzv.node.blocking_handler import Handler
    from rdzv.shared_store.store import BlockingSharedStore

SomeRound = TypeVar("SomeRound", bound="Round")


def iterate_rounds(
    make: Callable[..., SomeRound], connecting: AbstractContextManager[Handler], options: LoopOptions
) -> Generator[SomeRound, None, None]:
    """Yield a run's rounds, inside the handler's context."""
    return _RoundGenerator(_blocking_rounds(make, connecting, options))


class _RoundGenerator(Generator[SomeRound, None, None]):
    """Rounds that raise if continued after an error: an ended generator looks like an ended run."""

    def __init__(self, rounds: Generator[SomeRound, None, None]) -> None:
        self._rounds, self._has_failed = rounds, False

    def send(self, value: None) -> SomeRound:
        if self._has_failed:
            raise RendezvousStateError(HAS_FAILED)
        try:
            return self._rounds.send(value)
        except BaseException as error:
            self._has_failed = cast("Any", self._rounds).gi_frame is None and not isinstance(error, StopIteration)
            raise

    def throw(self, *args: Any) -> SomeRound:
        return self._rounds.throw(*args)


def _blocking_rounds(
    make: Callable[..., SomeRound], connecting: AbstractContextManager[Handler], options: LoopOptions
) -> Generator[SomeRound, None, None]:
    with connecting as handler:
        node = handler.node
        if node is None:
            raise RendezvousSettingsError(f"the backend of run {handler.run_id} is a third party's, and has no rounds")
        loop = RoundLoop(make, handler, node, options)
        try:
            while (round := run_synchronously(loop.next())) is not None:
                yield round
        finally:
            run_synchronously(loop.release())


class Round(MemberOfRound):
    """One round, for one of its members; made by `rdzv.sync.rounds`."""

    store: BlockingSharedStore
    _handler: Handler

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self.gate.note_body_end()
        return run_synchronously(self._handle_body_end(error))

    def _interrupt_body(self, ending: Ending) -> None:
        """Unless the members agreed to leave, end waits in the round's store: awaited keys may never come."""
        if ending.is_abrupt:
            self.store.end_waits()

    async def _wait_for_stop_decision(self) -> None:
        known = Flag()
        self._membership.notify_once(lambda: self.gate.decided or self.monitor.is_over or None, lambda _: known.set())
        known.wait()

    async def _leave_body(self) -> NoReturn:
        why = "its body has ended" if self.monitor.ending is None else self.monitor.ending.reason
        raise mark_run(self.run_id, RoundChanged(f"{self!r} is over: {why}"))

    @property
    def _async_view(self) -> MethodsForBody:
        return cast("MethodsForBody", self)  # this object has all methods that `MethodsForBody` needs

    check = blocking(MethodsForBody.check)
    keep = blocking(MethodsForBody.keep)
    restore = blocking(MethodsForBody.restore)
    accuse = blocking(MethodsForBody.accuse)
    participants = blocking(MethodsForBody.participants)
