"""Shell: `connect`, and the backends that are built in: a TCP store, which a node may host itself, and an etcd cluster.

Files and the environment are read here, sockets are made here; everything else gets what it needs handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from typing import TYPE_CHECKING, Any, Unpack

import anyio.to_thread

import store.sync
from rdzv.backends.hosting import host_if_called_for
from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.config.settings import Settings, parse
from rdzv.errors import RendezvousSettingsError
from rdzv.node.handler import Handler
from store import Client
from store.client.keepalive import ThreadKeeper
from store.net.address import Address
from store.net.dialing import dial

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rdzv.backends.hosting import Host
    from rdzv.config.overrides import Overrides
    from rdzv.interface import RendezvousHandler
    from store import Store

__all__ = ["Credentials", "connect", "create_etcd", "create_tcp"]

CALL_TIMEOUT = 30.0  # seconds for one request; a wait for nodes is not a request


@contextlib.asynccontextmanager
async def connect(url: str, **overrides: Unpack[Overrides]) -> AsyncIterator[RendezvousHandler]:
    """Take part in the rendezvous of a run for as long as the context lasts.

    Args:
        url: `scheme://host[:port]/run_id?parameters`.
        overrides: The same parameters as keywords; they beat the URL, which beats `RDZV_<NAME>` in the environment.

    Raises:
        RendezvousSettingsError: A parameter is wrong; the message names it, its value and the remedy.
        RendezvousConnectionError: No store answers within `join_timeout`.
    """
    parameters = RendezvousParameters.from_url(url, overrides)
    async with rendezvous_handler_registry.create_handler(parameters) as handler:
        yield handler


def create_tcp(parameters: RendezvousParameters) -> Handler:
    """A handler over a TCP store, which this process hosts if it is called for."""
    return tcp_handler(parse(parameters.url, parameters.overrides, os.environ))


def tcp_handler(settings: Settings) -> Handler:
    """The same, from settings that are parsed already."""
    credentials = Credentials.of(settings)
    ((host, port),) = settings.endpoint.hosts
    address = Address(host=host, port=port, secure=settings.uses_tls)
    hosting_considered = False

    def client(connect_timeout: float) -> Client:
        return Client(
            dial(address, credentials.client_tls()),
            name=str(address),
            token=credentials.token,
            timeout=CALL_TIMEOUT,
            connect_timeout=connect_timeout,
            timeout_name="join_timeout",
        )

    @contextlib.asynccontextmanager
    async def open_store() -> AsyncIterator[Store]:
        nonlocal hosting_considered
        if not hosting_considered:
            # At the first connect only: a second, empty store must not stand beside a living run.
            hosting_considered = True
            server_tls = credentials.server_tls() if settings.uses_tls else None
            starting = asyncio.create_task(
                anyio.to_thread.run_sync(lambda: host_if_called_for(settings, token=credentials.token, tls=server_tls))
            )
            handler.on_close(lambda: _end_host(starting))
            await asyncio.shield(starting)  # a thread cannot be cancelled, and what it starts must not be lost
        async with client(settings.join_timeout) as opened:
            yield opened

    handler = Handler(
        settings,
        open_store=open_store,
        open_keeper=lambda _: ThreadKeeper(lambda: client(CALL_TIMEOUT)),
        open_blocking_store=lambda: store.sync.Client(
            address, token=credentials.token, tls=credentials.client_tls(), timeout=CALL_TIMEOUT
        ),
    )
    return handler


def create_etcd(parameters: RendezvousParameters) -> Handler:
    """A handler over an etcd cluster."""
    settings = parse(parameters.url, parameters.overrides, os.environ)
    try:
        from store.etcd import blocking as etcd_sync
        from store.etcd import client as etcd
        from store.etcd.codec import Cluster
    except ImportError as error:
        raise RendezvousSettingsError(f"{settings.endpoint.scheme} cannot be used: {error}") from error
    credentials = Credentials.of(settings)
    cluster = Cluster(hosts=settings.endpoint.hosts, secure=settings.uses_tls)
    options: dict[str, Any] = {
        "tls": credentials.client_tls(),
        "user": settings.user,
        "password": credentials.password,
        "timeout": CALL_TIMEOUT,
        # No run has an empty name, so this is nobody's; and a user who may write runs may write there.
        "receipts": f"{settings.prefix}//receipts/",
    }
    return Handler(
        settings,
        open_store=lambda: etcd.Client(
            cluster, connect_timeout=settings.join_timeout, timeout_name="join_timeout", **options
        ),
        open_keeper=lambda _: ThreadKeeper(lambda: etcd.Client(cluster, **options)),
        open_blocking_store=lambda: etcd_sync.Client(cluster, **options),
    )


async def _end_host(starting: asyncio.Task[Host | None]) -> None:
    """End the store that this process hosts, if it does; also when nobody waited for it to be started."""
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None and (host := starting.result()) is not None:
        await host.aclose()


class Credentials:
    """What a run's settings say about who may take part: a token or a password, and certificates."""

    def __init__(self, settings: Settings, token: bytes | None, password: str | None) -> None:
        self._settings = settings
        self.token = token
        self.password = password

    @classmethod
    def of(cls, settings: Settings) -> Credentials:
        """Read the files that the settings name.

        Raises:
            RendezvousSettingsError: One of them cannot be read, or holds nothing.
        """
        token, password = settings.token, None
        if settings.token_file is not None:
            token = _read_secret("token_file", settings.token_file, "the shared secret")
        if settings.password_file is not None:
            password = _read_secret("password_file", settings.password_file, "the password").decode()
        return cls(settings, token.encode() if isinstance(token, str) else token, password)

    def client_tls(self) -> ssl.SSLContext | None:
        """How to reach the store over TLS; None: as the system does, or without."""
        settings = self._settings
        if settings.tls is not None:
            context: ssl.SSLContext = settings.tls
            return context
        if not settings.uses_tls or (settings.ca is None and settings.cert is None):
            return None
        try:
            context = ssl.create_default_context(cafile=settings.ca)
            if settings.cert is not None:
                context.load_cert_chain(settings.cert, settings.key)
        except OSError as error:
            raise _bad_certificates(settings, error) from error
        return context

    def server_tls(self) -> ssl.SSLContext | None:
        """How to serve the store over TLS; None if there is no certificate to serve it with."""
        settings = self._settings
        if settings.cert is None:
            return None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.cert, settings.key)
            if settings.ca is not None:
                context.load_verify_locations(settings.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise _bad_certificates(settings, error) from error
        return context


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise RendezvousSettingsError(f"{name}={path!r} cannot be read: {error.strerror or error}") from error


def _read_secret(name: str, path: str, what: str) -> bytes:
    secret = _read(name, path).strip()
    if not secret:
        raise RendezvousSettingsError(f"{name}={path!r} is empty; write {what} into it")
    return secret


def _bad_certificates(settings: Settings, error: OSError) -> RendezvousSettingsError:
    named = {"ca": settings.ca, "cert": settings.cert, "key": settings.key}
    given = ", ".join(f"{name}={path!r}" for name, path in named.items() if path is not None)
    return RendezvousSettingsError(
        f"{given} cannot be used: {error.strerror or error}; "
        f"they must be readable PEM files, and the key the certificate's"
    )


for _scheme, _creator in (("tcp", create_tcp), ("tcps", create_tcp), ("etcd", create_etcd), ("etcds", create_etcd)):
    rendezvous_handler_registry.register(_scheme, _creator)
