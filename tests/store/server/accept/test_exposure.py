"""Addresses that expose servers, and the authentication they require: `tests/guarantees/test_s8_*` test servers."""

import contextlib
import ssl

import pytest

from store.errors import StoreUsageError
from store.server.accept.exposure import TOKEN_BYTES_LEAST, check_exposure

GOOD, SHORT = bytes(TOKEN_BYTES_LEAST), bytes(TOKEN_BYTES_LEAST - 1)


def context(verify: ssl.VerifyMode, of: int = ssl.PROTOCOL_TLS_SERVER) -> ssl.SSLContext:
    made = ssl.SSLContext(of)
    made.check_hostname, made.verify_mode = False, verify
    return made


OPEN, ASKING, MUTUAL = (context(mode) for mode in (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED))
CLIENTS = context(ssl.CERT_REQUIRED, ssl.PROTOCOL_TLS_CLIENT)


@pytest.mark.parametrize(
    ("host", "token", "tls", "insecure", "refusal"),
    [
        ("127.0.0.1", None, None, False, None),
        ("127.0.0.1", SHORT, None, False, "the token has 15 bytes"),
        ("127.0.0.1", None, CLIENTS, True, "client's context"),  # no client could connect
        ("10.0.0.1", None, None, False, "a store on 10.0.0.1 would accept every client"),
        ("", None, OPEN, False, "a store on all interfaces would accept every client"),
        ("10.0.0.1", None, ASKING, False, "would accept every client"),
        ("10.0.0.1", None, MUTUAL, False, None),
        ("10.0.0.1", GOOD, None, False, None),
        ("10.0.0.1", GOOD, OPEN, False, None),
        ("10.0.0.1", SHORT, MUTUAL, False, "the token has 15 bytes, and every host that reaches 10.0.0.1"),
        ("10.0.0.1", SHORT, None, True, None),
        ("10.0.0.1", None, None, True, None),
    ],
)
def test_the_authentication_that_an_address_requires(
    host: str, token: bytes | None, tls: ssl.SSLContext | None, insecure: bool, refusal: str | None
) -> None:
    refused = contextlib.nullcontext() if refusal is None else pytest.raises(StoreUsageError, match=refusal)
    with refused:
        check_exposure(host, token=token, tls=tls, insecure=insecure)
