"""Shell: what peers are told: answers, events and farewells, queued with each peer and written once per batch.

From a change to the queueing of everything it means to others there is no `await`: nothing slips between. What one
change means to many is announced, in slices (S11), and whoever is to be told anything else meanwhile is told that
first: for each peer the order stays.

A peer that reads too slowly fills only its own outbox. Past `outbox_bytes_max` its watches end, each with the last
revision sent, and its client resumes from the next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from store.engine.engine import Answer, Delivery, Overtaken
from store.messages import Event, Failed, FailureKind, Found, Listing, ListingPart
from store.protocol import wire
from store.server.outbox import PIECE_BYTES, Shared, SharedFrame, weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from store.messages import Entry, Response
    from store.server.outbox import Frame
    from store.server.peer import Peer
    from store.server.peers import Peers

__all__ = ["Telling"]

log: logging.Logger = logging.getLogger(__name__)

SHARED_BYTES = 16 * 1024  # events and answers from here on are encoded once, and not copied for each reader
AT_ONCE = 64  # watches and waits that are told of a change before others have a turn
CAUGHT_UP_AT_ONCE = 1024  # of one peer: with more of them still to be told, its requests wait
WRITTEN_AT_ONCE = 16  # peers, before it is asked how long that has taken ...
BYTES_AT_ONCE = 2 * 1024 * 1024  # ... or so many bytes, which take about a millisecond
POSTPONED_MOST = 64  # changes that have each ended more waits than are answered at once; no more are made meanwhile
ANNOUNCEMENTS_MOST = 256  # that have begun; while there are so many, no more changes are made


class Telling:
    """What is still to be told, and to be written to sockets.

    Args:
        peers: Everybody who was taken in; and the store, with what is to be written down before it is said.
        stopwatch: What tells how long it takes.
        have_pass: Has a pass of the loop begin with more of what is to be told.

    Attributes:
        dirty: Peers with something queued in this batch.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        stopwatch: Callable[[], float],
        have_pass: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._durability = peers.durability
        self._outbox_bytes_max = peers.durability.engine.limits.outbox_bytes_max
        self._stopwatch = stopwatch
        self._have_pass = have_pass
        # In order: who is still to be told, by number, what of a change; and how.
        self._announcements: deque[tuple[OrderedDict[int, list[Any]], Callable[[Peer, Any], None]]] = deque()
        self._owed: dict[int, int] = {}  # by peer: how many of its watches and waits are among them
        self._ended: set[tuple[int, int]] = set()  # watches that have ended while they were among those to be told
        self.dirty: OrderedDict[Peer, None] = OrderedDict()
        self._later: OrderedDict[Peer, None] = OrderedDict()  # and those that are written to in the passes to come
        self._queued_in = self.dirty
        self._holding: dict[Peer, None] = {}  # peers with frames that are held
        self._shared = WeakValueDictionary[Any, Shared]()  # by content, of one engine: what waits in an outbox

    @property
    def behind(self) -> bool:
        """Whether so much is still to be told that no more is to be done meanwhile."""
        return (
            len(self._announcements) >= ANNOUNCEMENTS_MOST or len(self._durability.engine.postponed) >= POSTPONED_MOST
        )

    @property
    def goes_on(self) -> bool:
        """Whether there is more to be told, or written, in the next pass."""
        return bool(self.dirty or self._announcements or self._later or self._durability.engine.has_chores)

    def holding(self) -> Iterator[Peer]:
        """The peers that may be told nothing more before the disk has come further."""
        return (peer for peer in self._holding if not peer.outbox.ready)

    def owes_much(self, peer_id: int) -> bool:
        """Return whether a peer is still to be told so much that its requests wait until it has been."""
        return self._owed.get(peer_id, 0) > CAUGHT_UP_AT_ONCE

    def forget(self, peer: Peer) -> None:
        """A connection has ended."""
        self._owed.pop(peer.id, None)
        self.dirty.pop(peer, None)
        self._later.pop(peer, None)
        self._holding.pop(peer, None)

    # ------------------------------------------------------------------------------------------ what has changed

    def deliver(self, deliveries: tuple[Delivery | Answer | Overtaken, ...], *, opening: bool = False) -> None:
        """Queue what a change means to others. A watched event is encoded once, however many watch.

        What a watch that is `opening` is told comes in steps, each of which waits until the outbox is nearly empty.
        """
        number = self._durability.unwritten.appended  # what is done later need not be durable
        self._announce([(one.peer, one) for one in deliveries if type(one) is Answer], partial(self._answer, number))
        for delivery in deliveries:
            match delivery:
                case Delivery(watchers=watchers, events=events):
                    encoded = self._encode_events(events)
                    if opening:
                        for peer_id, watch_id in watchers:
                            self.say(self._peers.by_id[peer_id], _frame(watch_id, encoded))
                    else:
                        self._announce(watchers, partial(self._tell, number, encoded, events))
                case Overtaken(watcher=(peer_id, watch_id), revision=revision):
                    self.say(self._peers.by_id[peer_id], wire.encode_lagged(watch_id, revision))
        if not self._announcements:
            self._ended.clear()
        if self._durability.engine.has_chores:
            self._have_pass()

    def _announce(self, items: Sequence[tuple[int, Any]], tell: Callable[[Peer, Any], None]) -> None:
        """Tell all of these what was just done: a few at once, and many in the passes to come."""
        late: Sequence[tuple[int, Any]] = items
        if len(items) <= AT_ONCE:
            late = [item for item in items if self.owes_much(item[0])]
            for peer_id, what in items:
                # Its watches may be there for a moment longer than the peer.
                if not self.owes_much(peer_id) and (peer := self._peers.by_id.get(peer_id)) is not None:
                    self._catch_up(peer)
                    tell(peer, what)
        if late:
            left: OrderedDict[int, list[Any]] = OrderedDict()
            for peer_id, what in late:
                if peer_id in left:
                    left[peer_id].append(what)
                else:
                    left[peer_id] = [what]
            for peer_id, whats in left.items():
                self._owed[peer_id] = self._owed.get(peer_id, 0) + len(whats)
            self._announcements.append((left, tell))
            self._have_pass()

    def _catch_up(self, peer: Peer) -> None:
        """Tell a peer what is still to come of earlier changes, before it is told anything else."""
        if self._owed.pop(peer.id, 0):
            for left, tell in self._announcements:
                for what in left.pop(peer.id, ()):
                    tell(peer, what)

    # ------------------------------------------------------------------------------------------ in the next passes

    def go_on(self, turn: float) -> None:
        """Tell more of what is still to be told, for a turn of each kind.

        It is written later, together with what the same peers are told next; at once if nothing comes next.
        """
        self._queued_in = self._later
        try:
            self._for_a_turn(self._do_chore, turn)
            self._for_a_turn(self._announce_on, turn)
        finally:
            self._queued_in = self.dirty
        self._for_a_turn(self._flush_later, turn)

    def _for_a_turn(self, step: Callable[[], bool], turn: float) -> None:
        """Take one step after the other, until there is none left, or the time is over."""
        until = self._stopwatch() + turn
        while step() and self._stopwatch() < until:
            pass

    def _do_chore(self) -> bool:
        """Do more of what the engine has left for later: answer waits that one change has ended, say."""
        if self._durability.engine.has_chores:
            self.deliver(self._durability.engine.do_chore())
        return self._durability.engine.has_chores

    def _announce_on(self) -> bool:
        """Tell some of the watches and waits that are still to be told of the first change."""
        if self._announcements:
            left, tell = self._announcements[0]
            room = AT_ONCE
            while left and room:
                peer_id, items = left.popitem(last=False)
                some, rest = items[:room], items[room:]
                room -= len(some)
                if rest:
                    left[peer_id] = rest
                    left.move_to_end(peer_id, last=False)
                if (owed := self._owed.pop(peer_id, 0)) > len(some):
                    self._owed[peer_id] = owed - len(some)
                if (peer := self._peers.by_id.get(peer_id)) is not None:  # it may have gone meanwhile
                    for what in some:
                        tell(peer, what)
            if not left:
                self._announcements.popleft()
        if not self._announcements:
            self._ended.clear()
        return bool(self._announcements)

    def _flush_later(self) -> bool:
        """Write what some of those have queued who are told of one change with many others."""
        room = BYTES_AT_ONCE
        for _ in range(min(len(self._later), WRITTEN_AT_ONCE)):
            peer, _ = self._later.popitem(last=False)
            room -= _flush(peer)
            peer.read_on()
            if room <= 0:
                break
        return bool(self._later)

    def write_later(self, peer: Peer) -> None:
        """Write more of what a peer is to be sent, in one of the next passes."""
        self._later[peer] = None
        self._have_pass()

    # ------------------------------------------------------------------------------------------ one peer

    def _answer(self, number: int, peer: Peer, answer: Answer) -> None:
        """Queue the answer to a parked wait: one change may answer thousands, so these too keep to the outbox."""
        frame = self.encode(answer.request_id, answer.response)
        if peer.outbox.bytes + weight(len(frame)) > self._outbox_bytes_max:
            message = (
                f"{peer.outbox.bytes} bytes wait to be read, and this answer has {len(frame)}; outbox_bytes_max is "
                f"{self._outbox_bytes_max}: read, and ask again"
            )
            frame = wire.encode_response(answer.request_id, Failed(kind=FailureKind.LIMIT, message=message))
        self._queue(peer, frame, number)

    def encode(self, request_id: int, response: Response) -> Frame:
        """Encode a response; large ones of the same content share one encoding."""
        if type(response) is Found:
            entries: tuple[Entry | None, ...] = (response.entry,)
        elif type(response) is Listing or type(response) is ListingPart:
            entries = response.entries
        else:
            entries = ()
        if sum([len(entry.value) for entry in entries if entry is not None]) < SHARED_BYTES:
            return wire.encode_response(request_id, response)
        places = tuple([entry and (entry.key, entry.mod_revision) for entry in entries])
        content = self._durability.engine, type(response), getattr(response, "revision", 0), places
        if (shared := self._shared.get(content)) is None:
            shared = self._shared[content] = Shared(wire.encode_in_chunks(response))
        return SharedFrame(wire.content_head(request_id, shared.size), shared)

    def _encode_events(self, events: tuple[Event, ...]) -> bytes | Shared:
        """Encode events; large ones are shared by all watches that are told of them."""
        if sum([len(event.value) for event in events]) < SHARED_BYTES:
            encoded = wire.encode_events(events)
            return encoded if len(encoded) < SHARED_BYTES else Shared((encoded,))
        content = self._durability.engine, tuple([(event.kind, event.key, event.revision) for event in events])
        if (shared := self._shared.get(content)) is None:
            shared = self._shared[content] = Shared(wire.encode_in_chunks(events))
        return shared

    def _tell(self, number: int, encoded: bytes | Shared, events: tuple[Event, ...], peer: Peer, watch_id: int) -> None:
        """Queue events for one watch, or end it if its reader is too far behind; nothing comes after its end."""
        if (peer.id, watch_id) in self._ended:
            return
        most = self._outbox_bytes_max
        # A revision that is larger than any outbox goes to who is up to date; else its watch would never get past it.
        frame = _frame(watch_id, encoded)
        size = weight(len(frame))
        if peer.outbox.bytes + size <= most or (size > most and peer.outbox.bytes < PIECE_BYTES):
            self._queue(peer, frame, number)
            return
        self._ended.add((peer.id, watch_id))
        if self._durability.engine.end_watch(peer.id, watch_id):
            if not peer.lags:
                peer.lags = True
                log.warning("%s reads too slowly: its watches end, and may resume later", peer.name)
            self._queue(peer, wire.encode_lagged(watch_id, events[0].revision - 1), number)

    def say(self, peer: Peer, frame: Frame, *, number: int | None = None) -> None:
        """Queue a frame, to be sent once all up to `number` is durable; None: all that was done until now."""
        self._catch_up(peer)
        self._queue(peer, frame, self._durability.unwritten.appended if number is None else number)

    def answer_alone(self, peer: Peer, frame: Frame, number: int) -> None:
        """Do the same for the only answer of a batch, which is written at once if nothing waits before it."""
        if (
            peer.outbox.bytes
            or self._announcements
            or len(frame) > PIECE_BYTES
            or isinstance(frame, SharedFrame)
            or number > self._durability.unwritten.durable
        ):
            self.say(peer, frame, number=number)
        else:
            peer.write(frame)

    def _queue(self, peer: Peer, frame: Frame, number: int) -> None:
        if peer.gone:
            return
        if number <= self._durability.unwritten.durable:
            peer.outbox.queue(frame)
            self._queued_in[peer] = None
        else:
            peer.outbox.hold(frame, number)
            self._holding[peer] = None
            if peer.outbox.bytes > PIECE_BYTES or self._durability.behind:
                peer.pause_reading()
        peers = self._peers
        if peers.outboxes.bytes > peers.outboxes_kept_back and peers.outboxes_hold_too_much:
            for reader in (*self.dirty, *self._later):
                if peers.outboxes_hold_too_much:
                    reader.flush()  # that may be all it takes
            peers.make_room_in_outboxes()

    def flush(self) -> None:
        """Write what this batch has queued, one write per peer; what is too much for one step, in the next passes."""
        room = BYTES_AT_ONCE
        while self.dirty and room > 0:
            room -= _flush(self.dirty.popitem(last=False)[0])
        while self.dirty:
            self.write_later(self.dirty.popitem(last=False)[0])

    def release(self, number: int) -> None:
        """Let go of the frames that waited for this, and have those read again who may be."""
        waiting = list(self._holding)
        few = len(waiting) <= AT_ONCE
        for peer in waiting:
            if not peer.outbox.release(number):
                del self._holding[peer]
            (self.dirty if few else self._later)[peer] = None
        self.flush()
        if few:
            for peer in waiting:
                peer.read_on()
        else:
            self._have_pass()


def _flush(peer: Peer) -> int:
    """Write to a peer; return how many bytes."""
    before = peer.bytes_out
    peer.flush()
    return peer.bytes_out - before


def _frame(watch_id: int, encoded: bytes | Shared) -> Frame:
    """A frame of events for one watch."""
    if isinstance(encoded, bytes):
        return wire.frame_events(watch_id, encoded)
    return SharedFrame(wire.events_head(watch_id, encoded.size), encoded)
