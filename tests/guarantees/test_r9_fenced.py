"""Promise R9: a dropped node knows it at the latest when its TTL has run out on its own clock, and is fenced.

The harder cases run on virtual time: the node that is cut off is the coordinator itself, and its commit is on its way.
`test_real_processes_handlers.py` and `tests/chaos` pause real processes.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rdzv import Dropped, NodesLost, NodesWaiting, RendezvousInfo, RoundSupersededError, SharedStore
from store import ConditionFailed, Put, TransactionResult
from tests.support.runs import VirtualRun, assert_one_round, connected, listen
from tests.support.spoken import Request, Transact
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time

LATENCY_MOST = 0.001  # seconds, of the network these runs meet over


def commits(request: Request[Any]) -> bool:
    """Return True if this request would complete a round."""
    return isinstance(request, Transact) and any(
        isinstance(write, Put) and write.key.endswith("/head/round") for write in request.then
    )


@pytest.mark.parametrize("seed", range(6))
async def test_r9_a_node_that_is_cut_off_knows_before_the_others_go_on_without_it(seed: int) -> None:
    """Its TTL counts from the *sending* of the last acknowledged renewal, so it ends before the lease in the store."""
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=0.5, ttl=6, seed=seed) as run:
        a, b = await run.met("ab")
        await asyncio.sleep(run._rng.uniform(0, 6))
        at_a, at_b = await listen(run, a), await listen(run, b)
        cut_at = now()
        run.network.partition("a")
        await at_a.until(Dropped, within=6.001)
        await at_b.until(NodesLost(1, ("a",)), within=9)
        assert at_a.times[-1] <= at_b.times[-1]
        assert at_a.times[-1] - cut_at >= 6 * 2 / 3 - 0.1, "and no sooner than it must"


@pytest.mark.parametrize("away", [5, 15], ids=["for less than its ttl", "for longer"])
@pytest.mark.parametrize("cut", ["before it reaches the store", "before its answer comes back"])
async def test_r9_a_coordinator_cut_off_with_its_commit_on_the_way_makes_no_second_round(cut: str, away: float) -> None:
    async with VirtualRun(min_nodes=3, max_nodes=3, ttl=10, join_timeout=120) as run:
        a, b, c = (run.handler(name) for name in "abc")
        await connected(a)
        sent_at = 0.0

        async def hook(request: Request[Any], when: str) -> None:
            nonlocal sent_at
            if when == "before" and commits(request) and not sent_at:
                sent_at = now()
                if cut == "before it reaches the store":
                    run.network.partition("a")
                else:
                    asyncio.get_running_loop().call_later(LATENCY_MOST + 1e-5, run.network.partition, "a")

        run.clients["a"].hook = hook
        joining = {node: await run.join(node) for node in (a, b, c)}
        await asyncio.sleep(away)
        assert sent_at
        first = [await joining[b], await joining[c]]
        committed_by = {term_of(info) for info in first}
        run.network.heal("a")
        if away == 15:  # the others had a round of three, and have lost one of them
            await (await listen(run, b)).until(NodesLost(1, ("a",)), NodesWaiting(1))
            joining |= {node: await run.join(node) for node in (b, c)}
        infos = [await task for task in joining.values()]
        assert_one_round(infos)
        assert {info.round for info in first} == {0}
        assert infos[0].round == (1 if away == 15 else 0)
        assert len(committed_by) == 1
        await asyncio.sleep(5)
        assert [info.superseded() for info in infos] == [None] * 3, "what was on its way has changed nothing"
        assert (await b.status()).round == infos[0].round
        assert len({key.split("/")[1] for key in run.keys("rounds/")}) == 1, "the other attempt is cleared away"


def term_of(info: RendezvousInfo) -> int:
    """Return the term of the coordinator that made this round."""
    return info._membership.round.term


WRITES: dict[str, Callable[[SharedStore], Awaitable[object]]] = {
    "set": lambda shared: shared.set("key", "late"),
    "add": lambda shared: shared.add("sum", 1),
    "append": lambda shared: shared.append("log", "late"),
    "compare_set": lambda shared: shared.compare_set("key", "value", "late"),
    "delete_key": lambda shared: shared.delete_key("key"),
    "queue_push": lambda shared: shared.queue_push("queue", "late"),
    "multi_set": lambda shared: shared.multi_set(["key", "other"], ["late", "late"]),
}


@pytest.mark.parametrize("way", ["its lease lapses", "a later round completes"])
@pytest.mark.parametrize("write", WRITES)
async def test_r9_a_write_that_is_under_way_when_the_node_is_dropped_is_refused_by_the_store(
    write: str, way: str
) -> None:
    """R9: every such write is conditional on the round and on the node's own record. The node's own knowledge cannot
    help here: it has sent the write already, and the network delays it.
    """
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=0.5, ttl=6) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        (mine,) = [info for info in infos if info.node_id == "a"]
        (theirs,) = [info for info in infos if info.node_id == "b"]
        await theirs.store.set("key", "value")
        sent: list[Request[Any]] = []

        async def hook(request: Request[Any], when: str) -> None:
            if when == "before":
                sent.append(request)
                await asyncio.Event().wait()

        await mine.store.check(["key"])  # its client is made at first use
        run.shared_clients["a"].hook = hook
        run.start(WRITES[write](mine.store))
        await asyncio.sleep(0.1)
        (request,) = sent
        run.shared_clients["a"].hook = None
        if way == "its lease lapses":
            run.network.partition("a")
            await asyncio.sleep(8)
            holds = theirs
        else:
            joining = await run.join(b)
            await a.leave()
            back = await run.join(a)
            holds = await joining
            if not back.done():
                back.cancel()
        before = {key: run.engine._keys.entries[key] for key in run.keys_whole("store/")}
        with contextlib.suppress(ConditionFailed):
            response = await run.clients["b"].call(request)
            assert isinstance(response, TransactionResult)
            assert not response.succeeded
        after = {key: run.engine._keys.entries[key] for key in run.keys_whole("store/")}
        assert before == after
        assert holds.superseded() is None


async def test_r9_the_same_write_is_taken_while_the_node_is_a_member() -> None:
    """Otherwise the test above would pass if such writes were always refused."""
    async with VirtualRun(min_nodes=1, max_nodes=1) as run:
        (info,) = await run.meet(run.handler("a"))
        sent: list[Request[Any]] = []

        async def hook(request: Request[Any], when: str) -> None:
            if when == "before":
                sent.append(request)

        await info.store.check(["key"])
        run.shared_clients["a"].hook = hook
        await info.store.set("key", "value")
        run.shared_clients["a"].hook = None
        await connected(run.handler("observer", min_nodes=None, max_nodes=None))
        await run.clients["observer"].call(sent[0])


@pytest.mark.parametrize("moment", ["the record goes", "a moment later"])
async def test_r9_a_node_removed_from_its_round_is_notified_even_if_the_coordinator_dies_just_then(moment: str) -> None:
    """Regression: it learned that only from a later report. Without one it was notified of its own loss as if another
    node was lost, never of being dropped, and could become the next coordinator.
    """
    async with VirtualRun(min_nodes=1, max_nodes=4, last_call_timeout=1, ttl=60) as run:
        handlers = {name: run.handler(name) for name in "abcd"}
        infos = {info.node_id: info for info in await run.meet(*handlers.values())}
        coordinator = (await handlers["a"].status()).coordinator
        assert coordinator is not None
        accused, *others = [name for name in handlers if name != coordinator]
        heard = {name: await listen(run, handlers[name]) for name in (accused, *others)}
        dead = asyncio.Event()

        async def die(request: object, when: str) -> None:
            if when == "after" and f"/nodes/{accused}" in repr(request) and "Delete" in repr(request):
                await asyncio.sleep(0 if moment == "the record goes" else 0.03)
                dead.set()
                await asyncio.sleep(3600)

        run.clients[coordinator].hook = die
        for name in others:
            await handlers[name].accuse(infos[accused].rank, "connection refused")
        await dead.wait()
        run.crash(coordinator)
        await heard[accused].until(Dropped, within=5)
        assert not any(isinstance(change, NodesLost) for change in heard[accused].changes), "it is no other's loss"
        for name in others:
            await heard[name].until(NodesLost(2, (accused, coordinator)), within=5)
            (first, *_) = [change for change in heard[name].changes if isinstance(change, NodesLost)]
            assert "connection refused" in first.reasons[accused]
        assert (await handlers[others[0]].status()).coordinator in others
        with pytest.raises(RoundSupersededError):
            await infos[accused].store.set("key", "value")


async def test_r9_a_node_that_joins_the_next_round_is_not_dropped_by_it() -> None:
    """On etcd a push may come before an answer: a node read of its round before its arrival was answered."""

    async def answers_come_late(request: Any, when: str) -> None:
        if when == "after" and isinstance(request, Transact):
            await asyncio.sleep(0.5)

    async with VirtualRun(min_nodes=2) as run:
        a, b = await run.met("ab")
        heard = [await listen(run, node) for node in (a, b)]
        run.clients["b"].hook = answers_come_late
        assert_one_round(await run.meet(a, b))
        assert not any(isinstance(change, Dropped) for one in heard for change in one.changes)
