"""What peers are told: no more than they read, in order, and nothing after a watch has ended."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.testing.network import MemoryNetwork
from store.limits import Limits
from store.messages import Delete, Failed, FailureKind, Ping, Put, Wait, Watch
from store.protocol.wire import Events, Lagged
from store.server.outbox import PIECE_BYTES
from tests.support.stores import connect_in_memory, introduce, serve_in_memory

MIB = 1024 * 1024


async def passes(seconds: float = 0.0) -> float:
    """Let virtual time pass; gives the time it is then."""
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


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
async def test_a_revision_larger_than_any_outbox_reaches_a_watch_that_is_up_to_date() -> None:
    network = MemoryNetwork()
    async with (
        serve_in_memory(network, limits=Limits(outbox_bytes_max=MIB)),
        connect_in_memory(network) as client,
        client.watch("") as watch,
    ):
        await client.put("large", bytes(3 * MIB))
        async for event in watch:
            assert len(event.value) == 3 * MIB
            break


@pytest.mark.virtual_time
async def test_what_a_transport_is_handed_at_once_is_one_piece() -> None:
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


@pytest.mark.virtual_time
async def test_deleting_nothing_tells_nobody() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network):
        peer = await introduce(network)
        peer.ask(Watch(prefix=""), Delete("nothing"), Put("a", b""))
        await peer.until(lambda: any(isinstance(item, Events) for item in peer.said))
        (events,) = [item for item in peer.said if isinstance(item, Events)]
        assert [event.key for event in events.events] == ["a"]
