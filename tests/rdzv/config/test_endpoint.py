"""Endpoints: how URLs are split, and the message for each kind of wrong URL."""

from dataclasses import replace
from typing import Any

import pytest

from rdzv.config.endpoint import SCHEMES, Endpoint, split_url
from rdzv.errors import RendezvousSettingsError

TCP = "tcp://head:29400/job-7"


def endpoint_of(url: Any) -> Endpoint:
    parts = split_url(url)
    return Endpoint.parse(parts.scheme, parts.authority)


def refusal(url: Any) -> str:
    """Return the error message for a wrong URL. It is always one sentence."""
    with pytest.raises(RendezvousSettingsError) as caught:
        endpoint_of(url)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_url_is_split_without_validation() -> None:
    parts = split_url("my_db://a:b?colour=red&&x=%20")
    assert (parts.scheme, parts.authority, parts.run_id) == ("my_db", "a:b", "")
    assert parts.parameters == {"colour": "red", "x": " "}


def test_percent_signs_are_decoded_and_a_plus_is_a_plus() -> None:
    parts = split_url("tcp://head/j%C3%B6b%207?node_id=a%26b&data_dir=/c++")
    assert (parts.run_id, parts.parameters) == ("jöb 7", {"node_id": "a&b", "data_dir": "/c++"})


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("tcp://head/r", "tcp://head:29400"),
        ("TCPS://head:1/r", "tcps://head:1"),
        ("tcp://[::1]/r", "tcp://[::1]:29400"),
        ("tcp://[fe80::1%25eth0]:5/r", "tcp://[fe80::1%eth0]:5"),
        ("etcd://a,b:1,[::1]/r", "etcd://a:2379,b:1,[::1]:2379"),
        ("etcds://10.0.0.1/r", "etcds://10.0.0.1:2379"),
    ],
)
def test_an_endpoint_knows_its_url(url: str, endpoint: str) -> None:
    assert endpoint_of(url).url == endpoint


def test_every_scheme_has_a_port_and_a_prefix() -> None:
    assert {name: (it.family, it.is_encrypted, it.port) for name, it in SCHEMES.items()} == {
        "tcp": ("tcp", False, 29400),
        "tcps": ("tcp", True, 29400),
        "etcd": ("etcd", False, 2379),
        "etcds": ("etcd", True, 2379),
    }


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("head:29400/job-7", ("no scheme", "head:29400/job-7", "tcp://")),
        ("", ("no scheme", "tcp://head:29400/job-7")),
        ("://head/r", ("must be scheme://", "://head/r")),
        ("tcp://head/a b", ("%20", "a b")),
        ("tcp://head/a\n", ("%20", "must be scheme://")),
        ("tcp://head/r#part", ("%23", "#part")),
        ("tpc://head/r", ("tpc", "did you mean tcp?", "tcps")),
        ("tcp://head:0/r", ("port", "'0'", "65535", "29400")),
        ("tcp://head:65536/r", ("port", "65536", "65535")),
        ("tcp://head:x/r", ("port", "'x'", "whole number")),
        ("tcp://head:1_0/r", ("port", "'1_0'", "whole number")),
        ("tcp://head:+1/r", ("port", "'+1'", "whole number")),
        (None, ("URL None must be a str", "tcp://head:29400/job-7")),
        (["tcp://head/r"], ("URL ['tcp://head/r'] must be a str", "tcp://head:29400/job-7")),
        ("tcp://head:/r", ("port", "''", "leave it out")),
        ("tcp://::1/r", ("::1", "brackets", "[::1]:29400")),
        ("tcp://[::1/r", ("[::1", "brackets")),
        ("tcp://[1.2]/r", ("[1.2]", "brackets")),
        ("tcp://he$d/r", ("he$d", "host name")),
        ("etcd://a,head..example/r", ("head..example", "host name")),
        (f"etcd://{'a' * 64}.example/r", ("host name",)),
        ("tcp://a,b:1,a:1/r", ("a:1", "twice", "each host once")),
        ("tcp://a/%ff", ("run_id", "UTF-8", "%C3%A4")),
        ("tcp://\u05d0a,b/r", ("host name",)),  # no resolver takes it: letters of both directions
        ("tcp://a,b:99999/r", ("99999", "leave it out for 29400")),
        (replace(split_url(TCP), run_id="\udcff\ud800").url, ("run_id", "UTF-8")),
        (TCP + "?ttl", ("ttl", "write ttl=VALUE")),
        (TCP + "?=5", ("=5", "write name=VALUE")),
        (TCP + "?ttl=5&ttl=5", ("ttl", "twice", "leave one out")),
    ],
)
def test_the_error_for_a_wrong_url_names_the_fault(url: Any, said: tuple[str, ...]) -> None:
    message = refusal(url)
    assert all(words in message for words in said), message


def test_a_password_does_not_belong_into_a_url_and_is_not_repeated() -> None:
    message = refusal("tcp://me:swordfish@head/r")
    assert "do not belong into a URL" in message and "process lists" in message and "token_file=" in message
    assert "swordfish" not in message


def test_a_malformed_url_with_a_password_is_not_repeated() -> None:
    assert "swordfish" not in refusal("me:swordfish@head/r")


def test_an_endpoint_has_a_host() -> None:
    with pytest.raises(RendezvousSettingsError, match="needs a host"):
        Endpoint(scheme="etcd", hosts=())


@pytest.mark.parametrize(
    "url", ["tcp://h/job", "tcp://[::1]:1/a%2Fb%3F%25?token_file=%2Frun%2Fa%26b", "etcd://a:1,b:2/r%C3%A4"]
)
def test_a_split_url_can_be_joined_again(url: str) -> None:
    parts = split_url(url)
    assert split_url(parts.url) == parts
    assert parts.url == url


def test_an_ipv4_address_that_is_written_as_one_of_ipv6_is_that_address() -> None:
    """A socket of IPv6 only does not accept connections to such an address."""
    assert Endpoint.parse("tcp", "[::ffff:10.77.0.1]:29400").hosts == (("10.77.0.1", 29400),)
    assert Endpoint.parse("tcp", "[fe80::1%eth0]:29400").hosts == (("fe80::1%eth0", 29400),)
