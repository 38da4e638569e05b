"""The keeper: leases are renewed in time, claimed by new connections at once, and reported lost once they may be."""

import asyncio
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store import interface
from store.errors import LeaseNotFound, LimitExceeded
from store.keeping import RELEASE_WITHIN, KeptLeases
from store.messages import Granted, KeepAlive, Request
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time


class Lapses:
    """Records the losses that a holder is notified of, with their times."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.at: list[float] = []
        self.told = asyncio.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.at.append(now())
        self.told.set()


@virtual_time
async def test_closing_releases_everything_that_is_held() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        keeper = KeptLeases(client)
        for _ in range(10):
            await keeper.grant_kept(5.0, Lapses(), disconnect_ttl=1.0)
        await keeper.release_all()
        assert server.figures()["leases"] == 0


@virtual_time
async def test_a_lease_that_cannot_be_renewed_is_given_up_before_the_server_lets_it_lapse() -> None:
    network = MemoryNetwork(latency=0.01)
    async with (
        serve_in_memory(network),
        connect_in_memory(network, source="keeper") as client,
        connect_in_memory(network, source="other") as other,
    ):
        lapses = Lapses()
        lease = await KeptLeases(client).grant_kept(9.0, lapses)
        await other.put("mine", b"", lease=lease.id)
        await asyncio.sleep(100.0)
        network.partition("keeper")
        cut_at = now()
        async with other.watch("mine") as watch:
            assert (await anext(aiter(watch))).kind == "delete"
            gone_at = now()
        assert lapses.reasons == ["its lease of 9 s could not be renewed in time"]
        assert 6.0 - 0.1 <= lapses.at[0] - cut_at <= 9.0, "9 s after the last that was acknowledged was sent"
        assert lapses.at[0] <= gone_at
        network.heal("keeper")
        await asyncio.sleep(20.0)
        assert len(lapses.reasons) == 1


@virtual_time
async def test_releasing_from_an_unreachable_store_takes_a_short_time_however_many_there_are() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        keeper = KeptLeases(client)
        for _ in range(10):
            await keeper.grant_kept(60.0, Lapses())
        network.partition("client")
        started = now()
        await keeper.release_all()
        assert now() - started <= RELEASE_WITHIN + 0.1
        network.heal("client")


class Moody(interface.Store):
    """Another package's store that grants leases and refuses requests as a test chooses. It reports no connections."""

    def __init__(self) -> None:
        self.refusals: list[Exception] = []
        self.renewed_at: list[float] = []

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:  # noqa: ARG002
        if isinstance(request, KeepAlive):
            self.renewed_at.append(now())
            if self.refusals:
                raise self.refusals.pop(0)
        return Granted(lease=1, ttl=9.0)

    def watch(self, prefix: str, **_: Any) -> interface.Watch:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass

    def time(self) -> float:
        return now()


@virtual_time
async def test_a_renewal_that_failed_is_tried_again_at_once_not_at_the_next_one() -> None:
    moody = Moody()
    lapses = Lapses()
    keeper = KeptLeases(moody)
    started = now()
    await keeper.grant_kept(9.0, lapses)
    moody.refusals = [LimitExceeded("it is busy")] * 20
    await asyncio.sleep(8.5)
    assert moody.renewed_at[0] - started == pytest.approx(3.0)
    assert moody.renewed_at[20] - started == pytest.approx(5.0)
    assert moody.renewed_at[21] - started == pytest.approx(8.0)
    assert lapses.reasons == []
    moody.refusals = [LeaseNotFound("gone")]
    await lapses.told.wait()
    await keeper.release_all()


@virtual_time
async def test_an_unknown_error_of_a_store_ends_the_lease_and_its_holder_is_notified() -> None:
    """The keeper stopped renewing the lease, and did not notify its holder."""
    moody, lapses = Moody(), Lapses()
    await KeptLeases(moody).grant_kept(9.0, lapses)
    moody.refusals = [OSError("none of a store's own")] * 1000
    await asyncio.sleep(10.0)
    assert lapses.reasons == ["its lease of 9 s could not be renewed in time"]
