"""A node's view of its connection to the store, and the time after which it gives the store up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import anyio
import pytest

from rdzv import Dropped, RendezvousConnectionError
from rdzv.node.link.store_session import ANSWERS_KEPT, StoreSession
from tests.support.runs import VirtualRun, connected, listen


def test_one_delayed_answer_does_not_make_the_store_slow() -> None:
    link = StoreSession.__new__(StoreSession)
    link._answered_in = []
    link.follower = SimpleNamespace(opened_in=0.01)  # type: ignore[assignment]
    for count in range(ANSWERS_KEPT):
        assert link.round_trip == 0.01, count
        link.note_answer_time(5.0)
    assert link.round_trip == 5.0  # the client counts as slow by now


@pytest.mark.virtual_time
async def test_waiting_nodes_ping_the_store_at_different_moments() -> None:
    """Regression: all had last heard from the store in the same push, so a thousand nodes pinged in the same moment."""
    asked: list[float] = []
    async with VirtualRun(min_nodes=9) as run:
        for number in range(8):
            await run.join(run.handler(f"n{number}"))
        await asyncio.sleep(0.5)
        assert run.server is not None
        now = asyncio.get_running_loop().time
        run.server.add_request_callback(lambda kind, *_: asked.append(now()) if kind == "KeepAlive" else None)
        await asyncio.sleep(2)
        assert len(asked) >= 8, "each asks about once a second"
        assert max(sum(at <= other < at + 0.02 for other in asked) for at in asked) <= 4, "and not all together"


@pytest.mark.in_ci
@pytest.mark.virtual_time
async def test_a_crowd_pings_no_more_often_than_a_few_nodes() -> None:
    """The count of arrivals is sent rarely in a crowd. Regression: a node that knew of few pinged every second."""
    asked: list[float] = []
    nodes = 400
    async with VirtualRun(min_nodes=nodes + 1, join_timeout=600) as run:
        await run.join(run.handler("first"))
        assert run.server is not None
        now = asyncio.get_running_loop().time
        run.server.add_request_callback(lambda kind, *_: asked.append(now()) if kind == "KeepAlive" else None)
        async with anyio.create_task_group() as group:
            for number in range(nodes - 1):
                group.start_soon(run.handler(f"n{number}").next_rendezvous)
            begun = now()
            await asyncio.sleep(3)
            group.cancel_scope.cancel()
        assert len([at for at in asked if at < begun + 3]) <= 300, "some hundred a second"


# ------------------------------------------------------------------------------------------ a store that is lost


GONE = "was in memory only, and its process is gone.*start all nodes again"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about a store in memory whose port is closed."""
    return [line for record in caplog.records if "no process listens at" in (line := record.getMessage())]


def told_back(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about a store that is back."""
    return [line for record in caplog.records if "the store is back after" in (line := record.getMessage())]


@pytest.mark.virtual_time
async def test_the_return_of_a_store_is_logged_if_its_absence_was(caplog: pytest.LogCaptureFixture) -> None:
    async with VirtualRun(min_nodes=1) as run:
        link = await connected(run.handler("a"))
        for absence, told in ((1, 0), (60, 1)):
            run.network.partition("a")
            await asyncio.sleep(absence)
            run.network.heal()
            await link.wait_until_connected(within=60)
            await asyncio.sleep(1)
            assert len(told_back(caplog)) == told


@pytest.mark.virtual_time
async def test_a_store_is_not_said_to_be_back_when_the_lease_ends_unanswered(caplog: pytest.LogCaptureFixture) -> None:
    async with VirtualRun(min_nodes=1, ttl=3) as run:
        (a,) = await run.met("a")
        heard = await listen(run, a)
        run.network.partition("a")
        await heard.until(Dropped)
        await asyncio.sleep(1)
        assert "has not answered" in caplog.text
        assert told_back(caplog) == []
        run.network.heal()
        await a.next_rendezvous()


@pytest.mark.virtual_time
async def test_a_lost_store_in_memory_is_given_up_and_another_one_is_found_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, b = await run.met("ab")
        heard = await listen(run, a)
        waiting = run.start(b.next_rendezvous())
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        run.kill_store()
        await asyncio.sleep(1)
        where = "tcp://store:29400, where the store was, in memory only"
        assert set(warnings(caplog)) == {f"run job: no process listens at {where}; waiting 5 s for another"}
        with pytest.raises(RendezvousConnectionError, match=GONE):
            await waiting
        await heard.until(Dropped)
        assert 5 <= heard.times[-1] - began <= 6, "and not after its ttl of 10 s"
        for call in (a.next_rendezvous(), a.set_closed("done"), b.next_rendezvous()):
            asked = asyncio.get_running_loop().time()
            with pytest.raises(RendezvousConnectionError, match=GONE):
                await call
            assert asyncio.get_running_loop().time() - asked <= 1
        assert len(warnings(caplog)) == 2, "each node has said it, once"
        assert told_back(caplog) == [], "a store that was given up is not back"
        run.restart_store()
        assert {info.round for info in await run.meet(a, b)} == {1}


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another one comes in time", True),
        ("its host is restarted, and is out of reach meanwhile", True),
        ("it is cut off", False),
        ("it is durable", False),
        ("it is of an older release, and does not say what it is", False),
    ],
)
async def test_a_store_that_may_come_back_is_waited_for(
    what: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    timeout = 60 if what == "another one comes in time" else 5
    async with VirtualRun(min_nodes=2, store_gone_timeout=timeout, durable=what == "it is durable") as run:
        a, b = run.handler("a"), run.handler("b")
        assert a.node is not None
        joining = await run.join(a)
        if "older release" in what:
            run.clients["a"].durable = True
        if what == "it is cut off":
            run.network.partition()
        else:
            run.kill_store()
            if "out of reach" in what:
                await asyncio.sleep(3)
                run.network.partition()
        await asyncio.sleep(30)
        assert len(warnings(caplog)) == said
        run.network.heal()
        if what != "it is cut off":
            await asyncio.sleep(2)
            run.restart_store()
        assert {(await b.next_rendezvous()).world_size, (await joining).world_size} == {2}


@pytest.mark.virtual_time
async def test_a_newcomer_says_within_seconds_that_a_store_does_not_answer_its_arrival(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: for 30 s nothing was said, as a newcomer has no lease yet whose keep-alives would tell."""
    async with VirtualRun(min_nodes=1, last_call_timeout=0) as run:
        a = run.handler("a")
        assert not await a.is_closed()
        run.network.partition("a")
        joining = run.start(a.next_rendezvous())
        await asyncio.sleep(4)
        assert "run job: the store has not answered for 3 s; node a waits for it to take its arrival" in caplog.text
        run.network.heal()
        await joining
        caplog.clear()
        await a.next_rendezvous()
        await a.leave()
        await asyncio.sleep(4)
        assert "has not answered" not in caplog.text
