"""S2: "A request resent after a dropped connection is applied once", first as sessions and connections alone show it.

`RDZV_ADDITIONS` says how many are made through connections that keep being cut: 20,000 if nothing else is said;
`.ci/run` says 100,000.
"""

import asyncio
import itertools
import os
import random

import pytest

import store
from store import ConnectionLost
from tests.support.proxy import Proxy
from tests.support.seeds import FRESH
from tests.support.stores import connect_blocking

ADDITIONS = int(os.environ.get("RDZV_ADDITIONS", "20000"))


async def keep_cutting(proxy: Proxy, rng: random.Random, bytes_most: int) -> None:
    """Cut at a random byte, again and again, as soon as a client has reconnected."""
    while True:
        proxy.cut_after(rng.randrange(1, bytes_most))
        cut = proxy.connections
        await proxy.until(lambda cut=cut: proxy.connections > cut, timeout=60.0)  # type: ignore[misc]


@pytest.mark.parametrize("seed", [2, FRESH])
async def test_s2_additions_through_cut_connections_count_exactly(seed: int) -> None:
    additions = 800
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        async with store.connect(f"tcp://127.0.0.1:{proxy.port}") as client:
            cutting = asyncio.create_task(keep_cutting(proxy, random.Random(seed), 2000))
            room = asyncio.Semaphore(20)

            async def add() -> int:
                async with room:
                    return await client.add("count", 1)

            sums = await asyncio.gather(*[add() for _ in range(additions)])
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)
        assert proxy.connections > 3, "nothing was cut"
        assert sorted(sums) == list(range(1, additions + 1)), "each was applied once, and its own answer came back"


@pytest.mark.in_ci
async def test_s2_all_additions_of_eight_clients_through_cut_connections_end_at_exactly_their_number() -> None:
    clients, at_once = 8, 250
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        cutting = asyncio.create_task(keep_cutting(proxy, random.Random(5), 200_000))
        numbers = iter(range(ADDITIONS))
        sums: list[int] = []

        async def caller(client: store.Client) -> None:
            sums.extend([await client.add("count", 1) for _ in numbers])

        async def use_a_client() -> None:
            async with store.connect(f"tcp://127.0.0.1:{proxy.port}", timeout=60.0) as client:
                await asyncio.gather(*[caller(client) for _ in range(at_once)])

        await asyncio.gather(*[use_a_client() for _ in range(clients)])
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        assert proxy.connections > clients, "nothing was cut"
        assert sorted(sums) == list(range(1, ADDITIONS + 1))
        async with store.connect(server.url) as client:
            assert await client.add("count", 0) == ADDITIONS


async def test_s2_additions_of_blocking_threads_through_cut_connections_count_exactly() -> None:
    additions, threads = 100, 4
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        connect_blocking(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        cutting = asyncio.create_task(keep_cutting(proxy, random.Random(3), 1500))

        def add() -> list[int]:
            return [client.add("count", 1) for _ in range(additions)]

        sums = await asyncio.gather(*[asyncio.to_thread(add) for _ in range(threads)])
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        assert proxy.connections > 10, "nothing was cut"
        assert sorted(itertools.chain.from_iterable(sums)) == list(range(1, additions * threads + 1))


async def test_s2_if_the_outcome_cannot_be_known_the_error_says_maybe_applied() -> None:
    """If the result cannot be known, since a server without a data directory died, the caller gets `ConnectionLost`."""
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(f"tcp://127.0.0.1:{proxy.port}", timeout=0.3) as client,
    ):
        proxy.black_hole()
        call = asyncio.create_task(client.put("a", b""))
        await asyncio.sleep(0)
        await proxy.refuse()
        proxy.cut()
        proxy.heal()
        with pytest.raises(ConnectionLost) as caught:
            await call
        assert caught.value.maybe_applied
