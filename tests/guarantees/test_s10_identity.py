"""S10: a client knows its store by a random id, and does not go on with another one as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import store
from store import Add, Get, StoreReplaced
from store.engine.engine import Engine
from store.keeping import Keeping
from store.messages import GONE_TTL, Ping, Request, Watch
from store.net.address import Address
from tests.support.by_hand import Post, Town

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from store import Server


def test_s10_a_store_whose_welcome_never_came_was_not_met() -> None:
    """ "meets another id": a client that was never taken in has nothing to lose with another store."""
    post = Post()
    post.dial(Town(Engine(store_id="the first")))
    post.carry_to_client()
    post.cut()
    item = post.ask(Get("a"))
    post.meet(Town(Engine(store_id="the second")))
    assert post.failure is None
    assert item.request_id in post.outcomes
    assert post.connection.store_id == "the second"


def as_of(town: Town, revisions: int) -> Town:
    """The same store as it was some revisions ago: a backup, or a disk that has lost its end."""
    older = Engine(store_id=town.engine.store_id)
    older._keys.revision = town.engine.revision - revisions
    return Town(older)


@pytest.mark.parametrize("seen_by", [Add("n", 1), Get("n"), Ping()], ids=["a write", "a read", "a ping"])
def test_s10_the_same_store_gone_back_in_time_is_another_one(seen_by: Request[Any]) -> None:
    """ "nor if the same store has gone back in time (a revision below what the client has seen)"."""
    town, post = Town(Engine(store_id="the first")), Post()
    post.meet(town)
    for _ in range(3):
        town.ask(Add("n", 1), peer=9)
    post.ask(seen_by)
    post.settle()
    post.cut()
    seen = town.engine.revision
    post.dial(as_of(town, 1))
    post.settle()
    assert isinstance(post.failure, StoreReplaced)
    assert f"had come to revision {seen} and is at {seen - 1} now" in str(post.failure)


def test_s10_what_a_watch_has_seen_counts_too() -> None:
    """ "a revision below what the client has seen": not only what it was answered."""
    town, post = Town(Engine(store_id="the first")), Post()
    post.meet(town)
    post.ask(Watch(prefix=""))
    post.settle()
    town.ask(Add("n", 1), peer=9)
    post.settle()
    post.cut()
    post.dial(as_of(town, 1))
    post.settle()
    assert isinstance(post.failure, StoreReplaced)


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
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return error


async def test_s10_calls_watches_and_leases_end_when_the_store_was_replaced(restartable: Restartable) -> None:
    async with store.connect(restartable.server.url) as client:
        before = client.store_id
        lapsed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        lease = await Keeping(client).hold(60.0, None, GONE_TTL, lapsed.set_result)
        await client.put("mine", b"", lease=lease)
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
        assert "has been replaced" in await asyncio.wait_for(lapsed, 10.0)
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
        restartable.server._peers.by_id[1].abort()  # the answer will not come
        call = asyncio.create_task(client.put("a", b""))
        await asyncio.sleep(0)
        await restartable.replace()
        caught = await outcome_of(call)
        assert isinstance(caught, StoreReplaced)
        assert caught.maybe_applied


@pytest.mark.parametrize("kind", ["get", "put", "wait", "keep_alive"])
async def test_s10_blocking_calls_end_when_the_store_was_replaced(restartable: Restartable, kind: str) -> None:
    client = store.sync.Client(Address(host="127.0.0.1", port=restartable.server.port))
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
    await asyncio.to_thread(client.close)
    assert all(channel.sock is None for channel in client.shared.channels)


async def test_s10_a_blocking_watch_ends_when_the_store_was_replaced(restartable: Restartable) -> None:
    client = store.sync.Client(Address(host="127.0.0.1", port=restartable.server.port))
    watch = await asyncio.to_thread(client.watch("", snapshot=True).__enter__)
    reading = asyncio.create_task(asyncio.to_thread(lambda: list(watch)))
    await restartable.replace()
    assert isinstance(await outcome_of(reading), StoreReplaced)
    watch.__exit__(None, None, None)
    await asyncio.to_thread(client.close)


async def test_s10_a_channel_that_met_the_store_first_speaks_for_all_of_its_client(restartable: Restartable) -> None:
    """A thread that connects only after the replacement would otherwise take the new store for the old one."""
    client = store.sync.Client(Address(host="127.0.0.1", port=restartable.server.port))
    await asyncio.to_thread(client.ping)
    held = client._free_channel()
    await restartable.replace()
    assert isinstance(await outcome_of(asyncio.to_thread(client.get, "a")), StoreReplaced), "on a channel of its own"
    held.close()
    await asyncio.to_thread(client.close)
