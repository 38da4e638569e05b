"""The awaited loop over the rounds: real sockets, threads and event loops."""

import asyncio
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import anyio
import pytest

import rdzv
import rdzv.sync
import store.sync
from rdzv import Ending, RendezvousStateError, RendezvousTimeoutError
from tests.rdzv.loop.test_blocking import DIES, WITHIN
from tests.support.processes import require, start_python


@pytest.fixture
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield server.url


async def test_rounds_that_a_time_limit_has_ended_do_not_seem_to_be_those_of_a_closed_run(url: str) -> None:
    """Regression: the next `anext` ended the loop as a closed run does, so a program ended well without any work."""
    at = f"{url}/job?min_nodes=2&is_host=false"
    awaited = rdzv.rounds(at)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(awaited), 0.2)
    with pytest.raises(RendezvousStateError, match="call `rounds` again"):
        await anext(awaited)
    await awaited.aclose()
    blocking = rdzv.sync.rounds(at, join_timeout=0.2)
    with pytest.raises(RendezvousTimeoutError):
        next(blocking)
    with pytest.raises(RendezvousStateError, match="call `rounds` again"):
        next(blocking)


async def test_a_second_call_beside_the_first_fails_alone(url: str) -> None:
    """Regression: the first caller's loop ended later, as if its node had left."""
    rounds = rdzv.rounds(f"{url}/job?min_nodes=1&is_host=false")
    first = asyncio.create_task(anext(rounds))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already running"):
        await anext(rounds)
    async with await first:
        pass
    with pytest.raises(StopAsyncIteration):
        await anext(rounds)


async def test_a_slow_rank_order_is_named_with_the_nodes_that_wait_for_it(url: str) -> None:
    """Regression: the nodes of the last report were counted: "0 nodes wait"."""
    connecting = functools.partial(rdzv.connect, f"{url}/job?min_nodes=2&is_host=false", rank_order=slow_order)
    async with connecting(node_id="a") as a, connecting(node_id="b") as b, asyncio.TaskGroup() as meeting:
        for node in (a, b):
            meeting.create_task(node.next_rendezvous())
        while "rank_order" not in (reason := (await a.status()).reason):  # noqa: ASYNC110 - only the status tells
            await asyncio.sleep(0.05)
        assert reason.startswith("2 nodes wait for a round")


def slow_order(arrivals: Sequence[Any], _: object) -> Sequence[Any]:
    time.sleep(1.5)
    return arrivals


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
async def test_a_body_that_never_yields_gets_a_loss_at_its_next_check(url: str, library: str) -> None:
    """Regression: it was cancelled only at its next real await, so it ran until the end of its body."""
    if library == "uvloop":
        require("uvloop")
    run: Callable[[Coroutine[None, None, None]], None] = __import__(library).run
    at = f"{url}/job?min_nodes=2&max_nodes=2&is_host=false&disconnect_ttl=0.3"
    endings: list[Ending | None] = []
    steps, works, killed = [0], threading.Event(), threading.Event()

    async def train() -> None:
        async for round in rdzv.rounds(at, node_id="a"):
            async with round:
                until = time.monotonic() + WITHIN
                while time.monotonic() < until:
                    await round.check(steps[0])
                    steps[0] += not killed.is_set()
                    works.set()
                    time.sleep(0.001)  # noqa: ASYNC251  blocking the loop is the point of this test
                return
            endings.append(round.ending)
            return

    training = asyncio.create_task(asyncio.to_thread(run, train()))
    async with start_python("-c", DIES, at) as child:
        await child.line("in")
        assert await asyncio.to_thread(works.wait, WITHIN)
        child.kill()
        killed.set()
    await training
    (ending,) = endings
    assert ending is not None
    assert (ending.kind.value, ending.node_ids) == ("lost", ("killed",))


async def test_a_check_in_a_shielded_scope_leaves_the_round(url: str) -> None:
    """Regression: the scope kept the cancellation of the body from `check`, which waited for the end of the body."""

    async def train(name: str) -> str | None:
        async for round in rdzv.rounds(f"{url}/job?min_nodes=1&max_nodes=2&last_call_timeout=0", node_id=name):
            async with round:
                for step in itertools.count():
                    with anyio.CancelScope(shield=True):
                        await round.check(step)
                        works.set()
                        await anyio.sleep(0.001)
                    if round.world_size == 2:
                        return "both"
        return None

    works = asyncio.Event()
    first = asyncio.create_task(train("a"))
    await asyncio.wait_for(works.wait(), WITHIN)
    assert set(await asyncio.wait_for(asyncio.gather(first, train("b")), WITHIN)) == {"both"}


TRAINS = """
import asyncio, sys, time
import rdzv
from rdzv.node.member.membership_watcher import MembershipWatcher

url, name, held_up_for = sys.argv[1], sys.argv[2], float(sys.argv[3])
heed = MembershipWatcher._write_begun_step

async def and_then_stand_still(self, link, membership):
    stop = link.follower.head.stop
    await heed(self, link, membership)
    if stop is not None and not stop.decided:
        time.sleep(held_up_for)  # the thread of the node, which has just answered

MembershipWatcher._write_begun_step = and_then_stand_still

async def main():
    step = 0
    async for round in rdzv.rounds(url, node_id=name, is_host=False):
        print("in", round.number, round.world_size, flush=True)
        async with round:
            while True:
                await round.check(step)
                if await round.store.add(f"step/{step}", 1) == round.world_size:
                    await round.store.set(f"step/{step}/all", b"")
                await round.store.wait([f"step/{step}/all"])
                step += 1
        print("left", round.number, round.ending.kind.value, step, flush=True)

asyncio.run(main())
"""


async def test_a_member_whose_node_is_delayed_leaves_at_the_agreed_step(url: str) -> None:
    """Regression: decision and departure arrive in one read, over real sockets, which was taken for a loss."""
    at = f"{url}/job?min_nodes=2&max_nodes=3&last_call_timeout=60&ttl=10"
    async with contextlib.AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(start_python("-c", TRAINS, at, name, held_up_for))
            for name, held_up_for in (("a", "0.5"), ("b", "0"), ("c", "0"))
        ]
        observer = await stack.enter_async_context(rdzv.connect(f"{url}/job"))
        sizes = [(await member.line("in 0 ")).split()[2] for member in members]
        assert sizes == ["3", "3", "3"]
        await observer.drain(within=60, node_id="c")
        left = [(await member.line("left 0 ")).split()[2:] for member in members]
        assert {kind for kind, _ in left} == {"agreed"}
        assert len({step for _, step in left}) == 1
