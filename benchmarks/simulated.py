"""Rendezvous of more nodes than one machine can carry, each on a machine of its own: simulated, in virtual time.

    python -m benchmarks.simulated                                  # 100 and 1,000 nodes
    python -m benchmarks.simulated --nodes 10000 30000

Handlers, coordinator, clients and server are the real ones, over a network in memory (`rdzv.testing`): each node has
loops and a clock of its own, and a message takes 0.5 to 2 ms. All nodes call at the same moment, and again five seconds
later.

The machines are infinitely fast; only waiting takes time. So the seconds are the cost of the protocol: round trips and
timers. They would show a lost term, a repeated request, or an election with many candidates. `benchmarks.arrivals` adds
the cost of processors; CPU and memory are those of this process, with the store and all nodes.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from benchmarks import support
from benchmarks.support import ms
from rdzv.config.settings import parse
from rdzv.testing.machines import NODE_THREAD, Process, StoreHost, World, make_client, make_node_handler
from rdzv.testing.timeline import START

if TYPE_CHECKING:
    from rdzv.node.handler import Handler

AGAIN_AFTER = 5.0  # seconds of virtual time
LOOK_EVERY = 0.1  # seconds of virtual time


@dataclass(kw_only=True)
class Simulated:
    """The cost of one rendezvous of all nodes.

    Attributes:
        nodes: The number of nodes.
        which: "first" or "again".
        seconds: Of virtual time, from the begin until the last node has its rank.
        requests: To the server, per node.
        term: The coordinator's term; the same for both, unless one has lost the role.
        cpu: Seconds of this process, per node.
        memory: Peak bytes of this process until then.
    """

    nodes: int
    which: str
    seconds: float
    requests: float
    term: int
    cpu: float
    memory: int


def measure(nodes: int, *, seed: int = 1) -> list[Simulated]:
    """Measure the first and the second rendezvous of `nodes` nodes, which all call at the same moment.

    Raises:
        TimeoutError: They have not met within five seconds of virtual time.
    """
    world = World(seed, latency=(0.0005, 0.002))
    machine = StoreHost(world, rng=random.Random(seed), durable=False)
    machine.start()
    handlers = [_handler(world, f"node-{number}", nodes) for number in range(nodes)]
    results: list[list[tuple[float, int, int]]] = [[], []]

    async def node(process: Process, handler: Handler) -> None:
        async with handler:
            for number, some in enumerate(results):
                await anyio.sleep(max(START + number * AGAIN_AFTER - world.now, 0.0))
                info = await handler.next_rendezvous()
                some.append((world.now, info.rank, info.world_size))
            await process.host.create_future()  # stay until the simulation ends

    tasks = [process.host.start_task(node(process, handler), name=process.name) for process, handler in handlers]
    measured = []
    try:
        for number, (which, some) in enumerate(zip(("first", "again"), results, strict=True)):
            began, used = START + number * AGAIN_AFTER, time.process_time()
            world.timeline.run_until_time(began)
            assert machine.server is not None, "nobody ends it"
            before = machine.server.figures()["requests"]
            while len(some) < nodes:
                for task in tasks:
                    if task.done():
                        task.result()  # raises: none ends before the simulation
                if world.now >= began + AGAIN_AFTER:
                    raise TimeoutError(f"{len(some)} of {nodes} nodes have their rank after {AGAIN_AFTER:g} s")
                world.timeline.run_until_time(world.now + LOOK_EVERY)
            assert sorted(rank for _, rank, _ in some) == list(range(nodes)), "every rank once"
            assert {size for _, _, size in some} == {nodes}
            (term,) = {one.node.membership.round.term for _, one in handlers if one.node.membership is not None}
            measured.append(
                Simulated(
                    nodes=nodes,
                    which=which,
                    seconds=max(at for at, _, _ in some) - began,
                    requests=(machine.server.figures()["requests"] - before) / nodes,
                    term=term,
                    cpu=(time.process_time() - used) / nodes,
                    memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                )
            )
    finally:
        world.timeline.end_processes()
        machine.close()
    return measured


def _handler(world: World, name: str, nodes: int) -> tuple[Process, Handler]:
    """Return a node's process, and its unconnected handler."""
    process = Process(world, name, name, rng=random.Random(name))
    settings = parse(f"tcp://store/simulated?min_nodes={nodes}", {"node_id": name, "address": name}, {})
    handler = make_node_handler(
        process,
        settings,
        open_store=lambda: make_client(process, thread=NODE_THREAD, connect_timeout=settings.join_timeout),
        open_shared_store=lambda: make_client(process),
    )
    return process, handler


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(support.describe_machine())
    gc.disable()  # nodes must not pay for collections of the others' objects
    rows = []
    for nodes in options.nodes:
        for one in measure(nodes, seed=options.seed):
            rows.append(
                (
                    *(nodes, one.which, ms(one.seconds), f"{one.requests:.2f}", one.term),
                    *(ms(one.cpu), f"{one.memory / 1e6:.0f}"),
                )
            )
            print(rows[-1], flush=True)
        gc.collect()
    header = ("nodes", "", "virtual ms", "requests", "term", "CPU ms", "MB in all")
    support.table("All nodes at the same moment, each on a machine of its own; requests and CPU per node", header, rows)


if __name__ == "__main__":
    main()
