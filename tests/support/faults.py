"""The machines of `rdzv.testing` with faults that only our own tests play."""

from __future__ import annotations

import asyncio
import enum
import random
import sqlite3
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

from rdzv.testing.disk import COMMIT_SECONDS, Disk, NoJournalFiles, SimulatedJournal
from rdzv.testing.links import EVERYTHING, Duplex, Pipe
from rdzv.testing.machines import STORE, StoreHost, World
from rdzv.testing.network import MemoryNetwork
from rdzv.testing.timeline import SimulatedLoop, SimulatedTime
from store.engine.changeset import ChangeSet
from store.server.server import Server
from tests.support.virtual_time import timers_of

__all__ = ["FaultyDisk", "FaultyHost", "FaultyJournal", "FaultyNetwork", "FaultyStore", "FaultyWorld", "Way"]

PAGES_ALWAYS = 1_000_000


class Way(enum.Enum):
    """The direction of a link that is held."""

    BOTH = "both"
    UPWARD = "what the dialer sends"
    DOWNWARD = "what the listener sends"


class FaultyPipe(Pipe):
    """A direction of a link whose bytes may arrive in other pieces than those that were written."""

    _network: FaultyNetwork

    def _deliver(self) -> None:
        if self._may_deliver() and len(self._under_way) > 1 and self._network.draw_joins():
            self._join_what_has_arrived()
        super()._deliver()

    def _next_piece(self, item: memoryview) -> memoryview:
        return item[: self._network.draw_piece(len(item))]

    def _join_what_has_arrived(self) -> None:
        """Join the pieces that have arrived, as for a process that reads its socket late."""
        under_way, now = self._under_way, self.network_loop.time()
        first_due, pieces = under_way[0][0], []
        while under_way and under_way[0][0] <= now and isinstance(piece := under_way[0][1], memoryview):
            pieces.append(piece)
            under_way.popleft()
        if pieces:
            under_way.appendleft((first_due, memoryview(b"".join(pieces))))


class FaultyNetwork(MemoryNetwork):
    """A network that may also hold one direction, close links without an error, and forget connections.

    Args:
        shred: True to deliver streams in pieces of random sizes, from one byte on.
        joins: The probability that all bytes that have arrived are read at once. Else each write is read in a turn of
            its own, which hides defects in handling two messages in one turn.
    """

    def __init__(self, *, shred: bool = False, joins: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._shred = shred
        self._joins = joins
        self._ways: dict[str, Way] = {}  # of partitions that hold one direction only
        self._forgotten: set[str] = set()  # the links whose packets are dropped for good

    def cut(self, which: str = EVERYTHING) -> None:
        """Close links at once at both ends, without an error; bytes in flight are lost."""
        for link in self.links(which):
            link.close_both()

    def partition(self, which: str = EVERYTHING, *, way: Way = Way.BOTH) -> None:
        """Hold all bytes, or those of one direction, and all dials, until `heal`; neither end is told."""
        self._ways[which] = way
        super().partition(which)

    def new_one_way_pipe(self) -> FaultyPipe:
        """Return a direction of a new link."""
        return FaultyPipe(self)

    def draw_piece(self, length: int) -> int:
        """Return how many ready bytes arrive at once."""
        return self._rng.randint(1, length) if self._shred else length

    def draw_joins(self) -> bool:
        """Return True if all arrived pieces are read at once."""
        return bool(self._joins) and self._rng.random() < self._joins

    def forget_flows(self, which: str = EVERYTHING) -> None:
        """Drop all packets of the present links for good, as a restarted firewall does.

        New dials pass. An old connection looks the same for seconds after a cut, until TCP sends again.
        """
        for link in self.links(which):
            self._forgotten.add(link.name)
            self._hold_if_partitioned(link)

    def _hold_if_partitioned(self, link: Duplex) -> None:
        ways = {self._ways[name] for name in link.names & self._partitioned}
        forgotten = link.name in self._forgotten
        link.hold(upward=forgotten or bool(ways - {Way.DOWNWARD}), downward=forgotten or bool(ways - {Way.UPWARD}))


class FullReserve(NoJournalFiles):
    """A stand-in for the reserved space of a disk that may be full."""

    has_room = True

    def allocate(self, least: int) -> bool:
        """Return True if the disk has space."""
        return self.has_room or not least


class FaultyDisk(Disk):
    """A disk that stalls, fills up and fails.

    Attributes:
        fail_next: The number of writes that fail from now on.
        stalled_until: True time.

    `on_commit` is called with each committed group.
    """

    reserve: FullReserve

    def __init__(
        self,
        rng: random.Random,
        *,
        store_id: str,
        on_commit: Callable[[list[ChangeSet]], None],
        now: Callable[[], float],
    ) -> None:
        super().__init__(rng, store_id=store_id)
        self.on_commit = on_commit
        self.now = now
        self.fail_next = 0
        self.stalled_until = 0.0
        self.reserve = FullReserve()

    def fill(self) -> None:
        """Leave no free space."""
        (pages,) = self.database.execute("PRAGMA page_count").fetchone()
        self.database.execute(f"PRAGMA max_page_count={pages}")
        self.reserve.has_room = False

    def make_room(self) -> None:
        """Free space again."""
        self.database.execute(f"PRAGMA max_page_count={PAGES_ALWAYS}")
        self.reserve.has_room = True


class FaultyJournal(SimulatedJournal):
    """The journal of one process on a `FaultyDisk`."""

    _disk: FaultyDisk

    def stop(self, *, within: float | None = None) -> bool:
        """Write all pending facts at once; return False if the disk is stalled, which does not end within a limit."""
        return self._disk.now() >= self._disk.stalled_until and super().stop(within=within)

    def _finish_group(self) -> None:
        left = self._disk.stalled_until - self._disk.now()
        if left > 0:
            self._timer = self._loop.call_later(left + COMMIT_SECONDS[0], self._finish_group)
        else:
            super()._finish_group()

    def _commit(self, group: list[ChangeSet]) -> None:
        if self._disk.fail_next:
            self._disk.fail_next -= 1
            raise sqlite3.OperationalError("disk I/O error")
        super()._commit(group)
        self._disk.on_commit(group)


_callback_of = attrgetter("_callback")  # as asyncio's own messages use it


class FaultyHost(SimulatedLoop):
    """A process whose tasks can be delayed separately."""

    def __init__(self, timeline: SimulatedTime, name: str, rate: float) -> None:
        super().__init__(timeline, name, rate)
        self._held_up: weakref.WeakKeyDictionary[asyncio.Task[Any], float] = weakref.WeakKeyDictionary()

    def hold_up(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Keep one task of this process from running for some true seconds."""
        self._held_up[task] = self._timeline.now + seconds

    def close_coroutines(self) -> None:
        """Close all coroutines of a dead process, also of delayed tasks."""
        self._ready.extend(one for _, one in timers_of(self) if not isinstance(one, asyncio.TimerHandle))
        super().close_coroutines()

    def _run_handle(self, handle: asyncio.Handle) -> None:
        task = getattr(_callback_of(handle), "__self__", None)
        until = self._held_up.get(task, 0.0) if isinstance(task, asyncio.Task) and self._grave is None else 0.0
        if until > self._timeline.now:
            self._timeline.set_timer(until, self, handle)
        else:
            super()._run_handle(handle)


class FaultyWorld(World):
    """A world with a `FaultyNetwork`."""

    network_kind: ClassVar[type[MemoryNetwork]] = FaultyNetwork
    network: FaultyNetwork

    def __init__(self, seed: int, *, timeline: SimulatedTime | None = None, **of_network: Any) -> None:
        super().__init__(seed, timeline=timeline or SimulatedTime(seed, kind=FaultyHost), **of_network)


class FaultyStore(StoreHost):
    """A store on a `FaultyDisk`, which may also be told to leave."""

    disk: FaultyDisk | None
    leaving = False
    dark = False  # the machine has no power

    def make_disk(self, store_id: str) -> FaultyDisk:
        return FaultyDisk(self._rng, store_id=store_id, on_commit=self.committed, now=lambda: self._world.now)

    def committed(self, group: list[ChangeSet]) -> None:
        """Called with each committed group of facts."""

    def die(self, *, silently: bool = False) -> None:
        """Kill the process; with `silently`, cut its machine's power."""
        self.leaving = self.leaving and self.host is None
        if silently and self.host is not None:
            self.dark = True
            self._world.network.partition(STORE)
        super().die(silently=silently)

    def start(self) -> None:
        """Start a process with the disk's data; the machine has power again."""
        if self.dark:
            self.dark = False
            self._world.network.heal(STORE)
        super().start()

    def leave(self) -> None:
        """Tell it to end (SIGTERM)."""
        if self.host is not None and self.server is not None and self._listener is not None:
            self._world.say("the store is told to leave")
            self._close_listener()
            self.leaving = True
            self.host.start_task(self._leave(self.server, self.host))

    async def _leave(self, server: Server, host: SimulatedLoop) -> None:
        await server.shut_down()
        if self.host is host:
            self._world.network_host.call_soon(self._end, host)

    def _end(self, host: SimulatedLoop) -> None:
        if self.host is host:
            self.die()
