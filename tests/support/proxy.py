"""A TCP proxy between real sockets, to break a real connection in every way a network does.

    async with Proxy("127.0.0.1", server.port) as proxy:
        client = store.connect(f"tcp://127.0.0.1:{proxy.port}")
        proxy.black_hole()

Each connection has two coroutines per direction: a reader and a writer, with a short queue between them. As the queue
is short, a slow reader slows the far end down, as it would without the proxy. Faults act at once and come from the
loop's own thread; `until` waits for bytes or connections that a test expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

PIECE_BYTES = 64 * 1024
PIECES_HELD = 16  # a direction; beyond, the kernels' buffers fill, and then the sender blocks
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger: on, for 0 seconds: close() sends RST
END_ON_CLOSE = struct.pack("ii", 0, 0)  # linger: off, as sockets are made: close() sends FIN


class Proxy:
    """Listens on a free port of this host and forwards to one target, over IPv4.

    Attributes:
        port: The port that it listens on.
        delay: Seconds that bytes take each way; for all bytes received from now on.
        connections: The number of connections accepted so far.
        bytes_to_target: Forwarded so far, from clients to the target.
        bytes_from_target: Forwarded so far, from the target to clients.
    """

    port: int

    def __init__(self, target_host: str, target_port: int, *, delay: float = 0.0) -> None:
        self._target = (target_host, target_port)
        self.delay = delay
        self.connections = 0
        self.bytes_to_target = 0
        self.bytes_from_target = 0
        self._server: asyncio.Server | None = None
        self._left = False
        self._swallowing = False
        self._open: dict[asyncio.Task[None], _Connection] = {}
        self._cut_after: int | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Proxy:
        self.port = 0
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left = True
        await self.refuse()
        tasks = list(self._open)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        """The number of connections that are open now."""
        return len(self._open)

    async def until(self, condition: Callable[[], bool], *, timeout: float = 10.0) -> None:
        """Wait for something to become true of this proxy's counters."""
        async with asyncio.timeout(timeout):
            while not condition():
                await self._changed.wait()

    async def refuse(self) -> None:
        """Refuse new connections; those that exist stay."""
        if self._server is not None:
            # asyncio leaves a socket open that is being accepted when its listener closes: let those be taken first.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            # Not wait_closed(): since Python 3.12 that waits for the connections, which are to stay.
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Take new connections (again), on the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, at both ends; bytes held by the proxy are lost."""
        for task, connection in self._open.items():
            connection.reset()
            task.cancel()

    def cut_after(self, byte_count: int) -> None:
        """Forward this many bytes more to the target, then `cut`: in the middle of a frame, if one is longer."""
        self._cut_after = byte_count

    def close_all(self) -> None:
        """Tell both ends of every connection that no more comes (FIN), and drop what still does."""
        for connection in self._open.values():
            connection.end()

    def black_hole(self) -> None:
        """Forward nothing either way, and close nothing: neither end is told. New connections hang."""
        self._passing.clear()

    def heal(self) -> None:
        """Forward again, beginning with the bytes held so far."""
        self._passing.set()

    def swallow(self) -> None:
        """Drop all bytes on present connections, and on new ones, for good; neither end sees an error.

        Packet filters cut like this: afterwards an old connection stays silent (TCP would send again seconds later),
        and only new ones pass.
        """
        self._swallowing = True
        for connection in self._open.values():
            connection.is_swallowed = True

    def pass_new(self) -> None:
        """End a `swallow`: connections pass that are made from now on."""
        self._swallowing = False

    def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        connection.is_swallowed = self._swallowing
        connection.add(writer)
        if self._left:  # it was being accepted when the listener was closed
            connection.reset()
            return
        # A task of our own, not the one asyncio makes of a coroutine: 3.12 logs an error if that is cancelled.
        task = asyncio.get_running_loop().create_task(self._forward(connection, reader, writer))
        self._open[task] = connection
        task.add_done_callback(self._forget)
        self.connections += 1
        self._notify()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._notify()

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one client, until both ends are done."""
        try:
            await self._passing.wait()
            target_reader, target_writer = await self._dial()
            connection.add(target_writer)
            async with asyncio.TaskGroup() as group:
                self._carry(group, connection, reader, target_writer, to_target=True)
                self._carry(group, connection, target_reader, writer, to_target=False)
        except* OSError:
            # One end was reset, or the target refused: the other end hears of it, but not through a black hole.
            await self._passing.wait()
            connection.reset()
        finally:
            await connection.close()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with contextlib.ExitStack() as on_failure:
            sock = on_failure.enter_context(socket.socket())
            sock.setblocking(False)
            # Until the connection is taken on: a cut in the middle of the dial must be a reset as well.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            await asyncio.get_running_loop().sock_connect(sock, self._target)
            streams = await asyncio.open_connection(sock=sock)
            on_failure.pop_all()
        return streams

    def _carry(
        self,
        group: asyncio.TaskGroup,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        to_target: bool,
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_HELD)
        group.create_task(self._hear(reader, pieces))
        group.create_task(self._say(pieces, connection, writer, to_target=to_target))

    async def _hear(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Stamp each piece with the time before which it may not go on; an empty one is the end."""
        loop = asyncio.get_running_loop()
        data = b"not the end"
        while data:
            data = await reader.read(PIECE_BYTES)
            await pieces.put((loop.time() + self.delay, data))

    async def _say(
        self,
        pieces: asyncio.Queue[tuple[float, bytes]],
        connection: _Connection,
        writer: asyncio.StreamWriter,
        *,
        to_target: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._passing.wait()
            if not data:
                if not connection.is_swallowed:
                    connection.end_one_way(writer)
                return
            if connection.is_ended or connection.is_swallowed:
                continue
            if to_target and self._cut_after is not None:
                data = data[: self._cut_after]
                self._cut_after -= len(data)
            writer.write(data)
            # The transport's high-water mark is 0, so this waits until the kernel has all of it. A cut cannot take back
            # bytes that were counted.
            await writer.drain()
            self._count(len(data), to_target=to_target)
            if self._cut_after == 0:
                self._cut_after = None
                self.cut()

    def _count(self, byte_count: int, *, to_target: bool) -> None:
        if to_target:
            self.bytes_to_target += byte_count
        else:
            self.bytes_from_target += byte_count
        self._notify()

    def _notify(self) -> None:
        """Wake the callers of `until`, which check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()


class _Connection:
    """The writers of both ends, of which the target's comes later."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self.is_ended = False
        self.is_swallowed = False  # its bytes are dropped, and neither end sees an error

    def add(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, END_ON_CLOSE)
        # Small answers must not wait for each other's acknowledgements: this proxy has a `delay` for that.
        _socket(writer).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writers.append(writer)
        if self.is_ended:
            self.end_one_way(writer)

    def end(self) -> None:
        """End both ways in good order; each end then closes, or does not."""
        self.is_ended = True
        for writer in self._writers:
            self.end_one_way(writer)

    def end_one_way(self, writer: asyncio.StreamWriter) -> None:
        if not writer.transport.is_closing():
            writer.write_eof()

    def reset(self) -> None:
        """Close both sockets so that their peers get RST."""
        for writer in self._writers:
            if not writer.transport.is_closing():
                _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            writer.transport.abort()

    async def close(self) -> None:
        """Close both, and wait until their sockets are gone: a test leaves none behind."""
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _socket(writer: asyncio.StreamWriter) -> socket.socket:
    # Really asyncio's TransportSocket, which has the one method needed here.
    sock: socket.socket = writer.get_extra_info("socket")
    return sock
