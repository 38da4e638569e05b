"""Several hosts in the URL, each a machine of its own (promise S13): the one that serves the store dies or vanishes."""

import sys
import time

import pytest

from tests.hosts.lab import Host, Lab, Style, require_hosts
from tests.hosts.runs import PORT, Member, members

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()

TTL = 3


def slurm_url(hosts: list[Host], style: Style, more: str = "") -> str:
    listed = ",".join(
        f"[{host.ipv6}]" if style == "ipv6" else host.name if style != "cloud" else host.ipv4 for host in hosts
    )
    return f"tcp://{listed}:{PORT}/job-7?insecure=1&min_nodes=2&max_nodes={len(hosts)}&ttl={TTL}{more}"


async def of_size(member: Member, size: int, *, above: int = -1) -> int:
    """Wait for a round of this size; return its number."""
    while True:
        round = await member.round(timeout=90)
        if round["size"] == size and round["number"] > above:
            return int(round["number"])


def serving(everyone: list[Member]) -> list[Member]:
    return [member for member in everyone if member.events("round")[-1]["serves"]]


@pytest.mark.parametrize("style", ["cloud", "named", "debian", "ipv6", "dual"])
async def test_s13_the_death_of_the_host_is_survived_whatever_the_names(style: Style) -> None:
    async with Lab(3, style=style) as lab, members(slurm_url(lab.hosts, style), *lab.hosts) as everyone:
        number = max([await of_size(member, 3) for member in everyone])
        (host,) = serving(everyone)
        host.child.kill()
        for member in everyone:
            if member is not host:
                assert await of_size(member, 2, above=number) == number + 1
        async with members(slurm_url(lab.hosts, style), host.host) as (again,):
            for member in [again, *(one for one in everyone if one is not host)]:
                await of_size(member, 3, above=number + 1)


async def test_s13_a_node_that_does_not_reach_all_addresses_of_a_host_finds_the_one_that_serves() -> None:
    async with Lab(3, style="dual") as lab:
        *listed, other = lab.hosts
        await lab.lose_ipv6_from(other)
        url = slurm_url(listed, "dual").replace("max_nodes=2", "max_nodes=3")
        async with members(url, *lab.hosts) as everyone:
            number = max([await of_size(member, 3) for member in everyone])
            (host,) = serving(everyone)
            host.child.kill()
            for member in everyone:
                if member is not host:
                    assert await of_size(member, 2, above=number) == number + 1


async def test_s13_a_vanished_host_is_waited_for_and_given_up_by_an_operators_word() -> None:
    async with Lab(3) as lab:
        url = slurm_url(lab.hosts, "named")
        async with members(url, *lab.hosts) as everyone:
            number = max([await of_size(member, 3) for member in everyone])
            (host,) = serving(everyone)
            survivors = [member for member in everyone if member is not host]
            await lab.cut(host.host)
            for member in survivors:
                await member.child.says("does not answer", timeout=60)
            await survivors[0].host.do(*_rdzv("lost", url, host.host.name))
            told = time.monotonic()
            for member in survivors:
                assert await of_size(member, 2, above=number) == number + 1
            assert time.monotonic() - told < 10, "on a busy machine"


async def test_s13_the_error_of_a_member_that_waits_in_vain_names_the_silent_host() -> None:
    async with Lab(2) as lab, members(slurm_url(lab.hosts, "named", "&join_timeout=15"), *lab.hosts) as everyone:
        for member in everyone:
            await of_size(member, 2)
        (host,) = serving(everyone)
        (waiting,) = [member for member in everyone if member is not host]
        await lab.cut(host.host)
        error = await waiting.child.says("no round within join_timeout", timeout=60)
        assert f"out of reach: {host.host.name}:{PORT} does not answer" in error


async def test_s13_a_host_that_was_cut_off_and_is_back_goes_on_serving_without_a_second_store() -> None:
    async with Lab(3) as lab, members(slurm_url(lab.hosts, "named"), *lab.hosts) as everyone:
        number = max([await of_size(member, 3) for member in everyone])
        (host,) = serving(everyone)
        await lab.cut(host.host)
        for member in everyone:
            if member is not host:
                await member.child.says("does not answer", timeout=60)
        await lab.mend()
        for member in everyone:
            await of_size(member, 3, above=number)
        assert serving(everyone) == [host]


def _rdzv(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "rdzv", *words)
