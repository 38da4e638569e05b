"""S9: "stop accepting, tell watchers, flush, exit 0 within 10 s", as far as the server itself does it."""

import asyncio
import contextlib
import itertools
import logging
import random
from pathlib import Path

import pytest

import store
from store import ConnectionLost, Server
from tests.support.processes import start_python
from tests.support.stores import MemoryNetwork, Peer, connect_in_memory, introduce, serve_in_memory

SOON = 4.0  # seconds, also on a busy machine; the server waits five seconds for peers that do not read


async def test_s9_clients_are_notified_that_the_server_leaves_and_report_it() -> None:
    async with contextlib.AsyncExitStack() as outliving:
        async with store.serve() as server:
            client = await outliving.enter_async_context(store.connect(server.url, timeout=0.3))
            await outliving.enter_async_context(client.watch(""))
            problems: asyncio.Queue[str] = asyncio.Queue()
            # Read it at the moment of the loss: the next attempt to connect fails for another reason, as no server
            # listens.
            client.on_connection_change(
                lambda connected: None if connected else problems.put_nowait(client.last_problem)
            )
        assert await asyncio.wait_for(problems.get(), 5.0) == "the server is leaving"
        with pytest.raises(ConnectionLost):
            await client.get("a")


async def test_s9_requests_applied_before_it_left_were_answered() -> None:
    for seed in range(5):
        lost = asyncio.Event()
        async with contextlib.AsyncExitStack() as outliving:
            async with store.serve() as server:
                client = await outliving.enter_async_context(store.connect(server.url, timeout=1.0))
                client.on_connection_change(lambda connected, lost=lost: None if connected else lost.set())  # type: ignore[misc]
                first = server.figures()["revision"] + 1
                puts = [asyncio.create_task(client.put(f"{number}", bytes(10_000))) for number in range(100)]
                for _ in range(random.Random(seed).randrange(1, 8)):
                    await asyncio.sleep(0)
                applied = server.figures()["revision"]
            await asyncio.wait_for(lost.wait(), 5.0)
            answered = {task.result() for task in puts if task.done() and task.exception() is None}
            assert answered >= set(range(first, applied + 1)), "flushed before it hung up"
            for task in puts:
                task.cancel()
            await asyncio.gather(*puts, return_exceptions=True)


@pytest.mark.virtual_time
async def test_s9_leaving_is_bounded_despite_slow_readers_and_new_connections() -> None:
    network = MemoryNetwork()
    loop = asyncio.get_running_loop()
    async with serve_in_memory(network) as server, connect_in_memory(network) as other:
        await other.put("large", bytes(1_000_000))
        peers = [await introduce(network, source=f"peer {number}") for number in range(10)]
        for peer in peers[:5]:
            peer.transport.pause_reading()
            peer.ask(store.Get("large"))
        network.partition("peer 9")
        await asyncio.sleep(0.1)
        started = loop.time()
        leaving = asyncio.create_task(server.shut_down())
        await asyncio.sleep(1.0)
        assert server.connections <= 6, "who reads is gone at once"
        with pytest.raises(ConnectionLost):
            await connect_in_memory(network, source="late", timeout=1.0).__aenter__()
        await leaving
        assert loop.time() - started <= 10.0
        await asyncio.sleep(0)
        assert server.connections == 0
        network.heal()


async def test_s9_leaving_without_clients_is_immediate_and_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with store.serve():
        pass
    assert loop.time() - started < SOON
    assert caplog.records == []


async def test_s9_ending_it_a_second_time_ends_it_at_once() -> None:
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Server] = loop.create_future()

    async def serve() -> None:
        async with store.serve() as server:
            started.set_result(server)
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    server = await started
    _, peer = await loop.create_connection(Peer, "127.0.0.1", server.port)
    await peer.until(lambda: peer.connection.welcomed)
    await peer.answer(*peer.ask(store.Put("large", bytes(30_000_000))))  # more than the kernels' buffers hold
    peer.transport.pause_reading()
    peer.ask(store.Get("large"))
    async with store.connect(server.url) as other:
        while not (await other.stats())["outbox_bytes"]:  # noqa: ASYNC110 - the request may be on its way
            await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving], timeout=0.2)
    assert not serving.done(), "it waits for the one who does not read"
    cancelled_at = loop.time()
    serving.cancel()
    await asyncio.wait([serving])
    assert loop.time() - cancelled_at < SOON
    peer.transport.abort()
    await peer.lost.wait()


async def test_s9_sigterm_during_many_writes_exits_0_with_acknowledged_writes_on_disk(tmp_path: Path) -> None:
    """ "SIGTERM: stop accepting, tell watchers, flush, exit 0", beside clients that write as fast as they can."""
    acknowledged: dict[str, bytes] = {}
    command = ("-m", "rdzv", "serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", str(tmp_path))
    async with start_python(*command) as process:
        line = await process.says("listens on", timeout=30.0)
        url = f"tcp://{line.partition('listens on ')[2].partition(',')[0]}"

        async def write_for_ever(name: str) -> None:
            async with store.connect(url, timeout=30.0) as client:
                for number in itertools.count():
                    key, value = f"{name}/{number % 8}", b"%d " % number * 20_000
                    await client.put(key, value)
                    acknowledged[key] = value

        writing = [asyncio.create_task(write_for_ever(f"{number}")) for number in range(4)]
        async with asyncio.timeout(60.0):
            while len(acknowledged) < 24:  # noqa: ASYNC110 - they write meanwhile
                await asyncio.sleep(0.01)
        process.terminate()
        assert await process.wait(timeout=60.0) == 0
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url) as client:
        found = {entry.key: entry.value for entry in await client.list("")}
    for key, value in acknowledged.items():
        assert int(found[key].split()[0]) >= int(value.split()[0]), f"{key} was acknowledged and is gone"
