"""R25 **Equal after a loss.** What `sync_state` restores is equal on all members and holds nothing of the step that the
loss ended; what it does not restore is listed.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest

import store.sync
from tests.support.processes import require, start_python
from tests.support.twins import TWINS


async def trained(run: str, way: str, twin: str) -> list[dict[str, Any]]:
    async with start_python("-m", "tests.rdzv.torch.interrupted_program", run, way, twin) as program:
        assert await program.wait(timeout=90) == 0
        told = [json.loads(line) for line in program.stdout if line.startswith("{")]
    assert len(told) == 2
    return sorted(told, key=operator.itemgetter("name"))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("way", ["killed", "drained"])
async def test_r25_nothing_of_an_interrupted_step_remains(way: str, twin: str) -> None:
    """Neither a gradient nor what buffers have counted: as if nobody had gone."""
    require("torch")
    with store.sync.serve() as server:
        at = f"{server.url}/%s?min_nodes=2&max_nodes=2&is_host=false&rank_order=name"
        calm, disturbed = await trained(at % "calm", "calm", twin), await trained(at % way, way, twin)
    assert [one["counted"] for one in calm] == [one["counted"] for one in disturbed] == [[20, 20]] * 2
    assert [one["weights"] for one in calm] == [one["weights"] for one in disturbed]
    assert calm[0]["buffers"] == disturbed[0]["buffers"], "those of rank 0, which DDP gives to all"
