"""A job of DDP in the loop of `rdzv.torch.rounds` under faults of all kinds: real processes, a real host, real gloo.

    python -m benchmarks.torch_faults --seconds 1200 --busy 1

Five members train one model beside busy loops. Faults come in an order drawn by `--seed`: members are killed, stopped
and drained, the run is resized, and the store's host is killed and started again on its data. After each, all that live
must make steps together. The command fails unless all of this holds:

- The members of a round have the same parameters after each step, bit by bit. The final ones are those of one process
  that makes every step once.
- Every member that is not killed ends well, and none with the error of another.
- TCP connections unrelated to the job, which each member opens and closes all the time, keeping one, carry every byte.

The output has the number of each fault, and the time from the kill of members to the first step of all others. Every
other member awaits its rounds; the others block.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import rdzv
import store.sync
from benchmarks import support
from benchmarks.torch_churn import MARK, PATIENCE, Crowd, drain
from benchmarks.torchrun import free_port
from rdzv.node.handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

MEMBERS: Final = 5
STEP: Final = 0.01  # seconds
WIDTH: Final = 8  # columns of a batch, and its examples
CLOSE: Final = 1e-9  # sums of some 1e5 gradients, each a mean over 2 to 5 members, with different rounding
FOREIGN: Final = 20  # unrelated connections of a member
# Rarely gloo loses a send whose connection closes at that moment: a member stopped for a `ttl` may wait so long.
COLLECTIVES_TIMEOUT: Final = timedelta(minutes=1)
SHORT_STOP, LONG_STOP = 3.0, 13.0  # seconds: less than a `ttl`, and more


# --------------------------------------------------------------------------------------------- one member


def new_model() -> tuple[Any, Any]:
    """Return a model and its optimizer, the same on every member."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def train(model: Any, optimizer: Any, step: int, rank: int = 0, size: int = 1) -> None:
    """Make one step. Each rank has a batch of its own; the mean over all is that of a process alone.

    The gradient does not depend on the parameters, so a lost or repeated step stays visible.
    """
    import torch

    batch = torch.sin(torch.arange(WIDTH * WIDTH, dtype=torch.float64) + step).reshape(WIDTH, WIDTH)
    optimizer.zero_grad()
    model(batch + (rank - (size - 1) / 2)).mean().backward()
    optimizer.step()


def parameters(model: Any) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())


def echo_for_ever(pipe: Connection, name: str) -> None:
    """Open and close connections to this process all the time; report each that does not carry its bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    connections: collections.deque[tuple[socket.socket, socket.socket]] = collections.deque()

    def opened() -> tuple[socket.socket, socket.socket]:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]

    def carries(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.sendall(b"?")
            if other.recv(1) == b"?":
                return
        pipe.send(("broken", name))

    kept = opened()
    while True:
        connections.append(opened())
        carries(*kept)
        if len(connections) == FOREIGN:
            oldest = connections.popleft()
            carries(*oldest)
            for end in oldest:
                end.close()
        time.sleep(STEP)


def member(pipe: Connection, url: str, name: str) -> None:
    """Take part until the run is closed, or until this member is drained."""
    import torch

    import rdzv.torch

    os.environ[MARK] = str(os.getppid())
    torch.set_num_threads(1)
    threading.Thread(target=echo_for_ever, args=(pipe, name), daemon=True).start()
    trainee = Trainee(pipe, name)
    rounds = rdzv.torch.rounds(url, node_id=name, timeout=COLLECTIVES_TIMEOUT)
    if int(name.rpartition("-")[2]) % 2 == 1:
        asyncio.run(trainee.take_awaiting(rounds))
    else:
        trainee.take(rounds)
    pipe.send(("end", name))


class Trainee:
    """One member's part in the rounds."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self._pipe, self._name = pipe, name
        self._model, self._optimizer = new_model()
        self._step = 0

    def take(self, rounds: Any) -> None:
        """Go through the rounds, blocking."""
        for round in rounds:
            with round:
                self._step = round.sync_state(self._model, self._optimizer, self._step)
                wrapped = self._wrapped()
                while True:
                    round.check(self._step)
                    self._make_step(round, wrapped)

    async def take_awaiting(self, rounds: Any) -> None:
        """Go through the rounds, awaiting."""
        async for round in rounds:
            async with round:
                self._step = await round.sync_state(self._model, self._optimizer, self._step)
                wrapped = await round.in_thread(self._wrapped)
                while True:
                    await round.check(self._step)
                    await round.in_thread(self._make_step, round, wrapped)

    def _wrapped(self) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(self._model)

    def _make_step(self, round: Any, wrapped: Any) -> None:
        train(wrapped, self._optimizer, self._step, round.rank, round.world_size)
        self._step += 1
        made = Made(round.number, round.world_size, self._step, time.monotonic(), parameters(self._model))
        self._pipe.send(("made", self._name, made))
        time.sleep(STEP)


@dataclass(frozen=True)
class Made:
    """A step that a member has made."""

    round: int = -1
    size: int = 0
    step: int = 0
    at: float = 0.0
    parameters: bytes = b""


# --------------------------------------------------------------------------------------------- all of them


@dataclass
class Job(Crowd):
    """All members, the host of their store, and their reports."""

    port: int = 0
    folder: str = ""
    last: dict[str, Made] = field(default_factory=dict)
    first: dict[str, Made] = field(default_factory=dict)  # in its last round
    states: dict[tuple[int, int], bytes] = field(default_factory=dict)  # after a step of a round
    leaving: set[str] = field(default_factory=set)
    steps_seen: int = 0
    broken: int = 0
    host: subprocess.Popen[bytes] | None = None
    target = staticmethod(member)

    def start_host(self) -> None:
        """Serve the store from its disk."""
        command = ["-m", "rdzv", "serve", "--data-dir", self.folder, "--port", str(self.port)]
        self.host = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
        with store.sync.connect(f"tcp://127.0.0.1:{self.port}", timeout=PATIENCE):
            """It listens."""

    def kill_host(self) -> None:
        assert self.host is not None
        self.host.kill()
        self.host.wait()

    def kill_members(self, number: int = 1) -> None:
        """Kill some members by SIGKILL."""
        for name in random.sample(self.alive, number):
            self.killed[name] = time.monotonic()
            self.processes[name].kill()

    def _take(self, said: Any) -> None:
        match said:
            case ("made", name, made):
                if made.round != self.last.get(name, Made()).round:
                    self.first[name] = made
                self.last[name] = made
                self.steps_seen += 1
                state = self.states.setdefault((made.round, made.step), made.parameters)
                assert state == made.parameters, f"{name} differs from others: {made}"
                if len(self.states) > 1000:
                    del self.states[next(iter(self.states))]
            case ("broken", _):
                self.broken += 1
            case ("end", name):
                assert name in self.leaving, f"{name} has ended before its time"

    def _ended(self, name: str) -> None:
        assert name in self.killed or name in self.leaving, f"{name} has ended: {self.processes[name]}"

    def settled(self, size: int, *, after: float) -> Callable[[], bool]:
        """Return a condition: exactly `size` members have made steps in the newest round since a moment."""

        def are() -> bool:
            of = [self.last.get(name, Made()) for name in self.alive]
            newest = max(made.round for made in of)
            recent = [made for made in of if made.round == newest and made.size == size and made.at > after]
            return len(recent) == size

        return are

    def complete(self) -> None:
        """Start the missing members, and check that all train."""
        while len(self.alive) < MEMBERS:
            self.start()
        self.read_until("all to train", self.settled(MEMBERS, after=time.monotonic()))


# --------------------------------------------------------------------------------------------- what happens


def lose(job: Job, number: int = 1, *, of_the_host: bool = False) -> float:
    """Kill members, perhaps right after the host's return; return seconds until all others have made a step."""
    if of_the_host:
        restart(job)
    job.kill_members(number)
    killed = time.monotonic()
    job.read_until("the others to go on", job.settled(MEMBERS - number, after=killed))
    return max(job.first[name].at for name in job.alive) - killed


def restart(job: Job) -> None:
    """Kill the host; it is back a moment later."""
    job.kill_host()
    time.sleep(random.random())
    job.start_host()


def go_on(job: Job) -> None:
    """Kill the host and restart it while all train on."""
    restart(job)
    time.sleep(1.0)


def drain_one(job: Job) -> None:
    """Drain a member."""
    name = random.choice(job.alive)
    job.leaving.add(name)
    asyncio.run(drain(job.url, name))
    job.read_until("a drain", job.gone(name))


def stop_one(job: Job, seconds: float) -> None:
    """Stop a member for `seconds`."""
    pid = job.processes[random.choice(job.alive)].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
    job.read_until("the end of a stop", job.settled(MEMBERS, after=time.monotonic() + seconds))


def resize(job: Job) -> None:
    """Resize to one less, and back."""
    asyncio.run(_resize(job.url, MEMBERS - 1))
    job.read_until("one to wait", job.settled(MEMBERS - 1, after=time.monotonic()))
    asyncio.run(_resize(job.url, MEMBERS))


async def _resize(url: str, size: int) -> None:
    async with rdzv.connect(url) as handler:
        assert isinstance(handler, Handler)
        await handler.resize(max_nodes=size)


FAULTS: Final[tuple[tuple[str, Callable[[Job], float | None]], ...]] = (
    *[("a member killed", lose)] * 5,
    ("two members killed at once", partial(lose, number=2)),
    ("the host killed", go_on),
    ("the host killed, and a member as it is back", partial(lose, of_the_host=True)),
    ("a member drained", drain_one),
    ("a short stop", partial(stop_one, seconds=SHORT_STOP)),
    ("a long stop", partial(stop_one, seconds=LONG_STOP)),
    ("resized", resize),
)
"""The faults, in another order in each lap; a float is the duration of a loss."""


@dataclass
class Seen:
    """The faults of one kind.

    Attributes:
        next_steps: Seconds from kill to the first step of all others.
        complete: Seconds until all members train together again.
    """

    next_steps: list[float] = field(default_factory=list)
    complete: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        told = f"{len(self.complete)}; all together again after "
        told += f"{support.median(self.complete):.2f} s (median), {max(self.complete):.2f} s (worst)"
        if self.next_steps:
            told += f"; next step of the others after {support.median(self.next_steps):.3f} s (median), "
            told += f"{max(self.next_steps):.2f} s (worst)"
        return told


def play(job: Job, seconds: float, only: Sequence[str]) -> dict[str, Seen]:
    """Play one fault after the other for `seconds`; return the results."""
    faults = [fault for fault in FAULTS if fault[0] in only]
    seen = {name: Seen() for name, _ in faults}
    job.complete()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, happens in random.sample(faults, len(faults)):
            pause = time.monotonic() + random.random()
            job.read_until("steps between", lambda pause=pause: time.monotonic() > pause)  # type: ignore[misc]
            began = time.monotonic()
            took = happens(job)
            if took is not None:
                seen[name].next_steps.append(took)
            job.complete()
            seen[name].complete.append(time.monotonic() - began)
            assert not job.broken, f"{job.broken} foreign connections are broken, after: {name}"
    return seen


def difference_from_one_process(job: Job) -> float:
    """Return the distance of the newest state from that of a process which has made each step once."""
    import torch

    newest = max(job.last.values(), key=lambda made: made.step)
    model, optimizer = new_model()
    for step in range(newest.step):
        train(model, optimizer, step)
    ours = torch.frombuffer(bytearray(newest.parameters), dtype=torch.float64)
    alone = torch.frombuffer(bytearray(parameters(model)), dtype=torch.float64)
    return float((ours - alone).abs().max())


def spin(_: Connection) -> None:
    """Occupy a core."""
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="(default: %(default)s)")
    names = list(dict(FAULTS))
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="FAULT", help="what happens, by name"
    )
    parser.add_argument("--busy", type=int, default=1, help="loops that take a core each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.getrandbits(32), help="of the faults' order")
    options = parser.parse_args()
    if not support.HAS_TORCH:
        sys.exit("PyTorch is not installed")
    print(f"{support.describe_machine()}; seed {options.seed}", flush=True)
    random.seed(options.seed)
    port = free_port()
    url = f"tcp://127.0.0.1:{port}/job?min_nodes=2&max_nodes={MEMBERS}&last_call_timeout=1&is_host=false"
    with support.workers(*[(spin,)] * options.busy), tempfile.TemporaryDirectory() as folder:
        job = Job(url, port=port, folder=folder)
        try:
            job.start_host()
            seen = play(job, options.seconds, options.only)
            job.leaving.update(job.alive)
            job.end()
        finally:
            job.kill()
            job.kill_host()
        apart = difference_from_one_process(job)
    for name, what in seen.items():
        print(f"{name}: {what}", flush=True)
    newest = max(made.step for made in job.last.values())
    rounds = max(made.round for made in job.last.values()) + 1
    of_the_host = sum(len(what.complete) for name, what in seen.items() if "host" in name)
    print(
        f"{len(job.killed)} SIGKILLs of members and {of_the_host} of the host; {newest} steps in {rounds} rounds; of "
        f"{job.steps_seen} states none differs from the others' of its step, and the last by {apart:.1e} from one "
        f"process's; no foreign connection is broken",
        flush=True,
    )
    assert apart < CLOSE, apart


if __name__ == "__main__":
    main()
