"""Members that have used up the limits of their run, or of the store, with shared data can still meet again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from rdzv import RendezvousInfo
from rdzv.core.state import Closed, Draining, NodesLost, NodesWaiting
from rdzv.errors import MembersLostError, RendezvousConnectionError, RendezvousTimeoutError, RoundSupersededError
from rdzv.node.handler import Handler
from store import LimitExceeded, Limits
from store.net.tasks import cancel_and_wait
from tests.support.runs import VirtualRun, assert_one_round, listen, rounds_of

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(5)]

ROOM = 64 * 1024


MEMORY = Limits(
    value_bytes_max=ROOM // 2,
    frame_bytes_max=ROOM,
    outbox_bytes_max=16 * ROOM,
    history_bytes_max=ROOM,
    memory_bytes_max=20 * ROOM,
)
LIMITS = [
    Limits(group_bytes_max=ROOM),
    Limits(stored_bytes_max=ROOM),
    Limits(group_keys_max=200),
    Limits(keys_max=200),
    MEMORY,
]
all_limits = pytest.mark.parametrize(
    "limits", LIMITS, ids=["bytes of a run", "bytes", "keys of a run", "keys", "all memory"]
)


async def fill(info: RendezvousInfo) -> None:
    """Share keys until the store takes not even one byte more."""
    for size in (4096, 256, 1):
        number = 0
        try:
            while True:
                await info.store.set(f"{size}/{number}", bytes(size))
                number += 1
        except LimitExceeded:
            pass


@all_limits
@pytest.mark.parametrize("lost", ["a", "c"])
async def test_members_whose_shared_store_is_full_meet_again_after_a_loss(limits: Limits, lost: str) -> None:
    async with VirtualRun(limits=limits, min_nodes=2, max_nodes=3, ttl=3, last_call_timeout=1) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        first = await run.meet(*handlers.values())
        await fill(first[1])
        survivors = [handler for name, handler in handlers.items() if name != lost]
        heard = [await listen(run, handler) for handler in survivors]
        run.crash(lost)
        for one in heard:
            await one.until(NodesLost, within=5.0)
        infos = await asyncio.wait_for(run.meet(*survivors), 30)
        assert_one_round(infos)
        assert infos[0].round == first[0].round + 1
        await infos[0].store.set("k", bytes(1024))


@pytest.mark.in_ci
@all_limits
@pytest.mark.parametrize("lost", ["c", "ab", "abc"])
async def test_new_nodes_take_the_places_of_lost_ones_whose_shared_store_is_full(limits: Limits, lost: str) -> None:
    """Regression: the newcomers were refused for want of room, and without them there was no round to make it."""
    async with VirtualRun(limits=limits, min_nodes=3, ttl=3, last_call_timeout=1, durable=True) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        first = await run.meet(*handlers.values())
        await fill(first[0])
        for name in lost:
            run.crash(name)
        survivors = [handler for name, handler in handlers.items() if name not in lost]
        for heard in [await listen(run, handler) for handler in survivors]:
            await heard.until(NodesLost, within=10.0)
        newcomers = [run.handler(f"in place of {name}") for name in lost]
        infos = await asyncio.wait_for(run.meet(*survivors, *newcomers), 60)
        assert_one_round(infos)
        await infos[0].store.set("k", bytes(1024))


@pytest.mark.some_of(2)
@all_limits
async def test_members_that_fill_each_rounds_store_meet_again(limits: Limits) -> None:
    async with VirtualRun(limits=limits, min_nodes=3, ttl=3, last_call_timeout=1) as run:
        handlers = await run.met("abc")
        for _ in range(12):
            infos = await asyncio.wait_for(run.meet(*handlers), 60)
            assert_one_round(infos)
            await fill(infos[0])


async def fill_for_ever(put: Callable[[str, bytes], Awaitable[object]]) -> None:
    """Put keys, and take whatever becomes free at once."""
    size = 4096
    for number in itertools.count():
        try:
            await put(str(number), bytes(size))
        except (LimitExceeded, RendezvousConnectionError):
            size = max(size // 16, 1)
            await asyncio.sleep(0.01)
        except (MembersLostError, RoundSupersededError):
            return


async def test_a_first_round_that_the_store_has_no_room_for_is_an_error_at_once() -> None:
    """Only the last round's shared keys are deleted to make room."""
    async with VirtualRun(limits=Limits(keys_max=1), min_nodes=1) as run:
        began = asyncio.get_running_loop().time()
        with pytest.raises(RendezvousConnectionError, match="keys_max"):
            await run.handler("a").next_rendezvous()
        assert asyncio.get_running_loop().time() - began < 5.0


@pytest.mark.in_ci
@all_limits
@pytest.mark.parametrize("by", ["a round", "a member", "a stranger"])
@pytest.mark.parametrize("lost", ["a", "c"])
async def test_a_loss_is_told_and_nodes_meet_while_others_keep_the_store_full(
    limits: Limits, by: str, lost: str
) -> None:
    """Regression: no coordinator could report a loss, or take the role; survivors could not arrive again."""
    async with VirtualRun(limits=limits, min_nodes=2, max_nodes=3, ttl=3, last_call_timeout=1) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        first = await run.meet(*handlers.values())
        async with run.client("a stranger") as stranger:
            puts: dict[str, Callable[[str, bytes], Awaitable[object]]] = {
                "a round": first[1].store.set,
                "a member": handlers["b"].keep,
                "a stranger": lambda name, data: stranger.put(f"/rdzv/job/kept/{name}", data),
            }
            filling = asyncio.create_task(fill_for_ever(puts[by]))
            await asyncio.sleep(3)
            survivors = [handler for name, handler in handlers.items() if name != lost]
            heard = [await listen(run, handler) for handler in survivors]
            run.crash(lost)
            for one in heard:
                await one.until(NodesLost, within=5.0)
            assert_one_round(await asyncio.wait_for(run.meet(*survivors), 10))
            newcomer = run.handler("d")
            joining = await run.join(newcomer)
            await heard[0].until(NodesWaiting, within=5.0)
            assert_one_round([*await asyncio.wait_for(run.meet(*survivors), 10), await joining])
            await newcomer.set_closed("done")
            await cancel_and_wait(filling)


@all_limits
async def test_operators_steer_a_run_whose_store_others_keep_full(limits: Limits) -> None:
    """Regression: a drain was refused where there was no memory for its lease."""
    async with VirtualRun(limits=limits, min_nodes=1, max_nodes=3, ttl=3, last_call_timeout=1) as run:
        a, b, c = await run.met("abc")
        async with run.client("a stranger") as stranger:
            put = lambda name, data: stranger.put(f"/rdzv/job/kept/{name}", data)  # noqa: E731
            filling = asyncio.create_task(fill_for_ever(put))
            await asyncio.sleep(3)
            heard = await listen(run, a)
            async with run.looked_at() as it:
                await it.drain("b", 30.0, "maintenance")
                await heard.until(Draining, within=1.0)
                await b.leave()
                await it.ban("b", "slow disk")
                await it.resize(1, 2, reason="less")
                assert_one_round(await asyncio.wait_for(run.meet(a, c), 10))
                await it.set_closed("enough")
            await heard.until(Closed, within=1.0)
            await cancel_and_wait(filling)


@pytest.mark.parametrize("limits", [LIMITS[0], MEMORY], ids=["bytes of a run", "all memory"])
async def test_an_error_of_a_body_is_raised_and_a_finished_run_is_closed_in_a_full_store(limits: Limits) -> None:
    """Regression: neither could be noted, so that each member met again, and ran its body again, for ever."""

    async def take_part(handler: Handler, *, fails: bool = False) -> int:
        number = 0
        async for round in rounds_of(handler):
            number += 1
            async with round:
                await asyncio.sleep(3)
                if fails:
                    raise ValueError("of this member")
        return number

    async with VirtualRun(limits=limits, min_nodes=2, ttl=3) as run, run.client("a stranger") as stranger:
        filling = asyncio.create_task(fill_for_ever(lambda name, data: stranger.put(f"/rdzv/job/kept/{name}", data)))
        failing, other = run.start(take_part(run.handler("a"), fails=True)), run.start(take_part(run.handler("b")))
        with pytest.raises(ValueError, match="of this member"):
            await asyncio.wait_for(failing, 20)
        rounds = await asyncio.wait_for(asyncio.gather(other, take_part(run.handler("c"))), 20)
        assert list(rounds) == [2, 1]
        await cancel_and_wait(filling)


async def test_a_node_for_which_there_is_no_room_waits_for_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with VirtualRun(limits=LIMITS[0], min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        handlers = [run.handler(name) for name in "ab"]
        infos = await run.meet(*handlers)
        await fill(infos[0])
        async with run.client("a stranger") as stranger:  # what is kept back is full, too
            with pytest.raises(LimitExceeded):
                for number in itertools.count():
                    await stranger.put(f"/rdzv/job/unfit/{number}", b"")
        late = run.handler("c", join_timeout=30)
        with pytest.raises(RendezvousTimeoutError, match=r"takes no arrival: .* group_bytes_max is 65536"):
            await late.next_rendezvous()
        assert "group_bytes_max" in caplog.text
        assert handlers[0].node.membership is not None
        assert handlers[0].node.membership.over is None
