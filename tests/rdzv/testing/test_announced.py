"""Announced changes at random moments, with deaths and outages of the store between them, in virtual time."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import anyio
import pytest

import rdzv
from rdzv.loop.ending import EndKind
from rdzv.testing import cluster

if TYPE_CHECKING:
    from rdzv.testing import Cluster, ClusterNode

CHECK_MOST = 2.0  # seconds; a question and its answers take milliseconds, a death is known after a tenth
CHANGES = 8


class Training:
    """A training in which each step needs all members of the round, and what is to be seen of it.

    Attributes:
        stops: Before which steps members left a round since they had agreed to, by the round's number.
        interrupted: The steps that were begun, and cut short by an announced change.
        waits: Seconds that each check took.
        away_until: Until when the store may be missed.
    """

    def __init__(self) -> None:
        self.stops: dict[int, set[int]] = defaultdict(set)
        self.interrupted: list[tuple[str, int, int]] = []
        self.waits: list[tuple[float, float]] = []
        self.away_until = 0.0

    async def train(self, node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url, stall_timeout=None):
            step = 0 if round.newest is None else round.newest[1] + 1
            begun: int | None = None
            async with round:
                while True:
                    await anyio.sleep(node.rng.uniform(0.0, 0.3))  # so that not all begin a step at the same moment
                    asked = anyio.current_time()
                    await round.check(step)
                    if anyio.current_time() > self.away_until:
                        self.waits.append((anyio.current_time(), anyio.current_time() - asked))
                    begun = step
                    await round.store.barrier(f"step {step}", round.world_size)
                    begun = None
                    step += 1
            if round.ending is not None and round.ending.kind is EndKind.AGREED:
                self.stops[round.number].add(step)
                if begun is not None:
                    self.interrupted.append((node.name, round.number, begun))


def announce(made: Cluster, rng: random.Random) -> None:
    """Do one of the things that are announced."""
    here = [node for node in made.nodes if node.at_work]
    what = rng.choice(("drain", "join", "resize"))
    if what == "join" or len(here) < 3:
        made.join()
    elif what == "drain":
        made.drain(rng.choice(here), within=60)
    else:
        node = rng.choice(here)
        node.process.node_thread.start(node.handlers[-1].node.resize(min_nodes=None, max_nodes=rng.randrange(2, 7)))


@pytest.mark.parametrize("faults", [False, True])
def test_all_stop_before_one_step_and_no_step_is_lost_to_what_was_announced(faults: bool) -> None:
    seed = 0
    rng, training = random.Random(seed), Training()
    with cluster(4, seed=seed, min_nodes=2, max_nodes=6, ttl=3, last_call_timeout=0.5) as made:
        made.run(training.train)
        made.advance(2)
        for _ in range(CHANGES):
            announce(made, rng)
            made.advance(rng.choice((0.0, 0.01, 0.1, 1.0)))
            if faults and rng.random() < 0.4:
                here = [node for node in made.nodes if node.at_work]
                if rng.random() < 0.5 and len(here) > 2:
                    made.kill(rng.choice(here))
                else:
                    made.stop_store(1.5)
                    training.away_until = made.now + 8.0
            made.advance(rng.uniform(0.2, 2.0))
        made.advance(10)
        rounds = [one.world_size for one in made.rounds]
    assert len(training.stops) >= 3, rounds
    assert {number: stops for number, stops in training.stops.items() if len(stops) > 1} == {}
    assert training.interrupted == []
    late = [wait for wait in training.waits if wait[1] > CHECK_MOST]
    assert not late, late
