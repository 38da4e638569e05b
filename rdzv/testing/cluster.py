"""A cluster of simulated nodes, in which a user's code runs over the real store and handler.

Each node is a process of `timeline`. The network and the store's disk are in memory. `advance` plays the events of some
virtual seconds, in an order that the seed decides. Every method acts before it returns; awaiting its result is
optional, so blocking tests can use a cluster, too.

In the nodes' code, `rdzv.connect` and `rdzv.rounds` connect to the cluster's store, whatever host the URL names. A body
must not wait for a thread, which would answer at a random virtual time.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from rdzv.errors import RendezvousClosedError, RendezvousGracefulExitError, RendezvousStateError
from rdzv.node.front import verbs
from rdzv.testing.machines import Process, StoreHost, World
from rdzv.testing.nodes import ClusterNode, ClusterRound
from rdzv.testing.story import ClusterError, ClusterStuckError, EventLog
from rdzv.testing.timeline import START

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

    from rdzv.core.stopping import Resized
    from rdzv.membership import RendezvousInfo
    from store.net.threads import Call

    _Later = tuple[float, Callable[[], object]]

T = TypeVar("T")

EXIT_LOOKS_EVERY = 0.5  # seconds between checks whether a process is idle, after its body's end
EXIT_WITHIN = 10.0  # seconds from a body's end until its process is ended, even if not idle
FINISH_LOOKS_EVERY = 1.0
FINISH_WITHIN = 1800.0

FAULTS: Final = ("kill", "pause", "hang", "cut", "reset", "drain", "join", "stop_store", "pause_store", "resize")
"""The kinds of faults. A killed or drained node is replaced later, and a resize is taken back."""

SHORT, MIDDLING, LONG = 0.3, 3.0, 20.0
"""Typical seconds of a fault: below `disconnect_ttl`, below `ttl`, and above both."""


class AwaitableResult(Generic[T]):
    """The result `value` of a method of `Cluster`; awaiting it first calls `then`."""

    def __init__(self, value: T, then: Callable[[], object] | None = None) -> None:
        self.value = value
        self._then = then

    def __await__(self) -> Generator[Any, None, T]:
        if self._then is not None:
            self._then()
        yield from ()
        return self.value


class _StoryWorld(World):
    story: EventLog

    def say(self, what: str) -> None:
        self.story.say(what)


class Cluster:
    """Simulated nodes, their store, and their faults: `async with rdzv.testing.cluster(4, seed=1) as cluster`.

    Args:
        nodes: The number of nodes at the start.
        seed: The seed of all random choices: the same seed gives the same story.
        durable: True if the store has a disk.
        latency: The bounds, in seconds, of a message's time to or from the store.
        may_raise: Errors that the bodies may raise, besides a closed run's or a drain's; others fail the test.
        settings: Parameters of the run; those of a URL have precedence. The default of `min_nodes` is `nodes`.

    Attributes:
        nodes: All nodes so far, by number, each as it was last started.
        rounds: All rounds so far, in order.
    """

    def __init__(
        self,
        nodes: int,
        *,
        seed: int = 0,
        durable: bool = True,
        latency: tuple[float, float] = (0.0005, 0.002),
        may_raise: type[Exception] | tuple[type[Exception], ...] = (),
        **settings: Any,
    ) -> None:
        if nodes < 1:
            raise ValueError(f"cluster({nodes!r}): a cluster has at least one node")
        self.seed = seed
        self._count = nodes
        self._options: dict[str, Any] = {"durable": durable, "latency": latency, "may_raise": may_raise}
        self._given = settings
        self.settings: dict[str, Any] = {"min_nodes": nodes, **settings}
        self.settings.setdefault("max_nodes", max(nodes, int(self.settings["min_nodes"])))
        self._may_raise = may_raise
        self._body: Callable[[ClusterNode], Awaitable[object]] | None = None
        self._rng = random.Random(f"cluster {seed}")
        self._world = _StoryWorld(seed, latency=latency)
        self._world.story = self._story = EventLog(lambda: self.now)
        self._store = StoreHost(self._world, rng=random.Random(self._rng.random()), durable=durable)
        self._director = self._world.timeline.new_host("the director")
        self._processes = 0
        self._dark: set[Process] = set()  # the processes on machines without power
        self._over = False
        self.nodes: list[ClusterNode] = []
        self.rounds: list[ClusterRound] = []
        self._store.start()
        for _ in range(nodes):
            self._new_node()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes and free everything; repeated calls do nothing."""
        if not self._over:
            self._over = True
            with self._story.capture_logs():
                self._world.timeline.end_processes()
            self._store.close()

    @property
    def now(self) -> float:
        """The virtual seconds since the cluster began."""
        return self._world.now - START

    @property
    def story(self) -> list[str]:
        """The events so far, one line each."""
        return self._story.lines

    def say(self, what: str) -> None:
        """Add a line to the story."""
        self._story.say(what)

    def run(self, body: Callable[[ClusterNode], Awaitable[object]]) -> AwaitableResult[None]:
        """Start a body on each live node that runs none; awaiting the result calls `finish`."""
        self._body = body
        for node in self.nodes:
            if node.alive and node.task is None:
                self._start_body(node, body)
        return AwaitableResult(None, then=self.finish)

    def advance(self, seconds: float) -> AwaitableResult[None]:
        """Play some virtual seconds; raise ClusterError if a body fails, or members disagree about their round."""
        self._check_open()
        timeline = self._world.timeline
        with self._story.capture_logs():
            try:
                timeline.run_until_time(timeline.now + seconds)
            except ClusterError:
                raise
            except Exception as error:
                raise ClusterError(f"seed {self.seed}: {error}", self.story) from error
        return AwaitableResult(None)

    def finish(self, within: float = FINISH_WITHIN) -> AwaitableResult[None]:
        """Play until the bodies of all live nodes have ended; raise the errors of `advance`.

        After `within` virtual seconds, raise ClusterStuckError, which says where each node waits.
        """
        until = self.now + within
        while any(node.is_running for node in self.nodes):
            if self.now >= until:
                raise ClusterStuckError(
                    f"seed {self.seed}: not all nodes have come to their ends within {within:g} virtual seconds:"
                    f"{_describe_nodes(self.nodes)}",
                    self.story,
                )
            self.advance(min(FINISH_LOOKS_EVERY, until - self.now))
        return AwaitableResult(None)

    def kill(self, node: int | ClusterNode, *, power: bool = False) -> AwaitableResult[None]:
        """Kill a node's process; with `power`, cut its machine's power, so that its connections stay open."""
        found = self._find_node(node)
        if power and found.alive:
            found.process.die(silently=True)
            self._dark.add(found.process)
            for source in found.connection_names:
                self._world.network.partition(source)  # a machine without power does not even send a reset
        else:
            found.process.die()
        return AwaitableResult(None)

    def restart(self, node: int | ClusterNode) -> AwaitableResult[ClusterNode]:
        """Start a dead or ended node again, with the same name and body."""
        old = self._find_node(node)
        if old.alive and not old.ended:
            raise RendezvousStateError(f"{old.name} is alive: kill it first")
        old.process.exit()
        if old.process in self._dark:  # the machine has power again, and resets the old connections
            self._dark.discard(old.process)
            for source in old.connection_names:
                self._world.network.heal(source)
        new = self._new_node(old.index)
        if self._body is not None:
            self._start_body(new, self._body)
        return AwaitableResult(new)

    def join(self) -> AwaitableResult[ClusterNode]:
        """Start one more node, with the body of the last `run`."""
        node = self._new_node()
        self.say(f"{node.name} comes")
        if self._body is not None:
            self._start_body(node, self._body)
        return AwaitableResult(node)

    def pause(self, node: int | ClusterNode, seconds: float | None = None) -> AwaitableResult[None]:
        """Stop a node's process, as SIGSTOP does, for some seconds or until `resume`."""
        return self._pause_node(node, seconds, threads=True)

    def hang(self, node: int | ClusterNode, seconds: float | None = None) -> AwaitableResult[None]:
        """Block a node's own code, for some seconds or until `resume`; its node thread continues."""
        return self._pause_node(node, seconds, threads=False)

    def resume(self, node: int | ClusterNode) -> AwaitableResult[None]:
        """End a `pause` or a `hang`."""
        found = self._find_node(node)
        if found.alive:
            self.say(f"{found.name} goes on")
            found.process.resume()
        return AwaitableResult(None)

    def cut(self, node: int | ClusterNode, seconds: float | None = None) -> AwaitableResult[None]:
        """Partition a node from the store, for some seconds or until `heal`, without an error at either end."""
        found = self._find_node(node)
        self.say(f"{found.name} is cut off{_duration_text(seconds)}")
        for source in found.connection_names:
            self._world.network.partition(source)
        self._call_later(seconds, partial(self._heal_node, found))
        return AwaitableResult(None)

    def heal(self, node: int | ClusterNode) -> AwaitableResult[None]:
        """End a `cut`."""
        self._heal_node(self._find_node(node))
        return AwaitableResult(None)

    def reset(self, node: int | ClusterNode) -> AwaitableResult[None]:
        """Reset a node's connections."""
        found = self._find_node(node)
        self.say(f"{found.name}'s connections are reset")
        for source in found.connection_names:
            self._world.network.reset(source)
        return AwaitableResult(None)

    def drain(self, node: int | ClusterNode, within: float = 120.0, reason: str = "") -> AwaitableResult[None]:
        """Announce that a node is to leave, as `rdzv drain` does."""
        found = self._find_node(node)
        if not found.handlers:
            raise RendezvousStateError(f"{found.name} has not connected yet: call `advance` before `drain`")
        inner = found.handlers[-1].node
        self.say(f"{found.name} is to leave within {within:g} s")
        draining = inner.loop.spawn(verbs.drain(inner, within=within, reason=reason))
        self._say_failed_action(draining)
        return AwaitableResult(None)

    def resize(self, min_nodes: int | None = None, max_nodes: int | None = None) -> AwaitableResult[None]:
        """Change the run's minimum or maximum of nodes, as `rdzv resize` does."""
        connected = [node for node in self.nodes if node.is_running and node.handlers]
        if not connected:
            raise RendezvousStateError("no node has connected yet: call `advance` before `resize`")
        inner = connected[0].handlers[-1].node
        numbers = ", ".join(f"{name} {number}" for name, number in (("min", min_nodes), ("max", max_nodes)) if number)
        self.say(f"the run is resized: {numbers}")
        self._say_failed_action(inner.loop.spawn(verbs.resize(inner, min_nodes=min_nodes, max_nodes=max_nodes)))
        return AwaitableResult(None)

    def stop_store(self, seconds: float) -> AwaitableResult[None]:
        """Kill the store, and restart it after some seconds, with the data on its disk if any."""
        if self._store.is_up:
            self._store.die()
            self._director.call_later(seconds, lambda: None if self._store.is_up else self._store.start())
        return AwaitableResult(None)

    def pause_store(self, seconds: float) -> AwaitableResult[None]:
        """Stop the store's process, as SIGSTOP does, for some seconds."""
        host = self._store.host
        if host is not None:
            self.say(f"the store stands still for {seconds:g} s")
            host.pause()
            self._director.call_later(seconds, host.resume)
        return AwaitableResult(None)

    def explore(
        self,
        body: Callable[[ClusterNode], Awaitable[object]] | None = None,
        *,
        seeds: Iterable[int] = range(100),
        faults: Sequence[str] = FAULTS,
        most: int = 3,
        during: float = 60.0,
        within: float = FINISH_WITHIN,
        check: Callable[[Cluster], object] | None = None,
    ) -> AwaitableResult[int]:
        """Run a body on a new cluster like this one, with random faults, for each seed.

        After the faults, all bodies must end. At the first failure, print the seed and the story, and raise
        ClusterError. Return the number of seeds.

        Args:
            body: By default the body of the last `run`.
            seeds: The seeds of the clusters.
            faults: The kinds of faults.
            most: The most faults per cluster.
            during: Virtual seconds in which the faults begin.
            within: Virtual seconds for the bodies to end, after the last fault.
            check: Called with each cluster at its end; an error that it raises is a failure.
        """
        chosen = body or self._body
        if chosen is None:
            raise RendezvousStateError("explore() has no body to run: give it one, or call run(body) before")
        count = 0
        for seed in seeds:
            count += 1
            with Cluster(self._count, seed=seed, **self._options, **self._given) as one:
                try:
                    one.run(chosen)
                    _inject_faults(one, random.Random(f"faults {seed}"), faults=faults, most=most, during=during)
                    one.finish(within)
                    if check is not None:
                        check(one)
                except ClusterError as error:
                    print(error)
                    raise
                except Exception as error:
                    told = ClusterError(f"seed {seed}: {error}", one.story)
                    print(told)
                    raise told from error
        return AwaitableResult(count)

    def _find_node(self, node: int | ClusterNode) -> ClusterNode:
        self._check_open()
        index = node if isinstance(node, int) else node.index
        if not 0 <= index < len(self.nodes):
            raise IndexError(f"there is no node {index}: there are {len(self.nodes)}, from 0")
        return self.nodes[index]

    def _check_open(self) -> None:
        if self._over:
            raise RendezvousStateError("this cluster has ended: use it inside its `with` block")

    def _new_node(self, index: int | None = None) -> ClusterNode:
        number = len(self.nodes) if index is None else index
        name = f"node-{number}"
        self._processes += 1
        rng = random.Random(self._rng.random())
        node = ClusterNode(self, number, Process(self._world, name, f"{name}.{self._processes}", rng=rng))
        if index is None:
            self.nodes.append(node)
        else:
            self.nodes[index] = node
        return node

    def record_join(self, info: RendezvousInfo) -> None:
        """Record that a node is in a round, and check that all members agree about it (promise R3)."""
        for known in reversed(self.rounds):
            if (known.run_id, known.number) == (info.run_id, info.round):
                break
        else:
            known = ClusterRound(info.run_id, info.round, info.world_size, info.bootstrap_address, self.now)
            self.rounds.append(known)
        agree = (known.world_size, known.bootstrap_address) == (info.world_size, info.bootstrap_address)
        if not agree or known.ranks.setdefault(info.rank, info.node_id) != info.node_id:
            self._world.timeline.problem = ClusterError(f"{info} does not agree with {known} (R3)", self.story)
        self.say(f"{info.node_id} is rank {info.rank} of {info.world_size} in round {info.round} of {info.run_id}")

    def _start_body(self, node: ClusterNode, body: Callable[[ClusterNode], Awaitable[object]]) -> None:
        node.start_body(body).add_done_callback(partial(self._on_body_end, node))

    def _exit_node_when_idle(self, node: ClusterNode, *, until: float) -> None:
        if self.now < until and not node.is_idle:
            self._director.call_later(EXIT_LOOKS_EVERY, partial(self._exit_node_when_idle, node, until=until))
        else:
            node.process.exit()

    def _on_body_end(self, node: ClusterNode, task: asyncio.Task[Any]) -> None:
        if not node.alive:
            return
        node.ended = True
        error = None if task.cancelled() else task.exception()
        match error:
            case None | RendezvousClosedError() | RendezvousGracefulExitError():
                self.say(f"{node.name} has come to its end{f': {error}' if error else ''}")
            case Exception() if isinstance(error, self._may_raise):
                self.say(f"{node.name} has ended with {error!r}")
                node.error = error
            case _:
                self.say(f"{node.name} has failed: {error!r}")
                others = _describe_nodes([other for other in self.nodes if other is not node])
                problem = ClusterError(
                    f"seed {self.seed}: {node.name} has failed: {error!r}{others and '; meanwhile'}{others}", self.story
                )
                problem.__cause__ = error
                self._world.timeline.problem = problem
        self._exit_node_when_idle(node, until=self.now + EXIT_WITHIN)

    def _pause_node(self, node: int | ClusterNode, seconds: float | None, *, threads: bool) -> AwaitableResult[None]:
        found = self._find_node(node)
        if found.alive:
            self.say(f"{found.name} {'stands still' if threads else 'hangs'}{_duration_text(seconds)}")
            found.process.pause(threads=threads)
            # Resume this node only, not a node that has replaced it meanwhile.
            self._call_later(seconds, lambda: self.nodes[found.index] is found and self.resume(found))
        return AwaitableResult(None)

    def _heal_node(self, node: ClusterNode) -> None:
        if node.process in self._dark:
            return
        self.say(f"{node.name} is connected again")
        for source in node.connection_names:
            self._world.network.heal(source)

    def _call_later(self, seconds: float | None, action: Callable[[], object]) -> None:
        if seconds is not None:
            self._director.call_later(seconds, action)

    def _say_failed_action(self, begun: Call[None] | Call[Resized]) -> None:
        def say_if_action_failed() -> None:
            try:
                begun.result()
            except Exception as error:  # noqa: BLE001  the story has the error
                self.say(f"in vain: {error}")
            except asyncio.CancelledError:
                pass

        begun.over.call_when_set(say_if_action_failed)


cluster: Final = Cluster  # the name that callers use


def _describe_nodes(nodes: Iterable[ClusterNode]) -> str:
    return "".join(f"\n  {node.describe()}" for node in nodes)


def _duration_text(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:.2f} s"


def _inject_faults(cluster: Cluster, rng: random.Random, *, faults: Sequence[str], most: int, during: float) -> None:
    """Play 1 to `most` random faults, which begin within `during` seconds; raise ValueError for an unknown fault."""
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    moments = sorted(rng.uniform(0.0, during) for _ in range(rng.randint(1, most)))
    now = over_at = 0.0
    back_at: list[_Later] = []
    for moment in moments:
        now = _advance_with_due_actions(cluster, now, moment, back_at)
        kind = rng.choice(list(faults))
        seconds = rng.choice((SHORT, MIDDLING, LONG)) * rng.uniform(0.5, 1.5)
        over_at = max(over_at, moment + seconds)
        is_running = [i for i, node in enumerate(cluster.nodes) if node.is_running and node.handlers]
        if kind == "join":
            cluster.join()
        elif kind == "stop_store":
            cluster.stop_store(min(seconds, MIDDLING))
        elif kind == "pause_store":
            cluster.pause_store(min(seconds, MIDDLING))
        elif is_running:
            node = rng.choice(is_running)
            match kind:
                case "kill":
                    cluster.kill(node)
                    back_at.append((moment + seconds, partial(cluster.restart, node)))
                case "drain":
                    cluster.drain(node, within=rng.choice((5.0, 30.0)))
                    back_at.append((moment + seconds, cluster.join))
                case "pause":
                    cluster.pause(node, seconds)
                case "hang":
                    cluster.hang(node, seconds)
                case "cut":
                    cluster.cut(node, seconds)
                case "reset":
                    cluster.reset(node)
                case "resize":
                    least, most = (int(cluster.settings[name]) for name in ("min_nodes", "max_nodes"))
                    cluster.resize(max_nodes=rng.randint(least, most + 2))
                    back_at.append((moment + seconds, partial(_restore_max_nodes, cluster, most)))
    _advance_with_due_actions(cluster, now, max([over_at, *(at for at, _ in back_at)]), back_at)


def _restore_max_nodes(cluster: Cluster, most: int) -> None:
    if any(node.is_running and node.handlers for node in cluster.nodes):
        cluster.resize(max_nodes=most)


def _advance_with_due_actions(cluster: Cluster, now: float, until: float, back_at: list[_Later]) -> float:
    back_at.sort(key=itemgetter(0))
    while back_at and back_at[0][0] <= until:
        at, action = back_at.pop(0)
        cluster.advance(max(at - now, 0.0))
        now = max(at, now)
        action()
    cluster.advance(max(until - now, 0.0))
    return max(until, now)
