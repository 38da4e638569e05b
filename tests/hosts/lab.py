"""Several hosts on one machine: each a network, host-name and mount namespace of its own, on one bridge.

    async with Lab(3) as lab:
        head, *others = lab.hosts
        async with head.python("-m", "rdzv", "serve", "--insecure") as server:
            lab.cut(others[0])          # its packets are dropped, both ways: no FIN, no RST, no "unreachable"
            lab.mend(others[0])

A host has a name of its own, an `/etc/hosts` of its own, and no name server. The lab's `style` decides names and
addresses:

    cloud       hosts have addresses only: no name resolves, not even a host's own
    named       every host resolves every name, as in a well-kept cluster
    debian      as `named`, but a host's own name resolves to 127.0.1.1, as Debian's installer writes it
    ipv6        as `named`, with IPv6 addresses only
    dual        as `named`, with both families; a host's own name resolves to its IPv6 address first

Where names resolve, the first host is also called `head`.

With `management=True` every host has a second interface on a second bridge. Its own name resolves to that address
first.

The namespaces end with the processes that hold them, so a test leaves nothing behind, however it ends. It needs root,
or a kernel that lets users make user namespaces.
"""

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import pytest

from tests.support.processes import ROOT, Child, start

__all__ = ["Host", "Lab", "Style", "require_hosts"]

Style = Literal["cloud", "named", "debian", "ipv6", "dual"]

TOOLS = ("ip", "nft", "ss", "unshare", "nsenter", "mount")
AS_ROOT_OF_ITS_OWN = ("--user", "--map-root-user")


def require_hosts() -> None:
    """Skip this module if no hosts can be made. Fail instead if `RDZV_TEST_REQUIRE_ALL=1` forbids skipping."""
    problem = _why_not()
    if problem is None:
        return
    if os.environ.get("RDZV_TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"no hosts can be made: {problem}; RDZV_TEST_REQUIRE_ALL=1 forbids skipping", pytrace=False)
    pytest.skip(f"skipped, no hosts can be made: {problem}", allow_module_level=True)


@functools.cache
def _why_not() -> str | None:
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if missing := [tool for tool in TOOLS if _tool(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    rights = () if os.geteuid() == 0 else AS_ROOT_OF_ITS_OWN
    tried = subprocess.run(
        [
            _found("unshare"),
            *rights,
            "--net",
            "--uts",
            "--mount",
            _found("ip"),
            "link",
            "add",
            "bridge0",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    return tried.stderr.strip() or f"unshare exits with {tried.returncode}" if tried.returncode else None


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _found(name: str) -> str:
    path = _tool(name)
    assert path is not None, f"{name} is not installed"
    return path


class Host:
    """One host of a lab.

    Attributes:
        name: Its host name.
        address: The address at which the others reach it; IPv6 in an `ipv6` lab.
        port: The name of its port on the switch.
    """

    def __init__(self, number: int, style: Style) -> None:
        self.name = f"node{number}"
        self.port = f"port{number}"
        self.ipv4 = f"10.77.0.{11 + number}"
        self.ipv6 = f"fd77::{11 + number:x}"
        self.address = self.ipv6 if style == "ipv6" else self.ipv4
        self.management = f"10.78.0.{11 + number}"
        self.enter: tuple[str, ...] = ()  # a command prefix that enters its namespaces

    def python(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractAsyncContextManager[Child]:
        """Run this Python on the host, with this repository's packages to import."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return start(
            *self.enter, sys.executable, *arguments, env={"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})}
        )

    async def do(self, *command: str) -> str:
        """Run a command on the host to its end, and return its output."""
        return await _run(*self.enter, *command)

    async def flows(self) -> list[tuple[str, str, str, str]]:
        """Return the open TCP connections not on loopback: local address and port, remote address and port."""
        found = []
        for line in (await self.do(_found("ss"), "-Htn", "state", "established")).splitlines():
            local, remote = line.split()[2:4]
            ends = (*_address_and_port(local), *_address_and_port(remote))
            if not ends[0].startswith(("127.", "::1")):
                found.append(ends)
        return found


class Lab:
    """Hosts on a bridge, as long as the block lasts.

    Attributes:
        hosts: The hosts.
        style: The way that names and addresses are assigned.
        management: True if the hosts have a second interface.
    """

    def __init__(self, hosts: int, *, style: Style = "named", management: bool = False) -> None:
        self.style: Style = style
        self.management = management
        self.hosts = [Host(number, style) for number in range(hosts)]
        self._stack = contextlib.AsyncExitStack()
        self._switch: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-hosts-")))
            rights = () if os.geteuid() == 0 else AS_ROOT_OF_ITS_OWN
            pid = await self._hold(stack, *rights, "--net", "--mount")
            self._switch = self._into(pid)
            bridges = ("bridge", "bridge2") if self.management else ("bridge",)
            await self._on_switch(*(f"link add {name} type bridge; link set {name} up" for name in bridges))
            await _run(
                *(*self._switch, _found("nft"), "add table bridge lab"),
                *("; add chain bridge lab forward { type filter hook forward priority 0; }",),
                *("; add chain bridge lab forgotten { type filter hook forward priority 1; }",),
            )
            await asyncio.gather(*(self._add(stack, host, folder) for host in self.hosts))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def cut(self, *hosts: Host) -> None:
        """Drop the hosts' packets, both ways. Connections stay open, and no error is reported."""
        rules = [f"{way} {host.port} drop" for host in hosts for way in ("iifname", "oifname")]
        await self._nft("; ".join(f"add rule bridge lab forward {rule}" for rule in rules))

    async def cut_from(self, host: Host) -> None:
        """Drop the packets that a host sends. Packets to it arrive."""
        await self._nft(f"add rule bridge lab forward iifname {host.port} drop")

    async def lose_ipv6_from(self, host: Host) -> None:
        """Drop the TCP packets that a host sends over IPv6, as where only IPv4 is routed."""
        await self._nft(f"add rule bridge lab forward iifname {host.port} ip6 nexthdr tcp drop")

    async def cut_between(self, one: Host, other: Host) -> None:
        """Drop the packets between two hosts. All other hosts still reach both."""
        await self._nft(f"add rule bridge lab forward iifname {one.port} oifname {other.port} drop")
        await self._nft(f"add rule bridge lab forward iifname {other.port} oifname {one.port} drop")

    async def lose_large(self, size: int) -> None:
        """Drop packets of more bytes, and also the ICMP message that they are too large.

        New connections send each packet separately, as on a wire. Between namespaces the system otherwise joins several
        packets, which would be dropped, too.
        """
        for host in self.hosts:
            await host.do(_found("ip"), "link", "set", "net0", "gso_max_segs", "1")
        await self._nft(f"add rule bridge lab forward meta length > {size} drop")

    async def mend(self) -> None:
        """Let all packets pass again, also those of forgotten flows."""
        await self._nft("flush chain bridge lab forward; flush chain bridge lab forgotten")

    async def mend_cuts(self) -> float:
        """Let all packets pass again but those of forgotten flows. Return the time before that, by `time.monotonic`."""
        began = time.monotonic()
        await self._nft("flush chain bridge lab forward")
        return began

    async def forget_flows(self, *hosts: Host) -> None:
        """Drop the packets of the present connections, as behind a firewall that was restarted."""
        rules: list[str] = []
        for host in hosts:
            for local, port, remote, remote_port in await host.flows():
                family = "ip6" if ":" in local else "ip"
                ends = f"{family} saddr {{}} tcp sport {{}} {family} daddr {{}} tcp dport {{}} drop"
                rules += [ends.format(local, port, remote, remote_port), ends.format(remote, remote_port, local, port)]
        if rules:
            await self._nft("; ".join(f"add rule bridge lab forgotten {rule}" for rule in rules))

    async def renumber(self, host: Host, address: str) -> None:
        """Replace a host's IPv4 address, as DHCP may. Its connections are lost."""
        for change in (("del", host.ipv4), ("add", address)):
            await host.do(_found("ip"), "address", change[0], f"{change[1]}/24", "dev", "net0")
        host.address = host.ipv4 = address

    async def set_mtu(self, host: Host, mtu: int) -> None:
        """Limit the size of the packets that a host sends, in bytes."""
        await host.do(_found("ip"), "link", "set", "net0", "mtu", str(mtu))

    async def _add(self, stack: contextlib.AsyncExitStack, host: Host, folder: Path) -> None:
        pid = await self._hold(stack, "--net", "--uts", "--mount", inside=self._switch)
        host.enter = self._into(pid)
        names, resolver = folder / f"{host.name}-hosts", folder / f"{host.name}-resolv"
        names.write_text(self._names_on(host))
        resolver.write_text("")
        inside = [f"hostname {host.name} || echo {host.name} > /proc/sys/kernel/hostname"]
        inside += [f"mount --bind {names} /etc/hosts", f"mount --bind {resolver} /etc/resolv.conf"]
        await host.do("sh", "-ec", "; ".join(inside))
        await self._connect(host, pid, host.port, "bridge", "net0", self._addresses_of(host))
        if self.management:
            await self._connect(host, pid, f"{host.port}m", "bridge2", "net1", [f"{host.management}/24"])
        await host.do(_found("ip"), "link", "set", "lo", "up")

    async def _connect(self, host: Host, pid: int, port: str, bridge: str, name: str, addresses: list[str]) -> None:
        await self._on_switch(
            f"link add {port} type veth peer name {name} netns {pid}", f"link set {port} master {bridge} up"
        )
        family = {True: ["-6"], False: []}
        for address in addresses:
            extra = ["nodad"] if ":" in address else []
            await host.do(_found("ip"), *family[":" in address], "address", "add", address, "dev", name, *extra)
        await host.do(_found("ip"), "link", "set", name, "up")

    def _addresses_of(self, host: Host) -> list[str]:
        ipv4, ipv6 = f"{host.ipv4}/24", f"{host.ipv6}/64"
        return {"ipv6": [ipv6], "dual": [ipv4, ipv6]}.get(self.style, [ipv4])

    def _names_on(self, host: Host) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for other in self.hosts if self.style != "cloud" else ():
            own = other is host
            addresses = {"ipv6": [other.ipv6], "dual": [other.ipv6, other.ipv4]}.get(self.style, [other.ipv4])
            if own and self.style == "debian":
                addresses = ["127.0.1.1"]
            if own and self.management:
                addresses = [other.management, *addresses]
            names = f"{other.name} head" if other is self.hosts[0] else other.name
            lines += [f"{address} {names}" for address in addresses]
        return "\n".join([*lines, ""])

    async def _hold(self, stack: contextlib.AsyncExitStack, *namespaces: str, inside: tuple[str, ...] = ()) -> int:
        """Hold new namespaces open as long as the lab exists. Return the id of the process that holds them."""
        private = ("--propagation", "private")
        holder = await stack.enter_async_context(
            start(*inside, _found("unshare"), *namespaces, *private, "sh", "-c", "echo ready; exec sleep infinity")
        )
        await holder.line("ready")
        return holder.pid

    def _into(self, pid: int) -> tuple[str, ...]:
        whose = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        return (_found("nsenter"), "--target", str(pid), *whose, "--net", "--uts", "--mount", "--")

    async def _on_switch(self, *commands: str) -> None:
        for command in "; ".join(commands).split("; "):
            await _run(*self._switch, _found("ip"), *command.split())

    async def _nft(self, command: str) -> None:
        await _run(*self._switch, _found("nft"), command)


def _address_and_port(end: str) -> tuple[str, str]:
    address, _, port = end.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:"), port


async def _run(*command: str) -> str:
    """Run a command to its end, and return its output. A failure raises an error with the output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
    )
    written, _ = await process.communicate()
    assert process.returncode == 0, f"{' '.join(command)} exits with {process.returncode}: {written.decode()}"
    return written.decode()
