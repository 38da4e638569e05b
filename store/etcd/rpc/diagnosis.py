"""Shell: why a member cannot be reached, found out by connecting to it without gRPC, which has one word for everything.

What no retry can mend is said at once: a certificate that is missing or not trusted, TLS spoken to a port without it
and the reverse, and something that is no etcd at all.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import anyio

from store.errors import AuthenticationError, ProtocolError, StoreError
from store.etcd.codec import Failure, FailureKind
from store.net.dialing import NO_TLS, describe

__all__ = ["diagnose"]

ANSWER_WITHIN: Final = 1.0
"""In seconds: a member says hello, or no, at once."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first, and its settings, of which there are none."""

SETTINGS: Final = 4
"""The type of the frame that a server of HTTP/2 says first."""

TLS_ALERT: Final = b"\x15\x03"
OUR_STORE: Final = b"rdzv"

HUNG_UP: Final = "UNEXPECTED_EOF_WHILE_READING"


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
        hello = await _hello(host, port, tls)
    except ssl.SSLCertVerificationError as error:
        return AuthenticationError(f"{name} has no certificate that we trust: {error.verify_message}")
    except ssl.SSLError as error:
        if error.reason in NO_TLS:
            return ProtocolError(f"{name} does not speak TLS there; write etcd://")
        words = (error.reason or str(error)).lower().replace("_", " ")
        return AuthenticationError(
            f"{name} refused this client in the TLS handshake ({words}): give a client certificate that it trusts, by "
            f"cert= and key="
        )
    except TimeoutError:
        return None  # it is slow, and gRPC has said as much
    except (OSError, EOFError, UnicodeError) as error:  # of which the last is raised by a host that can be no name
        return Failure(describe(error) if isinstance(error, OSError) else str(error), FailureKind.UNDONE)
    speaks_tls = hello.startswith(TLS_ALERT) or b"HTTPS server" in hello
    if speaks_tls or (not hello and tls is None and await _speaks_tls(host, port)):
        return ProtocolError(f"{name} speaks TLS; write etcds://")
    if OUR_STORE in hello[:16]:
        return ProtocolError(f"{name} is a store of ours and no etcd; write {'tcps' if tls else 'tcp'}://")
    if not hello and tls is None:
        return Failure("it closed the connection", FailureKind.UNDONE)
    # Within TLS the handshake tells enough: without ALPN, which is the context's matter, it need not speak HTTP/2.
    if tls is not None or (len(hello) > SETTINGS and hello[3] == SETTINGS):
        return None
    return ProtocolError(f"{name} does not answer in HTTP/2; it is no etcd v3.4 or later ({hello[:40]!r})")


async def _hello(host: str, port: int, tls: ssl.SSLContext | None) -> bytes:
    """Return what a member says first; one that wants a certificate may say so only after its own hello."""
    with anyio.fail_after(ANSWER_WITHIN):
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            writer.write(PREFACE)
            await writer.drain()
            return await reader.read(512)
        finally:
            writer.transport.abort()


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether TLS's first words are answered in TLS, if only by a refusal, as of who shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whoever it is, nothing is told to him
    try:
        await _hello(host, port, context)
    except ssl.SSLError as error:
        return error.reason not in (*NO_TLS, HUNG_UP)
    except (OSError, EOFError):
        return False
    return True
