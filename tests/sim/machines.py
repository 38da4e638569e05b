"""The machines of a simulation: one that a store runs on, and those of its clients, and the network between them.

All of it is the real server, engine, journal, wire and client, in processes on virtual time (`tests/support/hosts.py`),
over a network in memory and a disk that keeps only what was committed.
"""

from __future__ import annotations

import contextlib
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from store.engine.engine import Engine
from store.limits import Limits
from store.server.server import Server
from tests.sim.truth import Books, HeardClient, Truth, observe
from tests.support.disk import Disk, SimulatedJournal
from tests.support.hosts import Timeline
from tests.support.memory_network import MemoryNetwork
from tests.support.stores import process_named

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from store.engine.changeset import Facts
    from store.messages import Event
    from tests.support.hosts import Host

__all__ = ["Cosmos", "Process", "Seams", "StoreMachine", "quiet_logs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Where a bug can be planted: what the simulation uses in place of the real thing."""

    server: type[Server] = Server
    journal: type[SimulatedJournal] = SimulatedJournal
    client: type[HeardClient] = HeardClient
    plant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # for as long as a run lasts


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """What the code under trouble has to say of it would fill the screen."""
    loggers = [logging.getLogger(name) for name in ("store", "rdzv", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Cosmos:
    """One seed's world: a timeline, a network, a store, and the truth about it."""

    def __init__(
        self,
        seed: int,
        *,
        replay: str,
        durable: bool = True,
        limits: Limits | None = None,
        seams: Seams | None = None,
        trace: Callable[[str], None] | None = None,
        on_revision: Callable[[tuple[Event, ...]], None] | None = None,
    ) -> None:
        self.rng = random.Random(f"cosmos {seed}")
        self.timeline = Timeline(seed)
        self.network_host = self.timeline.host("the network")
        self.latency_most = self.rng.choice((0.001, 0.005, 0.02, 0.05))
        self.network = MemoryNetwork(
            latency=(0.0002, self.latency_most),
            rng=random.Random(f"network {seed}"),
            shred=self.rng.random() < 0.2,
            loop=self.network_host,
        )
        self.truth = Truth(self.timeline, replay=replay, trace=trace, on_revision=on_revision)
        self.seams = seams or Seams()
        self.store = StoreMachine(self, durable=durable, limits=limits or Limits())
        self._processes = 0

    @property
    def now(self) -> float:
        """True time."""
        return self.timeline.now

    def draw_rate(self) -> float:
        """How fast some machine's clock runs."""
        return self.rng.choice((1.0, 1.0, 0.99, 1.01, 0.97, 1.03))

    def process(self, name: str) -> Process:
        """A process on a machine of its own; one of the same name is another one."""
        self._processes += 1
        return Process(self, name, f"{name}.{self._processes}")

    def end(self) -> None:
        """Nobody survives."""
        self.timeline.end()
        self.store.close()


class Process:
    """A client's process.

    Attributes:
        host: Its loop.
        name: The name of its machine.
        source: The name of its connections, which no other process has.
    """

    def __init__(self, cosmos: Cosmos, name: str, source: str) -> None:
        self.cosmos = cosmos
        self.name, self.source = name, source
        self.threads: list[str] = []  # the names of connections that other threads of it have
        self.rng = random.Random(f"{source} {cosmos.rng.random()}")
        self.host: Host = cosmos.timeline.host(source, rate=cosmos.draw_rate())

    @property
    def alive(self) -> bool:
        """Whether it has not been killed."""
        return not self.host.dead

    def client(self, *, thread: str = "", **options: Any) -> HeardClient:
        """A client of the store, to be entered in this process; that of another thread has connections of its own."""
        cosmos, source = self.cosmos, self.source + thread

        async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
            return await cosmos.network.dial("store", factory, source=source)

        return cosmos.seams.client(
            dial,
            name="store",
            rng=random.Random(self.rng.random()),
            process=process_named(self.source),
            truth=cosmos.truth,
            who=source,
            **options,
        )

    def die(self, *, silently: bool = False) -> None:
        """The process is killed; or, silently, its machine loses its power."""
        if self.alive:
            self.cosmos.truth.say(f"{self.source} is killed{', and its machine with it' if silently else ''}")
            self.host.die()
            for source in (self.source, *self.threads):
                self.cosmos.network.died(source, silently=silently)


class StoreMachine:
    """The machine that the store runs on; its disk outlives its processes.

    Attributes:
        server: The one that runs now; None while none does.
        disk: What outlives it; None for a store that is memory only.
        starts: How many processes there have been.
    """

    def __init__(self, cosmos: Cosmos, *, durable: bool, limits: Limits) -> None:
        self._cosmos = cosmos
        self._limits = limits
        self._rate = cosmos.draw_rate()
        self._rng = random.Random(cosmos.rng.random())
        self._listener: Any = None
        self._work_rng = random.Random(self._rng.random())
        self._worked = 0.0
        self.dark = False  # the machine has no power
        self.leaving = False
        self.host: Host | None = None
        self.server: Server | None = None
        self.starts = 0
        self.disk: Disk | None = None
        self.store_id = "store 1"
        cosmos.truth.server_rate = self._rate
        if durable:
            self.disk = Disk(self._rng, store_id=self.store_id, on_commit=self._committed)

    def _committed(self, group: list[Facts]) -> None:
        self.books.committed(group)

    @property
    def books(self) -> Books:
        """What it has really done."""
        return self._cosmos.truth.books_of(self.store_id)

    @property
    def up(self) -> bool:
        """Whether there is a process, even if it stands still."""
        return self.host is not None

    def start(self) -> None:
        """Start a process on what is on the disk."""
        assert self.host is None, "one at a time"
        cosmos = self._cosmos
        self.starts += 1
        if self.dark:
            self.dark = False
            cosmos.network.heal("store")
        self.store_id = f"store {self.starts if self.disk is None else 1}"
        cosmos.truth.say("the store starts")
        self.host = host = cosmos.timeline.host(f"store.{self.starts}", rate=self._rate)
        host.call_soon(self._serve, host)

    def _serve(self, host: Host) -> None:
        """What `store.serve` does, for a network and a disk that are not real."""
        cosmos, seams = self._cosmos, self._cosmos.seams
        journal: SimulatedJournal | None = None
        if self.disk is None:
            engine = Engine(store_id=self.store_id, limits=self._limits)
        else:
            journal = self.disk.open(host, kind=seams.journal, now=lambda: cosmos.timeline.now)
            engine = Engine.restore(journal.load(), limits=self._limits, now=host.time())
        self._observe(engine)
        self.server = server = _observed(seams.server, self._observe)(
            engine, clock=host.time, journal=journal, in_thread=host.in_thread, stopwatch=self._stopwatch
        )
        server.on_failure(lambda: cosmos.truth.fail(f"the server has stopped serving: {server._failure!r}"))
        self._listener = cosmos.network.listen("store", server.protocol, loop=host)
        server.start_journal()
        for timer in (host.start(server.keep_time()), host.start(server.drop_the_silent())):
            timer.add_done_callback(server.timer_ended)

    def _stopwatch(self) -> float:
        """What requests take is drawn, since the clock stands still meanwhile: some take more than several turns."""
        self._worked += self._work_rng.choice((0.0, 0.0, 0.0, 0.0003, 0.003, 0.02))
        return self._worked

    def _observe(self, engine: Engine) -> None:
        observe(engine, self.books, durable=self.disk is not None)

    def die(self, *, silently: bool = False) -> None:
        """The process is killed; or, silently, its machine loses its power."""
        if self.host is None:
            return
        cosmos = self._cosmos
        cosmos.truth.say(f"the store is killed{', and its machine with it' if silently else ''}")
        self.host.die()
        self.host = self.server = None
        self.leaving = False
        cosmos.network.died("store", silently=silently)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if silently:
            self.dark = True
            cosmos.network.partition("store")
        if self.disk is not None:
            self.disk.lose_power()

    def leave(self) -> None:
        """It is told to end (SIGTERM), and does so in its own time."""
        if self.host is not None and self.server is not None and self._listener is not None:
            self._cosmos.truth.say("the store is told to leave")
            self._listener.close()
            self._listener = None
            self.leaving = True
            self.host.start(self._leave(self.server, self.host))

    async def _leave(self, server: Server, host: Host) -> None:
        await server.leave()
        if self.host is host:
            self._cosmos.network_host.call_soon(self._end, host)

    def _end(self, host: Host) -> None:
        if self.host is host:
            self.die()

    def close(self) -> None:
        """The end of the simulation."""
        if self.disk is not None:
            self.disk.close()


def _observed(kind: type[Server], observe_engine: Callable[[Engine], None]) -> type[Server]:
    """A server that goes back to what is on its disk with an engine that is observed, too."""

    class Observed(kind):  # type: ignore[misc,valid-type]  # whichever it is
        def _restored(self, engine: Engine) -> None:
            super()._restored(engine)
            observe_engine(engine)

    return Observed
