"""Clients of the store in virtual time: scenes with a server that rows of a table silence, cut and forge."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio

import store
from rdzv.testing.timeline import START
from store import messages
from store.client import blocking, client, connection_health, timeouts
from store.engine.engine import Engine
from store.net.address import Address
from store.protocol import wire
from store.protocol.frames import FrameReader
from store.server.server import Server
from tests.recorded.tables import constants, evaluated, logged, sections, text
from tests.support.faults import FaultyNetwork, Way
from tests.support.limits import limits_with
from tests.support.stores import Peer
from tests.support.virtual_time import VirtualTimeLoop

TABLES = sections(__file__)
SMALL = constants(TABLES, "store.client")
NAMES = {
    **vars(messages),
    **vars(timeouts),
    **vars(connection_health),
    **vars(wire),
    **vars(store),
    "Way": Way,
    "Peer": Peer,
    "CHOSEN": messages.CHOSEN_LEASE_LEAST,
}


class Scene:
    """A server, its network and a client: rows call the methods, and what is said and returned is written."""

    def __init__(self, loop: VirtualTimeLoop, lines: list[str]) -> None:
        self.loop, self.lines, self.line, self.silent = loop, lines, (0, False, False), False
        self.tasks, self.links, self.listeners, self.client = list[Any](), list[Any](), list[Any](), SimpleNamespace()
        self.network = FaultyNetwork(latency=0.001, loop=loop, socket_buffer_bytes=3000)
        self.names = {**NAMES, **{name: getattr(self, name) for name in dir(self) if name[0] != "_"}, "scene": self}

    def note(self, what: str) -> None:
        """Write a line."""
        self.lines.append(f"  {self.loop.time() - START:.3f} {re.sub(' at 0x[0-9a-f]+|v{20,}|0{9,}', '', what)}")

    def log(self, line: str) -> None:
        """Write a line of the log, unless it only tells of a loss."""
        if ": debug: " not in line:
            self.lines.append(f"  {line[:90]}")

    def patched(self) -> dict[str, Any]:
        """Return what is replaced: random bytes, limits of the process, and what its system knows of connections."""
        numbers = itertools.count(1)
        return {
            "resource.getrlimit": lambda _: (5, 9),
            "secrets.token_bytes": lambda size: b"%0*d" % (size, next(numbers)),
            "store.client.reconnecting.unacknowledged": lambda _, buffered: (self.line[0] + buffered, *self.line[1:]),
        }

    def run(self, row: str) -> None:
        """Do what a row says."""
        self.lines.append(f"> {row[:90]}")
        try:
            exec(row, self.names)
        except Exception as error:  # noqa: BLE001 - it is recorded
            self.note(f"raises {text(error)}")

    def at(self, seconds: float, row: Any) -> None:
        """Do what a row says later, while the loop runs."""
        self.loop.call_later(seconds, *((self.run, row) if isinstance(row, str) else (row,)))

    def wait(self, work: float | Coroutine[Any, Any, Any]) -> Any:
        """Let time pass, or wait for some work."""
        return self.loop.run_until_complete(work if asyncio.iscoroutine(work) else asyncio.sleep(work))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task, of which the outcome is written."""
        self.tasks.append(self.loop.create_task(self._finish(len(self.tasks), work)))

    async def within(self, seconds: float, work: Coroutine[Any, Any, Any]) -> None:
        """Await work, and cancel it after some seconds, as anyio does."""
        with anyio.move_on_after(seconds):
            await work

    async def _finish(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.note(f"#{number} returns {text(await work)}")
        except BaseException as error:  # noqa: BLE001 - it is recorded
            self.note(f"#{number} raises {text(error)}")

    def serve(self, name: str = "store", *, token: bytes | None = None, mute: bool = False, **limits: Any) -> None:
        """Serve without entries, in place of an earlier server; a mute one says only what rows make it `say`."""
        for listener in self.listeners:
            listener.close()
        engine = Engine(store_id=name, limits=limits_with(**limits))
        self.server = Server(engine, token=token, clock=self.loop.time, stopwatch=lambda: 0.0)
        if asyncio._get_running_loop() is None:
            self.loop.call_soon(self.server.start)
            self.wait(0)
        else:
            self.server.start()
        accept = functools.partial(self._accept, mute=mute)
        self.listeners = [self.network.listen("store", accept), self.network.listen("side", self.server.protocol)]

    def _accept(self, *, mute: bool) -> Any:
        peer: Any = type("Mute", (asyncio.Protocol,), {})() if mute else self.server.protocol()
        link = SimpleNamespace(
            number=len(self.links) + 1, silent=False, kept=[], readers=(FrameReader(10**7), FrameReader(10**7))
        )
        link.openings = [wire.Hello], [wire.Greeting, wire.Welcome]

        def connection_made(transport: Any) -> None:
            link.write, transport.write = transport.write, functools.partial(self._answer, link)
            type(peer).connection_made(peer, transport)

        def connection_lost(error: Exception | None) -> None:
            self.note(f"{link.number} is lost{f': {text(error)}' if error else ''}")
            type(peer).connection_lost(peer, error)

        def buffer_updated(count: int) -> None:
            self._read(link, 0, bytes(peer.get_buffer(0)[:count]))
            type(peer).buffer_updated(peer, count)

        peer.connection_made, peer.connection_lost = connection_made, connection_lost
        peer.data_received, peer.buffer_updated = functools.partial(self._read, link, 0), buffer_updated
        self.links.append(link)
        return peer

    def _read(self, link: Any, by: int, data: bytes) -> None:
        for body in link.readers[by].feed(data):
            if link.openings[by]:
                said: Any = wire.decode_opening(body, link.openings[by].pop(0))
                if isinstance(said, wire.Hello | wire.Greeting):
                    continue  # they are sent each time
                more = f" {said.session} {said.revision}" if isinstance(said, wire.Welcome) else ""
                told = f"{type(said).__name__}{more}"
            else:
                told = text(wire.decode_server_frame(body) if by else wire.decode_request(body))
            self.note(f"{link.number}{'<>'[1 - by]} {told}")

    def _answer(self, link: Any, data: bytes) -> None:
        if self.silent or link.silent:
            link.kept.append(bytes(data))
        else:
            with contextlib.suppress(store.StoreError):
                self._read(link, 1, bytes(data))
            link.write(data)

    async def _put(self, key: str, value: bytes) -> None:
        _, peer = await self.network.dial("side", Peer, source="side")
        await peer.until(lambda: peer.connection.welcomed)
        await peer.answer(*peer.ask(messages.Put(key, value)))
        peer.transport.abort()

    def put(self, key: str, value: bytes) -> None:
        """Write an entry as another client."""
        (self.wait if asyncio._get_running_loop() is None else self.start)(self._put(key, value))

    async def raise_later(self, error: Exception) -> None:
        """Raise an error, as a dial does."""
        raise error

    def release(self) -> None:
        """Let the server say what it has kept back."""
        self.silent = False
        for link in self.links:
            kept, link.kept, link.silent = link.kept, [], False
            for data in kept:
                self._answer(link, data)

    def say(self, *data: bytes, link: int = 0) -> None:
        """Say something in the server's place, on the last connection or another one."""
        to = self.links[link - 1]
        with mock.patch.object(self, "silent", False), mock.patch.object(to, "silent", False):
            for each in data:
                self._answer(to, each)

    def connect(self, **options: Any) -> None:
        """Start an awaited client."""
        self._listen(client.Client(self._dial, name="store", rng=random.Random(1), process=b"p" * 16, **options))
        self.start(self.client.__aenter__())

    def _listen(self, made: Any) -> None:
        self.client = self.names["client"] = made
        if isinstance(made, client.Client):
            made.on_connection_change(lambda up: self.note("connected" if up else "disconnected"))
        made.cuts.listeners[lambda at: self.note(f"cut at {at - START:.3f}")] = None

    async def _dial(self, factory: Callable[[], Any]) -> Any:
        self.note("dials")
        return await self.network.dial("store", factory, source="client")

    def call(self, request: Any, timeout: float | None = None) -> None:
        """Start a call."""
        self.start(self.client.call(request, timeout=timeout))

    def watch(self, prefix: str, *, pause: float = 0.0, **options: Any) -> None:
        """Watch, with a pause after each batch."""
        self.start(self._watch(prefix, pause, options))

    async def _watch(self, prefix: str, pause: float, options: dict[str, Any]) -> None:
        async with self.client.watch(prefix, **options) as watch:
            self.note(f"watches {prefix}")
            async for batch in watch.batches():
                self.note(f"{prefix} has {text(batch)}")
                await asyncio.sleep(pause)


class BlockingScene(Scene):
    """The same with a blocking client, whose waits let the loop run."""

    def patched(self) -> dict[str, Any]:
        """Return what is replaced: also all that blocks."""
        clock = SimpleNamespace(monotonic=self.loop.time, sleep=self.wait)
        blocks = {
            "time": clock,
            "os": SimpleNamespace(write=Sock.write),
            "socket": SimpleNamespace(socket=Sock, SHUT_RDWR=2),
            "connect_blocking": self.dial,
            "set_tcp_options": lambda sock: sock.prepared.append("options"),
            "close_in_children": lambda _, sock: sock.prepared.append("closed in children"),
            "unacknowledged": lambda _: self.line,
            "_has_peer_closed": lambda sock: sock.over,
        }
        others = {
            "store.client.blocking.time": clock,
            "store.net.sockets.CALLED": {"store", "tests", "rdzv", "asyncio"},
        }
        return {**super().patched(), **others, **{f"store.client.channel.{name}": new for name, new in blocks.items()}}

    def connect(self, **options: Any) -> None:
        """Make a blocking client."""
        address = Address(host="127.0.0.1", port=1)
        self._listen(blocking.Client(address, rng=random.Random(1), **options))

    def call(self, request: Any, timeout: float | None = None) -> None:
        """Make a call."""
        self.do(functools.partial(self.client.call, request, timeout=timeout))

    def do(self, function: Callable[[], Any]) -> None:
        """Call a function, and write its result or its error."""
        try:
            self.note(f"returns {text(function())}")
        except BaseException as error:  # noqa: BLE001 - it is recorded
            self.note(f"raises {text(error)}")

    def batches(self, watch: Any) -> None:
        """Read a batch of a watch."""
        self.do(lambda: next(watch.batches(), None))

    def dial(self, _: object, until: float, check: Callable[[], None]) -> Any:
        """Connect, as `connect_blocking` does."""
        check()
        dialing = self._dial(functools.partial(Sock, self))
        self.sock: Any = self.wait(asyncio.wait_for(dialing, max(until - self.loop.time(), 0.001)))[1]
        return self.sock

    def signal(self, error: BaseException) -> None:
        """Let a signal's handler raise an error in the blocked read."""
        self.sock.signal = error
        self.sock.changed.set()


class Sock(asyncio.Protocol):
    """A blocking socket over a connection in memory."""

    def __init__(self, scene: BlockingScene) -> None:
        self.scene, self.timeout, self.data, self.over, self.changed = scene, 0.0, b"", False, asyncio.Event()
        self.error: BaseException | None = None
        self.signal: BaseException | None = None
        self.prepared, self.blocks = list[str](), 0

    def connection_made(self, transport: Any) -> None:
        """Take the transport."""
        self.transport, self.close, self.fileno = transport, transport.close, lambda: self
        self.settimeout, self.gettimeout = functools.partial(setattr, self, "timeout"), lambda: self.timeout

    def data_received(self, data: bytes) -> None:
        """Keep what has come."""
        self.data += data
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end."""
        self.over, self.error = True, error and ConnectionResetError(errno.ECONNRESET, "reset")
        self.changed.set()

    def shutdown(self, _: int = 2) -> None:
        """End reading."""
        self.connection_lost(None)

    async def _wait(self, is_ready: Callable[[], object]) -> None:
        async with asyncio.timeout(self.timeout):
            while not (self.signal or self.over or is_ready()):
                self.changed.clear()
                await self.changed.wait()

    def _block(self, is_ready: Callable[[], object]) -> None:
        assert len(self.prepared) == 2
        self.blocks += 1
        self.scene.wait(self._wait(is_ready))
        if self.signal is not None:
            self.signal, error = None, self.signal
            exec("raise error", {"__name__": "handler", "error": error})
        if self.error is not None:
            raise self.error

    def recv(self, most: int) -> bytes:
        """Return what has come."""
        self._block(lambda: self.data)
        data, self.data = self.data[:most], self.data[most:]
        return data

    def send(self, data: memoryview) -> int:
        """Send some of it."""
        if self.transport.is_closing():
            raise BrokenPipeError
        if self.transport.get_write_buffer_size():
            self._block(lambda: not self.transport.get_write_buffer_size())
        self.transport.write(bytes(data[:2000]))
        return min(len(data), 2000)

    def write(self, data: memoryview) -> int:
        """Send some of it at once."""
        assert self.scene.client.shared.tls is None, "what is written is not encrypted"
        if self.transport.get_write_buffer_size():
            raise BlockingIOError
        return self.send(data)

    sendall = send


def play(kind: type[Scene], table: str) -> Iterator[str]:
    """Yield the lines of a table's scenes, each with a loop, a server and a client of its own."""
    for rows in TABLES[table].split("\n\n"):
        lines: list[str] = []
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, contextlib.ExitStack() as stack:
            scene: Any = kind(runner.get_loop(), lines)  # type: ignore[arg-type]
            for name, new in {**SMALL, **scene.patched()}.items():
                stack.enter_context(mock.patch(name, new))
            stack.enter_context(logged(scene.log))
            for row in rows.split("\n")[1:]:
                scene.run(row)
            scene.wait(0)
            told = [*lines]  # tasks that are left are cancelled in any order
        yield rows.partition("\n")[0]
        for what, same in itertools.groupby(told, lambda line: re.sub(r"^  [\d.]+ ", "", line)):
            first, *more = same
            yield first
            if more:
                others = f" ({len(more)} more, {zlib.crc32(' '.join(more).encode()):08x})" if what != first else ""
                yield f"{more[-1]}{others}"


RECORDINGS: dict[str, Callable[[], Iterator[str]]] = {
    "awaited": lambda: play(Scene, "awaited"),
    "blocking": lambda: play(BlockingScene, "blocking"),
    "waits": lambda: evaluated(TABLES["waits"], dict(NAMES)),
}
