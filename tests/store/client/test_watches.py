"""The async client's watches: readers that lag, snapshots that are cut, and reopening that fails."""

import asyncio
from typing import Any

import pytest

import store
import store.sync
from store import Event
from store.client import client as watch_room
from store.errors import ConnectionLost, StoreUsageError
from tests.support.stores import MemoryNetwork, connect_in_memory, serve_in_memory, taken

virtual_time = pytest.mark.virtual_time


@virtual_time
async def test_a_reader_that_lags_behind_its_client_is_caught_up_from_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_room, "WATCH_BUFFER_BYTES", 20_000)
    network = MemoryNetwork()
    async with (
        serve_in_memory(network) as server,
        connect_in_memory(network, source="writer") as writer,
        connect_in_memory(network, source="watcher") as watcher,
        watcher.watch("") as watch,
    ):
        for number in range(200):
            await writer.put("a", bytes(1000))
            if number == 100:
                network.reset("watcher")
        await watcher.ping()
        assert server.figures()["watches"] == 0, "it was closed until its reader has caught up"
        assert watch._held_bytes < 25_000
        assert [event.revision for event in await taken(watch, 200)] == list(range(1, 201))
        await writer.put("a", b"")
        assert [event.revision for event in await taken(watch, 1)] == [201]


def test_a_watch_is_read_while_it_is_open() -> None:
    """Regression: the reader of a watch that was never entered waited for ever; the blocking one connected."""

    async def read() -> None:
        async with store.connect(server.url) as client:
            watch = client.watch("a")
            for _ in range(2):
                with pytest.raises(StoreUsageError, match="read it in `async with"):
                    await asyncio.wait_for(anext(aiter(watch)), 5)
                async with watch:
                    await client.put("a", b"")
                    assert (await anext(aiter(watch))).key == "a"

    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        asyncio.run(read())
        with pytest.raises(StoreUsageError, match="or `with`"):
            next(iter(client.watch("a")))


@virtual_time
async def test_a_snapshot_that_is_cut_in_the_middle_begins_again_with_a_reset() -> None:
    network = MemoryNetwork(latency=0.01)
    async with (
        serve_in_memory(network),
        connect_in_memory(network, source="writer") as writer,
        connect_in_memory(network, source="watcher") as watcher,
    ):
        for number in range(40):
            await writer.put(f"{number:02}", bytes(20_000))  # several pieces of a snapshot
        watch = watcher.watch("", snapshot=True)
        deliver = watch.deliver

        def cut_after_the_first_piece(events: tuple[Event, ...]) -> None:
            watch.deliver = deliver  # type: ignore[method-assign]
            deliver(events)
            network.reset("watcher")

        watch.deliver = cut_after_the_first_piece  # type: ignore[method-assign]
        async with watch:
            keys = []
            async for event in watch:
                keys.append(event.key if event.kind == "put" else event.kind)
                if event.kind == "synced":
                    break
        whole = [f"{number:02}" for number in range(40)]
        at = keys.index("reset")
        assert 0 < at < 40
        assert keys[:at] == whole[:at]
        assert keys[at + 1 :] == [*whole, "synced"]


@virtual_time
async def test_a_watch_that_is_reopened_slowly_goes_on_waiting() -> None:
    network = MemoryNetwork()
    async with (
        serve_in_memory(network),
        connect_in_memory(network, source="other") as other,
        connect_in_memory(network, timeout=1.0) as client,
        client.watch("") as watch,
    ):
        events = aiter(watch)
        # After the reconnect it is welcomed, and then nothing arrives for longer than the timeout of a call.
        client.on_connection_change(lambda connected: network.partition("client") if connected else None)
        network.reset("client")
        await asyncio.sleep(3.0)
        await other.put("a", b"")
        network.heal("client")
        assert (await anext(events)).key == "a"


@virtual_time
async def test_a_defect_in_reopening_a_watch_does_not_leave_its_reader_waiting() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client, client.watch("") as watch:

        def opening() -> Any:
            raise KeyError("a defect")

        watch._cursor.opening_request = opening  # type: ignore[method-assign]
        network.reset("client")
        with pytest.raises(ConnectionLost, match="a defect") as failed:
            await anext(aiter(watch))
        assert not failed.value.maybe_applied, "a watch changes nothing"
