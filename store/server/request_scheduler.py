"""Carries out the requests of peers in turns (`round_robin`), and has `deliverer` send the results.

A request is carried out, and all its results are queued, without an `await`, so that no other request comes between.
A peer's requests wait while it does not read its answers: one packet of requests may ask for gigabytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from store.engine.processes import DisconnectKind
from store.errors import AuthenticationError, ProtocolError
from store.messages import Failed, Figures, Guarded, Stats, Watch
from store.protocol.wire import Bye, Hello, Rejection
from store.server.deliverer import Deliverer
from store.server.log_lines import RateLimitedLog
from store.server.outbox import PIECE_BYTES
from store.server.round_robin import TURN, RoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.engine.applied import LongRead
    from store.messages import Request, Response
    from store.server.handshakes import Handshakes
    from store.server.peer import Peer
    from store.server.peers import Peers

log: logging.Logger = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024  # size of the receive buffer that all peers share
SLOW = 0.05  # seconds; slower requests are logged
SLOW_LINE = "%s: its request %s took %d ms, which held others up"


@dataclass(eq=False, repr=False)
class RequestScheduler:
    """Carries out the requests of all peers of a server."""

    peers: Peers
    handshakes: Handshakes
    clock: Callable[[], float]  # gives the time of requests
    stopwatch: Callable[[], float]  # measures turns and requests
    figures: Callable[[], dict[str, Any]]
    on_request: Callable[[str, str, float], None] | None = None  # see `Server.add_request_callback`
    bytes_in: int = 0

    def __post_init__(self) -> None:
        self._durability = self.peers.durability
        self._slow_lines = RateLimitedLog(self.clock)
        self._turns: RoundRobin[Peer] = RoundRobin()
        self._pass_comes = False
        self.deliverer: Deliverer = Deliverer(self.peers, stopwatch=self.stopwatch, request_pass=self._schedule_pass)
        self.handle_accept: Callable[[Peer], None] = self.handshakes.handle_accept
        self.write_later: Callable[[Peer], None] = self.deliverer.write_later
        # Peers that are not read until the disk has caught up, or until their notifications are queued.
        self._slowed: dict[Peer, None] = {}
        # Peers whose next request waits until the journal's next group has room.
        self._for_disk: OrderedDict[Peer, None] = OrderedDict()
        self.buffer: memoryview[int] = memoryview(bytearray(RECEIVE_BYTES))

    def handle_disconnect(self, peer: Peer) -> None:
        """See `PeerCallbacks.handle_disconnect`."""
        self.deliverer.remove_peer(peer)
        self._slowed.pop(peer, None)
        self._for_disk.pop(peer, None)
        self._turns.remove(peer)
        self.handshakes.handle_disconnect(peer)
        if self._durability.engine.has_chores:
            self._schedule_pass()

    def handle_bytes(self, peer: Peer, size: int) -> None:
        """See `PeerCallbacks.handle_bytes`."""
        self.bytes_in += size
        peer.received_at = now = self.clock()
        if self._durability.leaving:
            return  # requests are ignored while the journal writes its last group
        assert peer.unread is None, "a peer is not read while its requests wait"
        data = bytes(self.buffer[:size])  # copied: all peers share the buffer
        if self._pass_comes and (self._must_yield or self.deliverer.peer_is_behind(peer.id)):
            peer.unread = peer.connection.receive(data)
        elif not self._try_at_once(peer, data, now):
            is_read = peer.work is not None or peer.stalled is not None
            peer.unread = iter(()) if is_read else peer.connection.receive(data)
        if peer.unread is None:
            return
        peer.batch_bytes = size
        peer.set_inbox_bytes(peer.connection.held_bytes + size, progress=False)
        self._serve_or_queue_peer(peer)
        self.peers.close_costliest_inboxes(now)
        if peer.connection.held_bytes > PIECE_BYTES and self._durability.is_overloaded and not peer.gone:
            self._pause_slow_reader(peer)

    def resume_requests(self, peer: Peer) -> None:
        """See `PeerCallbacks.resume_requests`."""
        behind = self._durability.is_overloaded
        if peer.outbox.held and (peer.outbox.bytes > PIECE_BYTES or behind):
            return
        if behind:
            self._slowed[peer] = None
            return
        peer.lags = False
        self._serve_or_queue_peer(peer)
        if peer.unread is None:
            peer.resume_reading(self.clock())

    def _try_at_once(self, peer: Peer, data: bytes, now: float) -> bool:
        """Carry out `data` if it is one request that need not wait; return False unless this finished it."""
        began = self.stopwatch()
        try:
            asked = peer.connection.decode_single_request(data)
            if asked is None:
                return False
            if self._durability.request_must_wait(asked[2], has_more=bool(peer.outbox.held)):
                peer.stalled = asked  # kept: `connection` returns each request only once
                return False
            response = self._apply_request(peer, asked, now, alone=True)
        except ProtocolError as error:
            self.peers.disconnect_peer(peer, Rejection("protocol", str(error)))
            return True
        finally:
            if self.deliverer.dirty:
                self.deliverer.flush()
            took = self.stopwatch() - began
            self._charge_to_pass(took)
        if took > SLOW or self.on_request is not None:
            self._report_request(peer, asked[2], response, took)
        return peer.work is None

    def _serve_or_queue_peer(self, peer: Peer) -> None:
        if self._durability.leaving or peer.unread is None or peer in self._turns or peer in self._for_disk:
            return
        if self.deliverer.peer_is_behind(peer.id):
            self._pause_slow_reader(peer)
            return
        if self._must_yield:
            self._queue_for_turn(peer, used=False)
            return
        began = self.stopwatch()
        try:
            self._run_peer_turn(peer, began)
        except AuthenticationError as error:
            self.peers.disconnect_peer(peer, Rejection("authentication", str(error)))
        except ProtocolError as error:
            self.peers.disconnect_peer(peer, Rejection("protocol", str(error)))
        finally:
            self.deliverer.flush()
            self._charge_to_pass(self.stopwatch() - began)

    def _run_peer_turn(self, peer: Peer, began: float) -> None:
        """Carry out a peer's requests until its turn is over, its outbox is full, the disk lags, or none is left."""
        until = began + self._turns.turn_seconds
        now = self.clock()
        assert peer.unread is not None, "a peer has a turn only if it has sent a request"
        while True:
            if peer.work is not None:
                self._continue_work(peer, peer.work)
            else:
                try:
                    item = peer.stalled or next(peer.unread)
                except StopIteration:
                    peer.note_all_carried_out()
                    return
                peer.stalled = None
                if isinstance(item, Hello):
                    welcome = self.handshakes.open_session(peer, item)
                    if welcome is None:
                        peer.stalled = item
                        peer.pause_reading()
                        return
                    self.deliverer.send(peer, welcome)
                elif isinstance(item, Bye):
                    peer.close(DisconnectKind.GOODBYE)
                elif item is not None:  # `item` is None while a large request is decoded
                    if self._durability.request_must_wait(item[2], has_more=bool(peer.outbox.held)):
                        peer.stalled = item
                        peer.pause_reading()
                        self._for_disk[peer] = None
                        return
                    response = self._apply_request(peer, item, now)
                    took = self.stopwatch() - began
                    if took > SLOW or self.on_request is not None:
                        self._report_request(peer, item[2], response, took)
            if peer.gone:
                return
            if self.deliverer.peer_is_behind(peer.id):
                self._pause_slow_reader(peer)
                return
            if peer.outbox.bytes > PIECE_BYTES:
                peer.flush()
                if peer.reading_paused and peer.outbox.ready:
                    return
            began = self.stopwatch()
            if began >= until:
                self._queue_for_turn(peer, used=True)
                return

    @property
    def _must_yield(self) -> bool:
        return self._turns.is_pass_time_up or self.deliverer.is_overloaded

    def _queue_for_turn(self, peer: Peer, *, used: bool) -> None:
        self._turns.enqueue(peer, used=used)
        peer.pause_reading()
        self._schedule_pass()

    def _pause_slow_reader(self, peer: Peer) -> None:
        peer.pause_reading()
        self._slowed[peer] = None

    def _charge_to_pass(self, seconds: float) -> None:
        self._turns.spent += seconds
        if self._turns.spent > TURN:  # time for a new pass of the loop, which sets `spent` to 0
            self._schedule_pass()

    def _schedule_pass(self) -> None:
        if not self._pass_comes:
            self._pass_comes = True
            asyncio.get_running_loop().call_soon(self._run_pass)

    def _run_pass(self) -> None:
        self._pass_comes = False
        self._turns.spent = 0.0
        if self.deliverer.has_more:
            began = self.stopwatch()
            self.deliverer.run_turn(TURN)
            self._turns.spent = self.stopwatch() - began
            if not self._durability.is_overloaded:
                self._resume_slowed_peers()
        self.deliverer.flush()
        while not self._must_yield and (peer := self._turns.next()) is not None:
            self._serve_or_queue_peer(peer)
            peer.resume_requests()
        while self._for_disk and not self._must_yield and not self._durability.delays_large_writes:
            self._for_disk.popitem(last=False)[0].resume_requests()
        if self._turns or self.deliverer.has_more or (self._for_disk and not self._durability.delays_large_writes):
            self._schedule_pass()

    async def wait_for_first_turns(self) -> None:
        """Wait until all peers that now wait for a first turn have had it: they may renew leases."""
        came = self._turns.came
        while self._turns.has_unserved_peers(came):
            await anyio.lowlevel.checkpoint()  # each pass of the loop gives some peers a turn

    def seconds_waiting_by_peer(self, now: float) -> dict[int, float]:
        """Map the id of each peer with waiting requests to `Peer.seconds_waiting`."""
        waiting = chain(self._turns, self._slowed, self._for_disk, self.deliverer.peers_awaiting_disk())
        return {peer.id: peer.seconds_waiting(now) for peer in waiting if peer.reading_paused}

    def _apply_request(
        self, peer: Peer, asked: tuple[int, int, Request[Any]], now: float, *, alone: bool = False
    ) -> Response | None:
        engine = self._durability.engine
        request_id, acknowledged, request = asked
        response, deliveries, work = engine.apply(request, peer.id, request_id, acknowledged, now)
        peer.work = work
        number = 0
        if type(request) is Stats:
            response = Figures(figures=self.figures())
        if self._durability.journal is not None:
            self._durability.record_changes()
            if response is not None:
                number, response = self._durability.pending_commits.step_to_wait_for(request, response)
        if response is not None:
            frame = self.deliverer.encode(request_id, response)
            if alone:
                self.deliverer.send_batch_of_one(peer, frame, number)
            else:
                self.deliverer.send(peer, frame, number=number)
        if deliveries or engine.has_chores:
            self.deliverer.deliver(deliveries, opening=type(request) is Watch)
        return response

    def _continue_work(self, peer: Peer, work: LongRead) -> None:
        applied = self._durability.engine.continue_long_request(work)
        peer.work = applied.work
        if applied.response is not None:
            self.deliverer.send(peer, self.deliverer.encode(work.watcher[1], applied.response))
        self.deliverer.deliver(applied.deliveries, opening=True)

    def _report_request(self, peer: Peer, request: Request[Any], response: Response | None, took: float) -> None:
        if self.on_request is not None:
            asked = request.request if isinstance(request, Guarded) else request
            outcome = response.kind.name.lower() if isinstance(response, Failed) else "ok"
            self.on_request(type(asked).__name__, outcome, took)
        if took > SLOW:
            self._slow_lines.write(log, logging.WARNING, SLOW_LINE, peer.name, type(request).__name__, took * 1000)

    def note_durable(self, number: int) -> None:
        """Send the frames that waited for step `number`, and resume reading from paused peers."""
        self.deliverer.release_durable_frames(number)
        self._resume_slowed_peers()
        if self._for_disk:
            self._schedule_pass()

    def _resume_slowed_peers(self) -> None:
        slowed, self._slowed = self._slowed, {}
        for peer in slowed:
            peer.resume_requests()
