"""An async program in an elastic run: it meets the others, works, and regroups whenever somebody comes or goes.

By itself it plays a run of four nodes in this one process. With a URL it is one node of a real run; start it on as many
machines as you like, and end it with Ctrl-C:

    python examples/async_orchestrator.py
    python examples/async_orchestrator.py 'tcp://head:29400/job-7?min_nodes=2&max_nodes=4'
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

import anyio

import rdzv
import store

Tell = Callable[[str], None]


async def take_part(url: str, tell: Tell = print, *, node_id: str | None = None) -> None:
    """Be one node of a run until somebody closes it."""
    async with rdzv.connect(url, node_id=node_id) as handler, handler.changes() as changes:
        closed = False
        while not closed:
            info = await handler.next_rendezvous()
            async with anyio.create_task_group() as group:
                group.start_soon(work, info, tell)
                closed = await regroup_needed(changes, tell)
                group.cancel_scope.cancel()


async def work(info: rdzv.RendezvousInfo, tell: Tell) -> None:
    """What this node does in a round; it is cancelled when the round's members change."""
    with contextlib.suppress(rdzv.RoundSupersededError):  # the round is over: the changes say so, too
        await info.store.set(f"number/{info.rank}", str(info.rank + 1))
        numbers = await info.store.multi_get([f"number/{rank}" for rank in range(info.world_size)])
        total = sum(map(int, numbers))
        tell(f"{info.node_id}: round {info.round}, rank {info.rank} of {info.world_size}, our sum is {total}")
    await anyio.sleep_forever()


async def regroup_needed(changes: AsyncIterator[rdzv.Change], tell: Tell) -> bool:
    """Wait until the members must meet again; True if they never will, since the run is closed."""
    async for change in changes:
        match change:
            case rdzv.Closed(reason=reason):
                tell(f"the run is closed: {reason}")
                return True
            case rdzv.NodesLost(node_ids=ids) | rdzv.NodesLeft(node_ids=ids):
                tell(f"gone: {', '.join(ids)}")
                return False
            case rdzv.NodesWaiting(count=count) if count > 0:
                tell(f"waiting to come in: {count}")
                return False
            case rdzv.Dropped(reason=reason):
                tell(f"the others have gone on without this node: {reason}")
                return False
    return True


# ---------------------------------------------------------------------------------------- a run in one process


async def play() -> None:
    """Three nodes meet, one leaves, another comes, and the run is closed; every step is verified."""
    said: list[str] = []
    heard = asyncio.Event()

    def tell(line: str) -> None:
        nonlocal heard
        print(line)
        said.append(line)
        heard.set()
        heard = asyncio.Event()

    async def expect(round: int, *, size: int, total: int) -> None:
        """Wait until this round's members have all said their sum, and have ranks of their own."""
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
        cleo.cancel()  # a node that ends properly leaves at once; nobody waits for its lease
        await expect(1, size=2, total=3)
        start("dan")
        await expect(2, size=3, total=6)
        async with rdzv.connect(url) as handler:  # not a node: it never joins
            await handler.set_closed("all is done")
    assert said.count("the run is closed: all is done") == 3
    print("verified: 3 nodes, then 2, then 3 again; and all of them heard of the end")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(take_part(sys.argv[1]) if len(sys.argv) > 1 else play())
