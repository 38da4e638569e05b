"""R19 Closed runs end: a closed run stays closed for `closed_ttl`, then its keys are removed.

So a server does not grow with the runs it has seen.

Until the last member at work has left a closed run, a node coordinates it, its members hear of deaths and they keep
their shared store.

A planned closing leaves members at work: they run to the step at which all stop, or plain handlers finish their work.
If one of them died, raised or gave up, the others were not notified, and waited in the round's store for ever.
"""

import asyncio
import os

import anyio
import pytest

import rdzv
from rdzv import MembersLostError
from tests.support.runs import VirtualRun, rounds_of

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(5)]

CHAPTERS_MOST, UNFIT_MOST = 128, 64  # rounds that are remembered, and nodes that failed their health check
SHARED_TTL_LEAST = 30.0  # seconds for which the shared keys of a round outlive its last node
DAY = 600.0  # short here; the run has it as a setting


async def test_r19_a_closed_run_stays_closed_for_a_day_and_then_nothing_of_it_is_left() -> None:
    async with VirtualRun(min_nodes=2, closed_ttl=DAY) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", "weights")
            await info.store.add("steps", 1)
            await info.store.append("log", "line")
            await info.store.queue_push("queue", "item")
        await a.set_closed("done")
        await a.aclose()
        await b.aclose()
        await asyncio.sleep(DAY * 0.9)
        with pytest.raises(rdzv.RendezvousClosedError, match="done"):
            await run.handler("late").next_rendezvous()
        await asyncio.sleep(DAY * 0.4)
        assert run.keys() == []


async def test_r19_a_closed_run_ends_also_on_a_server_that_restarted_meanwhile() -> None:
    """R19, S5: no sooner than it would have, and at the latest `closed_ttl` after the restart."""
    async with VirtualRun(durable=True, min_nodes=2, closed_ttl=DAY) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", "weights")
        await a.set_closed("done")
        await a.aclose()
        await b.aclose()
        await asyncio.sleep(DAY * 0.7)
        run.kill_store()
        await asyncio.sleep(5)
        run.restart_store()
        await asyncio.sleep(DAY * 0.9)
        with pytest.raises(rdzv.RendezvousClosedError, match="done"):
            await run.handler("late").next_rendezvous()
        await asyncio.sleep(DAY * 0.2)
        assert run.keys() == []


async def test_r19_a_run_that_all_nodes_left_without_closing_it_ends_as_well() -> None:
    async with VirtualRun(min_nodes=2, closed_ttl=600) as run:
        await run.met("ab")
        run.crash("a")
        run.crash("b")
        await asyncio.sleep(700)
        assert run.keys() == []


@pytest.mark.parametrize("ending", ["closed and gone", "left", "killed"])
async def test_r19_the_last_rounds_shared_store_is_deleted_though_the_run_is_remembered_for_a_day(ending: str) -> None:
    """The run leaves a record of a few hundred bytes. Its shared store goes at once, since no node can read it any
    more.

    It stayed for a day: after 51 runs of 20 MiB, the store rejected all writes.
    """
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        for info in await run.meet(a, b):
            await info.store.set(f"model/{info.rank}", bytes(100_000))
        await asyncio.sleep(600)
        assert len(run.keys("store/")) == 2
        if ending == "closed and gone":
            await a.set_closed("done")
        if ending == "killed":
            run.crash("a")
            run.crash("b")
        else:
            await a.aclose()
            await b.aclose()
        await asyncio.sleep(SHARED_TTL_LEAST + 1)
        assert run.keys("store/") == []
        assert run.keys("head/round"), "the run is remembered"
        assert run.server.figures()["stored_bytes"] < 3500, "keys and values of 1 kB, and 200 bytes that each costs"


async def test_r19_a_run_that_goes_on_keeps_its_keys_for_longer_than_closed_ttl() -> None:
    """R19 is about closed runs: a running one keeps its shared keys, also when its coordinator changes."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1, closed_ttl=60) as run:
        a, b, c = run.handler("a"), run.handler("b"), run.handler("c")
        infos = await run.meet(a, b, c)
        await infos[1].store.set("model", "weights")
        await asyncio.sleep(500)
        coordinator = (await b.status()).coordinator
        assert coordinator is not None
        run.crash(coordinator)
        await asyncio.sleep(500)
        survivor = next(info for info in infos if info.node_id != coordinator)
        assert await survivor.store.get("model") == b"weights"
        assert run.keys("settings") == [""]


@pytest.mark.in_ci
async def test_r19_two_hundred_rounds_leave_no_more_keys_than_two() -> None:
    """R10: a round's store is removed when a later round completes, with all other keys of that round."""
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        counts = {}
        for number in range(200):
            for info in await run.meet(a, b):
                assert info.round == number
                await info.store.set(f"key/{info.rank}", "value")
            await asyncio.sleep(0.1)
            counts[number] = len(run.keys())
        assert counts[199] == counts[1]
        assert len(await a.history()) == CHAPTERS_MOST  # the history is kept, and it is bounded, too


async def test_r19_two_hundred_failed_health_checks_leave_a_bounded_record() -> None:
    """R19: "nor with the attempts to join them": each left a key and a lease for a day, and status named them all."""
    async with VirtualRun(min_nodes=2) as run:
        for number in range(200):
            handler = run.handler(f"made-up-{number}", health_check=lambda: "no GPU")
            with pytest.raises(rdzv.RendezvousError, match="no GPU"):
                await handler.next_rendezvous()
            await handler.aclose()
        status = await run.handler("looks").status()
        assert len(status.refused) == UNFIT_MOST
        assert f"made-up-{199}" in status.refused
        assert len(run.keys()) <= UNFIT_MOST + 3
        assert run.server.figures()["leases"] == 1


ENDINGS = ("closed", "left", "killed", "timed out", "half killed", "closed and killed", "unfit", "regrouped")

RUNS = int(os.environ.get("RDZV_RUNS", "80"))
"""The number of runs that end in the test below; `.ci/run` sets 2,000, which take a minute."""


async def end(run: VirtualRun, ending: str, number: int) -> None:
    """Let a run of two nodes end in one way."""
    names = [f"a-{number}", f"b-{number}"]
    a, b = [run.handler(name, run_id=f"run-{number}") for name in names]
    if ending == "timed out":
        with pytest.raises(rdzv.RendezvousTimeoutError):
            await a.next_rendezvous()
    elif ending == "unfit":
        with pytest.raises(rdzv.RendezvousError, match="health check"):
            await run.handler(f"unfit-{number}", run_id=f"run-{number}", health_check=lambda: False).next_rendezvous()
    else:
        for info in await run.meet(a, b):
            await info.store.set(f"key/{info.rank}", bytes(1000))
        if ending == "regrouped":
            await run.meet(a, b)
        if ending.startswith("closed"):
            await b.set_closed("done")
    for name, handler in zip(names, (a, b), strict=True):
        if ending in ("killed", "closed and killed") or (ending == "half killed" and handler is a):
            run.crash(name)
        else:
            await handler.aclose()


@pytest.mark.in_ci
async def test_r19_two_minutes_after_runs_of_every_ending_the_store_holds_no_key_and_no_lease() -> None:
    async with VirtualRun(min_nodes=2, closed_ttl=60, join_timeout=5) as run:
        numbers = iter(range(RUNS))

        async def one_after_the_other() -> None:
            for number in numbers:
                await end(run, ENDINGS[number % len(ENDINGS)], number)

        await asyncio.gather(*(one_after_the_other() for _ in range(8)))
        assert run.server.figures()["keys"] > 0
        await asyncio.sleep(120)
        assert (run.server.figures()["keys"], run.server.figures()["leases"]) == (0, 0)


LONG = 600.0  # seconds; many times the duration of a round's lease that is not renewed


@pytest.mark.parametrize("after", [0.1, 10.0])
@pytest.mark.parametrize("who", ["coordinator", "another"])
async def test_r19_a_member_that_dies_after_the_closing_ends_the_waits_of_the_others(who: str, after: float) -> None:
    async with VirtualRun(min_nodes=3) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        infos = {info.node_id: info for info in await run.meet(*handlers.values())}
        coordinator = (await handlers["a"].status()).coordinator
        dies = coordinator if who == "coordinator" else next(name for name in handlers if name != coordinator)
        assert dies is not None
        await handlers[dies].set_closed("planned")
        survivors = [info for name, info in infos.items() if name != dies]
        waits = [run.start(info.store.get("what the dead one was to write")) for info in survivors]
        await asyncio.sleep(after)
        run.crash(dies)
        for wait in waits:
            with anyio.fail_after(5), pytest.raises(MembersLostError) as lost:
                await wait
            assert lost.value.node_ids == (dies,)


@pytest.mark.in_ci
async def test_r19_a_second_death_after_the_closing_is_announced_as_well() -> None:
    """The first death may have been the coordinator's: another member coordinates the closed run."""
    async with VirtualRun(min_nodes=4) as run:
        handlers = {name: run.handler(name) for name in "abcd"}
        infos = {info.node_id: info for info in await run.meet(*handlers.values())}
        await handlers["a"].set_closed("planned")
        for count in (1, 2):
            await asyncio.sleep(LONG)
            dies = (await next(iter(handlers.values())).status()).coordinator
            assert dies is not None, "somebody coordinates for as long as there are members"
            run.crash(dies)
            del handlers[dies], infos[dies]
            await asyncio.sleep(5)
            for info in infos.values():
                with pytest.raises(MembersLostError) as lost:
                    await info.store.get("what the dead one was to write")
                assert len(lost.value.node_ids) == count


@pytest.mark.in_ci
async def test_r19_the_shared_store_stays_while_a_member_is_at_work() -> None:
    """It goes once all have left. A lease that was not renewed ended live members with `LeaseNotFound`."""
    async with VirtualRun(min_nodes=3, closed_ttl=60) as run:
        handlers = [run.handler(name) for name in "abc"]
        first, second, third = await run.meet(*handlers)
        await first.store.set("model", "weights")
        await handlers[0].set_closed("planned")
        await asyncio.sleep(LONG)
        assert await second.store.get("model") == b"weights"
        assert await second.store.add("steps", 1) == 1
        await handlers[0].aclose()
        await handlers[1].aclose()
        await asyncio.sleep(LONG)
        assert await third.store.get("model") == b"weights"
        assert await third.store.add("steps", 1) == 2
        await handlers[2].aclose()
        await asyncio.sleep(120)
        assert run.keys() == []


async def test_r19_a_body_hears_of_a_death_on_its_way_to_the_step_where_all_stop() -> None:
    """`rounds()`: all members are to stop before the next step, and wait in this one for the member that dies."""
    async with VirtualRun(min_nodes=3) as run:
        ended: dict[str, bool] = {}

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round:
                    await round.check(0)
                    if name == "a":
                        await asyncio.sleep(1)
                        await round.store.set("begun", "")
                        await asyncio.sleep(LONG)  # until it is killed
                    if name == "b":
                        await round.store.wait(["begun"])
                        await operator.set_closed("planned")
                    await round.store.wait(["what a was to write"])
            ended[name] = True

        operator = run.handler("operator", min_nodes=None)
        bodies = {name: run.start(train(name), name) for name in "abc"}
        await asyncio.sleep(60)
        run.crash("a")
        bodies["a"].cancel()
        with anyio.fail_after(30):
            await asyncio.wait([bodies["b"], bodies["c"]])
        assert ended == {"b": True, "c": True}
