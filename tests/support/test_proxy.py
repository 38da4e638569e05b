"""The proxy carries bytes between real sockets, and breaks the connection the way it says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pair:
    """A proxy, and the ends of the connections through it; the tests play both."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Streams] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []
        self.proxy: Proxy

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.accepted.put_nowait((reader, writer))

    async def dial_alone(self) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        self.writers.append(streams[1])
        return streams

    async def dial(self) -> tuple[Streams, Streams]:
        """A connection through the proxy: the client's end, and the target's."""
        return await self.dial_alone(), await asyncio.wait_for(self.accepted.get(), 10)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    server = await asyncio.start_server(pair.take, "127.0.0.1", 0)
    async with Proxy("127.0.0.1", server.sockets[0].getsockname()[1]) as pair.proxy:
        yield pair
    server.close()
    for writer in pair.writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # sockets close a turn of the loop after `abort`


async def are_reset(*ends: Any) -> None:
    for reader, _ in ends:
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_bytes_pass_both_ways_and_are_counted_and_an_end_is_passed_on(pair: Pair) -> None:
    (reader, writer), (target_reader, target_writer) = await pair.dial()
    size = 8 << 20  # more than any buffer holds
    writer.write(bytes(size))
    writer.write_eof()
    assert len(await target_reader.read()) == size
    target_writer.write(b"answer")
    target_writer.close()
    assert await reader.read() == b"answer"
    proxy = pair.proxy
    await proxy.until(lambda: proxy.open_connections == 0)
    assert (proxy.connections, proxy.bytes_to_target, proxy.bytes_from_target) == (1, size, 6)


async def test_a_cut_resets_both_ends_also_in_the_middle_of_the_dial(pair: Pair) -> None:
    ends = await pair.dial()
    alone = await pair.dial_alone()
    # The kernel answers for the target, so it has the connection before the proxy has heard that it is made.
    other = await pair.accepted.get()
    pair.proxy.cut()
    await are_reset(*ends, alone, other)
    await pair.proxy.until(lambda: pair.proxy.open_connections == 0)


async def test_closing_all_ends_both_streams_without_an_error(pair: Pair) -> None:
    (reader, _), (target_reader, _) = await pair.dial()
    pair.proxy.close_all()
    assert await reader.read() == await target_reader.read() == b""


async def test_a_black_hole_holds_bytes_and_new_connections_until_it_heals(pair: Pair) -> None:
    (reader, writer), (target_reader, target_writer) = await pair.dial()
    proxy = pair.proxy
    proxy.black_hole()
    writer.write(b"question")
    writer.write_eof()
    target_writer.write(b"answer")
    # A connection made since is one the proxy has surely turned to after those bytes; it hangs as well.
    await pair.dial_alone()
    await proxy.until(lambda: proxy.connections == 2)
    assert (proxy.bytes_to_target, proxy.bytes_from_target) == (0, 0)
    proxy.heal()
    assert await target_reader.read() == b"question"
    assert await reader.readexactly(6) == b"answer"


async def test_the_cut_comes_after_exactly_so_many_bytes(pair: Pair) -> None:
    (reader, writer), (target_reader, target_writer) = await pair.dial()
    pair.proxy.cut_after(5)
    writer.write(b"123")
    assert await target_reader.readexactly(3) == b"123"
    writer.write(b"456789")
    assert await target_reader.readexactly(2) == b"45"
    await are_reset((target_reader, target_writer), (reader, writer))
    assert pair.proxy.bytes_to_target == 5


async def test_the_delay_is_a_latency(pair: Pair) -> None:
    pair.proxy.delay = 0.05
    (_, writer), (target_reader, _) = await pair.dial()
    began = asyncio.get_running_loop().time()
    writer.write(b"late")
    assert await target_reader.readexactly(4) == b"late"
    assert asyncio.get_running_loop().time() - began >= 0.05


async def test_refused_connections_fail_until_accepted_and_old_ones_live_on(pair: Pair) -> None:
    (_, writer), (target_reader, _) = await pair.dial()
    await pair.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await pair.dial_alone()
    writer.write(b"old")
    assert await target_reader.readexactly(3) == b"old"
    await pair.proxy.accept()
    await pair.dial()


async def test_a_target_that_refuses_resets_the_client(pair: Pair) -> None:
    async with Proxy("127.0.0.1", pair.proxy.port) as outer:
        await pair.proxy.refuse()
        reader, writer = await asyncio.open_connection("127.0.0.1", outer.port)
        pair.writers.append(writer)
        await are_reset((reader, writer))
