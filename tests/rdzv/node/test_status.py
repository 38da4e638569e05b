"""How a run stands, in numbers and in words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rdzv.core.state import NodesLost, Phase
from tests.rdzv.node.test_coordinator import commits_in
from tests.support.runs import VirtualRun, listen

if TYPE_CHECKING:
    from store.messages import Request

pytestmark = pytest.mark.virtual_time


async def test_a_member_that_has_gone_on_waits_and_one_that_died_is_in_neither_list() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        _, b, c = await run.met("abc")
        heard = await listen(run, c)
        run.crash("a")
        await heard.until(NodesLost)
        await run.join(b)
        status = await c.status()
        assert [member.node_id for member in status.members] == ["c"]
        assert (status.waiting, status.spares) == (("b",), ())
        assert status.reason == "1 node waiting for round 0's 1 live member to leave: c"
        assert status.world_size == 3, "the round's, as it was completed"


async def test_a_round_that_was_just_committed_stands_though_its_progress_is_still_to_be_reported() -> None:
    async with VirtualRun(min_nodes=2, last_call_timeout=5) as run:
        a, b = run.handler("a"), run.handler("b")
        first = await run.join(a)
        held = asyncio.Event()

        async def hook(request: Request[Any], when: str) -> None:
            if when == "after" and commits_in(request):
                await held.wait()

        run.clients["a"].hook = hook
        await b.next_rendezvous()
        status = await b.status()
        held.set()
        assert (status.phase, status.reason) == (Phase.TRAINING, "round 0 stands with 2 nodes")
        await first


@pytest.mark.parametrize(
    ("given", "reason"), [("done", "the run is closed by a: done"), ("", "the run is closed by a")]
)
async def test_a_closed_run_says_who_closed_it_and_why(given: str, reason: str) -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        await a.set_closed(given)
        status = await a.status()
        assert (status.phase, status.reason, status.closed) == (Phase.CLOSED, reason, given)


async def test_who_was_in_the_round_before_and_is_not_here_is_missing_also_once_a_round_stands_without_it() -> None:
    """At three in the morning the others have met again long ago, and somebody asks which node to look at."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        _, b, c = await run.met("abc")
        heard = await listen(run, c)
        run.crash("a")
        await heard.until(NodesLost)
        await run.meet(b, c)
        status = await run.handler("observer", min_nodes=None, max_nodes=None).status()
        assert (status.phase, status.world_size) == (Phase.TRAINING, 2)
        assert [(one.node_id, one.how) for one in status.absent] == [("a", "lost")]
        assert status.absent_count == 1
