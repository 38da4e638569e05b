"""Blocks that hold a lease: their end after its loss, in another task, and after the end of a connection."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest

import store
import store.sync
from rdzv.testing.network import MemoryNetwork
from store import keeping
from store.errors import LeaseNotFound
from tests.support.processes import free_port, start_python
from tests.support.proxy import Proxy
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time

DISCONNECT_TTL, GONE_TTL = 1.0, 0.5


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[MemoryNetwork, store.Server, store.Client]]:
    network = MemoryNetwork(latency=0.001)
    async with serve_in_memory(network) as server, connect_in_memory(network, **options) as client:
        yield network, server, client


@virtual_time
@pytest.mark.parametrize(
    ("terms", "lasts"),
    [
        ({}, 10.0),
        ({"disconnect_ttl": DISCONNECT_TTL}, DISCONNECT_TTL),
        ({"disconnect_ttl": DISCONNECT_TTL, "gone_ttl": GONE_TTL}, GONE_TTL),
        ({"gone_ttl": GONE_TTL}, GONE_TTL),
    ],
)
async def test_a_lease_is_believed_in_no_longer_than_the_store_may_keep_it(
    terms: dict[str, float], lasts: float
) -> None:
    """After a cut another client led for as long as the TTL, while the first one's block went on."""
    async with connected() as (network, _, client):
        with pytest.raises(LeaseNotFound):
            async with client.kept_lease(10.0, **terms):
                network.partition("client")
                network.reset("client")
                cut_at = now()
                try:
                    await asyncio.sleep(60.0)
                finally:
                    assert lasts - 0.05 <= now() - cut_at <= lasts + 0.01
        network.heal("client")


@virtual_time
@pytest.mark.parametrize("cut_for", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("after", [0.0, 1.0, 3.2])
async def test_a_cut_that_heals_within_disconnect_ttl_ends_nothing(cut_for: float, after: float) -> None:
    async with (
        connected() as (network, server, client),
        client.kept_lease(10.0, disconnect_ttl=DISCONNECT_TTL) as lease,
    ):
        for _ in range(5):
            await asyncio.sleep(after)
            network.partition("client")
            network.reset("client")
            await asyncio.sleep(cut_for)
            network.heal("client")
            await asyncio.sleep(DISCONNECT_TTL)
            lease.check()
            assert server.figures()["leases"] == 1


HOLDER = """
import asyncio, sys, time
import store, store.sync

async def awaited():
    async with store.connect(sys.argv[1]) as client:
        async with client.kept_lease(10.0, disconnect_ttl=1.0) as lease:
            await client.put("leader", b"", lease=lease)
            print("leads", flush=True)
            await asyncio.sleep(60)

def blocking():
    with store.sync.connect(sys.argv[1]) as client:
        with client.kept_lease(10.0, disconnect_ttl=1.0) as lease:
            client.put("leader", b"", lease=lease)
            print("leads", flush=True)
            while True:
                lease.check()
                time.sleep(0.01)

try:
    asyncio.run(awaited()) if sys.argv[2] == "awaited" else blocking()
except store.LeaseNotFound:
    print("lost", time.monotonic(), flush=True)
"""
RIVAL = """
import sys, time
import store.sync
with store.sync.connect(sys.argv[1]) as client:
    with client.watch("leader", snapshot=True) as watch:
        for event in watch:
            if event.kind == "synced":
                print("watches", flush=True)
            elif event.kind == "delete":
                break
    print("free", time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("twin", ["awaited", "blocking"])
async def test_a_holder_that_is_cut_off_ends_before_a_rival_leads_for_long(twin: str) -> None:
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        start_python("-c", HOLDER, f"tcp://127.0.0.1:{proxy.port}", twin) as holder,
    ):
        await holder.line("leads")
        async with start_python("-c", RIVAL, server.url) as rival:
            await rival.line("watches")
            proxy.black_hole()
            cut_at = time.monotonic()
            proxy.cut()
            free_at = float((await rival.line("free")).split()[1])
            lost_at = float((await holder.line("lost")).split()[1])
        assert free_at - cut_at >= DISCONNECT_TTL - 0.1, "neither twin asks for a `gone_ttl` of its own"
        assert lost_at - free_at <= 0.3


@pytest.mark.parametrize("twin", ["awaited", "blocking"])
async def test_a_cut_that_heals_at_once_ends_nothing(twin: str) -> None:
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        start_python("-c", HOLDER, f"tcp://127.0.0.1:{proxy.port}", twin) as holder,
        store.connect(server.url) as client,
    ):
        await holder.line("leads")
        for _ in range(2):
            proxy.cut()
            cut_at = time.monotonic()
            while time.monotonic() < cut_at + 1.5 * DISCONNECT_TTL:
                assert await client.get("leader") is not None
                await asyncio.sleep(0.05)
        assert "\n  lost" not in holder.written()


SERVER = """
import sys, time
import store.sync
with store.sync.serve(port=int(sys.argv[1]), data_dir=sys.argv[2]):
    print("serves", flush=True)
    time.sleep(60)
"""


@pytest.mark.in_ci
@pytest.mark.parametrize("twin", ["awaited", "blocking"])
async def test_a_durable_store_that_is_killed_and_comes_back_within_the_ttl_ends_nothing(
    twin: str, tmp_path: Any
) -> None:
    """While it refuses connections, no lease can expire: the end of a connection means nothing then."""
    port = free_port()
    serve = "-c", SERVER, str(port), str(tmp_path)
    url = f"tcp://127.0.0.1:{port}"
    async with start_python(*serve) as server:
        await server.line("serves")
        async with start_python("-c", HOLDER, url, twin) as holder:
            await holder.line("leads")
            server.kill()
            await server.wait()
            await asyncio.sleep(3.0)  # the length matters: three times the `disconnect_ttl`
            async with start_python(*serve) as again, store.connect(url) as client:
                await again.line("serves")
                back_at = time.monotonic()
                while time.monotonic() < back_at + 2 * DISCONNECT_TTL:
                    assert await client.get("leader") is not None
                    await asyncio.sleep(0.1)
            assert "\n  lost" not in holder.written()


@pytest.fixture
def suspend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets the system's clocks tell of a suspension of the machine."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system does not tell for how long it was suspended")
    monkeypatch.setattr(keeping, "_suspended_for", 0.0)  # their sum never falls; a test with another clock may add days
    really = time.clock_gettime

    def suspend(seconds: float) -> None:
        def told(clock: int) -> float:
            return really(clock) + (seconds if clock == time.CLOCK_BOOTTIME else 0.0)

        monkeypatch.setattr(time, "clock_gettime", told)

    suspend(0.0)
    return suspend


@pytest.mark.parametrize("way", ["check", "wait"])
async def test_a_lease_ends_at_waking_if_the_machine_was_suspended_for_its_ttl(
    way: str, suspend: Callable[[float], None]
) -> None:
    """Timers stand still meanwhile: the holder believed in the lease until the store had answered its next renewal."""
    async with connected() as (network, _, client):
        with pytest.raises(LeaseNotFound):
            async with client.kept_lease(3.0) as lease:
                suspend(2.0)
                lease.check()
                suspend(4.0)
                network.partition("client")
                if way == "check":
                    lease.check()
                await asyncio.wait_for(asyncio.sleep(60.0), 2.0)
        network.heal("client")


@virtual_time
async def test_suspensions_shorter_than_the_ttl_end_no_lease_that_is_renewed_between_them(
    suspend: Callable[[float], None],
) -> None:
    async with connected() as (_, _, client), client.kept_lease(3.0) as lease:
        for slept in (1.5, 3.0, 4.5):
            suspend(slept)
            lease.check()
            await asyncio.sleep(1.5)  # it is renewed each second
        await asyncio.sleep(0.4)
        suspend(5.4)  # two clocks that are read one after the other may differ by as much
        await asyncio.sleep(0.05)
        assert lease.valid_until - client.time() > 2.0


def test_a_blocking_holder_knows_at_waking_that_its_lease_is_lost(suspend: Callable[[float], None]) -> None:
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        with pytest.raises(LeaseNotFound), client.kept_lease(60.0) as lease:
            lease.check()
            suspend(3600.0)
            lease.check()
        with client.kept_lease(60.0) as lease:
            lease.check()  # the suspension was before it


@virtual_time
@pytest.mark.parametrize("enter", ["kept_lease", "lock"])
@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_block_may_be_left_in_another_task_and_no_later_loss_cancels_anybody(
    enter: str, has_ended: bool
) -> None:
    """The cancel scope raised an error; without the scope, a late loss would have cancelled the wrong task."""
    async with connected() as (network, server, client):
        stack, left = contextlib.AsyncExitStack(), asyncio.Event()

        async def begin() -> None:
            with anyio.fail_after(100):  # this scope is left before the block is
                await stack.enter_async_context(
                    client.kept_lease(5.0) if enter == "kept_lease" else store.recipes.lock(client, "job", ttl=5.0)
                )
            if not has_ended:
                await left.wait()
                await asyncio.sleep(60.0)

        beginning = asyncio.create_task(begin())
        await asyncio.sleep(1.0)
        assert server.figures()["leases"] == 1
        await asyncio.create_task(stack.aclose())
        left.set()
        assert server.figures()["leases"] == 0
        network.partition("client")
        await asyncio.sleep(20.0)
        network.heal("client")
        await beginning
        assert beginning.cancelling() == 0


@virtual_time
async def test_a_loss_cancels_the_task_that_entered_at_each_await_until_the_block_is_left() -> None:
    async with connected() as (network, _, client):
        cancelled = 0

        async def hold() -> None:
            nonlocal cancelled
            with pytest.raises(LeaseNotFound):
                async with client.kept_lease(5.0):
                    network.partition("client")
                    for _ in range(5):
                        try:
                            await asyncio.sleep(60.0)
                        except asyncio.CancelledError:
                            cancelled += 1
            await asyncio.sleep(1.0)

        holding = asyncio.create_task(hold())
        await holding
        assert (cancelled, holding.cancelling()) == (5, 0)
        network.heal("client")


@virtual_time
@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_block_that_is_left_in_another_task_after_a_loss_says_so(has_ended: bool) -> None:
    async with connected() as (network, _, client):
        stack = contextlib.AsyncExitStack()
        told: list[float] = []

        async def begin() -> None:
            await stack.enter_async_context(client.kept_lease(5.0))
            if not has_ended:
                try:
                    await asyncio.sleep(60.0)
                except asyncio.CancelledError:
                    told.append(now())

        beginning = asyncio.create_task(begin())
        await asyncio.sleep(1.0)
        network.partition("client")
        await asyncio.sleep(20.0)
        assert beginning.done()
        assert len(told) == (not has_ended)
        with pytest.raises(LeaseNotFound):
            await asyncio.create_task(stack.aclose())
        assert beginning.cancelling() == 0
        network.heal("client")


async def timeout_within(client: store.Client) -> None:
    async with client.kept_lease(5.0):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(60.0)
        await asyncio.sleep(1.0)


async def timeout_around(client: store.Client) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), client.kept_lease(5.0):
            await asyncio.sleep(60.0)


async def scope_within(client: store.Client) -> None:
    async with client.kept_lease(5.0):
        with anyio.move_on_after(1.0) as scope:
            await asyncio.sleep(60.0)
        assert scope.cancelled_caught
        await asyncio.sleep(1.0)


async def scope_around(client: store.Client) -> None:
    with anyio.move_on_after(1.0) as scope:
        async with client.kept_lease(5.0):
            await asyncio.sleep(60.0)
    assert scope.cancelled_caught


@virtual_time
@pytest.mark.parametrize("work", [timeout_within, timeout_around, scope_within, scope_around])
async def test_time_limits_around_a_block_and_within_it_are_what_they_are(
    work: Callable[[store.Client], Coroutine[Any, Any, None]],
) -> None:
    async with connected() as (_, server, client):
        task = asyncio.create_task(work(client))
        await task
        assert task.cancelling() == 0
        assert server.figures()["leases"] == 0


async def asyncio_timeout(client: store.Client) -> None:
    async with asyncio.timeout(100.0), client.kept_lease(5.0), asyncio.timeout(50.0):
        await asyncio.sleep(600.0)


async def anyio_scopes(client: store.Client) -> None:
    with anyio.fail_after(100.0):
        async with client.kept_lease(5.0):
            with anyio.fail_after(50.0):
                await asyncio.sleep(600.0)


async def task_group(client: store.Client) -> None:
    async with client.kept_lease(5.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(600.0))


async def both_of_two(client: store.Client) -> None:
    async with client.kept_lease(5.0), client.kept_lease(5.0):
        await asyncio.sleep(600.0)


async def shielded(client: store.Client) -> None:
    began = now()
    try:
        async with client.kept_lease(5.0):
            try:
                await asyncio.sleep(600.0)
            finally:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(10.0)
    finally:
        assert now() - began >= 15.0 - 0.1


@virtual_time
@pytest.mark.parametrize("work", [asyncio_timeout, anyio_scopes, task_group, both_of_two, shielded])
async def test_a_loss_is_raised_through_time_limits_groups_and_shields(
    work: Callable[[store.Client], Coroutine[Any, Any, None]],
) -> None:
    async with connected() as (network, _, client):
        task = asyncio.create_task(work(client))
        await asyncio.sleep(0.1)
        network.partition("client")
        with pytest.raises(LeaseNotFound):
            await task
        assert task.cancelling() == 0
        network.heal("client")


@virtual_time
async def test_a_cancellation_from_outside_comes_before_a_loss() -> None:
    async with connected() as (network, _, client):

        async def hold() -> None:
            async with client.kept_lease(5.0):
                network.partition("client")
                try:
                    await asyncio.sleep(600.0)
                finally:
                    task.cancel()

        task = asyncio.create_task(hold())
        await asyncio.wait([task])
        assert task.cancelled()
        network.heal("client")


def test_a_blocking_lease_is_for_one_block_and_is_lost_with_its_store() -> None:
    """A second block held nothing; and a lock's block went on for a whole TTL beside another's on the next store."""
    port = free_port()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as last:
        url = first.enter_context(store.sync.serve(port=port)).url
        client = last.enter_context(store.sync.connect(url, timeout=5.0))
        with client.kept_lease(60.0) as held, pytest.raises(store.StoreUsageError, match="is for one `with`"):
            held.__enter__()
        with pytest.raises(store.StoreUsageError, match="is for one `with`"):
            held.__enter__()
        with pytest.raises(LeaseNotFound, match="has been replaced by"), client.kept_lease(60.0) as held:
            first.close()
            with store.sync.serve(port=port), pytest.raises(store.StoreReplaced):
                client.get("k")
            assert held.lost is not None
