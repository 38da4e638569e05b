"""The coordinator: its election, its writes, and the keys that it leaves behind."""

import asyncio
import contextlib
from typing import Any, cast

import pytest

from rdzv.core.keys import Keys
from rdzv.core.round import Round
from rdzv.core.state import NodesLost, NodesWaiting
from rdzv.node.coordinator.term import _delete_old_rounds
from rdzv.node.coordinator.term_context import SharedStoreLease, TermContext
from rdzv.node.member.leaving import HAND_OVER_WITHIN
from rdzv.testing.network import MemoryNetwork
from store import Lease, LeaseNotFound, Limits
from store.messages import Delete, Grant, Guarded, Put, Request, Revoke, Transact
from tests.support.limits import limits_with
from tests.support.runs import VirtualRun, assert_one_round, listen
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time


def commits_in(request: Request[Any]) -> bool:
    return isinstance(request, Transact) and any(operation.key.endswith("head/round") for operation in request.then)


def writes_marker_in(request: Request[Any]) -> bool:
    write = request.request if isinstance(request, Guarded) else request
    return isinstance(write, Put) and write.key.endswith("nodes//marker")


async def test_an_observer_never_coordinates() -> None:
    async with VirtualRun() as run:
        await run.handler("observer").status()
        await asyncio.sleep(10)
        assert run.keys("head/") == []


async def test_a_commit_that_was_refused_leaves_none_of_its_buckets() -> None:
    """Forty nodes need three buckets. If some die just before the commit, the next attempt needs fewer.

    Regression: the buckets left over from the first attempt made participants() fail, and a successor counted members
    that did not exist.
    """
    async with VirtualRun(min_nodes=5, max_nodes=40, last_call_timeout=3) as run:
        nodes = [run.handler(f"n{number}") for number in range(40)]
        first = await run.join(nodes[0])
        done = False

        async def hook(request: Request[Any], when: str) -> None:
            nonlocal done
            if commits_in(request) and when == "before" and not done:
                done = True
                for task in joining[10:]:
                    task.cancel()
                await asyncio.wait(joining[10:])

        run.clients["n0"].hook = hook
        joining = [first, *[run.start(node.next_rendezvous()) for node in nodes[1:]]]
        infos = await asyncio.gather(*joining[:10])
        assert done
        assert_one_round(infos)
        assert infos[0].world_size == 10
        assert len(await infos[3].participants()) == 10
        assert len([key for key in run.keys("rounds/") if "/store/" not in key]) == 2


async def test_a_commit_is_one_transaction_and_no_member_of_a_small_round_reads_its_rank() -> None:
    """Regression: writing the ranks, granting a lease and committing were three requests, and all nodes read ranks."""
    async with VirtualRun(min_nodes=20) as run:
        nodes = [run.handler(f"n{number}") for number in range(20)]
        first = await run.join(nodes[0])
        asked: list[Request[Any]] = []

        async def hook(request: Request[Any], when: str) -> None:
            if when == "before":
                asked.append(request)

        run.clients["n0"].hook = hook
        assert_one_round(await asyncio.gather(first, *(node.next_rendezvous() for node in nodes[1:])))
        (commit,) = [request for request in asked if commits_in(request)]
        assert isinstance(commit, Transact)
        assert sum("/ranks/" in operation.key for operation in commit.then) == 2
        assert not any("/ranks/" in str(request) for request in asked if request is not commit)
        assert not any(isinstance(request, Grant) for request in asked)


ETCD_LIMITS = limits_with(operations_max=128)


@pytest.mark.in_ci
async def test_a_node_that_left_before_the_marker_arrived_is_in_no_round() -> None:
    """The commit has no condition for that node. The coordinator's own check after the marker must leave it out."""
    settings: dict[str, Any] = {"min_nodes": 140, "max_nodes": 150, "last_call_timeout": 3, "rank_order": "name"}
    async with VirtualRun(**settings, limits=ETCD_LIMITS) as run:
        nodes = [run.handler(f"n{number}") for number in range(150)]
        joining = [await run.join(nodes[0])]
        marked = 0

        async def hook(request: Request[Any], when: str) -> None:
            nonlocal marked
            if when == "before" and writes_marker_in(request):
                marked += 1
                if marked == 1:
                    joining[-1].cancel()
                    await asyncio.wait([joining[-1]])

        run.clients["n0"].hook = hook
        joining += [run.start(node.next_rendezvous()) for node in nodes[1:]]
        infos = await asyncio.gather(*joining[:-1])
        assert marked == 2
        assert_one_round(infos)
        assert infos[0].world_size == 149
        assert {one.node_id for one in await infos[0].participants()} == {f"n{number}" for number in range(149)}


@pytest.mark.in_ci
async def test_the_roster_of_large_payloads_is_written_in_several_transactions() -> None:
    """A store limits the bytes of a transaction, not only its writes: etcd takes 1.5 MiB."""
    sizes = []

    async def hook(request: Request[Any], when: str) -> None:
        if isinstance(request, Transact) and when == "before":
            sizes.append(sum(len(put.value) for put in request.then if isinstance(put, Put)))

    count, payload = 280, "x" * 4000  # more than 1 MiB in all
    async with VirtualRun(min_nodes=count, payload=payload) as run:
        nodes = [run.handler(f"n{number}") for number in range(count)]
        first = await run.join(nodes[0])
        run.clients["n0"].hook = hook
        infos = await asyncio.gather(first, *(node.next_rendezvous() for node in nodes[1:]))
        assert [one.payload for one in await infos[0].participants()] == [payload] * count
    assert sum(sizes) > 1024 * 1024
    assert max(sizes) <= 1024 * 1024


async def test_the_next_coordinator_deletes_the_buckets_of_a_dead_one() -> None:
    """Writes that one transaction cannot hold come before the commit, in the term of a coordinator that may die."""
    settings: dict[str, Any] = {"min_nodes": 60, "max_nodes": 61, "last_call_timeout": 2}
    async with VirtualRun(**settings, limits=limits_with(writes_max=8)) as run:
        first, *others = [run.handler(f"n{number}") for number in range(61)]
        await run.join(first)
        left: list[str] = []

        async def hook(request: Request[Any], when: str) -> None:
            if commits_in(request) and when == "before" and not left:
                left.extend(run.keys("rounds/"))
                run.crash("n0")
                await asyncio.Event().wait()

        run.clients["n0"].hook = hook
        infos = await run.meet(*others)
        assert len({(info.round, info.world_size, info.bootstrap_address) for info in infos}) == 1
        await asyncio.sleep(1)
        assert left
        assert not {*left} & {*run.keys("rounds/")}


@pytest.mark.parametrize("last", [(3, 5), None])
async def test_a_coordinator_deletes_all_rounds_but_the_last_one_and_its_own_attempts(
    last: tuple[int, int] | None,
) -> None:
    keys, network = Keys("/rdzv", "job"), MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        term = await client.put(keys.coordinator, b"")
        attempts = [(2, 5), (2, term), (3, 4), (3, 5), (3, 6), (4, term)]
        for attempt in attempts:
            await client.put(keys.ranks(*attempt, 0), b"")
            await client.put(keys.shared(*attempt) + "x", b"")
        others = [f"{keys.rounds}no/{term}/ranks/0", f"{keys.rounds}3/no/ranks/0", f"{keys.rounds}3"]
        for key in others:
            await client.put(key, b"")
        round = None if last is None else Round(number=last[0], term=last[1], size=1, buckets=1, host="h", port=1)
        context = TermContext(store=client, keys=keys, view=cast("Any", None), term=term, run_lease=cast("Any", None))
        await _delete_old_rounds(context, round)
        left = [one for one in attempts if one == last or one[1] == term]
        for prefix, key in ((keys.rounds, "ranks/0"), (keys.stores, "x")):
            found = {entry.key for entry in await client.list(prefix)} - {*others}
            assert found == {f"{prefix}{number}/{of}/{key}" for number, of in left}
        assert await client.count(keys.rounds) == len(left) + len(others)


async def test_a_successor_reports_the_changes_since_its_predecessors_last_report() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=5, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "abc"]
        await run.meet(*nodes)
        coordinator = (await nodes[0].status()).coordinator
        assert coordinator is not None
        survivor = next(node for node in nodes if node.node_id != coordinator)
        heard = await listen(run, survivor)
        late = await run.join(run.handler("late"))
        await heard.until(NodesWaiting(1))
        run.crash(coordinator)
        late.cancel()
        await heard.until(NodesWaiting(0), within=5)


async def test_a_coordinator_leaves_as_soon_as_its_departure_is_reported() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = {node.node_id: node for node in await run.met("abc")}
        coordinator = (await nodes["a"].status()).coordinator
        assert coordinator is not None
        began = now()
        await nodes[coordinator].leave()
        assert now() - began < HAND_OVER_WITHIN / 2


async def test_a_member_that_becomes_coordinator_while_it_leaves_reports_that_it_has_left() -> None:
    """Regression: its view began after its record was gone, so it reported itself as lost."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = {node.node_id: node for node in await run.met("abc")}
        first = (await nodes["a"].status()).coordinator
        assert first is not None
        leaver, last = (name for name in "abc" if name != first)

        deleted = asyncio.Event()

        async def hook_of_leaver(request: Request[Any], when: str) -> None:
            write = request.then[0] if isinstance(request, Transact) else getattr(request, "request", request)
            match write, when:
                case Put(key=key), "before" if key.endswith(f"nodes/{leaver}"):
                    await nodes[first].leave()
                case Put(key=key), "before" if key.endswith("head/coordinator"):
                    await deleted.wait()
                case Delete(key=key), "after" if key.endswith(f"nodes/{leaver}"):
                    deleted.set()
                    await asyncio.sleep(1)

        async def hook_of_last(request: Request[Any], when: str) -> None:
            if when == "before" and isinstance(request, Transact) and "head/coordinator" in request.then[0].key:
                await asyncio.sleep(5)

        heard = await listen(run, nodes[last])
        run.clients[leaver].hook, run.clients[last].hook = hook_of_leaver, hook_of_last
        await nodes[leaver].leave()
        await asyncio.sleep(10)
        assert not any(isinstance(change, NodesLost) for change in heard.changes)


async def test_a_coordinator_whose_key_was_deleted_notices_at_its_next_write() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a)
        await run.clients["a"].call(Delete("/rdzv/job/head/coordinator"))
        joining = await run.join(b)
        assert_one_round([await a.next_rendezvous(), await joining])


@pytest.mark.in_ci
@pytest.mark.parametrize(("count", "limits"), [(150, ETCD_LIMITS), (50, limits_with(writes_max=8))])
async def test_more_members_than_one_transaction_holds_meet_all_the_same(count: int, limits: Limits) -> None:
    """If there are too many conditions, by way of a marker; if there are too many writes, in several portions."""
    async with VirtualRun(min_nodes=count, limits=limits) as run:
        infos = await run.meet(*(run.handler(f"n{number}") for number in range(count)))
        assert_one_round(infos)
        assert infos[0].world_size == count
        assert len(await infos[-1].participants()) == count
        assert run.keys("nodes//") == [], "the marker went with the commit"


async def test_nodes_meet_again_after_the_records_of_their_run_were_deleted_under_them() -> None:
    """Regression: two `rdzv forget` at once, one of them late, left a coordinator whose commits were always refused."""
    async with VirtualRun(min_nodes=4, max_nodes=4, ttl=3) as run:
        nodes = await run.met("abcd")
        async with run.client("an operator") as operator:
            await nodes[0].leave()
            await operator.call(Revoke(lease=Keys("/rdzv", "job").derived_lease_id))
        e = run.handler("e")
        joining = await run.join(e)  # which grants that lease again
        await asyncio.sleep(5)
        last = e.next_rendezvous() if joining.done() else joining
        again = [node.next_rendezvous() for node in nodes[1:]]
        assert_one_round(await asyncio.wait_for(asyncio.gather(*again, last), 30))


@pytest.mark.parametrize("taken_over", [False, True])
async def test_the_end_of_a_term_revokes_the_lease_of_no_round(*, taken_over: bool) -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network), connect_in_memory(network) as client:
        lease = await client.grant(60.0)
        round = Round(number=0, term=1, size=1, buckets=0, host="", port=0, lease=lease.id)
        shared = SharedStoreLease(client, ttl=60.0)
        keeping = asyncio.create_task(shared.renew_until_cancelled(round if taken_over else None))
        kept = Lease(client, id=await shared.acquire(), ttl=60.0)
        assert (kept.id == lease.id) is taken_over
        await shared.revoke_unused()
        with contextlib.nullcontext() if taken_over else pytest.raises(LeaseNotFound):
            await kept.keep_alive()
        keeping.cancel()
