"""Shell: which node starts the embedded store, and how long it lingers.

The URL names a host. The node whose machine that is starts the store there, while it first looks for one, if nobody
listens yet; of several on one machine the one whose bind succeeds. An address is bound as it is; for the machine's name
all its addresses are, as PyTorch's own rendezvous does. It never starts one on a reconnect: a node that replaces the
store's host must not found a second, empty store beside a run that lives on elsewhere.

The store runs in a thread of that process, and dies with it. So that rank zero may leave first, it lingers after its
own node is done until nobody else is connected, for at most `close_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from ssl import CERT_REQUIRED
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

import store.sync
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError
from store import StoreUsageError
from store.net.threads import in_thread
from store.printable import escaping

if TYPE_CHECKING:
    import ssl

    from rdzv.config.settings import Settings
    from store import Server

__all__ = ["Host", "Hosting", "NotResolvedError", "host_if_called_for"]

log = escaping(logging.getLogger(__name__))

RESOLVE_AGAIN_AFTER: Final = 0.5  # seconds; all the others wait for the node that hosts


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


class NotResolvedError(RendezvousConnectionError):
    """The URL's host is a name that has no address, or none yet."""


class Hosting:
    """Whether this process starts the store: decided while it first looks for one, and never after.

    The name in the URL may have no address yet when a job starts (DNS is often late). Then it is looked up again until
    it has one, or until a store has been found; whoever waits for the store says meanwhile what is the matter.
    """

    def __init__(self, settings: Settings, *, token: bytes | None, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._token = token
        self._tls = tls
        self._task: asyncio.Task[Host | None] | None = None
        self._asked = asyncio.Event()  # once, at least
        self._settled = asyncio.Event()

    async def begin(self) -> None:
        """Start the store if it is known to be called for, the first time that this is called.

        Being cancelled here does not end what is under way: a thread cannot be cancelled, and what it starts must not
        be lost. `aclose` sees to its end.

        Raises:
            RendezvousConnectionError: `is_host` was asked for, and cannot be.
            RendezvousSettingsError: It would be open to strangers.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._start(), name=f"host the store of run {self._settings.run_id}")
            await self._asked.wait()
            if self._task.done():
                self._task.result()

    def settle(self) -> None:
        """A store was found: this process will not start one any more."""
        self._settled.set()

    @property
    def hosts(self) -> bool:
        """Whether this process serves the store; from any thread."""
        task = self._task
        return (
            task is not None and task.done() and not task.cancelled() and not task.exception() and bool(task.result())
        )

    async def aclose(self) -> None:
        """End the store that this process hosts, if it does; also when nobody waited for it to be started."""
        self.settle()
        if self._task is None:
            return
        await asyncio.wait([self._task])
        if not self._task.cancelled() and self._task.exception() is None and (host := self._task.result()) is not None:
            await host.aclose()

    async def _start(self) -> Host | None:
        while True:
            try:
                return await in_thread(lambda: host_if_called_for(self._settings, token=self._token, tls=self._tls))
            except NotResolvedError as error:
                log.debug("%s; looking it up again in %g s", error, RESOLVE_AGAIN_AFTER)
            except RendezvousError as error:
                if not self._asked.is_set():
                    raise
                log.error("%s", error)  # noqa: TRY400  whoever waits for the store waits on, and reads here why
                return None
            finally:
                # No await between this and the end of the task, if it ends: `begin` is to find it done.
                asyncio.get_running_loop().call_soon(self._asked.set)
            with anyio.move_on_after(RESOLVE_AGAIN_AFTER):
                await self._settled.wait()
            if self._settled.is_set():
                return None


def host_if_called_for(settings: Settings, *, token: bytes | None, tls: ssl.SSLContext | None) -> Host | None:
    """Start the embedded store if the settings ask for it, or if it is this machine's to start and nobody has.

    Raises:
        NotResolvedError: The URL's host is a name that has no address, as it may be for a moment when a job starts.
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
    insist = settings.is_host is True
    try:
        is_closed_to_strangers = token is not None or (tls is not None and tls.verify_mode is CERT_REQUIRED)
        address = _address_to_listen_on(host, port, may_be_open=settings.insecure or is_closed_to_strangers)
        stack = contextlib.ExitStack()
        server = stack.enter_context(
            store.sync.serve(
                address,
                port,
                token=token,
                tls=tls,
                insecure=settings.insecure,
                limits=settings.limits,
                data_dir=settings.data_dir,
            )
        )
    except StoreUsageError as error:
        raise RendezvousSettingsError(f"the store cannot be started on {host}:{port}: {error}") from None
    except NotResolvedError:  # which is an OSError, too
        raise
    except OSError as error:
        if not insist:
            return None  # it is another machine's, or another process was first
        why = error.strerror or str(error)
        raise RendezvousConnectionError(
            f"is_host is set, but the store cannot be started on {host}:{port}: {why}"
        ) from error
    log.info("this node hosts the store of run %s at %s", settings.run_id, server.url)
    return Host(server, stack, linger=settings.close_timeout)


def _address_to_listen_on(host: str, port: int, *, may_be_open: bool) -> str:
    """Where to listen for a URL's host: "" for every address of this machine, if the host is its name.

    A name may stand for several addresses of this machine, and for others elsewhere: on Debian a machine calls itself
    127.0.1.1. Nodes of one machine that bind all its addresses cannot start two stores, and those elsewhere reach it.

    Raises:
        NotResolvedError: The name has no address.
        OSError: None of its addresses is this machine's, or somebody listens there already.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise NotResolvedError(f"the store cannot be started on {host}:{port}: {host!r} names no address") from error
    ours = [(family, address) for family, _, _, _, address in found if _is_of_this_machine(family, address)]
    if not ours:
        raise OSError(errno.EADDRNOTAVAIL, "it is no address of this machine")
    if any(_somebody_listens(family, address) for family, address in ours):
        raise OSError(errno.EADDRINUSE, "somebody listens there already")
    if host == "localhost" or _is_ip_address(host):
        return host
    if may_be_open:
        return ""
    first = str(ours[0][1][0])
    if all(ipaddress.ip_address(str(address[0])).is_loopback for _, address in ours):
        log.warning(
            "the store listens on %s only, which is all that %s stands for here, and no other machine reaches it: "
            "give the run a token or mutual TLS, or say insecure=1, and it will listen on every address",
            first,
            host,
        )
    return first


def _is_ip_address(host: str) -> bool:
    """Whether a host is written as an address, not as a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_of_this_machine(family: int, address: tuple[object, ...]) -> bool:
    """Whether an address is one of this machine's: then, and only then, a socket can be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _somebody_listens(family: int, address: tuple[object, ...]) -> bool:
    """Whether somebody listens at an address of ours, perhaps on all of them: some systems let one bind beside it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0
