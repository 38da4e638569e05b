"""A network in memory, for protocols under test on virtual time, with the faults a real one has.

    network = MemoryNetwork(latency=(0.001, 0.05), rng=random.Random(seed))
    listener = network.listen("store", ServerProtocol)
    transport, protocol = await network.dial("store", ClientProtocol, source="node-3")
    network.partition("node-3")

A *link* is one connection: two transports, and between them one `_Pipe` for each direction, which delivers what
was written in order, each piece a latency after it was sent. As in TCP, the boundaries between writes mean
nothing (`shred=True` cuts them anew at random), a peer that closes is noticed only once the bytes before are
read, and writing to one that is gone is answered by a reset.

Every fault takes a link, or a name: that of one link ("node-3>store#1"), of a dialer ("node-3", all its links
and those it will yet make), or of a listener ("store"); or `EVERYTHING`.

The two ends of a link may live in different loops, as processes of `hosts.py` do: each protocol is called in its own.
What travels, and what the systems at both ends do, is timed by the network's own loop, so that a process which stands
still is connected to and sent to, and one that dies has its connections ended for it (`died`).
"""

from __future__ import annotations

import asyncio
import enum
import errno
import itertools
import random
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

EVERYTHING = "*"

HIGH_WATER_BYTES = 64 * 1024  # asyncio's own default, for transports over sockets
SOCKET_BUFFER_BYTES = 64 * 1024  # what both kernels together hold; of the order of Linux's smallest defaults
GIVEN_UP_AFTER = 30.0  # seconds until TCP's own keep-alive, as `store.net.sockets` sets it, gives up a silent machine

AnyProtocol = asyncio.Protocol | asyncio.BufferedProtocol
P = TypeVar("P", bound=AnyProtocol)


class Way(enum.Enum):
    """Which of what is sent on a link is held."""

    BOTH = "both"
    UPWARD = "what the dialer sends"
    DOWNWARD = "what the listener sends"


class MemoryNetwork:
    """Listeners, the links between them and their dialers, and the faults on those.

    Args:
        latency: Seconds from one end to the other, or the bounds between which each write draws its own.
        rng: Decides latencies and, with `shred`, where the stream is cut.
        shred: Deliver the stream in randomly sized pieces, down to single bytes.
        socket_buffer_bytes: What may be under way before it counts against the writer's buffer.
        loop: Where the network itself lives, if not in the loop that uses it.
    """

    def __init__(
        self,
        *,
        latency: float | tuple[float, float] = 0.0,
        rng: random.Random | None = None,
        shred: bool = False,
        socket_buffer_bytes: int = SOCKET_BUFFER_BYTES,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = loop
        self._latency = latency
        self._rng = rng or random.Random(0)
        self._shred = shred
        self.socket_buffer_bytes = socket_buffer_bytes
        self._listeners: dict[str, Listener] = {}
        self._links: dict[str, Link] = {}
        self._numbers = itertools.count(1)
        self._refused: set[str] = set()
        self._partitioned: dict[str, Way] = {}
        self._dead: set[str] = set()
        self._waiting: dict[asyncio.Future[None], None] = {}  # dials that nobody answers

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where the network itself lives."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def listen(
        self, name: str, protocol_factory: Callable[[], AnyProtocol], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> Listener:
        """Answer dials to `name`, each with a protocol of its own, until the listener is closed.

        Args:
            name: What is dialed.
            protocol_factory: Makes the protocol of one connection.
            loop: Where these protocols live, if not where the dialer's do.
        """
        if name in self._listeners:
            raise OSError(f"{name} is already listened on")
        self._listeners[name] = listener = Listener(self, name, protocol_factory, loop)
        return listener

    async def dial(
        self, name: str, protocol_factory: Callable[[], P], *, source: str = "client"
    ) -> tuple[MemoryTransport, P]:
        """Connect to a listener, as `loop.create_connection` does; takes one latency there and one back.

        While the way is partitioned this waits, as a SYN that nobody answers does.

        Raises:
            ConnectionRefusedError: Nobody listens there, or `refuse` was called.
            ConnectionResetError: The link was reset before it was made.
        """
        if source in self._dead:
            raise ConnectionRefusedError(f"{source} is dead")
        dialer = (source, next(self._numbers))
        names = _names(dialer, name)
        await self._travel(names)
        listener = self._listeners.get(name)
        if listener is None or names & self._refused:
            await self._travel(names)
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{name} refuses {source}")

        here = asyncio.get_running_loop()
        protocol = protocol_factory()
        link = Link(
            self,
            dialer=dialer,
            target=name,
            client_protocol=protocol,
            server_protocol=listener.protocol_factory(),
            client_loop=here,
            server_loop=listener.loop or here,
        )
        self._links[link.name] = link
        self._hold(link)
        try:
            if listener.loop is None or listener.loop is here:
                link.server.connect()
            else:
                listener.loop.call_soon(link.server.connect)  # the system accepts it also while the process does not
            await self._travel(names)
        except BaseException:
            link.reset()
            raise
        if link.client.is_lost:
            raise ConnectionResetError(f"{link.name} was reset before it was made")
        link.client.connect()
        return link.client, protocol

    def links(self, which: str | Link = EVERYTHING) -> list[Link]:
        """The links with this name, dialer or listener that are not over, oldest first."""
        # Looked at lazily: a link ends when both its protocols have been told, which nobody reports.
        self._links = {name: link for name, link in self._links.items() if not link.is_over}
        return [link for link in self._links.values() if _name(which) in link.names]

    def cut(self, which: str | Link = EVERYTHING) -> None:
        """End links at once, at both ends, without an error; what was under way is lost."""
        for link in self.links(which):
            link.cut()

    def reset(self, which: str | Link = EVERYTHING) -> None:
        """End links at once, with `ConnectionResetError` at both ends; what was under way is lost."""
        for link in self.links(which):
            link.reset()

    def died(self, name: str, *, silently: bool = False) -> None:
        """The process at this end is gone: what it dialed, or what answered under this name.

        Its system ends its connections for it, after what it had sent; and answers what still comes with a reset. With
        `silently` the machine itself is gone, with all that was on its way: the other end hears nothing, until it
        writes and the machine is back (`partition` it while it is not), or until TCP gives up. A dialer of this name
        can dial no more.
        """
        if name not in self._listeners:
            self._dead.add(name)
        for link in self.links(name):
            end, other = (link.server, link.client) if link.target == name else (link.client, link.server)
            end.die(silently=silently)
            if silently:
                self.loop.call_later(GIVEN_UP_AFTER, other.lose, TimeoutError(f"{link.name} is silent"))

    def partition(self, which: str | Link = EVERYTHING, *, way: Way | None = None) -> None:
        """Hold all that is sent, or what is sent one way, and all dials; nobody is told.

        Never healed, it is a black hole.
        """
        self._partitioned[_name(which)] = Way.BOTH if way is None else way
        self._hold_what_is_partitioned()

    def heal(self, which: str | Link = EVERYTHING) -> None:
        """End a partition (of `EVERYTHING`: each of them); what was held is delivered now, in order."""
        if which == EVERYTHING:
            self._partitioned.clear()
        else:
            self._partitioned.pop(_name(which), None)
        self._hold_what_is_partitioned()
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def forget_flows(self, which: str | Link = EVERYTHING) -> None:
        """Hold for ever what is sent on the links that there are, as a firewall does that was restarted.

        New dials pass. It is also how an old connection looks for seconds after a cut, until TCP sends again.
        """
        for link in self.links(which):
            link.forgotten = True
            self._hold(link)

    def refuse(self, name: str) -> None:
        """Refuse dials to this listener, or from this source, from now on; links that exist stay."""
        self._refused.add(name)

    def accept(self, name: str) -> None:
        """End a `refuse`."""
        self._refused.discard(name)

    def draw_latency(self) -> float:
        """Seconds that the next piece takes."""
        return self._rng.uniform(*self._latency) if isinstance(self._latency, tuple) else self._latency

    def draw_piece(self, length: int) -> int:
        """How many of the bytes that are ready arrive at once."""
        return self._rng.randint(1, length) if self._shred else length

    def forget_listener(self, listener: Listener) -> None:
        """Called by a listener that closes."""
        if self._listeners.get(listener.name) is listener:
            del self._listeners[listener.name]

    def _hold_what_is_partitioned(self) -> None:
        for link in self._links.values():
            self._hold(link)

    def _hold(self, link: Link) -> None:
        if link.forgotten:
            link.hold(upward=True, downward=True)
            return
        ways = {self._partitioned[name] for name in link.names if name in self._partitioned}
        link.hold(upward=bool(ways - {Way.DOWNWARD}), downward=bool(ways - {Way.UPWARD}))

    def _is_partitioned(self, names: set[str]) -> bool:
        return not names.isdisjoint(self._partitioned)

    async def _travel(self, names: set[str]) -> None:
        await asyncio.sleep(self.draw_latency())
        while self._is_partitioned(names):
            healed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[healed] = None
            try:
                await healed
            finally:
                self._waiting.pop(healed, None)


class Listener:
    """A name that answers dials; an async context manager, as `asyncio.Server` is."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        protocol_factory: Callable[[], AnyProtocol],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._network = network
        self.name = name
        self.protocol_factory = protocol_factory
        self.loop = loop

    def close(self) -> None:
        """Refuse dials from now on. Links that exist stay; `network.reset(listener.name)` ends those."""
        self._network.forget_listener(self)

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Link:
    """One connection: the `client` transport that dialed, and the `server` transport that answered."""

    def __init__(
        self,
        network: MemoryNetwork,
        *,
        dialer: tuple[str, int],
        target: str,
        client_protocol: AnyProtocol,
        server_protocol: AnyProtocol,
        client_loop: asyncio.AbstractEventLoop,
        server_loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = _link_name(dialer, target)
        self.forgotten = False  # by what is between the two ends, for good
        self.names = _names(dialer, target)
        self.target = target
        self._upward = _Pipe(network)
        self._downward = _Pipe(network)
        listener = (target, 0)
        self.client = MemoryTransport(
            client_protocol, self._upward, self._downward, loop=client_loop, sockname=dialer, peername=listener
        )
        self.server = MemoryTransport(
            server_protocol, self._downward, self._upward, loop=server_loop, sockname=listener, peername=dialer
        )

    @property
    def is_over(self) -> bool:
        """Whether both ends are done with it."""
        return self.client.is_lost and self.server.is_lost

    def hold(self, *, upward: bool, downward: bool) -> None:
        """Stop or resume delivering, each way: upward is what the dialer sends."""
        self._upward.hold(held=upward)
        self._downward.hold(held=downward)

    def cut(self, error: Exception | None = None) -> None:
        """End both ends at once, each with this error."""
        self._upward.clear()
        self._downward.clear()
        self.client.lose(error)
        self.server.lose(error)

    def reset(self) -> None:
        """End both ends at once, with an error."""
        self.cut(ConnectionResetError(f"{self.name} was reset"))


class MemoryTransport(asyncio.Transport):
    """One end of a link, to its protocol indistinguishable from a transport over a socket."""

    def __init__(
        self,
        protocol: AnyProtocol,
        outgoing: _Pipe,
        incoming: _Pipe,
        *,
        loop: asyncio.AbstractEventLoop,
        sockname: tuple[str, int],
        peername: tuple[str, int],
    ) -> None:
        super().__init__(extra={"sockname": sockname, "peername": peername})
        self.loop = loop  # where its protocol is called
        self._protocol = protocol
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
        self.is_lost = False

    # What a protocol calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; what is written after the end is dropped, as sockets' transports do."""
        if self._end_sent and not self._closing:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        self._outgoing.send(memoryview(bytes(data)))
        self._control_flow()

    def can_write_eof(self) -> bool:
        """A stream may be ended one way."""
        return True

    def write_eof(self) -> None:
        """End what this side sends; it may still receive."""
        if not self._end_sent:
            self._end_sent = True
            self._outgoing.send(_Signal.END)

    def close(self) -> None:
        """Receive nothing more; let go once all that was written has left."""
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self._incoming.wake()
        self._let_go_once_flushed()

    def abort(self) -> None:
        """Let go at once. What was under way is lost, and the peer gets a reset: the worst a socket may do."""
        if self.is_lost:
            return
        self._outgoing.clear()
        self._outgoing.send(_Signal.RESET)
        self.lose(None)

    def is_closing(self) -> bool:
        """Whether it is closing, closed or lost."""
        return self._closing

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`; what the peer writes piles up on its side."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        self._reading_paused = False
        self._incoming.wake()

    def is_reading(self) -> bool:
        """Whether bytes would be delivered."""
        return not (self._reading_paused or self._closing)

    def get_write_buffer_size(self) -> int:
        """Bytes that have not left: those undelivered, less what the kernels' buffers hold."""
        return self._outgoing.bytes_beyond_socket_buffers

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low- and the high-water mark."""
        return self._low_water, self._high_water

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say above how many bytes the protocol is told to pause writing, and below how many to resume."""
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be >= low ({low}) must be >= 0")
        self._high_water, self._low_water = high, low
        self._control_flow()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the transport over to another protocol."""
        assert isinstance(protocol, AnyProtocol)
        self._protocol = protocol

    def get_protocol(self) -> AnyProtocol:
        """The protocol this transport calls."""
        return self._protocol

    # What the network calls.

    def connect(self) -> None:
        """Introduce the protocol to its transport, then deliver what has already come."""
        if self.is_lost:
            return
        self._connected = True
        self._protocol.connection_made(self)
        self._incoming.wake()

    def lose(self, error: Exception | None) -> None:
        """Tell the protocol, once and not from within its own call, that the connection is over."""
        if self.is_lost:
            return
        self._closing = self._end_sent = self.is_lost = True
        if self._connected:
            self.loop.call_soon(self._protocol.connection_lost, error)
        self._incoming.wake()

    def die(self, *, silently: bool) -> None:
        """The process is gone, and its protocol hears nothing any more: the system, or nobody, ends the connection."""
        if silently:
            self._outgoing.clear()
        elif not self._end_sent:
            self._outgoing.send(_Signal.END)
        self._closing = self._end_sent = self.is_lost = True
        self.loop = self._outgoing.network_loop  # what still comes, the system answers
        self._incoming.receiver_died()

    @property
    def takes_delivery(self) -> bool:
        """Whether the incoming pipe may deliver. One that closes takes all, and drops it."""
        return self._closing or (self._connected and not self._reading_paused)

    def receive(self, data: memoryview) -> int:
        """Pass bytes on; returns how many the protocol took."""
        if self._closing:
            if self.is_lost:
                self._outgoing.send(_Signal.RESET)
            return len(data)
        try:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                return _fill_buffer(self._protocol, data)
            self._protocol.data_received(bytes(data))
        # The loop reports whatever it is and the connection dies, as asyncio does.
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        return len(data)

    def receive_signal(self, signal: _Signal) -> None:
        """The peer ended its stream, or reset the link."""
        if signal is _Signal.RESET:
            self._outgoing.clear()
            self.lose(ConnectionResetError("Connection reset by peer"))
        elif not self._closing:
            try:
                keep_open = self._protocol.eof_received()
            except Exception as error:  # noqa: BLE001 (as in `receive`)
                self._fail(error)
            else:
                if not keep_open:
                    self.close()

    @property
    def waits_for_room(self) -> bool:
        """Whether it matters to this side that some of what it wrote was delivered."""
        return not self.is_lost and (self._writing_paused or self._closing)

    def bytes_left(self) -> None:
        """Some of what was written was delivered."""
        self._control_flow()
        if self._closing:
            self._let_go_once_flushed()

    def _control_flow(self) -> None:
        if self.is_lost:
            return
        size = self.get_write_buffer_size()
        if size > self._high_water and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        elif size <= self._low_water and self._writing_paused:
            self._writing_paused = False
            self._protocol.resume_writing()

    def _let_go_once_flushed(self) -> None:
        if self.get_write_buffer_size() == 0:
            self.lose(None)

    def _fail(self, error: Exception) -> None:
        self.loop.call_exception_handler(
            {
                "message": "a protocol failed to receive",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )
        self._outgoing.clear()
        self._outgoing.send(_Signal.RESET)
        self.lose(error)


class _Signal(enum.Enum):
    """What travels in a pipe besides bytes."""

    END = "the sender sends no more"
    RESET = "the sender is gone"


class _Pipe:
    """One direction of a link: what was sent and has not been taken, oldest first."""

    sender: MemoryTransport
    receiver: MemoryTransport

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self.network_loop = network.loop
        self._under_way: deque[tuple[float, memoryview | _Signal]] = deque()
        self._bytes_under_way = 0
        self._last_due = 0.0
        self._held = False
        self._delivery: asyncio.Handle | None = None

    @property
    def bytes_beyond_socket_buffers(self) -> int:
        return max(0, self._bytes_under_way - self._network.socket_buffer_bytes)

    def send(self, item: memoryview | _Signal) -> None:
        # Latencies are drawn, but nothing overtakes what was sent before it.
        self._last_due = max(self._last_due, self.network_loop.time() + self._network.draw_latency())
        self._under_way.append((self._last_due, item))
        if isinstance(item, memoryview):
            self._bytes_under_way += len(item)
        self.wake()

    def clear(self) -> None:
        self._under_way.clear()
        self._bytes_under_way = 0
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None

    def hold(self, *, held: bool) -> None:
        self._held = held
        self.wake()

    def wake(self) -> None:
        """Set the timer for the next delivery, if there is something to deliver to someone who takes it."""
        if self._delivery is None and self._may_deliver():
            # Always by way of the loop, so that no protocol is called from within its own `write`.
            self._delivery = self.network_loop.call_at(self._under_way[0][0], self._arrive)

    def receiver_died(self) -> None:
        """What was to be delivered in its loop is answered by its system instead."""
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        self.wake()

    def _arrive(self) -> None:
        if self.receiver.loop is self.network_loop:
            self._deliver()
        else:  # its process reads it when it gets to it
            self._delivery = self.receiver.loop.call_soon(self._deliver)

    def _may_deliver(self) -> bool:
        return bool(self._under_way) and not self._held and self.receiver.takes_delivery

    def _deliver(self) -> None:
        self._delivery = None
        if not self._may_deliver():
            return
        # One piece at a time, and the rest asked for anew: whoever is called may pause, close, or cut the link.
        entry = self._under_way[0]
        due, item = entry
        if isinstance(item, _Signal):
            self._under_way.popleft()
            self.receiver.receive_signal(item)
        else:
            taken = self.receiver.receive(item[: self._network.draw_piece(len(item))])
            if self._under_way and self._under_way[0] is entry:
                self._under_way.popleft()
                self._bytes_under_way -= taken
                if taken < len(item):
                    self._under_way.appendleft((due, item[taken:]))
            if self.sender.waits_for_room:
                if self.sender.loop is self.receiver.loop:
                    self.sender.bytes_left()
                else:
                    self.sender.loop.call_soon(self.sender.bytes_left)
        self.wake()


def _fill_buffer(protocol: asyncio.BufferedProtocol, data: memoryview) -> int:
    """Give a buffered protocol as much as its buffer takes; -1 is what asyncio too gives as the hint."""
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


def _names(dialer: tuple[str, int], target: str) -> set[str]:
    """Everything that a fault may call this link by."""
    return {_link_name(dialer, target), dialer[0], target, EVERYTHING}


def _name(which: str | Link) -> str:
    return which if isinstance(which, str) else which.name
