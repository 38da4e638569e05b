"""Shell: one connection as asyncio sees it: it carries bytes between the server and a socket, and decides nothing.

What is to be said waits in an outbox, first what may be said already, then what is held until the journal has come so
far. The transport is handed one piece at a time, since what it holds it copies; while it takes no more, the peer's
requests are not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from store.net.address import host_and_port
from store.net.sockets import forget, let_go_in_children, prepare
from store.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.protocol.connection import ServerConnection
    from store.protocol.wire import Sorry
    from store.server.server import Server

__all__ = ["LEAVE_WITHIN", "PIECE_BYTES", "Peer", "weight"]

LEAVE_WITHIN = 5.0  # seconds for the last frames to reach their readers; S9 promises 10 in all
PIECE_BYTES = (
    256 * 1024
)  # what a transport is handed at once, and how far one peer's answers may run ahead of its reading


def weight(size: int) -> int:
    """What a frame of so many bytes counts as in an outbox.

    With its bookkeeping, and a quarter for what the allocator loses between frames, which has been seen to be an
    eighth: a limit that is met by the bytes alone is passed by the memory that they take.
    """
    return size + (size >> 2) + 64


class Peer(asyncio.BufferedProtocol):
    """One connection as asyncio sees it: it carries bytes and counts them, and decides nothing."""

    def __init__(self, server: Server, id: int) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._out: deque[bytes] = deque()
        self._held: deque[tuple[int, bytes]] = deque()  # what comes after it, once the journal has come so far
        self._blocked = False  # the transport asked us to stop writing
        self._ending = False  # to be closed once the outbox is empty
        self._timer: asyncio.TimerHandle | None = None  # until it has said hello; later, until it has gone
        self.id = id
        self.connection: ServerConnection | None = None
        self.unread: Iterator[Any] | None = None  # requests that were read and wait for room in the outbox
        self.queued_bytes = 0  # by `weight`, in the outbox, and not handed to the transport yet
        self._handed_bytes = 0  # to the transport, when it asked us to stop
        self.inbox_bytes = 0  # of a frame that is not whole yet, or of requests that wait
        self._inbox_since = 0.0  # on the server's clock
        self.gone = False
        self.lags = False
        self.says_goodbye = False
        self.reading_paused = False
        self.received_at = 0.0
        self.address = ""
        self.name = f"peer {id}"

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection has been accepted."""
        self._transport = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        if peername:
            self.address = str(peername[0])
            self.name = f"{host_and_port(peername[0], peername[1])} (peer {self.id})"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)
            let_go_in_children(self, sock)
        self._server.accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer is as large as it is
        """Where the next bytes go: into the one buffer that all peers share."""
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if not self.gone:
            self.received_at = self._server.now()
            self._server.received(self, self._server.buffer[:nbytes])

    def eof_received(self) -> bool:
        """The client has stopped sending."""
        self._empty()  # a client that has stopped sending has nothing to wait for
        self.close()
        return False

    def pause_writing(self) -> None:
        """The transport takes no more for now: what it has counts as waiting until it has got rid of it."""
        self._blocked = True
        assert self._transport is not None
        self._count_handed(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The transport takes more again."""
        self._blocked = False
        self._count_handed(0)
        self.flush()
        self.read_on()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - how it ended makes no difference
        """The connection has ended."""
        forget(self)
        self.gone = True
        self._empty()
        self._let_go()
        self._count_handed(0)
        self._set_timer(None)
        self._server.lost(self)

    # the server calls these

    @property
    def backlog(self) -> int:
        """Bytes that wait for this peer to read."""
        held = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.queued_bytes + held

    def open(self, connection: ServerConnection, handshake: asyncio.TimerHandle) -> None:
        """Begin the conversation."""
        self.connection = connection
        self._set_timer(handshake)
        self.queue(connection.greeting())
        self.flush()

    def greeted(self) -> None:
        """The client has said hello in time."""
        self._set_timer(None)

    def queue(self, frame: bytes) -> None:
        """Put a frame into the outbox, unless nothing more will be sent."""
        if not self.gone:
            self._out.append(frame)
            more = weight(len(frame))
            self.queued_bytes += more  # `_count_queued`, of which this is the hot path
            self._server.outboxes_bytes += more

    def hold(self, frame: bytes, number: int) -> None:
        """Put a frame into the outbox, to be let go once the journal has made this number durable."""
        if not self.gone:
            self._held.append((number, frame))
            self._count_queued(weight(len(frame)))

    def release(self, number: int) -> bool:
        """Let go of the frames that waited for this number; whether others still wait."""
        while self._held and self._held[0][0] <= number:
            self._out.append(self._held.popleft()[1])
        return bool(self._held)

    def flush(self) -> None:
        """Hand the outbox to the transport, piece by piece until that is full; then read no more that would fill it.

        The transport itself never holds more than one piece, or one frame if that is larger: what it holds it copies.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while self._out and not self._blocked:
            piece = self._take_piece()
            self._server.wrote(len(piece))
            transport.write(piece)
            if transport.is_closing():  # the write found out that nobody is there
                return
        if self._out or (self._held and (self.queued_bytes > PIECE_BYTES or self._server.disk_is_behind)):
            self._pause_reading()
        elif self._ending and not self._held:
            transport.close()

    def read_on(self) -> None:
        """Carry out and read what this peer asks again, if its outbox has been emptied."""
        if not self.reading_paused or self._out or self._held or self.gone:
            return
        if self._server.disk_is_behind:
            self._server.waits_for_disk(self)
            return
        self.lags = self.reading_paused = False
        if self.unread is not None:
            self._server.go_on(self)
        if not self.reading_paused and self._transport is not None and not self._transport.is_closing():
            self.received_at = self._server.now()  # its silence was ours
            self._transport.resume_reading()

    def wait_for_disk(self) -> None:
        """Read no more until the disk has taken what was written; the server says when that is."""
        self._pause_reading()
        self._server.waits_for_disk(self)

    def count_inbox(self, size: int, *, progress: bool) -> None:
        """So many bytes have come that cannot be let go of yet; `progress` if a request among them could."""
        if progress or not self.inbox_bytes:
            self._inbox_since = self.received_at
        self._server.inboxes_bytes += size - self.inbox_bytes
        self.inbox_bytes = size

    def inbox_cost(self, now: float) -> float:
        """What its unfinished requests cost: bytes, and for how long. Who sends slowly on purpose is found by it."""
        return self.inbox_bytes * (1.0 + now - self._inbox_since)

    def refuse(self, sorry: Sorry) -> None:
        """Say why, and close."""
        self._empty()
        self.queue(wire.encode_sorry(sorry))
        self.close()

    def close(self) -> None:
        """Close once what is queued has been read, or after `LEAVE_WITHIN` seconds: there are peers that never read."""
        self.gone = self._ending = True
        self._let_go()
        if self._transport is not None:
            self._set_timer(asyncio.get_running_loop().call_later(LEAVE_WITHIN, self.abort))
            self.flush()

    def abort(self) -> None:
        """Close at once; nothing of what waits is sent."""
        self.gone = True
        self._let_go()
        self._empty()
        self._count_handed(0)
        if self._transport is not None:
            self._transport.abort()

    def _take_piece(self) -> bytes:
        """The next frames of the outbox, as one piece."""
        first = self._out.popleft()
        taken = weight(len(first))
        if not self._out:
            self.queued_bytes -= taken
            self._server.outboxes_bytes -= taken
            return first
        frames = [first]
        while self._out and taken < PIECE_BYTES:
            frame = self._out.popleft()
            taken += weight(len(frame))
            frames.append(frame)
        self._count_queued(-taken)
        return first if len(frames) == 1 else b"".join(frames)

    def _pause_reading(self) -> None:
        assert self._transport is not None
        if not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def _let_go(self) -> None:
        """Nothing that this peer has sent is wanted any more."""
        self.unread = None
        if self.connection is not None:
            self.connection.let_go()
        self.count_inbox(0, progress=False)

    def _empty(self) -> None:
        self._out.clear()
        self._held.clear()
        self._count_queued(-self.queued_bytes)

    def _count_queued(self, more: int) -> None:
        self.queued_bytes += more
        self._server.outboxes_bytes += more

    def _count_handed(self, size: int) -> None:
        self._server.outboxes_bytes += size - self._handed_bytes
        self._handed_bytes = size

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
