"""Promise R14: spares keep no other node waiting and survive rounds, and one comes in as soon as there is room."""

import asyncio

import pytest

from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("lost", ["a", "b"])
async def test_r14_spares_survive_rounds_and_the_longest_waiting_one_comes_in_when_there_is_room(lost: str) -> None:
    """The lost node is once the coordinator and once the other member."""
    async with VirtualRun(min_nodes=2, max_nodes=2, join_timeout=60) as run:
        members = {name: run.handler(name) for name in "ab"}
        await run.meet(*members.values())
        z, y = [await run.join(run.handler(name)) for name in ("z", "y")]
        for number in range(1, 4):
            await asyncio.sleep(100)
            assert {info.round for info in await run.meet(*members.values())} == {number}
        assert not z.done()
        assert not y.done()
        await asyncio.sleep(1)
        run.crash(lost)
        del members[lost]
        (survivor,) = members.values()
        assert (await survivor.status()).spares == ("z", "y")
        assert await survivor.num_nodes_waiting() == 0
        await asyncio.sleep(2)
        assert await survivor.num_nodes_waiting() == 1
        assert_one_round([await survivor.next_rendezvous(), await z])
        assert not y.done()


async def test_r14_nodes_beyond_the_unit_stay_as_spares() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=8, node_unit=2, last_call_timeout=30) as run:
        nodes = [run.handler(name) for name in "abc"]
        *joining, left_over = [await run.join(node) for node in nodes]
        assert_one_round(await asyncio.gather(*joining))
        assert (await nodes[0].status()).spares == ("c",)
        assert not left_over.done()
