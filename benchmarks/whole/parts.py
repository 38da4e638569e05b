"""The parts of the whole run, each a list of steps: a step is one measurement, and gives rows.

    python -m benchmarks.whole.parts NAME [--quick] [--seconds 60] [--nodes ...]

runs one part, and prints each row as JSON on a line of its own, behind the word ROW. The steps come in order of
importance: every size once, before any a second time. A step begins only if its last duration fits into the rest of the
part's time. A failed step is printed, and the others continue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import arrivals, calls, idle, load, pytorch, regroup, support, throughput, torch_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from benchmarks.whole.results import Row

NODES = (4, 64, 256, 1024, 4096, 10_000)
QUICK_NODES = (4, 16, 64, 128)
PEER_NODES = (4, 64, 128, 256)  # its nodes rewrite one shared record: more take minutes
PEER_PATIENCE = 60.0  # seconds per step of their round
STEP_MOST = 150  # seconds per step; the longest takes 30 on a quiet machine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The amount to measure."""

    quick: bool = False
    nodes: tuple[int, ...] = NODES
    processes: int = 4


@dataclass(frozen=True)
class Step:
    """One measurement; the same name means a repetition."""

    name: str
    measure: Callable[[], list[Row]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Measurements that belong together.

    Attributes:
        section: (a) rendezvous, (b) calls, (c) idle members, (d) detection of a death.
        says: The description.
        seconds: Its share of a whole run of 25 minutes.
        steps: The steps, in order.
        lacks: Why it cannot be measured here; else empty.
        torch: True if PyTorch takes part.
    """

    section: str
    says: str
    seconds: float
    steps: Callable[[Plan], Iterator[Step]]
    lacks: Callable[[], str] = lambda: ""
    torch: bool = True


def _rendezvous(plan: Plan) -> Iterator[Step]:
    def measure(nodes: int, way: str, run: int) -> list[Row]:
        return [{"who": "rdzv", "run": run, **asdict(one)} for one in arrivals.measure(nodes, plan.processes, way)]

    for run in range(1 if plan.quick else 5):
        for nodes in plan.nodes:
            if run < _runs(nodes):
                for way in arrivals.WAYS:
                    yield Step(f"{nodes} nodes, {way}", partial(measure, nodes, way, run))


def _runs(nodes: int) -> int:
    """Return the number of runs of a size: small ones vary more, and cost less."""
    return 5 if nodes <= 256 else 3 if nodes <= 1024 else 2


def _pytorch_meets(kind: str, nodes: int, processes: int, way: str) -> dict[str, float]:
    figures: dict[str, float] = dict.fromkeys(("seconds", "bytes", "server_cpu"), math.nan)
    try:
        with pytorch.Round(kind, nodes, processes, PEER_PATIENCE, parked=way == "parked") as one:
            figures = {"seconds": one.seconds, "bytes": one.bytes, "server_cpu": one.server_cpu}
    except TimeoutError as error:  # PyTorch's rendezvous does not always complete: no failure of ours
        print(f"not done: {error}", flush=True)
    return figures


def _pytorch_removes(kind: str) -> float:
    with pytorch.Round(kind, 4, 3, PEER_PATIENCE, parked=False) as one:
        one.watch()
        time.sleep(1.0)
        return one.lose_one()


def _pytorch(kind: str, plan: Plan) -> Iterator[Step]:
    def measure(nodes: int, way: str, run: int) -> list[Row]:
        figures = _pytorch_meets(kind, nodes, plan.processes, way)
        return [{"who": kind, "nodes": nodes, "way": way, "which": "first", "run": run, **figures}]

    for run in range(1 if plan.quick else 3):
        for nodes in PEER_NODES[: 2 if plan.quick else None]:
            for way in ("parked", "at once"):
                yield Step(f"{nodes} nodes, {way}", partial(measure, nodes, way, run))


def _requests(plan: Plan) -> Iterator[Step]:
    def measure(who: str, run: int) -> list[Row]:
        found = load.measure(who, count=64, processes=2, seconds=0.5 if plan.quick else 1.5)
        return [
            {"who": who, "operation": operation, "run": run, "server_cpu": cost, "per_second": rate}
            for operation, (cost, rate) in found.items()
        ]

    for run in range(1 if plan.quick else 3):
        for who in load.peers():
            yield Step(f"requests of {who}", partial(measure, who, run))


def _calls(plan: Plan) -> Iterator[Step]:
    def measure(run: int) -> list[Row]:
        if hasattr(os, "sched_setaffinity"):  # on several cores, waking one dominates a call
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before any process is forked
        found = calls.measure(10 if plan.quick else 40, 100)
        return [
            {"who": who, "operation": operation, "run": run, "seconds": seconds}
            for (who, operation), seconds in found.items()
        ]

    for run in range(1 if plan.quick else 3):
        yield Step("all calls", partial(measure, run))


def _fan_out(plan: Plan) -> Iterator[Step]:
    def cost(who: str, watchers: int, run: int) -> list[Row]:
        seconds = load.measure_fan_out(who, watchers, times=30)
        return [{"who": who, "watchers": watchers, "run": run, "server_cpu": seconds}]

    def told(watchers: int, run: int) -> list[Row]:
        seconds = support.median(throughput.measure_fan_out(watchers, 2, puts=30))
        return [{"who": "rdzv", "watchers": watchers, "run": run, "seconds": seconds}]

    for run in range(1 if plan.quick else 3):
        for watchers in (1, 10, 100, 1000):
            for who in ("rdzv", "echo"):
                yield Step(f"{watchers} of {who}", partial(cost, who, watchers, run))
            yield Step(f"{watchers}, until the last has it", partial(told, watchers, run))


def _throughput(plan: Plan) -> Iterator[Step]:
    def measure(clients: int, run: int) -> list[Row]:
        rate = throughput.measure_puts(clients, 256, 0.5 if plan.quick else 2.0)
        return [{"who": "rdzv", "clients": clients, "callers": 256, "run": run, "per_second": rate}]

    for run in range(1 if plan.quick else 3):
        for clients in (1, 8):
            yield Step(f"puts of {clients} clients", partial(measure, clients, run))


def _groups(plan: Plan) -> Iterator[Step]:
    def measure(who: str, ranks: int, run: int) -> list[Row]:
        found = torch_groups.measure(who == "TorchStore", ranks, 2 if plan.quick else 10)
        return [
            {"who": who, "ranks": ranks, "phase": phase, "run": run, "seconds": cost.wall / 1e3, "cpu": cost.cpu / 1e3}
            for phase, cost in found.items()
        ]

    for run in range(1 if plan.quick else 3):
        for ranks in (8,) if plan.quick else (8, 24, 64):
            sides = ("TorchStore", "TCPStore")
            for who in sides if run % 2 else reversed(sides):
                yield Step(f"{ranks} ranks over {who}", partial(measure, who, ranks, run))


def _idle(plan: Plan) -> Iterator[Step]:
    def measure(nodes: int) -> list[Row]:
        return [{"who": "rdzv", **idle.measure(nodes, plan.processes, seconds=4.0 if plan.quick else 10.0)}]

    for nodes in plan.nodes:
        yield Step(f"{nodes} members", partial(measure, nodes))


def _idle_peers(plan: Plan) -> Iterator[Step]:
    def measure(kind: str, nodes: int) -> list[Row]:
        seconds = 4.0 if plan.quick else 10.0
        return [{"who": kind, **idle.measure_pytorch(kind, nodes, plan.processes, seconds=seconds)}]

    for kind in filter(lambda kind: not pytorch.why_not(kind), pytorch.KINDS):
        for nodes in (4,) if plan.quick else (4, 64):
            yield Step(f"{nodes} members of {kind}", partial(measure, kind, nodes))


def _detection(plan: Plan) -> Iterator[Step]:
    def measure(nodes: int, victim: str, run: int) -> list[Row]:
        told, done = regroup.measure(nodes, 1.0, killed=1, kill_coordinator=victim == "coordinator")
        what = {"who": "rdzv", "nodes": nodes, "victim": victim, "run": run}
        return [{**what, "told": support.median(told), "told_last": max(told), "next_round": max(done)}]

    for run in range(1 if plan.quick else 3):
        for nodes in (4, 8) if plan.quick else (4, 16, 64):
            for victim in ("member", "coordinator"):
                yield Step(f"{nodes} nodes, a {victim} killed", partial(measure, nodes, victim, run))


def _detection_peers(plan: Plan) -> Iterator[Step]:  # noqa: ARG001  as all of them
    def measure(kind: str) -> list[Row]:
        return [{"who": kind, "nodes": 4, "victim": "member", "run": 0, "removed": _pytorch_removes(kind)}]

    for kind in filter(lambda kind: not pytorch.why_not(kind), pytorch.KINDS):
        yield Step(f"4 nodes of {kind}, one killed", partial(measure, kind))


def _beside(plan: Plan) -> Iterator[Step]:
    def meet(who: str, nodes: int, run: int) -> list[Row]:
        if who == "rdzv":
            one = arrivals.measure(nodes, plan.processes, "parked")[0]
            return [{"who": who, "nodes": nodes, "run": run, "seconds": one.seconds, "bytes": one.bytes}]
        figures = _pytorch_meets(who, nodes, plan.processes, "parked")
        return [{"who": who, "nodes": nodes, "run": run, "seconds": figures["seconds"], "bytes": figures["bytes"]}]

    def lose(who: str, run: int) -> list[Row]:
        what = {"who": who, "nodes": 4, "run": run}
        if who == "rdzv":
            _, done = regroup.measure(4, 1.0, killed=1, kill_coordinator=False)
            return [{**what, "next_round": max(done)}]
        return [{**what, "removed": _pytorch_removes(who)}]

    known = ["rdzv", *(kind for kind in pytorch.KINDS if not pytorch.why_not(kind))]
    for run in range(1 if plan.quick else 3):
        for nodes in (4, 64):
            for who in known if nodes == 4 else known[:2]:  # 64 nodes of etcd-v2 take minutes
                yield Step(f"{nodes} nodes of {who} meet", partial(meet, who, nodes, run))
        for who in known:
            yield Step(f"4 nodes of {who}, one killed", partial(lose, who, run))


def _without_torch() -> str:
    return pytorch.why_not("c10d")


PARTS = {
    "beside": Part(
        section="a",
        says="the README's figures: rdzv beside PyTorch's backends, in turns",
        seconds=240,
        steps=_beside,
        lacks=_without_torch,
    ),
    "rendezvous": Part(
        section="a",
        says="N nodes meet, at once and parked, first and again",
        seconds=480,
        steps=_rendezvous,
        torch=False,
    ),
    "c10d": Part(
        section="a",
        says="the same with PyTorch's c10d",
        seconds=180,
        steps=partial(_pytorch, "c10d"),
        lacks=_without_torch,
    ),
    "etcd-v2": Part(
        section="a",
        says="the same with PyTorch's etcd-v2",
        seconds=120,
        steps=partial(_pytorch, "etcd-v2"),
        lacks=partial(pytorch.why_not, "etcd-v2"),
    ),
    "requests": Part(section="b", says="what a request costs the server, 64 callers", seconds=120, steps=_requests),
    "calls": Part(section="b", says="one blocking call, all on one core", seconds=30, steps=_calls),
    "fan-out": Part(section="b", says="one change told to many", seconds=70, steps=_fan_out, torch=False),
    "throughput": Part(section="b", says="puts per second", seconds=25, steps=_throughput, torch=False),
    "groups": Part(section="b", says="gloo process groups", seconds=120, steps=_groups, lacks=_without_torch),
    "idle": Part(section="c", says="what N idle members cost", seconds=180, steps=_idle, torch=False),
    "idle-peers": Part(
        section="c", says="what idle members of PyTorch's cost", seconds=90, steps=_idle_peers, lacks=_without_torch
    ),
    "detection": Part(section="d", says="how soon a death is heard", seconds=60, steps=_detection, torch=False),
    "detection-peers": Part(
        section="d", says="how soon PyTorch removes the dead", seconds=60, steps=_detection_peers, lacks=_without_torch
    ),
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after `seconds`, in any wait; in a process that has no other use for SIGALRM."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    name: str,
    plan: Plan,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    limit: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Measure one part within so many seconds, each step under a limit, and print its rows."""
    began = clock()
    if not PARTS[name].torch:
        support.fork_without_torch()
    took: dict[str, float] = {}
    skipped = 0
    for step in PARTS[name].steps(plan):
        since = clock()
        if began + seconds - since < took.get(step.name, 0.0):
            skipped += 1
            continue
        try:
            with limit():
                rows = step.measure()
        except Exception as error:  # noqa: BLE001  the other steps continue
            traceback.print_exc()
            print(f"FAILED {step.name}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
            rows = []
        took[step.name] = clock() - since
        for row in rows:
            print("ROW", json.dumps(row), flush=True)
        print(f"{step.name}: {took[step.name]:.1f} s", flush=True)
    if skipped:
        print(f"SKIPPED {skipped} measurements for want of time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--nodes", type=int, nargs="+")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    nodes = tuple(options.nodes or (QUICK_NODES if options.quick else NODES))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket per node, and two in its own process
    with contextlib.suppress(KeyboardInterrupt):
        run(
            options.name,
            Plan(quick=options.quick, nodes=nodes, processes=options.processes),
            options.seconds,
            limit=partial(limited, STEP_MOST),
        )
        return
    sys.exit(130)


if __name__ == "__main__":
    main()
