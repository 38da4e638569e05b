"""The thread of all nodes of a process: it runs from its first user to its last, and no code in it blocks a node."""

import asyncio
import threading
import time

import pytest

from rdzv.errors import RendezvousStateError
from rdzv.node.link import node_loop
from rdzv.node.link.node_loop import TURN_MOST, TURNS, NodeLoop, NodeThread


async def where() -> threading.Thread:
    return threading.current_thread()


def node_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rdzv node"]


def test_all_users_share_one_thread_which_ends_with_the_last() -> None:
    one, other = NodeThread(), NodeThread()
    thread = one.spawn(where()).wait(10)
    assert other.spawn(where()).wait(10) is thread
    assert node_threads() == [thread]
    one.stop_using()
    assert other.spawn(where()).wait(10) is thread
    other.stop_using()
    thread.join(10)
    assert not node_threads()


def test_a_loop_that_was_left_does_not_restart_and_leaving_twice_does_nothing() -> None:
    one, other = NodeThread(), NodeThread()
    thread = other.spawn(where()).wait(10)
    one.spawn(where()).wait(10)
    one.stop_using()
    one.stop_using()
    with pytest.raises(RendezvousStateError, match="the node thread has ended: it was left"):
        one.spawn(where())
    assert thread.is_alive(), "the other one uses it"
    other.stop_using()
    thread.join(10)


def test_cancelling_the_future_cancels_its_task() -> None:
    loop = NodeThread()
    cancelled, begun = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = loop.spawn(work())
    assert begun.wait(10)
    future.cancel()
    assert cancelled.wait(10)
    loop.stop_using()


def test_user_code_run_in_a_thread_delays_no_node() -> None:
    loop = NodeThread()
    going_on = threading.Event()

    async def apart() -> bool:
        return await loop.run_in_new_thread(lambda: going_on.wait(10))

    slow = loop.spawn(apart())
    thread = loop.spawn(where()).wait(10)  # it answers while the other call is under way
    going_on.set()
    assert slow.wait(10)
    loop.stop_using()
    thread.join(10)


@pytest.mark.parametrize("given", [False, True])
async def test_a_node_loop_uses_the_given_loop_or_the_running_one(given: bool) -> None:
    loop: NodeLoop = NodeLoop(asyncio.get_running_loop() if given else None)
    assert await loop.spawn(where()) is threading.current_thread()
    assert await loop.run_in_new_thread(time.monotonic) > 0
    loop.stop_using()  # it belongs to another user, and goes on
    assert await loop.spawn(where()) is threading.current_thread()


@pytest.mark.virtual_time
async def test_few_nodes_connect_at_a_time_and_a_stuck_one_delays_others_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_loop, "_turns", asyncio.Semaphore(TURNS))
    loop, entered, began = NodeThread(), list[float](), asyncio.get_running_loop().time()

    async def node(seconds: float) -> None:
        async with loop.limit_concurrency():
            entered.append(asyncio.get_running_loop().time() - began)
            await asyncio.sleep(seconds)

    stuck = [asyncio.create_task(node(3600)) for _ in range(TURNS)]  # as if waiting for a disconnected store
    await asyncio.gather(*(node(1.0) for _ in range(2 * TURNS)))
    assert entered == pytest.approx([0.0] * TURNS + [TURN_MOST] * TURNS + [TURN_MOST + 1.0] * TURNS)
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
    entered.clear()
    await asyncio.gather(*(node(1.0) for _ in range(2 * TURNS)))
    assert entered[TURNS] > entered[TURNS - 1], "each turn was given back once"
