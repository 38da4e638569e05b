"""Operations, step by step on an engine without a network: every race can be arranged, every error distinguished."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from datetime import timedelta
from typing import Any, Generic, TypeVar

import pytest

from rdzv.errors import QueueEmptyError, RendezvousConnectionError, RoundSupersededError, SharedStoreTimeoutError
from rdzv.shared_store.fencing import ANSWER_TIMEOUT, FencedCall, MembershipQueries
from rdzv.shared_store.operations import MARK, Operations
from store import when
from store.engine.engine import Engine
from store.errors import ConditionFailed, ConnectionLost, LimitExceeded, StoreError, StoreTimeoutError
from store.messages import Condition, Delete, Guarded, List, Put, Request, Response, Target, Transact, Wait
from store.protocol.connection import error_of

T = TypeVar("T")
PEER = 1


class Table(Operations):
    """An engine, a clock that only the test moves, and operations to run on them."""

    lease = None

    def __init__(self, *fence: Condition) -> None:
        self.engine = Engine(store_id="store")
        self.engine.connect(PEER, session_id=b"session", now=0.0)
        self.now = 0.0
        self.reason: str | None = None
        self._ids = itertools.count(1)
        self._names = itertools.count(1)
        self.prefix, self._fence = "/r/", fence
        self._company = MembershipQueries(superseded=lambda: self.reason)
        self._timeout_seconds = 10.0

    def _new_fenced_call(self, timeout: timedelta | float | None = None) -> FencedCall:
        assert timeout is None
        return FencedCall(
            asked,
            prefix=self.prefix,
            fence=self._fence,
            company=self._company,
            seconds=self._timeout_seconds,
            now=lambda: self.now,
        )

    def _new_queue_item_name(self) -> str:
        return str(next(self._names))

    def begin(self, operation: Coroutine[Any, Any, T], seconds: float = 10.0) -> Driven[T]:
        self._timeout_seconds = seconds
        return Driven(self, operation)

    def run(self, operation: Coroutine[Any, Any, T], seconds: float = 10.0) -> T:
        return self.begin(operation, seconds).finish()

    def ask(self, request: Request[Any]) -> Response | None:
        applied = self.engine.apply(request, peer=PEER, request_id=next(self._ids), acknowledged=0, now=self.now)
        return applied.response


@types.coroutine
def asked(request: Request[Any], left: float) -> Generator[tuple[Request[Any], float], Response, Response]:
    """Let the driver of the operation answer the request."""
    return (yield request, left)


class Driven(Generic[T]):
    """An operation under way. Its request is made but only sent by `step`, so that others can come first."""

    def __init__(self, table: Table, operation: Coroutine[Any, Any, T]) -> None:
        self._table = table
        self._operation = operation
        self.results: list[T] = []
        self.request: Request[Any]
        self.left: float
        self._go_on(lambda: operation.send(None))

    def step(self) -> None:
        """Send the pending request. A wait that would be parked times out at once."""
        response = self._table.ask(self.request)
        if response is None:
            self._table.now += self.left
            self.fail(StoreTimeoutError("no answer in time"))
            return
        error = error_of(response)
        if error is not None:
            self.fail(error)
        else:
            self._go_on(lambda: self._operation.send(response))

    def fail(self, error: StoreError) -> None:
        """Let the pending request raise this error."""
        self._go_on(lambda: self._operation.throw(error))

    def finish(self) -> T:
        while not self.results:
            self.step()
        return self.results[0]

    def _go_on(self, go_on: Callable[[], tuple[Request[Any], float]]) -> None:
        try:
            self.request, self.left = go_on()
        except StopIteration as done:
            self.results.append(done.value)


# Fences.

FENCE = when.exists("/round"), when.mod_revision("/node") == 2


def member() -> Table:
    table = Table(*FENCE)
    table.ask(Put("/round", b""))
    table.ask(Put("/node", b""))
    return table


def test_requests_are_guarded_by_the_fence_and_transactions_have_it_among_their_conditions() -> None:
    table = member()
    assert table.begin(table.set("a", "1")).request == Guarded(when=FENCE, request=Put("/r/k/a", b"1"))
    transact = table.begin(table.check(["a"])).request
    assert isinstance(transact, Transact) and transact.when == (*FENCE, when.exists("/r/k/a"))
    assert [read.key for read in transact.otherwise] == ["/round", "/node"]


def test_a_transaction_that_fails_for_its_own_reason_is_no_broken_fence() -> None:
    table = member()
    assert table.run(table.check(["a"])) is False
    table.ask(Put("/node", b"again"))
    with pytest.raises(RoundSupersededError, match="mod_revision of '/node' is no longer 2; call next_rendezvous"):
        table.run(table.check(["a"]))


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        (when.mod_revision("/x") == 1, Put("/x", b"1")),
        (when.create_revision("/x") == 1, Delete("/x")),
        (when.value("/x") == b"0", Put("/x", b"1")),
        (when.exists("/x"), Delete("/x")),
        (Condition(key="/y", target=Target.EXISTS, expected=False), Put("/y", b"")),
    ],
)
def test_every_kind_of_condition_is_judged_as_the_store_judges_it(condition: Condition, change: Request[Any]) -> None:
    table = Table(condition)
    table.ask(Put("/x", b"0"))
    assert table.run(table.check(["a"])) is False
    table.ask(change)
    for operation in (table.check(["a"]), table.set("a", "1")):
        with pytest.raises(RoundSupersededError):
            table.run(operation)


def test_nothing_is_sent_once_this_node_is_known_to_be_dropped() -> None:
    table = Table()
    popping = table.begin(table.queue_pop("q"))
    table.reason = "its lease lapsed"
    with pytest.raises(RoundSupersededError, match="its lease lapsed"):
        popping.step()
    with pytest.raises(RoundSupersededError, match="its lease lapsed"):
        table.begin(table.set("a", "1"))


@pytest.mark.parametrize(
    "error",
    [ConnectionLost("interrupted", maybe_applied=True), StoreTimeoutError("late"), ConditionFailed("no longer 7")],
)
def test_every_error_in_a_call_of_a_dropped_node_is_round_superseded(error: StoreError) -> None:
    table = Table()
    waiting = table.begin(table.get("a"))
    table.reason = "its lease lapsed"
    with pytest.raises(RoundSupersededError, match="its lease lapsed") as caught:
        waiting.fail(error)
    assert caught.value.__cause__ is error


# Other errors, and time.


def test_a_barrier_that_all_have_reached_is_passed_though_members_are_lost_as_its_answer_comes() -> None:
    """Regression: the others left at once, and the last one to hear of it got MembersLostError."""
    table = Table()
    first = table.begin(table.barrier("all", 2))
    first.step()  # it has come, and waits
    table.run(table.barrier("all", 2))
    first.fail(StoreTimeoutError("the wait was ended"))
    first.finish()


def test_a_lost_connection_and_a_limit_are_errors_of_their_own() -> None:
    table = Table()
    with pytest.raises(RendezvousConnectionError, match="cannot be reached: nobody"):
        table.begin(table.get("a")).fail(ConnectionLost("nobody listens there", maybe_applied=False))
    with pytest.raises(LimitExceeded, match="too large"):
        table.begin(table.set("a", "1")).fail(LimitExceeded("too large"))


def test_a_missing_answer_is_a_timeout() -> None:
    table = Table()
    with pytest.raises(SharedStoreTimeoutError, match="no answer to Put") as caught:
        table.begin(table.set("a", "1")).fail(StoreTimeoutError("no answer to Put"))
    assert caught.value.timeout == 10.0


def test_waits_get_the_remaining_time_and_other_requests_a_minimum() -> None:
    table = Table()
    waiting = table.begin(table.get("a"), 3.0)
    assert (waiting.request, waiting.left) == (Wait(keys=("/r/k/a",)), 3.0)
    popping = table.begin(table.queue_pop("q"), 3.0)
    table.now = 1.0
    popping.step()
    assert (popping.request, popping.left) == (Wait(keys=("/r/k/q",)), 2.0)
    assert table.begin(table.set("a", "1"), 0.0).left == ANSWER_TIMEOUT


def test_a_wait_without_time_only_checks() -> None:
    table = Table()
    table.run(table.multi_set(["aa", "ab"], ["1", "2"]))
    looking = table.begin(table.wait(["aa", "ab"]), 0.0)
    assert looking.request == List(prefix="/r/k/a", keys_only=True)
    assert looking.finish() is None
    assert table.run(table.multi_get(["ab", "aa", "ab"]), 0.0) == [b"2", b"1", b"2"]
    assert table.run(table.multi_get([]), 0.0) == []


def test_a_key_that_is_made_and_deleted_during_the_check_is_missing() -> None:
    table = Table()
    reading = table.begin(table.get("a"), 0.0)
    table.ask(Put("/r/k/a", b"1"))
    reading.step()
    table.ask(Delete("/r/k/a"))
    with pytest.raises(SharedStoreTimeoutError, match="still missing: 'a'"):
        reading.step()


def test_all_keys_are_missing_if_the_store_does_not_say_which() -> None:
    table = Table()
    waiting = table.begin(table.wait(["a", "b"]), 0.0)
    with pytest.raises(SharedStoreTimeoutError, match=r"'a', 'b' \(2 of 2 keys\)"):
        waiting.fail(StoreTimeoutError("no answer to List"))


# Races.


def test_a_key_made_between_the_steps_of_a_compare_set_is_seen() -> None:
    table = Table()
    swapping = table.begin(table.compare_set("k", "", "new"))
    table.ask(Put("/r/k/k", b""))
    swapping.step()  # it is no longer missing, but empty
    table.ask(Delete("/r/k/k"))
    swapping.step()  # it is no longer empty, but missing
    assert swapping.finish() == b"new"


def test_a_pop_that_loses_the_race_for_an_item_takes_the_next() -> None:
    table = Table()
    for item in "123":
        table.run(table.queue_push("q", item))
    slow = table.begin(table.queue_pop("q"))
    slow.step()
    assert table.run(table.queue_pop("q")) == b"1"
    assert slow.finish() == b"2"


def test_a_pop_that_loses_the_race_for_the_last_item_finds_the_queue_empty() -> None:
    table = Table()
    table.run(table.queue_push("q", "1"))
    slow = table.begin(table.queue_pop("q", block=False))
    slow.step()
    assert table.run(table.queue_pop("q")) == b"1"
    with pytest.raises(QueueEmptyError):
        slow.finish()


def test_a_push_while_the_last_item_is_popped_keeps_the_mark() -> None:
    table = Table()
    table.run(table.queue_push("q", "1"))
    popping = table.begin(table.queue_pop("q"))
    popping.step()
    table.run(table.queue_push("q", "2"))
    assert popping.finish() == b"1"
    assert table.run(table.check(["q"])) is True
    assert table.run(table.queue_pop("q")) == b"2"
    assert table.run(table.check(["q"])) is False


def test_two_pushes_during_a_pop_make_it_look_again() -> None:
    table = Table()
    table.run(table.queue_push("q", "1"))
    popping = table.begin(table.queue_pop("q"))
    popping.step()
    table.run(table.queue_push("q", "2"))
    popping.step()
    table.run(table.queue_push("q", "3"))
    assert popping.finish() == b"1"
    assert table.run(table.queue_len("q")) == 2


def test_a_push_succeeds_while_the_queue_fills_and_empties() -> None:
    table = Table()
    pushing = table.begin(table.queue_push("q", "late"))
    table.run(table.queue_push("q", "1"))
    pushing.step()  # it is not the first item
    table.run(table.queue_pop("q"))
    pushing.step()  # now it is the first item
    pushing.finish()
    assert table.run(table.queue_pop("q")) == b"late"


def test_a_mark_is_no_text_and_no_number() -> None:
    assert MARK.startswith(b"\0")


def test_a_barrier_whose_count_is_deleted_times_out_with_none_arrived() -> None:
    table = Table()
    waiting = table.begin(table.barrier("b", 2), 1.0)
    waiting.step()
    table.ask(Delete("/r/k/b/num_members"))
    with pytest.raises(SharedStoreTimeoutError, match="none of 2 came"):
        waiting.finish()
