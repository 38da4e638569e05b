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
from store.server.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.engine.sessions import Budget
    from store.protocol.connection import ServerConnection
    from store.protocol.wire import Sorry

__all__ = ["LEAVE_WITHIN", "PEER_BYTES", "Host", "Peer"]

# What the end of a connection is reported as if the other side has closed it. With TLS, the end of the stream without
# an alert is an error; asyncio passes over it, and reports none. (Not a timeout: there, the network has gone.)
FROM_THEIR_SIDE = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
PEER_BYTES = 8 * 1024  # what a connection takes that does nothing
PIECES_AT_ONCE = 4  # a megabyte, which takes up to a millisecond with TLS, before other peers are written to
LEAVE_WITHIN = 5.0  # seconds for the last frames to reach their readers; S9 promises 10 in all


class Host(Protocol):
    """What a peer needs of the server it is connected to."""

    buffer: memoryview

    def accepted(self, peer: Peer) -> None:
        """A connection was made."""
        ...

    def received(self, peer: Peer, size: int) -> None:
        """So many bytes have come into the buffer."""
        ...

    def read_on(self, peer: Peer) -> None:
        """Carry out what was read of a peer, and read it again, if nothing keeps it from that."""
        ...

    def write_later(self, peer: Peer) -> None:
        """Write more of what a peer is to be sent once others have been written to."""
        ...

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        ...


class Peer(asyncio.BufferedProtocol):
    """One connection as asyncio sees it: it carries bytes and counts them, and decides nothing.

    Args:
        host: The server.
        id: Its number, another for each connection.
        outboxes: Where is counted what all of them have to read.
        inboxes: And what has come of all of them and could not be carried out yet.
        is_of_ours: Whether it is of the server's own process, and nobody to wait for.
    """

    def __init__(self, host: Host, id: int, *, outboxes: Budget, inboxes: Budget, is_of_ours: bool = False) -> None:
        self._host = host
        self._inboxes = inboxes
        self._transport: asyncio.Transport
        self._blocked = False  # the transport asked us to stop writing
        self._timer: asyncio.TimerHandle | None = None  # until it has gone, once it is to go
        self.id = id
        self.is_of_ours = is_of_ours
        self.outbox: Outbox = Outbox(outboxes)
        self.bytes_out: int = 0  # handed to the system
        self.connection: ServerConnection
        self.unread: Iterator[Any] | None = None  # requests that were read and wait for room in the outbox, or a turn
        self.stalled: Any = None  # the next of them, if it waits for the disk
        self.work: Any = None  # of the engine's, for the last of them, if that takes more than one turn
        self.inbox_bytes: int = 0  # of a frame that is not whole yet, or of requests that wait
        self._inbox_since = 0.0  # on the server's clock
        self.batch_bytes: int = 0  # that are being carried out, before any more are read
        self._to_hear = 0.0  # bytes that had come by `_marked_at`, and are not carried out yet
        self._marked_at = self._heard_at = -math.inf  # on the server's clock; before `_heard_at` nothing is left
        self.gone: bool = False  # nothing that it says counts any more
        self.lags: bool = False
        self.closing: Closing = Closing.CUT  # how it ends, unless its client closes it
        self.reading_paused: bool = False
        self.received_at: float = 0.0
        self.address: str = ""
        self._port = 0
        self.secure: bool = False

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
        self._let_go()
        self.outbox.clear()
        self.outbox.handed(0)
        if self._timer is not None:
            self._timer.cancel()
        self._host.lost(self)

    # the server calls these

    def write(self, piece: bytes | memoryview) -> None:
        """Hand something to the transport, which is not to hold more than one piece: what it holds it copies."""
        self.bytes_out += len(piece)
        self._transport.write(piece)

    def flush(self) -> None:
        """Hand some of the outbox to the transport, unless that is full; read no more while anything is left."""
        transport, outbox = self._transport, self.outbox
        for _ in range(PIECES_AT_ONCE):
            # Writing may find out that nobody is there.
            if not outbox.ready or self._blocked or transport.is_closing():
                break
            self.write(outbox.take())
        if transport.is_closing():
            return
        if outbox.ready:
            self.pause_reading()
            if not self._blocked:
                self._host.write_later(self)
        elif self.gone and not outbox.held:
            transport.close()

    def pause_reading(self) -> None:
        """Read no more for now."""
        if not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Have the server read it again, if its outbox has been emptied."""
        if self.reading_paused and not self.outbox.ready and not self.gone:
            self._host.read_on(self)

    def resume_reading(self, now: float) -> None:
        """Read it again: its silence was ours."""
        if not self._transport.is_closing():
            self.reading_paused = False
            self.received_at = now
            self._transport.resume_reading()

    def count_inbox(self, size: int, *, progress: bool) -> None:
        """So many bytes have come that cannot be let go of yet; `progress` if a request among them could."""
        if progress or not self.inbox_bytes:
            self._inbox_since = self.received_at
        self._inboxes.bytes += size - self.inbox_bytes
        self.inbox_bytes = size

    def inbox_cost(self, now: float) -> float:
        """What its unfinished requests cost: bytes, and for how long. Who sends slowly on purpose is found by it."""
        return self.inbox_bytes * (1.0 + now - self._inbox_since)

    def has_read(self) -> None:
        """Everything that was read is carried out, but for a frame that has not come whole."""
        self._to_hear -= self.batch_bytes
        self.batch_bytes = 0
        self.unread = None
        held = self.connection.held_bytes
        self.count_inbox(held, progress=held < self.inbox_bytes)

    def waiting_for(self, now: float) -> float:
        """For how many seconds at most something that it has sent may have waited by now, unread or not carried out.

        Who never stops sending is never heard out; but what had come at one moment is carried out some time.
        """
        if self._to_hear <= 0:
            self._heard_at, self._marked_at = self._marked_at, now
            held: int = self._transport.get_extra_info("held_bytes", 0)  # by TLS
            self._to_hear = self.batch_bytes + held + unread_bytes(self._transport.get_extra_info("socket"))
        return now - self._heard_at

    def refuse(self, sorry: Sorry) -> None:
        """Say why, and close."""
        if not self.gone:
            self.outbox.clear(but_begun=True)  # or what is said would be taken for the rest of it
            self.outbox.queue(wire.encode_sorry(sorry))
            self.close()

    def close(self, closing: Closing = Closing.CUT) -> None:
        """Close once what is queued has been read, or after `LEAVE_WITHIN` seconds: there are peers that never read."""
        if not self.gone:  # else it is known already how, and when
            self.closing = closing
            self._let_go()
            self._timer = asyncio.get_running_loop().call_later(LEAVE_WITHIN, self.abort)
            self.flush()

    def abort(self) -> None:
        """Close at once; nothing of what waits is sent."""
        self._let_go()
        self.outbox.clear()
        self.outbox.handed(0)
        self._transport.abort()

    def _let_go(self) -> None:
        """Nothing that this peer has sent is wanted any more."""
        self.gone = True
        self.unread = self.stalled = self.work = None
        self.connection.let_go()
        self.count_inbox(0, progress=False)
