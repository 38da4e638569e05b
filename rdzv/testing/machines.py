"""Simulated machines of the store and its clients: real code in processes of `timeline`, over `network`."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.node.handler import Handler
from rdzv.node.link.node_loop import NodeLoop
from rdzv.node.link.ports import HeldPort
from rdzv.node.node import Node
from rdzv.testing.disk import Disk, SimulatedJournal
from rdzv.testing.network import MemoryNetwork
from rdzv.testing.timeline import SimulatedTime
from store.client.client import Client
from store.engine.engine import Engine
from store.limits import Limits
from store.server.server import Server

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from rdzv.config.settings import Settings
    from rdzv.testing.network import Listener
    from rdzv.testing.timeline import SimulatedLoop
    from store import Store

STORE = "store"  # the store's name in the network
NODE_THREAD = " node thread"  # the suffix of the name of a node thread's connections


class World:
    """A timeline, and the network between its processes; `of_network`: the network's keyword arguments."""

    network_kind: ClassVar[type[MemoryNetwork]] = MemoryNetwork

    def __init__(self, seed: int, *, timeline: SimulatedTime | None = None, **of_network: Any) -> None:
        self.timeline: SimulatedTime = timeline or SimulatedTime(seed)
        self.network_host: SimulatedLoop = self.timeline.new_host("the network")
        rng = random.Random(f"network {seed}")
        self.network: MemoryNetwork = self.network_kind(rng=rng, loop=self.network_host, **of_network)

    @property
    def now(self) -> float:
        """The true time, in seconds."""
        return self.timeline.now

    def say(self, what: str) -> None:
        """Do nothing; a subclass adds a line to its story."""


class Process:
    """A client's process."""

    def __init__(self, world: World, name: str, source: str, *, rng: random.Random, rate: float = 1.0) -> None:
        self.world = world
        self.name: str = name  # the machine's name
        self.source: str = source  # the unique name of its main loop's connections
        self.rng = rng
        self.host: SimulatedLoop = world.timeline.new_host(source, rate=rate)  # its main loop
        self.threads: dict[str, SimulatedLoop] = {}  # its other loops, by the names of their connections

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return not self.host.dead

    @property
    def connection_names(self) -> tuple[str, ...]:
        """The names of the connections of all its loops."""
        return self.source, *self.threads

    @property
    def node_thread(self) -> SimulatedLoop:
        """The loop of the node thread, made at the first use."""
        name = self.source + NODE_THREAD
        if name not in self.threads:
            self.threads[name] = self.world.timeline.new_host(name, rate=self.host.rate)
        return self.threads[name]

    def make_dial(self, *, thread: str = "") -> Callable[[Callable[[], Any]], Any]:
        """Return a function that connects a thread of this process to the store."""
        return partial(self.world.network.dial, STORE, source=self.source + thread)

    def die(self, *, silently: bool = False) -> None:
        """Kill the process; with `silently`, cut its machine's power."""
        if self.alive:
            self.world.say(f"{self.source} is killed{', and its machine with it' if silently else ''}")
            self.exit(silently=silently)

    def exit(self, *, silently: bool = False) -> None:
        """End the process like `die`, without a line in the story."""
        if self.alive:
            self.host.die()
            for source in self.connection_names:
                self.world.network.end_process(source, silently=silently)
            for thread in self.threads.values():
                thread.die()

    def pause(self, *, threads: bool) -> None:
        """Stop the main loop, as a long call in it does; with `threads`, stop the process, as SIGSTOP does."""
        self.host.pause()
        if threads:
            for thread in self.threads.values():
                thread.pause()

    def resume(self) -> None:
        """End a `pause`."""
        self.host.resume()
        for thread in self.threads.values():
            thread.resume()


class SimulatedPort(HeldPort):
    """A constant instead of a bound port."""

    def reserve(self) -> int:
        """Return a constant."""
        return 40_000


def make_node_handler(
    process: Process,
    settings: Settings,
    *,
    open_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
    open_shared_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
    kind: type[Handler] = Handler,
) -> Handler:
    """Return the real handler of a new node, not connected yet."""
    rng = random.Random(process.rng.random())
    node = Node(settings, loop=NodeLoop(process.node_thread), open_store=open_store, rng=rng, port=SimulatedPort())
    return kind(node, open_store=open_shared_store)


def make_client(process: Process, *, thread: str = "", **options: Any) -> Client:
    """Return a client of the store for a thread of this process."""
    rng = random.Random(process.rng.random())
    identity = process_identity_of(process.source)
    return Client(process.make_dial(thread=thread), name=STORE, rng=rng, process=identity, **options)


def process_identity_of(name: str) -> bytes:
    """Return the id by which a server groups a process's connections."""
    return hashlib.sha256(name.encode()).digest()[:16]


class StoreHost:
    """The store's machine. A `durable` store's disk outlives its processes. `rate`: clock seconds per true second."""

    def __init__(
        self, world: World, *, rng: random.Random, durable: bool = True, limits: Limits | None = None, rate: float = 1.0
    ) -> None:
        self._world = world
        self._limits = limits or Limits()
        self._rate = rate
        self._rng = rng
        self._listener: Listener | None = None
        self.host: SimulatedLoop | None = None
        self.server: Server | None = None  # the running process's server
        self.starts: int = 0  # the number of the store's processes so far
        self.store_id: str = "store 1"
        self.disk: Disk | None = self.make_disk(self.store_id) if durable else None

    def make_disk(self, store_id: str) -> Disk:
        """Return a new, empty disk for this store."""
        return Disk(self._rng, store_id=store_id)

    def new_journal(self, disk: Disk, host: SimulatedLoop) -> SimulatedJournal:
        """Return a new process's journal."""
        return disk.open_journal(host, kind=SimulatedJournal)

    def new_server(self, engine: Engine, journal: SimulatedJournal | None, host: SimulatedLoop) -> Server:
        """Return a new process's server."""
        return Server(
            engine, clock=host.time, journal=journal, in_thread=host.in_thread, stopwatch=lambda: self._world.now
        )

    @property
    def is_up(self) -> bool:
        """True while the store's process exists, even if stopped."""
        return self.host is not None

    def start(self) -> None:
        """Start a process with the disk's data."""
        assert self.host is None, "one at a time"
        self.starts += 1
        self.store_id = f"store {self.starts if self.disk is None else 1}"
        self._world.say("the store starts")
        self.host = host = self._world.timeline.new_host(f"store.{self.starts}", rate=self._rate)
        host.call_soon(self._make_server, host)

    def _make_server(self, host: SimulatedLoop) -> None:
        journal: SimulatedJournal | None = None
        if self.disk is None:
            # A real store's first revision is random: choose one far from the revisions of earlier processes.
            first = 1_327_217_885 * self.starts % 2**31
            engine = Engine(store_id=self.store_id, limits=self._limits, first_revision=first)
        else:
            journal = self.new_journal(self.disk, host)
            engine = Engine.restore(journal.load(), limits=self._limits, now=host.time())
        self.server = server = self.new_server(engine, journal, host)
        self._listener = self._world.network.listen(STORE, server.protocol, loop=host)
        server.start()

    def die(self, *, silently: bool = False) -> None:
        """Kill the process; with `silently`, cut its machine's power."""
        if self.host is None:
            return
        self._world.say(f"the store is killed{', and its machine with it' if silently else ''}")
        self.host.die()
        self.host = self.server = None
        self._world.network.end_process(STORE, silently=silently)
        self._close_listener()
        if self.disk is not None:
            self.disk.crash_journal()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Delete the disk."""
        if self.disk is not None:
            self.disk.close()
