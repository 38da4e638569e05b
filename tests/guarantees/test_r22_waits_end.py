"""R22: every wait in a round, also in its shared store, ends when a member is lost, naming it.

The first half runs on virtual time. Then a process is really killed, under both twins.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

import rdzv
import store
from rdzv import NodesLost, SharedStore, SharedStoreTimeoutError
from rdzv.testing import Cluster, ClusterNode, cluster
from tests.support.processes import start_python
from tests.support.runs import VirtualRun, listen
from tests.support.twins import TWINS, Embedded, Meeting, told
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time

WAITS: dict[str, Callable[[Any], Any]] = {
    "get": lambda shared: shared.get("never"),
    "wait": lambda shared: shared.wait(["never"]),
    "multi_get": lambda shared: shared.multi_get(["never"]),
    "queue_pop": lambda shared: shared.queue_pop("empty"),
    "barrier": lambda shared: shared.barrier("b", 3),
}

ROUNDS = {
    "async": """
import asyncio, sys, rdzv

async def main():
    try:
        async for round in rdzv.rounds(sys.argv[1]):
            async with round:
                print("in", flush=True)
                await round.store.get("never")
    except rdzv.RendezvousConnectionError as error:
        print("ended:", error)
asyncio.run(main())
""",
    "blocking": """
import sys, rdzv.sync

try:
    for round in rdzv.sync.rounds(sys.argv[1]):
        with round:
            print("in", flush=True)
            round.store.get("never")
except rdzv.RendezvousConnectionError as error:
    print("ended:", error)
""",
}
JOB = "import signal; print('in', flush=True); signal.pause()"

DIES = """
import sys, time, rdzv.sync

with rdzv.sync.connect(sys.argv[1], node_id="killed", is_host=False) as handler:
    info = handler.next_rendezvous()
    print("in", flush=True)
    info.store.get("never")
"""


@virtual_time
@pytest.mark.parametrize("wait", WAITS)
async def test_r22_a_wait_ends_as_soon_as_the_node_knows_of_a_loss(wait: str) -> None:
    async with VirtualRun(min_nodes=3, ttl=10) as run:
        a, b, c = (run.handler(name) for name in "abc")
        infos = await run.meet(a, b, c)
        waiting = [run.start(WAITS[wait](info.store)) for info in infos[:2]]
        heard = await listen(run, a)
        await asyncio.sleep(5)
        assert not any(task.done() for task in waiting)
        run.crash("c")
        for task in waiting:
            with pytest.raises(rdzv.MembersLostError, match="'c'") as caught:
                async with asyncio.timeout(60):  # its own timeout is 300 s
                    await task
            assert caught.value.node_ids == ("c",)
        await heard.until(NodesLost(1, ("c",)))


@virtual_time
async def test_r22_after_a_loss_present_values_are_returned_and_other_waits_end_at_once() -> None:
    async with VirtualRun(min_nodes=2, ttl=10) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        await infos[1].store.set("left behind", "yes")
        heard = await listen(run, a)
        run.crash("b")
        await heard.until(NodesLost)
        shared = infos[0].store
        assert await shared.get("left behind") == b"yes"
        began = now()
        with pytest.raises(rdzv.MembersLostError):
            await shared.clone().get("never")
        assert now() - began < 1
        await shared.set("mine", "1")
        assert await shared.add("count", 1) == 1, "who does not wait goes on"


@virtual_time
async def test_r22_a_round_after_the_loss_waits_for_its_own_members() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, last_call_timeout=1, ttl=10) as run:
        a, b, _ = await run.met("abc")
        heard = await listen(run, a)
        run.crash("c")
        await heard.until(NodesLost)
        infos = await run.meet(a, b)
        waiting = run.start(infos[0].store.get("later"))
        await asyncio.sleep(2)
        await infos[1].store.set("later", "1")
        assert await waiting == b"1"


@virtual_time
async def test_r22_a_member_that_leaves_ends_no_wait() -> None:
    async with VirtualRun(min_nodes=2, ttl=10) as run:
        a, b = run.handler("a"), run.handler("b")
        waiting = run.start((await run.meet(a, b))[0].store.wait(["never"], timeout=20))
        await b.leave()
        with pytest.raises(SharedStoreTimeoutError):
            await waiting


@virtual_time
async def test_r22_waits_go_on_after_a_loss_if_configured() -> None:
    async with VirtualRun(min_nodes=2, ttl=10, waits_end_on_loss=False) as run:
        a, b = run.handler("a"), run.handler("b")
        shared: SharedStore = (await run.meet(a, b))[0].store
        waiting = run.start(shared.get("later"))
        heard = await listen(run, a)
        run.crash("b")
        await heard.until(NodesLost)
        await asyncio.sleep(60)
        assert not waiting.done()
        await shared.set("later", "1")
        assert await waiting == b"1"


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("wait", ["get", "barrier"])
async def test_r22_a_wait_for_a_killed_process_ends(twin: str, wait: str) -> None:
    with contextlib.ExitStack() as stack:
        backing = Embedded()
        backing.start()
        stack.callback(backing.stop)
        async with Meeting(twin, backing, min_nodes=2) as meeting:
            a = await meeting.node("a")
            url = (
                f"tcp://127.0.0.1:{backing.port}/{meeting.run_id}?min_nodes=2&last_call_timeout=0.2&disconnect_ttl=0.3"
            )
            joining = meeting.start(a.next_rendezvous())
            async with start_python("-c", DIES, url) as child:
                info = await joining
                await child.line("in")
                waiting = meeting.start(WAITS[wait](info.store))
                async with store.connect(f"tcp://127.0.0.1:{backing.port}") as look, asyncio.timeout(60):
                    while (await look.stats())["waits"] < 2:  # noqa: ASYNC110  no event
                        await asyncio.sleep(0.01)
                child.kill()
                with pytest.raises(rdzv.MembersLostError, match="'killed'") as caught:
                    async with asyncio.timeout(60):
                        await waiting
                assert caught.value.node_ids == ("killed",)
                await told(a, NodesLost(1, ("killed",)))


@pytest.mark.some_of(1)
@pytest.mark.parametrize("driver", [*ROUNDS, "rdzv run"])
async def test_r22_the_host_of_a_memory_store_is_killed_and_member_and_spare_end_soon_and_say_why(driver: str) -> None:
    async with start_python("-m", "rdzv", "serve", "--port", "0") as host, contextlib.AsyncExitStack() as stack:
        address = (await host.says("listens on ")).partition("listens on ")[2].split(",")[0]
        url = f"tcp://{address}/job?min_nodes=1&max_nodes=1&store_gone_timeout=1"
        program: tuple[str, ...] = ("-m", "rdzv", "run", url, "--", sys.executable, "-c", JOB)
        if driver in ROUNDS:
            program = ("-c", ROUNDS[driver], url)
        member = await stack.enter_async_context(start_python(*program))
        await member.line("in")
        spare = await stack.enter_async_context(start_python(*program))
        async with rdzv.connect(f"tcp://{address}/job") as observer, asyncio.timeout(60):
            while not (await observer.status()).spares:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        host.kill()
        for node in (member, spare):
            assert await node.wait(timeout=20) == (124 if driver == "rdzv run" else 0)
            await node.says("in memory only; waiting 1 s for another")
            await node.says("was in memory only, and its process is gone")


@virtual_time
async def test_r22_a_wait_for_a_round_names_the_missing_nodes_and_since_when() -> None:
    async with VirtualRun(min_nodes=3, ttl=10, join_timeout=60, expected="a,b,c,gpu-023") as run:
        a, b, c = (run.handler(name, address=f"10.0.0.{at}") for at, name in enumerate("abc"))
        coordinates = await run.join(a)
        await run.meet(b, c)
        await coordinates
        heard = await listen(run, a)
        run.crash("c")
        await heard.until(NodesLost)
        await asyncio.sleep(20)
        waiting = [await run.join(a), await run.join(b)]
        await asyncio.sleep(40)
        lost = "lost 1 min ago: its process ended"
        words = f"2 of at least 3 nodes; waiting 40 s for c at 10.0.0.2 ({lost}) and gpu-023 (never seen)"
        assert a.reason == (await b.status()).reason == words
        assert {one.node_id: one.describe() for one in (await a.status()).missing} == {
            "c": lost,
            "gpu-023": "never seen",
        }
        for task in waiting:
            with pytest.raises(
                rdzv.RendezvousTimeoutError, match=r"waiting 1 min for c at 10.0.0.2 \(lost 1 min 20 s ago: its process"
            ):
                await task


@virtual_time
async def test_r22_the_reason_of_a_wait_is_logged_when_it_changes_and_not_repeatedly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="rdzv.node.member")
    async with VirtualRun(min_nodes=3, join_timeout=600, expected="a,b,c") as run:
        a, b, c = (run.handler(name) for name in "abc")
        await run.join(a)
        await asyncio.sleep(100)
        await run.join(b)
        await asyncio.sleep(100)
        assert [record.getMessage() for record in caplog.records if "node a: " in record.getMessage()][-2:] == [
            "run job, node a: 1 of at least 3 nodes; waiting 0 s for b (never seen) and c (never seen)",
            "run job, node a: 2 of at least 3 nodes; waiting 1 min 40 s for c (never seen)",
        ]
        await c.next_rendezvous()


@virtual_time
async def test_r22_a_barrier_that_times_out_names_the_missing_members() -> None:
    async with VirtualRun(min_nodes=4, ttl=10, rank_order="name", waits_end_on_loss=False) as run:
        nodes = [run.handler(name) for name in "abcd"]
        # The first node to join coordinates. A successor cannot know when its predecessor was lost.
        infos = [await task for task in [await run.join(node) for node in nodes]]
        heard = await listen(run, nodes[0])
        run.crash("c")
        await heard.until(NodesLost)
        others = run.start(infos[3].store.barrier("epoch", 4, timeout=60))
        with pytest.raises(
            SharedStoreTimeoutError, match="2 of 4 came; missing rank 1, node b; rank 2, node c, lost 41 s ago"
        ):
            await infos[0].store.barrier("epoch", 4, timeout=40.5)
        await asyncio.gather(infos[1].store.barrier("later", 2), infos[3].store.barrier("later", 2))
        with pytest.raises(SharedStoreTimeoutError, match="rank 8; and 999999999990 more"):
            await infos[0].store.barrier("wrong", 10**12 - 1, timeout=1)  # regression: each missing rank was counted
        kept = [key for key in run.keys("store/") if "/b/wrong" not in key and "/b/" in key]
        assert len(kept) == 2, "those who gave up; who has gone on leaves no mark"
        others.cancel()


@virtual_time
async def test_r22_a_barrier_that_a_loss_ends_names_the_lost_members() -> None:
    async with VirtualRun(min_nodes=3, ttl=10, rank_order="name") as run:
        infos = await run.meet(*(run.handler(name) for name in "abc"))
        waiting = [run.start(info.store.barrier("epoch", 3)) for info in infos[:2]]
        await asyncio.sleep(1)
        run.crash("c")
        for task in waiting:
            with pytest.raises(rdzv.MembersLostError, match="'c'") as caught:
                await task
            assert "2 of 3 came; missing rank 2, node c" in str(caught.value.__cause__)


@pytest.mark.parametrize("how", ["pause_store", "stop_store"])
@pytest.mark.parametrize("waits_for", ["a round", "a key"])
def test_r22_a_wait_reports_within_three_seconds_that_the_store_is_gone(how: str, waits_for: str) -> None:
    """A store that stood still was reported only when the leases expired."""

    async def body(node: ClusterNode) -> None:
        async with rdzv.connect(node.url) as handler:
            info = await handler.next_rendezvous()
            with contextlib.suppress(rdzv.RendezvousError):
                await info.store.get("never")

    waiting = 3 if waits_for == "a round" else 2
    with cluster(2, seed=1, min_nodes=waiting, max_nodes=waiting) as made:
        made.run(body)
        made.advance(10)
        getattr(made, how)(60)
        made.advance(1)
        assert warnings(made) == 0
        made.advance(2)
        assert warnings(made) == 2, "of each of them"
        made.advance(4)
        assert warnings(made) == 4, "again, and ever more rarely"


def warnings(made: Cluster) -> int:
    """Return the number of warnings that the store does not answer."""
    return sum("store_session: warning" in line for line in made.story)
