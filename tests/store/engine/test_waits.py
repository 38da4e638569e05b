"""Waits are found by every key that can end them, and finished ones leave nothing behind."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from store import when
from store.engine import requests
from store.engine.engine import WAITS_AT_ONCE
from store.engine.requests import LOOKS_A_STEP
from store.engine.waits import ParkedWait, Waits
from store.messages import Append, Cancel, Delete, Event, Guarded, Put, Transact, Wait
from tests.support.by_hand import Desk


def parked(*keys: str, missing: str, fence: str | None = None) -> ParkedWait:
    conditions = () if fence is None else (when.exists(fence),)
    return ParkedWait(keys=keys, missing=keys.index(missing), when=conditions)


def put(key: str) -> Event:
    return Event(kind="put", revision=1, key=key)


def test_a_wait_stands_at_one_missing_key_so_that_writing_the_others_costs_nothing() -> None:
    """Each of eight megabytes of waits needed two keys. Each put of one of these keys took 17 ms."""
    waits = Waits()
    for number in range(100):
        waits.add((1, number), parked("often", f"never {number}", missing="often"), cost=10)
    ((standing, key),) = waits.find_affected_waits([put("often")])
    for watcher in standing.pop(key):
        missing = waits.parked[watcher].missing_index({"often"})
        assert missing == 1
        waits.move_to_key(watcher, missing)
    assert waits.find_affected_waits([put("often")]) == []
    ((standing, key),) = waits.find_affected_waits([put("never 7")])
    assert standing[key] == {(1, 7): None}


@pytest.mark.parametrize("popped", ["a", "fence"])
def test_a_wait_whose_key_was_postponed_is_not_registered_any_more(popped: str) -> None:
    waits = Waits()
    waits.add((1, 1), parked("a", missing="a", fence="fence"), cost=10)
    assert waits.is_registered((1, 1))
    ((standing, key),) = waits.find_affected_waits([put(popped)])
    standing.pop(key)
    assert not waits.is_registered((1, 1))


KEYS = st.sampled_from("abc")
WRITES = st.one_of(
    st.builds(Put, KEYS, st.sampled_from([b"1", b"2"])), st.builds(Delete, KEYS), st.builds(Append, KEYS, st.just(b"+"))
)
CONDITIONS = st.one_of(
    st.builds(when.exists, KEYS), st.builds(when.missing, KEYS), KEYS.map(lambda key: when.value(key) == b"1")
)
WAITS = st.builds(lambda keys: Wait(keys=tuple(keys)), st.lists(KEYS, min_size=1, max_size=3))
STEPS = st.one_of(
    WRITES,
    st.lists(WRITES, min_size=1, max_size=3).map(lambda writes: Transact(when=(), then=tuple(writes))),
    WAITS,
    st.builds(lambda condition, wait: Guarded(when=(condition,), request=wait), CONDITIONS, WAITS),
    st.builds(Cancel, target=st.integers(1, 10)),
    st.just("answer some"),
)


class Unhurried(Desk):
    """A desk that checks the waits that a change may end only when a test says so."""

    def do_chores(self) -> None:
        pass


@example([Guarded(when=(when.missing("b"),), request=Wait(keys=("a",))), Put("b", b""), Delete("b"), Put("a", b"")])
@example(
    [
        Guarded(when=(when.missing("b"),), request=Wait(keys=("a", "c"))),
        Put("a", b""),
        Put("b", b""),  # it is checked later, and was not met between two changes
        Delete("b"),
        Put("c", b""),
    ]
)
@given(st.lists(STEPS, max_size=20))
def test_waits_that_are_looked_at_later_are_answered_as_if_at_once(steps: list[Any]) -> None:
    """Writes may come in between: a key that was created and deleted again has existed."""
    desk, unhurried = Desk(), Unhurried()
    cancelled = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.engine.requests.LOOKS_A_STEP", 1)
        for step in steps:
            if step != "answer some":
                patch.setattr("store.engine.engine.WAITS_AT_ONCE", 100)
                answer = desk.ask(step)
                patch.setattr("store.engine.engine.WAITS_AT_ONCE", 0)
                assert unhurried.ask(step) == answer
                if isinstance(step, Cancel):
                    cancelled.add((1, step.target))
            elif unhurried.engine.has_chores:
                unhurried.take(unhurried.engine.do_postponed_work())
        Desk.do_chores(unhurried)
    for watcher in cancelled:  # the cancelled wait may have been answered or not
        answered = desk.answers.pop(watcher, None)
        assert unhurried.answers.pop(watcher, answered) == answered
    assert unhurried.answers == desk.answers
    assert unhurried.engine.figures() == desk.engine.figures()
    for each in (unhurried, desk):
        for key, standing in each.engine._waits._at.items():
            assert key not in each.engine._keys.entries
            assert standing
        assert all(map(each.engine._waits.is_registered, each.engine._waits.parked))
    assert not unhurried.engine.state.past


def test_waits_that_are_to_be_looked_at_later_are_noted_once_however_often_their_key_changes() -> None:
    """With each put of their key, the same thousands of waits were queued once more."""
    desk = Unhurried()
    desk.ask(Put("go", b""), peer=9)
    for number in range(WAITS_AT_ONCE + 1):
        desk.ask(Guarded(when=(when.exists("go"),), request=Wait(keys=("k", "never"))), peer=number % 3)
    desk.ask(Put("k", b""), peer=9)
    for _ in range(10):
        desk.ask(Delete("k"), peer=9)
        desk.ask(Put("k", b""), peer=9)
        desk.ask(Put("go", b""), peer=9)
        assert len(desk.engine.postponed) <= 2, "once for each key at which they stood"
    Desk.do_chores(desk)
    assert len(desk.engine._waits.parked) == WAITS_AT_ONCE + 1
    desk.ask(Put("never", b""), peer=9)
    Desk.do_chores(desk)
    assert len(desk.engine._waits.parked) == 0


def test_a_step_is_as_short_where_much_has_changed_since_its_waits_were_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each later change a wait was checked completely: 16,384 conditions took 4 s in one step."""
    desk = Unhurried()
    fence = tuple(when.mod_revision(f"c/{number}") == 0 for number in range(5000))
    desk.ask(Guarded(when=fence, request=Wait(keys=("k", "never", *(f"x/{number}" for number in range(9))))), peer=9)
    for number in range(WAITS_AT_ONCE):
        desk.ask(Wait(keys=("k", "never")), peer=number % 3)
    desk.ask(Put("k", b""), peer=9)
    assert desk.engine.postponed
    for number in range(10_000):
        desk.ask(Append(f"x/{number % 9}", b"+"), peer=8)
    looks = 0
    all_hold = requests._all_hold

    def counted(when: Any, entries: Any) -> bool:
        nonlocal looks
        looks += 1 + len(when)
        return all_hold(when, entries)

    monkeypatch.setattr(requests, "_all_hold", counted)
    steps = 0
    while desk.engine.postponed:
        before = looks
        desk.take(desk.engine.do_postponed_work())
        assert looks - before <= 2 * len(fence) + 2 * LOOKS_A_STEP
        steps += 1
    assert steps > 1, "the wait was looked at in several steps"
    desk.ask(Put("never", b""), peer=9)
    Desk.do_chores(desk)
    assert len(desk.answers) == WAITS_AT_ONCE + 1


def test_a_change_looks_up_only_its_own_waits_beside_postponed_ones() -> None:
    """Each wait of a change was searched among all postponed ones: 0.9 s beside 50 transactions."""
    desk = Unhurried()

    class Uncounted(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("what is postponed is not searched")

    for number in range(WAITS_AT_ONCE + 1):
        desk.ask(Wait(keys=(f"k/{number}", "b")), peer=1)
    for key in ("a", "b"):
        desk.ask(Wait(keys=(key,)), peer=2)
    desk.ask(Transact(when=(), then=tuple(Put(f"k/{number}", b"") for number in range(WAITS_AT_ONCE + 1))), peer=9)
    heaps = desk.engine.postponed.heaps
    heaps[0] = (heaps[0][0], Uncounted(heaps[0][1]))
    desk.ask(Transact(when=(), then=(Put("a", b""), Put("b", b""))), peer=9)
    assert set(desk.answers) == {(2, 1), (2, 2)}, "these are answered at once"
    Desk.do_chores(desk)
    assert len(desk.answers) == WAITS_AT_ONCE + 3
