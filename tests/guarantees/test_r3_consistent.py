"""Promise R3: "All members of a round agree on round number, members, ranks 0..n-1 once each, world size, and rank 0's
address".

Real processes do so in `test_real_processes_handlers`, and after crashes, pauses and cuts in `tests/sim`.
"""

import pytest

from tests.support.runs import VirtualRun, assert_one_round


@pytest.mark.virtual_time
async def test_r3_sixty_four_handlers_agree() -> None:
    async with VirtualRun(min_nodes=64) as run:
        infos = await run.meet(*(run.handler(f"n{number}") for number in range(64)))
        assert_one_round(infos)
        roster = await infos[5].participants()
        assert {one.node_id: one.rank for one in roster} == {info.node_id: info.rank for info in infos}
