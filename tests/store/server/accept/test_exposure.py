"""Addresses that expose a server, and the authentication that they require: `tests/guarantees/test_s8_*` test
servers.
"""

from __future__ import annotations

import ssl

import pytest

from store.errors import StoreUsageError
from store.server.accept.exposure import TOKEN_BYTES_LEAST, check_exposure

GOOD = bytes(TOKEN_BYTES_LEAST)


def test_a_token_that_can_be_guessed_is_refused_everywhere() -> None:
    with pytest.raises(StoreUsageError, match="the token has 15 bytes"):
        check_exposure("127.0.0.1", token=GOOD[:-1], tls=None, insecure=False)
    check_exposure("10.0.0.1", token=GOOD[:-1], tls=None, insecure=True)


def test_a_clients_context_is_refused_as_no_client_could_connect() -> None:
    with pytest.raises(StoreUsageError, match="client's context"):
        check_exposure("127.0.0.1", token=None, tls=ssl.create_default_context(), insecure=True)
