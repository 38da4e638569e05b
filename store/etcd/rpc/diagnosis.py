"""Finds out why a member cannot be reached, over a plain connection, as gRPC gives no reason.

Permanent problems are a missing or untrusted certificate, TLS on one side only, and a server that is not etcd.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import anyio

from store.errors import AuthenticationError, ProtocolError, StoreError
from store.etcd.codec import Failure, FailureKind
from store.net.dialing import NO_TLS, error_text, untrusted_error

ANSWER_WITHIN: Final = 1.0  # seconds to connect and to get first bytes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of an HTTP/2 client, with empty settings."""

SETTINGS: Final = 4  # the type of an HTTP/2 server's first frame

TLS_ALERT: Final = b"\x15\x03"
OUR_STORE: Final = b"rdzv"

HUNG_UP: Final = "UNEXPECTED_EOF_WHILE_READING"


async def explain_outage(host: str, port: int, tls: ssl.SSLContext | None, *, name: str) -> StoreError | Failure | None:
    """Return why a member cannot be reached: a permanent error, a temporary failure, or None if unknown."""
    try:
        hello = await _read_first_bytes(host, port, tls)
    except ssl.SSLCertVerificationError as error:
        return untrusted_error(name, error)
    except ssl.SSLError as error:
        if error.reason in NO_TLS:
            return ProtocolError(f"{name} does not speak TLS there; write etcd://")
        words = (error.reason or str(error)).lower().replace("_", " ")
        return AuthenticationError(
            f"{name} refused this client in the TLS handshake ({words}): give a client certificate that it trusts, by "
            f"cert= and key="
        )
    except TimeoutError:
        return None  # the member is too slow, which gRPC has reported already
    except (OSError, EOFError, UnicodeError) as error:  # UnicodeError: an impossible host name
        return Failure(error_text(error) if isinstance(error, OSError) else str(error), FailureKind.UNDONE)
    speaks_tls = hello.startswith(TLS_ALERT) or b"HTTPS server" in hello
    if speaks_tls or (not hello and tls is None and await _speaks_tls(host, port)):
        return ProtocolError(f"{name} speaks TLS; write etcds://")
    if OUR_STORE in hello[:16]:
        return ProtocolError(f"{name} is a store of ours and no etcd; write {'tcps' if tls else 'tcp'}://")
    if not hello and tls is None:
        return Failure("it closed the connection", FailureKind.UNDONE)
    # Check no more after a TLS handshake: without ALPN, etcd need not speak HTTP/2.
    if tls is not None or (len(hello) > SETTINGS and hello[3] == SETTINGS):
        return None
    return ProtocolError(f"{name} does not answer in HTTP/2; it is no etcd v3.4 or later ({hello[:40]!r})")


async def _read_first_bytes(host: str, port: int, tls: ssl.SSLContext | None) -> bytes:
    """Return a member's first bytes: only reading them may show that the member rejects the certificate."""
    with anyio.fail_after(ANSWER_WITHIN):
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            writer.write(PREFACE)
            await writer.drain()
            return await reader.read(512)
        finally:
            writer.transport.abort()


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing secret is sent
    try:
        await _read_first_bytes(host, port, context)
    except ssl.SSLError as error:
        return error.reason not in (*NO_TLS, HUNG_UP)
    except (OSError, EOFError):
        return False
    return True
