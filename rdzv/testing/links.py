"""One connection of a network in memory: two transports, and a pipe for each direction.

A pipe delivers writes in order, each as one piece, one latency after it was sent. As in TCP, a peer receives all bytes
before a close, and a dead peer answers a write by a reset.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from typing import Protocol

__all__ = ["EVERYTHING", "SOCKET_BUFFER_BYTES", "AnyProtocol", "Duplex", "MemoryTransport", "aliases_of"]

EVERYTHING = "*"

HIGH_WATER_BYTES = 64 * 1024  # asyncio's default for transports over sockets
SOCKET_BUFFER_BYTES = 64 * 1024  # the bytes that both ends' kernels buffer per direction

AnyProtocol = asyncio.Protocol | asyncio.BufferedProtocol
End = tuple[AnyProtocol, asyncio.AbstractEventLoop]  # a protocol, and the loop in which it is called


class LinkNetwork(Protocol):
    """The part of `MemoryNetwork` that links use."""

    socket_buffer_bytes: int

    @property
    def net_loop(self) -> asyncio.AbstractEventLoop: ...
    def draw_latency(self) -> float: ...
    def new_one_way_pipe(self) -> Pipe: ...


class Duplex:
    """One connection; `client` is the dialer's transport, `server` the listener's."""

    def __init__(self, network: LinkNetwork, *, dialer: tuple[str, int], target: str, client: End, server: End) -> None:
        self.name: str = _link_name(dialer, target)
        self.names: set[str] = aliases_of(dialer, target)
        self.target = target
        self._upward = network.new_one_way_pipe()
        self._downward = network.new_one_way_pipe()
        listener = (target, 0)
        self.client: MemoryTransport = MemoryTransport(client, self._upward, self._downward, dialer, listener)
        self.server: MemoryTransport = MemoryTransport(server, self._downward, self._upward, listener, dialer)

    @property
    def is_over(self) -> bool:
        """True if both ends are closed."""
        return self.client.is_lost and self.server.is_lost

    def hold(self, *, upward: bool, downward: bool) -> None:
        """Stop (True) or resume delivery in each direction; upward is from the dialer."""
        self._upward.hold(held=upward)
        self._downward.hold(held=downward)

    def close_both(self, error: Exception | None = None) -> None:
        """Close both ends at once; each protocol gets `error`."""
        self._upward.clear()
        self._downward.clear()
        self.client.lose_connection(error)
        self.server.lose_connection(error)

    def reset(self) -> None:
        """Close both ends at once, with a reset."""
        self.close_both(ConnectionResetError(f"{self.name} was reset"))


class MemoryTransport(asyncio.Transport):
    """One end of a link, which behaves as a transport over a socket."""

    def __init__(
        self, end: End, outgoing: Pipe, incoming: Pipe, sockname: tuple[str, int], peername: tuple[str, int]
    ) -> None:
        super().__init__(extra={"sockname": sockname, "peername": peername})
        self.loop: asyncio.AbstractEventLoop
        self._protocol, self.loop = end
        self._outgoing = outgoing
        self._incoming = incoming
        outgoing.sender = self
        incoming.receiver = self
        self._connected = False
        self._closing = False
        self._end_sent = False
        self._reading_paused = False
        self._writing_paused = False
        self._high_water, self._low_water = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self.is_lost: bool = False

    # Called by the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; drop them once the transport closes."""
        if self._end_sent and not self._closing:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        self._outgoing.send(memoryview(bytes(data)))
        self._apply_flow_control()

    def write_eof(self) -> None:
        """End the outgoing stream; receiving continues."""
        if not self._end_sent:
            self._end_sent = True
            self._outgoing.send(PipeSignal.END)

    def close(self) -> None:
        """Stop receiving; close once the write buffer is empty."""
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self._incoming.schedule_delivery()
        self._close_if_flushed()

    def abort(self) -> None:
        """Close at once: bytes in flight are lost, and the peer gets a reset."""
        if not self.is_lost:
            self._reset_peer(None)

    def is_closing(self) -> bool:
        """Return True if this end is closing, closed or lost."""
        return self._closing

    def pause_reading(self) -> None:
        """Deliver no more bytes to the protocol until `resume_reading`."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """Deliver bytes to the protocol again."""
        self._reading_paused = False
        self._incoming.schedule_delivery()

    def get_write_buffer_size(self) -> int:
        """Return the undelivered bytes beyond the kernels' buffers."""
        return self._outgoing.bytes_beyond_socket_buffers

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the buffer sizes at which the protocol must pause and may resume writing."""
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be >= low ({low}) must be >= 0")
        self._high_water, self._low_water = high, low
        self._apply_flow_control()

    # Called by the network.

    def connect(self) -> None:
        """Connect the protocol, and deliver the bytes that have arrived."""
        if self.is_lost:
            return
        self._connected = True
        self._protocol.connection_made(self)
        self._incoming.schedule_delivery()

    def lose_connection(self, error: Exception | None) -> None:
        """Close this end at once; let the loop call the protocol's `connection_lost`, once."""
        if self.is_lost:
            return
        self._closing = self._end_sent = self.is_lost = True
        if self._connected:
            self.loop.call_soon(self._protocol.connection_lost, error)
        self._incoming.schedule_delivery()

    def die(self, *, silently: bool) -> None:
        """Call the dead process's protocol no more; close the connection unless `silently`."""
        if silently:
            self._outgoing.clear()
        elif not self._end_sent:
            self._outgoing.send(PipeSignal.END)
        self._closing = self._end_sent = self.is_lost = True
        self.loop = self._outgoing.network_loop  # later bytes reach the operating system, not the process
        self._incoming.deliver_to_os_only()

    @property
    def takes_delivery(self) -> bool:
        """True if the incoming pipe may deliver. A closing end accepts and drops bytes."""
        return self._closing or (self._connected and not self._reading_paused)

    def receive(self, data: memoryview) -> int:
        """Pass bytes to the protocol; return how many it accepted."""
        if self._closing:
            if self.is_lost:
                self._outgoing.send(PipeSignal.RESET)
            return len(data)
        try:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                return _deliver_to_buffer(self._protocol, data)
            self._protocol.data_received(bytes(data))
        # If the protocol raises an error, the loop reports it and the connection is lost, as in asyncio.
        except Exception as error:  # noqa: BLE001
            self._report_protocol_error(error)
        return len(data)

    def receive_signal(self, signal: PipeSignal) -> None:
        """Handle the end of the peer's stream, or a reset."""
        if signal is PipeSignal.RESET:
            self._outgoing.clear()
            self.lose_connection(ConnectionResetError("Connection reset by peer"))
        elif not self._closing:
            try:
                keep_open = self._protocol.eof_received()
            except Exception as error:  # noqa: BLE001  as in `receive`
                self._report_protocol_error(error)
            else:
                if not keep_open:
                    self.close()

    @property
    def needs_callback(self) -> bool:
        """True if `on_delivered` must be called after a delivery."""
        return not self.is_lost and (self._writing_paused or self._closing)

    def on_delivered(self) -> None:
        """Resume writing, or finish closing: sent bytes were delivered."""
        self._apply_flow_control()
        if self._closing:
            self._close_if_flushed()

    def _apply_flow_control(self) -> None:
        if self.is_lost:
            return
        size = self.get_write_buffer_size()
        if size > self._high_water and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        elif size <= self._low_water and self._writing_paused:
            self._writing_paused = False
            self._protocol.resume_writing()

    def _close_if_flushed(self) -> None:
        if self.get_write_buffer_size() == 0:
            self.lose_connection(None)

    def _report_protocol_error(self, error: Exception) -> None:
        self.loop.call_exception_handler(
            {
                "message": "a protocol failed to receive",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )
        self._reset_peer(error)

    def _reset_peer(self, error: Exception | None) -> None:
        self._outgoing.clear()
        self._outgoing.send(PipeSignal.RESET)
        self.lose_connection(error)


class PipeSignal(enum.Enum):
    """The items of a pipe other than bytes."""

    END = "the sender sends no more"
    RESET = "the sender is gone"


class Pipe:
    """One direction of a link: the pieces in flight, oldest first."""

    sender: MemoryTransport
    receiver: MemoryTransport

    def __init__(self, network: LinkNetwork) -> None:
        self._network = network
        self.network_loop: asyncio.AbstractEventLoop = network.net_loop
        self._under_way: deque[tuple[float, memoryview | PipeSignal]] = deque()
        self._bytes_under_way = 0
        self._last_due = 0.0
        self._held = False
        self._delivery: asyncio.Handle | None = None

    @property
    def bytes_beyond_socket_buffers(self) -> int:
        return max(0, self._bytes_under_way - self._network.socket_buffer_bytes)

    def send(self, item: memoryview | PipeSignal) -> None:
        # Latencies are random, but no piece overtakes an earlier one.
        self._last_due = max(self._last_due, self.network_loop.time() + self._network.draw_latency())
        self._under_way.append((self._last_due, item))
        if isinstance(item, memoryview):
            self._bytes_under_way += len(item)
        self.schedule_delivery()

    def clear(self) -> None:
        self._under_way.clear()
        self._bytes_under_way = 0
        self._cancel_delivery()

    def hold(self, *, held: bool) -> None:
        self._held = held
        self.schedule_delivery()

    def schedule_delivery(self) -> None:
        """Set the timer for the next delivery, if the receiver accepts it."""
        if self._delivery is None and self._may_deliver():
            # Deliver through the loop, so that a protocol is never called within its own `write`.
            self._delivery = self.network_loop.call_at(self._under_way[0][0], self._arrive_at_receiver)

    def deliver_to_os_only(self) -> None:
        """Deliver further bytes to the operating system of the dead receiver."""
        self._cancel_delivery()
        self.schedule_delivery()

    def _cancel_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None

    def _arrive_at_receiver(self) -> None:
        if self.receiver.loop is self.network_loop:
            self._deliver()
        else:  # the receiver's loop delivers the bytes in its next iteration
            self._delivery = self.receiver.loop.call_soon(self._deliver)

    def _may_deliver(self) -> bool:
        return bool(self._under_way) and not self._held and self.receiver.takes_delivery

    def _deliver(self) -> None:
        self._delivery = None
        if not self._may_deliver():
            return
        entry = self._under_way[0]  # one piece at a time: the protocol may pause, close or cut the link
        due, item = entry
        if isinstance(item, PipeSignal):
            self._under_way.popleft()
            self.receiver.receive_signal(item)
        else:
            taken = self.receiver.receive(self._next_piece(item))
            if self._under_way and self._under_way[0] is entry:
                self._under_way.popleft()
                self._bytes_under_way -= taken
                if taken < len(item):
                    self._under_way.appendleft((due, item[taken:]))
            if self.sender.needs_callback:
                if self.sender.loop is self.receiver.loop:
                    self.sender.on_delivered()
                else:
                    self.sender.loop.call_soon(self.sender.on_delivered)
        self.schedule_delivery()

    def _next_piece(self, item: memoryview) -> memoryview:
        return item  # a subclass may split the write


def _deliver_to_buffer(protocol: asyncio.BufferedProtocol, data: memoryview) -> int:
    with memoryview(protocol.get_buffer(-1)) as buffer, buffer.cast("B") as room:
        if not room.nbytes:
            raise RuntimeError("get_buffer() returned an empty buffer")
        taken = min(room.nbytes, len(data))
        room[:taken] = data[:taken]
    protocol.buffer_updated(taken)
    return taken


def _link_name(dialer: tuple[str, int], target: str) -> str:
    source, number = dialer
    return f"{source}>{target}#{number}"


def aliases_of(dialer: tuple[str, int], target: str) -> set[str]:
    """Return the names by which faults address this link."""
    return {_link_name(dialer, target), dialer[0], target, EVERYTHING}
