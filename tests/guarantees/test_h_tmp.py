from __future__ import annotations
import asyncio
import pytest
from rdzv import *
from rdzv.core.stuck.tally import RunTally
from tests.support.runs import VirtualRun, assert_one_round, connected
from tests.support.virtual_time import now
pytestmark = pytest.mark.virtual_time
HOSTS = "a,b,c:29400"

async def c_resize(run, x): await x.resize(max_nodes=5)
async def c_ban(run, x): await x.ban("z", "bad memory")
async def c_timed(run, x): await x.ban("z", "bad memory", lasts=60)
async def c_close(run, x): await x.set_closed("it is done")
async def c_tally(run, x): await x.change_tally(lambda was: RunTally(restarts=2, fruitless=1).pack())
async def k_resize(run, x, y):
    s = await x.status(); assert s.settings["max_nodes"] == 5, s.settings
async def k_ban(run, x, y):
    with pytest.raises(RendezvousRefusedError, match="bad memory"): await run.handler("z").next_rendezvous()
async def k_timed(run, x, y):
    await k_ban(run, x, y)
    s = await x.status(); print(s.banned)
    await asyncio.sleep(62)
    t = await run.join(run.handler("z", )); await asyncio.sleep(1); assert not (t.done() and t.exception())
async def k_close(run, x, y):
    for n in (x, y, run.handler("fresh")):
        with pytest.raises(RendezvousClosedError, match="it is done"): await n.next_rendezvous()
async def k_tally(run, x, y):
    got = RunTally.of(await y.change_tally(lambda was: was)); assert got.restarts == 2 and got.fruitless == 1, got

CASES = {"resize": (c_resize, k_resize), "ban": (c_ban, k_ban), "timed": (c_timed, k_timed), "close": (c_close, k_close), "tally": (c_tally, k_tally)}

@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("who", ["x", "looker"])
@pytest.mark.parametrize("first", ["x", "y", "both", "fresh"])
@pytest.mark.parametrize("later", [0.0, 0.1])
async def test_it(what, who, first, later):
    change, check = CASES[what]
    if who == "looker" and later == 0.0: pytest.skip("documented")
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=1, ttl=60) as run:
        x, y = run.handler("x"), run.handler("y")
        await run.meet(x, y)
        if first != "both": run.network.partition("y")
        if who == "x": await change(run, x)
        else:
            h = run.handler("op"); await connected(h); await change(run, h)
        if later: await asyncio.sleep(later)
        run.network.partition("x"); run.network.partition("y")
        run.kill_store(); await asyncio.sleep(0.2); run.restart_store()
        if first == "fresh":
            run.network.heal("op") if 0 else None
            fr = await run.join(run.handler("f1")); await asyncio.sleep(0.3)
            run.network.heal()
        elif first == "both": run.network.heal()
        else:
            run.network.heal(first)
            node = {"x": x, "y": y}[first]
            t = await run.join(node) if what != "close" else None
            await asyncio.sleep(1)
            run.network.heal()
            if t is not None:
                await {"x": y, "y": x}[first].next_rendezvous(); await t
        if what != "close":
            if first in ("both","fresh"): await run.meet(x, y)
        else:
            await asyncio.sleep(2)
        await check(run, x, y)
