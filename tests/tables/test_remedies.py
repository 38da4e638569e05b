"""The advice of each error, followed by the test, solves the problem."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import rdzv.sync
import store.sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Remedy:
    """A wrong call, the error with its advice, and the call that follows the advice."""

    wrong: Callable[[Any], object]
    error: type[Exception]
    advice: str
    then: Callable[[Any], object]


def locked(client: store.sync.Client, name: str) -> int:
    with store.sync.recipes.lock(client, name) as held:
        return held.token


def served(**options: Any) -> str:
    with store.sync.serve("0.0.0.0", **options) as server:
        return server.url


OF_A_STORE = {
    "long key": Remedy(
        lambda it: it.put("k" * 5000, b""), store.LimitExceeded, "use a shorter one", lambda it: it.put("k", b"")
    ),
    "large value": Remedy(
        lambda it: it.put("k", b"x" * 2000),
        store.LimitExceeded,
        "store a reference to it instead",
        lambda it: it.put("k", b"file:///there"),
    ),
    "one key": Remedy(
        lambda it: it.get_many("k"), store.StoreUsageError, r"write \['k'\]", lambda it: it.get_many(["k"])
    ),
    "no expectation": Remedy(
        lambda it: it.compare_and_set("k", b""),
        store.StoreUsageError,
        "exactly one of expected_revision and expected_value",
        lambda it: it.compare_and_set("k", b"", expected_revision=0),
    ),
    "no name": Remedy(lambda it: locked(it, ""), store.StoreUsageError, "give it one", lambda it: locked(it, "a")),
    "open to all": Remedy(
        lambda _: served(), store.StoreUsageError, "give it a token", lambda _: served(token="0123456789abcdef" * 2)
    ),
    "open to all, and meant so": Remedy(
        lambda _: served(), store.StoreUsageError, "or say insecure", lambda _: served(insecure=True)
    ),
}


@pytest.mark.parametrize("remedy", OF_A_STORE.values(), ids=OF_A_STORE)
def test_advice_of_a_store(remedy: Remedy) -> None:
    with (
        store.sync.serve(limits=store.Limits(value_bytes_max=1000)) as server,
        store.sync.connect(server.url) as client,
    ):
        with pytest.raises(remedy.error, match=remedy.advice):
            remedy.wrong(client)
        remedy.then(client)


def test_advice_to_start_the_server_with_a_higher_limit(tmp_path: Any) -> None:
    def put(most: int) -> None:
        limits = store.Limits(value_bytes_max=most)
        with store.sync.serve(limits=limits, data_dir=tmp_path) as server, store.sync.connect(server.url) as client:
            client.put("k", b"x" * 2000)

    with pytest.raises(store.LimitExceeded, match="start the server with a higher limit"):
        put(1000)
    put(4000)


@contextlib.contextmanager
def joined(url: str, **more: Any) -> Iterator[rdzv.sync.RendezvousInfo]:
    settings: dict[str, Any] = {"min_nodes": 1, "is_host": False, "join_timeout": 3, **more}
    with rdzv.sync.connect(url, **settings) as handler:
        yield handler.next_rendezvous()


def join(url: str, **more: Any) -> None:
    with joined(url, **more):
        pass


def with_shared(url: str, work: Callable[[Any], object]) -> None:
    with joined(url) as info:
        info.store.set("value", "1")
        work(info.store)


def read_changes(url: str, *, entered: bool) -> None:
    with rdzv.sync.connect(url, is_host=False) as handler, contextlib.ExitStack() as stack:
        changes = handler.changes()
        if entered:
            stack.enter_context(changes)
        changes.poll(0.1)


def closed(url: str, *, again: bool) -> None:
    with rdzv.sync.connect(url, is_host=False) as handler:
        pass
    if again:
        with rdzv.sync.connect(url, is_host=False) as handler:
            handler.status()
    else:
        handler.status()


def beside_a(url: str, **more: Any) -> None:
    """Let b join while a is in a round alone, and let a meet with it."""
    settings: dict[str, Any] = {"min_nodes": 1, "max_nodes": 2, "is_host": False, "last_call_timeout": 0.1}
    with rdzv.sync.connect(url, node_id="a", **settings) as a, ThreadPoolExecutor() as pool:
        a.next_rendezvous()
        joining = pool.submit(join, url, node_id="b", **{**settings, **more})
        with a.changes() as changes:
            changes.poll(1)
        again = None if joining.done() else pool.submit(a.next_rendezvous)
        joining.result()
        assert again is None or again.result().world_size == 2


def banned(url: str, *, again: bool) -> None:
    with rdzv.sync.connect(url, is_host=False, node_id="operator") as handler:
        handler.ban("a", "its disk is slow")
        if again:
            handler.unban("a")
        join(url, node_id="a")


OF_A_RUN = {
    "banned": Remedy(
        lambda url: banned(url, again=False),
        rdzv.RendezvousRefusedError,
        "rdzv unban lets it in",
        lambda url: banned(url, again=True),
    ),
    "other settings": Remedy(
        lambda url: beside_a(url, node_unit=2), rdzv.RendezvousSettingsError, "give all nodes the same", beside_a
    ),
    "no sizes": Remedy(
        lambda url: join(url, min_nodes=None),
        rdzv.RendezvousSettingsError,
        r"add \?min_nodes=2, say",
        lambda url: join(f"{url}?min_nodes=1", min_nodes=None),
    ),
    "no run": Remedy(
        lambda url: join(url.rpartition("/")[0]), rdzv.RendezvousSettingsError, "write for example .*/job-7", join
    ),
    "a typing error": Remedy(
        lambda url: join(f"{url}?join_timeuot=3"),
        rdzv.RendezvousSettingsError,
        "did you mean join_timeout",
        lambda url: join(f"{url}?join_timeout=3"),
    ),
    "changes": Remedy(
        lambda url: read_changes(url, entered=False),
        rdzv.RendezvousStateError,
        "are entered first",
        lambda url: read_changes(url, entered=True),
    ),
    "closed": Remedy(
        lambda url: closed(url, again=False),
        rdzv.RendezvousStateError,
        "connect again",
        lambda url: closed(url, again=True),
    ),
    "keys and values": Remedy(
        lambda url: with_shared(url, lambda it: it.multi_set(["a", "b"], ["1"])),
        ValueError,
        "give one value for each key",
        lambda url: with_shared(url, lambda it: it.multi_set(["a", "b"], ["1", "2"])),
    ),
    "no queue": Remedy(
        lambda url: with_shared(url, lambda it: it.queue_push("value", "1")),
        ValueError,
        "a key of its own",
        lambda url: with_shared(url, lambda it: it.queue_push("queue", "1")),
    ),
}


@pytest.mark.parametrize("remedy", OF_A_RUN.values(), ids=OF_A_RUN)
def test_advice_of_a_run(remedy: Remedy) -> None:
    with store.sync.serve() as server:
        url = f"{server.url}/job"
        with pytest.raises(remedy.error, match=remedy.advice):
            remedy.wrong(url)
        remedy.then(url)
