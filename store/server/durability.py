"""Delays replies until the disk has the changes, and returns to the disk's state if a write fails (S3).

If the journal cannot write, the server drops its connections, and reads the store back from the disk. The lost steps
were never acknowledged. The server refuses writes, and tries the disk again each second. After a failed fsync, the last
group may be on disk or not, so no client is accepted until a probe is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from store.engine.engine import Engine
from store.messages import Add, CompareAndSet, Create, Delete, Get, Grant, Put, mutates, operations_of
from store.server.pending_commits import PendingCommits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from store.messages import Request
    from store.server.journal import Journal

log: logging.Logger = logging.getLogger(__name__)

STOP_WITHIN = 3.0  # seconds that a shutdown waits for the last group
SMALL = (Get, Put, Create, CompareAndSet, Delete, Add, Grant)  # the operations permitted in small writes
SMALL_OPERATIONS, SMALL_BYTES = 16, 16 * 1024
NO_RESERVE = "its disk has less than the 8 MiB that are kept back for them"
TRY_AGAIN_AFTER = 1.0  # seconds until a failed disk is retried


@dataclass(eq=False, repr=False)
class Durability:
    """The store, its journal (None in memory), and the replies that wait for the disk."""

    engine: Engine
    journal: Journal | None
    clock: Callable[[], float]
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    on_durable: Callable[[int], None]  # called with the number of the last step on disk
    on_restored: Callable[[Engine], None]  # called with an engine read back from the disk
    close_all: Callable[[], None]  # closes every connection
    ended: Callable[[asyncio.Task[None]], None]  # called with each ended background task
    leaving: bool = False
    _probing: asyncio.Task[None] | None = field(default=None, init=False)
    _restoring: bool = field(default=False, init=False)  # the store is being read back; no client is accepted

    def __post_init__(self) -> None:
        self._limits = self.engine.limits
        self.pending_commits: PendingCommits = PendingCommits(durable=0, revision=self.engine.revision)

    @property
    def is_overloaded(self) -> bool:
        """True if so many changes are not on disk yet that requests must wait."""
        return self.pending_commits.bytes > self._limits.journal_bytes_max

    @property
    def is_queue_full(self) -> bool:
        """True if one group is being written and the next is full."""
        return self.journal is not None and self.pending_commits.bytes >= 2 * self.journal.group_bytes

    @property
    def delays_large_writes(self) -> bool:
        """True if large writes must wait for the disk."""
        return self.is_queue_full or self.pending_commits.lets_small_steps_pass

    def request_must_wait(self, request: Request[Any], *, has_more: bool) -> bool:
        """Return whether a request must wait for the disk; `has_more`: earlier replies to the peer also wait."""
        if not self.pending_commits.bytes:
            return False
        if self.is_queue_full and has_more:
            return mutates(request)
        return self.delays_large_writes and mutates(request) and not _is_small_write(request)

    def client_refusal_reason(self) -> str | None:
        """Return why clients are refused now, or None."""
        if self._restoring:
            return f"the store is read from its disk again: {self.engine.read_only}"
        if self.journal is not None and self.journal.in_doubt:
            return f"no client is accepted now: {self.engine.read_only}, and its contents are in doubt"
        return None

    def record_changes(self) -> None:
        """Hand the changes of the last step to the journal."""
        if self.journal is not None and self.engine.read_only is None and not self.leaving:
            facts = self.engine.take_changeset()
            if facts is not None:
                self.pending_commits.append(self.journal.append(facts), facts)

    def start(self) -> None:
        """Start the journal's writer."""
        if self.journal is None:
            return
        loop = asyncio.get_running_loop()

        def post_to_loop(what: Callable[[Any], None], how: object) -> None:
            with contextlib.suppress(RuntimeError):  # raised if the loop ended while the disk hung
                loop.call_soon_threadsafe(what, how)

        self.pending_commits.note_written(self.journal.appended)
        self.journal.start(
            on_durable=lambda number: post_to_loop(self._note_durable, number),
            on_failure=lambda reason: post_to_loop(self._handle_write_failure, reason),
        )
        if self.journal.only_deletes and self._probing is None:
            self._probing = asyncio.create_task(self._wait_for_disk_room(self.journal, NO_RESERVE))
            self._probing.add_done_callback(self.ended)

    async def stop(self) -> None:
        """Write pending changes to disk, then send the waiting replies; if the disk hangs, close all connections."""
        self.leaving = True
        journal = self.journal
        if journal is not None:
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.wait([self._probing])
            # The loop handles the journal's last reports before this `await` returns.
            if not await self.in_thread(lambda: journal.stop(within=STOP_WITHIN)):
                self.close_all()  # the disk hangs: held frames must not be sent

    def _note_durable(self, number: int) -> None:
        self.pending_commits.note_written(number)
        self.on_durable(number)

    def _handle_write_failure(self, reason: str) -> None:
        assert self.journal is not None
        what = "accepts no client, as the disk's contents are in doubt," if self.journal.in_doubt else "refuses writes"
        log.error("store %s cannot write: %s; it %s until it can", self.engine.store_id, reason, what)
        self.engine.read_only = f"the disk does not take it ({reason})"  # so `record_changes` appends nothing
        self._restoring = True
        self.close_all()
        if self.leaving:
            return
        if self._probing is not None:
            self._probing.cancel()
        self._probing = asyncio.create_task(self._reload_from_disk(self.journal, self.engine.read_only))
        self._probing.add_done_callback(self.ended)

    async def _reload_from_disk(self, journal: Journal, why: str) -> None:
        """Read the store back from the disk; accept writes again once the disk accepts them."""
        engine = await self.in_thread(lambda: Engine.restore(journal.load(), limits=self._limits, now=self.clock()))
        engine.read_only = why
        self.engine = engine
        self._restoring = False
        self.pending_commits = PendingCommits(durable=journal.appended, revision=engine.revision)
        self.on_restored(engine)
        if not journal.answered:  # the disk failed; it did not just reject a step's content
            if not journal.only_deletes:
                await anyio.sleep(TRY_AGAIN_AFTER)
            while not await self.in_thread(journal.try_to_recover):  # noqa: ASYNC110 - a disk sends no notification
                await anyio.sleep(TRY_AGAIN_AFTER)
        engine.read_only = None
        self.start()
        self.record_changes()  # record the sessions opened meanwhile
        await self._wait_for_disk_room(journal, why)

    async def _wait_for_disk_room(self, journal: Journal, why: str) -> None:
        """While `journal.only_deletes`, refuse most writes but deletes; then large writes until there is room."""
        engine, state = self.engine, self.engine.state
        journal.short_of_room = True
        if journal.only_deletes:
            log.warning("store %s takes only deletes: %s", engine.store_id, why)
        while journal.only_deletes:
            state.why_only_deletes, state.writable_bytes = why, 0
            state.steering_bytes = await self.in_thread(journal.coordination_byte_rate)
            await anyio.sleep(TRY_AGAIN_AFTER)
            await self.in_thread(journal.try_to_accept_writes)
        log.warning("store %s can write again", engine.store_id)
        while (room := await self.in_thread(journal.write_bytes_max)) < self._limits.frame_bytes_max:
            state.writable_bytes = room
            await anyio.sleep(TRY_AGAIN_AFTER)
        state.why_only_deletes, journal.short_of_room = None, False


def _is_small_write(request: Request[Any]) -> bool:
    operations = operations_of(request)
    if len(operations) > SMALL_OPERATIONS or not all(isinstance(each, SMALL) for each in operations):
        return False
    return sum(len(getattr(each, "value", b"")) for each in operations) <= SMALL_BYTES
