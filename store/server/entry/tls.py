"""Shell: TLS between a socket and whoever converses on it, from the first byte of the handshake on (promise S8).

asyncio would do this by itself, and drop without a word whatever fails in it; each connection would take 290 KiB, and
keep them, after it has gone, until Python's collector comes by. Here one takes what OpenSSL takes, and gives it back
when it ends.

A client with TLS speaks first, and its first byte is known. A client without TLS waits for our greeting, and would wait
until both give up; it is told, in its own protocol, what this port speaks. Everyone who is turned away costs one line
in the log, which says why, and all of it together may last no longer than `handshake_timeout`.

Who stands here counts as a connection: strangers do not get round `connections_max` by never finishing a handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from store.net.address import host_and_port
from store.net.sockets import forget, let_go_in_children

if TYPE_CHECKING:
    from store.server.entry.table import Table

__all__ = ["TLS_BYTES", "TlsLayer"]

TLS_BYTES: Final = 24 * 1024  # what a connection takes more than one without TLS, nearly all of it OpenSSL's
HANDSHAKE: Final = 0x16  # the content type of a client's first record: RFC 8446, B.1
RECORD_BYTES: Final = 16 * 1024  # the most that a record carries before it is encrypted: RFC 8446, 5.1
HANDSHAKE_BYTES: Final = 64 * 1024  # with so many and no agreement, its certificates included, a client is turned away
# Seconds in which a client with TLS has begun to speak, if it is in good health; one that is not will come again.
SILENCE: Final = 3.0
HUNG_UP: Final = "it hung up in mid-handshake; it may not trust this server's certificate"

_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate, and this server wants one (mutual TLS)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this server's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not take this server's certificate for this server's",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not take this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this server's certificate has expired",
    "UNEXPECTED_EOF_WHILE_READING": HUNG_UP,
}


class TlsLayer(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection: to the socket's transport it is a protocol, and to the protocol inside it is a transport.

    Args:
        inner: Who converses, from the end of the handshake on.
        context: The server's.
        table: Where it is counted until then; its `handshake_timeout` counts.
        farewell: What a client without TLS is told.
        beside: Whether it leads to something else than the store.
    """

    def __init__(
        self,
        inner: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        table: Table,
        *,
        farewell: bytes,
        beside: bool = False,
    ) -> None:
        super().__init__()
        self._beside = beside
        self._inner = inner
        self._context = context
        self._table = table
        self._within = table.limits.handshake_timeout
        self._farewell = farewell
        self._raw: asyncio.Transport
        self._name = "a client"
        self._came_at = 0.0
        self._said = 0  # bytes that have come and have led to no agreement
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._agreed = self._ending = self._paused = False
        self._error: ssl.SSLError | None = None  # why we end it ourselves

    # the socket's transport calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection has been accepted."""
        self._raw = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        if peername:
            self._name = host_and_port(*peername[:2])
        if not self._table.has_room:  # before TLS there is no way to say so that it would understand; it comes again
            self._table.refused += 1
            self.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            let_go_in_children(self, sock)
        self._came_at = self._table.clock()
        self._table.came(self, str(peername[0]) if peername else "", cost=TLS_BYTES, beside=self._beside)
        says_nothing = partial(self._turn_away, "it says nothing, as a client does that speaks no TLS", self._farewell)
        self._table.expect(self, min(SILENCE, self._within / 2), says_nothing)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer is as large as it is
        """Where the next bytes go: what has come is copied out of it at once."""
        return self._table.raw

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._ending:
            return
        if self._tls is None:
            if self._table.raw[0] != HANDSHAKE:
                self._turn_away("what it says is not TLS", self._farewell)
                return
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            is_late = partial(self._turn_away, f"no handshake within {self._within:g} s")
            self._table.expect(self, self._came_at + self._within - self._table.clock(), is_late)
        self._incoming.write(self._table.raw[:nbytes])
        if self._agreed:
            self._decrypt()
            return
        agreed = self._shake_hands()
        # Afterwards: behind the client's last word of the handshake its first request may have come, however large.
        self._said += nbytes
        if not agreed and self._said > HANDSHAKE_BYTES:  # OpenSSL would hold all of a hello that has no end
            self._turn_away(f"it has agreed on nothing with {self._said} bytes")

    def eof_received(self) -> bool:
        """The client has stopped sending."""
        if self._agreed:
            self._incoming.write_eof()
            self._decrypt()
        else:
            self._hung_up()
        return self._paused and not self.is_closing()  # with what has come before it still to be heard

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        if self._agreed:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It takes more again."""
        if self._agreed:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        forget(self)
        self._table.went(self)
        if self._agreed:
            self._inner.connection_lost(error or self._error)
        elif error is not None:
            self._hung_up()
        # It goes now, with what OpenSSL holds for it, and not when Python's collector finds the circle.
        self._inner, self._tls, self._agreed = asyncio.BaseProtocol(), None, False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ending = True

    # the handshake

    def _shake_hands(self) -> bool:
        """Go on with the handshake; whether both sides have agreed."""
        assert self._tls is not None, "it has said hello"
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return False
        except ssl.SSLError as error:
            self._send()  # why, as an alert
            self._turn_away(_describe(error))
            return False
        self._send()
        self._table.went(self)
        forget(self)
        self._agreed = True
        self._inner.connection_made(self)
        self._decrypt()
        return True

    def _hung_up(self) -> None:
        if self._tls is not None:  # else it has said nothing wrong: a port is looked at by many
            self._turn_away(HUNG_UP)

    def _turn_away(self, why: str, farewell: bytes = b"") -> None:
        if self._ending:
            return
        self._ending = True
        self._table.went(self)
        self._table.turned_away("%s is refused: TLS failed: %s", self._name, why)
        if farewell:
            self._raw.write(farewell)
        self._raw.close()

    # bytes

    def _decrypt(self) -> None:
        """Give to who is inside what can be read, until it wants no more."""
        inner, ended = self._inner, None
        while ended is None and self._tls is not None and not self._paused and not self.is_closing():
            if isinstance(inner, asyncio.BufferedProtocol):
                size, ended = self._read_into(memoryview(inner.get_buffer(-1)))
                if size:
                    inner.buffer_updated(size)
            else:
                size, ended = self._read_into(self._table.plain)
                if size:
                    cast("asyncio.Protocol", inner).data_received(bytes(self._table.plain[:size]))
        if isinstance(ended, ssl.SSLEOFError):
            if not cast("asyncio.Protocol", inner).eof_received():
                self.close()
        elif ended is not None and not isinstance(ended, ssl.SSLWantReadError):
            self._fail(ended)
        if self._tls is not None:
            self._send()  # an answer of TLS's own, if there is any

    def _read_into(self, room: memoryview) -> tuple[int, ssl.SSLError | None]:
        """Decrypt what there is room for: how much that was, and why there is no more, if that is known."""
        assert self._tls is not None, "it is decrypted what was agreed on"
        size = 0
        try:
            while size < len(room):
                count = cast("int", self._tls.read(len(room) - size, room[size:]))  # no bytes: it was given a buffer
                if not count:
                    return size, ssl.SSLEOFError()
                size += count
        except ssl.SSLError as error:
            return size, error
        return size, None

    def _go_on(self) -> None:
        """Decrypt what has come before; nobody hears a connection that has failed at it again."""
        try:
            self._decrypt()
        except BaseException:
            self.abort()
            raise

    def _fail(self, error: ssl.SSLError) -> None:
        """End what makes no sense any more; whether the client lives is not said by that."""
        self._error = error
        self.abort()

    def _send(self) -> None:
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)

    # who is inside calls these

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection; `held_bytes` is what has come and was not decrypted yet."""
        ours = {"sslcontext": self._context, "ssl_object": self._tls, "held_bytes": self._incoming.pending}
        return ours[name] if name in ours else self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send it."""
        if self._tls is None or self.is_closing():
            return
        rest, encrypted = memoryview(data), []
        try:
            while rest:  # one record at a time: OpenSSL keeps, for good, room for the most that it has once held
                rest = rest[self._tls.write(rest[:RECORD_BYTES]) :]
                encrypted.append(self._outgoing.read())
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._raw.write(b"".join(encrypted))

    def close(self) -> None:
        """Say goodbye, and close once what is written has been sent."""
        if self._ending:
            return
        self._ending = True
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):  # it wants to wait for the client's goodbye
                self._tls.unwrap()
            self._send()
        self._raw.close()

    def abort(self) -> None:
        """Close at once."""
        self._ending = True
        self._raw.abort()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._ending or self._raw.is_closing()

    def pause_reading(self) -> None:
        """Decrypt nothing more for now."""
        self._paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Go on, beginning with what has come already; not before the caller is done with what it does."""
        if self._paused and not self.is_closing():
            self._paused = False
            asyncio.get_running_loop().call_soon(self._go_on)
            self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When the inside is told to write no more."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """How many bytes were not sent yet."""
        return self._raw.get_write_buffer_size()


def _describe(error: ssl.SSLError) -> str:
    """Why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is none that this server trusts: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error)  # those that Python raises, and not OpenSSL, have none
    return _REASONS.get(reason, reason)
