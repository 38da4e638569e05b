"""Members that live but are stuck are found, in virtual time; and one run of real processes that really hang."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

import rdzv
from rdzv.testing import Cluster, ClusterNode, cluster, processes

pytestmark = pytest.mark.some_here(3)

STALL = 10.0


def training(
    *,
    step_takes: Callable[[ClusterNode, rdzv.Round, int], Awaitable[object]] | None = None,
    run_together: bool = True,
    steps: int = 10_000,
) -> Callable[[ClusterNode], Awaitable[None]]:
    """A training of one step a second, in which the members wait for each other at each step, or run independently."""

    async def train(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url):
            async with round:
                step = 0
                while step < steps:
                    if run_together:
                        await round.check(step)
                    else:
                        round.beat(step)
                    if step_takes is not None:
                        await step_takes(node, round, step)
                    await anyio.sleep(1)
                    if run_together:
                        await round.store.barrier(f"step {step}", round.world_size)
                    step += 1

    return train


def said(made: Cluster, *words: str) -> list[str]:
    return [line for line in made.story if all(word in line for word in words)]


def when(line: str) -> float:
    return float(line.split(maxsplit=1)[0])


@pytest.mark.parametrize("index", range(3))
def test_a_hanging_node_is_named_within_a_second_also_if_it_is_the_coordinator(index: int) -> None:
    with cluster(3, seed=1, min_nodes=2, stall_timeout=STALL) as made:
        made.run(training())
        made.advance(7.5)
        made.hang(index)
        made.advance(STALL + 1)
        assert said(made, f"node-{index} is taken out of the round")
        made.advance(1)
        assert [one.world_size for one in made.rounds] == [3, 2]
        out, *_ = said(made, "is taken out of the round")
        assert f"node-{index} is taken out of the round: no step since 1" in out
        assert said(made, f"is over: lost: node-{index}: no step since 1")
        made.resume(index)
        made.advance(5)
        assert said(made, f"node-{index} was dropped: no step since 1")
        assert made.rounds[-1].world_size == 3, "it comes again once it goes on"


@pytest.mark.parametrize("run_together", [True, False])
@pytest.mark.parametrize("stall", [1.5, 7.0])
def test_a_hanging_node_is_named_within_a_second_also_with_rare_keep_alives(stall: float, run_together: bool) -> None:
    for begun in (7.0, 9.2):
        with cluster(3, seed=1, min_nodes=2, stall_timeout=stall) as made:
            made.run(training(run_together=run_together))
            made.advance(begun)
            made.hang(1)
            made.advance(stall + 1)
            (out,) = said(made, "node-1 is taken out of the round")
            if not run_together:
                assert re.search(r": no step since \d+ s, others are at \d+; it is at \d+$", out), f"hung at {begun}"


def test_if_no_member_makes_progress_none_is_dropped_and_the_status_says_so() -> None:
    told: list[str] = []

    async def halt(node: ClusterNode, _: rdzv.Round, step: int) -> None:
        if step == 7:
            await anyio.sleep(13)
            async with rdzv.connect(node.url, is_host=False) as observer:
                told.append((await observer.status()).standstill)
            await asyncio.Event().wait()

    with cluster(3, seed=1, min_nodes=2, stall_timeout=STALL) as made:
        made.run(training(step_takes=halt))
        made.advance(25)
        assert len(made.rounds) == 1
        assert said(made, words := "no member has begun a step for 10 s, all are at 7; nobody is dropped")
        assert told == [words] * 3


def test_a_slow_first_step_raises_no_alarm_without_a_limit_of_its_own() -> None:
    async def compile(node: ClusterNode, round: rdzv.Round, step: int) -> None:
        if step == 0 and node.index == 0 and round.number == 0:
            await anyio.sleep(40)

    for first_step_timeout, sizes in ((None, [3]), (20, [3, 3])):
        with cluster(3, seed=1, min_nodes=2, stall_timeout=5, first_step_timeout=first_step_timeout) as made:
            made.run(training(step_takes=compile))
            made.advance(60)
            assert [one.world_size for one in made.rounds] == sizes


def test_a_finished_member_is_not_taken_for_stuck() -> None:
    async def short(node: ClusterNode, _: rdzv.Round, __: int) -> None:
        if node.index != 0:
            await anyio.sleep(2)

    with cluster(3, seed=1, stall_timeout=5) as made:
        made.run(training(step_takes=short, run_together=False, steps=8))
        made.finish()
        assert len(made.rounds) == 1


async def checkpoint(_: ClusterNode, round: rdzv.Round, step: int) -> None:
    if step % 10 == 5 and round.rank == 0:
        async with round.busy(600, "checkpoint"):
            await anyio.sleep(60)


NO_ALARM: dict[str, Callable[[Cluster], object]] = {
    "nobody is judged without the setting": lambda made: made.hang(1),
    "a long checkpoint that is announced": lambda _: None,
    "a store that stands still": lambda made: made.pause_store(4.5),
    "a store that is away": lambda made: made.stop_store(4.5),
    "a cut": lambda made: made.cut(2, 4.5),
}


@pytest.mark.some_of(2)
@pytest.mark.parametrize("case", NO_ALARM)
@pytest.mark.in_ci
def test_other_pauses_raise_no_alarm(case: str) -> None:
    judged, announced = "without" not in case, "announced" in case
    with cluster(4, seed=3, min_nodes=2, stall_timeout=2 if judged else None) as made:
        made.run(training(step_takes=checkpoint if announced else None))
        for _ in range(2):
            made.advance(15.3)
            NO_ALARM[case](made)
        made.advance(60)
        assert len(made.rounds) == 1
        assert not said(made, "taken out")


SCRIPT = """
import os, time, rdzv, rdzv.sync
for round in rdzv.sync.rounds(os.environ["RDZV_URL"]):
    with round:
        print("round", round.number, "of", round.world_size, "lost", round.previous and round.previous.lost, flush=True)
        step = 0
        while round.world_size == 3 or step < 3:
            round.check(step)
            if round.world_size == 3 and round.node_id == "node-1" and step == 3:
                time.sleep(600)  # as in a call that does not return
            round.store.barrier(f"step {step}", round.world_size)
            step += 1
"""


def test_a_process_that_hangs_is_found_by_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with processes(3, script, min_nodes=2, max_nodes=3, stall_timeout=1, ttl=2, last_call_timeout=60) as started:
        for index in (0, 2):
            started.wait_for(index, "round 1 of 2 lost ('node-1',)")
        assert "round 0 of 3" in started.output(1)
        assert "round 1" not in started.output(1), "it hangs"


BEATS = """
n=0; while [ $n -lt 1000 ]; do
    echo $n > "$RDZV_BEAT_DIR/$LOCAL_RANK"
    if [ $RDZV_ROUND = 0 ] && [ $RANK = 1 ] && [ $n = 5 ]; then echo "rank 1 hangs"; sleep 600; fi
    if [ $RDZV_ROUND = 1 ] && [ $n = 5 ]; then echo "round 1 is done"; exit 0; fi
    n=$((n+1)); sleep 0.05
done
"""


def test_rdzv_run_finds_a_process_that_hangs_and_restarts_it(tmp_path: Path) -> None:
    """Each process writes its step to a file, as any language can. The one that hangs is stopped and started again."""
    script = tmp_path / "work.sh"
    script.write_text(BEATS)
    launch = [sys.executable, "-m", "rdzv", "run", "--grace", "2", "--no-stacks", "--", "sh", str(script)]
    with processes(2, launch, max_nodes=2, stall_timeout=1, first_step_timeout=1, ttl=2) as started:
        assert started.wait(within=90) == [0, 0]
        told = "".join(started.output(index) for index in range(2))
        assert "rank 1 hangs" in told
        assert "others are at" in told
        assert told.count("round 1 is done") == 2
