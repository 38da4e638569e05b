"""One node's watch on the head of its run (the keys that every node watches), and the head's listeners."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.core.questions import OperatorQuestion
from rdzv.core.round import Round
from rdzv.core.state import (
    AnnouncedDrain,
    Ban,
    Closed,
    CurrentCoordinator,
    Head,
    LastCoordinator,
    LostStore,
    NodeWithStore,
    Progress,
    Unban,
    ban_names_of,
)
from rdzv.core.stopping import Drain, Resized, RoundStop
from rdzv.core.stored import log_unreadable
from rdzv.errors import RendezvousStateError
from rdzv.listeners import Listeners
from rdzv.node.link.stopwatch import Stopwatch
from store import ConnectionLost, Entry, StoreTimeoutError
from store.net.tasks import cancel_and_wait
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from rdzv.core.keys import Keys
    from store import Event, Store, StoreError

log: Final = make_logger(__name__)

ASK_AGAIN_AFTER = 0.5  # seconds until a failed opening of the watch is repeated


class HeadWatcher:
    """Keeps `head`, a run's state that every node watches, up to date."""

    def __init__(self, store: Store, keys: Keys, *, node_id: str = "") -> None:
        self._store = store
        self._keys = keys
        self._node_id = node_id
        self._own_ban_keys = frozenset([keys.bans + node_id])
        self.head: Head = Head()
        self.heard_at: float = 0.0  # when the watch last delivered events, on this node's clock
        # The last ban of this node or of its attributes, with its revision, even if it was lifted.
        self.own_ban: tuple[int, Ban] | None = None
        self.before: LastCoordinator | None = None
        self.resets: int = 0  # how often the watch began anew with a snapshot, so that events may be missing
        self.error: Exception | None = None  # the error that ended the watch
        # The error of unpacking the round's key, until another round replaces that key.
        self.unreadable: Exception | None = None
        self.unanswered: StoreError | None = None  # the error of the last failed attempt to open the watch
        self.opened_in: float | None = None  # seconds that the store took to open the watch; None until it is open
        self.round_at: float | None = None  # when this node saw the round complete; None if it did not
        self.synced: asyncio.Event = asyncio.Event()
        self.on_change: Callable[[], object] = int  # called before the listeners, e.g. to update the membership
        self.listeners: Listeners = Listeners()
        self.seen: int = 0  # the highest revision of the watch's events
        self._anew: Head | None = None  # the incomplete head while a reset watch delivers its snapshot

    def watch_attribute_bans(self, attributes: Mapping[str, str]) -> None:
        """Notice bans of these attributes, too."""
        self._own_ban_keys = frozenset(self._keys.bans + name for name in ban_names_of(self._node_id, attributes))

    def notify_listeners(self) -> None:
        """Update the membership by `on_change`, then notify the listeners."""
        self.on_change()
        self.listeners.notify()

    async def run(self) -> None:
        """Follow the head until cancelled, or until an error."""
        try:
            while self.opened_in is None:
                await self._watch_head()
        except Exception as error:  # noqa: BLE001  after any error, end the waits for the head
            self.error = error
            self.synced.set()
            self.notify_listeners()
            log.debug("the head of run %s is not followed any more: %s", self._keys.run_id, error)

    async def _watch_head(self) -> None:
        """Open the watch and apply its events; if the opening times out or loses the connection, return for a retry."""
        with Stopwatch(self._store.time) as opening:
            try:
                async with self._store.watch(self._keys.head, snapshot=True) as watch:
                    self.opened_in = opening.stop()
                    async for events in watch.batches():
                        self.heard_at = self._store.time()
                        for event in events:
                            self._apply_event(event)
                            self.seen = max(self.seen, event.revision)
                        self.notify_listeners()
            except (ConnectionLost, StoreTimeoutError) as error:
                if self.opened_in is not None or self._store.failure is not None:
                    raise
                log.debug("the head of run %s is read again: %s", self._keys.run_id, error)
                self.unanswered = error
                await anyio.sleep(ASK_AGAIN_AFTER)

    def note_round(self, round: Round) -> None:
        """Replace the known round if `round` is later."""
        if self._set_later_round(round):
            self.notify_listeners()

    def note_coordinator(self, there: object, *, revision: int) -> None:
        """If no coordinator is known, set it from its key as of `revision`, unless the watch is past that revision."""
        if isinstance(there, Entry) and self.head.coordinator is None and revision > self.seen:
            coordinator = CurrentCoordinator(node_id=there.value.decode(errors="replace"), term=there.create_revision)
            self.head = replace(self.head, coordinator=coordinator)
            self.notify_listeners()

    def note_run_closed(self, closed: Closed) -> None:
        """Record the run's closing before the watch delivers it."""
        if self.head.closed is None:
            self.head = replace(self.head, closed=closed, closed_over=self.head.progress)
            self.notify_listeners()

    def _apply_event(self, event: Event) -> None:
        match event.kind:
            case "synced":
                self.head, self._anew = self._anew or self.head, None
                self.synced.set()
            case "reset":
                # Keep the old head until the snapshot is complete, so that a closed run does not look open.
                self._anew = Head(round=self.head.round)  # keep the last round until a later one replaces it
                self.resets += 1
            case "put" | "delete":
                try:
                    self._apply_change(event)
                except (RendezvousStateError, ValueError) as error:
                    log_unreadable(event.key, error)
                    if event.key == self._keys.round:
                        self.unreadable = error

    def _apply_change(self, event: Event) -> None:
        if event.key == self._keys.round:
            self.unreadable = None
            if event.kind == "put":
                self._set_later_round(Round.unpack(event.value, revision=event.revision))
        elif self._anew is None:
            self.head = replace(self.head, **self._fields_after_event(self.head, event))
        else:
            self._anew = replace(self._anew, **self._fields_after_event(self._anew, event))

    def _set_later_round(self, round: Round) -> bool:
        later = self.head.round is None or self.head.round.revision < round.revision
        if later:
            self.round_at = self._store.time() if self.synced.is_set() and self._anew is None else None
            self.head = replace(self.head, round=round)
            if self._anew is not None:
                self._anew = replace(self._anew, round=round)
        return later

    def _fields_after_event(self, head: Head, event: Event) -> dict[str, Any]:
        keys, key, value, put = self._keys, event.key, event.value, event.kind == "put"
        now, revision = self._store.time(), event.revision

        def map_with_change(field: str, prefix: str, read: Callable[[], object]) -> dict[str, Any]:
            there = {name: one for name, one in getattr(head, field).items() if prefix + name != key}
            if put:
                there[key.removeprefix(prefix)] = read()
            return {field: there}

        def announced_drain() -> AnnouncedDrain:
            drain, known = Drain.unpack(value), self.head.drains.get(key.removeprefix(keys.drains))
            if known is not None and known.revision == revision:
                return known  # a reset watch delivers a known drain again
            return AnnouncedDrain(until=now + drain.within, reason=drain.reason, revision=revision)

        if key == keys.coordinator:
            if not put and head.coordinator is not None:
                self.before = LastCoordinator(node_id=head.coordinator.node_id, cause=event.cause)
            coordinator = CurrentCoordinator(node_id=value.decode(errors="replace"), term=event.create_revision)
            return {"coordinator": coordinator if put else None}
        if key == keys.closed:
            # `closed_over` is the progress at the closing. Keep it after a reset: the snapshot's progress is later.
            over = self.head.closed_over if self.head.closed is not None else self.head.progress
            return {"closed": Closed.of(value) if put else None, "closed_over": over if put else None}
        if key == keys.progress:
            found = self._anew is not None or not self.synced.is_set()
            progress = Progress.unpack(value) if put else None
            if progress is not None and head.progress is not None:
                progress = progress.keep_lost_name(self._node_id, head.progress)
            # A snapshot delivers `moving` before `progress`, so `moves_over`, the progress at the move, is set here.
            first = {"moves_over": progress} if head.moves and head.moves_over is None else {}
            return {"progress": progress, "progress_at": now, "progress_found": found, **first}
        if key == keys.stop:
            return {"stop": RoundStop.unpack(value, revision=revision) if put else None}
        if key == keys.lost_store:
            return {
                "lost_store": LostStore.unpack(value) if put else None,
                "lost_store_at": now,
                "lost_store_told": revision,
            }
        if key == keys.tally_copy:
            return {"tally": value}
        if key == keys.moving:
            over = self.head.moves_over if self.head.moves else self.head.progress
            return {"moves": put, "moves_over": over if put else None}
        if key.startswith(keys.hosted):
            last, _, arrival = value.partition(b" ")
            hosted = NodeWithStore(arrival=int(arrival or revision), last_round=int(last or 0))
            return map_with_change("hosted", keys.hosted, lambda: hosted)
        if key == keys.resized:
            return {"resized": Resized.unpack(value, revision=revision) if put else None}
        if key.startswith(keys.drains):
            return map_with_change("drains", keys.drains, announced_drain)
        if key.startswith(keys.bans):
            if put and key in self._own_ban_keys:
                self.own_ban = revision, Ban.unpack(value)
            return map_with_change("bans", keys.bans, lambda: Ban.unpack(value, seen_at=now))
        if key.startswith(keys.unbans):
            return map_with_change("unbans", keys.unbans, lambda: Unban.unpack(value, revision=revision))
        if key.startswith(keys.questions):
            return map_with_change("questions", keys.questions, lambda: OperatorQuestion.unpack(value))
        return {}


@contextlib.asynccontextmanager
async def follow_head(store: Store, keys: Keys) -> AsyncIterator[HeadWatcher]:
    """Follow the head of a run without a node; yield once the head is read, or raise StoreError."""
    follower = HeadWatcher(store, keys)
    task = asyncio.create_task(follower.run(), name=f"follow run {keys.run_id}")
    try:
        await follower.synced.wait()
        if follower.error is not None:
            raise follower.error
        yield follower
    finally:
        await cancel_and_wait(task)
