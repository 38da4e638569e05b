"""One suite for a class and its blocking twin: both are awaited, the blocking one in a thread of its own.

    async with open_shared_store("blocking", server, prefix="/round/") as shared:
        await shared.set("key", "value")

The same for nodes, over a store that is chosen by name and lives in no loop of the test's:

    with open_store("durable") as backing:
        async with Meeting("blocking", backing, min_nodes=2) as meeting:
            a, b = await meeting.node("a"), await meeting.node("b")
            first, second = await meeting.meet(a, b)
            await told(a, NodesLost)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import rdzv
import rdzv.sync
import store
import store.sync
from rdzv import Change, Participant, SharedStore
from rdzv.shared_store.store import BlockingSharedStore
from store import ConnectionLost, Server
from tests.support.etcd import Etcd, serve_etcd
from tests.support.proxy import Proxy

TWINS = ("awaited", "blocking")
STORES = ("memory", "durable", "etcd")
EVERY_KIND = os.environ.get("RDZV_TEST_EVERY_KIND") == "1"
KINDS = [
    (twin, store_name)
    for store_name in STORES
    for twin in TWINS
    if EVERY_KIND or (twin, store_name) != ("blocking", "etcd")  # which would take twelve seconds more
]
"""The combinations of twins and stores."""

THREADS = 32  # more than any test has waiting at once


class InThreads:
    """A blocking object whose methods are awaited. Properties and what returns at once are on `.blocking`."""

    def __init__(self, blocking: Any, pool: ThreadPoolExecutor) -> None:
        self.blocking = blocking
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.blocking, name)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: method(*arguments, **keywords))

        return call


@contextlib.asynccontextmanager
async def open_shared_store(twin: str, server: Server, **arguments: Any) -> AsyncIterator[Any]:
    """A shared store of either kind on a client of its own; a blocking call that is left behind is interrupted."""
    arguments = {"prefix": "/round/", "fence": (), **arguments}
    if twin == "awaited":
        async with store.connect(server.url) as client:
            yield SharedStore(client, **arguments)
        return
    with ThreadPoolExecutor(THREADS) as pool, contextlib.ExitStack() as stack:
        client_in_thread = await asyncio.to_thread(stack.enter_context, store.sync.connect(server.url))
        try:
            yield InThreads(BlockingSharedStore(client_in_thread, **arguments), pool)
        finally:
            client_in_thread.interrupt(ConnectionLost("the test is over", maybe_applied=False))


async def until_waits(client: store.Client, count: int) -> None:
    """Return once so many waits are parked at the server."""
    async with asyncio.timeout(60):
        waits = -1
        while waits != count:
            waits = (await client.stats())["waits"]


class Backing:
    """A store for nodes to meet at.

    Args:
        scheme: Of its URLs.
        port: Where on this machine it listens.
    """

    host = "127.0.0.1"

    def __init__(self, scheme: str = "tcp", port: int = 0) -> None:
        self.scheme = scheme
        self.port = port

    def restart(self) -> None:
        """End it, and start it again on the data that it has kept."""
        raise NotImplementedError("this one keeps nothing, or is shared")

    @property
    def restarts(self) -> bool:
        """True if it can be restarted."""
        return type(self).restart is not Backing.restart


class Embedded(Backing):
    """Our own store, in a thread of its own; in memory, or on disk."""

    def __init__(self, data_dir: str | None = None) -> None:
        super().__init__()
        self._data_dir = data_dir
        self._serving = contextlib.ExitStack()

    def start(self) -> None:
        """Start it, on the same port as before."""
        server = self._serving.enter_context(store.sync.serve(port=self.port, data_dir=self._data_dir))
        self.port = server.port

    def stop(self) -> None:
        """End it."""
        self._serving.close()


class Durable(Embedded):
    """Our own store, on disk."""

    def restart(self) -> None:
        """End it, and start it again on the data that it has kept."""
        self.stop()
        self.start()


class RealEtcd(Backing):
    """A real etcd of one member."""

    def __init__(self, etcd: Etcd) -> None:
        super().__init__("etcd", etcd.members[0].client_port)
        self._etcd = etcd

    def restart(self) -> None:
        """Kill it, and start it again on the data that it has kept."""
        (member,) = self._etcd.members
        member.kill()
        member.start()
        self._etcd.wait_until_ready()


@contextlib.contextmanager
def open_store(name: str) -> Iterator[Backing]:
    """A store by name; skips the test, visibly, if it is not to be had here."""
    if name == "etcd":
        with serve_etcd() as served:
            yield RealEtcd(served)
        return
    with contextlib.ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory()) if name == "durable" else None
        backing = Embedded() if data_dir is None else Durable(data_dir)
        backing.start()
        stack.callback(backing.stop)
        yield backing


class Meeting:
    """Nodes of one run, all of one kind, at one store. Each has a proxy of its own, by which it can be cut off.

    Args:
        twin: Which of `TWINS` the nodes are.
        backing: Where they meet.
        parameters: Settings of every node that has no others of its own.
    """

    def __init__(self, twin: str, backing: Backing, **parameters: Any) -> None:
        self._twin = twin
        self.backing = backing
        timeouts = {"ttl": 10.0, "disconnect_ttl": 0.3, "last_call_timeout": 0.2}
        self._parameters = {"is_host": False, **timeouts, **parameters}
        self._stack = contextlib.AsyncExitStack()
        self._nodes: dict[str, contextlib.AsyncExitStack] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self.run_id = f"twins-{time.time_ns()}"
        self.proxies: dict[str, Proxy] = {}

    async def __aenter__(self) -> Self:
        self._pool = self._stack.enter_context(ThreadPoolExecutor(THREADS))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for proxy in self.proxies.values():
            proxy.heal()
        await asyncio.gather(*map(self.end, list(self._nodes)))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for proxy in self.proxies.values():
            await proxy.__aexit__(None, None, None)
        await self._stack.aclose()

    async def node(self, name: str, **parameters: Any) -> Any:
        """A node that is connected; everything of it is awaited, whichever twin it is."""
        proxy = self.proxies[name] = Proxy(self.backing.host, self.backing.port)
        await proxy.__aenter__()
        url = f"{self.backing.scheme}://127.0.0.1:{proxy.port}/{self.run_id}"
        given = {"node_id": name, **self._parameters, **parameters}
        stack = self._nodes[name] = contextlib.AsyncExitStack()
        if self._twin == "awaited":
            return await stack.enter_async_context(rdzv.connect(url, **given))
        connection = rdzv.sync.connect(url, **given)
        stack.push_async_callback(asyncio.to_thread, connection.__exit__, None, None, None)
        return BlockingNode(await asyncio.to_thread(connection.__enter__), self._pool)

    async def end(self, name: str) -> None:
        """Close a node's handler: it leaves for good."""
        await self._nodes.pop(name).aclose()

    async def cut_off(self, name: str) -> None:
        """End a node's connections, and refuse others."""
        await self.proxies[name].refuse()
        self.proxies[name].cut()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the test."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def join(self, node: Any, at: Any = None) -> asyncio.Task[Any]:
        """Have a node call `next_rendezvous`, and return once it is parked there, or through."""
        task = self.start(node.next_rendezvous())
        look = at or node
        async with asyncio.timeout(60):
            while not task.done() and node.node_id not in (await look.status()).waiting:  # noqa: ASYNC110 - an outsider
                await asyncio.sleep(0.01)
        return task

    async def meet(self, *nodes: Any) -> list[Any]:
        """All of them join; what each got."""
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*(node.next_rendezvous() for node in nodes)))


class BlockingNode(InThreads):
    """A blocking handler with awaitable methods, whose results are awaitable, too."""

    @property
    def node_id(self) -> str:
        """The name of the node."""
        name: str = self.blocking.node_id
        return name

    async def next_rendezvous(self) -> BlockingInfo:
        """Join; being cancelled leaves a thread behind, which ends with the handler."""
        info = await asyncio.get_running_loop().run_in_executor(self._pool, self.blocking.next_rendezvous)
        return BlockingInfo(info, self._pool)


class BlockingInfo:
    """The `RendezvousInfo` of a blocking member, with awaitable methods."""

    def __init__(self, info: rdzv.sync.RendezvousInfo, pool: ThreadPoolExecutor) -> None:
        self.round, self.rank, self.world_size = info.round, info.rank, info.world_size
        self.node_id, self.bootstrap_address = info.node_id, info.bootstrap_address
        self.store = InThreads(info.store, pool)
        self._info = info
        self._pool = pool

    async def participants(self) -> list[Participant]:
        """All members, by rank."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._info.participants)


async def told(node: Any, wanted: Change | type[Change], *, within: float = 10.0) -> Change:
    """Wait until `changes()` of a node says this, or something of this kind."""

    def is_it(change: Change) -> bool:
        return isinstance(change, wanted) if isinstance(wanted, type) else change == wanted

    async with asyncio.timeout(within):
        if isinstance(node, BlockingNode):
            return await _told_in_thread(node.blocking, is_it)
        async with node.changes() as changes:
            async for change in changes:
                if is_it(change):
                    found: Change = change
                    return found
    raise AssertionError("changes() ends by itself")


async def _told_in_thread(handler: rdzv.sync.Handler, is_it: Callable[[Change], bool]) -> Change:
    """In a thread of its own, which must not keep the others waiting if nothing is said; it ends with the handler."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Change] = loop.create_future()

    def listen() -> None:
        with contextlib.suppress(BaseException), handler.changes() as changes:
            change = next(change for change in changes if is_it(change))
            loop.call_soon_threadsafe(found.set_result, change)

    threading.Thread(target=listen, daemon=True).start()
    return await found
