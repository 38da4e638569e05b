"""The proxy carries bytes between real sockets, and breaks the connection the way it says."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.proxy import RESET_ON_CLOSE, Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """A server that only collects its connections; the tests play both ends."""

    def __init__(self) -> None:
        self.port: int
        self._accepted: asyncio.Queue[Streams] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._accepted.put_nowait((reader, writer))

    async def accepted(self) -> Streams:
        return await asyncio.wait_for(self._accepted.get(), 10)

    async def dial(self, proxy: Proxy) -> tuple[Streams, Streams]:
        """A connection through the proxy: the client's end and the target's."""
        client = await self.dial_alone(proxy)
        return client, await self.accepted()

    async def dial_alone(self, proxy: Proxy) -> Streams:
        client = await asyncio.open_connection("127.0.0.1", proxy.port)
        self._writers.append(client[1])
        return client

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    server = await target.start()
    yield target
    server.close()
    target.close()
    await asyncio.sleep(0)  # sockets close a turn of the loop after `abort`


@pytest.fixture
async def proxy(target: Target) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", target.port) as proxy:
        yield proxy


async def test_bytes_pass_both_ways_and_are_counted(target: Target, proxy: Proxy) -> None:
    (reader, writer), (target_reader, target_writer) = await target.dial(proxy)
    writer.write(b"question")
    assert await target_reader.readexactly(8) == b"question"
    target_writer.write(b"answer")
    assert await reader.readexactly(6) == b"answer"

    await proxy.until(lambda: proxy.bytes_from_target == 6)
    assert (proxy.connections, proxy.bytes_to_target) == (1, 8)


async def test_a_cut_resets_both_ends(target: Target, proxy: Proxy) -> None:
    (reader, _), (target_reader, _) = await target.dial(proxy)
    proxy.cut()

    with pytest.raises(ConnectionResetError):
        await reader.read()
    with pytest.raises(ConnectionResetError):
        await target_reader.read()
    await proxy.until(lambda: proxy.open_connections == 0)


async def test_a_cut_in_the_middle_of_the_dial_is_a_reset_too(target: Target, proxy: Proxy) -> None:
    reader, _ = await target.dial_alone(proxy)
    # The kernel answers for the target, so it has the connection before the proxy has heard that it is made.
    target_reader, _ = await target.accepted()
    proxy.cut()

    with pytest.raises(ConnectionResetError):
        await reader.read()
    with pytest.raises(ConnectionResetError):
        await target_reader.read()


async def test_closing_all_ends_both_streams_without_an_error(target: Target, proxy: Proxy) -> None:
    (reader, writer), (target_reader, target_writer) = await target.dial(proxy)
    proxy.close_all()

    assert await reader.read() == b""
    assert await target_reader.read() == b""
    writer.close()
    target_writer.close()
    await proxy.until(lambda: proxy.open_connections == 0)


async def test_an_end_is_passed_on_and_the_other_way_stays_open(target: Target, proxy: Proxy) -> None:
    (reader, writer), (target_reader, target_writer) = await target.dial(proxy)
    writer.write(b"all")
    writer.write_eof()
    assert await target_reader.read() == b"all"

    target_writer.write(b"still here")
    target_writer.close()
    assert await reader.read() == b"still here"
    await proxy.until(lambda: proxy.open_connections == 0)


async def test_a_reset_by_one_end_resets_the_other(target: Target, proxy: Proxy) -> None:
    (reader, _), (_, target_writer) = await target.dial(proxy)
    reset(target_writer)

    with pytest.raises(ConnectionResetError):
        await reader.read()


async def test_a_black_hole_holds_bytes_both_ways_until_it_heals(target: Target, proxy: Proxy) -> None:
    (reader, writer), (target_reader, target_writer) = await target.dial(proxy)
    proxy.black_hole()
    writer.write(b"question")
    target_writer.write(b"answer")
    writer.write_eof()
    # A connection made since is one the proxy has surely turned to after those bytes; it hangs as well.
    await target.dial_alone(proxy)
    await proxy.until(lambda: proxy.connections == 2)
    assert (proxy.bytes_to_target, proxy.bytes_from_target) == (0, 0)

    proxy.heal()
    assert await target_reader.read() == b"question"
    assert await reader.readexactly(6) == b"answer"
    await target.accepted()


async def test_a_reset_passes_a_black_hole_only_once_it_heals(target: Target, proxy: Proxy) -> None:
    (reader, _), (_, target_writer) = await target.dial(proxy)
    proxy.black_hole()
    reset(target_writer)
    await target.dial_alone(proxy)
    await proxy.until(lambda: proxy.connections == 2)
    assert proxy.open_connections == 2

    proxy.heal()
    with pytest.raises(ConnectionResetError):
        await reader.read()


async def test_the_cut_comes_after_exactly_so_many_bytes(target: Target, proxy: Proxy) -> None:
    (reader, writer), (target_reader, _) = await target.dial(proxy)
    proxy.cut_after(5)
    writer.write(b"123")
    assert await target_reader.readexactly(3) == b"123"
    writer.write(b"456789")

    assert await target_reader.readexactly(2) == b"45"
    with pytest.raises(ConnectionResetError):
        await target_reader.read()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    assert proxy.bytes_to_target == 5


async def test_the_delay_is_a_latency_and_does_not_add_up(target: Target) -> None:
    loop = asyncio.get_running_loop()
    async with Proxy("127.0.0.1", target.port, delay=0.05) as proxy:
        (_, writer), (target_reader, _) = await target.dial(proxy)
        began = loop.time()
        writer.write(b"late")
        assert await target_reader.readexactly(4) == b"late"
        assert loop.time() - began >= 0.05


async def test_refused_connections_fail_until_accepted_and_old_ones_live_on(target: Target, proxy: Proxy) -> None:
    (_, writer), (target_reader, _) = await target.dial(proxy)
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await target.dial_alone(proxy)
    writer.write(b"old")
    assert await target_reader.readexactly(3) == b"old"

    await proxy.accept()
    await target.dial(proxy)


async def test_a_target_that_refuses_resets_the_client(target: Target) -> None:
    async with Proxy("127.0.0.1", target.port) as inner, Proxy("127.0.0.1", inner.port) as proxy:
        await inner.refuse()
        reader, _ = await target.dial_alone(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_more_bytes_pass_than_any_buffer_holds(target: Target, proxy: Proxy) -> None:
    (_, writer), (target_reader, _) = await target.dial(proxy)
    size = 8 << 20
    writer.write(bytes(size))
    assert len(await target_reader.readexactly(size)) == size
    await proxy.until(lambda: proxy.bytes_to_target == size)


async def test_leaving_the_proxy_resets_what_is_open(target: Target) -> None:
    async with Proxy("127.0.0.1", target.port) as proxy:
        (reader, _), _ = await target.dial(proxy)
    with pytest.raises(ConnectionResetError):
        await reader.read()
