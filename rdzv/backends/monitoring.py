"""Shell: what a node's process serves over HTTP beside its work: its own metrics, and the page of a store it hosts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv.errors import RendezvousSettingsError
from rdzv.http.door import Door, where_to_listen
from store.net.address import host_and_port
from store.net.tasks import cancel_and_wait
from store.printable import escaping

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    import store.sync
    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from rdzv.node.node import Node
    from store import Server

__all__ = ["Monitoring", "http_room", "serve_page"]

log: logging.Logger = escaping(logging.getLogger(__name__))


def http_room(name: str, parameter: str) -> Any:
    """Return a module of `rdzv.http` that needs the extra.

    Raises:
        RendezvousSettingsError: That is not installed; it names the parameter that needs it.
    """
    try:
        return importlib.import_module(f"rdzv.http.{name}")
    except ImportError as error:
        raise RendezvousSettingsError(f"{parameter} needs {error.name}: pip install 'rdzv[http]'") from None


def serve_page(
    serve: Callable[..., contextlib.AbstractAsyncContextManager[int]],
    serving: store.sync.Serving,
    server: Server,
    address: str,
    settings: Settings,
    *,
    token: bytes | None,
    tls: ssl.SSLContext | None,
) -> contextlib.ExitStack | None:
    """Serve HTTP beside a store that listens at an address; what ends it. A port that is taken costs the page alone."""
    host, loopback = where_to_listen(address, token=token, secure=tls is not None, insecure=settings.insecure)
    try:
        context = serve(
            server,
            host,
            settings.http_port,
            token=token,
            tls=tls,
            loopback=loopback,
            prefix=settings.prefix,
        )
        page = contextlib.ExitStack()
        port = page.enter_context(serving.beside(context))
    except OSError as error:
        why = error.strerror or error
        log.warning("http_port=%d serves nothing: %s; the store does without", settings.http_port, why)
        return None
    where = host_and_port(host or socket.gethostname(), port)
    scheme = "http" if tls is None else "https"
    log.info("the runs of the store at %s are shown at %s://%s", server.url, scheme, where)
    return page


class Monitoring:
    """The metrics of a node's own process.

    Args:
        node: Whose.
        settings: What the user chose.
        credentials: Who may ask, where a token or a certificate says so.

    Raises:
        RendezvousSettingsError: The extra is not installed.
    """

    def __init__(self, node: Node, settings: Settings, credentials: Credentials) -> None:
        self._node = node
        self._task: asyncio.Task[None] | None = None
        self._serve = None
        if settings.metrics_port is None or not settings.can_join:
            return
        # What an etcd cluster trusts says nothing of who may look at this node.
        tls = credentials.server_tls() if settings.uses_tls and settings.endpoint.info.family == "tcp" else None
        # Bound as a store would be: to loopback, unless who may come is known, or nobody minds.
        is_mutual = tls is not None and settings.ca is not None
        open_to_all = settings.insecure or credentials.token is not None or is_mutual
        host, loopback = where_to_listen(
            "" if open_to_all else "localhost",
            token=credentials.token,
            secure=tls is not None,
            insecure=settings.insecure,
        )
        door = Door(token=credentials.token, loopback=loopback, secure=tls is not None)
        serve_node = http_room("node", "metrics_port").serve_node
        self._serve = partial(serve_node, node, host, settings.metrics_port, door=door, tls=tls)

    def begin(self) -> None:
        """Serve them from the node's first arrival on, if they are asked for; to be called in the node's loop."""
        if self._serve is not None and self._task is None:
            self._task = asyncio.create_task(self._serve(), name=f"serve metrics of node {self._node.node_id}")
            self._node.on_close(self._end)

    async def _end(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
