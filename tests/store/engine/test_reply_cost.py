"""The memory of a kept reply is at most the predicted cost."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from store import when
from store.engine.sessions import reply_cost, reply_cost_at_most
from store.messages import Add, Append, CompareAndSet, Delete, Get, Guarded, Put, Request, Transact, mutates
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
