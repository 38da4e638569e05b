"""The network in memory behaves like sockets: ordered, flow-controlled, and with every way to break."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from rdzv.testing.links import MemoryTransport
from tests.support.faults import FaultyNetwork, Way

pytestmark = pytest.mark.virtual_time


class Recorder(asyncio.Protocol):
    """Records the calls that it gets, in order, and the bytes apart from them."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.pieces: list[bytes] = []
        self.heard_at: list[float] = []
        self.stays_at_the_end = False
        self.transport: MemoryTransport

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, MemoryTransport)
        self.transport = transport
        self.heard.append("made")

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.heard_at.append(asyncio.get_running_loop().time())

    def eof_received(self) -> bool:
        self.heard.append("end")
        return self.stays_at_the_end

    def pause_writing(self) -> None:
        self.heard.append("paused")

    def resume_writing(self) -> None:
        self.heard.append("resumed")

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(type(exc) if exc else "lost")


class BufferedRecorder(asyncio.BufferedProtocol):
    """Accepts at most three bytes at a time."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._buffer = bytearray(3)

    def get_buffer(self, sizehint: int) -> bytearray:
        assert sizehint == -1
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.pieces.append(bytes(self._buffer[:nbytes]))


class Pair:
    """A listening recorder, and one that has connected to it."""

    def __init__(self, network: FaultyNetwork) -> None:
        self.network = network
        self.servers: list[Recorder] = []
        self.listener = network.listen("store", self._answer)
        self.client: Recorder

    def _answer(self) -> Recorder:
        self.servers.append(Recorder())
        return self.servers[-1]

    async def dial(self, source: str = "client") -> Recorder:
        _, self.client = await self.network.dial("store", Recorder, source=source)
        return self.client

    @property
    def server(self) -> Recorder:
        return self.servers[-1]


async def settle() -> None:
    """Let all data under way arrive. On virtual time a minute costs nothing."""
    await asyncio.sleep(60)


@pytest.fixture
def network() -> FaultyNetwork:
    return FaultyNetwork(latency=0.5)


@pytest.fixture
async def pair(network: FaultyNetwork) -> Pair:
    pair = Pair(network)
    await pair.dial()
    return pair


async def test_dialing_takes_a_round_trip_and_introduces_both_ends(network: FaultyNetwork) -> None:
    began = asyncio.get_running_loop().time()
    pair = Pair(network)
    await pair.dial(source="node-3")

    assert asyncio.get_running_loop().time() - began == 1.0
    assert pair.client.heard == pair.server.heard == ["made"]
    assert pair.client.transport.get_extra_info("peername") == ("store", 0)
    assert pair.client.transport.get_extra_info("sockname") == ("node-3", 1)
    assert pair.server.transport.get_extra_info("peername") == ("node-3", 1)
    assert [link.name for link in network.links("node-3")] == ["node-3>store#1"]


async def test_bytes_arrive_in_order_a_latency_later(pair: Pair) -> None:
    began = asyncio.get_running_loop().time()
    pair.client.transport.write(b"one ")
    pair.client.transport.writelines([b"two ", bytearray(b"three")])
    assert pair.server.data == b""
    await settle()

    assert pair.server.data == b"one two three"
    assert pair.server.heard_at == [began + 0.5, began + 0.5]


async def test_random_latencies_overtake_nothing_and_shredding_loses_nothing() -> None:
    pair = Pair(FaultyNetwork(latency=(0.0, 2.0), rng=random.Random(7), shred=True))
    await pair.dial()
    sent = bytes(range(256)) * 4
    for start in range(0, len(sent), 64):
        pair.client.transport.write(sent[start : start + 64])
    await settle()

    assert pair.server.data == sent
    assert len(pair.server.pieces) > len(sent) / 64


async def test_a_buffered_protocol_gets_pieces_that_fit_its_buffer(network: FaultyNetwork) -> None:
    server = BufferedRecorder()
    network.listen("store", lambda: server)
    transport, _ = await network.dial("store", Recorder)
    transport.write(b"12345678")
    await settle()

    assert server.pieces == [b"123", b"456", b"78"]


async def test_a_peer_that_pauses_reading_pauses_the_writer_until_it_reads_again() -> None:
    pair = Pair(FaultyNetwork(socket_buffer_bytes=10))
    await pair.dial()
    pair.client.transport.set_write_buffer_limits(high=20, low=5)
    pair.server.transport.pause_reading()

    pair.client.transport.write(bytes(30))
    assert pair.client.heard == ["made"]
    pair.client.transport.write(b"!")
    assert pair.client.heard == ["made", "paused"]
    assert pair.client.transport.get_write_buffer_size() == 21
    await settle()
    assert pair.server.data == b""

    pair.server.transport.resume_reading()
    await settle()
    assert pair.client.heard == ["made", "paused", "resumed"]
    assert pair.server.data == bytes(30) + b"!"


async def test_closing_flushes_and_then_ends_both_sides_without_an_error(pair: Pair) -> None:
    pair.client.transport.write(b"last words")
    pair.client.transport.close()
    assert pair.client.transport.is_closing()
    pair.client.transport.write(b"too late")
    await settle()

    assert pair.server.data == b"last words"
    assert pair.server.heard == ["made", "end", "lost"]
    assert pair.client.heard == ["made", "lost"]
    assert pair.network.links() == []


async def test_closing_waits_for_a_peer_that_does_not_read() -> None:
    pair = Pair(FaultyNetwork(socket_buffer_bytes=0))
    await pair.dial()
    pair.server.transport.pause_reading()
    pair.client.transport.write(b"unread")
    pair.client.transport.close()
    await settle()
    assert pair.client.heard == ["made"]

    pair.server.transport.resume_reading()
    await settle()
    assert pair.client.heard == ["made", "lost"]
    assert pair.server.data == b"unread"


async def test_aborting_loses_the_data_under_way_and_resets_the_peer(pair: Pair) -> None:
    pair.client.transport.write(b"never arrives")
    pair.client.transport.abort()
    await settle()

    assert pair.client.heard == ["made", "lost"]
    assert pair.server.heard == ["made", ConnectionResetError]
    assert pair.server.data == b""


async def test_writing_to_a_peer_that_is_gone_is_answered_by_a_reset(pair: Pair) -> None:
    pair.server.stays_at_the_end = True
    pair.client.transport.close()
    await settle()
    pair.server.transport.write(b"are you there?")
    await settle()

    assert pair.server.heard == ["made", "end", ConnectionResetError]
    assert pair.client.data == b""


async def test_a_stream_ended_one_way_still_flows_the_other(pair: Pair) -> None:
    pair.server.stays_at_the_end = True
    pair.client.transport.write_eof()
    await settle()
    pair.server.transport.write(b"answer")
    await settle()

    assert pair.client.data == b"answer"
    with pytest.raises(RuntimeError, match="after write_eof"):
        pair.client.transport.write(b"more")


async def test_cutting_a_link_ends_both_ends_and_loses_the_data_under_way(pair: Pair) -> None:
    pair.client.transport.write(b"lost")
    (link,) = pair.network.links()
    pair.network.cut(link.name)
    await settle()

    assert pair.client.heard == pair.server.heard == ["made", "lost"]
    assert pair.server.data == b""


async def test_resetting_picks_links_by_the_name_of_their_dialer(network: FaultyNetwork) -> None:
    pair = Pair(network)
    first = await pair.dial(source="node-1")
    second = await pair.dial(source="node-2")
    network.reset("node-1")
    await settle()

    assert first.heard == ["made", ConnectionResetError]
    assert second.heard == ["made"]
    assert [link.client for link in network.links()] == [second.transport]


async def test_a_partition_holds_bytes_and_closings_until_it_heals(pair: Pair) -> None:
    pair.network.partition("client")
    pair.client.transport.write(b"held")
    pair.client.transport.close()
    await settle()
    assert pair.server.heard == ["made"]
    assert pair.server.data == b""

    pair.network.heal()
    await settle()
    assert pair.server.data == b"held"
    assert pair.server.heard == ["made", "end", "lost"]


async def test_a_partition_may_hold_one_way_only(pair: Pair) -> None:
    pair.network.partition("client", way=Way.UPWARD)
    pair.client.transport.write(b"held")
    pair.server.transport.write(b"through")
    await settle()
    assert (pair.server.data, pair.client.data) == (b"", b"through")

    pair.network.partition("client", way=Way.DOWNWARD)
    pair.server.transport.write(b"held, too")
    await settle()
    assert (pair.server.data, pair.client.data) == (b"held", b"through")


async def test_bytes_already_under_way_are_held_by_a_partition_too(pair: Pair) -> None:
    pair.client.transport.write(b"under way")
    await asyncio.sleep(0.25)
    pair.network.partition()
    await settle()
    assert pair.server.data == b""

    pair.network.heal()
    await settle()
    assert pair.server.data == b"under way"


async def test_dialing_through_a_partition_waits_until_it_heals(network: FaultyNetwork) -> None:
    pair = Pair(network)
    network.partition("node-1")
    await pair.dial(source="node-2")
    dialing = asyncio.create_task(pair.dial(source="node-1"))
    await settle()
    assert not dialing.done()

    network.heal("node-1")
    assert (await dialing).heard == ["made"]


async def test_a_dial_given_up_half_way_resets_the_server_that_answered(network: FaultyNetwork) -> None:
    pair = Pair(network)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.75):
            await pair.dial()
    await settle()

    assert pair.server.heard == ["made", ConnectionResetError]


async def test_a_link_cut_before_it_is_made_fails_the_dial(network: FaultyNetwork) -> None:
    dialing = asyncio.create_task(Pair(network).dial())
    await asyncio.sleep(0.75)
    network.cut("store")

    with pytest.raises(ConnectionResetError):
        await dialing


@pytest.mark.parametrize("refused", ["store", "node-1"])
async def test_refused_dials_fail_until_accepted_again(network: FaultyNetwork, refused: str) -> None:
    pair = Pair(network)
    network.refuse(refused)
    with pytest.raises(ConnectionRefusedError):
        await pair.dial(source="node-1")

    network.stop_refusing(refused)
    assert (await pair.dial(source="node-1")).heard == ["made"]


async def test_a_closed_listener_refuses_dials_and_leaves_its_links(pair: Pair) -> None:
    first = pair.client
    with contextlib.closing(pair.listener):
        pass
    with pytest.raises(ConnectionRefusedError):
        await pair.dial()

    pair.server.transport.write(b"still here")
    await settle()
    assert first.data == b"still here"


async def test_a_second_listener_of_a_name_is_an_error(pair: Pair) -> None:
    with pytest.raises(OSError, match="already listened on"):
        pair.network.listen("store", Recorder)


async def test_a_server_that_aborts_at_once_is_seen_as_a_reset(network: FaultyNetwork) -> None:
    class Unfriendly(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    network.listen("store", Unfriendly)
    _, client = await network.dial("store", Recorder)
    await settle()

    assert client.heard == ["made", ConnectionResetError]


async def test_bytes_sent_before_the_dialer_is_ready_wait_for_it(network: FaultyNetwork) -> None:
    class Greeter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")

    network.listen("store", Greeter)
    _, client = await network.dial("store", Recorder)
    await settle()

    assert client.heard == ["made"]
    assert client.data == b"hello"


async def test_a_protocol_that_fails_to_receive_loses_its_connection_and_is_reported(pair: Pair) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))

    def fail(_: bytes) -> None:
        raise ValueError("not the protocol")

    pair.server.data_received = fail  # type: ignore[method-assign, assignment]
    pair.client.transport.write(b"garbage")
    await settle()

    assert pair.server.heard == ["made", ValueError]
    assert pair.client.heard == ["made", ConnectionResetError]
    assert [report["message"] for report in reports] == ["a protocol failed to receive"]
