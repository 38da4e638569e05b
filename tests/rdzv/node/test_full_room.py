"""Members that have used up the limits of their run, or of the store, with shared data can still meet again."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core.state import NodesLost
from store import LimitExceeded, Limits
from tests.support.runs import VirtualRun, assert_one_round, listen

pytestmark = pytest.mark.virtual_time

ROOM = 64 * 1024


@pytest.mark.parametrize("limits", [Limits(group_bytes_max=ROOM), Limits(stored_bytes_max=ROOM), Limits(keys_max=200)])
@pytest.mark.parametrize("lost", ["a", "c"])
async def test_members_whose_shared_store_is_full_meet_again_after_a_loss(limits: Limits, lost: str) -> None:
    async with VirtualRun(limits=limits, min_nodes=2, max_nodes=3, ttl=3, last_call_timeout=1) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        first = await run.meet(*handlers.values())
        store = first[1].store
        await store.set("big", b"")
        for size in (4096, 256, 1):
            number = 0
            try:
                while True:
                    await store.set(f"{size}/{number}", bytes(size))
                    number += 1
            except LimitExceeded:
                pass
        survivors = [handler for name, handler in handlers.items() if name != lost]
        heard = [await listen(run, handler) for handler in survivors]
        run.crash(lost)
        for one in heard:
            await one.until(NodesLost, within=5.0)
        infos = await asyncio.wait_for(run.meet(*survivors), 30)
        assert_one_round(infos)
        assert infos[0].round == first[0].round + 1
        await infos[0].store.set("k", bytes(1024))
