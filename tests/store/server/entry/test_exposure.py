"""Who could reach a server, and what it must ask of them: `tests/guarantees/test_s8_*` show it on servers."""

from __future__ import annotations

import ssl

import pytest

from store.errors import StoreUsageError
from store.server.entry.exposure import TOKEN_BYTES_LEAST, check_exposure, token_bytes

GOOD = bytes(TOKEN_BYTES_LEAST)


def mutual(verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = verify_mode
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.8.7", "::1"])
def test_on_loopback_nothing_need_be_asked(host: str) -> None:
    check_exposure(host, token=None, tls=None, insecure=False)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "a-name"])
def test_elsewhere_a_token_or_mutual_tls_is_asked_for(host: str) -> None:
    for tls in (None, mutual(ssl.CERT_NONE), mutual(ssl.CERT_OPTIONAL)):
        with pytest.raises(StoreUsageError, match="would let anybody in: give it a token"):
            check_exposure(host, token=None, tls=tls, insecure=False)
    check_exposure(host, token=GOOD, tls=None, insecure=False)
    check_exposure(host, token=None, tls=mutual(ssl.CERT_REQUIRED), insecure=False)
    check_exposure(host, token=None, tls=None, insecure=True)


def test_a_token_that_can_be_guessed_is_refused_everywhere() -> None:
    with pytest.raises(StoreUsageError, match="the token has 15 bytes"):
        check_exposure("127.0.0.1", token=GOOD[:-1], tls=None, insecure=False)
    check_exposure("10.0.0.1", token=GOOD[:-1], tls=None, insecure=True)


def test_an_empty_token_is_a_mistake() -> None:
    for empty in ("", b""):
        with pytest.raises(StoreUsageError, match="the token is empty"):
            token_bytes(empty)
    assert (token_bytes(None), token_bytes("é"), token_bytes(b"x")) == (None, "é".encode(), b"x")


def test_a_clients_context_is_refused_as_nobody_could_come_in() -> None:
    with pytest.raises(StoreUsageError, match="client's context"):
        check_exposure("127.0.0.1", token=None, tls=ssl.create_default_context(), insecure=True)
