"""The embedded store: exactly one node starts it. It outlives its own node until the others have disconnected."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import socket
import threading
import time
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import rdzv
import store
from rdzv.backends import bind_address
from rdzv.backends.bind_address import NotResolvedError, PortTakenError
from rdzv.backends.credentials import Credentials
from rdzv.backends.hosting import CALL_TIMEOUT, HostedStore, OneHostStarter, address_to_listen_on, host_if_needed
from rdzv.config.settings import parse
from rdzv.core.state import Dropped
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousTimeoutError, RoundSupersededError
from store.net.address import Address
from store.net.dialing import TcpDialer
from store.net.threads import Flag
from tests.support.processes import free_port, require, start_python
from tests.support.runs import VirtualRun, listen

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.some_here(5)

NODE = """
import asyncio, sys, rdzv
async def main():
    async with rdzv.connect(sys.argv[1], node_id=sys.argv[2]) as handler:
        print("hosting", int(handler.node.hosts_store()), flush=True)
        info = await handler.next_rendezvous()
        print("rank", info.rank, info.world_size, flush=True)
        await info.store.barrier("all", info.world_size)
asyncio.run(main())
"""


def host_of(url: str, **overrides: Any) -> HostedStore | None:
    """Return the store if this process hosts it; None if not, also if the port is already in use."""
    settings = parse(url, overrides, {})
    try:
        return host_if_needed(settings, Credentials(settings), Flag(), threading.Event())
    except PortTakenError:
        if overrides.get("is_host"):
            raise
        return None


async def end(host: HostedStore | None) -> None:
    assert host is not None
    await host.aclose(lambda _: store.connect(host.server.url))


async def test_it_is_started_if_the_url_points_to_this_machine_and_the_port_is_free() -> None:
    port = free_port()
    host = host_of(f"tcp://127.0.0.1:{port}/job")
    async with store.connect(f"tcp://127.0.0.1:{port}") as client:
        assert await client.count("") == 0
        assert host_of(f"tcp://127.0.0.1:{port}/job") is None, "the port is already in use"
        with pytest.raises(PortTakenError):
            host_of(f"tcp://127.0.0.1:{port}/job", is_host=True)
    await end(host)
    assert not can_reach("127.0.0.1", port)


async def test_it_has_the_limits_that_the_node_was_given() -> None:
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    async with rdzv.connect(url, limits=store.Limits(value_bytes_max=5000, keys_max=500)) as handler:
        info = await handler.next_rendezvous()
        with pytest.raises(store.LimitExceeded, match="value_bytes_max is 5000"):
            await info.store.set("k", bytes(5001))


@pytest.mark.parametrize(
    ("url", "where_it_is_a_must"),
    [
        ("tcp://192.0.2.1/job", RendezvousConnectionError),
        ("tcps://127.0.0.1:1/job", RendezvousSettingsError),
        ("tcp://no-such-host.invalid/job", NotResolvedError),
    ],
)
def test_it_is_not_started_elsewhere(url: str, where_it_is_a_must: type[Exception]) -> None:
    assert host_of(url, is_host=False) is None
    with pytest.raises(where_it_is_a_must):
        host_of(url, is_host=True)
    if where_it_is_a_must is NotResolvedError:  # the name may resolve a moment later
        with pytest.raises(NotResolvedError):
            host_of(url)
    else:
        assert host_of(url) is None


def test_an_error_that_keeps_the_local_machine_from_hosting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a port without permission to listen was taken for another machine's, and all waited ten minutes."""

    def forbidden(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "cannot listen on 127.0.0.1 port 80: permission denied")

    monkeypatch.setattr("rdzv.backends.hosting.choose_bind_address", forbidden)
    with pytest.raises(RendezvousConnectionError, match="port 80: permission denied"):
        host_of("tcp://127.0.0.1:80/job")


async def test_it_is_not_opened_to_strangers_unless_told_so() -> None:
    url = f"tcp://0.0.0.0:{free_port()}/job"
    with pytest.raises(RendezvousSettingsError, match="would accept every client"):
        host_of(url, is_host=True)
    await end(host_of(url, is_host=True, insecure=True))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0"])
async def test_an_address_that_every_machine_takes_for_its_own_is_refused_unless_insisted_on(host: str) -> None:
    """Two machines began two jobs under one URL."""
    url = f"tcp://{host}:{free_port()}/job"
    with pytest.raises(RendezvousSettingsError, match=r"stands for any machine, .*write a name or an address"):
        host_of(url, insecure=True, min_nodes=1, max_nodes=2)
    await end(host_of(url, insecure=True, min_nodes=1, max_nodes=1))
    await end(host_of(url, insecure=True, min_nodes=1, max_nodes=2, is_host=True))


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_an_address_that_refuses_or_is_silent_is_another_machines(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine may be still starting, and then it would start a store of its own."""
    monkeypatch.setattr(bind_address, "ANSWERS_WITHIN", 0.3)
    port, loopback = free_port(), int(socket.AF_INET)
    with socket.socket() as other, ExitStack() as pending:
        other.bind(("127.0.0.7", 0))
        if how == "is silent":  # a full queue of connections: further ones are not answered
            other.listen(0)
            for _ in range(4):
                waiting = pending.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(other.getsockname())
        addresses = [(loopback, ("127.0.0.1", port))], [(loopback, other.getsockname())]
        monkeypatch.setattr(bind_address, "split_own_addresses", lambda *_: addresses)
        with pytest.raises(
            RendezvousSettingsError, match=r"also names 127\.0\.0\.7.* is_host=1 on one node and is_host=0 on the"
        ):
            host_of(f"tcp://pods.test:{port}/job", insecure=True, min_nodes=1, max_nodes=2)
        assert not can_reach("127.0.0.1", port)
        for more in ({"max_nodes": 1}, {"max_nodes": 2, "is_host": True}):
            await end(host_of(f"tcp://pods.test:{port}/job", insecure=True, min_nodes=1, **more))
    assert caplog.text.count("also names 127.0.0.7, of other machines") == 1, "a lone node is warned"


@pytest.mark.parametrize("closed_by", ["token", "mutual TLS", "insecure", "a server's TLS", ""])
def test_for_a_forwarded_address_the_store_listens_on_all_if_it_is_closed_to_strangers(
    closed_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of a Service, of NAT, or a floating one can be dialled, but not bound."""
    monkeypatch.setattr(bind_address, "split_own_addresses", lambda *_: ([], [(int(socket.AF_INET), ("127.0.0.7", 1))]))
    more: dict[str, Any] = {"token": {"token": "a token of enough bytes"}, "insecure": {"insecure": True}}
    if "TLS" in closed_by:
        require("trustme")
        import trustme

        authority, both = trustme.CA(), str(tmp_path / "both.pem")
        authority.issue_cert("service.test").private_key_and_cert_chain_pem.write_to_path(both)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        more[closed_by] = {
            "cert": both,
            "key": both,
            **({"ca": str(tmp_path / "ca.pem")} if "mutual" in closed_by else {}),
        }
    url = f"tcp{'s' if 'TLS' in closed_by else ''}://service.test:29400/job?is_host=1"
    settings = parse(url, more.get(closed_by, {}), {})
    if closed_by in {"", "a server's TLS"}:
        with pytest.raises(OSError, match="give the run a token or mutual TLS, or say insecure=1"):
            address_to_listen_on(settings, Credentials(settings), ("service.test", 29400))
    else:
        found = address_to_listen_on(settings, Credentials(settings), ("service.test", 29400))
        assert (found.address, found.indirect) == ("", True)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the addresses of the names in `.test`, to be filled by the test. Other names resolve as usual."""
    known: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def look_up(host: str | bytes | None, *arguments: Any, **options: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else host or ""
        if not name.endswith(".test"):
            return resolve(host, *arguments, **options)
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for address in known[name] for found in resolve(address, *arguments, **options)]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return known


def can_reach(address: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, port)) == 0


async def test_the_names_of_this_machine_make_one_store_on_all_its_addresses(names: dict[str, list[str]]) -> None:
    """Regression: a name with two local addresses made two stores. On Debian, a machine's own name is 127.0.1.1."""
    names["head.test"], names["head-ib.test"] = ["127.0.1.1"], ["127.0.2.1"]
    names["round-robin.test"] = ["192.0.2.1", "127.0.2.1"]  # the first address is another machine's, the second is ours
    port = free_port()
    host = host_of(f"tcp://head.test:{port}/job", insecure=True)
    assert can_reach("127.0.1.1", port)
    assert can_reach("127.0.0.1", port), "and so every address"
    for name in ("head-ib", "round-robin"):
        assert host_of(f"tcp://{name}.test:{port}/job", insecure=True) is None
    with pytest.raises(PortTakenError, match="the port is already in use"):
        host_of(f"tcp://head-ib.test:{port}/job", insecure=True, is_host=True)
    await end(host)


async def test_of_several_that_bind_at_once_exactly_one_hosts(names: dict[str, list[str]]) -> None:
    names["head.test"] = ["127.0.1.1"]
    url = f"tcp://head.test:{free_port()}/job"
    found = await asyncio.gather(*(asyncio.to_thread(host_of, url, insecure=True) for _ in range(4)))
    (host,) = [one for one in found if one is not None]
    await end(host)


async def test_a_name_that_is_loopback_here_and_open_to_all_stays_on_loopback_and_says_so(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    names["head.test"] = ["127.0.1.1"]
    port = free_port()
    host = host_of(f"tcp://head.test:{port}/job")
    assert can_reach("127.0.1.1", port)
    assert not can_reach("127.0.0.1", port)
    assert "listens on 127.0.1.1 only" in caplog.text
    await end(host)


async def test_it_waits_a_limited_time_for_connected_clients() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    host = host_of(f"{url}/job", close_timeout=0.5)
    async with store.connect(url) as client:
        closing = asyncio.create_task(end(host))
        await client.put("key", b"value")
        began = time.monotonic()
        await closing
        assert 0.2 < time.monotonic() - began < 60
    host = host_of(f"{url}/job", close_timeout=60)
    async with store.connect(url):
        closing = asyncio.create_task(end(host))
        await asyncio.sleep(0)
        assert not closing.done()
    await asyncio.wait_for(closing, 5)


async def test_being_cancelled_ends_the_wait() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    host = host_of(f"{url}/job", close_timeout=60)
    async with store.connect(url):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(end(host), 0.2)


async def test_a_first_connect_that_fails_leaves_no_store_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the store that it had started was served for ever, and the process could not end."""
    port = free_port()

    async def fail(*_: object) -> None:
        raise RendezvousConnectionError("no")

    monkeypatch.setattr("rdzv.node.link.head_watcher.HeadWatcher.run", fail)
    with pytest.raises(RendezvousConnectionError):
        async with rdzv.connect(f"tcp://127.0.0.1:{port}/job?min_nodes=1&join_timeout=0.3"):
            pass
    assert not can_reach("127.0.0.1", port)


async def test_a_node_cancelled_while_it_starts_the_store_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    inner = host_if_needed
    started = threading.Event()

    def slowly(*arguments: Any, **named: Any) -> HostedStore | None:
        time.sleep(0.3)  # as slow as a DNS query may be
        try:
            return inner(*arguments, **named)
        finally:
            started.set()

    monkeypatch.setattr("rdzv.backends.hosting.host_if_needed", slowly)

    async def node() -> None:
        async with rdzv.connect(f"tcp://127.0.0.1:{port}/job?min_nodes=1"):
            pass

    task = asyncio.create_task(node())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await asyncio.to_thread(started.wait)
    assert not can_reach("127.0.0.1", port)


async def test_a_node_hosts_also_if_its_name_resolves_a_second_late(names: dict[str, list[str]]) -> None:
    url = f"tcp://head.test:{free_port()}/job?min_nodes=1&join_timeout=30&insecure=1"
    asyncio.get_running_loop().call_later(1.0, names.update, {"head.test": ["127.0.0.1"]})
    async with rdzv.connect(url) as handler:
        assert (await handler.next_rendezvous()).world_size == 1


async def test_a_node_with_is_host_warns_if_the_port_turns_out_to_be_taken(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: neither the log nor the error said so."""
    async with store.serve() as server, asyncio.timeout(30):
        address = Address(host="127.0.0.1", port=server.port)
        settings = parse(f"tcp://head.test:{server.port}/job?is_host=1", {}, {})
        hosting = OneHostStarter(
            settings,
            Credentials(settings),
            lambda within: store.Client(TcpDialer(address, None), name="it", timeout=within),
            random.Random(1),
        )
        await hosting.try_to_start()
        names["head.test"] = ["127.0.0.1"]
        while "is_host is set, but" not in caplog.text:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.01)
        await hosting.aclose()
        assert not hosting.is_hosting


@pytest.mark.parametrize("more", ["", "&is_host=1"])
async def test_a_port_that_is_bound_without_a_listener_is_reported_as_in_use(
    more: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: log and error said only that nothing listens there, and not why this node did not host."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        taken = f"the store cannot be started on 127.0.0.1:{port}: .*already in use.* does not answer as a store"
        with pytest.raises(RendezvousConnectionError, match=f"nobody listens there; .*{taken}"):
            async with rdzv.connect(f"tcp://127.0.0.1:{port}/job?min_nodes=1&join_timeout=3{more}"):
                pass
    assert len([one for one in caplog.messages if re.search(taken, one)]) == 1


async def test_a_node_that_has_found_a_store_starts_none_later(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.backends.hosting.TRY_AGAIN_AFTER", (60.0, 60.0))
    async with store.serve() as server:
        asyncio.get_running_loop().call_later(0.5, names.update, {"head.test": ["127.0.0.1"]})
        async with rdzv.connect(f"tcp://head.test:{server.port}/job?min_nodes=1&join_timeout=30") as handler:
            assert (await handler.next_rendezvous()).world_size == 1
        # Closing the handler has cancelled the next look-up of the name, which was due in a minute.


@pytest.mark.usefixtures("names")
async def test_a_name_that_never_resolves_is_named_in_the_error() -> None:
    with pytest.raises(RendezvousConnectionError, match="Name or service not known"):
        async with rdzv.connect("tcp://head.test:1/job?min_nodes=1&join_timeout=0.7"):
            pass


@pytest.mark.in_ci
async def test_of_several_processes_exactly_one_hosts_and_it_may_leave_first() -> None:
    nodes = 6
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes={nodes}"
    async with AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(start_python("-c", NODE, url, f"n{number}")) for number in range(nodes)
        ]
        hosting = [int((await child.line("hosting")).split()[1]) for child in children]
        assert sorted(hosting) == [0] * (nodes - 1) + [1]
        ranks = [(await child.line("rank")).split()[1:] for child in children]
        assert sorted(ranks) == [[str(rank), str(nodes)] for rank in range(nodes)]
        assert [await child.wait() for child in children] == [0] * nodes


async def test_the_store_does_not_linger_for_the_shared_store_of_the_node_that_hosts_it() -> None:
    async with rdzv.connect(f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&close_timeout=20") as handler:
        info = await handler.next_rendezvous()
        await info.store.set("key", "value")
        reading = asyncio.create_task(info.store.get("never"))
        await asyncio.sleep(0)
        with anyio.fail_after(60):
            await handler.aclose()
        with pytest.raises(RoundSupersededError):
            await reading


async def test_the_store_waits_for_members_that_are_still_in_the_round() -> None:
    script = NODE.replace(
        'await info.store.barrier("all", info.world_size)',
        'sys.stdin.close() if info.rank else None; await info.store.wait(["go"], 20) if info.rank else None',
    )
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=2"
    async with start_python("-c", script, url, "host") as host:
        assert await host.line("hosting") == "hosting 1"
        async with rdzv.connect(url, node_id="other", is_host=False) as other:
            info = await other.next_rendezvous()
            await info.store.set("go", "")
            await host.line("rank")
            async with other.changes() as changes:
                async for _ in changes:  # the host has left the round, and its store still serves this node
                    break
            assert (await other.status()).round == 0
        assert await host.wait() == 0


TOLD_WITHIN = 10 + CALL_TIMEOUT + 1  # seconds: the default TTL of a lease, and one call
HOSTED = "if a node hosted this store, it ended with that node's process"


@pytest.mark.virtual_time
async def test_the_death_of_a_store_in_memory_is_reported_within_a_bounded_time() -> None:
    """Members, callers and spares of a store in memory get an error, although a spare's join timeout does not run."""
    async with VirtualRun(min_nodes=2, max_nodes=2, store_gone_timeout=4) as run:
        a, b = run.handler("a"), run.handler("b")
        infos = await run.meet(a, b)
        heard = await listen(run, a)
        spare = await run.join(run.handler("spare"))
        reading = run.start(infos[0].store.get("never"))
        run.kill_store()
        died_at = asyncio.get_running_loop().time()
        calls = [run.start(b.next_rendezvous()), run.start(a.status()), run.start(a.ban("b")), spare]
        await asyncio.wait([*calls, reading])
        assert 4 < asyncio.get_running_loop().time() - died_at < 6
        for task in calls:
            with pytest.raises(RendezvousConnectionError, match="was in memory only, and its process is gone"):
                await task
        with pytest.raises(RoundSupersededError):
            await reading
        assert isinstance(heard.changes[-1], Dropped)


@pytest.mark.virtual_time
async def test_a_cut_network_is_not_reported_as_the_end_of_the_stores_host() -> None:
    """Regression: the error said that the store's node may have died, so operators looked at the wrong machine."""
    async with VirtualRun(min_nodes=1, join_timeout=TOLD_WITHIN / 2) as run:
        (a,) = await run.met("a")
        run.network.partition()
        with pytest.raises(RendezvousConnectionError) as caught:
            await run.start(a.status())
        assert HOSTED not in str(caught.value)
        with pytest.raises((RendezvousConnectionError, RendezvousTimeoutError)) as caught_again:
            await run.start(a.next_rendezvous())
        assert HOSTED not in str(caught_again.value)
        assert "out of reach" in str(caught_again.value) or "away" in str(caught_again.value)
        run.network.heal()


@pytest.mark.virtual_time
async def test_a_last_call_does_not_run_for_ever_when_the_store_has_died() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=4, durable=True) as run:
        parked = await run.join(run.handler("a", last_call_timeout=9999, join_timeout=TOLD_WITHIN / 2))
        run.kill_store()
        died_at = asyncio.get_running_loop().time()
        with pytest.raises(RendezvousTimeoutError, match=HOSTED):
            await parked
        assert asyncio.get_running_loop().time() - died_at < TOLD_WITHIN
