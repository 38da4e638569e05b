"""Promises R7 and R8 on a cluster of three: members die, hang, and are cut off from the others, and rounds go on."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import rdzv
from rdzv import Handler
from rdzv.core.state import Closed
from store import StoreError
from store.etcd import members as members_room
from store.etcd.client import Client
from store.etcd.codec import Endpoints
from tests.store.etcd.test_client import AlwaysFirst
from tests.support.etcd import Etcd, serve_etcd
from tests.support.peers import PeerNetwork
from tests.support.runs import assert_one_round

pytestmark = pytest.mark.some_here(2)

KILLS = int(os.environ.get("RDZV_ETCD_KILLS", "1"))
"""The number of times that the leader is killed in the middle of a round."""

WITHIN = 60.0
"""In seconds. Only a limit: `benchmarks.etcd` measures the time of each call, on an idle machine."""

_names = iter(range(10**6))


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with serve_etcd(3) as served:
        yield served


@pytest.fixture(autouse=True)
def _revived(etcd: Etcd) -> None:
    revive(etcd)


def revive(etcd: Etcd) -> None:
    """Start again the members that an earlier test has killed."""
    for member in etcd.members:
        if not member.running:
            member.start()
    etcd.wait_until_ready()


@asynccontextmanager
async def run_of(etcd: Etcd, nodes: int, parameters: str = "") -> AsyncIterator[list[Handler]]:
    """Yield handlers of one run, connected but not joined."""
    url = f"{etcd.url}/run-{next(_names)}?min_nodes={nodes}&join_timeout=60{parameters}"
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(rdzv.connect(url, node_id=f"n{number}")) for number in range(nodes)]


async def until_waiting(handler: Handler, nodes: int) -> None:
    async with asyncio.timeout(WITHIN):
        async for status in handler.statuses():
            if len(status.waiting) >= nodes:
                return


async def test_r7_the_leader_is_killed_while_the_nodes_gather(etcd: Etcd) -> None:
    for _ in range(KILLS):
        revive(etcd)
        async with run_of(etcd, 6) as nodes:
            joining = [asyncio.create_task(node.next_rendezvous()) for node in nodes[:4]]
            await until_waiting(nodes[5], 4)
            etcd.leader().kill()
            began = time.monotonic()
            joining += [asyncio.create_task(node.next_rendezvous()) for node in nodes[4:]]
            async with asyncio.timeout(WITHIN):
                infos = await asyncio.gather(*joining)
            print(f"complete {time.monotonic() - began:.2f} s after the leader was killed")
            assert_one_round(infos)
            assert infos[0].round == 0
            await infos[0].store.set("key", "value")
            assert await infos[1].store.get("key") == b"value"


async def test_r7_the_leader_is_killed_in_the_middle_of_a_round_and_again_in_the_next(etcd: Etcd) -> None:
    """Requests to the shared store that are under way are carried out once, and the run can be closed."""
    async with run_of(etcd, 3) as nodes:
        infos = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        waiting = asyncio.create_task(infos[2].store.get("late"))
        etcd.leader().kill()
        async with asyncio.timeout(WITHIN):
            sums = await asyncio.gather(*(info.store.add("n", 1) for info in infos for _ in range(4)))
        assert sorted(sums) == list(range(1, 13))
        await infos[0].store.set("late", "come")
        async with asyncio.timeout(WITHIN):
            assert await waiting == b"come"
        assert all(info.superseded() is None for info in infos)
        revive(etcd)
        etcd.followers()[0].kill()
        async with asyncio.timeout(WITHIN):
            infos = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        assert_one_round(infos)
        assert infos[0].round == 1
        async with nodes[0].changes() as changes:
            await nodes[1].set_closed("enough")
            async with asyncio.timeout(WITHIN):
                heard = [change async for change in changes]  # they end with the close
            assert heard[-1] == Closed(reason="enough", by="n1")


async def test_r8_a_member_that_hangs_costs_a_delay_and_nothing_else(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_room, "IDLE", 1.0)
    async with run_of(etcd, 4) as nodes:
        joining = [asyncio.create_task(node.next_rendezvous()) for node in nodes[:3]]
        await until_waiting(nodes[3], 3)
        member = etcd.followers()[0]
        member.stop()
        try:
            joining.append(asyncio.create_task(nodes[3].next_rendezvous()))
            async with asyncio.timeout(WITHIN):
                infos = await asyncio.gather(*joining)
        finally:
            member.resume()
        assert_one_round(infos)
        assert infos[0].round == 0


async def test_without_a_majority_the_error_names_the_cause_and_nothing_is_lost(etcd: Etcd) -> None:
    async with Client(Endpoints.parse(etcd.url)) as client:
        await client.put("kept", b"1")
        for member in etcd.followers():
            member.kill()
        with pytest.raises(StoreError, match=r"writing at etcd://.* was not answered in time: "):
            await client.put("kept", b"2", timeout=1.0)
        revive(etcd)
        entry = await client.get("kept")
        assert entry is not None
        assert entry.value in (b"1", b"2")  # the error had `maybe_applied`
        await client.put("kept", b"3")


@asynccontextmanager
async def cluster_on(network: PeerNetwork) -> AsyncIterator[Etcd]:
    """Yield a cluster whose members reach each other through a simulated network in this event loop."""
    serving = serve_etcd(3, advertised=network.ports, listening=network.lead_to)
    cluster = await asyncio.to_thread(serving.__enter__)
    try:
        await asyncio.to_thread(network.find, cluster)
        yield cluster
    finally:
        await asyncio.to_thread(serving.__exit__, None, None, None)


@pytest.mark.in_ci
async def test_r8_clients_leave_a_leader_that_is_cut_off_from_the_others() -> None:
    """Otherwise it accepts watches but never sends an event, and holds writes without an answer."""
    async with PeerNetwork(3) as network, cluster_on(network) as cluster:
        leader = await asyncio.to_thread(cluster.leader)
        followers = [member for member in cluster.members if member is not leader]
        urls = ",".join(f"127.0.0.1:{member.client_port}" for member in (leader, *followers))
        everywhere = Endpoints.parse(f"etcd://{urls}")
        with_others = Endpoints.parse(f"etcd://127.0.0.1:{followers[0].client_port}")
        async with (
            Client(everywhere, rng=AlwaysFirst()) as inside,
            Client(everywhere, rng=AlwaysFirst()) as watcher,  # it only watches
            Client(with_others) as outside,
            watcher.watch("key", snapshot=True) as watch,
        ):
            waiting = asyncio.create_task(inside.wait(["key"]))
            await inside.put("before", b"")
            network.cut_off(cluster, leader)
            async with asyncio.timeout(WITHIN):
                await inside.put("written", b"")
            await outside.put("key", b"1")
            async with asyncio.timeout(WITHIN):
                async for event in watch:
                    if event.key:
                        assert event.value == b"1"
                        break
                assert (await waiting)[0].value == b"1"
            network.heal()
