"""Promise R16: "Whatever waits says for what, in words and numbers": why a round was given up, and who was lost."""

from __future__ import annotations

import pytest

from rdzv import NodesLost
from tests.support.runs import VirtualRun, listen


@pytest.mark.virtual_time
async def test_r16_why_the_coordinator_itself_was_lost_is_said_too() -> None:
    """R16: "whatever waits says for what": its successor had seen nothing of its death, and gave no reason."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        await run.meet(*handlers.values())
        coordinator = (await handlers["a"].status()).coordinator
        assert coordinator is not None
        rest = [handler for name, handler in handlers.items() if name != coordinator]
        run.crash(coordinator)
        heard = await listen(run, rest[0])
        await heard.until(NodesLost(1, (coordinator,)))
        status = await rest[0].status()
        assert {one.node_id: one.why for one in status.absent} == {coordinator: "its process ended"}
        (chapter,) = await rest[0].history()
        assert [(one.kind, one.node_ids, one.reason) for one in chapter.incidents] == [
            ("lost", (coordinator,), "its process ended")
        ]
