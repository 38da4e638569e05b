"""Stores and clients on the in-memory network, for tests on virtual time; and peers without manners.

network = MemoryNetwork()
async with serve_in_memory(network) as server, connect_in_memory(network) as client:
    await client.put("key", b"value")
    network.partition("client")
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import store
from rdzv.testing.machines import process_identity_of
from rdzv.testing.network import MemoryNetwork
from store import Client, Event, Limits, Server, Watch
from store.engine.engine import Engine
from store.messages import Request, Response
from store.protocol.connection import ClientConnection
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome

__all__ = [
    "MemoryNetwork",
    "Peer",
    "connect_blocking",
    "connect_in_memory",
    "introduce",
    "process_identity_of",
    "serve_in_memory",
    "taken",
    "until",
]

Said = Welcome | Reply | Events | Lagged | Bye


@contextlib.asynccontextmanager
async def serve_in_memory(
    network: MemoryNetwork,
    *,
    name: str = "store",
    limits: Limits | None = None,
    token: bytes | None = None,
    engine: Engine | None = None,
) -> AsyncIterator[Server]:
    """Serve a store under a name of the network, as `store.serve` does on a port."""
    engine = engine or Engine(store_id=secrets.token_hex(8), limits=limits)
    clock = asyncio.get_running_loop().time
    # In virtual time no turn is too long then, however busy the machine is.
    server = Server(engine, token=token, clock=clock, stopwatch=clock)
    server.start()
    try:
        with contextlib.closing(network.listen(name, server.protocol)):
            yield server
    finally:
        await server.shut_down()


def connect_in_memory(
    network: MemoryNetwork,
    *,
    name: str = "store",
    source: str = "client",
    token: bytes | None = None,
    timeout: float = 30.0,
) -> Client:
    """A client of a store on the network, to be entered with `async with`."""

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await network.dial(name, factory, source=source)

    return Client(
        dial, name=name, token=token, timeout=timeout, rng=random.Random(source), process=process_identity_of(source)
    )


@contextlib.asynccontextmanager
async def connect_blocking(url: str) -> AsyncIterator[store.sync.Client]:
    """A blocking client, connected and closed without blocking the loop."""
    with contextlib.ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, store.sync.connect(url))
        await asyncio.to_thread(stack.close)


async def taken(watch: Watch, count: int) -> list[Event]:
    """The next events."""
    events: list[Event] = []
    batches = watch.batches()
    while len(events) < count:
        events += await anext(batches)
    assert len(events) == count
    return events


async def until(condition: Callable[[], bool]) -> None:
    """Let the server, which runs on this loop, go on until something is true of it."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


class Peer(asyncio.Protocol):
    """A client that speaks the protocol by hand: it sends without waiting, and reads only when the test says so.

    Attributes:
        said: The messages of the server, in order.
        problem: The error of a message that made no sense, or the server's refusal.
        transport: Its end of the connection.
    """

    def __init__(
        self, *, session_id: bytes | None = None, process: bytes = b"", token: bytes | None = None, hello: bool = True
    ) -> None:
        self.connection = ClientConnection(
            session_id=session_id or secrets.token_bytes(16), process=process, token=token, name="the store"
        )
        self.connection.start_connection(nonce=secrets.token_bytes(16))
        self.said: list[Said] = []
        self.problem: Exception | None = None
        self.transport: asyncio.Transport
        self.lost = asyncio.Event()
        self._hello = hello
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            for item in self.connection.receive(data):
                if not isinstance(item, bytes):
                    self.said.append(item)
                elif self._hello:
                    self.transport.write(item)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.problem = error
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Called by the loop."""
        self.lost.set()
        self._notify()

    def ask(self, *requests: Request[Any]) -> list[int]:
        """Ask all of it in one write; gives the ids."""
        items = [self.connection.register_request(request, None) for request in requests]
        self.transport.write(b"".join(map(self.connection.encode, items)))
        return [item.request_id for item in items]

    async def answer(self, request_id: int) -> Response:
        """Wait for the answer to one request."""
        await self.until(lambda: request_id in [reply.request_id for reply in self.replies()])
        return next(reply.response for reply in self.replies() if reply.request_id == request_id)

    def replies(self) -> list[Reply]:
        """The answers so far."""
        return [item for item in self.said if isinstance(item, Reply)]

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the received messages meet a condition; return the condition's result."""
        while not (result := condition()):
            assert not self.lost.is_set(), f"the connection was lost; {self.problem!r}"
            await self._changed.wait()
        return result

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def introduce(network: MemoryNetwork, *, name: str = "store", source: str = "peer", **options: Any) -> Peer:
    """A peer on the network that has been welcomed."""
    _, peer = await network.dial(name, lambda: Peer(**options), source=source)
    await peer.until(lambda: peer.connection.welcomed)
    return peer
