"""R21 **One loop.** `rounds()` gives each round once to each of its members. A loss ends its body at once. Everything
else ends it at a `check(step)`, the same one for all members: the largest step that any has begun, plus one.

A `check` with nothing pending costs no message, and none waits for the dead. The next round names the member that has
finished the most steps (`newest`).
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from rdzv import GiveUp, Handler, MembersLostError, RendezvousClosedError, Round, RunGivenUpError
from tests.support.runs import VirtualRun, rounds_of

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(9)]

STEP = 0.1  # seconds of one collective


@dataclass(slots=True)
class Trainer:
    """One node that trains: each step is a collective, which needs all members of the round.

    Attributes:
        left_before: In each round that ended, the step before which it left.
        played: Each round's number, rank, size, and its news of the round before.
    """

    name: str
    step: int = 0
    total: int = 1_000_000
    played: list[tuple[int, int, int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    left_before: list[int] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)
    pace: Callable[[], float] = lambda: STEP
    alone: bool = False  # its steps need no other member

    async def train(self, rounds: AsyncGenerator[Round, None]) -> None:
        async for round in rounds:
            self.rounds.append(round)
            self.played.append((round.number, round.rank, round.world_size))
            async with round:
                while self.step < self.total:
                    await round.check(self.step)
                    self.begun.append((round.number, self.step))
                    await self.collective(round)
                    self.step += 1
            self.left_before.append(self.step)

    async def collective(self, round: Round) -> None:
        """Wait in the round's own store until all members have come to the same step, as a collective does."""
        await asyncio.sleep(self.pace())
        if self.alone:
            return
        key = f"step/{self.step}"
        if await round.store.add(key, 1) == round.world_size:
            await round.store.set(f"{key}/all", b"")
        await round.store.wait([f"{key}/all"])


def begin(run: VirtualRun, name: str, *, on_waiting: str = "now", **more: object) -> Trainer:
    trainer = Trainer(name, **more)  # type: ignore[arg-type]
    handler: Handler = run.handler(name)
    run.start(trainer.train(rounds_of(handler, on_waiting=on_waiting)), f"train {name}")
    return trainer


class Whole:
    """A whole number of some other kind: numpy's, or a tensor of one element."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


async def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    with anyio.fail_after(within):
        while not condition():  # noqa: ASYNC110  on virtual time, where that costs nothing
            await asyncio.sleep(0.001)


def a_run(**parameters: object) -> VirtualRun:
    return VirtualRun(min_nodes=1, max_nodes=8, last_call_timeout=1, **parameters)  # type: ignore[arg-type]


async def test_r21_a_step_is_a_whole_number_of_any_kind_and_all_else_is_refused_where_it_is_said() -> None:
    """An integer of numpy's ended the keep-alives silently, and a float left all members waiting in `check`."""
    async with a_run(ttl=3) as run:
        begun: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name), progress=lambda: Whole(7)):
                async with round:
                    for step in range(1000):
                        for wrong in (0.5, "7", None, 2**70):
                            with pytest.raises(ValueError):
                                await round.check(wrong)  # type: ignore[arg-type]
                            with pytest.raises(ValueError):
                                round.beat(wrong)  # type: ignore[arg-type]
                        await round.check(Whole(step))
                        begun[name].append((round.number, step))
                        await asyncio.sleep(1)

        run.start(train("a")), run.start(train("b"))
        await until(lambda: begun["a"][-1:] == begun["b"][-1:] == [(0, 9)])
        run.start(train("c"))
        await until(lambda: all(steps[-1:] == [(1, 9)] for steps in begun.values()))


async def test_r21_nodes_that_come_back_with_checkpoints_know_in_their_first_round_whose_is_the_newest() -> None:
    """`progress` was asked after a round only, so both could go on from the older checkpoint."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        seen: dict[str, tuple[int, tuple[int, int] | None, bool]] = {}

        async def train(name: str, finished: int) -> None:
            async for round in rounds_of(run.handler(name), progress=lambda: finished):
                async with round:
                    seen[name] = round.rank, round.newest, round.lags
                    return

        await asyncio.gather(train("a", 480), train("b", 500))
        assert seen["a"][1:] == ((seen["b"][0], 500), True)
        assert seen["b"][1:] == ((seen["b"][0], 500), False)


@pytest.mark.parametrize("wrong", [0.5, "7", None, 2**70])
async def test_r21_progress_that_is_no_whole_number_ends_the_loop_of_its_node(wrong: object) -> None:
    """The node's record could not be read: it was never admitted, and waited for ever."""
    async with a_run() as run:
        with pytest.raises(ValueError):
            await anext(rounds_of(run.handler("c"), progress=lambda: wrong))
        answers = iter((-1, wrong))
        rounds = rounds_of(run.handler("a"), progress=lambda: next(answers))
        async with await anext(rounds) as round:
            run.start(run.handler("b").next_rendezvous())
            await round.check(0)
            await asyncio.sleep(5)
            await round.check(1)
        with pytest.raises(ValueError):
            await anext(rounds)


async def test_r21_two_tasks_of_a_member_that_check_together_both_hear_of_the_decision() -> None:
    """The second task replaced the first one in the list of waiters, and the first was never woken."""
    async with a_run(ttl=3) as run:
        played: dict[str, list[int]] = {"a": [], "b": [], "c": []}

        async def train(name: str, pace: float) -> None:
            async for round in rounds_of(run.handler(name)):
                played[name].append(round.world_size)
                async with round:
                    for step in range(1000):
                        async with anyio.create_task_group() as group:
                            group.start_soon(round.check, step)
                            group.start_soon(round.check, step)
                        await asyncio.sleep(pace)

        async def slow(request: Any, when: str) -> None:
            if when == "before" and any(
                getattr(put, "key", "").startswith(begun) for put in getattr(request, "then", ())
            ):
                await asyncio.sleep(1)

        run.start(train("a", 0.3)), run.start(train("b", 0.1))
        await until(lambda: played["a"][-1:] == played["b"][-1:] == [2])
        begun = run._handlers["a"].node.keys.begun
        await asyncio.sleep(3)
        run.clients["b"].hook = slow
        run.start(train("c", 0.1))
        await until(lambda: all(sizes[-1:] == [3] for sizes in played.values()))


async def test_r21_a_loss_ends_the_body_at_once_and_the_next_round_names_the_lost() -> None:
    async with a_run() as run:
        a, b, c = (begin(run, name) for name in "abc")
        await until(lambda: a.step == 5)
        run.crash("b")
        await until(lambda: len(a.played) == 2 and len(c.played) == 2)
        assert [played[2] for played in a.played] == [3, 2]
        assert a.rounds[0].ending is not None
        assert a.rounds[0].ending.kind.value == "lost"
        assert a.rounds[0].ending.node_ids == ("b",)
        previous = a.rounds[1].previous
        assert previous is not None
        assert (previous.lost, previous.left, previous.joined) == (("b",), (), ())
        assert previous.rank == a.played[0][1]
        before = a.step
        await until(lambda: a.step > before + 3)
        assert b.played == [(0, b.played[0][1], 3)]


async def test_r21_a_newcomer_comes_in_at_a_step_and_no_step_is_lost_or_begun_twice() -> None:
    async with a_run() as run:
        a, b = (begin(run, name) for name in "ab")
        await until(lambda: a.step == 5)
        c = begin(run, "c", step=10_000)
        await until(lambda: c.played != [] and len(a.played) == 2)
        assert a.left_before == b.left_before
        stop = a.left_before[0]
        assert a.begun[: stop + 1] == [(0, step) for step in range(stop)] + [(1, stop)][: len(a.begun) - stop]
        assert c.rounds[0].world_size == 3
        assert a.rounds[0].ending is not None
        assert a.rounds[0].ending.kind.value == "agreed"
        assert a.rounds[1].previous is not None
        assert a.rounds[1].previous.joined == ("c",)
        assert c.rounds[0].previous is None


async def test_r21_a_body_that_ends_before_the_agreed_step_by_an_earlier_rounds_store_holds_nobody_up() -> None:
    """Its node met again at once, which the others took for agreed: they waited for it in the step before, for ever."""
    async with a_run() as run:
        rounds: dict[str, list[Round]] = {name: [] for name in ("late", "a", "b", "c")}

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                rounds[name].append(round)
                async with round:
                    step = 0 if round.newest is None else round.newest[1] + 1
                    while True:
                        await round.check(step)
                        await asyncio.sleep(STEP)
                        if name == "late" and round.number == 1 and round.gate.decided:
                            await rounds["late"][0].store.get("of an earlier round")
                        if await round.store.add(f"step/{step}", 1) == round.world_size:
                            await round.store.set(f"step/{step}/all", b"")
                        await round.store.wait([f"step/{step}/all"])
                        step += 1

        def are(*names: str) -> bool:
            return all(rounds[name] and rounds[name][-1].world_size == len(names) for name in names)

        run.start(train("late")), run.start(train("a"))
        await until(lambda: are("late", "a"))
        run.start(train("b"))
        await until(lambda: are("late", "a", "b"))
        await asyncio.sleep(10.5 * STEP)
        run.start(train("c"))
        await until(lambda: are("late", "a", "b", "c"), within=10)


@pytest.mark.parametrize("last", [3, 10], ids=["in its last step", "then checks"])
async def test_r21_a_step_that_ends_after_the_news_of_a_loss_is_finished(last: int) -> None:
    """The next round named the step before as the newest, so that programs trained this one twice."""
    async with a_run() as run:
        newest: list[tuple[int, int] | None] = []

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                newest.append(round.newest)
                async with round:
                    if round.world_size < 2:
                        await asyncio.sleep(3600)
                    for step in range(last + 1):
                        await round.check(step)
                        await asyncio.sleep(STEP)
                        if step == 3:
                            with anyio.CancelScope(shield=True):  # it computes, and is not interrupted
                                await asyncio.sleep(10)

        run.start(train("a"))
        assert (await run.handler("b").next_rendezvous()).world_size == 2
        await asyncio.sleep(3.5 * STEP)
        run.crash("b")
        await until(lambda: len(newest) == 2)
        assert newest == [None, (0, 3)]


async def train_until_round_1(
    handler: Handler, body: Callable[[Round], Awaitable[None]], newest: list[tuple[int, int] | None]
) -> None:
    """Play the first round by this body; note what each round has as `newest`."""
    async for round in rounds_of(handler):
        newest.append(round.newest)
        if round.number == 1:
            return
        async with round:
            await body(round)


async def test_r21_a_body_that_catches_its_end_at_a_check_has_not_finished_that_step() -> None:
    """The next round named that step as finished, so that programs which go on from there left it out."""
    async with a_run() as run:
        done: list[int] = []
        newest: list[tuple[int, int] | None] = []

        async def body(round: Round) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                for step in range(1_000_000):
                    await round.check(step)
                    await asyncio.sleep(STEP)
                    done.append(step)

        run.start(train_until_round_1(run.handler("a"), body, newest))
        await until(lambda: len(done) == 3)
        run.start(run.handler("b").next_rendezvous())
        await until(lambda: len(newest) == 2)
        assert newest == [None, (0, done[-1])]


async def test_r21_a_body_that_catches_a_failed_wait_has_not_finished_that_step() -> None:
    """The next round named that step as finished, so that programs which go on from there left it out."""
    async with a_run() as run:
        newest: list[tuple[int, int] | None] = []

        async def body(round: Round) -> None:
            for step in range(5):
                await round.check(step)
                if step == 4:
                    with contextlib.suppress(MembersLostError), anyio.CancelScope(shield=True):
                        await round.store.get("never")

        run.start(train_until_round_1(run.handler("a"), body, newest))
        await run.handler("b").next_rendezvous()
        await asyncio.sleep(STEP)
        run.crash("b")
        await until(lambda: len(newest) == 2)
        assert newest == [None, (0, 3)]


async def test_r21_a_check_with_nothing_pending_costs_no_message() -> None:
    async with a_run() as run:
        handler = run.handler("a")
        async for round in rounds_of(handler):
            async with round:
                await asyncio.sleep(2)
                asked: list[object] = []

                async def note(request: object, when: str, asked: list[object] = asked) -> None:
                    asked.append((request, when))

                run.clients["a"].hook = note
                for step in range(10_000):
                    await round.check(step)
                assert asked == []
                await handler.set_closed()
                while True:  # a closing ends it at a check, too
                    step += 1
                    await round.check(step)
                    await asyncio.sleep(STEP)


async def test_r21_a_check_never_waits_for_the_dead() -> None:
    """A member dies after the question for its step, so that its node never answers."""
    async with a_run() as run:
        a, b, c = (begin(run, name) for name in "abc")
        await until(lambda: a.step == 3)
        run.network.refuse("b")
        run.network.cut("b")  # nothing from it arrives any more
        d = begin(run, "d", step=10_000)
        await until(lambda: d.played != [] and len(a.played) > 1, within=5)
        assert a.rounds[0].ending is not None
        assert len(c.played) > 1
        assert b.left_before == []


@pytest.mark.some_of(4)
@pytest.mark.parametrize("seed", range(12))
async def test_r21_all_members_always_stop_before_the_same_step(seed: int) -> None:
    """Newcomers at random moments, steps of random lengths: each round's members leave before one step."""
    rng = random.Random(seed)
    async with a_run(seed=seed) as run:
        trainers = [begin(run, name, pace=lambda: rng.uniform(0, STEP)) for name in "abc"]
        for name in "defgh":
            await asyncio.sleep(rng.uniform(0.01, 1.5))
            trainers.append(begin(run, name, step=trainers[0].step))
            await until(lambda: bool(trainers[-1].played))
            for trainer in trainers:
                trainer.step = max(one.step for one in trainers)  # the state is synchronised, as a job would
        for number in range(trainers[0].played[-1][0]):
            stops = {
                trainer.left_before[index]
                for trainer in trainers
                for index, played in enumerate(trainer.played)
                if played[0] == number
            }
            begun = [step for trainer in trainers for of, step in trainer.begun if of == number]
            assert len(stops) == 1, (number, stops)
            assert max(begun, default=-1) < min(stops)


async def test_r21_the_member_with_the_most_finished_steps_is_named() -> None:
    async with a_run() as run:
        a, b, _ = (begin(run, name, step=7) for name in "abc")
        await until(lambda: a.step == 9)
        run.crash("c")
        await until(lambda: len(a.played) == 2 and len(b.played) == 2)
        newest = a.rounds[1].newest
        assert newest is not None
        assert newest == b.rounds[1].newest
        assert newest[1] == max(step for one in (a, b) for of, step in one.begun if of == 0) - 1
        assert a.rounds[0].newest is None


async def test_r21_when_every_body_has_come_to_its_end_the_run_is_closed_and_the_loop_ends() -> None:
    async with a_run() as run:
        a, b = (begin(run, name, total=5) for name in "ab")
        await until(lambda: a.left_before == [5] and b.left_before == [5])
        assert a.played == [(0, a.played[0][1], 2)]
        observer = run.handler("observer")
        async with observer:
            assert await observer.is_closed()


async def test_r21_a_finished_member_rejoins_if_a_member_was_lost_before_the_others_finished() -> None:
    async with a_run() as run:
        quick, lost = begin(run, "quick", total=0), begin(run, "lost", total=0)
        lost.total = 10_000_000
        await until(lambda: bool(quick.played) and bool(lost.played))
        await asyncio.sleep(5)
        assert quick.left_before == [], "it waits for the other one"
        run.crash("lost")
        await until(lambda: quick.left_before == [0, 0])
        assert [played[2] for played in quick.played] == [2, 1]


async def test_r21_a_newcomer_in_the_last_step_does_not_make_members_wait_for_another_step() -> None:
    """All had agreed to stop before a step that no body reaches: each waited for ever at its end."""
    async with a_run() as run:
        a, b = (begin(run, name, total=6) for name in "ab")
        await until(lambda: (0, 5) in a.begun and (0, 5) in b.begun)
        late = run.handler("late")
        async with late:
            arriving = run.start(late.next_rendezvous())
            await until(lambda: a.left_before == [6] and b.left_before == [6])
            assert a.rounds[0].gate.stop == 6, "it was agreed, and nobody checks that step"
            with pytest.raises(RendezvousClosedError):
                await arriving
        assert [len(one.played) for one in (a, b)] == [1, 1]


async def test_r21_a_finished_member_joins_the_members_that_stop_after_its_last_step() -> None:
    async with a_run() as run:
        done, longer = begin(run, "done", total=6), begin(run, "longer", total=20)
        await until(lambda: (0, 5) in done.begun and (0, 5) in longer.begun)
        late = begin(run, "late", step=6)
        await until(lambda: late.played != [] and len(done.played) == 2)
        assert [played[2] for played in done.played] == [2, 3]
        assert longer.left_before == [6]


@pytest.mark.parametrize("waited_for", [False, True])
async def test_r21_giving_up_ends_the_run_everywhere_with_one_reason_and_one_status(waited_for: bool) -> None:
    """Regression: the others were to leave before a step that they never reached: their collective lacked a member."""
    async with a_run(seed=0, latency=(0.001, 0.05)) as run:  # here the agreement comes before the departure
        reasons: dict[str, str] = {}

        async def live(name: str, *, gives_up: bool) -> None:
            trainer = Trainer(name, alone=not waited_for)
            try:
                async for round in rounds_of(run.handler(name)):
                    async with round:
                        for step in range(100):
                            await round.check(step)
                            if gives_up and step == 4:
                                raise GiveUp("loss is NaN", status=93)  # noqa: TRY301
                            trainer.step = step
                            await trainer.collective(round)
            except (GiveUp, RunGivenUpError) as error:
                reasons[name] = f"{type(error).__name__} {error.status}: {error.reason}"

        tasks = [run.start(live(name, gives_up=name == "b")) for name in "abc"]
        async with asyncio.timeout(30):  # a wait in the round's store would take 300 s
            await asyncio.gather(*tasks)
        theirs = "RunGivenUpError 93: loss is NaN"
        assert reasons == {"a": theirs, "b": "GiveUp 93: loss is NaN", "c": theirs}


async def test_r21_an_error_of_ones_own_is_raised_and_the_others_go_on() -> None:
    async with a_run() as run:
        a, b = begin(run, "a"), begin(run, "b")

        async def fail() -> None:
            async for round in rounds_of(run.handler("c")):
                async with round:
                    await asyncio.sleep(1)
                    raise ZeroDivisionError

        failing = run.start(fail())
        with pytest.raises(ZeroDivisionError):
            await failing
        await until(lambda: len(a.played) == 2 and len(b.played) == 2)
        assert a.played[1][2] == 2


async def test_r21_state_is_kept_from_round_to_round() -> None:
    async with a_run() as run:
        seen: list[bytes | None] = []

        async def live(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round:
                    seen.append(await round.restore("checkpoint"))
                    if round.rank == 0:
                        await round.keep("checkpoint", b"step-%d" % round.number)
                    await anyio.sleep_forever()

        run.start(live("a"))
        await until(lambda: len(seen) == 1)
        run.start(live("b"))
        await until(lambda: len(seen) == 3)
        assert seen == [None, b"step-0", b"step-0"]


async def test_r21_a_body_without_check_is_cancelled_when_a_newcomer_waits_or_left_alone_if_that_is_wished() -> None:
    for on_waiting, interrupted in (("now", True), ("wait", False)):
        async with a_run() as run:
            ended: list[str] = []

            async def live(run: VirtualRun = run, ended: list[str] = ended, on_waiting: str = on_waiting) -> None:
                async for round in rounds_of(run.handler("a"), on_waiting=on_waiting):
                    async with round:
                        await anyio.sleep(5)
                        ended.append(f"slept through round {round.number}")
                        await anyio.sleep_forever()

            run.start(live())
            await asyncio.sleep(3)
            newcomer = begin(run, "b", step=1)
            await asyncio.sleep(4)
            assert bool(newcomer.played) is interrupted
            assert (ended == ["slept through round 0"]) is not interrupted


@pytest.mark.parametrize("slow", ["a", "b"])
@pytest.mark.parametrize("takes", [0.0, 0.5])
async def test_r21_a_closing_while_some_have_begun_no_step_ends_the_first_step_of_the_others(
    slow: str, takes: float
) -> None:
    """Also R6. The members that had begun waited in their step for ever: the others had left once all had agreed on the
    next.

    One member is still busy before its first step, and takes a while to leave that; the other waits for it.
    """
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        kinds: list[str | None] = []

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round:
                    if name == slow:
                        try:
                            await asyncio.sleep(60)
                        finally:
                            with anyio.CancelScope(shield=True):
                                await anyio.sleep(takes)
                    await round.check(0)
                    await round.store.wait(["never"])
                kinds.append(round.ending.kind.value if round.ending is not None else None)

        training = [run.start(train(name)) for name in "ab"]
        await asyncio.sleep(1)
        await run.handler("operator").set_closed("enough")
        async with asyncio.timeout(10):
            await asyncio.gather(*training)
        assert "agreed" not in kinds, "whose waits go on"


@pytest.mark.parametrize("early", [False, True], ids=["at the agreed step", "in the middle of a step"])
async def test_r21_waiting_for_a_member_that_stopped_at_the_agreed_step_is_the_waiters_own_error(early: bool) -> None:
    """One rank skipped a `check` by mistake. This cost a long wait at each drain, and the error did not name the cause.

    A member that stops at the agreed step harms no other. One that leaves earlier, in the middle of a step, makes the
    others fail.
    """
    async with a_run() as run:
        handlers = {name: run.handler(name) for name in "ab"}
        sizes: list[int] = []

        async def leave() -> None:
            async for round in rounds_of(handlers["b"]):
                async with round:
                    await round.check(0)
                    await asyncio.sleep(60 if early else 2)
                    await round.check(1)
                    raise AssertionError("b was to leave")

        async def skip_checks() -> None:
            async for round in rounds_of(handlers["a"]):
                async with round:
                    sizes.append(round.world_size)
                    if round.world_size > 1:
                        await round.check(0)
                        await asyncio.sleep(5)  # all agree meanwhile to leave before step 1
                        with anyio.fail_after(10):
                            await round.store.wait(["b has come to step 1"])

        leaving, skipping = run.start(leave()), run.start(skip_checks())
        await until(lambda: sizes == [2])
        await asyncio.sleep(1)
        await handlers["b"].drain(within=5)
        await leaving
        if early:
            await skipping
            assert sizes == [2, 1], "it has met again"
        else:
            with pytest.raises(TimeoutError):
                await skipping


@pytest.mark.parametrize("why", ["a drain", "a newcomer"])
async def test_r21_a_member_that_raises_between_an_agreement_and_its_step_is_lost_to_the_others(why: str) -> None:
    """Regression: the others waited for it in the store until they ran out of time, and newcomers waited with them."""
    async with a_run() as run:
        handlers = {name: run.handler(name) for name in "abc"}
        met: dict[str, list[int]] = {name: [] for name in "abc"}
        ends: list[tuple[str, tuple[str, ...]]] = []

        async def train(name: str) -> None:
            async for round in rounds_of(handlers[name]):
                met[name].append(round.world_size)
                async with round:
                    await round.check(0)
                    if name == "c":
                        await asyncio.sleep(2)
                        raise ZeroDivisionError
                    if round.number == 0:
                        await round.store.wait(["c has come out of step 0"])
                    await anyio.sleep_forever()
                if round.number == 0 and round.ending is not None:
                    ends.append((round.ending.kind.value, round.ending.node_ids))

        training = {name: run.start(train(name)) for name in "abc"}
        await until(lambda: met == {"a": [3], "b": [3], "c": [3]})
        await asyncio.sleep(1)
        if why == "a drain":
            await handlers["b"].drain(within=600)
        else:
            newcomer = begin(run, "d")
        with pytest.raises(ZeroDivisionError):
            await training["c"]
        await until(lambda: len(met["a"]) == 2, within=5)
        assert ends[0] == ("left", ("c",))
        if why == "a drain":
            await training["b"]
            assert met["a"] == [3, 1]
        else:
            await until(lambda: newcomer.played != [], within=5)
            assert met["a"] == [3, 3]


@pytest.mark.parametrize("announced", ["a drain", "a resize"])
async def test_r21_newcomers_that_are_left_waiting_do_not_prevent_a_departure(announced: str) -> None:
    """All had agreed to stop at once for the newcomer, and a body that did not leave was notified of nothing more."""
    async with a_run() as run:
        handlers = {name: run.handler(name) for name in "ab"}
        ends: list[tuple[str, str]] = []
        met: dict[str, list[int]] = {name: [] for name in "ab"}

        async def train(name: str) -> None:
            async for round in rounds_of(handlers[name], on_waiting="wait"):
                met[name].append(round.world_size)
                async with round:
                    await anyio.sleep_forever()
                assert round.ending is not None
                ends.append((name, round.ending.kind.value))

        training = {name: run.start(train(name)) for name in "ab"}
        await until(lambda: met == {"a": [2], "b": [2]})
        late = run.handler("late")
        async with late:
            arriving = run.start(late.next_rendezvous())
            await until(lambda: handlers["a"].num_nodes_changed() == 1)
            await asyncio.sleep(5)
            assert ends == [], "it waits"
            if announced == "a drain":
                await handlers["b"].drain(within=20)
                await asyncio.wait_for(training["b"], 5)
                await asyncio.wait_for(arriving, 5)
            else:
                await handlers["a"].resize(min_nodes=1, max_nodes=1)
                await until(lambda: met["a"] == [2, 1], within=5)
                arriving.cancel()
                await asyncio.wait([arriving])
        assert {("a", "agreed"), ("b", "agreed")} <= {*ends}


async def test_r21_a_member_whose_body_has_ended_is_the_newest() -> None:
    """Regression: it had finished 20 steps, but the next round named a member that had finished 8."""
    async with a_run() as run:
        done, slow = begin(run, "done", total=20, alone=True), begin(run, "slow", alone=True, pace=lambda: 3 * STEP)
        begin(run, "lost", alone=True)
        await until(lambda: done.step == 20)
        await asyncio.sleep(1)
        assert slow.step < 15
        run.crash("lost")
        await until(lambda: len(done.played) == 2 and len(slow.played) == 2)
        assert done.rounds[1].newest == (done.rounds[1].rank, 19)
        assert slow.rounds[1].newest == done.rounds[1].newest


async def test_r21_a_member_that_fails_after_the_store_has_returned_waits_until_a_death_would_be_known() -> None:
    """Also R22. A survivor ended with a dead peer's error: the store had renewed the dead one's lease for a TTL."""
    async with a_run(durable=True, ttl=5) as run:
        sizes: list[int] = []
        hung_up = asyncio.Event()

        async def train() -> None:
            async for round in rounds_of(run.handler("a")):
                sizes.append(round.world_size)
                async with round:
                    await hung_up.wait()
                    if round.world_size > 1:
                        raise ConnectionError("connection closed by peer")
                    raise GiveUp("that will do")

        surviving = run.start(train())
        begin(run, "b")
        await until(lambda: 2 in sizes)
        run.kill_store()
        await asyncio.sleep(1)
        run.crash("b")
        run.restart_store()
        await until(lambda: run.clients["a"].connected)
        hung_up.set()
        with pytest.raises(GiveUp):
            await surviving
        assert sizes[-1] == 1


async def test_r21_a_death_counts_also_after_all_have_agreed_to_leave() -> None:
    """Also R22. A member still in a collective was not notified of the loss, and ended with the dead peer's error."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        hung_up = {name: asyncio.Event() for name in "ab"}
        rounds: dict[str, Round] = {}

        async def train(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                rounds[name] = round
                async with round:
                    if round.number:
                        raise GiveUp("that will do")
                    with anyio.CancelScope(shield=True):  # nothing but its peers gets it out
                        await hung_up[name].wait()
                        raise ConnectionError("connection closed by peer")

        surviving, _ = run.start(train("a")), run.start(train("b"))
        await until(lambda: len(rounds) == 2)
        run.start(run.handler("late").next_rendezvous())
        await until(lambda: rounds["a"].ending is not None)
        assert rounds["a"].ending is not None
        assert rounds["a"].ending.kind.value == "agreed"
        run.crash("b")
        hung_up["a"].set()
        with pytest.raises(GiveUp):
            await surviving


async def test_r21_a_store_that_is_away_while_the_run_is_to_be_closed_costs_delay_and_nothing_else() -> None:
    """Also R8. The member that finished last ended with an error, since it could not report its end."""
    async with VirtualRun(min_nodes=2, durable=True, close_timeout=2) as run:
        trainers = [begin(run, name, total=5) for name in "ab"]
        loops = run._tasks[-2:]
        away: list[str] = []

        async def lose_the_store(request: object, when: str) -> None:
            if when == "before" and getattr(request, "key", "").endswith("/head/closed") and not away:
                away.append(when)
                run.kill_store()
                asyncio.get_running_loop().call_later(5, run.restart_store)

        await until(lambda: all(trainer.step == 3 for trainer in trainers))
        for client in run.clients.values():
            client.hook = lose_the_store
        await asyncio.gather(*loops)
        assert away
        assert await run.handler("operator").is_closed()


async def test_r21_no_member_waits_for_one_that_rejoins_from_the_middle_of_its_step() -> None:
    """Regression: it had failed while the store did not answer, and could not ask which member failed first. The others
    were not notified.
    """
    async with a_run(disconnect_ttl=8) as run:
        handlers = {name: run.handler(name) for name in "ab"}
        rounds: dict[str, Round] = {}

        async def train(name: str) -> None:
            async for round in rounds_of(handlers[name]):
                rounds[name] = round
                async with round:
                    await round.check(0)
                    if name == "b" and round.world_size == 2:
                        await asyncio.sleep(2)
                        raise ZeroDivisionError
                    await round.store.wait(["b has come out of step 0"])

        run.start(train("a"))
        run.start(train("b"))
        await until(lambda: {round.world_size for round in rounds.values()} == {2})
        in_step, first = rounds["a"], rounds["b"]
        await asyncio.sleep(1)
        run.network.partition("b")
        await until(lambda: first.ending is not None)
        run.network.heal("b")
        await until(lambda: rounds["a"] is not in_step, within=10)
        assert in_step.ending is not None
        assert in_step.ending.kind.value == "left"
