"""The reason why a member cannot be reached: the server at its port is identified by its first bytes."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme

from store.errors import AuthenticationError, ProtocolError, StoreError
from store.etcd.codec import Failure
from store.etcd.rpc import diagnosis
from store.etcd.rpc.diagnosis import PREFACE, explain_outage
from tests.support.processes import free_port

SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
AUTHORITY, STRANGER = trustme.CA(), trustme.CA()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time, so that the result does not depend on the speed of this machine."""
    monkeypatch.setattr(diagnosis, "ANSWER_WITHIN", 30.0)


def server_tls(*, wants: trustme.CA | None = None, newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return a TLS context like a member's."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(context)
    if wants is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        wants.configure_trust(context)
    if newest is not None:
        context.maximum_version = newest
    return context


def client_tls(authority: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@asynccontextmanager
async def member(says: bytes | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Start a server that reads a client's first bytes and answers with these, or hangs up at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if says is not None:
                await reader.readexactly(len(PREFACE))
                writer.write(says)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def found(port: int, tls: ssl.SSLContext | None = None) -> StoreError | Failure | None:
    return await explain_outage("127.0.0.1", port, tls, name="the cluster")


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x16", "write etcds://"),
        (b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n", "write etcds://"),
        (b"\x00\x00\x00\x10rdzv", "write tcp://"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "it is no etcd"),
    ],
)
async def test_a_server_that_is_no_etcd_is_identified_by_its_answer(says: bytes, sentence: str) -> None:
    async with member(says) as port:
        wrong = await found(port)
    assert isinstance(wrong, ProtocolError)
    assert sentence in str(wrong)


async def test_with_a_member_that_answers_nothing_is_wrong() -> None:
    async with member(SETTINGS_FRAME) as port:
        assert await found(port) is None
    async with member(SETTINGS_FRAME, server_tls()) as port:
        assert await found(port, client_tls()) is None


async def test_a_member_that_hangs_up_or_does_not_listen_may_return() -> None:
    async with member(None) as port:
        assert isinstance(await found(port), Failure)
    assert isinstance(await explain_outage("head..example", 1, None, name="the cluster"), Failure), "that is no name"
    nobody = await found(free_port())
    assert isinstance(nobody, Failure)
    assert "nobody listens there" in str(nobody)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_port_with_tls_is_recognized_though_it_only_hangs_up(newest: ssl.TLSVersion) -> None:
    """etcd 3.5.1 sends nothing to a plain client, and refuses one without a certificate during the handshake."""
    async with member(SETTINGS_FRAME, server_tls(newest=newest)) as port:
        assert "speaks TLS; write etcds://" in str(await found(port))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = asyncio.create_task(asyncio.to_thread(refuse, listener, newest, times=2))
        assert "speaks TLS; write etcds://" in str(await found(listener.getsockname()[1]))
        await refusing


async def test_a_tls_refusal_says_whose_certificate_it_was() -> None:
    async with member(SETTINGS_FRAME, server_tls()) as port:
        wrong = await found(port, client_tls(STRANGER))
    assert isinstance(wrong, AuthenticationError)
    assert "has no certificate that we trust" in str(wrong)
    for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        with socket.create_server(("127.0.0.1", 0)) as listener:  # asyncio would hang up without an alert of TLS
            refusing = asyncio.create_task(asyncio.to_thread(refuse, listener, newest))
            wrong = await found(listener.getsockname()[1], client_tls())
            await refusing
        assert isinstance(wrong, AuthenticationError)
        assert "give a client certificate that it trusts" in str(wrong)


def refuse(listener: socket.socket, newest: ssl.TLSVersion, *, times: int = 1) -> None:
    """Refuse clients that speak no TLS, or show no certificate."""
    for _ in range(times):
        connection, _ = listener.accept()
        refuse_one(connection, newest)


def refuse_one(connection: socket.socket, newest: ssl.TLSVersion) -> None:
    tls = server_tls(wants=AUTHORITY, newest=newest)
    with connection.dup() as plain, tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as it:
        with contextlib.suppress(ssl.SSLError):
            it.do_handshake()
        # Closing while bytes of the client are unread would reset the connection, and TLS's alert would be lost.
        with contextlib.suppress(OSError):
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(4096):
                pass


async def test_tls_to_a_port_without_it_is_reported() -> None:
    # TLS's first message is long enough for such an answer
    async with member(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        wrong = await found(port, client_tls())
    assert isinstance(wrong, ProtocolError)
    assert "does not speak TLS there; write etcd://" in str(wrong)
