"""TLS on the bytes of one connection, record by record: a client's OpenSSL, without a socket in between."""

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from typing import Any

import pytest

import store
from store.limits import Limits
from store.server.accept.connection_table import ConnectionTable
from store.server.accept.tls import HANDSHAKE, HANDSHAKE_BYTES, HUNG_UP, RECORD_BYTES, TlsLayer, _describe_tls_error
from tests.support.processes import require


class Line(asyncio.Transport):
    """Stands in for a layer's socket, and keeps the bytes that were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.aborted = self.closing = False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Inside(asyncio.Protocol):
    """The protocol inside a layer."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.ends: list[Exception | None] = []
        self.eofs = 0
        self.pauses = self.fails = False

    def connection_made(self, transport: Any) -> None:
        self.transport: TlsLayer = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if self.pauses:
            self.transport.pause_reading()
        if self.fails:
            raise RuntimeError("it has failed")

    def eof_received(self) -> None:
        self.eofs += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.ends.append(error)


class Watched(ssl.SSLContext):
    """A context that records how many outgoing bytes OpenSSL has held."""

    most_held = 0

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any) -> ssl.SSLObject:
        context = self

        class Seen(ssl.SSLObject):
            def write(self, data: Any) -> int:
                written = super().write(data)
                context.most_held = max(context.most_held, outgoing.pending)
                return written

        self.sslobject_class = Seen
        return super().wrap_bio(incoming, outgoing, *args, **more)


class Conversation:
    """A client and a layer after the handshake; the client may have sent data already."""

    def __init__(self, at_once: bytes = b"") -> None:
        require("trustme")
        import trustme

        authority, self.server = trustme.CA(), Watched(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self.server)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        clock = asyncio.get_running_loop().time
        self.table = ConnectionTable(Limits(), clock)
        self.line, self.inside = Line(), Inside()
        self.layer = TlsLayer(self.inside, self.server, self.table, farewell=b"")
        self.layer.connection_made(self.line)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = trusting.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")
        for _ in range(3):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.client.do_handshake()
                self.client.write(at_once)
                at_once = b""
            self.pass_on()
            self.fetch()

    def pass_on(self) -> None:
        """Pass the client's pending bytes to the layer."""
        self.feed(self._out.read())

    def feed(self, data: bytes) -> None:
        """Pass these bytes to the layer."""
        while data:
            part, data = data[: len(self.table.raw)], data[len(self.table.raw) :]
            self.layer.get_buffer(-1)[: len(part)] = part
            self.layer.buffer_updated(len(part))

    def fetch(self) -> None:
        """Pass the layer's bytes to the client."""
        self._in.write(self.line.sent)
        self.line.sent.clear()

    def says(self, data: bytes) -> bytes:
        """Return the client's encrypted bytes for this."""
        self.client.write(data)
        return self._out.read()


async def test_openssl_holds_one_record_of_any_large_write() -> None:
    """It keeps memory for the most that it has held: each connection took 340 KiB for good after one large answer."""
    conversation = Conversation()
    value = bytes(range(256)) * 1024
    conversation.inside.transport.write(value)
    conversation.fetch()
    read = b""
    while len(read) < len(value):
        read += conversation.client.read(len(value))
    assert read == value
    assert 0 < conversation.server.most_held < RECORD_BYTES + 1024


async def test_a_closed_client_gets_tlss_goodbye_and_not_a_bare_end() -> None:
    conversation = Conversation()
    conversation.inside.transport.close()
    assert conversation.line.closing
    conversation.fetch()
    assert conversation.client.read(1) == b"", "an end without a goodbye is ssl.SSLEOFError"
    conversation.inside.transport.close()
    assert not conversation.line.sent, "once"


async def test_a_record_that_makes_no_sense_ends_a_connection_without_a_word_on_whether_its_client_lives() -> None:
    """Regression: it was reported as if the client had hung up, which counts as its death."""
    conversation = Conversation()
    record = bytearray(conversation.says(b"a request"))
    record[-1] ^= 1
    conversation.feed(bytes(record))
    assert conversation.line.aborted
    conversation.layer.connection_lost(None)
    (error,) = conversation.inside.ends
    assert isinstance(error, ssl.SSLError)
    assert not isinstance(error, ssl.SSLEOFError)


async def test_data_before_an_end_is_delivered_after_a_pause() -> None:
    conversation = Conversation()
    conversation.inside.pauses = True
    said = bytes(200_000)
    conversation.feed(conversation.says(said))
    assert 0 < len(conversation.inside.heard) < len(said)
    assert conversation.layer.eof_received(), "the socket stays open"
    assert conversation.inside.eofs == 0
    while not conversation.line.closing:
        conversation.inside.transport.resume_reading()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert conversation.inside.heard == said
    assert conversation.inside.eofs == 1
    other = Conversation()
    assert (other.layer.eof_received(), other.inside.eofs, other.line.closing) == (False, 1, True)


async def test_an_error_at_delayed_data_closes_the_connection_as_an_immediate_one() -> None:
    conversation = Conversation()
    loop, failed = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    try:
        conversation.inside.transport.pause_reading()
        conversation.feed(conversation.says(b"a request"))
        conversation.inside.fails = True
        conversation.inside.transport.resume_reading()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert [str(error) for error in failed] == ["it has failed"]
    assert conversation.line.aborted


async def test_a_probe_that_resets_the_connection_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Load balancers probe so; each probe was a line in the log."""
    caplog.set_level(logging.WARNING)
    async with store.serve(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            while not server.figures()["strangers"]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        while server.figures()["strangers"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert server.figures()["connections_refused"] == 0
    assert caplog.records == []


async def test_a_hello_that_has_no_end_is_not_heard_out() -> None:
    """OpenSSL held 131 kB of it for each peer, until the handshake timed out."""
    conversation = Conversation()
    layer, line = TlsLayer(Inside(), conversation.server, conversation.table, farewell=b""), Line()
    layer.connection_made(line)
    conversation.layer, fed = layer, 0
    record = bytes([HANDSHAKE, 3, 1]) + RECORD_BYTES.to_bytes(2, "big")
    first = record + b"\x01" + (131_000).to_bytes(3, "big") + b"\x03\x03" + bytes(RECORD_BYTES - 6)
    while not line.is_closing() and fed < 8 * RECORD_BYTES:
        conversation.feed(first if not fed else record + bytes(RECORD_BYTES))
        fed += RECORD_BYTES
    assert line.is_closing()
    assert not conversation.table.unauthenticated_count, (
        "it has no place any more, though its socket may take long to close"
    )
    layer.connection_lost(ConnectionResetError())
    assert conversation.table.refused == 1
    assert HANDSHAKE_BYTES <= fed <= HANDSHAKE_BYTES + RECORD_BYTES


async def test_a_large_request_right_behind_the_handshake_is_heard() -> None:
    """It arrives together with the client's last handshake message, and is not taken for a hello without an end."""
    value = bytes(2 * HANDSHAKE_BYTES)
    assert Conversation(at_once=value).inside.heard == value


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("UNEXPECTED_EOF_WHILE_READING", "it", HUNG_UP),
        ("NO_SHARED_CIPHER", "it", "NO_SHARED_CIPHER"),
        ("", "it failed", "it failed"),
        (None, "it failed", "it failed"),
    ],
)
def test_the_words_of_a_failed_handshake(reason: str | None, message: str, words: str) -> None:
    error = ssl.SSLError(1, message)
    if reason is not None:
        error.reason = reason
    assert _describe_tls_error(error) == words
