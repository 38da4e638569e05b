"""What peers ask: what waits for room or a turn, and what it costs them; S11's tests show the turns themselves."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store.engine.engine import Applied, Engine
from store.limits import Limits
from store.messages import Found, Get, List, Ping, Put
from store.protocol import wire
from store.server import conversations
from store.server.server import Server
from tests.support.stores import connect_in_memory, introduce, serve_in_memory

MIB = 1024 * 1024


async def passes(seconds: float = 0.0) -> float:
    """Let virtual time pass; gives the time it is then."""
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_time
async def test_requests_that_were_read_wait_while_their_answers_find_no_room() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server:
        peer = await introduce(network)
        peer.ask(Put("large", bytes(MIB)))
        await peer.until(lambda: len(peer.replies()) == 1)
        peer.transport.pause_reading()
        requests_before = server.figures()["requests"]
        asked = peer.ask(*[Get("large")] * 100)
        await passes(1.0)
        assert server.figures()["outbox_bytes"] < 3 * MIB, "a packet of 1 kB asked for 100 MB"
        assert server.figures()["requests"] - requests_before < 5
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.replies()) == 101)
        assert [reply.request_id for reply in peer.replies()[1:]] == asked
        assert server.figures()["outbox_bytes"] == 0


@pytest.mark.virtual_time
async def test_waiting_requests_are_not_overwritten_by_what_others_send() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as other:
        await other.put("large", bytes(MIB))
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(*[Get("large")] * 10, Put("after", b"as it was asked"))
        for number in range(100):
            await other.put(f"other/{number}", b"noise" * 100)
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.replies()) == 11)
        assert peer.problem is None
        entry = await other.get("after")
        assert entry is not None
        assert entry.value == b"as it was asked"


@pytest.mark.virtual_time
async def test_thousands_who_ask_little_at_once_hold_what_they_have_sent_and_not_a_buffer_each() -> None:
    """Of 10,000 nodes that came at once, each was counted with the 256 KiB of the shared buffer, and hung up on."""
    network = MemoryNetwork()
    async with serve_in_memory(network) as server:
        peers = [await introduce(network) for _ in range(16)]
        conversations = server.conversations
        buffer = conversations.buffer
        for peer, at_server in zip(peers, server._peers.values(), strict=True):
            conversations._turns.spent = 1.0  # this pass of the loop has had its time: whoever asks now waits
            frame = wire.encode_request(7, 0, Ping())
            conversations.buffer[: len(frame)] = frame
            at_server.buffer_updated(len(frame))
            assert not peer.replies()
        assert server.figures()["inbox_bytes"] < 16 * 1024
        assert conversations.buffer is buffer, "nothing of it was given away"
        for peer in peers:
            await peer.until(peer.replies)
            assert [reply.request_id for reply in peer.replies()] == [7]


@pytest.mark.virtual_time
async def test_a_peer_that_hangs_up_while_its_requests_wait_leaves_nothing_behind() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as other:
        await other.put("large", bytes(MIB))
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(*[Get("large")] * 10)
        await passes(1.0)
        assert server.figures()["outbox_bytes"] > 0
        peer.transport.abort()
        await passes(1.0)
        assert server.connections == 1
        assert server.figures()["outbox_bytes"] == 0


@pytest.mark.virtual_time
async def test_a_defect_met_by_one_request_costs_that_peer_its_connection_and_others_still_hear_what_happened() -> None:
    class Defective(Engine):
        def apply(self, request: Any, *context: Any, **named: Any) -> Applied:
            if isinstance(request, List):
                raise KeyError("a defect")
            return super().apply(request, *context, **named)

    network = MemoryNetwork()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with (
        serve_in_memory(network, engine=Defective(store_id="it")),
        connect_in_memory(network) as other,
        other.watch("") as watch,
    ):
        peer = await introduce(network)
        peer.ask(Put("a", b""), List(prefix=""))
        await peer.lost.wait()
        async for event in watch:
            assert event.key == "a"
            break
    assert len(reported) == 1


@pytest.mark.virtual_time
async def test_a_peer_whose_reading_is_paused_by_us_is_not_taken_for_silent() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=Limits(frame_timeout=4.0)), connect_in_memory(network) as other:
        await other.put("large", bytes(MIB))
        peer = await introduce(network)
        peer.transport.pause_reading()
        frame = peer.connection.encode(peer.connection.ask(Put("after", b""), None))
        peer.transport.write(
            b"".join(peer.connection.encode(peer.connection.ask(Get("large"), None)) for _ in range(3)) + frame[:-1]
        )
        await passes(60.0)
        peer.transport.resume_reading()
        await passes(0.5)
        peer.transport.write(frame[-1:])
        await peer.until(lambda: any(isinstance(item.response, Found) for item in peer.replies()))
        assert peer.problem is None


@pytest.mark.virtual_time
async def test_a_request_that_takes_long_has_a_line_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under its own name the log does not tell tests of it.
    monkeypatch.setattr(conversations, "log", logging.getLogger("tests.slow"))
    looks = itertools.count()
    network = MemoryNetwork()
    clock = asyncio.get_running_loop().time
    server = Server(Engine(store_id="it"), clock=clock, stopwatch=lambda: next(looks) / 8)
    async with network.listen("store", server.protocol):
        peer = await introduce(network)
        peer.ask(Put("a", b"1"))
        await peer.until(lambda: len(peer.replies()) == 1)
        await server.leave()
    (record,) = [each for each in caplog.records if each.name == "tests.slow"]
    assert record.getMessage().endswith(": its request Put took 125 ms, which held others up")
