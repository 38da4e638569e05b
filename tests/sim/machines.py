"""The machines of `rdzv.testing`, observed: the answers of every client, and the changes that the store has really
made.

A bug can be planted in each of them (`Seams`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rdzv.testing.disk import Disk, SimulatedJournal
from rdzv.testing.machines import STORE, Process, process_identity_of
from rdzv.testing.timeline import SimulatedLoop
from store.engine.changeset import ChangeSet
from store.engine.engine import Engine
from store.limits import Limits
from store.messages import Event
from store.server.server import Server
from tests.sim.truth import Books, HeardClient, Truth, observe
from tests.support.faults import FaultyJournal, FaultyStore, FaultyWorld

__all__ = ["Cosmos", "HeardProcess", "ObservedStore", "Seams", "quiet_logs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """The places for planted bugs: replacements for parts of the product, and a context."""

    journal: type[SimulatedJournal] = FaultyJournal
    client: type[HeardClient] = HeardClient
    plant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # entered for the whole run


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence the logs, since faults cause very many lines."""
    loggers = [logging.getLogger(name) for name in ("store", "rdzv", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Cosmos(FaultyWorld):
    """The world of one seed: a timeline, a network, a store, and the truth about it."""

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
        """Write one line of the trace."""
        self.truth.say(what)

    def draw_rate(self) -> float:
        """Draw the rate of a machine's clock."""
        return self.rng.choice((1.0, 1.0, 0.99, 1.01, 0.97, 1.03))

    def process(self, name: str) -> HeardProcess:
        """Start a process on a machine of its own. A second one of the same name is another process."""
        self._processes += 1
        return HeardProcess(self, name, f"{name}.{self._processes}")

    def end(self) -> None:
        """End all processes and the store."""
        self.timeline.end_processes()
        self.store.close()


class HeardProcess(Process):
    """A process with clients of the store, which the truth observes."""

    went_on_at = 0.0  # the true time when it was last resumed

    def __init__(self, cosmos: Cosmos, name: str, source: str) -> None:
        rng = random.Random(f"{source} {cosmos.rng.random()}")
        super().__init__(cosmos, name, source, rng=rng, rate=cosmos.draw_rate())
        self.cosmos = cosmos

    def resume(self) -> None:
        """Resume the process, and remember the time."""
        super().resume()
        self.went_on_at = self.cosmos.now

    def client(self, *, thread: str = "", **options: Any) -> HeardClient:
        """Make a client of the store for this process. A client of another thread has connections of its own."""
        return self.cosmos.seams.client(
            self.make_dial(thread=thread),
            name=STORE,
            rng=random.Random(self.rng.random()),
            process=process_identity_of(self.source),
            truth=self.cosmos.truth,
            who=self.source + thread,
            **options,
        )


class ObservedStore(FaultyStore):
    """The machine that the store runs on, and the books of its store."""

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
        """The books of the store that it runs."""
        return self._cosmos.truth.books_of(self.store_id)

    def committed(self, group: list[ChangeSet]) -> None:
        """Enter data that is on the disk into the books."""
        self.books.committed(group)

    def new_journal(self, disk: Disk, host: SimulatedLoop) -> SimulatedJournal:
        """Open the journal, or one with a planted bug."""
        return disk.open_journal(host, kind=self._cosmos.seams.journal)

    def new_server(self, engine: Engine, journal: SimulatedJournal | None, host: SimulatedLoop) -> Server:
        """Make a server whose engine is observed. If the server stops by itself, the story fails."""
        kind, fail = _observed(self._observe), self._cosmos.truth.fail
        server = kind(engine, clock=host.time, journal=journal, in_thread=host.in_thread, stopwatch=self._stopwatch)
        server.on_failure(lambda: fail(f"the server has stopped serving: {server._failure!r}"))
        return server

    def _stopwatch(self) -> float:
        """Draw the time that requests take, since the clock stands still while they run. Some take several turns."""
        self._worked += self._work_rng.choice((0.0, 0.0, 0.0, 0.0003, 0.003, 0.02))
        return self._worked

    def _observe(self, engine: Engine) -> None:
        observe(engine, self.books, durable=self.disk is not None)


def _observed(observe_engine: Callable[[Engine], None]) -> type[Server]:
    """Return a class of servers that also observe the engine that replaces theirs when they go back to the disk."""

    class Observed(Server):
        def _include_connection_memory(self, engine: Engine) -> None:
            super()._include_connection_memory(engine)
            observe_engine(engine)

    return Observed
