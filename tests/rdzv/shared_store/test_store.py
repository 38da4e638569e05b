"""The round's shared store: PyTorch's Store API and semantics, the same in both twins, over a real server."""

from __future__ import annotations

import asyncio
import inspect
import math
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import store
from rdzv.errors import QueueEmptyError, RendezvousConnectionError, RoundSupersededError, SharedStoreTimeoutError
from rdzv.shared_store.fencing import MembershipQueries
from rdzv.shared_store.store import BlockingSharedStore, SharedStore
from store.errors import ConnectionLost
from tests.support.processes import require
from tests.support.twins import TWINS, open_shared_store, until_waits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from store.server.server import Server

    Open = Callable[..., AbstractAsyncContextManager[Any]]

METHODS = (
    *("set", "get", "add", "append", "wait", "check", "compare_set", "delete_key", "num_keys", "list_keys"),
    *("multi_get", "multi_set", "queue_push", "queue_pop", "queue_len", "set_timeout", "timeout", "clone", "barrier"),
)

MISSED = 0.05  # seconds to wait for a key that is never set


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with store.serve() as server:
        yield server


@pytest.fixture
async def observer(server: Server) -> AsyncIterator[store.Client]:
    async with store.connect(server.url) as client:
        yield client


@pytest.fixture(params=TWINS)
def open_store(request: pytest.FixtureRequest, server: Server) -> Open:
    return lambda **arguments: open_shared_store(request.param, server, **arguments)


@pytest.fixture
async def shared(open_store: Open) -> AsyncIterator[Any]:
    async with open_store() as shared:
        yield shared


def test_the_twins_have_the_same_methods_and_arguments() -> None:
    for name in METHODS:
        mine, theirs = (getattr(twin, name) for twin in (SharedStore, BlockingSharedStore))
        if name != "timeout":
            assert str(inspect.signature(mine)) == str(inspect.signature(theirs)), name


# PyTorch's own stores give the same answers.

LATE, EMPTY, WRONG = SharedStoreTimeoutError, QueueEmptyError, TypeError
SHORT = timedelta(milliseconds=50)

DIALOGUE: list[tuple[str, tuple[Any, ...], Any]] = [
    ("set", ("a", "ä"), None),
    ("get", ("a",), "ä".encode()),
    ("set", ("a", b"\x00\xff"), None),
    ("get", ("a",), b"\x00\xff"),
    ("get", ("nope",), LATE),
    ("check", ([],), True),
    ("check", (["a", "a"],), True),
    ("check", (["a", "nope"],), False),
    ("wait", (["a"],), None),
    ("wait", ([],), None),
    ("wait", (["a", "nope"], SHORT), LATE),
    ("add", ("n", 3), 3),
    ("add", ("n", -5), -2),
    ("get", ("n",), b"-2"),
    ("set", ("n", "10"), None),
    ("add", ("n", 1), 11),
    ("append", ("log", "po"), None),
    ("append", ("log", "tato"), None),
    ("get", ("log",), b"potato"),
    ("compare_set", ("c", "", "v"), b"v"),  # the key is missing, and none is expected
    ("compare_set", ("c", "other", "w"), b"v"),
    ("compare_set", ("c", "v", "w"), b"w"),
    ("compare_set", ("c", "", "x"), b"w"),
    ("get", ("c",), b"w"),
    ("compare_set", ("c2", "e", "v"), b"e"),  # the key is missing, and a value is expected
    ("check", (["c2"],), False),
    ("set", ("e", ""), None),
    ("compare_set", ("e", "old", "w"), b""),
    ("compare_set", ("e", "", "w"), b"w"),
    ("get", ("e",), b"w"),
    ("delete_key", ("e",), True),
    ("delete_key", ("e",), False),
    ("multi_set", (["m1", "m2"], ["1", "2"]), None),
    ("multi_get", (["m2", "m1", "m2"],), [b"2", b"1", b"2"]),
    ("multi_get", ([],), []),
    ("multi_get", (["m1", "nope"],), LATE),
    ("queue_len", ("q",), 0),
    ("queue_push", ("q", "1"), None),
    ("queue_push", ("q", "2"), None),
    ("queue_len", ("q",), 2),
    ("queue_pop", ("q",), b"1"),
    ("check", (["q"],), True),
    ("wait", (["q"], SHORT), None),
    ("queue_pop", ("q", False), b"2"),
    ("queue_pop", ("q", False), EMPTY),
    ("queue_len", ("q",), 0),
    ("check", (["q"],), False),
    ("barrier", ("b1", 1), None),
    ("barrier", ("b1", 1, SHORT), None),
    ("barrier", ("b2", 2, SHORT), LATE),
    ("set", ("a", 3), WRONG),
    ("wait", ("ab", SHORT), WRONG),
    ("add", ("n", 1.5), WRONG),
]


async def test_each_call_is_answered_as_by_pytorchs_stores(open_store: Open) -> None:
    async with open_store(timeout=MISSED) as shared:
        for name, arguments, answer in DIALOGUE:
            if answer in (LATE, EMPTY, WRONG):
                with pytest.raises(answer):
                    await getattr(shared, name)(*arguments)
            else:
                assert await getattr(shared, name)(*arguments) == answer, (name, arguments)
        assert [key for key in await shared.list_keys() if key[0] != "b"] == ["a", "c", "log", "m1", "m2", "n"]


@pytest.mark.parametrize("name", ["HashStore", "TCPStore"])
def test_pytorchs_stores_give_the_same_answers(name: str) -> None:
    require("torch")
    import torch.distributed as theirs

    errors = {LATE: theirs.DistStoreError, EMPTY: theirs.QueueEmptyError, WRONG: TypeError}
    shared = theirs.HashStore() if name == "HashStore" else theirs.TCPStore("127.0.0.1", 0, 1, is_master=True)
    shared.set_timeout(timedelta(milliseconds=100))
    for method, arguments, answer in DIALOGUE:
        if answer in (LATE, EMPTY, WRONG):
            with pytest.raises(errors[answer]):
                getattr(shared, method)(*arguments)
        else:
            assert getattr(shared, method)(*arguments) == answer, (method, arguments)


# Values.


async def test_wait_and_multi_get_wait_for_all_their_keys(shared: Any, observer: store.Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        waited = tasks.create_task(shared.wait(["a", "b"]))
        read = tasks.create_task(shared.multi_get(["b", "a", "b"]))
        await until_waits(observer, 2)
        await shared.set("a", "1")
        await until_waits(observer, 2)
        await shared.set("b", "2")
    assert waited.result() is None
    assert read.result() == [b"2", b"1", b"2"]


async def test_a_wait_that_times_out_names_the_missing_keys(shared: Any) -> None:
    await shared.set("here", "x")
    with pytest.raises(SharedStoreTimeoutError) as caught:
        await shared.wait(["here", "nope", "nor this"], timedelta(milliseconds=50))
    assert str(caught.value) == ("wait timed out after 0.05 s, still missing: 'nope', 'nor this' (2 of 3 keys)")
    assert caught.value.keys == ("nope", "nor this") and caught.value.timeout == 0.05
    assert isinstance(caught.value, TimeoutError)


async def test_of_many_missing_keys_a_few_are_named(shared: Any) -> None:
    with pytest.raises(SharedStoreTimeoutError, match=r"'7' and 12 more \(20 of 20 keys\)") as caught:
        await shared.wait([str(number) for number in range(20)], MISSED)
    assert len(caught.value.keys) == 20


async def test_adding_to_a_value_that_is_no_number_is_an_error(shared: Any) -> None:
    await shared.set("n", "junk")
    with pytest.raises(ValueError, match="junk"):
        await shared.add("n", 1)


async def test_concurrent_compare_sets_never_lose_one_another(open_store: Open) -> None:
    async def take_numbers(shared: Any, name: str) -> None:
        taken, seen = 0, b""
        while taken < 10:
            wanted = f"{int(seen.split()[0]) + 1 if seen else 1} {name}".encode()
            seen = await shared.compare_set("n", seen, wanted)
            taken += seen == wanted

    async with open_store() as one, open_store() as other:
        await asyncio.gather(take_numbers(one, "x"), take_numbers(other, "y"), take_numbers(one, "z"))
        assert (await one.get("n")).startswith(b"30 ")


async def test_multi_set_writes_all_at_once(shared: Any, observer: store.Client) -> None:
    await shared.multi_set(["a", "b", "a"], ["1", b"2", "3"])
    entries = await observer.list("/round/k/")
    assert [(entry.key, entry.value) for entry in entries] == [("/round/k/a", b"3"), ("/round/k/b", b"2")]
    assert len({entry.mod_revision for entry in entries}) == 1
    await shared.multi_set([], [])


async def test_keys_are_those_of_this_store_only(open_store: Open) -> None:
    async with open_store(prefix="/one/") as one, open_store(prefix="/two/") as two:
        await one.multi_set(["b", "a/b", ""], ["1"] * 3)
        await two.set("c", "1")
        await one.queue_push("jobs", "1")
        assert (await one.list_keys(), await one.num_keys()) == (["", "a/b", "b"], 3)
        assert (await two.list_keys(), await two.num_keys()) == (["c"], 1)


# Queues.


async def test_queues_whose_names_begin_alike_are_separate(shared: Any) -> None:
    await shared.queue_push("a/b", "1")
    await shared.queue_push("a%2Fb", "2")
    assert [await shared.queue_len(key) for key in ("a", "a/b", "a%2Fb")] == [0, 1, 1]
    assert await shared.queue_pop("a%2Fb", False) == b"2"


async def test_each_item_goes_to_one_popper_and_each_popper_sees_them_in_order(
    open_store: Open, observer: store.Client
) -> None:
    async with open_store() as one, open_store() as other:

        async def pop_until_the_end(shared: Any) -> list[int]:
            popped = []
            while (item := int(await shared.queue_pop("jobs"))) >= 0:
                popped.append(item)
            return popped

        async with asyncio.TaskGroup() as tasks:
            poppers = [tasks.create_task(pop_until_the_end(shared)) for shared in (one, other, one)]
            await until_waits(observer, 3)
            for item in range(40):
                await one.queue_push("jobs", str(item))
            for _ in poppers:
                await other.queue_push("jobs", "-1")
        popped = [popper.result() for popper in poppers]
        assert sorted(item for items in popped for item in items) == list(range(40))
        assert all(items == sorted(items) for items in popped)
        assert not await one.check(["jobs"])
        assert await observer.list("/round/") == []


async def test_a_value_is_no_queue(shared: Any) -> None:
    await shared.set("jobs", "1")
    for attempt in (shared.queue_push("jobs", "2"), shared.queue_pop("jobs")):
        with pytest.raises(ValueError, match="'jobs' holds a value that was set, not a queue"):
            await attempt
    assert await shared.get("jobs") == b"1"


@pytest.mark.parametrize("meddle", ["set", "delete"])
async def test_a_queue_survives_writes_to_its_key(shared: Any, meddle: str) -> None:
    for item in "12":
        await shared.queue_push("jobs", item)
    await (shared.set("jobs", "x") if meddle == "set" else shared.delete_key("jobs"))
    assert [await shared.queue_pop("jobs", False) for _ in "12"] == [b"1", b"2"]
    assert await shared.check(["jobs"]) is (meddle == "set")


# Barriers, timeouts, clones.


async def test_a_barrier_opens_when_all_have_arrived(shared: Any, observer: store.Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(shared.barrier("start", 3)) for _ in range(2)]
        await until_waits(observer, 2)
        assert not any(one.done() for one in waiting)
        await shared.barrier("start", 3)
    assert all(one.done() for one in waiting)
    await shared.barrier("alone", 1)


async def test_a_barrier_that_all_have_passed_leaves_nothing_behind(shared: Any, observer: store.Client) -> None:
    """Regression: it left two keys until the next round, so ten barriers a second filled a store in fourteen hours."""
    before = await observer.count("")
    for step in range(3):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(shared.barrier(f"step/{step}", 3))
    await shared.barrier("alone", 1)
    assert await observer.count("") == before


async def test_a_barrier_that_times_out_names_the_number_of_arrivals(shared: Any) -> None:
    with pytest.raises(SharedStoreTimeoutError, match=r"'start' timed out after 0.05 s: 1 of 3 came"):
        await shared.barrier("start", 3, timedelta(milliseconds=50))


async def test_a_clone_shares_the_keys_but_not_the_timeout(server: Server) -> None:
    async with store.connect(server.url) as client:
        over: list[str] = []
        shared = SharedStore(
            client, prefix="/round/", fence=(), company=MembershipQueries(superseded=lambda: over[0] if over else None)
        )
        assert shared.timeout == timedelta(minutes=5)
        clone = shared.clone()
        clone.set_timeout(1.5)
        shared.set_timeout(timedelta(seconds=2))
        assert (clone.timeout, shared.timeout) == (timedelta(seconds=1.5), timedelta(seconds=2))
        await clone.set("a", "1")
        assert await shared.get("a") == b"1"
        waiting = asyncio.create_task(clone.get("never"))
        await asyncio.sleep(0)
        over.append("it was dropped")
        shared.end_calls()
        for call in (waiting, clone.get("a")):
            with pytest.raises(RoundSupersededError, match="it was dropped"):
                await call


# Error messages for wrong arguments.


@pytest.mark.parametrize(
    ("name", "arguments", "error", "said"),
    [
        ("set", ("a", 3), TypeError, "a value is str or bytes, not 3"),
        ("set", (3, "a"), TypeError, "a key is a str, not 3"),
        ("set", ("\ud800", "a"), ValueError, "UTF-8"),
        ("set", ("a", "\ud800"), ValueError, "UTF-8"),
        ("get", (b"a",), TypeError, "a key is a str, not b'a'"),
        ("add", ("a", 1.5), TypeError, "amount is a whole number, not 1.5"),
        ("add", ("a", 2**63), ValueError, "64 bits"),
        ("wait", ("ab",), TypeError, r"keys is a list, not 'ab'; for a single one write keys=\[...\]"),
        ("wait", (["a"], -1), ValueError, "timeout -1 must be from 0"),
        ("wait", (["a"], math.nan), ValueError, "timeout nan"),
        ("wait", (["a"], 10**400), ValueError, "timeout 1000"),
        ("wait", (["a"], "soon"), TypeError, "timedelta or a number of seconds, not 'soon'"),
        ("check", (None,), TypeError, "keys is a list, not None"),
        ("multi_get", ([1],), TypeError, "a key is a str, not 1"),
        ("multi_set", (["a", "b"], ["1"]), ValueError, "2 keys and 1 values"),
        ("multi_set", (["a"], "1"), TypeError, "values is a list"),
        ("barrier", ("a", 0), ValueError, "world_size=0 must be at least 1"),
        ("barrier", ("a", "2"), TypeError, "world_size is a whole number"),
        ("set_timeout", (True,), TypeError, "not True"),
        ("set_timeout", (timedelta(days=-1),), ValueError, "must be from 0"),
    ],
)
async def test_the_error_for_a_wrong_argument_names_the_fault(
    shared: Any, name: str, arguments: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await getattr(shared, name)(*arguments)


# Errors that end a call.


@pytest.mark.parametrize("twin", TWINS)
async def test_a_lost_store_is_a_connection_error(twin: str) -> None:
    async with AsyncExitStack() as serving:
        server = await serving.enter_async_context(store.serve())
        async with open_shared_store(twin, server, timeout=MISSED) as shared:
            await shared.set("a", "1")
            await serving.aclose()
            with pytest.raises(RendezvousConnectionError, match=r"shared store /round/ cannot be reached"):
                await shared.set("a", "1")


async def test_cancelling_a_caller_is_not_reported_as_superseded(server: Server, observer: store.Client) -> None:
    async with store.connect(server.url) as client:
        shared = SharedStore(client, prefix="/round/", fence=())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shared.get("a"), MISSED)
        await until_waits(observer, 0)


async def test_an_interrupted_client_ends_a_blocking_call_as_superseded(server: Server, observer: store.Client) -> None:
    reasons: list[str] = []

    def superseded() -> str | None:
        return reasons[0] if reasons else None

    async with open_shared_store("blocking", server, company=MembershipQueries(superseded=superseded)) as shared:
        waiting = asyncio.create_task(shared.get("a"))
        await until_waits(observer, 1)
        reasons.append("its lease lapsed")
        shared.blocking._client.interrupt(ConnectionLost("the node was dropped", maybe_applied=False))
        with pytest.raises(RoundSupersededError, match="its lease lapsed; call next_rendezvous again"):
            await waiting
        with pytest.raises(RoundSupersededError, match="its lease lapsed"):
            await shared.set("a", "1")


# A loss of members ends waits.


async def test_an_error_names_the_users_key_without_its_prefix(shared: Any) -> None:
    await shared.set("word", "abc")
    with pytest.raises(store.StoreError, match=r"^'word' holds b'abc', which is no decimal number"):
        await shared.add("word", 1)
    with pytest.raises(store.LimitExceeded, match=r"^the key 'k{20}"):
        await shared.set("k" * 10_000, "")
