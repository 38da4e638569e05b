"""R20: a death is heard at once. When a process has closed all its connections without a goodbye, its leases end after
`gone_ttl` (0.1 s), unless it comes back. If many processes disconnect together, as when a proxy is restarted, their
leases end after `disconnect_ttl`. A false alarm costs a round, never a promise.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import rdzv
import store
from store import Grant, Put, Watch
from tests.support.faults import FaultyNetwork
from tests.support.processes import start_python
from tests.support.runs import VirtualRun, listen
from tests.support.spoken import Granted
from tests.support.stores import Peer, connect_in_memory, introduce, process_identity_of, serve_in_memory
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time

GONE_TTL, DISCONNECT_TTL = 0.1, 1.0
LATE = 0.11  # seconds: the server looks every 0.1 s at the latest, and the network takes a little


@contextlib.asynccontextmanager
async def member(network: FaultyNetwork, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """A process that holds a lease with a key of its own name, until it loses the lease."""
    ready = asyncio.Event()

    async def live() -> None:
        async with (
            connect_in_memory(network, source=name) as client,
            client.kept_lease(10.0, disconnect_ttl=DISCONNECT_TTL, gone_ttl=GONE_TTL) as lease,
        ):
            await client.put(f"members/{name}", b"", lease=lease)
            ready.set()
            await asyncio.Event().wait()

    living = asyncio.create_task(live())
    await ready.wait()
    yield living
    living.cancel()
    await asyncio.wait([living])


@contextlib.asynccontextmanager
async def serving(network: FaultyNetwork) -> AsyncIterator[tuple[store.Server, Watch]]:
    """A server, and a client's watch of its members."""
    async with (
        serve_in_memory(network) as server,
        connect_in_memory(network, source="watcher") as watcher,
        watcher.watch("members/") as watch,
    ):
        yield server, watch


async def join(peer: Peer, name: str, *, gone_ttl: float | None = GONE_TTL) -> None:
    """Put a key of this name, on a new lease."""
    granted = await peer.answer(*peer.ask(Grant(ttl=10.0, disconnect_ttl=DISCONNECT_TTL, gone_ttl=gone_ttl)))
    assert isinstance(granted, Granted)
    await peer.answer(*peer.ask(Put(f"members/{name}", b"", lease=granted.lease)))


async def deaths(watch: Watch, count: int) -> list[float]:
    """Return the times at which the next members go."""
    times: list[float] = []
    async for event in watch:
        if event.kind == "delete":
            times.append(now())
            if len(times) == count:
                break
    return times


def let_back(network: FaultyNetwork, *names: str) -> None:
    """Let these processes connect again."""
    for name in names:
        network.stop_refusing(name)


def kill(network: FaultyNetwork, *names: str) -> None:
    """End all connections of these processes from their side, for good."""
    for name in names:
        network.refuse(name)
    for name in names:
        network.cut(name)


@virtual_time
async def test_r20_a_killed_process_is_heard_of_after_gone_ttl_once_all_of_its_connections_are_closed() -> None:
    network = FaultyNetwork(latency=0.001)
    async with serving(network) as (_, watch), member(network, "a"), member(network, "b"), member(network, "c"):
        # the process has other connections, too
        shared = await introduce(network, source="c", process=process_identity_of("c"))
        assert isinstance(await shared.answer(*shared.ask(Put("other", b""))), object)
        killed_at = now()
        kill(network, "c")
        (gone_at,) = await deaths(watch, 1)
        assert GONE_TTL <= gone_at - killed_at <= GONE_TTL + LATE
        let_back(network, "c")


@virtual_time
async def test_r20_one_of_two_connections_closed_is_no_death() -> None:
    network = FaultyNetwork(latency=0.001)
    async with serving(network) as (server, watch):
        both = process_identity_of("a")
        keeping, other = [await introduce(network, source="a", process=both) for _ in range(2)]
        await join(keeping, "a")
        closed_at = now()
        keeping.transport.close()
        (gone_at,) = await deaths(watch, 1)
        assert gone_at - closed_at >= DISCONNECT_TTL, "its process lives, and may yet keep it on the other connection"
        assert server.connections == 2
        other.transport.close()


@virtual_time
@pytest.mark.parametrize("times", [1, 5])
async def test_r20_a_process_that_comes_back_at_once_loses_nothing(times: int) -> None:
    """ "unless it comes back": a living client reconnects before any back-off."""
    network = FaultyNetwork(latency=(0.001, 0.01))
    async with (
        serve_in_memory(network) as server,
        connect_in_memory(network, source="watcher") as watcher,
        connect_in_memory(network, source="a") as client,
        client.kept_lease(10.0, disconnect_ttl=DISCONNECT_TTL, gone_ttl=GONE_TTL),
        member(network, "b"),
        member(network, "c"),
    ):
        connected: asyncio.Queue[bool] = asyncio.Queue()
        client.on_connection_change(connected.put_nowait)
        for _ in range(times):
            await asyncio.sleep(0.5)
            lost_at = now()
            network.reset("a")
            assert [await connected.get(), await connected.get()] == [False, True]
            assert now() - lost_at < 0.06
        await asyncio.sleep(3.0)
        assert await watcher.count("members/") == 2
        assert server.figures()["leases_lapsed"] == 0


@virtual_time
@pytest.mark.parametrize(("killed", "left"), [(30, 40), (30, 2), (2, 1)])
async def test_r20_many_at_once_are_judged_by_their_disconnect_ttl(killed: int, left: int) -> None:
    """Here 30 of 70 processes, 30 of 32, and two of 3 disconnect at once, as when a proxy or a switch is restarted."""
    network = FaultyNetwork(latency=0.001)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve_in_memory(network))
        watcher = await stack.enter_async_context(connect_in_memory(network, source="watcher"))
        watch = await stack.enter_async_context(watcher.watch("members/"))
        for number in range(killed + left):
            await stack.enter_async_context(member(network, str(number)))
        killed_at = now()
        kill(network, *map(str, range(killed)))
        for gone_at in await deaths(watch, killed):
            assert DISCONNECT_TTL <= gone_at - killed_at <= DISCONNECT_TTL + LATE
        let_back(network, *map(str, range(killed)))


@virtual_time
async def test_r20_a_proxy_that_returns_in_half_a_second_costs_no_member_its_place() -> None:
    network = FaultyNetwork(latency=0.001)
    names = list(map(str, range(30)))
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_in_memory(network))
        for name in names:
            await stack.enter_async_context(member(network, name))
        kill(network, *names)
        await asyncio.sleep(0.5)
        let_back(network, *names)
        await asyncio.sleep(5.0)
        assert server.figures()["leases_lapsed"] == 0


@virtual_time
async def test_r20_a_connection_closed_by_the_server_is_no_death() -> None:
    """A member that the server disconnects for its bytes has `disconnect_ttl` to come back."""
    network = FaultyNetwork(latency=0.001)
    async with serving(network) as (_, watch):
        peer = await introduce(network, source="a", process=process_identity_of("a"))
        await join(peer, "a")
        hung_up_at = now()
        peer.transport.write(b"\xff" * 64)
        (gone_at,) = await deaths(watch, 1)
        assert gone_at - hung_up_at >= DISCONNECT_TTL


@virtual_time
async def test_r20_a_lease_without_gone_ttl_and_a_client_of_before_are_judged_by_disconnect_ttl() -> None:
    network = FaultyNetwork(latency=0.001)
    async with serving(network) as (_, watch):
        for name, process, gone_ttl in (("a", process_identity_of("a"), None), ("b", b"", GONE_TTL)):
            peer = await introduce(network, source=name, process=process)
            await join(peer, name, gone_ttl=gone_ttl)
            closed_at = now()
            peer.transport.close()
            (gone_at,) = await deaths(watch, 1)
            assert gone_at - closed_at >= DISCONNECT_TTL


@virtual_time
async def test_r20_a_restart_of_the_store_is_no_members_death() -> None:
    async with VirtualRun(min_nodes=3, last_call_timeout=0, durable=True) as run:
        nodes = [run.handler(name) for name in "abc"]
        await run.meet(*nodes)
        heard = await listen(run, nodes[0])
        run.kill_store()
        await asyncio.sleep(0.7)
        run.restart_store()
        await asyncio.sleep(20.0)
        assert heard.changes == []


@virtual_time
@pytest.mark.parametrize("nodes", [4, 16])
async def test_r20_every_survivor_is_notified_of_a_killed_node_soon_after_gone_ttl(nodes: int) -> None:
    async with VirtualRun(min_nodes=2, max_nodes=nodes, last_call_timeout=1) as run:
        handlers = [run.handler(f"n{number}") for number in range(nodes)]
        await run.meet(*handlers)
        heard = [await listen(run, handler) for handler in handlers[1:]]
        killed_at = now()
        run.crash("n0")  # if it coordinated, another node is elected first
        for one in heard:
            await one.until(rdzv.NodesLost)
            assert one.times[-1] - killed_at <= GONE_TTL + LATE + 0.2


@virtual_time
@pytest.mark.parametrize("killed", ["the coordinator", "another"])
async def test_r20_the_parameter_gone_ttl_decides_of_both_leases_of_a_node(killed: str) -> None:
    async with VirtualRun(min_nodes=4, last_call_timeout=0, gone_ttl=0.3) as run:
        handlers = {name: run.handler(name) for name in "abcd"}
        await run.meet(*handlers.values())
        coordinator = (await handlers["a"].status()).coordinator
        assert coordinator is not None
        victim = coordinator if killed == "the coordinator" else next(name for name in handlers if name != coordinator)
        heard = await listen(run, next(handlers[name] for name in handlers if name != victim))
        killed_at = now()
        run.crash(victim)
        await heard.until(rdzv.NodesLost)
        assert 0.3 <= heard.times[-1] - killed_at <= 0.3 + LATE + 0.2


NODE = """
import asyncio, sys
import store

async def main():
    async with store.connect(sys.argv[1]) as keeping, store.connect(sys.argv[1]), store.connect(sys.argv[1]):
        lease = await keeping.grant(60.0, disconnect_ttl=30.0)
        await keeping.put("node", b"", lease=lease)
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_r20_a_process_killed_by_sigkill_is_heard_of_long_before_its_disconnect_ttl() -> None:
    async with (
        store.serve() as server,
        store.connect(server.url) as client,
        client.watch("node") as watch,
        start_python("-c", NODE, server.url) as node,
    ):
        await node.line("ready")
        node.kill()
        killed_at = now()
        await asyncio.wait_for(deaths(watch, 1), 15.0)
        assert now() - killed_at >= GONE_TTL - 0.01
