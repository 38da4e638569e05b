"""What a call refuses: one table of odd arguments, and the same error of each kind of store, awaited and blocking."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import store
import store.sync
from store import Add, Append, Create, Put, when
from store.errors import LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.messages import KeepAlive, Revoke, TimeToLive
from tests.support.etcd import serve_etcd
from tests.support.twins import InThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "amount": lambda client, odd: client.add("sum", odd),
    "expected_revision": lambda client, odd: client.compare_and_set("key", b"", expected_revision=odd),
    "when": lambda client, odd: client.put("key", b"", when=[odd]),
    "then": lambda client, odd: client.transact(then=[odd]),
}
TABLE: list[tuple[dict[str, Callable[[Any, Any], Any]], list[Any], type[StoreError]]] = [
    (KEYS, [b"bytes", bytearray(b"bytes"), 7, None, "half \udc80 a pair"], StoreUsageError),
    (VALUES, ["text", 7, [1]], StoreUsageError),
    (LEASES, ["1", 1.5, True], StoreUsageError),
    (LEASES, [0, -1, 2**62 + 1, 2**63], LeaseNotFound),
    (TTLS, [0, -1, "1", b"1", math.nan, True], StoreUsageError),
    (TTLS, [math.inf], LimitExceeded),
    (OTHERS, ["1", 1.5, True, b"1"], StoreUsageError),
]


@pytest.fixture(scope="module", params=["embedded", "etcd"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        with store.sync.serve() as server:
            yield server.url
    else:
        with serve_etcd() as etcd:
            yield etcd.url


async def look(client: Any) -> None:
    """Make each call with each odd argument; bytes-like values are taken, and nothing else."""
    wrong = []
    for calls, arguments, expected in TABLE:
        for name, call in calls.items():
            for odd in arguments:
                try:
                    await call(client, odd)
                    said = "nothing"
                except Exception as error:  # noqa: BLE001 - which, is the question
                    said = type(error).__name__
                if said != expected.__name__:
                    wrong.append(f"{name} of {odd!r}: {said}, not {expected.__name__}")
    assert wrong == []
    for value in (bytearray(b"taken"), memoryview(b"taken")):
        await client.put("taken", value)
        entry = await client.get("taken")
        assert entry is not None
        assert entry.value == b"taken"
    assert await client.get("leased") is None


async def test_odd_arguments_are_refused_alike_by_every_store_and_by_both_twins(url: str) -> None:
    """On etcd `put(lease=0)` wrote without a lease, bytearray was refused, and a key of bytes gave AttributeError."""
    async with store.connect(url) as client:
        await look(client)
    with ThreadPoolExecutor(1) as pool, store.sync.connect(url) as blocking:
        await look(InThreads(blocking, pool))


@pytest.mark.parametrize(
    "odd", [None, b"tcp://127.0.0.1:29400", 29400, "", "127.0.0.1:29400", "tcp://127.0.0.1:2_9400"]
)
async def test_a_url_that_is_none_is_named_in_the_error(odd: Any) -> None:
    """Else None was an AttributeError without a hint of which argument it was."""
    with pytest.raises(StoreUsageError) as awaited:
        async with store.connect(odd):
            pass
    with pytest.raises(StoreUsageError) as blocking, store.sync.connect(odd):
        pass
    assert str(awaited.value) == str(blocking.value)
    assert repr(odd) in str(awaited.value)
