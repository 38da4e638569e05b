"""Promises R1 to R18 once more, for both twins, over every store: real sockets, real threads, short timeouts.

Tests that depend on timers are on virtual time in the files beside this one, with the async handler. The short form of
each promise is here, so that the blocking twin and every store are tested, too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

import rdzv
import rdzv.sync
from rdzv import Closed, Dropped, NodesLeft, NodesLost, NodesWaiting, Overrides, Phase
from tests.support.twins import KINDS, Backing, BlockingNode, Meeting, open_store, told

T = TypeVar("T")

pytestmark = [pytest.mark.parametrize(("twin", "store_name"), KINDS), pytest.mark.some_here(9)]


@pytest.fixture(scope="module")
def etcd() -> Iterator[Backing]:
    """One for all tests, because it takes a second to start; each test has a run of its own."""
    with open_store("etcd") as opened:
        yield opened


@pytest.fixture
def backing(store_name: str, request: pytest.FixtureRequest) -> Iterator[Backing]:
    """Serve the store that the nodes of a test use."""
    if store_name == "etcd":
        yield request.getfixturevalue("etcd")
    else:
        with open_store(store_name) as opened:
            yield opened


def assert_one_round(infos: list[Any]) -> None:
    """R3: all members agree, and each rank occurs once."""
    assert len({(info.round, info.world_size, info.bootstrap_address) for info in infos}) == 1
    assert sorted(info.rank for info in infos) == list(range(infos[0].world_size))


async def eventually(look: Callable[[], Awaitable[T]], is_wanted: Callable[[T], bool]) -> T:
    """Ask a node until it gives the wanted answer, and return that: each node learns of a change a moment later."""
    async with asyncio.timeout(60):
        while True:
            seen = await look()
            if is_wanted(seen):
                return seen
            await asyncio.sleep(0.01)


async def test_r1_r3_r10_r12_r15_all_nodes_share_one_round_roster_and_store(twin: str, backing: Backing) -> None:
    async with Meeting(twin, backing, min_nodes=2, max_nodes=3, rank_order="name") as meeting:
        nodes = [await meeting.node(name, payload={"gpus": 8, "of": name}, address=name) for name in "cab"]
        infos = await meeting.meet(*nodes)
        assert_one_round(infos)
        assert {info.node_id: info.rank for info in infos} == {"a": 0, "b": 1, "c": 2}
        for info in infos:
            assert [who.payload["of"] for who in await info.participants()] == ["a", "b", "c"]
            assert info.bootstrap_address[0] == "a"
        await infos[0].store.set("key", "value")
        assert await infos[1].store.get("key") == b"value"
        assert sorted(await asyncio.gather(*(info.store.add("sum", 1) for info in infos))) == [1, 2, 3]
        again = await meeting.meet(*nodes)
        assert_one_round(again)
        assert again[0].round == 1
        assert not await again[0].store.check(["key"]), "what a round shared goes with it"
        with pytest.raises(rdzv.RoundSupersededError):
            await infos[0].store.set("key", "late")


async def test_r1_r11_r16_too_few_time_out_saying_so_and_enough_have_a_last_call(twin: str, backing: Backing) -> None:
    async with Meeting(twin, backing, min_nodes=2, max_nodes=4, join_timeout=2.0) as meeting:
        a, b = await meeting.node("a"), await meeting.node("b")
        began = time.monotonic()
        with pytest.raises(rdzv.RendezvousTimeoutError, match="1 of at least 2 nodes"):
            await a.next_rendezvous()
        assert time.monotonic() - began >= 2.0
        assert (await b.status()).reason == "no node is here"
        assert_one_round(await meeting.meet(a, b))
        status = await eventually(b.status, lambda status: status.reason == "round 0 stands with 2 nodes")
        assert status.phase is Phase.TRAINING


async def test_r2_r5_r14_a_late_node_waits_announced_a_spare_is_not_and_is_taken_in_when_there_is_room(
    twin: str, backing: Backing
) -> None:
    async with Meeting(twin, backing, min_nodes=2, max_nodes=3) as meeting:
        a, b, c, d = [await meeting.node(name) for name in "abcd"]
        assert_one_round(await meeting.meet(a, b))
        late = await meeting.join(c)
        await told(a, NodesWaiting(1))
        await eventually(b.num_nodes_waiting, lambda count: count == 1)
        spare = await meeting.join(d)
        await eventually(a.status, lambda status: status.spares == ("d",))
        await a.leave()
        await told(b, NodesLeft(1, ("a",)))
        assert not late.done(), "b is still in the round"
        infos = [await b.next_rendezvous(), await late, await spare]
        assert_one_round(infos)
        assert infos[0].round == 1, "and there was room for the spare, since a has left"


async def test_r6_closing_reaches_members_joiners_and_spares_with_the_first_reason(twin: str, backing: Backing) -> None:
    async with Meeting(twin, backing, min_nodes=2, max_nodes=2) as meeting:
        a, b, c = [await meeting.node(name) for name in "abc"]
        await meeting.meet(a, b)
        spare = await meeting.join(c)
        await a.leave()
        joiner = await meeting.join(a, at=b)
        # There is room for one beside b, and a has been in the round. So c must know that neither of them has come
        # again.
        await eventually(c.status, lambda status: status.spares == ("c",))
        await b.set_closed("trained")
        await a.set_closed("second")
        assert await told(b, Closed) == Closed(reason="trained", by="b")
        with pytest.raises(rdzv.RendezvousClosedError, match="trained"):
            await joiner
        with pytest.raises(rdzv.RendezvousGracefulExitError, match="trained"):
            await spare
        await eventually(a.is_closed, bool)
        with pytest.raises(rdzv.RendezvousClosedError, match="trained"):
            await b.next_rendezvous()


async def test_r4_r5_r7_r9_a_node_that_is_cut_off_is_lost_notified_and_fenced_and_can_rejoin(
    twin: str, backing: Backing
) -> None:
    """The node is also the coordinator."""
    # On a busy machine one or two nodes would miss a short last call.
    async with Meeting(twin, backing, min_nodes=1, max_nodes=3, ttl=3, last_call_timeout=600) as meeting:
        a, b, c = [await meeting.node(name) for name in "abc"]
        joining = [await meeting.join(node) for node in (a, b, c)]
        infos = [await task for task in joining]
        assert_one_round(infos)
        await eventually(b.status, lambda status: status.coordinator == "a")
        await meeting.cut_off("a")
        await told(b, NodesLost(1, ("a",)))
        regrouped = await meeting.meet(b, c)
        assert_one_round(regrouped)
        assert regrouped[0].world_size == 2
        await meeting.proxies["a"].accept()
        await told(a, Dropped)
        with pytest.raises(rdzv.RoundSupersededError):
            await infos[0].store.set("key", "late")
        back = await meeting.join(a, at=b)
        await told(c, NodesWaiting(1))
        assert_one_round([*(await meeting.meet(b, c)), await back])


async def test_r8_a_connection_that_breaks_and_a_store_that_restarts_cost_delay_and_nothing_else(
    twin: str, backing: Backing
) -> None:
    # A busy machine may take seconds to connect again. The test is about the round's survival, not about the duration.
    async with Meeting(twin, backing, min_nodes=2, ttl=10, disconnect_ttl=10) as meeting:
        a, b = await meeting.node("a"), await meeting.node("b")
        first = await meeting.join(a)
        if meeting.backing.restarts:
            await asyncio.to_thread(meeting.backing.restart)
        infos = [await b.next_rendezvous(), await first]
        assert_one_round(infos)
        for proxy in meeting.proxies.values():
            proxy.cut()
        if meeting.backing.restarts:
            await asyncio.to_thread(meeting.backing.restart)
        await asyncio.gather(*(info.store.set(f"of {info.rank}", "value") for info in infos))
        status = await a.status()
        assert (status.round, len(status.members)) == (0, 2)
        again = await meeting.meet(a, b)
        assert_one_round(again)
        assert again[0].round == 1


async def test_r11_r13_a_re_rendezvous_ends_its_last_call_early_and_sizes_are_whole_units(
    twin: str, backing: Backing
) -> None:
    async with Meeting(
        twin, backing, min_nodes=2, max_nodes=4, node_unit=2, last_call_timeout=600, join_timeout=20
    ) as meeting:
        nodes = [await meeting.node(name) for name in "abcd"]
        assert (await meeting.meet(*nodes))[0].world_size == 4
        await meeting.end("d")
        joining = [await meeting.join(node, at=nodes[0]) for node in nodes[:3]]
        async with asyncio.timeout(60):
            while sum(task.done() for task in joining) < 2:  # noqa: ASYNC110 - any two of them
                await asyncio.sleep(0.01)
        assert_one_round([await task for task in joining if task.done()])
        (left_out,) = [task for task in joining if not task.done()]
        assert len((await nodes[0].status()).waiting) == 1, "a unit is two"
        assert not left_out.done()


async def test_r17_r18_unfit_banned_and_differing_nodes_are_kept_out_saying_why(twin: str, backing: Backing) -> None:
    async with Meeting(twin, backing, min_nodes=2, max_nodes=3) as meeting:
        a, b = await meeting.node("a"), await meeting.node("b")
        sick = await meeting.node("sick", health_check=lambda: "GPU 3 is gone")
        other = await meeting.node("other", max_nodes=2)
        await meeting.meet(a, b)
        with pytest.raises(rdzv.RendezvousRefusedError, match="GPU 3 is gone"):
            await sick.next_rendezvous()
        with pytest.raises(rdzv.RendezvousSettingsError, match="max_nodes"):
            await other.next_rendezvous()
        await a.ban("b", "rogue", now=True)
        await told(b, Dropped("this node is banned by a: rogue"))
        with pytest.raises(rdzv.RendezvousRefusedError, match="rogue"):
            await b.next_rendezvous()
        assert set((await a.status()).refused) == {"b", "sick"}
        await a.unban("b")
        back = await meeting.join(b, at=a)
        await told(a, NodesWaiting(1))
        assert_one_round([await a.next_rendezvous(), await back])


async def test_r2_several_callers_at_once_do_not_get_into_each_others_way(twin: str, backing: Backing) -> None:
    """From several threads, or from several tasks: also while one of them is parked, and only one may be."""
    async with Meeting(twin, backing, min_nodes=2) as meeting:
        a, b = await meeting.node("a"), await meeting.node("b")
        parked = await meeting.join(a)
        with pytest.raises(rdzv.RendezvousStateError):
            await a.next_rendezvous()
        await eventually(b.status, lambda status: status.reason == "1 of at least 2 nodes")
        statuses = await asyncio.gather(*(b.status() for _ in range(8)), *(a.is_closed() for _ in range(8)))
        assert {status.reason for status in statuses[:8]} == {"1 of at least 2 nodes"}
        assert statuses[8:] == [False] * 8
        infos = [await b.next_rendezvous(), await parked]
        assert_one_round(infos)
        sums = await asyncio.gather(*(infos[number % 2].store.add("sum", 1) for number in range(40)))
        assert sorted(sums) == list(range(1, 41))


async def test_r9_a_caller_that_blocks_for_longer_than_the_ttl_between_two_calls_stays_a_member(
    twin: str, backing: Backing
) -> None:
    """A training step that blocks the loop, or the script, does not look like a death."""
    async with Meeting(twin, backing, min_nodes=1) as meeting:
        a = await meeting.node("a")
        # Not through a proxy: its loop is the one that the test blocks.
        url = f"{meeting.backing.scheme}://{meeting.backing.host}:{meeting.backing.port}/blocked-{time.time_ns()}"
        given: Overrides = {"min_nodes": 1, "ttl": 0.6, "is_host": False, "node_id": "busy"}
        if isinstance(a, BlockingNode):
            status = await asyncio.to_thread(block_a_script, url, given)
        else:
            async with rdzv.connect(url, **given) as handler:
                info = await handler.next_rendezvous()
                time.sleep(0.9)  # noqa: ASYNC251 - the test needs a blocked loop
                await info.store.set("key", "value")
                status = await handler.status()
        assert [member.node_id for member in status.members] == ["busy"]
        assert status.round == 0


def block_a_script(url: str, given: Overrides) -> rdzv.RunStatus:
    """Act as a script that computes between two calls."""
    with rdzv.sync.connect(url, **given) as handler:
        info = handler.next_rendezvous()
        time.sleep(0.9)
        info.store.set("key", "value")
        return handler.status()
