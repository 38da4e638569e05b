"""The faults of a store's story: of its connections, its process, its disk, and the processes of its clients."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from store.messages import mutates
from tests.sim.story import Troubles

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.messages import Request
    from tests.sim.machines import HeardProcess
    from tests.sim.store_story import StoreStory

__all__ = ["StoreTroubles"]

PERIL = 0.03  # the probability that a change has a fault while it is under way
HOW = ("cut", "reset", "partition", "partition", "stop", "kill", "power")


class StoreTroubles(Troubles):
    """Strikes the store, its disk, and its clients."""

    def __init__(self, story: StoreStory) -> None:
        super().__init__(story)
        self._story = story

    async def make(self) -> None:
        """Make random faults at random times."""
        rng = self._rng
        pause = rng.choice((2.0, 8.0, 20.0))  # the average pause: some stories have more faults
        faults: list[Callable[[], Any]] = [self._strike_client] * 5
        faults += [self.cut_store, self.partition_store, self.stop_store, self.kill_store]
        if self._story.durable:
            faults += [self.stall_disk, self.fill_disk, self._fail_disk]
        while True:
            await asyncio.sleep(rng.expovariate(1 / pause))
            if not self._story.calm:
                self.count += 1
                rng.choice(faults)()

    def draw_seconds(self) -> float:
        """Draw a duration: from one without any effect to one longer than a session lives."""
        return self._rng.choice((0.02, 0.3, 2.0, 6.0, 14.0)) * self._rng.uniform(0.5, 1.5)

    def _strike_client(self) -> None:
        process, how, seconds = self._rng.choice(list(self._story.processes.values())), self._rng.choice(HOW), 0.0
        if how not in ("cut", "reset"):
            seconds = self.draw_seconds()
        self._story.say(f"{process.source}: {how}, {seconds:.2f} s")
        self.befall(process, how, seconds)

    def kill_store(self) -> None:
        """Kill the store, or let it leave; without a disk less often, since another store begins then."""
        if not self._story.durable and self._rng.random() < 0.6:
            return
        if self._rng.random() < 0.25:
            self._cosmos.store.leave()
            self._later(self.draw_seconds(), self.start_store)
        else:
            super().kill_store()

    def _fail_disk(self) -> None:
        assert self._cosmos.store.disk is not None
        self._story.say("the disk fails once")
        self._cosmos.store.disk.fail_next = 1

    async def imperil(self, process: HeardProcess, request: Request[Any], at: str) -> None:
        """At random, break a connection or kill the store while a change or its answer is under way."""
        if at == "before" and not self._story.calm and mutates(request) and process.rng.random() < PERIL:
            self.count += 1
            strike = process.rng.choice((self._break_link, self._break_link, self._break_link, self._kill_in_flight))
            self._later(process.rng.uniform(0.0, 0.02), partial(strike, process))

    def _break_link(self, process: HeardProcess) -> None:
        self._story.say(f"the connection of {process.source} breaks with something on its way")
        self._cosmos.network.reset(process.source)

    def _kill_in_flight(self, _: HeardProcess) -> None:
        if self._cosmos.store.is_up and self._story.durable:
            self._story.say("the store is killed with something on its way")
            self._cosmos.store.die()
            self._later(self._rng.uniform(0.05, 1.0), self.start_store)
