"""Shell: the listener, one protocol object per peer, bounded outboxes, and the lease timer.

The hot path is plain asyncio: bytes arrive in one buffer that all peers share, `connection` cuts them into requests,
`engine` applies them, and what is to be said is queued with each peer and written once per batch. From the first byte
of a request to the queueing of everything it causes there is no `await`: nothing slips between a change and its
announcement.

What one peer asks is carried out for as long as a turn lasts; what is left of it stands in a ring (`turns`), so that
others wait for milliseconds, whatever it is (S11).

A peer that reads too slowly fills only its own outbox. Past `outbox_bytes_max` its watches end, each with the last
revision sent, and its client resumes from the next; while its replies pile up, its requests are not carried out, also
those that were read already: a packet full of requests may ask for gigabytes of answers. Past `outboxes_bytes_max`,
which is for all of them together, who has most waiting is hung up on; its client comes back and resumes.

A frame that has come in part takes memory, too, for as long as its sender likes: past `inboxes_bytes_max`, which is for
all of them together, whoever has taken up most of it for longest is hung up on.

Leases lapse after the sockets have been read once more, so that a keep-alive that has arrived always counts (S5).

On a durable store (S3) whatever a step led to is handed to the journal before anything is said, and from then on every
frame, answers to reads included, waits in its outbox until the journal reports that step durable. While the disk is
behind by more than `journal_bytes_max`, those who write are not read. If the journal cannot
write, nothing of what it could not write has been said: the server goes back to what is on disk, drops its connections
(their clients come back, and ask again what was not answered), refuses writes, and tries once a second to write again.
If it is not even known what is on disk, since an fsync failed, it takes in nobody until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import secrets
import socket
import ssl
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from store.engine.engine import Answer, Delivery, Engine, Overtaken, Work
from store.engine.processes import Closing
from store.errors import AuthenticationError, ProtocolError, StoreUsageError
from store.messages import Failed, FailureKind, Stats, Watch
from store.net.address import Address, host_and_port
from store.net.callers import serves, serves_no_more
from store.net.sockets import bound_sockets, forget, let_go_in_children, open_files, raised_file_limit
from store.net.threads import in_thread
from store.protocol import wire
from store.protocol.connection import ServerConnection
from store.protocol.wire import Bye, Hello, Sorry
from store.server.door import Door
from store.server.limit_warnings import LimitWarnings
from store.server.log_limiter import Complaints
from store.server.outbox import PIECE_BYTES, Budget, weight
from store.server.peer import LEAVE_WITHIN, Peer
from store.server.session_log import SILENT_AFTER, SessionLog
from store.server.strangers import Strangers
from store.server.tls_accept import Doorstep
from store.server.turns import TURN, Turns
from store.server.unwritten import Unwritten

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from store.engine.leases import LeaseRecord
    from store.limits import Limits
    from store.messages import Event, Request
    from store.server.journal import Journal

__all__ = ["LEAVE_WITHIN", "PIECE_BYTES", "Server", "serve"]

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024  # one buffer for all peers; larger frames are put together from pieces
SMALL_BYTES = 16 * 1024  # less than this is copied out of the shared buffer sooner than the buffer is given away
SHARED_BYTES = 16 * 1024  # events from here on are queued as they are, and not copied for each who watches
SLOW = 0.05  # seconds of one request that the log has a line for
SILENCE_EVERY = 1.0  # seconds; how late it may be noticed that a lease is not renewed
WARN_EVERY = 5.0  # seconds; how late it may be noticed that a limit is near
LOOK_EVERY = 0.1  # seconds; how late a lease may lapse, and a third of what counts as a stall
LOOK_LEAST = 0.001  # seconds; a lease due in less than a clock can tell apart would be looked at for ever
STOP_WITHIN = 3.0  # seconds for the disk to take the last group
TRY_AGAIN_AFTER = 1.0  # seconds between attempts to write to a disk that took nothing
EVENTS_HEAD_BYTES = len(wire.frame_events(0, b""))  # what each watch has of its own in a frame of events
SPARE_FILES = 64  # for the rest of the process
STRANGERS_LEAST = 16  # so many may connect at once also where there is room for few
TOKEN_BYTES_LEAST = 16  # of a token that strangers may guess at


class Server:
    """A store that is being served.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
        store_id: The store's random identity.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token: bytes | None = None,
        clock: Callable[[], float],
        secure: bool = False,
        journal: Journal | None = None,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = in_thread,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._in_thread = in_thread  # where the disk is waited for; on virtual time there are no threads
        self._unwritten = Unwritten(durable=0, revision=engine.revision)
        self._holding: dict[Peer, None] = {}  # peers with frames that are held
        self._token = token
        self._clock = clock
        self._began = clock()
        self._stopwatch = stopwatch  # for what turns take; the clock of a test may stand still meanwhile
        self._turns: Turns[Peer] = Turns()
        self._pass_comes = False
        self._secure = secure
        self._limits = engine.limits
        self._peers: dict[int, Peer] = {}
        self._dirty: dict[Peer, None] = {}  # peers with something queued in this batch
        self._last_peer = 0
        self._slowed: dict[Peer, None] = {}  # peers that are not read until the disk has taken more
        self._outboxes = Budget()  # counted by the peers, as they queue and send
        self._inboxes = Budget()  # and as they receive
        self._outboxes_free = min(
            self._limits.outbox_bytes_max, self._limits.outboxes_bytes_max
        )  # whatever else is held
        self._bytes_in = 0
        self._bytes_out = 0
        self._refused = 0
        self._refuses = False  # connections, since the last one that was taken in
        self._complaints = Complaints()
        self._limit_warnings = LimitWarnings()
        self._session_log = SessionLog() if log.isEnabledFor(logging.INFO) else None
        if self._session_log is not None:
            engine.on_lapse = self._say_lapsed
        self._leaving = False
        self._failure: BaseException | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._probing: asyncio.Task[None] | None = None
        self._goes_back = False  # to what is on disk, and nobody is told anything meanwhile
        self._nobody_left = asyncio.Event()
        self._alone = threading.Event()
        self._alone.set()
        self._connections_max = self._limits.connections_max
        self.strangers = Strangers(most=self._strangers_most(), per_address_max=self._limits.address_connections_max)
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.host = ""
        self.port = 0
        self.store_id = engine.store_id

    @property
    def url(self) -> str:
        """Where clients find it."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
        host = everywhere.get(self.host, self.host)
        return str(Address(host=host, port=self.port, secure=self._secure))

    @property
    def handshake_timeout(self) -> float:
        """How long a connection may take to become a conversation."""
        return self._limits.handshake_timeout

    def now(self) -> float:
        """Seconds on the server's clock."""
        return self._clock()

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._peers)

    def has_room_for(self, others: int) -> bool:
        """Whether one more connection may come, beside those there are and so many that are about to be."""
        return not self._leaving and len(self._peers) + others < self._connections_max

    @property
    def disk_is_behind(self) -> bool:
        """Whether so much has been done that is not on disk yet that no more is to be taken on."""
        return self._unwritten.bytes > self._limits.journal_bytes_max

    def waits_for_disk(self, peer: Peer) -> None:
        """This peer is to be read again when the disk has taken more."""
        self._slowed[peer] = None

    def turned_away(self) -> bool:
        """Somebody is refused or hung up on; whether the log has a line for it."""
        self._refused += 1
        if not self._complaints.say(self._clock()):
            return False
        self._say_how_many_more()
        return True

    def _say_how_many_more(self) -> None:
        unsaid = self._complaints.take_unsaid()
        if unsaid:
            log.warning("%d more were refused or hung up on than the log has taken lines for", unsaid)

    def protocol(self) -> asyncio.BufferedProtocol:
        """A protocol object for a connection that has been accepted."""
        self._last_peer += 1
        return Peer(self, self._last_peer, outboxes=self._outboxes, inboxes=self._inboxes)

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        return {
            **self._engine.figures(),
            **dataclasses.asdict(self._limits),
            "connections_max": self._connections_max,
            "uptime": self._clock() - self._began,
            "connections": len(self._peers),
            "connections_refused": self._refused,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out + sum(peer.bytes_out for peer in self._peers.values()),
            "outbox_bytes": self._outboxes.bytes,
            "inbox_bytes": self._inboxes.bytes,
            "journal_bytes": self._unwritten.bytes,
            "memory_bytes": self._engine.memory_bytes + self._held_bytes,
            "commits": self._journal.commits if self._journal is not None else 0,
        }

    # -------------------------------------------------------------------------------------- called by peers

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        now = self._clock()
        refusal = self._refusal() or self.strangers.refusal(peer.address, now)
        if refusal is not None:
            self._refused += 1
            if not self._refuses and not self._leaving and self._complaints.say(self._clock()):
                log.warning("store %s refuses connections, from %s on: %s", self.store_id, peer.name, refusal)
            self._refuses = True
            peer.refuse(Sorry("limit", refusal))
            return
        self._refuses = False
        self.strangers.connected(peer.address)
        self.strangers.came(peer, peer.address, now)
        self._peers[peer.id] = peer
        self._nobody_left.clear()
        self._alone.clear()
        peer.open(
            ServerConnection(
                store_id=self.store_id, nonce=secrets.token_bytes(16), token=self._token, limits=self._limits
            ),
            asyncio.get_running_loop().call_later(self._limits.handshake_timeout, self._check_greeted, peer),
        )

    def _refusal(self) -> str | None:
        """Why nobody is taken in now, if so; it may be otherwise soon."""
        if self._leaving:
            return "the server is leaving"
        if self._goes_back:
            return f"the store is read from its disk again: {self._engine.read_only}"
        if self._journal is not None and self._journal.in_doubt:
            return f"nobody can be told anything now: {self._engine.read_only}, and what is on it is in doubt"
        if len(self._peers) >= self._connections_max:
            return f"it has {len(self._peers)} connections, the most it takes (connections_max, or the file limit)"
        return None

    def received(self, peer: Peer, data: memoryview) -> None:
        """Bytes have come. No await here: a change and its announcements are one step."""
        self._bytes_in += len(data)
        if self._leaving:
            return  # the journal takes its last group: what came after that could not be answered any more
        assert peer.connection is not None, "only peers that were taken in are read"
        assert peer.unread is None, "a peer is not read while its requests wait"
        if not self._turns.over:
            began = self._stopwatch()
            try:
                request = peer.connection.only_request(data)
                if request is not None:
                    self._apply(peer, *request, self._clock())
            except ProtocolError as error:
                self._hang_up(peer, Sorry("protocol", str(error)))
                return
            finally:
                self._flush()  # whatever happened: what was announced is told
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
        if self._inboxes_hold_too_much():
            self._make_room_in_inboxes(peer.received_at)
        if peer.connection.held_bytes > PIECE_BYTES and self.disk_is_behind and not peer.gone:
            peer.wait_for_disk()

    def go_on(self, peer: Peer) -> None:
        """Carry out what a peer has asked, in its turn, while its outbox has room for the answers. No await here."""
        if self._leaving or peer.unread is None or peer in self._turns:
            return
        if self._turns.over:
            self._wait_for_turn(peer, used=False)
            return
        began = self._stopwatch()
        try:
            self._take_turn(peer, began + self._turns.length)
        except AuthenticationError as error:
            self.strangers.guessed_wrong(peer.address, self._clock())
            self._hang_up(peer, Sorry("authentication", str(error)))
        except ProtocolError as error:
            self._hang_up(peer, Sorry("protocol", str(error)))
        finally:
            self._flush()  # whatever happened: what was announced is told
            self._count_time(self._stopwatch() - began)

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
                    self._take_in(peer, item, now)
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
        self._flush()
        while not self._turns.over and (peer := self._turns.next()) is not None:
            self.go_on(peer)
            peer.read_on()
        if self._turns or self._dirty:
            self._have_pass()

    def _has_read(self, peer: Peer) -> None:
        """Everything that has come from this peer is done, but for a frame that has not come whole."""
        assert peer.connection is not None, "only peers that were taken in are read"
        held = peer.connection.held_bytes
        peer.unread = None
        peer.count_inbox(held, progress=held < peer.inbox_bytes)

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        if self._peers.pop(peer.id, None) is None:
            return
        self.strangers.went(peer)
        self.strangers.disconnected(peer.address)
        self._dirty.pop(peer, None)
        self._holding.pop(peer, None)
        self._slowed.pop(peer, None)
        self._turns.leave(peer)
        self._bytes_out += peer.bytes_out
        session = self._engine.session_of(peer.id)
        if self._session_log is not None and session is not None and not self._leaving:
            kept, now = self._engine.kept_by(peer.id), self._clock()
            _log_line(self._session_log.closed(session, peer.name, peer.closing, kept, now=now))
        self._engine.disconnect(peer.id, now=self._clock(), how=peer.closing)
        self._record()
        if not self._peers:
            self._nobody_left.set()
            self._alone.set()

    # ------------------------------------------------------------------------------------------ one request

    def _apply(self, peer: Peer, request_id: int, acknowledged: int, request: Request[Any], now: float) -> None:
        began = self._stopwatch()
        self._engine.held_elsewhere(self._held_bytes)
        applied = self._engine.apply(request, peer=peer.id, request_id=request_id, acknowledged=acknowledged, now=now)
        self._record()
        response = applied.response
        if response is not None:
            if type(request) is Stats:
                response = type(response)(figures=self.figures())  # type: ignore[call-arg]
            number, response = self._unwritten.wait_for(request, response)
            self._say(peer, wire.encode_response(request_id, response), number)
        peer.work = applied.work
        self._deliver(applied.deliveries, opening=type(request) is Watch)
        took = self._stopwatch() - began
        if took > SLOW and self._complaints.say(now):
            log.warning("%s: its %s took %d ms", peer.name, type(request).__name__, took * 1000)

    def _go_on_with(self, peer: Peer, work: Work) -> None:
        """Do one more step of a request that takes several."""
        applied = self._engine.go_on(work)
        peer.work = applied.work
        if applied.response is not None:
            self._say(peer, wire.encode_response(work.watcher[1], applied.response))
        self._deliver(applied.deliveries, opening=True)

    def _deliver(self, deliveries: tuple[Delivery | Answer | Overtaken, ...], *, opening: bool = False) -> None:
        """Queue what a change means to others. A watched event is encoded once, however many watch.

        What a watch that is `opening` is told comes in steps, each of which waits until the outbox is nearly empty.
        """
        ended: set[tuple[int, int]] = set()
        for delivery in deliveries:
            match delivery:
                case Answer(peer=peer_id, request_id=request_id, response=response):
                    self._answer(self._peers[peer_id], request_id, wire.encode_response(request_id, response))
                case Delivery(watchers=watchers, events=events):
                    encoded = wire.encode_events(events)
                    for watcher in watchers:
                        if opening:
                            self._say_events(watcher, encoded)
                        elif watcher not in ended and not self._tell(watcher, encoded, events):
                            ended.add(watcher)  # nothing comes after its end
                case Overtaken(watcher=(peer_id, watch_id), revision=revision):
                    self._say(self._peers[peer_id], wire.encode_lagged(watch_id, revision))

    def _answer(self, peer: Peer, request_id: int, frame: bytes) -> None:
        """Queue the answer to a parked wait: one change may answer thousands, so these too keep to the outbox."""
        if peer.outbox.bytes + weight(len(frame)) > self._limits.outbox_bytes_max:
            message = (
                f"{peer.outbox.bytes} bytes wait to be read, and this answer has {len(frame)}; outbox_bytes_max is "
                f"{self._limits.outbox_bytes_max}: read, and ask again"
            )
            frame = wire.encode_response(request_id, Failed(kind=FailureKind.LIMIT, message=message))
        self._say(peer, frame)

    def _tell(self, watcher: tuple[int, int], encoded: bytes, events: tuple[Event, ...]) -> bool:
        """Queue events for one watch, or end it if its reader is too far behind; whether it is still open."""
        peer_id, watch_id = watcher
        peer = self._peers[peer_id]
        most = self._limits.outbox_bytes_max
        # A revision that is larger than any outbox goes to who is up to date; else its watch would never get past it.
        size = weight(len(encoded) + EVENTS_HEAD_BYTES)
        if peer.outbox.bytes + size <= most or (size > most and peer.outbox.bytes < PIECE_BYTES):
            self._say_events(watcher, encoded)
            return True
        if self._engine.end_watch(peer_id, watch_id):
            if not peer.lags:
                peer.lags = True
                log.warning("%s reads too slowly: its watches end, and may resume later", peer.name)
            self._say(peer, wire.encode_lagged(watch_id, events[0].revision - 1))
        return False

    def _say_events(self, watcher: tuple[int, int], encoded: bytes) -> None:
        """Queue events for one watch; those that are large are shared with all others who are told of them."""
        peer_id, watch_id = watcher
        peer = self._peers[peer_id]
        if len(encoded) < SHARED_BYTES:
            self._say(peer, wire.frame_events(watch_id, encoded))
        else:
            self._say(peer, wire.events_head(watch_id, len(encoded)))
            self._say(peer, encoded)

    def _say(self, peer: Peer, frame: bytes, number: int | None = None) -> None:
        """Queue a frame, to be sent once all up to `number` is durable; None: all that was done until now."""
        if number is None:
            number = self._unwritten.appended
        if number > self._unwritten.durable:
            peer.hold(frame, number)
            self._holding[peer] = None
            if peer.outbox.bytes > PIECE_BYTES or self.disk_is_behind:
                self._dirty[peer] = None  # nothing of it may be sent, but it is to be read no further
        else:
            peer.queue(frame)
            self._dirty[peer] = None
        if self._outboxes.bytes > self._outboxes_free and self._outboxes_hold_too_much():
            self._make_room()

    @property
    def _held_bytes(self) -> int:
        """What is held for connections and for the disk."""
        return self._outboxes.bytes + self._inboxes.bytes + self._unwritten.bytes

    def _holds_too_much(self, budget: Budget, most: int, kept_back: int) -> bool:
        """Whether all outboxes, or all inboxes, hold more than they may, or more than all else leaves of the memory.

        What is kept back for them is theirs in any case: a store that is full must still be read from.
        """
        if budget.bytes <= kept_back:
            return budget.bytes > most
        return budget.bytes > most or self._engine.memory_bytes + self._held_bytes > self._limits.memory_bytes_max

    def _bound(self, *, outboxes: bool) -> str:
        """Which limit is passed, in words."""
        name = "outboxes_bytes_max" if outboxes else "inboxes_bytes_max"
        if (self._outboxes if outboxes else self._inboxes).bytes <= getattr(self._limits, name):
            name = "memory_bytes_max"
        return f"{name} is {getattr(self._limits, name)}"

    def _outboxes_hold_too_much(self) -> bool:
        return self._holds_too_much(self._outboxes, self._limits.outboxes_bytes_max, self._limits.outbox_bytes_max)

    def _inboxes_hold_too_much(self) -> bool:
        return self._holds_too_much(self._inboxes, self._limits.inboxes_bytes_max, self._limits.frame_bytes_max)

    def _make_room(self) -> None:
        """All outboxes together hold too much: send what can be sent, and then let who is slowest pay for it.

        Not whoever is told something just now: that may be anybody, and a few who read nothing would cost all others
        their watches.
        """
        self._flush()
        while self._outboxes_hold_too_much():
            slowest = max((peer for peer in self._peers.values() if not peer.gone), key=_backlog, default=None)
            if slowest is None:
                return
            if self.turned_away():
                log.warning(
                    "%s is hung up on: %d bytes wait in all outboxes, and %s; it reads slowest, and %d of them are its",
                    *(slowest.name, self._outboxes.bytes, self._bound(outboxes=True), slowest.outbox.bytes),
                )
            slowest.abort()

    def _make_room_in_inboxes(self, now: float) -> None:
        """What has come of unfinished requests takes too much: let who has held most of it for longest begin anew."""
        while self._inboxes_hold_too_much():
            costliest = max(
                (peer for peer in self._peers.values() if not peer.gone),
                key=lambda peer: peer.inbox_cost(now),
            )
            what = (
                f"{self._inboxes.bytes} bytes of unfinished requests wait in all inboxes, and "
                f"{self._bound(outboxes=False)}; yours have cost most, and for longest"
            )
            self._hang_up(costliest, Sorry("limit", what))

    def _flush(self) -> None:
        """Write what this batch has queued, one write per peer."""
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for peer in dirty:
                peer.flush()

    # ------------------------------------------------------------------------------------------ durability

    def _record(self) -> None:
        """Hand what has just been done to the journal, before anything is said of it."""
        if self._journal is not None and self._engine.read_only is None and not self._leaving:
            facts = self._engine.take_facts()
            if facts is not None:
                self._unwritten.append(self._journal.append(facts), facts)

    def start_journal(self) -> None:
        """Have the journal write from now on."""
        if self._journal is not None:
            loop = asyncio.get_running_loop()

            def on_durable(number: int) -> None:
                with contextlib.suppress(RuntimeError):  # a disk that hung, and came back when the loop had gone
                    loop.call_soon_threadsafe(self._became_durable, number)

            def on_failure(reason: str) -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._cannot_write, reason)

            self._unwritten.written(self._journal.appended)
            self._journal.start(on_durable=on_durable, on_failure=on_failure)

    def _became_durable(self, number: int) -> None:
        """Let go of the frames that waited for this."""
        self._unwritten.written(number)
        waiting = list(self._holding)
        for peer in waiting:
            if not peer.outbox.release(number):
                del self._holding[peer]
            self._dirty[peer] = None
        self._flush()
        slowed, self._slowed = self._slowed, {}
        for peer in {**dict.fromkeys(waiting), **slowed}:
            peer.read_on()

    def _cannot_write(self, reason: str) -> None:
        """Go back to what is on disk: of what was done since, nobody has been told anything."""
        assert self._journal is not None
        # In doubt, what is read back may be gone after a crash, or what is not may be there: nobody is told either.
        what = "takes in nobody, since what is on disk is in doubt," if self._journal.in_doubt else "refuses writes"
        log.error("store %s cannot write: %s; it %s until it can", self.store_id, reason, what)
        self._engine.read_only = f"the disk does not take it ({reason})"  # and so nothing more of it is recorded
        self._goes_back = True
        self.abort()
        if self._leaving:
            return
        if self._probing is not None:
            self._probing.cancel()
        self._probing = asyncio.create_task(self._go_back(self._engine.read_only))
        self._probing.add_done_callback(self.timer_ended)

    async def _go_back(self, why: str) -> None:
        """Read what is on disk, in a thread: that may take seconds, in which newcomers are told to come again."""
        journal = self._journal
        assert journal is not None
        try:
            engine = await self._in_thread(
                lambda: Engine.restore(journal.load(), limits=self._limits, now=self._clock())
            )
        except StoreUsageError as error:
            self._stop_serving(error)
            return
        engine.read_only = why
        self._restored(engine)
        if not journal.answered:
            await self._try_to_write(why)
        else:  # who caused it is told so by a reply that is kept, and the disk takes everything else
            self._write_on()

    def _restored(self, engine: Engine) -> None:
        """Serve what is on disk from now on."""
        assert self._journal is not None
        self._engine = engine
        self._goes_back = False
        self._unwritten = Unwritten(durable=self._journal.appended, revision=engine.revision)

    async def _try_to_write(self, why: str) -> None:
        """Take writes again as soon as the disk does, but not before clients have been refused what it did not take.

        There may be room for the probe and not for what failed: its client, which is about to come back and ask again,
        would else have it fail again, with every connection dropped, and so on until it gives up.
        """
        assert self._journal is not None
        await anyio.sleep(TRY_AGAIN_AFTER)
        while not await self._in_thread(self._journal.try_again):  # noqa: ASYNC110 - a disk tells nobody
            await anyio.sleep(TRY_AGAIN_AFTER)
        if self._journal.only_deletes:
            log.warning("store %s has no room on its disk for more than deletes", self.store_id)
            self._engine.only_deletes = why
        self._write_on()
        while self._journal.only_deletes:
            await anyio.sleep(TRY_AGAIN_AFTER)
            await self._in_thread(self._journal.has_room)
        self._engine.only_deletes = None
        log.warning("store %s can write again", self.store_id)

    def _write_on(self) -> None:
        """The disk takes what is done from now on."""
        self._engine.read_only = None
        self.start_journal()
        self._record()  # sessions that were opened meanwhile

    async def stop_journal(self) -> None:
        """Make durable what is pending, and let its frames go; nothing more is taken on by now."""
        if self._journal is not None:
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.wait([self._probing])
            # Its last reports are in the loop before this returns.
            stopped = await self._in_thread(lambda: cast("Journal", self._journal).stop(within=STOP_WITHIN))
            if not stopped:
                self.abort()  # what is held may not be said, and whatever else comes after it

    # ------------------------------------------------------------------------------------------ comings and goings

    def _take_in(self, peer: Peer, hello: Hello, now: float) -> None:
        opened = self._engine.connect(peer.id, session_id=hello.session_id, process=hello.process, now=now)
        self._record()
        if opened is None:
            self._hang_up(
                peer, Sorry("limit", f"the server has {self._limits.sessions_max} sessions (sessions_max): come again")
            )
            return
        session, previous = opened
        if self._session_log is not None:
            old = self._peers.get(previous) if previous is not None else None
            replaces = None if old is None else old.name
            _log_line(self._session_log.opened(session, peer.name, replaces=replaces, now=now))
        if previous is not None and previous in self._peers:
            # The client came back before its old connection was seen to end; it renews its leases on the new one. At
            # once: what waits there is for nobody, and a network that was cut would take it for half a minute more.
            self._peers[previous].abort()
        peer.greeted()
        self.strangers.proved(peer, now)
        assert peer.connection is not None
        self._say(
            peer,
            peer.connection.welcome(session=session, address=peer.address, revision=self._engine.revision),
        )

    def _hang_up(self, peer: Peer, sorry: Sorry) -> None:
        """Cost a peer its connection, and nobody else anything (S7)."""
        if self.turned_away():
            log.warning("%s is disconnected: %s", peer.name, sorry.message)
        peer.refuse(sorry)

    def _check_greeted(self, peer: Peer) -> None:
        if peer.connection is not None and not peer.connection.greeted and not peer.gone:
            # Strangers are not the only ones who are slow: an honest client on a busy machine may try again.
            self._hang_up(
                peer, Sorry("limit", f"no hello within {self._limits.handshake_timeout:g} s (handshake_timeout)")
            )

    # ------------------------------------------------------------------------------------------ time

    async def keep_time(self) -> None:
        """Let leases lapse when they are due, for as long as the server runs."""
        while True:
            due_in = self._engine.next_tick_in() if self._may_lapse() else None
            await anyio.sleep(LOOK_EVERY if due_in is None else min(max(due_in, LOOK_LEAST), LOOK_EVERY))
            if self._engine.look(now=self._clock()):
                # Two turns of the loop, the second of which comes after every socket has been read once more.
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                if not self._may_lapse():
                    continue
                deliveries = self._engine.tick(now=self._clock())
                self._record()
                self._deliver(deliveries)
                self._flush()

    def _say_lapsed(self, lease: LeaseRecord) -> None:
        assert self._session_log is not None, "it asked to be told"
        _log_line(self._session_log.lapsed(lease, now=self._clock()))

    async def tell_of_silence(self) -> None:
        """Log which sessions do not renew their leases, for as long as the server runs, if anybody reads that."""
        while self._session_log is not None:
            await anyio.sleep(SILENCE_EVERY)
            now, silent = self._clock(), self._engine.silent_leases(SILENT_AFTER)
            self._session_log.heard({lease.id for _, lease, _ in silent})
            for peer_id, lease, remaining in silent:
                peer, session = self._peers.get(peer_id), self._engine.session_of(peer_id)
                if peer is not None and session is not None:
                    _log_line(self._session_log.silent(session, peer.name, lease, remaining=remaining, now=now))

    def _may_lapse(self) -> bool:
        """Whether a lapse could be written down: on a full disk, and when leaving, leases stay until it can.

        On a disk that is far behind, too: keep-alives may have come on connections that are not read for its sake.
        """
        return self._engine.read_only is None and not self._leaving and not self.disk_is_behind

    async def warn_of_limits(self) -> None:
        """Log which limits are nearly reached, and by whom, for as long as the server runs."""
        while True:
            await anyio.sleep(WARN_EVERY)
            for line in self._limit_warnings.look(self.figures(), self._engine.groups):
                log.warning("store %s: %s", self.store_id, line)

    async def drop_the_silent(self) -> None:
        """Disconnect peers that stopped in the middle of a frame, for as long as the server runs."""
        while True:
            await anyio.sleep(self._limits.frame_timeout / 2)
            self._say_how_many_more()
            silent_since = self._clock() - self._limits.frame_timeout
            why = f"half a frame and {self._limits.frame_timeout:g} s of silence (frame_timeout)"
            for peer in list(self._peers.values()):
                stuck = peer.connection is not None and peer.connection.half_a_frame
                if stuck and peer.received_at < silent_since and not peer.reading_paused and not peer.gone:
                    self._hang_up(peer, Sorry("limit", why))

    # ------------------------------------------------------------------------------------------ leaving

    async def leave(self) -> None:
        """Tell everyone, let the last frames through, and close every connection, within `LEAVE_WITHIN` seconds."""
        self._leaving = True
        with anyio.CancelScope(shield=True):
            await self.stop_journal()
        for peer in list(self._peers.values()):
            if peer.connection is not None and peer.connection.greeted:
                self._say(peer, wire.encode_bye("the server is leaving"))
                peer.close()
            else:  # a farewell is no welcome; this it understands, and tries again
                peer.refuse(Sorry("limit", "the server is leaving"))
        if self._peers:
            with anyio.move_on_after(LEAVE_WITHIN, shield=True):
                await self._nobody_left.wait()
        self.abort()

    def wait_until_alone(self, within: float) -> bool:
        """From another thread: wait until no client is connected; False if some still are after `within` seconds."""
        return self._alone.wait(within)

    def stop_waiting(self) -> None:
        """From any thread: whoever waits to be alone need wait no longer."""
        self._alone.set()

    def abort(self) -> None:
        """Cut every connection that is left, at once."""
        for peer in list(self._peers.values()):
            peer.abort()

    def limit_connections(self, most: int) -> None:
        """Take no more connections than the system allows."""
        self._connections_max = min(self._limits.connections_max, max(most, 1))
        self.strangers.most = self._strangers_most()

    def _strangers_most(self) -> int:
        """How many may have proved nothing: half of the room is kept for those who do, unless there is hardly any."""
        return min(self._limits.handshakes_max, max(self._connections_max // 2, STRANGERS_LEAST))

    def timer_ended(self, timer: asyncio.Task[None]) -> None:
        """A timer ends only by a defect of ours. A store whose leases never lapse must not pass for one."""
        if not timer.cancelled() and (error := timer.exception()) is not None:
            self._stop_serving(error)

    def _stop_serving(self, error: BaseException) -> None:
        log.critical("store %s stops serving: %s", self.store_id, error, exc_info=error)
        self._failure = error
        self._leaving = True
        self.abort()
        for callback in self._on_failure:
            callback()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call back when this server stops serving by itself; leaving its context then raises why."""
        self._on_failure.append(callback)

    def check_timers(self) -> None:
        """Raise what a timer has failed of."""
        if self._failure is not None:
            raise self._failure


def _log_line(line: str | None) -> None:
    if line is not None:
        log.info("%s", line)


def _backlog(peer: Peer) -> int:
    return peer.outbox.bytes


# ---------------------------------------------------------------------------------------------------- starting one


def _check_exposure(host: str, *, token: bytes | None, tls: ssl.SSLContext | None, insecure: bool) -> None:
    """Refuse to listen to strangers (promise S8)."""
    if token is not None and len(token) < TOKEN_BYTES_LEAST and not insecure and not _is_loopback(host):
        raise StoreUsageError(
            f"the token has {len(token)} bytes, and anybody may guess at that of {host or 'all interfaces'}: "
            f"give it one of at least {TOKEN_BYTES_LEAST} (`rdzv token` prints a good one), or say insecure"
        )
    if insecure or token is not None or (tls is not None and tls.verify_mode is ssl.CERT_REQUIRED):
        return
    if not _is_loopback(host):
        raise StoreUsageError(
            f"a store on {host or 'all interfaces'} would let anybody in: give it a token (token= or --token-file) or "
            f"mutual TLS (tls= with CERT_REQUIRED, or --cert, --key and --ca); or say insecure to leave it open"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_bytes(token: str | bytes | None) -> bytes | None:
    """A token as bytes; an empty one is a mistake, not a token."""
    if token is None:
        return None
    if not token:
        raise StoreUsageError("the token is empty; leave it out, or give one")
    return token.encode() if isinstance(token, str) else token


def _open_journal(data_dir: str | os.PathLike[str]) -> Journal:
    """The journal of a directory, with what it needs of Python loaded only now: a store in memory does without."""
    try:
        from store.server import journal
    except ImportError as error:
        raise StoreUsageError(
            f"data_dir= needs Python's module {error.name}, which this Python does not have ({sys.platform}): use one "
            f"that has sqlite3 and fcntl, on Linux or macOS, or serve the store in memory or from another machine"
        ) from error
    return journal.Journal(data_dir, new_id=secrets.token_hex(8))


@contextlib.asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    sock: socket.socket | Sequence[socket.socket] | None = None,
) -> AsyncIterator[Server]:
    """Serve a store for as long as the context lasts.

    Args:
        host: The address to listen on; "" is all interfaces. Anything but loopback wants a token or mutual TLS.
        port: The port; 0 lets the system choose one, see `Server.port`.
        data_dir: Where the store is kept, so that it survives restarts and power loss; without it, in memory only.
        token: What clients must prove to know.
        tls: A server-side context; with `CERT_REQUIRED` clients need a certificate.
        insecure: Listen beyond loopback without token or mutual TLS.
        limits: What clients may ask.
        sock: A bound socket to listen on, or several with one port, instead of `host` and `port`.

    Raises:
        StoreUsageError: It would be open to strangers, or `data_dir` cannot be used; the message says why.
        OSError: The address cannot be bound.
    """
    socks = [sock] if isinstance(sock, socket.socket) else list(sock or ())
    addresses: list[str] = [one.getsockname()[0] for one in socks] or [host]
    bound_host = addresses[0] if len(addresses) == 1 else host
    secret = _token_bytes(token)
    for address in addresses:
        _check_exposure(address, token=secret, tls=tls, insecure=insecure)
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        files = stack.enter_context(raised_file_limit())
        journal = None
        if data_dir is None:
            engine = Engine(store_id=secrets.token_hex(8), limits=limits)
        else:
            journal = _open_journal(data_dir)
            stack.callback(journal.close, within=STOP_WITHIN / 3)  # it has been stopped by then, or the disk hangs
            engine = Engine.restore(journal.load(), limits=limits, now=loop.time())
        server = Server(engine, token=secret, clock=loop.time, secure=tls is not None, journal=journal)
        allowed = files - open_files() - SPARE_FILES
        server.limit_connections(allowed)
        doorstep = None if tls is None else Doorstep(server, tls)
        # The loop is given sockets, not the host: uvloop would ask threads of libuv's what that stands for, and those
        # make a forked child crash when it ends.
        listening = socks or await anyio.to_thread.run_sync(bound_sockets, host, port)
        door = Door(server, listening, None if doorstep is None else doorstep.take)
        door.open()
        let_go_in_children(server, *listening)
        server.host = bound_host
        server.port = listening[0].getsockname()[1]
        serves(bound_host, server.port)
        log.info(
            "serving store %s on %s, %s; %d files allow about %d connections",
            server.store_id,
            host_and_port(bound_host or "*", server.port),
            "in memory only: it ends with this process" if data_dir is None else f"kept in {data_dir}",
            files,
            allowed,
        )
        server.start_journal()
        timers = [
            asyncio.create_task(timer)
            for timer in (
                server.keep_time(),
                server.drop_the_silent(),
                server.warn_of_limits(),
                server.tell_of_silence(),
            )
        ]
        for timer in timers:
            timer.add_done_callback(server.timer_ended)
        try:
            yield server
        finally:
            door.close()
            serves_no_more(server.port)
            forget(server)
            try:
                await door.wait_closed()
                if doorstep is not None:
                    await doorstep.close()
                await server.leave()
            finally:
                server.abort()
                for timer in timers:
                    timer.cancel()
                await asyncio.gather(*timers, return_exceptions=True)
        server.check_timers()
