"""User code on a cluster in virtual time: the faults, the story that is told, and the defects that are found."""

import asyncio
from collections.abc import Iterator

import anyio
import pytest

import rdzv
import rdzv.testing
from rdzv.testing import Cluster, ClusterError, ClusterNode, ClusterStuckError, cluster

pytestmark = pytest.mark.some_here(6)


@pytest.fixture
def four() -> Iterator[Cluster]:
    with cluster(4, seed=1, min_nodes=2) as made:
        yield made


async def train(node: ClusterNode) -> None:
    """Make ten steps, one a second."""
    async for round in rdzv.rounds(node.url):
        async with round:
            step = int(await round.restore("step") or 0)
            while step < 10:
                await round.check(step)
                await anyio.sleep(1)
                step += 1
                await round.keep("step", str(step).encode())


async def stay(node: ClusterNode) -> None:
    """Be a member, and write every change to the story."""
    async with rdzv.connect("tcp://head:29400/job-7?insecure=1") as handler:
        while True:
            await handler.next_rendezvous()
            async with handler.changes() as changes:
                async for change in changes:
                    node.say(str(change))
                    if isinstance(change, rdzv.NodesLost | rdzv.Dropped):
                        break
                    if isinstance(change, rdzv.Closed):
                        return


def sizes(made: Cluster) -> list[int]:
    return [one.world_size for one in made.rounds]


def told(made: Cluster, *words: str) -> bool:
    return any(all(word in line for word in words) for line in made.story)


def test_a_body_runs_to_its_end_on_every_node(four: Cluster) -> None:
    four.run(train)
    four.finish()
    assert all(node.ended for node in four.nodes)
    (only,) = four.rounds
    assert (only.number, only.world_size, sorted(only.members)) == (0, 4, ["node-0", "node-1", "node-2", "node-3"])


def test_the_end_of_a_pause_does_not_resume_a_node_that_was_restarted_and_paused_again(four: Cluster) -> None:
    four.run(stay)
    four.pause(2, 10)
    four.advance(1)
    four.kill(2)
    four.restart(2)
    four.pause(2, 60)
    four.advance(30)
    assert not told(four, "node-2 goes on")
    four.advance(40)
    assert told(four, "node-2 goes on")


async def test_it_can_be_awaited_inside_a_running_loop() -> None:
    ours = asyncio.current_task()
    async with cluster(2, seed=1) as made:
        await made.run(train)
        await made.advance(5)
        assert asyncio.current_task() is ours
        assert await made.join() is made.nodes[2]
    assert asyncio.get_running_loop().is_running()


def test_one_seed_is_one_story() -> None:
    stories = []
    for seed in (5, 5, 6):
        with cluster(3, seed=seed, min_nodes=2) as made:
            made.run(train)
            made.advance(3)
            made.kill(0)
            made.finish()
            stories.append(made.story)
    assert stories[0] == stories[1] != stories[2]


def test_a_node_that_is_killed_is_lost_at_once_and_one_without_power_after_its_ttl(four: Cluster) -> None:
    four.run(stay)
    four.advance(1)
    four.kill(0)
    four.advance(0.5)
    assert told(four, "NodesLost", "node-0")
    four.advance(5)
    assert sizes(four) == [4, 3]
    four.kill(1, power=True)
    four.advance(5)
    assert sizes(four) == [4, 3]
    four.advance(10)
    assert sizes(four) == [4, 3, 2]
    assert not four.nodes[0].alive


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_machine_without_power_answers_nothing_until_it_is_back(seed: int) -> None:
    """It sends no reset, even if the store writes to it: as if it coordinated, and another node takes over."""
    with cluster(4, seed=seed, min_nodes=2) as made:
        made.run(stay)
        made.advance(1)
        made.cut(1, 2)
        made.kill(1, power=True)
        made.advance(5)
        assert sizes(made) == [4]
        assert not told(made, "node-1 is connected again")
        made.restart(1)
        made.advance(30)
        assert sizes(made)[-1] == 4
        assert len(sizes(made)) > 1


def test_a_node_that_was_killed_may_start_again(four: Cluster) -> None:
    four.run(train)
    four.advance(2)
    with pytest.raises(rdzv.RendezvousStateError, match="node-3 is alive"):
        four.restart(3)
    four.kill(3)
    four.restart(3)
    four.finish()
    assert sizes(four)[0] == sizes(four)[-1] == 4


def test_a_paused_node_is_dropped_and_a_hanging_one_is_not(four: Cluster) -> None:
    four.run(stay)
    four.advance(1)
    four.hang(2, 60)
    four.advance(70)
    assert sizes(four) == [4]
    four.pause(2)
    four.advance(15)
    assert sizes(four) == [4, 3]
    four.resume(2)
    four.advance(1)
    assert told(four, "node-2: Dropped")


def test_a_short_cut_is_survived(four: Cluster) -> None:
    four.run(stay)
    four.advance(1)
    four.cut(1, 4)
    four.advance(10)
    four.reset(1)
    four.advance(10)
    assert sizes(four) == [4]
    four.cut(1)
    four.advance(15)
    assert sizes(four) == [4, 3]
    four.heal(1)
    four.advance(15)
    assert told(four, "node-1: Dropped")


def test_a_drained_node_leaves_at_a_step_and_a_newcomer_joins(four: Cluster) -> None:
    with pytest.raises(rdzv.RendezvousStateError, match="call `advance`"):
        four.drain(1)
    four.run(train)
    four.advance(2.5)
    four.drain(1, within=60)
    four.advance(3)
    assert four.nodes[1].ended
    assert sizes(four) == [4, 3]
    four.join()
    four.finish()
    assert sizes(four) == [4, 3, 4]


@pytest.mark.parametrize("how", ["stop_store", "pause_store"])
def test_a_short_outage_of_the_store_ends_no_round(four: Cluster, how: str) -> None:
    four.run(train)
    four.advance(3)
    getattr(four, how)(4)
    four.finish()
    assert sizes(four) == [4]


def test_a_store_without_a_disk_is_a_new_one_after_a_restart() -> None:
    with cluster(2, seed=1, durable=False, may_raise=rdzv.RendezvousError) as made:
        made.run(stay)
        made.advance(3)
        made.stop_store(1)
        made.advance(30)
        assert told(made, "Dropped", "store 1 has been replaced by store 2")


async def fails_as_rank_1(node: ClusterNode) -> None:
    async with rdzv.connect(node.url) as handler:
        info = await handler.next_rendezvous()
        await anyio.sleep(1)
        if info.rank == 1:
            raise ValueError("out of memory")


def test_an_error_of_a_body_fails_the_test_with_its_story() -> None:
    with cluster(2, seed=7) as made:
        made.run(fails_as_rank_1)
        with pytest.raises(ClusterError, match=r"seed 7: node-\d has failed: ValueError\('out of memory'\)") as caught:
            made.advance(10)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "is rank 1 of 2 in round 0" in str(caught.value)


def test_an_error_that_a_body_may_raise_does_not() -> None:
    with cluster(2, seed=7, may_raise=ValueError) as made:
        made.run(fails_as_rank_1)
        made.finish()
        assert [str(node.error) for node in made.nodes if node.error] == ["out of memory"]


def test_nodes_that_do_not_finish_are_named_with_the_lines_they_wait_at() -> None:
    async def never(node: ClusterNode) -> None:
        if node.index == 0:
            await asyncio.Event().wait()  # for ever
        await train(node)

    with cluster(2, seed=1) as made:
        made.run(never)
        with pytest.raises(ClusterStuckError) as caught:
            made.finish(within=30)
    first, zero, one, *_ = str(caught.value).splitlines()
    assert first == "seed 1: not all nodes have come to their ends within 30 virtual seconds:"
    assert "node-0 is at " in zero
    assert "await asyncio.Event().wait()  # for ever" in zero
    assert "async for round in rdzv.rounds(node.url)" in one
    assert one.endswith("; 1 of at least 2 nodes")


def test_tasks_that_a_body_has_started_are_named_with_their_lines_too() -> None:
    async def never(node: ClusterNode) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1000)
            group.start_soon(anyio.Event().wait)
            group.start_soon(stay, node)

    with cluster(1, seed=1) as made:
        made.run(never)
        with pytest.raises(ClusterStuckError) as caught:
            made.finish(within=30)
    _, body, task, *_ = str(caught.value).splitlines()
    assert "async with anyio.create_task_group()" in body
    assert "and at stay" in task and "async for change in changes" in task


def test_a_node_that_the_others_wait_for_is_named_also_if_they_time_out_first() -> None:
    async def comes_too_late(node: ClusterNode) -> None:
        if node.index == 0:
            await anyio.sleep(60)
        await stay(node)

    with cluster(2, seed=1, join_timeout=20) as made:
        made.run(comes_too_late)
        with pytest.raises(ClusterError, match="node-1 has failed: RendezvousTimeoutError") as caught:
            made.finish()
    assert "node-0 is at " in str(caught.value)
    assert "await anyio.sleep(60)" in str(caught.value)


def test_a_node_that_finished_is_not_reported_as_killed(four: Cluster) -> None:
    four.run(train)
    four.finish()
    four.restart(0)
    four.advance(20)
    assert not told(four, "is killed")


def test_the_error_for_blocking_callers_names_rdzv_testing_processes() -> None:
    async def blocks(node: ClusterNode) -> None:
        with rdzv.sync.connect(node.url):
            pass

    with cluster(1) as made:
        made.run(blocks)
        with pytest.raises(ClusterError, match=r"rdzv\.testing\.processes"):
            made.advance(1)


def test_explore_reports_the_first_failing_seed_with_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    def no_node_was_killed(made: Cluster) -> None:
        assert not told(made, "is killed"), "a node was killed"

    with cluster(2, seed=0, min_nodes=1) as made:
        assert made.explore(train, seeds=range(3), faults=["reset"], during=5).value == 3
        made.run(train)
        with pytest.raises(ClusterError, match="seed 4: a node was killed") as caught:
            made.explore(seeds=[4], faults=["kill"], during=5, check=no_node_was_killed)
    assert str(caught.value) in capsys.readouterr().out


def test_explore_refuses_a_missing_body_and_unknown_faults() -> None:
    with cluster(1) as made:
        with pytest.raises(rdzv.RendezvousStateError, match="no body"):
            made.explore()
        with pytest.raises(ClusterError, match="there is no fault 'earthquake'; there are kill, pause"):
            made.explore(train, faults=["earthquake"])


def test_a_cluster_that_has_ended_refuses_calls() -> None:
    with cluster(1) as made:
        made.run(train)
        with pytest.raises(IndexError, match="there is no node 1: there are 1, from 0"):
            made.kill(1)
    made.end()
    with pytest.raises(rdzv.RendezvousStateError, match="inside its `with` block"):
        made.advance(1)
    with pytest.raises(ValueError, match="at least one node"):
        cluster(0)
