"""A disk on virtual time: it has latencies, and keeps only committed data.

A `Disk` outlives the store's processes. Each process of the store opens a `SimulatedJournal` on its disk: the real
journal on a database in memory, with timers of the process's loop in place of the writer's thread. When the process
dies, uncommitted data is lost, but the group of changes being written may have reached the disk.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.disk import rows
from store.server.journal import Journal, UnstorableRowError

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Iterator

    from store.engine.changeset import ChangeSet

COMMIT_SECONDS = (0.0002, 0.004)  # the shortest and the longest commit, in seconds


class NoJournalFiles:
    """Replaces the journal's files: its mark, and its reserve of space, which is unlimited."""

    def write(self, store_id: str, number: int) -> None:
        """Do nothing."""

    def allocate(self, least: int) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def free(self) -> None:
        """Do nothing."""


class Disk:
    """The data that outlives the store's processes; `rng` draws latencies, and whether a crash keeps the last group."""

    def __init__(self, rng: random.Random, *, store_id: str) -> None:
        self.rng = rng
        self._journal: SimulatedJournal | None = None
        self.reserve: NoJournalFiles = NoJournalFiles()
        self.database: sqlite3.Connection = sqlite3.connect(":memory:", isolation_level=None)
        self.database.executescript(rows.SCHEMA)
        self.database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", store_id))

    def open_journal(self, loop: asyncio.AbstractEventLoop, *, kind: type[SimulatedJournal]) -> SimulatedJournal:
        """Open the journal of a new process; the previous process has ended."""
        self._journal = kind(self, loop)
        return self._journal

    def crash_journal(self) -> None:
        """End a killed process's journal; draw whether the group being written reached the disk."""
        opened, self._journal = self._journal, None
        if opened is not None:
            opened.end_with_process(reaches_the_disk=self.rng.random() < 0.5)

    def close(self) -> None:
        """Delete the data."""
        self.database.close()


class SimulatedJournal(Journal):
    """One store process's journal on a `Disk`."""

    def __init__(self, disk: Disk, loop: asyncio.AbstractEventLoop) -> None:
        self._disk = disk  # `super().__init__` is not called, as it makes and locks files
        self._loop = loop
        self._path = self._directory = self._log = Path("a disk in memory")  # for messages only: no such file exists
        self._database = disk.database
        self._pending = []
        self.appended: int = 0
        self._wake = threading.Condition()
        self._in_hand: tuple[list[ChangeSet], int] | None = None
        self._probing, self._closed = threading.Lock(), False
        self._timer: asyncio.TimerHandle | None = None
        self._on_durable: Callable[[int], None] | None = None
        self._on_failure: Callable[[str], None] | None = None
        self.commits: int = 0
        self.commit_seconds: float = 0.0
        self.in_doubt: bool = False  # always False: on this disk, nothing of a failed group is written
        self.only_deletes: bool = False
        self._grows = self._free_bytes = self._long_for = 0
        self.log_bytes: int = 0
        self.answered: bool = False
        self._mark, self._reserve = NoJournalFiles(), disk.reserve  # type: ignore[assignment]

    def write_bytes_max(self) -> int:
        """Return the most bytes of a write: unlimited."""
        return sys.maxsize

    coordination_byte_rate = write_bytes_max

    def _predict_growth(self) -> int:
        return 0

    def _open_read_only(self) -> sqlite3.Connection:
        return _DatabaseKeptOpen(self._disk.database)  # type: ignore[return-value]  # the caller cannot close it

    def append(self, facts: ChangeSet) -> int:
        """Add changes to the next group."""
        number = super().append(facts)
        self._begin_group()
        return number

    def start(self, *, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        """Begin to write groups."""
        self._on_durable, self._on_failure = on_durable, on_failure
        self._begin_group()

    def stop(self, *, within: float | None = None) -> bool:  # noqa: ARG002 - it takes no time
        """Write all pending changes; this takes no virtual time."""
        while self._on_durable is not None and (self._in_hand is not None or self._pending):
            self._begin_group()
            assert self._timer is not None
            self._timer.cancel()
            self._finish_group()
        self._on_durable = None
        return True

    def end_with_process(self, *, reaches_the_disk: bool) -> None:
        """End the process's writes; first commit the group being written if it `reaches_the_disk`."""
        if self._in_hand is not None and reaches_the_disk:
            with contextlib.suppress(sqlite3.Error, UnstorableRowError):
                self._commit(self._in_hand[0])
        self._roll_back()

    def _begin_group(self) -> None:
        if self._in_hand is None and self._pending and self._on_durable is not None:
            self._in_hand, self._pending = (self._pending, self.appended), []
            self._timer = self._loop.call_later(self._disk.rng.uniform(*COMMIT_SECONDS), self._finish_group)

    def _finish_group(self) -> None:
        assert self._in_hand is not None
        assert self._on_durable is not None
        assert self._on_failure is not None
        (group, last), self._in_hand, self._timer = self._in_hand, None, None
        try:
            self._write_group(group, last, self._on_durable)
        except (sqlite3.Error, UnstorableRowError) as error:
            self._roll_back()
            on_failure, self._on_durable = self._on_failure, None
            on_failure(str(error))
            return
        self._begin_group()


class _DatabaseKeptOpen:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def execute(self, statement: str) -> Iterator[Any]:
        return self._database.execute(statement)

    def close(self) -> None:
        """Do nothing."""
