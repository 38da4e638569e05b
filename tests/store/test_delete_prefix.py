"""`delete_prefix` of more keys than one revision may change: keys from before are deleted, later ones stay."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store import ConditionFailed, Put, StoreTimeoutError, Unsupported, when
from store.calls import Calls, LeaseLike
from store.limits import Limits
from store.messages import Delete, DeleteOlder, DeletePrefix, Guarded, Request
from tests.support.stores import connect_blocking, connect_in_memory, serve_in_memory

MOST = Limits.writes_max
OLD = 3 * MOST


async def fill(client: store.Client) -> None:
    for first in range(0, OLD, MOST):
        await client.transact(then=[Put(f"m/{number:05}", b"") for number in range(first, first + MOST)])


class Scripted(Calls):
    """A client that runs hooks before its requests, the first of which has number 1.

    Attributes:
        before: The hook before a request, by its number.
        timeouts: The timeout of each request.
    """

    def __init__(self, client: store.Client, before: dict[int, Callable[[], Any]]) -> None:
        self._client, self.before = client, before
        self.timeout = 30.0
        self.timeouts: list[float | None] = []
        self.kinds: list[type] = []
        self.requests: list[Any] = []
        self.late = 0.0

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        self.requests.append(request.request if isinstance(request, Guarded) else request)
        self.kinds.append(type(self.requests[-1]))
        happens = self.before.get(len(self.timeouts))
        if happens is not None and (coming := happens()) is not None:
            await coming
        return await self._client.call(request, timeout=timeout)

    def time(self) -> float:
        return self._client.time() + self.late

    def wait_a_second(self) -> None:
        self.late += 1.0

    async def aclose(self) -> None: ...

    def kept_lease(self, ttl: float, **_: Any) -> AbstractAsyncContextManager[LeaseLike]:
        raise NotImplementedError


async def test_writes_after_the_first_step_stay_also_to_existing_keys() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        await fill(client)

        async def write() -> None:
            await client.put("m/00000 new", b"1")  # between the keys that are deleted next and earlier ones
            await client.put("m/99999", b"1")
            await client.put(f"m/{OLD - 1:05}", b"overwritten")

        scripted = Scripted(client, {3: write, 4: write})
        revision = (await client.call(store.Get("m/00000"))).entry.mod_revision  # type: ignore[union-attr]
        async with client.watch("m/", start_revision=revision + 3) as watch:
            assert await scripted.delete_prefix("m/") == OLD - 1
            left = await client.list("m/")
            steps = [len({event.key for event in await anext(watch.batches())}) for _ in range(1)]
        assert [entry.key for entry in left] == ["m/00000 new", f"m/{OLD - 1:05}", "m/99999"]
        assert steps == [MOST], "each step is one revision"
        assert scripted.kinds[0] is DeletePrefix
        assert set(scripted.kinds[1:]) == {DeleteOlder}


@pytest.mark.virtual_time
async def test_each_step_is_applied_once_and_begins_after_the_last_key_of_the_one_before() -> None:
    network, loop = MemoryNetwork(latency=0.1), asyncio.get_running_loop()
    async with (
        serve_in_memory(network),
        connect_in_memory(network, source="cut") as client,
        connect_in_memory(network) as other,
        other.watch("m/") as watch,
    ):
        await fill(other)
        steps = OLD // MOST

        def lose_the_answer() -> None:
            loop.call_later(0.15, network.reset, "cut")

        scripted = Scripted(client, dict.fromkeys(range(2, 2 + steps), lose_the_answer))
        assert await scripted.delete_prefix("m/") == OLD
        await other.put("m/last", b"")
        deleted: list[list[str]] = []
        async for batch in watch.batches():
            if batch[0].key == "m/last":
                break
            if batch[0].kind == "delete":
                deleted.append(sorted(event.key for event in batch))
        assert [len(keys) for keys in deleted] == [MOST] * steps, "each step is one revision"
        assert len(set(itertools.chain(*deleted))) == OLD
        assert [request.after for request in scripted.requests[1:]] == ["", *(keys[-1] for keys in deleted)]


async def test_beside_writers_it_ends() -> None:
    async with store.serve() as server, store.connect(server.url) as client, connect_blocking(server.url) as blocking:
        await fill(client)
        written = 0

        async def write() -> None:
            nonlocal written
            while True:
                await client.transact(then=[Put(f"m/new/{written + more}", b"") for more in range(MOST)])
                written += MOST

        writing = asyncio.create_task(write())
        await asyncio.sleep(0)
        deleted = await asyncio.to_thread(blocking.delete_prefix, "m/", timeout=20.0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert deleted >= OLD
        assert await client.count("m/") >= written + OLD - deleted


@pytest.mark.parametrize("how", ["timeout", "condition"])
async def test_an_error_after_the_first_step_says_which_keys_are_deleted(how: str) -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        await fill(client)
        await client.put("guard", b"")
        scripted = Scripted(client, {})

        def end() -> Any:
            if how == "timeout":
                scripted.late = 20.0
                return asyncio.sleep(0.01)
            return client.delete("guard")

        scripted.before[3] = end
        with pytest.raises(StoreTimeoutError if how == "timeout" else ConditionFailed) as ended:
            await scripted.delete_prefix("m/", when=[when.exists("guard")], timeout=10.0)
        assert ended.value.maybe_applied
        steps = 2 if how == "timeout" else 1
        assert f"{steps * MOST} keys that start with 'm/' are gone" in str(ended.value)
        assert await client.count("m/") <= OLD - steps * MOST, "the step that was not answered may have been done"


async def test_one_timeout_is_for_all_requests_of_a_call() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        for first in range(0, 1500, 500):
            await client.transact(then=[Put(f"/{number}/g/k", b"") for number in range(first, first + 500)])
        for call in ("groups", "notes", "delete_prefix"):
            scripted = Scripted(client, {})
            scripted.before.update(dict.fromkeys(range(1, 10), scripted.wait_a_second))
            if call == "delete_prefix":
                await fill(client)
            await getattr(scripted, call)(*([] if call == "groups" else ["m/" if call == "delete_prefix" else ""]))
            given = [timeout or 0.0 for timeout in scripted.timeouts]
            assert len(given) >= 3
            assert all(later <= earlier - 1.0 for earlier, later in itertools.pairwise(given)), given


async def test_a_server_of_an_older_release_deletes_as_it_always_did() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        await fill(client)

        def refuse() -> None:
            raise Unsupported("this server does not know request 25")

        scripted = Scripted(client, {2: refuse})
        assert await scripted.delete_prefix("m/") == OLD
        assert scripted.kinds[:3] == [DeletePrefix, DeleteOlder, DeletePrefix]
        assert await client.delete_prefix("m/") == 0
        assert Delete not in scripted.kinds
