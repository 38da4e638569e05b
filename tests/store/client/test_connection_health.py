"""A silent connection is slow at first, then broken; an idle one is pinged."""

import asyncio
import random
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store.client.reconnecting import Connection
from store.client.timeouts import SILENCE, Timeouts
from tests.support.processes import require
from tests.support.stores import connect_in_memory, serve_in_memory


@pytest.mark.virtual_time
async def test_an_answer_that_a_busy_loop_has_not_read_yet_costs_no_ping() -> None:
    """In a loop that was busy with thousands of clients each request caused a ping as well, which added load."""
    network = MemoryNetwork(latency=SILENCE / 3)
    loop: Any = asyncio.get_running_loop()
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        before = server.figures()["requests"]
        asking = asyncio.create_task(client.get("a", timeout=100.0))
        await asyncio.sleep(SILENCE / 4)
        loop.timeline.now += 30.0  # one callback that takes half a minute
        await asking
        assert server.figures()["requests"] == before + 1
        assert len(network.links("client")) == 1


def test_on_uvloop_a_look_that_is_due_at_once_is_one_that_can_be_hastened() -> None:
    """uvloop returns a handle without a due time for it, and the first request after it failed."""
    require("uvloop")
    import uvloop

    async def ask() -> None:
        client: Any = type("Owner", (), {"timeouts": Timeouts(random.Random(0)), "met": False})
        link = Connection(client)
        link._schedule_check(asyncio.get_running_loop().time() - 1.0)
        link.expect_answer()
        link.stop_checks()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
