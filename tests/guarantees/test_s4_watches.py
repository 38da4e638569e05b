"""S4: "Watches are ordered, unique, atomic per revision, reliable and resumable", seen by clients.

"snapshot, then every later change, no gap, across reconnects; or, when history is gone, an explicit reset (forget
everything, a new snapshot follows), never silence."
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator

import pytest

import store
from store import BlockingWatch, Event, Limits, WatchCompacted
from tests.support.faults import FaultyNetwork
from tests.support.proxy import Proxy
from tests.support.seeds import FRESH
from tests.support.stores import connect_blocking, connect_in_memory, serve_in_memory, taken

virtual_time = pytest.mark.virtual_time


def blocking_taken(watch: BlockingWatch, count: int) -> list[Event]:
    events: list[Event] = []
    batches = watch.batches()
    while len(events) < count:
        events += next(batches)
    assert len(events) == count
    return events


@contextlib.asynccontextmanager
async def serving(
    network: FaultyNetwork, limits: Limits | None = None
) -> AsyncIterator[tuple[store.Server, store.Client, store.Client]]:
    """A server, a client that writes, and one that watches."""
    async with (
        serve_in_memory(network, limits=limits) as server,
        connect_in_memory(network, source="writer") as writer,
        connect_in_memory(network, source="watcher") as watcher,
    ):
        yield server, writer, watcher


@virtual_time
@pytest.mark.parametrize("seed", [4, FRESH])
@pytest.mark.parametrize("snapshot", [True, False])
async def test_s4_a_watch_across_cuts_sees_every_revision_once_and_in_order(seed: int, snapshot: bool) -> None:
    rng = random.Random(seed)
    network = FaultyNetwork(latency=(0.001, 0.05), rng=rng, shred=True)
    async with serving(network) as (_, writer, watcher), watcher.watch("watched/", snapshot=snapshot) as watch:
        written: list[int] = []

        async def write() -> None:
            for number in range(300):
                written.append(await writer.put(f"watched/{number % 7}", b"%d" % number))
                await writer.put("elsewhere", b"")

        async def cut() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.1, 3.0))
                rng.choice([network.reset, network.cut])("watcher")

        cutting, writing = asyncio.create_task(cut()), asyncio.create_task(write())
        events = await taken(watch, 300 + snapshot)
        await writing
        cutting.cancel()
        assert [event.revision for event in events if event.kind == "put"] == written
        assert {event.kind for event in events} == ({"put", "synced"} if snapshot else {"put"})


@virtual_time
async def test_s4_a_watch_from_a_revision_gets_the_history_and_continues_across_cuts() -> None:
    """ "resumable": there is no gap between the history and later changes."""
    network = FaultyNetwork(latency=(0.001, 0.05), rng=random.Random(1), shred=True)
    async with serving(network) as (_, writer, watcher):
        revisions = [await writer.put(f"watched/{number % 3}", b"") for number in range(20)]
        async with watcher.watch("watched/", start_revision=revisions[5]) as watch:
            for number in range(20):
                if number % 4 == 0:
                    network.reset("watcher")
                revisions.append(await writer.put(f"watched/{number % 3}", b""))
            assert [event.revision for event in await taken(watch, 35)] == revisions[5:]


@virtual_time
async def test_s4_an_idle_watch_is_not_reset_by_changes_to_other_keys() -> None:
    """ "resumable": each answer of the server moves the resume point of a watch that has had no event."""
    network = FaultyNetwork()
    async with (
        serving(network, limits=Limits(history_bytes_max=5000)) as (_, writer, watcher),
        watcher.watch("a/", snapshot=True) as watch,
    ):
        assert [event.kind for event in await taken(watch, 1)] == ["synced"]
        for _ in range(100):
            await writer.put("b", b"")
        await watcher.ping()
        network.reset("watcher")
        await writer.put("a/1", b"")
        assert [event.kind for event in await taken(watch, 1)] == ["put"]


@virtual_time
async def test_s4_a_watch_gets_each_change_once_whatever_prefixes_others_watch() -> None:
    """ "unique": a watch of a whole run got each change twice beside a watch of another prefix of the same length."""
    run, as_long = "/rdzv/train/", "x" * len("/rdzv/train/")
    async with (
        serving(FaultyNetwork()) as (_, writer, watcher),
        watcher.watch(run) as watch,
        watcher.watch(as_long),
        watcher.watch(as_long[1:]),
    ):
        for number in range(3):
            await writer.put(f"{run}{number}", b"")
        await writer.transact(then=[store.Put(f"{run}a", b""), store.Put(f"{run}b", b"")])
        events = await taken(watch, 5)
        assert [event.key for event in events] == [run + each for each in ("0", "1", "2", "a", "b")]


@virtual_time
async def test_s4_changes_of_one_revision_come_in_one_batch_also_after_a_cut() -> None:
    network = FaultyNetwork(shred=True, rng=random.Random(1))
    async with serving(network) as (_, writer, watcher), watcher.watch("") as watch:
        batches = watch.batches()
        for number in range(20):
            if number % 3 == 0:
                network.reset("watcher")
            await writer.transact(then=[store.Put(key, b"%d" % number) for key in ("a", "b", "c")])
            batch = await anext(batches)
            assert [event.key for event in batch] == ["a", "b", "c"]
            assert {event.value for event in batch} == {b"%d" % number}


@virtual_time
async def test_s4_a_client_too_slow_for_its_outbox_misses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    network = FaultyNetwork()
    async with (
        serving(network, limits=Limits(outbox_bytes_max=300_000)) as (server, writer, watcher),
        watcher.watch("", snapshot=True) as watch,
    ):
        for _ in range(3):
            network.partition("watcher")
            for _ in range(100):
                await writer.put("a", bytes(10_000))
                assert server.figures()["outbox_bytes"] < 301_000
            network.heal("watcher")
            await writer.ping()
        events = await taken(watch, 301)
        assert [event.revision for event in events] == list(range(301)), "synced at 0, and each revision once"
    assert "reads too slowly" in caplog.text


@contextlib.asynccontextmanager
async def history_gone(network: FaultyNetwork, watcher: store.Client, writer: store.Client) -> AsyncIterator[None]:
    """Disconnect the watcher during the block. When it reconnects, the events that it missed are no longer kept."""
    network.refuse("watcher")
    network.reset("watcher")
    yield
    for _ in range(100):
        await writer.put("other", b"")
    network.stop_refusing("watcher")
    await watcher.ping()


@virtual_time
async def test_s4_with_a_snapshot_lost_history_is_a_reset_and_a_new_snapshot() -> None:
    network = FaultyNetwork()
    async with serving(network, limits=Limits(history_bytes_max=5000)) as (_, writer, watcher):
        await writer.put("a", b"1")
        async with watcher.watch("", snapshot=True) as watch:
            assert [event.kind for event in await taken(watch, 2)] == ["put", "synced"]
            async with history_gone(network, watcher, writer):
                await writer.delete("a")
                await writer.put("b", b"2")
            events = await taken(watch, 4)
            assert [(event.kind, event.key) for event in events] == [
                ("reset", ""),
                ("put", "b"),
                ("put", "other"),
                ("synced", ""),
            ]
            await writer.put("c", b"3")
            assert [(event.kind, event.key) for event in await taken(watch, 1)] == [("put", "c")]


@virtual_time
async def test_s4_without_a_snapshot_lost_history_ends_the_watch_with_an_error() -> None:
    network = FaultyNetwork()
    async with serving(network, limits=Limits(history_bytes_max=5000)) as (_, writer, watcher):
        async with watcher.watch("") as watch:
            await writer.put("a", b"1")
            async with history_gone(network, watcher, writer):
                await writer.put("a", b"2")
            assert [event.value for event in await taken(watch, 1)] == [b"1"], "what had come is still given out"
            for _ in range(2):
                with pytest.raises(WatchCompacted):
                    await anext(watch.batches())
        with pytest.raises(WatchCompacted):
            await watcher.watch("", start_revision=1).__aenter__()


async def test_s4_a_blocking_watch_across_cuts_sees_every_revision_once_and_in_order() -> None:
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(server.url) as writer,
        connect_blocking(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        watch = await asyncio.to_thread(client.watch("watched/").__enter__)
        reading = asyncio.create_task(asyncio.to_thread(blocking_taken, watch, 500))
        written = []
        for number in range(500):
            written.append(await writer.put(f"watched/{number % 7}", bytes(number)))
            await writer.put("elsewhere", b"")
            if number % 50 == 25:
                proxy.cut()
        events = await asyncio.wait_for(reading, 10.0)
        assert [event.revision for event in events] == written
        assert proxy.connections > 1  # it meets fewer of the cuts if it reconnects later
        watch.__exit__(None, None, None)


async def test_s4_a_blocking_reader_too_slow_for_its_outbox_misses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    continue_work = threading.Event()

    def read_late(watch: BlockingWatch) -> list[Event]:
        continue_work.wait(10.0)
        return blocking_taken(watch, 150)

    async with (
        store.serve(limits=Limits(outbox_bytes_max=1_000_000)) as server,
        store.connect(server.url) as writer,
        connect_blocking(server.url) as client,
    ):
        watch = await asyncio.to_thread(client.watch("").__enter__)
        reading = asyncio.create_task(asyncio.to_thread(read_late, watch))
        first = await writer.put("a", bytes(200_000))
        for _ in range(149):
            await writer.put("a", bytes(200_000))  # 30 MB: more than the kernels' buffers and the outbox hold
        assert "reads too slowly" in caplog.text
        continue_work.set()
        revisions = [event.revision for event in await asyncio.wait_for(reading, 10.0)]
        assert revisions == list(range(first, first + 150))
        watch.__exit__(None, None, None)


@pytest.mark.parametrize("snapshot", [True, False])
async def test_s4_a_blocking_watch_reports_lost_history(snapshot: bool) -> None:
    async with (
        store.serve(limits=Limits(history_bytes_max=5000)) as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(server.url) as writer,
        connect_blocking(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        watch = await asyncio.to_thread(client.watch("", snapshot=snapshot).__enter__)
        await proxy.refuse()
        proxy.cut()
        for _ in range(100):
            await writer.put("a", b"")
        await proxy.accept()
        if snapshot:
            events = await asyncio.to_thread(blocking_taken, watch, 3 + 1)
            assert [event.kind for event in events] == ["synced", "reset", "put", "synced"]
        else:
            with pytest.raises(WatchCompacted):
                await asyncio.to_thread(blocking_taken, watch, 1)
        watch.__exit__(None, None, None)
