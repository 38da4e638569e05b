"""S5: leases, first as the engine alone keeps them, and then as clients and servers do."""

import asyncio
import time
from typing import cast

import pytest

import store
from store import Watch
from tests.support.processes import start_python
from tests.support.proxy import Proxy
from tests.support.stores import MemoryNetwork, connect_blocking, connect_in_memory, serve_in_memory
from tests.support.virtual_time import VirtualTimeLoop, now

virtual_time = pytest.mark.virtual_time


async def deletion(watch: Watch) -> float:
    """Return the time of the next deletion."""
    async for event in watch:
        if event.kind == "delete":
            break
    return now()


@virtual_time
@pytest.mark.parametrize("ttl", [0.05, 0.5, 1.0, 9.99, 600.0])
async def test_s5_a_key_goes_between_its_ttl_and_a_tenth_of_a_second_later(ttl: float) -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client, client.watch("") as watch:
        await asyncio.sleep(0.033)
        lease = await client.grant(ttl)
        granted_at = now()
        await client.put("leased", b"", lease=lease)
        assert ttl <= await deletion(watch) - granted_at <= ttl + 0.1 + 1e-6
        put_at = now()
        await client.put("simple", b"", ttl=ttl)
        assert ttl - 1e-6 <= await deletion(watch) - put_at <= ttl + 0.1 + 1e-6


@virtual_time
async def test_s5_each_keep_alive_gives_the_full_ttl_again() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client, client.watch("") as watch:
        lease = await client.grant(5.0)
        await client.put("a", b"", lease=lease)
        for _ in range(10):
            await asyncio.sleep(4.9)
            await lease.keep_alive()
        renewed_at = now()
        assert await lease.time_to_live() == pytest.approx(5.0)
        assert 5.0 <= await deletion(watch) - renewed_at <= 5.1 + 1e-6
        with pytest.raises(store.LeaseNotFound):
            await lease.keep_alive()


@virtual_time
@pytest.mark.parametrize("how", ["the answer is late", "the answer is lost with its connection"])
async def test_s5_a_grant_that_timed_out_or_was_cancelled_leaves_no_lease(how: str) -> None:
    network = MemoryNetwork(latency=0.5)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        kept = await client.grant(600.0)
        granting = asyncio.create_task(client.grant(600.0))
        await asyncio.sleep(0.1)
        granting.cancel()
        with pytest.raises(store.StoreTimeoutError):
            await client.grant(600.0, timeout=0.7)
        if "lost" in how:
            network.reset("client")
        await asyncio.sleep(5.0)
        assert (await client.stats())["leases"] == 1
        assert await kept.time_to_live() > 590.0


@pytest.mark.parametrize("how", ["the answer is late", "the answer is lost with its connection"])
async def test_s5_a_blocking_grant_that_timed_out_leaves_no_lease(how: str) -> None:
    """It left a lease that nobody knew for its whole TTL. Now the next call of the client revokes it."""
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(server.url) as other,
        connect_blocking(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        kept = await asyncio.to_thread(client.grant, 600.0)
        proxy.delay = 0.5  # each way
        granting = asyncio.create_task(asyncio.to_thread(client.grant, 600.0, timeout=0.8))
        while (await other.stats())["leases"] < 2:
            pass
        if "lost" in how:
            await proxy.refuse()
            proxy.cut()
        with pytest.raises(store.StoreError) as ended:
            await granting
        assert ended.value.maybe_applied
        proxy.delay = 0.0
        await proxy.accept()
        await asyncio.to_thread(client.ping)
        async with asyncio.timeout(20.0):
            while (await other.stats())["leases"] > 1:
                pass
        assert await asyncio.to_thread(kept.time_to_live) > 590.0


@virtual_time
async def test_s5_a_client_that_is_closed_after_a_grant_that_timed_out_leaves_no_lease() -> None:
    """Regression: its lease stayed for its TTL, although the answer came in time for the last call."""
    network = MemoryNetwork(latency=0.05)
    async with serve_in_memory(network) as server:
        async with connect_in_memory(network) as client:
            with pytest.raises(store.StoreTimeoutError):
                await client.grant(600.0, timeout=0.06)
        await asyncio.sleep(1.0)
        assert server.figures()["leases"] == 0


async def test_s5_a_blocking_client_that_is_closed_after_a_grant_that_timed_out_leaves_no_lease() -> None:
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        async with connect_blocking(f"tcp://127.0.0.1:{proxy.port}") as client:
            await asyncio.to_thread(client.ping)
            proxy.delay = 0.04  # each way
            with pytest.raises(store.StoreTimeoutError):
                await asyncio.to_thread(client.grant, 600.0, timeout=0.06)
        async with asyncio.timeout(20.0):
            while server.figures()["leases"]:  # noqa: ASYNC110 - the server sends no notification
                await asyncio.sleep(0.01)


@virtual_time
async def test_s5_a_closed_connection_is_noticed_after_the_disconnect_ttl_and_a_cut_network_after_the_ttl() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network, source="other") as other, other.watch("") as watch:
        for fault, least in ((network.reset, 1.0), (network.partition, 10.0)):
            client = await connect_in_memory(network, source="node").__aenter__()
            await client.put("node", b"", lease=await client.grant(10.0, disconnect_ttl=1.0, gone_ttl=None))
            network.refuse("node")
            fault("node")
            started = now()
            assert least <= await deletion(watch) - started <= least + 0.1 + 1e-6
            network.heal("node")
            network.stop_refusing("node")
            await client.aclose()


@virtual_time
async def test_s5_a_client_that_comes_back_in_time_keeps_its_lease_and_one_that_does_not_renew_it_does_not() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network, source="node") as client:
        lease = await client.grant(10.0, disconnect_ttl=1.0, gone_ttl=None)
        await client.put("node", b"", lease=lease)
        network.reset("node")
        await asyncio.sleep(0.5)
        await lease.keep_alive()
        await asyncio.sleep(5.0)
        assert await client.get("node") is not None
        network.reset("node")
        await asyncio.sleep(5.0)
        assert client.connected
        assert await client.get("node") is None, "being connected is not keeping a lease"


@virtual_time
async def test_s5_time_in_which_the_server_stood_still_is_not_counted() -> None:
    network = MemoryNetwork()
    loop = cast("VirtualTimeLoop", asyncio.get_running_loop())
    async with serve_in_memory(network), connect_in_memory(network) as client:
        unkept = await client.grant(5.0)
        for _ in range(5):
            loop.timeline.now += 60.0
            await asyncio.sleep(0.2)
        assert await unkept.time_to_live() > 5.0 - 5 * (0.3 + 0.2) - 0.1


async def test_s5_a_keep_alive_sent_to_a_server_that_stands_still_counts() -> None:
    async with store.serve() as server, connect_blocking(server.url) as client:
        lease = await asyncio.to_thread(client.grant, 0.25)
        renewing = asyncio.create_task(asyncio.to_thread(lease.keep_alive))
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - the server's loop is blocked, while the thread sends
        await renewing
        assert await asyncio.to_thread(lease.time_to_live) > 0.1


async def test_s5_a_server_that_was_stopped_for_longer_than_the_ttl_lets_nothing_lapse_for_that() -> None:
    """SIGSTOP really stops the process. Its sockets hold the messages, and it reads them before any lease expires."""
    ttl = 0.8
    async with start_python("-m", "rdzv", "serve", "--port", "0") as server:
        line = await server.says("listens on")
        url = f"tcp://{line.partition('listens on ')[2].partition(',')[0]}"
        async with store.connect(url) as client, store.connect(url) as other, other.watch("") as watch:
            kept, unkept = await client.grant(ttl), await client.grant(ttl)
            await client.put("kept", b"", lease=kept)
            await client.put("unkept", b"", lease=unkept)
            server.stop()
            renewing = asyncio.create_task(kept.keep_alive())
            await asyncio.sleep(2 * ttl)  # of the server's real clock, in which it is really stopped
            assert not renewing.done()
            resumed_at = now()
            server.resume()
            await renewing
            assert {entry.key for entry in await client.list("")} == {"kept", "unkept"}
            lapsed: dict[str, float] = {}
            async with asyncio.timeout(60):
                async for event in watch:
                    if event.kind == "delete":
                        lapsed[event.key] = now() - resumed_at
                    if len(lapsed) == 2:
                        break
            assert list(lapsed) == ["unkept", "kept"]
            assert lapsed["kept"] >= ttl, "renewed by what waited in the socket"
