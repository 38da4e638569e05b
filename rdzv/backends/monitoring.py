"""Serves the embedded store with its HTTP page, and the metrics of a node's own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import resource
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import store.sync
from rdzv.errors import RendezvousSettingsError
from store.net.sockets import files_needed
from store.net.tasks import cancel_and_wait
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from rdzv.node.node import Node
    from store import Server
    from store.net.sockets import Sockets

log: Final = make_logger(__name__)


def http_module(name: str, parameter: str) -> Any:
    """Return a module of `rdzv.http`; without the extra `http`, raise an error that names `parameter`."""
    try:
        return importlib.import_module(f"rdzv.http.{name}")
    except ImportError as error:
        raise RendezvousSettingsError(f"{parameter} needs {error.name}: pip install 'rdzv[http]'") from None


def make_metrics_starter(node: Node, settings: Settings, credentials: Credentials) -> Callable[[], None]:
    """Return a function, to call in the node's loop, that starts serving metrics if `metrics_port` is set."""
    if settings.metrics_port is None or not settings.can_join:
        return lambda: None
    token, tls = credentials.server_token_getter(renews=True), credentials.server_tls(renews=True)
    insecure = settings.insecure
    # Serve the metrics on loopback only, unless clients are authenticated or `insecure` is set.
    host = "" if insecure or token is not None or (tls is not None and settings.ca is not None) else "localhost"
    serve_node = http_module("node", "metrics_port").serve_node
    serve = partial(serve_node, node, host, settings.metrics_port, token=token, tls=tls, insecure=insecure)
    tasks: list[asyncio.Task[None]] = []

    def start_metrics() -> None:
        if not tasks:
            tasks.append(asyncio.create_task(serve(), name=f"serve metrics of node {node.node_id}"))
            node.on_close(lambda: cancel_and_wait(*tasks))

    return start_metrics


def serve_embedded(
    settings: Settings, credentials: Credentials, address: str, port: int, listeners: Sockets | None = None
) -> tuple[contextlib.ExitStack, Server]:
    """Serve the embedded store, and its page if `http_port` is set; return (a context that ends both, the server).

    If the page cannot be served, log only. Raise `OSError` if the address cannot be bound, `StoreUsageError` if every
    machine could connect, `RendezvousSettingsError` without the extra or enough open files.
    """
    port_of_page, insecure = settings.http_port, settings.insecure
    nodes, most = settings.min_nodes or 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if nodes > 1 and most != resource.RLIM_INFINITY and most < (files := files_needed(2 * nodes)):
        raise RendezvousSettingsError(
            f"the limit of open files is {most}, and the store of a run of {nodes} nodes needs {files}; raise ulimit -n"
        )
    app = None if port_of_page is None else http_module("app", "http_port")  # without the extra, raise before serving
    token, tls = credentials.server_token_getter(renews=True), credentials.server_tls(renews=True)
    store_serving = store.sync.serve(
        address,
        port,
        token=token,
        tls=tls,
        insecure=insecure,
        limits=settings.limits,
        data_dir=settings.data_dir,
        sock=listeners,
    )
    serving = contextlib.ExitStack()
    server = serving.enter_context(store_serving)
    if app is not None:
        how = {"token": token, "tls": tls, "insecure": insecure, "prefix": settings.prefix}
        try:
            page = store_serving.enter_in_loop(app.serve(server, address, port_of_page, **how))
            url = serving.enter_context(page)
        except OSError as error:
            why = error.strerror or error
            log.warning("http_port=%d serves nothing: %s; the store runs without its page", port_of_page, why)
        else:
            log.info("the runs of the store at %s are shown at %s", server.url, url)
    return serving, server
