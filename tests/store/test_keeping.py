"""Leases that keep themselves: for as long as a block lasts, and no longer than they can be relied on."""

import asyncio
import time
from functools import partial

import pytest

import store
import store.sync
from rdzv.testing.network import MemoryNetwork
from store.errors import LeaseNotFound
from store.interface import Lease
from store.keeping import renew_if_old
from tests.support.stores import connect_in_memory, serve_in_memory

virtual_time = pytest.mark.virtual_time


@virtual_time
async def test_a_kept_lease_lasts_as_long_as_its_block() -> None:
    network = MemoryNetwork(latency=0.05)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        async with client.kept_lease(5.0) as lease:
            await client.put("mine", b"", lease=lease)
            await asyncio.sleep(600.0)
            assert await client.get("mine") is not None
            lease.check()
        assert await client.get("mine") is None


@virtual_time
async def test_a_block_is_cancelled_when_its_lease_may_be_anothers() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        started = asyncio.get_running_loop().time()
        with pytest.raises(LeaseNotFound, match="5 s could not be renewed in time"):
            async with client.kept_lease(5.0):
                network.partition("client")
                await asyncio.sleep(600.0)
        assert asyncio.get_running_loop().time() - started <= 5.0 + 2.0  # and revoking it takes no time


@virtual_time
async def test_a_lease_is_lost_in_time_also_if_its_renewal_waits_for_longer_than_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a process was stopped as it began to renew, the time limit counted only from the moment it continued."""
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        renew = store.Lease.keep_alive

        async def late(lease: store.Lease, *, note: bytes = b"", timeout: float | None = None) -> None:
            await asyncio.sleep(60.0)
            await renew(lease, note=note, timeout=timeout)

        monkeypatch.setattr(store.Lease, "keep_alive", late)
        started = asyncio.get_running_loop().time()
        with pytest.raises(LeaseNotFound, match="5 s could not be renewed in time"):
            async with client.kept_lease(5.0):
                await asyncio.sleep(600.0)
        assert asyncio.get_running_loop().time() - started <= 5.1


@virtual_time
@pytest.mark.parametrize("checks", [True, False])
async def test_a_block_that_has_blocked_its_event_loop_for_longer_than_the_ttl_ends_with_the_loss(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended without an error, since its timers had not run; so did a lock that another had meanwhile."""
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        for held in (client.kept_lease(5.0), store.recipes.lock(client, "name", ttl=5.0)):
            with pytest.raises(LeaseNotFound, match="5 s could not be renewed in time"):
                async with held as lease:
                    after = asyncio.get_running_loop().time() + 6.0
                    monkeypatch.setattr(client, "time", lambda after=after: after)
                    if checks and isinstance(lease, store.HeldLease):
                        lease.check()
                        pytest.fail("it is held")
            monkeypatch.undo()


@virtual_time
async def test_a_revoked_lease_ends_the_block_and_an_error_of_the_block_comes_first() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        with pytest.raises(LeaseNotFound, match="let its lease lapse"):
            async with client.kept_lease(5.0) as lease:
                await store.Lease(client, id=lease.id, ttl=5.0).revoke()
                await asyncio.sleep(600.0)
        with pytest.raises(ValueError, match="of the block"):
            async with client.kept_lease(5.0):
                raise ValueError("of the block")


@virtual_time
async def test_a_block_that_is_cancelled_from_outside_stays_cancelled() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:

        async def hold() -> None:
            async with client.kept_lease(5.0) as lease:
                await client.put("mine", b"", lease=lease)
                await asyncio.sleep(600.0)

        task = asyncio.create_task(hold())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.get("mine") is None


def test_a_thread_keeps_the_lease_of_a_blocking_caller() -> None:
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        with client.kept_lease(0.5) as lease:
            client.put("mine", b"", lease=lease)
            time.sleep(1.5)  # three times the TTL: the key lives only if its lease is renewed
            lease.check()
            assert client.get("mine") is not None
        assert client.get("mine") is None


def test_a_blocking_caller_is_notified_that_its_lease_is_lost() -> None:
    with (
        store.sync.serve() as server,
        store.sync.connect(server.url) as client,
        pytest.raises(LeaseNotFound, match="its keys may have another holder"),
        client.kept_lease(0.5) as lease,
    ):
        store.BlockingLease(client, id=lease.id, ttl=0.5).revoke()
        deadline = time.monotonic() + 20.0
        while lease.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(LeaseNotFound, match="is lost"):
            lease.check()


def test_a_blocking_caller_knows_by_its_clock_that_the_store_is_out_of_reach() -> None:
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        lease = client.kept_lease(60.0)
        with lease:
            lease.check()
            lease._keeper.belief.renewed_at -= 60.0  # as after a minute without a connection
            assert lease.lost == "its lease of 60 s could not be renewed in time"
            with pytest.raises(LeaseNotFound):
                lease.check()
            lease._keeper._lost = None
            lease._keeper.belief.renewed_at += 60.0


class OldLease(Lease):
    """A lease whose grant was sent long ago, and which may have expired."""

    id = 7
    ttl = 9.0

    def __init__(self, *, over: bool = False) -> None:
        self.over = over
        self.renewed = 0

    async def keep_alive(self, *, note: bytes = b"", timeout: float | None = None) -> None:  # noqa: ARG002
        if self.over:
            raise LeaseNotFound("it has lapsed")
        self.renewed += 1

    async def revoke(self, *, timeout: float | None = None) -> None:
        """Revoke the lease."""


@pytest.mark.virtual_time
async def test_a_lease_that_is_granted_late_and_not_renewed_in_time_is_revoked() -> None:
    """Regression: it stayed for its TTL, and no caller knew it."""
    network = MemoryNetwork(latency=0.4)
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        with pytest.raises(store.StoreTimeoutError):
            async with client.kept_lease(2.4, timeout=1.0, disconnect_ttl=None):
                pytest.fail("it was renewed in time")
        await asyncio.sleep(1.0)
        assert server.figures()["leases"] == 0


async def test_a_lease_whose_grant_was_long_under_way_is_renewed_before_anybody_relies_on_it() -> None:
    """Regression: it was lost as soon as it was granted, after an outage during which the grant had waited."""
    for age, renewed in ((0.0, 0), (2.9, 0), (3.0, 1), (60.0, 1)):
        lease = OldLease()
        assert await renew_if_old(lease, 100.0, partial(float, 100.0 + age)) == 100.0 + renewed * age
        assert lease.renewed == renewed
    with pytest.raises(LeaseNotFound):
        await renew_if_old(OldLease(over=True), 100.0, lambda: 200.0)
