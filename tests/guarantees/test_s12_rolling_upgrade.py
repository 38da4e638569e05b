"""Promise S12: "Two releases side by side": a server and four nodes are rolled through an upgrade, one at a time, and back.

The next release is this tree with patches: one more version of the wire, request, field, column and event (those of
`test_s12_two_releases`), one more setting, field of a node, column of ranks and roster, and another word for a phase. One
with another format on the disk is in `test_s12_data_of_two_releases`.
"""

# ruff: noqa: E501 - the patch quotes lines as they stand
from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import store
from tests.guarantees.test_s12_two_releases import LATER, ROOT, patched
from tests.support.processes import Child, start_python

LATER_RDZV = {
    "rdzv/_version.py": [('__version__ = "', '__version__ = "0.99.')],
    "rdzv/core/state.py": [
        ('LAST_CALL = "last call"', 'LAST_CALL = "final call"'),
        ("return pack(dict(sorted(shared.items())))", 'return pack(dict(sorted({**shared, "a_new_setting": 7}.items())))'),
        ("    arrival: int = 0", '    mood: str = "fine"\n    arrival: int = 0'),
        ("\n\n    def for_round_commit", '\n    mood: str = "fine"\n\n    def for_round_commit'),
    ],
    "rdzv/core/round.py": [
        ("    arrival: int\n", '    arrival: int\n    mood: str = "new"\n'),
        (" = MappingProxyType({})\n", ' = MappingProxyType({})\n    mood: str = "new"\n'),
        ("    revision: int = 0", '    mood: str = "new"\n    revision: int = 0'),
    ],
    "rdzv/core/history.py": [
        ("\n\n\nclass Chapter(", '\n    mood: str = "new"\n\n\nclass Chapter('),
        ("\n\n    @property\n    def addresses(", '\n    mood: str = "new"\n\n    @property\n    def addresses('),
    ],
}  # fmt: skip

NODE = """
import asyncio, contextlib, signal, sys, rdzv

async def until_changed(handler):
    async with handler.changes() as changes:
        async for change in changes:
            if not isinstance(change, (rdzv.NodesWaiting, rdzv.NodesLeft)):
                print("UNEXPECTED", change)
            if not isinstance(change, rdzv.NodesWaiting) or change.count:
                return

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stopping = asyncio.create_task(stop.wait())
    async with rdzv.connect(sys.argv[1], node_id=sys.argv[2], is_host=False) as handler:
        while not stop.is_set():
            joining = asyncio.create_task(handler.next_rendezvous())
            await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                joining.cancel()
                await asyncio.wait([joining])
                return
            info = joining.result()
            with contextlib.suppress(rdzv.RoundSupersededError):
                await info.store.set(f"rank/{info.rank}", info.node_id)
                await info.store.wait([f"rank/{rank}" for rank in range(info.world_size)])
                people = await info.participants()
                print(f"{rdzv.__version__}: round {info.round} size {info.world_size} people {len(people)}", flush=True)
            changed = asyncio.create_task(until_changed(handler))
            await asyncio.wait([changed, stopping], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            await asyncio.wait([changed])

asyncio.run(main())
"""


# An event of a new kind would also get into the journal, and there only with a new format.
SAME_FORMAT = {
    **LATER,
    "store/protocol/wire.py": [each for each in LATER["store/protocol/wire.py"] if "frozen" not in each[1]],
}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the next release, of both packages, whose data directories this one reads."""
    return patched(tmp_path_factory.mktemp("later"), SAME_FORMAT, LATER_RDZV)


class Fleet:
    """A server and its nodes, each of which may be replaced by one of another release."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._stack = contextlib.AsyncExitStack()
        self._server: Child | None = None
        self.port = 0
        self.nodes: dict[str, Child] = {}
        self.seen: list[Child] = []

    async def start(self, tree: Path, *arguments: str) -> Child:
        child = await self._stack.enter_async_context(start_python(*arguments, env={"PYTHONPATH": str(tree)}, cwd=tree))
        self.seen.append(child)
        return child

    async def serve(self, tree: Path) -> None:
        """Let a server of this release take over the store."""
        if self._server is not None:
            self._server.terminate()
            assert await self._server.wait() == 0
        words = ("-m", "rdzv", "serve", "--port", str(self.port), "--data-dir", str(self._data_dir))
        self._server = await self.start(tree, *words)
        line = await self._server.says("listens on")
        found = re.search(r":(\d+), kept", line)
        assert found is not None, line
        self.port = int(found[1])
        await self.all_are_back()

    async def all_are_back(self) -> None:
        """Wait until all nodes are connected to the new server: a node without a connection cannot say goodbye."""
        async with asyncio.timeout(60), store.connect(f"tcp://127.0.0.1:{self.port}") as client:
            while (await client.stats())["watches"] < len(self.nodes):  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.05)

    async def node(self, tree: Path, name: str) -> None:
        """Replace the node of this name by one of this release."""
        if name in self.nodes:
            self.nodes[name].terminate()
            assert await self.nodes[name].wait() == 0
        # A busy machine may take ten seconds to start a server, whose code is compiled anew. No lease may end
        # meanwhile.
        url = f"tcp://127.0.0.1:{self.port}/job?min_nodes=3&max_nodes=4&last_call_timeout=1&ttl=60"
        self.nodes[name] = await self.start(tree, "-c", NODE, url, name)

    async def all_meet(self, size: int) -> None:
        """Wait until all nodes are in one round of this size."""
        for child in self.nodes.values():
            await child.line(f"size {size} people {size}")

    async def aclose(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "store")
    yield fleet
    await fleet.aclose()


@pytest.mark.in_ci
async def test_s12_a_server_and_four_nodes_are_rolled_through_an_upgrade_and_back(fleet: Fleet, later: Path) -> None:
    names = ["a", "b", "c", "d"]
    await fleet.serve(ROOT)
    for name in names:
        await fleet.node(ROOT, name)
    await fleet.all_meet(4)
    for tree in (later, ROOT):
        await fleet.serve(tree)
        for name in names:
            await fleet.node(tree, name)
            await fleet.all_meet(4)  # the newcomer is in, with all earlier members
    for child in fleet.seen:
        assert not [line for line in child.output if re.search("UNEXPECTED|Traceback|refused|was started with", line)]
    releases = {line.partition(":")[0] for child in fleet.seen for line in child.output if ": round" in line}
    assert len(releases) == 2, "both releases have met"
