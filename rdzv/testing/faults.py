"""Pure: what befalls a cluster at random, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

__all__ = ["FAULTS", "deal"]

FAULTS: Final = ("kill", "pause", "hang", "cut", "reset", "drain", "join", "stop_store", "pause_store")
"""What may befall a cluster. Who is killed or drained is replaced after a while, so that the run can go on."""

SHORT, MIDDLING, LONG = 0.3, 3.0, 20.0
"""Seconds that a fault lasts, about: less than `disconnect_ttl`, than `ttl`, and more than both."""


class _Cluster(Protocol):
    """What can befall a cluster; see `cluster.Cluster`."""

    nodes: list[Any]

    def advance(self, seconds: float) -> object: ...
    def kill(self, node: int) -> object: ...
    def restart(self, node: int) -> object: ...
    def join(self) -> object: ...
    def pause(self, node: int, seconds: float) -> object: ...
    def hang(self, node: int, seconds: float) -> object: ...
    def cut(self, node: int, seconds: float) -> object: ...
    def reset(self, node: int) -> object: ...
    def drain(self, node: int, within: float) -> object: ...
    def stop_store(self, seconds: float) -> object: ...
    def pause_store(self, seconds: float) -> object: ...


def deal(cluster: _Cluster, rng: random.Random, *, faults: Sequence[str], most: int, during: float) -> None:
    """Let faults befall a cluster, and time pass until they are over.

    Args:
        cluster: Whose nodes run a body.
        rng: Decides all of it.
        faults: Of which kinds.
        most: How many at most; at least one.
        during: Seconds within which they begin.

    Raises:
        ValueError: There is no fault of this kind.
    """
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    moments = sorted(rng.uniform(0.0, during) for _ in range(rng.randint(1, most)))
    now = over_at = 0.0
    back_at: list[tuple[float, int]] = []  # who comes back then; -1: somebody new
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
                    back_at.append((moment + seconds, node))
                case "drain":
                    cluster.drain(node, within=rng.choice((5.0, 30.0)))
                    back_at.append((moment + seconds, -1))
                case "pause":
                    cluster.pause(node, seconds)
                case "hang":
                    cluster.hang(node, seconds)
                case "cut":
                    cluster.cut(node, seconds)
                case "reset":
                    cluster.reset(node)
    _advance(cluster, now, max([over_at, *(at for at, _ in back_at)]), back_at)


def _advance(cluster: _Cluster, now: float, until: float, back_at: list[tuple[float, int]]) -> float:
    """Let time pass, and nodes come back whose time has come; returns the time it is then."""
    back_at.sort()
    while back_at and back_at[0][0] <= until:
        at, node = back_at.pop(0)
        cluster.advance(max(at - now, 0.0))
        now = max(at, now)
        if node < 0:
            cluster.join()
        else:
            cluster.restart(node)
    cluster.advance(max(until - now, 0.0))
    return max(until, now)
