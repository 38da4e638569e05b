"""`bootstrap_check`: a round is handed out only if all its members reach rank 0 where they are to meet."""

from __future__ import annotations

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import members, serving, url_of

require_hosts()


async def test_a_round_whose_rank_0_is_not_reached_is_given_up_and_another_node_is_rank_0() -> None:
    """Round after round named the same rank 0, whom one member could not reach, and status said "complete" for ever."""
    async with Lab(4, style="cloud") as lab:
        head, first, second, third = lab.hosts
        url = url_of(head.address, "min_nodes=3&rank_order=name&bootstrap_check=1&master_port=29500-29599")
        async with serving(head):
            await lab.cut_between(first, third)
            async with members(url, first, second, third) as everyone:
                rounds = [await member.round() for member in everyone]
                assert [tuple(line["master"]) for line in rounds] == [(second.address, 29500)] * 3
                assert [line["rank"] for line in rounds] == [1, 0, 2]
                await everyone[0].child.says(f"{third.name} ({third.address}), rank 2, did not come")
                await everyone[2].child.says(f"(rank 2): rank 0 at {first.address}:29500: ")
                await everyone[1].child.says("it was reached, and has not seen all the others come")
