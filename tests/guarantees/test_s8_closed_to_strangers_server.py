"""S8: closed to strangers, over real sockets.

"Mutual TLS, and/or a shared token proven by an HMAC-SHA256 challenge both ways: the token never crosses the wire".
"Binding anything but loopback without either is refused, with a message naming both remedies, unless `insecure` ..."
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import store
from store import server as server_room
from store.connection import ServerConnection
from store.errors import AuthenticationError, ConnectionLost, StoreUsageError
from tests.support.processes import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from store.server import Server
    from store.wire import Hello

TOKEN = "correct horse battery staple"
IMPOSTORS_TOKEN = b"something else"


# ------------------------------------------------------------------------------------------------ where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "example.com"])
async def test_listening_beyond_loopback_is_refused_naming_both_remedies(host: str) -> None:
    with pytest.raises(StoreUsageError) as caught:
        async with store.serve(host):
            raise AssertionError("it served")
    assert "token" in str(caught.value)
    assert "TLS" in str(caught.value)
    assert "insecure" in str(caught.value)


async def test_tls_that_asks_for_no_certificate_is_no_remedy() -> None:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(StoreUsageError, match="mutual TLS"):
        async with store.serve("0.0.0.0", tls=anybody):
            raise AssertionError("it served")


@pytest.mark.parametrize("options", [{"token": TOKEN}, {"insecure": True}], ids=["token", "insecure"])
async def test_with_a_token_or_the_word_insecure_it_listens_beyond_loopback(options: dict[str, Any]) -> None:
    async with store.serve("0.0.0.0", **options) as server:
        assert server.port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
async def test_loopback_needs_nothing(host: str) -> None:
    async with store.serve(host) as server, store.connect(server.url) as client:
        await client.ping()


async def test_an_empty_token_is_a_mistake_not_a_token() -> None:
    with pytest.raises(StoreUsageError, match="the token is empty"):
        async with store.serve(token=""):
            raise AssertionError("it served")


# ------------------------------------------------------------------------------------------------ the token


def connect_blocking(url: str, token: str | None, **options: Any) -> int:
    with store.sync.connect(url, token=token, **options) as client:
        return client.put("a", b"")


async def test_who_knows_the_token_is_let_in() -> None:
    async with store.serve(token=TOKEN) as server:
        async with store.connect(server.url, token=TOKEN) as client:
            assert await client.put("a", b"") == 1
        async with store.connect(server.url, token=TOKEN.encode()) as client:
            assert await client.put("a", b"") == 2
        assert await asyncio.to_thread(connect_blocking, server.url, TOKEN) == 3


@pytest.mark.parametrize(
    ("token", "reason"), [("another", "not the server's"), (None, "wants a token, and none was given")]
)
async def test_who_does_not_know_the_token_is_not_and_learns_why_at_once(
    token: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.serve(token=TOKEN) as server:
        with pytest.raises(AuthenticationError, match=reason):
            async with store.connect(server.url, token=token):
                raise AssertionError("it was let in")
        with pytest.raises(AuthenticationError, match=reason):
            await asyncio.to_thread(connect_blocking, server.url, token)
        assert server.figures()["revision"] == 0
    assert TOKEN not in caplog.text


async def test_a_client_with_a_token_refuses_a_server_that_asks_for_none() -> None:
    async with store.serve() as server:
        with pytest.raises(AuthenticationError, match="cannot prove that it knows"):
            async with store.connect(server.url, token=TOKEN):
                raise AssertionError("it trusted the server")
        with pytest.raises(AuthenticationError, match="cannot prove that it knows"):
            await asyncio.to_thread(connect_blocking, server.url, TOKEN)


class Credulous(ServerConnection):
    """The server's side of a connection for a server that pretends to know the token: it believes every proof."""

    heard: ClassVar[list[bytes]] = []

    def receive(self, data: bytes | memoryview) -> Iterator[Any]:
        self.heard.append(bytes(data))
        return super().receive(data)

    def _check_hello(self, hello: Hello) -> None:
        if self._token != IMPOSTORS_TOKEN:
            super()._check_hello(hello)


@pytest.fixture
async def impostor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    with monkeypatch.context() as patch:
        patch.setattr(server_room, "ServerConnection", Credulous)
        Credulous.heard.clear()
        async with store.serve(token=IMPOSTORS_TOKEN) as server:
            yield server


async def test_a_client_refuses_a_server_that_cannot_prove_the_token_and_tells_it_nothing(impostor: Server) -> None:
    with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
        async with store.connect(impostor.url, token=TOKEN):
            raise AssertionError("it trusted the server")
    with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
        await asyncio.to_thread(connect_blocking, impostor.url, TOKEN)
    said = b"".join(Credulous.heard)
    assert len(said) > 100
    assert TOKEN.encode() not in said, "the token never crosses the wire"
    assert impostor.figures()["requests"] == 0


async def test_a_recorded_hello_is_worth_nothing_in_another_conversation(impostor: Server) -> None:
    with pytest.raises(AuthenticationError):
        async with store.connect(impostor.url, token=TOKEN):
            raise AssertionError("it trusted the server")
    (recorded,) = Credulous.heard
    async with store.serve(token=TOKEN) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(recorded)
        assert b"not the server's" in await reader.read()
        writer.close()
        await writer.wait_closed()


# ------------------------------------------------------------------------------------------------ mutual TLS


class Certificates:
    """An authority, and contexts that trust it."""

    def __init__(self) -> None:
        require("trustme")
        import trustme

        self.authority = trustme.CA()
        self._issued = self.authority.issue_cert("127.0.0.1", "localhost")

    def server(self, *, mutual: bool = True, newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._issued.configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        if newest is not None:
            context.maximum_version = newest
        return context

    def client(self, *, certificate: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if certificate:
            self._issued.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_who_has_a_certificate_is_let_in(certificates: Certificates, newest: ssl.TLSVersion, host: str) -> None:
    async with store.serve(host, tls=certificates.server(newest=newest)) as server:
        url = f"tcps://127.0.0.1:{server.port}"
        async with store.connect(url, tls=certificates.client(), timeout=5.0) as client, client.watch("") as watch:
            await client.put("a", bytes(1_000_000))
            assert len((await anext(aiter(watch))).value) == 1_000_000
            assert await asyncio.to_thread(connect_blocking, url, None, tls=certificates.client(), timeout=5.0) == 2
        assert server.url.startswith("tcps://")


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_has_none_is_not(certificates: Certificates, newest: ssl.TLSVersion) -> None:
    bare = certificates.client(certificate=False)
    async with store.serve(tls=certificates.server(newest=newest)) as server:
        with pytest.raises(ConnectionLost, match=r"TLS failed|closed the connection"):
            async with store.connect(server.url, tls=bare, timeout=0.5):
                raise AssertionError("it was let in")
        with pytest.raises(ConnectionLost, match=r"TLS failed|closed the connection"):
            await asyncio.to_thread(connect_blocking, server.url, None, tls=bare, timeout=0.5)
        assert server.connections == 0


async def test_a_server_whose_certificate_is_not_trusted_is_refused_at_once(certificates: Certificates) -> None:
    stranger = Certificates().client()
    async with store.serve(tls=certificates.server()) as server:
        with pytest.raises(AuthenticationError, match="no certificate that we trust"):
            async with store.connect(server.url, tls=stranger):
                raise AssertionError("it trusted the server")
        with pytest.raises(AuthenticationError, match="no certificate that we trust"):
            await asyncio.to_thread(connect_blocking, server.url, None, tls=stranger)


async def test_a_plain_client_at_a_tls_port_learns_that_nobody_understands_it(certificates: Certificates) -> None:
    async with store.serve(tls=certificates.server()) as server:
        with pytest.raises((ConnectionLost, store.ProtocolError)):
            async with store.connect(f"tcp://127.0.0.1:{server.port}", timeout=0.5):
                raise AssertionError("it was let in")


async def test_tls_and_a_token_go_together(certificates: Certificates) -> None:
    async with store.serve(tls=certificates.server(mutual=False), token=TOKEN) as server:
        bare = certificates.client(certificate=False)
        async with store.connect(server.url, tls=bare, token=TOKEN) as client:
            assert await client.put("a", b"") == 1
        with pytest.raises(AuthenticationError):
            async with store.connect(server.url, tls=bare, token="another"):
                raise AssertionError("it was let in")


async def test_whoever_is_silent_in_mid_handshake_is_hung_up_on(certificates: Certificates) -> None:
    limits = store.Limits(handshake_timeout=0.2)
    async with store.serve(tls=certificates.server(), limits=limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()
        await writer.wait_closed()
