"""S6, for each table of the server that has a bound: living clients get in, whether dead or living ones fill the table.

docs/limits.md says which entry of each table makes way.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import store
from store import Add, Grant, LimitExceeded, Put, StoreError
from tests.support.limits import limits_with
from tests.support.processes import free_port, start_python
from tests.support.spoken import Request, Wait, Watch, wire
from tests.support.stores import MemoryNetwork, Peer, connect_in_memory, introduce, serve_in_memory

AWAY_LEAST = 10.0  # seconds for which a session keeps its place against newcomers
MANY = 12  # more than any table below takes
LEASE = 20.0


@dataclass(frozen=True, kw_only=True)
class ConnectionTable:
    """A table of the server: its bound, the requests of each client that fill it, and the request of a newcomer.

    Attributes:
        dead_for: Seconds that the dead may keep a newcomer out.
        refusal: The newcomer's error while the living fill the table; "" if it gets in.
    """

    limits: dict[str, int]
    fill: tuple[Request[Any], ...]
    acknowledges: bool = True
    newcomer: Callable[[store.Client], Awaitable[object]]
    dead_for: float = 1.0
    refusal: str = ""


async def watch(client: store.Client) -> None:
    for _ in range(4):
        await client.watch("k").__aenter__()


async def resume(client: store.Client) -> None:
    """Watch from the beginning: the watch reports that the history is gone, and then the present keys."""
    async with client.watch("k", snapshot=True) as watching:
        assert (await anext(aiter(watching))).key == "k"
    await client.put("k", b"")


TABLES = {
    "sessions": ConnectionTable(
        limits={"sessions_max": 4},
        fill=(Put("k", b""),),
        newcomer=lambda client: client.get("k"),
        dead_for=AWAY_LEAST + 2.0,
        refusal="the server has 4 sessions (sessions_max)",
    ),
    "leases": ConnectionTable(
        limits={"leases_max": 4},
        fill=(Grant(ttl=LEASE),),
        newcomer=lambda client: client.grant(1.0),
        dead_for=LEASE + 2.0,
        refusal="leases_max is 4: revoke some",
    ),
    "watches": ConnectionTable(limits={"watches_max": 4}, fill=(Watch(prefix="k"),) * 5, newcomer=watch),
    "waits": ConnectionTable(
        limits={"watches_max": 4}, fill=(Wait(keys=("never",)),) * 5, newcomer=lambda client: client.wait(["k"])
    ),
    "kept replies of one client": ConnectionTable(
        limits={"session_replies_max": 4},
        fill=(Add("sum", 1),) * 5,
        acknowledges=False,
        newcomer=lambda client: client.add("sum", 1),
    ),
    "kept replies of all clients": ConnectionTable(
        limits={"replies_bytes_max": 1000},
        fill=(Add("sum", 1),) * 5,
        acknowledges=False,
        newcomer=lambda client: client.add("sum", 1),
    ),
    "history": ConnectionTable(limits={"history_bytes_max": 2000}, fill=(Put("k", bytes(500)),) * 3, newcomer=resume),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize("by", ["the dead", "the living"])
@pytest.mark.parametrize("name", TABLES)
async def test_s6_a_newcomer_finds_room_in_a_full_table_or_an_error_that_says_why_not(name: str, by: str) -> None:
    table, network = TABLES[name], MemoryNetwork()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve_in_memory(network, limits=limits_with(**table.limits)))
        writer = await stack.enter_async_context(connect_in_memory(network, source="writer"))
        await writer.put("k", b"")
        living: list[Peer] = []
        for number in range(MANY):
            with contextlib.suppress(AssertionError, TimeoutError):  # the table is full, and the newcomer gets an error
                async with asyncio.timeout(0.1):
                    peer = await introduce(network, source=f"peer {number}")
                    living.append(peer)
                    await fill(peer, table)
        if by == "the dead":
            for peer in living:
                peer.transport.abort()
                await peer.lost.wait()
        newcomer = stack.enter_async_context(connect_in_memory(network, source="newcomer", timeout=table.dead_for))
        began = asyncio.get_running_loop().time()
        if by == "the living" and table.refusal:
            with pytest.raises(StoreError) as refused:
                await table.newcomer(await newcomer)
            assert table.refusal in str(refused.value)
        else:
            client = await newcomer
            while True:
                assert asyncio.get_running_loop().time() - began <= table.dead_for
                with contextlib.suppress(LimitExceeded):
                    await table.newcomer(client)
                    break
                await asyncio.sleep(0.1)
        await writer.put("still", b"")


async def fill(peer: Peer, table: ConnectionTable) -> None:
    """Send the requests that fill the table, and read the answers, except those that never come."""
    first = peer.connection.register_request(table.fill[0], None).request_id
    for request_id, request in enumerate(table.fill, first):
        acknowledged = request_id - 1 if table.acknowledges else 0
        peer.transport.write(wire.encode_request(request_id, acknowledged, request))
    await asyncio.sleep(0.01)


@pytest.mark.virtual_time
async def test_s6_a_client_whose_session_made_way_is_told_that_its_write_is_in_doubt_and_goes_on() -> None:
    network = MemoryNetwork(latency=0.1)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve_in_memory(network, limits=limits_with(sessions_max=3)))
        client = await stack.enter_async_context(connect_in_memory(network, source="client"))
        adding = asyncio.create_task(client.add("sum", 1, timeout=60.0))
        await asyncio.sleep(0.15)  # it is done, and its answer is under way
        network.partition("client")
        network.reset("client")
        for number in range(2):
            await stack.enter_async_context(connect_in_memory(network, source=f"{number}"))
        async with connect_in_memory(network, source="newcomer", timeout=20.0) as newcomer:
            assert (await newcomer.stats())["sessions"] == 3
            network.heal("client")
        with pytest.raises(store.ConnectionLost) as told:
            await adding
        assert told.value.maybe_applied
        assert await client.add("sum", 1) == 2


@pytest.mark.parametrize("by", ["strangers", "the living"])
async def test_s6_connections_that_have_proved_nothing_make_way_and_others_do_not(by: str) -> None:
    limits = store.Limits(connections_max=20)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(store.serve(limits=limits))
        if by == "strangers":
            for _ in range(30):
                _, writer = await asyncio.open_connection(server.host, server.port)
                stack.callback(writer.close)
            async with store.connect(server.url, timeout=20) as newcomer:
                await newcomer.put("k", b"")
            return
        living = [await stack.enter_async_context(store.connect(server.url)) for _ in range(20)]
        with pytest.raises(StoreError, match="it has 20 connections, the most it takes"):
            async with store.connect(server.url, timeout=0.5):
                raise AssertionError("there is no room")
        await living[0].aclose()
        async with store.connect(server.url, timeout=20) as newcomer:
            await newcomer.put("k", b"")
        assert await living[1].get("k") is not None


LIVING = """import sys, store.sync
with store.sync.connect(sys.argv[1], timeout=60) as client:
    told = 0
    while True:
        told += 1
        assert client.add("sum", 1) == told, "an addition was lost, or made twice"
        print(told, file=sys.stderr, flush=True)
"""


@pytest.mark.in_ci
async def test_s6_a_client_that_stands_still_beside_a_full_table_of_sessions_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    """Its session is among the restored ones, and keeps its place for 10 s."""
    port = free_port()
    serve = ("-m", "rdzv", "serve", "--port", str(port), "--data-dir", str(tmp_path), "--limit", "connections_max=10")
    async with contextlib.AsyncExitStack() as stack:
        async with start_python(*serve) as server:
            await server.says("listens on")
            living = await stack.enter_async_context(start_python("-c", LIVING, f"tcp://127.0.0.1:{port}"))
            await living.says("20")
            await kill_writers(port, 19)
            living._signal(signal.SIGSTOP)
            server.kill()
        async with start_python(*serve) as server:
            await server.says("listens on")
            newcomers = [asyncio.create_task(write_once(port, number)) for number in range(4)]
            await asyncio.sleep(5.0)
            living._signal(signal.SIGCONT)
            for revision in await asyncio.gather(*newcomers):
                assert revision > 0
            told = len(living.output)
            await living.says(str(told + 100))


async def kill_writers(port: int, count: int) -> None:
    """Let clients write once, and kill their processes."""
    for _ in range(count):
        _, peer = await asyncio.get_running_loop().create_connection(Peer, "127.0.0.1", port)
        await peer.until(lambda peer=peer: peer.connection.welcomed)  # type: ignore[misc]
        await peer.answer(peer.ask(Put("k", b""))[0])
        peer.transport.abort()
        await peer.lost.wait()


async def write_once(port: int, number: int) -> int:
    async with store.connect(f"tcp://127.0.0.1:{port}", timeout=20.0) as client:
        return await client.put(f"new/{number}", b"")
