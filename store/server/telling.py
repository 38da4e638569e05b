"""Shell: what peers are told: answers, events and farewells, queued with each peer and written once per batch.

From a change to the queueing of everything it means to others there is no `await`: nothing slips between. What one
change means to thousands is told in slices (`turns`), and whoever is to be told anything else meanwhile is told that
first: for each peer the order stays.

A peer that reads too slowly fills only its own outbox. Past `outbox_bytes_max` its watches end, each with the last
revision sent, and its client resumes from the next.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from store.engine.engine import Answer, Delivery, Overtaken
from store.messages import Failed, FailureKind
from store.protocol import wire
from store.server.outbox import PIECE_BYTES, weight
from store.server.turns import AT_ONCE, Announcement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from store.engine.engine import Engine
    from store.limits import Limits
    from store.messages import Event
    from store.server.durability import Durability
    from store.server.memory import Memory
    from store.server.peer import Peer

__all__ = ["Telling"]

log: logging.Logger = logging.getLogger(__name__)

SHARED_BYTES = 16 * 1024  # events from here on are queued as they are, and not copied for each who watches
FLUSHES_AT_ONCE = 16  # before it is asked how long they have taken
POSTPONED_MOST = 64  # changes that have each ended more waits than are answered at once; no more are made meanwhile
ANNOUNCEMENTS_MOST = 256  # that have begun; while there are so many, no more changes are made
EVENTS_HEAD_BYTES = len(wire.frame_events(0, b""))  # what each watch has of its own in a frame of events


class Telling:
    """What is still to be told, and to be written to sockets.

    Args:
        engine: The store.
        peers: Everybody who was taken in, by number.
        limits: What may wait for them.
        durability: What is to be written down before it is said.
        memory: What all of them hold.
        stopwatch: What tells how long it takes.
        have_pass: Has a pass of the loop begin with more of what is to be told.

    Attributes:
        engine: The store; another one, once it has been read from its disk again.
        dirty: Peers with something queued in this batch.
    """

    def __init__(
        self,
        engine: Engine,
        peers: dict[int, Peer],
        *,
        limits: Limits,
        durability: Durability,
        memory: Memory,
        stopwatch: Callable[[], float],
        have_pass: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._peers = peers
        self._limits = limits
        self._durability = durability
        self._memory = memory
        self._stopwatch = stopwatch
        self._have_pass = have_pass
        self._announcements: deque[Announcement[Any]] = deque()  # those that have begun, in order
        self._ended: set[tuple[int, int]] = set()  # watches that have ended while they were among those to be told
        self.dirty: dict[Peer, None] = {}
        self._later: OrderedDict[Peer, None] = OrderedDict()  # and those that are written to in the passes to come
        self._no_hurry = False  # what is queued now is written then
        self._holding: dict[Peer, None] = {}  # peers with frames that are held

    @property
    def behind(self) -> bool:
        """Whether so much is still to be told that no more is to be done meanwhile."""
        return len(self._announcements) >= ANNOUNCEMENTS_MOST or len(self.engine.postponed) >= POSTPONED_MOST

    @property
    def goes_on(self) -> bool:
        """Whether there is more to be told, or written, in the next pass."""
        return bool(self.dirty or self._announcements or self._later or self.engine.has_chores)

    def holding(self) -> Iterator[Peer]:
        """The peers that may be told nothing more before the disk has come further."""
        return (peer for peer in self._holding if not peer.outbox.ready)

    def forget(self, peer: Peer) -> None:
        """A connection has ended."""
        self.dirty.pop(peer, None)
        self._later.pop(peer, None)
        self._holding.pop(peer, None)

    # ------------------------------------------------------------------------------------------ what has changed

    def deliver(self, deliveries: tuple[Delivery | Answer | Overtaken, ...], *, opening: bool = False) -> None:
        """Queue what a change means to others. A watched event is encoded once, however many watch.

        What a watch that is `opening` is told comes in steps, each of which waits until the outbox is nearly empty.
        """
        answers = [(one.peer, one) for one in deliveries if type(one) is Answer]
        self._announce(answers, self._answer)
        for delivery in deliveries:
            match delivery:
                case Delivery(watchers=watchers, events=events):
                    encoded = wire.encode_events(events)
                    if opening:
                        for peer_id, watch_id in watchers:
                            self._say_events(self._peers[peer_id], watch_id, encoded)
                    else:
                        self._announce(watchers, partial(self._tell, encoded=encoded, events=events))
                case Overtaken(watcher=(peer_id, watch_id), revision=revision):
                    self.say(self._peers[peer_id], wire.encode_lagged(watch_id, revision))
        if not self._announcements:
            self._ended.clear()
        if self.engine.has_chores:
            self._have_pass()

    def go_on(self, turn: float) -> None:
        """Tell more of what is still to be told, for a turn of each kind."""
        began = self._stopwatch()
        self._do_chores(began + turn)
        self._announce_on(began + 2 * turn)
        self._flush_later(began + 3 * turn)

    def _do_chores(self, until: float) -> None:
        """Do more of what the engine has left for later, for so long: answer waits that one change has ended, say."""
        self._no_hurry = True
        try:
            while self.engine.has_chores:
                self.deliver(self.engine.do_chore())
                if self._stopwatch() >= until:
                    return
        finally:
            self._no_hurry = False

    def _announce(self, items: Sequence[tuple[int, Any]], tell: Callable[[Peer, Any, int], None]) -> None:
        """Tell all of these what was just done: a few at once, and many in the passes to come."""
        number = self._durability.unwritten.appended  # what is done later need not be durable
        if len(items) > AT_ONCE:

            def tell_one(item: tuple[int, Any]) -> None:
                peer = self._peers.get(item[0])
                if peer is not None:  # it may have gone meanwhile
                    tell(peer, item[1], number)

            self._announcements.append(Announcement(items, tell_one))
            self._have_pass()
            return
        for peer_id, what in items:
            if (peer := self._peers.get(peer_id)) is not None:  # its watches may be there for a moment longer
                self._catch_up(peer)
                tell(peer, what, number)

    def _catch_up(self, peer: Peer) -> None:
        """Tell a peer what is still to come of earlier changes, before it is told anything else."""
        for announcement in self._announcements:
            announcement.tell_now(peer.id)

    def _announce_on(self, until: float) -> None:
        """Tell more of those who are still to be told, for so long.

        What they are told is written later, together with what they are told next; at once if nothing comes next.
        """
        self._no_hurry = True
        try:
            while self._announcements:
                self._announcements[0].go_on()
                if self._announcements[0].over:
                    self._announcements.popleft()
                if self._stopwatch() >= until:
                    break
        finally:
            self._no_hurry = False
        if not self._announcements:
            self._ended.clear()

    # ------------------------------------------------------------------------------------------ one peer

    def _answer(self, peer: Peer, answer: Answer, number: int) -> None:
        """Queue the answer to a parked wait: one change may answer thousands, so these too keep to the outbox."""
        frame = wire.encode_response(answer.request_id, answer.response)
        if peer.outbox.bytes + weight(len(frame)) > self._limits.outbox_bytes_max:
            message = (
                f"{peer.outbox.bytes} bytes wait to be read, and this answer has {len(frame)}; outbox_bytes_max is "
                f"{self._limits.outbox_bytes_max}: read, and ask again"
            )
            frame = wire.encode_response(answer.request_id, Failed(kind=FailureKind.LIMIT, message=message))
        self._queue(peer, frame, number)

    def _tell(self, peer: Peer, watch_id: int, number: int, *, encoded: bytes, events: tuple[Event, ...]) -> None:
        """Queue events for one watch, or end it if its reader is too far behind; nothing comes after its end."""
        if (peer.id, watch_id) in self._ended:
            return
        most = self._limits.outbox_bytes_max
        # A revision that is larger than any outbox goes to who is up to date; else its watch would never get past it.
        size = weight(len(encoded) + EVENTS_HEAD_BYTES)
        if peer.outbox.bytes + size <= most or (size > most and peer.outbox.bytes < PIECE_BYTES):
            self._queue_events(peer, watch_id, encoded, number)
            return
        self._ended.add((peer.id, watch_id))
        if self.engine.end_watch(peer.id, watch_id):
            if not peer.lags:
                peer.lags = True
                log.warning("%s reads too slowly: its watches end, and may resume later", peer.name)
            self._queue(peer, wire.encode_lagged(watch_id, events[0].revision - 1), number)

    def _say_events(self, peer: Peer, watch_id: int, encoded: bytes) -> None:
        self._catch_up(peer)
        self._queue_events(peer, watch_id, encoded, self._durability.unwritten.appended)

    def _queue_events(self, peer: Peer, watch_id: int, encoded: bytes, number: int) -> None:
        """Queue events for one watch; those that are large are shared with all others who are told of them."""
        if len(encoded) < SHARED_BYTES:
            frame = wire.frame_events(watch_id, encoded)
            self._queue(peer, frame, number)
        else:
            self._queue(peer, wire.events_head(watch_id, len(encoded)), number)
            self._queue(peer, encoded, number)

    def say(self, peer: Peer, frame: bytes, number: int | None = None) -> None:
        """Queue a frame, to be sent once all up to `number` is durable; None: all that was done until now."""
        if self._announcements:
            self._catch_up(peer)
        self._queue(peer, frame, self._durability.unwritten.appended if number is None else number)

    def _queue(self, peer: Peer, frame: bytes, number: int) -> None:
        dirty = self._later if self._no_hurry else self.dirty
        if number > self._durability.unwritten.durable:
            peer.hold(frame, number)
            self._holding[peer] = None
            if peer.outbox.bytes > PIECE_BYTES or self._durability.behind:
                dirty[peer] = None  # nothing of it may be sent, but it is to be read no further
        else:
            peer.queue(frame)
            dirty[peer] = None
        memory = self._memory
        if memory.outboxes.bytes > memory.outboxes_free and memory.outboxes_hold_too_much:
            self._flush_later(math.inf)
            self.flush()  # that may be all it takes
            memory.make_room_in_outboxes()

    # ------------------------------------------------------------------------------------------ what waits

    def flush(self) -> None:
        """Write what this batch has queued, one write per peer."""
        while self.dirty:
            dirty, self.dirty = self.dirty, {}
            for peer in dirty:
                peer.flush()

    def _flush_later(self, until: float) -> None:
        """Write what those have queued who are told of one change with thousands of others, for so long."""
        later = self._later
        while later:
            for _ in range(min(len(later), FLUSHES_AT_ONCE)):
                peer, _ = later.popitem(last=False)
                peer.flush()
                peer.read_on()
            if self._stopwatch() >= until:
                return

    def release(self, number: int) -> list[Peer]:
        """Let go of the frames that waited for this; who may be read again now, if it is not for later."""
        waiting = list(self._holding)
        dirty = self.dirty if len(waiting) <= AT_ONCE else self._later
        for peer in waiting:
            if not peer.outbox.release(number):
                del self._holding[peer]
            dirty[peer] = None
        self.flush()
        if dirty is self._later:
            self._have_pass()
            return []
        return waiting
