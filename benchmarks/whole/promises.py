"""Each ratio that docs/benchmarks.md promises: its sentence, its value in the results, its limit.

A promise is a ratio within one run, or a count, so that it holds on any machine; `python -m benchmarks` fails if one is
broken, and names it. A missing measurement is named, and breaks nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.whole import growth
from benchmarks.whole.figures import quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.whole.results import Results

__all__ = ["COSTS", "PROMISES", "Limit", "Verdict", "judge"]

US = {"who": "rdzv"}
TURNS = [(way, which) for way in ("at once", "parked") for which in ("first", "again")]
Points = "Sequence[tuple[float, float]]"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One figure and its limit.

    Attributes:
        sentence: As in the documents.
        measured: The figure; not a number if it was not measured.
        most: The maximum; or
        least: the minimum.
        unit: Of the figure: "s", "B" or "%"; none of a ratio.
    """

    sentence: str
    measured: Callable[[Results], float]
    most: float = math.inf
    least: float = -math.inf
    unit: str = ""

    def shown(self, value: float) -> str:
        """Return a value with the unit."""
        if self.unit == "%":
            return f"{value * 100:.3g} %"
        return quantity(value, self.unit) if self.unit else f"{value:,.3g}"

    @property
    def bound(self) -> str:
        """Return the limit in words."""
        return f"at most {self.shown(self.most)}" if self.most < math.inf else f"at least {self.shown(self.least)}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a limit: kept, broken, or not measured (none)."""

    limit: Limit
    value: float
    kept: bool | None


def judge(limits: Sequence[Limit], results: Results) -> list[Verdict]:
    """Compare the results with each limit."""
    verdicts = []
    for limit in limits:
        value = limit.measured(results)
        kept = None if math.isnan(value) else limit.least <= value <= limit.most
        verdicts.append(Verdict(limit=limit, value=value, kept=kept))
    return verdicts


# ------------------------------------------------------------------------------------------ what the figures are


def _slower(kind: str, way: str) -> Callable[[Results], float]:
    """Return how many times as long the peer takes, where it comes closest to us."""

    def measured(results: Results) -> float:
        ours = dict(results.points("rendezvous", "nodes", "seconds", **US, way=way, which="first"))
        theirs = results.points(kind, "nodes", "seconds", way=way)
        return min((seconds / ours[nodes] for nodes, seconds in theirs if nodes in ours), default=math.nan)

    return measured


def _least_known(values: Iterable[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _more_bytes(kind: str, nodes: int) -> Callable[[Results], float]:
    def measured(results: Results) -> float:
        ours = results.value("rendezvous", "bytes", **US, way="at once", which="first", nodes=nodes)
        return results.value(kind, "bytes", way="at once", nodes=nodes) / ours

    return measured


def _most_bytes(results: Results, *, of_64: bool = False, nodes_least: int = 0) -> float:
    """Return the bytes of the node that moves most, all at once; or their ratio to a round of 64."""
    found = []
    for which in ("first", "again"):
        points = dict(results.points("rendezvous", "nodes", "bytes", **US, way="at once", which=which))
        if max(points, default=0) < growth.JUDGED_FROM or 64 not in points:
            continue
        found += [value / (points[64] if of_64 else 1) for nodes, value in points.items() if nodes >= nodes_least]
    return max(found, default=math.nan)


def _sooner_heard(kind: str) -> Callable[[Results], float]:
    def measured(results: Results) -> float:
        told = results.value("detection", "told", victim="member", nodes=4)
        return results.value("detection-peers", "removed", who=kind) / told

    return measured


def _fan_out(results: Results) -> float:
    ours, bare = (results.value("fan-out", "server_cpu", who=who, watchers=1000) for who in ("rdzv", "echo"))
    return ours / bare


COSTS: dict[str, Callable[[Results], Sequence[tuple[float, float]]]] = {
    **{
        f"the server's processor, {way}, {which}": (
            lambda results, way=way, which=which: results.totals(  # type: ignore[misc]
                "rendezvous", "server_cpu", **US, way=way, which=which
            )
        )
        for way, which in TURNS
    },
    **{
        f"the coordinator's processor, {way}, {which}": (
            lambda results, way=way, which=which: results.points(  # type: ignore[misc]
                "rendezvous", "nodes", "coordinator_cpu", **US, way=way, which=which
            )
        )
        for way, which in TURNS
    },
    **{
        f"bytes, {way}, {which}": (
            lambda results, way=way, which=which: results.totals(  # type: ignore[misc]
                "rendezvous", "bytes", **US, way=way, which=which
            )
        )
        for way, which in TURNS
    },
    "requests, at once, first": lambda results: results.totals(
        "rendezvous", "requests", **US, way="at once", which="first"
    ),
    "messages pushed, at once, first": lambda results: results.totals(
        "rendezvous", "pushed", **US, way="at once", which="first"
    ),
    "the server's memory": lambda results: results.points(
        "rendezvous", "nodes", "server_memory", **US, way="at once", which="again"
    ),
    "the server's processor for one change told to N": lambda results: results.points(
        "fan-out", "watchers", "server_cpu", who="rdzv"
    ),
    "the server's processor for N idle members": lambda results: results.points("idle", "nodes", "cpu", **US),
    "bytes per second of N idle members": lambda results: results.points("idle", "nodes", "bytes", **US),
}
"""The costs of all nodes, by name, that must not grow faster than N log N."""


def _above(results: Results) -> float:
    """Return the largest share of a cost that N log N does not explain."""
    return max(
        (share for share in map(_share_above, (of(results) for of in COSTS.values())) if share >= 0), default=math.nan
    )


def _share_above(points: Sequence[tuple[float, float]]) -> float:
    if max((n for n, _ in points), default=0) < growth.JUDGED_FROM:
        return math.nan
    return growth.fit(points).above


# ------------------------------------------------------------------------------------------ the limits

PROMISES = (
    Limit(
        sentence="From the last arrival until everyone is done, `c10d` and `etcd-v2` take at least 20 times as long",
        measured=lambda results: _least_known(_slower(kind, "parked")(results) for kind in ("c10d", "etcd-v2")),
        least=20,
    ),
    Limit(
        sentence="with all nodes calling at the same moment, `c10d` takes at least 3 times as long",
        measured=_slower("c10d", "at once"),
        least=3,
    ),
    Limit(
        sentence="At 256 nodes, `c10d` moves at least 100 times the bytes", measured=_more_bytes("c10d", 256), least=100
    ),
    Limit(
        sentence="When all nodes call at once, each moves a few kilobytes, however many they are",
        measured=_most_bytes,
        unit="B",
        most=4096,
    ),
    Limit(
        sentence="and from 4,096 nodes on at most 1.5 times the bytes of 64 nodes",
        measured=partial(_most_bytes, of_64=True, nodes_least=4096),
        most=1.5,
    ),
    Limit(
        sentence="`c10d` takes at least 50 times as long to remove a dead member as our survivors take to hear of it",
        measured=_sooner_heard("c10d"),
        least=50,
    ),
    Limit(
        sentence="a change is told to 1,000 watchers for at most 3 times the processor time of a bare broadcast",
        measured=_fan_out,
        most=3,
    ),
    Limit(
        sentence="no cost of the server or the coordinator grows faster than N log N: at the most nodes, at most half "
        "of any is what N log N does not explain",
        measured=_above,
        unit="%",
        most=growth.ABOVE_MOST,
    ),
)
