"""One attempt of a blocking caller, step by step, and the fresh connection beside a silent one."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

import store
from store.client import channel, patience
from store.client.connecting import Connecting, Stage
from store.net.address import Address
from store.net.racing import Addresses
from store.net.sockets import have_calls_wait
from tests.support.processes import require
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 30.0  # seconds: none of this takes so long


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def to(listener: socket.socket, tls: ssl.SSLContext | None = None) -> Connecting:
    return Connecting(Addresses(*listener.getsockname()), tls)


def can_be_read(sock: socket.socket, *, within: float) -> bool:
    return bool(select.select([sock], [], [], within)[0])


def soon() -> float:
    return time.monotonic() + 0.01


def test_an_attempt_goes_as_far_as_it_is_asked_to(listener: socket.socket) -> None:
    attempt = to(listener)
    assert attempt.go_on(time.monotonic() + LONG, to=Stage.TAKEN)
    assert not attempt.go_on(soon(), to=Stage.SPOKEN)
    theirs, _ = listener.accept()
    theirs.send(b"hello")
    assert attempt.go_on(time.monotonic() + LONG, to=Stage.SPOKEN)
    assert attempt.first_word == b"hello"
    with attempt.take() as ours, theirs:
        attempt.close()
        ours.send(b"still open")
        assert theirs.recv(100) == b"still open"


def test_word_on_the_older_connection_ends_the_wait(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        attempt = to(listener)
        assert attempt.go_on(time.monotonic() + LONG, to=Stage.TAKEN, beside=ours)
        assert not can_be_read(ours, within=0.0)
        theirs.send(b"here I am")
        assert not attempt.go_on(time.monotonic() + LONG, to=Stage.SPOKEN, beside=ours)
        assert can_be_read(ours, within=0.0)
        attempt.close()


def test_who_hangs_up_without_a_word_is_no_fresh_connection(listener: socket.socket) -> None:
    attempt = to(listener)
    assert attempt.go_on(time.monotonic() + LONG, to=Stage.SECURED)
    listener.accept()[0].close()
    with pytest.raises(ConnectionResetError, match="before it said a word"):
        attempt.go_on(time.monotonic() + LONG, to=Stage.SPOKEN)
    attempt.close()


def test_tls_is_agreed_on_before_a_word() -> None:
    require("trustme")
    import trustme

    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.configure_trust(ours)
    with store.sync.serve(tls=theirs) as server:
        attempt = Connecting(Addresses("127.0.0.1", server.port), ours)
        assert attempt.go_on(time.monotonic() + LONG, to=Stage.SPOKEN)
        assert attempt.first_word
        attempt.close()


async def test_a_blocking_client_leaves_a_connection_that_stays_silent_for_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for ten seconds; and what it had asked is applied once."""
    monkeypatch.setattr(channel, "HEARTBEAT", LONG)
    monkeypatch.setattr(channel, "LOOK", 0.05)
    monkeypatch.setattr(channel, "SYSTEM_TELLS", False)  # the proxy acknowledges what it drops
    monkeypatch.setattr(patience, "SILENCE", 0.1)
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        client = store.sync.Client(Address(host="127.0.0.1", port=proxy.port), timeout=LONG)
        assert await asyncio.to_thread(client.add, "count", 1) == 1
        proxy.swallow()
        proxy.pass_new()
        assert await asyncio.to_thread(client.add, "count", 1) == 2
        assert proxy.connections == 2
        with pytest.raises(store.StoreTimeoutError):
            await asyncio.to_thread(client.wait, ["later"], timeout=0.3)
        assert proxy.connections == 2, "who waits for what comes later is not answered, and none the worse for it"
        await asyncio.to_thread(client.close)


async def test_a_blocking_client_comes_back_by_another_attempt_while_one_hears_nothing() -> None:
    """It waited on the first that was taken; those who await made others, and kept that one beside them."""
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        client = store.sync.Client(Address(host="127.0.0.1", port=proxy.port), timeout=LONG)
        assert await asyncio.to_thread(client.add, "count", 1) == 1
        proxy.swallow()
        proxy.cut()
        adding = asyncio.create_task(asyncio.to_thread(client.add, "count", 1))
        await proxy.until(lambda: proxy.connections == 2, timeout=LONG)
        proxy.pass_new()
        assert await adding == 2
        assert proxy.connections == 3
        assert server.figures()["sessions"] == 1
        await asyncio.to_thread(client.close)


async def test_a_silent_connection_that_is_heard_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT", LONG)
    monkeypatch.setattr(channel, "LOOK", 0.02)
    monkeypatch.setattr(channel, "SYSTEM_TELLS", False)
    monkeypatch.setattr(patience, "SILENCE", 0.04)
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        client = store.sync.Client(Address(host="127.0.0.1", port=proxy.port), timeout=LONG)
        assert await asyncio.to_thread(client.put, "a", b"") == 1
        proxy.black_hole()  # new connections are taken, and nobody speaks on them
        putting = asyncio.create_task(asyncio.to_thread(client.put, "a", b""))
        await proxy.until(lambda: proxy.connections > 1, timeout=LONG)
        proxy.heal()
        assert await putting == 2
        assert server.figures()["sessions"] == 1
        await asyncio.to_thread(client.close)


async def test_a_server_whose_system_acknowledges_is_taken_for_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh connection would be as slow, and keep it busier still."""
    monkeypatch.setattr(channel, "SYSTEM_TELLS", True)
    monkeypatch.setattr(channel, "queued_bytes", lambda _: (0, 0))
    monkeypatch.setattr(channel, "LOOK", 0.02)
    monkeypatch.setattr(patience, "SILENCE", 0.04)
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        client = store.sync.Client(Address(host="127.0.0.1", port=proxy.port), timeout=LONG)
        await asyncio.to_thread(client.put, "a", b"")
        proxy.black_hole()
        with pytest.raises(store.StoreTimeoutError):
            await asyncio.to_thread(client.put, "a", b"", timeout=0.25)
        assert proxy.connections == 1
        proxy.heal()
        await asyncio.to_thread(client.close)


def test_a_caller_is_interrupted_while_it_looks_for_a_fresh_connection(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LOOK", 0.02)
    monkeypatch.setattr(channel, "SYSTEM_TELLS", False)
    monkeypatch.setattr(patience, "SILENCE", 0.04)
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        client.put("a", b"")
        one = client._free[0]
        ours, theirs = socket.socketpair()
        assert one.sock is not None
        one.sock.close()
        one.sock = ours
        have_calls_wait(ours, channel.LOOK)
        client.addresses = Addresses(*listener.getsockname())  # takes connections, and says nothing

        def close_later() -> None:
            with listener.accept()[0]:
                client.close()

        closing = threading.Thread(target=close_later)
        closing.start()
        with pytest.raises(store.ConnectionLost, match="is closed"):
            client.put("b", b"", timeout=LONG)
        closing.join()
        theirs.close()
