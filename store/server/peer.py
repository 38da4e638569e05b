"""A connection in asyncio, which moves bytes between the server and a socket.

The transport gets one piece of the `Outbox` at a time. The server reads no requests of a peer whose transport is full,
or whose earlier requests wait for their turn.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from typing import TYPE_CHECKING, Any, Protocol, cast

from store.engine.processes import DisconnectKind
from store.net.address import join_host_port
from store.net.sockets import close_in_children, forget_sockets, unread_bytes
from store.protocol import wire
from store.server.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.engine.sessions import ByteCount
    from store.protocol.connection import ServerConnection
    from store.protocol.wire import Rejection

# The errors of a connection that the client's side closed. A timeout is not among them: it is a network failure.
FROM_THEIR_SIDE = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
PEER_BYTES = 8 * 1024  # memory of an idle connection
PIECES_AT_ONCE = 4  # the most pieces written by one `flush`: a megabyte
LEAVE_WITHIN = 5.0  # seconds in which a closing connection may send its last frames


class PeerCallbacks(Protocol):
    """The methods of the server that a peer calls."""

    buffer: memoryview

    def handle_accept(self, peer: Peer) -> None:
        """Handle a new connection."""

    def handle_bytes(self, peer: Peer, size: int) -> None:
        """Handle the `size` bytes just received into the buffer, which all peers share."""

    def resume_requests(self, peer: Peer) -> None:
        """Carry out the pending requests of a peer, and read from it again, if possible."""

    def write_later(self, peer: Peer) -> None:
        """Write more to a peer after other peers had their turn."""

    def handle_disconnect(self, peer: Peer) -> None:
        """Handle the end of a connection."""


class Peer(asyncio.BufferedProtocol):
    """One connection; if `is_internal`, it does not keep the server running."""

    def __init__(
        self, host: PeerCallbacks, id: int, *, outboxes: ByteCount, inboxes: ByteCount, is_internal: bool = False
    ) -> None:
        self._host = host
        self._inboxes = inboxes
        self._transport: asyncio.Transport
        self._blocked = False  # the transport has unsent bytes
        self._timer: asyncio.TimerHandle | None = None  # aborts a connection that is slow to close
        self.id = id
        self.is_internal = is_internal
        self.outbox: Outbox = Outbox(outboxes)
        self.bytes_out: int = 0
        self.connection: ServerConnection
        self.unread: Iterator[Any] | None = None  # received requests that are not carried out yet
        self.stalled: Any = None  # the next request, ahead of `unread`, if it waits for the disk
        self.work: Any = None
        self.inbox_bytes: int = 0  # bytes of an incomplete frame and of waiting requests
        self._inbox_since = 0.0  # when the inbox last began to fill or made progress
        self.batch_bytes: int = 0  # bytes last received, until their requests are carried out
        self._to_hear = 0.0  # bytes that had arrived when last counted, and are not carried out
        self._marked_at = self._heard_at = -math.inf  # times of that count, and of the last count carried out in full
        self.gone: bool = False  # closing or closed: its requests are ignored
        self.lags: bool = False  # it was logged that the peer reads too slowly
        self.closing: DisconnectKind = DisconnectKind.CUT  # how the connection ends; `CUT` unless the client closes it
        self.reading_paused: bool = False
        self.received_at: float = 0.0
        self.address: str = ""

    @property
    def name(self) -> str:
        """The peer's name in the log."""
        return f"{join_host_port(self.address, self._port)} (peer {self.id})" if self.address else f"peer {self.id}"

    # methods that asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle an accepted connection."""
        self._transport = cast("asyncio.Transport", transport)
        self.secure: bool = transport.get_extra_info("sslcontext") is not None
        # With the limit 0, asyncio calls `pause_writing` if any bytes are unsent.
        self._transport.set_write_buffer_limits(high=0)
        peername = transport.get_extra_info("peername")
        if peername:
            self.address, self._port = str(peername[0]), peername[1]
        sock = transport.get_extra_info("socket")
        if sock is not None:
            close_in_children(self, sock)
        self._host.handle_accept(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer's size is fixed
        """Return the buffer that all peers share."""
        return self._host.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes."""
        if not self.gone:
            self._host.handle_bytes(self, nbytes)

    def eof_received(self) -> bool:
        """Handle the client's end of stream."""
        self.outbox.clear()  # the client reads no more answers
        self.close(DisconnectKind.DROPPED)
        return False

    def pause_writing(self) -> None:
        """Count a full transport's unsent bytes among the outbox's."""
        self._blocked = True
        self.outbox.note_unsent(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Note that the transport has sent its bytes."""
        self._blocked = False
        self.outbox.note_unsent(0)
        self.flush()
        self.resume_requests()

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        forget_sockets(self)
        if not self.gone and (error is None or isinstance(error, FROM_THEIR_SIDE)):
            self.closing = DisconnectKind.DROPPED
        self._free_buffers()
        self.outbox.clear()
        self.outbox.note_unsent(0)
        if self._timer is not None:
            self._timer.cancel()
        self._host.handle_disconnect(self)

    # methods that the server calls

    def write(self, piece: bytes | memoryview) -> None:
        """Hand a piece to the transport, which copies it."""
        self.bytes_out += len(piece)
        self._transport.write(piece)

    def flush(self) -> None:
        """Hand some of the outbox to the transport; pause reading while frames are left."""
        transport, outbox = self._transport, self.outbox
        for _ in range(PIECES_AT_ONCE):
            # Check before each write: the last one may have detected that the connection is closed.
            if not outbox.ready or self._blocked or transport.is_closing():
                break
            self.write(outbox.take_piece())
        if transport.is_closing():
            return
        if outbox.ready:
            self.pause_reading()
            if not self._blocked:
                self._host.write_later(self)
        elif self.gone and not outbox.held:
            transport.close()

    def pause_reading(self) -> None:
        """Pause reading."""
        if not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def resume_requests(self) -> None:
        """Resume a paused peer's requests if no frame is ready to be sent."""
        if self.reading_paused and not self.outbox.ready and not self.gone:
            self._host.resume_requests(self)

    def resume_reading(self, now: float) -> None:
        """Resume reading; the pause does not count as silence of the peer (`frame_timeout`)."""
        if not self._transport.is_closing():
            self.reading_paused = False
            self.received_at = now
            self._transport.resume_reading()

    def set_inbox_bytes(self, size: int, *, progress: bool) -> None:
        """Set the bytes of received requests that are not carried out. `progress`: a request was carried out now."""
        if progress or not self.inbox_bytes:
            self._inbox_since = self.received_at
        self._inboxes.bytes += size - self.inbox_bytes
        self.inbox_bytes = size

    def slow_sender_score(self, now: float) -> float:
        """Return the bytes of unfinished requests times their age: high for deliberately slow senders."""
        return self.inbox_bytes * (1.0 + now - self._inbox_since)

    def note_all_carried_out(self) -> None:
        """Note that every complete request is carried out."""
        self._to_hear -= self.batch_bytes
        self.batch_bytes = 0
        self.unread = None
        held = self.connection.held_bytes
        self.set_inbox_bytes(held, progress=held < self.inbox_bytes)

    def seconds_waiting(self, now: float) -> float:
        """Return how many seconds, at most, a request of this peer has waited, unread or not carried out."""
        # Count only bytes that arrived by `_marked_at`: an endless sender always has waiting requests.
        if self._to_hear <= 0:
            self._heard_at, self._marked_at = self._marked_at, now
            held: int = self._transport.get_extra_info("held_bytes", 0)  # received, but not decrypted
            self._to_hear = self.batch_bytes + held + unread_bytes(self._transport.get_extra_info("socket"))
        return now - self._heard_at

    def refuse(self, rejection: Rejection) -> None:
        """Send the reason of a refusal, and close the connection."""
        if not self.gone:
            self.outbox.clear(but_begun=True)  # without the rest of a begun frame, the message is misread
            self.outbox.queue(wire.encode_rejection(rejection))
            self.close()

    def close(self, closing: DisconnectKind = DisconnectKind.CUT) -> None:
        """Close the connection once its queued frames are sent, or after `LEAVE_WITHIN` seconds."""
        if not self.gone:
            self.closing = closing
            self._free_buffers()
            self._timer = asyncio.get_running_loop().call_later(LEAVE_WITHIN, self.abort)
            self.flush()

    def abort(self) -> None:
        """Close the connection at once, without sending its queued frames."""
        self._free_buffers()
        self.outbox.clear()
        self.outbox.note_unsent(0)
        self._transport.abort()

    def _free_buffers(self) -> None:
        self.gone = True
        self.unread = self.stalled = self.work = None
        self.connection.free_incomplete_frame()
        self.set_inbox_bytes(0, progress=False)
