"""Parameters: each is documented, and the error for a wrong value names the valid values and a remedy."""

from typing import Any

import pytest

from rdzv.config import settings
from rdzv.config.config_errors import brief
from rdzv.config.overrides import Overrides
from rdzv.config.parameters import KEEP_ALIVE, Source
from rdzv.errors import RendezvousSettingsError

DEEP: Any = []
for _ in range(1022):
    DEEP = [DEEP]

PARAMETERS = {**settings.PARAMETERS, **KEEP_ALIVE}


def refusal(name: str, raw: Any, **where: Any) -> str:
    """Return the error message of a parameter for a wrong value. It is always one sentence."""
    with pytest.raises(RendezvousSettingsError) as caught:
        PARAMETERS[name].read(raw, **where)
    message = str(caught.value)
    assert "\n" not in message
    return message


NAME_LIMIT = "255 printable characters"
WHOLE = "whole number from 1"
WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("min_nodes", 0, WHOLE),
    ("min_nodes", 2.5, WHOLE),
    ("min_nodes", True, WHOLE),
    ("max_nodes", -1, WHOLE),
    ("max_nodes", 1_000_001, "1000000"),
    ("requested_rank", -1, "whole number from 0"),
    ("join_timeout", -1, "seconds from 0"),
    ("join_timeout", "nan", "seconds from 0"),
    ("join_timeout", float("inf"), "to 1000000000"),
    ("join_timeout", 10**400, "to 1000000000"),
    ("join_timeout", "soon", "seconds"),
    ("join_timeout", True, "seconds"),
    ("closed_ttl", 0, "seconds from 1 "),
    ("ttl", 0.4, "seconds from 0.5 "),
    ("disconnect_ttl", 0, "which a connection that was cut needs to come back"),
    ("gone_ttl", 0.001, "seconds from 0.01 "),
    ("unit_within", 7, "text"),
    ("stall_timeout", 0.5, "seconds from 1 "),
    ("first_step_timeout", 0, "seconds from 1 "),
    ("http_port", 65536, "a port from 1 to 65535, or 0 for any free one"),
    ("http_port", True, "a port from 1 to 65535"),
    ("metrics_port", "-1", "a port from 1 to 65535, or 0 for any free one"),
    ("master_port", 0, "a port or a range of them, from 1 to 65535"),
    ("master_port", "29599-29500", "a port or a range of them"),
    ("bootstrap_check", "maybe", "true, false, yes, no, on, off"),
    ("torch_store", "TCP", "one of rdzv, tcp"),
    ("host", "thread", "one of inside, process"),
    ("agent_store", "maybe", "true, false, yes, no, on, off"),
    ("early_last_call", "maybe", "true, false, yes, no, on, off"),
    ("expected", "a,,b", 'each of 1 to 255 printable characters without "/"'),
    ("expected", ["a/b"], "a list or separated by commas"),
    ("expected", 7, "at most 20000 names"),
    ("expected", [f"n{at}" for at in range(20_001)], "but these are 20001"),
    ("expected_file", "", "the path of a file"),
    ("waits_end_on_loss", "maybe", "true, false, yes, no, on, off"),
    ("is_host", 2, "auto, 1, 0"),
    ("prefix", "//", "more than slashes"),
    ("data_dir", "", "not empty"),
    ("limits", "keys_max", "a store.Limits, or names"),
    ("limits", "key_max:5", "there is no limit 'key_max' (did you mean keys_max?)"),
    ("limits", "keys_max:5,keys_max:6", "'keys_max' is there twice"),
    ("limits", {"keys_max": 0}, "the limit keys_max is 0; it must be above 0"),
    ("limits", {"keys_max": "many"}, "a store.Limits, or names"),
    ("limits", 7, "a store.Limits, or names"),
    ("token_file", "", "not empty"),
    ("ca", "", "not empty"),
    ("key", "", "not empty"),
    ("user", "", "not empty"),
    ("password_file", "", "not empty"),
    ("node_id", "a/b", NAME_LIMIT),
    ("node_id", "", NAME_LIMIT),
    ("node_id", "x" * 256, NAME_LIMIT),
    ("node_id", "a\x07", NAME_LIMIT),
    ("node_id", "\ud800", NAME_LIMIT),
    ("address", "head:29400", "without a port"),
    ("address", "0.0.0.0", "of this machine"),
    ("address", "x" * 256, "host name"),
    ("address", "rack:r1:z", "host name"),
    ("payload", bytes(4094), "at most 4096 bytes of msgpack"),
    ("payload", DEEP, "nested more deeply"),
    ("payload", object(), "msgpack cannot carry it"),
    ("payload", {(1, 2): 3}, "msgpack cannot carry it"),
    ("payload", 2**70, "msgpack cannot carry it"),
    ("attributes", {"rack": 1}, "both text"),
    ("attributes", {1: "r1"}, "both text"),
    ("attributes", "rack", "names and values"),
    ("attributes", "rack:", "not empty"),
    ("attributes", "rack:a,rack:b", "but 'rack' is there twice"),
    ("attributes", {"rack": "x" * 1024}, "1024 bytes of msgpack, but these are more"),
    ("attributes", 7, "names and values"),
    ("rank_order", "random", "survivors, in_place, arrival"),
    ("rank_order", "topology:", "topology:ATTRIBUTE"),
    ("rank_order", 7, "a function"),
    ("health_check", "x", "a function"),
    ("tls", True, "an ssl.SSLContext"),
    ("keep_alive_interval", -1, "seconds from 0"),
    ("keep_alive_max_attempt", 0, WHOLE),
]


@pytest.mark.parametrize(("name", "value", "limit"), WRONG_VALUES)
def test_the_error_for_a_wrong_value_has_the_limit_and_a_remedy(name: str, value: Any, limit: str) -> None:
    message = refusal(name, value)
    assert message.startswith(f"{name}={brief(value)} must be "), message
    assert limit in message and f"write for example {name}={PARAMETERS[name].kind.example}" in message, message


def test_the_tables_cover_every_parameter() -> None:
    assert {name for name, *_ in WRONG_VALUES} >= set(PARAMETERS) - {
        "token",  # not shown, see below
        *(
            "node_unit",
            "last_call_timeout",
            "close_timeout",
            "store_gone_timeout",
            "insecure",
            "cert",
        ),  # they are shown as text, like their neighbours
    }


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"source": Source.URL}, "ttl='0' in the URL must be a number of seconds from 0.5"),
        ({"source": Source.ENVIRONMENT}, "RDZV_TTL='0' in the environment must be"),
        ({"source": Source.ENVIRONMENT}, "write for example RDZV_TTL=10"),
        ({"written": "keep_alive"}, "keep_alive='0' must be"),
    ],
)
def test_an_error_names_the_source_of_the_value(where: dict[str, Any], said: str) -> None:
    assert said in refusal("ttl", "0", **where)


@pytest.mark.parametrize("token", ["", b"", ["swordfish"]])
def test_a_wrong_token_is_not_shown(token: Any) -> None:
    assert refusal("token", token).startswith("token=(not shown) must be text or bytes, not empty")


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_documented_and_its_example_is_valid(name: str) -> None:
    parameter = PARAMETERS[name]
    assert parameter.name == name and parameter.kind.limit
    assert (Source.KEYWORD in parameter.sources and Source.RDZV_CONF in parameter.sources) or parameter.is_secret
    if Source.URL in parameter.sources:
        value = parameter.read(parameter.kind.example)
        assert parameter.read(value) == value, "parsing a parsed value gives the same"


def test_every_parameter_is_a_keyword_by_its_name_and_nothing_else_is() -> None:
    assert list(Overrides.__annotations__.keys() ^ settings.PARAMETERS.keys()) == []
