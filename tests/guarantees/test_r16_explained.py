"""Promise R16: "Whatever waits says for what, in words and numbers": why a round was given up, and who was lost."""

from __future__ import annotations

import pytest

from rdzv import NodesLost
from rdzv.core.decision import Parked
from tests.support.hand_fed import HandFed
from tests.support.runs import VirtualRun, listen


def reason(run: HandFed, name: str) -> str:
    """What a waiting node says."""
    answer = run.follow(name, passed_over=run.round.revision if run.round else 0)
    assert isinstance(answer, Parked)
    return answer.reason


def test_r16_a_round_that_was_given_up_is_named_with_the_reason_of_its_rank_0_until_the_next_completes() -> None:
    """Nodes that did not reach rank 0 waited "for a coordinator", and status did not say why they met again."""
    run = HandFed(needed=3, last_call=0)
    run.arrive("a", "b", "c")
    run.commit()
    run.arrive("b", gave_up="round 0 was given up: node b (rank 1): rank 0 at a:1: it does not answer")
    run.arrive("a", unreached=True, gave_up="round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    reasons = [reason(run, name) for name in ("a", "b")]
    assert reasons[0] == reasons[1]
    assert reasons[0].endswith("; round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    run.die("c")
    assert reason(run, "a").startswith("2 of at least 3 nodes")
    assert "; round 0 was given up: node a (rank 0)" in reason(run, "a")
    run.arrive("c")
    assert run.commit()[0] != "a"
    assert run.progress.given_up == ""


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
