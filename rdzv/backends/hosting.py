"""Shell: which node starts the embedded store, and how long it lingers.

The URL names a host. The node whose machine that is starts the store there, at its first connect, if nobody listens
yet; of several on one machine the one whose bind succeeds. It never does so on a reconnect: a node that replaces the
store's host must not found a second, empty store beside a run that lives on elsewhere.

The store runs in a thread of that process, and dies with it. So that rank zero may leave first, it lingers after its
own node is done until nobody else is connected, for at most `close_timeout`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

import store.sync
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from store import StoreUsageError

if TYPE_CHECKING:
    import ssl

    from rdzv.config.settings import Settings
    from store import Server

__all__ = ["Host", "host_if_called_for"]

log = logging.getLogger(__name__)

NOT_OURS = (errno.EADDRNOTAVAIL,)


class Host:
    """An embedded store that this process serves."""

    def __init__(self, server: Server, stack: contextlib.ExitStack, *, linger: float) -> None:
        self._stack = stack
        self._linger = linger
        self.server = server

    async def aclose(self) -> None:
        """Wait until the others have gone, but not for ever, and end the store; being cancelled ends the wait."""
        try:
            if self.server.connections:
                log.info(
                    "the store at %s has %d connections, and waits up to %g s for them to end",
                    self.server.url,
                    self.server.connections,
                    self._linger,
                )
                await anyio.to_thread.run_sync(self.server.wait_until_alone, self._linger, abandon_on_cancel=True)
        finally:
            self.server.stop_waiting()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._stack.close)


def host_if_called_for(settings: Settings, *, token: bytes | None, tls: ssl.SSLContext | None) -> Host | None:
    """Start the embedded store if the settings ask for it, or if it is this machine's to start and nobody has.

    Raises:
        RendezvousConnectionError: `is_host` was asked for, and cannot be.
        RendezvousSettingsError: It would be open to strangers.
    """
    if settings.is_host is False or settings.endpoint.info.family != "tcp":
        return None
    ((host, port),) = settings.endpoint.hosts
    if settings.uses_tls and tls is None:
        if settings.is_host is None:
            return None
        raise RendezvousSettingsError(
            f"is_host is set, but there is no certificate to serve {settings.endpoint.url} with; give cert and key"
        )
    sock = _bind(host, port, insist=settings.is_host is True)
    if sock is None:
        return None
    stack = contextlib.ExitStack()
    try:
        server = stack.enter_context(
            store.sync.serve(sock=sock, token=token, tls=tls, insecure=settings.insecure, data_dir=settings.data_dir)
        )
    except StoreUsageError as error:
        sock.close()
        raise RendezvousSettingsError(f"the store cannot be started on {host}:{port}: {error}") from None
    log.info("this node hosts the store of run %s at %s", settings.run_id, server.url)
    return Host(server, stack, linger=settings.close_timeout)


def _bind(host: str, port: int, *, insist: bool) -> socket.socket | None:
    """A socket bound to the URL's host, or None if that is another machine, or somebody is there already."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        if insist:
            raise RendezvousConnectionError(f"is_host is set, but {host!r} names no address: {error}") from error
        return None  # a name that is not there yet is not this machine's
    last: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            if not _somebody_listens(family, address):
                sock.listen()  # several may bind at once, on some systems; one can listen
                return sock
            last = OSError(errno.EADDRINUSE, "somebody listens there already")
        except OSError as error:
            last = error
        sock.close()
    if insist:
        assert last is not None
        why = "it is no address of this machine" if last.errno in NOT_OURS else str(last)
        raise RendezvousConnectionError(
            f"is_host is set, but the store cannot be started on {host}:{port}: {why}"
        ) from last
    return None


def _somebody_listens(family: int, address: tuple[object, ...]) -> bool:
    """Whether a wildcard listener has this address of ours: some systems let one bind beside it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0
