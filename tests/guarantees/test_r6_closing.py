"""Promise R6: closing reaches everyone, with the first reason given; leaving, or dying, closes nothing for others."""

import asyncio

import pytest

from rdzv import Closed, RendezvousClosedError, RendezvousGracefulExitError
from tests.support.runs import VirtualRun, listen

pytestmark = pytest.mark.virtual_time


@pytest.mark.in_ci
async def test_r6_closing_reaches_parked_joiners_and_spares_leave_gracefully() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = await run.met("ab")
        spare = await run.join(run.handler("spare"))
        await asyncio.sleep(1200)
        assert not spare.done(), "a spare's join timeout stands still"
        await a.leave()
        joiner = await run.join(a)
        assert not joiner.done()
        await b.set_closed("first")
        await a.set_closed("second")
        with pytest.raises(RendezvousClosedError, match="first"):
            await joiner
        with pytest.raises(RendezvousGracefulExitError, match="first"):
            await spare


@pytest.mark.parametrize("way", ["leave", "aclose", "crash"])
async def test_r6_leaving_does_not_close_the_run(way: str) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=0.5) as run:
        a, b = await run.met("ab")
        await (a.leave() if way == "leave" else a.aclose() if way == "aclose" else asyncio.sleep(0))
        if way == "crash":
            run.crash("a")
        await asyncio.sleep(5)
        assert not await b.is_closed()
        (info,) = await run.meet(b)
        assert (info.round, info.world_size) == (1, 1)


async def test_r6_a_newcomer_to_a_closed_run_is_refused_with_the_first_reason() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=0.5) as run:
        (a,) = await run.met("a")
        await a.set_closed("trained")
        await a.aclose()
        newcomer = run.handler("b")
        with pytest.raises(RendezvousClosedError, match="trained"):
            await newcomer.next_rendezvous()
        assert await newcomer.is_closed()


async def test_r6_a_run_may_be_closed_by_one_that_takes_no_part_and_before_anybody_has_met() -> None:
    async with VirtualRun(min_nodes=2) as run:
        waiting = await run.join(run.handler("a"))
        await run.handler("operator", min_nodes=None).set_closed("enough")
        with pytest.raises(RendezvousClosedError, match="enough"):
            await waiting


async def test_r6_a_node_cut_off_at_the_closing_hears_of_it_when_it_reconnects() -> None:
    async with VirtualRun(min_nodes=2, ttl=6) as run:
        a, b = await run.met("ab")
        heard = await listen(run, a)
        run.network.partition("a")
        await b.set_closed("over")
        await asyncio.sleep(2)
        assert heard.changes == []
        run.network.heal("a")
        await heard.until(Closed(reason="over", by="b"), within=20)


@pytest.mark.parametrize("seed", range(5))
async def test_r6_if_two_nodes_close_at_once_all_nodes_get_the_same_reason(seed: int) -> None:
    async with VirtualRun(min_nodes=3, seed=seed) as run:
        nodes = [run.handler(name) for name in "abc"]
        await run.meet(*nodes)
        heard = [await listen(run, node) for node in nodes]
        await asyncio.gather(*(node.set_closed(f"said by {node.node_id}") for node in nodes[:2]))
        for one in heard:
            await one.until(Closed)
        (told,) = {change for one in heard for change in one.changes}
        assert told in [Closed(reason=f"said by {name}", by=name) for name in "ab"]
