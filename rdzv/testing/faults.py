"""Pure: random faults of a cluster, and their times."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    _Later = tuple[float, Callable[[], object]]

FAULTS: Final = ("kill", "pause", "hang", "cut", "reset", "drain", "join", "stop_store", "pause_store", "resize")
"""The kinds of faults. A killed or drained node is replaced later, and a resize is taken back."""

SHORT, MIDDLING, LONG = 0.3, 3.0, 20.0
"""Typical seconds of a fault: below `disconnect_ttl`, below `ttl`, and above both."""


class _Cluster(Protocol):
    """The members of `cluster.Cluster` that faults use."""

    nodes: list[Any]
    settings: dict[str, Any]

    def advance(self, seconds: float) -> object: ...
    def kill(self, node: int) -> object: ...
    def restart(self, node: int) -> object: ...
    def join(self) -> object: ...
    def pause(self, node: int, seconds: float) -> object: ...
    def hang(self, node: int, seconds: float) -> object: ...
    def cut(self, node: int, seconds: float) -> object: ...
    def reset(self, node: int) -> object: ...
    def drain(self, node: int, within: float) -> object: ...
    def resize(self, *, max_nodes: int) -> object: ...
    def stop_store(self, seconds: float) -> object: ...
    def pause_store(self, seconds: float) -> object: ...


def deal(cluster: _Cluster, rng: random.Random, *, faults: Sequence[str], most: int, during: float) -> None:
    """Play 1 to `most` random faults of the kinds `faults`, which begin within `during` seconds, until they are over.

    Raises:
        ValueError: One of the kinds does not exist.
    """
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    moments = sorted(rng.uniform(0.0, during) for _ in range(rng.randint(1, most)))
    now = over_at = 0.0
    back_at: list[_Later] = []
    for moment in moments:
        now = _advance(cluster, now, moment, back_at)
        kind = rng.choice(list(faults))
        seconds = rng.choice((SHORT, MIDDLING, LONG)) * rng.uniform(0.5, 1.5)
        over_at = max(over_at, moment + seconds)
        at_work = [i for i, node in enumerate(cluster.nodes) if node.at_work and node.handlers]
        if kind == "join":
            cluster.join()
        elif kind == "stop_store":
            cluster.stop_store(min(seconds, MIDDLING))
        elif kind == "pause_store":
            cluster.pause_store(min(seconds, MIDDLING))
        elif at_work:
            node = rng.choice(at_work)
            match kind:
                case "kill":
                    cluster.kill(node)
                    back_at.append((moment + seconds, partial(cluster.restart, node)))
                case "drain":
                    cluster.drain(node, within=rng.choice((5.0, 30.0)))
                    back_at.append((moment + seconds, cluster.join))
                case "pause":
                    cluster.pause(node, seconds)
                case "hang":
                    cluster.hang(node, seconds)
                case "cut":
                    cluster.cut(node, seconds)
                case "reset":
                    cluster.reset(node)
                case "resize":
                    least, most = (int(cluster.settings[name]) for name in ("min_nodes", "max_nodes"))
                    cluster.resize(max_nodes=rng.randint(least, most + 2))
                    back_at.append((moment + seconds, partial(_resize_back, cluster, most)))
    _advance(cluster, now, max([over_at, *(at for at, _ in back_at)]), back_at)


def _resize_back(cluster: _Cluster, most: int) -> None:
    if any(node.at_work and node.handlers for node in cluster.nodes):
        cluster.resize(max_nodes=most)


def _advance(cluster: _Cluster, now: float, until: float, back_at: list[_Later]) -> float:
    back_at.sort(key=itemgetter(0))
    while back_at and back_at[0][0] <= until:
        at, action = back_at.pop(0)
        cluster.advance(max(at - now, 0.0))
        now = max(at, now)
        action()
    cluster.advance(max(until - now, 0.0))
    return max(until, now)
