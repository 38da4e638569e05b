"""The settings: their sources, the order of precedence, and the error message for each wrong value."""

import math
import ssl
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.config.parameters import Source
from rdzv.config.settings import PARAMETERS, Settings, describe_difference, parse, parse_all
from rdzv.errors import RendezvousSettingsError
from store.limits import Limits

TCP = "tcp://head:29400/job-7"
ETCD = "etcd://head/job-7"


def parsed(url: str = TCP, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    return parse(url, overrides, environ or {})


def refusal(url: str = TCP, environ: Mapping[str, str] | None = None, **overrides: Any) -> str:
    """Return the error message for wrong settings. It is always one sentence."""
    with pytest.raises(RendezvousSettingsError) as caught:
        parse(url, overrides, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def by_name(first: Any, second: Any) -> int:
    return int(first > second) - int(first < second)


FEW = Limits(keys_max=5, handshake_timeout=2.5)
PAIR = "?keep_alive_interval=2&keep_alive_max_attempt=4"


@pytest.mark.parametrize(
    ("url", "environ", "overrides", "expected"),
    [
        (
            TCP + "?min_nodes=2&max_nodes=4",
            {},
            {},
            {
                "endpoint": Endpoint(scheme="tcp", hosts=(("head", 29400),)),
                "run_id": "job-7",
                "min_nodes": 2,
                "max_nodes": 4,
                "can_join": True,
            },
        ),
        # The defaults are those of the interface.
        (
            TCP,
            {},
            {"min_nodes": 3},
            {
                "max_nodes": 3,
                "node_unit": 1,
                "rank_order": "survivors",
                "attributes": {},
                "limits": None,
                "join_timeout": 600,
                "last_call_timeout": 30,
                "early_last_call": True,
                "close_timeout": 30,
                "closed_ttl": 86400,
                "ttl": 10,
                "disconnect_ttl": 1,
                "gone_ttl": 0.1,
                "prefix": "/rdzv",
                "is_host": None,
                "insecure": False,
            },
        ),
        (ETCD, {}, {}, {"prefix": "/torchelastic/p2p"}),
        (TCP, {}, {"ttl": 0.5}, {"disconnect_ttl": 0.5}),
        (TCP, {}, {"min_nodes": 5, "max_nodes": 15, "node_unit": 4}, {"needed": 8, "capacity": 12}),
        # A keyword beats the URL, and the URL beats the environment.
        (
            TCP + "?ttl=6&close_timeout=7",
            {"RDZV_TTL": "3", "RDZV_CLOSE_TIMEOUT": "4", "RDZV_JOIN_TIMEOUT": "5"},
            {"ttl": 8},
            {"ttl": 8, "close_timeout": 7, "join_timeout": 5},
        ),
        (TCP + "?min_nodes=2", {}, {"min_nodes": None}, {"min_nodes": 2}),
        (TCP + "?is_host=1", {}, {"is_host": "auto"}, {"is_host": None}),
        # An older name means the new one, and may be given beside it with the same value.
        (
            TCP + "?min_workers=2&max_workers=4&timeout=60&etcd_prefix=torch/runs/",
            {},
            {},
            {"min_nodes": 2, "max_nodes": 4, "join_timeout": 60, "prefix": "/torch/runs"},
        ),
        (TCP, {"RDZV_MIN_WORKERS": "2", "RDZV_TIMEOUT": "2"}, {}, {"min_nodes": None, "join_timeout": 600}),
        (TCP, {"RDZV_TOKEN": "swordfish\n"}, {}, {"token": "swordfish"}),
        (TCP + "?min_nodes=2&min_workers=2", {}, {}, {"min_nodes": 2}),
        (TCP + "?min_workers=2", {}, {"min_nodes": 3}, {"min_nodes": 3}),
        # PyTorch's pair of parameters gives the ttl, also if only one of them is set.
        (TCP + PAIR, {}, {}, {"ttl": 8}),
        (TCP + PAIR + "&ttl=8", {}, {}, {"ttl": 8}),
        (TCP + "?keep_alive_interval=2", {}, {}, {"ttl": 6}),
        (TCP + "?keep_alive_interval=0.2&ttl=0.6", {}, {}, {"ttl": 0.6}),  # 0.2 * 3 is 0.6000000000000001
        (TCP + "?keep_alive_max_attempt=4", {}, {}, {"ttl": 20}),
        (TCP + PAIR, {"RDZV_TTL": "3"}, {}, {"ttl": 8}),
        (TCP + PAIR, {}, {"ttl": 7}, {"ttl": 7}),
        (TCP, {"RDZV_TOKEN_FILE": "/run/t"}, {"token": b"swordfish"}, {"token": b"swordfish", "token_file": None}),
        (TCP + "?token_file=/run/t", {"RDZV_TOKEN": "swordfish"}, {}, {"token": None, "token_file": "/run/t"}),
        # Values come as text or as themselves.
        (
            TCP + "?attributes=rack:r1,zone:z2&insecure=yes",
            {},
            {"data_dir": Path("/var/lib/rdzv"), "rank_order": by_name},
            {
                "attributes": {"rack": "r1", "zone": "z2"},
                "insecure": True,
                "data_dir": "/var/lib/rdzv",
                "rank_order": by_name,
            },
        ),
        (TCP, {}, {"limits": {"keys_max": 5, "handshake_timeout": 2.5}}, {"limits": FEW}),
        (TCP + "?limits=keys_max:5,handshake_timeout:2.5", {}, {}, {"limits": FEW}),
        (TCP, {"RDZV_LIMITS": "keys_max:5"}, {"limits": FEW}, {"limits": FEW}),
    ],
)
def test_the_sources_of_values(
    url: str, environ: dict[str, str], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    chosen = parsed(url, environ, **overrides)
    assert {name: getattr(chosen, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("timeout", "join_timeout"),
        ("min_workers", "min_nodes"),
        ("max_workers", "max_nodes"),
        ("etcd_prefix", "prefix"),
        ("keep_alive_interval", "ttl"),
        ("keep_alive_max_attempt", "ttl"),
    ],
)
def test_an_older_name_is_for_urls_and_rdzv_conf_and_no_keyword(old: str, name: str) -> None:
    """In other calls the keyword `timeout` limits a request, or a collective."""
    given: dict[str, Any] = {old: 1}
    assert f"no keyword {old}," in (message := refusal(**given)) and message.endswith(f"; write {name}"), message
    assert parse_all({old: "7"}, Source.RDZV_CONF).keys() == {name} == parse_all({old: "7"}, Source.URL).keys()


def test_variables_that_set_no_parameter_are_ignored() -> None:
    environ = {"RDZV_ROUND": "3", "RDZV_RUN_ID": "other", "RDZV_TLS": "x", "RDZV_HEALTH_CHECK": "x", "TTL": "1"}
    assert parsed(environ=environ) == parsed()


def test_a_tls_context_replaces_the_files_of_weaker_sources_and_turns_tls_on() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    chosen = parsed(environ={"RDZV_CA": "/ca.pem"}, tls=context)
    assert chosen.tls is context and chosen.ca is None and chosen.uses_tls
    assert not parsed().uses_tls
    assert parsed("tcps://head/job-7?ca=/ca.pem").uses_tls


# Error messages for wrong values.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("tcp:///r", ("no host", "tcp://head")),
        ("tcp://head", ("run_id", "tcp://head:29400/job-7")),
        ("tcp://head/", ("run_id", "tcp://head:29400/job-7")),
        ("tcp://a/b/c", ("run_id", "b/c", '"/"')),
        ("tcp://a/b%2Fc", ("run_id", "b/c", '"/"')),
        ("tcp://a/b%00", ("run_id", "\\x00", "printable")),
        ("tcp://a/" + "x" * 256, ("run_id", "xxx", "255", "job-7")),
        (TCP + "?tll=5", ("tll", "did you mean ttl?", "join_timeout")),
        (TCP + "?password=x", ("password", "did you mean password_file?")),
        (TCP + "?qqqqqq=5", ("'qqqqqq' in the URL; the parameters are",)),
        (TCP + "?tls=x", ("tls", "ssl.SSLContext", "keyword")),
        (TCP + "?health_check=x", ("health_check", "function", "keyword")),
    ],
)
def test_the_error_for_a_wrong_url_names_the_fault(url: str, said: tuple[str, ...]) -> None:
    message = refusal(url)
    assert all(words in message for words in said), message


def test_secrets_do_not_belong_into_a_url_and_are_not_repeated() -> None:
    message = refusal(TCP + "?token=swordfish")
    assert all(words in message for words in ("in the URL", "do not belong there", "process lists", "token_file="))
    assert "swordfish" not in message


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
        (TCP, {"disconnect_ttl": 1, "gone_ttl": 3}, ("gone_ttl=3", "disconnect_ttl=1", "lower gone_ttl")),
        (TCP, {"requested_rank": 1}, ("requested_rank=1", "rank_order=survivors", "rank_order=requested")),
        (TCP, {"token": "swordfish", "token_file": "/t"}, ("token and token_file='/t'", "leave one out")),
        ("tcps://h/r", {"tls": CONTEXT, "ca": "/ca"}, ("tls and ca='/ca'", "leave out")),
        ("tcps://h/r", {"cert": "/c"}, ("cert='/c'", "give key")),
        ("tcps://h/r", {"key": "/k"}, ("key='/k'", "give cert")),
        (ETCD, {"user": "me"}, ("user='me'", "give password_file")),
        (ETCD, {"password_file": "/p"}, ("password_file='/p'", "give user")),
        (ETCD, {"data_dir": "/d"}, ("data_dir is for tcp", "etcd", "leave out data_dir", "RDZV_DATA_DIR")),
        ("tcp://a,b/r", {"data_dir": "/d"}, ("data_dir='/d' is for a store on one host", "lists 2", "list one host")),
        (ETCD, {"limits": FEW}, ("limits is for tcp",)),
        (ETCD, {"token_file": "/d"}, ("token_file is for tcp", "leave out token_file")),
        (TCP, {"user": "me"}, ("user is for etcd", "tcp", "leave out user")),
        (TCP, {"password_file": "/p"}, ("password_file is for etcd", "leave out")),
        (TCP, {"ca": "/ca"}, ("ca is for encrypted connections", "write tcps://")),
        (TCP + "?min_nodes=2&min_workers=3", {}, ("min_nodes='2' and min_workers='3'", "leave one out")),
        (TCP + "?timeout=1&join_timeout=2", {}, ("timeout='1' and join_timeout='2' in the URL",)),
        (
            TCP + "?ttl=4&keep_alive_interval=2",
            {},
            ("ttl=4 and keep_alive_interval x keep_alive_max_attempt=6", "leave one out"),
        ),
        (
            TCP + "?keep_alive_interval=0.1",
            {},
            ("keep_alive_interval x keep_alive_max_attempt=0.3 ", "from 0.5", "write for example ttl=10"),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named_together(
    url: str, overrides: dict[str, Any], said: tuple[str, ...]
) -> None:
    message = refusal(url, **overrides)
    assert all(words in message for words in said), message
    assert "swordfish" not in message


# Settings as an object.


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


def test_secrets_are_not_in_the_repr() -> None:
    chosen = parsed(token="swordfish", tls=CONTEXT)
    assert "swordfish" not in repr(chosen) and "SSLContext" not in repr(chosen)


def test_an_observer_that_joins_gets_an_error_that_names_the_missing_settings() -> None:
    chosen = parsed()
    assert not chosen.can_join
    for name in ("needed", "capacity"):
        with pytest.raises(RendezvousSettingsError, match=r"min_nodes is missing.*tcp://head:29400/job-7\?min"):
            getattr(chosen, name)


class Order:
    def __call__(self, *_: Any) -> None:
        """Return the records in the given order."""


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("topology:rack", "topology:rack"),
        (by_name, f"{__name__}.by_name"),
        (Order(), f"{__name__}.Order"),
        (partial(by_name, 1), "functools.partial"),
    ],
)
def test_the_settings_that_a_run_shares_are_plain_data(order: Any, name: str) -> None:
    assert parsed(min_nodes=2, max_nodes=4, rank_order=order).shared() == {
        "min_nodes": 2,
        "max_nodes": 4,
        "node_unit": 1,
        "rank_order": name,
        "last_call_timeout": 30.0,
        "early_last_call": True,
    }


def test_a_difference_names_both_values() -> None:
    assert describe_difference(parsed(min_nodes=2, torch_store="tcp").shared(), parsed(min_nodes=2).shared()) == (
        "torch_store is 'tcp' here and 'rdzv' in the run"
    )
    ours, theirs = parsed(min_nodes=2).shared(), parsed(min_nodes=3, rank_order="name").shared()
    assert describe_difference(ours, theirs) == (
        "min_nodes is 2 here and 3 in the run, max_nodes is 2 here and 3 in the run, "
        "rank_order is 'survivors' here and 'name' in the run"
    )
    assert describe_difference(ours, ours) == ""
    assert describe_difference({}, {"colour": "red"}) == "", "settings of a later release are not compared"


def test_the_table_is_complete_and_in_order() -> None:
    assert ["endpoint", "run_id", *PARAMETERS] == [declared.name for declared in fields(Settings)]
    assert PARAMETERS["ttl"].default == 10 and PARAMETERS["prefix"].default is None


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("url", "overrides"),
    [
        (TCP, {"payload": bytes(10_000_000)}),
        (TCP, {"payload": [{"deep": [object()] * 1000}] * 1000}),
        (TCP, {"payload": 2**100_000}),
        (TCP, {"attributes": f"{LONG}:a,{LONG}:b"}),
        (TCP, {"token": "secret", "token_file": LONG}),
        (TCP, {LONG: 1}),
        (TCP, {"node_id": LONG}),
        (TCP, {"ttl": range(10**80)}),
        (f"{TCP}?{LONG}", {}),
        (f"{TCP}?{LONG}=1&{LONG}=2", {}),
        (f"{TCP}?{LONG}=%ff", {}),
        (f"tcp://head:{LONG}/job", {}),
        (f"tcp://head/{LONG}", {}),
    ],
)
def test_no_error_shows_a_value_at_length(url: str, overrides: dict[str, Any]) -> None:
    with pytest.raises(RendezvousSettingsError) as raised:
        parse(url, overrides, {})
    assert len(str(raised.value)) < 1500


def test_a_maximum_that_no_round_can_reach_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        parse(f"{TCP}?min_nodes=3&max_nodes=4&node_unit=3", {}, {})
    parse(f"{TCP}?min_nodes=3&max_nodes=6&node_unit=3", {}, {})
    (record,) = caplog.records
    assert "a round has at most 3 nodes, and more stay as spares; write max_nodes=3 or max_nodes=6" in record.message


def test_defaults_have_the_form_of_parsed_values() -> None:
    for parameter in PARAMETERS.values():
        if parameter.default is not None:
            read = parameter.read(parameter.default)
            assert (read, type(read)) == (parameter.default, type(parameter.default))


def test_a_payload_that_is_not_equal_to_itself_contradicts_nothing() -> None:
    given = parse("tcp://host/job", {"min_nodes": 1, "payload": math.nan}, {}).payload
    assert math.isnan(given)


@pytest.mark.parametrize("service", ["MASTER", "HTTP", "METRICS"])
@pytest.mark.parametrize("link", ["tcp://10.0.0.1:29400", "udp://10.0.0.1:53", "tcp://[fd00::1]:29400"])
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(service: str, link: str) -> None:
    """A Service called rdzv-master sets RDZV_MASTER_PORT in every pod of its namespace."""
    name = f"{service.lower()}_port"
    theirs = {f"RDZV_{service}_PORT": link, f"RDZV_{service}_SERVICE_HOST": "10.0.0.1"}
    assert getattr(parse(TCP, {}, theirs), name) == getattr(parse(TCP, {}, {}), name)
    assert getattr(parse(TCP, {}, {f"RDZV_{service}_PORT": "29501"}), name) != getattr(parse(TCP, {}, {}), name)
