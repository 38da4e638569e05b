"""Shell: what a server does waits for its disk here, and goes back to what is on it if the disk takes nothing (S3).

Whatever a step led to is handed to the journal before anything is said, and what is said waits until the journal
reports that step durable; `unwritten` knows what waits for which. Reports come from the journal's thread, and are
handed over to the event loop's.

If the journal cannot write, nothing of what it could not write has been said: the server goes back to what is on disk,
drops its connections (their clients come back, and ask again what was not answered), refuses writes, and tries once a
second to write again. If it is not even known what is on disk, since an fsync failed, it takes in nobody until it is.

A store in memory has no journal, and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol, cast

import anyio

from store.engine.engine import Engine
from store.errors import StoreUsageError
from store.server.unwritten import Unwritten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from store.limits import Limits
    from store.server.journal import Journal

__all__ = ["STOP_WITHIN", "Durability", "Host"]

log: logging.Logger = logging.getLogger(__name__)

STOP_WITHIN = 3.0  # seconds for the disk to take the last group
TRY_AGAIN_AFTER = 1.0  # seconds between attempts to write to a disk that took nothing


class Host(Protocol):
    """What it needs of its server."""

    def became_durable(self, number: int) -> None:
        """Everything up to this number is on disk: what waited for it may be said."""
        ...

    def restored(self, engine: Engine) -> None:
        """Serve this store from now on: it is what is on disk."""
        ...

    def abort(self) -> None:
        """Cut every connection, at once."""
        ...

    def stop_serving(self, error: BaseException) -> None:
        """Serve no more: what is on disk cannot be read."""
        ...

    def timer_ended(self, timer: asyncio.Task[None]) -> None:
        """A task has ended that ends with an error only by a defect of ours."""
        ...


class Durability:
    """The journal of a server, and what waits for it.

    Args:
        engine: The store.
        journal: What writes it down; None if it is in memory only.
        limits: How far the disk may be behind.
        clock: The server's.
        in_thread: Where the disk is waited for.
        host: The server.

    Attributes:
        journal: What writes it down.
        unwritten: What is not on disk yet.
        leaving: Nothing more is taken on: the journal takes its last group.
        goes_back: The store is being read from its disk, and nobody is told anything meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal | None,
        *,
        limits: Limits,
        clock: Callable[[], float],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        host: Host,
    ) -> None:
        self._engine = engine
        self.journal = journal
        self._limits = limits
        self._clock = clock
        self._in_thread = in_thread
        self._host = host
        self.unwritten: Unwritten = Unwritten(durable=0, revision=engine.revision)
        self._probing: asyncio.Task[None] | None = None
        self.leaving: bool = False
        self.goes_back: bool = False

    @property
    def store_id(self) -> str:
        """Whose disk it is."""
        return self._engine.store_id

    @property
    def behind(self) -> bool:
        """Whether so much has been done that is not on disk yet that no more is to be taken on."""
        return self.unwritten.bytes > self._limits.journal_bytes_max

    @property
    def commits(self) -> int:
        """How often the disk has taken something."""
        return self.journal.commits if self.journal is not None else 0

    @property
    def commit_seconds(self) -> float:
        """How long the groups that were written have taken, all of them, in seconds."""
        return self.journal.commit_seconds if self.journal is not None else 0.0

    def refusal(self) -> str | None:
        """Why nobody can be told anything now, if so."""
        if self.goes_back:
            return f"the store is read from its disk again: {self._engine.read_only}"
        if self.journal is not None and self.journal.in_doubt:
            return f"nobody can be told anything now: {self._engine.read_only}, and what is on it is in doubt"
        return None

    def record(self) -> None:
        """Hand what has just been done to the journal, before anything is said of it."""
        if self.journal is not None and self._engine.read_only is None and not self.leaving:
            facts = self._engine.take_facts()
            if facts is not None:
                self.unwritten.append(self.journal.append(facts), facts)

    def start(self) -> None:
        """Have the journal write from now on."""
        if self.journal is not None:
            loop = asyncio.get_running_loop()

            def on_durable(number: int) -> None:
                with contextlib.suppress(RuntimeError):  # a disk that hung, and came back when the loop had gone
                    loop.call_soon_threadsafe(self._became_durable, number)

            def on_failure(reason: str) -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._cannot_write, reason)

            self.unwritten.written(self.journal.appended)
            self.journal.start(on_durable=on_durable, on_failure=on_failure)

    async def stop(self) -> None:
        """Make durable what is pending, and let its frames go; nothing more is taken on by now."""
        self.leaving = True
        if self.journal is not None:
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.wait([self._probing])
            # Its last reports are in the loop before this returns.
            stopped = await self._in_thread(lambda: cast("Journal", self.journal).stop(within=STOP_WITHIN))
            if not stopped:
                self._host.abort()  # what is held may not be said, and whatever else comes after it

    def _became_durable(self, number: int) -> None:
        self.unwritten.written(number)
        self._host.became_durable(number)

    def _cannot_write(self, reason: str) -> None:
        """Go back to what is on disk: of what was done since, nobody has been told anything."""
        assert self.journal is not None
        # In doubt, what is read back may be gone after a crash, or what is not may be there: nobody is told either.
        what = "takes in nobody, since what is on disk is in doubt," if self.journal.in_doubt else "refuses writes"
        log.error("store %s cannot write: %s; it %s until it can", self.store_id, reason, what)
        self._engine.read_only = f"the disk does not take it ({reason})"  # and so nothing more of it is recorded
        self.goes_back = True
        self._host.abort()
        if self.leaving:
            return
        if self._probing is not None:
            self._probing.cancel()
        self._probing = asyncio.create_task(self._go_back(self._engine.read_only))
        self._probing.add_done_callback(self._host.timer_ended)

    async def _go_back(self, why: str) -> None:
        """Read what is on disk, in a thread: that may take seconds, in which newcomers are told to come again."""
        journal = self.journal
        assert journal is not None
        try:
            engine = await self._in_thread(
                lambda: Engine.restore(journal.load(), limits=self._limits, now=self._clock())
            )
        except StoreUsageError as error:
            self._host.stop_serving(error)
            return
        engine.read_only = why
        self._engine = engine
        self.goes_back = False
        self.unwritten = Unwritten(durable=journal.appended, revision=engine.revision)
        self._host.restored(engine)
        if not journal.answered:
            await self._try_to_write(why)
        else:  # who caused it is told so by a reply that is kept, and the disk takes everything else
            self._write_on()

    async def _try_to_write(self, why: str) -> None:
        """Take writes again as soon as the disk does, but not before clients have been refused what it did not take.

        There may be room for the probe and not for what failed: its client, which is about to come back and ask again,
        would else have it fail again, with every connection dropped, and so on until it gives up.
        """
        assert self.journal is not None
        await anyio.sleep(TRY_AGAIN_AFTER)
        while not await self._in_thread(self.journal.try_again):  # noqa: ASYNC110 - a disk tells nobody
            await anyio.sleep(TRY_AGAIN_AFTER)
        if self.journal.only_deletes:
            log.warning("store %s has no room on its disk for more than deletes", self.store_id)
            self._engine.only_deletes = why
        self._write_on()
        while self.journal.only_deletes:
            await anyio.sleep(TRY_AGAIN_AFTER)
            await self._in_thread(self.journal.has_room)
        self._engine.only_deletes = None
        log.warning("store %s can write again", self.store_id)

    def _write_on(self) -> None:
        """The disk takes what is done from now on."""
        self._engine.read_only = None
        self.start()
        self.record()  # sessions that were opened meanwhile
