"""From SIGKILL until each survivor is notified, and until the next round; real processes, one per node.

    python -m benchmarks.regroup
    python -m benchmarks.regroup --nodes 64 --killed 20      twenty at once, the coordinator among them

Before a killed process counts as dead the store waits for its return: for `gone_ttl`, or, if many seem to die at once,
for `disconnect_ttl`. The tables show the whole time, including that. The victim is a plain member, or the coordinator.
There is no peer: PyTorch's c10d rendezvous drops a dead node after 15 s by default, and notifies no other.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import rdzv
from benchmarks import support
from benchmarks.support import ms

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATIENCE = 60.0


def node(pipe: Connection, url: str, name: str) -> None:
    """Meet; report the loss of a member; meet again, and report that."""

    async def main() -> None:
        async with rdzv.connect(url, node_id=name, is_host=False) as handler, handler.changes() as changes:
            await handler.next_rendezvous()
            pipe.send((await handler.status()).coordinator)
            async for change in changes:
                if isinstance(change, rdzv.NodesLost):
                    break
            told = time.monotonic()
            info = await handler.next_rendezvous()
            pipe.send((told, time.monotonic(), info.rank, info.world_size))
            await support.hear(pipe)

    support.run(main())


def measure(
    size: int, disconnect_ttl: float, *, killed: int, kill_coordinator: bool
) -> tuple[list[float], list[float]]:
    """Return, per survivor, seconds from the kill until it was notified, and until its next round."""
    names = [f"node-{number}" for number in range(size)]
    with support.serving() as server:
        url = f"{server}/regroup?min_nodes={size - killed}&max_nodes={size}&disconnect_ttl={disconnect_ttl}"
        with support.workers(*((node, url, name) for name in names)) as nodes:
            coordinator = [worker.hear(PATIENCE) for worker in nodes][-1]
            time.sleep(0.5)
            plain = [name for name in names if name != coordinator]
            victims = [coordinator, *plain[: killed - 1]] if kill_coordinator else plain[:killed]
            for name in victims:
                nodes[names.index(name)].process.kill()
            survivors = [worker for name, worker in zip(names, nodes, strict=True) if name not in victims]
            last_killed = time.monotonic()
            answers = [worker.hear(PATIENCE) for worker in survivors]
    assert sorted(rank for _, _, rank, _ in answers) == list(range(size - killed)), "one new round, of all who are left"
    assert {world_size for *_, world_size in answers} == {size - killed}
    return ([told - last_killed for told, *_ in answers], [done - last_killed for _, done, *_ in answers])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regroup", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--killed", type=int, default=1, help="how many at once")
    parser.add_argument("--disconnect-ttl", type=float, default=1.0)
    options = parser.parse_args()

    print(support.describe_machine())
    rows = []
    for size in options.nodes:
        for kill_coordinator in (False, True):
            told: list[float] = []
            done: list[float] = []
            for _ in range(options.runs):
                some_told, some_done = measure(
                    size, options.disconnect_ttl, killed=options.killed, kill_coordinator=kill_coordinator
                )
                told += some_told
                done += some_done
            victim = "coordinator" if kill_coordinator else "member"
            rows.append((size, victim, *map(ms, (support.median(told), max(told), support.median(done), max(done)))))
    header = ("nodes", "killed", "told, ms", "worst", "next round, ms", "worst")
    support.table(
        f"From SIGKILL, with gone_ttl at 0.1 s and disconnect_ttl at {options.disconnect_ttl:g} s; medians",
        header,
        rows,
    )


if __name__ == "__main__":
    main()
