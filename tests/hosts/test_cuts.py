"""Promise R8 on real hosts: "a network cut of up to half the TTL costs delay and nothing else".

`python -m tests.hosts.cuts` cuts hundreds of times, with the default TTL; here it is a few times, with a shorter one.
"""

import asyncio

import pytest

from tests.hosts.cuts import NOT_TO_BE_HEARD, cut_often
from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import members, serving, slurm_url

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()

BACK_WITHIN = 10.0  # seconds; half a second on an idle machine, and never if only the old connections are used


@pytest.mark.parametrize("forget", [False, True], ids=["cut", "forgotten flows"])
async def test_r8_cuts_of_up_to_half_the_ttl_drop_no_member_and_all_are_back_at_once(forget: bool) -> None:
    """Regression: a keep-alive was written once, to one connection. Only the kernel repeated it, seconds after the cut,
    and in vain if a firewall had forgotten the connection.
    """
    report = await cut_often(2, seed=4, forget=forget, hosts=4, ttl=5.0)
    assert not report.troubles, str(report)
    assert max(report.back) < BACK_WITHIN, str(report)


async def test_r8_a_node_whose_address_changes_keeps_its_place() -> None:
    """Regression: its packets left with the old address, so it was dropped, though a new connection would work."""
    async with Lab(3, style="cloud") as lab:
        head, *others = lab.hosts
        url = slurm_url(head.address, "min_nodes=2&ttl=4")
        async with serving(head), members(url, *others, probe=True) as both:
            for member in both:
                await member.round()
            await lab.renumber(others[1], "10.77.0.99")
            await both[1].hears("back")
            await asyncio.sleep(5.0)  # longer than the TTL
            for member in both:
                assert not member.events(*NOT_TO_BE_HEARD)
