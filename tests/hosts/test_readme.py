"""The README's own command lines, run on hosts with different kinds of names and addresses."""

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.hosts.lab import Host, Lab, Style, require_hosts
from tests.hosts.runs import PORT
from tests.support.processes import ROOT, Child

pytestmark = pytest.mark.some_here(2)

require_hosts()

WITHIN = 180.0  # seconds; on a busy machine an agent of torchrun takes 20 to start
PYTHON = (sys.executable, "-I", "-S")  # many interpreters start, and need only the standard library
SHORTLY = {"RDZV_LAST_CALL_TIMEOUT": "1"}  # two nodes are enough for these lines, and no more will come

TRAIN = """
import os, pathlib, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else the agent of torchrun listens
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    listener = socket.create_server(place, family=family)
while True:
    try:
        connection = socket.create_connection(place, timeout=60)
        break
    except ConnectionRefusedError:  # rank 0 has not come so far yet
        time.sleep(0.05)
print("reached", rank, "of", size, "at", place[0], flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def line_of(beginning: str) -> list[str]:
    """Return the words of the README's line with this beginning."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = re.search(rf"^{re.escape(beginning)}.*$", text, re.MULTILINE)
    assert found is not None, f"the README has no line {beginning!r}"
    return shlex.split(found[0])


class Typed:
    """A command line that runs on several hosts, and trains until a file appears."""

    def __init__(self, children: list[Child], end: Path) -> None:
        self.children = children
        self._end = end

    async def places(self, workers: int) -> set[str]:
        """Return the addresses of rank 0 that the workers got and have reached; each node has this many workers."""
        said = [await child.line("reached", timeout=WITHIN) for child in self.children for _ in range(workers)]
        assert len({line.partition("reached ")[2] for line in said}) == len(said), "each rank once"
        assert {line.split()[-3] for line in said} == {str(len(said))}, "the world's size"
        return {line.split()[-1] for line in said}

    async def ends_well(self) -> None:
        """End the training, and check that every node has succeeded."""
        self._end.touch()
        assert await asyncio.gather(*(child.wait(timeout=WITHIN) for child in self.children)) == [0] * len(
            self.children
        )


@contextlib.asynccontextmanager
async def typed(hosts: Sequence[Host], words: Sequence[str], tmp_path: Path) -> AsyncIterator[Typed]:
    train, end = tmp_path / "train.py", tmp_path / "end"
    train.write_text(TRAIN)
    words = [*words, str(train), str(end)]
    async with contextlib.AsyncExitStack() as stack:
        yield Typed([await stack.enter_async_context(host.python(*words, env=SHORTLY)) for host in hosts], end)


@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    ("style", "management"), [("cloud", False), ("debian", False), ("ipv6", False), ("dual", True)]
)
@pytest.mark.in_ci
async def test_rdzv_run_works_on_two_hosts(style: Style, management: bool, tmp_path: Path) -> None:
    """Regression: the store listened only on the first address in the machine's own files: loopback, IPv6, or that of a
    management network.
    """
    *words, python, script = line_of("rdzv run 'tcp://head:29400/")
    assert (python, script) == ("python", "train.py")
    async with Lab(2, style=style, management=management) as lab:
        head = lab.hosts[0]
        if style == "cloud":  # without names, users write an address
            words = [word.replace("//head:", f"//{head.address}:") for word in words]
        async with typed(lab.hosts, ["-m", *words, *PYTHON], tmp_path) as run:
            places = await run.places(8)
            assert len(places) == 1
            assert places <= {address for host in lab.hosts for address in (host.ipv4, host.ipv6)}
            for host in lab.hosts:
                await reach_store(lab, host)
            await run.ends_well()


async def test_torchrun_works_on_two_hosts(tmp_path: Path) -> None:
    """Debian's hosts resolve their own name to 127.0.1.1, which other hosts cannot reach."""
    pytest.importorskip("torch")
    torchrun, *words, script = line_of("torchrun --rdzv-backend=rdzv --rdzv-endpoint=head:29400")
    assert (torchrun, script) == ("torchrun", "train.py")
    async with Lab(2, style="debian") as lab:
        words = ["-m", "torch.distributed.run", *words, "--no-python", *PYTHON]
        async with typed(lab.hosts, words, tmp_path) as run:
            assert await run.places(1) == {lab.hosts[0].address}
            await run.ends_well()


async def reach_store(lab: Lab, host: Host) -> None:
    """Check that the store listens on each address at which a host may look for it."""
    head = lab.hosts[0]
    code = "import socket, sys; [socket.create_connection((a, sys.argv[1]), timeout=5).close() for a in sys.argv[2:]]"
    addresses = {"ipv6": [head.ipv6], "dual": [head.ipv4, head.ipv6]}.get(lab.style, [head.ipv4])
    if lab.management:
        addresses.append(head.management)
    async with host.python("-I", "-S", "-c", code, str(PORT), *addresses) as child:
        assert await child.wait(timeout=30) == 0, child.written()
