"""S13: "the next host's store begins empty, and the nodes carry over what they know of the run".

In virtual time, where the store is replaced by an empty one, as by the next host.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rdzv import (
    Handler,
    NodesWaiting,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousStateError,
    RoundSupersededError,
    RunStatus,
)
from tests.support.limits import limits_with
from tests.support.runs import VirtualRun, assert_one_round, connected
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time

HOSTS = "a,b,c:29400"
TTL = 10.0  # the default of `ttl`


async def replace(run: VirtualRun) -> None:
    run.kill_store()
    await asyncio.sleep(0.2)
    run.restart_store()


async def test_s13_survivors_meet_at_once_with_the_order_of_their_ranks_and_above_their_last_round() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=30) as run:
        nodes = [run.handler(name) for name in "wxyz"]
        for _ in range(3):
            await run.meet(*nodes)
        before = await run.meet(*nodes)
        run.crash("x")
        await asyncio.sleep(1.0)  # its loss is announced
        await replace(run)
        began = now()
        survivors = [nodes[0], nodes[2], nodes[3]]
        after = await run.meet(*survivors)
        assert_one_round(after)
        assert after[0].round == before[0].round + 1
        assert now() - began < 2.0, "the last call of 30 s is not waited for"
        (chapter,) = await survivors[0].history()
        assert [one.kind for one in chapter.incidents] == ["store lost"]
        ranks = {info.rank: was.rank for info, was in zip(after, (before[0], before[2], before[3]), strict=True)}
        assert sorted(ranks.items()) == sorted(zip(range(3), sorted(ranks.values()), strict=True))


@pytest.mark.parametrize("early", [True, False])
async def test_s13_the_first_round_waits_for_a_member_that_may_still_be_at_work_until_its_ttl(early: bool) -> None:
    """It waited for the rest of the last call, too, though no other node was expected any more."""
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=3, last_call_timeout=60, early_last_call=early) as run:
        nodes = [run.handler(name) for name in "xyz"]
        infos = await run.meet(*nodes)
        run.network.partition("z")  # it does not hear that the store was lost, and works on
        await replace(run)
        began = now()
        assert (await run.meet(*nodes[:2]))[0].world_size == 2
        until = TTL if early else 60.0
        assert until - 1 < now() - began < until + 3
        with pytest.raises(RoundSupersededError):
            await infos[0].store.set("key", "of the old round")


async def test_s13_the_wait_for_a_member_is_explained_and_ends_when_it_comes() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "xyz"]
        await run.meet(*nodes)
        run.network.partition("z")
        await replace(run)
        joining = [await run.join(node) for node in nodes[:2]]
        await asyncio.sleep(2.0)
        assert "1 of 3 nodes of round 0, whose store was lost, may still be at work" in nodes[0].reason
        run.network.heal()
        infos = [await nodes[2].next_rendezvous(), *[await task for task in joining]]
        assert_one_round(infos)
        assert infos[0].world_size == 3
        assert infos[0].round == 1


async def test_s13_a_fresh_node_that_comes_first_undoes_no_resize() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "wxyz"]
        await run.meet(*nodes)
        async with run.looked_at() as seen:
            await seen.resize(max_nodes=3)
        await nodes[3].aclose()
        await run.meet(*nodes[:3])
        for name in "wxy":
            run.network.partition(name)
        await replace(run)
        fresh = [run.handler(f"fresh{number}") for number in range(3)]
        first = [await run.join(fresh[0])]
        await asyncio.sleep(0.5)
        run.network.heal()
        survivors = await run.meet(*nodes[:3])
        assert {info.world_size for info in survivors} == {3}
        assert not first[0].done(), "three nodes are all that a round takes now"


async def test_s13_a_resize_holds_of_which_the_members_have_only_heard() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "xyz"]
        await run.meet(*nodes)
        coordinator = run.engine._keys.entries["/rdzv/job/head/coordinator"].value.decode()
        async with run.looked_at() as seen:
            await seen.resize(max_nodes=2)
        await asyncio.sleep(0.5)
        run.crash(coordinator)
        await replace(run)
        infos = await run.meet(*(node for node in nodes if node.node_id != coordinator))
        assert infos[0].world_size == 2
        late = await run.join(run.handler("late"))
        await asyncio.sleep(2.0)
        assert not late.done()
        assert {node.num_nodes_changed() for node in nodes if node.node_id != coordinator} == {0}, "it has no room"


async def test_s13_a_store_that_is_lost_while_nodes_connect_ends_no_node() -> None:
    """The second loss, before a survivor has read the store that replaced the first one."""
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=2, latency=0.05) as run:
        nodes = [run.handler(name) for name in "xy"]
        before = await run.meet(*nodes)
        joining = [run.start(node.next_rendezvous()) for node in nodes]
        await replace(run)
        for number in range(12):
            await asyncio.sleep(0.13 + 0.02 * number)
            run.kill_store()
            await asyncio.sleep(0.05)
            run.restart_store()
        infos = [await task for task in joining]
        assert_one_round(infos)
        assert infos[0].round > before[0].round


async def test_s13_a_fresh_node_that_comes_first_undoes_no_ban() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "xy"]
        await run.meet(*nodes)
        async with run.looked_at() as seen:
            await seen.ban("banned", "bad memory")
            await seen.ban("banned_for_a_minute", lasts=60)
        await asyncio.sleep(30)
        await replace(run)
        await run.meet(*nodes)
        for name in ("banned", "banned_for_a_minute"):
            with pytest.raises(RendezvousRefusedError, match="banned"):
                await run.handler(name).next_rendezvous()
        await asyncio.sleep(31)
        assert (await run.join(run.handler("banned_for_a_minute"))).done() is False, "its minute is over"


COUNTS = b"\x82\xa8restarts\x02\xa9fruitless\x01"
Change = Callable[["Handler"], Awaitable[object]]
CHANGES: dict[str, tuple[Change, Callable[[RunStatus, bytes], bool]]] = {
    "resize": (lambda node: node.resize(max_nodes=5), lambda status, _: status.settings["max_nodes"] == 5),
    "ban": (lambda node: node.ban("z"), lambda status, _: "z" in status.banned),
    "ban for a minute": (lambda node: node.ban("z", lasts=60), lambda status, _: "z" in status.banned),
    "closing": (lambda node: node.set_closed("it is done"), lambda status, _: "it is done" in str(status.closed)),
    "counts": (lambda node: node.change_counts(lambda _: COUNTS), lambda _, tally: tally == COUNTS),
}


@pytest.mark.parametrize("first", ["who made it", "who has not heard of it", "a new node", ""])
@pytest.mark.parametrize("change", CHANGES)
async def test_s13_a_change_acknowledged_just_before_the_loss_holds_whoever_comes_first(
    change: str, first: str
) -> None:
    make, holds = CHANGES[change]
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=1, ttl=60) as run:
        x, y = await run.met("xy")
        if first:
            run.network.partition("y")
        await make(x)
        run.kill_store()
        for name in "xy" if first else "":
            run.network.partition(name)
        await replace(run)
        await asyncio.sleep(1.0)  # they know that the store is lost
        order = {"who made it": [x, y], "who has not heard of it": [y, x], "a new node": [run.handler("new"), x, y]}
        joining = []
        for node in order.get(first, [x, y]):
            run.network.heal(node.node_id)
            joining.append(run.start(node.next_rendezvous()))
            await asyncio.sleep(1.0 if first else 0.0)
        done, _ = await asyncio.wait(joining[-2:], timeout=20)
        assert len(done) == 2
        for node in [x, y]:
            assert holds(await node.status(), await node.change_counts(bytes))
        assert change != "closing" or all(isinstance(task.exception(), RendezvousClosedError) for task in done)


async def test_s13_the_later_knowledge_stands_as_a_whole() -> None:
    """A member that was cut off before a ban was lifted comes first to the new store, and is corrected."""
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=3, last_call_timeout=1, ttl=60) as run:
        x, y = run.handler("x"), run.handler("y")
        await run.meet(x, y)
        async with run.looked_at() as seen:
            await seen.ban("z")
            await asyncio.sleep(0.5)
            run.network.partition("x")
            await seen.unban("z")
            await asyncio.sleep(0.5)
        run.network.partition("y")
        await replace(run)
        run.network.heal("x")
        joining = [await run.join(x)]
        await asyncio.sleep(0.5)
        run.network.heal()
        joining.append(await run.join(y))
        infos = [await task for task in joining]
        assert_one_round(infos)
        joining = [await run.join(run.handler("z"))]
        await asyncio.sleep(0.5)
        assert_one_round([*await run.meet(x, y), await joining[0]])


async def test_s13_a_store_that_is_lost_before_its_first_round_passes_the_knowledge_on() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "xyz"]
        for _ in range(2):
            await run.meet(*nodes)
        run.network.partition("z")
        await replace(run)
        joining = [await run.join(node) for node in nodes[:2]]
        await asyncio.sleep(1.0)
        await replace(run)
        await asyncio.sleep(1.0)
        assert "1 of 3 nodes of round 1" in nodes[0].reason
        run.network.heal()
        infos = [await nodes[2].next_rendezvous(), *[await task for task in joining]]
        assert_one_round(infos)
        assert infos[0].round == 2


async def test_s13_a_member_of_a_lost_store_is_drained_in_the_next_one() -> None:
    """Regression: if the next store's revisions are lower, a member ignored its drain, and all met again and again."""
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=4, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "wxyz"]
        await run.meet(*nodes)
        revisions = [run.engine.revision]
        while len(nodes) > 2:
            await replace(run)
            await run.meet(*nodes)
            revisions.append(run.engine.revision)
            leaving = nodes.pop()
            await nodes[0].drain(node_id=leaving.node_id)
            with pytest.raises(RendezvousGracefulExitError, match=f"{leaving.node_id} is to leave"):
                await leaving.next_rendezvous()
        assert revisions[0] > revisions[1] < revisions[2], "as they begin at random, both happen"


async def test_s13_a_drain_in_a_store_that_ends_is_refused_as_the_node_may_be_gone_before_it_reads_it() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=2) as run:
        one, other = nodes = [run.handler(name) for name in "xy"]
        await run.meet(*nodes)
        await one.node.call_store(lambda store: store.put(one.node.keys.moving, b"", ttl=60))
        with pytest.raises(RendezvousStateError, match="the next one serves; drain node y there"):
            await one.drain(node_id=other.node_id)


async def test_s13_nodes_with_different_lists_do_not_meet_and_both_lists_are_named() -> None:
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=2) as run:
        await run.join(run.handler("x"))
        await asyncio.sleep(0.5)
        run._hosts = "a,b:29400"
        with pytest.raises(RendezvousSettingsError, match=r"tcp://a:29400,b:29400' here and 'tcp://a:29400,b:29400,c"):
            await run.handler("y").next_rendezvous()


async def test_s13_with_one_host_the_restarted_store_continues_the_run_as_well() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=2, last_call_timeout=1) as run:
        nodes = [run.handler(name) for name in "xy"]
        for _ in range(3):
            await run.meet(*nodes)
        async with run.looked_at() as seen:
            await seen.ban("z", "bad memory")
        await asyncio.sleep(0.5)
        await replace(run)
        assert (await run.meet(*nodes))[0].round == 3
        with pytest.raises(RendezvousRefusedError, match="bad memory"):
            await run.handler("z").next_rendezvous()


async def test_s13_a_round_of_new_nodes_with_an_old_number_is_awaited_like_any_other() -> None:
    """Regression: after a round 0 of new nodes, the members of the older store's round 0 passed for its members."""
    async with VirtualRun(hosts=HOSTS, min_nodes=2, max_nodes=2, last_call_timeout=1) as run:
        old = [run.handler(name) for name in "xy"]
        await run.meet(*old)
        run.network.partition("x")
        run.network.partition("y")
        await replace(run)
        new = [run.handler(name) for name in "ab"]
        (first, _) = await run.meet(*new)
        assert first.round == 0
        run.network.heal("x")
        joining = [await run.join(old[0])]  # it tells what it knows of the other round 0
        await asyncio.sleep(1.0)
        run.network.partition("a")  # it works on in the round of the new nodes
        await replace(run)
        began = now()
        joining.append(await run.join(new[1]))
        await asyncio.sleep(TTL / 2)
        assert not any(task.done() for task in joining)
        infos = [await task for task in joining]
        assert_one_round(infos)
        assert infos[0].round > 0
        assert now() - began > TTL - 1


STEPS_MOST = 120  # more than the coordinator takes; the test says if that ceases to be so


async def elastic(handler: Handler, infos: list[RendezvousInfo]) -> None:
    """Take part, and meet again whenever the round has changed."""
    async with handler.changes() as changes:
        while True:
            infos.append(await handler.next_rendezvous())
            async for change in changes:
                if not isinstance(change, NodesWaiting) or change.count:
                    break


async def tell(step: int, moment: str, *, both: bool) -> bool:
    """Lose the store at this step of the coordinator, which dies as well if `both`; return if it took that step."""
    limits = limits_with(writes_max=8)  # several requests for each commit
    async with VirtualRun(
        hosts=HOSTS, seed=step, limits=limits, min_nodes=2, max_nodes=4, last_call_timeout=1, ttl=3
    ) as run:
        seen: dict[str, list[RendezvousInfo]] = {name: [] for name in "abcd"}
        steps, lost = 0, asyncio.Event()

        async def hook(*about: object) -> None:
            nonlocal steps
            steps += about[1] == moment
            if steps > step and not lost.is_set():
                lost.set()
                run.kill_store()
                asyncio.get_running_loop().call_later(0.2, run.restart_store)
                if both:
                    run.crash("a")
                    await asyncio.Event().wait()

        a = run.handler("a")
        await connected(a)
        run.clients["a"].hook = hook
        task = run.start(elastic(a, seen["a"]))
        run._joins.append((a, task))  # `crash` cancels it
        for name, pause in (("b", 0.5), ("c", 0.5), ("d", 5.0)):  # d comes when a round stands
            await asyncio.sleep(pause)
            run.start(elastic(run.handler(name), seen[name]))
        await asyncio.sleep(40)
        if not lost.is_set():
            return False
        survivors = [seen[name] for name in "abcd"[both:]]
        assert all(survivors), "a survivor has never been in a round"
        assert_one_round([infos[-1] for infos in survivors])
        assert survivors[0][-1].world_size == 4 - both
        for infos in seen.values():
            numbers = [info.round for info in infos]
            assert numbers == sorted(set(numbers))
        for number in {info.round for infos in seen.values() for info in infos}:
            of_round = [info for infos in seen.values() for info in infos if info.round == number]
            assert len({(one.world_size, one.bootstrap_address) for one in of_round}) == 1
            assert len({one.rank for one in of_round}) == len(of_round), "forked"
        return True


@pytest.mark.some_of(1)
@pytest.mark.parametrize("both", [False, True], ids=["the store", "the store and the coordinator"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_s13_the_store_may_die_between_any_two_requests_of_its_coordinator(moment: str, both: bool) -> None:
    for step in range(STEPS_MOST):
        if not await tell(step, moment, both=both):
            assert step > 12, "the coordinator does more than that"
            return
    pytest.fail(f"the coordinator takes more than {STEPS_MOST} steps; raise STEPS_MOST")
