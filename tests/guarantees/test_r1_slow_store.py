"""Promise R1 through a slow network: a round completes, and waiting nodes know that the store answers slowly."""

import asyncio

import pytest

from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("round_trip", [0.05, 0.3, 1.0, 3.0])
async def test_r1_rounds_complete_however_slowly_the_store_answers(round_trip: float) -> None:
    """At 1.5 s no round ever completed: a coordinator's term of 3 s expired before its first decision."""
    async with VirtualRun(latency=round_trip / 2, min_nodes=3) as run:
        handlers = [run.handler(name) for name in "abc"]
        began = asyncio.get_running_loop().time()
        infos = await run.meet(*handlers)
        assert {info.round for info in infos} == {0}
        assert asyncio.get_running_loop().time() - began < 1.0 + 20 * round_trip
        await asyncio.sleep(60)  # no node is dropped meanwhile
        infos = await run.meet(*handlers)
        assert {info.round for info in infos} == {1}


@pytest.mark.parametrize(("round_trip", "words"), [(0.1, ""), (1.5, "the store takes 1.5 s to answer")])
async def test_r1_a_waiting_node_reports_how_slowly_the_store_answers(round_trip: float, words: str) -> None:
    async with VirtualRun(latency=round_trip / 2, min_nodes=2, join_timeout=40) as run:
        handler = run.handler("a")
        with pytest.raises(TimeoutError, match=f"1 of at least 2 nodes.*{words}"):
            await run.meet(handler)
