"""Handlers of one run, and the store they meet at: on virtual time over a network in memory, or over real sockets.

    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        first, second = await run.meet(a, b)

A node's links carry its name, so `run.network.partition("a")` cuts it off. `run.crash("a")` ends a node as `kill -9`
does: its connection closes, and nothing it does afterwards reaches the network. At the end of the block every handler
is closed; a task that is still running then is an error.

The store is a process of its own on the test's timeline (`rdzv.testing.machines`): `run.kill_store()`,
`run.restart_store()`. With `VirtualRun(durable=True)` it has a disk, and restarts with the data on it.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import store
from rdzv import Change, RendezvousInfo
from rdzv.backends.builtin import create_tcp_handler
from rdzv.backends.registry import RendezvousParameters
from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.loop.member import LoopOptions
from rdzv.loop.rounds import Round, iterate_rounds
from rdzv.node.handler import Handler
from rdzv.node.link.head_watcher import follow_head
from rdzv.node.link.node_loop import NodeLoop
from rdzv.node.link.store_session import StoreSession
from rdzv.node.node import Node
from rdzv.node.run.run import Run
from rdzv.testing.machines import process_identity_of
from store import Client, Server
from store.engine.engine import Engine
from store.messages import KeepAlive, Ping, Request, Response
from tests.support.faults import FaultyStore, FaultyWorld
from tests.support.virtual_time import VirtualTimeLoop

__all__ = ["VirtualRun", "assert_one_round", "connected", "listen", "rounds_of"]

R = TypeVar("R", bound=Response)

PATIENCE = 3600.0
"""In virtual seconds. No test takes longer, and idling through more of them takes real time."""


class HookedClient(Client):
    """A client that calls hooks before and after each request, except keep-alives and pings."""

    hook: Callable[[Request[Any], str], Awaitable[None]] | None = None

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request, with a word before and after."""
        if self.hook is None or isinstance(request, KeepAlive | Ping):
            return await super().call(request, timeout=timeout)
        await self.hook(request, "before")
        response = await super().call(request, timeout=timeout)
        await self.hook(request, "after")
        return response


class VirtualRun:
    """One store, and as many handlers as a test asks for.

    Args:
        run_id: The name of the run.
        seed: Of latencies, names and jitter.
        limits: The limits of the store.
        durable: Whether the store is kept on disk, and may be killed and restarted.
        hosts: Those in the URL; the store is the same for all.
        latency: Of the network, in seconds each way; one number, or its bounds.
        parameters: Settings of every handler that has no others of its own.
    """

    def __init__(
        self,
        run_id: str = "job",
        *,
        seed: int = 0,
        limits: store.Limits | None = None,
        durable: bool = False,
        latency: float | tuple[float, float] = (0.0005, 0.001),
        hosts: str = "store",
        **parameters: Any,
    ) -> None:
        self._hosts = hosts
        self._latency = latency
        self._durable = durable
        self._run_id = run_id
        self._limits = limits
        self._parameters = parameters
        self._rng = random.Random(seed)
        self._handlers: dict[str, Handler] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._joins: list[tuple[Handler, asyncio.Task[Any]]] = []
        self._burials: list[asyncio.Task[None]] = []
        self.clients: dict[str, HookedClient] = {}  # of the nodes
        self.shared_clients: dict[str, HookedClient] = {}  # of the shared stores, once they are used

    async def __aenter__(self) -> Self:
        self._before = asyncio.all_tasks()
        self._limit = asyncio.timeout(PATIENCE)
        await self._limit.__aenter__()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "mark the test with `virtual_time`"
        self._world = FaultyWorld(self._rng.getrandbits(32), latency=self._latency, timeline=loop.timeline)
        self.network = self._world.network
        self.machine = FaultyStore(
            self._world, rng=random.Random(self._rng.random()), durable=self._durable, limits=self._limits
        )
        self.restart_store()
        await asyncio.sleep(0.001)
        return self

    def restart_store(self) -> None:
        """The store comes back, as its disk has it; without a disk, as another one, that is empty."""
        self.machine.start()

    def kill_store(self) -> None:
        """Kill the store between two steps. A durable store has all acknowledged changes on disk."""
        self.machine.die()

    @property
    def server(self) -> Server:
        """The server that there is."""
        assert self.machine.server is not None
        return self.machine.server

    @property
    def engine(self) -> Engine:
        return self.server._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, trace)  # a test that hangs ends here, with a TimeoutError
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.network.heal()
        await asyncio.gather(*self._burials)
        for handler in list(self._handlers.values()):
            await handler.aclose()
        self.kill_store()
        self.machine.close()
        if error is None:
            await asyncio.sleep(1)
            left = asyncio.all_tasks() - self._before
            assert not left, f"nobody awaits {left}"

    def handler(self, name: str, *, run_id: str | None = None, **parameters: Any) -> Handler:
        """A node, not yet connected; of another run, if that is named."""
        given = {**self._parameters, **parameters}
        settings = parse(f"tcp://{self._hosts}/{run_id or self._run_id}", {"node_id": name, **given}, {})

        def open_client() -> HookedClient:
            return self.client(source, settings.join_timeout)

        def open_store() -> Client:
            client = self.clients[source] = open_client()
            return client

        def open_shared_store() -> Client:
            client = self.shared_clients[source] = open_client()
            return client

        source = name
        while source in self._handlers:  # two processes of one name, on two machines
            source += "'"
        node = Node(settings, loop=NodeLoop(), open_store=open_store, rng=random.Random(self._rng.random()))
        handler = Handler(node, open_store=open_shared_store)
        self._handlers[source] = handler
        return handler

    def client(self, source: str, connect_timeout: float = PATIENCE) -> HookedClient:
        """Return a client that comes from this node of the network."""

        async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
            return await self.network.dial("store", factory, source=source)

        rng = random.Random(self._rng.random())
        return HookedClient(
            dial, name="store", connect_timeout=connect_timeout, rng=rng, process=process_identity_of(source)
        )

    @contextlib.asynccontextmanager
    async def looked_at(self) -> AsyncIterator[Run]:
        """Return the run, read by a client that is no node of it."""
        keys = Keys("/rdzv", self._run_id)
        async with self.client("observer", PATIENCE) as client, follow_head(client, keys) as follower:
            yield Run(client, keys, head=lambda: follower.head)

    def start(self, work: Any, name: str = "") -> asyncio.Task[Any]:
        """Run something beside the test, until it is over or the test is."""
        task = asyncio.create_task(work, name=name or None)
        self._tasks.append(task)
        return task

    async def join(self, handler: Handler) -> asyncio.Task[RendezvousInfo]:
        """Call `next_rendezvous`, and return once the node is parked there."""
        await connected(handler)
        task = self.start(handler.next_rendezvous(), f"join {handler.node_id}")
        self._joins.append((handler, task))
        await asyncio.sleep(0.02)
        return task

    async def meet(self, *handlers: Handler) -> list[RendezvousInfo]:
        """All of them join; what each got."""
        return list(await asyncio.gather(*(handler.next_rendezvous() for handler in handlers)))

    async def met(self, names: Iterable[str]) -> list[Handler]:
        """Nodes of these names, once they have met."""
        handlers = [self.handler(name) for name in names]
        await self.meet(*handlers)
        return handlers

    def crash(self, name: str) -> None:
        """End a node as `kill -9` does."""
        self.network.refuse(name)
        self.network.cut(name)
        handler = self._handlers.pop(name)
        for joining, task in self._joins:
            if joining is handler:
                task.cancel()
        self._burials.append(asyncio.create_task(handler.aclose(), name=f"bury {name}"))

    def keys(self, under: str = "") -> list[str]:
        """Return the keys of this run, below its prefix."""
        root = f"/rdzv/{self._run_id}/{under}"
        return [key.removeprefix(root) for key in sorted(self.engine._keys.entries) if key.startswith(root)]

    def keys_whole(self, under: str = "") -> list[str]:
        """The same, with the prefix."""
        return [f"/rdzv/{self._run_id}/{under}{key}" for key in self.keys(under)]


def rounds_of(handler: Handler, **options: Any) -> AsyncGenerator[Round, None]:
    """The rounds of a run over a handler; the options are those of `rdzv.rounds`."""
    return iterate_rounds(Round, handler, LoopOptions(**options))


async def connected(handler: Handler) -> StoreSession:
    """A handler's node, connected: its link to the store."""
    return await handler.node.loop.spawn(handler.node.get_session())


class LastNote:
    """The items of one handler's `changes()` so far."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.changes: list[Change] = []
        self.times: list[float] = []
        self._news = asyncio.Event()
        self.ready = asyncio.Event()

    async def listen(self) -> None:
        """Collect, until cancelled."""
        async with self._handler.changes() as changes:
            self.ready.set()
            async for change in changes:
                self.changes.append(change)
                self.times.append(asyncio.get_running_loop().time())
                self._news.set()

    async def until(self, *wanted: Change | type[Change], within: float = 30.0) -> None:
        """Wait until each of these, or of these kinds, has been heard."""
        try:
            async with asyncio.timeout(within):
                while not all(self._heard(one) for one in wanted):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{wanted} should have come, and only {self.changes} did") from None

    def _heard(self, wanted: Change | type[Change]) -> bool:
        if isinstance(wanted, type):
            return any(isinstance(change, wanted) for change in self.changes)
        return wanted in self.changes


async def listen(run: VirtualRun, handler: Handler) -> LastNote:
    """Listen to a handler's changes from now on."""
    heard = LastNote(handler)
    run.start(heard.listen(), f"listen to {handler.node_id}")
    await heard.ready.wait()
    return heard


def assert_one_round(infos: Sequence[RendezvousInfo]) -> None:
    """All agree on one round: its number, its size, its address, and ranks 0 to n-1 once each (promise R3)."""
    assert len({(info.round, info.world_size, info.bootstrap_address) for info in infos}) == 1
    assert sorted(info.rank for info in infos) == list(range(infos[0].world_size))


@contextlib.asynccontextmanager
async def real_run(run_id: str = "job", **parameters: Any) -> AsyncIterator[Callable[..., Handler]]:
    """Serve a store on a real socket; yield a function that makes handlers, which are closed at the end."""
    made: list[Handler] = []
    async with store.serve() as server:

        def make(name: str, **own: Any) -> Handler:
            given = {"node_id": name, "is_host": False, **parameters, **own}
            handler = create_tcp_handler(RendezvousParameters.from_url(f"{server.url}/{run_id}", given))
            made.append(handler)
            return handler

        try:
            yield make
        finally:
            for handler in made:
                await handler.aclose()
