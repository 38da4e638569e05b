"""R19 Closed runs end: a closed run stays closed for `closed_ttl` (one day), then its keys are removed.

So a server does not grow with the runs it has seen.
"""

from __future__ import annotations

import asyncio
import os

import pytest

import rdzv
from rdzv.cli.observe import _describe
from rdzv.core.history import CHAPTERS_MOST
from rdzv.node.admission import UNFIT_MOST
from rdzv.node.coordinator import SHARED_TTL_LEAST
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


@pytest.mark.parametrize("ending", ["closed and gone", "left", "killed"])
async def test_r19_what_the_last_round_shared_goes_though_the_run_is_remembered_for_a_day(ending: str) -> None:
    """R19: "as a record of a few hundred bytes; its shared store goes at once": nobody can read it any more.

    It stayed for a day: after 51 runs of 20 MiB, the store took nothing more of anybody.
    """
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", bytes(100_000))
        await asyncio.sleep(600)
        assert len(run.keys("store/")) == 2
        if ending == "closed and gone":
            await a.set_closed("done")
        if ending == "killed":
            run.crash("a")
            run.crash("b")
        else:
            await a.aclose()
            await b.aclose()
        await asyncio.sleep(SHARED_TTL_LEAST + 1)
        assert run.keys("store/") == []
        kept = list(run.engine._keys.entries.values())
        assert any(entry.key.endswith("head/round") for entry in kept), "the run is remembered"
        assert sum(len(entry.key) + len(entry.value) for entry in kept) < 1000


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


async def test_r19_two_hundred_failed_health_checks_leave_a_bounded_record() -> None:
    """R19: "nor with the attempts to join them": each left a key and a lease for a day, and status named them all."""
    async with VirtualRun(min_nodes=2) as run:
        for number in range(200):
            handler = run.handler(f"made-up-{number}", health_check=lambda: "no GPU")
            with pytest.raises(rdzv.RendezvousError, match="no GPU"):
                await handler.next_rendezvous()
            await handler.aclose()
        status = await run.handler("looks").status()
        assert len(status.refused) == UNFIT_MOST
        assert f"made-up-{199}" in status.refused
        assert len(run.engine._keys) <= UNFIT_MOST + 3
        assert len(run.engine._leases) == 1
        lines = _describe(status, None, {}).splitlines()
        assert len(lines) < 5
        assert any("and 60 more: failed its health check: no GPU" in line for line in lines)


ENDINGS = ("closed", "left", "killed", "timed out", "half killed", "closed and killed", "unfit", "regrouped")

RUNS = int(os.environ.get("RDZV_RUNS", "80"))
"""How many runs end in the test below; `.ci/run` says 2,000, which take a minute."""


async def end(run: VirtualRun, ending: str, number: int) -> None:
    """Let a run of two nodes end in one way."""
    names = [f"a-{number}", f"b-{number}"]
    a, b = [run.handler(name, run_id=f"run-{number}") for name in names]
    if ending == "timed out":
        with pytest.raises(rdzv.RendezvousTimeoutError):
            await a.next_rendezvous()
    elif ending == "unfit":
        with pytest.raises(rdzv.RendezvousError, match="health check"):
            await run.handler(f"unfit-{number}", run_id=f"run-{number}", health_check=lambda: False).next_rendezvous()
    else:
        for info in await run.meet(a, b):
            await info.store.set(f"key/{info.rank}", bytes(1000))
        if ending == "regrouped":
            await run.meet(a, b)
        if ending.startswith("closed"):
            await b.set_closed("done")
    for name, handler in zip(names, (a, b), strict=True):
        if ending in ("killed", "closed and killed") or (ending == "half killed" and handler is a):
            run.crash(name)
        else:
            await handler.aclose()


async def test_r19_two_minutes_after_runs_of_every_ending_the_store_holds_no_key_and_no_lease() -> None:
    """R19: "a server does not grow with the runs it has seen, nor with the attempts to join them"."""
    async with VirtualRun(min_nodes=2, closed_ttl=60, join_timeout=5) as run:
        numbers = iter(range(RUNS))

        async def one_after_the_other() -> None:
            for number in numbers:
                await end(run, ENDINGS[number % len(ENDINGS)], number)

        await asyncio.gather(*(one_after_the_other() for _ in range(8)))
        assert len(run.engine._keys) > 0
        await asyncio.sleep(120)
        assert sorted(run.engine._keys.entries) == []
        assert len(run.engine._leases) == 0
