"""The errors of a failed connection. `test_client.py` dials."""

import ssl

import pytest

from store.net.dialing import RefusedByStore, error_text, silent_close_error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "nobody listens there"),
        (ConnectionRefusedError("said by an event loop"), "nobody listens there"),
        (RefusedByStore("the store is full"), "the store is full"),
        (ConnectionResetError(104, "Connection reset by peer"), "it closed the connection"),
        (TimeoutError(), "it does not answer"),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), "wants a client's certificate (mutual TLS)"),
        (silent_close_error(secure=True, met=False), "wants a client's certificate (mutual TLS)"),
        (silent_close_error(secure=False, met=False), "if it speaks TLS, write tcps://"),
        (ssl.SSLError(1, "something new"), "TLS failed: "),
        (OSError(113, "No route to host"), "No route to host"),
        (OSError(), "OSError"),
    ],
)
def test_errors_of_dialing_are_in_plain_words(error: OSError, words: str) -> None:
    said = error_text(error)
    assert words in said
    assert "\n" not in said
    assert "Errno" not in said
