"""S10: a client that meets another store than it knew gets `StoreReplaced`, and the consequences for a run.

The death of a memory store ends the exclusivity of its runs. But each member of a round is notified, and rejoins above
the highest round that it knows. No group forms beside a living one unless both are notified.
"""

import asyncio

import pytest

from rdzv import Dropped, NodesWaiting, RendezvousTimeoutError, RoundSupersededError
from tests.support.runs import VirtualRun, assert_one_round, listen
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time


async def replace(run: VirtualRun) -> None:
    """Kill the store, and serve an empty one at its address."""
    run.kill_store()
    await asyncio.sleep(0.5)
    run.restart_store()


async def test_s10_members_of_a_replaced_store_are_notified_and_rejoin_above_the_highest_round_they_know() -> None:
    async with VirtualRun(min_nodes=3, max_nodes=5, last_call_timeout=1) as run:
        old = [run.handler(name) for name in "abc"]
        for _ in range(3):
            await run.meet(*old)
        infos = await run.meet(*old)
        heard = [await listen(run, node) for node in old]
        began = now()
        await replace(run)
        for one in heard:
            await one.until(Dropped, within=5)
        assert now() - began < 5, "as soon as they are connected again"
        for info in infos:
            with pytest.raises(RoundSupersededError):
                await info.store.set("key", "of the old round")
        newcomers = [run.handler(name) for name in "de"]
        again = await run.meet(*newcomers, *old)
        assert_one_round(again)
        assert again[0].round == 4


async def test_s10_a_group_in_the_new_store_hears_of_nodes_from_the_old_one() -> None:
    """The nodes that knew no round made round 0; nodes that know of round 3 make no second group, but wait for it."""
    async with VirtualRun(min_nodes=2, max_nodes=4, last_call_timeout=1) as run:
        old = [run.handler(name) for name in "ab"]
        for _ in range(4):
            await run.meet(*old)
        run.network.refuse("a")
        run.network.refuse("b")
        await replace(run)
        new = [run.handler(name) for name in "cd"]
        first = await run.meet(*new)
        assert {info.round for info in first} == {0}
        heard = await listen(run, new[0])
        run.network.stop_refusing("a")
        run.network.stop_refusing("b")
        joining = [await run.join(node) for node in old]
        await heard.until(NodesWaiting(2))
        await asyncio.sleep(60)
        assert not any(task.done() for task in joining), "the living group is not overrun"
        run_together = [*(await run.meet(*new)), *[await task for task in joining]]
        assert_one_round(run_together)
        assert run_together[0].round == 4


async def test_s10_a_node_that_only_waited_also_joins_above_the_others_round() -> None:
    """It knew of round 0, and made another round 0: only members of a round were asked for the highest number."""
    async with VirtualRun(min_nodes=1, max_nodes=1, last_call_timeout=1) as run:
        await run.met("a")
        waiting = await run.join(run.handler("b"))
        run.kill_store()
        run.crash("a")
        run.restart_store()
        assert (await waiting).round == 1


async def test_s10_a_member_that_is_cut_off_while_the_store_is_replaced_is_dropped_by_its_own_clock() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1, ttl=6) as run:
        a, b, c = (run.handler(name) for name in "abc")
        infos = await run.meet(a, b, c)
        at_a = await listen(run, a)
        run.network.partition("a")
        cut_at = now()
        await replace(run)
        for one in [await listen(run, node) for node in (b, c)]:
            await one.until(Dropped)
        run_together = await run.meet(b, c)
        assert {info.round for info in run_together} == {1}
        await at_a.until(Dropped, within=8)
        assert now() - cut_at <= 6.001
        run.network.heal("a")
        (mine,) = [info for info in infos if info.node_id == "a"]
        with pytest.raises(RoundSupersededError):
            await mine.store.set("key", "late")
        heard = await listen(run, b)
        back = await run.join(a)
        await heard.until(NodesWaiting(1))
        infos = [*(await run.meet(b, c)), await back]
        assert_one_round(infos)
        assert infos[0].round == 2


async def test_s10_a_node_that_waits_while_the_store_is_replaced_waits_on_in_the_new_one_for_as_long_as_it_would_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the call failed, and a node that did not call again was missing in the new store."""
    async with VirtualRun(min_nodes=2, join_timeout=60) as run:
        a, b = run.handler("a"), run.handler("b")
        for _ in range(3):
            await run.meet(a, b)
        joining = await run.join(a)
        await asyncio.sleep(20)
        await replace(run)
        await asyncio.sleep(20)
        assert not joining.done()
        assert "replaced by" in caplog.text
        assert "it joins the run in the new one" in caplog.text
        infos = [await b.next_rendezvous(), await joining]
        assert_one_round(infos)
        assert infos[0].round == 3
        await a.leave()
        await b.leave()
        joining = await run.join(a)
        began = now()
        await asyncio.sleep(20)
        await replace(run)
        with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
            await joining
        assert 59 <= now() - began <= 61
