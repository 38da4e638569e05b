"""The cost of a rendezvous, from 4 nodes to 10,000, in both ways of arriving.

    python -m benchmarks.arrivals                                   # 4, 64, 256 and 1,024 nodes
    python -m benchmarks.arrivals --nodes 4096 10000 --runs 1 --ways parked

At once: all nodes begin at the same moment; each connects, arrives and waits for its round, and the time ends when the
last has its rank. Parked: all but one have arrived and wait, and the time begins with the call of the last, which is
connected. Then all call again in the same way, connected and known: the second rendezvous.

The nodes are spread over `--processes` processes, and each is a whole handler. The first and the last node have
processes of their own: the first is the coordinator, begins a moment before the others, and its process shows a
coordinator's cost.

Requests, bytes and connections are counted by the server from before the first connection; pushed changes are counted
by their receivers. CPU is the time used by the processes, which says more than seconds on a busy machine. Server and
nodes are measured separately.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

import rdzv
import store
from benchmarks import support
from benchmarks.support import ms, us
from store.client.client import Watch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rdzv.node.handler import Handler
    from store import Event

PATIENCE = 600.0  # seconds for each step, far more than needed
PARKING = 16  # nodes of one process that connect and arrive together
NOT_WAITING = "not waiting for anything"
SETTLE = (0.3, 0.8)  # seconds between the last but one arrival and the last
WAYS = ("at once", "parked")
FIRST, LAST = "node-first", "node-last"


@dataclass(kw_only=True)
class Rendezvous:
    """The cost of one rendezvous; per node where not said otherwise.

    Attributes:
        nodes: The number of nodes.
        way: "at once" or "parked".
        which: "first" or "again".
        seconds: From the begin, or the last node's call, until the last node has its rank.
        requests: To the server.
        pushed: Messages with changes that nodes received without a request.
        bytes: In and out of the server.
        connections: To the server, at the end, of all nodes.
        server_cpu: Seconds.
        coordinator_cpu: Seconds of the coordinator's process in total; not a number if another node coordinated.
        node_cpu: Seconds, of the nodes' processes.
        server_memory: Peak bytes of the server's process until then.
    """

    nodes: int
    way: str
    which: str
    seconds: float
    requests: float
    pushed: float
    bytes: float
    connections: int
    server_cpu: float
    coordinator_cpu: float
    node_cpu: float
    server_memory: int


class Nodes:
    """Some nodes that share a process."""

    def __init__(self, pipe: Connection, url: str, names: list[str]) -> None:
        self._pipe = pipe
        self._url = url
        self._names = names
        self._handlers: dict[str, Handler] = {}
        self._pushed = 0

    async def serve(self) -> None:
        """Obey "connect", "park" and then "meet", or "meet" at once; report the results of all nodes."""
        await self._warm_up()
        self._count_what_is_pushed()
        support.as_in_a_process_of_its_own()
        self._pipe.send("ready")
        parked: list[asyncio.Task[tuple[int, int, int]]] = []
        while True:
            match await support.hear(self._pipe):
                case "connect":
                    await asyncio.gather(*(self._connect(name) for name in self._names if name not in self._handlers))
                    self._pipe.send("connected")
                case "park":
                    parked = await self._park()
                    self._pipe.send("parked")
                case "meet":
                    began = time.monotonic()
                    results = await asyncio.gather(*(parked or map(self._meet, self._names)))
                    parked = []
                    self._pipe.send((began, time.monotonic(), results, self._pushed))
                case "coordinates":
                    (handler,) = self._handlers.values()
                    self._pipe.send((await handler.status()).coordinator == handler.node_id)

    async def _warm_up(self) -> None:
        """Meet alone once, as the first calls of a process are slow and no part of a rendezvous."""
        server, _, _ = self._url.partition("?")
        async with rdzv.connect(
            f"{server}-{self._names[0]}?min_nodes=1&max_nodes=1", node_id=self._names[0], is_host=False
        ) as handler:
            await handler.next_rendezvous()

    async def _connect(self, name: str) -> Handler:
        handler = await rdzv.connect(self._url, node_id=name, is_host=False)
        self._handlers[name] = handler
        return handler

    async def _meet(self, name: str) -> tuple[int, int, int]:
        handler = self._handlers.get(name) or await self._connect(name)
        info = await handler.next_rendezvous()
        return info.round, info.rank, info.world_size

    async def _park(self) -> list[asyncio.Task[tuple[int, int, int]]]:
        """Let all call, a few at a time; return once each of them waits."""
        tasks: list[asyncio.Task[tuple[int, int, int]]] = []
        for start in range(0, len(self._names), PARKING):
            some = self._names[start : start + PARKING]
            await asyncio.gather(*(self._connect(name) for name in some if name not in self._handlers))
            tasks += [asyncio.create_task(self._meet(name)) for name in some]
            while any(self._handlers[name].reason == NOT_WAITING for name in some):
                assert not any(task.done() for task in tasks), "nobody has a round before the last has come"
                await anyio.sleep(0.01)
        support.as_in_a_process_of_its_own()
        return tasks

    def _count_what_is_pushed(self) -> None:
        deliver = Watch.deliver

        def counted(watch: Watch, events: tuple[Event, ...]) -> None:
            self._pushed += 1
            deliver(watch, events)

        Watch.deliver = counted  # type: ignore[method-assign,assignment]


def our_nodes(pipe: Connection, url: str, names: list[str]) -> None:
    """Run some nodes; at each word, have all of them meet, and report the results."""
    support.run(Nodes(pipe, url, names).serve())


def start(url: str, nodes: int, processes: int) -> list[tuple[Any, ...]]:
    """Return the calls of each process: the first node alone, the last alone, the others spread over the rest."""
    shares = support.shares(nodes - 2, processes)
    names = [[FIRST], *([f"node-{number}" for number in share] for share in shares), [LAST]]
    return [(our_nodes, url, some) for some in names]


def meet(workers: list[support.Worker], *, parked: bool) -> tuple[float, list[tuple[int, int, int]], int]:
    """Have all meet; return the seconds, the results of the nodes, and the pushes so far."""
    first, *others, last = workers
    if parked:
        last.ask("connect", PATIENCE)
        first.ask("park", PATIENCE)
        for worker in others:
            worker.pipe.send("park")
        support.hear_all(others, PATIENCE)
        time.sleep(random.uniform(*SETTLE))
    began = time.monotonic()
    for worker in workers:  # the parked ones only report
        worker.pipe.send("meet")
    answers = support.hear_all(workers, PATIENCE)
    if parked:
        began = answers[-1][0]
    done_at = max(at for _, at, _, _ in answers)
    results = [result for _, _, some, _ in answers for result in some]
    return done_at - began, results, sum(pushed for *_, pushed in answers)


def measure(nodes: int, processes: int, way: str = "at once") -> list[Rendezvous]:
    """Measure the first and the second rendezvous of `nodes` nodes."""
    measured = []
    with support.served() as server, store.sync.connect(server.url, timeout=PATIENCE) as observer:
        url = f"{server.url}/arrivals?min_nodes={nodes}&join_timeout=3600"
        with support.workers(*start(url, nodes, processes), fresh=True) as workers:
            support.hear_all(workers, PATIENCE)
            pushed_before = 0
            for number, which in enumerate(("first", "again")):
                used = [support.cpu_seconds(worker.process.pid) for worker in workers]
                before, server_used = observer.stats(), support.cpu_seconds(server.pid)
                seconds, results, pushed = meet(workers, parked=way == "parked")
                used = [
                    support.cpu_seconds(worker.process.pid) - then for worker, then in zip(workers, used, strict=True)
                ]
                server_used = support.cpu_seconds(server.pid) - server_used
                after = observer.stats()
                assert sorted(rank for _, rank, _ in results) == list(range(nodes)), "every rank once"
                assert {(round, size) for round, _, size in results} == {(number, nodes)}
                coordinates = workers[0].ask("coordinates", PATIENCE)
                measured.append(
                    Rendezvous(
                        nodes=nodes,
                        way=way,
                        which=which,
                        seconds=seconds,
                        requests=(after["requests"] - before["requests"]) / nodes,
                        pushed=(pushed - pushed_before) / nodes,
                        bytes=bytes_between(after, before) / nodes,
                        connections=after["connections"] - 1,
                        server_cpu=server_used / nodes,
                        coordinator_cpu=used[0] if coordinates else math.nan,
                        node_cpu=sum(used) / nodes,
                        server_memory=support.peak_memory(server.pid),
                    )
                )
                pushed_before = pushed
                time.sleep(0.5)
    return measured


def bytes_between(after: dict[str, Any], before: dict[str, Any]) -> float:
    """Return the bytes in and out of the server between two readings."""
    return float(sum(after[name] - before[name] for name in ("bytes_in", "bytes_out")))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arrivals", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256, 1024])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="that carry most of the nodes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()

    print(support.describe_machine())
    rows = []
    for nodes, way in itertools.product(options.nodes, options.ways):
        runs = [measure(nodes, options.processes, way) for _ in range(options.runs)]
        for each in zip(*runs, strict=True):

            def middle(name: str, each: tuple[Rendezvous, ...] = each) -> float:
                return support.median([getattr(one, name) for one in each])

            rows.append(
                (
                    *(nodes, way, each[0].which, ms(middle("seconds"))),
                    *(f"{middle('requests'):.1f}", f"{middle('pushed'):.1f}", f"{middle('bytes'):.0f}"),
                    *(f"{middle('connections'):.0f}", us(middle("server_cpu")), us(middle("node_cpu"))),
                    *(ms(middle("coordinator_cpu")), f"{middle('server_memory') / 1e6:.0f}"),
                )
            )
            print(rows[-1], flush=True)
    costs = ("requests", "pushed", "bytes", "connections", "server us", "node us", "coordinator ms", "server MB")
    support.table("Medians; requests, bytes and CPU per node", ("nodes", "", "", "ms", *costs), rows)


if __name__ == "__main__":
    main()
