"""A node notices the events that concern it, at whatever time they arrive."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdzv.core.decision import Joiner
from rdzv.core.round import Round
from rdzv.core.state import Head
from rdzv.core.stopping import LastBegun, RoundStop
from rdzv.core.stuck.step_log import StepLog
from rdzv.errors import RendezvousGracefulExitError
from rdzv.membership import Membership
from rdzv.node.member.arrival import ArrivalState
from rdzv.node.member.membership_watcher import MembershipWatcher
from rdzv.testing.network import MemoryNetwork
from store import Client
from store.messages import Request, Transact
from store.net.tasks import cancel_and_wait
from tests.rdzv.node.part.parts import part_of
from tests.support.runs import VirtualRun, connected
from tests.support.stores import connect_in_memory, serve_in_memory

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
            lease=SimpleNamespace(id=5), revision=0, on_accepted=int, state=ArrivalState.TAKEN_IN, record=None, began=1
        ),
    )
    answers: list[Any] = []

    async def transact(*, when: Any, then: Any) -> None:  # noqa: ARG001
        answers.extend(LastBegun.unpack(put.value) for put in then)

    store = SimpleNamespace(time=asyncio.get_running_loop().time, transact=transact, store_id="it")
    follower = SimpleNamespace(
        head=Head(round=round), resets=0, own_ban=None, error=None, listeners=part.listeners, watch_attribute_bans=set
    )
    link = cast("Any", SimpleNamespace(store=store, follower=follower))
    noticing = asyncio.create_task(MembershipWatcher(part, link).run())
    try:
        await asyncio.sleep(0)
        follower.head = Head(round=round, stop=RoundStop(round=7, why="1 node waiting to join"))
        part.listeners.notify()
        await asyncio.sleep(1)
        assert not answers
        membership = part.become_member(round, 0, Joiner(arrival=3), link, time=asyncio.get_running_loop().time)
        await asyncio.sleep(1)
    finally:
        await cancel_and_wait(noticing)
        part.port.release()
    assert answers == [LastBegun(round=7, step=None)]
    assert not membership.gate.try_begin_step(0), "and it begins no step before the members have agreed"


def watcher_of(client: Client, arrival: SimpleNamespace, **of_the_part: Any) -> tuple[MembershipWatcher, Any]:
    part, link = part_of(), cast("Any", SimpleNamespace(store=client, follower=FOLLOWER))
    same = {"node_id": part.node_id, "keys": part.keys, "settings": part.settings}
    return MembershipWatcher(cast("Any", SimpleNamespace(arrival=arrival, **same, **of_the_part)), link), link


FOLLOWER = SimpleNamespace(head=Head(), resets=0, own_ban=None, watch_attribute_bans=lambda _: None)
IN_STEPS = Round(number=7, term=1, size=2, buckets=1, host="h", port=1, in_steps=True)


@pytest.mark.parametrize(
    ("stop", "round", "lease", "answers"),
    [
        (RoundStop(round=7), IN_STEPS, 5, 1),  # once, however often it looks
        (RoundStop(round=7), IN_STEPS, None, 0),
        (RoundStop(round=7), IN_STEPS.replace(in_steps=False), 5, 0),
        (RoundStop(round=6), IN_STEPS, 5, 0),
        (RoundStop(round=7, decided=True), IN_STEPS, 5, 0),
        (None, IN_STEPS, 5, 0),
    ],
)
async def test_which_questions_a_member_answers(
    stop: RoundStop | None, round: Round, lease: int | None, answers: int
) -> None:
    part, written = part_of(), []
    part.arrival = cast("Any", SimpleNamespace(lease=lease and SimpleNamespace(id=lease)))

    async def transact(**write: Any) -> None:
        written.append(write)

    link = cast("Any", SimpleNamespace(store=SimpleNamespace(transact=transact), follower=FOLLOWER))
    membership = Membership(round=round, rank=0, arrival=3, beats=StepLog(7, lambda: 0.0, expected=True))
    membership.head = Head(stop=stop)
    watcher = MembershipWatcher(part, link)
    for _ in range(2):
        await watcher._write_begun_step(link, membership)
    assert len(written) == answers


@pytest.mark.parametrize(
    ("stored", "left", "state", "removed"),
    [
        ("this", 0.0, ArrivalState.TAKEN_IN, True),
        ("this", 1.0, ArrivalState.TAKEN_IN, False),  # until then it may stop by itself
        ("this", None, ArrivalState.TAKEN_IN, False),  # it is not drained
        ("this", 0.0, ArrivalState.SENT, False),
        ("a later one", 0.0, ArrivalState.TAKEN_IN, False),  # it has joined again, and its caller will learn of that
        ("none", 0.0, ArrivalState.TAKEN_IN, False),  # an operator was faster
    ],
)
async def test_a_drains_deadline_removes_the_record_that_it_found(
    stored: str, left: float | None, state: ArrivalState, removed: bool
) -> None:
    network, part, said = MemoryNetwork(), part_of(), []
    key = part.keys.node(part.node_id)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        record = SimpleNamespace(arrival=await client.put(key, b""))
        if stored == "a later one":
            await client.put(key, b"")
        elif stored == "none":
            await client.delete(key)
        leaving = None if left is None else SimpleNamespace(until=client.time() + left, reason="")
        arrival = SimpleNamespace(record=record, state=state, is_recorded=lambda _: True)
        watcher, link = watcher_of(
            client, arrival, announced_drain=lambda _: leaving, note_removal=lambda _, why: said.append(why)
        )
        again = await watcher._handle_drain(link, cast("Any", SimpleNamespace(over=None)))
        assert again == (leaving.until if leaving and left else None)
        assert said == (["it was to leave, and its time is over"] if removed else [])
        assert (await client.get(key) is None) is (removed or stored == "none")


@pytest.mark.parametrize(
    ("stored", "state", "current", "ended"),
    [
        ("this", ArrivalState.TAKEN_IN, True, False),
        ("none", ArrivalState.TAKEN_IN, True, True),
        ("none", ArrivalState.STANDING, True, True),
        ("none", ArrivalState.SENT, True, False),
        ("none", ArrivalState.TAKEN_IN, False, False),  # the node has arrived again while the store was asked
        ("another", ArrivalState.TAKEN_IN, True, True),
    ],
)
async def test_a_record_that_is_gone_ends_the_membership(
    stored: str, state: ArrivalState, current: bool, ended: bool
) -> None:
    network, part = MemoryNetwork(), part_of()
    said: list[object] = []
    key = part.keys.node(part.node_id)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        arrival = await client.put(key, b"")
        if stored == "none":
            await client.delete(key)
        elif stored == "another":
            await client.put(key, b"")
        record = SimpleNamespace(arrival=arrival)
        watcher, link = watcher_of(
            client,
            SimpleNamespace(
                record=record, state=state, is_recorded=lambda _: current, on_removed=lambda: said.append("removed")
            ),
            end_membership=lambda why, dropped: said.append((why.partition(";")[0], dropped)),
            listeners=SimpleNamespace(notify=lambda: said.append("told")),
        )
        await watcher._end_if_record_gone(link)
    assert said == (["removed", ("its record was deleted", True), "told"] if ended else [])


async def test_a_node_whose_drain_is_due_while_its_arrival_is_under_way_waits_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it looked again without pause, and kept the thread of all nodes of the process busy."""
    looks = 0
    look = MembershipWatcher._check_own_state

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
        assert a.node.part.arrival.state is ArrivalState.SENT
        monkeypatch.setattr(MembershipWatcher, "_check_own_state", counted)
        await operator.drain(within=5, node_id="a")
        with pytest.raises(RendezvousGracefulExitError):
            await coming
        assert looks < 20
