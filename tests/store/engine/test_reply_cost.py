"""The memory of a kept reply is at most the predicted cost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import when
from store.engine.sessions import ENTRY, REPLY, RESULT, reply_cost, reply_cost_at_most
from store.messages import (
    Add,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Delete,
    Entry,
    Failed,
    FailureKind,
    Get,
    Guarded,
    Put,
    Request,
    Response,
    Transact,
    TransactionResult,
    Written,
    mutates,
)
from tests.support.by_hand import Desk

KEYS = st.sampled_from("abc")
VALUES = st.binary(max_size=3000)
WRITES = st.one_of(st.builds(Put, KEYS, VALUES), st.builds(Append, KEYS, VALUES), st.builds(Delete, KEYS))
OPERATIONS = st.lists(st.one_of(WRITES, st.builds(Get, KEYS)), max_size=6).map(tuple)
CONDITIONS = st.lists(st.builds(when.missing, KEYS), max_size=2).map(tuple)
PLAIN = st.one_of(
    WRITES,
    st.builds(Add, KEYS, st.integers(-5, 5)),
    st.builds(CompareAndSet, key=KEYS, value=VALUES, expected_revision=st.integers(0, 3)),
)
MUTATIONS = st.one_of(
    PLAIN,
    st.builds(Transact, when=CONDITIONS, then=OPERATIONS, otherwise=OPERATIONS),
    st.builds(Guarded, when=CONDITIONS, request=PLAIN),
)


@given(st.lists(MUTATIONS, max_size=8))
def test_no_reply_costs_more_than_was_foretold(requests: list[Request[Any]]) -> None:
    desk = Desk()
    for request in requests:
        if not mutates(request):
            continue  # a transaction that only reads
        foretold = reply_cost_at_most(request, desk.engine._keys.entries)
        response = desk.ask(request)
        if type(response).__name__ != "Failed":
            assert reply_cost(response) <= foretold


THERE = Entry(key="ké", value=b"12345", create_revision=1, mod_revision=1)
COST = ENTRY + 4 * len("ké") + 5  # of that entry
EXACTLY: list[tuple[Response, int]] = [
    (Written(revision=7), REPLY),
    (Failed(kind=FailureKind.CONDITION, message="seven"), REPLY + 5),
    (CompareAndSetResult(False, None), REPLY),
    (CompareAndSetResult(True, THERE), REPLY + COST),
    (TransactionResult(True, (), 9), REPLY),
    (TransactionResult(True, (7, None, True, THERE, THERE), 9), REPLY + 5 * RESULT + 2 * COST),
]
AT_MOST: list[tuple[Request[Any], int]] = [
    (Put("k", b"12345"), REPLY),
    (CompareAndSet(key="k", value=b"123", expected_revision=0), REPLY + RESULT + ENTRY + 1 + 3),
    (CompareAndSet(key="ké", value=b"123", expected_revision=0), REPLY + RESULT + COST + ENTRY + 8 + 3),
    (
        Transact(when=(), then=(Put("a", b"12"), Get("ké")), otherwise=()),
        REPLY + 2 * (RESULT + ENTRY) + 1 + 2 + 8 + COST,
    ),
    (Guarded(when=(), request=CompareAndSet(key="k", value=b"", expected_revision=0)), REPLY + RESULT + ENTRY + 1),
]


@pytest.mark.parametrize(("response", "cost"), EXACTLY)
def test_the_cost_of_each_kind_of_reply(response: Response, cost: int) -> None:
    assert reply_cost(response) == cost


@pytest.mark.parametrize(("request_", "cost"), AT_MOST)
def test_the_most_that_the_reply_to_each_kind_of_request_costs(request_: Request[Any], cost: int) -> None:
    assert reply_cost_at_most(request_, {"ké": THERE}) == cost
