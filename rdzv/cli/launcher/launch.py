"""The launcher of `rdzv run`, for any program that needs a rank, a world size and rank 0's address.

    join  ->  start the processes  ->  wait for the end of the round  ->  stop them  ->  join again, or leave

docs/command.md lists the ends of a round, their consequences, and the signals. If the launcher
dies, each process's `guard` kills the process's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from rdzv import RendezvousClosedError, RendezvousError, RendezvousGracefulExitError, RendezvousSettingsError
from rdzv.cli.command import ENDING, RepeatedSignalFilter, call_on_signal, message_of
from rdzv.cli.launcher import guard
from rdzv.cli.launcher.job import NPROC, SIGNALLED, NodeRemedy
from rdzv.cli.launcher.job_round import SUCCEEDED, JobRound, LauncherContext
from rdzv.cli.launcher.preload import run_preload_server
from rdzv.cli.launcher.stacks import WorkerStacks
from rdzv.config.settings import parse
from rdzv.display.standard_error import say_error
from rdzv.loop import KILL, STACKS, EndKind, NextAfterWork, RunCounts, cancel_and_wait
from rdzv.loop.own_folder import temporary_folder
from rdzv.loop.rounds import make_handler
from store.printable import make_logger, printable, without_durations

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv import Handler, RendezvousInfo
    from rdzv.cli.launcher.job import Job

log: Final = make_logger(__name__)

SAID_AGAIN_AFTER: Final = 30.0  # seconds until an unchanged reason is first repeated
EXPLAINED_AFTER: Final = 2.0  # seconds until a wait's reason (or a host's stay) is printed, and between checks
ANSWERED_WITHIN: Final = 2.0  # seconds for requests whose answers are only printed

AGAIN: Final = "again after a second: at once"
FILES_NEEDED: Final = 40  # the open files that a launcher needs to host the store
FILES_OF_PROCESS: Final = 5
REAPS_EVERY: Final = 1.0  # seconds between searches for ended orphans
PAIR_WITHIN: Final = 0.002  # seconds, at most, between two signals that a supervisor sends together
NO_SIGNAL: Final = 0
PASSED_ON: Final = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


async def run(job: Job) -> int:
    """Run a command under rendezvous; return 0, the command's status, or 128 plus the signal that ended the launcher.

    Raises:
        RendezvousError: Joining failed, the run was closed, or the store is out of reach.
        OSError: A process cannot be started.
    """
    if shutil.which(job.command[0]) is None:
        raise RendezvousSettingsError(
            f"the command {job.command[0]!r} is not an executable file, nor in PATH; write its path, or install it here"
        )
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], FILES_NEEDED + FILES_OF_PROCESS * job.nproc
    if most != resource.RLIM_INFINITY and most < needed:
        raise RendezvousSettingsError(
            f"the limit of open files is {most}, and --nproc {job.nproc} needs {needed}; raise ulimit -n"
        )
    with temporary_folder("rdzv-run-") as folder:
        return await _Launcher(job, folder).run()


class _Launcher:
    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._workplace = LauncherContext(
            job=job,
            checkpoint_file=folder / "checkpoint",
            beats=folder / "beats",
            stacks=WorkerStacks(folder) if job.stacks else None,
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],  # the workers' limit; hosting a store raises this one
        )
        self._tally = RunCounts()
        self._signal: signal.Signals | None = None
        self._wish = RepeatedSignalFilter()
        self._scope = anyio.CancelScope()  # a signal to stop cancels this scope
        self._drains = asyncio.Event()
        self._round: JobRound | None = None
        self._connected: Handler | None = None

    async def run(self) -> int:
        status: int | None = None
        making = self._make_handler()  # before signals are handled: reading a file may hang
        self._set_signal_handlers()
        try:
            with self._scope as everything:
                async with run_preload_server(self._job) as self._workplace.preloaded, making as handler:
                    self._connected = handler
                    with anyio.CancelScope() as self._scope:
                        status = await self._run_rounds_and_tasks(handler)
                    if self._signal is not None and handler.hosts_store:
                        stays = f"rdzv run: the store is served from here until the other nodes have gone; {AGAIN}"
                        asyncio.get_running_loop().call_later(EXPLAINED_AFTER, say_error, stays)
                    self._scope = everything  # from now on, a signal ends the hosted store's wait for other nodes
        except (RendezvousError, OSError, RuntimeError) as error:
            if status is None:
                raise
            log.warning("the node did not leave properly: %s", message_of(error))
        return SIGNALLED + (self._signal or 0) if status is None else status

    def _make_handler(self) -> Handler:
        chosen = parse(self._job.url, {}, os.environ)
        _ = chosen.needed  # raises, before anything starts, if the URL has no `min_nodes`
        mine = str(self._job.nproc)
        if chosen.attributes.get(NPROC, mine) != mine:
            raise RendezvousSettingsError(
                f"the attribute {NPROC}:{chosen.attributes[NPROC]} contradicts --nproc {mine}, which is told the other "
                f"nodes by that name; rename the attribute"
            )
        if self._job.agent_store or chosen.agent_store:
            self._workplace.job = self._job = replace(self._job, agent_store=True)
            try:
                import rdzv.torch.tcp_store as serving
            except ImportError as error:
                raise RendezvousSettingsError(f"agent_store is set, and {error}") from None
            self._workplace.serve_workers = partial(serving.serve_workers, ports=chosen.master_port, taken=set())
            self._workplace.with_remedy = serving.add_port_remedy
        attributes = {**chosen.attributes, NPROC: mine}
        check = chosen.bootstrap_check is not False
        return make_handler(self._job.url, {"attributes": attributes, "bootstrap_check": check})

    def _set_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            call_on_signal(number, self._on_stop_signal, number)
        for number in PASSED_ON:
            call_on_signal(number, self._forward_signal, number)
        if self._job.drain_on is not None:
            call_on_signal(self._job.drain_on, self._on_drain_signal, self._job.drain_on)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Stop the processes and leave; at a second request exit at once: the guards kill the processes."""
        is_new, drains = self._wish.accept(number), self._drains.is_set()
        if is_new and (self._signal is not None or (drains and self._round is not None and self._round.is_ending)):
            os._exit(SIGNALLED + number)
        if self._signal is not None or (drains and not is_new):
            return
        if self._round is not None and not is_new:  # SIGHUP or SIGQUIT was just passed on: send no second signal
            self._round.ask_to_end(NO_SIGNAL)
        self._stop_and_say_so(number)

    def _stop_and_say_so(self, number: signal.Signals) -> None:
        self._stop(number)
        say_error(f"rdzv run: {number.name}: leaving, within --grace {self._job.grace:g} s; {AGAIN}")

    def _stop(self, number: signal.Signals) -> None:
        self._signal = number
        if self._connected is not None:  # announce the leave at once, so that another node hosts the next store
            self._connected.leaves_because(f"its launcher was told to stop by {number.name}")
        self._scope.cancel()

    def _on_drain_signal(self, number: signal.Signals) -> None:
        """Announce that this node is to leave its round; without a round, or at a second request, leave at once."""
        if self._round is None or self._drains.is_set() or self._signal is not None:
            self._on_stop_signal(number)
        else:
            if not self._wish.accept(number):
                self._round.ask_to_end(NO_SIGNAL)
            self._drains.set()

    async def _drain_when_asked(self, handler: Handler) -> None:
        await self._drains.wait()
        number = self._job.drain_on
        assert number is not None, "nobody else asks for it"
        log.warning("%s: this node leaves within %g s; again after a second: sooner", number.name, self._job.drain_in)
        try:
            with anyio.fail_after(self._job.drain_in):
                await handler.drain(within=self._job.drain_in, reason=f"{number.name} came")
        except (RendezvousError, TimeoutError) as error:
            why = str(error) or f"the store has not answered within {self._job.drain_in:g} s"
            log.warning("that this node leaves cannot be announced: %s", why)
            self._stop(number)

    def _forward_signal(self, number: signal.Signals) -> None:
        """Pass a signal on to the processes; before SIGHUP and SIGQUIT, wait `PAIR_WITHIN` for a SIGTERM."""
        if number in ENDING and (self._signal is not None or self._drains.is_set()):
            self._on_stop_signal(number)
        elif number in ENDING:  # of two signals, the lower number arrives first; a SIGTERM may follow
            asyncio.get_running_loop().call_later(PAIR_WITHIN, self._forward_signal_now, number)
        else:
            self._forward_signal_now(number)

    def _forward_signal_now(self, number: signal.Signals) -> None:
        if number in ENDING and not self._wish.accept(number):
            return
        if self._round is not None and self._round.forward_signal(number):
            log.info("%s was passed on", number.name)
        elif number in ENDING:  # no process runs, so the signal is for this launcher
            self._stop_and_say_so(number)
        else:
            log.warning("%s came while no process was running: nothing was passed on", number.name)

    async def _run_rounds_and_tasks(self, handler: Handler) -> int:
        await handler.is_closed()  # connects to the store, which the next lines need
        with anyio.move_on_after(ANSWERED_WITHIN), contextlib.suppress(RendezvousError):
            if not handler.hosts_store and (host := await handler.store_host()):
                level = logging.INFO if host.startswith(f"run {handler.run_id}, ") else logging.WARNING
                log.log(level, "run %s: %s serves the store", handler.run_id, host)
        answering = asyncio.create_task(self._answer_operators(handler), name="answer what operators ask")
        draining = asyncio.create_task(self._drain_when_asked(handler), name="announce that this node leaves")
        reaping = asyncio.create_task(_reap_orphans(), name="reap orphans, as process 1")
        try:
            return await self._run_rounds(handler)
        finally:
            await cancel_and_wait(draining, answering, reaping)
            if handler.run_closing is not None and self._job.says_cost:
                with anyio.move_on_after(ANSWERED_WITHIN, shield=True), contextlib.suppress(RendezvousError):
                    _, history, cost = await handler.status_and_cost()
                    if history.chapters:
                        say_error(f"rdzv run: {printable(str(cost))}")

    async def _answer_operators(self, handler: Handler) -> None:
        async with contextlib.aclosing(handler.questions()) as questions:
            async for name, question in questions:
                text = await self._answer_to_operator(question.what)
                if text is not None:
                    with contextlib.suppress(RendezvousError):  # the operator's command then reports a timeout
                        await handler.answer_operator(name, text)
                if question.what == KILL and self._job.allow_chaos:
                    log.warning("killed by rdzv chaos")
                    os.kill(os.getpid(), signal.SIGKILL)

    async def _answer_to_operator(self, asked: str) -> str | None:
        if asked == STACKS:
            if not self._job.remote_stacks:
                return "refused: this launcher runs with --no-remote-stacks"
            return "no process runs: it waits for a round" if self._round is None else await self._round.dump_stacks()
        if asked == KILL:
            return "killed" if self._job.allow_chaos else "refused: this launcher was not started with --allow-chaos"
        return None

    async def _run_rounds(self, handler: Handler) -> int:
        was_open = not await handler.is_closed()
        while True:
            try:
                info = await _join_round(handler)
            except RendezvousGracefulExitError as error:
                log.info("%s", error)
                return self._job.exit_status_for(NodeRemedy.REPLACE, 0) if handler.is_draining else 0
            except RendezvousClosedError as error:
                if was_open and error.reason == SUCCEEDED and not error.given_up:
                    return 0
                if error.given_up and error.status:
                    say_error(f"rdzv run: {printable(str(error))}")
                    return self._job.exit_status_for(NodeRemedy.OVER, error.status)
                if not was_open:
                    say_error("rdzv run: rdzv reopen opens a closed run again; or give the job a run of its own")
                raise
            await self._update_restart_counts(handler, lambda tally: tally)
            if 0 < self._job.no_progress <= self._tally.fruitless:
                verdict = (
                    f"{self._tally.fruitless} rounds have failed, one after the other, without a checkpoint or a step "
                    f"(--no-progress)"
                )
                status = self._job.give_up_status
                log.error("run %s, round %d: %s", info.run_id, info.round, verdict)
                await handler.give_up(verdict, status=status)
                return self._job.exit_status_for(NodeRemedy.OVER, status)
            ended = await self._handle_outcome(handler, info, *await self._run_round(handler, info))
            if ended is not None:
                return ended

    async def _run_round(self, handler: Handler, info: RendezvousInfo) -> tuple[JobRound, NextAfterWork]:
        current = self._round = JobRound(self._workplace, handler, info, restarts=self._tally.restarts)
        outcome: NextAfterWork | signal.Signals | None = None
        try:
            outcome = await current.run()
            if isinstance(outcome, signal.Signals):  # a passed-on signal has ended the command
                if self._signal is None:
                    self._stop(outcome)
                await anyio.sleep_forever()  # `_stop` has cancelled this scope
        finally:
            current.monitor.stop()
            with anyio.CancelScope(shield=True):
                if not isinstance(outcome, NextAfterWork):
                    # A signal or a defect in this launcher ended the round: claim that end for this node.
                    await current.claim_round_end()
                await current.stop_processes(self._signal or signal.SIGTERM)
                self._round = None
        assert isinstance(outcome, NextAfterWork)
        return current, outcome

    async def _update_restart_counts(self, handler: Handler, change: Callable[[RunCounts], RunCounts]) -> None:
        """Change or read the run's tally of restarts; if the store is out of reach, change this launcher's copy."""
        try:
            self._tally = RunCounts.of(await handler.change_counts(lambda was: change(RunCounts.of(was)).pack()))
        except RendezvousError as error:
            self._tally = change(self._tally)
            log.warning("the restarts of the run cannot be read: %s", error)

    async def _handle_outcome(
        self, handler: Handler, info: RendezvousInfo, round: JobRound, outcome: NextAfterWork
    ) -> int | None:
        """Return the launcher's exit status after a round, or None to meet the other nodes again."""
        where, monitor, achieved = f"run {info.run_id}, round {info.round}", round.monitor, round.achieved
        how, status = round.failed or ("", 0)
        if monitor.all_have_finished:
            return 0
        if outcome is NextAfterWork.GIVE_UP:
            log.error("%s: given up: %s", where, how)
            return self._job.exit_status_for(NodeRemedy.OVER, status)
        if monitor.ending is not None and monitor.ending.kind is EndKind.CLOSED:
            return None  # the next `next_rendezvous` raises the error with the details
        is_ours, leaves = outcome is NextAfterWork.RAISE, outcome is not NextAfterWork.RAISE and handler.is_draining
        if monitor.ending is not None and not is_ours:
            then = "this node leaves, and does not come again" if leaves else "meeting again"
            why = f"{how} because others have gone" if how else monitor.ending.reason
            log.warning("%s: %s; %s", where, why, then)  # log this before the next requests, as the store may be lost
        ended = {"restart": is_ours, "failed": is_ours or monitor.has_failed, "achieved": achieved}
        await self._update_restart_counts(handler, lambda was: was.after(info.round, **ended))
        if not is_ours:
            return self._job.exit_status_for(NodeRemedy.REPLACE, 0) if leaves else None
        if self._tally.restarts <= self._job.max_restarts:
            log.warning("%s: %s; restart %d of %d", where, how, self._tally.restarts, self._job.max_restarts)
            return None
        handler.leaves_because(how)
        say_error(
            f"rdzv run: {where}: {how}, and --max-restarts {self._job.max_restarts} allows no restart; see "
            f"what it wrote, or allow more"
        )
        return self._job.exit_status_for(NodeRemedy.REPLACE, status if status >= 0 else SIGNALLED - status)


async def _reap_orphans() -> None:
    while os.getpid() == 1:
        await anyio.sleep(REAPS_EVERY)
        for name in filter(str.isdecimal, os.listdir("/proc")):
            _reap_if_zombie(int(name))


def _reap_if_zombie(pid: int) -> None:
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        if (state, parent) == ("Z", "1") and pid not in guard.STARTED:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


async def _join_round(handler: Handler) -> RendezvousInfo:
    telling = asyncio.create_task(_print_wait_reasons(handler), name="tell what is waited for")
    try:
        return await handler.next_rendezvous()
    finally:
        await cancel_and_wait(telling)


async def _print_wait_reasons(handler: Handler) -> None:
    told, told_at, pause = "", -math.inf, SAID_AGAIN_AFTER
    while True:
        await anyio.sleep(EXPLAINED_AFTER)
        now, before, told = anyio.current_time(), told, handler.reason
        is_news = without_durations(told) != without_durations(before)
        if is_news or now - told_at >= pause:
            told_at, pause = now, SAID_AGAIN_AFTER if is_news else pause * 2  # say an unchanged reason ever less often
            say_error(f"rdzv run: run {handler.run_id}, node {handler.node_id}: {printable(told)}")
