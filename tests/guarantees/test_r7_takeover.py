"""A successor coordinates within three round trips, whatever there is to take over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rdzv.core.state import NodesLost
from store.messages import Put, Request, Transact
from tests.support.runs import VirtualRun, listen

pytestmark = pytest.mark.virtual_time

ONE_WAY = 0.1  # seconds
ROUND_TRIPS_MOST = 3


@pytest.mark.parametrize("members", [3, 40])
async def test_r7_a_takeover_takes_at_most_three_round_trips(members: int) -> None:
    """From asking for the role to saying who is lost it took about nine, one after the other."""
    begun: dict[str, float] = {}
    said: dict[str, float] = {}
    async with VirtualRun(latency=ONE_WAY, min_nodes=members, max_nodes=members) as run:
        handlers = [run.handler(f"n{number}") for number in range(members)]
        infos = await run.meet(*handlers)
        coordinator = run.engine._keys.entries["/rdzv/job/head/coordinator"].value.decode()

        def hook_of(name: str) -> Any:
            async def hook(request: Request[Any], when: str) -> None:
                now = asyncio.get_running_loop().time()
                keys = (
                    {one.key for one in request.then if isinstance(one, Put)} if isinstance(request, Transact) else ()
                )
                if when == "before" and "/rdzv/job/head/coordinator" in keys:
                    begun[name] = now
                if when == "after" and "/rdzv/job/head/progress" in keys:
                    said.setdefault(name, now)

            return hook

        for name, client in run.clients.items():
            client.hook = hook_of(name)
        survivor = next(handler for handler in handlers if handler.node_id != coordinator)
        heard = await listen(run, survivor)
        run.crash(coordinator)
        await heard.until(NodesLost)
        (successor,) = said
        assert said[successor] - begun[successor] <= ROUND_TRIPS_MOST * 2 * ONE_WAY + 0.01
        assert len(infos) == members
