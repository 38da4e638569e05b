"""The named calls, over a fake `call`: what each asks, and what it makes of the answer.

Those who await are asked: the calls that block are made of theirs, and both are tried on each kind of store in
`test_conformance`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from store import when
from store.errors import StoreUsageError
from store.interface import BlockingLease, BlockingStore, BlockingWatch, Lease, Store, Watch
from store.messages import (
    GONE_TTL,
    Add,
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Count,
    Counted,
    Delete,
    DeletePrefix,
    Done,
    Entry,
    Event,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    LeaseState,
    List,
    Listing,
    Ping,
    Pong,
    Put,
    Request,
    Response,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType
    from typing import Self

A = Entry(key="a", value=b"1", create_revision=1, mod_revision=1)


class Fake(Store):
    """A store that answers with what it was given, and notes what it was asked."""

    def __init__(self, answer: Response) -> None:
        self.answer = answer
        self.asked: Any = None
        self.timeout: float | None = None
        self.closed = False
        self.clock = 10.0

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        self.asked, self.timeout = request, timeout
        return self.answer

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True

    def time(self) -> float:
        return self.clock


Call = tuple[str, tuple[Any, ...], dict[str, Any], Request[Any], Response, Any]
CONDITIONS = (when.exists("x"),)

CALLS: list[Call] = [
    ("put", ("a", b"1"), {}, Put("a", b"1"), Written(revision=5), 5),
    ("put", ("a", b"1"), {"ttl": 3.0}, Put("a", b"1", ttl=3.0), Written(revision=5), 5),
    ("put", ("a", b"1"), {"lease": 7}, Put("a", b"1", lease=7), Written(revision=5), 5),
    ("get", ("a",), {}, Get("a"), Found(entry=A), A),
    ("get", ("a",), {}, Get("a"), Found(entry=None), None),
    ("get_many", (["a", "b"],), {}, GetMany(keys=("a", "b")), Listing(entries=(A, None), revision=1), [A, None]),
    ("list", ("a",), {}, List(prefix="a"), Listing(entries=(A,), revision=1), [A]),
    ("list", ("a",), {"keys_only": True}, List(prefix="a", keys_only=True), Listing(entries=(A,), revision=1), [A]),
    ("count", ("a",), {}, Count(prefix="a"), Counted(count=3, revision=1), 3),
    ("delete", ("a",), {}, Delete("a"), Counted(count=1, revision=1), True),
    ("delete", ("a",), {}, Delete("a"), Counted(count=0, revision=1), False),
    ("delete_prefix", ("a",), {}, DeletePrefix(prefix="a"), Counted(count=3, revision=1), 3),
    (
        "compare_and_set",
        ("a", b"2"),
        {"expected_revision": 0, "lease": 7},
        CompareAndSet(key="a", value=b"2", expected_revision=0, lease=7),
        CompareAndSetResult(succeeded=False, entry=A),
        CompareAndSetResult(succeeded=False, entry=A),
    ),
    (
        "compare_and_set",
        ("a", b"2"),
        {"expected_value": b"", "ttl": 3.0},
        CompareAndSet(key="a", value=b"2", expected_value=b"", ttl=3.0),
        CompareAndSetResult(succeeded=True, entry=A),
        CompareAndSetResult(succeeded=True, entry=A),
    ),
    ("add", ("a", 2), {}, Add("a", 2), Added(value=5, revision=1), 5),
    ("append", ("a", b"2"), {}, Append("a", b"2"), Added(value=5, revision=1), 5),
    (
        "transact",
        (),
        {"when": CONDITIONS, "then": [Put("a", b"")], "otherwise": iter([Get("a")])},
        Transact(when=CONDITIONS, then=(Put("a", b""),), otherwise=(Get("a"),)),
        TransactionResult(succeeded=True, results=(5,), revision=5),
        TransactionResult(succeeded=True, results=(5,), revision=5),
    ),
    ("wait", (iter(["a"]),), {}, Wait(keys=("a",)), Listing(entries=(A,), revision=1), [A]),
    ("ping", (), {}, Ping(), Pong(revision=1), pytest.approx(0.0, abs=10.0)),  # seconds; the fakes answer at once
    ("stats", (), {}, Stats(), Figures(figures={"keys": 3}), {"keys": 3}),
]
GUARDED = ["put", "delete", "delete_prefix", "compare_and_set", "add", "append", "wait"]


def again(call: Call) -> Call:
    """The same call, with iterators that are fresh."""
    name, args, kwargs, request, answer, result = call
    if name == "wait":
        args = (iter(["a"]),)
    if name == "transact":
        kwargs = {**kwargs, "otherwise": iter([Get("a")])}
    return name, args, kwargs, request, answer, result


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
async def test_a_call_asks_what_it_says_and_gives_what_was_answered(call: Call) -> None:
    for timeout in ({}, {"timeout": 7.0}):
        name, args, kwargs, request, answer, result = again(call)
        fake = Fake(answer)
        assert await getattr(fake, name)(*args, **kwargs, **timeout) == result
        assert fake.asked == request
        assert fake.timeout == timeout.get("timeout")


@pytest.mark.parametrize("call", [call for call in CALLS if call[0] in GUARDED], ids=lambda call: call[0])
async def test_a_write_or_a_wait_can_be_guarded(call: Call) -> None:
    name, args, kwargs, request, answer, _ = again(call)
    fake = Fake(answer)
    await getattr(fake, name)(*args, **kwargs, when=list(CONDITIONS))
    assert fake.asked == Guarded(when=CONDITIONS, request=request)


@pytest.mark.parametrize("expected", [{}, {"expected_revision": 0, "expected_value": b""}])
async def test_a_compare_and_set_without_exactly_one_expectation_is_a_value_error(expected: dict[str, Any]) -> None:
    fake = Fake(Done())
    with pytest.raises(StoreUsageError) as caught:
        await fake.compare_and_set("a", b"", **expected)
    assert isinstance(caught.value, ValueError)
    assert fake.asked is None


async def test_one_string_is_not_taken_for_several_keys() -> None:
    fake = Fake(Done())
    for call in (fake.wait, fake.get_many):
        with pytest.raises(StoreUsageError):
            await call("key")
    assert fake.asked is None


async def test_a_lease_knows_what_was_granted_and_can_be_put_on() -> None:
    fake = Fake(Granted(lease=7, ttl=2.0))
    lease = await fake.grant(1.5, disconnect_ttl=1.0)
    assert fake.asked == Grant(ttl=1.5, disconnect_ttl=1.0, gone_ttl=GONE_TTL)
    assert (lease.id, lease.ttl) == (7, 2.0)
    await lease.keep_alive(timeout=3.0)
    assert (fake.asked, fake.timeout) == (KeepAlive(lease=7), 3.0)
    fake.answer = Done()
    await lease.revoke(timeout=4.0)
    assert (fake.asked, fake.timeout) == (Revoke(lease=7), 4.0)
    fake.answer = LeaseState(remaining=1.25, ttl=2.0, keys=())
    assert await lease.time_to_live(timeout=5.0) == 1.25
    assert (fake.asked, fake.timeout) == (TimeToLive(lease=7), 5.0)
    fake.answer = Written(revision=1)
    await fake.put("a", b"", lease=lease)
    assert fake.asked == Put("a", b"", lease=7)


async def test_leaving_the_context_hangs_up() -> None:
    seen = []
    async with Fake(Done()) as fake:
        seen.append(fake.closed)
    seen.append(fake.closed)
    assert seen == [False, True]


BATCHES = [
    [Event(kind="put", revision=1, key="a"), Event(kind="put", revision=1, key="b")],
    [],
    [Event(kind="synced", revision=1)],
]


class FakeWatch(Watch):
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    async def batches(self) -> AsyncIterator[list[Event]]:
        for batch in BATCHES:
            yield batch


class BlockingFakeWatch(BlockingWatch):
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def batches(self) -> Iterator[list[Event]]:
        yield from BATCHES


async def test_a_watch_gives_the_events_of_its_batches_one_by_one() -> None:
    flat = [event for batch in BATCHES for event in batch]
    async with FakeWatch() as watch:
        assert [event async for event in watch] == flat
    with BlockingFakeWatch() as blocking:
        assert list(blocking) == flat


def named_calls(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(kind, callable)
        if not name.startswith("_")
        and name not in ("aclose", "close", "end_waits", "interrupt", "register")  # a task is cancelled instead
        and name not in ("bound_pauses", "fail", "on_connection")  # who blocks is in a call, and hears it there
    }


@pytest.mark.parametrize(
    ("awaited", "blocking"), [(Store, BlockingStore), (Lease, BlockingLease), (Watch, BlockingWatch)]
)
def test_the_twins_have_the_same_names_and_arguments(awaited: type, blocking: type) -> None:
    one, other = named_calls(awaited), named_calls(blocking)
    assert one.keys() == other.keys()
    for name in one:
        assert inspect.signature(one[name]).parameters == inspect.signature(other[name]).parameters, (
            f"{name} differs between the twins"
        )
