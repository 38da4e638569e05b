"""The checker convicts histories that no order explains, and only those."""

from typing import Any

import pytest

from tests.support.linearizability import (
    UNANSWERED,
    Add,
    CompareAndSet,
    Compared,
    Delete,
    Get,
    Operation,
    Presence,
    Put,
    RegisterInput,
    RegisterModel,
    UndecidedError,
    assert_linearizable,
    check,
)


def op(call: float, returned: float | None, input: RegisterInput, output: Any = None) -> Operation:
    if returned is None:
        output = UNANSWERED
    return Operation(client=f"at {call:g}", call=call, returned=returned, input=input, output=output)


CREATED = Compared(succeeded=True, value=b"me")

REJECTED = {
    "a stale read": [op(0, 1, Put("k", b"old")), op(2, 3, Put("k", b"new")), op(4, 5, Get("k"), b"old")],
    "a write that comes and goes": [
        op(0, 1, Put("k", b"old")),
        op(2, 9, Put("k", b"new")),
        op(3, 4, Get("k"), b"new"),
        op(5, 6, Get("k"), b"old"),
    ],
    "a lost update": [
        op(0, 1, Put("k", b"0")),
        op(2, 5, CompareAndSet("k", b"a", b"0"), Compared(succeeded=True, value=b"a")),
        op(2, 5, CompareAndSet("k", b"b", b"0"), Compared(succeeded=True, value=b"b")),
    ],
    "an add applied twice": [op(0, 1, Add("n", 1), 1), op(2, 3, Get("n"), b"2")],
    "an unanswered add applied twice": [op(0, None, Add("n", 1)), op(2, 3, Get("n"), b"2")],
    "a value never written": [op(0, 1, Put("k", b"a")), op(0, 1, Get("k"), b"b")],
    "a success against another value": [
        op(0, 1, Put("k", b"actual")),
        op(2, 3, CompareAndSet("k", b"x", b"expected"), Compared(succeeded=True, value=b"x")),
    ],
    "a failure against the expected value": [
        op(0, 1, Put("k", b"a")),
        op(2, 3, CompareAndSet("k", b"x", b"a"), Compared(succeeded=False, value=b"a")),
    ],
    "a key created twice": [op(0, 5, CompareAndSet("k", b"me", Presence.MISSING), CREATED) for _ in range(2)],
    "a key deleted twice": [op(0, 1, Put("k", b"a")), *(op(2, 5, Delete("k"), True) for _ in range(2))],
    "a sum of what is no number": [op(0, 1, Put("k", b"text")), op(2, 3, Add("k", 1), 1)],
    "an effect before its call": [op(0, 1, Get("k"), b"a"), op(2, None, Put("k", b"a"))],
    "an unanswered write that comes and goes": [
        op(0, None, Put("k", b"a")),
        op(1, 2, Get("k"), b"a"),
        op(3, 4, Get("k"), None),
    ],
    "more than all unanswered adds": [*(op(0, None, Add("n", 1)) for _ in range(12)), op(1, 2, Get("n"), b"13")],
}

UNCERTAIN = [op(1, 2, Put("k", b"a")), op(0, None, CompareAndSet("k", b"b", Presence.EXISTING))]

ACCEPTED = {
    "nothing": [],
    "a read beside a write that sees it": [op(0, 5, Put("k", b"new")), op(3, 4, Get("k"), b"new")],
    "a read beside a write that does not": [op(0, 5, Put("k", b"new")), op(3, 4, Get("k"), None)],
    "a touch, which is an overlap": [op(0, 3, Get("k"), b"a"), op(3, 4, Put("k", b"a"))],
    "writes in the order that reads need": [
        op(0, 9, Put("k", b"first called")),
        op(1, 9, Put("k", b"second called")),
        op(2, 3, Get("k"), b"second called"),
        op(4, 5, Get("k"), b"first called"),
    ],
    "a late effect": [op(0, None, Put("k", b"a")), op(5, 6, Get("k"), None), op(7, 8, Get("k"), b"a")],
    "no effect": [op(0, None, Put("k", b"a")), op(1000, 1001, Get("k"), None)],
    "all unanswered adds": [*(op(0, None, Add("n", 1)) for _ in range(12)), op(1, 2, Get("n"), b"12")],
    "an unanswered compare-and-set that failed": [*UNCERTAIN, op(3, 4, Get("k"), b"a")],
    "an unanswered compare-and-set that succeeded": [*UNCERTAIN, op(3, 4, Get("k"), b"b")],
    "sums out of order": [op(0, 5, Add("n", 1), 2), op(1, 5, Add("n", 1), 1), op(6, 7, Get("n"), b"2")],
    "deleting, and creating again": [
        op(0, 1, Put("k", b"a")),
        op(2, 3, Delete("k"), True),
        op(4, 5, Delete("k"), False),
        op(6, 7, CompareAndSet("k", b"b", Presence.MISSING), Compared(succeeded=True, value=b"b")),
    ],
}


@pytest.mark.parametrize("history", REJECTED.values(), ids=REJECTED)
def test_a_history_that_no_order_explains_is_rejected(history: list[Operation]) -> None:
    assert not check(history, RegisterModel()).linearizable


@pytest.mark.parametrize("history", ACCEPTED.values(), ids=ACCEPTED)
def test_a_history_that_some_order_explains_is_accepted(history: list[Operation]) -> None:
    assert check(history, RegisterModel()).linearizable


def test_the_failing_key_is_named_with_the_longest_explanation_and_the_operations_that_do_not_fit() -> None:
    innocent = op(0, 1, Put("good", b"a"))
    guilty = [op(0, 1, Put("bad", b"a")), op(2, 3, Get("bad"), b"a"), op(4, 5, Get("bad"), b"b")]
    verdict = check([innocent, *guilty], RegisterModel())
    assert {operation.input.key for operation in verdict.unexplained} == {"bad"}
    with pytest.raises(AssertionError, match=r"(?s)at 2 .*which leaves b'a'.*could have come next:.*at 4 "):
        assert_linearizable([innocent, *guilty], RegisterModel())


def test_a_search_that_grows_too_large_is_undecided_rather_than_passed() -> None:
    history = [op(0, 100, Put("k", b"%d" % number)) for number in range(16)]
    with pytest.raises(UndecidedError, match="undecided after"):
        check([*history, op(101, 102, Get("k"), b"nobody's")], RegisterModel(), configurations_max=1000)


def test_half_an_answer_is_no_operation() -> None:
    with pytest.raises(AssertionError, match="half an answer"):
        Operation(client="c", call=0, returned=1, input=Get("k"))
    with pytest.raises(AssertionError, match="before it was called"):
        op(2, 1, Get("k"))
