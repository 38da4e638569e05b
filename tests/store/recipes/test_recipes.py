"""Locks and elections: on both kinds of store, with holders that die."""

import asyncio
import contextlib
import inspect
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import store
import store.sync
from rdzv.testing.network import MemoryNetwork
from store.errors import ConditionFailed, LeaseNotFound, StoreTimeoutError, StoreUsageError
from tests.support.processes import start_python
from tests.support.proxy import Proxy
from tests.support.stores import connect_in_memory, serve_in_memory

LIMIT = 30.0  # seconds; it takes some milliseconds on an idle machine

_names = iter(range(10**6))


@pytest.fixture
def name() -> str:
    return f"recipe-{next(_names)}"


@pytest.fixture
async def client(url: str) -> AsyncIterator[store.Client]:
    async with store.connect(url) as client:
        yield client


async def until_in_line(client: store.Client, name: str, count: int) -> None:
    """Wait until so many clients are in line."""
    with anyio.fail_after(LIMIT):
        while await client.count(f"{name}/line/") != count:  # noqa: ASYNC110 - another process makes the change
            await asyncio.sleep(0.01)


async def test_a_lock_has_one_holder_at_a_time_in_the_order_of_arrival(client: store.Client, name: str) -> None:
    holders: list[tuple[int, int]] = []
    inside = 0

    async def hold(number: int) -> None:
        nonlocal inside
        async with store.recipes.lock(client, name) as held:
            inside += 1
            assert inside == 1
            holders.append((number, held.token))
            await asyncio.sleep(0)
            inside -= 1

    with anyio.fail_after(LIMIT):
        async with asyncio.TaskGroup() as tasks, store.recipes.lock(client, name):
            for number in range(4):
                tasks.create_task(hold(number))
                await until_in_line(client, name, number + 2)
    assert [number for number, _ in holders] == [0, 1, 2, 3]
    tokens = [token for _, token in holders]
    assert tokens == sorted(set(tokens))
    assert await client.count(name) == 0


async def test_the_fence_of_a_lock_that_was_left_refuses_writes(client: store.Client, name: str) -> None:
    async with store.recipes.lock(client, name) as held:
        await client.put(f"{name}-result", b"in time", when=[held.fence])
    with pytest.raises(ConditionFailed):
        await client.put(f"{name}-result", b"late", when=[held.fence])


async def test_a_lock_that_is_not_free_in_time_says_so_and_leaves_no_trace(client: store.Client, name: str) -> None:
    async with store.recipes.lock(client, name):
        with pytest.raises(StoreTimeoutError, match=f"the lock '{name}' was not free within 0.5 s"):
            async with store.recipes.lock(client, name, timeout=0.5):
                pytest.fail("two hold it")
        await until_in_line(client, name, 1)


async def test_readers_share_a_lock_and_a_writer_waits_for_all_of_them(client: store.Client, name: str) -> None:
    order: list[str] = []

    async def write() -> None:
        async with store.recipes.write_lock(client, name):
            order.append("written")

    async def read_later() -> None:
        async with store.recipes.read_lock(client, name):
            order.append("read after the writer that came before")

    with anyio.fail_after(LIMIT):
        async with asyncio.TaskGroup() as tasks, store.recipes.read_lock(client, name):
            async with store.recipes.read_lock(client, name):
                tasks.create_task(write())
                await until_in_line(client, name, 3)
                tasks.create_task(read_later())
                await until_in_line(client, name, 4)
            assert order == []
    assert order == ["written", "read after the writer that came before"]


async def test_a_client_removed_from_the_line_is_notified(client: store.Client, name: str) -> None:
    async def wait() -> None:
        with pytest.raises(LeaseNotFound):
            async with store.recipes.lock(client, name):
                pytest.fail("it has no place any more")

    with anyio.fail_after(LIMIT):
        async with asyncio.TaskGroup() as tasks, store.recipes.lock(client, name):
            tasks.create_task(wait())
            await until_in_line(client, name, 2)
            line = sorted(await client.list(f"{name}/line/"), key=lambda entry: entry.create_revision)
            await client.delete(line[1].key)


async def test_a_recipe_wants_a_name(client: store.Client) -> None:
    with pytest.raises(StoreUsageError, match="is empty; give it one"):
        async with store.recipes.lock(client, ""):
            pytest.fail("it has no name")


HOLD_FOR_EVER = """
import sys, threading
import store.sync
with store.sync.connect(sys.argv[1]) as client:
    with store.sync.recipes.lock(client, sys.argv[2], ttl=2.0):
        print("held", flush=True)
        threading.Event().wait()
"""


async def test_the_lock_of_a_holder_that_was_killed_is_free_after_its_ttl(
    client: store.Client, url: str, name: str
) -> None:
    command = [sys.executable, "-c", HOLD_FOR_EVER, url, name]
    holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"held\n"
        with anyio.fail_after(LIMIT):
            with pytest.raises(StoreTimeoutError):
                async with store.recipes.lock(client, name, timeout=0.5):
                    pytest.fail("it is held")
            holder.send_signal(signal.SIGKILL)
            async with store.recipes.lock(client, name):
                pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.kill()
        await holder.wait()


async def test_a_holder_that_is_cut_off_is_ended_before_another_can_hold_the_lock(name: str) -> None:
    """With our own store, the holder's own clock ends its block, since the store cannot reach it."""
    ended = asyncio.Event()
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:

        async def hold(held: asyncio.Event) -> None:
            async with store.connect(f"tcp://127.0.0.1:{proxy.port}") as client:
                with pytest.raises(LeaseNotFound, match="could not be renewed in time"):
                    async with store.recipes.lock(client, name, ttl=1.0):
                        held.set()
                        try:
                            await asyncio.Event().wait()
                        finally:
                            ended.set()

        with anyio.fail_after(LIMIT):
            async with asyncio.TaskGroup() as tasks:
                held = asyncio.Event()
                tasks.create_task(hold(held))
                await held.wait()
                proxy.black_hole()
                async with store.connect(server.url) as client, store.recipes.lock(client, name):
                    assert ended.is_set()


@pytest.mark.virtual_time
async def test_a_lock_outlives_a_cut_that_is_shorter_than_its_ttl(name: str) -> None:
    network = MemoryNetwork()
    async with (
        serve_in_memory(network),
        connect_in_memory(network) as client,
        store.recipes.lock(client, name, ttl=10.0) as held,
    ):
        network.partition("client")
        await asyncio.sleep(5.0)
        network.heal("client")
        await asyncio.sleep(60.0)
        await client.put("result", b"", when=[held.fence])


async def test_an_election_has_one_leader_and_the_next_when_it_resigns(client: store.Client, name: str) -> None:
    assert await store.recipes.leader(client, name) is None
    second_leads, resign = asyncio.Event(), asyncio.Event()

    async def follow() -> None:
        async with store.recipes.leadership(client, name, b"second"):
            second_leads.set()
            await resign.wait()

    with anyio.fail_after(LIMIT):
        async with asyncio.TaskGroup() as tasks:
            async with store.recipes.leadership(client, name, b"first"):
                tasks.create_task(follow())
                await until_in_line(client, name, 2)
                assert await store.recipes.leader(client, name) == b"first"
            await second_leads.wait()
            assert await store.recipes.leader(client, name) == b"second"
            resign.set()
    assert await store.recipes.leader(client, name) is None


async def test_an_observer_of_an_election_sees_each_change(client: store.Client, name: str) -> None:
    seen = store.recipes.leaders(client, name)
    with anyio.fail_after(LIMIT):
        assert await anext(seen) is None
        for candidate in (b"a", b"b"):
            following = asyncio.ensure_future(anext(seen))
            await asyncio.sleep(0.1)  # by then it waits for a leader
            async with store.recipes.leadership(client, name, candidate):
                assert await following == candidate
                following = asyncio.ensure_future(anext(seen))
            assert await following is None


HOLDER = """import asyncio, sys, store
async def main():
    async with store.connect(sys.argv[1]) as client, store.recipes.lock(client, "held", ttl=60.0, gone_ttl=0.1):
        print("holds", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_with_gone_ttl_alone_a_lock_of_a_killed_holder_is_free_at_once() -> None:
    async with store.serve() as server, start_python("-c", HOLDER, server.url) as holder:
        await holder.line("holds")
        async with store.connect(server.url) as client:
            with pytest.raises(StoreTimeoutError):
                async with store.recipes.lock(client, "held", timeout=0.3):
                    pytest.fail("two hold it")
            holder.kill()
            async with store.recipes.lock(client, "held", timeout=LIMIT):
                pass


def test_each_recipe_has_a_blocking_twin(url: str, name: str) -> None:
    """Their code is that of the async recipes."""
    recipes = store.sync.recipes
    with store.sync.connect(url) as client, ThreadPoolExecutor() as pool:

        def write() -> int:
            with recipes.write_lock(client, name) as held:
                return held.token

        with recipes.lock(client, name) as held:
            with pytest.raises(StoreTimeoutError), recipes.lock(client, name, timeout=0.1):
                pytest.fail("two hold it")
            client.put(f"{name}-result", b"in time", when=[held.fence])
        with pytest.raises(ConditionFailed):
            client.put(f"{name}-result", b"late", when=[held.fence])
        with recipes.read_lock(client, name), recipes.read_lock(client, name):
            writing = pool.submit(write)
        assert writing.result(LIMIT) > held.token
        leaders = recipes.leaders(client, f"{name}-led")
        assert next(leaders) is recipes.leader(client, f"{name}-led") is None
        with recipes.leadership(client, f"{name}-led", b"me"):
            assert next(leaders) == recipes.leader(client, f"{name}-led") == b"me"


@pytest.mark.parametrize("recipe", ["leader", "leaders", "leadership", "lock", "read_lock", "write_lock"])
def test_a_blocking_twin_takes_the_same_arguments(recipe: str) -> None:
    awaited, blocking = (inspect.signature(getattr(one.recipes, recipe)) for one in (store, store.sync))
    assert [str(each).partition(":")[0] for each in list(awaited.parameters.values())[1:]] == [
        str(each).partition(":")[0] for each in list(blocking.parameters.values())[1:]
    ]
