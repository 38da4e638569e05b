"""The port that a node promises, in case it becomes rank 0."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.node.link.ports import HeldPort
from store.net.dialing import error_text
from store.net.sockets import listen_on
from tests.support.processes import ROOT
from tests.support.runs import VirtualRun


def test_the_port_of_rank_0_is_taken_from_the_given_range(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        last = min(first + 20, 65535)
        one, other = HeldPort(f"{first}-{last}"), HeldPort(f"{first}-{last}")
        assert first < one.reserve() <= last
        assert one.reserve() == other.reserve(), "nodes of one machine: only one of them becomes rank 0"
        one.release()
        other.release()
        assert HeldPort(str(first)).reserve() == first
        assert f"master_port={first}-{first} is in use" in caplog.text


def test_rank_0_can_bind_its_port_after_a_fork() -> None:
    """Regression: a worker of a DataLoader, forked while its node joined, held the promised port while it lived."""
    held = HeldPort()
    port = held.reserve()
    reader, writer = os.pipe()
    alive, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(tell, b".")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(alive, 1)
        held.release()
        socket.create_server(("", port)).close()
    finally:
        for end in (writer, reader, alive, tell):
            os.close(end)
        os.waitpid(child, 0)


def test_a_promised_port_is_free_for_ipv4_and_ipv6() -> None:
    """Regression: a port of the range that was in use by IPv6 was promised, and rank 0 could not listen there."""
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6) as taken:
        first = taken.getsockname()[1]
        last = min(first + 20, 65535)
        held = HeldPort(f"{first}-{last}")
        assert first < held.reserve() <= last
        held.release()
    free = HeldPort()
    port = free.reserve()
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with pytest.raises(OSError, match="in use"), socket.socket(family) as other:
            other.bind((address, port))
    free.release()
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        pass


def test_without_a_free_automatic_port_the_error_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: port 0 was promised. Rank 0 then listened at some port, and the others connected to port 0."""
    said = "no automatic port of this machine is free; end connections, or widen net.ipv4.ip_local_port_range"

    class Full(socket.socket):
        def bind(self, address: Any, /) -> None:
            if address[1] == 0:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Full)
    with pytest.raises(RendezvousConnectionError, match=f"cannot promise a port for rank 0: {said}"):
        HeldPort().reserve()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port 0: {said}"):
        listen_on("127.0.0.1", 0)
    assert error_text(OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")) == said
    monkeypatch.undo()
    no_address = "Cannot assign requested address"
    assert error_text(OSError(errno.EADDRNOTAVAIL, no_address)) == no_address


@pytest.mark.virtual_time
async def test_a_node_waits_for_a_free_automatic_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: port 0 was promised; and a member that meets again in a short shortage must not end."""
    async with VirtualRun(min_nodes=1) as run:
        handler = run.handler("a")
        await handler.next_rendezvous()
        monkeypatch.setattr("rdzv.node.link.ports._bind_to_port", lambda _port: None)
        meets = run.start(handler.next_rendezvous())
        await asyncio.sleep(20)
        assert "cannot promise a port for rank 0" in handler.reason
        assert not meets.done()
        monkeypatch.undo()
        assert (await meets).bootstrap_address[1] > 0
    assert caplog.text.count("cannot promise a port for rank 0") == 1


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root"
)
@pytest.mark.parametrize(("how", "status"), [("", 124), ("&master_port=29500", 124)])
def test_a_launcher_names_the_limit_when_no_automatic_port_is_free(how: str, status: int) -> None:
    """Regression: it said "Cannot assign requested address", or that its own address is another machine's."""
    script = f"""
import os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40001")
held = []
for port in (40000, 40001):
    held.append(socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET))
    held[-1].bind(("", port))
url = "tcp://127.0.0.1:29400/job?min_nodes=1&join_timeout=4{how}"
sys.exit(subprocess.run([sys.executable, "-m", "rdzv", "run", url, "--", "true"]).returncode)
"""
    line = ["unshare", "--net", sys.executable, "-c", script]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if "No such file" in done.stderr:
        pytest.skip("this system has no `ip`")
    assert done.returncode == status, done.stderr
    assert "widen net.ipv4.ip_local_port_range" in done.stderr.splitlines()[-1]


LACKING = """
import os, resource, socket, subprocess, sys
from rdzv.backends.bind_address import NoProbeSocketError, find_accepting_targets
from rdzv.node.link.ports import HeldPort, NoFreePortError

targets = [(int(socket.AF_INET), ("127.0.0.1", 1))]
assert find_accepting_targets(targets) == [], "no process listens there"
if sys.argv[1] == "files":
    free = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, 4096))
    os.close(free)  # one is free for the selector
else:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("40000 40001")
    held = [socket.create_server(("", port)) for port in (40000, 40001)]
asks = lambda: find_accepting_targets(targets)
for call in (asks, lambda: HeldPort().reserve(), lambda: HeldPort("1000-1001").reserve()):
    try:
        print(call())
    except (NoProbeSocketError, NoFreePortError) as error:
        print(error)
    if call is asks and sys.argv[1] == "files":
        os.open(os.devnull, os.O_RDONLY)  # none is free from now on
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs namespaces")
@pytest.mark.parametrize(("lack", "limit"), [("files", "raise ulimit -n"), ("ports", "ip_local_port_range")])
def test_what_this_machine_lacks_is_not_said_of_another_machine_or_of_the_ports(lack: str, limit: str) -> None:
    """Regression: an address that could not be dialled counted as one that refuses, so as another machine's."""
    if lack == "ports" and os.geteuid() != 0:
        pytest.skip("namespaces need root")
    line = [*(["unshare", "--net"] if lack == "ports" else []), sys.executable, "-c", LACKING, lack]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    asks, automatic, chosen = done.stdout.splitlines()
    assert limit in asks
    assert limit in automatic
    assert limit in chosen or lack == "ports"
