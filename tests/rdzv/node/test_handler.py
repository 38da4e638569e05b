"""One node: it arrives, waits, takes part, leaves; and each of these is interrupted."""

import asyncio
import contextlib
import socket
from typing import Any

import anyio
import pytest

from rdzv.core.round import Member
from rdzv.core.state import NodeRecord, NodesLost, NodesWaiting
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousStateError, RoundSupersededError
from rdzv.node.coordinator import term as room_of_coordinator
from rdzv.node.handler import Handler
from rdzv.node.link.store_session import StoreSession
from rdzv.node.member import arrival_writer as room_of_record
from rdzv.node.member import joining as room_of_joining
from rdzv.node.member.node_state import NodeState
from rdzv.node.run.status import find_member
from store import ConnectionLost
from store.messages import KeepAlive, Request, Revoke, Transact
from tests.support.runs import VirtualRun, assert_one_round, connected, listen
from tests.support.virtual_time import now

pytestmark = pytest.mark.virtual_time


async def lose_lease(run: VirtualRun, handler: Handler, by: str) -> None:
    """Revoke a node's lease from another client, and wait until the node has noticed."""
    await connected(handler)
    lease = handler.node.part.arrival.lease
    assert lease is not None
    assert lease.task is not None
    await run.clients[by].call(Revoke(lease=lease.id))
    await asyncio.wait([lease.task])


async def test_the_promised_port_is_free_once_the_round_is_returned() -> None:
    async with VirtualRun(min_nodes=1) as run:
        (info,) = await run.meet(run.handler("a"))
        socket.create_server(("", info.bootstrap_address[1])).close()


@pytest.mark.parametrize("name", ["ttl", "closed_ttl"])
async def test_a_duration_beyond_the_stores_limit_is_refused_by_its_name(name: str) -> None:
    """Regression: the error named the store's limit, but not the setting that asked for more."""
    longer: dict[str, Any] = {name: 30 * 86_400.0}
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a", **longer)
        with pytest.raises(RendezvousSettingsError, match=f"^{name}=2.592e.06 s was refused: .*; lower {name}$"):
            await a.next_rendezvous()
        assert run.keys("nodes/") == []


async def test_a_second_call_while_joining_is_refused_and_harms_nothing() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        joining = await run.join(a)
        with pytest.raises(RendezvousStateError, match="joining run job already"):
            await a.next_rendezvous()
        with pytest.raises(RendezvousStateError, match="cancel that call instead"):
            await a.leave()
        assert_one_round([await b.next_rendezvous(), await joining])


async def test_without_min_nodes_a_handler_may_observe_and_close_but_not_join() -> None:
    async with VirtualRun() as run:
        observer = run.handler("observer")
        with pytest.raises(RendezvousSettingsError, match="min_nodes is missing"):
            await observer.next_rendezvous()
        assert (await observer.status()).reason == "no node is here"
        await observer.leave()
        await observer.set_closed("enough")
        assert await observer.is_closed()


async def test_a_closed_handler_refuses_calls_and_can_be_closed_again() -> None:
    async with VirtualRun(min_nodes=1) as run:
        (a,) = await run.met("a")
        await a.aclose()
        await a.aclose()
        for call in (a.next_rendezvous, a.status, a.is_closed, a.num_nodes_waiting, a.leave):
            with pytest.raises(RendezvousStateError, match="is closed; connect again"):
                await call()


async def test_a_holder_that_comes_again_keeps_its_name() -> None:
    """Regression: any change of the record counted as the holder's departure, so a rival took a live node's name."""
    async with VirtualRun(min_nodes=2, last_call_timeout=0) as run:
        holder, rival, other = run.handler("a"), run.handler("a"), run.handler("b")
        await run.meet(holder, other)
        waiting = await run.join(rival)
        infos = await run.meet(holder, other)
        assert_one_round(infos)
        assert infos[0].superseded() is None
        await asyncio.sleep(60)
        assert infos[0].superseded() is None
        assert not waiting.done()
        await holder.leave()
        assert_one_round(await asyncio.gather(waiting, other.next_rendezvous()))


async def test_a_lease_lost_while_the_rank_is_read_makes_the_node_join_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the node joined a round from which it had been dropped, and was never told."""
    async with VirtualRun(min_nodes=2, last_call_timeout=0, ttl=4, disconnect_ttl=4) as run:
        a, b = run.handler("a"), run.handler("b")
        for node in (a, b):
            await connected(node)
        held = asyncio.Event()

        async def slowly(*arguments: Any, node_id: str, arrival: int) -> Member | None:
            member = await find_member(*arguments, node_id=node_id, arrival=arrival)
            if node_id == "a" and not held.is_set():
                held.set()
                await lose_lease(run, a, "b")
            return member

        monkeypatch.setattr(room_of_joining, "find_member", slowly)
        monkeypatch.setattr(room_of_coordinator, "pack_arrivals", lambda _: {})  # as in a round of many members
        heard = await listen(run, b)
        joins = await run.join(a)
        first = await b.next_rendezvous()
        await heard.until(NodesWaiting(1))
        second, joined = await asyncio.gather(b.next_rendezvous(), joins)
        assert first.round == 0
        assert_one_round([second, joined])
        assert joined.round == 1


async def test_a_member_whose_name_was_taken_by_another_process_gets_no_rank_from_it() -> None:
    """Regression: a member knew its rank by its name. So did a node that had been dropped, unaware, and replaced."""
    async with VirtualRun(min_nodes=2, last_call_timeout=0, ttl=30, disconnect_ttl=30, join_timeout=20) as run:
        a, b = run.handler("a"), run.handler("b")
        assert_one_round(await run.meet(a, b))
        joining = await run.join(a)
        lease = a.node.part.arrival.lease
        assert lease is not None
        await run.clients["b"].call(Revoke(lease=lease.id))  # its keeper notices that within 10 s
        assert_one_round(await run.meet(run.handler("a"), b))
        await asyncio.sleep(1.0)
        assert a.node.head.round is not None
        assert a.node.head.round.number == 1
        assert not joining.done()


async def test_a_lease_lost_while_the_arrival_is_under_way_makes_the_node_arrive_again() -> None:
    """Regression: the node believed its arrival, and waited without a record and without any news."""
    async with VirtualRun(min_nodes=2, join_timeout=60) as run:
        a = run.handler("a")
        await connected(a)
        done = False

        async def hook(request: Request[Any], when: str) -> None:
            nonlocal done
            if isinstance(request, Transact) and when == "after" and run.keys("nodes/") == ["a"] and not done:
                done = True
                lease = a.node.part.arrival.lease
                assert lease is not None
                await run.clients["a"].call(Revoke(lease=lease.id))

        run.clients["a"].hook = hook
        joining = await run.join(a)
        assert_one_round([await run.handler("b").next_rendezvous(), await joining])
        assert done


async def test_a_lease_lost_before_the_arrival_is_sent_makes_the_node_take_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the arrival went out on the lost lease. A store that had stood still accepted it, but no keeper
    renewed it.
    """
    async with VirtualRun(min_nodes=2, join_timeout=60) as run:
        a, b = await run.met("ab")
        b_joining = await run.join(b)
        make, lost = room_of_record.new_record, False

        async def make_late(part: NodeState, link: StoreSession) -> NodeRecord:
            nonlocal lost
            if part.node_id == "a" and not lost:
                lost = True
                lease = a.node.part.arrival.lease
                assert lease is not None and lease.task is not None
                run.network.partition("a")
                await asyncio.sleep(5)
                await run.clients["b"].call(KeepAlive(lease=lease.id))  # as if the store stood still meanwhile
                await asyncio.wait([lease.task])
                run.network.heal("a")
            return await make(part, link)

        monkeypatch.setattr(room_of_record, "new_record", make_late)
        assert_one_round([await a.next_rendezvous(), await b_joining])
        assert lost
        await asyncio.sleep(20)
        assert run.keys("nodes/") == ["a", "b"], "both are kept"


async def test_is_closed_raises_while_the_store_is_unreachable() -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        assert not await a.is_closed()
        run.network.refuse("a")
        run.network.cut("a")
        await asyncio.sleep(0.1)
        with pytest.raises(RendezvousConnectionError, match="not known"):
            await a.is_closed()
        run.network.stop_refusing("a")


async def test_num_nodes_changed_answers_from_local_state() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, last_call_timeout=1) as run:
        a, b, c = (run.handler(name) for name in "abc")
        assert a.num_nodes_changed() == 0
        await run.meet(a, b)
        assert a.num_nodes_changed() == 0
        await run.join(c)
        await asyncio.sleep(1)
        assert (a.num_nodes_changed(), a.num_nodes_changed(on_loss=False)) == (1, 1)
        await b.leave()
        await asyncio.sleep(1)
        assert (a.num_nodes_changed(), a.num_nodes_changed(on_loss=False)) == (2, 1)
        assert b.num_nodes_changed() == 0  # its departure was its own act
        run.kill_store()
        await asyncio.sleep(60)
        assert (a.num_nodes_changed(), a.num_nodes_changed(on_loss=False)) == (1, 0), "it was dropped"


async def test_closing_takes_at_most_its_timeout_after_any_loss_of_the_store() -> None:
    async with VirtualRun(min_nodes=1, close_timeout=3) as run:
        (a,) = await run.met("a")
        run.kill_store()
        run.restart_store()  # another store, so that the handler has to connect again
        await asyncio.sleep(10)
        run.kill_store()
        started = now()
        with pytest.raises(RendezvousConnectionError):
            await a.set_closed("too late")
        assert now() - started <= 3.5


async def test_a_node_without_a_link_loses_its_membership_with_the_store() -> None:
    async with VirtualRun(min_nodes=1) as run:
        node = run.handler("a").node
        await node._disconnect(ConnectionLost("its process is gone"))
        assert node.part.wait_reason, "it was never connected"
        (b,) = await run.met("b")
        membership = b.node.membership
        for _ in range(2):
            await b.node._disconnect(ConnectionLost("its process is gone"))
        assert membership is not None
        assert membership.over == "the store is lost: its process is gone"


async def test_changes_of_a_closed_handler_end_with_an_error() -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        async with a.changes() as changes:
            following = run.start(anext(changes))
            await asyncio.sleep(1)
            await a.aclose()
            with pytest.raises(RendezvousStateError, match="is closed"):
                await following


async def test_pending_changes_of_a_round_are_not_delivered_in_the_next() -> None:
    """Regression: a caller that stopped after the first of several changes got the rest of them in the next round."""
    async with VirtualRun(min_nodes=1, max_nodes=3, last_call_timeout=1) as run:
        a, b, _ = await run.met("abc")
        run.crash("c")
        await asyncio.sleep(2)
        joining = await run.join(b)
        await asyncio.sleep(1)
        async with a.changes() as changes:
            assert await anext(changes) == NodesLost(1, ("c",))  # the change that b waits is still pending
            assert_one_round([await a.next_rendezvous(), await joining])
            following = run.start(anext(changes))
            await asyncio.sleep(5)
            assert not following.done()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", ["natively", "by anyio"])
async def test_cancelling_takes_the_arrival_back(how: str, times: int) -> None:
    """Regression: a second cancel stopped the clean-up, and the others had a round with a node that took no part."""
    async with VirtualRun(min_nodes=2) as run:
        a = run.handler("a")
        outer, inner = anyio.CancelScope(), anyio.CancelScope()

        async def join() -> None:
            with outer, inner:
                await a.next_rendezvous()

        joining = run.start(join())
        await asyncio.sleep(0.1)
        assert run.keys("nodes/") == ["a"]
        for scope in (inner, outer)[:times]:
            if how == "natively":
                joining.cancel()
            else:
                scope.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([joining])
        await asyncio.sleep(0.1)
        assert run.keys("nodes/") == []
        assert_one_round(await run.meet(a, run.handler("b")))


@pytest.mark.parametrize("by", ["cancel", "aclose"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_call_cancelled_during_the_arrival_leaves_nothing_behind(moment: str, by: str) -> None:
    async with VirtualRun(min_nodes=2) as run:
        a = run.handler("a")
        await connected(a)
        reached = asyncio.Event()

        async def hook(request: Request[Any], when: str) -> None:
            if isinstance(request, Transact) and when == moment:
                reached.set()
                await asyncio.sleep(5)

        joining = run.start(a.next_rendezvous())
        run.clients["a"].hook = hook
        await reached.wait()
        run.clients["a"].hook = None
        if by == "cancel":
            joining.cancel()
        else:
            await a.aclose()
        await asyncio.wait([joining])
        await asyncio.sleep(0.1)
        assert run.keys("nodes/") == []
        assert_one_round(await run.meet(run.handler("b"), run.handler("c")))


@pytest.mark.parametrize("while_it", ["waits", "connects"])
async def test_closing_the_handler_ends_a_call_at_once(while_it: str) -> None:
    """Regression: it kept connecting for the whole join timeout, and then did not close the connection."""
    async with VirtualRun(min_nodes=2) as run:
        if while_it == "connects":
            run.network.refuse("a")
        a = run.handler("a")
        joining = run.start(a.next_rendezvous())
        await asyncio.sleep(1)
        began = now()
        await a.aclose()
        with pytest.raises(RendezvousStateError, match="is closed"):
            await joining
        assert now() - began < 1
        assert run.keys("nodes/") == []


async def test_a_cancelled_close_releases_everything_all_the_same() -> None:
    """A native cancel breaks through a shield. Regression: the lease was still kept and the tasks ran on."""
    async with VirtualRun(min_nodes=1) as run:
        (a,) = await run.met("a")
        closing = run.start(a.aclose())
        await asyncio.sleep(0.0001)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert run.keys("nodes/") == []


async def test_a_node_that_left_can_join_again_and_its_old_round_is_over() -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        (first,) = await run.meet(a)
        assert first.superseded() is None
        told: list[str] = []
        first.on_superseded(told.append)
        await a.leave()
        await a.leave()
        first.on_superseded(told.append)  # a callback added later is called at once
        assert told == [first.superseded()] * 2 == ["this node has left it"] * 2
        with pytest.raises(RoundSupersededError):
            await first.store.set("key", "value")
        (second,) = await run.meet(a)
        assert (first.round, second.round) == (0, 1)


@pytest.mark.parametrize("given_up_after", [0.3, 60.0])
async def test_if_leaving_cannot_reach_the_store_the_record_expires(given_up_after: float) -> None:
    """Regression: its lease was renewed, so a departed node stayed in the round as long as its process lived."""
    async with VirtualRun(min_nodes=2, max_nodes=2, join_timeout=60) as run:
        a, b = await run.met("ab")
        run.network.partition("a")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(a.leave(), given_up_after)
        run.network.heal("a")
        await asyncio.sleep(15)
        assert run.keys("nodes/") == ["b"]
        assert_one_round(await run.meet(b, run.handler("c")))


async def test_joining_fails_with_a_clear_error_while_the_rounds_key_cannot_be_read() -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        await connected(a)
        await run.clients["a"].put("/rdzv/job/head/round", b"\xc1")
        await asyncio.sleep(0.1)
        with pytest.raises(RendezvousStateError, match="something else writes under this prefix"):
            await a.next_rendezvous()
        await run.clients["a"].delete("/rdzv/job/head/round")
        assert_one_round(await run.meet(a))
