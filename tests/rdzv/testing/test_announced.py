"""Announced changes at random moments, with deaths and outages of the store in between, in virtual time."""

import random
from collections import defaultdict

import anyio
import pytest

import rdzv
from rdzv.core.round_life import EndKind
from rdzv.node.front import verbs
from rdzv.testing import Cluster, ClusterNode, cluster

CHECK_MOST = 2.0  # seconds; a question and its answers take milliseconds, a death is noticed after 0.1 s
CHANGES = 8


class Training:
    """A training in which each step needs all members of the round, and its results.

    Attributes:
        stops: The steps before which members left a round by agreement, by the round's number.
        interrupted: The steps that were begun and cut short by an announced change.
        waits: The seconds that each check took.
        away_until: The time until which the store may be disconnected.
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
    """Announce one random change."""
    here = [node for node in made.nodes if node.is_running]
    what = rng.choice(("drain", "join", "resize"))
    if what == "join" or len(here) < 3:
        made.join()
    elif what == "drain":
        made.drain(rng.choice(here), within=60)
    else:
        made.resize(max_nodes=rng.randrange(2, 7))


@pytest.mark.in_ci
@pytest.mark.parametrize("faults", [False, True])
def test_all_members_stop_before_the_same_step_and_announced_changes_lose_no_step(faults: bool) -> None:
    seed = 0
    rng, training = random.Random(seed), Training()
    with cluster(4, seed=seed, min_nodes=2, max_nodes=6, ttl=3, last_call_timeout=0.5) as made:
        made.run(training.train)
        made.advance(2)
        for _ in range(CHANGES):
            announce(made, rng)
            made.advance(rng.choice((0.0, 0.01, 0.1, 1.0)))
            if faults and rng.random() < 0.4:
                here = [node for node in made.nodes if node.is_running]
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


def drain_by_another(made: Cluster, name: str) -> None:
    """Drain a node through the handler of the last node."""
    other = made.nodes[-1].handlers[-1].node
    told = other.loop.spawn(verbs.drain(other, within=60, node_id=name))
    made.advance(0.5)
    assert told.over.is_set()
    told.result()


def test_a_drain_of_an_earlier_process_of_the_same_name_does_not_apply() -> None:
    """That process died silently, so its record, and with it the drain, remains until its TTL is over.

    Regression: its replacement ended its loop at once, as if it had been drained.
    """
    with cluster(2, seed=0, min_nodes=1, ttl=10, last_call_timeout=0.5) as made:
        made.run(Training().train)
        made.advance(2)
        made.kill(0, power=True)
        drain_by_another(made, "node-0")
        made.restart(0)
        made.advance(13)
        assert made.nodes[0].is_running
        assert made.rounds[-1].world_size == 2


def test_the_drain_of_an_earlier_process_ends_when_another_one_takes_its_name() -> None:
    """Regression: the lease had expired by the earlier process's own clock, but lasted as long again in the store,
    which had been restarted. So that process left, and the next one of its name was asked to leave every round that it
    joined.
    """

    async def train(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url):
            async with round:
                for step in range(1000):
                    await round.check(step)
                    await anyio.sleep(0.5)

    with cluster(2, seed=0, min_nodes=1, ttl=10, last_call_timeout=0.5) as made:
        made.run(train)
        made.advance(2)
        made.cut(0, 12)
        made.advance(6)
        made.stop_store(0.1)
        made.advance(5)
        drain_by_another(made, "node-0")
        made.advance(1)
        assert [node.is_running for node in made.nodes] == [False, True], "it came again, and was to leave"
        made.restart(0)
        made.advance(2)
        rounds = len(made.rounds)
        assert made.rounds[-1].world_size == 2
        made.advance(20)
        assert len(made.rounds) == rounds
        assert [node.is_running for node in made.nodes] == [True, True]


def test_a_waiting_node_leaves_as_soon_as_it_is_drained() -> None:
    """A waiting node is in no round whose members would have to stop for it. Regression: it waited to the run's end."""
    with cluster(3, seed=0, min_nodes=2, max_nodes=2, last_call_timeout=0.5) as made:
        made.run(Training().train)
        made.advance(5)
        (spare,) = (node for node in made.nodes if node.name not in made.rounds[-1].members)
        made.drain(spare, within=600)
        made.advance(5)
        assert not spare.is_running and spare.error is None
        assert len(made.rounds) == 1, "no other node has noticed"
