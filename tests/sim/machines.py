"""The machines of `rdzv.testing`, observed: what every client is told, and what the store has really done.

A bug can be planted in each of them (`Seams`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rdzv.testing.disk import Disk, SimulatedJournal
from rdzv.testing.machines import STORE, Process, StoreMachine, World, process_id_of
from store.limits import Limits
from store.server.server import Server
from tests.sim.truth import Books, HeardClient, Truth, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rdzv.testing.disk import Disk
    from rdzv.testing.timeline import Host
    from store.engine.changeset import Facts
    from store.engine.engine import Engine
    from store.messages import Event

__all__ = ["Cosmos", "HeardProcess", "ObservedStore", "Seams", "quiet_logs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Where a bug can be planted: what the simulation uses in place of the real thing."""

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


class Cosmos(World):
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
        self.latency_most = self.rng.choice((0.001, 0.005, 0.02, 0.05))
        shred, joins = self.rng.random() < 0.2, self.rng.choice((0.0, 0.5, 1.0))
        super().__init__(seed, latency=(0.0002, self.latency_most), shred=shred, joins=joins)
        self.truth = Truth(self.timeline, replay=replay, trace=trace, on_revision=on_revision)
        self.seams = seams or Seams()
        self.store = ObservedStore(self, durable=durable, limits=limits or Limits())
        self._processes = 0

    def say(self, what: str) -> None:
        """One line of the trace."""
        self.truth.say(what)

    def draw_rate(self) -> float:
        """How fast some machine's clock runs."""
        return self.rng.choice((1.0, 1.0, 0.99, 1.01, 0.97, 1.03))

    def process(self, name: str) -> HeardProcess:
        """A process on a machine of its own; one of the same name is another one."""
        self._processes += 1
        return HeardProcess(self, name, f"{name}.{self._processes}")

    def end(self) -> None:
        """Nobody survives."""
        self.timeline.end()
        self.store.close()


class HeardProcess(Process):
    """A client's process, of whose clients the truth hears."""

    went_on_at = 0.0  # when it last stood still, in true time

    def __init__(self, cosmos: Cosmos, name: str, source: str) -> None:
        rng = random.Random(f"{source} {cosmos.rng.random()}")
        super().__init__(cosmos, name, source, rng=rng, rate=cosmos.draw_rate())
        self.cosmos = cosmos

    def resume(self) -> None:
        """Go on."""
        super().resume()
        self.went_on_at = self.cosmos.now

    def client(self, *, thread: str = "", **options: Any) -> HeardClient:
        """A client of the store, to be entered in this process; that of another thread has connections of its own."""
        return self.cosmos.seams.client(
            self.dial(thread=thread),
            name=STORE,
            rng=random.Random(self.rng.random()),
            process=process_id_of(self.source),
            truth=self.cosmos.truth,
            who=self.source + thread,
            **options,
        )


class ObservedStore(StoreMachine):
    """The machine that the store runs on, and what is true of its store."""

    def __init__(self, cosmos: Cosmos, *, durable: bool, limits: Limits) -> None:
        self._cosmos = cosmos
        rate = cosmos.draw_rate()
        rng = random.Random(cosmos.rng.random())
        self._work_rng = random.Random(rng.random())
        self._worked = 0.0
        cosmos.truth.server_rate = rate
        super().__init__(cosmos, rng=rng, durable=durable, limits=limits, rate=rate)

    @property
    def books(self) -> Books:
        """What it has really done."""
        return self._cosmos.truth.books_of(self.store_id)

    def committed(self, group: list[Facts]) -> None:
        """The truth is what is on the disk."""
        self.books.committed(group)

    def new_journal(self, disk: Disk, host: Host) -> SimulatedJournal:
        """One with the bug that was planted, if any."""
        return disk.open(host, kind=self._cosmos.seams.journal, now=lambda: self._cosmos.timeline.now)

    def new_server(self, engine: Engine, journal: SimulatedJournal | None, host: Host) -> Server:
        """One with the bug that was planted, if any, whose engine is observed."""
        kind = _observed(self._observe)
        return kind(engine, clock=host.time, journal=journal, in_thread=host.in_thread, stopwatch=self._stopwatch)

    def failed(self, server: Server) -> None:
        """It must not."""
        self._cosmos.truth.fail(f"the server has stopped serving: {server._failure!r}")

    def _stopwatch(self) -> float:
        """What requests take is drawn, since the clock stands still meanwhile: some take more than several turns."""
        self._worked += self._work_rng.choice((0.0, 0.0, 0.0, 0.0003, 0.003, 0.02))
        return self._worked

    def _observe(self, engine: Engine) -> None:
        observe(engine, self.books, durable=self.disk is not None)


def _observed(observe_engine: Callable[[Engine], None]) -> type[Server]:
    """A server that goes back to what is on its disk with an engine that is observed, too."""

    class Observed(Server):
        def _restored(self, engine: Engine) -> None:
            super()._restored(engine)
            observe_engine(engine)

    return Observed
