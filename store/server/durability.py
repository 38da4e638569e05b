"""Shell: what a server does waits for its disk here, and goes back to what is on it if the disk takes nothing (S3).

Whatever a step led to is handed to the journal before anything is said, and what is said waits until the journal
reports that step durable; `unwritten` knows what waits for which. Reports come from the journal's thread, and are
handed over to the event loop's.

If the journal cannot write, nothing of what it could not write has been said: the server goes back to what is on disk,
drops its connections (their clients come back, and ask again what was not answered), refuses writes, and tries once a
second to write again. On a full disk it goes on with deletes. If it is not even known what is on disk, since an fsync
failed, it takes in nobody until it is.

A store in memory has no journal, and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import anyio

from store.engine.engine import Engine
from store.messages import Add, CompareAndSet, Create, Delete, Get, Grant, Guarded, Put, Transact, mutates
from store.server.unwritten import Unwritten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from store.messages import Request
    from store.server.journal import Journal

__all__ = ["STOP_WITHIN", "Durability"]

log: logging.Logger = logging.getLogger(__name__)

STOP_WITHIN = 3.0  # seconds for the disk to take the last group
SMALL = (Get, Put, Create, CompareAndSet, Delete, Add, Grant)  # what may be: the rest may change much at once
SMALL_OPERATIONS, SMALL_BYTES = 16, 16 * 1024
NO_RESERVE = "its disk has less than the 8 MiB that are kept back for them"
TRY_AGAIN_AFTER = 1.0  # seconds between looks at a disk that took nothing, or has only room for deletes


class Durability:
    """The store, its journal, and what waits for that.

    Args:
        engine: The store.
        journal: What writes it down; None if it is in memory only.
        clock: The server's.
        in_thread: Where the disk is waited for.
        on_durable: Told that everything up to this number is on disk: what waited for it may be said.
        on_restored: Told of the store that is served from now on, since it is what is on disk.
        cut: Cuts every connection, at once.
        ended: Told of a task that has ended; if with an error, what is on disk cannot be read, or it is a defect.

    Attributes:
        engine: The store; another one, once it has been read from its disk again.
        journal: As given.
        unwritten: What is not on disk yet.
        leaving: Nothing more is taken on: the journal takes its last group.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal | None,
        *,
        clock: Callable[[], float],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_durable: Callable[[int], None],
        on_restored: Callable[[Engine], None],
        cut: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.engine: Engine = engine
        self.journal: Journal | None = journal
        self._limits = engine.limits
        self._clock = clock
        self._in_thread = in_thread
        self._on_durable, self._on_restored = on_durable, on_restored
        self._cut, self._ended = cut, ended
        self.unwritten: Unwritten = Unwritten(durable=0, revision=engine.revision)
        self._probing: asyncio.Task[None] | None = None
        self.leaving: bool = False
        self._goes_back = False  # the store is being read from its disk, and nobody is told anything meanwhile

    @property
    def behind(self) -> bool:
        """Whether so much has been done that is not on disk yet that no more is to be taken on."""
        return self.unwritten.bytes > self._limits.journal_bytes_max

    @property
    def is_full(self) -> bool:
        """Return whether one group is being written and another one is full."""
        return self.journal is not None and self.unwritten.bytes >= 2 * self.journal.group_bytes

    def must_wait(self, request: Request[Any], *, has_more: bool) -> bool:
        """Return whether a request must wait until the disk has taken more.

        All peers fill the groups in turns. A peer that has nothing on its way to the disk yet may add something small
        at any time. `has_more` says whether the peer has.
        """
        return self.is_full and mutates(request) and (has_more or not _is_small(request))

    def refusal(self) -> str | None:
        """Why nobody can be told anything now, if so."""
        if self._goes_back:
            return f"the store is read from its disk again: {self.engine.read_only}"
        if self.journal is not None and self.journal.in_doubt:
            return f"nobody can be told anything now: {self.engine.read_only}, and what is on it is in doubt"
        return None

    def record(self) -> None:
        """Hand what has just been done to the journal, before anything is said of it."""
        if self.journal is not None and self.engine.read_only is None and not self.leaving:
            facts = self.engine.take_facts()
            if facts is not None:
                self.unwritten.append(self.journal.append(facts), facts)

    def start(self) -> None:
        """Have the journal write from now on."""
        if self.journal is None:
            return
        loop = asyncio.get_running_loop()

        def report(what: Callable[[Any], None], how: object) -> None:
            with contextlib.suppress(RuntimeError):  # a disk that hung, and came back when the loop had gone
                loop.call_soon_threadsafe(what, how)

        self.unwritten.written(self.journal.appended)
        self.journal.start(
            on_durable=lambda number: report(self._became_durable, number),
            on_failure=lambda reason: report(self._cannot_write, reason),
        )
        if self.journal.only_deletes and self._probing is None:
            self._probing = asyncio.create_task(self._wait_for_room(self.journal, NO_RESERVE))
            self._probing.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Make durable what is pending, and let its frames go; nothing more is taken on by now."""
        self.leaving = True
        journal = self.journal
        if journal is not None:
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.wait([self._probing])
            # Its last reports are in the loop before this returns.
            if not await self._in_thread(lambda: journal.stop(within=STOP_WITHIN)):
                self._cut()  # what is held may not be said, and whatever else comes after it

    def _became_durable(self, number: int) -> None:
        self.unwritten.written(number)
        self._on_durable(number)

    def _cannot_write(self, reason: str) -> None:
        """Go back to what is on disk: of what was done since, nobody has been told anything."""
        assert self.journal is not None
        # In doubt, what is read back may be gone after a crash, or what is not may be there: nobody is told either.
        what = "takes in nobody, since what is on disk is in doubt," if self.journal.in_doubt else "refuses writes"
        log.error("store %s cannot write: %s; it %s until it can", self.engine.store_id, reason, what)
        self.engine.read_only = f"the disk does not take it ({reason})"  # and so nothing more of it is recorded
        self._goes_back = True
        self._cut()
        if self.leaving:
            return
        if self._probing is not None:
            self._probing.cancel()
        self._probing = asyncio.create_task(self._go_back(self.journal, self.engine.read_only))
        self._probing.add_done_callback(self._ended)

    async def _go_back(self, journal: Journal, why: str) -> None:
        """Serve what is on disk, and take writes again as soon as the disk does.

        It is read in a thread: that may take seconds, in which newcomers are told to come again.
        """
        engine = await self._in_thread(lambda: Engine.restore(journal.load(), limits=self._limits, now=self._clock()))
        engine.read_only = why
        self.engine = engine
        self._goes_back = False
        self.unwritten = Unwritten(durable=journal.appended, revision=engine.revision)
        self._on_restored(engine)
        if not journal.answered:  # else who caused it is told so by a reply that is kept: the disk takes all else
            if not journal.only_deletes:
                await anyio.sleep(TRY_AGAIN_AFTER)
            while not await self._in_thread(journal.try_again):  # noqa: ASYNC110 - a disk tells nobody
                await anyio.sleep(TRY_AGAIN_AFTER)
        engine.read_only = None
        self.start()
        self.record()  # sessions that were opened meanwhile
        await self._wait_for_room(journal, why)

    async def _wait_for_room(self, journal: Journal, why: str) -> None:
        """Refuse all but deletes, then large writes, for as long as the disk has no room for more.

        All but deletes for a second at least: the client of a write that failed comes back and asks again. Else the
        same write would fail again, with every connection dropped, and so on until its client gives up.
        """
        engine = self.engine
        if journal.only_deletes:
            log.warning("store %s takes only deletes: %s", engine.store_id, why)
        while journal.only_deletes:
            engine.only_deletes, engine.writable_bytes = why, 0
            await anyio.sleep(TRY_AGAIN_AFTER)
            await self._in_thread(journal.has_room)
        log.warning("store %s can write again", engine.store_id)
        while (room := await self._in_thread(journal.room)) < self._limits.frame_bytes_max:
            engine.writable_bytes = room
            await anyio.sleep(TRY_AGAIN_AFTER)
        engine.only_deletes = None


def _is_small(request: Request[Any]) -> bool:
    """Return whether a mutation is written in much less time than a group may take, whatever it meets in the store."""
    if isinstance(request, Guarded):
        request = request.request
    operations = (*request.then, *request.otherwise) if isinstance(request, Transact) else (request,)
    if len(operations) > SMALL_OPERATIONS or not all(isinstance(each, SMALL) for each in operations):
        return False
    return sum(len(getattr(each, "value", b"")) for each in operations) <= SMALL_BYTES
