"""R17 Admission: a health-check hook runs before a node joins.

One that fails stays out, with its reason visible; a node can be banned and unbanned.
"""

import asyncio
import math
import subprocess
import sys
from typing import Any

import pytest

import rdzv
import store
from rdzv import Dropped, NodesLeft, NodesLost
from tests.support.runs import VirtualRun, assert_one_round, listen

pytestmark = pytest.mark.virtual_time


async def test_r17_a_node_that_fails_its_health_check_stays_out_with_a_visible_reason() -> None:
    def check() -> str:
        return "GPU 3 has fallen off the bus"

    async with VirtualRun(min_nodes=1) as run:
        sick, well = run.handler("sick", health_check=check), run.handler("well")
        with pytest.raises(rdzv.RendezvousRefusedError, match="GPU 3"):
            await sick.next_rendezvous()
        await well.next_rendezvous()
        status = await well.status()
        assert status.refused == {"sick": "failed its health check: GPU 3 has fallen off the bus"}
        assert [member.node_id for member in status.members] == ["well"]
        assert run.keys("nodes/") == ["well"]


async def test_r17_a_health_check_that_raises_has_failed_and_one_that_is_awaited_may_pass() -> None:
    healthy = False

    async def check() -> None:
        if not healthy:
            raise OSError("no driver")

    async with VirtualRun(min_nodes=1) as run:
        handler = run.handler("a", health_check=check)
        with pytest.raises(rdzv.RendezvousRefusedError, match="no driver"):
            await handler.next_rendezvous()
        healthy = True
        assert (await handler.next_rendezvous()).world_size == 1
        assert (await handler.status()).refused == {}


ENDS_NODES = """
import sys, rdzv

def fails(*_):
    raise vars(__builtins__)[sys.argv[2]]

one = {"min_nodes": 1, "is_host": False}
with rdzv.sync.connect(sys.argv[1] + "/well", **one) as well:
    info = well.next_rendezvous()
    with rdzv.sync.connect(sys.argv[1] + "/sick", health_check=fails, **one) as sick:
        try:
            sick.next_rendezvous()
        except rdzv.RendezvousRefusedError as error:
            print(error)
    with rdzv.sync.connect(sys.argv[1] + "/order", rank_order=fails, join_timeout=2, **one) as unordered:
        try:
            unordered.next_rendezvous()
        except rdzv.RendezvousTimeoutError as error:
            print(error)
    well.next_rendezvous()
    print("the other node of this process is well")
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "GeneratorExit"])
def test_r17_any_error_of_a_users_function_ends_no_other_node_of_the_process(error: str) -> None:
    """Regression: KeyboardInterrupt in a blocking health check or a `rank_order` ended the thread of all nodes."""
    with store.sync.serve() as server:
        line = [sys.executable, "-c", ENDS_NODES, server.url, error]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert f"failed its health check: {error}" in said[0]
    assert f"rank_order fails with {error}" in said[1]
    assert said[2:] == ["the other node of this process is well"]


async def test_r17_an_invalid_node_name_is_neither_banned_nor_unbanned() -> None:
    """No node can have this name. The command would report success and keep no node out."""
    async with VirtualRun() as run:
        handler = run.handler("a")
        for judged in (handler.ban("b/c", "slow disk"), handler.unban("b/c")):
            with pytest.raises(rdzv.RendezvousSettingsError):
                await judged
        assert (await handler.status()).refused == {}


async def test_r17_a_temporary_ban_ends_by_itself_and_the_status_shows_the_time_left() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = await run.met("ab")
        await a.ban("b", "slow disk", lasts=600)
        with pytest.raises(rdzv.RendezvousRefusedError, match="slow disk"):
            await b.next_rendezvous()
        await asyncio.sleep(30)
        status = await a.status()
        assert status.refused == {"b": "banned by a for 9 min 30 s more: slow disk"}
        assert status.banned["b"].ends_in == pytest.approx(570, abs=1)
        await asyncio.sleep(569)
        with pytest.raises(rdzv.RendezvousRefusedError):
            await b.next_rendezvous()
        await asyncio.sleep(2)
        assert (await a.status()).refused == {}
        joining = await run.join(b)
        await a.next_rendezvous()
        assert (await joining).world_size == 2


async def test_r17_a_ban_for_a_time_and_one_for_good_replace_each_other_and_either_is_lifted() -> None:
    async with VirtualRun(min_nodes=1) as run:
        (a,) = await run.met("a")
        await a.ban("b", lasts=60)
        await a.ban("b")
        await asyncio.sleep(120)
        assert (await a.status()).refused == {"b": "banned by a"}, "the last word counts"
        await a.ban("b", lasts=60)
        await a.unban("b")
        assert (await a.status()).refused == {}
        await a.ban("b", lasts=60)
        await asyncio.sleep(61)
        assert (await a.status()).refused == {}


@pytest.mark.parametrize("lasts", [0, -1, math.nan, math.inf, 1e9])
async def test_r17_a_ban_for_no_time_or_for_longer_than_the_store_can_is_refused_in_a_sentence(lasts: float) -> None:
    async with VirtualRun(min_nodes=1) as run:
        with pytest.raises(rdzv.RendezvousSettingsError):
            await run.handler("a").ban("b", lasts=lasts)
        assert (await run.handler("a").status()).refused == {}


async def test_r17_a_banned_node_finishes_its_round_and_is_kept_out_of_the_next_until_it_is_unbanned() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = run.handler("a"), run.handler("b")
        _, info = await run.meet(a, b)
        heard = await listen(run, b)
        await a.ban("b", "slow disk")
        await info.store.set("still", "here")
        assert heard.changes == []
        joining = await run.join(a)
        with pytest.raises(rdzv.RendezvousRefusedError, match="slow disk"):
            await b.next_rendezvous()
        assert (await joining).world_size == 1
        assert (await a.status()).refused == {"b": "banned by a: slow disk"}
        await a.unban("b")
        again = await run.join(b)
        assert await a.num_nodes_waiting() == 1
        await a.next_rendezvous()
        assert (await again).world_size == 2


async def test_r17_the_history_records_each_lifted_ban_once_with_its_author_and_reason() -> None:
    """R17: "banned, for a time or until it is unbanned, with a reason for all to read"."""
    names = [f"n{number}" for number in range(40)]
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        await a.ban("early")
        await b.unban("early", "before anybody had met")
        await run.meet(a, b)
        for name in names:
            await a.ban(name, "slow disk")
        await a.ban(where=("rack", "17"), lasts=600)
        await a.unban("never-banned", "a slip")
        await asyncio.gather(*(b.unban(name, "new disk") for name in names), b.unban(where=("rack", "17")))
        await asyncio.sleep(1)
        (chapter,) = await a.history()
        assert {one.kind for one in chapter.incidents} == {"unbanned"}
        said = sorted(one.reason for one in chapter.incidents)
        others = "early by b: before anybody had met", "nodes with rack=17 by b"
        assert said == sorted([*others, *(f"{name} by b: new disk" for name in names)])
        assert run.keys("head/banned/") == run.keys("head/unbanned/") == []


@pytest.mark.parametrize("dies_after", [0.0, 1.0])
async def test_r17_a_lifted_ban_is_announced_once_though_the_coordinator_dies_before_or_after(
    dies_after: float,
) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        nodes = {name: run.handler(name) for name in "ab"}
        await run.meet(*nodes.values())
        coordinator = (await nodes["a"].status()).coordinator
        assert coordinator is not None
        stays = nodes["b" if coordinator == "a" else "a"]
        await stays.ban("x")
        lifting = run.start(stays.unban("x", "new disk"))
        await asyncio.sleep(dies_after)
        run.crash(coordinator)
        await lifting
        await asyncio.sleep(30)
        await run.meet(stays)
        told = [one for chapter in await stays.history() for one in chapter.incidents if one.kind == "unbanned"]
        assert [one.reason for one in told] == [f"x by {stays.node_id}: new disk"]


async def test_r17_a_ban_with_now_takes_the_node_out_of_its_round_at_once() -> None:
    """R17: "a node can be banned", and R2: a member leaves a round also "by a ban"."""
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        _, info = await run.meet(a, b)
        at_a, at_b = await listen(run, a), await listen(run, b)
        await a.ban("b", "rogue", now=True)
        await at_b.until(Dropped("this node is banned by a: rogue"))
        await at_a.until(NodesLost(1, ("b",)))
        with pytest.raises(rdzv.RoundSupersededError, match="rogue"):
            await info.store.set("late", "write")
        assert (await a.next_rendezvous()).world_size == 1


async def test_r17_a_ban_of_an_attribute_holds_for_present_and_later_nodes_with_it() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=4) as run:
        a = run.handler("a", attributes={"rack": "18"})
        b = run.handler("b", attributes={"host": "h1", "rack": "17"})
        await run.meet(a, b)
        c = run.handler("c", attributes={"rack": "17"})
        parked = await run.join(c)
        assert await a.ban(reason="its switch", where=("rack", "17"), lasts=600) == ("b", "c")
        with pytest.raises(rdzv.RendezvousRefusedError, match="rack=17"):
            await parked
        joining = await run.join(a)
        with pytest.raises(rdzv.RendezvousRefusedError, match="its switch"):
            await b.next_rendezvous()
        assert (await joining).world_size == 1
        d = run.handler("d", attributes={"rack": "17"})
        with pytest.raises(rdzv.RendezvousRefusedError, match="rack=17"):
            await d.next_rendezvous()
        status = await a.status()
        assert status.banned == {}
        assert status.refused == {"nodes with rack=17": "banned by a for 10 min more: its switch"}
        shown = status.banned_where["rack=17"]
        assert shown.reason == "its switch"
        assert shown.ends_in == pytest.approx(600, abs=1)
        await a.unban(where=("rack", "18"))
        with pytest.raises(rdzv.RendezvousRefusedError):
            await d.next_rendezvous()
        await a.unban(where=("rack", "17"))
        again = await run.join(d)
        await a.next_rendezvous()
        assert (await again).world_size == 2


async def test_r17_a_ban_of_an_attribute_ends_by_itself_and_with_now_takes_nodes_out_of_their_round() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b", attributes={"rack": "17"})
        await run.meet(a, b)
        at_a, at_b = await listen(run, a), await listen(run, b)
        assert await a.ban(where=("rack", "17"), now=True, lasts=60) == ("b",)
        await at_b.until(Dropped("this node is banned, as all nodes with rack=17, by a for 1 min"))
        await at_a.until(NodesLost(1, ("b",)))
        assert (await a.next_rendezvous()).world_size == 1
        await asyncio.sleep(61)
        again = await run.join(b)
        await a.next_rendezvous()
        assert (await again).world_size == 2


@pytest.mark.parametrize(("attribute", "value"), [("", "17"), ("rack", ""), ("ra=ck", "17"), ("rack", "7" * 5000)])
async def test_r17_an_invalid_attribute_is_not_banned(attribute: str, value: str) -> None:
    async with VirtualRun(min_nodes=1) as run:
        with pytest.raises(rdzv.RendezvousSettingsError):
            await run.handler("a").ban(where=(attribute, value))
        assert (await run.handler("a").status()).refused == {}


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ({}, "not of neither"),
        ({"node_id": "a", "where": ("rack", "17")}, "not of both"),
        ({"node_id": "a", "where": ()}, "not of both"),
        ({"where": "ab"}, "must be an attribute and its value"),
        ({"where": ("rack",)}, "must be an attribute and its value"),
    ],
)
async def test_r17_a_ban_is_of_one_node_or_of_one_attribute(named: dict[str, Any], problem: str) -> None:
    async with VirtualRun(min_nodes=1) as run:
        handler = run.handler("a")
        for call in (handler.ban, handler.unban):
            with pytest.raises(rdzv.RendezvousSettingsError, match=problem):
                await call(**named)


async def test_r17_a_node_that_waits_is_put_out_by_a_ban_at_once() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.join(b)
        waiting = await run.join(run.handler("c"))
        await a.ban("c", "not you")
        with pytest.raises(rdzv.RendezvousRefusedError, match="not you"):
            await waiting
        assert "c" not in run.keys("nodes/")


async def test_r17_a_ban_with_now_of_the_coordinator_takes_the_role_from_it_as_well() -> None:
    """R17, R7: it went on deciding for the members that had banned it."""
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = (run.handler(name) for name in "abc")
        joining = [await run.join(node) for node in (a, b, c)]
        assert_one_round([await task for task in joining])
        assert (await b.status()).coordinator == "a"
        at_a, at_c = await listen(run, a), await listen(run, c)
        await b.ban("a", "rogue", now=True)
        await at_a.until(Dropped("this node is banned by b: rogue"))
        await at_c.until(NodesLost(1, ("a",)))
        await asyncio.sleep(2)
        assert (await b.status()).coordinator in {"b", "c"}
        infos = await run.meet(b, c)
        assert_one_round(infos)
        assert infos[0].world_size == 2
        with pytest.raises(rdzv.RendezvousRefusedError, match="rogue"):
            await a.next_rendezvous()
        await a.unban("a")
        back = await run.join(a)
        assert_one_round([*(await run.meet(b, c)), await back])


async def test_r17_a_ban_of_the_coordinator_takes_it_out_at_the_next_round_and_the_others_go_on() -> None:
    """R17: "a node can be banned": it finishes its round, and coordinates as long as it is in it."""
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a, b, c = (run.handler(name) for name in "abc")
        joining = [await run.join(node) for node in (a, b, c)]
        await asyncio.gather(*joining)
        at_c = await listen(run, c)
        await b.ban("a", "slow disk")
        await asyncio.sleep(30)
        assert at_c.changes == []
        assert (await b.status()).coordinator == "a"
        others = [await run.join(node) for node in (b, c)]
        with pytest.raises(rdzv.RendezvousRefusedError, match="slow disk"):
            await a.next_rendezvous()
        infos = [await task for task in others]
        assert_one_round(infos)
        assert infos[0].world_size == 2
        assert not any(isinstance(change, NodesLost) for change in at_c.changes), "it has left, and is not lost"
        assert all(change.node_ids == ("a",) for change in at_c.changes if isinstance(change, NodesLeft))


async def test_r17_a_ban_of_a_coordinator_that_waits_lets_the_last_call_go_on_without_it() -> None:
    """R17, R7: a running last call is continued, also if a ban ends the coordinator."""
    async with VirtualRun(min_nodes=2, max_nodes=4, last_call_timeout=20) as run:
        a, b, c = (run.handler(name) for name in "abc")
        began = asyncio.get_running_loop().time()
        joining = [await run.join(node) for node in (a, b, c)]
        await asyncio.sleep(10)
        assert (await b.status()).coordinator == "a"
        await b.ban("a", "not you")
        with pytest.raises(rdzv.RendezvousRefusedError, match="not you"):
            await joining[0]
        infos = [await task for task in joining[1:]]
        assert_one_round(infos)
        assert infos[0].world_size == 2
        assert asyncio.get_running_loop().time() - began == pytest.approx(20, abs=1)
