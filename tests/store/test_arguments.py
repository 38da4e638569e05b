"""Refused arguments: one table of odd arguments, and the same error from each kind of store, async and blocking."""

import asyncio
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import store
import store.sync
from store import Add, Append, Create, Put, when
from store.errors import LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.messages import Delete, DeleteOlder, Get, KeepAlive, Ping, Revoke, TimeToLive
from store.records import brief
from tests.support.twins import InThreads

KEYS: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda client, key: client.put(key, b""),
    "get": lambda client, key: client.get(key),
    "get_many": lambda client, key: client.get_many([key]),
    "list": lambda client, key: client.list(key),
    "count": lambda client, key: client.count(key),
    "delete": lambda client, key: client.delete(key),
    "delete_prefix": lambda client, key: client.delete_prefix(key),
    "add": lambda client, key: client.add(key, 1),
    "append": lambda client, key: client.append(key, b""),
    "compare_and_set": lambda client, key: client.compare_and_set(key, b"", expected_revision=0),
    "wait": lambda client, key: client.wait([key], timeout=1.0),
    "notes": lambda client, key: client.notes(key),
    "transact": lambda client, key: client.transact(then=[Put(key, b"")]),
    "get and put": lambda client, key: client.transact(then=[Get(key), Put("key", b"")]),
    "delete of several": lambda client, key: client.transact(then=[Delete(key)]),
    "when": lambda client, key: client.put("key", b"", when=[when.exists(key)]),
}
VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda client, value: client.put("value", value),
    "append": lambda client, value: client.append("appended", value),
    "compare_and_set": lambda client, value: client.compare_and_set("set", value, expected_revision=0),
    "expected_value": lambda client, value: client.compare_and_set("set", b"", expected_value=value),
    "transact": lambda client, value: client.transact(then=[Put("done", value)]),
    "create": lambda client, value: client.transact(then=[Create("created", value)]),
}
LEASES: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda client, lease: client.put("leased", b"", lease=lease),
    "compare_and_set": lambda client, lease: client.compare_and_set("leased", b"", expected_revision=0, lease=lease),
    "transact": lambda client, lease: client.transact(then=[Put("leased", b"", lease=lease)]),
    "add": lambda client, lease: client.transact(then=[Add("leased", 1, lease)]),
    "append": lambda client, lease: client.transact(then=[Append("leased", b"", lease)]),
    "create": lambda client, lease: client.transact(then=[Create("leased", b"", lease)]),
    "keep_alive": lambda client, lease: client.call(KeepAlive(lease=lease)),
    "revoke": lambda client, lease: client.call(Revoke(lease=lease)),
    "time_to_live": lambda client, lease: client.call(TimeToLive(lease=lease)),
}
TTLS: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda client, ttl: client.put("passing", b"", ttl=ttl),
    "compare_and_set": lambda client, ttl: client.compare_and_set("passing", b"", expected_revision=0, ttl=ttl),
    "grant": lambda client, ttl: client.grant(ttl),
    "disconnect_ttl": lambda client, ttl: client.grant(5.0, disconnect_ttl=ttl),
    "gone_ttl": lambda client, ttl: client.grant(5.0, gone_ttl=ttl),
}


async def not_needed(client: Any, lease: int) -> None:
    """Call operations on an existing key, which keeps its own lease."""
    await client.append("there", b"")
    for operation in (Append("there", b"", lease), Create("there", b"", lease)):
        await client.transact(then=[operation])


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "amount": lambda client, odd: client.add("sum", odd),
    "expected_revision": lambda client, odd: client.compare_and_set("key", b"", expected_revision=odd),
    "when": lambda client, odd: client.put("key", b"", when=[odd]),
    "then": lambda client, odd: client.transact(then=[odd]),
    "call": lambda client, odd: client.call(odd),
}
PREFIXES = ("list", "count", "delete_prefix", "notes")
PASSED = {
    "put": lambda client, timeout: client.put("timed", b"", timeout=timeout),
    "get": lambda client, timeout: client.get("timed", timeout=timeout),
    "wait": lambda client, timeout: client.wait(["timed"], timeout=timeout),
    "delete_prefix": lambda client, timeout: client.delete_prefix("timed", timeout=timeout),
    "grant": lambda client, timeout: client.grant(5.0, timeout=timeout),
    "notes": lambda client, timeout: client.notes("timed", timeout=timeout),
}
TABLE: list[tuple[dict[str, Callable[[Any, Any], Any]], list[Any], type[StoreError] | type[None]]] = [
    ({name: call for name, call in KEYS.items() if name not in PREFIXES}, [""], StoreUsageError),
    (PASSED, ["1", b"1", math.nan, True, [], 10**400], StoreUsageError),
    (KEYS, [b"bytes", bytearray(b"bytes"), 7, None, "half \udc80 a pair"], StoreUsageError),
    (VALUES, ["text", 7, [1]], StoreUsageError),
    (LEASES, ["1", 1.5, True], StoreUsageError),
    (LEASES, [0, -1, 2**62 + 1, 2**63], LeaseNotFound),
    (LEASES, [2**64, 10**5000], StoreUsageError),
    (TTLS, [0, -1, "1", b"1", math.nan, True, 10**400], StoreUsageError),
    (TTLS, [math.inf], LimitExceeded),
    (OTHERS, ["1", 1.5, True, b"1", Ping], StoreUsageError),
    ({"a lease that is not needed": not_needed}, [0, 2**62 + 1], type(None)),
]


async def look(client: Any) -> None:
    """Make each call with each odd argument; only bytes-like values are accepted."""
    wrong = []
    for calls, arguments, expected in TABLE:
        for name, call in calls.items():
            for odd in arguments:
                try:
                    await call(client, odd)
                    said = type(None).__name__
                except Exception as error:  # noqa: BLE001 - the test compares the errors
                    said = type(error).__name__
                if said != expected.__name__:
                    wrong.append(f"{name} of {brief(odd)}: {said}, not {expected.__name__}")
    assert wrong == []
    for value in (bytearray(b"taken"), memoryview(b"taken")):
        await client.put("taken", value)
        entry = await client.get("taken")
        assert entry is not None
        assert entry.value == b"taken"
    assert await client.get("leased") is None


async def watch(client: Any, prefix: Any) -> None:
    async with client.watch(prefix):
        raise AssertionError(f"it is watched: {prefix!r}")


async def test_odd_prefixes_of_watches_are_refused_by_every_store(url: str) -> None:
    async with store.connect(url) as client:
        for prefix in (b"bytes", 7, None, "half \udc80 a pair"):
            with pytest.raises(StoreUsageError):
                await watch(client, prefix)


async def test_a_call_that_is_refused_is_not_made_after_a_reconnect() -> None:
    """An invalid timeout was detected when the request was in flight, and so it was sent later."""
    async with store.serve() as server, store.connect(server.url) as client:
        with pytest.raises(StoreUsageError):
            await client.put("refused", b"", timeout="1")  # type: ignore[arg-type]
        assert not client._connection.in_flight


async def test_a_deletion_up_to_a_later_revision_than_there_is_does_not_look_like_another_store() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        first = await client.put("a", b"")
        assert (await client.call(DeleteOlder(prefix="a", revision=2**63))).revision == first
        assert await client.get("a") is None


async def test_odd_arguments_are_refused_alike_by_every_store_and_by_both_twins(url: str) -> None:
    """On etcd `put(lease=0)` wrote without a lease, bytearray was refused, and a key of bytes gave AttributeError."""
    async with store.connect(url) as client:
        await look(client)
    with ThreadPoolExecutor(1) as pool, store.sync.connect(url) as blocking:
        await look(InThreads(blocking, pool))


NOWHERE = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *(  # None gave an AttributeError that did not name the argument
            ({"url": odd}, re.escape(repr(odd)))
            for odd in (None, b"tcp://127.0.0.1:29400", 29400, "", "127.0.0.1:29400", "tcp://127.0.0.1:2_9400")
        ),
        *(  # the awaited one raised TypeError, ValueError or OverflowError
            ({"url": NOWHERE, "timeout": odd}, r"timeout is .*; give seconds")
            for odd in (None, "1", b"1", math.nan, True, 10**400)
        ),
        ({"url": NOWHERE, "token": 1}, "is of type int"),
        ({"url": "tcp://a\udc80:1"}, "is no URL"),
    ],
)
async def test_a_wrong_argument_of_a_client_is_refused_alike_by_both_twins(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreUsageError, match=why) as awaited:
        async with store.connect(**arguments):
            pass
    with pytest.raises(StoreUsageError) as blocking, store.sync.connect(**arguments):
        pass
    assert str(awaited.value) == str(blocking.value)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"port": 65536}, "port=65536: give a name, and a port from 0 to 65535"),
        ({"port": True}, "port=True"),
        ({"port": "x"}, "port='x'"),
        ({"host": None}, "host=None"),
        ({"token": 1}, "the token is of type int; give str or bytes"),
        ({"token": "secret\ud800"}, "character 6 of the token is half a character: give other text, or bytes"),
    ],
)
async def test_a_wrong_address_or_token_of_a_server_is_refused_in_words(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreUsageError, match=why):
        async with store.serve(**arguments):
            pass


@pytest.mark.parametrize("opens", [store.serve, lambda: store.connect("tcp://127.0.0.1:1")])
def test_without_a_loop_of_asyncio_the_error_names_the_blocking_twin(opens: Callable[[], Any]) -> None:
    """On trio it was "no running event loop"."""
    with pytest.raises(StoreUsageError, match=r"runs on asyncio.*on trio, use store\.sync in a thread"):
        opens().__aenter__().send(None)


async def test_an_odd_disconnect_ttl_of_a_kept_lease_is_refused_alike_by_both_twins() -> None:
    """The blocking one raised TypeError."""
    odd: Any = "x"
    async with store.serve() as server, store.connect(server.url) as client:
        with pytest.raises(StoreUsageError) as awaited:
            async with client.kept_lease(5, disconnect_ttl=odd, gone_ttl=1.0):
                pass

        def block() -> None:
            with store.sync.connect(server.url) as blocking, blocking.kept_lease(5, disconnect_ttl=odd, gone_ttl=1.0):
                pass

        with pytest.raises(StoreUsageError) as blocked:
            await asyncio.to_thread(block)
    assert str(awaited.value) == str(blocked.value)
