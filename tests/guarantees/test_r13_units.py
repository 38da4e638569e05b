"""Promise R13: "`node_unit=k` makes the world size a multiple of k; the minimum is rounded up to a unit"."""

import asyncio

import pytest

import rdzv
from tests.support.runs import VirtualRun, assert_one_round


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("min_nodes", "max_nodes", "unit", "there", "size"),
    [(2, 6, 2, there, size) for there, size in [(2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (9, 6)]]
    + [(3, 8, 4, 3, 0), (3, 8, 4, 4, 4)],  # the minimum was once rounded down, even to zero (DLRover)
)
async def test_r13_the_world_size_is_a_multiple_of_the_unit(
    min_nodes: int, max_nodes: int, unit: int, there: int, size: int
) -> None:
    async with VirtualRun(min_nodes=min_nodes, max_nodes=max_nodes, node_unit=unit, last_call_timeout=5) as run:
        joining = [await run.join(run.handler(f"n{number}")) for number in range(there)]
        done, _ = await asyncio.wait(joining, timeout=60)
        assert len(done) == size
        if size:
            infos = [task.result() for task in done]
            assert_one_round(infos)
            assert infos[0].world_size == size


async def test_r13_a_minimum_then_above_max_nodes_is_an_error() -> None:
    with pytest.raises(rdzv.RendezvousSettingsError, match="node_unit"):
        await rdzv.connect("tcp://127.0.0.1/job?min_nodes=3&max_nodes=3&node_unit=4")
