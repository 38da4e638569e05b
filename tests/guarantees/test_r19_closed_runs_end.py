"""R19 Closed runs end: a closed run stays closed for `closed_ttl` (one day), then its keys are removed.

So a server does not grow with the runs it has seen.
"""

from __future__ import annotations

import asyncio

import pytest

import rdzv
from rdzv.core.history import CHAPTERS_MOST
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time

DAY = 600.0  # a short one: the run is told so


async def test_r19_a_closed_run_stays_closed_for_a_day_and_then_nothing_of_it_is_left() -> None:
    """R19: "A closed run stays closed for `closed_ttl` (one day), then its keys are removed"."""
    async with VirtualRun(min_nodes=2, closed_ttl=DAY) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", "weights")
            await info.store.add("steps", 1)
            await info.store.append("log", "line")
            await info.store.queue_push("queue", "item")
        await a.set_closed("done")
        await a.aclose()
        await b.aclose()
        await asyncio.sleep(DAY * 0.9)
        with pytest.raises(rdzv.RendezvousClosedError, match="done"):
            await run.handler("late").next_rendezvous()
        await asyncio.sleep(DAY * 0.4)
        assert run.keys() == []


async def test_r19_a_closed_run_ends_also_on_a_server_that_restarted_meanwhile() -> None:
    """R19, S5: no sooner than it would have, and at the latest `closed_ttl` after the restart."""
    async with VirtualRun(durable=True, min_nodes=2, closed_ttl=DAY) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", "weights")
        await a.set_closed("done")
        await a.aclose()
        await b.aclose()
        await asyncio.sleep(DAY * 0.7)
        run.kill_store()
        await asyncio.sleep(5)
        run.restart_store()
        await asyncio.sleep(DAY * 0.9)
        with pytest.raises(rdzv.RendezvousClosedError, match="done"):
            await run.handler("late").next_rendezvous()
        await asyncio.sleep(DAY * 0.2)
        assert run.keys() == []


async def test_r19_a_run_that_everybody_has_left_without_closing_it_ends_as_well() -> None:
    """R19: "a server does not grow with the runs it has seen"."""
    async with VirtualRun(min_nodes=2, closed_ttl=600) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        run.crash("a")
        run.crash("b")
        await asyncio.sleep(700)
        assert run.keys() == []


async def test_r19_a_run_that_goes_on_keeps_its_keys_for_longer_than_closed_ttl() -> None:
    """R19 is of closed runs: what a living one has shared stays, also when its coordinator changes."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1, closed_ttl=60) as run:
        a, b, c = run.handler("a"), run.handler("b"), run.handler("c")
        infos = await run.meet(a, b, c)
        await infos[1].store.set("model", "weights")
        await asyncio.sleep(500)
        coordinator = (await b.status()).coordinator
        assert coordinator is not None
        run.crash(coordinator)
        await asyncio.sleep(500)
        survivor = next(info for info in infos if info.node_id != coordinator)
        assert await survivor.store.get("model") == b"weights"
        assert run.keys("settings") == [""]


async def test_r19_two_hundred_rounds_leave_no_more_keys_than_two() -> None:
    """R10: a round's store is removed when a later round completes; and with it all else of that round."""
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        counts = {}
        for number in range(200):
            for info in await run.meet(a, b):
                assert info.round == number
                await info.store.set(f"key/{info.rank}", "value")
            await asyncio.sleep(0.1)
            counts[number] = len(run.keys())
        assert counts[199] == counts[1]
        assert len(await a.history()) == CHAPTERS_MOST  # what happened is remembered, and that is bounded too
