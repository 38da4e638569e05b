"""The lab is what it says: hosts that reach each other, or do not, as told, and know the names of their style."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import pytest

from tests.hosts.lab import Host, Lab, Style, require_hosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.processes import Child

require_hosts()

ECHO = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 7000), family=family) as server:
    print("listening")
    while True:
        connection, _ = server.accept()
        print("accepted")
"""

TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=60) as connection:
    print("connected from", connection.getsockname()[0])
    connection.settimeout(float(sys.argv[2]))
    try:
        print("heard", connection.recv(1))
    except TimeoutError:
        print("heard nothing")
"""

NAMES = """
import socket, sys
print(socket.gethostname())
for name in sys.argv[1:]:
    try:
        print(name, *dict.fromkeys(found[4][0] for found in socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)))
    except OSError as error:
        print(name, "unknown")
"""


@contextlib.asynccontextmanager
async def listening(host: Host) -> AsyncIterator[Child]:
    async with host.python("-c", ECHO, host.address) as child:
        await child.line("listening")
        yield child


@pytest.mark.parametrize(
    ("style", "known"),
    [
        ("cloud", ["node0 unknown", "node1 unknown"]),
        ("named", ["node0 10.77.0.11", "node1 10.77.0.12"]),
        ("debian", ["node0 127.0.1.1", "node1 10.77.0.12"]),
        ("ipv6", ["node0 fd77::b", "node1 fd77::c"]),
    ],
)
async def test_hosts_know_the_names_of_their_style_and_reach_each_other(style: str, known: list[str]) -> None:
    async with Lab(2, style=cast("Style", style)) as lab, listening(lab.hosts[1]):
        async with lab.hosts[0].python("-c", NAMES, "node0", "node1") as asked:
            assert await asked.wait() == 0
            assert asked.stdout == ["node0", *known]
        async with lab.hosts[0].python("-c", TALK, lab.hosts[1].address, "0.1") as talking:
            assert await talking.line("connected") == f"connected from {lab.hosts[0].address}"


async def test_a_second_interface_is_what_the_own_name_stands_for() -> None:
    async with Lab(2, management=True) as lab, lab.hosts[0].python("-c", NAMES, "node0", "node1") as asked:
        assert await asked.wait() == 0
        assert asked.stdout == ["node0", "node0 10.78.0.11 10.77.0.11", "node1 10.77.0.12"]


async def test_what_is_cut_vanishes_without_a_word_and_passes_again_once_mended() -> None:
    async with Lab(3) as lab, listening(lab.hosts[1]) as server:
        one, other, third = lab.hosts
        async with one.python("-c", TALK, other.address, "30") as talking:
            await talking.line("connected")
            await lab.cut(one)
            assert not await reaches(one, other) and not await reaches(one, third, refused=True)
            server.kill()  # its kernel says so to a host that hears nothing
            await server.wait()
            assert len(await one.flows()) == 1, "no FIN and no RST has come through"
            await lab.mend()
            assert await reaches(one, other, refused=True)


async def test_a_cut_may_be_of_one_way_or_of_one_pair() -> None:
    async with Lab(3) as lab, listening(lab.hosts[1]):
        one, other, third = lab.hosts
        await lab.cut_between(one, other)
        assert not await reaches(one, other)
        assert await reaches(third, other)
        await lab.mend()
        await lab.cut_from(third)
        assert not await reaches(third, other)
        assert await reaches(one, other)


async def test_flows_are_forgotten_and_new_ones_pass() -> None:
    async with Lab(2) as lab, listening(lab.hosts[1]) as server:
        one, other = lab.hosts
        async with one.python("-c", TALK, other.address, "30") as talking:
            await talking.line("connected")
            await lab.forget_flows(one)
            server.kill()
            await server.wait()
            assert len(await one.flows()) == 1, "the end of the old connection has not come through"
            async with listening(other):
                assert await reaches(one, other)


async def reaches(one: Host, other: Host, *, refused: bool = False) -> bool:
    """Whether a connection comes about within a second; or a refusal, which shows as well that packets pass."""
    code = f"import socket; socket.create_connection(({other.address!r}, 7000), timeout=1)"
    async with one.python("-c", code) as child:
        status = await child.wait(timeout=30)
        return status == 0 or (refused and any("ConnectionRefused" in line for line in child.output))
