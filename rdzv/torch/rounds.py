"""`rdzv.torch.rounds`: the loop over a run's rounds, with a process group for each, in this process.

After a loss the node's thread aborts the group, so that a hanging collective raises at once. Leaving the round's `with`
block swallows the collective's error, and the next round has a new group.

**Awaited** (`async for`, `async with`, `await round.check(step)`, `await round.in_thread(train, ...)`). Collectives
block, so a thread of the round makes the group, syncs state, and runs the work of `in_thread`. A loss aborts the group,
to end the thread's work, and cancels the body. Other changes end the body only at a `check`, even where `rdzv.rounds`
would cancel the body before its first step: a body cancelled in a collective would leave the other members hanging.
"""

from __future__ import annotations

import asyncio
import functools
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

import rdzv.sync
from rdzv import RendezvousStateError, RoundChanged
from rdzv.config.config_errors import brief, refuse
from rdzv.loop import MemberPhase, blocking, mark_run
from rdzv.loop import rounds as awaited
from rdzv.loop.member import LoopOptions, MemberOfRound
from rdzv.torch.group import RoundGroup, refuse_existing_group
from rdzv.torch.interrupted_step import StepUndo
from rdzv.torch.pytorch import RELEASE, bind_to_current_gpu, dist, reconfigure_handle
from rdzv.torch.state import broadcast_state
from rdzv.torch.store import TorchStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence
    from typing import SupportsIndex

    from rdzv import Ending, Handler
    from rdzv.loop import BlockingSharedStore
    from rdzv.loop.member import OnWaiting, RoundLoop

T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)  # PyTorch's default for collectives other than nccl's


def rounds(
    url: str,
    *,
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
    on_waiting: OnWaiting = "now",
    progress: Callable[[], SupportsIndex] | None = None,
    no_progress: int = 0,
    **overrides: Any,
) -> TorchRounds:
    """Take part in a run, round after round, with a process group in each, until the run is closed.

    Iterate over the result by `for`, which yields a `TorchRound`, or by `async for`, which yields an `AsyncTorchRound`.

    Args:
        url: As for `rdzv.connect`.
        backend: Of the process group: `gloo`, `nccl`, or another one of PyTorch's. See `rdzv.torch.group`.
        timeout: The limit of a collective, which a member's loss ends sooner.
        on_waiting: See `rdzv.rounds`. Newcomers never interrupt a body without `check`: they wait for the round's end.
        progress: See `rdzv.rounds`.
        no_progress: See `rdzv.rounds`.
        overrides: As for `rdzv.connect`.

    Raises:
        GiveUp, RunGivenUpError, RendezvousError: As in `rdzv.rounds`.
        RendezvousSettingsError: The backend or the timeout is invalid.
        RendezvousStateError: This process has a process group already, perhaps of another loop.
    """
    given: object = timeout
    if not isinstance(given, timedelta) or given <= timedelta():
        refuse(
            f"timeout={brief(timeout)} must be a timedelta above 0: it limits a collective, as in "
            f"timeout=timedelta(seconds=30); how long to wait for nodes is join_timeout=30"
        )
    unknown = [one for one in backend.split(",") if not dist.is_backend_available(one.rpartition(":")[2])]
    if unknown:
        refuse(f"backend={brief(backend)} is none that this PyTorch has; give for example gloo, nccl or cpu:gloo")
    options = LoopOptions(on_waiting=on_waiting, progress=progress, no_progress=no_progress)
    return TorchRounds(url, overrides, backend=backend, timeout=timeout, options=options)


class TorchRounds:
    """A run's rounds, for one loop by `for` or `async for`; made by `rounds`."""

    def __init__(
        self, url: str, overrides: dict[str, Any], *, backend: str, timeout: timedelta, options: LoopOptions
    ) -> None:
        self._url = url
        self._overrides = overrides
        self._group: dict[str, Any] = {"backend": backend, "timeout": timeout, "interrupted": StepUndo()}
        self._options = options
        self._blocking: Generator[TorchRound, None, None] | None = None
        self._awaited: AsyncGenerator[AsyncTorchRound, None] | None = None

    def __iter__(self) -> TorchRounds:
        return self

    def __next__(self) -> TorchRound:
        if self._awaited is not None:
            raise RendezvousStateError("these rounds are awaited by `async for`; a second loop needs another call")
        if self._blocking is None:
            refuse_existing_group()
            make = functools.partial(TorchRound, **self._group)
            connecting = rdzv.sync.connect(self._url, **self._overrides)
            self._blocking = blocking.iterate_rounds(make, connecting, self._options)
        return next(self._blocking)

    def close(self) -> None:
        """Leave the run for good, as garbage collection does after a `break`."""
        if self._blocking is not None:
            self._blocking.close()

    def __aiter__(self) -> AsyncGenerator[AsyncTorchRound, None]:
        if self._blocking is not None or self._awaited is not None:
            raise RendezvousStateError("these rounds are in a loop already; a second loop needs another call")
        refuse_existing_group()
        handler = awaited.make_handler(self._url, self._overrides)
        make = functools.partial(AsyncTorchRound, **self._group)
        self._awaited = awaited.iterate_rounds(make, handler, self._options)
        return self._awaited

    async def aclose(self) -> None:
        """See `close`."""
        if self._awaited is not None:
            await self._awaited.aclose()


class _RoundWithGroup(MemberOfRound):
    """The base of `TorchRound` and `AsyncTorchRound`, with their process group."""

    group: RoundGroup

    def _init_fields(
        self,
        shared: BlockingSharedStore,
        loop: RoundLoop[Any],
        *,
        backend: str,
        timeout: timedelta,
        interrupted: StepUndo,
    ) -> None:
        self._interrupted = interrupted
        self._was_announced = loop.last is not None and not loop.last.monitor.has_failed
        self._torch_store = TorchStore(shared, timeout)  # PyTorch keeps only the C++ half of the store alive
        self.group = RoundGroup(
            self._torch_store, rank=self.rank, world_size=self.world_size, backend=backend, timeout=timeout
        )

    @abstractmethod
    async def _make_group(self) -> None:
        """Make the process group."""

    async def prepare(self) -> bool:
        """Make the group; treat a failure as an error of the body. Return False if the failure ends the round."""
        self.monitor.start()
        try:
            await self._make_group()
        except BaseException as error:
            if not await self._handle_body_end(error):
                raise
            return False
        return True

    def _close_group(self) -> None:
        self.group.close()
        self._torch_store.end(f"round {self.number} of run {self.run_id}")

    def _synchronize_state(self, model: Any, optimizer: Any, extra: Any) -> Any:
        source = self.newest[0] if self.newest is not None else 0
        self._interrupted.undo_step(model, optimizer, announced=self._was_announced)
        extra = broadcast_state(source, rank=self.rank, lags=self.lags, model=model, optimizer=optimizer, extra=extra)
        self._interrupted.track(model, optimizer)
        return extra


class TorchRound(_RoundWithGroup, blocking.Round):
    """One round for blocking code, with its process group."""

    def __init__(self, handler: Any, info: Any, loop: RoundLoop[Any], **of_group: Any) -> None:
        super().__init__(handler, info, loop)
        self._init_fields(self.store, loop, **of_group)

    async def _make_group(self) -> None:
        self.group.make()

    def _interrupt_body(self, ending: Ending) -> None:
        """Abort the group after a loss; at an agreed leave, no member is in a collective."""
        super()._interrupt_body(ending)
        if ending.is_abrupt:
            self.group.abort()

    async def _release_resources(self) -> None:
        self._close_group()

    def check(self, step: SupportsIndex) -> None:
        """Begin a step, or leave the round together with all other members; see `rdzv.sync.rounds`."""
        self._interrupted.remember_buffers()
        super().check(step)

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> Any:
        """Make a group by `torch.distributed.new_group`; it is aborted with the round's group."""
        return dist.new_group(ranks, **options)

    def sync_state(self, model: Any = None, optimizer: Any = None, extra: Any = None) -> Any:
        """Bring all members to the state with the most finished steps; a collective, so all call it.

        If the state's source dies during the call, a member that lags behind keeps its own state. No trace of an
        interrupted step remains (`rdzv.torch.interrupted_step`): all members' gradients are None. The program restores
        the rest, such as a GradScaler or a scheduler; docs/pytorch.md has the list.

        Args:
            model: A `torch.nn.Module`. Parameters and buffers are written in place, also those outside its
                `state_dict`, and the results of its modules' `get_extra_state` are set.
            optimizer: A `torch.optim.Optimizer`, or any object with `state_dict` and `load_state_dict`.
            extra: Any picklable value: the step, the state of a scheduler or of a random generator.

        Returns:
            The `extra` of the member with the most finished steps.

        Raises:
            ValueError: This member's model has other tensors than the source's (the message names the first, with
                both shapes), and the other members meet again without this one; or the model is sharded
                (`fully_shard`).
        """
        return self._synchronize_state(model, optimizer, extra)


class AsyncTorchRound(_RoundWithGroup, awaited.Round):
    """One round for awaiting code, with its process group; `blocking_store` is its store for code in `in_thread`."""

    def __init__(self, handler: Handler, info: Any, loop: RoundLoop[Any], **of_group: Any) -> None:
        super().__init__(handler, info, loop)
        self.blocking_store: BlockingSharedStore
        self.blocking_store, self._client = handler.open_blocking_shared_store()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rdzv round {self.number}")
        self._released = False
        self._init_fields(self.blocking_store, loop, **of_group)

    async def _make_group(self) -> None:
        await self.in_thread(self.group.make)

    def _interrupt_body(self, ending: Ending) -> None:
        """After a loss, abort the group. Cancel the body unless it leaves at a `check`; called in the node's thread."""
        if ending.is_abrupt:
            self._end_thread_waits()
        elif self.monitor.phase is MemberPhase.AT_WORK:
            return  # an agreed stop: the body leaves at its next `check`, and may be in a collective now
        super()._interrupt_body(ending)

    def _end_thread_waits(self) -> None:
        self.blocking_store.end_waits()
        self.group.abort()

    async def _release_resources(self) -> None:
        if not self._released:
            self._released = True
            with anyio.CancelScope(shield=True):
                await self._loop.run_in_executor(self._thread, self._close_group)
            self._thread.shutdown()  # the thread is idle
            self._client.close()

    async def check(self, step: SupportsIndex) -> None:
        """Begin a step, or leave the round together with all other members; see `rdzv.rounds`."""
        self._interrupted.remember_buffers()
        await super().check(step)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work, such as a training step, in the round's thread, and wait for its end.

        One call of `in_thread` runs at a time. A call cancelled before its work begins drops it. A call cancelled later
        aborts the work's collectives, ends its waits in the store, and returns after the work, which would else write
        to the model in the next round. If the round's end cancels a call whose work succeeds, return its result, so
        that the caller counts the step.
        """
        if self._released:
            raise mark_run(self.run_id, RoundChanged(f"{self!r} is over"))
        queued = self._thread.submit(bind_to_current_gpu(work), *arguments)
        doing = asyncio.wrap_future(queued)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            if queued.cancel():  # the thread runs another call
                raise
            self._end_thread_waits()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([doing])
            if doing.exception() is None and self._scope.cancel_called:
                return doing.result()
            raise
        finally:
            # Break a cycle of this frame, the futures and the work's error, which would keep the group's sockets.
            del doing, queued

    async def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> Any:
        """Make a group in the round's thread; see `TorchRound.new_group`."""
        return await self.in_thread(functools.partial(dist.new_group, ranks, **options))

    async def sync_state(self, model: Any = None, optimizer: Any = None, extra: Any = None) -> Any:
        """Bring all members to the state with the most finished steps; see `TorchRound.sync_state`."""
        return await self.in_thread(self._synchronize_state, model, optimizer, extra)


def rendezvous_reconfigure(round: blocking.Round | AsyncTorchRound, group: Any = None) -> tuple[int, list[str]]:
    """Exchange the handles of a group's members in a round, for `torch.distributed._reconfigure`.

        uuid, handles = rdzv.torch.rendezvous_reconfigure(round)
        dist._reconfigure(uuid=uuid, handles=handles).wait()

    All members of the round call this blocking function, equally often and in the same order. PyTorch's experiment
    (2.14 and later) changes the members of a group in place.

    Args:
        round: A round of `rdzv.sync.rounds` or `rdzv.torch.rounds`; in an awaited one, call this by `in_thread`.
        group: Made with `enable_reconfigure=True`; by default the process's default group.

    Returns:
        The uuid, a number new in this run; and the handle of each rank of the round.

    Raises:
        RendezvousSettingsError: This PyTorch cannot reconfigure groups.
        RendezvousError: A member has gone, or has not called this function within the store's timeout.
    """
    if reconfigure_handle is None:
        refuse(f"PyTorch {'.'.join(map(str, RELEASE))} cannot reconfigure a group; 2.14 and later can")
    store = round.blocking_store if isinstance(round, AsyncTorchRound) else round.store
    count = store.add(f"rdzv.reconfigure/calls/{round.rank}", 1)
    store.set(f"rdzv.reconfigure/{count}/{round.rank}", reconfigure_handle(group))
    handles = store.multi_get([f"rdzv.reconfigure/{count}/{rank}" for rank in range(round.world_size)])
    return (round.number << 16) + count, [handle.decode() for handle in handles]
