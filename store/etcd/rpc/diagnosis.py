"""Shell: why a member cannot be reached, found out by connecting to it without gRPC, which has one word for everything.

What no retry can mend is said at once: a certificate that is missing or not trusted, TLS spoken to a port without it
and the reverse, and something that is no etcd at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

import anyio

from store.errors import AuthenticationError, ProtocolError, StoreError
from store.etcd.codec import Failure, FailureKind
from store.net.dialing import describe

__all__ = ["diagnose"]

ANSWER_WITHIN: Final = 1.0
"""In seconds: a member says hello, or no, at once."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first, and its settings, of which there are none."""

SETTINGS: Final = 4
"""The type of the frame that a server of HTTP/2 says first."""

TLS_ALERT: Final = b"\x15\x03"
TLS_HANDSHAKE: Final = b"\x16\x03"
OUR_STORE: Final = b"rdzv"


async def diagnose(host: str, port: int, tls: ssl.SSLContext | None, *, name: str) -> StoreError | Failure | None:
    """Return why no connection to a member comes about.

    Args:
        host: The member's.
        port: The member's.
        tls: How TLS is spoken to it; None: not at all.
        name: The cluster's.

    Returns:
        An error that no retry mends; or a failure that one may; None if nothing is wrong as far as can be seen.
    """
    try:
        with anyio.fail_after(ANSWER_WITHIN):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except ssl.SSLCertVerificationError as error:
        return AuthenticationError(f"{name} has no certificate that we trust: {error.verify_message}")
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
            return ProtocolError(f"{name} does not speak TLS there; write etcd://")
        return _refused(error, name)
    except TimeoutError:
        return None  # it is slow, and gRPC has said as much
    except (OSError, EOFError) as error:
        return Failure(describe(error) if isinstance(error, OSError) else str(error), FailureKind.UNDONE)
    try:
        with anyio.fail_after(ANSWER_WITHIN):
            writer.write(PREFACE)
            await writer.drain()
            hello = await reader.read(512)
    except ssl.SSLError as error:  # a member that wants a certificate says so after its own hello
        return _refused(error, name)
    except TimeoutError:
        return None
    except OSError as error:
        return Failure(describe(error), FailureKind.UNDONE)
    finally:
        writer.transport.abort()
    if not hello and tls is None and await _speaks_tls(host, port):
        return ProtocolError(f"{name} speaks TLS; write etcds://")
    return _judged(hello, name, secure=tls is not None)


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether TLS's first words are answered in TLS, if only by an alert.

    A handshake would not tell: until TLS 1.2 a member that wants a certificate refuses within it, and etcd 3.5.1 speaks
    no later one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing but the first words will be sent
    to_read, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(to_read, to_send).do_handshake()
    try:
        with anyio.fail_after(ANSWER_WITHIN):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(to_send.read())
                answer = await reader.read(512)
            finally:
                writer.transport.abort()
    except OSError:
        return False
    return answer.startswith((TLS_HANDSHAKE, TLS_ALERT))


def _refused(error: ssl.SSLError, name: str) -> AuthenticationError:
    words = (error.reason or str(error)).lower().replace("_", " ")
    return AuthenticationError(
        f"{name} refused this client in the TLS handshake ({words}): give a client certificate that it trusts, by "
        f"cert= and key="
    )


def _judged(hello: bytes, name: str, *, secure: bool) -> StoreError | Failure | None:
    if hello.startswith(TLS_ALERT) or b"HTTPS server" in hello:
        return ProtocolError(f"{name} speaks TLS; write etcds://")
    if OUR_STORE in hello[:16]:
        return ProtocolError(f"{name} is a store of ours and no etcd; write {'tcps' if secure else 'tcp'}://")
    if secure and hello:
        return None  # the handshake is over; without ALPN, which is the context's matter, it need not speak HTTP/2
    if not hello:
        return Failure("it closed the connection", FailureKind.UNDONE)
    if len(hello) > SETTINGS and hello[3] == SETTINGS:
        return None
    return ProtocolError(f"{name} does not answer in HTTP/2; it is no etcd v3.4 or later ({hello[:40]!r})")
