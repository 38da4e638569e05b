"""R23 **Announced changes cost no step.** All members know of a drain or a resize before it happens, and no restart is
counted. A verdict not to go on (`GiveUp`, no progress) ends the run everywhere, with one reason, kept in its record.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import pytest

from rdzv import (
    Draining,
    Dropped,
    NodesLost,
    NodesWaiting,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RendezvousStateError,
    Resized,
    Round,
    RunGivenUpError,
)
from tests.guarantees.test_r21_one_loop import Trainer, a_run, until
from tests.support.runs import VirtualRun, listen, rounds_of

pytestmark = pytest.mark.virtual_time


async def test_r23_a_node_that_drains_leaves_at_a_step_that_all_agree_on() -> None:
    async with a_run() as run:
        trainers = [Trainer(name) for name in "abc"]
        handlers = [run.handler(name) for name in "abc"]
        tasks = [
            run.start(trainer.train(rounds_of(handler))) for trainer, handler in zip(trainers, handlers, strict=True)
        ]
        a, b, c = trainers
        await until(lambda: a.step == 5)
        await handlers[1].drain(within=60, reason="maintenance")
        await until(lambda: len(a.played) == 2 and len(c.played) == 2)
        await tasks[1]  # its loop has ended, and its node has left for good
        assert a.left_before[0] == b.left_before[0] == c.left_before[0], "no step is begun by some and not by others"
        stop = a.left_before[0]
        assert [step for of, step in a.begun if of == 0] == list(range(stop)), "no step is lost, none is done twice"
        assert a.rounds[0].ending is not None
        assert a.rounds[0].ending.kind.value == "agreed"
        assert a.rounds[0].ending.reason == "b to leave: maintenance"
        assert [played[2] for played in a.played] == [3, 2]


async def test_r23_members_hear_of_a_drain_in_advance_and_a_node_that_stays_is_removed_at_its_deadline() -> None:
    async with a_run() as run:
        a, b = await run.met("ab")
        heard, itself = await listen(run, a), await listen(run, b)
        began = asyncio.get_running_loop().time()
        await b.drain(within=20, reason="spot instance")
        await heard.until(Draining)
        (told,) = [change for change in heard.changes if isinstance(change, Draining)]
        assert (told.node_ids, told.reason) == (("b",), "spot instance")
        assert 19 < told.seconds_left <= 20
        await until(lambda: b.node.membership is not None and b.node.membership.over is not None)
        assert 19.9 < asyncio.get_running_loop().time() - began < 21
        await itself.until(Dropped)
        assert Dropped("it was to leave, and its time is over: spot instance") in itself.changes
        await heard.until(NodesLost)
        await asyncio.sleep(120)  # its step lasts longer than the drain's key
        with pytest.raises(RendezvousGracefulExitError, match="joins no round any more"):
            await b.next_rendezvous()


async def test_r23_a_drained_node_in_the_middle_of_a_step_does_not_delay_the_others() -> None:
    """All had agreed where to stop, and waited in the step before that for a member removed from the round."""
    async with a_run() as run:
        a, b = run.handler("a"), run.handler("b")
        ended: list[str] = []

        async def train(rounds: AsyncGenerator[Round, None], *, slow: float) -> None:
            async for round in rounds:
                async with round:
                    for step in range(3):
                        await round.check(step)
                        await asyncio.sleep(slow if step else 1)
                        await round.store.barrier(f"step {step}", round.world_size)
                assert round.ending is not None
                ended.append(round.ending.kind.value)

        run.start(train(rounds_of(a), slow=1))
        last = run.start(train(rounds_of(b), slow=1000))
        await until(lambda: b.node.membership is not None)
        await asyncio.sleep(1.5)
        await b.drain(within=20)
        await last
        await until(lambda: len(ended) == 2)
        assert set(ended) == {"dropped", "lost"}


async def test_r23_a_run_that_is_made_smaller_stops_at_a_step_and_keeps_the_lowest_ranks() -> None:
    async with a_run() as run:
        trainers = [Trainer(name) for name in "abcd"]
        handlers = [run.handler(name) for name in "abcd"]
        for trainer, handler in zip(trainers, handlers, strict=True):
            run.start(trainer.train(rounds_of(handler)))
        await until(lambda: all(trainer.step == 5 for trainer in trainers))
        resized = await handlers[3].resize(max_nodes=2, reason="the price went up")
        assert (resized.min_nodes, resized.max_nodes) == (1, 2)
        stay = [trainer for trainer in trainers if trainer.played[0][1] < 2]
        go = [trainer for trainer in trainers if trainer not in stay]
        await until(lambda: all(len(trainer.played) == 2 for trainer in stay))
        assert len({trainer.left_before[0] for trainer in trainers}) == 1, "all leave before the same step"
        stop = stay[0].left_before[0]
        assert [step for of, step in stay[0].begun if of == 0] == list(range(stop)), "no step is lost"
        ending = stay[0].rounds[0].ending
        assert ending is not None
        assert (ending.kind.value, ending.reason) == (
            "agreed",
            "the run was resized to at most 2 nodes: the price went up",
        )
        assert [trainer.played[1][1:] for trainer in sorted(stay, key=lambda one: one.played[0][1])] == [(0, 2), (1, 2)]
        async for status in handlers[0].statuses():
            if len(status.spares) == 2:
                break
        assert all(len(trainer.played) == 1 for trainer in go), "who is over stays as a spare"
        await handlers[0].resize(max_nodes=3)
        await until(lambda: len(stay[0].played) == 3)
        assert stay[0].played[2][2] == 3, "and comes in where there is room again"


async def test_r23_an_enlarged_run_admits_waiting_nodes_at_a_step() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=2, last_call_timeout=1) as run:
        trainers = [Trainer(name) for name in "abc"]
        handlers = [run.handler(name) for name in "abc"]
        for trainer, handler in zip(trainers, handlers, strict=True):
            run.start(trainer.train(rounds_of(handler)))
        await until(lambda: sum(trainer.step >= 5 for trainer in trainers) == 2)
        (spare,) = [trainer for trainer in trainers if not trainer.played]
        inside = [trainer for trainer in trainers if trainer.played]
        await handlers[0].resize(max_nodes=3)
        await until(lambda: bool(spare.played))
        assert spare.played[0][2] == 3
        assert inside[0].left_before == inside[1].left_before
        assert [step for of, step in inside[0].begun if of == 0] == list(range(inside[0].left_before[0]))


async def test_r23_a_larger_minimum_lets_the_round_go_on_until_there_are_enough_nodes() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = await run.met("ab")
        heard = await listen(run, a)
        await b.resize(3, 4)
        await heard.until(Resized)
        assert not any(isinstance(change, NodesWaiting) for change in heard.changes)
        c = run.handler("c")  # it knows only the former numbers of the run
        joining = run.start(c.next_rendezvous())
        await heard.until(NodesWaiting)
        assert a.num_nodes_changed() == 1
        both = [run.start(handler.next_rendezvous()) for handler in (a, b)]
        infos = [await task for task in (*both, joining)]
        assert {info.world_size for info in infos} == {3}
        status = await a.status()
        assert (status.settings["min_nodes"], status.settings["max_nodes"], status.resized) == (3, 4, None)


async def test_r23_a_resize_that_changes_nothing_is_not_announced() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = await run.met("ab")
        heard = await listen(run, a)
        for sizes in ((None, None), (1, None), (1, 2)):
            resized = await b.resize(*sizes)
            assert (resized.min_nodes, resized.max_nodes) == (1, 2)
        await asyncio.sleep(1)
        assert heard.changes == []
        assert (await a.status()).resized is None


async def test_r23_a_resize_holds_for_the_next_coordinator_and_for_nodes_that_join_an_empty_run() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=4, last_call_timeout=1) as run:
        a, b, c = await run.met("abc")
        coordinator = (await a.status()).coordinator
        survivors = [handler for handler in (a, b, c) if handler.node_id != coordinator]
        await a.resize(max_nodes=1)
        assert coordinator is not None
        run.crash(coordinator)
        await until(lambda: survivors[0].num_nodes_changed() >= 2)  # one is lost, and one is beyond the maximum
        joining = [run.start(handler.next_rendezvous()) for handler in survivors]
        done, pending = await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().world_size for task in done] == [1]
        assert len(pending) == 1
        for task in pending:
            task.cancel()
        await asyncio.wait(joining)
        for handler in survivors:
            await handler.aclose()
        d = run.handler("d")
        assert (await run.meet(d))[0].world_size == 1
        assert (await d.status()).settings["max_nodes"] == 1
        with pytest.raises(RendezvousSettingsError, match="max_nodes"):
            await run.handler("e", max_nodes=7).next_rendezvous()


async def test_r23_a_run_without_nodes_and_one_that_is_closed_cannot_be_resized() -> None:
    async with a_run() as run:
        a = run.handler("a")
        with pytest.raises(RendezvousStateError):
            await a.resize(2, 3)
        await run.meet(a)
        with pytest.raises(RendezvousSettingsError):
            await a.resize(9)
        await a.set_closed("done")
        with pytest.raises(RendezvousClosedError, match="done"):
            await a.resize(2, 3)


@dataclass(slots=True)
class FailingRun:
    """Two nodes of a run that will be given up for lack of progress, and other nodes that join and are killed."""

    run: VirtualRun
    sizes: dict[str, list[int]] = field(default_factory=lambda: {"a": [], "b": []})
    gets_on: bool = False
    names: Iterator[int] = field(default_factory=itertools.count)

    async def live(self, name: str) -> RunGivenUpError | None:
        """Go from round to round without finishing a step, unless `gets_on`; return the error that ends the loop."""
        try:
            async for round in rounds_of(self.run.handler(name), no_progress=3):
                self.sizes.setdefault(name, []).append(round.world_size)
                async with round:
                    if self.gets_on:
                        round.beat(0)
                        round.beat(1)  # and so step 0 is finished
                    await asyncio.sleep(1_000_000)
        except RunGivenUpError as error:
            return error
        return None

    async def one_comes_and_is_killed(self) -> None:
        """Let a node join, which is announced, and kill it, which is a loss."""
        name, rounds = f"killed-{next(self.names)}", len(self.sizes["a"])
        self.run.start(self.live(name))
        await until(lambda: len(self.sizes["a"]) == len(self.sizes["b"]) == rounds + 1)
        self.run.crash(name)


async def test_r23_three_losses_without_a_finished_step_end_the_run_but_announced_changes_never_do() -> None:
    async with a_run() as run:
        failing = FailingRun(run)
        lives = [run.start(failing.live(name)) for name in "ab"]
        await until(lambda: failing.sizes["a"][-1:] == failing.sizes["b"][-1:] == [2])
        for _ in range(3):
            await failing.one_comes_and_is_killed()
            await until(lambda: failing.sizes["a"][-1] == 2 or lives[0].done())
        ends = [await life for life in lives]
        told = {(end.reason.partition(":")[0], end.status) for end in ends if end is not None}
        assert len(ends) == 2
        assert told == {("the last rounds have failed before a step was finished", 93)}
        late = run.handler("late")
        with pytest.raises(RendezvousClosedError) as closed:
            await late.next_rendezvous()
        assert (closed.value.given_up, closed.value.status) == (True, 93)


@pytest.mark.parametrize("finished", [{"a": 480, "b": 480}, {"a": 480, "b": 500}, {"a": -1, "b": -1}])
async def test_r23_a_round_that_only_brings_a_node_up_with_another_is_one_without_progress(
    finished: dict[str, int],
) -> None:
    """`progress` was asked after a round only; then the round seemed to have finished all steps up to that."""
    async with a_run() as run:
        rounds = dict.fromkeys("ab", 0)

        async def live(name: str) -> RunGivenUpError | None:
            try:
                async for round in rounds_of(run.handler(name), progress=lambda: finished[name], no_progress=1):
                    rounds[name] += 1
                    async with round:
                        if round.newest is not None:
                            finished[name] = round.newest[1]  # as by `sync_state`
                        await asyncio.sleep(1_000_000)
            except RunGivenUpError as error:
                return error
            return None

        killed = await run.join(run.handler("killed"))
        lives = [run.start(live(name)) for name in "ab"]
        await until(lambda: min(rounds.values()) > 0)
        await killed
        at_first = dict(rounds)
        run.crash("killed")
        ends = [await one for one in lives]
        assert [type(end) for end in ends] == [RunGivenUpError, RunGivenUpError]
        assert rounds == at_first


async def test_r23_a_finished_step_of_any_member_lets_the_failures_be_counted_anew() -> None:
    async with a_run() as run:
        failing = FailingRun(run)
        lives = [run.start(failing.live(name)) for name in "ab"]
        await until(lambda: failing.sizes["a"][-1:] == failing.sizes["b"][-1:] == [2])
        for killed in range(5):
            failing.gets_on = killed == 2
            await failing.one_comes_and_is_killed()
            await until(lambda: failing.sizes["a"][-1] == 2)
        assert not any(life.done() for life in lives)
        await failing.one_comes_and_is_killed()
        assert all([await life for life in lives])


@pytest.mark.parametrize("who", ["one that has left", "one that waits"])
async def test_r23_members_are_notified_of_drains_of_members_only(who: str) -> None:
    """Members that met again at this news met once too often: it had left their round, or had never been in it."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=0.1) as run:
        a, b, c = (run.handler(name) for name in "abc")
        spares = [run.handler(f"spare {number}") for number in range(2)]
        await run.meet(a, b, c)
        if who == "one that has left":
            drained = c
            await c.drain(within=600, reason="maintenance")
            await c.leave()  # its process lives on for a while, and the announcement with it
            await run.meet(a, b)
        else:
            drained, *_ = spares
            joining = await run.join(drained)
            await drained.drain(within=600, reason="maintenance")
            with pytest.raises(RendezvousGracefulExitError):
                await joining
        heard = await listen(run, a)
        await asyncio.sleep(5)
        assert drained.node_id in a.node.head.drains, "all nodes know of it"
        assert not [change for change in heard.changes if isinstance(change, Draining)]
        await b.drain(within=300)
        await heard.until(Draining)
        assert [change.node_ids for change in heard.changes if isinstance(change, Draining)] == [("b",)]


async def test_r23_return_order_keeps_no_rank_from_the_lowest_if_units_lie_within_one_domain() -> None:
    units = {"node_unit": 2, "unit_within": "rack", "min_nodes": 2, "max_nodes": 6, "last_call_timeout": 1}
    async with VirtualRun(**units) as run:  # type: ignore[arg-type]
        handlers = [run.handler(f"n{index}", attributes={"rack": f"r{index // 2}"}) for index in range(6)]
        ranks = {info.node_id: info.rank for info in await run.meet(*handlers)}
        handlers.sort(key=lambda handler: ranks[handler.node_id])
        await handlers[0].resize(max_nodes=4)
        joins = [await run.join(handler) for handler in reversed(handlers)]  # the lowest ranks come last
        infos = await asyncio.gather(*reversed(joins[2:]))
        assert [(info.node_id, info.rank) for info in infos] == [
            (handler.node_id, rank) for rank, handler in enumerate(handlers[:4])
        ]
        assert not joins[0].done()
