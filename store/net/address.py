"""The address of a store as a URL: `tcp://host:port`, or `tcps://host:port` for TLS."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from store.errors import StoreUsageError

DEFAULT_PORT = 29400  # torchrun's default port


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def token_bytes(token: object) -> bytes | None:
    """Return a token as bytes, or None; raise `StoreUsageError` for other types, and for unencodable text."""
    if not isinstance(token, str | bytes | None):
        raise StoreUsageError(f"the token is of type {type(token).__name__}; give str or bytes")
    try:
        # A token from the environment may hold surrogates: Python's stand-ins for bytes that are not UTF-8.
        return token.encode(errors="surrogateescape") if isinstance(token, str) else token
    except UnicodeEncodeError as error:
        raise StoreUsageError(
            f"character {error.start} of the token is half a character: give other text, or bytes"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The host and port of a store, and whether it uses TLS."""

    host: str
    port: int
    secure: bool = False

    def __str__(self) -> str:
        return f"{'tcps' if self.secure else 'tcp'}://{join_host_port(self.host, self.port)}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse the URL of a store; raise `StoreUsageError` for any other text."""
        try:
            url.encode()  # raises for surrogates
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise StoreUsageError(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("tcp", "tcps"):
            raise StoreUsageError(f"{url!r} does not start with tcp:// or tcps://")
        if not parts.hostname:
            raise StoreUsageError(f"{url!r} names no host; write tcp://HOST:{DEFAULT_PORT}")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise StoreUsageError(f"{url!r} has more than a store's address; write tcp://HOST:PORT")
        return cls(host=parts.hostname, port=DEFAULT_PORT if port is None else port, secure=parts.scheme == "tcps")
