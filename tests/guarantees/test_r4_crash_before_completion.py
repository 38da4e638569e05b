"""Promise R4: "A crash before completion drops that node and the rest complete without it"."""

import asyncio

import pytest

from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_r4_a_crash_before_completion_drops_that_node_alone(victim: str) -> None:
    async with VirtualRun(min_nodes=2, max_nodes=4, last_call_timeout=10) as run:
        joining = {name: await run.join(run.handler(name)) for name in "abc"}
        run.crash(victim)
        infos = await asyncio.gather(*(task for name, task in joining.items() if name != victim))
        assert_one_round(infos)
        assert infos[0].world_size == 2
