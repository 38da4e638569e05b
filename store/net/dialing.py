"""Shell: how a client connects: to whom, with what pauses in between, and in what words it is told of what fails."""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
from typing import TYPE_CHECKING, Protocol

import anyio.to_thread

from store.net.racing import Addresses, connected_socket
from store.net.sockets import prepare
from store.net.standard_streams import open_before_uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from store.net.address import Address

__all__ = [
    "NEVER_ANSWERED",
    "NOBODY_LISTENS",
    "NO_TLS",
    "SAYS_NOTHING",
    "Dial",
    "TcpDial",
    "TurnedAway",
    "describe",
    "lack_of",
    "left_without_a_word",
]


class Dial(Protocol):
    """How a connection is made; tests on virtual time bring their own."""

    def __call__(
        self, protocol_factory: Callable[[], asyncio.Protocol], /
    ) -> Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]:
        """Connect and give what `loop.create_connection` gives."""
        ...


class TcpDial:
    """Connects to an address over TCP, with TLS if it asks for it."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, *, renew: Callable[[], ssl.SSLContext | None] | None = None
    ) -> None:
        self.secure: bool = address.secure
        self._context = (tls or ssl.create_default_context()) if address.secure else None
        self._renew = renew  # reads the files of certificates again
        self.addresses: Addresses = Addresses(address.host, address.port)

    async def __call__(
        self, protocol_factory: Callable[[], asyncio.Protocol], /
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect and give what `loop.create_connection` gives."""
        loop = asyncio.get_running_loop()
        open_before_uvloop(loop)
        context = self._context
        if self._renew is not None:
            renewed = await anyio.to_thread.run_sync(self._renew, abandon_on_cancel=True)
            context = (renewed or context) if self.secure else None
        try:
            # No await between the two: a socket that nobody has taken over yet could be lost there, unclosed.
            sock = await connected_socket(self.addresses)
            prepare(sock)  # here, and not by the loop's stand-in for it: uvloop's takes three times as long
            return await loop.create_connection(
                protocol_factory, sock=sock, ssl=context, server_hostname=self.addresses.host if context else None
            )
        except (ConnectionResetError, BrokenPipeError) as error:
            raise HungUp(IN_THE_HANDSHAKE) if context else error from None


class HungUp(ConnectionResetError):
    """A server ended a connection before it said a word; the text says what may be the matter."""


IN_THE_HANDSHAKE = (
    "it closed the connection in the TLS handshake, as a server does that wants a client's certificate (mutual TLS) "
    "and has got none, or one that it does not trust"
)
"""This is all that TLS 1.3 lets a refused client see."""

WITHOUT_A_WORD = "it closed the connection without a word; if it speaks TLS, write tcps://"
"""Said of a server that was never met, without TLS: of one that was met we know what it speaks."""


def left_without_a_word(*, secure: bool, met: bool) -> ConnectionResetError:
    """The error for a connection that was closed before the server said anything; `met`, if it ever has."""
    if secure:
        return HungUp(IN_THE_HANDSHAKE)
    return ConnectionResetError() if met else HungUp(WITHOUT_A_WORD)


class TurnedAway(ConnectionRefusedError):
    """Whoever listens at the store's address refused us, and said why: it is full, or it is not the store we met."""


NOBODY_LISTENS = "nobody listens there"
NEVER_ANSWERED = "it has never answered"
SAYS_NOTHING = (
    "it accepts connections and sends nothing: it is no store (of HTTP, say), or speaks TLS: for that, write tcps://",
    "it accepts connections and does not answer in the TLS handshake: it is no store, or without TLS: write tcp://",
)
"""Said of a server that was never met and does not greet, as ours do at once: to a client without TLS, and with it."""


NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL says of an answer that is none in TLS."""

_TLS_IN_WORDS = {
    **dict.fromkeys(NO_TLS, "it does not speak TLS: use tcp:// for it"),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a client's certificate (mutual TLS), and there is none",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refuses, as one does that wants a client's certificate (mutual TLS)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this client's certificate",
}


def describe(error: BaseException) -> str:
    """An operating-system error as a person would say it."""
    if isinstance(error, HungUp | TurnedAway):
        return str(error)
    if isinstance(error, ssl.SSLEOFError):
        return IN_THE_HANDSHAKE
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)  # those that Python raises, and not OpenSSL, have none
        return f"TLS failed: {_TLS_IN_WORDS.get(reason, reason)}"
    if isinstance(error, ConnectionRefusedError):
        return NOBODY_LISTENS
    if isinstance(error, ConnectionResetError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    lack = "" if isinstance(error, BlockingIOError) else lack_of(error)
    return lack or (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def lack_of(error: BaseException) -> str:
    """Say which limit of this process an error comes from, and how to raise it; empty if it is of something else."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error.strerror}: this process may have {soft} of at most {hard}; raise ulimit -n"
    if (isinstance(error, OSError) and error.errno == errno.EAGAIN) or "can't start new thread" in str(error):
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        allowed = "any number" if most == resource.RLIM_INFINITY else most
        return (
            f"no more threads or processes are started for this user: ulimit -u allows {allowed}, and the cgroup's "
            f"pids.max perhaps fewer; raise it"
        )
    return ""
