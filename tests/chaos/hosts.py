"""Several hosts for a store in memory: real processes, of which the one that serves is killed again and again.

Each of four nodes may host the store, at one of three addresses of this machine. In each turn an operator changes the
run: a resize, a ban, a count in the tally. A moment later the process that hosts the store is killed, stopped or
drained, at random together with another node. Before the next turn all nodes must be in one round again, and the
changes must hold there. At the end the run is closed, the host dies, and a member that could not hear of it before must
end, too.

All the while the hosts are asked which store they serve: `tests.chaos.checker.check_stores`. The other checks are those
of all chaotic runs; the death of a host excuses no overlap of two rounds.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import rdzv
from rdzv.backends.host_queries import read_frame
from rdzv.node.handler import Handler
from store.errors import ProtocolError
from store.protocol.wire import Greeting, decode_opening
from tests.chaos.checker import HOST, Fault, Look, Violation, check_numbers, check_stops, check_stores, stays_of
from tests.chaos.runner import PARAMETERS, QUIET_WITHIN, TTL, Chaos, Outcome, Seat, Store, lines_of
from tests.support.processes import free_port

__all__ = ["hosts_chaos"]

HOSTS = 3
MODULES = ("tests.chaos.node", "tests.chaos.looping")
FAULTS = ("kill", "kill with another", "kill twice", "stop", "long stop", "stop and kill", "drain")
LOOK_EVERY = 0.1  # seconds
ANSWERS_WITHIN = 0.5  # seconds
HEARD_WITHIN = 0.5  # seconds after its acknowledgement, all members have heard of a change
LONG_STOP = 3 * TTL


@dataclass(slots=True)
class _Hosts(Chaos):
    """One run."""

    hosts: list[str] = field(default_factory=lambda: [f"127.0.0.1:{free_port()}" for _ in range(HOSTS)])
    faults_to_play: Sequence[str] = FAULTS
    looks: list[Look] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    wanted: dict[str, int] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)
    tally: int = 0

    def url(self, port: int | None = None, *, joining: bool = True) -> str:  # noqa: ARG002
        """Return the URL of the run."""
        nodes = f"min_nodes=2&max_nodes={self.nodes}&" if joining else ""
        parameters = PARAMETERS if not joining else PARAMETERS.replace("is_host=0", "is_host=auto")
        return f"tcp://{','.join(self.hosts)}/{self.run_id}?{nodes}ttl={self.ttl}&{parameters}"

    async def play_scenes(self, seconds: float) -> None:
        """Play turns for some seconds, at least one, and the closing."""
        looking = asyncio.create_task(self.look())
        try:
            await self.until(self.in_one_round, within=QUIET_WITHIN, what="come to a first round")
            until = time.monotonic() + seconds
            while not self.done or time.monotonic() < until:
                await self.turn(self.rng.choice(self.faults_to_play))
            await self.end()
        finally:
            looking.cancel()

    async def turn(self, kind: str) -> None:
        """Change the run, strike its host, and see the changes hold in the next round."""
        await self.change_the_run()
        await asyncio.sleep(HEARD_WITHIN)
        began = time.monotonic()
        struck = await self.strike(kind)
        self.faults.append(Fault(HOST, None, began, time.monotonic()))
        for seat in struck:
            if seat.life is None or seat.life.killed_at is not None or kind == "drain":
                await self.start(seat)
        await self.until(self.in_one_round, within=QUIET_WITHIN, what=f"come to one round after {kind!r}")
        self.say(f"{kind}: {', '.join(seat.node for seat in struck)}, {time.monotonic() - began:.1f} s")
        self.done[kind] += 1
        await self.changes_hold(kind)

    async def strike(self, kind: str) -> list[Seat]:
        """Strike the process that hosts the store; return the nodes that were struck."""
        host = await self.host()
        other = self.rng.choice([seat for seat in self.seats.values() if seat is not host])
        match kind:
            case "kill":
                self.kill(host)
            case "kill with another":
                for seat in self.rng.sample((host, other), 2):
                    self.kill(seat)
                return [host, other]
            case "kill twice":
                self.kill(host)
                other = await self.host()
                self.kill(other)
                return [host, other]
            case "drain":
                assert host.life is not None
                async with self.operator() as operator:
                    await operator.drain(within=QUIET_WITHIN, node_id=host.node)
                if (status := await host.life.child.wait(timeout=QUIET_WITHIN)) != 0:
                    raise Violation(f"{host.node} was drained, and ended with {status}: {host.life.child.written()}")
            case _:
                await self.stop(host, self.rng.uniform(0.2, 1.0) if kind == "stop" else LONG_STOP)
                if kind == "stop and kill":
                    self.kill(host)
        return [host]

    def kill(self, seat: Seat) -> None:
        """Kill a node."""
        assert seat.life is not None
        seat.life.child.kill()
        seat.life.killed_at = at = time.monotonic()
        self.faults.append(Fault("kill", seat.node, at, at))

    async def stop(self, seat: Seat, seconds: float) -> None:
        """Stop a node for some seconds, and let it continue."""
        assert seat.life is not None
        seat.life.child.stop()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        seat.life.child.resume()
        self.faults.append(Fault("pause", seat.node, began, ended))

    async def host(self) -> Seat:
        """Return the node that hosts the store."""

        def found() -> list[Seat]:
            alive = [seat for seat in self.seats.values() if seat.life is not None and seat.life.killed_at is None]
            return [
                seat
                for seat in alive
                if seat.life is not None and any("hosts the store" in line for line in seat.life.child.output)
            ]

        await self.until(lambda: bool(found()), within=QUIET_WITHIN, what="host the store")
        if len(found()) > 1:
            raise Violation(f"S13: {[seat.node for seat in found()]} say that they host the store")
        return found()[0]

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[Handler]:
        """Connect without joining, and with nothing known of earlier stores."""
        async with rdzv.connect(self.url(joining=False)) as operator:
            assert isinstance(operator, Handler)
            yield operator

    async def change_the_run(self) -> None:
        """Resize the run, ban a name, and count."""
        async with self.operator() as operator:
            if self.rng.random() < 1 / 2:
                most = self.rng.randint(self.nodes, 2 * self.nodes)
                await operator.resize(max_nodes=most)
                self.wanted["max_nodes"] = most
            if self.rng.random() < 1 / 2:
                name = f"banned{self.rng.randrange(3)}"
                await (operator.unban if name in self.banned else operator.ban)(name)
                self.banned ^= {name}
        await self.count()

    async def count(self) -> None:
        """Let a node count in the run's tally, and see that no earlier count is lost."""
        if self.module != MODULES[0]:
            return
        seat = self.rng.choice(list(self.seats.values()))
        assert seat.life is not None
        child, before = seat.life.child, self.counts(seat)
        child.send_signal(signal.SIGUSR1)
        await self.until(lambda: len(self.counts(seat)) > len(before), within=QUIET_WITHIN, what="count")
        self.tally += 1
        if (counted := self.counts(seat)[-1]) != self.tally:
            raise Violation(f"S13: {self.tally} counts were acknowledged, and the tally has {counted}")

    def counts(self, seat: Seat) -> list[int]:
        """Return the tally after each count of a node's present process."""
        return [len(line["tally"]) for line in self.lines_of(seat) if line["what"] == "counted"]

    async def changes_hold(self, kind: str) -> None:
        """Check that the changes which the survivors knew hold."""
        async with self.operator() as operator:
            status = await operator.status()
        there = {name: status.settings.get(name) for name in self.wanted}
        if there != self.wanted:
            raise Violation(f"S13: the run was resized to {self.wanted}, and after {kind!r} it has {there}")
        if set(status.banned) != self.banned:
            raise Violation(f"S13: {self.banned} were banned, and after {kind!r} {set(status.banned)} are")

    async def end(self) -> None:
        """Close the run while a member is stopped, and kill the host: that member hears of the closing, too."""
        host = await self.host()
        deaf = self.rng.choice([seat for seat in self.seats.values() if seat is not host])
        assert host.life is not None
        assert deaf.life is not None
        deaf.life.child.stop()
        began = time.monotonic()
        async with self.operator() as operator:
            await operator.set_closed("chaos is over")
        await asyncio.sleep(HEARD_WITHIN)
        if host.life.child.returncode is None:
            self.kill(host)
        deaf.life.child.resume()
        self.faults.append(Fault(HOST, None, began, time.monotonic()))
        self.faults.append(Fault("pause", deaf.node, began, time.monotonic()))
        del self.seats[host.node]
        await self.all_end()

    async def look(self) -> None:
        """Ask all hosts again and again which store they serve."""
        while True:
            await asyncio.gather(*map(self.look_at, self.hosts))
            await asyncio.sleep(LOOK_EVERY)

    async def look_at(self, host: str) -> None:
        """Ask one host."""
        began = time.monotonic()
        with contextlib.suppress(OSError, EOFError, ProtocolError, TimeoutError):
            async with asyncio.timeout(ANSWERS_WITHIN):
                reader, writer = await asyncio.open_connection(*host.split(":"))
                try:
                    said = decode_opening(await read_frame(reader), Greeting)
                finally:
                    writer.close()
            if isinstance(said, Greeting):
                self.looks.append(Look(said.store_id, began, time.monotonic()))

    def judge(self) -> Outcome:
        """Check the lines of the nodes, and the answers of the hosts, against the promises."""
        outcome = Chaos.judge(self)
        for life in self.lives:
            check_numbers(stays_of(life.node, lines_of(life.child)))
        if self.module == MODULES[1]:
            unannounced = [fault for fault in self.faults if fault.kind != HOST]
            check_stops([(life.node, line) for life in self.lives for line in lines_of(life.child)], unannounced)
        return replace(outcome, announced=self.done, stores=check_stores(self.looks))


async def hosts_chaos(
    *,
    seconds: float,
    seed: int,
    nodes: int = 4,
    url: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    faults: Sequence[str] = FAULTS,
    module: str = "",
) -> Outcome:
    """Play one run. Arguments and errors are those of `tests.chaos.runner.chaos`.

    Args:
        faults: The kinds of faults of the host.
        module: The program of the nodes; by default, the seed decides.
    """
    assert url is None, "the nodes host the store"
    rng = random.Random(seed)
    run = _Hosts(Store(None), f"hosts-{seed}", nodes, rng, say, module=module or rng.choice(MODULES))
    run.faults_to_play = faults
    return await run.play(seconds)
