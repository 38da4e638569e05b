"""Shell: `rdzv run`, a command under rendezvous, for whatever needs a rank, a world size and an address.

    join  ->  start the processes  ->  until something ends the round  ->  stop them  ->  join again, or leave

What ends a round, and what follows:

    the membership changes (lost, left, waiting, dropped)    meet again; this never counts as a restart
    a process fails                                          meet again, as a restart; or leave, with its exit status
    all processes of all nodes have succeeded                close the run, and end with 0
    the run is closed                                        end: with 0 if it has succeeded, else as "closed"
    SIGTERM or SIGINT                                        pass it on, leave the round, close nothing

**Who is to blame.** When one node goes, the commands of the others fail, too, because their peer has hung up, and
mostly sooner than anybody is told that the node has gone. So whoever is about to end a round (its process has failed,
it has been told of a change, it was asked to stop) first writes its name into the round's shared store, and the first
one wins. A failure counts where that name is one's own. As a node that was killed writes nothing, a failing node that
shares its round with others also waits `disconnect_ttl` and a second for news of a loss; if there is any, nothing
counts.

**Who succeeds last.** The processes of a node may be done before those of others. Each node then counts itself in the
round's shared store. The last one closes the run, and the others are told. Until then a change means meeting again,
also for those that were done: whatever the command computes together, it was not finished. Only if all were counted
already (and the last one died before it could close) does whoever is told of a change close the run instead.

**Ranks.** A node says how many processes it runs in an attribute, `nproc`, beside the user's own attributes, and leaves
the payload alone. The members are read once a round, in order of rank; a node's first process comes after all processes
of the nodes before it. A member without the attribute, which uses the library rather than this launcher, counts as one.

**Nothing is left running.** Each process has a guard (`rdzv.cli.guard`), which kills its process group should this
process die.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import select
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import anyio
import anyio.to_thread

from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.cli import guard
from rdzv.core.state import Change, Closed, Dropped, NodesLeft, NodesLost, NodesWaiting
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RendezvousStateError,
    RoundSupersededError,
)
from rdzv.node.handler import Handler
from store import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rdzv.core.state import Participant
    from rdzv.node.handler import RendezvousInfo

__all__ = ["Job", "Place", "environment_of", "label_lines", "place_of", "run"]

log = logging.getLogger(__name__)

SUCCEEDED: Final = "the command has succeeded on every node"
"""Why a run is closed that has done what it was for. Nodes that wait tell by it that they are not needed any more."""

A_MOMENT: Final = 2.0  # seconds that nobody minds waiting in silence; and not more often is another reason told

NPROC: Final = "nproc"  # the attribute
BLAME, COUNT = "rdzv.run/ended_by", "rdzv.run/succeeded"  # keys in the round's shared store

NEWS_OF_A_LOSS: Final = 1.0  # seconds after disconnect_ttl: a lease goes within 0.1, a coordinator is replaced in less
ASK_WITHIN: Final = 2.0  # seconds for a word with the shared store, before one does without
KILL_WITHIN: Final = 5.0  # seconds in which killed processes have ended, unless the kernel itself hangs
DRAIN_WITHIN: Final = 5.0  # seconds in which output is passed on before the next round begins beside it
LINE_BYTES_MAX: Final = 65_536  # of a line that does not end; it is then broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, and how.

    Attributes:
        url: Of the run to join.
        command: A program and its arguments.
        nproc: How many processes of it on this node.
        max_restarts: How often this node starts again after a failure of its own; PyTorch's default, too, is never.
        grace: Seconds between SIGTERM and SIGKILL.
        prefix: Whether each line of output gets the rank in front.
    """

    url: str
    command: tuple[str, ...]
    nproc: int = 1
    max_restarts: int = 0
    grace: float = 10.0
    prefix: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node's processes are among all those of the round."""

    first_rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Succeeded:
    """All processes of all nodes have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A process has; `counts` if nobody else is to blame for that."""

    rank: int
    status: int
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """The members have."""

    why: str


_End = _Succeeded | _Failed | _Changed | Closed


async def run(job: Job) -> int:
    """Run a command under rendezvous, and return the exit status: 0, its own, or 128 and the signal that ended us.

    Raises:
        RendezvousError: Joining failed, or the run was closed; or the store is out of reach.
        OSError: A process cannot be started.
    """
    if shutil.which(job.command[0]) is None:
        raise RendezvousSettingsError(
            f"the command {job.command[0]!r} is not an executable file, nor in PATH; write its path, or install it here"
        )
    return await _Launcher(job).run()


def place_of(rank: int, participants: Sequence[Participant], nproc: int) -> Place:
    """The ranks of a node's processes, from the members in order of rank.

    Raises:
        RendezvousStateError: A member says of itself that it runs no such number of processes.
    """
    counts = [_count_of(participant) for participant in participants]
    assert counts[rank] == nproc, "a node reads of itself what it has written"
    return Place(first_rank=sum(counts[:rank]), world_size=sum(counts))


def _count_of(participant: Participant) -> int:
    text = participant.attributes.get(NPROC, "1")
    if not text.isdecimal() or int(text) < 1:
        raise RendezvousStateError(
            f"node {participant.node_id} has the attribute {NPROC}:{text}, which must be a number of processes; "
            f"rename that attribute"
        )
    return int(text)


def environment_of(job: Job, info: RendezvousInfo, place: Place, *, local_rank: int, restarts: int) -> dict[str, str]:
    """What a process is told. None of the names is that of a parameter, which `rdzv.connect` would read there."""
    host, port = info.bootstrap_address
    return {
        "RANK": str(place.first_rank + local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "GROUP_RANK": str(info.rank),
        "GROUP_WORLD_SIZE": str(info.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RDZV_RUN_ID": info.run_id,
        "RDZV_ROUND": str(info.round),
        "RDZV_URL": job.url,
        "RDZV_RESTARTS": str(restarts),
    }


class _Launcher:
    """One node's `rdzv run`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._restarts = 0
        self._signal: int | None = None
        self._scope = anyio.CancelScope()  # what a signal ends
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # before a store hosted here raises it

    async def run(self) -> int:
        """Take part in the run until it is over for this node."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        status: int | None = None
        with anyio.CancelScope() as everything:
            self._scope = everything
            async with self._handler() as handler:
                with anyio.CancelScope() as taking_part:
                    self._scope = taking_part
                    status = await self._take_part(handler)
                self._scope = everything  # while a store hosted here waits for the others to go
        if status is None:
            assert self._signal is not None
            return 128 + self._signal
        return status

    def _asked_to_stop(self, number: int) -> None:
        """Leave in good order; asked again, at once: the guards then kill what is running."""
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
        self._scope.cancel()

    def _handler(self) -> Handler:
        """The handler of this node, with its number of processes beside what the user wants it to bring."""
        chosen = _handler_for(RendezvousParameters.from_url(self._job.url, {})).settings
        _ = chosen.needed  # raises if this is an observer's URL, before anything is started
        mine = str(self._job.nproc)
        if chosen.attributes.get(NPROC, mine) != mine:
            raise RendezvousSettingsError(
                f"the attribute {NPROC}:{chosen.attributes[NPROC]} contradicts --nproc {mine}, which is told the other "
                f"nodes by that name; rename the attribute"
            )
        attributes = {**chosen.attributes, NPROC: mine}
        return _handler_for(RendezvousParameters.from_url(self._job.url, {"attributes": attributes}))

    async def _take_part(self, handler: Handler) -> int:
        was_open = not await handler.is_closed()
        while True:
            try:
                info = await _meet(handler)
            except RendezvousGracefulExitError as error:
                log.info("%s", error)
                return 0
            except RendezvousClosedError as error:
                if was_open and error.reason == SUCCEEDED:
                    return 0
                raise
            end = await self._play(handler, info)
            where = f"run {info.run_id}, round {info.round}"
            match end:
                case _Succeeded():
                    try:
                        await handler.set_closed(SUCCEEDED)
                    except RendezvousConnectionError as error:
                        log.warning("%s: %s, but the run cannot be closed: %s", where, SUCCEEDED, error)
                    return 0
                case Closed(reason=reason, by=by):
                    if reason == SUCCEEDED:
                        return 0
                    raise RendezvousClosedError(
                        f"run {info.run_id} is closed{f' by {by}' if by else ''}{f': {reason}' if reason else ''}; "
                        f"the command was stopped",
                        reason=reason,
                    )
                case _Failed(rank=rank, status=status, counts=counts):
                    ended = _describe(status)
                    if not counts:
                        log.warning("%s: rank %d %s because others have gone; meeting again", where, rank, ended)
                    elif self._restarts < self._job.max_restarts:
                        self._restarts += 1
                        log.warning(
                            "%s: rank %d %s; restart %d of %d",
                            where,
                            rank,
                            ended,
                            self._restarts,
                            self._job.max_restarts,
                        )
                    else:
                        sys.stderr.write(
                            f"rdzv run: {where}: rank {rank} {ended}, and --max-restarts {self._job.max_restarts} "
                            f"allows no restart; see what it wrote, or allow more\n"
                        )
                        return status if status >= 0 else 128 - status
                case _Changed(why=why):
                    log.warning("%s: %s; meeting again", where, why)
                case _:
                    assert_never(end)

    # ------------------------------------------------------------------------------------------ one round

    async def _play(self, handler: Handler, info: RendezvousInfo) -> _End:
        """Run the command in a round until that is over; no process is left then."""
        try:
            place = place_of(info.rank, await info.participants(), self._job.nproc)
        except RoundSupersededError:
            return _Changed(why="the round is over before it began")
        log.info(
            "run %s, round %d: ranks %d to %d of %d, to meet at %s:%d",
            info.run_id,
            info.round,
            place.first_rank,
            place.first_rank + self._job.nproc - 1,
            place.world_size,
            *info.bootstrap_address,
        )
        processes: list[_Process] = []
        end: _End | None = None
        try:
            for local_rank in range(self._job.nproc):
                environment = environment_of(self._job, info, place, local_rank=local_rank, restarts=self._restarts)
                with anyio.CancelScope(shield=True):  # short; a process must not be lost between its start and us
                    processes.append(await _Process.start(self._job, environment, files=self._files))
            heard: asyncio.Queue[Change | _Process] = asyncio.Queue()
            async with handler.changes() as changes, anyio.create_task_group() as listening:
                listening.start_soon(_hear_changes, changes, heard)
                for process in processes:
                    listening.start_soon(_hear_of_end, process, heard)
                end = await self._end_of_round(handler, info, processes, heard)
                listening.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if end is None:  # a signal; or a defect, and then, too, others had better not be blamed
                    await _is_to_blame(info)
                await self._stop(processes)
        assert end is not None, "the group was cancelled by nobody else"
        return end

    async def _end_of_round(
        self, handler: Handler, info: RendezvousInfo, processes: list[_Process], heard: asyncio.Queue[Change | _Process]
    ) -> _End:
        """Wait for what ends the round; whoever else will feel it has been told who began."""
        running = len(processes)
        try:
            while True:
                match await heard.get():
                    case _Process() as process if process.failed:
                        return await self._end_of_failure(handler, info, processes, heard, failed=process)
                    case _Process():
                        running -= 1
                        if running == 0 and await info.store.add(COUNT, 1) == info.world_size:
                            return _Succeeded()
                    case Closed() as closed:
                        return closed
                    case change:
                        why = _ends_round(change)
                        if why is None:
                            continue
                        if running == 0 and await info.store.add(COUNT, 0) == info.world_size:
                            return _Succeeded()
                        await _is_to_blame(info)
                        return _Changed(why=why)
        except (RoundSupersededError, StoreError) as error:
            return _Changed(why=f"who has succeeded is not known: {error}")

    async def _end_of_failure(
        self,
        handler: Handler,
        info: RendezvousInfo,
        processes: list[_Process],
        heard: asyncio.Queue[Change | _Process],
        *,
        failed: _Process,
    ) -> _End:
        """Find out whether a failure counts: it does unless somebody else began, or died."""
        counts = await _is_to_blame(info)
        if counts and info.world_size > 1:
            for process in processes:
                process.ask_to_end(signal.SIGTERM)
            with anyio.move_on_after(handler.settings.disconnect_ttl + NEWS_OF_A_LOSS):
                while counts:
                    match await heard.get():
                        case Closed() as closed:
                            return closed
                        case NodesLost() | NodesLeft() | Dropped():
                            counts = False
        assert failed.status is not None
        return _Failed(rank=failed.rank, status=failed.status, counts=counts)

    async def _stop(self, processes: list[_Process]) -> None:
        """Ask the processes to end, with the signal we were sent ourselves if there was one; then make them."""
        for process in processes:
            process.ask_to_end(self._signal or signal.SIGTERM)
        with anyio.move_on_after(self._job.grace):
            for process in processes:
                await process.wait()
        for process in processes:
            process.kill()
        with anyio.move_on_after(KILL_WITHIN) as scope:
            for process in processes:
                await process.wait()
        if scope.cancelled_caught:
            log.error("a process does not end although it was killed; a driver or a file system may hang")
        for process in processes:
            await process.let_go()


async def _meet(handler: Handler) -> RendezvousInfo:
    """Meet the others; who sits before a terminal for longer than a moment reads there what is waited for."""
    met: RendezvousInfo | RendezvousError
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_tell_what_is_waited_for, handler)
        try:
            met = await handler.next_rendezvous()
        except RendezvousError as error:  # raised once the group has ended, which would wrap it
            met = error
        tasks.cancel_scope.cancel()
    if isinstance(met, RendezvousError):
        raise met
    return met


async def _tell_what_is_waited_for(handler: Handler) -> None:
    told = ""
    while True:
        await anyio.sleep(A_MOMENT)
        if told != (told := handler.reason):
            sys.stderr.write(f"rdzv run: run {handler.run_id}, node {handler.node_id}: {told}\n")
            sys.stderr.flush()


async def _hear_changes(changes: AsyncIterator[Change], heard: asyncio.Queue[Change | _Process]) -> None:
    async for change in changes:
        heard.put_nowait(change)


async def _hear_of_end(process: _Process, heard: asyncio.Queue[Change | _Process]) -> None:
    await process.wait()
    heard.put_nowait(process)


def _ends_round(change: NodesWaiting | NodesLost | NodesLeft | Dropped) -> str | None:
    """Why a change means meeting again, in words; None if it does not."""
    match change:
        case NodesLost(count=count, node_ids=ids):
            return f"{count} lost: {', '.join(ids)}"
        case NodesLeft(count=count, node_ids=ids):
            return f"{count} left: {', '.join(ids)}"
        case NodesWaiting(count=count):
            return f"{count} waiting to come in" if count else None
        case Dropped(reason=reason):
            return f"this node was dropped: {reason}"


async def _is_to_blame(info: RendezvousInfo) -> bool:
    """Say that this node ends the round; whether it is the first that does.

    A node that cannot say so is cut off, or is in the round no more: it has that against it, not its command.
    """
    with anyio.move_on_after(ASK_WITHIN), contextlib.suppress(RoundSupersededError, StoreError):
        return await info.store.compare_set(BLAME, "", info.node_id) == info.node_id.encode()
    return False


def _handler_for(parameters: RendezvousParameters) -> Handler:
    handler = rendezvous_handler_registry.create_handler(parameters)
    if not isinstance(handler, Handler):
        raise RendezvousSettingsError(
            f"the backend {parameters.backend!r} cannot run commands: its handlers tell no changes and share no store; "
            f"use one of rdzv's own schemes"
        )
    return handler


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"


# ------------------------------------------------------------------------------------------------ processes


class _Process:
    """One process of the command, behind its guard, and its output.

    Attributes:
        rank: Its rank among all processes.
        status: Its exit status, negative for the signal that killed it; None while it runs.
    """

    def __init__(self, rank: int, guarded: asyncio.subprocess.Process, control: int, output: list[_Output]) -> None:
        self.rank = rank
        self._guarded = guarded
        self._control: int | None = control
        self._asked = False
        self._output = output

    @classmethod
    async def start(cls, job: Job, environment: dict[str, str], *, files: int) -> _Process:
        """Start one.

        Args:
            job: With the command.
            environment: What it is told beyond our own environment.
            files: Its soft limit of open files.
        """
        rank = int(environment["RANK"])
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, told = _pipe(theirs, ours)
            output: list[tuple[int, int]] = []  # where to read, where to write
            streams: dict[int, int] = {}
            if job.prefix:
                for target in (1, 2):
                    source, streams[target] = _pipe(ours, theirs)
                    output.append((source, target))
                environment = {"PYTHONUNBUFFERED": "1", **environment}  # else lines come late, and at a SIGKILL never
            guarded = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(Path(guard.__file__))),
                *(str(control), str(files)),
                *job.command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=(control,),
                start_new_session=True,  # Ctrl-C in a terminal is ours to pass on
                stdout=streams.get(1),
                stderr=streams.get(2),
            )
            ours.pop_all()
            label = f"[{rank}] ".encode()
            return cls(rank, guarded, told, [_Output(source, target, label) for source, target in output])

    @property
    def status(self) -> int | None:
        """See the class."""
        return self._guarded.returncode

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not with 0."""
        return bool(self.status)

    async def wait(self) -> None:
        """Wait until it has ended."""
        await self._guarded.wait()

    def ask_to_end(self, number: int) -> None:
        """Send its process group a signal that it may handle; but only one, for some take a second one ill."""
        if not self._asked:
            self._asked = True
            self._send(number)

    def kill(self) -> None:
        """Kill its process group."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._control is not None and self.status is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, bytes([number]))

    async def let_go(self) -> None:
        """Pass on what it has written, and let go of it."""
        control, self._control = self._control, None
        if control is None:
            return
        os.close(control)
        for output in self._output:
            output.finish()
        with anyio.move_on_after(DRAIN_WITHIN):  # whoever reads ours may be slow, and must not hold up the round
            for output in self._output:
                await anyio.to_thread.run_sync(output.join, abandon_on_cancel=True)


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these."""
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing


class _Output(threading.Thread):
    """Passes one stream of one process on, with a label before each line; in a thread, as a terminal may block.

    Not a daemon: whatever was written is passed on before this process ends, however slow its reader.
    """

    _locks: Final = {1: threading.Lock(), 2: threading.Lock()}  # lines of several processes must not mix

    def __init__(self, source: int, target: int, label: bytes) -> None:
        super().__init__(name=f"output {label.decode()}")
        self._from = source
        self._to = target
        self._label = label
        self._finish_reading, self._finish_writing = os.pipe()
        self.start()

    def finish(self) -> None:
        """Stop once nothing is left to read, even if somebody who has escaped might still write."""
        os.close(self._finish_writing)

    def run(self) -> None:
        """Until the end of the stream; or of its reader, and then its writer is told by the pipe's being closed."""
        try:
            with contextlib.suppress(OSError):
                self._pass_on()
        finally:
            os.close(self._from)
            os.close(self._finish_reading)

    def _pass_on(self) -> None:
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        poll.register(self._finish_reading, select.POLLIN)
        rest = b""
        while True:
            ready = {file for file, _ in poll.poll()}
            if self._from not in ready:
                break  # told to finish, and nothing is left
            chunk = os.read(self._from, LINE_BYTES_MAX)
            if not chunk:
                break
            labelled, rest = label_lines(rest + chunk, self._label)
            self._write(labelled)
        if rest:
            self._write(self._label + rest + b"\n")

    def _write(self, data: bytes) -> None:
        with self._locks[self._to]:
            while data:
                try:
                    data = data[os.write(self._to, data) :]
                except BlockingIOError:  # somebody else has made it so
                    waiting = select.poll()
                    waiting.register(self._to, select.POLLOUT)
                    waiting.poll()


_LINE_ENDS = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def label_lines(text: bytes, label: bytes) -> tuple[bytes, bytes]:
    """Put a label before each line that is complete; also what is left of one that is not.

    A lone carriage return ends a line, too, as progress bars write them.
    """
    labelled: list[bytes] = []
    begin = 0
    for line_end in _LINE_ENDS.finditer(text):
        labelled += label, text[begin : line_end.end()]
        begin = line_end.end()
    rest = text[begin:]
    if len(rest) >= LINE_BYTES_MAX:
        labelled += label, rest, b"\n"
        rest = b""
    return b"".join(labelled), rest
