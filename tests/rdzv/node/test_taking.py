"""A membership reads the head before any listener is called; each listener is called, and each callback once."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rdzv.core.round import Round
from rdzv.core.round_life import Ending
from rdzv.core.state import Head, Phase, Progress
from rdzv.core.stopping import RoundStop
from rdzv.core.stuck.step_log import StepLog
from rdzv.loop.round_monitor import RoundMonitor
from rdzv.membership import Membership
from rdzv.node.link.store_session import StoreSession
from rdzv.node.member.membership_watcher import MembershipWatcher
from tests.guarantees.test_r21_one_loop import a_run, begin, until

virtual_time = pytest.mark.virtual_time

ROUND = Round(number=7, term=1, size=3, buckets=1, host="h", port=1, in_steps=True)


def member(clock: Callable[[], float] = lambda: 0.0) -> Membership:
    return Membership(round=ROUND, rank=0, arrival=3, node_id="a", beats=StepLog(7, clock, expected=True))


class Looks:
    """A listener that records the value at each call."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def notify(self) -> None:
        self.seen.append(self.look())


LOST = Progress(phase=Phase.TRAINING, round=7, lost=1, lost_ids=("b",), live=2)
EXPELLED = LOST.replace(lost=2, lost_ids=("b", "a"), why_lost=(("a", "it stood still"),))
STOP = RoundStop(round=7, decided=True, step=6, why="c to leave")


@pytest.mark.parametrize(
    ("head", "rejoins", "over", "decided", "lost_ids"),
    [
        (Head(round=ROUND, progress=LOST), False, None, False, ("b",)),
        (Head(round=ROUND, progress=LOST, stop=STOP), False, None, True, ("b",)),
        (Head(round=ROUND, stop=STOP.replace(round=6)), False, None, False, ()),
        (Head(round=ROUND, progress=LOST.replace(round=6)), False, None, False, ()),
        (Head(round=ROUND, progress=EXPELLED), False, "it stood still", False, ()),
        (Head(round=ROUND, progress=EXPELLED.replace(why_lost=())), False, "its record is gone", False, ()),
        (Head(round=ROUND.replace(number=8, revision=9)), False, "round 8 was completed without", False, ()),
        (Head(round=ROUND.replace(number=8, revision=9)), True, None, False, ()),
    ],
)
def test_the_first_notification_comes_after_all_of_the_head_was_read(
    head: Head, rejoins: bool, over: str | None, decided: bool, lost_ids: tuple[str, ...]
) -> None:
    membership = member()
    looks = Looks(lambda: (membership.over, membership.gate.decided, membership.lost_ids))
    membership.listeners.add(looks)
    membership.update(head, rejoins=rejoins)
    assert looks.seen[0] == looks.seen[-1]
    (why, *rest) = looks.seen[0]
    assert rest == [decided, lost_ids]
    assert (why is None) if over is None else (over in why)


@virtual_time
async def test_a_listener_of_the_node_finds_the_loss_when_it_is_called() -> None:
    """Regression: it was woken before the loss was set, and not again."""
    async with a_run(ttl=3) as run:
        a, _, _ = await run.met("abc")
        await asyncio.sleep(5)
        membership = a.node.membership
        assert membership is not None
        looks = Looks(lambda: membership.lost_ids)
        with a.node.listeners.subscribed(looks):
            run.crash("c")
            await until(lambda: membership.lost_ids == ("c",))
            await asyncio.sleep(0.02)
        assert ("c",) in looks.seen


@virtual_time
async def test_a_loss_is_announced_while_a_request_of_the_node_is_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: listeners of the membership got it 5 s later, after the answer to the coordinator's question."""
    ended: dict[tuple[str, str], float] = {}
    end = RoundMonitor.note_ending

    def noted(self: RoundMonitor, ending: Ending) -> None:
        ended.setdefault((self.membership.node_id, ending.kind.value), anyio.current_time())
        end(self, ending)

    monkeypatch.setattr(RoundMonitor, "note_ending", noted)
    async with a_run(ttl=3) as run:
        trainers = [begin(run, name) for name in "abc"]
        await until(lambda: all(one.step >= 5 and one.played[-1][2] == 3 for one in trainers))
        keys, asked = run._handlers["a"].node.keys, asyncio.Event()

        async def slow(request: Any, when: str) -> None:
            puts = getattr(request, "then", ())
            if when == "before" and any(getattr(put, "key", "").startswith(keys.begun) for put in puts):
                asked.set()
                await asyncio.sleep(5)

        run.clients["a"].hook = slow
        await run._handlers["b"].drain(within=60)
        await asked.wait()
        run.crash("c")
        at = anyio.current_time()
        await until(lambda: ("a", "lost") in ended)
        assert ended["a", "lost"] - at < 1


@virtual_time
@pytest.mark.parametrize("seconds", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("held_up", ["a", "ab"])
async def test_a_decision_and_a_departure_in_one_read_are_no_loss(
    monkeypatch: pytest.MonkeyPatch, seconds: float, held_up: str
) -> None:
    """Regression: a separate task set the decision later. A healthy job ended in the middle of a step, or hung."""
    heed = MembershipWatcher._write_begun_step

    async def late(self: MembershipWatcher, link: StoreSession, membership: Membership) -> None:
        stop = link.follower.head.stop
        if self._part.node_id in held_up and stop is not None and stop.decided and seconds:
            await anyio.sleep(seconds)
        await heed(self, link, membership)

    monkeypatch.setattr(MembershipWatcher, "_write_begun_step", late)
    async with a_run(ttl=10) as run:
        trainers = {name: begin(run, name) for name in "abc"}
        await until(lambda: all(one.step >= 5 and one.played[-1][2] == 3 for one in trainers.values()))
        rounds = {name: one.rounds[-1] for name, one in trainers.items()}
        await run._handlers["c"].drain(within=60)
        await until(lambda: all(round.ending is not None for round in rounds.values()))
        endings = [round.ending for round in rounds.values()]
        assert {ending.kind.value for ending in endings if ending} == {"agreed"}
        await until(lambda: all(trainers[name].left_before for name in "ab"))
        assert len({one.left_before[-1] for one in trainers.values() if one.left_before}) == 1


@virtual_time
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, asyncio.CancelledError])
async def test_an_error_in_a_listener_or_callback_does_not_end_the_follower(error: type[BaseException]) -> None:
    """Regression: the error reached the follower, and the member was put out of its round by its own callback."""

    def fails(*_: object) -> None:
        raise error

    async with a_run(ttl=3) as run:
        a, b = await run.met("ab")
        membership = a.node.membership
        assert membership is not None
        membership.call_on_member_loss(fails)
        membership.call_when_over(fails)
        if error is ZeroDivisionError:
            a.node.listeners.add(Looks(fails))
            membership.listeners.add(Looks(fails))
        looks = Looks(lambda: membership.lost_ids)
        membership.listeners.add(looks)
        run.crash("b")
        await until(lambda: looks.seen[-1:] == [("b",)])
        assert membership.dropped is False
        assert membership.over is None
        await a.leave()
        over = a.node.membership
        assert over is membership
        assert over.over == "this node has left it"
        assert b.node.membership is not None


def test_a_callback_that_raises_keyboard_interrupt_ends_no_thread_but_its_callers() -> None:
    """Regression: it ended the thread of all nodes of the process. In the caller's thread it is a Ctrl-C."""
    membership, told = member(), list[str]()

    def fails(_: str) -> None:
        raise KeyboardInterrupt

    membership.call_when_over(fails)
    membership.call_when_over(told.append)
    thread = threading.Thread(target=membership.end, args=("over",), kwargs={"dropped": True})
    thread.start()
    thread.join()
    assert told == ["over"]
    with pytest.raises(KeyboardInterrupt):
        membership.call_when_over(fails)


def test_a_callback_is_called_once_even_if_two_threads_race() -> None:
    for _ in range(300):
        membership, calls, both = member(), list[str](), threading.Barrier(2)

        def end(membership: Membership = membership, both: threading.Barrier = both) -> None:
            both.wait()
            membership.end("over", dropped=True)

        def listen(
            membership: Membership = membership, both: threading.Barrier = both, calls: list[str] = calls
        ) -> None:
            both.wait()
            membership.call_when_over(calls.append)

        threads = [threading.Thread(target=end), threading.Thread(target=listen)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        membership.end("over again", dropped=True)
        assert calls == ["over"]


def test_a_child_forked_during_a_callback_can_use_the_membership() -> None:
    """With a lock the child would wait for ever: the thread that holds it does not exist there."""
    membership, in_callback, may_return = member(), threading.Event(), threading.Event()

    def callback(_: str) -> None:
        in_callback.set()
        may_return.wait()

    membership.call_when_over(callback)
    thread = threading.Thread(target=membership.end, args=("over",), kwargs={"dropped": True})
    thread.start()
    in_callback.wait()
    pid = os.fork()
    if pid == 0:
        told: list[str] = []

        def ask() -> None:
            membership.call_when_over(told.append)
            membership.listeners.notify()
            os._exit(0 if told == ["over"] else 2)

        threading.Thread(target=ask, daemon=True).start()
        time.sleep(30)
        os._exit(1)
    may_return.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
