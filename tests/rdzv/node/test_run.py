"""Operator calls on a run, without a node of their own: interrupted at each write; and the readers of a run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import rdzv
from rdzv.node.run.run import Run
from store.messages import Delete, Put, Request, Transact
from tests.support.runs import HookedClient, VirtualRun

pytestmark = pytest.mark.virtual_time

BANS: dict[str, Callable[[Run], Awaitable[object]]] = {
    "a node": lambda run: run.ban("b", "rogue", now=True),
    "an attribute": lambda run: run.ban(reason="rogue", where=("rack", "17"), now=True),
    "a node, for a time": lambda run: run.ban("b", "rogue", now=True, lasts=60),
    "an attribute, for a time": lambda run: run.ban(reason="rogue", where=("rack", "17"), now=True, lasts=60),
}


@pytest.mark.in_ci
@pytest.mark.parametrize("ban", BANS.values(), ids=BANS)
@pytest.mark.parametrize("writes", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C, and the member hangs", "killed"])
async def test_a_ban_that_is_interrupted_after_any_write_leaves_no_banned_member_in_its_round(
    ban: Callable[[Run], Awaitable[object]], how: str, writes: int
) -> None:
    """Regression: after a Ctrl-C between two writes the member was banned, but counted, and the others waited."""
    async with VirtualRun(min_nodes=2) as run, run.looked_at() as steered:
        a, b = run.handler("a"), run.handler("b", attributes={"rack": "17"})
        await run.join(a)  # this node coordinates
        await b.next_rendezvous()
        left, client = writes, steered.store
        assert isinstance(client, HookedClient)

        async def interrupt(request: Request[Any], moment: str) -> None:
            nonlocal left
            left -= moment == "after" and isinstance(request, Put | Delete | Transact)
            if left <= 0 and how == "killed":
                await asyncio.sleep(3600)
            elif left <= 0:
                banning.cancel()

        client.hook = interrupt
        if how == "Ctrl-C, and the member hangs":
            run.clients["b"].hook = hang
        banning = run.start(ban(steered))
        await asyncio.wait([banning], timeout=1)
        banning.cancel()
        await asyncio.wait([banning])
        await asyncio.sleep(1)
        status = await a.status()
        banned = bool(status.banned or status.banned_where)
        assert banned is ("b" not in {member.node_id for member in status.members})
        if banned:
            (chapter,) = await a.history()
            assert [(one.kind, one.node_ids) for one in chapter.incidents] == [("lost", ("b",))]
            assert "rogue" in chapter.incidents[0].reason


async def hang(*_: object) -> None:
    """Renew the lease, and do nothing else."""
    await asyncio.sleep(3600)


@pytest.mark.parametrize("deleted", [("a",), ("a", "b"), ("b",)], ids=["the coordinator's", "both", "the other's"])
async def test_a_node_that_waits_arrives_again_if_an_operator_has_deleted_its_record(deleted: tuple[str, ...]) -> None:
    """Regression: all nodes waited for the node that was there, until `join_timeout`."""
    async with VirtualRun(min_nodes=3) as run, run.looked_at() as operator:
        a, b, c = (run.handler(name) for name in "abc")
        joining = [await run.join(a), await run.join(b)]
        for name in deleted:
            assert await operator.store.delete(operator.keys.node(name))
        begin = asyncio.get_running_loop().time()
        info = await c.next_rendezvous()
        assert [info.world_size, *[(await task).world_size for task in joining]] == [3, 3, 3]
        assert asyncio.get_running_loop().time() - begin < 2 * a.settings.ttl


@pytest.mark.parametrize("now", [True, False])
async def test_a_ban_of_an_attribute_removes_all_nodes_with_it(now: bool) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=1) as run, run.looked_at() as steered:
        handlers = [run.handler(f"n{number}", attributes={"rack": "17"}) for number in range(9)]
        await handlers[0].next_rendezvous()
        tasks = [await run.join(handler) for handler in handlers[1:]]
        assert len(await steered.ban(where=("rack", "17"), now=now)) == 9
        for task in tasks:
            with pytest.raises(rdzv.RendezvousRefusedError):
                await task
        assert len((await steered.status()).members) == (not now)


async def test_the_counters_of_a_run_end_soon_after_its_last_round() -> None:
    async with VirtualRun(min_nodes=1, ttl=3, closed_ttl=3600) as run:
        a, b = run.handler("a"), run.handler("b")
        await a.next_rendezvous()
        assert await a.change_counts(lambda before: before + b"1") == b"1"
        run.crash("a")
        await asyncio.sleep(600)
        await b.next_rendezvous()
        assert await b.change_counts(lambda before: before + b"2") == b"2"


async def test_an_observer_gets_the_status_history_and_cost_of_a_run() -> None:
    async with VirtualRun(min_nodes=1) as run, run.looked_at() as seen:
        assert (await seen.status()).reason == "no node is here"
        with pytest.raises(rdzv.RendezvousStateError, match="has no run job; it has none under /rdzv"):
            await seen.check_exists()
        a = run.handler("a")
        await a.next_rendezvous()
        await asyncio.sleep(0.1)
        status, history, cost = await seen.status_and_cost()
        assert (status.world_size, len(history.chapters), cost.rounds) == (1, 1, 1)
        by_node = await a.status()
        assert (status.members, status.phase, status.round) == (by_node.members, by_node.phase, by_node.round)
        first = await seen.set_closed("enough")
        assert (await seen.set_closed("more")).reason == first.reason == "enough"
        assert (await seen.reopen()) == first
        assert await seen.reopen() is None


async def test_the_tally_of_a_run_holds_in_the_store_of_the_next_host() -> None:
    """Else the restarts count anew in every new store. Each member reads the tally in each round, as launchers do."""
    async with VirtualRun(hosts="a,b,c:29400", min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = [run.handler("x"), run.handler("y")]
        await run.meet(*nodes)
        for counted in (b"1", b"11", b"111"):
            await nodes[0].change_counts(lambda before: before + b"1")
            assert [await node.change_counts(bytes) for node in nodes] == [counted] * 2  # `bytes` changes nothing
            run.kill_store()
            await asyncio.sleep(0.2)
            run.restart_store()
            await run.meet(*nodes)
            assert await nodes[1].change_counts(bytes) == counted


@pytest.mark.parametrize("spare_saw_more", [False, True])
async def test_a_spare_that_comes_first_to_the_next_store_resets_no_tally(spare_saw_more: bool) -> None:
    """Regression: a spare had read no tally, so the restarts counted anew if it was the first in the next store, or if
    it had seen a later change of the run than the members.
    """
    async with VirtualRun(hosts="a,b,c:29400", min_nodes=2, max_nodes=2, last_call_timeout=1) as run:
        nodes = [run.handler("x"), run.handler("y")]
        await run.meet(*nodes)
        spare = await run.join(run.handler("z"))
        await asyncio.sleep(1.0)
        for node in nodes:
            await node.change_counts(lambda before: before or b"1")
        async with run.looked_at() as operator:
            await asyncio.sleep(0.1)
            for name in "xy":
                run.network.partition(name)
                run.network.forget_flows(name)
            if spare_saw_more:
                await operator.ban("other")
                await asyncio.sleep(0.1)
        run.kill_store()
        await asyncio.sleep(0.2)
        run.restart_store()
        await asyncio.sleep(1.0)
        run.network.heal()
        await asyncio.sleep(1.0)
        await run.meet(*nodes)
        assert await nodes[1].change_counts(bytes) == b"1"
        spare.cancel()
