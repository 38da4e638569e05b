"""All members of a round come to the same answer: go on, or meet again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.loop.round_barrier import all_here
from tests.support.runs import VirtualRun

if TYPE_CHECKING:
    from rdzv.node.handler import Handler, RendezvousInfo

pytestmark = pytest.mark.virtual_time


async def muster(run: VirtualRun, *members: tuple[Handler, RendezvousInfo]) -> list[bool]:
    tasks = [run.start(all_here(handler, info, timeout=60)) for handler, info in members]
    return list(await asyncio.gather(*tasks))


async def test_when_all_have_come_all_go_on() -> None:
    async with VirtualRun(min_nodes=3) as run:
        handlers = [run.handler(name) for name in "abc"]
        infos = await run.meet(*handlers)
        early = [run.start(all_here(*member, timeout=60)) for member in zip(handlers[:2], infos, strict=False)]
        await asyncio.sleep(30)
        assert not any(task.done() for task in early)
        assert await all_here(handlers[2], infos[2], timeout=60)
        assert await asyncio.gather(*early) == [True, True]


@pytest.mark.parametrize("way", ["dies", "leaves"])
async def test_when_one_goes_first_all_meet_again_and_can(way: str) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = (run.handler(name) for name in "abc")
        infos = await run.meet(a, b, c)
        waiting = [run.start(all_here(*member, timeout=60)) for member in ((a, infos[0]), (b, infos[1]))]
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        if way == "dies":
            run.crash("c")
        else:
            await c.leave()
        assert await asyncio.gather(*waiting) == [False, False]
        assert asyncio.get_running_loop().time() - began < 1.5  # disconnect_ttl is 1 s; nobody waits for a timeout
        again = await run.meet(a, b)
        assert await muster(run, (a, again[0]), (b, again[1])) == [True, True]


async def test_who_goes_after_all_have_come_changes_no_answer() -> None:
    """Else one would go on, and wait for another that meets again."""
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        late = run.start(all_here(a, infos[0], timeout=60))
        assert await all_here(b, infos[1], timeout=60)
        await b.leave()
        assert await late


async def test_who_comes_after_one_has_gone_hears_the_same() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = (run.handler(name) for name in "abc")
        infos = await run.meet(a, b, c)
        await c.leave()
        assert not await all_here(a, infos[0], timeout=60)
        assert not await all_here(b, infos[1], timeout=60)


async def test_a_member_that_was_dropped_itself_meets_again() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, ttl=4) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        waiting = run.start(all_here(a, infos[0], timeout=60))
        run.network.partition("a")
        await asyncio.sleep(8)
        run.network.heal()
        assert not await waiting


async def test_who_lives_and_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        began = asyncio.get_running_loop().time()
        assert await all_here(a, infos[0], timeout=60)
        assert 60 <= asyncio.get_running_loop().time() - began < 62


async def test_a_store_that_is_out_of_reach_is_an_error_by_itself() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        await run.end_store()
        with pytest.raises(RendezvousConnectionError):
            await all_here(a, infos[0], timeout=5)


async def test_a_handler_that_was_closed_is_in_no_round_to_wait_for() -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        (info,) = await run.meet(a)
        await a.aclose()
        assert not await all_here(a, info, timeout=60)
