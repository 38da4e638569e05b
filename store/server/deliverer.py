"""Queues answers, events and goodbyes for each peer, and writes each queue once per batch.

If one change causes many notifications, they are queued in slices (S11). A peer's pending notifications are queued
before any other frame for this peer, to keep the order. If the outbox of a slow reader exceeds `outbox_bytes_max`, its
watches end. The client is told the last revision that each watch got, and may resume the watch after it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from store.engine.applied import EventBatch, WaitEnd, WatchLost
from store.messages import Event, Failed, FailureKind, Found, Listing, ListingPart
from store.protocol import wire
from store.server.outbox import PIECE_BYTES, SharedChunks, SharedFrame, frame_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from store.messages import Entry, Response
    from store.server.outbox import Frame
    from store.server.peer import Peer
    from store.server.peers import Peers

log: logging.Logger = logging.getLogger(__name__)

SHARED_BYTES = 16 * 1024  # events and answers of at least this size are encoded once for all readers
AT_ONCE = 64  # the most notifications queued, or peers served after a commit, in one step
CAUGHT_UP_AT_ONCE = 1024  # a peer's requests wait while it has more pending notifications than this
WRITTEN_AT_ONCE = 16  # peers written to before the clock is read again
BYTES_AT_ONCE = 2 * 1024 * 1024  # bytes written to peers in one step: 1 ms
POSTPONED_MOST = 64  # requests wait while this many changes have `Wait` requests to check
ANNOUNCEMENTS_MOST = 256  # requests wait while this many changes have pending notifications


class Deliverer:
    """The pending notifications, and the peers to write to. `request_pass` schedules the next pass that sends."""

    def __init__(self, peers: Peers, *, stopwatch: Callable[[], float], request_pass: Callable[[], None]) -> None:
        self._peers = peers
        self._durability = peers.durability
        self._outbox_bytes_max = peers.durability.engine.limits.outbox_bytes_max
        self._stopwatch = stopwatch
        self._request_pass = request_pass
        # For each change: its pending notifications, by peer, and the function that queues a notification.
        self._announcements: deque[tuple[OrderedDict[int, Sequence[Any]], Callable[[Peer, Any], None]]] = deque()
        self._owed = Counter[int]()  # the number of pending notifications, by peer
        self._ended: set[tuple[int, int]] = set()  # ended watches: their pending notifications are dropped
        self.dirty: OrderedDict[Peer, None] = OrderedDict()
        self._later: OrderedDict[Peer, None] = OrderedDict()  # peers to write to in later passes
        self._queued_in = self.dirty  # where peers with new frames go: `dirty`, or `_later` during `run_turn`
        self._holding: dict[Peer, None] = {}  # peers with frames that wait for the disk
        self._shared = WeakValueDictionary[Any, SharedChunks]()  # encoded events and answers, by content

    @property
    def is_overloaded(self) -> bool:
        """True if so many notifications or waits are pending that requests must wait."""
        return (
            len(self._announcements) >= ANNOUNCEMENTS_MOST or len(self._durability.engine.postponed) >= POSTPONED_MOST
        )

    @property
    def has_more(self) -> bool:
        """True if there is more to do in the next pass."""
        return bool(self.dirty or self._announcements or self._later or self._durability.engine.has_chores)

    def peers_awaiting_disk(self) -> Iterator[Peer]:
        """Return each peer whose queued frames all wait for the disk."""
        return (peer for peer in self._holding if not peer.outbox.ready)

    def peer_is_behind(self, peer_id: int) -> bool:
        """Return whether a peer has so many pending notifications that its requests wait."""
        return self._owed.get(peer_id, 0) > CAUGHT_UP_AT_ONCE

    def remove_peer(self, peer: Peer) -> None:
        """Forget a closed connection."""
        self._owed.pop(peer.id, None)
        self._holding.pop(peer, None)

    def deliver(self, deliveries: tuple[EventBatch | WaitEnd | WatchLost, ...], *, opening: bool = False) -> None:
        """Queue a change's notifications, or the first events of an `opening` watch."""
        number = self._durability.pending_commits.appended  # notifications wait until this step is durable
        answers: dict[int, list[WaitEnd]] = {}
        for one in deliveries:
            if type(one) is WaitEnd:
                answers.setdefault(one.peer, []).append(one)
        self._queue_notifications(answers, partial(self._queue_answer, number))
        for delivery in deliveries:
            match delivery:
                case EventBatch(watches=watches, events=events):
                    encoded = self._encode_events(events)
                    if opening:  # no limit: each step of opening a watch awaits a nearly empty outbox
                        for peer_id, watch_ids in watches.items():
                            for watch_id in watch_ids:
                                self.send(self._peers.by_id[peer_id], _events_frame(watch_id, encoded))
                    else:
                        self._queue_notifications(watches, partial(self._queue_events, number, encoded, events))
                case WatchLost(watcher=(peer_id, watch_id), revision=revision):
                    self.send(self._peers.by_id[peer_id], wire.encode_lagged(watch_id, revision))
        if not self._announcements:
            self._ended.clear()
        if self._durability.engine.has_chores:
            self._request_pass()

    def _queue_notifications(self, by_peer: Mapping[int, Sequence[Any]], tell: Callable[[Peer, Any], None]) -> None:
        """Queue notifications: now if they are few, else in the next passes of the loop."""
        late = by_peer
        if sum(map(len, by_peer.values())) <= AT_ONCE:
            late = {peer_id: items for peer_id, items in by_peer.items() if self.peer_is_behind(peer_id)}
            for peer_id, items in by_peer.items():
                # A closed peer may still have watches.
                if peer_id not in late and (peer := self._peers.by_id.get(peer_id)) is not None:
                    self._send_pending_notifications(peer)
                    for what in items:
                        tell(peer, what)
        if late:
            self._owed.update({peer_id: len(items) for peer_id, items in late.items()})
            self._announcements.append((OrderedDict(late), tell))
            self._request_pass()

    def _send_pending_notifications(self, peer: Peer) -> None:
        if self._owed.pop(peer.id, 0):
            for left, tell in self._announcements:
                for what in left.pop(peer.id, ()):
                    tell(peer, what)

    def run_turn(self, turn: float) -> None:
        """Spend up to `turn` seconds on each kind of pending work: chores, notifications, writes to sockets."""
        self._queued_in = self._later
        try:
            self._repeat_for_seconds(self._do_postponed_work, turn)
            self._repeat_for_seconds(self._notify_some, turn)
        finally:
            self._queued_in = self.dirty
        self._repeat_for_seconds(self._flush_postponed, turn)

    def _repeat_for_seconds(self, step: Callable[[], bool], turn: float) -> None:
        until = self._stopwatch() + turn
        while step() and self._stopwatch() < until:
            pass

    def _do_postponed_work(self) -> bool:
        if self._durability.engine.has_chores:
            self.deliver(self._durability.engine.do_postponed_work())
        return self._durability.engine.has_chores

    def _notify_some(self) -> bool:
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
                if (peer := self._peers.by_id.get(peer_id)) is not None:
                    for what in some:
                        tell(peer, what)
            if not left:
                self._announcements.popleft()
        if not self._announcements:
            self._ended.clear()
        return bool(self._announcements)

    def _flush_postponed(self) -> bool:
        room = BYTES_AT_ONCE
        for _ in range(min(len(self._later), WRITTEN_AT_ONCE)):
            peer, _ = self._later.popitem(last=False)
            room -= _flush_peer(peer)
            peer.resume_requests()
            if room <= 0:
                break
        return bool(self._later)

    def write_later(self, peer: Peer) -> None:
        """See `PeerCallbacks.write_later`."""
        self._later[peer] = None
        self._request_pass()

    def _queue_answer(self, number: int, peer: Peer, answer: WaitEnd) -> None:
        frame = self.encode(answer.request_id, answer.response)
        if peer.outbox.bytes + frame_memory(len(frame)) > self._outbox_bytes_max:
            message = (
                f"{peer.outbox.bytes} bytes wait to be read, and this answer has {len(frame)}; outbox_bytes_max is "
                f"{self._outbox_bytes_max}: read, and ask again"
            )
            frame = wire.encode_response(answer.request_id, Failed(kind=FailureKind.LIMIT, message=message))
        self._queue_frame(peer, frame, number)

    def encode(self, request_id: int, response: Response) -> Frame:
        """Encode a response; equal large responses share their bytes."""
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
            shared = self._shared[content] = SharedChunks(wire.encode_shared_body(response))
        return SharedFrame(wire.response_head(request_id, shared.size), shared)

    def _encode_events(self, events: tuple[Event, ...]) -> bytes | SharedChunks:
        if sum([len(event.value) for event in events]) < SHARED_BYTES:
            encoded = wire.encode_events(events)
            return encoded if len(encoded) < SHARED_BYTES else SharedChunks((encoded,))
        content = self._durability.engine, tuple([(event.kind, event.key, event.revision) for event in events])
        if (shared := self._shared.get(content)) is None:
            shared = self._shared[content] = SharedChunks(wire.encode_shared_body(events))
        return shared

    def _queue_events(
        self, number: int, encoded: bytes | SharedChunks, events: tuple[Event, ...], peer: Peer, watch_id: int
    ) -> None:
        if (peer.id, watch_id) in self._ended:
            return
        most = self._outbox_bytes_max
        # If the outbox is almost empty, send events of any size: the watch could not get past them otherwise.
        frame = _events_frame(watch_id, encoded)
        size = frame_memory(len(frame))
        if peer.outbox.bytes + size <= most or (size > most and peer.outbox.bytes < PIECE_BYTES):
            self._queue_frame(peer, frame, number)
            return
        self._ended.add((peer.id, watch_id))
        if self._durability.engine.state.watches.remove(peer.id, watch_id):
            if not peer.lags:
                peer.lags = True
                log.warning("%s reads too slowly: its watches end, and may resume later", peer.name)
            self._queue_frame(peer, wire.encode_lagged(watch_id, events[0].revision - 1), number)

    def send(self, peer: Peer, frame: Frame, *, number: int | None = None) -> None:
        """Queue a frame, to be sent once step `number`, by default the last, is on disk."""
        self._send_pending_notifications(peer)
        self._queue_frame(peer, frame, self._durability.pending_commits.appended if number is None else number)

    def send_batch_of_one(self, peer: Peer, frame: Frame, number: int) -> None:
        """Write the only answer of a batch at once, unless it is large, or must wait for the disk or other frames."""
        if (
            peer.outbox.bytes
            or self._announcements
            or len(frame) > PIECE_BYTES
            or isinstance(frame, SharedFrame)
            or number > self._durability.pending_commits.durable
        ):
            self.send(peer, frame, number=number)
        else:
            peer.write(frame)

    def _queue_frame(self, peer: Peer, frame: Frame, number: int) -> None:
        if peer.gone:
            return
        if number <= self._durability.pending_commits.durable:
            peer.outbox.queue(frame)
            self._queued_in[peer] = None
        else:
            peer.outbox.hold(frame, number)
            self._holding[peer] = None
            if peer.outbox.bytes > PIECE_BYTES or self._durability.is_overloaded:
                peer.pause_reading()
        peers = self._peers
        if peers.outboxes.bytes > peers.outboxes_kept_back and peers.outboxes_hold_too_much:
            for reader in (*self.dirty, *self._later):
                if peers.outboxes_hold_too_much:
                    reader.flush()  # sending may make enough room
            peers.close_slowest_readers()

    def flush(self) -> None:
        """Write queued frames, one write per peer; beyond `BYTES_AT_ONCE`, in the next passes."""
        room = BYTES_AT_ONCE
        while self.dirty and room > 0:
            room -= _flush_peer(self.dirty.popitem(last=False)[0])
        while self.dirty:
            self.write_later(self.dirty.popitem(last=False)[0])

    def release_durable_frames(self, number: int) -> None:
        """Send the frames that waited for step `number`, now on disk, and resume reading from their peers."""
        waiting = list(self._holding)
        few = len(waiting) <= AT_ONCE
        for peer in waiting:
            if not peer.outbox.release_held(number):
                del self._holding[peer]
            (self.dirty if few else self._later)[peer] = None
        self.flush()
        if few:
            for peer in waiting:
                peer.resume_requests()
        else:
            self._request_pass()


def _flush_peer(peer: Peer) -> int:
    before = peer.bytes_out
    peer.flush()
    return peer.bytes_out - before


def _events_frame(watch_id: int, encoded: bytes | SharedChunks) -> Frame:
    if isinstance(encoded, bytes):
        return wire.events_head(watch_id, len(encoded)) + encoded
    return SharedFrame(wire.events_head(watch_id, encoded.size), encoded)
