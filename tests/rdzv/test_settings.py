"""The settings: where they come from, which one wins, and what is said to each wrong one."""

from __future__ import annotations

import ast
import ssl
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rdzv import settings
from rdzv.errors import RendezvousSettingsError
from rdzv.settings import (
    PARAMETERS,
    SCHEMES,
    Endpoint,
    Settings,
    describe_difference,
    parse,
    split_url,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

TCP = "tcp://head:29400/job-7"
ETCD = "etcd://head/job-7"


def parsed(url: str = TCP, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    return parse(url, overrides, environ or {})


def refusal(url: str = TCP, environ: Mapping[str, str] | None = None, **overrides: Any) -> str:
    """Return what is said to settings that are wrong; always one sentence."""
    with pytest.raises(RendezvousSettingsError) as caught:
        parse(url, overrides, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def by_name(first: Any, second: Any) -> int:
    return int(first > second) - int(first < second)


# Where values come from.


def test_a_url_alone_is_enough_to_join() -> None:
    chosen = parsed(TCP + "?min_nodes=2&max_nodes=4")
    assert chosen.endpoint == Endpoint(scheme="tcp", hosts=(("head", 29400),))
    assert (chosen.run_id, chosen.min_nodes, chosen.max_nodes) == ("job-7", 2, 4)
    assert chosen.can_join


def test_defaults_are_those_of_the_interface() -> None:
    chosen = parsed(min_nodes=3)
    expected = {
        "max_nodes": 3,
        "join_timeout": 600,
        "last_call_timeout": 30,
        "early_last_call": True,
        "close_timeout": 30,
        "closed_ttl": 86400,
        "ttl": 10,
        "disconnect_ttl": 1,
        "prefix": "/rdzv",
        "is_host": None,
        "insecure": False,
        "attributes": {},
        "rank_order": "survivors",
        "node_unit": 1,
    }
    assert {name: getattr(chosen, name) for name in expected} == expected


def test_a_keyword_beats_the_url_and_the_url_beats_the_environment() -> None:
    environ = {"RDZV_TTL": "3", "RDZV_CLOSE_TIMEOUT": "4", "RDZV_JOIN_TIMEOUT": "5"}
    chosen = parsed(TCP + "?ttl=6&close_timeout=7", environ, ttl=8)
    assert (chosen.ttl, chosen.close_timeout, chosen.join_timeout) == (8, 7, 5)


def test_a_keyword_that_is_none_counts_as_not_given() -> None:
    assert parsed(TCP + "?min_nodes=2", min_nodes=None).min_nodes == 2


def test_variables_that_set_no_parameter_are_left_alone() -> None:
    environ = {
        "RDZV_ROUND": "3",
        "RDZV_RUN_ID": "other",
        "RDZV_TLS": "x",
        "RDZV_HEALTH_CHECK": "x",
        "TTL": "1",
    }
    assert parsed(environ=environ) == parsed()


def test_a_legacy_name_means_the_new_one() -> None:
    url = TCP + "?min_workers=2&max_workers=4&timeout=60&etcd_prefix=torch/runs/"
    chosen = parsed(url)
    assert (chosen.min_nodes, chosen.max_nodes, chosen.join_timeout, chosen.prefix) == (
        2,
        4,
        60,
        "/torch/runs",
    )
    assert parsed(environ={"RDZV_MIN_WORKERS": "2"}).min_nodes == 2


def test_a_legacy_name_may_repeat_what_the_new_one_says() -> None:
    assert parsed(min_nodes=2, min_workers="2").min_nodes == 2


def test_a_legacy_name_from_a_stronger_source_beats_the_new_one() -> None:
    assert parsed(TCP + "?min_nodes=2", min_workers=3).min_nodes == 3


@pytest.mark.parametrize(
    ("given", "ttl"),
    [
        ({"keep_alive_interval": 2, "keep_alive_max_attempt": 4}, 8),
        ({"keep_alive_interval": 2}, 6),
        ({"keep_alive_max_attempt": 4}, 20),
        ({"keep_alive_interval": 2, "ttl": 6}, 6),
    ],
)
def test_pytorchs_keep_alive_pair_gives_the_ttl(given: dict[str, Any], ttl: float) -> None:
    assert parsed(**given).ttl == ttl


def test_the_keep_alive_pair_may_come_from_two_places() -> None:
    assert parsed(TCP + "?keep_alive_interval=10", keep_alive_max_attempt=2).ttl == 20


@pytest.mark.parametrize(
    ("url", "overrides", "ttl"),
    [(TCP + "?ttl=7", {"keep_alive_interval": 2}, 6), (TCP + "?keep_alive_interval=2", {"ttl": 7}, 7)],
)
def test_of_ttl_and_the_keep_alive_pair_the_stronger_source_wins(
    url: str, overrides: dict[str, Any], ttl: float
) -> None:
    assert parsed(url, **overrides).ttl == ttl


def test_of_a_token_and_a_token_file_the_stronger_source_wins() -> None:
    chosen = parsed(environ={"RDZV_TOKEN_FILE": "/run/token"}, token=b"swordfish")
    assert (chosen.token, chosen.token_file) == (b"swordfish", None)
    chosen = parsed(TCP + "?token_file=/run/token", {"RDZV_TOKEN": "swordfish"})
    assert (chosen.token, chosen.token_file) == (None, "/run/token")


def test_a_tls_context_replaces_the_files_of_weaker_sources_and_turns_tls_on() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    chosen = parsed(environ={"RDZV_CA": "/ca.pem"}, tls=context)
    assert chosen.tls is context and chosen.ca is None and chosen.uses_tls
    assert not parsed().uses_tls
    assert parsed("tcps://head/job-7?ca=/ca.pem").uses_tls


# What values may look like.


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "TRUE", 1, True])
def test_words_for_true(word: Any) -> None:
    assert parsed(insecure=word).insecure is True


@pytest.mark.parametrize("word", ["0", "false", "no", "off", 0, False])
def test_words_for_false(word: Any) -> None:
    assert parsed(early_last_call=word).early_last_call is False


def test_is_host_may_be_left_to_us_explicitly() -> None:
    assert parsed(TCP + "?is_host=1", is_host="auto").is_host is None
    assert parsed(TCP + "?is_host=0").is_host is False


def test_attributes_come_as_text_or_as_a_mapping() -> None:
    assert parsed(TCP + "?attributes=rack:r1,zone:z2").attributes == {"rack": "r1", "zone": "z2"}
    assert parsed(attributes={"rack": "r1"}).attributes == {"rack": "r1"}


@pytest.mark.parametrize("order", ["survivors", "arrival", "name", "requested", "topology", "topology:rack"])
def test_an_order_goes_by_its_name(order: str) -> None:
    assert parsed(f"{TCP}?rank_order={order}").rank_order == order


def test_an_order_may_be_a_function() -> None:
    assert parsed(rank_order=by_name).rank_order is by_name


def test_paths_may_be_path_objects() -> None:
    assert parsed(data_dir=Path("/var/lib/rdzv")).data_dir == "/var/lib/rdzv"


def test_percent_signs_are_decoded_and_a_plus_is_a_plus() -> None:
    chosen = parsed("tcp://head/j%C3%B6b%207?node_id=a%26b&data_dir=/c++")
    assert (chosen.run_id, chosen.node_id, chosen.data_dir) == ("jöb 7", "a&b", "/c++")


def test_an_address_in_brackets_loses_them() -> None:
    assert parsed(address="[fe80::1%eth0]").address == "fe80::1%eth0"


def test_a_payload_is_a_copy_of_what_was_given() -> None:
    given = {"gpus": [1, 2], "any": ("thing",)}
    chosen = parsed(payload=given)
    given["gpus"].append(3)  # type: ignore[attr-defined]
    assert chosen.payload == {"gpus": [1, 2], "any": ["thing"]}


def test_a_payload_may_have_just_the_limit() -> None:
    assert len(parsed(payload=bytes(4096 - 3)).payload) == 4093  # msgpack adds three bytes


def test_disconnect_ttl_is_never_more_than_a_short_ttl() -> None:
    assert parsed(ttl=0.5).disconnect_ttl == 0.5


def test_etcd_has_its_own_prefix() -> None:
    assert parsed(ETCD).prefix == "/torchelastic/p2p"


# Endpoints.


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
    assert parsed(url).endpoint.url == endpoint


def test_every_scheme_has_a_port_and_a_prefix() -> None:
    assert {name: (it.family, it.is_encrypted, it.port) for name, it in SCHEMES.items()} == {
        "tcp": ("tcp", False, 29400),
        "tcps": ("tcp", True, 29400),
        "etcd": ("etcd", False, 2379),
        "etcds": ("etcd", True, 2379),
    }


# What is said to wrong values.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("head:29400/job-7", ("no scheme", "head:29400/job-7", "tcp://")),
        ("", ("no scheme", "tcp://head:29400/job-7")),
        ("://head/r", ("must be scheme://", "://head/r")),
        ("tcp://head/a b", ("%20", "a b")),
        ("tcp://head/a\n", ("%20", "must be scheme://")),
        ("tcp://head/r#part", ("%23", "#part")),
        ("tcp:///r", ("no host", "tcp://head")),
        ("tpc://head/r", ("tpc", "did you mean tcp?", "tcps", "rdzv.register")),
        ("tcp://head", ("run_id", "tcp://head:29400/job-7")),
        ("tcp://head/", ("run_id", "tcp://head:29400/job-7")),
        ("tcp://head:0/r", ("port", "'0'", "65535", "29400")),
        ("tcp://head:65536/r", ("port", "65536", "65535")),
        ("tcp://head:x/r", ("port", "'x'", "whole number")),
        ("tcp://head:/r", ("port", "''", "leave it out")),
        ("tcp://::1/r", ("::1", "brackets", "[::1]:29400")),
        ("tcp://[::1/r", ("[::1", "brackets")),
        ("tcp://[1.2]/r", ("[1.2]", "brackets")),
        ("tcp://he$d/r", ("he$d", "host name")),
        ("tcp://a,b/r", ("tcp", "exactly one", "2", "etcd")),
        ("tcp://a/b/c", ("run_id", "b/c", '"/"')),
        ("tcp://a/b%2Fc", ("run_id", "b/c", '"/"')),
        ("tcp://a/b%00", ("run_id", "\\x00", "printable")),
        ("tcp://a/" + "x" * 256, ("run_id", "xxx", "255", "job-7")),
        ("tcp://a/%ff", ("run_id", "UTF-8", "%C3%A4")),
        (TCP + "?ttl", ("ttl", "write ttl=VALUE")),
        (TCP + "?=5", ("=5", "write name=VALUE")),
        (TCP + "?ttl=5&ttl=5", ("ttl", "twice", "leave one out")),
        (TCP + "?tll=5", ("tll", "did you mean ttl?", "join_timeout")),
        (TCP + "?password=x", ("password", "did you mean password_file?")),
        (TCP + "?qqqqqq=5", ("qqqqqq", "the parameters are")),
        (TCP + "?tls=x", ("tls", "ssl.SSLContext", "keyword")),
        (TCP + "?health_check=x", ("health_check", "function", "keyword")),
    ],
)
def test_a_wrong_url_is_told_what_is_wrong_with_it(url: str, said: tuple[str, ...]) -> None:
    message = refusal(url)
    assert all(words in message for words in said), message


@pytest.mark.parametrize("url", [TCP + "?token=swordfish", "tcp://me:swordfish@head/r"])
def test_secrets_do_not_belong_into_a_url_and_are_not_repeated(url: str) -> None:
    message = refusal(url)
    assert "do not belong into a URL" in message and "process lists" in message and "token_file=" in message
    assert "swordfish" not in message


def test_a_malformed_url_with_a_password_is_not_repeated() -> None:
    assert "swordfish" not in refusal("me:swordfish@head/r")


NAME_LIMIT = "255 printable characters"
WHOLE = "whole number from 1"
WRONG_VALUES: list[tuple[str, Any, str, str]] = [
    ("min_nodes", 0, WHOLE, "min_nodes=2"),
    ("min_nodes", "two", WHOLE, "min_nodes=2"),
    ("min_nodes", 2.5, WHOLE, "min_nodes=2"),
    ("min_nodes", True, WHOLE, "min_nodes=2"),
    ("max_nodes", -1, WHOLE, "max_nodes=4"),
    ("max_nodes", 1_000_001, "1000000", "max_nodes=4"),
    ("node_unit", 0, WHOLE, "node_unit=1"),
    ("requested_rank", -1, "whole number from 0", "requested_rank=0"),
    ("join_timeout", -1, "seconds from 0", "join_timeout=600"),
    ("join_timeout", "nan", "seconds from 0", "join_timeout=600"),
    ("join_timeout", float("inf"), "to 1000000000", "join_timeout=600"),
    ("join_timeout", 10**400, "to 1000000000", "join_timeout=600"),
    ("join_timeout", "soon", "seconds", "join_timeout=600"),
    ("join_timeout", True, "seconds", "join_timeout=600"),
    ("join_timeout", [], "seconds", "join_timeout=600"),
    ("closed_ttl", 0, "seconds from 1 ", "closed_ttl=86400"),
    ("ttl", 0.4, "seconds from 0.5 ", "ttl=10"),
    ("disconnect_ttl", -0.1, "seconds from 0", "disconnect_ttl=1"),
    ("early_last_call", "maybe", "true, false, yes, no, on, off", "early_last_call=true"),
    ("is_host", 2, "auto, 1, 0", "is_host=true"),
    ("prefix", "//", "more than slashes", "prefix=/rdzv"),
    ("data_dir", "", "not empty", "data_dir=/var/lib/rdzv"),
    ("token_file", "", "not empty", "token_file=/run/secrets/rdzv"),
    ("ca", "", "not empty", "ca=/etc/rdzv/ca.pem"),
    ("cert", 7, "path", "cert=/etc/rdzv/cert.pem"),
    ("key", "", "not empty", "key=/etc/rdzv/key.pem"),
    ("user", "", "not empty", "user=rdzv"),
    ("password_file", "", "not empty", "password_file=/run/secrets/etcd"),
    ("node_id", "a/b", NAME_LIMIT, "node_id=host10"),
    ("node_id", "", NAME_LIMIT, "node_id=host10"),
    ("node_id", "x" * 256, NAME_LIMIT, "node_id=host10"),
    ("node_id", "a\x07", NAME_LIMIT, "node_id=host10"),
    ("node_id", "\ud800", NAME_LIMIT, "node_id=host10"),
    ("address", "head:29400", "without a port", "address=10.0.0.7"),
    ("address", "x" * 256, "host name", "address=10.0.0.7"),
    ("payload", bytes(4094), "4096 bytes of msgpack, but it has 4097", "payload=8xH100"),
    ("payload", object(), "msgpack cannot carry it", "payload=8xH100"),
    ("payload", {(1, 2): 3}, "msgpack cannot carry it", "payload=8xH100"),
    ("payload", 2**70, "msgpack cannot carry it", "payload=8xH100"),
    ("attributes", {"rack": 1}, "both text", "attributes=rack:r1"),
    ("attributes", {1: "r1"}, "both text", "attributes=rack:r1"),
    ("attributes", "rack", "names and values", "attributes=rack:r1"),
    ("attributes", "rack:", "not empty", "attributes=rack:r1"),
    ("attributes", "rack:a,rack:b", "but 'rack' is there twice", "attributes=rack:r1"),
    ("attributes", {"rack": "x" * 1024}, "1024 bytes of msgpack, but these are more", "attributes=rack:r1"),
    ("attributes", 7, "names and values", "attributes=rack:r1"),
    ("rank_order", "random", "survivors, arrival", "rank_order=topology:rack"),
    ("rank_order", "topology:", "topology:ATTRIBUTE", "rank_order=topology:rack"),
    ("rank_order", 7, "a function", "rank_order=topology:rack"),
    ("health_check", "x", "a function", "health_check=check_gpus"),
    ("tls", True, "an ssl.SSLContext", "tls=ssl.create_default_context()"),
    ("keep_alive_interval", -1, "seconds from 0", "keep_alive_interval=5"),
    ("keep_alive_max_attempt", 0, WHOLE, "keep_alive_max_attempt=3"),
]


@pytest.mark.parametrize(("name", "value", "limit", "remedy"), WRONG_VALUES)
def test_a_wrong_value_is_told_its_limit_and_a_remedy(name: str, value: Any, limit: str, remedy: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={settings._shown(value)} must be "), message
    assert limit in message and f"write for example {remedy}" in message, message


def test_the_tables_cover_every_parameter() -> None:
    assert {name for name, *_ in WRONG_VALUES} >= set(PARAMETERS) - {
        "token",  # not shown, see below
        *("last_call_timeout", "close_timeout", "insecure"),  # of the same kinds as their neighbours
    }


@pytest.mark.parametrize("token", ["", b""])
def test_an_empty_token_is_refused(token: str | bytes) -> None:
    assert "token=(not shown) must be text or bytes, not empty" in refusal(token=token)


def test_a_token_of_the_wrong_type_is_not_shown() -> None:
    message = refusal(token=["swordfish"])
    assert "token=" in message and "swordfish" not in message


@pytest.mark.parametrize(
    ("url", "environ", "overrides", "said"),
    [
        (TCP + "?ttl=0", {}, {}, "ttl='0' in the URL must be a number of seconds from 0.5"),
        (TCP, {"RDZV_TTL": "0"}, {}, "RDZV_TTL='0' in the environment must be"),
        (TCP, {"RDZV_TTL": "0"}, {}, "write for example RDZV_TTL=10"),
        (TCP, {}, {"timeout": -1}, "timeout=-1 must be"),
    ],
)
def test_an_error_says_where_the_value_was_given(
    url: str, environ: dict[str, str], overrides: dict[str, Any], said: str
) -> None:
    assert said in refusal(url, environ, **overrides)


def test_an_unknown_keyword_is_told_the_closest_name() -> None:
    assert "'join_timeot' (did you mean join_timeout?)" in refusal(join_timeot=5)


def test_a_long_value_is_not_shown_at_length() -> None:
    assert len(refusal(node_id="x" * 10_000)) < 300


CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.mark.parametrize(
    ("url", "overrides", "said"),
    [
        (TCP, {"max_nodes": 4}, ("max_nodes=4", "needs min_nodes", "give min_nodes")),
        (TCP, {"min_nodes": 3, "max_nodes": 2}, ("max_nodes=2", "min_nodes=3", "raise one")),
        (
            TCP,
            {"min_nodes": 5, "max_nodes": 7, "node_unit": 4},
            ("min_nodes=5", "node_unit=4", "is 8", "max_nodes=7", "raise max_nodes to 8"),
        ),
        (TCP, {"ttl": 2, "disconnect_ttl": 3}, ("disconnect_ttl=3", "ttl=2", "lower disconnect_ttl")),
        (TCP, {"token": "swordfish", "token_file": "/t"}, ("token and token_file='/t'", "leave one out")),
        ("tcps://h/r", {"tls": CONTEXT, "ca": "/ca"}, ("tls and ca='/ca'", "leave out")),
        ("tcps://h/r", {"cert": "/c"}, ("cert='/c'", "give key")),
        ("tcps://h/r", {"key": "/k"}, ("key='/k'", "give cert")),
        (ETCD, {"user": "me"}, ("user='me'", "give password_file")),
        (ETCD, {"password_file": "/p"}, ("password_file='/p'", "give user")),
        (ETCD, {"data_dir": "/d"}, ("data_dir is for tcp", "etcd", "leave out data_dir", "RDZV_DATA_DIR")),
        (ETCD, {"token_file": "/d"}, ("token_file is for tcp", "leave out token_file")),
        (TCP, {"user": "me"}, ("user is for etcd", "tcp", "leave out user")),
        (TCP, {"password_file": "/p"}, ("password_file is for etcd", "leave out")),
        (TCP, {"ca": "/ca"}, ("ca is for encrypted connections", "write tcps://")),
        (TCP, {"min_nodes": 2, "min_workers": 3}, ("min_nodes=2 and min_workers=3", "leave one out")),
        (TCP + "?timeout=1&join_timeout=2", {}, ("timeout='1' and join_timeout='2' in the URL",)),
        (
            TCP,
            {"ttl": 4, "keep_alive_interval": 2},
            ("ttl=4 and keep_alive_interval x keep_alive_max_attempt=6", "leave one out"),
        ),
        (
            TCP,
            {"keep_alive_interval": 0.1},
            ("keep_alive_interval x keep_alive_max_attempt=0.3", "from 0.5", "write for example ttl=10"),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named_together(
    url: str, overrides: dict[str, Any], said: tuple[str, ...]
) -> None:
    message = refusal(url, **overrides)
    assert all(words in message for words in said), message
    assert "swordfish" not in message


# What settings are, once they are.


def test_settings_cannot_be_changed() -> None:
    chosen = parsed(attributes={"rack": "r1"})
    with pytest.raises(FrozenInstanceError):
        chosen.ttl = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        chosen.attributes["rack"] = "r2"  # type: ignore[index]


def test_settings_made_by_hand_are_checked_too() -> None:
    chosen = parsed(min_nodes=2)
    assert replace(chosen, max_nodes=8).capacity == 8
    with pytest.raises(RendezvousSettingsError, match=r"ttl=0 must be"):
        replace(chosen, ttl=0)
    with pytest.raises(RendezvousSettingsError, match=r"run_id='a/b' must be"):
        replace(chosen, run_id="a/b")
    with pytest.raises(RendezvousSettingsError, match=r"exactly one host, not 0"):
        Endpoint(scheme="etcd", hosts=())


def test_secrets_are_not_in_the_repr() -> None:
    chosen = parsed(token="swordfish", tls=CONTEXT)
    assert "swordfish" not in repr(chosen) and "SSLContext" not in repr(chosen)


def test_the_minimum_is_rounded_up_to_a_unit_and_the_maximum_down() -> None:
    chosen = parsed(min_nodes=5, max_nodes=15, node_unit=4)
    assert (chosen.needed, chosen.capacity) == (8, 12)


def test_an_observer_is_told_what_joining_takes() -> None:
    chosen = parsed()
    assert not chosen.can_join
    for name in ("needed", "capacity"):
        with pytest.raises(RendezvousSettingsError, match=r"min_nodes is missing.*tcp://head:29400/job-7\?min"):
            getattr(chosen, name)


class Order:
    def __call__(self, *_: Any) -> None:
        """Order nothing."""


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("topology:rack", "topology:rack"),
        (by_name, f"{__name__}.by_name"),
        (Order(), f"{__name__}.Order"),
        (partial(by_name, 1), "functools.partial"),
    ],
)
def test_what_a_run_shares_is_plain_data(order: Any, name: str) -> None:
    assert parsed(min_nodes=2, max_nodes=4, rank_order=order).shared() == {
        "min_nodes": 2,
        "max_nodes": 4,
        "node_unit": 1,
        "rank_order": name,
        "last_call_timeout": 30.0,
        "early_last_call": True,
    }


def test_a_difference_names_both_values() -> None:
    ours, theirs = parsed(min_nodes=2).shared(), parsed(min_nodes=3, rank_order="name").shared()
    assert describe_difference(ours, theirs) == (
        "min_nodes is 2 here and 3 in the run, max_nodes is 2 here and 3 in the run, "
        "rank_order is 'survivors' here and 'name' in the run"
    )
    assert describe_difference(ours, ours) == ""
    assert describe_difference({}, {"colour": "red"}) == "colour is None here and 'red' in the run"


def test_every_parameter_is_ready_for_the_documentation() -> None:
    for name, parameter in PARAMETERS.items():
        assert parameter.name == name and parameter.help and parameter.example and parameter.kind.limit
        assert parameter.derive is None or parameter.default_text


def test_examples_are_values_that_would_do() -> None:
    for parameter in PARAMETERS.values():
        if settings.Source.URL in parameter.sources:
            parameter.read(parameter.example)


def test_a_url_comes_apart_without_judgement() -> None:
    parts = split_url("my_db://a:b?colour=red&&x=%20")
    assert (parts.scheme, parts.authority, parts.run_id) == ("my_db", "a:b", "")
    assert parts.parameters == {"colour": "red", "x": " "}


def test_this_room_is_pure() -> None:
    tree = ast.parse(Path(settings.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"anyio", "asyncio", "datetime", "os", "random", "socket", "ssl", "time"}
