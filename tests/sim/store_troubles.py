"""What goes wrong in the story of a store: its connections, its process, its disk, and the processes of its clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rdzv.testing.network import Way
from store.messages import mutates

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.messages import Request
    from tests.sim.machines import HeardProcess
    from tests.sim.store_story import StoreStory

__all__ = ["StoreTroubles"]

PERIL = 0.03  # of a change, to have something break while it is under way


class StoreTroubles:
    """Strikes somebody, or something, until the story is calm.

    Attributes:
        count: How often something has gone wrong.
    """

    def __init__(self, story: StoreStory) -> None:
        self._story = story
        self._rng = story.rng
        self._cosmos = story.cosmos
        self._truth = story.truth
        self.count = 0

    async def make(self) -> None:
        """Now and then something goes wrong."""
        rng = self._rng
        pause = rng.choice((2.0, 8.0, 20.0))  # how eventful this story is
        faults: list[Callable[[], Any]] = [
            self._break_connections,
            self._break_connections,
            self._partition,
            self._partition,
            self._kill_store,
            self._stop_store,
            self._stop_client,
            self._kill_client,
            self._stall_disk,
            self._fill_disk,
            self._fail_disk,
        ]
        if not self._story.durable:
            faults[8:] = []
        while True:
            await asyncio.sleep(rng.expovariate(1 / pause))
            if not self._story.calm:
                self.count += 1
                rng.choice(faults)()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something end by itself."""
        self._story.director.call_later(seconds, lambda: None if self._story.calm else action())

    def _somebody(self) -> HeardProcess:
        return self._rng.choice(list(self._story.processes.values()))

    def _break_connections(self) -> None:
        which = self._rng.choice(("store", self._somebody().source))
        how = self._rng.choice((self._cosmos.network.cut, self._cosmos.network.reset))
        self._truth.say(f"{how.__name__} {which}")
        how(which)

    def _partition(self) -> None:
        which = self._rng.choice(("store", self._somebody().source, self._somebody().source))
        seconds = self._rng.choice((0.3, 2.0, 6.0, 14.0)) * self._rng.uniform(0.5, 1.5)
        way = self._rng.choice((Way.BOTH, Way.BOTH, Way.UPWARD, Way.DOWNWARD))
        self._truth.say(f"{which} is cut off for {seconds:.2f} s: {way.value}")
        self._cosmos.network.partition(which, way=way)
        self._later(seconds, lambda: self._heal(which))

    def _heal(self, which: str) -> None:
        if which != "store" or not self._cosmos.store.dark:
            self._cosmos.network.heal(which)

    def _kill_store(self) -> None:
        store = self._cosmos.store
        if not store.up or (not self._story.durable and self._rng.random() < 0.6):
            return
        match self._rng.choice(("kill", "kill", "power", "leave")):
            case "kill":
                store.die()
            case "power":
                store.die(silently=True)
            case _:
                store.leave()
        self._later(self._rng.choice((0.02, 0.5, 3.0, 9.0)) * self._rng.uniform(0.5, 1.5), self._start_store)

    def _start_store(self) -> None:
        if self._cosmos.store.up:  # it takes its time to leave
            self._later(1.0, self._start_store)
        else:
            self._cosmos.store.start()

    def _stop_store(self) -> None:
        host = self._cosmos.store.host
        if host is not None:
            seconds = self._rng.choice((0.2, 1.5, 6.0)) * self._rng.uniform(0.5, 1.5)
            self._truth.say(f"the store stands still for {seconds:.2f} s")
            host.pause()
            self._later(seconds, host.resume)

    def _stop_client(self) -> None:
        process = self._somebody()
        seconds = self._rng.choice((0.2, 3.0, 12.0)) * self._rng.uniform(0.5, 1.5)
        self._truth.say(f"{process.source} stands still for {seconds:.2f} s")
        process.host.pause()
        self._later(seconds, process.host.resume)

    def _kill_client(self) -> None:
        process = self._somebody()
        process.die(silently=self._rng.random() < 0.5)
        self._later(self._rng.uniform(0.1, 5.0), lambda: self._story.start(process.name))

    def _stall_disk(self) -> None:
        assert self._cosmos.store.disk is not None
        seconds = self._rng.choice((0.2, 1.0, 5.0)) * self._rng.uniform(0.5, 1.5)
        self._truth.say(f"the disk takes nothing for {seconds:.2f} s")
        self._cosmos.store.disk.stalled_until = self._cosmos.now + seconds

    def _fill_disk(self) -> None:
        assert self._cosmos.store.disk is not None
        seconds = self._rng.choice((0.5, 4.0, 12.0)) * self._rng.uniform(0.5, 1.5)
        self._truth.say(f"the disk is full for {seconds:.2f} s")
        self._cosmos.store.disk.fill()
        self._later(seconds, self._cosmos.store.disk.make_room)

    def _fail_disk(self) -> None:
        assert self._cosmos.store.disk is not None
        self._truth.say("the disk fails once")
        self._cosmos.store.disk.fail_next = 1

    async def imperil(self, process: HeardProcess, request: Request[Any], at: str) -> None:
        """Now and then something breaks just while a change is under way, or its answer."""
        if at == "before" and not self._story.calm and mutates(request) and process.rng.random() < PERIL:
            self.count += 1
            soon = process.rng.uniform(0.0, 0.02)
            strike = process.rng.choice((self._break_link, self._break_link, self._break_link, self._kill_in_flight))
            self._story.director.call_later(soon, lambda: None if self._story.calm else strike(process))

    def _break_link(self, process: HeardProcess) -> None:
        self._truth.say(f"the connection of {process.source} breaks with something on its way")
        self._cosmos.network.reset(process.source)

    def _kill_in_flight(self, _: HeardProcess) -> None:
        if self._cosmos.store.up and self._story.durable:
            self._truth.say("the store is killed with something on its way")
            self._cosmos.store.die()
            self._later(self._rng.uniform(0.05, 1.0), self._start_store)
