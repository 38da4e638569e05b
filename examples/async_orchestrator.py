"""An async program in an elastic run: it meets the others, works, and meets again when nodes join or leave.

Without arguments it runs four nodes in this process. With a URL it is one node of a real run; start it on several
machines, and end it with Ctrl-C:

    python examples/async_orchestrator.py
    python examples/async_orchestrator.py 'tcp://head:29400/job-7?min_nodes=2&max_nodes=4'
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

import anyio

import rdzv
import store

Tell = Callable[[str], None]


async def take_part(url: str, tell: Tell = print, *, node_id: str | None = None) -> None:
    """Take part in a run as one node until the run is closed."""
    async for round in rdzv.rounds(url, node_id=node_id):
        async with round:  # cancelled when a node leaves, or waits to join
            await work(round, tell)
        if round.ending is not None:
            tell(round.ending.reason)


async def work(round: rdzv.Round, tell: Tell) -> None:
    """Do this node's work of a round."""
    await round.store.set(f"number/{round.rank}", str(round.rank + 1))
    numbers = await round.store.multi_get([f"number/{rank}" for rank in range(round.world_size)])
    total = sum(map(int, numbers))
    tell(f"{round.node_id}: round {round.number}, rank {round.rank} of {round.world_size}, our sum is {total}")
    await anyio.sleep_forever()


# ---------------------------------------------------------------------------------------- a run in one process


async def play() -> None:
    """Let three nodes meet, one leave, another join, and close the run; verify every step."""
    said: list[str] = []
    heard = asyncio.Event()

    def tell(line: str) -> None:
        nonlocal heard
        print(line)
        said.append(line)
        heard.set()
        heard = asyncio.Event()

    async def expect(round: int, *, size: int, total: int) -> None:
        """Wait until all members of this round have reported their sum, with distinct ranks."""
        wanted = {f"round {round}, rank {rank} of {size}, our sum is {total}" for rank in range(size)}
        with anyio.fail_after(5):
            while not wanted <= {line.partition(": ")[2] for line in said}:
                await heard.wait()

    async with store.serve() as server, anyio.create_task_group() as nodes:
        url = f"{server.url}/example?min_nodes=2&max_nodes=3"

        def start(name: str) -> anyio.CancelScope:
            scope = anyio.CancelScope()

            async def run() -> None:
                with scope:
                    await take_part(url, tell, node_id=name)

            nodes.start_soon(run)
            return scope

        for name in ("ada", "ben"):
            start(name)
        cleo = start("cleo")
        await expect(0, size=3, total=6)
        cleo.cancel()  # a node that ends properly leaves at once, before its lease expires
        await expect(1, size=2, total=3)
        start("dan")
        await expect(2, size=3, total=6)
        async with rdzv.connect(url) as handler:  # it never joins
            await handler.set_closed("all is done")
    assert said.count("the run is closed: all is done") == 3
    print("verified: 3 nodes, then 2, then 3 again; and all of them heard of the end")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(take_part(sys.argv[1]) if len(sys.argv) > 1 else play())
