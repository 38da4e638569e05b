"""What a rendezvous costs when all nodes call at the same moment, from 4 to 10,000 of them.

    python -m benchmarks.arrivals                                   # 4, 64, 256 and 1,024 nodes
    python -m benchmarks.arrivals --nodes 4096 10000 --runs 1

The nodes are spread over `--processes` processes, and each of them is a whole handler: it connects, arrives and waits
for its round. The time runs from the moment all are told to begin until the last of them has its rank. Then all of them
call again, which is the second rendezvous: they are connected, and known.

Requests, bytes and connections are the server's own counts; CPU is what the processes have used, which says more than
the time on a machine that is busy with other things. The server and the nodes are measured apart.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import rdzv
import store
from benchmarks import support
from benchmarks.support import ms, us

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rdzv.node.handler import Handler

PATIENCE = 600.0  # seconds for each step; far more than any of them takes


@dataclass(kw_only=True)
class Rendezvous:
    """What one of them cost; per node where not said otherwise.

    Attributes:
        nodes: How many took part.
        which: "first" or "again".
        seconds: From the word to begin until the last node has its rank.
        requests: To the server, whoever made them.
        bytes: In and out of the server.
        connections: To the server, at the end, of all nodes.
        server_cpu: Seconds.
        node_cpu: Seconds, of whatever ran in the nodes' processes.
        server_memory: Bytes, of the server's process at most until then, all in all.
    """

    nodes: int
    which: str
    seconds: float
    requests: float
    bytes: float
    connections: int
    server_cpu: float
    node_cpu: float
    server_memory: int


def our_nodes(pipe: Connection, url: str, names: list[str]) -> None:
    """Carry some nodes; at each word, have all of them meet, and tell what they got."""
    support.run(_our_nodes(pipe, url, names))


async def _our_nodes(pipe: Connection, url: str, names: list[str]) -> None:
    handlers: list[Handler] = []

    async def first(name: str) -> tuple[int, int, int]:
        handler = await rdzv.connect(url, node_id=name, is_host=False)
        handlers.append(handler)  # type: ignore[arg-type]
        return await again(handler)  # type: ignore[arg-type]

    async def again(handler: Handler) -> tuple[int, int, int]:
        info = await handler.next_rendezvous()
        return info.round, info.rank, info.world_size

    support.as_in_a_process_of_its_own()
    pipe.send("ready")
    await support.hear(pipe)
    results = await asyncio.gather(*(first(name) for name in names))
    while True:
        pipe.send((time.monotonic(), time.process_time(), results))
        await support.hear(pipe)
        results = await asyncio.gather(*(again(handler) for handler in handlers))


def measure(nodes: int, processes: int) -> list[Rendezvous]:
    """The first and the second rendezvous of so many nodes, all of which call at the same moment."""
    measured = []
    with support.served() as server, store.sync.connect(server.url, timeout=PATIENCE) as observer:
        url = f"{server.url}/arrivals?min_nodes={nodes}&join_timeout=3600"
        names = [[f"node-{number}" for number in share] for share in support.shares(nodes, processes)]
        with support.workers(*((our_nodes, url, some) for some in names)) as workers:
            for worker in workers:
                assert worker.hear(PATIENCE) == "ready"
            for number, which in enumerate(("first", "again")):
                used = sum(support.cpu_seconds(worker.process.pid) for worker in workers)
                before, server_used = observer.stats(), support.cpu_seconds(server.pid)
                began = time.monotonic()
                for worker in workers:
                    worker.pipe.send("meet")
                answers = [worker.hear(PATIENCE) for worker in workers]
                done_at = max(at for at, _, _ in answers)
                results = [result for _, _, some in answers for result in some]
                assert sorted(rank for _, rank, _ in results) == list(range(nodes)), "every rank once"
                assert {(round, size) for round, _, size in results} == {(number, nodes)}
                after = observer.stats()
                measured.append(
                    Rendezvous(
                        nodes=nodes,
                        which=which,
                        seconds=done_at - began,
                        requests=(after["requests"] - before["requests"]) / nodes,
                        bytes=bytes_between(after, before) / nodes,
                        connections=after["connections"] - 1,
                        server_cpu=(support.cpu_seconds(server.pid) - server_used) / nodes,
                        node_cpu=(sum(support.cpu_seconds(worker.process.pid) for worker in workers) - used) / nodes,
                        server_memory=support.peak_memory(server.pid),
                    )
                )
                time.sleep(0.5)
    return measured


def bytes_between(after: dict[str, Any], before: dict[str, Any]) -> float:
    """How many went in and out of the server between two looks at its figures."""
    return float(sum(after[name] - before[name] for name in ("bytes_in", "bytes_out")))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arrivals", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256, 1024])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="that carry the nodes")
    options = parser.parse_args()

    print(support.describe_machine())
    rows = []
    for nodes in options.nodes:
        runs = [measure(nodes, options.processes) for _ in range(options.runs)]
        for each in zip(*runs, strict=True):
            middle = {
                name: support.median([asdict(one)[name] for one in each]) for name in asdict(each[0]) if name != "which"
            }
            rows.append(
                (
                    nodes,
                    each[0].which,
                    ms(middle["seconds"]),
                    f"{middle['requests']:.1f}",
                    f"{middle['bytes']:.0f}",
                    f"{middle['connections']:.0f}",
                    us(middle["server_cpu"]),
                    us(middle["node_cpu"]),
                    f"{middle['server_memory'] / 1e6:.0f}",
                )
            )
            print(rows[-1], flush=True)
    header = ("nodes", "", "ms", "requests", "bytes", "connections", "server us", "node us", "server MB")
    support.table("All nodes at the same moment, medians; requests, bytes and CPU per node", header, rows)


if __name__ == "__main__":
    main()
