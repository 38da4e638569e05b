"""Shell: how a client connects: to whom, with what pauses in between, and in what words it is told of what fails."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Protocol

import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from store.net.address import Address

__all__ = [
    "NEVER_ANSWERED",
    "SAYS_NOTHING",
    "Dial",
    "HungUp",
    "LeftWithoutAWord",
    "TurnedAway",
    "describe",
    "dial",
]

ADDRESS_WITHIN = 3.0  # seconds for one of a name's addresses, where a loop cannot try several at a time


class Dial(Protocol):
    """How a connection is made; tests on virtual time bring their own."""

    def __call__(
        self, protocol_factory: Callable[[], asyncio.Protocol], /
    ) -> Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]:
        """Connect and give what `loop.create_connection` gives."""
        ...


def dial(address: Address, tls: ssl.SSLContext | None) -> Dial:
    """A way to connect to an address over TCP, with TLS if it asks for it."""
    context = (tls or ssl.create_default_context()) if address.secure else None
    # For a name with a dead IPv6 address and a live IPv4 one. Not for a single address: asyncio's race between
    # addresses forgets the socket that has won, unclosed, if it is cancelled just then.
    delay = None if _is_literal(address.host) else 0.25

    async def dial_tcp(
        protocol_factory: Callable[[], asyncio.Protocol],
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        try:
            if not isinstance(loop, asyncio.BaseEventLoop):  # uvloop's does not know the delay
                sock = await _connected_socket(address)
                return await loop.create_connection(
                    protocol_factory, sock=sock, ssl=context, server_hostname=address.host if context else None
                )
            return await loop.create_connection(
                protocol_factory,
                address.host,
                address.port,
                ssl=context,
                happy_eyeballs_delay=delay,
            )
        except (ConnectionResetError, BrokenPipeError) as error:
            raise HungUp if context else error from None

    return dial_tcp


def _is_literal(host: str) -> bool:
    """Whether it is an IP address, and not a name that may have several."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _connected_socket(address: Address) -> socket.socket:
    """A socket connected to the first of the addresses that answers, each of which is given a short while."""
    problem = OSError(f"{address.host} has no address")
    # Neither the loop's getaddrinfo nor its sock_connect: uvloop asks threads of libuv's, which a forked child has not,
    # and libuv looks for them when the child ends.
    found = await anyio.to_thread.run_sync(
        lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), abandon_on_cancel=True
    )
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            with anyio.fail_after(ADDRESS_WITHIN):
                await _connect(sock, target)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise problem


async def _connect(sock: socket.socket, target: Any) -> None:
    """Connect a socket that does not block, to an address that is resolved."""
    loop = asyncio.get_running_loop()
    try:
        sock.connect(target)
    except BlockingIOError:
        connected = asyncio.Event()
        loop.add_writer(sock, connected.set)
        try:
            await connected.wait()
        finally:
            loop.remove_writer(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error)) from None


class HungUp(ConnectionResetError):
    """A server ended a TLS connection before it said a word: all that TLS 1.3 lets a refused client see."""

    def __str__(self) -> str:
        """What may be the matter."""
        return (
            "it closed the connection in the TLS handshake, as a server does that wants a client's certificate "
            "(mutual TLS) and has got none, or one that it does not trust"
        )


class LeftWithoutAWord(HungUp):
    """A server that was never met ended a plain connection; of one that was met we know what it speaks."""

    def __str__(self) -> str:
        """What may be the matter."""
        return "it closed the connection without a word; if it speaks TLS, write tcps://"


class TurnedAway(ConnectionRefusedError):
    """Whoever listens at the store's address refused us, and said why: it is full, or it is not the store we met."""


NEVER_ANSWERED = "it has never answered"
SAYS_NOTHING = "it takes connections and says nothing, as one does that speaks TLS: for that, write tcps://"
"""Of a server without TLS that has not sent its greeting, which is the first thing that ours do."""


_TLS_IN_WORDS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS: use tcp:// for it",
    "RECORD_LAYER_FAILURE": "it does not speak TLS: use tcp:// for it",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a client's certificate (mutual TLS), and there is none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this client's certificate",
}


def describe(error: BaseException) -> str:
    """An operating-system error as a person would say it."""
    if isinstance(error, HungUp):
        return str(error)
    if isinstance(error, ssl.SSLEOFError):
        return str(HungUp())
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)  # those that Python raises, and not OpenSSL, have none
        return f"TLS failed: {_TLS_IN_WORDS.get(reason, reason)}"
    if isinstance(error, TurnedAway):
        return str(error)
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, ConnectionResetError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__
