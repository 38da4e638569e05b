"""Whoever stands before a port with TLS is let in, or told why not, and does not stand there for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from typing import TYPE_CHECKING

import anyio
import pytest

import store
from store.errors import ConnectionLost
from store.limits import Limits
from tests.support.processes import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's, and a client's that trusts it."""
    require("trustme")
    import trustme

    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


@contextlib.asynccontextmanager
async def standing(port: int, said: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """Somebody who has connected, and says this."""
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
        (b"", "it says nothing, as a client does that speaks no TLS", b"this port speaks TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "what it says is not TLS", b"this port speaks TLS"),
        (b"\x16", "no handshake within 0.4 s", b""),
        (b"\x16\x03\x01\x02\x00\x01\x00", "no handshake within 0.4 s", b""),
        (b"\x16" * 100, "WRONG_VERSION_NUMBER", b""),
    ],
    ids=["nothing", "HTTP", "one byte of TLS", "a bit of TLS", "something like TLS"],
)
async def test_who_brings_no_handshake_is_turned_away_with_one_line(
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


async def test_who_comes_and_goes_again_has_said_nothing_wrong(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    tls, client_tls = contexts
    async with store.serve(tls=tls) as server:
        for _ in range(50):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        async with store.connect(server.url, tls=client_tls) as client:
            assert await client.put("a", b"") == 1
    assert caplog.records == []


@pytest.fixture
def open_files() -> Iterator[None]:
    """No file is left open."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 2, "a loop has some of its own"


@pytest.mark.usefixtures("open_files")
async def test_a_server_that_leaves_sends_away_who_still_stands_there(
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


async def test_a_server_that_is_cancelled_still_says_goodbye_though_somebody_stands_there(
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
            client.on_connection(lambda _: lost.set())
            tasks.cancel_scope.cancel()
        await lost.wait()
        assert client.last_problem == "the server is leaving"


async def test_who_stands_there_counts_as_a_connection_and_no_longer_than_a_handshake_may_take(
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
