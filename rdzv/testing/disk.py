"""A disk on virtual time: it takes its time, stalls, fills up, fails, and keeps only what was committed.

A `Disk` outlives the processes that use it. Each opens a `SimulatedJournal` on it: the journal's own code, its SQL, its
checksums and its reading back, on a database in memory; the writer's thread is replaced by timers of the process's
loop. What is not committed when the process dies is lost, but for the group that the disk has in hand at that moment:
that may just have got there, with nobody left to hear of it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING, Any

from store.disk import rows
from store.server.journal import Journal, Unwritable

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Iterator

    from store.engine.changeset import Facts

__all__ = ["Disk", "SimulatedJournal"]

COMMIT_SECONDS = (0.0002, 0.004)  # what a group takes on a disk that is well
PAGES_ALWAYS = 1_000_000


class NoMark:
    """Nothing is kept beside the database."""

    def write(self, store_id: str, number: int) -> None:
        """A group is durable."""


class NoReserve:
    """No room is kept back.

    Attributes:
        has_room: Whether there is any.
    """

    has_room = True

    def take(self, least: int) -> bool:
        """There is as much as there is."""
        return self.has_room or not least

    def give_up(self) -> None:
        """There is no more."""


class Disk:
    """What outlives a process, and what may be wrong with it.

    Args:
        rng: Decides how long things take, and whether what was in hand at a crash got there.
        store_id: The identity of the store that is founded on it.
        on_commit: Told of each group at the moment it is on the disk.

    Attributes:
        commits: How many groups were written.
        fail_next: How many writes from now on fail of an error.
    """

    def __init__(self, rng: random.Random, *, store_id: str, on_commit: Callable[[list[Facts]], None]) -> None:
        self.rng = rng
        self.on_commit = on_commit
        self.commits: int = 0
        self.fail_next: int = 0
        self.stalled_until: float = 0.0  # true time
        self._journal: SimulatedJournal | None = None
        self.mark: NoMark = NoMark()
        self.reserve: NoReserve = NoReserve()
        self.database: sqlite3.Connection = sqlite3.connect(":memory:", isolation_level=None)
        self.database.executescript(rows.SCHEMA)
        self.database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.seal("store_id", store_id))

    def open(
        self, loop: asyncio.AbstractEventLoop, *, kind: type[SimulatedJournal], now: Callable[[], float]
    ) -> SimulatedJournal:
        """The journal of a new process; the one before has died, or let go."""
        self._journal = kind(self, loop, now)
        return self._journal

    def fill(self) -> None:
        """No more room than for what is there."""
        (pages,) = self.database.execute("PRAGMA page_count").fetchone()
        self.database.execute(f"PRAGMA max_page_count={pages}")
        self.reserve.has_room = False

    def make_room(self) -> None:
        """Room again."""
        self.database.execute(f"PRAGMA max_page_count={PAGES_ALWAYS}")
        self.reserve.has_room = True

    def lose_power(self) -> None:
        """The process, or the whole machine, has died: what was in hand is on the disk, or it is not."""
        opened, self._journal = self._journal, None
        if opened is not None:
            opened.gone(reaches_the_disk=self.rng.random() < 0.5)

    def close(self) -> None:
        """Throw it away."""
        self.database.close()


class SimulatedJournal(Journal):
    """The journal of one process on a `Disk`."""

    def __init__(self, disk: Disk, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        # Not the journal's own constructor: it makes files, and takes a lock on them.
        self._disk = disk
        self._loop = loop
        self._now = now
        self._path = self._directory = "a disk in memory"  # type: ignore[assignment]  # only for messages
        self._database = disk.database
        self._pending = []
        self.appended: int = 0
        self._wake = threading.Condition()
        self._in_hand: tuple[list[Facts], int] | None = None
        self._probing, self._closed = threading.Lock(), False
        self._timer: asyncio.TimerHandle | None = None
        self._on_durable: Callable[[int], None] | None = None
        self._on_failure: Callable[[str], None] | None = None
        self.commits: int = 0
        self.commit_seconds: float = 0.0  # nothing takes time here
        self.in_doubt: bool = False  # nothing of a group that fails here is on the disk
        self.only_deletes: bool = False
        self._grows = self._free_bytes = 0
        self.answered: bool = False
        self._mark, self._reserve = disk.mark, disk.reserve  # type: ignore[assignment]  # which have no files

    def room(self) -> int:
        """How many bytes a write may have: nobody counts them here."""
        return sys.maxsize

    def _growth(self) -> int:
        return 0

    def _open_to_read(self) -> sqlite3.Connection:
        return _Borrowed(self._disk.database)  # type: ignore[return-value]  # to it, but for closing

    def append(self, facts: Facts) -> int:
        """Have these facts written with the next group."""
        number = super().append(facts)
        self._take_up()
        return number

    def start(self, *, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        """Write from now on."""
        self._on_durable, self._on_failure = on_durable, on_failure
        self._take_up()

    def stop(self, *, within: float | None = None) -> bool:  # noqa: ARG002 - it stands still, or it does not
        """Write what is pending, all at once; False if the disk stands still."""
        if self._now() < self._disk.stalled_until:
            return False
        while self._on_durable is not None and (self._in_hand is not None or self._pending):
            self._take_up()
            assert self._timer is not None
            self._timer.cancel()
            self._written()
        self._on_durable = None
        return True

    def gone(self, *, reaches_the_disk: bool) -> None:
        """The process has died."""
        if self._in_hand is not None and reaches_the_disk:
            with contextlib.suppress(sqlite3.Error, Unwritable):
                self._commit(self._in_hand[0])
        self._roll_back()

    def _take_up(self) -> None:
        """What the writer's thread does between two groups."""
        if self._in_hand is None and self._pending and self._on_durable is not None:
            self._in_hand, self._pending = (self._pending, self.appended), []
            stall = max(self._disk.stalled_until - self._now(), 0.0)
            self._timer = self._loop.call_later(stall + self._disk.rng.uniform(*COMMIT_SECONDS), self._written)

    def _written(self) -> None:
        """The group in hand is on the disk now, or it is not."""
        assert self._in_hand is not None
        assert self._on_durable is not None
        assert self._on_failure is not None
        left = self._disk.stalled_until - self._now()
        if left > 0:  # it has come to a standstill meanwhile
            self._timer = self._loop.call_later(left + COMMIT_SECONDS[0], self._written)
            return
        (group, last), self._in_hand, self._timer = self._in_hand, None, None
        try:
            self._write_group(group, last, self._on_durable)
        except (sqlite3.Error, Unwritable) as error:
            self._roll_back()
            on_failure, self._on_durable = self._on_failure, None
            on_failure(str(error))
            return
        self._take_up()

    def _commit(self, group: list[Facts]) -> None:
        if self._disk.fail_next:
            self._disk.fail_next -= 1
            raise sqlite3.OperationalError("disk I/O error")
        self._write_down(group)
        self._disk.commits += 1
        self._disk.on_commit(group)

    def _write_down(self, group: list[Facts]) -> None:
        super()._commit(group)


class _Borrowed:
    """A database that whoever reads it does not close."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def execute(self, statement: str) -> Iterator[Any]:
        """Run a statement."""
        return self._database.execute(statement)

    def close(self) -> None:
        """It is the disk's."""
