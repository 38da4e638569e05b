"""The requests of peers and their answers: waits for memory or a turn, and the order; S11's tests show the turns."""

import asyncio
import contextlib
import itertools
import logging
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store.engine.applied import ApplyResult
from store.engine.engine import Engine
from store.engine.sessions import AWAY_LEAST
from store.limits import Limits
from store.messages import Failed, FailureKind, Found, Get, List, Ping, Put, Wait, Watch
from store.protocol import wire
from store.protocol.wire import Events, Lagged
from store.server import request_scheduler
from store.server.handshakes import HELD_MOST
from store.server.outbox import PIECE_BYTES
from store.server.server import Server
from tests.support.limits import limits_with
from tests.support.stores import Peer, connect_in_memory, introduce, serve_in_memory
from tests.support.virtual_time import passes

MIB = 1024 * 1024


@pytest.mark.virtual_time
async def test_waiting_requests_are_not_overwritten_by_other_peers_bytes() -> None:
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


class Eager(Peer):
    """It sends a request together with its hello."""

    def connection_made(self, transport: Any) -> None:
        write, early = transport.write, self.connection.encode(self.connection.register_request(Get("k"), None))
        transport.write = lambda hello: write(hello + early)
        super().connection_made(transport)


@pytest.mark.virtual_time
@pytest.mark.parametrize("leaves", [False, True])
async def test_without_room_for_a_session_what_follows_a_hello_waits_and_an_end_is_a_refusal(leaves: bool) -> None:
    """The early request ended in a traceback, and a goodbye in the welcome's place was no word of the protocol."""
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=limits_with(sessions_max=2)) as server:
        for _ in range(2):
            (await introduce(network)).transport.abort()
        await asyncio.sleep(AWAY_LEAST - HELD_MOST / 2)
        _, peer = await network.dial("store", Eager, source="eager")
        await asyncio.sleep(HELD_MOST / 4)
        assert not peer.connection.welcomed
        if leaves:
            await server.shut_down()
            assert "the server is leaving" in str(peer.problem)
        else:
            await peer.until(lambda: [reply.response for reply in peer.replies()] == [Found(None)])


@pytest.mark.virtual_time
async def test_thousands_of_small_requests_hold_their_own_bytes_and_not_a_buffer_each() -> None:
    """Of 10,000 nodes that connected at once, each counted with the shared buffer's 256 KiB, and was disconnected."""
    network = MemoryNetwork()
    async with serve_in_memory(network) as server:
        peers = [await introduce(network) for _ in range(16)]
        conversations = server._scheduler
        buffer = conversations.buffer
        for peer, at_server in zip(peers, server._peers.by_id.values(), strict=True):
            conversations._turns.spent = 1.0  # this pass of the loop has used its time: new requests wait
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
async def test_a_defect_in_one_request_closes_its_connection_and_others_still_get_their_events() -> None:
    class Defective(Engine):
        def apply(self, request: Any, *context: Any, **named: Any) -> ApplyResult:
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
    async with serve_in_memory(network, limits=limits_with(frame_timeout=4.0)), connect_in_memory(network) as other:
        await other.put("large", bytes(MIB))
        peer = await introduce(network)
        peer.transport.pause_reading()
        frame = peer.connection.encode(peer.connection.register_request(Put("after", b""), None))
        peer.transport.write(
            b"".join(peer.connection.encode(peer.connection.register_request(Get("large"), None)) for _ in range(3))
            + frame[:-1]
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
    # Under the module's own name pytest does not see its log.
    monkeypatch.setattr(request_scheduler, "log", logging.getLogger("tests.slow"))
    looks = itertools.count()
    network = MemoryNetwork()
    clock = asyncio.get_running_loop().time
    server = Server(Engine(store_id="it"), clock=clock, stopwatch=lambda: next(looks) / 8)
    with contextlib.closing(network.listen("store", server.protocol)):
        peer = await introduce(network)
        peer.ask(Put("a", b"1"))
        await peer.until(lambda: len(peer.replies()) == 1)
        await server.shut_down()
    (record,) = [each for each in caplog.records if each.name == "tests.slow"]
    assert record.getMessage().endswith(": its request Put took 125 ms, which held others up")


@pytest.mark.virtual_time
async def test_work_for_which_every_pass_of_the_loop_is_too_short_is_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.server.deliverer.AT_ONCE", 1)
    looks, network = itertools.count(), MemoryNetwork()
    server = Server(Engine(store_id="it"), clock=asyncio.get_running_loop().time, stopwatch=lambda: next(looks) / 8)
    with contextlib.closing(network.listen("store", server.protocol)):
        peers = [await introduce(network) for _ in range(5)]
        for peer in peers:
            peer.ask(Watch(prefix=""), *[Ping()] * 4)
        await passes(1.0)
        assert [len(peer.replies()) for peer in peers] == [5] * 5
        for puts, pings in ((5, 5), (1, 0)):
            peers[0].ask(*[Put(f"{number}", b"") for number in range(puts)])
            for peer in peers[1:]:
                peer.ask(*[Ping()] * pings)
            await passes(1.0)
        assert [sum(isinstance(item, Events) for item in peer.said) for peer in peers] == [6] * 5
        assert [len(peer.replies()) for peer in peers] == [11, 10, 10, 10, 10]
        await server.shut_down()


@pytest.mark.virtual_time
async def test_one_change_answers_only_as_many_parked_waits_of_a_peer_as_its_outbox_takes() -> None:
    network = MemoryNetwork()
    limits = Limits(outbox_bytes_max=4 * MIB)
    async with serve_in_memory(network, limits=limits) as server, connect_in_memory(network) as other:
        peer = await introduce(network)
        peer.ask(*[Wait(keys=("large",))] * 100, Ping())
        await peer.until(peer.replies)
        peer.transport.pause_reading()
        await other.put("large", bytes(MIB))
        assert server.figures()["outbox_bytes"] <= 4 * MIB + 100 * 300
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.replies()) == 101)
        refused = [reply.response for reply in peer.replies() if isinstance(reply.response, Failed)]
        assert 96 <= len(refused) < 100
        assert {failed.kind for failed in refused} == {FailureKind.LIMIT}
        assert "ask again" in refused[0].message


@pytest.mark.virtual_time
async def test_a_slow_reader_loses_its_watches_with_one_log_line_and_nothing_comes_after_their_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    limits = Limits(outbox_bytes_max=MIB)
    async with serve_in_memory(network, limits=limits) as server, connect_in_memory(network) as other:
        peer = await introduce(network)
        watches = peer.ask(Watch(prefix="a"), Watch(prefix=""))
        await peer.until(lambda: len(peer.replies()) == 2)
        peer.transport.pause_reading()
        for _ in range(40):
            await other.put("a", bytes(100_000))
            assert server.figures()["outbox_bytes"] <= MIB + 1000
        await other.put("a", b"small enough to fit, and yet too late")
        assert server.figures()["watches"] == 0
        assert sum("reads too slowly" in record.message for record in caplog.records) == 1
        peer.transport.resume_reading()
        await peer.until(lambda: sum(isinstance(item, Lagged) for item in peer.said) == 2)
        for watch in watches:
            *events, lagged = [item for item in peer.said if isinstance(item, Events | Lagged) and item[0] == watch]
            assert isinstance(lagged, Lagged)
            revisions = [item.events[0].revision for item in events if isinstance(item, Events)]
            assert revisions == list(range(1, lagged.revision + 1)), "up to its end the watch has no gap"


@pytest.mark.virtual_time
async def test_a_history_longer_than_the_outbox_comes_in_steps_as_it_is_read_and_has_no_gap() -> None:
    network = MemoryNetwork()
    limits = Limits(outbox_bytes_max=MIB)
    async with serve_in_memory(network, limits=limits), connect_in_memory(network) as other:
        for _ in range(20):
            await other.put("a", bytes(100_000))
        await other.put("a", b"small")
        peer = await introduce(network)
        peer.transport.pause_reading()
        peer.ask(Watch(prefix="", start_revision=1), Ping())
        await passes(0.1)
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.replies()) == 2)
        told = [item for item in peer.said if isinstance(item, Events | Lagged)]
        assert [item.events[0].revision for item in told if isinstance(item, Events)] == list(range(1, 22))


@pytest.mark.virtual_time
async def test_data_written_together_reaches_the_transport_in_one_piece() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as other:
        peer = await introduce(network)
        peer.ask(Watch(prefix=""))
        await peer.until(peer.replies)
        peer.transport.pause_reading()
        for _ in range(50):
            await other.put("a", bytes(100_000))
        (link,) = network.links("peer")
        assert link.server.get_write_buffer_size() < 2 * PIECE_BYTES
        assert server.figures()["outbox_bytes"] > 4 * MIB
        peer.transport.resume_reading()
        await peer.until(lambda: sum(isinstance(item, Events) for item in peer.said) == 50)
