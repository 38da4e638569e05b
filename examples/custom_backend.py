"""A backend of your own behind the same interface: a static one, whose members are listed in the URL.

    python examples/custom_backend.py

A scheme is registered with a function that makes handlers; `rdzv.connect` and `rdzv.sync.connect` then accept it. An
installed package offers one by an entry point in the group `rdzv.backends`, without being imported first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple, Self

import rdzv
import store


class StaticInfo(NamedTuple):
    """The description of a round by this backend; it unpacks like `rdzv.RendezvousInfo`."""

    store: rdzv.SharedStore
    rank: int
    world_size: int


class StaticHandler(rdzv.RendezvousHandler):
    """Ranks by a fixed list of names; the inherited methods report that they are not offered."""

    def __init__(self, parameters: rdzv.RendezvousParameters) -> None:
        # static://HOST:PORT/RUN?nodes=a,b,c and, by keyword or URL, node_id=b
        self._names = str(parameters.get("nodes", "")).split(",")
        self._name = str(parameters.get("node_id", ""))
        if self._name not in self._names:
            raise rdzv.RendezvousSettingsError(f"node_id={self._name!r} must be one of nodes={','.join(self._names)}")
        self._url = f"tcp://{parameters.endpoint}"
        self._prefix = f"static/{parameters.run_id}/"
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(store.connect(self._url))
        return self

    async def aclose(self) -> None:
        """Disconnect."""
        await self._stack.aclose()

    async def next_rendezvous(self) -> Any:
        """Wait for all nodes; the ranks are known before."""
        shared = rdzv.SharedStore(self._client, prefix=self._prefix, fence=())
        size = len(self._names)
        await shared.barrier("everyone is here", size)
        return StaticInfo(shared, self._names.index(self._name), size)

    async def num_nodes_waiting(self) -> int:
        """Return 0: no node can come later."""
        return 0

    async def is_closed(self) -> bool:
        """Return True if the run is closed."""
        return await self._client.get(f"{self._prefix}closed") is not None

    async def set_closed(self, reason: str = "") -> None:
        """Close the run for all nodes."""
        await self._client.put(f"{self._prefix}closed", reason.encode())


async def take_part(url: str, name: str) -> tuple[int, int, bytes]:
    """Take part as one node, with any backend."""
    async with rdzv.connect(url, node_id=name) as handler:
        shared, rank, world_size = await handler.next_rendezvous()
        await shared.set(f"name/{rank}", name)
        await shared.barrier("everyone is done", world_size)
        return rank, world_size, b" ".join(await shared.multi_get([f"name/{rank}" for rank in range(world_size)]))


async def main() -> None:
    """Meet over the new scheme."""
    rdzv.register("static", StaticHandler)
    async with store.serve() as server:
        url = f"static://127.0.0.1:{server.port}/example?nodes=ada,ben,cleo"
        results = await asyncio.gather(*(take_part(url, name) for name in ("cleo", "ada", "ben")))
        try:
            await take_part(url, "mallory")
        except rdzv.RendezvousSettingsError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("mallory is not on the list")
    for result in sorted(results):
        print("rank {} of {}; all: {}".format(*result))
    assert sorted(results) == [(rank, 3, b"ada ben cleo") for rank in range(3)]
    print("verified: a backend of one's own, used like any other")


if __name__ == "__main__":
    asyncio.run(main())
