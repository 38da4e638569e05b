"""The client for a URL. Not named `connect`: importing that module would replace the function `store.connect`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

from store.calls import checked_timeout
from store.client.client import Client
from store.errors import StoreUsageError
from store.interface import DEFAULT_TIMEOUT
from store.net.address import Address, token_bytes
from store.net.dialing import TcpDialer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator


def is_etcd_url(url: str) -> bool:
    """Return True for the URL of an etcd cluster."""
    given: object = url
    if not isinstance(given, str):
        raise StoreUsageError(f"the URL {given!r} must be a str; write tcp://HOST:29400")
    return url.startswith(("etcd://", "etcds://"))


@contextlib.asynccontextmanager
async def connect(
    url: str,
    *,
    token: str | bytes | None = None,
    tls: ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> AsyncIterator[Client]:
    """Connect to a store, retrying within `timeout`.

    Args:
        url: `tcp://host:port`, `etcd://host:port,host:port`; `tcps://` and `etcds://` for TLS.
        token: The secret that both sides prove to know; not for etcd.
        tls: A client-side context; by default the system's certificates are trusted.
        user: The user to log in as; for etcd.
        password: The password of `user`.
        timeout: Seconds for connecting, and for each call without its own `timeout`.

    Raises:
        ConnectionLost: No store answered in time.
        AuthenticationError: The server rejected the token, or did not prove that it knows it.
        ProtocolError: The server is not a store, or a store of another version.
        ImportError: The URL is of etcd, and the extra `etcd` is not installed.
    """
    secret = checked_token_bytes(url, token=token, tls=tls, user=user, password=password, timeout=timeout)
    if is_etcd_url(url):
        from store.etcd import client as etcd
        from store.etcd.codec import Endpoints

        cluster = Endpoints.parse(url)
        async with etcd.Client(cluster, tls=tls, user=user, password=password, timeout=timeout) as client:
            # The etcd client is typed as the usual one; only the members of `interface.Store` are common to both.
            yield cast("Client", client)
        return
    address = Address.parse(url)
    async with Client(TcpDialer(address, tls), name=str(address), token=secret, timeout=timeout) as own:
        yield own


def checked_token_bytes(
    url: str, *, token: str | bytes | None, tls: object, user: str | None, password: str | None, timeout: float
) -> bytes | None:
    """Return the token as bytes; reject a wrong timeout, and credentials that this kind of store would ignore."""
    if checked_timeout(timeout, None) is None:
        raise StoreUsageError("timeout is None; give seconds")
    secret = token_bytes(token)
    if is_etcd_url(url) and token is not None:
        raise StoreUsageError("etcd knows no token; give user= and password=, or certificates by tls=")
    if tls is not None and not url.lower().startswith(("tcps://", "etcds://")):
        raise StoreUsageError(f"{url!r} is without TLS, and tls= is given: write tcps://, or etcds://")
    if not is_etcd_url(url) and (user is not None or password is not None):
        raise StoreUsageError(f"{url!r} knows no users; give token=")
    return secret
