"""Promises R1 to R16 with real handlers, on virtual time; R3, R4 and others have files of their own beside it."""

import asyncio
import logging
from typing import Any

import pytest

from rdzv import Closed, NodesLeft, NodesLost, NodesWaiting, RendezvousTimeoutError
from store import Limits
from tests.support.runs import VirtualRun, assert_one_round, connected, listen
from tests.support.virtual_time import now

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(9)]

SOON = 0.5  # seconds of virtual time that messages and elections may take


async def test_r1_completes_at_once_at_max_nodes() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3) as run:
        began = now()
        assert_one_round(await run.meet(*(run.handler(name) for name in "abc")))
        assert now() - began < SOON


async def test_r1_completes_with_min_nodes_once_the_last_call_is_over() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=4, last_call_timeout=7) as run:
        began = now()
        assert_one_round(await run.meet(run.handler("a"), run.handler("b")))
        assert 7 <= now() - began < 7 + SOON


async def test_r1_the_timeout_error_says_what_was_missing() -> None:
    async with VirtualRun(min_nodes=3, join_timeout=20) as run:
        began = now()
        joining = [run.start(run.handler(name).next_rendezvous()) for name in "ab"]
        for task in joining:
            with pytest.raises(RendezvousTimeoutError, match="2 of at least 3 nodes"):
                await task
        assert 20 <= now() - began < 20 + SOON
        await asyncio.sleep(SOON)
        assert run.keys("nodes/") == []


async def test_r1_the_timeout_stands_still_during_the_last_call() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, join_timeout=5, last_call_timeout=60) as run:
        began = now()
        await run.meet(run.handler("a"))
        assert 60 <= now() - began < 60 + SOON


async def test_r1_the_timeout_bounds_the_wait_for_a_member_that_is_busy() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, join_timeout=30, last_call_timeout=1) as run:
        a, b, late = (run.handler(name) for name in "abc")
        await run.meet(a, b)
        began = now()
        with pytest.raises(RendezvousTimeoutError, match="1 node waiting for round 0's 2 live members to leave"):
            await late.next_rendezvous()
        assert 30 <= now() - began < 30 + SOON


@pytest.mark.parametrize("early", [step * 0.001 for step in range(-3, 14)])
async def test_r1_a_round_that_comes_in_the_moment_of_the_timeout_wins(early: float) -> None:
    async with VirtualRun(min_nodes=2, join_timeout=20) as run:
        a, b = run.handler("a"), run.handler("b")
        joining = await run.join(a)
        await connected(b)
        await asyncio.sleep(20 - 0.02 - early)
        other = await run.join(b)
        done, _ = await asyncio.wait([joining, other], timeout=5)
        if joining in done and joining.exception() is None:
            assert_one_round([joining.result(), other.result()])
        else:
            assert isinstance(joining.exception(), RendezvousTimeoutError)
            assert other not in done


async def test_r11_the_last_call_is_not_extended_by_later_joins() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=5, last_call_timeout=10) as run:
        began = now()
        joining = []
        for name in "abc":
            joining.append(await run.join(run.handler(name)))
            await asyncio.sleep(3)
        assert_one_round(await asyncio.gather(*joining))
        assert 10 <= now() - began < 10 + SOON


async def test_r11_the_last_call_starts_anew_after_falling_below_the_minimum() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=5, last_call_timeout=10) as run:
        a = await run.join(run.handler("a"))
        b = await run.join(run.handler("b"))
        await asyncio.sleep(8)
        b.cancel()
        await asyncio.sleep(1)
        began = now()
        c = await run.join(run.handler("c"))
        assert_one_round([await a, await c])
        assert 10 <= now() - began < 10 + SOON


@pytest.mark.parametrize(("early", "takes"), [(True, 0), (False, 10)])
async def test_r11_in_a_re_rendezvous_it_ends_once_no_other_node_is_known_to_be_coming(
    early: bool, takes: float
) -> None:
    async with VirtualRun(min_nodes=2, max_nodes=5, last_call_timeout=10, early_last_call=early) as run:
        a, b, _ = await run.met("abc")
        heard = await listen(run, a)
        run.crash("c")
        await heard.until(NodesLost)
        began = now()
        assert_one_round(await run.meet(a, b))
        assert takes <= now() - began < takes + SOON


async def test_r11_it_runs_also_while_members_are_waited_for_and_completing_needs_both() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=5, last_call_timeout=10, early_last_call=False) as run:
        a, b, busy = (run.handler(name) for name in "abc")
        await run.meet(a, b, busy)
        joining = [await run.join(node) for node in (a, b)]
        await asyncio.sleep(30)
        assert not any(task.done() for task in joining), "one member is left"
        began = now()
        await busy.leave()
        assert_one_round(await asyncio.gather(*joining))
        assert now() - began < SOON, "and the last call has run meanwhile"


@pytest.mark.parametrize("way", ["next_rendezvous", "leave", "aclose", "lapse"])
async def test_r2_a_late_node_waits_announced_until_every_member_has_left(way: str) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=4, last_call_timeout=1) as run:
        a, b, late = (run.handler(name) for name in "abc")
        await run.meet(a, b)
        waiting = await run.join(late)
        await (await listen(run, a)).until(NodesWaiting(1))
        assert await a.num_nodes_waiting() == 1
        await asyncio.sleep(60)
        assert not waiting.done()
        joined = []
        for node in (a, b):
            if way == "next_rendezvous":
                joined.append(await run.join(node))
            elif way == "leave":
                await node.leave()
            elif way == "aclose":
                await node.aclose()
            else:
                run.crash(node.node_id)
                await asyncio.sleep(2)
            if node is a:
                await asyncio.sleep(5)
                assert not waiting.done(), "one live member is left"
                assert await b.num_nodes_waiting() == (2 if way == "next_rendezvous" else 1)
        infos = [await waiting, *[await task for task in joined]]
        assert_one_round(infos)
        assert infos[0].round == 1
        assert await late.num_nodes_waiting() == 0


async def test_r5_losses_departures_arrivals_and_closing_reach_every_survivor() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=6, last_call_timeout=0.5) as run:
        nodes = [run.handler(name) for name in "abcde"]
        await run.meet(*nodes)
        survivors = nodes[2:]
        heard = [await listen(run, node) for node in survivors]
        began = now()
        run.crash("a")
        await asyncio.gather(*(one.until(NodesLost(1, ("a",))) for one in heard))
        assert now() - began < 1 + 2 * SOON, "it takes disconnect_ttl, and an election if it coordinated"
        await nodes[1].leave()
        await asyncio.gather(*(one.until(NodesLeft(1, ("b",))) for one in heard))
        late = await run.join(run.handler("f"))
        await asyncio.gather(*(one.until(NodesWaiting(1)) for one in heard))
        late.cancel()
        await asyncio.gather(*(one.until(NodesWaiting(0)) for one in heard))
        await nodes[2].set_closed("over")
        await asyncio.gather(*(one.until(Closed(reason="over", by="c")) for one in heard))
        again = await listen(run, nodes[3])
        await again.until(Closed)
        assert again.changes == [Closed(reason="over", by="c")], "there is nothing to meet again for"


async def test_r5_the_departure_of_each_member_is_no_loss_even_of_the_one_that_coordinates() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=4, last_call_timeout=0.5) as run:
        nodes = [run.handler(name) for name in "abcd"]
        await run.meet(*nodes)
        heard = await listen(run, nodes[3])
        for node in nodes[:3]:
            await node.aclose()
            await asyncio.sleep(2)
        await heard.until(NodesLeft(3, ("a", "b", "c")))
        assert not any(isinstance(change, NodesLost) for change in heard.changes)


async def test_r5_a_coordinator_that_leaves_right_behind_another_is_no_loss() -> None:
    """The second departure within fifty milliseconds is reported later, and the role was given up before the report."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        nodes = {name: run.handler(name) for name in "abc"}
        await run.meet(*nodes.values())
        await asyncio.sleep(5)
        coordinator = (await nodes["c"].status()).coordinator
        assert coordinator is not None
        first, last = (node for name, node in nodes.items() if name != coordinator)
        heard = await listen(run, last)
        await first.leave()
        await nodes[coordinator].aclose()
        await heard.until(NodesLeft(2, (first.node_id, coordinator)))
        await asyncio.sleep(5)
        assert not any(isinstance(change, NodesLost) for change in heard.changes)


async def test_r16_the_reason_is_in_the_status_and_one_line_of_the_log_per_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rdzv")
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=20) as run:
        a, b = run.handler("a"), run.handler("b")
        first = await run.join(a)
        assert (await a.status()).reason == "1 of at least 2 nodes"
        second = await run.join(b)
        await asyncio.sleep(5)
        assert (await a.status()).reason.startswith("last call, 1")
        assert a.reason.endswith("left; 2 of at most 3 nodes")
        await asyncio.gather(first, second)
        assert (await a.status()).reason == "round 0 stands with 2 nodes"
        said = [record.getMessage() for record in caplog.records if "last call" in record.getMessage()]
        assert len(said) == 3, "one by the coordinator, and one by each node"


@pytest.mark.parametrize("error", [LookupError, SystemExit])
async def test_r16_an_order_that_fails_is_in_every_status_and_in_the_timeout_error(error: type[BaseException]) -> None:
    """SystemExit ended the thread of all nodes of the process, for good."""

    def order(*_: object) -> list[Any]:
        raise error("no topology for b")

    async with VirtualRun(min_nodes=2, rank_order=order, join_timeout=30) as run:
        a, b = run.handler("a"), run.handler("b")
        observer = run.handler("observer", min_nodes=None)
        joining = [await run.join(a), await run.join(b)]
        await asyncio.sleep(5)
        words = f"it cannot be completed: rank_order fails with {error.__name__}: no topology for b"
        for node in (a, b, observer):
            assert words in (await node.status()).reason
        with pytest.raises(RendezvousTimeoutError, match=words):
            await joining[0]


async def test_r16_the_timeout_error_names_a_store_that_refuses_the_arrival() -> None:
    """Regression: it said that the node was "not waiting for anything"."""
    async with VirtualRun(min_nodes=2, join_timeout=5) as run:
        a = run.handler("a")
        await connected(a)
        run.network.partition("a")
        with pytest.raises(RendezvousTimeoutError, match="waiting for the store to take its arrival"):
            await a.next_rendezvous()


async def test_r1_the_timeout_bounds_a_health_check_that_hangs() -> None:
    """Regression: it was waited for without any limit."""

    async def hang() -> None:
        await asyncio.sleep(9999)

    async with VirtualRun(min_nodes=1, join_timeout=20, health_check=hang) as run:
        began = now()
        with pytest.raises(RendezvousTimeoutError):
            await run.handler("a").next_rendezvous()
        assert now() - began == pytest.approx(20, abs=0.1)


@pytest.mark.in_ci
async def test_r12_by_topology_the_node_left_over_is_a_spare_and_says_so() -> None:
    async with VirtualRun(min_nodes=4, max_nodes=4, rank_order="topology:rack", join_timeout=60) as run:
        first = [run.handler(f"x{number}", attributes={"rack": "x"}) for number in range(4)]
        await run.meet(*first)
        others = {name: run.handler(name, attributes={"rack": name[0]}) for name in ("a1", "b1", "c1", "b2", "c2")}
        joining = {name: await run.join(node) for name, node in others.items()}
        for node in first:
            await node.leave()
        alone = joining.pop("a1")
        infos = [await task for task in joining.values()]
        assert_one_round(infos)
        assert {info.node_id: info.rank for info in infos} == {"b1": 0, "b2": 1, "c1": 2, "c2": 3}
        await asyncio.sleep(600)
        assert not alone.done(), "a spare's join timeout stands still"
        assert (await first[0].status()).spares == ("a1",)


async def test_r16_all_nodes_report_a_store_that_is_too_full_for_a_round() -> None:
    """Regression: they waited for ever, in a last call that was over, and only the coordinator's log said why."""
    limits = Limits(keys_max=6)  # two nodes, their settings, coordinator and progress, but no round
    async with VirtualRun(min_nodes=2, join_timeout=30, limits=limits) as run:
        a, b = run.handler("a"), run.handler("b")
        joining = [await run.join(a), await run.join(b)]
        await asyncio.sleep(5)
        assert "it cannot be completed: the store does not take it: " in (await b.status()).reason
        with pytest.raises(RendezvousTimeoutError, match="keys_max"):
            await joining[0]
