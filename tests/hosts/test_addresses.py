"""Nodes meet at addresses that the others can reach, also if the store sees other addresses."""

import contextlib
import tempfile
from collections.abc import Sequence

import pytest

from tests.hosts.lab import Host, Lab, require_hosts
from tests.hosts.runs import members, serving, slurm_url
from tests.support.etcd import require_etcd
from tests.support.processes import start

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()


FORWARD = """
import asyncio, sys
async def carry(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def answer(reader, writer):
    there = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))
async def main():
    async with await asyncio.start_server(answer, "0.0.0.0", 29400) as server:
        print("listening", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


async def test_members_behind_a_forwarder_meet_at_their_own_addresses() -> None:
    """Regression: all of them published the address of the forwarder, since the store saw that."""
    async with Lab(4, style="cloud") as lab:
        head, between, *others = lab.hosts
        async with serving(head), between.python("-c", FORWARD, head.address, "29400") as forwarder:
            await forwarder.line("listening")
            async with members(slurm_url(between.address, "min_nodes=2&rank_order=name"), *others) as both:
                assert [(await member.round())["master"][0] for member in both] == [others[0].address] * 2


async def test_after_an_outage_no_job_is_sent_to_a_name_that_does_not_resolve() -> None:
    """Regression: a node that arrived before its connection was back published its host's own name."""
    async with Lab(4, style="cloud") as lab:
        head, *others = lab.hosts
        async with serving(head), members(slurm_url(head.address, "min_nodes=3&ttl=1"), *others) as everyone:
            for member in everyone:
                await member.round()
            await lab.cut(head)
            for member in everyone:
                await member.hears("Dropped")
            await lab.mend()
            masters = {(await member.round())["master"][0] for member in everyone}
            assert masters <= {host.address for host in others}


async def test_rdzv_serve_is_reachable_on_hosts_with_ipv6_only() -> None:
    """Regression: with the README's `--host 0.0.0.0` it listened on IPv4 only."""
    async with Lab(3, style="ipv6") as lab:
        head, *others = lab.hosts
        async with serving(head), members(slurm_url(head.address, "min_nodes=2"), *others) as both:
            masters = {tuple((await member.round())["master"]) for member in both}
            assert len(masters) == 1
            assert masters.pop()[0] in {host.ipv6 for host in others}


async def test_members_behind_a_forwarder_on_the_stores_host_meet_at_their_own_addresses() -> None:
    """Regression: the store saw all members at its own loopback, so all were sent to 127.0.0.1."""
    async with Lab(3, style="cloud") as lab:
        head = lab.hosts[0]
        async with serving(head, "--host", "127.0.0.1", "--port", "29401"):
            forward = head.python("-c", FORWARD, "127.0.0.1", "29401")
            async with forward as forwarder, members(slurm_url(head.address, "min_nodes=3"), *lab.hosts) as everyone:
                await forwarder.line("listening")
                masters = {(await member.round())["master"][0] for member in everyone}
                assert len(masters) == 1
                assert masters <= {host.address for host in lab.hosts}


async def test_on_etcd_a_member_on_a_servers_host_is_published_at_its_own_address() -> None:
    """Regression: it was published at the address of another server of etcd, on another host."""
    async with Lab(3, style="cloud") as lab, contextlib.AsyncExitStack() as stack:
        url = await etcd_on(stack, lab.hosts)
        for number in range(3):
            run = f"{url}/job-{number}?min_nodes=3&rank_order=name"
            async with members(run, *lab.hosts) as everyone:
                for member in everyone:
                    told = await member.round()
                    assert told["master"][0] == lab.hosts[0].address
                    assert told["addresses"] == [host.address for host in lab.hosts]


async def test_on_etcd_a_node_known_only_by_loopback_is_refused_as_rank_0() -> None:
    """Each host has a server of its own, and no node knows an address of its own."""
    async with Lab(2, style="cloud") as lab, contextlib.AsyncExitStack() as stack:
        await etcd_on(stack, lab.hosts)
        run = "etcd://127.0.0.1:2379/job-7?min_nodes=2&join_timeout=6"  # etcd may have to elect a leader first
        async with members(run, *lab.hosts) as both:
            ends = [(await member.hears("end"))["words"] for member in both]
            assert all("no round within join_timeout" in words for words in ends)
            # A node that gives up a moment after the other only sees that the other is gone.
            assert any("where no other host reaches it" in words for words in ends)


async def etcd_on(stack: contextlib.AsyncExitStack, hosts: Sequence[Host]) -> str:
    """Run one etcd with a server on each of the hosts, and return its URL."""
    cluster = ",".join(f"{host.name}=http://{host.address}:2380" for host in hosts)
    for host in hosts:
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-etcd-"))
        clients, peers = f"http://{host.address}:2379", f"http://{host.address}:2380"
        command = (
            *(require_etcd(), "--name", host.name, "--data-dir", data, "--initial-cluster", cluster),
            *("--listen-client-urls", f"{clients},http://127.0.0.1:2379", "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--log-level", "error"),
        )
        await stack.enter_async_context(start(*host.enter, *command))
    return f"etcd://{','.join(f'{host.address}:2379' for host in hosts)}"
