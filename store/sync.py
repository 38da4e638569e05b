"""Façade: a store's client for blocking callers, and a server in a thread."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any, TypeVar, cast

from store.client.blocking import Client, Watch
from store.connecting import checked_token_bytes, is_etcd_url
from store.interface import DEFAULT_TIMEOUT
from store.messages import Ping
from store.net.address import Address
from store.net.threads import ContextInThread, LoopThread
from store.recipes import blocking as recipes

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from store.limits import Limits
    from store.server.server import Server

__all__ = ["Client", "Watch", "connect", "recipes", "serve"]

T = TypeVar("T")


@contextlib.contextmanager
def connect(
    url: str,
    *,
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Iterator[Client]:
    """Connect to a store; the blocking twin of `store.connect`."""
    secret = checked_token_bytes(url, token=token, tls=tls, user=user, password=password, timeout=timeout)
    client: Client
    if is_etcd_url(url):
        from store.etcd import blocking as etcd_sync
        from store.etcd.codec import Endpoints

        etcd_client = etcd_sync.Client(Endpoints.parse(url), tls=tls, user=user, password=password, timeout=timeout)
        client = cast("Client", etcd_client)  # typed as in `store.connect`
    else:
        client = Client(Address.parse(url), token=secret, tls=tls, timeout=timeout)
    with client:
        client.call(Ping())
        yield client


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | Callable[[], bytes | None] | None = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    sock: socket.socket | Sequence[socket.socket] | None = None,
) -> Serving:
    """Serve a new store in a thread with its own event loop; arguments as in `store.serve`.

    While a caller holds the interpreter lock, the server pauses, too; this time does not count against leases. In a
    forked child, leaving the context does nothing.
    """
    from store.server import server as async_server  # imported late: clients need neither the server nor sqlite3

    return Serving(
        async_server.serve(
            host, port, token=token, tls=tls, insecure=insecure, limits=limits, data_dir=data_dir, sock=sock
        )
    )


class Serving(contextlib.AbstractContextManager["Server"]):
    """A server and its thread."""

    def __init__(self, serving: contextlib.AbstractAsyncContextManager[Server]) -> None:
        self._serving = serving
        self._pid = os.getpid()

    def __enter__(self) -> Server:
        self._thread = LoopThread("store", last=True)
        try:
            self._held = ContextInThread(self._thread, self._serving)
            return self._held.__enter__()
        except BaseException:
            self._thread.stop()
            raise

    def enter_in_loop(self, context: contextlib.AbstractAsyncContextManager[T]) -> contextlib.AbstractContextManager[T]:
        """Return a context that is entered in the server's thread; leave the context before the server ends."""
        return ContextInThread(self._thread, context)

    def __exit__(self, *how: Any) -> None:
        if self._pid != os.getpid():
            return
        try:
            self._held.__exit__(*how)
        finally:
            self._thread.stop(within=math.inf)
