"""Hosts that are lost for longer than the TTL: told, fenced, and back by themselves (promises R5, R9), with a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import PORT, START_WITHIN, Member, members

if TYPE_CHECKING:
    from pathlib import Path

require_hosts()


async def of_size(member: Member, size: int) -> None:
    """Wait for a round of so many; whoever comes back may first meet those that were quicker."""
    while (await member.round())["size"] != size:
        pass


async def test_hosts_that_vanish_or_are_heard_one_way_only_are_lost_fenced_and_come_back(tmp_path: Path) -> None:
    """Neither a FIN nor a RST tells of them, and one of them still hears all that the store says."""
    token = tmp_path / "token"
    token.write_text("a secret of twenty-five bytes")
    async with Lab(5, style="debian") as lab:
        head, *hosts = lab.hosts
        await lab.set_mtu(hosts[0], 576)
        url = f"tcp://{head.address}:{PORT}/job-7?token_file={token}&min_nodes=2&max_nodes=4&ttl=3"
        async with head.python("-m", "rdzv", "serve", "-v", "--token-file", str(token)) as server:
            await server.says("listens on", timeout=START_WITHIN)
            async with members(url, *hosts) as everyone:
                for member in everyone:
                    await of_size(member, 4)
                await lab.cut(hosts[2])
                await lab.cut_from(hosts[3])
                for member in everyone[:2]:
                    await of_size(member, 2)
                for member in everyone[2:]:
                    # Its changes may not tell of it: whoever is heard one way only hears of the other's loss first,
                    # and is then on its way into another round.
                    await member.child.says(f"node {member.host.name} was dropped", timeout=60.0)
                await server.says(f"has lapsed, and with it /rdzv/job-7/nodes/{hosts[2].name}")
                await lab.mend()
                for member in everyone:
                    await of_size(member, 4)
