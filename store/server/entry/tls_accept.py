"""Shell: what happens to a connection at a port with TLS before it is anybody's (promise S8).

asyncio would do the handshake by itself, and drop without a word whatever fails in it. So a connection is taken from
the listener as a bare socket, and looked at before TLS begins: a client with TLS speaks first, and its first byte is
known. A client without TLS waits for our greeting, and would wait until both give up; it is told, in its own protocol,
what this port speaks. Everyone who is turned away costs one line in the log, which says why, and all of it together may
last no longer than `handshake_timeout`.

Who stands here counts as a connection: strangers do not get round `connections_max` by never finishing a handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Protocol

import anyio

from store.net.address import host_and_port
from store.net.sockets import forget, let_go_in_children
from store.protocol import wire
from store.protocol.wire import Sorry
from store.server.peer import LEAVE_WITHIN

if TYPE_CHECKING:
    from store.server.entry.strangers import Strangers

__all__ = ["Doorstep", "Host"]

log: logging.Logger = logging.getLogger(__name__)

TLS_HANDSHAKE = b"\x16"  # the content type of a client's first record: RFC 8446, B.1
# Seconds in which a client with TLS has begun to speak, if it is in good health; one that is not will come again.
SILENCE = 3.0
SPEAKS_TLS = Sorry("protocol", "this port speaks TLS, and the client does not: use tcps:// and the server's authority")

_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate, and this server wants one (mutual TLS)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this server's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not take this server's certificate for this server's",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not take this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this server's certificate has expired",
    "UNEXPECTED_EOF_WHILE_READING": "it hung up in mid-handshake; it may not trust this server's certificate",
}


class Host(Protocol):
    """What the doorstep needs of its server."""

    strangers: Strangers

    @property
    def handshake_timeout(self) -> float:
        """How long a connection may take to become a conversation."""
        ...

    def now(self) -> float:
        """Seconds on the server's clock."""
        ...

    def has_room_for(self, others: int) -> bool:
        """Whether one more connection may come, beside those there are and so many that are about to be."""
        ...

    def protocol(self) -> asyncio.BufferedProtocol:
        """A protocol object for a connection that has been accepted."""
        ...

    def turned_away(self) -> bool:
        """Somebody is refused or hung up on; whether the log has a line for it."""
        ...


class Doorstep:
    """The connections to one server that are not through their TLS handshake yet."""

    def __init__(self, server: Host, tls: ssl.SSLContext) -> None:
        self._server = server
        self._tls = tls
        self._within = server.handshake_timeout
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many stand here now."""
        return len(self._tasks)

    def take(self, sock: socket.socket) -> None:
        """Somebody has connected."""
        if not self._server.has_room_for(len(self._tasks)):
            sock.close()  # before TLS there is no way to say so that it would understand; it comes again
            self._server.turned_away()
            return
        task = asyncio.get_running_loop().create_task(self._let_in(sock))
        self._tasks.add(task)
        newcomer = _Newcomer(task)
        self._server.strangers.came(newcomer, _address_of(sock), self._server.now())
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._server.strangers.went(newcomer))

    async def close(self) -> None:
        """Send away who still stands here."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            with anyio.CancelScope(shield=True):  # whoever was cancelled still has a farewell to say to all others
                await asyncio.wait(tasks)

    async def _let_in(self, sock: socket.socket) -> None:
        """Bring a connection through its handshake, and give it to the server; or say why not."""
        owner = _Owner()
        let_go_in_children(owner, sock)
        try:
            name = host_and_port(*sock.getpeername()[:2])
        except OSError:
            name = "a client"
        try:
            with anyio.fail_after(self._within):
                if await self._speaks_tls(sock, name):
                    await asyncio.get_running_loop().connect_accepted_socket(
                        self._server.protocol,
                        sock,
                        ssl=self._tls,
                        ssl_handshake_timeout=self._within + 1.0,  # our own time limit comes first
                        ssl_shutdown_timeout=LEAVE_WITHIN,
                    )
        except (OSError, TimeoutError) as error:
            self._turn_away(name, _describe(error, self._within))
            sock.close()
        except BaseException:
            sock.close()
            raise
        finally:
            forget(owner)

    async def _speaks_tls(self, sock: socket.socket, name: str) -> bool:
        """Look at the first byte without taking it. A client without TLS is told, and gone when this returns."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            with anyio.fail_after(min(SILENCE, self._within / 2)):
                await readable.wait()
            first = sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            first = None
        except OSError:
            first = b""
        finally:
            loop.remove_reader(sock)
        if first == TLS_HANDSHAKE:
            return True
        if first == b"":  # it has gone, and has said nothing wrong: a port is looked at by many
            sock.close()
            return False
        what = "it says nothing, as a client does that speaks no TLS" if first is None else "what it says is not TLS"
        self._turn_away(name, what)
        with contextlib.suppress(OSError):
            if first is not None:
                sock.recv(64 * 1024)  # closing with something unread would reset what it is told
            sock.send(wire.encode_sorry(SPEAKS_TLS))
            sock.shutdown(socket.SHUT_WR)
        sock.close()
        return False

    def _turn_away(self, name: str, why: str) -> None:
        if self._server.turned_away():
            log.warning("%s is refused: TLS failed: %s", name, why)


class _Owner:
    """Whose a socket is as long as no transport has it."""


class _Newcomer:
    """A connection in its handshake, as one that can be ended."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def abort(self) -> None:
        """Close it at once."""
        self._task.cancel()


def _address_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has gone already
        return ""


def _describe(error: OSError, within: float) -> str:
    """Why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is none that this server trusts: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)  # those that Python raises, and not OpenSSL, have none
        return _REASONS.get(reason, reason)
    if isinstance(error, TimeoutError):
        return f"no handshake within {within:g} s"
    return _REASONS["UNEXPECTED_EOF_WHILE_READING"]
