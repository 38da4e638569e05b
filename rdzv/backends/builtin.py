"""`connect`, and the built-in backends: a TCP store, which a node may host, and an etcd cluster.

This folder reads the environment and the settings' files; nodes get their content as arguments.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import warnings
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast

import store.sync
from rdzv.backends.credentials import Credentials, with_full_paths
from rdzv.backends.host_queries import MultiHostDial, wait_for_serving_host
from rdzv.backends.hosting import CALL_TIMEOUT, OneHostStarter
from rdzv.backends.monitoring import make_metrics_starter
from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.backends.succession import HostSuccession
from rdzv.config.endpoint import SCHEMES
from rdzv.config.settings import Settings, parse
from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from rdzv.node.handler import Handler
from rdzv.node.link.node_loop import NodeThread
from rdzv.node.node import Node
from store import Client, StoreError
from store.net.address import Address
from store.net.dialing import TcpDialer

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Generator, Mapping

    from rdzv.config.overrides import Overrides
    from rdzv.interface import RendezvousHandler
    from store import Store

    ClientToEnter = contextlib.AbstractAsyncContextManager[Store]

log: logging.Logger = logging.getLogger(__name__)

ETCD_TTL_LEAST = 6.0  # seconds; the least TTL that allows two renewals after an election of etcd's leader


def connect(url: str, **overrides: Unpack[Overrides]) -> HandlerToEnter:
    """Take part in a run's rendezvous: `async with rdzv.connect(url) as handler`, or without a block.

        handler = await rdzv.connect(url)
        ...
        await handler.aclose()

    Args:
        url: `scheme://host[:port]/run_id?parameters`.
        overrides: Parameters as keywords. Keywords override the URL, which overrides `RDZV_<NAME>` in the environment.

    Raises:
        RendezvousSettingsError: A parameter is wrong; the message names it, its value and the remedy.
        RendezvousConnectionError: No store answers within `join_timeout`.
    """
    return HandlerToEnter(url, overrides)


class HandlerToEnter:
    """The result of `connect`; enter or await it, once, to get a handler."""

    def __init__(self, url: str, overrides: Mapping[str, Any]) -> None:
        self._url = url
        self._overrides = overrides
        self._handler: Handler | None = None
        self._used = False

    async def __aenter__(self) -> Handler:
        if self._used:
            raise RendezvousStateError("rdzv.connect(...) is entered or awaited once; call it again for another node")
        self._used = True
        handler = await handler_for_url(self._url, self._overrides).__aenter__()
        self._handler = cast("Handler", handler)  # a registered backend's handler may be of another class
        return self._handler

    async def __aexit__(self, *error: Any) -> None:
        if self._handler is not None:
            await self._handler.__aexit__(*error)

    def __await__(self) -> Generator[Any, Any, Handler]:
        return self.__aenter__().__await__()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"rdzv.connect(...) is not connected yet, and has no {name}; write "
            f"`async with rdzv.connect(...) as handler:` or `handler = await rdzv.connect(...)`"
        )

    def __del__(self) -> None:
        if not self.__dict__.get("_used", True):
            warnings.warn(
                "rdzv.connect(...) was neither entered nor awaited, so this node has not connected", RuntimeWarning, 2
            )


maker_of_handlers: ContextVar[Callable[..., RendezvousHandler] | None] = ContextVar("maker_of_handlers", default=None)
"""If set, `handler_for_url` calls this function instead of a backend; `rdzv.testing` sets it in its nodes."""


def handler_for_url(url: str, overrides: Mapping[str, Any], *, blocking: bool = False) -> RendezvousHandler:
    """Return an unconnected handler of the URL's backend."""
    maker = maker_of_handlers.get()
    if maker is not None:
        return maker(url, overrides, blocking=blocking)
    return rendezvous_handler_registry.create_handler(RendezvousParameters.from_url(url, overrides))


def create_tcp_handler(parameters: RendezvousParameters) -> Handler:
    """Return a handler over a TCP store, which this process may host."""
    way = _TcpConnector(with_full_paths(parse(parameters.url, parameters.overrides, os.environ)))
    return Handler(way.node, open_store=way.new_client, open_blocking_store=way.blocking_client)


def make_client(settings: Settings, credentials: Credentials, **options: Any) -> ClientToEnter:
    """Return an unconnected client of the settings' store; `options` are further arguments of its class."""
    if settings.endpoint.scheme_info.family == "tcp":
        return _tcp_client(_make_dial(settings, credentials), settings, credentials, **options)
    from store.etcd import client as etcd

    return etcd.Client(**_etcd_options(settings, credentials), **options)


def _make_dial(settings: Settings, credentials: Credentials) -> TcpDialer:
    if settings.endpoint.has_successors:
        return MultiHostDial(settings, credentials)
    return TcpDialer(_single_host_address(settings), credentials.client_tls(), renew=credentials.renew)


def _tcp_client(dial: TcpDialer, settings: Settings, credentials: Credentials, **options: Any) -> Client:
    name = settings.endpoint.url if settings.endpoint.has_successors else str(_single_host_address(settings))
    return Client(dial, name=name, token=lambda: credentials.token, **options)


def _single_host_address(settings: Settings) -> Address:
    ((host, port),) = settings.endpoint.hosts
    return Address(host=host, port=port, secure=settings.uses_tls)


def _etcd_options(settings: Settings, credentials: Credentials) -> dict[str, Any]:
    from store.etcd.codec import Endpoints

    return {
        "cluster": Endpoints(hosts=settings.endpoint.hosts, secure=settings.uses_tls),
        "tls": credentials.client_tls(),
        "renew": credentials.renew,
        "user": settings.user,
        "password": credentials.read_password,
        # Below the prefix, where the user may write; the run id is empty, which no run's is.
        "receipts": f"{settings.prefix}//receipts/",
    }


class _TcpConnector:
    __slots__ = ("_begin_metrics", "_credentials", "_dial", "_hosting", "_of_node", "_rng", "_settings", "node")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._credentials = Credentials(settings)
        self._rng = random.Random(secrets.randbits(64))  # without a seed `Random` reads 2.5 kB of entropy
        self.node: Node = Node(settings, loop=NodeThread(), open_store=lambda: self, rng=self._rng)
        self.node.store_settings = self._settings_of_found_host
        self._begin_metrics = make_metrics_starter(self.node, settings, self._credentials)
        self._dial = _make_dial(self._settings, self._credentials)
        self._hosting: OneHostStarter | HostSuccession | None = None
        self._of_node: ClientToEnter | None = None

    def _settings_of_found_host(self) -> Settings:
        """Return the settings; of several hosts in the URL, keep only the one where the store was found."""
        found = self._dial.found if isinstance(self._dial, MultiHostDial) else None
        if found is None:
            return self._settings
        endpoint = replace(self._settings.endpoint, hosts=((found.address.host, found.address.port),))
        return replace(self._settings, endpoint=endpoint)

    def new_client(self, connect_timeout: float = CALL_TIMEOUT, **options: Any) -> ClientToEnter:
        how = {"timeout": CALL_TIMEOUT, "connect_timeout": connect_timeout, "timeout_name": "join_timeout"}
        return make_client(self._settings_of_found_host(), self._credentials, **how, **options)

    def blocking_client(self) -> store.sync.Client:
        credentials = self._credentials
        if isinstance(self._dial, MultiHostDial) and self._dial.found is None:
            wait_for_serving_host(self._dial, within=CALL_TIMEOUT)
        return store.sync.Client(
            _single_host_address(self._settings_of_found_host()),
            token=lambda: credentials.token,
            tls=credentials.client_tls(),
            renew=credentials.renew,
            timeout=CALL_TIMEOUT,
        )

    async def __aenter__(self) -> Store:
        self._begin_metrics()
        settings = self._settings
        if settings.is_host is not False:  # the decision needs a thread, which `is_host=0` saves
            await self._host_if_needed()
        times = {"timeout": CALL_TIMEOUT, "connect_timeout": settings.join_timeout, "timeout_name": "join_timeout"}
        about = {"rng": self._rng, "generation": self.node.least_store_generation}
        client = _tcp_client(self._dial, settings, self._credentials, **about, **times)
        client.on_connection_change(self._update_host_search)
        # The store is hosted above, outside `limit_concurrency`: nodes inside may wait for that store.
        try:
            async with self.node.loop.limit_concurrency():
                connected = await client.__aenter__()
        except StoreError as error:
            if self._hosting is not None and self._hosting.problem:
                error.args = (f"{error}; {self._hosting.problem}", *error.args[1:])
            raise
        self._of_node = client
        return connected

    def _update_host_search(self, connected: bool) -> None:
        """When connected, end the search for a host; when disconnected, search again if the URL has several hosts."""
        if connected and self._hosting is not None:
            self._hosting.note_store_found()
        elif isinstance(self._hosting, HostSuccession) and self.node.needs_store:
            self._hosting.resume_search()

    async def __aexit__(self, *error: Any) -> None:
        client, self._of_node = self._of_node, None
        if client is not None:
            await client.__aexit__(*error)

    async def _host_if_needed(self) -> None:
        if self._hosting is None:
            # Decide only at the first connection: a live run must not get a second store.
            kind = HostSuccession if self._settings.endpoint.has_successors else OneHostStarter
            self._hosting = hosting = kind(self._settings, self._credentials, self.new_client, self._rng)
            self.node.on_close(hosting.aclose)
            if isinstance(hosting, HostSuccession):
                self.node.call_on_lease_lost(hosting.resume_search)
                hosting.may_host = self.node.may_host
            self.node.hosts_store = lambda: hosting.is_hosting
        elif self.node.handed_on and isinstance(self._hosting, OneHostStarter):
            await self._hosting.reset()
        await self._hosting.try_to_start()


def create_etcd_handler(parameters: RendezvousParameters) -> Handler:
    """Return a handler over an etcd cluster."""
    settings = with_full_paths(parse(parameters.url, parameters.overrides, os.environ))
    try:
        from store.etcd import blocking as etcd_sync
    except ImportError as error:
        raise RendezvousSettingsError(f"{settings.endpoint.scheme} cannot be used: {error}") from error
    if settings.ttl < ETCD_TTL_LEAST:
        log.warning(
            "ttl=%g s is short for etcd, whose members need up to 2 s to elect a leader: below %g s a node that is "
            "well may lose its round by a change of leader",
            *(settings.ttl, ETCD_TTL_LEAST),
        )
    credentials = Credentials(settings)
    cluster = _etcd_options(settings, credentials)  # raises if a file is unreadable
    who = (settings.user, settings.password_file, settings.tls, settings.ca, settings.cert, settings.key)
    shared_as = (cluster["cluster"], settings.prefix, *who)

    def open_store(**more: Any) -> ClientToEnter:
        return make_client(settings, credentials, shared_as=shared_as, timeout=CALL_TIMEOUT, **more)

    def open_node_client() -> ClientToEnter:
        begin_metrics()
        return open_store(connect_timeout=settings.join_timeout, timeout_name="join_timeout")

    node = Node(settings, loop=NodeThread(), open_store=open_node_client)
    begin_metrics = make_metrics_starter(node, settings, credentials)
    return Handler(
        node, open_store=open_store, open_blocking_store=lambda: etcd_sync.Client(timeout=CALL_TIMEOUT, **cluster)
    )


for _scheme, _about in SCHEMES.items():
    rendezvous_handler_registry.register(_scheme, create_tcp_handler if _about.family == "tcp" else create_etcd_handler)
