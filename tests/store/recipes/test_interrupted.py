"""Leases and recipes that an exception out of a signal's handler, or a cancellation, interrupts: nothing stays held."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import store
import store.sync
from rdzv.testing.network import MemoryNetwork
from tests.support.interrupts import cancelled_at_each_await, tears, torn, torn_at_each_place
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

TTL = 60.0  # longer than any of these tests takes: nothing is free because its lease has lapsed
SOON = 5.0  # seconds; it takes a few milliseconds on an idle machine


def lease(client: store.sync.Client) -> None:
    with client.kept_lease(TTL) as kept:
        client.put("held", b"", lease=kept)


def lock(client: store.sync.Client) -> None:
    with store.sync.recipes.lock(client, "name", ttl=TTL):
        client.put("inside", b"")


def read_lock(client: store.sync.Client) -> None:
    with store.sync.recipes.read_lock(client, "name", ttl=TTL):
        pass


def leadership(client: store.sync.Client) -> None:
    with store.sync.recipes.leadership(client, "name", b"me", ttl=TTL):
        store.sync.recipes.leader(client, "name")


def keepers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("keep")]


def is_soon(condition: Callable[[], bool]) -> bool:
    """Return True if a condition becomes true within a moment."""
    until = time.monotonic() + SOON
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def of_calls(work: Callable[[], object]) -> Iterator[str]:
    return torn(work, every=3)


def of_leases(work: Callable[[], object]) -> Iterator[str]:
    return torn_at_each_place(work, "store/keeping.py", "store/recipes/", "store/calls.py", "store/net/threads.py")


@pytest.mark.in_ci
@tears
@pytest.mark.parametrize(
    ("places", "work"), [(of_calls, lock), (of_leases, lease), (of_leases, read_lock), (of_leases, leadership)]
)
def test_an_interrupt_at_any_place_leaves_nothing_held_and_no_thread(
    places: Callable[[Callable[[], object]], Iterator[str]], work: Callable[[store.sync.Client], None]
) -> None:
    """Around `with lock(...)` a lock stayed held, and was renewed for ever; many places left a thread and a lease."""
    count = 0
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        for where in places(lambda: work(client)):
            count += 1
            assert is_soon(lambda: server.figures()["leases"] == 0), where
            assert is_soon(lambda: not keepers()), where
        work(client)  # it still works
    gc.collect()  # an interrupted call may leave a socket to the collector, which says so here
    assert count > 50


def test_a_lease_whose_block_is_given_up_without_being_left_is_revoked_and_leaves_no_thread() -> None:
    """Its thread renewed the lease of a generator that nobody finished for as long as the program ran."""
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        client.kept_lease(TTL).__enter__()
        assert is_soon(lambda: server.figures()["leases"] == 0)
        assert is_soon(lambda: not keepers())


async def kept_lease(client: store.Client) -> None:
    async with client.kept_lease(TTL) as kept:
        await client.put("held", b"", lease=kept)


async def held_lock(client: store.Client) -> None:
    async with store.recipes.lock(client, "name", ttl=TTL, timeout=30.0):
        await client.put("inside", b"")


async def awaited_lock(client: store.Client) -> None:
    """Acquire a lock that another client holds at first."""
    async with asyncio.TaskGroup() as tasks, store.recipes.lock(client, "name", ttl=TTL):
        tasks.create_task(held_lock(client))
        await asyncio.sleep(1.0)


async def led(client: store.Client) -> None:
    async with store.recipes.leadership(client, "name", b"me", ttl=TTL):
        await store.recipes.leader(client, "name")


@pytest.mark.virtual_time
@pytest.mark.parametrize("work", [kept_lease, held_lock, awaited_lock, led])
@pytest.mark.parametrize("latency", [0.0, 0.1])
async def test_a_cancellation_at_any_await_arrives_and_leaves_nothing_held(
    work: Callable[[store.Client], Coroutine[Any, Any, None]], latency: float
) -> None:
    """If a native cancellation arrived while a lock was released, the lock was held for its TTL."""
    network = MemoryNetwork(latency=latency)
    awaits = 0
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        async for number in cancelled_at_each_await(lambda: work(client)):
            awaits = number
            assert server.figures()["leases"] == 0, f"after await {number}"
            assert not [task for task in asyncio.all_tasks() if "keep lease" in task.get_name()]
        await work(client)
    assert awaits >= 3


@pytest.mark.virtual_time
async def test_a_cancellation_on_leaving_arrives_within_two_seconds_though_the_store_is_silent() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:

        async def hold() -> None:
            async with store.recipes.lock(client, "name", ttl=TTL):
                network.partition("client")

        task = asyncio.create_task(hold())
        await asyncio.sleep(0.5)
        began = now()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert now() - began <= 2.1
        network.heal("client")
