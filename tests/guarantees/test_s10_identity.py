"""S10: a client knows its store by a random id, and fails if it meets another one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import store
from store import LeaseNotFound, Server, StoreReplaced
from tests.support.stores import connect_blocking


class Restartable:
    """A memory server that can be replaced by an empty one on the same port."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self.server: Server

    async def start(self, port: int = 0) -> None:
        self.server = await self._stack.enter_async_context(store.serve("127.0.0.1", port))

    async def stop(self) -> None:
        await self._stack.aclose()

    async def replace(self) -> None:
        port = self.server.port
        await self.stop()
        await self.start(port)


@pytest.fixture
async def restartable() -> AsyncIterator[Restartable]:
    it = Restartable()
    await it.start()
    yield it
    await it.stop()


async def outcome_of(call: Awaitable[Any]) -> Any:
    try:
        return await asyncio.wait_for(call, 10.0)
    except Exception as error:  # noqa: BLE001 - the test returns it
        return error


async def test_s10_calls_watches_and_leases_end_when_the_store_was_replaced(restartable: Restartable) -> None:
    async with store.connect(restartable.server.url) as client:
        before = client.store_id
        held = asyncio.Event()

        async def hold() -> None:
            async with client.kept_lease(60.0) as lease:
                await client.put("mine", b"", lease=lease)
                held.set()
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        await held.wait()
        waiting = asyncio.create_task(client.wait(["never"]))
        watch = await client.watch("", snapshot=True).__aenter__()
        batches = watch.batches()
        assert [event.kind for event in await anext(batches)] == ["put", "synced"]
        await restartable.replace()
        assert restartable.server.store_id != before

        parked = await outcome_of(waiting)
        assert isinstance(parked, StoreReplaced)
        assert f"{before} has been replaced by {restartable.server.store_id}" in str(parked)
        with pytest.raises(StoreReplaced):
            await anext(batches)
        assert isinstance(await outcome_of(holding), LeaseNotFound)
        for _ in range(2):
            with pytest.raises(StoreReplaced) as caught:
                await client.put("mine", b"again")
            assert not caught.value.maybe_applied, "it was not even sent"
        with pytest.raises(StoreReplaced):
            await client.watch("").__aenter__()
        assert isinstance(client.failure, StoreReplaced)
        await watch.__aexit__(None, None, None)
    async with store.connect(restartable.server.url) as newcomer:
        assert await newcomer.count("") == 0, "nothing was done to the new one"


async def test_s10_a_write_under_way_when_the_store_was_replaced_is_in_doubt(restartable: Restartable) -> None:
    async with store.connect(restartable.server.url) as client:
        call = asyncio.create_task(client.put("a", b""))  # the server goes before it answers
        await asyncio.sleep(0)
        await restartable.replace()
        caught = await outcome_of(call)
        assert isinstance(caught, StoreReplaced)
        assert caught.maybe_applied


@pytest.mark.parametrize("kind", ["get", "put", "wait", "keep_alive"])
async def test_s10_blocking_calls_end_when_the_store_was_replaced(restartable: Restartable, kind: str) -> None:
    async with connect_blocking(restartable.server.url) as client:
        lease = await asyncio.to_thread(client.grant, 60.0)
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: client.get("a"),
            "put": lambda: client.put("a", b""),
            "wait": lambda: client.wait(["never"]),
            "keep_alive": lease.keep_alive,
        }
        waiting = asyncio.create_task(asyncio.to_thread(calls[kind])) if kind == "wait" else None
        await asyncio.sleep(0)
        await restartable.replace()
        caught = await outcome_of(waiting or asyncio.to_thread(calls[kind]))
        assert isinstance(caught, StoreReplaced)
        assert not caught.maybe_applied or kind == "put"
        assert isinstance(await outcome_of(asyncio.to_thread(client.count, "")), StoreReplaced)


async def test_s10_a_blocking_watch_ends_when_the_store_was_replaced(restartable: Restartable) -> None:
    async with connect_blocking(restartable.server.url) as client:
        watch = await asyncio.to_thread(client.watch("", snapshot=True).__enter__)
        reading = asyncio.create_task(asyncio.to_thread(lambda: list(watch)))
        await restartable.replace()
        assert isinstance(await outcome_of(reading), StoreReplaced)
        watch.__exit__(None, None, None)
