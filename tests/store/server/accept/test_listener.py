"""The listener: connections accepted, when, and its log lines. The rules are those of `test_connection_table.py`."""

import asyncio
import errno
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import store
import store.sync
from store.limits import Limits
from store.net.sockets import SPARE_FILES, open_file_count
from store.server.accept.connection_table import ConnectionTable
from store.server.accept.listener import EndWhenAlone, TcpListener
from tests.support.limits import limits_with


class Listener:
    """A listening socket without free file descriptors, until the test frees some."""

    def __init__(self) -> None:
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.full = True
        self.asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.full:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.sock, name)


class Taken(asyncio.Protocol):
    """Notes the socket and the transport of an accepted connection."""

    def __init__(self) -> None:
        self.accepted = asyncio.Event()
        self.sock: Any = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.sock = transport.get_extra_info("socket")
        self.accepted.set()


def a_table() -> ConnectionTable:
    loop = asyncio.get_running_loop()
    return ConnectionTable(limits_with(handshakes_max=4), loop.time)


async def test_files_that_run_out_cost_one_line_and_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    listener, taken = Listener(), Taken()
    door = TcpListener(a_table(), [listener], lambda: taken)  # type: ignore[list-item]
    with caplog.at_level(logging.ERROR, "store.server.accept.listener"):
        door.open()
        _, writer = await asyncio.open_connection(*listener.sock.getsockname())
        while listener.asked < 3:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        listener.full = False
        async with asyncio.timeout(60):
            await taken.accepted.wait()
    assert len(caplog.records) == 1
    assert "ulimit -n" in caplog.text
    writer.close()
    taken.transport.abort()
    door.close()
    await door.wait_closed()


@pytest.fixture
def silent_strangers() -> Iterator[list[socket.socket]]:
    strangers: list[socket.socket] = []
    yield strangers
    for one in strangers:
        one.close()


@pytest.mark.in_ci
async def test_silent_connections_do_not_keep_out_a_client_with_the_token(
    silent_strangers: list[socket.socket],
) -> None:
    """260 of them kept a client with the token out 117 times of 120."""
    limits = Limits(connections_max=128)
    token = "a good token, long enough"
    async with store.serve(token=token, limits=limits) as server:
        for _ in range(260):
            one = socket.socket()
            one.setblocking(False)
            assert one.connect_ex(("127.0.0.1", server.port)) in (0, errno.EINPROGRESS)
            silent_strangers.append(one)
        await asyncio.sleep(0)
        for _ in range(3):
            async with store.connect(server.url, token=token, timeout=30) as client:
                await client.put("a", b"")
        assert server.connections <= limits.connections_max // 2 + 1


async def test_the_limit_of_files_is_restored_and_counts_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= 1024:
        pytest.skip("the hard limit leaves nothing to raise")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        async with store.serve(), store.serve(limits=Limits(connections_max=2**30)) as server:
            assert (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) > 1024
            assert server.table.connections_max < most - SPARE_FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    files = [socket.socket() for _ in range(10)]
    assert open_file_count() >= 10
    for one in files:
        one.close()


async def test_no_client_is_accepted_between_being_alone_and_the_end() -> None:
    """A client that came at that moment was welcomed, lost its store, and tried to reconnect to it."""
    with store.sync.serve() as server:
        async with store.connect(server.url) as client:
            assert not await asyncio.to_thread(server.end_when_alone.wait_until_alone, 0)
            async with store.connect(server.url) as another:  # while a client is connected, others may connect
                assert await another.count("") == 0
            assert await client.count("") == 0
        assert await asyncio.to_thread(server.end_when_alone.wait_until_alone, 60)
        with pytest.raises(store.StoreError, match="the server is leaving"):
            async with store.connect(server.url, timeout=0.5):
                pass


def test_a_server_that_is_to_stay_takes_clients_however_alone_it_has_been() -> None:
    end_when_alone = EndWhenAlone(lambda: True)
    end_when_alone.end_wait_if_alone()
    assert not end_when_alone.rejects_clients


def test_waiting_to_be_alone_in_a_blocked_loop_keeps_its_timeout() -> None:
    loop = asyncio.new_event_loop()
    end_when_alone = EndWhenAlone(lambda: True)
    end_when_alone.note_loop(loop)
    waiting = threading.Thread(target=end_when_alone.wait_until_alone, args=(0.01,), daemon=True)
    waiting.start()
    waiting.join(10.0)
    assert not waiting.is_alive()
    loop.close()


async def test_accepted_sockets_have_their_options_also_if_the_listening_socket_passes_them_on() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    taken = Taken()
    door = TcpListener(a_table(), [listener], lambda: taken)
    door.open()
    with socket.create_connection(listener.getsockname()):
        await taken.accepted.wait()
        assert taken.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert taken.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert taken.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        taken.transport.abort()
    door.close()


async def test_a_listener_that_closes_with_a_connection_just_accepted_closes_that_connection() -> None:
    """Regression: a task that is cancelled before its first step closes nothing, so that the client waited."""
    sock = socket.create_server(("127.0.0.1", 0))
    listener = TcpListener(a_table(), [sock], Taken)
    listener.open()
    with socket.create_connection(sock.getsockname()) as client:
        client.settimeout(5)
        listener._accept(sock)
        listener.close()
        await listener.wait_closed()
        assert await asyncio.to_thread(client.recv, 1) == b""
