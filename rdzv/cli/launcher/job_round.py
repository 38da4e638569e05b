"""One round of `rdzv run`: starts the processes, waits for the round's end, and stops the processes.

A round ends by the rules of `rdzv.loop.round_monitor`, as in `rounds()`. If it ends before the processes of all nodes
have succeeded, and the run continues, all nodes meet again, also the successful ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from rdzv import Change, Draining, Ending, GiveUp, NodesWaiting, Resized, RoundSupersededError, StoreEnding
from rdzv.cli.command import message_of
from rdzv.cli.launcher.job import CHECKPOINT_FILE, ERROR_FILE, SIGNALLED, OnChangeMode, environment_of, process_ranks
from rdzv.cli.launcher.processes import Process, open_log
from rdzv.loop import MOVES, EndKind, NextAfterWork, leaving_in_words
from rdzv.loop.process_files import (
    BEAT_DIR,
    clear_step_folder,
    follow_step_files,
    note_lowest_step,
    read_exception_line,
)
from rdzv.loop.round_monitor import RoundMonitor
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from rdzv import Handler, RendezvousInfo
    from rdzv.cli.launcher.job import Job, NodeRanks
    from rdzv.cli.launcher.preload import PreloadServer
    from rdzv.cli.launcher.stacks import WorkerStacks
    from rdzv.torch.tcp_store import WorkersStore

log: logging.Logger = logging.getLogger(__name__)

# The reason for closing a successful run. A node that waits to join such a run ends without an error.
SUCCEEDED: Final = "the command has succeeded on every node"
KILL_WITHIN: Final = 5.0  # seconds to wait for killed processes
# Seconds by which a forked rank 0 starts first: a rank that connects before PyTorch's rank 0 listens waits 0.5 s.
HEAD_START: Final = 0.1
CONTINUE_EVERY: Final = 1.0  # seconds between SIGCONTs to guards, which may be stopped
LOOK_AGAIN: Final = 0.05  # seconds between checks of the checkpoint file; no portable call reports a change


@dataclass(slots=True, kw_only=True)
class LauncherContext:
    """The state that all rounds of a launcher share; processes are forked from `preloaded`, if any."""

    job: Job
    checkpoint_file: Path
    beats: Path
    stacks: WorkerStacks | None
    files: int
    preloaded: PreloadServer | None = None
    serve_workers: Callable[[RendezvousInfo], WorkersStore | None] | None = None
    with_remedy: Callable[[str], str] = str


Wished = NodesWaiting | Draining | Resized | StoreEnding  # announced changes, which may be delayed until a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWait:
    """A wait for a change of the checkpoint file's modification time `checkpoint`, at most until the time `until`."""

    wished: Wished
    why: str
    until: float
    checkpoint: int


class JobRound:
    """One node's processes in one round."""

    def __init__(self, workplace: LauncherContext, handler: Handler, info: RendezvousInfo, *, restarts: int) -> None:
        membership = handler.membership
        assert membership is not None, "next_rendezvous has just made this node a member"
        self._workplace = workplace
        self._job = workplace.job
        self._handler = handler
        self._info = info
        self._restarts = restarts
        self._checkpoint_before = self._checkpoint_mtime()
        self._membership = membership
        self._processes: list[Process] = []
        self._running = 0
        self._heard: asyncio.Queue[Wished | Process | Ending] = asyncio.Queue()
        self._passed_on: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self.monitor: RoundMonitor = RoundMonitor(handler.node, membership, self._queue_round_end, finished=SUCCEEDED)
        self.is_ending: bool = False  # True after `ask_to_end`
        self.achieved: bool = False  # set at the end: the job has written a checkpoint or begun its second step
        self.failed: tuple[str, int] | None = None  # a description of this node's failed process, and the exit status

    async def run(self) -> NextAfterWork | signal.Signals:
        """Run the command until the round ends; return the outcome, or the passed-on signal that ended a process."""
        info, job = self._info, self._job
        try:
            place = process_ranks(info.rank, await info.participants(), job.nproc)
        except RoundSupersededError as error:
            self.monitor.note_ending(Ending(kind=EndKind.DROPPED, reason="the round is over before it began"))
            return await self.monitor.on_work_end(error, in_node=self._handler.call, release=self._ask_all_to_end)
        log.info(
            "run %s, round %d: ranks %d to %d of %d, to meet at %s:%d",
            *(info.run_id, info.round, place.first_rank, place.first_rank + job.nproc - 1, place.world_size),
            *info.bootstrap_address,
        )
        clear_step_folder(self._workplace.beats)
        serve = self._workplace.serve_workers
        with contextlib.ExitStack() as serving:
            if serve is not None and info.rank == 0:
                store = await anyio.to_thread.run_sync(serve, info)
                if store is None:
                    self.monitor.note_ending(Ending(kind=EndKind.DROPPED, reason="the port that was promised is taken"))
                    return NextAfterWork.MEET_AGAIN
                serving.callback(store.close)
            return await self._run_processes(place)

    async def _run_processes(self, place: NodeRanks) -> NextAfterWork | signal.Signals:
        await self._start_processes(place)
        follow_step_files(self._handler, self._workplace.beats)
        async with self._handler.changes() as changes, anyio.create_task_group() as listening:
            listening.start_soon(self._queue_changes, changes)
            listening.start_soon(self._continue_guards)
            listening.start_soon(self._handler.call, self.monitor.wait_for_end())
            for process in self._processes:
                listening.start_soon(self._watch_process, process)
            self.monitor.start()
            failure = await self._wait_for_end()
            outcome: NextAfterWork | signal.Signals
            if isinstance(failure, signal.Signals):
                outcome = failure
            else:
                outcome = await self.monitor.on_work_end(
                    failure, in_node=self._handler.call, release=self._ask_all_to_end
                )
            listening.cancel_scope.cancel()
        self.achieved = self._has_progressed()
        return outcome

    async def _start_processes(self, place: NodeRanks) -> None:
        preloaded = self._workplace.preloaded
        if preloaded is not None and not await preloaded.wait_until_ready():
            preloaded = None
        for local_rank in range(self._job.nproc):
            # Pause only before this node's first process that is not rank 0.
            if preloaded is not None and place.world_size > 1 and local_rank == (0 if place.first_rank else 1):
                await anyio.sleep(HEAD_START)
            environment = environment_of(self._job, self._info, place, local_rank=local_rank, restarts=self._restarts)
            environment |= {
                CHECKPOINT_FILE: str(self._workplace.checkpoint_file),
                ERROR_FILE: str(self._error_file(local_rank)),
                BEAT_DIR: str(self._workplace.beats),
            }
            if self._workplace.stacks is not None:
                environment |= self._workplace.stacks.environment()
            log_file, files = await open_log(self._job.log_dir, environment), self._workplace.files
            # A cancellation must not lose a just started process.
            with log_file or contextlib.nullcontext(), anyio.CancelScope(shield=True):
                process = await Process.start(self._job, environment, log_file, files=files, preloaded=preloaded)
                self._processes.append(process)
        self._running = self._job.nproc

    def _error_file(self, local_rank: int) -> Path:
        return self._workplace.checkpoint_file.with_name(f"error-{self._info.round}-{local_rank}")

    def _queue_round_end(self, ending: Ending) -> None:
        self._loop.call_soon_threadsafe(self._heard.put_nowait, ending)

    async def _queue_changes(self, changes: AsyncIterator[Change]) -> None:
        async for change in changes:
            if isinstance(change, Wished):
                self._heard.put_nowait(change)

    async def _continue_guards(self) -> None:
        while True:
            await anyio.sleep(CONTINUE_EVERY)
            for process in self._processes:
                process.continue_guard()

    async def _watch_process(self, process: Process) -> None:
        await process.wait()
        self._heard.put_nowait(process)

    async def _wait_for_end(self) -> signal.Signals | GiveUp | str | None:
        wait: CheckpointWait | None = None
        while wait is None or not self._checkpoint_wait_over(wait):
            heard: Wished | Process | Ending | None = None
            with anyio.move_on_after(None if wait is None else LOOK_AGAIN):  # a `get` that times out loses no item
                heard = await self._heard.get()
            match heard:
                case None:
                    pass
                case Ending():
                    return None
                case Process() if wait is not None and self._usr1_on_change:
                    self._running -= 1  # the process was asked to end, so its status does not matter
                case Process() if heard.status:
                    return self._forwarded_signal_of(heard) or self._failure_of(heard)
                case Process():
                    self._running -= 1
                    if self._running == 0:
                        return None
                case _ if self._job.on_change is not OnChangeMode.TERM:
                    wait = await self._update_checkpoint_wait(heard, wait)
                case _ if (why := self._rejoin_reason(heard)) is not None:
                    wait = CheckpointWait(wished=heard, why=why, until=-math.inf, checkpoint=-1)
        if not self._usr1_on_change:
            await self.claim_round_end()
        self.monitor.note_ending(Ending(kind=EndKind.AGREED, reason=wait.why))
        return None

    async def claim_round_end(self) -> None:
        """Report that this node ends the round, before the end of its processes makes other nodes' processes fail."""
        await self._handler.call(self.monitor.claim_end())

    @property
    def _usr1_on_change(self) -> bool:
        return self._job.on_change is OnChangeMode.USR1

    async def _update_checkpoint_wait(self, wished: Wished, wait: CheckpointWait | None) -> CheckpointWait | None:
        """Begin, continue or cancel a wait for a checkpoint, for at most `--grace` and the seconds left of a drain."""
        why = self._rejoin_reason(wished)
        if why is None:
            gone = isinstance(wished, NodesWaiting) and wait is not None and isinstance(wait.wished, NodesWaiting)
            return None if gone and not self._usr1_on_change else wait
        within = min(self._job.grace, wished.seconds_left) if isinstance(wished, Draining) else self._job.grace
        until = anyio.current_time() + within
        if wait is not None:
            return replace(wait, until=min(until, wait.until))
        log.info("%s, for a checkpoint of the job, at most %g s", printable(why), within)
        wait = CheckpointWait(wished=wished, why=why, until=until, checkpoint=self._checkpoint_mtime())
        if self._usr1_on_change:
            await self.claim_round_end()
            for process in self._processes:
                process.send_signal(signal.SIGUSR1)
        return wait

    def _checkpoint_wait_over(self, wait: CheckpointWait) -> bool:
        return not self._running or anyio.current_time() >= wait.until or self._checkpoint_mtime() != wait.checkpoint

    def _rejoin_reason(self, change: Wished) -> str | None:
        match change:
            case NodesWaiting(count=count):
                return f"{count} waiting to join" if count else None
            case Draining(node_ids=ids, reason=reason):
                return leaving_in_words(ids, reason)
            case Resized(max_nodes=most, reason=reason):
                too_many = self._info.world_size > most
                return f"resized to at most {most}{f': {reason}' if reason else ''}" if too_many else None
            case StoreEnding():
                return MOVES

    def _forwarded_signal_of(self, process: Process) -> signal.Signals | None:
        """Return the passed-on signal that ended a process, if any; a shell exits with 128 plus the signal."""
        ended_by = (number for number in self._passed_on if process.status in (-number, SIGNALLED + number))
        return next(map(signal.Signals, ended_by), None)

    def _failure_of(self, process: Process) -> GiveUp | str:
        assert process.status is not None
        raised = read_exception_line(self._error_file(self._processes.index(process)))
        how = f"rank {process.rank} {describe_exit_status(process.status)}{f': {raised}' if raised else ''}"
        how = self._workplace.with_remedy(how)
        self.failed = how, process.status
        if process.status == self._job.give_up_status:
            return GiveUp(f"{how}, which says not to go on", status=process.status)
        return how

    async def _ask_all_to_end(self) -> None:
        self.ask_to_end(signal.SIGTERM)

    def _has_progressed(self) -> bool:
        if self._checkpoint_mtime() != self._checkpoint_before:
            return True
        note_lowest_step(self._membership, self._workplace.beats)
        return not self._membership.beats.is_first_step

    def _checkpoint_mtime(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self._workplace.checkpoint_file).st_mtime_ns
        return -1

    def _running_processes(self) -> list[Process]:
        return [process for process in self._processes if process.status is None]

    def forward_signal(self, number: int) -> bool:
        """Send a signal to the processes; return False if no process runs, or all were asked to end."""
        running = [] if self.is_ending else self._running_processes()
        for process in running:
            process.forward_signal(number)
        if running:
            self._passed_on.add(number)
        return bool(running)

    def ask_to_end(self, number: int) -> None:
        """Send the processes a signal that ends them (0 sends none); later calls do nothing."""
        self.is_ending = True
        for process in self._processes:
            process.ask_to_end(number)

    async def dump_stacks(self) -> str:
        """Return the Python stacks of the running processes."""
        if self._workplace.stacks is None:
            return "they are not to be had: this launcher runs with --no-stacks"
        try:
            return await self._workplace.stacks.collect(process.rank for process in self._running_processes())
        except (OSError, ValueError) as error:
            return f"they cannot be read: {message_of(error)}"

    async def stop_processes(self, number: int) -> None:
        """Send the processes this signal, kill those that have not ended after `--grace`, and pass on their output."""
        self.ask_to_end(number)
        await self._wait_for_processes(self._job.grace)
        try:
            if self._running_processes():
                log.warning(
                    "run %s, round %d: told to end, and not done after --grace %g s; "
                    "to be killed with these stacks:\n%s",
                    *(self._info.run_id, self._info.round, self._job.grace, await self.dump_stacks()),
                )
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGKILL)
        await self._wait_for_processes(KILL_WITHIN)
        if self._running_processes():
            log.error("a process does not end although it was killed; a driver or a file system may hang")
        for process in self._processes:
            await process.finish_output()
        if self._workplace.stacks is not None:
            self._workplace.stacks.remove_ended_files()

    async def _wait_for_processes(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            for process in self._processes:
                await process.wait()


def describe_exit_status(status: int) -> str:
    """Describe a process's exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"
