"""A network that drops large packets, and the ICMP message about it (an "MTU black hole"). Small packets pass."""

import pytest

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import members, serving, slurm_url

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()

LARGEST = 1300  # bytes that pass; the hosts assume 1500


async def test_if_large_packets_are_lost_commands_and_members_use_small_ones() -> None:
    """Regression: a command waited for its timeout, and a member with a large message was dropped, since all later
    messages on its connection waited behind that.
    """
    async with Lab(4, style="cloud") as lab:
        head, *others, operator = lab.hosts
        url = slurm_url(head.address, f"min_nodes=2&payload={'x' * 3000}")
        async with serving(head), members(url, *others) as both:
            for member in both:
                await member.round()
            await lab.lose_large(LARGEST)
            plain = slurm_url(head.address, "")
            async with (
                operator.python("-m", "rdzv", "status", plain, "--timeout", "30") as patient,
                operator.python("-m", "rdzv", "status", plain, "--timeout", "0.5") as hasty,
                operator.python("-m", "rdzv", "resize", plain, "--max", "3") as resizing,
            ):
                assert [await command.wait() for command in (patient, hasty, resizing)] == [0, 4, 0]
                assert "round 0 stands with 2 nodes" in patient.written()
                assert "within 0.5 s" in hasty.written()
            for member in both:  # they join again, each with a large record
                assert (await member.round())["size"] == 2
                assert not member.events("Dropped", "NodesLost", "error", "end")
