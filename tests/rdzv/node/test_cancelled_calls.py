"""Every public call, cancelled natively or by anyio, once or twice: the handler and the run continue as before."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from rdzv.core.state import Closed, NodesLost
from rdzv.errors import RendezvousGracefulExitError
from rdzv.node.handler import Handler
from rdzv.node.node import JoinHandle
from tests.support.runs import VirtualRun, assert_one_round, connected, listen

pytestmark = pytest.mark.virtual_time

CALLS: dict[str, Callable[[Handler], Awaitable[Any]]] = {
    "next_rendezvous": lambda handler: handler.next_rendezvous(),
    "leave": lambda handler: handler.leave(),
    "drain": lambda handler: handler.drain(within=3600),
    "resize": lambda handler: handler.resize(max_nodes=3),
    "keep": lambda handler: handler.keep("key", b"kept"),
    "restore": lambda handler: handler.restore("key"),
    "accuse": lambda handler: handler.accuse(1, "does not answer"),
    "all_here": lambda handler: handler.all_here(timeout=60),
    "ban": lambda handler: handler.ban("z", "slow"),
    "unban": lambda handler: handler.unban("z"),
    "ban(where)": lambda handler: handler.ban(where=("rack", "17")),
    "unban(where)": lambda handler: handler.unban(where=("rack", "17")),
    "status": lambda handler: handler.status(),
    "history": lambda handler: handler.history(),
    "status_and_cost": lambda handler: handler.status_and_cost(),
    "store_host": lambda handler: handler.store_host(),
    "ping": lambda handler: handler.ping(),
    "is_closed": lambda handler: handler.is_closed(),
    "num_nodes_waiting": lambda handler: handler.num_nodes_waiting(),
    "answer_operator": lambda handler: handler.answer_operator("q", "text"),
    "change_counts": lambda handler: handler.change_counts(lambda before: before + b"1"),
    "set_closed": lambda handler: handler.set_closed("done"),
    "give_up": lambda handler: handler.give_up("no data"),
}
"""The awaitable calls of a handler. `aclose` has tests of its own."""

SEEN_TO_THEIR_END = {
    "drain": "head/draining/a",
    "resize": "head/resized",
    "keep": "kept/key",
    "ban": "head/banned/z",
    "answer_operator": "answers/q/a",
    "change_counts": "tally",
    "set_closed": "head/closed",
    "give_up": "head/closed",
}
"""Calls that take effect although they were cancelled, and the key that shows it."""


async def test_an_abandoned_call_is_undone_before_the_next_one_begins() -> None:
    """Regression: the next call sent its record while the previous one was still being withdrawn."""
    async with VirtualRun(latency=0.05, min_nodes=1, max_nodes=1) as run:
        node, unheard = run.handler("a").node, JoinHandle()
        first = await node.next_rendezvous(unheard)
        undoing = run.start(node.undo_join(unheard))
        await asyncio.sleep(0)
        second = await node.next_rendezvous(JoinHandle())
        assert undoing.done()
        assert second.round.number == first.round.number + 1


def test_every_awaitable_call_is_tested() -> None:
    public = [name for name in dir(Handler) if not name.startswith("_")]
    awaited = {name for name in public if asyncio.iscoroutinefunction(getattr(Handler, name))}
    assert awaited - {"aclose", "call"} == {name.partition("(")[0] for name in CALLS}


@pytest.mark.in_ci
@pytest.mark.parametrize("how", ["natively", "by anyio"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_is_cancelled_twice_is_cleaned_up_and_harms_no_other_node(call: str, how: str) -> None:
    async with VirtualRun(latency=0.05, min_nodes=2, max_nodes=2, join_timeout=60) as run:
        a, b = run.handler("a"), run.handler("b")
        assert_one_round(await run.meet(a, b))
        await connected(a)
        outer, inner = anyio.CancelScope(), anyio.CancelScope()

        async def ask() -> None:
            with outer, inner:
                await CALLS[call](a)

        asking = run.start(ask())
        await asyncio.sleep(0.02)  # the request is on its way, and there is no answer yet
        for scope in (inner, outer):
            if how == "natively":
                asking.cancel()
            else:
                scope.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([asking], timeout=30)
        assert asking.done(), "its caller gets out, however often it is cancelled"
        await asyncio.sleep(1)
        if call in SEEN_TO_THEIR_END:
            assert run.keys(SEEN_TO_THEIR_END[call]) == [""]
        if call in ("next_rendezvous", "leave"):
            assert run.keys("nodes/") == ["b"], "no record of it stays"
        if call in ("set_closed", "give_up"):
            heard = await listen(run, b)
            await heard.until(Closed)
            return
        if call == "drain":
            with pytest.raises(RendezvousGracefulExitError, match="is to leave"):
                await (a if call == "drain" else b).next_rendezvous()
            return
        again = run.start(a.next_rendezvous())
        assert_one_round(await asyncio.gather(again, b.next_rendezvous()))


@pytest.mark.in_ci
async def test_a_coordinator_cancelled_while_its_round_completes_counts_as_departed_not_lost() -> None:
    """Regression: it left before its departure was reported, and its successor took that for a loss."""
    was_in_it = 0
    for step in range(0, 50, 2):  # every 20 ms: at two or three moments in each latency of 50 ms
        async with VirtualRun(latency=0.05, min_nodes=1, max_nodes=2) as run:
            a, b = await run.met("ab")
            if (await a.status()).coordinator != "a":
                a, b = b, a
            heard = await listen(run, b)
            giving_up, going_on = run.start(a.next_rendezvous()), run.start(b.next_rendezvous())
            await asyncio.sleep(step / 100)
            giving_up.cancel()
            info = await going_on
            was_in_it += info.round == 1 and info.world_size == 2
            await asyncio.sleep(5)
            assert not any(isinstance(change, NodesLost) for change in heard.changes), (step, heard.changes)
    assert was_in_it > 5
