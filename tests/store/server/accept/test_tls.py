"""A connection to a port with TLS is accepted or gets the reason for its refusal, and does not wait long."""

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

import store
from store.errors import ConnectionLost
from store.limits import Limits
from store.server.accept.tls import TLS_BYTES
from store.server.peer import PEER_BYTES
from tests.support.processes import require

pytestmark = pytest.mark.some_here(3)

KIB = 1024


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context, and a client's that trusts it."""
    require("trustme")
    import trustme

    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


@contextlib.asynccontextmanager
async def standing(port: int, said: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """Open a connection, and send these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def all_of(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 5.0)
    return b""


@pytest.mark.parametrize(
    ("said", "logged", "told"),
    [
        (b"", "it sends nothing: a client without TLS waits for the server to begin", b"this port speaks TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "its first bytes are not TLS", b"this port speaks TLS"),
        (b"\x16", "no handshake within 0.4 s", b""),
        (b"\x16\x03\x01\x02\x00\x01\x00", "no handshake within 0.4 s", b""),
        (b"\x16" * 100, "WRONG_VERSION_NUMBER", b""),
    ],
    ids=["nothing", "HTTP", "one byte of TLS", "a bit of TLS", "something like TLS"],
)
async def test_a_connection_without_a_handshake_is_refused_with_one_line(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    said: bytes,
    logged: str,
    told: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with store.serve(tls=contexts[0], limits=Limits(handshake_timeout=0.4)) as server:
        async with standing(server.port, said) as reader:
            assert told in await all_of(reader)
        (record,) = caplog.records
        assert "127.0.0.1:" in record.getMessage()
        assert logged in record.getMessage()
        assert server.figures()["connections_refused"] == 1


@pytest.fixture
def open_files() -> Iterator[None]:
    """Assert that no file is left open."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 2, "a loop has some of its own"


@pytest.mark.usefixtures("open_files")
async def test_a_leaving_server_closes_connections_without_a_handshake(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    loop = asyncio.get_running_loop()
    readers: list[asyncio.StreamReader] = []
    async with contextlib.AsyncExitStack() as stack:
        async with store.serve(tls=contexts[0], limits=Limits(handshake_timeout=60.0)) as server:
            readers += [
                await stack.enter_async_context(standing(server.port, said)) for said in (b"", b"\x16", b"\x16\x03\x01")
            ]
            async with store.connect(server.url, tls=contexts[1]) as client:
                await client.ping()
            left_at = loop.time()
        assert loop.time() - left_at < 30.0
        for reader in readers:
            assert await all_of(reader) == b""


async def test_a_cancelled_server_still_says_goodbye_with_a_pending_handshake(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        serving: asyncio.Future[store.Server] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with store.serve(tls=contexts[0]) as server:
                serving.set_result(server)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            server = await serving
            await stack.enter_async_context(standing(server.port, b"\x16"))
            client = await stack.enter_async_context(store.connect(server.url, tls=contexts[1]))
            lost = asyncio.Event()
            client.on_connection_change(lambda _: lost.set())
            tasks.cancel_scope.cancel()
        await lost.wait()
        assert client.last_problem == "the server is leaving"


async def test_a_pending_handshake_counts_as_a_connection_until_its_timeout(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    tls, client_tls = contexts
    limits = Limits(connections_max=3, handshake_timeout=1.0)
    async with store.serve(tls=tls, limits=limits) as server, contextlib.AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(standing(server.port, b"\x16")) for _ in range(3)]
        with pytest.raises(ConnectionLost):
            async with store.connect(server.url, tls=client_tls, timeout=0.3):
                raise AssertionError("it was let in")
        assert server.figures()["connections_refused"] > 0
        for reader in readers:
            await all_of(reader)
        async with store.connect(server.url, tls=client_tls) as client:
            await client.ping()


@pytest.mark.parametrize("said", [b"\x16\x03\x01", b"a hello", b"GET / HTTP/1.1\r\n\r\n"], ids=["a bit", "all", "none"])
async def test_the_memory_of_a_stranger_is_freed_as_soon_as_it_has_gone(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], said: bytes
) -> None:
    """Each connection that sent three bytes and hung up left 300 KiB behind, until Python's collector ran."""
    if said == b"a hello":
        said = client_hello(contexts[1])
    async with store.serve(tls=contexts[0]) as server:
        for _ in range(10):
            await come_and_go(server.port, said)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(100):
                await come_and_go(server.port, said)
            while server.figures()["strangers"]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            assert tracemalloc.get_traced_memory()[0] < 100 * 8 * KIB
            assert [one for one in gc.get_objects() if issubclass(type(one), ssl.SSLObject)] == [], (
                "and what OpenSSL holds"
            )
        finally:
            tracemalloc.stop()
            gc.enable()


def client_hello(tls: ssl.SSLContext) -> bytes:
    """Return the first record of a client."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), said, server_hostname="127.0.0.1").do_handshake()
    return said.read()


async def come_and_go(port: int, said: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, said)
        await asyncio.sleep(0.005)


async def test_an_idle_connection_takes_little_and_is_counted(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Regression: it took 286 KiB, which did not count."""
    async with store.serve(tls=contexts[0]) as server, contextlib.AsyncExitStack() as stack:
        before = server.figures()["memory_bytes"]
        for _ in range(10):
            await stack.enter_async_context(store.connect(server.url, tls=contexts[1]))
        figures = server.figures()
        assert figures["connection_bytes"] == 10 * (PEER_BYTES + TLS_BYTES)
        assert figures["memory_bytes"] - before >= figures["connection_bytes"]
    assert server.figures()["connection_bytes"] == 0


async def test_many_requests_at_once_over_tls_are_answered_in_order_and_large_values_pass(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """Some of the data that arrives together is decrypted later, while its peer waits for its turn."""
    async with store.serve(tls=contexts[0]) as server, store.connect(server.url, tls=contexts[1]) as client:
        value = os.urandom(3_000_000)
        answers = await asyncio.gather(
            *(client.add("count", 1) for _ in range(3000)), client.put("large", value), client.add("count", 1)
        )
        assert answers[:3000] == list(range(1, 3001))
        entries = await asyncio.gather(*(client.get("large") for _ in range(20)))
        assert all(entry is not None and entry.value == value for entry in entries)
