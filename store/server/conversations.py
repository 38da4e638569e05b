"""Shell: what peers ask and what they are told: requests are carried out in turns, and their effects announced.

The hot path is plain asyncio: bytes arrive in one buffer that all peers share, `connection` cuts them into requests,
`engine` applies them, and what is to be said is queued with each peer and written once per batch. From the first byte
of a request to the queueing of everything it causes there is no `await`: nothing slips between a change and its
announcement.

What one peer asks is carried out for as long as a turn lasts; what is left of it stands in a ring (`turns`), so that
others wait for milliseconds, whatever it is (S11).

A peer that reads too slowly fills only its own outbox. Past `outbox_bytes_max` its watches end, each with the last
revision sent, and its client resumes from the next; while its replies pile up, its requests are not carried out, also
those that were read already: a packet full of requests may ask for gigabytes of answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import anyio.lowlevel

from store.engine.engine import Answer, Delivery, Engine, Overtaken, Work
from store.engine.processes import Closing
from store.errors import AuthenticationError, ProtocolError
from store.messages import Failed, FailureKind, Guarded, Stats, Watch
from store.protocol import wire
from store.protocol.wire import Bye, Hello, Sorry
from store.server.outbox import PIECE_BYTES, weight
from store.server.turns import AT_ONCE, TURN, Announcement, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from store.limits import Limits
    from store.messages import Event, Request, Response
    from store.server.durability import Durability
    from store.server.log_lines import Complaints
    from store.server.memory import Memory
    from store.server.peer import Peer

__all__ = ["Conversations", "Host"]

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024  # one buffer for all peers; larger frames are put together from pieces
SMALL_BYTES = 16 * 1024  # less than this is copied out of the shared buffer sooner than the buffer is given away
SHARED_BYTES = 16 * 1024  # events from here on are queued as they are, and not copied for each who watches
SLOW = 0.05  # seconds of one request that the log has a line for
FLUSHES_AT_ONCE = 16  # before it is asked how long they have taken
STIRRED_MOST = 8  # changes that have each ended more waits than are answered at once; no more are made meanwhile
ANNOUNCEMENTS_MOST = 256  # that have begun; while there are so many, no more changes are made
EVENTS_HEAD_BYTES = len(wire.frame_events(0, b""))  # what each watch has of its own in a frame of events


class Host(Protocol):
    """What the conversations need of their server."""

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        ...

    def take_in(self, peer: Peer, hello: Hello, now: float) -> None:
        """A peer has said hello, and proven what is wanted."""
        ...

    def guessed_wrong(self, peer: Peer) -> None:
        """A peer has not proven what is wanted."""
        ...

    def hang_up(self, peer: Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and nobody else anything."""
        ...

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        ...

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        ...


class Conversations:
    """All peers of a server, from the first byte of a request to the last of what it causes.

    Args:
        engine: The store.
        peers: Everybody who was taken in, by number.
        limits: What they may ask.
        durability: What is to be written down before it is said.
        memory: What all of them hold.
        complaints: The log's lines about them.
        clock: The server's.
        stopwatch: What tells how long turns take; the clock of a test may stand still meanwhile.
        host: The server.

    Attributes:
        buffer: Where bytes arrive, whoever sends them.
        bytes_in: How many have.
        on_request: Told of each request that was begun: its kind, "ok" or how it failed, and how long that took.
    """

    def __init__(
        self,
        engine: Engine,
        peers: dict[int, Peer],
        *,
        limits: Limits,
        durability: Durability,
        memory: Memory,
        complaints: Complaints,
        clock: Callable[[], float],
        stopwatch: Callable[[], float],
        host: Host,
    ) -> None:
        self.engine = engine
        self._peers = peers
        self._limits = limits
        self._durability = durability
        self._memory = memory
        self._complaints = complaints
        self._clock = clock
        self._stopwatch = stopwatch
        self._host = host
        self._turns: Turns[Peer] = Turns()
        self._pass_comes = False
        self._announcements: deque[Announcement[Any]] = deque()  # those that have begun, in order
        self._ended: set[tuple[int, int]] = set()  # watches that have ended while they were among those to be told
        self._dirty: dict[Peer, None] = {}  # peers with something queued in this batch
        self._later: OrderedDict[Peer, None] = OrderedDict()  # and those that are written to in the passes to come
        self._no_hurry = False  # what is queued now is written then
        self._holding: dict[Peer, None] = {}  # peers with frames that are held
        self._slowed: dict[Peer, None] = {}  # peers that are not read until the disk has taken more
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.bytes_in = 0
        self.on_request: Callable[[str, str, float], None] | None = None

    # ------------------------------------------------------------------------------------------ called by peers

    @property
    def disk_is_behind(self) -> bool:
        """Whether so much has been done that is not on disk yet that no more is to be taken on."""
        return self._durability.behind

    def now(self) -> float:
        """Seconds on the server's clock."""
        return self._clock()

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        self._host.accepted(peer)

    def waits_for_disk(self, peer: Peer) -> None:
        """This peer is to be read again when the disk has taken more."""
        self._slowed[peer] = None

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        self._dirty.pop(peer, None)
        self._later.pop(peer, None)
        self._holding.pop(peer, None)
        self._slowed.pop(peer, None)
        self._turns.leave(peer)
        self._host.lost(peer)

    def received(self, peer: Peer, data: memoryview) -> None:
        """Bytes have come. No await here: a change and its announcements are one step."""
        self.bytes_in += len(data)
        if self._durability.leaving:
            return  # the journal takes its last group: what came after that could not be answered any more
        assert peer.connection is not None, "only peers that were taken in are read"
        assert peer.unread is None, "a peer is not read while its requests wait"
        if not self._busy:
            began = self._stopwatch()
            try:
                request = peer.connection.only_request(data)
                if request is not None:
                    self._apply(peer, *request, self._clock())
            except ProtocolError as error:
                self._host.hang_up(peer, Sorry("protocol", str(error)))
                return
            finally:
                self.flush()  # whatever happened: what was announced is told
                self._count_time(self._stopwatch() - began)
            if request is not None and peer.work is None:
                return
            peer.unread = iter(()) if request is not None else peer.connection.receive(data)
            copied = False
        elif copied := len(data) < SMALL_BYTES:
            peer.unread = peer.connection.receive(bytes(data))
        else:
            peer.unread = peer.connection.receive(data)
        before = peer.connection.held_bytes
        peer.count_inbox(before + len(data), progress=False)
        self.go_on(peer)
        if not copied and peer.unread is not None:
            # The requests that are left lie in the buffer, which now stays theirs: others get a new one.
            self.buffer = memoryview(bytearray(RECEIVE_BYTES))
            peer.count_inbox(before + RECEIVE_BYTES, progress=True)
        if self._memory.inboxes_hold_too_much:
            self._memory.make_room_in_inboxes(peer.received_at)
        if peer.connection.held_bytes > PIECE_BYTES and self._durability.behind and not peer.gone:
            peer.wait_for_disk()

    def go_on(self, peer: Peer) -> None:
        """Carry out what a peer has asked, in its turn, while its outbox has room for the answers. No await here."""
        if self._durability.leaving or peer.unread is None or peer in self._turns:
            return
        if self._busy:
            self._wait_for_turn(peer, used=False)
            return
        began = self._stopwatch()
        try:
            self._take_turn(peer, began + self._turns.length)
        except AuthenticationError as error:
            self._host.guessed_wrong(peer)
            self._host.hang_up(peer, Sorry("authentication", str(error)))
        except ProtocolError as error:
            self._host.hang_up(peer, Sorry("protocol", str(error)))
        finally:
            self.flush()  # whatever happened: what was announced is told
            self._count_time(self._stopwatch() - began)

    # ------------------------------------------------------------------------------------------ turns

    def _take_turn(self, peer: Peer, until: float) -> None:
        """Carry out what a peer has asked until its turn is over, its outbox is full, or nothing is left."""
        now = self._clock()
        assert peer.unread is not None, "whose turn it is has asked something"
        while True:
            if peer.work is not None:
                self._go_on_with(peer, peer.work)
            else:
                try:
                    item = next(peer.unread)
                except StopIteration:
                    self._has_read(peer)
                    return
                if item is None:
                    pass  # a large request is being decoded
                elif isinstance(item, Hello):
                    self._host.take_in(peer, item, now)
                elif isinstance(item, Bye):
                    peer.close(Closing.GOODBYE)
                else:
                    request_id, acknowledged, request = item
                    self._apply(peer, request_id, acknowledged, request, now)
            if peer.gone:
                return
            if peer.outbox.bytes > PIECE_BYTES:
                peer.flush()
                if peer.reading_paused and peer.outbox.ready:
                    return
            if self._stopwatch() >= until:
                self._wait_for_turn(peer, used=True)
                return

    @property
    def _busy(self) -> bool:
        """Whether enough is done in this pass, or is still to be told."""
        told = len(self._announcements) < ANNOUNCEMENTS_MOST and self.engine.stirred < STIRRED_MOST
        return self._turns.over or not told

    def _wait_for_turn(self, peer: Peer, *, used: bool) -> None:
        self._turns.wait(peer, used=used)
        peer.pause_reading()
        self._have_pass()

    def _count_time(self, seconds: float) -> None:
        self._turns.spent += seconds
        if self._turns.spent > TURN:  # less of it is not worth one more pass of the loop
            self._have_pass()

    def _have_pass(self) -> None:
        """Have the next pass of the loop begin with those whose turn it is."""
        if not self._pass_comes:
            self._pass_comes = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        """Let those in the ring have their turns, until it is time to look at the sockets again."""
        self._pass_comes = False
        self._turns.spent = 0.0
        if self._announcements or self._later or self.engine.stirred:
            began = self._stopwatch()
            self._answer_waits(began + TURN)
            self._announce_on(began + 2 * TURN)
            self._flush_later(began + 3 * TURN)
            self._turns.spent = self._stopwatch() - began
        self.flush()
        while not self._busy and (peer := self._turns.next()) is not None:
            self.go_on(peer)
            peer.read_on()
        if self._turns or self._dirty or self._announcements or self._later or self.engine.stirred:
            self._have_pass()

    def _has_read(self, peer: Peer) -> None:
        """Everything that has come from this peer is done, but for a frame that has not come whole."""
        assert peer.connection is not None, "only peers that were taken in are read"
        held = peer.connection.held_bytes
        peer.unread = None
        peer.count_inbox(held, progress=held < peer.inbox_bytes)

    # ------------------------------------------------------------------------------------------ one request

    def _apply(self, peer: Peer, request_id: int, acknowledged: int, request: Request[Any], now: float) -> None:
        began = self._stopwatch()
        self.engine.held_elsewhere(self._memory.held_bytes)
        applied = self.engine.apply(request, peer=peer.id, request_id=request_id, acknowledged=acknowledged, now=now)
        self._durability.record()
        response = applied.response
        if response is not None:
            if type(request) is Stats:
                response = type(response)(figures=self._host.figures())  # type: ignore[call-arg]
            number, response = self._durability.unwritten.wait_for(request, response)
            self.say(peer, wire.encode_response(request_id, response), number)
        peer.work = applied.work
        self.deliver(applied.deliveries, opening=type(request) is Watch)
        took = self._stopwatch() - began
        if self.on_request is not None:
            self.on_request(*_kind_and_outcome(request, response), took)
        if took > SLOW and self._complaints.say(now):
            log.warning("%s: its %s took %d ms", peer.name, type(request).__name__, took * 1000)

    def _go_on_with(self, peer: Peer, work: Work) -> None:
        """Do one more step of a request that takes several."""
        applied = self.engine.go_on(work)
        peer.work = applied.work
        if applied.response is not None:
            self.say(peer, wire.encode_response(work.watcher[1], applied.response))
        self.deliver(applied.deliveries, opening=True)

    async def hear_newcomers(self) -> None:
        """Wait until all have had a turn who have come to the ring before now."""
        came = self._turns.came
        while self._turns.waits(came):
            await anyio.lowlevel.checkpoint()  # each pass of the loop begins with turns, while anybody waits for one

    def unheard(self) -> set[int]:
        """Peers that may have sent what is not carried out yet, or not even read, for reasons that are not theirs.

        They wait for a turn or for the disk. Who does not read what it is told is not among them.
        """
        waiting = chain(self._turns, self._slowed, (peer for peer in self._holding if not peer.outbox.ready))
        return {peer.id for peer in waiting if peer.reading_paused}

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
        if self.engine.stirred:
            self._have_pass()

    def _answer_waits(self, until: float) -> None:
        """Answer more of the waits that one change has ended with thousands of others, for so long."""
        self._no_hurry = True
        try:
            while self.engine.stirred:
                self.deliver(self.engine.answer_waits())
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
            peer = self._peers[peer_id]
            self._catch_up(peer)
            tell(peer, what, number)

    def _catch_up(self, peer: Peer) -> None:
        """Tell a peer what is still to come of earlier changes, before it is told anything else."""
        for announcement in self._announcements:
            announcement.tell_now(peer.id)

    def _announce_on(self, until: float) -> None:
        """Tell more of those who are still to be told, for so long; what they are told is written later."""
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
            self._queue(peer, wire.frame_events(watch_id, encoded), number)
        else:
            self._queue(peer, wire.events_head(watch_id, len(encoded)), number)
            self._queue(peer, encoded, number)

    def say(self, peer: Peer, frame: bytes, number: int | None = None) -> None:
        """Queue a frame, to be sent once all up to `number` is durable; None: all that was done until now."""
        if self._announcements:
            self._catch_up(peer)
        self._queue(peer, frame, self._durability.unwritten.appended if number is None else number)

    def _queue(self, peer: Peer, frame: bytes, number: int) -> None:
        dirty = self._later if self._no_hurry else self._dirty
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
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
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

    def became_durable(self, number: int) -> None:
        """Let go of the frames that waited for this."""
        waiting = list(self._holding)
        dirty = self._dirty if len(waiting) <= AT_ONCE else self._later
        for peer in waiting:
            if not peer.outbox.release(number):
                del self._holding[peer]
            dirty[peer] = None
        self.flush()
        slowed, self._slowed = self._slowed, {}
        if dirty is self._later:
            self._have_pass()
            waiting = []
        for peer in {**dict.fromkeys(waiting), **slowed}:
            peer.read_on()


def _kind_and_outcome(request: Request[Any], response: Response | None) -> tuple[str, str]:
    """Which kind of request this is, and "ok" or how it failed."""
    asked = request.request if isinstance(request, Guarded) else request
    return type(asked).__name__, response.kind.name.lower() if isinstance(response, Failed) else "ok"
