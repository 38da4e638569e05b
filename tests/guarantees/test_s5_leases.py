"""S5: leases, first as the engine alone keeps them, and then as clients and servers do."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import store
from rdzv.testing.network import MemoryNetwork
from store import Grant, Limits, Put, Server
from store.engine.engine import Engine
from store.engine.leases import LOOK_AGAIN_AFTER
from store.messages import Count, Granted, KeepAlive, List, Listing, Revoke, TimeToLive
from store.net.address import Address
from tests.support.by_hand import LOOK_EVERY, Desk
from tests.support.journals import OnTheLoopsClock
from tests.support.processes import start_python
from tests.support.stores import Peer, connect_in_memory, introduce, serve_in_memory

if TYPE_CHECKING:
    from pathlib import Path

    from store.interface import Watch
    from tests.support.virtual_time import VirtualTimeLoop


def leased(desk: Desk, ttl: float, *, disconnect_ttl: float | None = None, peer: int = 1) -> int:
    """A lease with one key on it, named like the lease."""
    lease: int = desk.ask(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer).lease
    desk.ask(Put(f"on {lease}", b"", lease=lease), peer=peer)
    return lease


@given(
    st.floats(0.01, 20.0),
    st.lists(st.tuples(st.sampled_from(["wait", "renew", "stall", "ask"]), st.floats(0.001, 8.0)), max_size=15),
)
def test_s5_a_key_on_a_lease_never_goes_before_its_ttl(ttl: float, steps: list[tuple[str, float]]) -> None:
    """ "A key on a lease never goes before its TTL"."""
    desk = Desk()
    renewed_at = desk.now
    lease = leased(desk, ttl)
    for step, seconds in steps:
        if step == "wait":
            desk.pass_time(seconds)
        elif step == "stall":
            desk.stand_still(seconds)
        elif step == "ask":
            desk.now += seconds
            desk.ask(TimeToLive(lease=lease))
        if step == "renew" and desk.ask(KeepAlive(lease=lease)).__class__.__name__ == "Granted":
            renewed_at = desk.now
        if not desk.keys():
            assert desk.now - renewed_at >= ttl - 1e-6
            return


def test_s5_a_lease_whose_keeper_was_not_heard_out_is_looked_at_again() -> None:
    """ "queued keep-alives are read before any lease lapses": also of who waits for a turn, or for the disk."""
    desk = Desk()
    lease = leased(desk, 0.2, peer=1)
    leased(desk, 0.2, peer=2)
    revoked = leased(desk, 0.2, peer=1)
    desk.now += 0.25
    desk.ask(Revoke(lease=revoked), peer=1)
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"]
    assert desk.engine.next_tick_in() == pytest.approx(LOOK_AGAIN_AFTER, abs=0.001), "and not at once, over and over"
    desk.now += LOOK_AGAIN_AFTER
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"], "for as long as it waits"
    desk.pass_time(LOOK_AGAIN_AFTER)
    assert desk.keys() == []


def test_s5_reading_a_lease_does_not_keep_it() -> None:
    """ "the connection that keeps it": asking what is left is not keeping."""
    desk = Desk()
    lease = leased(desk, 10.0, disconnect_ttl=1.0, peer=1)
    desk.disconnect(1)
    for _ in range(5):
        desk.ask(TimeToLive(lease=lease), peer=2)
        desk.pass_time(0.25)
    assert desk.keys() == []


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["keep", "close", "wait"])), max_size=30))
def test_s5_the_last_to_keep_a_lease_decides_when_it_goes(steps: list[tuple[int, str]]) -> None:
    """ "the connection that keeps it": against a model that knows only who kept it last."""
    ttl, disconnect_ttl = 2.0, 0.5
    desk = Desk()
    lease = leased(desk, ttl, disconnect_ttl=disconnect_ttl, peer=1)
    keeper: int | None = 1
    until = desk.now + ttl
    peers = {1: 1}  # several connections of each client, one after the other
    for client, step in steps:
        peer: Any = peers.get(client, client)
        if step == "wait":
            desk.pass_time(0.25)
        elif step == "close":
            if peer in desk.last_id:
                desk.disconnect(peer)
                peers[client] = peer + 10
                if keeper == peer:
                    keeper, until = None, min(until, desk.now + disconnect_ttl)
        elif desk.keys():
            desk.ask(KeepAlive(lease=lease), peer=peer)
            keeper, until = peer, desk.now + ttl
        if desk.now < until - 1e-3:
            assert desk.keys()
        elif desk.now > until + LOOK_EVERY:
            assert not desk.keys()


virtual_time = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def deletion(watch: Watch) -> float:
    """When the next key goes."""
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
async def test_s5_a_closed_connection_is_noticed_after_the_disconnect_ttl_and_a_cut_network_after_the_ttl() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network, source="other") as other, other.watch("") as watch:
        for fault, least in ((network.reset, 1.0), (network.partition, 10.0)):
            client = await connect_in_memory(network, source="node").__aenter__()
            lease = await client.grant(10.0, disconnect_ttl=1.0, gone_ttl=None)
            await client.put("node", b"", lease=lease)
            network.refuse("node")
            fault("node")
            started = now()
            assert least <= await deletion(watch) - started <= least + 0.1 + 1e-6
            network.heal("node")
            network.accept("node")
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
            loop._jumping_selector.now += 60.0
            await asyncio.sleep(0.2)
        assert await unkept.time_to_live() > 5.0 - 5 * (0.3 + 0.2) - 0.1


@virtual_time
async def test_s5_a_keep_alive_that_has_arrived_is_read_before_its_lease_lapses() -> None:
    network = MemoryNetwork()
    loop = cast("VirtualTimeLoop", asyncio.get_running_loop())
    saved = 0
    async with serve_in_memory(network):
        for offset in range(100):
            peer = await introduce(network)
            granted = await peer.answer(*peer.ask(Grant(ttl=0.3)))
            assert isinstance(granted, Granted)
            network.partition("peer")
            asked = peer.ask(KeepAlive(lease=granted.lease))
            # The server stands still; when it goes on, the lease is due, and the keep-alive is in the socket.
            await asyncio.sleep(0.1 * offset / 100)
            loop.call_soon(network.heal, "peer")
            loop._jumping_selector.now += 10.0
            assert isinstance(await peer.answer(*asked), Granted), f"it lapsed at offset {offset}"
            saved += 1
            peer.transport.close()
    assert saved == 100


@virtual_time
async def test_s5_a_keep_alive_that_is_not_read_since_the_disk_is_behind_counts(tmp_path: Path) -> None:
    """Who writes is not read while the disk takes nothing; what it sends then has arrived all the same."""
    journal = OnTheLoopsClock(tmp_path, new_id="id")
    engine = Engine.restore(journal.load(), limits=Limits(journal_bytes_max=1000), now=now())
    server = Server(engine, clock=now, journal=journal)
    server.durability.start()
    time_keeping = asyncio.create_task(server.keep_time())
    network = MemoryNetwork()
    async with network.listen("store", server.protocol):
        peer = await introduce(network)
        granted = await peer.answer(*peer.ask(Grant(ttl=2.0)))
        assert isinstance(granted, Granted)
        await peer.answer(*peer.ask(store.Put("held", b"", lease=granted.lease)))
        journal.WRITES_IN = 10.0
        peer.ask(store.Put("large", bytes(2000)))
        await asyncio.sleep(1.5)
        (renewal,) = peer.ask(KeepAlive(lease=granted.lease))
        await asyncio.sleep(5.0)
        assert server.figures()["leases_lapsed"] == 0, "and nothing goes meanwhile"
        journal.WRITES_IN = 0.002
        assert isinstance(await peer.answer(renewal), Granted)
        renewed_at = now()
        while server.figures()["leases_lapsed"] == 0:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)  # of virtual time
        assert 1.9 <= now() - renewed_at <= 2.1
        peer.transport.abort()
        await asyncio.sleep(0.1)
    time_keeping.cancel()
    await asyncio.wait([time_keeping])
    journal.kill()


async def test_s5_a_keep_alive_sent_to_a_server_that_stands_still_counts() -> None:
    async with store.serve() as server:
        client = store.sync.Client(Address(host="127.0.0.1", port=server.port))
        lease = await asyncio.to_thread(client.grant, 0.25)
        renewing = asyncio.create_task(asyncio.to_thread(lease.keep_alive))
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - the server's loop is blocked, while the thread sends
        await renewing
        assert (await asyncio.to_thread(client.call, TimeToLive(lease=lease.id))).remaining > 0.1
        await asyncio.to_thread(client.close)


async def test_s5_a_server_that_was_stopped_for_longer_than_the_ttl_lets_nothing_lapse_for_that() -> None:
    """Really stopped: SIGSTOP. What was sent to it meanwhile is in its sockets, and is read before anything lapses."""
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


NODE = """
import asyncio, sys, store

async def main():
    async with store.connect(sys.argv[1]) as client:
        lease = await client.grant(60.0, disconnect_ttl=0.5, gone_ttl=None)
        await client.put("node", b"", lease=lease)
        print("ready", flush=True)
        await client.wait(["never"])

asyncio.run(main())
"""


async def test_s5_a_process_killed_by_sigkill_is_noticed_within_its_disconnect_ttl() -> None:
    async with (
        store.serve() as server,
        store.connect(server.url) as client,
        client.watch("node") as watch,
        start_python("-c", NODE, server.url) as node,
    ):
        await node.line("ready")
        node.kill()
        killed_at = now()
        with anyio.fail_after(50.0):  # a busy machine takes its time; the sooner end, to the moment, is shown above
            event = await anext(event async for event in watch if event.kind == "delete")
        assert event.cause == "disconnected", "and not for the silence of its TTL, which is 60 s"
        assert now() - killed_at >= 0.5


class Slow:
    """A store whose stopwatch and clock go on by a millisecond with every look at the stopwatch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.network = MemoryNetwork()
        self.server = Server(Engine(store_id="it"), clock=lambda: self.seconds, stopwatch=self._look)
        self.network.listen("store", self.server.protocol)

    def _look(self) -> float:
        self.seconds += 0.001
        return self.seconds


async def leased_by_hand(peer: Peer, key: str, *, ttl: float) -> int:
    """A lease with one key on it."""
    granted = cast("Granted", await peer.answer(*peer.ask(Grant(ttl=ttl))))
    await peer.answer(*peer.ask(Put(key, b"", lease=granted.lease)))
    return granted.lease


@virtual_time
@pytest.mark.parametrize("asked_by", ["its keeper, behind a heap of its own", "a new connection, behind many heaps"])
async def test_s5_a_keep_alive_that_waits_for_its_turn_counts(asked_by: str) -> None:
    """ "queued keep-alives are read before any lease lapses": those that were read and wait in the ring, too."""
    slow = Slow()
    keeper, other = await introduce(slow.network, source="keeper"), await introduce(slow.network, source="other")
    greedy = [await introduce(slow.network, source=f"greedy {number}") for number in range(30)]
    lease, _ = [await leased_by_hand(peer, key, ttl=0.1) for peer, key in ((keeper, "kept"), (other, "dead"))]
    asker, heap = keeper, [Count(prefix="")] * 300
    if asked_by.startswith("a new connection"):
        asker, heap = await introduce(slow.network, source="keeper again"), []
    for peer in greedy:
        peer.ask(*[Count(prefix="")] * 300)
    kept = asker.ask(*heap, KeepAlive(lease=lease))[-1]
    slow.seconds += 0.2
    assert slow.server.engine.look(now=slow.seconds)
    await slow.server._let_lapse()
    listing = cast("Listing", await other.answer(*other.ask(List(prefix=""))))
    assert [entry.key for entry in listing.entries if entry] == ["kept"], "and who has sent nothing is not spared"
    assert await asker.answer(kept) == Granted(lease=lease, ttl=0.1)
