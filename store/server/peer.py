"""Shell: one connection as asyncio sees it: it carries bytes between the server and a socket, and decides nothing.

What is to be said waits in its `Outbox`, and the transport is handed one piece of it at a time; while it takes no more,
the peer's requests are not read. They are not read, either, while what was read of them waits for its turn.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from typing import TYPE_CHECKING, Any, Protocol, cast

from store.engine.processes import Closing
from store.net.address import host_and_port
from store.net.sockets import forget, let_go_in_children, unread_bytes
from store.protocol import wire
from store.server.outbox import PIECE_BYTES, Budget, Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.protocol.connection import ServerConnection
    from store.protocol.wire import Sorry

__all__ = ["LEAVE_WITHIN", "PEER_BYTES", "Host", "Peer"]

# What the end of a connection is reported as if the other side has closed it. With TLS, the end of the stream without
# an alert is an error; asyncio passes over it, and reports none. (Not a timeout: there, the network has gone.)
FROM_THEIR_SIDE = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
PEER_BYTES = 8 * 1024  # what a connection takes that does nothing
LEAVE_WITHIN = 5.0  # seconds for the last frames to reach their readers; S9 promises 10 in all


class Host(Protocol):
    """What a peer needs of the server it is connected to."""

    buffer: memoryview

    @property
    def disk_is_behind(self) -> bool:
        """Whether so much has been done that is not on disk yet that no more is to be taken on."""
        ...

    def now(self) -> float:
        """Seconds on the server's clock."""
        ...

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        ...

    def received(self, peer: Peer, size: int) -> None:
        """So many bytes have come into the buffer."""
        ...

    def go_on(self, peer: Peer) -> None:
        """Carry out what a peer has asked and was not carried out yet, as soon as it is its turn."""
        ...

    def waits_for_disk(self, peer: Peer) -> None:
        """This peer is to be read again when the disk has taken more."""
        ...

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        ...


class Peer(asyncio.BufferedProtocol):
    """One connection as asyncio sees it: it carries bytes and counts them, and decides nothing."""

    def __init__(self, host: Host, id: int, *, outboxes: Budget, inboxes: Budget) -> None:
        self._host = host
        self._inboxes = inboxes
        self._transport: asyncio.Transport | None = None
        self._blocked = False  # the transport asked us to stop writing
        self._ending = False  # to be closed once the outbox is empty
        self._timer: asyncio.TimerHandle | None = None  # until it has gone, once it is to go
        self.id = id
        self.outbox: Outbox = Outbox(outboxes)
        self.bytes_out: int = 0  # handed to the system
        self.connection: ServerConnection | None = None
        self.unread: Iterator[Any] | None = None  # requests that were read and wait for room in the outbox, or a turn
        self.work: Any = None  # of the engine's, for the last of them, if that takes more than one turn
        self.inbox_bytes: int = 0  # of a frame that is not whole yet, or of requests that wait
        self._inbox_since = 0.0  # on the server's clock
        self._batch = 0  # bytes that are being carried out
        self._to_hear = 0.0  # bytes that had come by `_marked_at`, and are not carried out yet
        self._marked_at = self._heard_at = -math.inf  # on the server's clock; before `_heard_at` nothing is left
        self.gone: bool = False
        self.lags: bool = False
        self.closing: Closing = Closing.CUT  # how it ends, unless its client closes it
        self.reading_paused: bool = False
        self.received_at: float = 0.0
        self.address: str = ""
        self.secure: bool = False
        self._port = 0
        self.is_of_ours: bool = False  # of the server's own process, and nobody to wait for

    @property
    def name(self) -> str:
        """Which one it is, for the log."""
        return f"{host_and_port(self.address, self._port)} (peer {self.id})" if self.address else f"peer {self.id}"

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection has been accepted."""
        self._transport = cast("asyncio.Transport", transport)
        self.secure = transport.get_extra_info("sslcontext") is not None
        # Whatever cannot be sent at once is reported, so that all of what the transport holds is counted.
        self._transport.set_write_buffer_limits(high=0)
        peername = transport.get_extra_info("peername")
        if peername:
            self.address, self._port = str(peername[0]), peername[1]
        sock = transport.get_extra_info("socket")
        if sock is not None:
            let_go_in_children(self, sock)
        self._host.accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer is as large as it is
        """Where the next bytes go: into the one buffer that all peers share."""
        return self._host.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if not self.gone:
            self._host.received(self, nbytes)

    def eof_received(self) -> bool:
        """The client has stopped sending."""
        self.outbox.clear()  # a client that has stopped sending has nothing to wait for
        self.close(Closing.DROPPED)
        return False

    def pause_writing(self) -> None:
        """The transport takes no more for now: what it has counts as waiting until it has got rid of it."""
        self._blocked = True
        assert self._transport is not None
        self.outbox.handed(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The transport takes more again."""
        self._blocked = False
        self.outbox.handed(0)
        self.flush()
        self.read_on()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        forget(self)
        if not self.gone and (error is None or isinstance(error, FROM_THEIR_SIDE)):
            self.closing = Closing.DROPPED
        self.gone = True
        self.outbox.clear()
        self._let_go()
        self.outbox.handed(0)
        self._set_timer(None)
        self._host.lost(self)

    # the server calls these

    def open(self, connection: ServerConnection) -> None:
        """Begin the conversation."""
        self.connection = connection
        self.queue(connection.greeting())
        self.flush()

    def queue(self, frame: bytes) -> None:
        """Put a frame into the outbox, unless nothing more will be sent."""
        if not self.gone:
            self.outbox.queue(frame)

    def hold(self, frame: bytes, number: int) -> None:
        """Put a frame into the outbox, to be sent once the journal has made this number durable."""
        if not self.gone:
            self.outbox.hold(frame, number)

    def flush(self) -> None:
        """Hand the outbox to the transport, piece by piece until that is full; then read no more that would fill it.

        The transport itself never holds more than one piece: what it holds it copies.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        outbox = self.outbox
        while outbox.ready and not self._blocked:
            piece = outbox.take()
            self.bytes_out += len(piece)
            transport.write(piece)
            if transport.is_closing():  # the write found out that nobody is there
                return
        if outbox.ready or (outbox.held and (outbox.bytes > PIECE_BYTES or self._host.disk_is_behind)):
            self.pause_reading()
        elif self._ending and not outbox.held:
            transport.close()

    def read_on(self) -> None:
        """Carry out and read what this peer asks again, if its outbox has been emptied."""
        if not self.reading_paused or self.outbox.ready or self.gone:
            return
        if self.outbox.held and (self.outbox.bytes > PIECE_BYTES or self._host.disk_is_behind):
            return
        if self._host.disk_is_behind:
            self._host.waits_for_disk(self)
            return
        self.lags = False
        self._host.go_on(self)
        if self.unread is None and self._transport is not None and not self._transport.is_closing():
            self.reading_paused = False
            self.received_at = self._host.now()  # its silence was ours
            self._transport.resume_reading()

    def wait_for_disk(self) -> None:
        """Read no more until the disk has taken what was written; the server says when that is."""
        self.pause_reading()
        self._host.waits_for_disk(self)

    def count_inbox(self, size: int, *, progress: bool) -> None:
        """So many bytes have come that cannot be let go of yet; `progress` if a request among them could."""
        if progress or not self.inbox_bytes:
            self._inbox_since = self.received_at
        self._inboxes.bytes += size - self.inbox_bytes
        self.inbox_bytes = size

    def reads(self, size: int) -> None:
        """So many bytes are carried out before any more are read."""
        self._batch = size

    def has_read(self) -> None:
        """They have been carried out."""
        self._to_hear -= self._batch
        self._batch = 0
        self.unread = None

    def waiting_for(self, now: float) -> float:
        """For how many seconds at most something that it has sent may have waited by now, unread or not carried out.

        Who never stops sending is never heard out; but what had come at one moment is carried out some time.
        """
        if self._to_hear <= 0:
            assert self._transport is not None, "it has connected"
            self._heard_at, self._marked_at = self._marked_at, now
            held: int = self._transport.get_extra_info("held_bytes", 0)  # by TLS
            self._to_hear = self._batch + held + unread_bytes(self._transport.get_extra_info("socket"))
        return now - self._heard_at

    def inbox_cost(self, now: float) -> float:
        """What its unfinished requests cost: bytes, and for how long. Who sends slowly on purpose is found by it."""
        return self.inbox_bytes * (1.0 + now - self._inbox_since)

    def refuse(self, sorry: Sorry) -> None:
        """Say why, and close."""
        self.outbox.clear(but_begun=True)  # or what is said would be taken for the rest of it
        self.queue(wire.encode_sorry(sorry))
        self.close()

    def close(self, closing: Closing = Closing.CUT) -> None:
        """Close once what is queued has been read, or after `LEAVE_WITHIN` seconds: there are peers that never read."""
        if not self.gone:  # else it is known already
            self.closing = closing
        self.gone = self._ending = True
        self._let_go()
        if self._transport is not None:
            self._set_timer(asyncio.get_running_loop().call_later(LEAVE_WITHIN, self.abort))
            self.flush()

    def abort(self) -> None:
        """Close at once; nothing of what waits is sent."""
        self.gone = True
        self._let_go()
        self.outbox.clear()
        self.outbox.handed(0)
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Read no more for now."""
        assert self._transport is not None
        if not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def _let_go(self) -> None:
        """Nothing that this peer has sent is wanted any more."""
        self.unread = self.work = None
        if self.connection is not None:
            self.connection.let_go()
        self.count_inbox(0, progress=False)

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
