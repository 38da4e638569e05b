"""A run of real processes with faults: processes are killed, stopped, cut off; the store is restarted.

Every node is a process of its own (`tests.chaos.node`), half of them blocking, each behind a proxy of its own. A seed
decides the faults, their nodes and times. One fault in three strikes the coordinator. The timing of the processes
depends on the machine. Then it is calm, and all live nodes must come to one round. Two fixed scenes follow: the
coordinator is killed, and one node stands still for longer than its TTL. In the end the run is closed.
`tests.chaos.checker` checks the lines of the nodes against the promises.
"""

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import rdzv
import store
from tests.chaos.checker import Fault, Stay, Violation, check, false_alarms, stays_of
from tests.support.processes import Child, free_port, start_python
from tests.support.proxy import Proxy

__all__ = ["QUIET_WITHIN", "Chaos", "Life", "Outcome", "Seat", "Store", "chaos", "lines_of"]

TTL = 2.0
PREFIX = "/chaos"
PARAMETERS = f"disconnect_ttl=0.5&last_call_timeout=0.5&join_timeout=60&close_timeout=10&is_host=0&prefix={PREFIX}"
TOLD_WITHIN = (
    8  # seconds after the TTL of a dead node: two coordinators that stand still (3 s each), and a busy machine
)
TOLD_IN_QUIET = 8.0  # seconds, without other faults: its TTL, the coordinator's, an election, and a busy machine
QUIET_WITHIN = 30.0  # seconds in which all nodes must come to one round after the last fault
# seconds: short ones without effect, and long ones after which the node is dropped
PAUSES = ((0.2, 1.0), (TTL + 1.5, TTL + 3))
HOLES = ((0.2, 0.8), (TTL + 0.5, TTL + 3))
FAULTS = ("kill", "kill", "pause", "pause", "cut", "hole", "refuse", "store")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The counts of a run, which show whether anything happened in it.

    Attributes:
        rounds: The number of rounds.
        writes: The number of lines about writes to rounds' stores.
        fenced: The number of writes that were refused, since their round was over.
        dropped: The number of times that a node was told that it was dropped.
        false_alarms: The number of members that were lost without any other fault than reset connections.
        faults: The number of faults of each kind.
        announced: The number of announced changes of each kind; with several hosts, of turns.
        stores: The number of stores that have served, with several hosts.
    """

    rounds: int
    writes: int
    fenced: int
    dropped: int
    false_alarms: int
    faults: Counter[str]
    announced: Counter[str] = field(default_factory=Counter)
    stores: int = 0


@dataclass(slots=True)
class Life:
    """One process, and the time when it was killed."""

    node: str
    child: Child
    stack: contextlib.AsyncExitStack
    killed_at: float | None = None


@dataclass(slots=True)
class Seat:
    """A node's name, its proxy, and its present process."""

    node: str
    twin: str
    proxy: Proxy
    life: Life | None = None
    busy: bool = False  # it has a fault


class Store:
    """The store of the run: a durable one of our own, which may be killed, or one that runs already."""

    def __init__(self, url: str | None) -> None:
        self.ours = url is None
        self._stack = contextlib.AsyncExitStack()
        self._server: contextlib.AsyncExitStack | None = None
        scheme, _, rest = (url or "tcp://").partition("://")
        host, _, port = rest.partition(":")
        self.scheme, self.host = scheme, host or "127.0.0.1"
        self.port = int(port) if port else free_port()

    async def __aenter__(self) -> Self:
        if self.ours:
            self._directory = self._stack.enter_context(tempfile.TemporaryDirectory())
            await self.start()
        return self

    async def start(self) -> None:
        """Start the store, with the data of the previous process."""
        self._server = contextlib.AsyncExitStack()
        arguments = ("--port", str(self.port), "--data-dir", self._directory)
        child = await self._server.enter_async_context(start_python("-m", "rdzv", "serve", *arguments))
        await child.says("listens on", timeout=30)

    async def kill(self) -> None:
        """Kill the store."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.aclose()  # kills the process

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        await self._stack.aclose()


@dataclass(slots=True)
class Chaos:
    """One run.

    Attributes:
        store: The store of the nodes.
        run_id: The id of the run.
        nodes: The number of nodes.
        rng: Decides the faults.
        say: Called with lines about the run.
        module: The program of each node.
        ttl: The TTL of the nodes' leases.
    """

    store: Store
    run_id: str
    nodes: int
    rng: random.Random
    say: Callable[[str], None]
    module: str = "tests.chaos.node"
    ttl: float = TTL
    seats: dict[str, Seat] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    restarting: bool = False

    def url(self, port: int | None = None, *, joining: bool = True) -> str:
        """Return the URL of the run, through the proxy at a port if one is given."""
        where = f"{self.store.scheme}://{self.store.host if port is None else '127.0.0.1'}:{port or self.store.port}"
        nodes = f"min_nodes=2&max_nodes={self.nodes}&" if joining else ""
        return f"{where}/{self.run_id}?{nodes}ttl={self.ttl}&{PARAMETERS}"

    async def start(self, seat: Seat) -> None:
        """Start a new process for a node."""
        stack = contextlib.AsyncExitStack()
        arguments = ("-m", self.module, self.url(seat.proxy.port), seat.node, seat.twin)
        child = await stack.enter_async_context(start_python(*arguments))
        seat.life = Life(seat.node, child, stack)
        self.lives.append(seat.life)

    async def play(self, seconds: float) -> Outcome:
        """Play the run: faults, a calm phase, the closing, and the checks."""
        async with contextlib.AsyncExitStack() as stack:
            for number in range(self.nodes):
                proxy = await stack.enter_async_context(Proxy(self.store.host, self.store.port))
                seat = Seat(f"n{number}", "blocking" if number % 2 else "awaited", proxy)
                self.seats[seat.node] = seat
            try:
                async with asyncio.TaskGroup() as group:
                    for seat in self.seats.values():
                        group.create_task(self.start(seat))
                await self.play_scenes(seconds)
                outcome = self.judge()
            except BaseException as error:
                for life in self.lives:
                    error.add_note(f"--- {life.node}, killed at {life.killed_at}\n{life.child.written()[-3000:]}")
                error.add_note("\n".join(map(str, self.faults)))
                raise
            finally:
                for life in self.lives:
                    await life.stack.aclose()
        return outcome

    async def play_scenes(self, seconds: float) -> None:
        """Play faults, a calm phase, and the closing."""
        async with rdzv.connect(self.url(joining=False)) as observer:
            await self.trouble(seconds, observer)
            await self.quiet(observer)
            await self.close(observer)

    async def trouble(self, seconds: float, observer: rdzv.Handler) -> None:
        """Strike nodes and the store, several at a time."""
        await self.until(lambda: len(self.stays()) >= self.nodes, within=QUIET_WITHIN, what="come to a first round")
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                kind = self.rng.choice(FAULTS)
                if kind == "store":
                    if self.store.ours and not self.restarting:
                        group.create_task(self.restart_store())
                else:
                    seat = await self.choose(observer)
                    if seat is not None:
                        seat.busy = True
                        group.create_task(self.meddle(kind, seat))
                await asyncio.sleep(self.rng.uniform(0.3, 1.2))

    async def choose(self, observer: rdzv.Handler) -> Seat | None:
        """Return a node without a fault, often the coordinator; None while half of the nodes have a fault."""
        free = [seat for seat in self.seats.values() if not seat.busy]
        if 2 * len(free) <= self.nodes:
            return None
        if self.rng.random() < 1 / 3:
            with contextlib.suppress(TimeoutError, rdzv.RendezvousError):
                status = await asyncio.wait_for(observer.status(), 0.5)
                free = [seat for seat in free if seat.node == status.coordinator] or free
        return self.rng.choice(free)

    async def meddle(self, kind: str, seat: Seat) -> None:
        """Strike one node with one fault, and end the fault."""
        assert seat.life is not None
        began = time.monotonic()
        match kind:
            case "kill":
                seat.life.child.kill()
                seat.life.killed_at = time.monotonic()
                await asyncio.sleep(self.rng.uniform(0, 2))
                await self.start(seat)
            case "pause":
                seat.life.child.stop()
                began = time.monotonic()
                await asyncio.sleep(self.rng.uniform(*self.rng.choice(PAUSES)))
                ended = time.monotonic()
                seat.life.child.resume()
                self.faults.append(Fault(kind, seat.node, began, ended))
            case "cut":
                seat.proxy.cut()
            case "hole":
                seat.proxy.black_hole()
                await asyncio.sleep(self.rng.uniform(*self.rng.choice(HOLES)))
                seat.proxy.heal()
            case _:
                await seat.proxy.refuse()
                seat.proxy.cut()
                await asyncio.sleep(self.rng.uniform(0.1, 1.5))
                await seat.proxy.accept()
        if kind != "pause":
            self.faults.append(Fault(kind, seat.node, began, time.monotonic()))
        self.say(f"{kind} {seat.node}, {time.monotonic() - began:.1f} s")
        seat.busy = False

    async def restart_store(self) -> None:
        """Kill the store, and start it again."""
        self.restarting = True
        began = time.monotonic()
        await self.store.kill()
        await asyncio.sleep(self.rng.uniform(0, 1))
        await self.store.start()
        self.faults.append(Fault("store", None, began, time.monotonic()))
        self.say(f"restart of the store, {time.monotonic() - began:.1f} s")
        self.restarting = False

    async def quiet(self, observer: rdzv.Handler) -> None:
        """Wait until all nodes are in one round. Then play the two fixed scenes."""
        await self.until(self.settled, within=QUIET_WITHIN, what="come to one round, and stay in it")
        await self.kill_the_coordinator(observer)
        await self.let_one_stand_still()
        await self.nothing_is_left_behind()

    async def kill_the_coordinator(self, observer: rdzv.Handler) -> None:
        """R5, R7: without other faults, all nodes are told at once, and a newcomer of the same name is accepted."""
        seat = self.seats[(await observer.status()).coordinator or "n0"]
        assert seat.life is not None
        others = [other for other in self.seats.values() if other is not seat]
        began = time.monotonic()  # others may be told before `kill` returns
        seat.life.child.kill()
        seat.life.killed_at = time.monotonic()
        self.faults.append(Fault("kill", seat.node, began, seat.life.killed_at))

        def all_are_told() -> bool:
            return all(
                any(
                    at > began and kind == "NodesLost" and seat.node in ids
                    for stay in self.stays_at(other)
                    for at, kind, ids in stay.told
                )
                for other in others
            )

        await self.until(all_are_told, within=TOLD_IN_QUIET, what=f"hear that {seat.node} was killed (R5)")
        await self.start(seat)
        await self.until(self.in_one_round, within=QUIET_WITHIN, what="come to one round after a kill")

    async def let_one_stand_still(self) -> None:
        """R9: the others continue without it. When it resumes, it is told, and may join again."""
        seat = self.seats["n1"]
        assert seat.life is not None
        others = [other for other in self.seats.values() if other is not seat]
        began = time.monotonic()
        seat.life.child.stop()
        try:
            await self.until(
                lambda: self.in_one_round(others),
                within=2 * TTL + TOLD_WITHIN,
                what="go on without one that stands still",
            )
        finally:
            resumed_at = time.monotonic()
            seat.life.child.resume()
        self.faults.append(Fault("pause", seat.node, began, resumed_at))

        def it_is_told() -> bool:
            return any(stay.began < began < resumed_at < stay.ended and stay.end for stay in self.stays_at(seat))

        await self.until(it_is_told, within=TOLD_IN_QUIET, what=f"see {seat.node} dropped, which stood still (R9)")
        await self.until(self.in_one_round, within=QUIET_WITHIN, what="come to one round after a pause")

    async def nothing_is_left_behind(self) -> None:
        """Check that no data of rounds that are over, or of zombies' writes to them, is in the store."""
        where = f"{self.store.scheme}://{self.store.host}:{self.store.port}"
        root = f"{PREFIX}/{self.run_id}/rounds/"
        async with store.connect(where) as client:
            numbers = {entry.key.removeprefix(root).split("/")[0] for entry in await client.list(root)}
        if len(numbers) != 1:
            raise Violation(f"R10: of the rounds {sorted(numbers)} something is in the store, and one is current")

    async def close(self, observer: rdzv.Handler) -> None:
        """R6: all are told, and end."""
        await observer.set_closed("chaos is over")
        await self.all_end()

    async def all_end(self) -> None:
        """Wait until all nodes have ended, as the run is closed."""
        for seat in self.seats.values():
            assert seat.life is not None
            assert await seat.life.child.wait(timeout=QUIET_WITHIN) == 0
            if self.lines_of(seat)[-1]["what"] != "closed":
                raise Violation(f"R6: {seat.node} was not told that the run is closed; {seat.life.child.written()}")

    def in_one_round(self, seats: Sequence[Seat] = ()) -> bool:
        """Return True if these nodes, or all, are in the same round, without others."""
        seats = seats or tuple(self.seats.values())
        last = []
        for seat in seats:
            stays = self.stays_at(seat)
            if not stays or stays[-1].end:
                return False
            last.append(stays[-1])
        return len({stay.round for stay in last}) == 1 and last[0].size == len(seats)

    def settled(self) -> bool:
        """Return True if all have been in one round for a TTL, so that earlier faults have no effect any more."""
        return self.in_one_round() and all(
            self.stays_at(seat)[-1].began < time.monotonic() - TTL for seat in self.seats.values()
        )

    def stays_at(self, seat: Seat) -> list[Stay]:
        """Return all stays of a node's present process."""
        return stays_of(seat.node, self.lines_of(seat))

    def lines_of(self, seat: Seat) -> list[dict[str, Any]]:
        """Return the lines of a node's present process."""
        assert seat.life is not None
        return lines_of(seat.life.child)

    async def until(self, condition: Callable[[], bool], *, within: float, what: str) -> None:
        """Wait until a condition on the lines is true."""
        try:
            async with asyncio.timeout(within):
                while not condition():  # noqa: ASYNC110  there is no event for the output of six processes
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise Violation(f"the nodes did not {what} within {within:g} s") from None

    def stays(self) -> list[Stay]:
        """Return all stays so far, of all processes."""
        return [
            stay for life in self.lives for stay in stays_of(life.node, lines_of(life.child), killed_at=life.killed_at)
        ]

    def judge(self) -> Outcome:
        """Check the lines of the nodes against the promises."""
        lines = [(life.node, line) for life in self.lives for line in lines_of(life.child)]
        writes = [(node, line) for node, line in lines if line["what"] == "wrote"]
        stays = self.stays()
        told_within = self.ttl + TOLD_WITHIN
        check(stays, writes, self.faults, ttl=self.ttl, told_within=told_within, over_at=time.monotonic())
        return Outcome(
            rounds=len({stay.round for stay in stays}),
            writes=len(writes),
            fenced=sum(line["what"] == "fenced" for _, line in lines),
            dropped=sum(line.get("kind") == "Dropped" for _, line in lines),
            false_alarms=false_alarms(stays, self.faults),
            faults=Counter(fault.kind for fault in self.faults),
        )


def lines_of(child: Child) -> list[dict[str, Any]]:
    """Return the lines of a node. A line that was cut short by a kill does not count."""
    lines = []
    for line in child.stdout:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


async def chaos(
    *, seconds: float, seed: int, nodes: int = 6, url: str | None = None, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Play one run.

    Args:
        seconds: The length of the phase with faults.
        seed: Decides the faults.
        nodes: The number of processes.
        url: A store that runs already (`etcd://127.0.0.1:2379`). Without it, a durable store is started, which also
            gets
            restarted.
        say: Called with lines about the run.

    Raises:
        Violation: A promise was broken.
    """
    async with Store(url) as store:
        run_id = f"chaos-{seed}-{random.Random().getrandbits(32):08x}"
        return await Chaos(store, run_id, nodes, random.Random(seed), say).play(seconds)
