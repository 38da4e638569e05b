"""The status of a run, in numbers and in words."""

import asyncio
import time
from typing import Any

import pytest

from rdzv.core.history import History
from rdzv.core.report import Account, RunStatus, status_json
from rdzv.core.state import Draining, NodesLost, Phase
from rdzv.display.history import timeline
from rdzv.errors import RendezvousGracefulExitError
from store.messages import Request
from tests.rdzv.node.test_coordinator import commits_in
from tests.support.runs import VirtualRun, listen
from tests.support.virtual_time import now

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(6)]


async def test_a_member_that_joins_again_is_waiting_and_a_dead_one_is_in_no_list() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        _, b, c = await run.met("abc")
        heard = await listen(run, c)
        run.crash("a")
        await heard.until(NodesLost)
        await run.join(b)
        status = await c.status()
        assert [member.node_id for member in status.members] == ["c"]
        assert (status.waiting, status.spares) == (("b",), ())
        assert status.reason == "1 node waiting for round 0's 1 live member to leave: c"
        assert status_json(status)["counts"]["here"] == 2
        assert status.world_size == 3, "the round's, as it was completed"


async def test_half_a_second_after_a_loss_the_status_has_the_nodes_that_are_here() -> None:
    """Regression: `members` was empty once all survivors had come again, and no field counted them."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        _, b, c = await run.met("abc")
        run.crash("a")
        for handler in (b, c):
            await (await listen(run, handler)).until(NodesLost)
        for handler in (b, c):
            await run.join(handler)
        await asyncio.sleep(0.5)
        async with run.looked_at() as seen:
            told = status_json(await seen.status())
        assert (told["members"], told["waiting"], told["counts"]["here"]) == ([], ["b", "c"], 2)
        assert [one["node_id"] for one in told["missing"]] == ["a"]


async def test_a_committed_round_is_shown_before_its_progress_is_reported() -> None:
    async with VirtualRun(min_nodes=2, last_call_timeout=5) as run:
        a, b = run.handler("a"), run.handler("b")
        first = await run.join(a)
        held = asyncio.Event()

        async def hook(request: Request[Any], when: str) -> None:
            if when == "after" and commits_in(request):
                await held.wait()

        run.clients["a"].hook = hook
        await b.next_rendezvous()
        status = await b.status()
        held.set()
        assert (status.phase, status.reason) == (Phase.TRAINING, "round 0 stands with 2 nodes")
        await first


@pytest.mark.parametrize(
    ("given", "reason"), [("done", "the run is closed by a: done"), ("", "the run is closed by a")]
)
async def test_the_status_of_a_closed_run_names_the_node_and_its_reason(given: str, reason: str) -> None:
    async with VirtualRun(min_nodes=1) as run:
        a = run.handler("a")
        await a.set_closed(given)
        status = await a.status()
        assert (status.phase, status.reason, status.closed) == (Phase.CLOSED, reason, given)


async def test_a_lost_member_is_missing_also_after_the_next_round_has_completed() -> None:
    """Hours later, when the others have long met again, an operator asks which node to look at."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        _, b, c = await run.met("abc")
        heard = await listen(run, c)
        run.crash("a")
        await heard.until(NodesLost)
        await run.meet(b, c)
        status = await run.handler("observer", min_nodes=None, max_nodes=None).status()
        assert (status.phase, status.world_size) == (Phase.TRAINING, 2)
        assert [(one.node_id, one.how) for one in status.missing] == [("a", "lost")]
        assert status.missing_count == 1


@pytest.mark.parametrize(("own", "told"), [("", "drained: its turn"), ("it is full", "it is full")])
async def test_a_departure_has_its_own_reason_or_else_that_of_the_drain(own: str, told: str) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        heard = await listen(run, b)
        await b.drain(within=60, reason="its turn")
        await heard.until(Draining)
        b.leaves_because(own)
        await b.aclose()
        status = await a.status()
        assert [(one.node_id, one.how, one.why) for one in status.missing] == [("b", "left", told)]


HOUR = 3600.0


class Clocks:
    """Replaces `time.time`: each machine has its own clock, and the test sets how far ahead the current one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0  # seconds by which the current machine's clock is ahead
        monkeypatch.setattr(time, "time", lambda: 1e9 + now() + self.ahead)

    async def ask(self, run: VirtualRun, *, ahead: float) -> tuple[RunStatus, History, Account, float]:
        """Read the status of a run in a new process, on a machine whose clock is ahead."""
        async with run.looked_at() as seen:
            before, self.ahead = self.ahead, ahead
            status, history, cost = await seen.status_and_cost()
            shown = timeline(seen.run_id, history, now=await seen.time_of_day())
            self.ahead = before
        return status, history, cost, shown["seconds"]


@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
async def test_ages_do_not_depend_on_the_clock_of_the_observer(ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        _, b, c = await run.met("abc")
        await asyncio.sleep(10)
        _, _, cost, shown = await clocks.ask(run, ahead=ahead)
        assert cost.spent.trained == pytest.approx(10, abs=1)
        assert shown == pytest.approx(10, abs=1)

        heard = await listen(run, c)
        run.crash("a")
        await heard.until(NodesLost)
        await run.meet(b, c)
        await asyncio.sleep(10)
        (lost,) = (await clocks.ask(run, ahead=ahead))[0].missing
        assert lost.node_id == "a"
        assert (await clocks.ask(run, ahead=ahead))[0].phase_for == pytest.approx(10, abs=1)
        assert lost.ago == pytest.approx(10, abs=2)

        heard = await listen(run, c)
        run.crash("b")
        await heard.until(NodesLost)
        await run.join(c)
        await asyncio.sleep(10)
        status, _, _, _ = await clocks.ask(run, ahead=ahead)
        ago = {one.node_id: one.ago for one in status.missing}
        assert ago["b"] == pytest.approx(10, abs=1)
        assert status.waited == pytest.approx(10, abs=1)

        await run.join(run.handler("d"))
        await asyncio.sleep(5)
        _, _, cost, _ = await clocks.ask(run, ahead=ahead)
        assert cost.spent.waited == pytest.approx(10, abs=1), "since b was lost, until d has come"


@pytest.mark.parametrize("noted", [True, False], ids=["", "after a restart of the store"])
@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
async def test_durations_of_a_run_without_a_coordinator_do_not_depend_on_the_clock_of_the_observer(
    ahead: float, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: once all nodes had died, the observer's own hour was taken for the run's."""
    clocks = Clocks(monkeypatch)
    async with VirtualRun(min_nodes=2, last_call_timeout=1, durable=True) as run:
        await run.met("ab")
        await asyncio.sleep(30)
        run.crash("a")
        run.crash("b")
        await asyncio.sleep(100)
        if not noted:
            run.kill_store()
            run.restart_store()
        status, _, cost, shown = await clocks.ask(run, ahead=ahead)
        assert status.coordinator is None
        assert cost.seconds == pytest.approx(shown, abs=1)
        assert shown == pytest.approx(130, abs=5) if noted else 0 <= shown < 130


async def test_a_commit_sends_the_time_of_day_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round cost two requests more."""
    clocks = Clocks(monkeypatch)
    async with VirtualRun(min_nodes=2) as run:
        members, requests = await run.met("ab"), []
        for ahead in (0.0, HOUR):
            await asyncio.sleep(1)
            before, clocks.ahead = run.server.figures()["requests"], ahead
            await run.meet(*members)
            await asyncio.sleep(0.1)
            requests.append(int(run.server.figures()["requests"] - before))
        assert requests == [6, 8]


@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
@pytest.mark.parametrize("was_there", [True, False], ids=["a member succeeds", "a newcomer succeeds"])
async def test_a_successor_continues_the_wall_clock_of_its_predecessor(
    was_there: bool, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor's clock is ahead. The observer has the clock of the first coordinator."""
    clocks = Clocks(monkeypatch)
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(*([a, b] if was_there else [a]))
        await asyncio.sleep(10)
        if not was_there:
            await run.join(b)
            await asyncio.sleep(1)
        clocks.ahead = ahead
        heard = await listen(run, b)
        run.crash("a")
        if was_there:
            await heard.until(NodesLost)
            await asyncio.sleep(3)
        else:
            await asyncio.sleep(5)
        _, history, cost, _ = await clocks.ask(run, ahead=0.0)
        assert cost.seconds == pytest.approx(15, abs=2.5), history
        assert all(one.after is not None for one in history.chapters[0].incidents)


async def test_the_seconds_left_of_a_drain_do_not_depend_on_the_reader() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        a, b = await run.met("ab")
        async with run.looked_at() as steered:
            await steered.drain("b", within=100.0, reason="a reboot")
        await asyncio.sleep(40)
        async with run.looked_at() as seen:
            left, reason = (await seen.status()).draining["b"]
        assert left == pytest.approx(60, abs=1)
        assert reason == "a reboot"
        until = b.node.head.drains["b"].until
        assert until - now() == pytest.approx(60, abs=1)
        assert (await a.status()).draining["b"][0] == pytest.approx(60, abs=1)
        run.crash("b")
        await asyncio.sleep(20)
        assert (await a.status()).draining == {}, "it is not here any more"


async def test_a_drain_still_holds_after_the_nodes_lease_has_expired() -> None:
    """Regression: the node came back, and was in the next round."""
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1, ttl=5) as run:
        _, b = await run.met("ab")
        async with run.looked_at() as steered:
            await steered.drain("b", within=100.0)
        await asyncio.sleep(1)
        run.network.partition("b")
        await asyncio.sleep(20)
        run.network.heal()
        await asyncio.sleep(5)
        with pytest.raises(RendezvousGracefulExitError, match="is to leave"):
            await b.next_rendezvous()
