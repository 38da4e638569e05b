"""A network in memory for protocols on virtual time, with the faults of a real one.

A fault applies to a name: of a link ("node-3>store#1"), of a dialer ("node-3": its present and future links), of a
listener ("store"), or to `EVERYTHING`.

The ends of a link may be in different loops. The network's own loop stands for the wire and for both ends' operating
systems: these still accept connections and bytes for a stopped process, and close a dead process's connections.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import anyio

from rdzv.testing.links import EVERYTHING, SOCKET_BUFFER_BYTES, AnyProtocol, Duplex, MemoryTransport, Pipe, aliases_of

if TYPE_CHECKING:
    from collections.abc import Callable

GIVEN_UP_AFTER = 30.0  # seconds until TCP's keep-alive (`store.net.sockets`) closes a silent connection

P = TypeVar("P", bound=AnyProtocol)


class MemoryNetwork:
    """Listeners, their links, and the faults on these.

    Args:
        latency: Seconds from one end to the other, or the bounds from which each write draws.
        rng: Draws latencies.
        socket_buffer_bytes: The bytes in flight that do not count against the writer's buffer.
        loop: By default the loop that runs at the first use.
    """

    def __init__(
        self,
        *,
        latency: float | tuple[float, float] = 0.0,
        rng: random.Random | None = None,
        socket_buffer_bytes: int = SOCKET_BUFFER_BYTES,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = loop
        self._latency = latency
        self._rng = rng or random.Random(0)
        self.socket_buffer_bytes = socket_buffer_bytes
        self._listeners: dict[str, Listener] = {}
        self._links: dict[str, Duplex] = {}
        self._numbers = itertools.count(1)
        self._refused: set[str] = set()
        self._partitioned: set[str] = set()
        self._dead: set[str] = set()
        self._waiting: dict[asyncio.Future[None], None] = {}  # dials that a partition holds

    @property
    def net_loop(self) -> asyncio.AbstractEventLoop:
        """The network's own loop, beside those of processes."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def listen(
        self, name: str, protocol_factory: Callable[[], AnyProtocol], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> Listener:
        """Accept connections to `name`, each with a new protocol, which is called in `loop` (default: the dialer's)."""
        if name in self._listeners:
            raise OSError(f"{name} is already listened on")
        self._listeners[name] = listener = Listener(name, protocol_factory, loop, self._listeners)
        return listener

    async def dial(
        self, name: str, protocol_factory: Callable[[], P], *, source: str = "client"
    ) -> tuple[MemoryTransport, P]:
        """Connect to a listener as `loop.create_connection` does, in one latency each way; wait during a partition.

        Raises:
            ConnectionRefusedError: No such listener, a dead dialer, or `refuse` applies.
            ConnectionResetError: The link was reset before it was connected.
        """
        if source in self._dead:
            raise ConnectionRefusedError(f"{source} is dead")
        dialer = (source, next(self._numbers))
        names = aliases_of(dialer, name)
        await self._delay_dial(names)
        listener = self._listeners.get(name)
        if listener is None or names & self._refused:
            await self._delay_dial(names)
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{name} refuses {source}")

        here = asyncio.get_running_loop()
        protocol = protocol_factory()
        server = (listener.protocol_factory(), listener.loop or here)
        link = Duplex(self, dialer=dialer, target=name, client=(protocol, here), server=server)
        self._links[link.name] = link
        self._hold_if_partitioned(link)
        try:
            if listener.loop is None or listener.loop is here:
                link.server.connect()
            else:
                # A stopped process's operating system accepts connections, too.
                listener.loop.call_soon(link.server.connect)
            await self._delay_dial(names)
        except BaseException:
            link.reset()
            raise
        if link.client.is_lost:
            raise ConnectionResetError(f"{link.name} was reset before it was made")
        link.client.connect()
        return link.client, protocol

    def links(self, which: str = EVERYTHING) -> list[Duplex]:
        """Return the open links of this name, the oldest first."""
        # Remove closed links here, as a link does not report its end.
        self._links = {name: link for name, link in self._links.items() if not link.is_over}
        return [link for link in self._links.values() if which in link.names]

    def reset(self, which: str = EVERYTHING) -> None:
        """Close links at both ends with `ConnectionResetError`; bytes in flight are lost."""
        for link in self.links(which):
            link.reset()

    def end_process(self, name: str, *, silently: bool = False) -> None:
        """End the links of a dead process, a dialer or a listener; a dead dialer can dial no more.

        The process's system delivers the sent bytes, closes the connections, and answers later bytes with a reset. With
        `silently` the machine has lost power, and bytes in flight are lost. The other end learns of the death only when
        it writes to the restarted machine (`partition` the name until then), or when TCP's keep-alive fails.
        """
        if name not in self._listeners:
            self._dead.add(name)
        for link in self.links(name):
            end, other = (link.server, link.client) if link.target == name else (link.client, link.server)
            end.die(silently=silently)
            if silently:
                self.net_loop.call_later(GIVEN_UP_AFTER, other.lose_connection, TimeoutError(f"{link.name} is silent"))

    def partition(self, which: str = EVERYTHING) -> None:
        """Hold all bytes and dials until `heal`, without an error at either end."""
        self._partitioned.add(which)
        self._apply_partitions()

    def heal(self, which: str = EVERYTHING) -> None:
        """End a partition, or with `EVERYTHING` all partitions; deliver the held bytes in order."""
        if which == EVERYTHING:
            self._partitioned.clear()
        else:
            self._partitioned.discard(which)
        self._apply_partitions()
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def refuse(self, name: str) -> None:
        """Refuse dials to or from this name; open links stay."""
        self._refused.add(name)

    def stop_refusing(self, name: str) -> None:
        """End a `refuse`."""
        self._refused.discard(name)

    def draw_latency(self) -> float:
        """Return the next latency, in seconds."""
        return self._rng.uniform(*self._latency) if isinstance(self._latency, tuple) else self._latency

    def new_one_way_pipe(self) -> Pipe:
        """Return one direction of a new link."""
        return Pipe(self)

    def _apply_partitions(self) -> None:
        for link in self._links.values():
            self._hold_if_partitioned(link)

    def _hold_if_partitioned(self, link: Duplex) -> None:
        held = not link.names.isdisjoint(self._partitioned)
        link.hold(upward=held, downward=held)

    async def _delay_dial(self, names: set[str]) -> None:
        await anyio.sleep(self.draw_latency())
        while not names.isdisjoint(self._partitioned):
            healed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[healed] = None
            try:
                await healed
            finally:
                self._waiting.pop(healed, None)


@dataclass(eq=False)
class Listener:
    """A name that accepts connections."""

    name: str
    protocol_factory: Callable[[], AnyProtocol]
    loop: asyncio.AbstractEventLoop | None
    _listeners: dict[str, Listener]  # the network's listeners, by name

    def close(self) -> None:
        """Refuse dials from now on; open links stay."""
        if self._listeners.get(self.name) is self:
            del self._listeners[self.name]
