"""The server: accepting and refusing clients, hanging up, leaving, and its addresses."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store.engine.engine import Engine
from store.errors import LimitExceeded, ProtocolError, StoreUsageError
from store.messages import Count, Found, Get, Grant, Granted, Put, Written
from store.protocol.connection import InFlight
from store.protocol.wire import Bye
from store.server.peer import LEAVE_WITHIN
from tests.support.limits import limits_with
from tests.support.stores import Peer, connect_in_memory, introduce, serve_in_memory
from tests.support.virtual_time import passes

MIB = 1024 * 1024


async def dial(network: MemoryNetwork, factory: Callable[[], Peer] = Peer) -> Peer:
    return (await network.dial("store", factory, source="peer"))[1]


@pytest.mark.virtual_time
async def test_a_flood_of_strangers_gets_no_more_lines_than_a_log_can_bear_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("store.server.log_lines.AT_ONCE", 5)
    monkeypatch.setattr("store.server.log_lines.PER_SECOND", 0.001)
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=limits_with(frame_timeout=4.0)) as server:
        for _ in range(50):
            stranger = await dial(network, lambda: Peer(hello=False))
            stranger.transport.write(b"GET / HTTP/1.1\r\n\r\n")
            await stranger.lost.wait()
        assert server.figures()["connections_refused"] == 50
        assert len(caplog.records) == 5
        monkeypatch.setattr("store.server.log_lines.PER_SECOND", 10.0)
        await passes(4.0)
        stranger = await dial(network, lambda: Peer(hello=False))
        stranger.transport.write(b"GET / HTTP/1.1\r\n\r\n")
        await stranger.lost.wait()
        assert "(45 lines like this were left out before it)" in caplog.text
        assert len(caplog.records) == 6


@pytest.mark.virtual_time
async def test_refusals_in_a_row_are_counted_and_have_one_line(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=limits_with(connections_max=1)) as server:
        for row in (1, 2):
            accepted = await introduce(network)
            for _ in range(3):
                refused = await dial(network)
                await refused.lost.wait()
                assert "it has 1 connections, the most it takes" in str(refused.problem)
            assert server.figures()["connections_refused"] == 3 * row
            assert len(caplog.records) == row
            accepted.transport.abort()
            await passes(0.1)
        server._scheduler.handshakes.leaving = True  # a client that finds it so connects to the next server
        refused = await dial(network)
        await refused.lost.wait()
        assert (server.figures()["connections_refused"], len(caplog.records)) == (7, 2)


@pytest.mark.virtual_time
async def test_a_client_that_comes_again_ends_its_former_connection() -> None:
    network, session = MemoryNetwork(), b"s" * 16
    async with serve_in_memory(network) as server:
        former = await introduce(network, session_id=session)
        await introduce(network, session_id=session)
        await passes(1.0)
        assert (former.lost.is_set(), server.connections) == (True, 1)


class Deaf(Peer):
    """Stops reading when a test says so, and has the more time to write."""

    deaf = False

    def data_received(self, data: bytes) -> None:
        if not self.deaf:
            super().data_received(data)

    def flood(self, *, first: int) -> int:
        """Send many more requests, with ids from `first` on; return the id after the last."""
        (frame,) = [self.connection.encode(InFlight(1_000_000, Count(prefix="k"), None, False))]
        before, after = frame.split(id_bytes := struct.pack(">BI", 0xCE, 1_000_000))
        assert len(id_bytes) == 5
        ids = range(first, first + 10_000)
        self.transport.write(b"".join([before + struct.pack(">BI", 0xCE, id) + after for id in ids]))
        return ids.stop


async def test_endless_requests_without_a_renewal_do_not_keep_a_lease() -> None:
    """Regression: a client kept a lease of one second while it sent: some of its bytes were always unread (S5)."""
    async with store.serve() as server, store.connect(server.url) as client:
        peer = (await asyncio.get_running_loop().create_connection(Deaf, "127.0.0.1", server.port))[1]
        await peer.until(lambda: peer.connection.welcomed)
        granted = await peer.answer(*peer.ask(Grant(ttl=0.2)))
        assert isinstance(granted, Granted)
        await peer.answer(*peer.ask(Put("kept", b"", lease=granted.lease)))
        peer.deaf = True
        next_id = 1_000_000
        async with asyncio.timeout(60.0), client.watch("kept", snapshot=True) as watch:
            flooded = 0
            async for event in watch:
                if event.kind == "delete":
                    break
                while flooded < 100 and await client.count("kept"):
                    flooded += 1
                    if peer.transport.get_write_buffer_size() < MIB:
                        next_id = peer.flood(first=next_id)
            assert flooded < 100, "it went while there was always more to carry out"
        peer.transport.abort()


@pytest.mark.virtual_time
async def test_a_closed_peer_is_not_closed_again(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=limits_with(frame_timeout=0.5)), connect_in_memory(network) as other:
        await other.put("in between", bytes(100_000))  # more than the network holds, less than makes us stop reading
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(Get("in between"))
        peer.transport.write(b"\x00\x00\x00\x20half")
        await passes(LEAVE_WITHIN + 2.0)
    assert len(caplog.records) == 1


@pytest.mark.virtual_time
async def test_a_frame_that_comes_slowly_is_no_silence() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=limits_with(frame_timeout=4.0)):
        peer = await introduce(network)
        item = peer.connection.register_request(Put("slow", b"x" * 10), None)
        for byte in peer.connection.encode(item):
            peer.transport.write(bytes([byte]))
            await passes(3.0)
        assert isinstance(await peer.answer(item.request_id), Written)


@pytest.mark.virtual_time
async def test_a_peer_that_is_hung_up_on_and_never_reads_is_gone_after_a_while() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as other:
        await other.put("in between", bytes(100_000))  # more than the network holds, less than makes us stop reading
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(Get("in between"))
        await passes(0.1)
        peer.transport.write(b"\xff\xff\xff\xffgarbage")
        await passes(LEAVE_WITHIN - 1)
        assert server.connections == 2
        await passes(2.0)
        assert server.connections == 1


@pytest.mark.virtual_time
async def test_a_leaving_server_sends_a_slow_reader_its_queue() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as other:
        await other.put("large", bytes(MIB))
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(Get("large"))
        await passes(0.1)
        leaving = asyncio.create_task(server.shut_down())
        await passes(1.0)
        assert not leaving.done()
        peer.transport.resume_reading()
        await leaving
        await peer.lost.wait()
        assert isinstance(peer.replies()[0].response, Found)
        assert isinstance(peer.said[-1], Bye)


@pytest.mark.virtual_time
async def test_a_client_in_mid_handshake_is_asked_to_retry_and_gets_no_protocol_error() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server:
        peer = await dial(network, lambda: Peer(hello=False))
        await server.shut_down()
        await peer.lost.wait()
        assert isinstance(peer.problem, LimitExceeded)
        assert not isinstance(peer.problem, ProtocolError)


async def test_every_address_of_a_name_is_served_on_one_port() -> None:
    for host in ("localhost", ""):
        async with store.serve(host, insecure=True) as server:
            families = {family for family, *_ in await addresses(host)}
            loopback = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
            for family in families & loopback.keys():
                at = f"[{loopback[family]}]" if family == socket.AF_INET6 else loopback[family]
                async with store.connect(f"tcp://{at}:{server.port}", timeout=60.0) as client:
                    assert await client.put("a", b"") > 0
            async with store.connect(server.url, timeout=60.0) as client:
                assert client.store_id == server.store_id


async def addresses(host: str) -> list[Any]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)


async def test_a_socket_that_is_bound_already_can_be_served() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    async with store.serve(sock=sock) as server, store.connect(server.url) as client:
        assert server.port == sock.getsockname()[1]
        await client.ping()


async def test_of_several_sockets_the_url_has_the_host_that_was_given() -> None:
    first = socket.create_server(("127.0.0.2", 0))
    second = socket.create_server(("127.0.0.3", first.getsockname()[1]))
    async with store.serve("127.0.0.3", sock=[first, second]) as server:
        assert server.url == f"tcp://127.0.0.3:{server.port}"
        for host in ("127.0.0.2", "127.0.0.3"):
            async with store.connect(f"tcp://{host}:{server.port}") as client:
                await client.ping()
                assert client.socket_addresses == ("127.0.0.1", host)


async def test_a_port_in_use_is_an_error_of_the_system() -> None:
    async with store.serve() as server:
        with pytest.raises(OSError, match="in use"):
            async with store.serve("127.0.0.1", server.port):
                raise AssertionError("there is no second one")


async def test_a_server_whose_timer_fails_stops_serving_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Defective(Engine):
        """Fails at its first check of the leases that finds one."""

        def advance_lease_clock(self, *, now: float) -> bool:
            if len(self._leases):
                raise KeyError("a defect of the timer")
            return super().advance_lease_clock(now=now)

    original, store.server.server.Engine = store.server.server.Engine, Defective  # type: ignore[attr-defined]
    try:
        with pytest.raises(KeyError, match="a defect of the timer"):
            async with store.serve() as server, store.connect(server.url, timeout=0.2) as client:
                await client.grant(10)
                with pytest.raises(store.ConnectionLost):
                    await client.wait(["never"], timeout=0.5)
                assert server.connections == 0
    finally:
        store.server.server.Engine = original  # type: ignore[attr-defined]
    assert "stops serving" in caplog.text


def test_a_server_that_is_closed_in_another_loop_says_so() -> None:
    """Regression: it hung."""
    opened, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    served = store.serve()
    server = opened.run_until_complete(served.__aenter__())
    with pytest.raises(StoreUsageError, match="in the event loop that opened it"):
        other.run_until_complete(asyncio.wait_for(served.__aexit__(None, None, None), 10))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    for task in asyncio.all_tasks(opened):
        task.cancel()
    opened.run_until_complete(asyncio.sleep(0))
    opened.close()
    other.close()
