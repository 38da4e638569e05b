"""An address is read from a URL, and written as the same URL."""

import pytest

from store.errors import StoreUsageError
from store.net.address import DEFAULT_PORT, Address, join_host_port, token_bytes


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://head:29400", Address(host="head", port=29400)),
        ("tcps://10.0.0.1:5", Address(host="10.0.0.1", port=5, secure=True)),
        ("tcp://[::1]:29400", Address(host="::1", port=29400)),
        ("tcp://localhost:65535", Address(host="localhost", port=65535)),
    ],
)
def test_an_address_is_parsed_and_printed_back(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert str(address) == url


@pytest.mark.parametrize("url", ["tcp://head", "tcp://head/", "tcp://HEAD:"])
def test_without_a_port_it_is_the_usual_one(url: str) -> None:
    assert Address.parse(url) == Address(host="head", port=DEFAULT_PORT)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("tcp://head:port", "is no URL"),
        ("tcp://head:65536", "is no URL"),
        ("tcp://[::1", "is no URL"),
        ("http://head:1", "does not start with tcp:// or tcps://"),
        ("head:29400", "does not start with tcp:// or tcps://"),
        ("", "does not start with tcp:// or tcps://"),
        ("tcp://", "names no host"),
        ("tcp://:29400", "names no host"),
        ("tcp://head/run", "has more than a store's address"),
        ("tcp://head?x=1", "has more than a store's address"),
        ("tcp://head#x", "has more than a store's address"),
        ("tcp://me@head", "has more than a store's address"),
        ("tcp://:secret@head", "has more than a store's address"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(url: str, problem: str) -> None:
    with pytest.raises(StoreUsageError, match=problem):
        Address.parse(url)


def test_only_ipv6_addresses_get_brackets() -> None:
    assert join_host_port("head", 1) == "head:1"
    assert join_host_port("fe80::1", 1) == "[fe80::1]:1"


def test_a_token_that_is_no_text_has_the_bytes_that_the_environment_had() -> None:
    """Regression: such a token in RDZV_TOKEN ended a node with an error of Python's codec, which named no parameter."""
    assert token_bytes("secret-\udcff") == b"secret-\xff"
