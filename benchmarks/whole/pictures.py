"""The figures, each made of the results alone. A missing part leaves its figures out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.whole.figures import Lines, draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.whole.results import Results

__all__ = ["figures", "svgs"]

PEERS = ("c10d", "etcd-v2")
TURNS = [(way, which) for way in ("at once", "parked") for which in ("first", "again")]
US = {"who": "rdzv"}
FIRST = {**US, "way": "at once", "which": "first"}
AGAIN = {**US, "way": "at once", "which": "again"}
PARKED = {**US, "way": "parked"}  # the coordinator has a process of its own


def _rendezvous(results: Results) -> Lines:
    ours = {
        f"rdzv, {way}, {which}": results.points("rendezvous", "nodes", "seconds", **US, way=way, which=which)
        for way, which in TURNS
    }
    theirs = {
        f"{kind}, {way}": results.points(kind, "nodes", "seconds", way=way)
        for kind in PEERS
        for way in ("at once", "parked")
    }
    return Lines(
        title="Until every node has its rank",
        across="nodes",
        up="seconds",
        unit="s",
        lines={**ours, **theirs},
        dashed=frozenset(theirs),
    )


def _bytes(results: Results) -> Lines:
    theirs = {kind: results.points(kind, "nodes", "bytes", way="parked") for kind in PEERS}
    return Lines(
        title="Bytes per node of one round",
        across="nodes",
        up="bytes",
        unit="B",
        lines={
            "rdzv, first": results.points("rendezvous", "nodes", "bytes", **FIRST),
            "rdzv, again": results.points("rendezvous", "nodes", "bytes", **AGAIN),
            **theirs,
        },
        dashed=frozenset(theirs),
    )


def _messages(results: Results) -> Lines:
    return Lines(
        title="Messages per node of one round",
        across="nodes",
        up="messages",
        lines={
            "requests, first": results.points("rendezvous", "nodes", "requests", **FIRST),
            "requests, again": results.points("rendezvous", "nodes", "requests", **AGAIN),
            "pushed, first": results.points("rendezvous", "nodes", "pushed", **FIRST),
            "pushed, again": results.points("rendezvous", "nodes", "pushed", **AGAIN),
        },
    )


def _processor(results: Results) -> Lines:
    theirs = {f"server of {kind}": results.points(kind, "nodes", "server_cpu", way="at once") for kind in PEERS}
    return Lines(
        title="Processor time of one round, per node",
        across="nodes",
        up="seconds of a core",
        unit="s",
        lines={
            "server, first": results.points("rendezvous", "nodes", "server_cpu", **FIRST),
            "server, again": results.points("rendezvous", "nodes", "server_cpu", **AGAIN),
            "node, first": results.points("rendezvous", "nodes", "node_cpu", **FIRST),
            "node, again": results.points("rendezvous", "nodes", "node_cpu", **AGAIN),
            **theirs,
        },
        dashed=frozenset(theirs),
    )


def _coordinator(results: Results) -> Lines:
    return Lines(
        title="Processor time of one round, whole process",
        across="nodes",
        up="seconds of a core",
        unit="s",
        lines={
            "server, first": results.totals("rendezvous", "server_cpu", **FIRST),
            "server, again": results.totals("rendezvous", "server_cpu", **AGAIN),
            "coordinator, first": results.points("rendezvous", "nodes", "coordinator_cpu", **PARKED, which="first"),
            "coordinator, again": results.points("rendezvous", "nodes", "coordinator_cpu", **PARKED, which="again"),
        },
    )


def _memory(results: Results) -> Lines:
    return Lines(
        title="Memory of the server's process, at most",
        across="nodes",
        up="bytes",
        unit="B",
        lines={
            "in a round": results.points("rendezvous", "nodes", "server_memory", **AGAIN),
            "idle members": results.points("idle", "nodes", "memory", **US),
        },
    )


def _idle(results: Results) -> Lines:
    theirs = {f"server of {kind}": results.points("idle-peers", "nodes", "cpu", who=kind) for kind in PEERS}
    return Lines(
        title="The server, for members that do nothing",
        across="members",
        up="share of a core",
        lines={"server of rdzv": results.points("idle", "nodes", "cpu", **US), **theirs},
        dashed=frozenset(theirs),
    )


def _detection(results: Results) -> Lines:
    theirs = {f"{kind}, removed": results.points("detection-peers", "nodes", "removed", who=kind) for kind in PEERS}
    return Lines(
        title="From SIGKILL of a node",
        across="nodes",
        up="seconds",
        unit="s",
        lines={
            f"{victim}: {words}": results.points("detection", "nodes", figure, victim=victim)
            for victim in ("member", "coordinator")
            for figure, words in (("told", "told"), ("next_round", "next round"))
        }
        | theirs,
        dashed=frozenset(theirs),
    )


FIGURES: dict[str, tuple[str, Callable[[Results], Lines]]] = {
    "rendezvous": ("rendezvous", _rendezvous),
    "bytes": ("rendezvous", _bytes),
    "messages": ("rendezvous", _messages),
    "processor": ("rendezvous", _processor),
    "coordinator": ("rendezvous", _coordinator),
    "memory": ("rendezvous", _memory),
    "idle": ("idle", _idle),
    "detection": ("detection", _detection),
}
"""Each figure by its name: its part, and the function that draws it."""


def figures(results: Results) -> dict[str, Lines]:
    """Return the figures with measurements; a line without points is left out."""
    found: dict[str, Lines] = {}
    for name, (part, make) in FIGURES.items():
        if results.rows(part):
            figure = make(results)
            lines = {label: points for label, points in figure.lines.items() if points}
            found[name] = replace(figure, lines=lines)
    return found


def svgs(results: Results) -> dict[str, str]:
    """Return each figure as SVG, by the file's name."""
    return {f"bench-{name}.svg": draw(figure) for name, figure in figures(results).items()}
