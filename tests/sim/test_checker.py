"""The checker against a store that breaks a promise, one event at a time."""

from typing import Any

import pytest

from rdzv.core.decision import Rules
from rdzv.core.keys import Keys
from rdzv.core.ranks import survivors_first
from rdzv.core.round import Member, Participant, Round
from rdzv.core.state import Closed, NodeRecord, Phase, Progress
from store.messages import Event
from tests.sim.checker import Checker, Violation

KEYS = Keys(prefix="/p", run_id="r")


class StillLife:
    """A world in which no time passes and nothing goes wrong."""

    disturbed_until = 0.0
    replay = "nothing"
    now = 1.0

    def say(self, what: str) -> None:
        """Drop the line."""


class Books:
    """A checker with events made by hand."""

    def __init__(self, *nodes: str, needed: int = 2, capacity: int = 2, unit: int = 1) -> None:
        """Begin a term that `nodes`, if there are any, arrive in."""
        rules = Rules(needed=needed, capacity=capacity, unit=unit, last_call=1.0, order=survivors_first)
        self.checker = Checker(StillLife(), KEYS, rules)
        self.revision = 0
        self.arrivals: dict[str, int] = {}
        if nodes:
            self.put(KEYS.coordinator, b"a")
        self.arrive(*nodes)

    def put(self, key: str, value: bytes) -> int:
        self.revision += 1
        event = Event(kind="put", revision=self.revision, key=key, value=value, create_revision=self.revision)
        self.checker.take((event,))
        return self.revision

    def arrive(self, *nodes: str, left: bool = False) -> None:
        for node_id in nodes:
            record = NodeRecord(node_id=node_id, incarnation="1", address=node_id, port=1, left=left)
            self.arrivals[node_id] = self.put(KEYS.node(node_id), record.pack())

    def complete(self, *names: str, number: int = 0, ranks: tuple[int, ...] = (0, 1), host: str = "a") -> None:
        term = self.checker.term
        members = [
            Member(node_id=name, rank=rank, arrival=self.arrivals[name])
            for name, rank in zip(names, ranks, strict=True)
        ]
        roster = [Participant(node_id=one.node_id, rank=one.rank, address=one.node_id) for one in members]
        self.put(KEYS.ranks(number, term, 0), Member.pack_all(members))
        self.put(KEYS.roster(number, term, 0), Participant.pack_all(roster))
        self.put(KEYS.round, Round(number=number, term=term, size=len(names), buckets=1, host=host, port=1).pack())


def test_the_checker_accepts_a_correct_round() -> None:
    books = Books("a", "b")
    books.complete("a", "b")
    (committed,) = books.checker.rounds.values()
    assert committed.ranks == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"ranks": (0, 0)}, "ranks are"),
        ({"ranks": (1, 2)}, "ranks are"),
        ({"host": "elsewhere"}, "does not meet at"),
        ({"number": -1}, "came after round"),
    ],
)
def test_the_checker_refuses_a_round_that_is_wrong(broken: dict[str, object], said: str) -> None:
    books = Books("a", "b")
    with pytest.raises(Violation, match=said):
        books.complete("a", "b", **broken)  # type: ignore[arg-type]


def test_the_checker_refuses_sizes_that_were_not_agreed_on() -> None:
    books = Books("a", "b", "c", capacity=4, unit=2)
    with pytest.raises(Violation, match="not 2 to 4 by 2"):
        books.complete("a", "b", "c", ranks=(0, 1, 2))


def test_the_checker_refuses_a_member_that_is_leaving() -> None:
    books = Books("a", needed=1)
    books.arrive("b", left=True)
    with pytest.raises(Violation, match="took in arrival"):
        books.complete("a", "b")


def test_the_checker_refuses_a_round_after_the_closing() -> None:
    books = Books("a", "b")
    books.put(KEYS.closed, Closed(reason="").pack())
    with pytest.raises(Violation, match="after the run was closed"):
        books.complete("a", "b")


def test_the_checker_refuses_a_round_while_a_member_of_the_last_remains() -> None:
    books = Books("a", "b")
    books.complete("a", "b")
    books.arrive("c", "d")
    with pytest.raises(Violation, match="remained in round 0"):
        books.complete("c", "d", number=1, host="c")


def test_the_checker_refuses_a_second_completion_of_a_round() -> None:
    books = Books("a", "b")
    books.complete("a", "b")
    books.arrive("a", "b")
    with pytest.raises(Violation, match="round 0 came after round 0"):
        books.complete("a", "b")


@pytest.mark.parametrize(
    "later",
    [
        {"lost": 0, "lost_ids": ()},
        {"lost": 1, "lost_ids": ("b",)},
        {"departed": 0, "departed_ids": ()},
        {"departed_ids": ("d",)},
    ],
)
def test_the_checker_refuses_a_report_that_takes_back_a_loss(later: dict[str, Any]) -> None:
    books = Books()
    first = Progress(phase=Phase.TRAINING, round=0, lost=1, lost_ids=("a",), departed=1, departed_ids=("c",))
    books.put(KEYS.progress, first.pack())
    books.put(KEYS.progress, first.replace(lost=2, lost_ids=("a", "b")).pack())
    with pytest.raises(Violation, match="takes back"):
        books.put(KEYS.progress, first.replace(**later).pack())


def test_the_checker_accepts_a_report_of_another_round() -> None:
    books = Books()
    books.put(KEYS.progress, Progress(phase=Phase.TRAINING, round=0, lost=1, lost_ids=("a",)).pack())
    books.put(KEYS.progress, Progress(phase=Phase.TRAINING, round=1).pack())


def test_the_checker_refuses_a_node_with_another_rank() -> None:
    books = Books("a", "b")
    books.complete("a", "b")
    (committed,) = books.checker.rounds.values()
    books.checker.learned("a", committed.round, 0, committed.arrivals["a"])
    with pytest.raises(Violation, match="a has rank 1"):
        books.checker.learned("a", committed.round, 1, committed.arrivals["a"])
