"""The access rules of HTTP, as docs/operating.md lists them.

If the server is on loopback, the header `Host` must name this machine: otherwise a foreign page in a browser of this
machine could read the answers (DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from store.limits import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from store.protocol.connection import Secret

LOOPBACK = "127.0.0.1"
HEALTH = frozenset({"/healthz", "/readyz"})


class Refusal(NamedTuple):
    """The status and the reason of a rejected request."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The access rules of an HTTP server on one address."""

    token: Secret
    loopback: bool  # True if only this machine can connect

    def find_refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why to reject a request; None to accept it."""
        host = headers.get("Host", "")
        if self.loopback and not _is_loopback_host(host):
            return Refusal(421, f"{host!r:.80} is not this machine; ask for localhost or 127.0.0.1")
        if path in HEALTH:
            return None
        if method not in ("GET", "HEAD"):
            return Refusal(405, "nothing is changed over HTTP: use the command, rdzv")
        token = self.token() if callable(self.token) else self.token
        if token is None:
            return None
        kind, _, secret = headers.get("Authorization", "").partition(" ")
        # Restore bytes that are not UTF-8, which aiohttp has decoded as surrogates.
        plain = secret.encode("utf-8", "surrogateescape")
        given = plain if kind.lower() == "bearer" else _basic_auth_password(plain) if kind.lower() == "basic" else b""
        if hmac.compare_digest(given, token):
            return None
        return Refusal(401, "give the store's token, as Authorization: Bearer or as the password")


def access_rules_for(host: str, *, token: Secret, secure: bool, insecure: bool) -> tuple[str, AccessRules]:
    """Return the host on which to serve HTTP, and the access rules.

    The host is `host`, but with a token and without TLS it is loopback unless `insecure` is set: the token would cross
    the network unencrypted.
    """
    if host == "localhost" or (token is not None and not secure and not insecure):
        host = LOOPBACK
    return host, AccessRules(token=token, loopback=_is_loopback_host(f"[{host}]" if ":" in host else host))


def _basic_auth_password(secret: bytes) -> bytes:
    with contextlib.suppress(binascii.Error):
        return base64.b64decode(secret, validate=True).partition(b":")[2]
    return b""


def _is_loopback_host(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return False
