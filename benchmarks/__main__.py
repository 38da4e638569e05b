"""Run everything side by side with its peers: `python -m benchmarks [--quick] [--out DIR] [--nodes ...]`.

    (a) a rendezvous of N nodes, in both ways of arriving, the first and the second one; beside PyTorch's c10d
    (b) what a request costs, one call, and one change told to many; beside an echo, TCPStore and redis
    (c) what idle members cost
    (d) how soon a death is heard

It writes `results.json` and a figure for each section, fits how each cost grows with N, and checks what the README and
docs/benchmarks.md promise. It fails if a promise is not kept: those are ratios within this run, so that they hold on
any machine. Peers that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import arrivals, barrier, idle, load, regroup, support
from benchmarks.figures import Figure, draw, growth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NODES = (4, 64, 256, 1024)
TORCH_NODES_MOST = 128  # its nodes share one record, which all of them rewrite: more take minutes
GROWTH_MOST = 1.25  # the exponent that N log N comes out as between 4 and 10,000, and a little for noise
BYTES_GROWTH_MOST = 1.5  # bytes per node at most, times those at 64 nodes
FAN_OUT_MOST = 3.0  # times a bare broadcast
FASTER_THAN_C10D = 20.0  # at any number of nodes
TOLD_WITHIN = 1.0  # seconds from SIGKILL; 0.1 on a machine that is not busy


class Report:
    """What was measured, and which promises hold."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {"machine": support.describe_machine(), "left_out": []}
        self.checks: list[tuple[str, float, float, bool]] = []

    def check(self, what: str, value: float, *, most: float | None = None, least: float | None = None) -> None:
        """Compare a figure with its bound; a figure that could not be taken is no failure."""
        bound = most if most is not None else least
        assert bound is not None, "a promise has a bound"
        kept = math.isnan(value) or (value <= bound if most is not None else value >= bound)
        self.checks.append((what, value, bound, kept))
        limit = "at most" if most is not None else "at least"
        print(f"{'kept  ' if kept else 'BROKEN'} {what}: {value:.2f} ({limit} {bound:g})", flush=True)


def rendezvous(report: Report, nodes: list[int], runs: int, processes: int) -> dict[str, Figure]:
    """Section (a)."""
    rows: list[dict[str, Any]] = []
    theirs: list[tuple[int, float]] = []
    for count in nodes:
        for each in zip(*(arrivals.measure(count, processes) for _ in range(runs)), strict=True):
            row = {
                name: support.median([asdict(one)[name] for one in each]) for name in asdict(each[0]) if name != "which"
            }
            rows.append({**row, "which": each[0].which})
        parked = support.median([barrier.measure_ours(count, processes)[0] for _ in range(runs)])
        rows.append({"nodes": count, "which": "parked", "seconds": parked})
        if support.HAS_TORCH and count <= TORCH_NODES_MOST:
            theirs.append((count, barrier.measure_torch(count, processes, 120.0)))
        print(f"{count} nodes are measured", flush=True)
    report.results["rendezvous"] = rows
    report.results["c10d"] = [{"nodes": count, "seconds": seconds} for count, seconds in theirs]

    def points(which: str, name: str, *, times_nodes: bool = False) -> list[tuple[float, float]]:
        return [
            (row["nodes"], row[name] * (row["nodes"] if times_nodes else 1)) for row in rows if row["which"] == which
        ]

    for which in ("first", "again"):
        costs = points(which, "server_cpu", times_nodes=True)
        report.check(
            f"the server's processor in a rendezvous ({which}) grows with N to the power of",
            growth(costs[1:]),
            most=GROWTH_MOST,
        )
        of_64 = dict(points(which, "bytes")).get(64)
        if of_64 is not None:
            most = max(value for count, value in points(which, "bytes") if count >= 64)
            report.check(f"bytes per node ({which}), times those at 64 nodes", most / of_64, most=BYTES_GROWTH_MOST)
    of_parked = dict(points("parked", "seconds"))
    for count, seconds in theirs:
        report.check(
            f"c10d takes so many times as long, {count} nodes parked",
            seconds / of_parked[count],
            least=FASTER_THAN_C10D,
        )
    lines: dict[str, Sequence[tuple[float, float]]] = {
        "all at once": points("first", "seconds"),
        "again, at once": points("again", "seconds"),
        "parked": points("parked", "seconds"),
        **({"c10d, parked": theirs} if theirs else {}),
    }
    return {
        "rendezvous": Figure(title="Until every node has its rank", across="nodes", up="seconds", lines=lines),
        "rendezvous-cost": Figure(
            title="Processor time per node",
            across="nodes",
            up="seconds",
            lines={
                "server, first": points("first", "server_cpu"),
                "server, again": points("again", "server_cpu"),
                "node, first": points("first", "node_cpu"),
                "node, again": points("again", "node_cpu"),
            },
        ),
    }


def requests(report: Report, seconds: float, watchers: list[int]) -> dict[str, Figure]:
    """Section (b)."""
    costs = {
        who: {
            operation: load.measure(who, operation, count=64, processes=2, seconds=seconds)
            for operation in load.OPERATIONS
        }
        for who in load.peers()
    }
    report.results["requests"] = {
        who: {operation: {"server_cpu": cost, "per_second": rate} for operation, (cost, rate) in of.items()}
        for who, of in costs.items()
    }
    for operation in load.OPERATIONS:
        ratio = costs["rdzv"][operation][0] / costs["echo"][operation][0]
        report.results[f"{operation}_over_echo"] = ratio
        print(f"{operation}: {ratio:.2f} times a bare echo's processor", flush=True)
    fan_out = {
        who: [(count, load.measure_fan_out(who, count, times=30)) for count in watchers] for who in ("rdzv", "echo")
    }
    report.results["fan_out"] = fan_out
    (_, ours), (_, bare) = fan_out["rdzv"][-1], fan_out["echo"][-1]
    report.check(f"one change told to {watchers[-1]}, times a bare broadcast", ours / bare, most=FAN_OUT_MOST)
    return {
        "fan-out": Figure(
            title="The server's processor for one change",
            across="watchers",
            up="seconds",
            lines={"rdzv": fan_out["rdzv"], "bare broadcast": fan_out["echo"]},
        )
    }


def idling(report: Report, nodes: list[int], processes: int) -> dict[str, Figure]:
    """Section (c)."""
    rows = [idle.measure(count, processes) for count in nodes]
    report.results["idle"] = rows
    points = [(row["nodes"], row["cpu"]) for row in rows]
    report.check("an idle server's processor grows with N to the power of", growth(points), most=GROWTH_MOST)
    return {
        "idle": Figure(
            title="The server, for idle members", across="members", up="share of a core", lines={"rdzv": points}
        )
    }


def detection(report: Report, runs: int) -> dict[str, Figure]:
    """Section (d)."""
    told: list[float] = []
    for _ in range(runs):
        told += regroup.measure(8, 1.0, killed=1, kill_coordinator=False)[0]
    report.results["told"] = told
    report.check("seconds from SIGKILL until a survivor is told, median", support.median(told), most=TOLD_WITHIN)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few nodes and one run of each: a minute or two")
    parser.add_argument("--nodes", type=int, nargs="+", help="how many meet; up to 10000 on 2 cores")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="that carry the nodes")
    parser.add_argument("--only", nargs="+", choices=tuple("abcd"), default=list("abcd"), help="these sections")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="where results and figures go")
    options = parser.parse_args()
    nodes = options.nodes or ([4, 64, 128] if options.quick else list(NODES))
    runs = 1 if options.quick else options.runs
    report = Report()
    print(report.results["machine"], flush=True)
    for name, there in (("torch", support.HAS_TORCH), ("redis", load.HAS_REDIS)):
        if not there:
            report.results["left_out"].append(name)
            print(f"{name} is not installed, and left out")
    sections: dict[str, Callable[[], dict[str, Figure]]] = {
        "a": lambda: rendezvous(report, nodes, runs, options.processes),
        "b": lambda: requests(report, 1.0 if options.quick else 3.0, [100, 1000]),
        "c": lambda: idling(report, nodes, options.processes),
        "d": lambda: detection(report, runs),
    }
    figures: dict[str, Figure] = {}
    for letter in options.only:
        figures |= sections[letter]()
    options.out.mkdir(parents=True, exist_ok=True)
    report.results["checks"] = [
        {"what": what, "value": value, "bound": bound, "kept": kept} for what, value, bound, kept in report.checks
    ]
    (options.out / "results.json").write_text(json.dumps(report.results, indent=1) + "\n")
    for name, figure in figures.items():
        (options.out / f"{name}.svg").write_text(draw(figure))
    broken = [what for what, *_, kept in report.checks if not kept]
    print(f"{len(report.checks) - len(broken)} of {len(report.checks)} promises kept; {options.out}/results.json")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
