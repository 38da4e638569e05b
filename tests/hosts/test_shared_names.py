"""The URL's host name stands for several machines, or for a forwarded address: at most one node starts a store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.hosts.lab import Host, Lab, require_hosts
from tests.hosts.runs import PORT, START_WITHIN, members, serving
from tests.support.processes import Child

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()

SERVICE = "10.98.0.10"


async def name(hosts: list[Host], *addresses: str) -> None:
    """Add these addresses of the name `pods` to the files of each of the hosts."""
    lines = "\\n".join(f"{address} pods" for address in addresses)
    for host in hosts:
        await host.do("sh", "-c", f'printf "{lines}\\n" >> /etc/hosts')


async def forward(address: str, to: str, *hosts: Host) -> None:
    """Forward connections from these hosts to another address, as a Service or NAT does."""
    for host in hosts:
        await host.do("ip", "route", "add", address, "dev", "net0")
        rule = f"add rule ip nat out ip daddr {address} dnat to {to}"
        chain = "add chain ip nat out { type nat hook output priority -100 ; }"
        await host.do("nft", f"add table ip nat; {chain}; {rule}")


@contextlib.asynccontextmanager
async def node(host: Host, query: str, *, at: str = "pods") -> AsyncIterator[Child]:
    url = f"tcp://{at}:{PORT}/job?insecure=1&join_timeout=30&node_id={host.name}&{query}"
    worker = "import os; print('MET', os.environ['WORLD_SIZE'], flush=True)"
    async with host.python("-m", "rdzv", "run", url, "--", "python3", "-c", worker) as child:
        yield child


async def ends(child: Child) -> int:
    return await asyncio.wait_for(child.wait(), START_WITHIN)


@pytest.mark.parametrize("sizes", ["min_nodes=1&max_nodes=2&last_call_timeout=1", "min_nodes=2"])
async def test_a_name_of_several_machines_starts_no_store_on_any(sizes: str) -> None:
    """Regression: each node found its own address among those of a headless Service, and silently trained alone."""
    async with Lab(2, style="cloud") as lab:
        await name(lab.hosts, *(host.address for host in lab.hosts))
        async with node(lab.hosts[0], sizes) as one, node(lab.hosts[1], sizes) as other:
            for child, foreign in ((one, lab.hosts[1]), (other, lab.hosts[0])):
                assert await ends(child) != 0
                told = "\n".join(child.output)
                assert "MET" not in told
                assert foreign.address in told
                assert "is_host=1 on one node" in told


async def test_one_node_may_set_is_host_and_the_others_use_its_store() -> None:
    async with Lab(2, style="cloud") as lab:
        await name(lab.hosts, *(host.address for host in lab.hosts))
        async with node(lab.hosts[0], "min_nodes=2&is_host=1") as one:
            await one.says("1 of at least 2", timeout=START_WITHIN)
            async with node(lab.hosts[1], "min_nodes=2") as other:
                assert [await ends(child) for child in (one, other)] == [0, 0]


async def test_a_store_that_serves_at_any_address_of_the_name_is_used() -> None:
    async with Lab(3, style="cloud") as lab:
        server, *others = lab.hosts
        await name(lab.hosts, *(host.address for host in lab.hosts))
        async with serving(server), node(others[0], "min_nodes=2") as one, node(others[1], "min_nodes=2") as other:
            assert [await ends(child) for child in (one, other)] == [0, 0]


@pytest.mark.parametrize(
    "case", ["a loopback address that this machine lacks", "an address that NAT leads back", "a lone node"]
)
async def test_a_name_that_only_one_machine_can_serve_starts_the_store_there(case: str) -> None:
    """An address that cannot be bound here is not always another machine's."""
    async with Lab(2, style="cloud") as lab:
        host, other = lab.hosts
        if case.startswith("a loopback"):
            await host.do("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
            await name([host], "127.0.0.1", "::1")
        elif "NAT" in case:
            await name([host], host.address, SERVICE)
            await forward(SERVICE, host.address, host)
        else:
            await name([host], host.address, other.address)
        largest = 1 if "lone" in case else 2
        async with node(host, f"min_nodes=1&max_nodes={largest}&last_call_timeout=0.1") as child:
            assert await ends(child) == 0
            assert ("also names" in "\n".join(child.output)) == ("lone" in case)


async def test_behind_a_service_every_node_may_set_is_host() -> None:
    """The address of a Service, of NAT, or a floating address can be dialed, but not bound."""
    async with Lab(2, style="cloud") as lab:
        head, other = lab.hosts
        await forward(SERVICE, head.address, head, other)
        query = "min_nodes=2&is_host=1"
        async with node(head, query, at=SERVICE) as one, node(other, query, at=SERVICE) as two:
            assert [await ends(child) for child in (one, two)] == [0, 0]


async def test_a_service_that_leads_to_another_host_is_an_error_with_its_name() -> None:
    async with Lab(2, style="cloud") as lab:
        host, nobody = lab.hosts
        await forward(SERVICE, nobody.address, host)
        async with node(host, "min_nodes=1&is_host=1", at=SERVICE) as child:
            assert await ends(child) != 0
            assert "did not lead here within 10 s" in "\n".join(child.output)


async def test_without_a_token_the_error_of_a_node_behind_a_service_asks_for_one() -> None:
    async with Lab(1, style="cloud") as lab:
        (host,) = lab.hosts
        async with host.python(
            "-m", "rdzv", "run", f"tcp://{SERVICE}:{PORT}/j?min_nodes=1&is_host=1", "--", "true"
        ) as child:
            assert await ends(child) != 0
            assert "a token or mutual TLS, or say insecure=1" in "\n".join(child.output)


async def test_two_nodes_with_is_host_meet_in_any_order_of_start() -> None:
    async with Lab(2, style="cloud") as lab:
        await name(lab.hosts, *(host.address for host in lab.hosts))
        url = f"tcp://pods:{PORT}/job?insecure=1&is_host=1&min_nodes=2"
        async with members(url, *lab.hosts) as both:
            assert [(await member.round())["size"] for member in both] == [2, 2]
