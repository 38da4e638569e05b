"""TLS between a socket and the inner protocol (promise S8).

asyncio's TLS drops failed handshakes silently, and takes 290 KiB a connection, which only the garbage collector frees.
A client without TLS waits for a greeting, so the server tells a silent client, unencrypted, that this port requires
TLS. A handshake counts as a connection, and must end within `handshake_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from store.net.address import join_host_port
from store.net.sockets import close_in_children, forget_sockets

if TYPE_CHECKING:
    from store.server.accept.connection_table import ConnectionTable

TLS_BYTES: Final = 24 * 1024  # memory of a connection's TLS, nearly all OpenSSL's
HANDSHAKE: Final = 0x16  # the type of a client's first record
RECORD_BYTES: Final = 16 * 1024  # the most bytes of a decrypted record
HANDSHAKE_BYTES: Final = 64 * 1024  # the most bytes of a client's handshake, certificates included
SILENCE: Final = 3.0  # seconds, at most, until a silent client counts as one without TLS
HUNG_UP: Final = "it hung up in mid-handshake; it may not trust this server's certificate"

_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate, and this server requires one (mutual TLS)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this server's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it rejects this server's certificate: it is for another name",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it rejects this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this server's certificate has expired",
    "UNEXPECTED_EOF_WHILE_READING": HUNG_UP,
}


class TlsLayer(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection: a protocol for the socket's transport, and a transport for the `inner` protocol."""

    def __init__(
        self,
        inner: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        table: ConnectionTable,
        *,
        farewell: bytes,
        beside: bool = False,
    ) -> None:
        self._beside = beside
        self._inner = inner
        self._context = context
        self._table = table
        self._within = table.limits.handshake_timeout
        self._farewell = farewell  # sent to a client that uses no TLS
        self._raw: asyncio.Transport
        self._name = "a client"
        self._came_at = 0.0
        self._said = 0  # bytes received during the handshake
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._agreed = self._ending = self._paused = False
        self._error: ssl.SSLError | None = None  # why the server aborted the connection

    # methods that the socket's transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle an accepted connection."""
        self._raw = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        if peername:
            self._name = join_host_port(*peername[:2])
        if not self._table.has_room:  # no reason can be sent before the TLS handshake
            self._table.refused += 1
            self.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            close_in_children(self, sock)
        self._came_at = self._table.clock()
        self._table.register(self, str(peername[0]) if peername else "", cost=TLS_BYTES, beside=self._beside)
        says_nothing = partial(
            self._reject, "it sends nothing: a client without TLS waits for the server to begin", self._farewell
        )
        self._table.limit_handshake(self, min(SILENCE, self._within / 2), says_nothing)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the buffer's size is fixed
        """Return the buffer that all connections share."""
        return self._table.raw

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes."""
        if self._ending:
            return
        if self._tls is None:
            if self._table.raw[0] != HANDSHAKE:
                self._reject("its first bytes are not TLS", self._farewell)
                return
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            is_late = partial(self._reject, f"no handshake within {self._within:g} s")
            self._table.limit_handshake(self, self._came_at + self._within - self._table.clock(), is_late)
        self._incoming.write(self._table.raw[:nbytes])
        if self._agreed:
            self._decrypt()
            return
        agreed = self._shake_hands()
        # Count the bytes only now: the last bytes of a handshake may include a large request.
        self._said += nbytes
        if not agreed and self._said > HANDSHAKE_BYTES:  # OpenSSL keeps all bytes of an endless handshake
            self._reject(f"it has agreed on nothing with {self._said} bytes")

    def eof_received(self) -> bool:
        """Handle the client's end of stream."""
        if self._agreed:
            self._incoming.write_eof()
            self._decrypt()
        else:
            self._reject_hang_up()
        return self._paused and not self.is_closing()  # True keeps the socket open: earlier bytes wait for decryption

    def pause_writing(self) -> None:
        """Pause the inner protocol's writing."""
        if self._agreed:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Resume the inner protocol's writing."""
        if self._agreed:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        forget_sockets(self)
        self._table.unregister(self)
        if self._agreed:
            self._inner.connection_lost(error or self._error)
        elif error is not None:
            self._reject_hang_up()
        # Break a reference cycle, to free OpenSSL's memory now.
        self._inner, self._tls, self._agreed = asyncio.BaseProtocol(), None, False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ending = True

    def _shake_hands(self) -> bool:
        assert self._tls is not None, "it has said hello"
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_encrypted()
            return False
        except ssl.SSLError as error:
            self._send_encrypted()  # OpenSSL's alert tells the client the reason
            self._reject(_describe_tls_error(error))
            return False
        self._send_encrypted()
        self._table.unregister(self)
        forget_sockets(self)
        self._agreed = True
        self._inner.connection_made(self)
        self._decrypt()
        return True

    def _reject_hang_up(self) -> None:
        if self._tls is not None:  # log only clients that sent something: ports are probed often
            self._reject(HUNG_UP)

    def _reject(self, why: str, farewell: bytes = b"") -> None:
        if self._ending:
            return
        self._ending = True
        self._table.unregister(self)
        self._table.log_refusal("%s is refused: TLS failed: %s", self._name, why)
        if farewell:
            self._raw.write(farewell)
        self._raw.close()

    def _decrypt(self) -> None:
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
            self._send_encrypted()  # TLS answers some received messages, for example a key update

    def _read_into(self, room: memoryview) -> tuple[int, ssl.SSLError | None]:
        """Decrypt into `room`; return the number of bytes, and the error that stopped decryption, if any."""
        assert self._tls is not None, "the TLS session exists"
        size = 0
        try:
            while size < len(room):
                count = cast("int", self._tls.read(len(room) - size, room[size:]))
                if not count:
                    return size, ssl.SSLEOFError()
                size += count
        except ssl.SSLError as error:
            return size, error
        return size, None

    def _resume_decryption(self) -> None:
        try:
            self._decrypt()
        except BaseException:
            self.abort()
            raise

    def _fail(self, error: ssl.SSLError) -> None:
        self._error = error
        self.abort()

    def _send_encrypted(self) -> None:
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)

    # methods that the inner protocol calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information; `held_bytes`: the bytes received and not decrypted yet."""
        ours = {"sslcontext": self._context, "ssl_object": self._tls, "held_bytes": self._incoming.pending}
        return ours[name] if name in ours else self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send."""
        if self._tls is None or self.is_closing():
            return
        rest, encrypted = memoryview(data), []
        try:
            while rest:  # one record at a time, as OpenSSL's buffer never shrinks
                rest = rest[self._tls.write(rest[:RECORD_BYTES]) :]
                encrypted.append(self._outgoing.read())
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._raw.write(b"".join(encrypted))

    def close(self) -> None:
        """Say goodbye, and close once all written bytes are sent."""
        if self._ending:
            return
        self._ending = True
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):  # raised if the client has not said goodbye yet
                self._tls.unwrap()
            self._send_encrypted()
        self._raw.close()

    def abort(self) -> None:
        """Close at once."""
        self._ending = True
        self._raw.abort()

    def is_closing(self) -> bool:
        """Return True once the connection is closing: later writes are dropped."""
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        """Pause decryption."""
        self._paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Resume decryption once the caller has returned, starting with bytes received before."""
        if self._paused and not self.is_closing():
            self._paused = False
            asyncio.get_running_loop().call_soon(self._resume_decryption)
            self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the numbers of unsent bytes at which the inner protocol pauses and resumes."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes."""
        return self._raw.get_write_buffer_size()


def _describe_tls_error(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is none that this server trusts: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error)  # Python's own errors have no `reason`
    return _REASONS.get(reason, reason)
