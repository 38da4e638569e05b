"""From the last node's arrival until every node has its rank: ours, and PyTorch's c10d rendezvous beside it.

    python -m benchmarks.barrier                                    # 4, 64 and 256 nodes
    python -m benchmarks.barrier --nodes 1024 4096 --runs 1         # simulated nodes: many to a process

All nodes but one are connected and parked, over `--processes` processes; the last, connected too, has a process of its
own. The time runs from just before its `next_rendezvous` to its latest return in any process. Every node's rank and
world size are checked. Parked nodes are notified of the progress, so bytes also depend on the time of arriving. Bytes
are those in and out of our server from before the first connection until the last node is done, keep-alives included,
per node. Connections are those open at our server once all nodes have their rank, per node: one until the round's store
is used.

PyTorch's nodes sleep a second between polls and rewrite one record that holds all of them, so this takes a while.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING, Any

import anyio

import rdzv
import store
from benchmarks import pytorch, support
from benchmarks.support import Worker, ms, ratio
from rdzv.node.handler import Handler

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from anyio.abc import TaskStatus

PATIENCE = 300.0  # seconds for each step of ours, far more than needed
AT_ONCE = 16  # nodes of one process that arrive together
NOT_WAITING = "not waiting for anything"
SETTLE = (0.5, 1.5)  # seconds between the last two arrivals; at random, since PyTorch polls each second
Result = tuple[int, int, float]  # rank, world size, when

# ------------------------------------------------------------------------------------------------ one process's nodes


def our_nodes(pipe: Connection, url: str, names: list[str]) -> None:
    """Run some of our nodes: connect, wait for the word, arrive, report the results."""
    support.run(_our_nodes(pipe, url, names))


async def _our_nodes(pipe: Connection, url: str, names: list[str]) -> None:
    handlers: list[Handler] = []
    results: list[Result] = []

    async def hold(name: str, *, task_status: TaskStatus[None]) -> None:
        async with rdzv.connect(url, node_id=name, is_host=False) as handler:
            assert isinstance(handler, Handler)
            handlers.append(handler)
            task_status.started()
            await anyio.sleep_forever()

    async def join(handler: Handler) -> None:
        _, rank, world_size = await handler.next_rendezvous()
        results.append((rank, world_size, time.monotonic()))

    async with anyio.create_task_group() as group:
        for name in names:
            await group.start(hold, name)
        pipe.send("connected")
        await support.hear(pipe)
        began = time.monotonic()
        for start in range(0, len(handlers), AT_ONCE):
            some = handlers[start : start + AT_ONCE]
            for handler in some:
                group.start_soon(join, handler)
            await _until(lambda some=some: all(one.reason != NOT_WAITING for one in some) or bool(results))
        support.as_in_a_process_of_its_own()
        pipe.send("parked")
        await _until(lambda: len(results) == len(names))
        pipe.send((began, results))
        await anyio.sleep_forever()


async def _until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110  the interval is no part of the measurement
        await anyio.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------- one run


def measure_ours(size: int, processes: int) -> tuple[float, float, float]:
    """Return seconds from the last arrival until all are done, and bytes and connections per node."""
    with support.serving() as server, store.sync.connect(server) as observer:
        url = f"{server}/barrier?min_nodes={size}&join_timeout=3600"
        names = [[f"node-{number}" for number in share] for share in support.shares(size - 1, processes)]
        before = _bytes(observer)
        calls = [(our_nodes, url, some) for some in [*names, ["the-last"]]]
        with support.workers(*calls) as all_workers:
            last = park(all_workers, PATIENCE)
            time.sleep(random.uniform(*SETTLE))
            seconds, _ = complete(all_workers, last, size, PATIENCE)
            connections = int(observer.stats()["connections"]) - 1  # without the observer's
            return seconds, (_bytes(observer) - before) / size, connections / size


def measure_torch(size: int, processes: int, patience: float) -> float:
    """Return the same seconds for PyTorch."""
    with pytorch.Round("c10d", size, processes, patience, parked=True) as their_round:
        return their_round.seconds


def park(all_workers: list[Worker], patience: float) -> Worker:
    """Have all nodes connect, and all but the last arrive; return the last one's process."""
    for worker in all_workers:
        assert worker.hear(patience) == "connected"
    *parked, last = all_workers
    for worker in parked:
        worker.pipe.send("arrive")
    for worker in parked:
        assert worker.hear(patience) == "parked"
    return last


def complete(all_workers: list[Worker], last: Worker, size: int, patience: float) -> tuple[float, float]:
    """Let the last node arrive, and check all results; return the seconds until all were done, and the time."""
    assert last.ask("arrive", patience) == "parked"
    answers = [worker.hear(patience) for worker in all_workers]
    results: list[Result] = [result for _, some in answers for result in some]
    assert sorted(rank for rank, _, _ in results) == list(range(size)), "every rank once"
    assert {world_size for _, world_size, _ in results} == {size}
    done_at = max(at for _, _, at in results)
    return done_at - float(answers[-1][0]), done_at


def _bytes(observer: store.sync.Client) -> int:
    figures = observer.stats()
    return int(figures["bytes_in"]) + int(figures["bytes_out"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.barrier", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4, help="that carry the parked nodes")
    parser.add_argument("--torch-nodes-max", type=int, default=128, help="more than these are for ours alone")
    parser.add_argument("--torch-runs", type=int, default=3)
    parser.add_argument("--torch-timeout", type=float, default=60.0, help="seconds for each step of a run")
    options = parser.parse_args()

    print(support.describe_machine())
    rows = []
    for size in options.nodes:
        ours, sizes, connected, theirs = [], [], [], []
        for number in range(options.runs):
            seconds, per_node, connections = measure_ours(size, options.processes)
            ours.append(seconds)
            print(
                f"{size} nodes: {ms(seconds)} ms, {per_node:.0f} bytes and {connections:.2f} connections per node",
                flush=True,
            )
            sizes.append(per_node)
            connected.append(connections)
            if support.HAS_TORCH and size <= options.torch_nodes_max and number < options.torch_runs:
                try:
                    theirs.append(measure_torch(size, options.processes, options.torch_timeout))
                    print(f"{size} nodes of PyTorch: {ms(theirs[-1])} ms", flush=True)
                except TimeoutError:
                    print(f"PyTorch, {size} nodes: not done within {options.torch_timeout:g} s")
        our, their = support.median(ours), support.median(theirs)
        per_node = support.median(sizes)
        times = (ms(our), ms(min(ours)), ms(max(ours)), ms(their), ratio(their, our))
        rows.append((size, *times, f"{per_node:.0f}", f"{support.median(connected):.2f}"))
    if not support.HAS_TORCH:
        print("PyTorch is not installed: ours alone")
    header = ("nodes", "ours, ms", "best", "worst", "torch c10d, ms", "ratio", "our bytes per node", "connections")
    support.table("From the last arrival to everyone done, medians", header, rows)


if __name__ == "__main__":
    main()
