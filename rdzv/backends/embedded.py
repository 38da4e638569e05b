"""Shell: serves the embedded store, in a thread of this process, with its page if that is asked for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import store.sync
from rdzv.backends.monitoring import http_room, serve_page

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from store import Server

__all__ = ["serve_embedded"]


def serve_embedded(
    settings: Settings,
    credentials: Credentials,
    address: str,
    port: int,
    listeners: Sequence[socket.socket] | None = None,
) -> tuple[contextlib.ExitStack, Server]:
    """Serve the embedded store, and its page if that is asked for; return what ends both, and the store.

    Raises:
        OSError: The address cannot be bound.
        RendezvousSettingsError: The page needs an extra that is not installed.
        StoreUsageError: The store would be open to strangers.
    """
    if settings.http_port is not None:
        http_room("app", "http_port")  # which may not be installed: then no store is started
    token, tls = credentials.token, credentials.server_tls()
    store_serving = store.sync.serve(
        address,
        port,
        token=token,
        tls=tls,
        insecure=settings.insecure,
        limits=settings.limits,
        data_dir=settings.data_dir,
        sock=listeners,
    )
    serving = contextlib.ExitStack()
    server = serving.enter_context(store_serving)
    if settings.http_port is not None:
        serving.enter_context(serve_page(store_serving, server, address, settings, token=token, tls=tls))
    return serving, server
