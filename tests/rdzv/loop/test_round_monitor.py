"""The end of a member's round: the events that end it, and the outcome for the member."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

import rdzv
from rdzv.core.round import Round
from rdzv.core.round_life import Ending, EndKind, MemberPhase, NextAfterWork
from rdzv.core.state import Closed, Head, Phase, Progress
from rdzv.core.stopping import RoundStop
from rdzv.core.stuck.step_log import StepLog
from rdzv.loop.round_monitor import RoundMonitor
from rdzv.membership import Membership
from rdzv.testing import ClusterNode, cluster
from store.calls import run_synchronously

ROUND = Round(number=7, term=1, size=3, buckets=1, host="h", port=1, in_steps=True)


GONE = Progress(phase=Phase.TRAINING, round=7, departed=1, departed_ids=("b",), live=2)
ALL_HERE = Progress(phase=Phase.TRAINING, round=7, live=3)
LOST_ONE = Progress(phase=Phase.TRAINING, round=7, lost=1, lost_ids=("b",), live=2)
MEETS_AGAIN = ALL_HERE.replace(live=2)  # one has sent a new record
AT_ONCE, FOR_NEWCOMERS = RoundStop(round=7, decided=True), RoundStop(round=7, decided=True, for_newcomers=True)
AT_SIX, ASKED = RoundStop(round=7, decided=True, step=6), RoundStop(round=7)
CLOSING, GIVEN_UP = Closed(reason="done"), Closed(reason="broken", given_up=True)


@pytest.mark.parametrize(
    ("head", "begun", "member", "kind"),
    [
        ({"progress": ALL_HERE}, None, {}, None),
        ({"progress": LOST_ONE}, 4, {}, EndKind.LOST),
        ({"progress": GONE}, 4, {}, EndKind.LEFT),
        ({"progress": MEETS_AGAIN}, 4, {}, EndKind.LEFT),
        # A member that waits after the agreement for one in a later step has skipped a check, which is its own error.
        ({"progress": GONE, "stop": AT_SIX}, 4, {}, None),
        ({"progress": GONE.replace(left_early=True), "stop": AT_SIX}, 4, {}, EndKind.LEFT),
        ({"progress": MEETS_AGAIN, "stop": AT_SIX}, 4, {}, None),
        ({"progress": MEETS_AGAIN, "stop": ASKED}, 4, {}, EndKind.LEFT),
        ({"stop": ASKED}, None, {}, None),
        ({"stop": AT_ONCE}, None, {}, EndKind.AGREED),
        ({"stop": AT_ONCE}, None, {"lets_newcomers_wait": True}, EndKind.AGREED),
        ({"stop": FOR_NEWCOMERS}, None, {}, EndKind.AGREED),
        ({"stop": FOR_NEWCOMERS}, None, {"lets_newcomers_wait": True}, None),
        ({"stop": AT_ONCE}, 4, {}, EndKind.CLOSED),
        ({"stop": AT_ONCE}, 4, {"phase": MemberPhase.AT_END}, EndKind.AGREED),
        ({"closed": CLOSING}, None, {}, EndKind.CLOSED),
        ({"closed": CLOSING}, 4, {}, None),
        ({"closed": CLOSING}, 4, {"phase": MemberPhase.AT_END}, EndKind.CLOSED),
        ({"closed": CLOSING, "stop": AT_SIX}, None, {}, None),
        ({"closed": GIVEN_UP}, 4, {}, EndKind.CLOSED),
        ({"progress": ALL_HERE}, 4, {"phase": MemberPhase.AT_END}, None),
        ({"progress": MEETS_AGAIN}, 4, {"phase": MemberPhase.AT_END}, EndKind.AGREED),
        ({"progress": MEETS_AGAIN}, 4, {"phase": MemberPhase.FAILED}, None),
        # It calls no `check`: it has no agreed step to leave at, and the others have left.
        ({"progress": MEETS_AGAIN, "stop": AT_SIX}, None, {}, EndKind.AGREED),
        ({"progress": ALL_HERE, "stop": AT_SIX}, None, {}, None),
    ],
)
def test_what_ends_a_round(
    head: dict[str, Any], begun: int | None, member: dict[str, Any], kind: EndKind | None
) -> None:
    membership = Membership(round=ROUND, rank=0, arrival=3, beats=StepLog(7, lambda: 0.0, expected=True))
    ended: list[Ending] = []
    RoundMonitor(cast("Any", SimpleNamespace(node_id="a")), membership, ended.append, **member).start()
    if begun is not None:
        membership.gate.try_begin_step(begun)
    membership.update(Head(round=ROUND, **head))
    assert [ending.kind for ending in ended] == ([] if kind is None else [kind])
    assert all(ending.node_ids == ("b",) for ending in ended if head.get("progress") in (GONE, LOST_ONE))


@pytest.mark.parametrize(
    ("progress", "live"),
    [
        (None, False),
        (ALL_HERE, False),
        (ALL_HERE.replace(live=2), False),
        (ALL_HERE.replace(live=1), True),
        (ALL_HERE.replace(live=0), True),
        (ALL_HERE.replace(live=1, lost=1), False),
        (ALL_HERE.replace(live=1, departed=1), False),
    ],
)
def test_the_others_live_once_all_have_come_back(progress: Progress | None, live: bool) -> None:
    membership = Membership(round=ROUND, rank=0, arrival=3, beats=StepLog(7, lambda: 0.0, expected=True))
    membership.head = Head(progress=progress)
    assert RoundMonitor(cast("Any", None), membership, lambda _: None)._have_others_rejoined() is live


LOST = Ending(kind=EndKind.LOST, reason="lost: b", node_ids=("b",))
AGREED = Ending(kind=EndKind.AGREED, reason="1 waits to join")


class Driven:
    """A `RoundMonitor` over a scripted store, driven as by blocking callers: no call waits.

    Attributes:
        life: The life.
        did: The calls in the node's loop, and the release, in order.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_first: bool = False, size: int = 3, news: bool = False
    ) -> None:
        self.did: list[str] = []
        self.told: list[Ending] = []
        membership = Membership(
            round=ROUND.replace(size=size), rank=0, arrival=3, beats=StepLog(7, lambda: 0.0, expected=True)
        )
        self.monitor = RoundMonitor(
            cast("Any", SimpleNamespace(node_id="a", run_id="job")), membership, self.told.append
        )

        async def be_first(how: str = "") -> bool:
            self.did.append(f"claim {how}".strip())
            return is_first

        async def await_news() -> bool:
            self.did.append("await news")
            if news:
                self.monitor.note_ending(LOST)
            return news

        async def note(*_: object) -> bool:
            self.did.append("accuse_unknown_member")
            return True

        async def leave() -> None:
            self.did.append("leave")

        monkeypatch.setattr(self.monitor, "_leave", leave)
        monkeypatch.setattr(self.monitor, "claim_end", be_first)
        monkeypatch.setattr(self.monitor, "_wait_for_possible_loss", await_news)
        monkeypatch.setattr("rdzv.loop.round_monitor.accuse_unknown_member", note)

    def on_work_end(self, failure: BaseException | str | None) -> NextAfterWork:
        async def in_node(work: Any) -> bool:
            return bool(await work)

        async def release() -> None:
            self.did.append("release")

        return run_synchronously(self.monitor.on_work_end(failure, in_node=in_node, release=release))


HUNG_UP = OSError("peer has hung up")
ALL = ["claim", "accuse_unknown_member", "release", "await news"]


@pytest.mark.parametrize(
    ("failure", "ending", "more", "outcome", "did", "has_failed"),
    [
        (None, LOST, {}, NextAfterWork.MEET_AGAIN, [], True),
        (None, AGREED, {}, NextAfterWork.MEET_AGAIN, [], False),
        (rdzv.RoundChanged("over"), AGREED, {}, NextAfterWork.MEET_AGAIN, [], False),
        (rdzv.MembersLostError("b"), None, {}, NextAfterWork.MEET_AGAIN, [], True),
        (HUNG_UP, LOST, {}, NextAfterWork.MEET_AGAIN, [], True),
        (KeyboardInterrupt(), LOST, {}, NextAfterWork.RAISE, [], True),
        (HUNG_UP, None, {}, NextAfterWork.MEET_AGAIN, ["claim"], True),
        (HUNG_UP, AGREED, {}, NextAfterWork.MEET_AGAIN, ["claim"], True),
        (HUNG_UP, None, {"is_first": True, "size": 1}, NextAfterWork.RAISE, ["claim", "leave"], False),
        (HUNG_UP, None, {"is_first": True}, NextAfterWork.RAISE, [*ALL, "leave"], False),
        (HUNG_UP, None, {"is_first": True, "news": True}, NextAfterWork.MEET_AGAIN, ALL, True),
        (HUNG_UP, AGREED, {"is_first": True, "news": True}, NextAfterWork.MEET_AGAIN, ALL, True),
        (ExceptionGroup("", [HUNG_UP]), None, {"is_first": True}, NextAfterWork.RAISE, [*ALL, "leave"], False),
        ("it exited", None, {"is_first": True, "size": 1}, NextAfterWork.RAISE, ["claim it exited", "leave"], False),
    ],
)
def test_the_outcome_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException | str | None,
    ending: Ending | None,
    more: dict[str, Any],
    outcome: NextAfterWork,
    did: list[str],
    has_failed: bool,
) -> None:
    driven = Driven(monkeypatch, **more)
    if ending is not None:
        driven.monitor.note_ending(ending)
    assert driven.on_work_end(failure) is outcome
    assert (driven.did, driven.monitor.has_failed) == (did, has_failed)


def test_the_first_ending_counts_unless_a_departure_follows_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(monkeypatch)
    monitor, told = driven.monitor, driven.told
    for ending in (AGREED, Ending(kind=EndKind.AGREED, reason="b to leave")):
        monitor.note_ending(ending)
        assert (monitor.ending, monitor.has_ended_abruptly, told) == (AGREED, False, [AGREED])
    for ending in (LOST, Ending(kind=EndKind.CLOSED, reason="enough"), AGREED):
        monitor.note_ending(ending)
        assert (monitor.ending, monitor.has_ended_abruptly, told) == (LOST, True, [AGREED, LOST])


def test_an_ending_is_announced_once_even_if_two_threads_race(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(300):
        driven, both = Driven(monkeypatch), threading.Barrier(2)

        def end(driven: Driven = driven, both: threading.Barrier = both) -> None:
            both.wait()
            driven.monitor.note_ending(Ending(kind=EndKind.AGREED, reason="1 waits to join"))

        threads = [threading.Thread(target=end) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(driven.told) == 1


@pytest.mark.virtual_time
def test_a_member_paused_while_it_waits_for_news_reads_them_before_it_ends() -> None:
    """Regression: its time was over as soon as it continued, so a survivor ended with the error of a killed peer."""
    fails: list[int] = []

    async def train(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url):
            async with round:
                while round.number or node.index not in fails:  # noqa: ASYNC110  on virtual time, polling costs nothing
                    await anyio.sleep(0.01)
                raise OSError("connection closed by peer")

    with cluster(3, seed=0, min_nodes=2) as town:
        town.run(train)
        town.advance(5)
        town.kill(2)
        fails.append(0)
        town.advance(0.02)
        town.pause(0, 5)
        town.advance(20)
        assert [one.world_size for one in town.rounds] == [3, 2]
