"""The cost of idle members: the server's processor time and bytes per second for members of a round.

    python -m benchmarks.idle --nodes 64 256 1024

Each renews its lease; nothing else happens. The figures are of ten seconds, five seconds after all are in the round.
"""

from __future__ import annotations

import argparse
import time

import store
from benchmarks import arrivals, pytorch, support

SETTLE = 5.0  # seconds until the round's own traffic is over


def measure(nodes: int, processes: int, *, seconds: float = 10.0) -> dict[str, float]:
    """Return the cost per second of all members."""
    with support.served() as server, store.sync.connect(server.url, timeout=600) as observer:
        url = f"{server.url}/idle?min_nodes={nodes}&join_timeout=3600"
        with support.workers(*arrivals.start(url, nodes, processes)) as workers:
            for worker in workers:
                assert worker.hear(arrivals.PATIENCE) == "ready"
            arrivals.meet(workers, parked=False)
            time.sleep(SETTLE)
            before, used, began = observer.stats(), support.cpu_seconds(server.pid), time.monotonic()
            time.sleep(seconds)
            after, used = observer.stats(), support.cpu_seconds(server.pid) - used
            took = time.monotonic() - began
            return {
                "nodes": nodes,
                "cpu": used / took,
                "bytes": arrivals.bytes_between(after, before) / took,
                "requests": (after["requests"] - before["requests"]) / took,
                "memory": support.peak_memory(server.pid),
            }


def measure_pytorch(kind: str, nodes: int, processes: int, *, seconds: float = 10.0) -> dict[str, float]:
    """Return the cost of PyTorch's nodes, whose agents poll once a second; bytes are those of their record."""
    with pytorch.Round(kind, nodes, processes, 120.0, parked=False) as their_round:
        their_round.watch()
        time.sleep(SETTLE)
        sent, used, began = (their_round.count_bytes(), support.cpu_seconds(their_round.server_pid), time.monotonic())
        time.sleep(seconds)
        used, sent = support.cpu_seconds(their_round.server_pid) - used, their_round.count_bytes() - sent
        took = time.monotonic() - began
        return {"nodes": nodes, "cpu": used / took, "bytes": sent / took}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    print(support.describe_machine())
    rows = []
    for nodes in options.nodes:
        found = measure(nodes, options.processes)
        rows.append(
            (
                nodes,
                f"{found['cpu'] * 100:.2f}",
                f"{found['bytes']:.0f}",
                f"{found['requests']:.0f}",
                f"{found['memory'] / 1e6:.0f}",
            )
        )
    header = ("members", "% of a core", "bytes/s", "requests/s", "server MB")
    support.table("The server, for members that do nothing", header, rows)


if __name__ == "__main__":
    main()
