"""R19 "Closing ends no promise to members who are still at work: somebody coordinates, and the round's lease is kept,
until the last of them has left."

A run is closed by plan while its members still run to the step at which all stop, or while plain handlers finish what
they do. Who dies, raises or gives up meanwhile was told to nobody: the others waited in the round's store for ever.
"""

from __future__ import annotations

import asyncio

import anyio
import pytest

from rdzv import MembersLostError
from rdzv.loop.rounds import rounds_of
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time

LONG = 600.0  # seconds; many times what a round's lease lasts without anybody who renews it


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


async def test_r19_a_second_death_after_the_closing_is_told_as_well() -> None:
    """The first may have been the coordinator's: one of those who are left coordinates a run that is closed."""
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


async def test_r19_what_members_share_stays_for_as_long_as_one_of_them_is_at_work() -> None:
    """Once all have left, it goes; a lease that nobody renewed ended live members with `LeaseNotFound`."""
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
    """`rounds()`: all are to stop before the next step, and the one of them that dies in this one is waited for."""
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
