"""`all_here`: all members of a round get the same answer, to continue or to meet again."""

import asyncio

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.node.front.verbs import _has_task_failed
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time


async def test_if_all_call_all_continue() -> None:
    async with VirtualRun(min_nodes=3) as run:
        handlers = [run.handler(name) for name in "abc"]
        await run.meet(*handlers)
        early = [run.start(handler.all_here(timeout=60)) for handler in handlers[:2]]
        await asyncio.sleep(30)
        assert not any(task.done() for task in early)
        last_came = asyncio.get_running_loop().time()
        assert await handlers[2].all_here(timeout=60)
        assert await asyncio.gather(*early) == [True, True]
        assert asyncio.get_running_loop().time() - last_came < 1.0, "no member waits for the timeout"


@pytest.mark.parametrize("way", ["dies", "leaves"])
async def test_if_one_leaves_first_all_meet_again(way: str) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = await run.met("abc")
        waiting = [run.start(handler.all_here(timeout=60)) for handler in (a, b)]
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        if way == "dies":
            run.crash("c")
        else:
            await c.leave()
        assert await asyncio.gather(*waiting) == [False, False]
        assert asyncio.get_running_loop().time() - began < 1.5  # disconnect_ttl is 1 s; no member waits for the timeout
        await run.meet(a, b)
        assert all(await asyncio.gather(a.all_here(timeout=60), b.all_here(timeout=60)))


async def test_a_departure_after_all_have_come_changes_no_answer() -> None:
    """Otherwise one member would continue, and wait for another that meets again."""
    async with VirtualRun(min_nodes=2) as run:
        a, b = await run.met("ab")
        late = run.start(a.all_here(timeout=60))
        assert await b.all_here(timeout=60)
        await b.leave()
        assert await late


async def test_a_call_after_a_departure_gets_the_same_answer() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = await run.met("abc")
        await c.leave()
        assert not await a.all_here(timeout=60)
        assert not await b.all_here(timeout=60)


async def test_a_member_that_was_dropped_itself_meets_again() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, ttl=4) as run:
        a, _ = await run.met("ab")
        waiting = run.start(a.all_here(timeout=60))
        run.network.partition("a")
        await asyncio.sleep(8)
        run.network.heal()
        assert not await waiting


async def test_a_live_member_that_does_not_call_is_waited_for_until_the_timeout() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, _ = await run.met("ab")
        began = asyncio.get_running_loop().time()
        assert await a.all_here(timeout=60)
        assert 60 <= asyncio.get_running_loop().time() - began < 62


async def test_an_unreachable_store_is_an_error() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, _ = await run.met("ab")
        run.kill_store()
        with pytest.raises(RendezvousConnectionError):
            await a.all_here(timeout=5)


async def test_a_member_that_is_banned_while_it_waits_meets_again() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, _ = await run.met("abc")
        waiting = run.start(a.all_here(timeout=60))
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        await b.ban("a", now=True)
        assert not await waiting
        assert asyncio.get_running_loop().time() - began < 1.5


@pytest.mark.parametrize(("end", "failed"), [("", False), ("succeeds", False), ("fails", True), ("cancelled", True)])
async def test_a_count_that_failed_is_repeated(end: str, failed: bool) -> None:
    async def count() -> int:
        if not end:
            await asyncio.Event().wait()
        return 1 if end == "succeeds" else int("no number")

    task = asyncio.create_task(count())
    if end == "cancelled":
        task.cancel()
    await asyncio.wait([task], timeout=1.0)
    assert _has_task_failed(task) is failed
    task.cancel()
