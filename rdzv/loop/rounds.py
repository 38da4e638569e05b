"""One loop over a run's rounds, for async callers: `rdzv.rounds`.

A round's body ends in one of these ways:

    a member is lost, or leaves mid-step  the body is cancelled at once; the next round follows
    a node wants to join or leave         all members leave at the same `check`; the next round follows
    the body finishes                     this member waits for the others to finish; then the run is closed
    the body raises `GiveUp`              the run is closed everywhere, with its reason; the loop raises it
    the body raises anything else         the loop raises it, and the node leaves; but if members have gone, the
                                          next round follows
    the run is closed                     the loop ends
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, TypeVar, Unpack, cast

import anyio
from anyio.lowlevel import checkpoint

from rdzv.backends.builtin import handler_for_url
from rdzv.config.config_errors import brief, refuse
from rdzv.errors import RendezvousStateError, RoundChanged, mark_run
from rdzv.loop.member import HAS_FAILED, LoopOptions, MethodsForBody, OnWaiting, RoundLoop
from rdzv.node.handler import Handler
from rdzv.node.link.wakeup import ThreadSafeWakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rdzv.config.overrides import Overrides
    from rdzv.core.round_life import Ending
    from rdzv.membership import RendezvousInfo
    from rdzv.shared_store.store import SharedStore

SomeRound = TypeVar("SomeRound", bound="Round")


def rounds(
    url: str,
    *,
    on_waiting: OnWaiting = "now",
    progress: Callable[[], SupportsIndex] | None = None,
    no_progress: int = 0,
    **overrides: Unpack[Overrides],
) -> AsyncGenerator[Round, None]:
    """Take part in a run, round after round, until it is closed.

    Args:
        url: As for `rdzv.connect`.
        on_waiting: When nodes wait to join, a body that never calls `check` is cancelled at once (`now`), or left
            alone until the round ends otherwise (`wait`). A body that calls `check` leaves at its next `check`.
        progress: Returns the last step that this node has finished, -1 for none; needed if the steps given to `check`
            do not show it. `progress` is called before the first round, and after each.
        no_progress: The run is given up everywhere after this many rounds in a row that ended by a failure or a loss
            before any member had finished a step; 0: never. Rounds with an announced end do not count.
        overrides: As for `rdzv.connect`.

    Raises:
        GiveUp: The body has raised `GiveUp`.
        RunGivenUpError: The body of another member has raised `GiveUp`, or there was no progress.
        RendezvousError: The next round was not reached, and a retry would not help.
    """
    options = LoopOptions(on_waiting=on_waiting, progress=progress, no_progress=no_progress)
    return iterate_rounds(Round, make_handler(url, overrides), options)


def iterate_rounds(
    make: Callable[..., SomeRound], handler: Handler, options: LoopOptions
) -> AsyncGenerator[SomeRound, None]:
    """Yield a run's rounds, made by `make`; enter the handler, and close it in the end."""
    return _RoundGenerator(_iterate_rounds(make, handler, options))


class _RoundGenerator(AsyncGenerator[SomeRound, None]):
    """Rounds that raise if continued after an error or a cancellation: an ended generator looks like an ended run."""

    def __init__(self, rounds: AsyncGenerator[SomeRound, None]) -> None:
        self._rounds, self._has_failed = rounds, False

    async def asend(self, value: None) -> SomeRound:
        if self._has_failed:
            raise RendezvousStateError(HAS_FAILED)
        try:
            return await self._rounds.asend(value)
        except BaseException as error:
            # A second call beside a first one fails without ending the generator.
            self._has_failed = cast("Any", self._rounds).ag_frame is None and not isinstance(error, StopAsyncIteration)
            raise

    async def athrow(self, *args: Any) -> SomeRound:
        return await self._rounds.athrow(*args)

    async def aclose(self) -> None:
        await self._rounds.aclose()


def make_handler(url: str, overrides: Mapping[str, Any]) -> Handler:
    """Return a URL's built-in handler, unconnected; raise RendezvousSettingsError for a wrong URL or other backend."""
    handler = handler_for_url(url, overrides)
    if not isinstance(handler, Handler):
        what = f"the backend of {brief(url.partition('?')[0])} is a third party's"
        refuse(f"{what}, and has neither rounds nor a store to open; use tcp or etcd")
    return handler


async def _iterate_rounds(
    make: Callable[..., SomeRound], handler: Handler, options: LoopOptions
) -> AsyncGenerator[SomeRound, None]:
    try:
        async with handler:
            loop = RoundLoop(make, handler, handler.node, options)
            try:
                while (round := await loop.next()) is not None:
                    yield round
            finally:
                await loop.release()
    except GeneratorExit:
        await handler.aclose()  # close again: `asyncio.run` cancels the first close, then throws GeneratorExit
        raise


class Round(MethodsForBody):
    """One round, for one of its members; made by `rounds`."""

    store: SharedStore
    _handler: Handler

    def __init__(self, handler: Handler, info: RendezvousInfo, loop: RoundLoop[Any]) -> None:
        super().__init__(handler, info, loop)
        self._scope = anyio.CancelScope()
        self._left = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._has_cancelled = False  # True once a `check` has cancelled the body

    async def __aenter__(self) -> Self:
        self._enter()
        body = asyncio.current_task()
        assert body is not None, "a body runs in a task"
        self._body, self._cancelled_before = body, body.cancelling()
        self._scope.__enter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        # Leave the scope only in the task that entered it, as anyio requires.
        body, cancelled_by_us = self._body, False
        if asyncio.current_task() is body:
            cancelled_by_us = bool(self._scope.__exit__(kind, error, trace))
            # Swallow also the CancelledError that `asyncio.gather` raises itself after the scope's cancellation, but
            # never another caller's cancellation, which the scope swallows before anyio 4.16.
            if self._scope.cancel_called and isinstance(error, asyncio.CancelledError):
                cancelled_by_us = body.cancelling() <= self._cancelled_before
        if error is None:
            self.gate.note_body_end()
        self._left.set()
        return await self._handle_body_end(None if cancelled_by_us else error)

    def _interrupt_body(self, _: Ending) -> None:
        with contextlib.suppress(RuntimeError):  # the body's loop is closed, so the body has ended
            self._loop.call_soon_threadsafe(self._scope.cancel)

    async def _wait_for_stop_decision(self) -> None:
        """Wait for the agreement on a stop: about a round trip, as nodes answer even while their members compute."""
        wakeup = ThreadSafeWakeup()
        with self._membership.listeners.subscribed(wakeup):
            while not (self.gate.decided or self.monitor.is_over):
                await wakeup.sleep_until(None)

    async def _leave_body(self) -> NoReturn:
        self._scope.cancel()
        if asyncio.current_task() is self._body and not self._left.is_set():
            if not self._has_cancelled:  # a body that swallows its cancellation gets the error at its next `check`
                self._has_cancelled = True
                await checkpoint()  # cancelled here, unless a scope of the body shields it
        else:
            await self._left.wait()
        raise mark_run(self.run_id, RoundChanged(f"{self!r} is over"))
