"""Promises R2 and R5 at the size of a real job: of sixty-four nodes one is killed, or twenty are. Also R5 through a
slow network.

On virtual time, so that the bounds are about waits of the protocol and not about the speed of this machine. `python -m
benchmarks.regroup` measures the real time.
"""

import asyncio

import pytest

import rdzv
from rdzv import Handler, NodesLeft, NodesLost, RendezvousInfo
from tests.support.runs import VirtualRun, assert_one_round
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time

NODES = 64
GONE_TTL = 0.1  # for a single death
DISCONNECT_TTL = 1.0  # for many at once
TOLD_WITHIN = 0.2  # seconds on top of these, for an election and a report
MET_WITHIN = 0.3  # seconds from the notification to the next round


class Life:
    """One node that stops its work and meets the others again when some are lost, and the changes that it saw."""

    def __init__(self, handler: Handler, *, puts_down_in: float) -> None:
        self.handler = handler
        self.puts_down_in = puts_down_in
        self.infos: list[RendezvousInfo] = []
        self.met_at: list[float] = []
        self.told_at: list[float] = []
        self.lost: set[str] = set()

    async def live(self) -> None:
        """Go on until cancelled."""
        async with self.handler.changes() as changes:
            while True:
                self.infos.append(await self.handler.next_rendezvous())
                self.met_at.append(now())
                async for change in changes:
                    if isinstance(change, NodesLost | NodesLeft):
                        assert isinstance(change, NodesLost), "nobody has left on its own account"
                        self.told_at.append(now())
                        self.lost |= set(change.node_ids)
                        break
                await asyncio.sleep(self.puts_down_in)


async def start_all(run: VirtualRun, *, put_down_within: float = 0.0) -> dict[str, Life]:
    """Start all nodes; return when they are in their first round."""
    names = [f"n{number}" for number in range(NODES)]
    lives = {name: Life(run.handler(name), puts_down_in=run._rng.uniform(0, put_down_within)) for name in names}
    for name, life in lives.items():
        run._joins.append((life.handler, run.start(life.live(), f"life of {name}")))
    await asyncio.sleep(20)
    assert_one_round([life.infos[0] for life in lives.values()])
    return lives


@pytest.mark.parametrize("victim", ["the coordinator", "another"])
async def test_r5_each_of_sixty_three_survivors_is_notified_in_time_and_soon_in_the_next_round(victim: str) -> None:
    async with VirtualRun(min_nodes=2, max_nodes=NODES, last_call_timeout=5, disconnect_ttl=DISCONNECT_TTL) as run:
        lives = await start_all(run)
        coordinator = (await lives["n0"].handler.status()).coordinator
        assert coordinator is not None
        dead = coordinator if victim == "the coordinator" else next(name for name in lives if name != coordinator)
        killed_at = now()
        run.crash(dead)
        survivors = [life for name, life in lives.items() if name != dead]
        await asyncio.sleep(20)
        assert_one_round([life.infos[-1] for life in survivors])
        assert {life.infos[-1].world_size for life in survivors} == {NODES - 1}
        told = [life.told_at[0] - killed_at - GONE_TTL for life in survivors]
        assert min(told) >= 0
        assert max(told) <= TOLD_WITHIN
        assert max(life.met_at[1] for life in survivors) - max(life.told_at[0] for life in survivors) <= MET_WITHIN


@pytest.mark.some_of(1)
@pytest.mark.parametrize("seed", range(3))
async def test_r5_twenty_killed_at_once_with_the_coordinator_among_them_make_one_new_round_of_forty_four(
    seed: int,
) -> None:
    """Their connections end within a tenth of a second, and so their leases expire within a tenth of a second."""
    async with VirtualRun(
        seed=seed, min_nodes=2, max_nodes=NODES, last_call_timeout=5, disconnect_ttl=DISCONNECT_TTL
    ) as run:
        lives = await start_all(run, put_down_within=0.05)
        coordinator = (await lives["n0"].handler.status()).coordinator
        assert coordinator is not None
        dead = {coordinator, *run._rng.sample(sorted(lives), 19)}
        dead |= set([name for name in lives if name not in dead][: 20 - len(dead)])
        killed_at = now()
        for name in sorted(dead):
            run.crash(name)
            await asyncio.sleep(run._rng.uniform(0, 0.01))
        await asyncio.sleep(20)
        survivors = [life for name, life in lives.items() if name not in dead]
        for life in survivors:
            assert [info.round for info in life.infos] == [0, 1], "one new round, and not several"
            assert life.lost <= dead
        assert_one_round([life.infos[1] for life in survivors])
        assert survivors[0].infos[1].world_size == 44
        met = max(life.met_at[1] for life in survivors) - killed_at - DISCONNECT_TTL
        assert met <= 0.1 + TOLD_WITHIN + MET_WITHIN


async def test_r5_a_leaving_node_deletes_its_record_even_if_the_store_is_slow() -> None:
    """At 3 s the node's time for that was over before the store had answered. It gave up its lease, and the others
    learned of its departure only by the lease's end.
    """
    async with VirtualRun(latency=1.5, min_nodes=2, max_nodes=3) as run:
        one, other = await run.met("ab")
        lease = one.node.part.arrival.lease
        async with other.changes() as changes:
            await one.leave()
            async for change in changes:
                assert not isinstance(change, rdzv.NodesLost)
                if isinstance(change, rdzv.NodesLeft):
                    break
        assert one.node.part.arrival.lease is lease is not None
