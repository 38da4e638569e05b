"""`bootstrap_check`: a round is returned to callers only if all members reach rank 0 at its address."""

import asyncio

import pytest

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import members, serving, slurm_url

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()


async def test_a_round_whose_rank_0_is_not_reached_is_given_up_and_another_node_is_rank_0() -> None:
    """Regression: every round had the same rank 0, which one member could not reach, and the status said it stood."""
    async with Lab(4, style="cloud") as lab:
        head, first, second, third = lab.hosts
        url = slurm_url(head.address, "min_nodes=3&rank_order=name&bootstrap_check=1&master_port=29500-29599")
        async with serving(head):
            await lab.cut_between(first, third)
            async with members(url, first, second, third) as everyone:
                rounds = [await member.round() for member in everyone]
                assert [tuple(line["master"]) for line in rounds] == [(second.address, 29500)] * 3
                assert [line["rank"] for line in rounds] == [1, 0, 2]
                await everyone[0].child.says(f"{third.name} ({third.address}), rank 2, did not come")
                await everyone[2].child.says(f"(rank 2): rank 0 at {first.address}:29500: ")
                await everyone[1].child.says("it was reached, and has not seen all the others come")


async def test_a_newcomer_that_does_not_reach_rank_0_ends_no_other_nodes_job() -> None:
    """Regression: round after round was given up with it, until all four nodes had failed."""
    async with Lab(5, style="cloud") as lab:
        head, first, second, third, newcomer = lab.hosts
        url = slurm_url(head.address, "min_nodes=2&max_nodes=4&last_call_timeout=3&bootstrap_check=1&join_timeout=15")
        async with serving(head), members(url, first, second, third) as three:
            before = [await member.round() for member in three]
            assert [line["size"] for line in before] == [3, 3, 3]
            rank_0 = next(host for host, line in zip((first, second, third), before, strict=True) if not line["rank"])
            for host in (first, second, third):
                await lab.cut_between(host, newcomer)
            async with members(url, newcomer) as (fourth,):
                after = [await member.round(timeout=30) for member in three]
                assert [line["size"] for line in after] == [3, 3, 3]
                assert {line["number"] for line in after} == {2}, "one round was given up, with all four"
                left_out = f"{newcomer.name} ({newcomer.address}), rank 3, did not come to {rank_0.address}:"
                for member in (*three, fourth):
                    await member.child.says(left_out)
                # It waits as long as the others work, and they are not interrupted again.
                await asyncio.sleep(16)
                assert fourth.said == []
                assert [len(member.events("round")) for member in three] == [2, 2, 2]
                # Its network is mended: it looks after 10 and 30 s, and comes in.
                await lab.mend()
                for member in (*three, fourth):
                    assert (await member.round(timeout=40))["size"] == 4
