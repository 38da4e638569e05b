"""Sockets are quick, notice a dead peer, and are closed in forked children."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import warnings
from collections.abc import Callable

import pytest

import store
from store.net import sockets
from store.net.address import Address
from store.net.dialing import TcpDialer
from tests.support.processes import require, start_python

MIB = 1024 * 1024


class Owner:
    """An object that has a socket."""


def in_child(check: Callable[[], bool]) -> bool:
    """Return the result of `check` in a forked child."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child's coverage is its own
        status = 2
        with contextlib.suppress(BaseException):
            status = 0 if check() else 1
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1), "the child failed"
    return os.waitstatus_to_exitcode(status) == 0


def is_null(number: int) -> bool:
    return os.path.samestat(os.fstat(number), os.stat(os.devnull))


def test_a_connected_socket_does_not_delay_and_notices_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        sockets.set_tcp_options(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_readable_data_is_not_taken_for_data_behind_a_loss() -> None:
    """tests/hosts/test_large_packets.py tests the loss itself: loopback loses nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    acknowledged = (0, False, sockets.SYSTEM_TELLS)
    with ours, theirs:
        assert sockets.unacknowledged(ours) == acknowledged
        theirs.send(b"to be read")
        assert sockets.unacknowledged(ours) == acknowledged
        ours.recv(100)
        assert sockets.unacknowledged(ours) == acknowledged
        assert sockets.unacknowledged(ours, 100) == (100, True, False)
    assert sockets.unacknowledged(None, 100) == (100, True, False)


def test_all_sockets_of_an_owner_are_released() -> None:
    owner = Owner()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sockets.close_in_children(owner, ours, theirs)
        numbers = (ours.fileno(), theirs.fileno())
        assert in_child(lambda: all(map(is_null, numbers)))


def test_a_number_that_has_become_another_files_is_left_alone() -> None:
    class StandIn:
        """A socket as some loops have it: it keeps its number after it was closed."""

        def __init__(self, number: int) -> None:
            self._number = number

        def fileno(self) -> int:
            return self._number

    owner = Owner()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sockets.close_in_children(owner, StandIn(ours.fileno()))
        sockets.forget_sockets(owner)
        sockets.forget_sockets(owner)  # again: nothing left to do
        number = ours.fileno()
        assert in_child(lambda: not is_null(number))


def test_a_socket_whose_owner_is_gone_or_that_is_closed_is_left_alone() -> None:
    owner, gone = Owner(), Owner()
    ours, theirs = socket.socketpair()
    with theirs:
        sockets.close_in_children(owner, ours)
        sockets.close_in_children(gone, theirs)
        ours.close()
        del gone
        gc.collect()
        number = theirs.fileno()
        assert in_child(lambda: not is_null(number))


@pytest.mark.parametrize(
    ("soft", "hard", "refused_above", "expected"),
    [
        (1024, 4096, 10**9, 4096),
        (4096, 4096, 10**9, 4096),
        (256, resource.RLIM_INFINITY, 10**9, 1_048_576),
        (256, resource.RLIM_INFINITY, 245_760, 65_536),  # macOS
        (256, resource.RLIM_INFINITY, 0, 256),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 0, 1_048_576),
        (2_000_000, resource.RLIM_INFINITY, 10**9, 2_000_000),
    ],
)
def test_the_file_limit_is_raised_as_far_as_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, refused_above: int, expected: int
) -> None:
    limits = [soft, hard]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > refused_above:
            raise ValueError("not allowed to raise maximum limit")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert sockets.raise_file_limit() == expected


def close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def test_a_host_of_several_addresses_has_one_port_on_all_of_them() -> None:
    socks = sockets.listen_on("", 0)
    addresses = {family for family, *_ in socket.getaddrinfo(None, 0, flags=socket.AI_PASSIVE)}
    try:
        assert {sock.family for sock in socks} <= addresses
        assert len({sock.getsockname()[1] for sock in socks}) == 1
    finally:
        close(socks)


def test_a_free_port_that_is_taken_on_another_address_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loopback addresses of IPv4 stand in for IPv4 and IPv6, which not every machine has."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    ports: list[int] = []
    bind = sockets._bind_and_listen

    def unlucky(family: int, address: tuple[object, ...]) -> socket.socket | None:
        if address[0] == "127.0.0.2":
            ports.append(int(str(address[1])))
            if len(ports) == 1:
                raise OSError(errno.EADDRINUSE, "taken on this address")
        return bind(family, address)

    monkeypatch.setattr(sockets, "_bind_and_listen", unlucky)
    socks = sockets.listen_on("both", 0)
    try:
        assert [sock.getsockname()[1] for sock in socks] == [ports[1]] * 2
    finally:
        close(socks)


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1 port {port}: ") as caught:
            sockets.listen_on("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(("chosen", "said"), [(True, "choose another port"), (False, "no automatic port")])
def test_a_lack_of_automatic_ports_is_named_only_where_one_was_asked_for(
    chosen: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a server whose own port was taken was told to widen the range of automatic ones."""

    class Taken(socket.socket):
        def bind(self, _: object, /) -> None:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket, "socket", Taken)
    with pytest.raises(OSError, match=said):
        sockets.listen_on("127.0.0.1", 29400 if chosen else 0)


def test_an_address_of_another_machine_is_no_place_to_listen() -> None:
    with pytest.raises(OSError, match=r"'192\.0\.2\.1' is no address of this machine"):
        sockets.listen_on("192.0.2.1", 0)


FORKING_ASYNC = """
import asyncio, os, signal, sys, store

async def main():
    async with store.connect(sys.argv[1]) as client, client.watch("") as watch:
        lease = await client.grant(60.0, disconnect_ttl=0.2)
        await client.put("parent", b"", lease=lease)
        if os.fork() == 0:
            for use in (client.get("a"), client.watch("a").__aenter__(), lease.keep_alive()):
                try:
                    await use
                except store.UsedAfterFork as error:
                    print("child:", error, flush=True)
            print("child", os.getpid(), flush=True)
            signal.pause()
        await client.wait(["never"])

asyncio.run(main())
"""

FORKING_BLOCKING = """
import os, signal, sys, store

with store.sync.connect(sys.argv[1]) as client, client.watch("") as watch:
    lease = client.grant(60.0, disconnect_ttl=0.2)
    client.put("parent", b"", lease=lease)
    if os.fork() == 0:
        for use in (lambda: client.get("a"), client.watch("a").__enter__, lease.keep_alive):
            try:
                use()
            except store.UsedAfterFork as error:
                print("child:", error, flush=True)
        print("child", os.getpid(), flush=True)
        signal.pause()
    client.wait(["never"])
"""


@pytest.mark.parametrize("program", [FORKING_ASYNC, FORKING_BLOCKING], ids=["async", "blocking"])
async def test_a_forked_child_gets_an_error_and_does_not_hide_its_parents_death(program: str) -> None:
    async with (
        store.serve() as server,
        store.connect(server.url) as client,
        client.watch("parent") as watch,
        start_python("-c", program, server.url) as parent,
    ):
        events = aiter(watch)
        assert (await anext(events)).kind == "put"
        for _ in range(3):
            assert "made before fork(); make a new one in the child" in await parent.line("child:")
        child = int((await parent.line("child ")).split()[1])
        parent.kill()
        assert (await asyncio.wait_for(anext(events), 2.0)).kind == "delete"
        os.kill(child, 0)  # it lives


async def test_a_forked_child_has_no_socket_of_a_client_that_its_parent_serves() -> None:
    async with store.serve("localhost") as server, store.connect(server.url):
        (peer,) = server._peers.by_id.values()
        number = peer._transport.get_extra_info("socket").fileno()
        assert not is_null(number)
        assert in_child(lambda: is_null(number))


FORKING_SERVER = """
import asyncio, os, signal, store

async def main():
    async with store.serve("localhost") as server, store.connect(server.url) as client:
        if os.fork() == 0:
            signal.pause()
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_forked_child_holds_neither_the_port_nor_the_connections_of_a_server() -> None:
    async with start_python("-c", FORKING_SERVER) as parent:
        url = await parent.line("tcp://")
        async with store.connect(url, timeout=1.0) as client:
            lost = asyncio.Event()
            client.on_connection_change(lambda connected: None if connected else lost.set())
            parent.kill()
            await asyncio.wait_for(lost.wait(), 2.0)
            with pytest.raises(store.ConnectionLost, match="the connection is lost"):
                await client.ping(timeout=1.0)


LEAVING = """
import asyncio, contextlib, os, sys, store

async def main():
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(store.serve("localhost"))
        client = await stack.enter_async_context(store.connect(server.url))
        await stack.enter_async_context(client.watch("a"))
        await stack.enter_async_context(client.kept_lease(5.0))
        await stack.enter_async_context(store.recipes.lock(client, "job"))
        await client.put("a", b"")
        child = os.fork()
        if child == 0:
            sys.exit(7)
        # No thread waits: a child that closes its copy of asyncio's loop ends the parent's wake-ups by threads.
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            await asyncio.sleep(0.01)
        print("child ended with", os.waitstatus_to_exitcode(ended[1]), flush=True)
        async with store.connect(server.url) as other:
            assert await other.get("a")
        assert server.figures()["leases"] == 2

with asyncio.Runner(loop_factory=__import__(sys.argv[1]).new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_forked_child_may_leave_the_blocks_of_its_parent(loop: str) -> None:
    """Regression: `sys.exit` in the child became a RuntimeError of the server's end, or of the lease's."""
    if loop == "uvloop":
        require("uvloop")
    async with start_python("-W", "ignore", "-c", LEAVING, loop) as parent:
        assert await parent.line("ended") == "child ended with 7", parent.written()
        assert await parent.wait() == 0, parent.written()
        assert "Traceback" not in parent.written()


async def test_a_connection_that_is_given_up_at_any_moment_leaves_no_socket_behind() -> None:
    """If asyncio's race between addresses was cancelled at the moment of its success, it leaked the winning socket."""
    async with store.serve() as server:
        dialling = TcpDialer(Address(host="127.0.0.1", port=server.port), None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for turns in range(15):  # it takes about ten
                task = asyncio.ensure_future(dialling(asyncio.Protocol))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    transport, _ = await task
                    transport.close()
                del task
                await asyncio.sleep(0)
            gc.collect()
        assert [str(warning.message) for warning in caught] == []
