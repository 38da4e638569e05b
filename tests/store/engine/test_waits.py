"""Waits are found by every key that bears on them, and nothing is left of those that are over."""

from __future__ import annotations

from store import when
from store.engine.waits import WAIT_OVERHEAD, Parked, Waits, wait_bytes
from store.messages import Event


def parked(*keys: str, missing: str, fence: str | None = None) -> Parked:
    conditions = () if fence is None else (when.exists(fence),)
    return Parked(keys=keys, names=frozenset(keys), missing=set(missing), when=conditions)


def put(key: str) -> Event:
    return Event(kind="put", revision=1, key=key)


def deletion(key: str) -> Event:
    return Event(kind="delete", revision=1, key=key)


def test_a_change_stirs_the_waits_that_it_bears_on_and_no_others() -> None:
    waits = Waits()
    waits.add((1, 1), parked("a", "b", missing="ab"), cost=10)
    waits.add((1, 2), parked("c", missing="c", fence="f"), cost=10)
    assert waits.stirred([put("x")]) == {}
    assert list(waits.stirred([put("a")])) == [(1, 1)]
    assert list(waits.stirred([deletion("f")])) == [(1, 2)]
    assert waits._parked[1, 1].missing == {"b"}
    assert waits._parked[1, 2].missing == {"c"}, "what a condition is about is not waited for"


def test_a_key_that_goes_again_is_missing_again_and_all_changes_of_a_revision_are_noted_first() -> None:
    waits = Waits()
    waits.add((1, 1), parked("a", "b", missing="b"), cost=10)
    stirred = waits.stirred([deletion("a"), put("b")])
    assert [one.missing for one in stirred.values()] == [{"a"}]
    assert [one.missing for one in waits.stirred([put("a")]).values()] == [set()]


def test_what_a_peer_has_parked_is_counted_until_it_is_over() -> None:
    waits = Waits()
    for number in range(3):
        waits.add((1, number), parked("a", missing="a", fence="f"), cost=100)
    waits.add((2, 0), parked("a", missing="a"), cost=7)
    assert (len(waits), waits.of(1), waits.bytes_of(1), waits.bytes_of(2)) == (4, 3, 300, 7)
    waits.remove((1, 1))
    assert (1, 1) not in waits
    assert (1, 2) in waits
    assert waits.bytes_of(1) == 200
    waits.peer_closed(1)
    waits.peer_closed(1)
    assert (len(waits), waits.of(1), waits.bytes_of(1)) == (1, 0, 0)
    waits.remove((2, 0))
    assert (waits._parked, waits._on, waits._by) == ({}, {}, {})


def test_a_wait_costs_its_keys_and_what_its_conditions_expect() -> None:
    assert wait_bytes(["a", "bb"], []) == 2 * WAIT_OVERHEAD + 3
    assert wait_bytes(["a"], [when.value("k") == bytes(50), when.exists("k")]) == 3 * WAIT_OVERHEAD + 3 + 50
