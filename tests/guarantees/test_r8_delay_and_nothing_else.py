"""Promise R8: "A store restart (durable, or etcd), or a network cut shorter than the TTL (where connections were reset:
than `disconnect_ttl`), costs delay and nothing else."

The same story of two rounds runs many times. Each time the trouble comes one request later, counted over all nodes. So
it comes in every phase: gathering, last call, between the assignment and the commit, the standing round, a newcomer's
waiting, and the next commit. The outcome is the same each time.

`RDZV_R8_EVERY=1` has the trouble at every step.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rdzv import (
    Change,
    Dropped,
    Handler,
    NodesLeft,
    NodesLost,
    NodesWaiting,
    RendezvousInfo,
    RendezvousTimeoutError,
    RoundSupersededError,
)
from tests.support.runs import VirtualRun, assert_one_round, connected, listen
from tests.support.spoken import Request

pytestmark = pytest.mark.virtual_time

STEPS_MOST = 500  # more than all nodes take together; the test says if that ceases to be so
EVERY = int(
    os.environ.get("RDZV_R8_EVERY", "14")
)  # the trouble comes at one step of so many, at different steps for each kind of trouble
OUTAGES = (0.3, 2.0, 4.0)  # seconds: a blink, less than a coordinator's TTL, and more than that but less than a node's


class Life:
    """One node that meets again whenever a node waits to join."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.infos: list[RendezvousInfo] = []
        self.changes: list[Change] = []

    async def live(self) -> None:
        """Go on until cancelled."""
        async with self.handler.changes() as changes:
            while True:
                info = await self.handler.next_rendezvous()
                self.infos.append(info)
                await info.store.add("members", 1)
                async for change in changes:
                    self.changes.append(change)
                    if isinstance(change, NodesWaiting) and change.count:
                        break


async def tell(step: int, trouble: Callable[[VirtualRun], Awaitable[None]], *, durable: bool = True) -> bool:
    """Run the story, with trouble at this step; return whether it reached that step."""
    async with VirtualRun(durable=durable, min_nodes=2, max_nodes=4, last_call_timeout=12, seed=step) as run:
        steps = 0
        begun = asyncio.Event()

        async def hook(_: Request[Any], __: str) -> None:
            nonlocal steps
            steps += 1
            if steps > step and not begun.is_set():
                begun.set()
                run.start(trouble(run), "trouble")

        lives: dict[str, Life] = {}

        async def join(name: str) -> None:
            lives[name] = life = Life(run.handler(name))
            await connected(life.handler)
            run.clients[name].hook = hook
            run.start(life.live(), f"life of {name}")

        for name in "abc":
            await join(name)
            await asyncio.sleep(1)
        await asyncio.sleep(30)
        await join("d")
        await asyncio.sleep(30)
        for client in run.clients.values():
            client.hook = None
        assert_the_same(lives)
        assert await lives["a"].infos[-1].store.get("members") == b"4", "each counted itself once"
        assert len({key.split("/")[1] for key in run.keys("rounds/")}) == 1, "what is over is cleared away"
        return begun.is_set()


def assert_the_same(lives: dict[str, Life]) -> None:
    """Assert the outcome that the story has without any trouble."""
    old, new = [lives[name] for name in "abc"], lives["d"]
    for life in (*old, new):
        assert not [change for change in life.changes if isinstance(change, NodesLost | NodesLeft | Dropped)]
    assert [[info.round for info in life.infos] for life in old] == [[0, 1]] * 3
    assert [info.round for info in new.infos] == [1]
    assert_one_round([life.infos[0] for life in old])
    assert_one_round([life.infos[-1] for life in lives.values()])
    assert {info.world_size for info in (old[0].infos[0], new.infos[0])} == {3, 4}


async def at_every_step(trouble: Callable[[VirtualRun], Awaitable[None]], *, first: int = 0, **how: Any) -> None:
    for step in range(first % EVERY, STEPS_MOST, EVERY):
        try:
            reached = await tell(step, trouble, **how)
        except BaseException as error:
            error.add_note(f"the trouble came at step {step}")
            raise
        if not reached:
            assert step > 40, "the nodes do more than that"
            return
    pytest.fail(f"the nodes take more than {STEPS_MOST} steps; raise STEPS_MOST")


@pytest.mark.some_of(1)
@pytest.mark.parametrize(("outage", "first"), [(outage, first) for first, outage in enumerate(OUTAGES, start=1)])
async def test_r8_a_durable_store_killed_at_any_step_costs_delay_and_nothing_else(outage: float, first: int) -> None:
    async def restart(run: VirtualRun) -> None:
        run.kill_store()
        await asyncio.sleep(outage)
        run.restart_store()

    await at_every_step(restart, first=first)


@pytest.mark.some_of(1)
@pytest.mark.parametrize(("way", "first"), [("cut", 4), ("partition", 5), ("partition the coordinator", 6)])
async def test_r8_a_network_cut_shorter_than_the_ttl_costs_delay_and_nothing_else(way: str, first: int) -> None:
    async def cut(run: VirtualRun) -> None:
        if way == "cut":  # connections were reset: shorter than disconnect_ttl
            run.network.refuse("store")
            run.network.cut("store")
            await asyncio.sleep(0.5)
            run.network.stop_refusing("store")
            return
        which = "store" if way == "partition" else "a"
        run.network.partition(which)
        await asyncio.sleep(5)
        run.network.heal(which)

    await at_every_step(cut, first=first, durable=False)


async def test_r8_a_store_that_is_down_for_longer_than_the_ttl_costs_members_their_round_and_no_more() -> None:
    """R9 prevails then: a member cannot distinguish a store that is down from a network that is cut."""
    async with VirtualRun(durable=True, min_nodes=2, ttl=4) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        heard = [await listen(run, node) for node in (a, b)]
        run.kill_store()
        for one in heard:
            await one.until(Dropped, within=5)
        await asyncio.sleep(20)
        run.restart_store()
        again = await run.meet(a, b)
        assert_one_round(again)
        assert again[0].round == 1
        with pytest.raises(RoundSupersededError):
            await infos[0].store.set("key", "late")


@pytest.mark.parametrize("minutes", [1, 10])
async def test_r8_a_wait_for_a_round_survives_a_store_outage_of_minutes(
    minutes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A durable store that was away for 40 s ended every waiting node and spare, though `join_timeout` was 600."""
    async with VirtualRun(durable=True, min_nodes=2, max_nodes=2, last_call_timeout=0, join_timeout=900) as run:
        parked = [run.start(run.handler("a").next_rendezvous())]
        await asyncio.sleep(20)
        run.kill_store()
        # One more node joins while it is away, and has never met it.
        await asyncio.sleep(5)
        parked.append(run.start(run.handler("b").next_rendezvous()))
        await asyncio.sleep(60 * minutes)
        assert not any(task.done() for task in parked)
        assert "the store has been out of reach for 3 s; node a waits for it, and for a round" in caplog.text
        run.restart_store()
        async with asyncio.timeout(30):
            assert_one_round([await task for task in parked])


async def test_r8_join_timeout_ends_the_wait_for_a_store_that_stays_away_and_says_that_it_is_away() -> None:
    async with VirtualRun(durable=True, min_nodes=2, join_timeout=600) as run:
        waiting = run.start(run.handler("a").next_rendezvous())
        await asyncio.sleep(20)
        run.kill_store()
        began = asyncio.get_running_loop().time()
        with pytest.raises(RendezvousTimeoutError, match=r"join_timeout=600 s .*; the store is out of reach"):
            await waiting
        assert asyncio.get_running_loop().time() - began == pytest.approx(580, abs=5)


@pytest.mark.parametrize(("ttl", "seeds"), [(3, 4), (10, 1)])
async def test_r8_a_store_away_for_less_than_half_the_ttl_costs_no_member_its_place(ttl: float, seeds: int) -> None:
    """With ttl=3 and 1.2 s of absence two of six lost their places: the pauses between attempts were up to 2 s."""
    for seed in range(seeds):
        async with VirtualRun(durable=True, min_nodes=6, max_nodes=6, ttl=ttl, seed=seed) as run:
            nodes = [run.handler(name) for name in "abcdef"]
            await run.meet(*nodes)
            heard = [await listen(run, node) for node in nodes]
            for _ in range(3):
                await asyncio.sleep(ttl)
                run.kill_store()
                await asyncio.sleep(0.4 * ttl)
                run.restart_store()
            await asyncio.sleep(4 * ttl)
            assert [one.changes for one in heard] == [[]] * 6


async def test_r8_a_node_that_died_while_the_store_was_down_counts_as_alive_for_up_to_one_ttl_more() -> None:
    async with VirtualRun(durable=True, min_nodes=1, max_nodes=2, last_call_timeout=1, ttl=6) as run:
        a, _ = await run.met("ab")
        heard = await listen(run, a)
        run.kill_store()
        run.crash("b")
        await asyncio.sleep(2)
        run.restart_store()
        back = asyncio.get_running_loop().time()
        await heard.until(NodesLost(1, ("b",)), within=10)
        assert 3 < heard.times[-1] - back <= 6.2


async def test_r8_a_lease_whose_grant_was_long_under_way_is_renewed_in_time() -> None:
    """Regression: it was renewed a third of its TTL after the answer, when little of it was left: a drop."""
    async with VirtualRun(min_nodes=2, ttl=10) as run:
        a = run.handler("a")
        await connected(a)
        run.network.partition("a")
        joining = run.start(a.next_rendezvous())
        await asyncio.sleep(8)
        run.network.heal("a")
        await asyncio.sleep(0.5)
        lease = a.node.part.arrival.lease
        assert lease is not None
        await asyncio.sleep(20)
        assert a.node.part.arrival.lease is lease, "the first one still holds"
        assert_one_round([await run.handler("b").next_rendezvous(), await joining])
