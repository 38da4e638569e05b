"""Every kind of store behaves the same: one suite, over the embedded store and a real etcd, async and blocking.

`store.interface` lists the differences of etcd; they are not tested here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import store
import store.sync
from store import when
from store.errors import (
    ConditionFailed,
    ConnectionLost,
    LeaseNotFound,
    LimitExceeded,
    StoreTimeoutError,
    StoreUsageError,
)
from store.messages import Event, Guarded, Wait
from tests.support.twins import InThreads

pytestmark = pytest.mark.some_here(36)

TWINS = ("awaited", "blocking")
THREADS = 32  # more than the concurrent calls of any test

_names = iter(range(10**6))


@contextlib.asynccontextmanager
async def open_client(url: str, twin: str) -> AsyncIterator[Any]:
    """A client of either twin, with awaitable methods."""
    if twin == "awaited":
        async with store.connect(url) as client:
            yield client
        return
    with ThreadPoolExecutor(THREADS) as pool, contextlib.ExitStack() as stack:
        blocking = await asyncio.to_thread(stack.enter_context, store.sync.connect(url))
        try:
            yield InThreads(blocking, pool)
        finally:
            blocking.interrupt(ConnectionLost("the test is over", maybe_applied=False))


@pytest.fixture(params=TWINS)
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Any]:
    async with open_client(url, request.param) as opened:
        yield opened


@pytest.fixture
async def other(url: str) -> AsyncIterator[store.Client]:
    """Another client, always an async one."""
    async with store.connect(url) as opened:
        yield opened


@pytest.fixture
def at() -> str:
    """Return a prefix that no other test has."""
    return f"test-{next(_names)}/"


async def told(watch: Any, *, until: str) -> list[Event]:
    """Return the events of a watch up to one of this kind or key."""
    seen: list[Event] = []
    async with asyncio.timeout(60):
        async for event in watch:
            seen.append(event)
            if until in (event.kind, event.key):
                break
    return seen


async def test_a_put_is_read_back_with_its_revisions(client: Any, at: str) -> None:
    first = await client.put(at + "a", b"1")
    second = await client.put(at + "a", b"\x00\xff")
    entry = await client.get(at + "a")
    assert (entry.key, entry.value, entry.lease) == (at + "a", b"\x00\xff", None)
    assert (entry.create_revision, entry.mod_revision) == (first, second)
    assert second > first


async def test_a_deleted_key_is_made_anew(client: Any, at: str) -> None:
    first = await client.put(at + "a", b"1")
    assert await client.delete(at + "a") is True
    assert await client.delete(at + "a") is False
    again = await client.put(at + "a", b"1")
    assert (await client.get(at + "a")).create_revision == again > first


async def test_keys_may_be_any_text_and_values_empty(client: Any, at: str) -> None:
    key = at + "ä/\x00 €𝄞"
    await client.put(key, b"")
    assert (await client.get(key)).value == b""
    assert [entry.key for entry in await client.list(at)] == [key]


REFUSED: dict[str, tuple[Callable[[Any, str], Any], str]] = {
    "an empty key": (lambda client, at: client.put("", b"1"), "at least one character"),  # noqa: ARG005
    "half a surrogate pair": (lambda client, at: client.put("\ud800", b"1"), "."),  # noqa: ARG005
    "no expectation": (lambda client, at: client.compare_and_set(at, b""), "exactly one"),
    "two expectations": (
        lambda client, at: client.compare_and_set(at, b"", expected_revision=0, expected_value=b""),
        "exactly one",
    ),
    "a key that is written twice": (
        lambda client, at: client.transact(then=[store.Put(at, b"1"), store.Delete(at)]),
        "twice",
    ),
    "no time for a lease": (lambda client, at: client.grant(0.0), "above 0"),  # noqa: ARG005
    "less than no time for a key": (lambda client, at: client.put(at, b"", ttl=-1.0), "above 0"),
    "a time and a lease": (lambda client, at: client.put(at, b"", ttl=5, lease=1), "not both"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_invalid_requests_are_refused_and_write_nothing(client: Any, at: str, what: str) -> None:
    ask, said = REFUSED[what]
    with pytest.raises(StoreUsageError, match=said):
        await ask(client, at)
    assert await client.get(at) is None


async def test_several_keys_are_read_in_the_order_asked(client: Any, at: str) -> None:
    await client.put(at + "a", b"1")
    await client.put(at + "b", b"2")
    found = await client.get_many([at + "b", at + "none", at + "a", at + "b"])
    assert [entry and entry.value for entry in found] == [b"2", None, b"1", b"2"]
    assert await client.get_many([]) == []


async def test_many_keys_are_read_at_once(client: Any, at: str) -> None:
    for first in range(0, 250, 100):
        puts = [store.Put(f"{at}{number:03}", b"%d" % number) for number in range(first, min(first + 100, 250))]
        await client.transact(then=puts)
    names = [f"{at}{number:03}" for number in range(250)]
    assert [entry.value for entry in await client.get_many(names)] == [b"%d" % number for number in range(250)]


async def test_a_listing_is_sorted_and_whole_and_only_of_its_prefix(client: Any, at: str) -> None:
    for name in ("b", "a/2", "a/10", "ä", "Z"):
        await client.put(at + name, b"v")
    await client.put(at[:-1] + "0", b"outside")
    assert [entry.key.removeprefix(at) for entry in await client.list(at)] == ["Z", "a/10", "a/2", "b", "ä"]
    assert await client.count(at) == 5
    assert [entry.value for entry in await client.list(at + "a/", keys_only=True)] == [b"", b""]
    assert await client.delete_prefix(at + "a/") == 2
    assert await client.count(at) == 3
    await client.delete(at[:-1] + "0")
    assert (await client.list(at + "a/"), await client.count(at + "a/")) == ([], 0)
    assert await client.delete_prefix(at + "a/") == 0


async def test_a_prefix_is_deleted_at_one_revision(client: Any, other: store.Client, at: str) -> None:
    for name in "abc":
        await client.put(at + name, b"")
    async with other.watch(at) as watch:
        assert await client.delete_prefix(at) == 3
        async with asyncio.timeout(60):
            batch = await anext(aiter(watch.batches()))
    assert [event.key.removeprefix(at) for event in batch] == ["a", "b", "c"]
    assert len({event.revision for event in batch}) == 1


async def test_a_key_is_created_once(client: Any, at: str) -> None:
    won = await client.compare_and_set(at + "a", b"mine", expected_revision=0)
    lost = await client.compare_and_set(at + "a", b"yours", expected_revision=0)
    assert won.succeeded
    assert not lost.succeeded
    assert won.entry == lost.entry == await client.get(at + "a")
    assert won.entry.value == b"mine"


async def test_a_value_is_replaced_if_it_is_as_expected(client: Any, at: str) -> None:
    assert not (await client.compare_and_set(at + "a", b"2", expected_value=b"")).succeeded
    await client.put(at + "a", b"1")
    assert not (await client.compare_and_set(at + "a", b"2", expected_value=b"0")).succeeded
    assert (await client.compare_and_set(at + "a", b"2", expected_value=b"1")).succeeded
    entry = await client.get(at + "a")
    assert (await client.compare_and_set(at + "a", b"3", expected_revision=entry.mod_revision)).succeeded
    assert not (await client.compare_and_set(at + "a", b"4", expected_revision=entry.mod_revision)).succeeded


async def test_of_many_clients_that_create_a_key_one_wins(client: Any, at: str) -> None:
    tries = [client.compare_and_set(at + "a", b"%d" % number, expected_revision=0) for number in range(16)]
    results = await asyncio.gather(*tries)
    assert sum(result.succeeded for result in results) == 1
    assert len({result.entry for result in results}) == 1


async def test_sums_and_joins_come_back(client: Any, at: str) -> None:
    assert await client.add(at + "n", 5) == 5
    assert await client.add(at + "n", -7) == -2
    assert (await client.get(at + "n")).value == b"-2"
    assert await client.append(at + "s", b"ab") == 2
    assert await client.append(at + "s", b"c") == 3
    assert (await client.get(at + "s")).value == b"abc"


async def test_nothing_is_lost_when_many_add(client: Any, at: str) -> None:
    sums = await asyncio.gather(*(client.add(at + "n", 1) for _ in range(16)))
    assert sorted(sums) == list(range(1, 17))


async def test_adding_to_a_value_that_is_no_number_is_refused(client: Any, at: str) -> None:
    await client.put(at + "n", b"1_0")
    with pytest.raises(StoreUsageError, match="no decimal number"):
        await client.add(at + "n", 1)
    await client.put(at + "n", b"9223372036854775807")
    with pytest.raises(StoreUsageError, match="64 bits"):
        await client.add(at + "n", 1)


async def test_a_transaction_does_all_at_one_revision(client: Any, at: str) -> None:
    await client.put(at + "old", b"0")
    result = await client.transact(
        when=[when.exists(at + "old"), when.missing(at + "a"), when.value(at + "old") == b"0"],
        then=[
            store.Get(at + "old"),
            store.Delete(at + "old"),
            store.Delete(at + "none"),
            store.Put(at + "a", b"1"),
            store.Get(at + "a"),
            store.Add(at + "n", 3),
            store.Append(at + "s", b"xyz"),
        ],
    )
    old, deleted, nothing, put, a, total, length = result.results
    assert result.succeeded
    assert (old.value, deleted, nothing, put, total, length) == (b"0", True, False, result.revision, 3, 3)
    assert a == await client.get(at + "a")
    entries = await client.get_many([at + "a", at + "n", at + "s"])
    assert {entry.mod_revision for entry in entries} == {result.revision}


async def test_a_transaction_whose_conditions_fail_does_the_other_thing(client: Any, at: str) -> None:
    revision = await client.put(at + "a", b"1")
    result = await client.transact(
        when=[when.mod_revision(at + "a") == revision, when.create_revision(at + "a") == revision + 1],
        then=[store.Put(at + "b", b"")],
        otherwise=[store.Get(at + "a"), store.Get(at + "b"), store.Put(at + "c", b"")],
    )
    assert not result.succeeded
    assert [result.results[0].value, result.results[1]] == [b"1", None]
    assert (await client.get(at + "c")).mod_revision == result.results[2]
    assert await client.get(at + "b") is None


async def test_a_transaction_of_as_many_operations_as_the_store_says_it_takes(client: Any, at: str, url: str) -> None:
    most = 126 if url.startswith("etcd") else 200
    puts = [store.Put(f"{at}{number:03}", b"") for number in range(most)]
    absent = [when.missing(put.key) for put in puts]
    assert (await client.transact(when=absent, then=puts)).succeeded
    assert await client.count(at) == most


async def test_a_value_that_is_too_large_is_refused_in_one_sentence(client: Any, at: str, url: str) -> None:
    most = 130 if url.startswith("etcd") else 20_000
    with pytest.raises(LimitExceeded, match="operations_max" if url.startswith("etcd") else "writes_max"):
        await client.transact(then=[store.Get(at) for number in range(most)])
    for size in (1_600_000, 3_000_000) if url.startswith("etcd") else (33 * 1024 * 1024,):
        with pytest.raises(LimitExceeded, match="reference to it"):
            await client.put(at + "a", bytes(size))
    assert await client.get(at + "a") is None


async def test_a_write_whose_condition_fails_writes_nothing(client: Any, at: str) -> None:
    await client.put(at + "fence", b"")
    gone = [when.missing(at + "fence")]
    for attempt in (
        client.put(at + "a", b"", when=gone),
        client.delete(at + "fence", when=gone),
        client.delete_prefix(at, when=gone),
        client.add(at + "a", 1, when=gone),
        client.append(at + "a", b"", when=gone),
        client.compare_and_set(at + "a", b"", expected_revision=0, when=gone),
    ):
        with pytest.raises(ConditionFailed, match=r"exists of .*fence"):
            await attempt
    assert [entry.key for entry in await client.list(at)] == [at + "fence"]


async def test_a_write_whose_condition_holds_is_done(client: Any, at: str) -> None:
    revision = await client.put(at + "fence", b"")
    held = [when.mod_revision(at + "fence") == revision]
    await client.put(at + "a", b"1", when=held)
    assert await client.add(at + "n", 2, when=held) == 2
    assert not (await client.compare_and_set(at + "a", b"2", expected_revision=0, when=held)).succeeded
    assert await client.delete(at + "a", when=held)
    assert await client.delete_prefix(at + "n", when=held) == 1


async def test_reads_are_guarded_too(client: Any, at: str) -> None:
    await client.put(at + "a", b"")
    for request in (store.Get(at + "a"), store.messages.Count(prefix=at), store.messages.List(prefix=at)):
        await client.call(Guarded(when=(when.exists(at + "a"),), request=request))
        with pytest.raises(ConditionFailed):
            await client.call(Guarded(when=(when.missing(at + "a"),), request=request))


async def test_a_wait_ends_when_all_keys_are_there(client: Any, other: store.Client, at: str) -> None:
    waiting = asyncio.create_task(client.wait([at + "a", at + "b"]))
    await other.put(at + "a", b"1")
    await other.put(at + "b", b"2")
    async with asyncio.timeout(60):
        assert [entry.value for entry in await waiting] == [b"1", b"2"]
    assert [entry.value for entry in await client.wait([at + "b"])] == [b"2"]


async def test_a_wait_is_not_over_while_one_key_has_gone_again(client: Any, other: store.Client, at: str) -> None:
    await other.put(at + "a", b"1")
    waiting = asyncio.create_task(client.wait([at + "a", at + "b"]))
    await asyncio.sleep(0.05)
    await other.delete(at + "a")
    await other.put(at + "b", b"2")
    await other.put(at + "a", b"3")
    async with asyncio.timeout(60):
        assert [entry.value for entry in await waiting] == [b"3", b"2"], "it was over while a was not there"


async def test_a_wait_that_is_in_vain_runs_out(client: Any, at: str) -> None:
    with pytest.raises(StoreTimeoutError) as caught:
        await client.wait([at + "a"], timeout=0.1)
    assert "never answered" not in str(caught.value), "nothing is wrong with the store"


async def test_a_guarded_wait_ends_with_its_condition(client: Any, other: store.Client, at: str) -> None:
    await other.put(at + "fence", b"")
    waiting = asyncio.create_task(
        client.call(Guarded(when=(when.exists(at + "fence"),), request=Wait(keys=(at + "a",))))
    )
    await asyncio.sleep(0.1)
    await other.delete(at + "fence")
    async with asyncio.timeout(60):
        with pytest.raises(ConditionFailed):
            await waiting


async def test_a_lease_takes_its_keys_with_it(client: Any, at: str) -> None:
    lease = await client.grant(30)
    ttl = lease.ttl
    assert ttl == 30
    await client.put(at + "a", b"", lease=lease.id)
    await client.compare_and_set(at + "b", b"", expected_revision=0, lease=lease.id)
    await client.transact(then=[store.Add(at + "c", 1, lease=lease.id), store.Put(at + "d", b"", lease=lease.id)])
    assert {entry.lease for entry in await client.list(at)} == {lease.id}
    state = await client.call(store.messages.TimeToLive(lease=lease.id))
    assert list(state.keys) == [at + "a", at + "b", at + "c", at + "d"]
    assert 25 < state.remaining <= 30
    assert state.ttl == 30
    await client.call(store.messages.KeepAlive(lease=lease.id))
    await client.call(store.messages.Revoke(lease=lease.id))
    assert await client.list(at) == []


async def test_the_note_of_a_keep_alive_is_listed_with_the_keys_on_the_lease(client: Any, at: str) -> None:
    lease = await client.grant(5)
    for key in ("nodes/a", "others/b"):
        await client.put(at + key, b"", lease=lease)
    await client.put(at + "nodes/c", b"")
    await client.call(store.messages.KeepAlive(lease=lease.id, note=b"one"))
    await client.call(store.messages.KeepAlive(lease=lease.id, note=b"two"))
    await client.call(store.messages.KeepAlive(lease=lease.id))
    told = await client.notes(at + "nodes/")
    assert [(one.key.removeprefix(at), one.note) for one in told] == [("nodes/a", b"two"), ("nodes/c", b"")]


async def test_a_lease_that_has_gone_is_not_found(client: Any, at: str) -> None:
    lease = await client.grant(30)
    await client.call(store.messages.Revoke(lease=lease.id))
    for request in (
        store.messages.KeepAlive(lease=lease.id),
        store.messages.Revoke(lease=lease.id),
        store.messages.TimeToLive(lease=lease.id),
        store.Put(at + "a", b"", lease=lease.id),
        store.Append(at + "a", b"", lease=lease.id),
    ):
        with pytest.raises(LeaseNotFound):
            await client.call(request)
    assert await client.get(at + "a") is None


async def test_a_put_without_a_lease_takes_the_key_off_it_and_an_addition_does_not(client: Any, at: str) -> None:
    lease = await client.grant(30)
    await client.put(at + "a", b"1", lease=lease.id)
    await client.put(at + "n", b"1", lease=lease.id)
    await client.put(at + "a", b"2")
    await client.add(at + "n", 1)
    await client.call(store.messages.Revoke(lease=lease.id))
    assert [entry.key for entry in await client.list(at)] == [at + "a"]


async def test_keys_lapse_with_their_lease_or_their_own_time_and_not_before(
    url: str, other: store.Client, at: str
) -> None:
    async with store.connect(url) as client:
        lease = await client.grant(2)
        kept = await client.grant(2)
        began = client.time()
        await client.put(at + "leased", b"", lease=lease)
        await client.put(at + "kept", b"", lease=kept)
        await client.put(at + "own", b"", ttl=2)
        async with other.watch(at, snapshot=True) as watch:
            await told(watch, until="synced")
            await asyncio.sleep(1)
            await kept.keep_alive()
            gone: set[str] = set()
            async with asyncio.timeout(60):
                async for event in watch:
                    assert client.time() - began >= lease.ttl - 0.05
                    gone.add(event.key.removeprefix(at))
                    if len(gone) == 2:
                        break
        assert gone == {"leased", "own"}


async def test_a_watch_begins_with_the_present_keys_and_continues(other: store.Client, client: Any, at: str) -> None:
    await client.put(at + "a", b"1")
    before = await client.put(at + "b", b"2")
    async with other.watch(at, snapshot=True) as watch:
        snapshot = await told(watch, until="synced")
        assert [(event.kind, event.key, event.value) for event in snapshot[:-1]] == [
            ("put", at + "a", b"1"),
            ("put", at + "b", b"2"),
        ]
        assert snapshot[-1].revision >= before
        result = await client.transact(then=[store.Put(at + "c", b"3"), store.Delete(at + "a")])
        async with asyncio.timeout(60):
            batch = await anext(watch.batches())
        assert {(event.kind, event.key, event.revision) for event in batch} == {
            ("put", at + "c", result.revision),
            ("delete", at + "a", result.revision),
        }


@pytest.mark.parametrize("twin", TWINS)
async def test_iteration_left_within_a_revision_goes_on_where_it_was(
    url: str, twin: str, other: store.Client, at: str
) -> None:
    """The rest of the revision was lost."""
    keys = [f"{at}{number}" for number in range(5)]

    def told_blocking() -> list[str]:
        seen = []
        with store.sync.connect(url) as client, client.watch(at, start_revision=revision) as watch:
            seen += [next(iter(watch)).key for _ in range(3)]
            seen += [event.key for event in next(watch.batches())]
            seen += [event.key for event in next(watch.batches())]
        return seen

    async def told_awaited() -> list[str]:
        seen = []
        async with other.watch(at, start_revision=revision) as watch:
            seen += [(await anext(aiter(watch))).key for _ in range(3)]
            seen += [event.key for event in await anext(watch.batches())]
            seen += [event.key for event in await anext(watch.batches())]
        return seen

    revision = (await other.transact(then=[store.Put(key, b"") for key in keys])).revision
    async with asyncio.timeout(60):
        assert await (told_awaited() if twin == "awaited" else asyncio.to_thread(told_blocking)) == keys


async def test_a_watch_without_a_start_reports_changes_after_its_opening(
    other: store.Client, client: Any, at: str
) -> None:
    await client.put(at + "a", b"1")
    async with other.watch(at) as watch:
        revision = await client.put(at + "b", b"2")
        (event,) = await told(watch, until=at + "b")
    assert (event.revision, event.create_revision, event.value) == (revision, revision, b"2")
    assert event.entry == await client.get(at + "b")


async def test_a_watch_starts_at_an_earlier_revision(other: store.Client, client: Any, at: str) -> None:
    await client.put(at + "a", b"1")
    start = await client.put(at + "a", b"2")
    await client.put(at + "a", b"3")
    await client.put(at + "last", b"")
    async with other.watch(at, start_revision=start) as watch:
        assert [event.value for event in await told(watch, until=at + "last")] == [b"2", b"3", b""]


async def test_a_watch_cannot_start_in_the_future(other: store.Client, client: Any, at: str) -> None:
    revision = await client.put(at + "a", b"1")
    with pytest.raises(StoreUsageError, match="cannot start at revision"):
        async with other.watch(at, start_revision=revision + 1_000):
            pass
    with pytest.raises(StoreUsageError, match="not both"):
        other.watch(at, start_revision=1, snapshot=True)


async def test_a_watch_hears_only_of_its_prefix(other: store.Client, client: Any, at: str) -> None:
    async with other.watch(at + "b") as watch:
        for name in ("a", "b", "ba", "c", "b/last"):
            await client.put(at + name, b"")
        assert [event.key for event in await told(watch, until=at + "b/last")] == [at + "b", at + "ba", at + "b/last"]


async def test_a_watch_of_everything_does_not_report_the_clients_own_bookkeeping(other: store.Client, at: str) -> None:
    async with other.watch("", snapshot=True) as watch:
        await told(watch, until="synced")
        await other.put(at + "a", b"1")
        await other.put(at + "b", b"1")
        seen = await told(watch, until=at + "b")
        assert [event.key for event in seen if not event.key.startswith("test-")] == []
    assert await other.count("") == len(await other.list(""))


async def test_a_blocking_watch_ends_when_it_is_closed_from_another_thread(url: str, at: str) -> None:
    def read() -> list[str]:
        with store.sync.connect(url) as blocking, blocking.watch(at, snapshot=True) as watch:
            keys = []
            for event in watch:
                if event.kind == "synced":
                    opened.set_result(watch)
                else:
                    keys.append(event.key)
            return keys

    from concurrent.futures import Future

    opened: Future[Any] = Future()
    reading = asyncio.create_task(asyncio.to_thread(read))
    watch = await asyncio.wrap_future(opened)
    async with store.connect(url) as client:
        await client.put(at + "a", b"")
    await asyncio.sleep(0.2)
    watch.close()
    async with asyncio.timeout(60):
        assert await reading == [at + "a"]


async def test_a_store_reports_its_id_and_its_statistics(client: Any, other: store.Client) -> None:
    revision = await client.put("test-revision", b"")
    assert 0 < await client.ping() < 10
    figures = await client.stats()
    assert figures["revision"] >= revision
    assert figures["store_id"] == other.store_id
    assert other.connected
    assert other.observed_address == "127.0.0.1"


async def test_calls_of_a_closed_client_say_so(url: str, at: str) -> None:
    client = store.connect(url)
    async with client as opened:
        waiting = asyncio.create_task(opened.wait([at + "never"]))
        watch = opened.watch(at)
        await watch.__aenter__()
        reading = asyncio.create_task(told(watch, until="never"))
        await asyncio.sleep(0.1)
    for task in (waiting, reading):
        with pytest.raises(ConnectionLost, match="closed"):
            await task
    with pytest.raises(ConnectionLost, match="closed"):
        await opened.get(at)


async def test_calls_of_an_interrupted_blocking_client_raise_the_given_error(url: str, at: str) -> None:
    async with open_client(url, "blocking") as client:
        waiting = asyncio.create_task(client.wait([at + "never"]))
        await asyncio.sleep(0.1)
        client.blocking.interrupt(ConnectionLost("enough", maybe_applied=False))
        with pytest.raises(ConnectionLost, match="enough"):
            await waiting
        with pytest.raises(ConnectionLost, match="enough"):
            await client.get(at)


async def test_a_cancelled_call_leaves_the_client_as_it_was(url: str, at: str) -> None:
    async with store.connect(url) as client:
        for _ in range(5):
            call = asyncio.create_task(client.put(at + "a", b"1"))
            await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await client.put(at + "a", b"2")
        assert (await client.get(at + "a")).value == b"2"  # type: ignore[union-attr]  # it was just put


async def test_a_missing_server_is_reported_within_the_timeout(url: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(ConnectionLost, match="nobody listens"):
        async with store.connect(f"{scheme}://127.0.0.1:1", timeout=0.3):
            pass
