"""S6: "A slow reader loses its watch, not the server its memory.", and other limits, seen by clients."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING

import pytest

import store
from store.errors import ConnectionLost, LimitExceeded
from store.limits import Limits
from store.messages import Found, Get, Put
from tests.support.journals import a_peer, held_back, taken

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024


async def test_s6_a_client_that_reads_nothing_costs_less_than_its_outbox_and_its_watch_resumes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(outbox_bytes_max=4 * MIB, history_bytes_max=64 * MIB)
    async with (
        store.serve(limits=limits) as server,
        store.connect(server.url) as writer,
        store.connect(server.url) as reader,
        reader.watch("a", snapshot=True) as watch,
    ):
        batches = watch.batches()
        assert [event.kind for event in await anext(batches)] == ["synced"]
        assert reader._link is not None
        assert reader._link.transport is not None
        reader._link.transport.pause_reading()
        worst = 0
        for _ in range(240):
            await writer.put("a", bytes(256 * 1024))  # 60 MB
            worst = max(worst, server.figures()["outbox_bytes"])
        assert 1 * MIB < worst <= 4 * MIB + 1000
        assert "reads too slowly" in caplog.text
        reader._link.transport.resume_reading()
        revisions: list[int] = []
        async with asyncio.timeout(60):
            while len(revisions) < 240:
                revisions += [event.revision for event in await anext(batches)]
        assert revisions == list(range(1, 241))


async def test_s6_a_packet_that_asks_for_gigabytes_costs_what_one_peer_may() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("large", bytes(8 * MIB))
        assert client._link is not None
        assert client._link.transport is not None
        client._link.transport.pause_reading()
        tracemalloc.start()
        try:
            asking = [asyncio.create_task(client.get("large", timeout=60.0)) for _ in range(500)]  # 4 GB of answers
            async with store.connect(server.url) as other:
                for _ in range(20):
                    await other.ping()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 * MIB
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_s6_more_connections_than_allowed_are_refused_with_a_reason_and_harm_nobody() -> None:
    async with store.serve(limits=Limits(connections_max=3)) as server:
        async with store.connect(server.url) as one, store.connect(server.url) as two, store.connect(server.url):
            with pytest.raises(ConnectionLost, match="connections_max"):
                async with store.connect(server.url, timeout=0.3):
                    raise AssertionError("it was let in")
            await one.put("a", b"1")
            assert await two.get("a") is not None
        async with store.connect(server.url) as late:
            assert await late.get("a") is not None


async def test_s6_limits_are_clear_errors_and_change_nothing() -> None:
    limits = Limits(value_bytes_max=1000, key_bytes_max=100, keys_max=3, watches_max=2, leases_max=2)
    async with store.serve(limits=limits) as server, store.connect(server.url) as client:
        with pytest.raises(LimitExceeded, match="value_bytes_max is 1000"):
            await client.put("a", bytes(1001))
        with pytest.raises(LimitExceeded, match="key_bytes_max is 100"):
            await client.put("k" * 101, b"")
        for number in range(3):
            await client.put(f"{number}", b"")
        with pytest.raises(LimitExceeded, match="keys_max is 3"):
            await client.put("3", b"")
        async with client.watch("a"), client.watch("b"):
            with pytest.raises(LimitExceeded, match="watches_max"):
                await client.watch("c").__aenter__()
            with pytest.raises(LimitExceeded, match="watches_max"):
                await client.wait(["never"])
        await client.grant(10), await client.grant(10)
        with pytest.raises(LimitExceeded, match="leases_max is 2"):
            await client.grant(10)
        assert await client.count("") == 3


async def test_s6_while_the_disk_takes_nothing_a_peer_is_read_no_further_than_its_answers_may_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests came one in a packet: what stopped a peer then was only looked at after packets of several."""
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        peer = await a_peer(server, journal)
        peer.ask(Put("large", bytes(100_000)))
        await taken(journal.begun)
        asked: list[int] = []
        for done in range(1, 21):
            asked += peer.ask(Get("large"))
            for _ in range(20):
                await asyncio.sleep(0)
                if server.figures()["requests"] > done:
                    break
        assert server.figures()["requests"] < 8
        assert server.figures()["outbox_bytes"] < 600_000
        journal.may_commit.release(1000)
        assert isinstance(await peer.answer(asked[-1]), Found)
        peer.transport.abort()
