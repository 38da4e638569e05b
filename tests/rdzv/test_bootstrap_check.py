"""The outcome of a round in which not all members reach rank 0. The check has real hosts in `tests/hosts`."""

import asyncio
import contextlib

import pytest

import store
from rdzv.bootstrap_check import ReachVerdict, accept_other_ranks, find_rank0_problem, judge_reach
from rdzv.core.round import Round
from tests.support.processes import free_port, start_python


@pytest.mark.parametrize(
    ("missing", "size", "needed", "left_out"),
    [
        ([3], 4, 2, (3,)),
        ([3], 4, 3, (3,)),
        ([3], 4, 4, ()),  # too few would be left: another node becomes rank 0
        ([2, 3], 4, 2, (2, 3)),
        ([1, 2, 3], 4, 1, ()),  # only rank 0 itself reached rank 0
        ([2, 3, 4], 5, 2, ()),
        ([], 4, 2, ()),  # rank 0 could not listen
        ([1], 2, 1, ()),  # of two nodes, either may be at fault
    ],
)
def test_missing_members_are_left_out_if_most_came_and_enough_remain(
    missing: list[int], size: int, needed: int, left_out: tuple[int, ...]
) -> None:
    assert judge_reach("why", missing, size=size, needed=needed, again=False).left_out == left_out


def test_of_two_the_second_is_left_out_once_each_has_been_rank_0() -> None:
    assert judge_reach("why", [1], size=2, needed=1, again=True).left_out == (1,)
    assert judge_reach("why", [1], size=2, needed=2, again=True).left_out == ()


def test_a_verdict_is_packed_and_unpacked() -> None:
    verdict = judge_reach("n3 did not come", [3], size=4, needed=2, again=False)
    assert ReachVerdict.unpack(verdict.pack()) == verdict


async def test_a_peer_of_another_round_is_not_told_that_all_have_come() -> None:
    """It was, once the members of this round had come."""
    round = Round(number=1, term=1, size=2, buckets=1, host="127.0.0.1", port=free_port(), revision=7)
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(accept_other_ranks(round))
        other = tasks.create_task(find_rank0_problem(round.replace(revision=8), 1))
        assert await find_rank0_problem(round, 1) == ""
    assert listening.result() == []
    assert other.result() != ""


MEMBER = """
import logging, sys, rdzv
logging.basicConfig(level="INFO")
with rdzv.sync.connect(sys.argv[1], node_id=sys.argv[2]) as handler:
    while True:
        info = handler.next_rendezvous()
        print("a round of", info.world_size, flush=True)
        with handler.changes() as changes:
            for change in changes:
                if not isinstance(change, rdzv.NodesWaiting) or change.count:
                    break
"""
PARAMETERS = "min_nodes=2&max_nodes=4&bootstrap_check=1&ttl=15&last_call_timeout=2&rank_order=name&is_host=0"
PAUSED = 6.0  # seconds: longer than the check, and shorter than `ttl`


@pytest.mark.in_ci
async def test_a_member_that_is_paused_during_the_check_is_not_left_out_afterwards() -> None:
    """Regression: it was taken for a node that does not reach rank 0, and waited until the others had finished."""
    async with store.serve() as server, contextlib.AsyncExitStack() as stack:
        url = f"{server.url}/job?{PARAMETERS}"
        members = [await stack.enter_async_context(start_python("-c", MEMBER, url, "a"))]
        await members[0].says("node a coordinates")
        members += [await stack.enter_async_context(start_python("-c", MEMBER, url, name)) for name in "bc"]
        await asyncio.gather(*(member.says("last call, ") for member in members))
        members[2].stop()
        await members[0].says("round 0 is complete with 3 nodes", timeout=10)
        await asyncio.sleep(PAUSED)
        members[2].resume()
        for member in members:
            await member.line("a round of 3", timeout=30)
        await members[2].says("(rank 2): this process was paused, or too busy, while rank 0 listened")
