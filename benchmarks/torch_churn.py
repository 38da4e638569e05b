"""Process groups in the loop of `rdzv.torch.rounds` while members join and leave: real processes and collectives.

    python -m benchmarks.torch_churn                                       all three at full length
    python -m benchmarks.torch_churn --only drains --changes 5

drains  Members join, and the oldest is drained, so that rank 0 leaves as often as any: no collective may be aborted.
rounds  One member leaves in the middle of a step and joins again, repeatedly: each time the others' group is aborted.
The
        threads, descriptors and memory of a member that stays must not grow.
kills   A member, a newcomer and the oldest in turn, is killed at each call to the store while its group is made, and at
        moments between them. The others must make a step without it; the output is the time from the kill to that. In
        the
        end the run's members are those that live, and no process is left.

Every other member awaits its rounds in an event loop; the others block. The command fails if any of this does not hold.
The tests have a short version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from dataclasses import astuple, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import rdzv
from benchmarks import support
from rdzv.node.handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

PATIENCE: Final = 120.0  # seconds for any one thing
STEP: Final = 0.002  # seconds
STANDING: Final = 3  # members at any time
TOGETHER: Final = 3  # steps of a member before the next change
SETTLED_AFTER: Final = 40  # rounds, after which caches and heaps are full
DESCRIPTORS_NOISE: Final = 2  # a client's sockets: one per thread in a call
MEMORY_NOISE: Final = 4 * 1024  # KiB
OF_PYTORCH: Final = 16  # KiB that each group leaves behind over any store: 5 in a group of two without an abort
CALLS: Final = ("set", "get", "add", "wait", "check", "multi_get", "multi_set")
MARK: Final = "RDZV_CHURN"  # an environment variable of all processes of this one
Moment = tuple[str, float]  # ("call", 3): at the fourth call; ("after", 0.004): seconds after the first


# --------------------------------------------------------------------------------------------- one member


class Killer:
    """Kills this process at a given moment while its next group is made."""

    def __init__(self, pipe: Connection, name: str, moment: Moment | None) -> None:
        self._pipe, self._name, self._moment = pipe, name, moment
        self.told = False
        self._calls = itertools.count()

    def listen(self) -> None:
        """Wait for the moment, in a thread."""
        with contextlib.suppress(EOFError, OSError):
            self._moment = self._pipe.recv()  # None: stay from now on
            self.told = True

    def watch(self, store_class: type) -> None:
        """Count the stores' calls from now on."""
        for name in CALLS:
            setattr(store_class, name, self._counted(getattr(store_class, name)))

    def group_begins(self) -> None:
        """Restart the count for another group."""
        self._calls = itertools.count()

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            number, moment = next(self._calls), self._moment
            if moment is not None:
                kind, when = moment
                if kind == "call" and number >= when:
                    self._die()
                elif kind == "after" and number == 0:
                    threading.Timer(when, self._die).start()
            return method(*arguments, **keywords)

        return call

    def _die(self) -> None:
        self._pipe.send(("killed", self._name, time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


class Away(BaseException):
    """Takes a member out of a round in the middle of a step, without a message."""


def member(pipe: Connection, url: str, name: str, moment: Moment | None = None, *, flaps: bool = False) -> None:
    """Take part until the run is closed, or until drained; with `flaps`, leave and join repeatedly."""
    import torch

    import rdzv.torch
    from rdzv.torch.group import RoundGroup
    from rdzv.torch.store import TorchStore

    os.environ[MARK] = str(os.getppid())
    torch.set_num_threads(1)
    killer = Killer(pipe, name, moment)
    killer.watch(TorchStore)
    threading.Thread(target=killer.listen, daemon=True).start()

    def before(method: Callable[[Any], None], also: Callable[[], None]) -> Callable[[Any], None]:
        def call(group: Any) -> None:
            also()
            method(group)

        return call

    setattr(RoundGroup, "abort", before(RoundGroup.abort, lambda: pipe.send(("aborted", name))))  # noqa: B010
    setattr(RoundGroup, "make", before(RoundGroup.make, killer.group_begins))  # noqa: B010
    part = Part(pipe, name, lambda: flaps and not killer.told)
    awaits = int(name.rpartition("-")[2]) % 2 == 1
    while True:
        # A member that joins again may find the run closed, which raises.
        with contextlib.suppress(rdzv.RendezvousClosedError):
            try:
                if awaits:
                    asyncio.run(part.take_awaiting(rdzv.torch.rounds(url, node_id=name)))
                else:
                    part.take(rdzv.torch.rounds(url, node_id=name))
            except Away:
                continue
        break
    pipe.send(("end", name))


class Part:
    """One member's part in the rounds: steps until each ends."""

    def __init__(self, pipe: Connection, name: str, leaves: Callable[[], bool]) -> None:
        self._pipe, self._name, self._leaves = pipe, name, leaves
        self._step = 0

    def take(self, rounds: Any) -> None:
        """Go through the rounds, blocking."""
        self._step = 0
        with contextlib.closing(rounds):
            for round in rounds:
                with round:
                    leave = self._leaves()
                    self._step = round.sync_state(extra=self._step)
                    for made in itertools.count():
                        round.check(self._step)
                        self._make_step(round, made, leave)

    async def take_awaiting(self, rounds: Any) -> None:
        """Go through the rounds, awaiting."""
        self._step = 0
        async with contextlib.aclosing(rounds):
            async for round in rounds:
                async with round:
                    leave = self._leaves()
                    self._step = await round.sync_state(extra=self._step)
                    for made in itertools.count():
                        await round.check(self._step)
                        await round.in_thread(self._make_step, round, made, leave)

    def _make_step(self, round: Any, made: int, leave: bool) -> None:
        import torch
        import torch.distributed as dist

        total = torch.ones(256)
        dist.all_reduce(total)
        assert float(total[0]) == round.world_size
        self._step += 1
        if made == TOGETHER:
            steps = Steps(round.number, round.world_size, time.monotonic(), leave)
            self._pipe.send(("steps", self._name, steps, _held()))
            if leave:
                raise Away
        time.sleep(STEP)


@dataclass(frozen=True)
class Steps:
    """The first steps of a member in its last round."""

    round: int = -1
    size: int = 0
    at: float = 0.0
    leaves: bool = False  # in the middle of the next


@dataclass(frozen=True)
class Held:
    """The resources of a process that must not grow."""

    threads: int
    descriptors: int
    memory: int  # KiB


def _of_all(choose: Callable[[Iterable[int]], int], held: Sequence[Held]) -> Held:
    """Return the maximum or minimum of each resource."""
    return Held(*(choose(column) for column in zip(*map(astuple, held), strict=True)))


def _held() -> Held:
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), memory)


# --------------------------------------------------------------------------------------------- all of them


@dataclass
class Crowd:
    """All members, and their reports."""

    url: str
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    pipes: dict[str, Connection] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)
    held: dict[str, list[tuple[int, Held]]] = field(default_factory=dict)  # with the size of the round
    killed: dict[str, float] = field(default_factory=dict)  # and when
    aborted: int = 0
    numbers: Any = field(default_factory=itertools.count)
    target: ClassVar[Callable[..., None]] = staticmethod(member)

    def start(self, *arguments: Any, **keywords: Any) -> str:
        """Start one more member; return its name."""
        name = f"member-{next(self.numbers)}"
        ours, theirs = support.CONTEXT.Pipe()
        process = support.CONTEXT.Process(
            target=self.target, args=(theirs, self.url, name, *arguments), kwargs=keywords
        )
        process.start()
        theirs.close()
        self.processes[name], self.pipes[name], self.steps[name] = process, ours, Steps()
        return name

    def read_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Read reports until the condition holds."""
        while not condition():
            ready = wait(list(self.pipes.values()), timeout=PATIENCE)
            if not ready:
                raise TimeoutError(f"nobody says anything for {PATIENCE:g} s, waiting for {what}: {self.steps}")
            for name, pipe in list(self.pipes.items()):
                if pipe in ready:
                    try:
                        self._take(pipe.recv())
                    except (EOFError, ConnectionResetError):
                        del self.pipes[name]
                        self._ended(name)

    def _take(self, said: Any) -> None:
        match said:
            case ("steps", name, steps, held):
                self.steps[name] = steps
                self.held.setdefault(name, []).append((steps.size, held))
            case ("killed", name, at):
                self.killed[name] = at
            case ("aborted", _):
                self.aborted += 1

    def _ended(self, name: str) -> None:
        """Record a member's end; `end` checks its status."""

    @property
    def alive(self) -> list[str]:
        """Return the members that take part, the oldest first."""
        return [name for name in self.pipes if name not in self.killed]

    def together(self, size: int, *, after: float = 0.0) -> Callable[[], bool]:
        """Return a condition: `size` members take part in one round since a moment."""

        def are() -> bool:
            of = [self.steps[name] for name in self.alive]
            same = len({steps.round for steps in of}) == 1
            return len(of) == size and same and all(it.size == size and it.at > after for it in of)

        return are

    def gone(self, name: str) -> Callable[[], bool]:
        """Return a condition: a member has ended."""
        return lambda: name not in self.pipes

    def end(self) -> None:
        """Close the run, and check that all members end well and leave no process."""
        asyncio.run(_close(self.url))
        self.read_until("the end", lambda: not self.pipes)
        for name, process in self.processes.items():
            process.join(PATIENCE)
            expected = -signal.SIGKILL if name in self.killed else 0
            assert process.exitcode == expected, (name, process.exitcode)
        assert not _left_behind(), _left_behind()

    def kill(self) -> None:
        """Kill all members."""
        for process in self.processes.values():
            process.kill()
            process.join()


def _left_behind() -> list[str]:
    """Return members' processes that still live, or are zombies."""
    ours = f"{MARK}={os.getpid()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and ours in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


async def _close(url: str) -> None:
    async with rdzv.connect(url) as handler:
        await handler.set_closed("enough")


async def drain(url: str, name: str) -> None:
    """Tell a member to leave."""
    async with rdzv.connect(url) as handler:
        assert isinstance(handler, Handler)
        await handler.drain(within=PATIENCE, reason="its turn", node_id=name)


async def _members(url: str) -> set[str]:
    async with rdzv.connect(url) as handler:
        return {who.node_id for who in (await handler.status()).members}


# --------------------------------------------------------------------------------------------- what is played


def drains(crowd: Crowd, changes: int) -> str:
    """Play `changes` arrivals and drains."""
    for _ in range(STANDING):
        crowd.start()
    crowd.read_until("the first round", crowd.together(STANDING))
    crowd.aborted = 0  # a late arrival to the first round aborts one
    for _ in range(changes):
        crowd.start()
        crowd.read_until("an arrival", crowd.together(STANDING + 1))
        oldest = crowd.alive[0]
        asyncio.run(drain(crowd.url, oldest))
        crowd.read_until("a drain", crowd.gone(oldest))
        crowd.read_until("the others", crowd.together(STANDING))
    assert crowd.aborted == 0, f"{crowd.aborted} groups were aborted"
    return f"{changes} arrivals and {changes} drains, no collective aborted"


def rounds(crowd: Crowd, number: int) -> str:
    """Play `number` rounds; a member leaves each in the middle of a step, or joins again."""
    stays, awaits = crowd.start(), crowd.start()
    crowd.read_until("the first round", crowd.together(2))
    flaps = crowd.start(flaps=True)
    crowd.read_until("the rounds", lambda: crowd.steps[stays].round >= number)
    crowd.pipes[flaps].send(None)
    crowd.read_until("the end", lambda: not crowd.steps[flaps].leaves and crowd.together(STANDING)())
    said = []
    for name in (stays, awaits):
        held = [it for size, it in crowd.held[name] if size == STANDING]
        # A group's threads end during the next round and do not count as growth.
        first, last = _of_all(max, held[: min(SETTLED_AFTER, len(held) // 2) + 1]), _of_all(min, held[-3:])
        assert last.threads <= first.threads, (first, last)
        assert last.descriptors <= first.descriptors + DESCRIPTORS_NOISE, (first, last)
        assert last.memory <= first.memory + MEMORY_NOISE + OF_PYTORCH * number, (first, last)
        said.append(f"{first}, then {last}")
    of_both = f"held by who blocks: {said[0]}; by who awaits: {said[1]}"
    return f"{number} rounds, {crowd.aborted} groups aborted at one member or another; {of_both}"


def moments(number: int) -> list[Moment]:
    """Return calls and times, in turn, over the making of a group, which takes some 15 ms and 6 calls.

    The fourth call comes first: it reads the others' addresses, so a member killed there has announced its own, and the
    others connect to it, or wait for it.
    """
    return [
        ("call", (turn // 4 + 3) % 6) if turn % 2 else ("after", 0.001 * (turn // 2 * 7 % 24)) for turn in range(number)
    ]


def kills(crowd: Crowd, number: int) -> str:
    """Play `number` kills while groups are made."""
    for _ in range(STANDING):
        crowd.start()
    crowd.read_until("the first round", crowd.together(STANDING))
    took: dict[float, str] = {}  # with the moment
    for turn, moment in enumerate(moments(number)):
        if turn % 4 < 2:
            victim = crowd.start(moment)
        else:  # the oldest dies while it makes a group with a newcomer
            victim = crowd.alive[0]
            crowd.pipes[victim].send(moment)
            crowd.start()
        crowd.read_until(f"a kill, {moment}", lambda victim=victim: victim in crowd.killed)  # type: ignore[misc]
        killed = crowd.killed[victim]
        crowd.read_until(f"the others, {moment}", crowd.together(STANDING, after=killed))
        seconds = max(crowd.steps[name].at for name in crowd.alive) - killed
        took[seconds] = f"{'a newcomer' if turn % 4 < 2 else 'the oldest'}, {moment}"
    members = asyncio.run(_members(crowd.url))
    assert members == set(crowd.alive), (members, crowd.alive)
    return (
        f"{number} kills while a group was made: the others have made {TOGETHER} steps without the dead after "
        f"{support.median(list(took)):.2f} s (median), {max(took):.2f} s (worst: {took[max(took)]})"
    )


PLAYED: Final[dict[str, tuple[Callable[[Crowd, int], str], str]]] = {
    "drains": (drains, "changes"),
    "rounds": (rounds, "rounds"),
    "kills": (kills, "kills"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLAYED, default=list(PLAYED), help="what to play")
    parser.add_argument("--changes", type=int, default=50, help="arrivals, and drains (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--kills", type=int, default=80, help="(default: %(default)s)")
    options = parser.parse_args()
    if not support.HAS_TORCH:
        sys.exit("PyTorch is not installed")
    print(support.describe_machine(), flush=True)
    for name in options.only:
        play, count = PLAYED[name]
        with support.serving() as endpoint:
            crowd = Crowd(f"{endpoint}/{name}?min_nodes=2&max_nodes={STANDING + 1}&last_call_timeout=1&is_host=false")
            try:
                told = play(crowd, getattr(options, count))
                crowd.end()
            finally:
                crowd.kill()
        print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    main()
