"""Rules for the authentication that a listening address requires (promise S8)."""

from __future__ import annotations

import ssl

from store.errors import StoreUsageError
from store.limits import is_loopback

TOKEN_BYTES_LEAST = 16  # a shorter token could be guessed


def check_exposure(host: str, *, token: bytes | None, tls: ssl.SSLContext | None, insecure: bool) -> None:
    """Refuse to listen if `tls` is a client's, or, unless `insecure`, if anyone could connect or guess the token."""
    if tls is not None and tls.protocol is ssl.PROTOCOL_TLS_CLIENT:
        raise StoreUsageError(
            "tls is a client's context, which accepts no connection: a server's is PROTOCOL_TLS_SERVER"
        )
    if token is not None and len(token) < TOKEN_BYTES_LEAST and not insecure:
        raise StoreUsageError(
            f"the token has {len(token)} bytes, and every host that reaches {host or 'an interface'} may guess it: "
            f"give it one of at least {TOKEN_BYTES_LEAST} (`rdzv token` prints a good one), or say insecure"
        )
    if insecure or token is not None or (tls is not None and tls.verify_mode is ssl.CERT_REQUIRED):
        return
    if not is_loopback(host):
        raise StoreUsageError(
            f"a store on {host or 'all interfaces'} would accept every client: give it a token (token= or "
            f"--token-file) or mutual TLS (tls= with CERT_REQUIRED, or --cert, --key and --ca); or say insecure to "
            f"leave it open"
        )
