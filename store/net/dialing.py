"""Connects a client to a server, finds the route to it, and describes errors in words."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
from typing import TYPE_CHECKING, Final, TypeAlias

import anyio
import anyio.to_thread

from store.errors import AuthenticationError
from store.limits import is_loopback
from store.net.racing import Addresses, connect_async
from store.net.sockets import port_shortage_text, set_tcp_options
from store.net.standard_streams import reserve_streams_if_uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from store.net.address import Address

FOUND_WITHIN: Final = 3.0  # seconds for all name lookups
ELSEWHERE: Final = "another"  # stands for the unknown id of any host but the first

Ends: TypeAlias = tuple[str, str]  # the addresses of a route's ends: this machine, and a cluster's member

Dial: TypeAlias = "Callable[[Callable[[], asyncio.Protocol]], Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]]"
"""A function that connects, and returns the result of `loop.create_connection`."""

Renew: TypeAlias = "Callable[[], ssl.SSLContext | None] | None"  # reads the certificate files again


async def reload_tls(tls: ssl.SSLContext | None, renew: Renew) -> ssl.SSLContext | None:
    """Return the TLS context for a new connection, from the files as they are now; None without TLS."""
    found = None if renew is None else await anyio.to_thread.run_sync(renew, abandon_on_cancel=True)
    return tls and (found or tls)


class TcpDialer:
    """Connects to an address over TCP, with TLS if the address says so."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, *, renew: Renew = None) -> None:
        self.secure: bool = address.secure
        self.tls: ssl.SSLContext | None = (tls or ssl.create_default_context()) if address.secure else None
        self.renew = renew
        self.addresses: Addresses = Addresses(address.host, address.port)

    async def __call__(
        self, protocol_factory: Callable[[], asyncio.Protocol], /
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect; return transport and protocol."""
        loop = asyncio.get_running_loop()
        reserve_streams_if_uvloop(loop)
        context = await reload_tls(self.tls, self.renew)
        await self.choose_addresses(context)
        try:
            # Do not await between getting the socket and passing it on: a cancellation there would leak it.
            sock = await connect_async(self.addresses)
            set_tcp_options(sock)  # set here, as uvloop's socket object would take three times as long
            return await loop.create_connection(
                protocol_factory, sock=sock, ssl=context, server_hostname=self.addresses.host if context else None
            )
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ClosedBeforeGreeting(IN_THE_HANDSHAKE) if context else error from None

    async def choose_addresses(self, context: ssl.SSLContext | None) -> None:
        """Do nothing; a subclass for several hosts sets `addresses` here, before each attempt to connect."""


async def find_route(hosts: Sequence[tuple[str, int]], server: str) -> tuple[Ends, str] | None:
    """Return the first route out of this machine, else the first host's; and the host's id: `server` or `ELSEWHERE`."""
    first = None
    with anyio.move_on_after(FOUND_WITHIN):
        for place, (host, port) in enumerate(hosts):
            ends = await _route_ends(host, port)
            if ends is not None and ends[0] != ends[1] and not is_loopback(ends[1]):
                return ends, ELSEWHERE if place else server
            if not place:
                first = ends
    return None if first is None else (first, server)


async def _route_ends(host: str, port: int) -> Ends | None:
    with contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, _, _, target in found:
            with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
                sock.connect(target)  # sends nothing: it only chooses a route
                return str(sock.getsockname()[0]), str(target[0])
    return None


class ClosedBeforeGreeting(ConnectionResetError):
    """The server closed a connection before it sent any bytes."""


IN_THE_HANDSHAKE = (
    "it closed the connection in the TLS handshake, as a server does that wants a client's certificate (mutual TLS) "
    "and has got none, or one that it does not trust"
)
"""The problem in words: with TLS 1.3, a rejected client sees no more than this."""

WITHOUT_A_WORD = "it closed the connection without a word; if it speaks TLS, write tcps://"
"""The problem in words, if a server that has never answered closes a connection without TLS."""


def silent_close_error(*, secure: bool, met: bool) -> ConnectionResetError:
    """Return the error of a connection closed without any bytes; `met`: the server has answered before."""
    if secure:
        return ClosedBeforeGreeting(IN_THE_HANDSHAKE)
    return ConnectionResetError() if met else ClosedBeforeGreeting(WITHOUT_A_WORD)


def untrusted_error(name: str, error: ssl.SSLCertVerificationError) -> AuthenticationError:
    """Return the error for a server whose certificate is not trusted."""
    return AuthenticationError(f"{name} has no certificate that we trust: {error.verify_message}")


class RefusedByStore(ConnectionRefusedError):
    """The server rejected the client with a reason, for example that the server is full."""


NOBODY_LISTENS = "nobody listens there"
NEVER_ANSWERED = "it has never answered"
SAYS_NOTHING = (
    "it accepts connections and sends nothing: it is no store (of HTTP, say), or speaks TLS: for that, write tcps://",
    "it accepts connections and does not answer in the TLS handshake: it is no store, or without TLS: write tcp://",
)
"""The problem in words of a server that sends no greeting: for a client without TLS, and for one with TLS."""


NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""OpenSSL's errors for an answer that is not TLS."""

_TLS_IN_WORDS = {
    **dict.fromkeys(NO_TLS, "it does not speak TLS: use tcp:// for it"),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a client's certificate (mutual TLS), and there is none",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refuses, as one does that wants a client's certificate (mutual TLS)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this client's certificate",
}


def error_text(error: BaseException) -> str:
    """Return an error of the operating system or of TLS in plain words."""
    if isinstance(error, ClosedBeforeGreeting | RefusedByStore):
        return str(error)
    if isinstance(error, ssl.SSLEOFError):
        return IN_THE_HANDSHAKE
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)
        return f"TLS failed: {_TLS_IN_WORDS.get(reason, reason)}"
    if isinstance(error, ConnectionRefusedError):
        return NOBODY_LISTENS
    if isinstance(error, ConnectionResetError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return shortage_text(error) or (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def shortage_text(error: BaseException) -> str:
    """Return the shortage of this machine or process that caused an error, with the remedy; "" for other errors."""
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return port_shortage_text()
    return "" if isinstance(error, BlockingIOError) else exhausted_limit(error)


def exhausted_limit(error: BaseException) -> str:
    """Return the exhausted limit of this process that caused an error, with the remedy; "" for other errors."""
    if isinstance(error, socket.gaierror):  # a resolver may fail because it cannot open a file
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as lack:
            return exhausted_limit(lack)
        return ""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error.strerror}: this process may have {soft} of at most {hard}; raise ulimit -n"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        text = f"{error.strerror}: this process may write files of {most} bytes; raise ulimit -f"
        return "" if most == resource.RLIM_INFINITY else text
    if (isinstance(error, OSError) and error.errno == errno.EAGAIN) or "can't start new thread" in str(error):
        most, memory = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS))
        allowed = "any number" if most == resource.RLIM_INFINITY else most
        also = "" if memory == resource.RLIM_INFINITY else f", ulimit -v {memory // 1024} kB of memory"
        return (
            f"no more threads or processes are started for this user: ulimit -u allows {allowed}{also}, and the "
            f"cgroup's pids.max perhaps fewer; raise it"
        )
    return ""
