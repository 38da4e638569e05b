"""Nodes meet at addresses that the others can reach, whatever the store sees of them."""

from __future__ import annotations

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import members, serving, url_of

require_hosts()


FORWARD = """
import asyncio, sys
async def carry(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def answer(reader, writer):
    there = await asyncio.open_connection(sys.argv[1], 29400)
    await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))
async def main():
    async with await asyncio.start_server(answer, "0.0.0.0", 29400) as server:
        print("listening", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


async def test_behind_a_forwarder_members_meet_at_their_own_addresses() -> None:
    """All of them published the forwarder's, from which the store saw them come."""
    async with Lab(4, style="cloud") as lab:
        head, between, *others = lab.hosts
        async with serving(head), between.python("-c", FORWARD, head.address) as forwarder:
            await forwarder.line("listening")
            async with members(url_of(between.address, "min_nodes=2&rank_order=name"), *others) as both:
                assert [(await member.round())["master"][0] for member in both] == [others[0].address] * 2


async def test_after_an_outage_no_job_is_sent_to_a_name_that_nobody_can_resolve() -> None:
    """A node that arrived before its connection had come back said its host's own name."""
    async with Lab(4, style="cloud") as lab:
        head, *others = lab.hosts
        async with serving(head), members(url_of(head.address, "min_nodes=3&ttl=1"), *others) as everyone:
            for member in everyone:
                await member.round()
            await lab.cut(head)
            for member in everyone:
                await member.hears("Dropped")
            await lab.mend()
            masters = {(await member.round())["master"][0] for member in everyone}
            assert masters <= {host.address for host in others}


async def test_rdzv_serve_is_reached_over_ipv6_where_there_is_nothing_else() -> None:
    """The README's `--host 0.0.0.0` listened where nobody could come."""
    async with Lab(3, style="ipv6") as lab:
        head, *others = lab.hosts
        async with serving(head), members(url_of(head.address, "min_nodes=2"), *others) as both:
            masters = {tuple((await member.round())["master"]) for member in both}
            assert len(masters) == 1
            assert masters.pop()[0] in {host.ipv6 for host in others}
