"""Promise R8: "a network cut of up to half the TTL costs delay and nothing else": the client's half of it.

The cuts are those of real networks: neither side is notified (no FIN, no RST). Data of an old connection arrives only
when TCP sends it again, seconds after the cut, or never. A new connection passes at once.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable

import pytest

import store
from store import Client
from tests.support.faults import FaultyNetwork
from tests.support.proxy import Proxy
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time

TTL = 10.0


class Cut:
    """A network between clients and a store that can be cut as a real one."""

    def __init__(self, network: FaultyNetwork) -> None:
        self._network = network
        self._on = False

    def client(self, source: str, *, timeout: float = 30.0) -> Client:
        """Return a client. Its attempts to connect hang if they begin during a cut, as if the SYN was lost."""

        async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
            if self._on:
                await asyncio.sleep(3600.0)
            return await self._network.dial("store", factory, source=source)

        return Client(dial, name="store", timeout=timeout, rng=random.Random(source))

    async def during(self, seconds: float) -> None:
        """Cut the network for a while. Connections that exist now stay silent for ever."""
        self._on = True
        self._network.forget_flows()
        await asyncio.sleep(seconds)
        self._network.forget_flows()
        self._on = False


@pytest.mark.some_of(2)
@virtual_time
@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.5, 5.0])
async def test_r8_a_silent_cut_of_up_to_half_the_ttl_costs_no_lease_and_is_over_at_once(seconds: float) -> None:
    network = FaultyNetwork(latency=0.0005)
    cut, rng = Cut(network), random.Random(seconds)
    back: list[float] = []
    async with serve_in_memory(network) as server:
        for number in range(50):
            async with cut.client(f"node {number}") as client, client.kept_lease(TTL):
                await asyncio.sleep(rng.uniform(2 * TTL, 3 * TTL))  # the cut comes in every phase of the renewals
                cutting = asyncio.create_task(cut.during(seconds))
                await asyncio.sleep(rng.uniform(0, seconds))
                asked = asyncio.create_task(client.put("a", b""))
                await cutting
                healed_at = now()
                await asked
                back.append(now() - max(healed_at, 0))
                await asyncio.sleep(TTL)
                assert server.figures()["leases"] == 1
    assert max(back) <= 1.6, "asked just before the end: a second of patience, and an attempt"
    assert sorted(back)[len(back) // 2] <= (1.6 if seconds < 1.5 else 0.6)


@virtual_time
async def test_r8_a_cut_soon_after_another_finds_the_lease_renewed() -> None:
    """The renewal that the first cut had delayed was counted from its sending, and the next was put off as usual."""
    network = FaultyNetwork(latency=0.0005)
    cut, rng = Cut(network), random.Random(7)
    async with serve_in_memory(network), cut.client("node") as client, client.kept_lease(TTL):
        for _ in range(100):
            await asyncio.sleep(rng.uniform(1.5, TTL / 3))
            await cut.during(rng.uniform(0.5, TTL / 2))
        await asyncio.sleep(TTL)


@virtual_time
async def test_r8_a_firewall_that_forgets_connections_costs_a_second() -> None:
    network = FaultyNetwork(latency=0.001)
    async with (
        serve_in_memory(network) as server,
        connect_in_memory(network) as client,
        client.kept_lease(TTL, disconnect_ttl=1.0),
    ):
        counted = await client.add("count", 1)
        for _ in range(20):
            await asyncio.sleep(7.3)
            network.forget_flows()
            began = now()
            counted += 1
            assert await client.add("count", 1) == counted, "it was asked twice, and applied once"
            assert now() - began <= 1.2
        assert server.figures()["leases"] == 1


@virtual_time
async def test_r8_pauses_between_attempts_leave_time_for_a_short_lease() -> None:
    """A durable store restarts and refuses connections for half the TTL. No client may then sleep through its pause."""
    network = FaultyNetwork(latency=0.001)
    async with serve_in_memory(network), contextlib.AsyncExitStack() as stack:
        clients = [connect_in_memory(network, source=f"node {number}") for number in range(100)]
        for client in clients:
            await stack.enter_async_context(client)
            await stack.enter_async_context(client.kept_lease(3.0))
            await asyncio.sleep(0.03)
        network.refuse("store")
        network.reset("store")
        await asyncio.sleep(1.5)
        network.stop_refusing("store")
        await asyncio.sleep(0.5)
        assert all(client.connected for client in clients)


@virtual_time
async def test_r8_a_server_that_stands_still_is_not_flooded_and_answers_on_the_old_connection() -> None:
    network = FaultyNetwork(latency=0.001)
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        changes: list[bool] = []
        client.on_connection_change(changes.append)
        dialed = network.links("store")[0]
        network.partition("store")  # its system accepts connections, but the server sends nothing
        asked = asyncio.create_task(client.put("a", b"", timeout=60.0))
        await asyncio.sleep(8.0)
        network.heal("store")
        await asked
        await asyncio.sleep(5.0)
        assert network.links("store") == [dialed]
        assert changes == []
        assert server.connections == 1


@virtual_time
async def test_r8_if_every_answer_takes_three_seconds_clients_do_not_reconnect_for_ever() -> None:
    network = FaultyNetwork(latency=1.5)
    async with serve_in_memory(network), connect_in_memory(network) as client, client.kept_lease(60.0):
        changes: list[bool] = []
        client.on_connection_change(changes.append)
        for _ in range(30):
            await client.put("a", b"")
        assert changes == []
        network.forget_flows()
        await client.put("a", b"", timeout=60.0)
        assert changes == [False, True]


async def test_r8_a_cut_on_a_real_network_is_over_within_a_second() -> None:
    """The honest run: a proxy that drops the data of both directions, and resets no connection."""
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(f"tcp://127.0.0.1:{proxy.port}") as client,
        client.kept_lease(TTL),
    ):
        proxy.swallow()
        asked = asyncio.create_task(client.add("count", 1))
        await proxy.until(lambda: proxy.connections >= 3)
        proxy.pass_new()
        assert await asked == 1
        assert await client.get("count") is not None


@pytest.mark.skipif("sys.platform != 'linux'", reason="elsewhere nobody knows what was acknowledged")
async def test_r8_a_connection_that_a_proxy_only_pretends_to_carry_is_left() -> None:
    """The proxy's system acknowledges all data; the client relied on that for 30 s, for most of a lease."""
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        url = f"tcp://127.0.0.1:{proxy.port}"
        async with store.connect(url, timeout=25.0) as awaited:

            def add_twice() -> list[int]:
                with store.sync.connect(url, timeout=25.0) as client:
                    client.add("blocked", 1)
                    connected.set()
                    swallowed.wait()
                    return [client.add("blocked", 1)]

            connected, swallowed = threading.Event(), threading.Event()
            blocked = asyncio.create_task(asyncio.to_thread(add_twice))
            await asyncio.to_thread(connected.wait)
            proxy.swallow()
            proxy.pass_new()
            swallowed.set()
            assert await awaited.add("awaited", 1) == 1, "the session has gone on, on another connection"
            assert await blocked == [2]
