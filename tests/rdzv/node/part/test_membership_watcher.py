"""A node notices the events that concern it, at whatever time they arrive."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdzv.core.decision import Joiner
from rdzv.core.round import Round
from rdzv.core.state import Head
from rdzv.core.stopping import BegunStep, Stop
from rdzv.errors import RendezvousGracefulExitError
from rdzv.node.member.arrival import State
from rdzv.node.member.membership_watcher import MembershipWatcher
from store.messages import Request, Transact
from store.net.tasks import cancel_and_wait
from tests.rdzv.node.part.parts import part_of
from tests.support.runs import VirtualRun, connected

pytestmark = pytest.mark.virtual_time


async def test_a_question_that_arrives_before_the_node_knows_its_rank_is_answered() -> None:
    """Regression: the coordinator waited for the answer for ever. Two members stood still, one of them in a collective.

    The question followed at once after the commit of the round, since a newcomer was waiting. The node was still
    reading its rank then, and was not woken when it had that.
    """
    round = Round(number=7, term=1, size=2, buckets=1, host="h", port=1, in_steps=True)
    part = part_of()
    part.arrival = cast(
        "Any",
        SimpleNamespace(
            lease=SimpleNamespace(id=5), revision=0, accepted=int, state=State.TAKEN_IN, record=None, began=1
        ),
    )
    answers: list[Any] = []

    async def transact(*, when: Any, then: Any) -> None:  # noqa: ARG001
        answers.extend(BegunStep.unpack(put.value) for put in then)

    store = SimpleNamespace(time=asyncio.get_running_loop().time, transact=transact, store_id="it")
    follower = SimpleNamespace(
        head=Head(round=round), resets=0, own_ban=None, error=None, listeners=part.listeners, has_attributes=set
    )
    link = cast("Any", SimpleNamespace(store=store, follower=follower))
    noticing = asyncio.create_task(MembershipWatcher(part, link).run())
    try:
        await asyncio.sleep(0)
        follower.head = Head(round=round, stop=Stop(round=7, why="1 node waiting to join"))
        part.listeners.notify()
        await asyncio.sleep(1)
        assert not answers
        membership = part.become_member(round, 0, Joiner(arrival=3), link, time=asyncio.get_running_loop().time)
        await asyncio.sleep(1)
    finally:
        await cancel_and_wait(noticing)
        part.port.release()
    assert answers == [BegunStep(round=7, step=None)]
    assert not membership.gate.begin_step(0), "and it begins no step before the members have agreed"


async def test_a_node_whose_drain_is_due_while_its_arrival_is_under_way_waits_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it looked again without pause, and kept the thread of all nodes of the process busy."""
    looks = 0
    look = MembershipWatcher._check_state

    async def counted(self: MembershipWatcher) -> float | None:
        nonlocal looks
        looks += 1
        assert looks < 1000, "it spins"
        return await look(self)

    async with VirtualRun(min_nodes=2) as run:
        a, _ = await run.met("ab")
        operator = run.handler("operator")
        await connected(operator)

        async def be_slow(request: Request[Any], when: str) -> None:
            if isinstance(request, Transact) and when == "before":
                await asyncio.sleep(20)

        run.clients["a"].hook = be_slow
        coming = run.start(a.next_rendezvous())
        await asyncio.sleep(1)
        assert a.node.part.arrival.state is State.SENT
        monkeypatch.setattr(MembershipWatcher, "_check_state", counted)
        await operator.drain(within=5, node_id="a")
        with pytest.raises(RendezvousGracefulExitError):
            await coming
        assert looks < 20
