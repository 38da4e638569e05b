"""Shell: one node's watch on the head of its run, and who wants to know when it changes.

This is all that a node watches: the coordinator's key, the last round, the closing, the progress. It is kept as one
`Head`, from which everything a handler is asked is answered without a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.core.asking import Question
from rdzv.core.round import Round
from rdzv.core.state import Ban, Closed, Coordinator, Head, LastCoordinator, Leaving, Progress, Unban, ban_names
from rdzv.core.stopping import Drain, Resized, Stop
from rdzv.core.stored import pass_over
from rdzv.errors import RendezvousStateError
from rdzv.listeners import Listeners
from rdzv.node.link.stopwatch import Stopwatch
from store import ConnectionLost, Entry, StoreTimeoutError
from store.net.tasks import cancel_and_wait
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from rdzv.core.keys import Keys
    from store import Event, Store, StoreError

__all__ = ["Follower", "following"]

log: logging.Logger = escaping(logging.getLogger(__name__))

ASK_AGAIN_AFTER = 0.5  # seconds


class Follower:
    """Follows the head of a run.

    Attributes:
        head: What is known of it.
        heard_at: When the store has told anything last, on this node's clock.
        own_ban: The last ban of this node, or of an attribute of its, after the revision that wrote it; also if it was
            lifted before anybody looked.
        before: Who was the last coordinator that has gone.
        resets: How often history was missed.
        error: Why it is not followed any more, if so.
        unreadable: Why the last round is not known, if so: while its key cannot be read, no other one is completed.
        unanswered: What came of the last attempt to begin, if that has failed; there is another one.
        opened_in: Seconds that the store took to answer.
        round_at: When the round completed, on this node's clock, if it was there.
        synced: Set once the head is known as it stands.
        on_change: Called at every change, before any listener: the node's membership takes the change in.
        listeners: Notified at every change then.
    """

    def __init__(self, store: Store, keys: Keys, *, node_id: str = "") -> None:
        self._store = store
        self._keys = keys
        self._node_id = node_id
        self._own_ban_keys = frozenset([keys.banned(node_id)])
        self.head: Head = Head()
        self.heard_at: float = 0.0
        self.own_ban: tuple[int, Ban] | None = None
        self.before: LastCoordinator | None = None
        self.resets: int = 0
        self.error: Exception | None = None
        self.unreadable: RendezvousStateError | None = None
        self.unanswered: StoreError | None = None
        self.opened_in: float | None = None
        self.round_at: float | None = None
        self.synced: asyncio.Event = asyncio.Event()
        self.on_change: Callable[[], object] = int
        self.listeners: Listeners = Listeners()
        self._seen = 0  # the last revision that the watch has told of
        self._anew: Head | None = None  # what a snapshot has said so far, until it is whole

    def has_attributes(self, attributes: Mapping[str, str]) -> None:
        """Learn what this node says of itself: by that, it may be banned with others."""
        self._own_ban_keys = frozenset(map(self._keys.banned, ban_names(self._node_id, attributes)))

    def tell(self) -> None:
        """Have the membership take in what has changed, and notify the listeners then. Nothing here waits."""
        self.on_change()
        self.listeners.changed()

    async def run(self) -> None:
        """Follow until cancelled, or until the store is of no more use."""
        try:
            while self.opened_in is None:
                await self._follow()
        except Exception as error:  # noqa: BLE001  whatever it is, nobody must wait for a head that will not come
            self.error = error
            self.synced.set()
            self.tell()
            log.debug("the head of run %s is not followed any more: %s", self._keys.run_id, error)

    async def _follow(self) -> None:
        """Open the watch, and take in what it tells; return if it could not be opened, and is to be asked for again.

        Whoever waits for the head has a time limit of its own. A server to which thousands come at once may be too busy
        to answer some of them within the time limit of a call.
        """
        with Stopwatch(self._store.time) as opening:
            try:
                async with self._store.watch(self._keys.head, snapshot=True) as watch:
                    self.opened_in = opening.stop()
                    async for events in watch.batches():
                        self.heard_at = self._store.time()
                        for event in events:
                            self._take(event)
                            self._seen = max(self._seen, event.revision)
                        self.tell()
            except (ConnectionLost, StoreTimeoutError) as error:
                if self.opened_in is not None or self._store.failure is not None:
                    raise
                log.debug("the head of run %s is read again: %s", self._keys.run_id, error)
                self.unanswered = error
                await anyio.sleep(ASK_AGAIN_AFTER)  # of no use to hurry: the time limit of a call has just passed

    # ------------------------------------------------------------------------------------ learned by another way

    def take_round(self, round: Round) -> None:
        """Learn of a round; the later one counts."""
        if self._take_round(round):
            self.tell()

    def take_coordinator(self, there: object, *, revision: int) -> None:
        """Learn who coordinates by the entry of its key as of a revision, unless the watch has come further."""
        if isinstance(there, Entry) and self.head.coordinator is None and revision > self._seen:
            coordinator = Coordinator(node_id=there.value.decode(errors="replace"), term=there.create_revision)
            self.head = replace(self.head, coordinator=coordinator)
            self.tell()

    def take_closing(self, closed: Closed) -> None:
        """Learn of the closing; what the watch says later counts."""
        if self.head.closed is None:
            self.head = replace(self.head, closed=closed, closed_over=self.head.progress)
            self.tell()

    # ------------------------------------------------------------------------------------ learned by the watch

    def _take(self, event: Event) -> None:
        match event.kind:
            case "synced":
                self.head, self._anew = self._anew or self.head, None
                self.synced.set()
            case "reset":
                # The snapshot that follows says what holds, and until it is whole the old head does: a run must not
                # look open for the moment between the two. Rounds only go up.
                self._anew = Head(round=self.head.round)
                self.resets += 1
            case "put" | "delete":
                try:
                    self._change(event)
                except RendezvousStateError as error:  # it says nothing, and all else that is there holds
                    pass_over(event.key, error)
                    if event.key == self._keys.round:
                        self.unreadable = error

    def _change(self, event: Event) -> None:
        if event.key == self._keys.round:
            self.unreadable = None
            if event.kind == "put":
                self._take_round(Round.unpack(event.value, revision=event.revision))
        elif self._anew is None:
            self.head = replace(self.head, **self._changes(self.head, event))
        else:
            self._anew = replace(self._anew, **self._changes(self._anew, event))

    def _take_round(self, round: Round) -> bool:
        """Learn of a round; False if it is none that is later than what is known."""
        later = self.head.round is None or self.head.round.revision < round.revision
        if later:
            self.round_at = self._store.time() if self.synced.is_set() and self._anew is None else None
            self.head = replace(self.head, round=round)
            if self._anew is not None:
                self._anew = replace(self._anew, round=round)
        return later

    def _changes(self, head: Head, event: Event) -> dict[str, Any]:
        """What one event of any key but the round's changes in the head."""
        keys, key, value, put = self._keys, event.key, event.value, event.kind == "put"
        now, revision = self._store.time(), event.revision

        def of_many(field: str, prefix: str, read: Callable[[], object]) -> dict[str, Any]:
            there = {name: one for name, one in getattr(head, field).items() if prefix + name != key}
            if put:
                there[key.removeprefix(prefix)] = read()
            return {field: there}

        def leaving() -> Leaving:
            drain = Drain.unpack(value)
            return Leaving(until=now + drain.within, reason=drain.reason, revision=revision)

        if key == keys.coordinator:
            if not put and head.coordinator is not None:
                self.before = LastCoordinator(node_id=head.coordinator.node_id, cause=event.cause)
            coordinator = Coordinator(node_id=value.decode(errors="replace"), term=event.create_revision)
            return {"coordinator": coordinator if put else None}
        if key == keys.closed:
            # After a reset, both are of before: of the members' leaving a new snapshot tells together with the closing.
            over = self.head.closed_over if self.head.closed is not None else self.head.progress
            return {"closed": Closed.of(value) if put else None, "closed_over": over if put else None}
        if key == keys.progress:
            found = self._anew is not None or not self.synced.is_set()
            progress = Progress.unpack(value) if put else None
            return {"progress": progress, "progress_at": now, "progress_found": found}
        if key == keys.stop:
            return {"stop": Stop.unpack(value, revision=revision) if put else None}
        if key == keys.resized:
            return {"resized": Resized.unpack(value, revision=revision) if put else None}
        if key.startswith(keys.drains):
            return of_many("drains", keys.drains, leaving)
        if key.startswith(keys.bans):
            if put and key in self._own_ban_keys:
                self.own_ban = revision, Ban.unpack(value)
            return of_many("bans", keys.bans, lambda: Ban.unpack(value))
        if key.startswith(keys.unbans):
            return of_many("unbans", keys.unbans, lambda: Unban.unpack(value, revision=revision))
        if key.startswith(keys.questions):
            return of_many("questions", keys.questions, lambda: Question.unpack(value))
        return {}


@contextlib.asynccontextmanager
async def following(store: Store, keys: Keys) -> AsyncIterator[Follower]:
    """Follow the head of a run without a node, and give the follower once it knows the head.

    Raises:
        StoreError: The store does not tell it.
    """
    follower = Follower(store, keys)
    task = asyncio.create_task(follower.run(), name=f"follow run {keys.run_id}")
    try:
        await follower.synced.wait()
        if follower.error is not None:
            raise follower.error
        yield follower
    finally:
        await cancel_and_wait(task)
