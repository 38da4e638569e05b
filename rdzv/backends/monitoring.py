"""Shell: what a node's process serves over HTTP beside its work: its own metrics, and the page of a store it hosts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv.errors import RendezvousSettingsError
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
    serve: Callable[..., contextlib.AbstractAsyncContextManager[str]],
    serving: store.sync.Serving,
    server: Server,
    address: str,
    settings: Settings,
    *,
    token: bytes | None,
    tls: ssl.SSLContext | None,
) -> contextlib.ExitStack | None:
    """Serve HTTP beside a store that listens at an address; what ends it. A port that is taken costs the page alone."""
    port, insecure = settings.http_port, settings.insecure
    try:
        context = serve(server, address, port, token=token, tls=tls, insecure=insecure, prefix=settings.prefix)
        page = contextlib.ExitStack()
        url = page.enter_context(serving.beside(context))
    except OSError as error:
        why = error.strerror or error
        log.warning("http_port=%d serves nothing: %s; the store does without", port, why)
        return None
    log.info("the runs of the store at %s are shown at %s", server.url, url)
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
        self._serve = partial(
            http_room("node", "metrics_port").serve_node,
            node,
            "" if open_to_all else "localhost",
            settings.metrics_port,
            token=credentials.token,
            tls=tls,
            insecure=settings.insecure,
        )

    def begin(self) -> None:
        """Serve them from the node's first arrival on, if they are asked for; to be called in the node's loop."""
        if self._serve is not None and self._task is None:
            self._task = asyncio.create_task(self._serve(), name=f"serve metrics of node {self._node.node_id}")
            self._node.on_close(self._end)

    async def _end(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
