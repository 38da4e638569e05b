"""The blocking loop over the rounds: real sockets and threads, judged by the outcome."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

import rdzv
import rdzv.sync
import store
import store.sync
from rdzv.errors import GiveUp, RendezvousClosedError, RoundChanged, RunGivenUpError
from rdzv.loop.round_monitor import FINISHED
from rdzv.node.member.membership_watcher import MembershipWatcher
from rdzv.shared_store.store import BlockingSharedStore
from tests.support.processes import start_python

T = TypeVar("T")

WITHIN = 60  # seconds, on a busy machine


@pytest.fixture
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield server.url


def side_by_side(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WITHIN) for future in [pool.submit(call) for call in calls]]


def verdict_on(url: str, name: str, verdict: Exception | None = None) -> GiveUp | RunGivenUpError:
    """Return the error that the loop of one member raises. A member with a verdict raises that at its third step."""
    try:
        for round in rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False, node_id=name):
            with round:
                step = 0
                while True:
                    round.check(step)
                    step += 1
                    if step == 3:
                        if verdict is not None:
                            raise verdict
                        round.store.wait(["what the other would have written"])
    except (GiveUp, RunGivenUpError) as error:
        return error
    raise AssertionError("the loop has ended without a word")


@pytest.mark.parametrize("in_group", [False, True])
def test_giving_up_reaches_every_member_within_a_step_with_reason_and_status(url: str, in_group: bool) -> None:
    verdict = GiveUp("loss is NaN", status=93)
    group = ExceptionGroup("tasks", [OSError("peer has hung up"), ExceptionGroup("more", [verdict])])
    theirs, own = side_by_side(
        lambda: verdict_on(url, "a"), lambda: verdict_on(url, "b", group if in_group else verdict)
    )
    assert own is verdict
    assert isinstance(theirs, RunGivenUpError)
    assert (theirs.reason, theirs.status, theirs.given_up) == ("loss is NaN", 93, True)
    with rdzv.sync.connect(f"{url}/job", min_nodes=1, is_host=False) as late:
        with pytest.raises(RendezvousClosedError) as closed:
            late.next_rendezvous()
        assert (closed.value.given_up, closed.value.status) == (True, 93)


def test_the_last_member_to_finish_closes_the_run_and_the_loop_ends_for_all(url: str) -> None:
    def train(name: str) -> int:
        bodies = 0
        for round in rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False, node_id=name):
            with round:
                round.check(0)
                bodies += 1
        return bodies

    assert side_by_side(lambda: train("a"), lambda: train("b")) == [1, 1]
    with rdzv.sync.connect(f"{url}/job", min_nodes=1, is_host=False) as late:
        with pytest.raises(RendezvousClosedError) as closed:
            late.next_rendezvous()
        assert closed.value.reason == FINISHED
    with pytest.raises(RendezvousClosedError):  # it was closed before this loop began
        next(rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False))


def test_the_end_of_another_runs_round_passes_through_a_round(url: str) -> None:
    """Regression: the inner loop took the outer round's end for its own, and met again, for ever."""
    outer_url, entered = f"{url}/outer?min_nodes=1&max_nodes=2&last_call_timeout=0&is_host=false", list[int]()

    def join() -> None:
        for outer in rdzv.sync.rounds(outer_url):
            with outer:
                return

    with ThreadPoolExecutor(1) as pool:
        for outer in rdzv.sync.rounds(outer_url):
            with outer:
                if outer.world_size == 2:
                    return
                pool.submit(join)
                for inner in rdzv.sync.rounds(f"{url}/inner?min_nodes=1&is_host=false"):
                    with inner:
                        assert entered == []
                        entered.append(inner.number)
                        for step in itertools.count():
                            outer.check(step)
                            time.sleep(0.001)
    pytest.fail("the run was closed before both had met")


def test_a_body_that_catches_its_end_at_a_check_has_not_finished_that_step(url: str) -> None:
    """Regression: the next round named that step as finished, so that programs which go on from there left it out."""
    at = f"{url}/job?min_nodes=1&max_nodes=2&last_call_timeout=1&is_host=false"
    works = threading.Event()

    def train() -> bool:
        done = -1
        for round in rdzv.sync.rounds(at, node_id="a"):
            if round.number == 1:
                return round.newest == (0, done)
            with round, contextlib.suppress(RoundChanged):
                while True:
                    round.check(done + 1)
                    done += 1
                    works.set()
        raise AssertionError("the loop has ended")

    def join() -> bool:
        assert works.wait(WITHIN)
        with rdzv.sync.connect(at, node_id="b") as handler:
            return handler.next_rendezvous().round == 1

    assert side_by_side(train, join) == [True, True]


def test_a_body_that_catches_a_failed_wait_has_not_finished_that_step(url: str) -> None:
    at = f"{url}/job?min_nodes=1&max_nodes=2&last_call_timeout=60&is_host=false"
    waits = threading.Event()

    def train() -> bool:
        for round in rdzv.sync.rounds(at, node_id="a"):
            if round.number == 1:
                return round.newest == (0, 2)
            with round, contextlib.suppress(RoundChanged):
                for step in range(4):
                    round.check(step)
                waits.set()
                round.store.get("never")
        raise AssertionError("the loop has ended")

    def join() -> bool:
        with rdzv.sync.connect(at, node_id="b") as handler:
            handler.next_rendezvous()
            return waits.wait(WITHIN)

    assert side_by_side(train, join) == [True, True]


def test_a_check_in_a_forked_child_does_not_wait_for_a_decision_that_never_comes(url: str) -> None:
    for round in rdzv.sync.rounds(f"{url}/job?min_nodes=1&is_host=false"):
        with round:
            round.check(0)
            round.gate.close_gate()  # as the node does when one is to leave
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the test runner
                signal.alarm(10)
                with contextlib.suppress(rdzv.RendezvousStateError):
                    round.check(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            return


def test_of_two_that_fail_at_once_only_the_first_raises_its_error(url: str) -> None:
    def errors_of(name: str) -> int:
        errors = 0
        while True:
            try:
                for round in rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False, node_id=name):
                    with round:
                        if round.number == 0:
                            round.store.barrier("both are here", 2)
                            raise OSError(f"the collective of {name} has failed")  # noqa: TRY301
                return errors
            except OSError:
                errors += 1  # it joins again, as a new process would

    assert sorted(side_by_side(lambda: errors_of("a"), lambda: errors_of("b"))) == [0, 1]


def test_a_run_without_progress_is_given_up_at_every_member(url: str) -> None:
    def fail(name: str) -> RunGivenUpError:
        first = True
        try:
            for round in rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False, node_id=name, no_progress=1):
                assert first, "the counts are read before the next body begins"
                first = False
                with round:
                    round.check(0)
                    round.store.add("here", 1)
                    raise OSError(f"the collective of {name} has failed")  # noqa: TRY301
        except RunGivenUpError as error:
            return error
        except OSError:
            return fail(name)  # its own error: it joins again, as a new process would
        raise AssertionError("the loop has ended without a word")

    both = side_by_side(lambda: fail("a"), lambda: fail("b"))
    assert {(error.reason, error.status) for error in both} == {
        ("the last rounds have failed before a step was finished: 1 of them, one after the other (no_progress=1)", 93)
    }


def test_a_failed_round_in_which_a_step_was_finished_does_not_count_as_without_progress(url: str) -> None:
    def rounds_of(name: str) -> int:
        begun = 0
        while True:
            with contextlib.suppress(OSError):
                for round in rdzv.sync.rounds(f"{url}/job?min_nodes=2", is_host=False, node_id=name, no_progress=1):
                    with round:
                        begun += 1
                        round.check(0)
                        round.check(1)
                        if round.number == 0:
                            round.store.barrier("both are here", 2)
                            raise OSError(f"the collective of {name} has failed")
                return begun

    assert side_by_side(lambda: rounds_of("a"), lambda: rounds_of("b")) == [2, 2]


@pytest.mark.parametrize(
    "wait",
    [
        lambda shared: shared.get("never"),
        lambda shared: shared.wait(["never"]),
        lambda shared: shared.queue_pop("never"),
        lambda shared: shared.barrier("never", 2),
    ],
    ids=["get", "wait", "queue_pop", "barrier"],
)
def test_a_wait_ended_because_a_member_has_left_is_not_called_a_timeout(
    url: str, wait: Callable[[BlockingSharedStore], object]
) -> None:
    """Regression: it raised SharedStoreTimeoutError ("timed out after 300 s") after milliseconds."""
    at = f"{url}/job?min_nodes=2&max_nodes=2&is_host=false"
    ended: list[BaseException] = []

    def leave() -> None:
        with rdzv.sync.connect(at) as handler:
            handler.next_rendezvous().store.wait(["here"])

    def stay() -> None:
        for round in rdzv.sync.rounds(at, node_id="a"):
            with round:
                round.store.set("here", b"")
                try:
                    wait(round.store)
                except BaseException as error:
                    ended.append(error)
                    raise
            return

    side_by_side(leave, stay)
    assert [type(error) for error in ended] == [RoundChanged]
    assert "never" in str(ended[0])


DIES = """
import sys, time, rdzv.sync

with rdzv.sync.connect(sys.argv[1], node_id="killed", is_host=False) as handler:
    info = handler.next_rendezvous()
    print("in", flush=True)
    info.store.get("never")
"""


async def test_a_wait_ended_by_a_loss_names_the_lost_even_if_the_store_is_slow(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the wait ended at once, but the names of the lost nodes came later, so the error was a timeout."""
    heed = MembershipWatcher._write_begun_step

    async def late(self: MembershipWatcher, *arguments: Any) -> None:
        await asyncio.sleep(1)
        await heed(self, *arguments)

    monkeypatch.setattr(MembershipWatcher, "_write_begun_step", late)
    at = f"{url}/job?min_nodes=2&max_nodes=2&is_host=false&disconnect_ttl=0.3"
    ended: list[BaseException] = []

    def train() -> None:
        for round in rdzv.sync.rounds(at, node_id="a"):
            with round:
                round.store.set("here", b"")
                try:
                    round.store.get("never")
                except BaseException as error:
                    ended.append(error)
                    raise
            return

    training = asyncio.create_task(asyncio.to_thread(train))
    async with start_python("-c", DIES, at) as child:
        await child.line("in")
        async with store.connect(url) as look, asyncio.timeout(WITHIN):
            while (await look.stats())["waits"] < 2:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.01)
        child.kill()
    async with asyncio.timeout(WITHIN):
        await training
    (error,) = ended
    assert isinstance(error, rdzv.MembersLostError)
    assert error.node_ids == ("killed",)
