"""Promises R3, R5 and R9 with real processes that are really stopped and killed."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

import rdzv
import store
from rdzv import NodesLost, NodesWaiting
from tests.support.processes import Child, start_python

PAUSED = """
import asyncio, json, sys, time, rdzv

def say(**what):
    print(json.dumps(what), flush=True)

async def main():
    async with rdzv.connect(sys.argv[1], node_id="paused", is_host=False) as handler, handler.changes() as changes:
        info = await handler.next_rendezvous()
        waiting = asyncio.ensure_future(info.store.get("never"))
        say(what="in", round=info.round)
        async for change in changes:
            if isinstance(change, rdzv.Dropped):
                say(what="dropped", reason=change.reason)
                break
        for name, attempt in (("wait", waiting), ("write", info.store.set("value", "late"))):
            try:
                await attempt
            except rdzv.RoundSupersededError:
                say(what=name, ended="superseded")
        info = await handler.next_rendezvous()
        say(what="again", round=info.round, size=info.world_size)
asyncio.run(main())
"""

FILLING = """
import asyncio, itertools, sys, rdzv, store

async def main():
    async with rdzv.connect(sys.argv[1], node_id="filling", is_host=False) as handler:
        while True:
            info, size, keys = await handler.next_rendezvous(), 30_000, itertools.count()
            lost = asyncio.ensure_future(info.store.get("never"))
            while not lost.done():
                try:
                    await info.store.set(str(next(keys)), bytes(size))
                except store.LimitExceeded:
                    if size == 1:
                        print("full in round", info.round, flush=True)
                        await asyncio.wait([lost], timeout=0.1)
                    size = max(size // 10, 1)
            lost.exception()
asyncio.run(main())
"""

MANY = """
import asyncio, json, sys, rdzv

async def node(url, name):
    async with rdzv.connect(url, node_id=name, is_host=False) as handler:
        info = await handler.next_rendezvous()
        await info.store.barrier("all have it", info.world_size)
        return [name, info.round, info.rank, info.world_size, list(info.bootstrap_address)]

async def main():
    url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(await asyncio.gather(*(node(url, f"n{first + at}") for at in range(count)))), flush=True)
asyncio.run(main())
"""


async def told(child: Child, what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await child.line(f'"what": "{what}"'))
    return found


async def test_r9_a_process_that_is_paused_beyond_its_ttl_is_dropped_fenced_and_can_come_again() -> None:
    parameters = "min_nodes=1&max_nodes=2&last_call_timeout=2&ttl=1"
    async with store.serve() as server, AsyncExitStack() as stack:
        url = f"{server.url}/job?{parameters}"
        other = await stack.enter_async_context(rdzv.connect(url, node_id="other", is_host=False))
        joining = asyncio.create_task(other.next_rendezvous())
        child = await stack.enter_async_context(start_python("-c", PAUSED, url))
        assert await told(child, "in") == {"what": "in", "round": 0}
        await joining
        async with other.changes() as changes:
            child.stop()
            async for change in changes:
                if isinstance(change, NodesLost):
                    assert change == NodesLost(1, ("paused",))
                    break
        info = await other.next_rendezvous()
        assert (info.round, info.world_size) == (1, 1)
        await info.store.set("value", "new")
        child.resume()
        reason = (await told(child, "dropped"))["reason"]  # whichever it hears of first
        expected = ("lease", "round 1 was completed without this node", "the others have lost it")
        assert any(words in reason for words in expected)
        assert await told(child, "wait") == {"what": "wait", "ended": "superseded"}
        assert await told(child, "write") == {"what": "write", "ended": "superseded"}
        assert await info.store.get("value") == b"new"
        async with other.changes() as changes:
            async for change in changes:
                if change == NodesWaiting(1):
                    break
        await other.next_rendezvous()
        assert await told(child, "again") == {"what": "again", "round": 2, "size": 2}
        assert await child.wait() == 0


@pytest.mark.in_ci
async def test_r3_a_hundred_handlers_in_four_processes_agree() -> None:
    nodes, processes = 100, 4
    async with store.serve() as server, AsyncExitStack() as stack:
        url = f"{server.url}/job?min_nodes={nodes}"
        children = [
            await stack.enter_async_context(
                start_python("-c", MANY, url, str(number * nodes // processes), str(nodes // processes))
            )
            for number in range(processes)
        ]
        infos = [info for child in children for info in json.loads(await child.line("[", timeout=40))]
        assert [await child.wait(timeout=20) for child in children] == [0] * processes
    assert sorted(rank for _, _, rank, _, _ in infos) == list(range(nodes))
    assert {(round, size) for _, round, _, size, _ in infos} == {(0, nodes)}
    assert len({tuple(address) for *_, address in infos}) == 1


async def test_r5_a_killed_process_is_announced_while_another_keeps_the_store_full() -> None:
    """Regression: the coordinator could not write its report, nor any node take the role again."""
    mib = 2**20
    limits = store.Limits(
        value_bytes_max=mib // 16,
        frame_bytes_max=mib // 8,
        outbox_bytes_max=mib,
        history_bytes_max=mib // 4,
        memory_bytes_max=4 * mib,
    )
    async with store.serve(limits=limits) as server, AsyncExitStack() as stack:
        url = f"{server.url}/job?min_nodes=2&max_nodes=3&last_call_timeout=2&ttl=3"
        other = await stack.enter_async_context(rdzv.connect(url, node_id="other", is_host=False))
        joining = asyncio.create_task(other.next_rendezvous())
        filling = await stack.enter_async_context(start_python("-c", FILLING, url))
        paused = await stack.enter_async_context(start_python("-c", PAUSED, url))
        await joining
        await filling.line("full in round 0")
        async with other.changes() as changes:
            paused.kill()
            async with asyncio.timeout(5):
                async for change in changes:
                    if isinstance(change, NodesLost):
                        break
        async with asyncio.timeout(10):
            info = await other.next_rendezvous()
        assert (info.round, info.world_size) == (1, 2)
        await filling.line("full in round 1")
