"""The rendezvous on a real etcd: only the URL differs.

`RDZV_ETCD_NODES` is the number of nodes in a round with more members than a transaction has conditions. Each node takes
a while.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import rdzv
import rdzv.sync
import store
import store.etcd
from rdzv import Closed, MembersLostError, NodesLost, RoundSupersededError
from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from store.etcd import client as client_room
from store.etcd import members as members_room
from store.etcd.rpc.connection import Connection
from tests.guarantees.test_real_processes_handlers import PAUSED, told
from tests.support.etcd import Etcd, serve_etcd
from tests.support.processes import start_python
from tests.support.runs import assert_one_round

pytestmark = pytest.mark.some_here(3)

NODES = int(os.environ.get("RDZV_ETCD_NODES", "130"))

_names = iter(range(10**6))


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with serve_etcd() as served:
        yield served


@pytest.fixture
def url(etcd: Etcd) -> str:
    """Return the URL of a run that no other test uses."""
    return f"{etcd.url}/{next(_names)}"


async def test_the_url_of_torchelastics_documentation_works_unchanged(etcd: Etcd, url: str) -> None:
    run_id = url.rpartition("/")[2]
    url += "?min_workers=1&max_workers=3&last_call_timeout=30&timeout=600"
    async with AsyncExitStack() as stack, store.connect(etcd.url) as client:
        nodes = [
            await stack.enter_async_context(rdzv.connect(url, node_id=name, payload={"name": name})) for name in "abc"
        ]
        infos = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        assert_one_round(infos)
        assert [one.payload for one in await infos[0].participants()] == [
            {"name": one.node_id} for one in sorted(infos, key=lambda info: info.rank)
        ]
        under = f"/torchelastic/p2p/{run_id}/"
        assert await client.count(f"{under}nodes/") == 3
        status = await nodes[0].status()
        assert (status.world_size, len(status.members), status.round) == (3, 3, 0)
        assert all(member.address == "127.0.0.1" for member in status.members)
        async with nodes[1].changes() as changes:
            await nodes[2].set_closed("enough")
            async with asyncio.timeout(30):
                assert await anext(aiter(changes)) == Closed(reason="enough", by="c")
        await stack.aclose()
        assert await client.count(f"{under}nodes/") == 0
        left = [entry.key for entry in await client.list("/torchelastic/p2p//receipts/")]
        of_run = [key for key in left if key.startswith("/torchelastic/p2p//receipts/notes/")]
        assert left == of_run[:1], "nothing is left of clients that have gone but the note on the run's lease"


async def test_members_wait_for_each_others_keys_items_and_barriers(url: str) -> None:
    """The tests of the shared store, and of the client, cover each operation alone."""
    url += "?min_nodes=2"
    async with rdzv.connect(url) as first, rdzv.connect(url) as second, asyncio.timeout(60):
        a, b = (info.store for info in await asyncio.gather(first.next_rendezvous(), second.next_rendezvous()))
        getting, popping = asyncio.create_task(b.multi_get(["x", "y"])), asyncio.create_task(b.queue_pop("q"))
        await a.multi_set(["x", "y"], ["1", "2"])
        assert await getting == [b"1", b"2"]
        await asyncio.gather(*(it.add("n", 1) for it in (a, b) * 3))
        assert await a.get("n") == b"6"
        assert await a.compare_set("new", "", "made") == await b.compare_set("new", "other", "lost") == b"made"
        assert await b.list_keys() == ["n", "new", "x", "y"]
        for item in ("first", "second"):
            await a.queue_push("q", item)
        assert (await popping, await a.queue_pop("q"), await b.queue_len("q")) == (b"first", b"second", 0)
        await asyncio.gather(a.barrier("all", 2), b.barrier("all", 2))


async def test_a_killed_process_is_noticed_and_the_others_meet_again(url: str) -> None:
    url += "?min_nodes=2&max_nodes=3&last_call_timeout=20&ttl=2"
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(rdzv.connect(url, node_id=name)) for name in ("a", "b")]
        joining = [asyncio.create_task(node.next_rendezvous()) for node in nodes]
        child = await stack.enter_async_context(start_python("-c", PAUSED, url))
        await told(child, "in")
        stores = [info.store for info in await asyncio.gather(*joining)]
        child.kill()
        for node in nodes:
            async with node.changes() as changes, asyncio.timeout(30):
                assert await anext(aiter(changes)) == NodesLost(1, ("paused",))
        with pytest.raises(MembersLostError) as missed:
            await stores[0].get("never")
        assert missed.value.node_ids == ("paused",)
        assert {one.node_id: one.why for one in (await nodes[0].status()).missing} == {
            "paused": "nothing was heard of it for its ttl"
        }
        infos = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        assert_one_round(infos)
        assert (infos[0].round, infos[0].world_size) == (1, 2)
        with pytest.raises(RoundSupersededError):
            await stores[0].get("never")


async def test_r22_a_member_that_fails_as_a_peer_has_died_meets_the_others_again(url: str) -> None:
    """Regression: it waited for `disconnect_ttl`, which has no effect on etcd, and ended with the peer's error."""
    url += "?min_nodes=1&max_nodes=2&last_call_timeout=20&ttl=3"
    sizes = []
    async with start_python("-c", PAUSED, url) as child, asyncio.timeout(60):
        async for round in rdzv.rounds(url, node_id="a"):
            async with round:
                sizes.append(round.world_size)
                if round.world_size == 2:
                    child.kill()
                    raise ConnectionResetError("as of a collective with a dead peer")
    assert sizes == [2, 1]


async def test_blocking_handlers_meet_and_share(url: str) -> None:
    url += "?min_nodes=2"

    def node(name: str) -> list[bytes]:
        with rdzv.sync.connect(url, node_id=name) as handler:
            info = handler.next_rendezvous()
            info.store.set(f"from/{info.rank}", name)
            found = info.store.multi_get([f"from/{rank}" for rank in range(info.world_size)])
            info.store.barrier("done", info.world_size)
            return found

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(asyncio.to_thread(node, name) for name in ("a", "b")))
    assert sorted(found[0]) == [b"a", b"b"]
    assert found[0] == found[1]


@pytest.mark.in_ci
async def test_more_members_meet_than_a_transaction_has_conditions(url: str) -> None:
    url += f"?min_nodes={NODES}"
    async with AsyncExitStack() as stack:
        connecting = (stack.enter_async_context(rdzv.connect(url, node_id=f"n{number}")) for number in range(NODES))
        nodes = [await one for one in connecting]
        infos = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        assert_one_round(infos)
        assert len(await infos[0].participants()) == NODES


async def test_an_arrival_costs_two_requests_and_a_round_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a later node. Regression: an arrival took nine and a round one. Connecting takes two and a watch."""
    for name in ("ATTEMPT_ALONE", "ATTEMPT_MOST", "IDLE"):  # no request is repeated because the machine is busy
        monkeypatch.setattr(members_room, name, 600.0)
    # as if each node had a process of its own
    monkeypatch.setattr(client_room, "_get_shared_members", lambda _, make: make())
    asked: dict[Connection, list[str]] = {}
    ask = Connection.ask

    async def heard(self: Connection, method: str, *arguments: Any, **options: Any) -> Any:
        if method != "Lease/LeaseKeepAlive":  # their number depends on the time
            asked.setdefault(self, []).append(method)
        return await ask(self, method, *arguments, **options)

    monkeypatch.setattr(Connection, "ask", heard)
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        connecting = (stack.enter_async_context(rdzv.connect(f"{url}?min_nodes=3", node_id=name)) for name in "abc")
        nodes = [await one for one in connecting]
        observer = await stack.enter_async_context(rdzv.connect(url))
        _, *others = [asked[connection] for connection in list(asked)[:3]]
        meeting = [asyncio.create_task(nodes[0].next_rendezvous())]
        while (await observer.status()).coordinator is None:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.02)
        assert others == [["KV/Range"] * 2] * 2
        infos = await asyncio.gather(*meeting, *(node.next_rendezvous() for node in nodes[1:]))
        assert_one_round(infos)
        assert [some[2:] for some in others] == [["Lease/LeaseGrant", "KV/Txn"]] * 2
        assert_one_round(await asyncio.gather(*(node.next_rendezvous() for node in nodes)))
        assert [some[4:] for some in others] == [["KV/Txn"]] * 2


@pytest.mark.in_ci
async def test_the_nodes_of_a_process_are_one_client_of_the_cluster() -> None:
    """Regression: each node had its own connection and streams, and 300 of them kept an etcd too busy for others."""
    with serve_etcd() as served:

        def streams(method: str) -> float:
            return sum(
                count
                for name, count in served.metrics().items()
                if name.startswith("grpc_server_started_total") and f'grpc_method="{method}"' in name
            )

        url = f"{served.url}/job?min_nodes=40"
        before = streams("Range")
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(rdzv.connect(url, node_id=f"n{number}")) for number in range(40)]
            assert streams("Range") - before == 41, "one to meet the cluster, and one each for what there is"
            for _ in range(2):
                assert_one_round(await asyncio.gather(*(node.next_rendezvous() for node in nodes)))
            assert streams("Watch") == 1
            await asyncio.gather(*(node.aclose() for node in nodes[:20]))
            more = [await stack.enter_async_context(rdzv.connect(url, node_id=f"m{number}")) for number in range(20)]
            assert_one_round(await asyncio.gather(*(node.next_rendezvous() for node in (*nodes[20:], *more))))


@pytest.mark.in_ci
async def test_commands_show_and_close_a_run_on_etcd(url: str) -> None:
    worker = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(0)"
    async with AsyncExitStack() as stack:
        run = ("-m", "rdzv", "run", f"{url}?min_nodes=2", "--no-prefix", "--", sys.executable, "-c", worker)
        launchers = [await stack.enter_async_context(start_python(*run)) for _ in range(2)]
        assert [await launcher.wait(timeout=60) for launcher in launchers] == [0, 0]
        assert sorted(line for launcher in launchers for line in launcher.stdout) == ["0 2", "1 2"]
        ping = await stack.enter_async_context(start_python("-m", "rdzv", "ping", url, "--count", "1"))
        status = await stack.enter_async_context(start_python("-m", "rdzv", "status", "--json", url))
        close = await stack.enter_async_context(start_python("-m", "rdzv", "close", "--create", f"{url}-other"))
        assert [await child.wait() for child in (ping, status, close)] == [0, 0, 0]
        assert "answers in" in ping.output[0]
        assert json.loads(status.output[0])["phase"] == "closed"
        assert "is closed" in close.output[0]


async def test_two_clusters_are_distinguished_and_a_missing_one_is_an_error(url: str) -> None:
    with pytest.raises(RendezvousConnectionError, match="nobody listens"):
        async with rdzv.connect("etcd://127.0.0.1:1/job?min_nodes=1&join_timeout=0.3"):
            pass
    dead, alive = "127.0.0.1:1", url.removeprefix("etcd://")
    async with rdzv.connect(f"etcd://{dead},{alive}?min_nodes=1") as handler:
        assert (await handler.next_rendezvous()).world_size == 1


def test_without_grpc_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in [name for name in sys.modules if name.startswith("store.etcd.")]:
        monkeypatch.delitem(sys.modules, room)
        monkeypatch.delattr(store.etcd, room.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(RendezvousSettingsError, match=r"pip install 'rdzv\[etcd\]'"):
        rendezvous_handler_registry.create_handler(RendezvousParameters.from_url("etcd://head/job?min_nodes=1", {}))
    with pytest.raises(ImportError, match=r"rdzv\[etcd\]"), store.sync.connect("etcd://head"):
        pass


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_r22_waiting_callers_are_told_within_three_seconds_that_the_cluster_is_lost(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    handler_of_logs = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler_of_logs, "emit", lambda _: loop.call_soon_threadsafe(told.set))
    monkeypatch.setattr(logging.getLogger("rdzv.node.link.store_session"), "handlers", [handler_of_logs])
    with serve_etcd() as served:
        async with rdzv.connect(f"{served.url}/job?min_nodes=2") as handler:
            waiting = asyncio.create_task(handler.next_rendezvous())
            await asyncio.sleep(1)
            getattr(served.members[0], how)()
            async with asyncio.timeout(3):
                await told.wait()
            waiting.cancel()
            await asyncio.wait([waiting])
