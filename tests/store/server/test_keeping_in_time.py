"""Keep-alives that have arrived are read before a lease expires, wherever they wait (S5)."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store import Grant, Put, Server
from store.engine.engine import Engine
from store.messages import Count, Granted, KeepAlive, List, Listing
from tests.support.faults import FaultyDisk, FaultyJournal
from tests.support.limits import limits_with
from tests.support.stores import Peer, introduce, serve_in_memory
from tests.support.virtual_time import VirtualTimeLoop, now

virtual_time = pytest.mark.virtual_time


@virtual_time
async def test_a_keep_alive_that_has_arrived_is_read_before_its_lease_lapses() -> None:
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
            # The server stands still. When it continues, the lease is due, and the keep-alive is in the socket.
            await asyncio.sleep(0.1 * offset / 100)
            loop.call_soon(network.heal, "peer")
            loop.timeline.now += 10.0
            assert isinstance(await peer.answer(*asked), Granted), f"it lapsed at offset {offset}"
            saved += 1
            peer.transport.close()
    assert saved == 100


@virtual_time
async def test_a_keep_alive_that_is_not_read_since_the_disk_is_behind_counts() -> None:
    """A client that writes is not read while the disk is behind. Its keep-alive has arrived all the same."""
    disk = FaultyDisk(random.Random(0), store_id="id", on_commit=lambda _: None, now=now)
    journal = disk.open_journal(asyncio.get_running_loop(), kind=FaultyJournal)
    engine = Engine.restore(journal.load(), limits=limits_with(journal_bytes_max=1000), now=now())

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    server = Server(engine, clock=now, journal=journal, in_thread=at_once)
    server.start()
    network = MemoryNetwork()
    with contextlib.closing(network.listen("store", server.protocol)):
        peer = await introduce(network)
        granted = await peer.answer(*peer.ask(Grant(ttl=2.0)))
        assert isinstance(granted, Granted)
        await peer.answer(*peer.ask(store.Put("held", b"", lease=granted.lease)))
        disk.stalled_until = now() + 7.0
        peer.ask(store.Put("large", bytes(2000)))
        await asyncio.sleep(1.5)
        (renewal,) = peer.ask(KeepAlive(lease=granted.lease))
        await asyncio.sleep(5.0)
        assert server.figures()["leases_lapsed"] == 0, "and nothing goes meanwhile"
        assert isinstance(await peer.answer(renewal), Granted)
        renewed_at = now()
        while server.figures()["leases_lapsed"] == 0:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)  # of virtual time
        assert 1.9 <= now() - renewed_at <= 2.1
        peer.transport.abort()
        await asyncio.sleep(0.1)
    await server.shut_down()
    disk.crash_journal()
    disk.close()


class Slow:
    """A store whose stopwatch and clock advance by a millisecond with every reading of the stopwatch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.network = MemoryNetwork()
        self.server = Server(Engine(store_id="it"), clock=lambda: self.seconds, stopwatch=self._look)
        self.network.listen("store", self.server.protocol)

    def _look(self) -> float:
        self.seconds += 0.001
        return self.seconds


async def leased_by_hand(peer: Peer, key: str, *, ttl: float) -> int:
    """Return a lease with one key on it."""
    granted = cast("Granted", await peer.answer(*peer.ask(Grant(ttl=ttl))))
    await peer.answer(*peer.ask(Put(key, b"", lease=granted.lease)))
    return granted.lease


@virtual_time
@pytest.mark.parametrize("asked_by", ["its keeper, behind a heap of its own", "a new connection, behind many heaps"])
async def test_a_keep_alive_that_waits_for_its_turn_counts(asked_by: str) -> None:
    """Pending keep-alives are read before any lease expires, also those that were read and wait in the ring."""
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
    assert slow.server._engine.advance_lease_clock(now=slow.seconds)
    await slow.server._expire_leases()
    listing = cast("Listing", await other.answer(*other.ask(List(prefix=""))))
    assert [entry.key for entry in listing.entries if entry] == ["kept"], "and who has sent nothing is not spared"
    assert await asker.answer(kept) == Granted(lease=lease, ttl=0.1)
