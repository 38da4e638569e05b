"""Value types: which values each one accepts or rejects, and that parsing a parsed value changes nothing."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from rdzv.config import value_types
from rdzv.config.value_types import ValueType, duration, whole_number

CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

ACCEPTED: list[tuple[ValueType, Any, Any]] = [
    (whole_number(1), "12", 12),
    (whole_number(0), 0, 0),
    (duration(), "0.5", 0.5),
    (duration(0.5), 1, 1.0),
    (duration(), "5m", 300.0),
    (duration(), "1h30m", 5400.0),
    (duration(), "1.5s", 1.5),
    (duration(), "500ms", 0.5),
    (duration(), "2d", 172_800.0),
    *((value_types.FLAG, word, True) for word in ("1", "true", "yes", "on", "TRUE", 1, True)),
    *((value_types.FLAG, word, False) for word in ("0", "false", "no", "off", 0, False)),
    (value_types.FLAG_OR_AUTO, "auto", None),
    (value_types.FLAG_OR_AUTO, "0", False),
    (value_types.NAME, "jöb 7", "jöb 7"),
    (value_types.TEXT, "a/b", "a/b"),
    (value_types.PATH, Path("/var/lib/rdzv"), "/var/lib/rdzv"),
    (value_types.PREFIX, "rdzv/", "/rdzv"),
    (value_types.ADDRESS, "10.0.0.7", "10.0.0.7"),
    (value_types.ADDRESS, "[fe80::1%eth0]", "fe80::1%eth0"),
    (value_types.SECRET, b"swordfish", b"swordfish"),
    (value_types.PAYLOAD, {"any": ("thing",)}, {"any": ["thing"]}),
    (value_types.PAYLOAD, bytes(4096 - 3), bytes(4093)),  # msgpack adds three bytes: just the limit
    (value_types.ATTRIBUTES, "rack:r1,zone:z2", {"rack": "r1", "zone": "z2"}),
    (value_types.ATTRIBUTES, {"rack": "r1"}, {"rack": "r1"}),
    *((value_types.RANK_ORDER, order, order) for order in (*value_types.RANK_ORDERS, "topology:rack")),
    (value_types.RANK_ORDER, max, max),
    (value_types.FUNCTION, max, max),
    (value_types.TLS, CONTEXT, CONTEXT),
]


@pytest.mark.parametrize(("kind", "raw", "value"), ACCEPTED)
def test_parsing_a_parsed_value_changes_nothing(kind: ValueType, raw: Any, value: Any) -> None:
    assert kind.convert(raw) == value
    assert value is None or kind.convert(kind.convert(raw)) == value


PYTHONS_OWN = ("1_0", "+1", " 1", "1 ", "\uff11", "0x1", "")
"""Numbers that `int`, `float` or Python's grammar accept. In a URL they count as typing errors."""


@pytest.mark.parametrize("text", PYTHONS_OWN)
@pytest.mark.parametrize(
    "kind", [whole_number(0), duration(), value_types.HTTP_PORT, value_types.PORTS, value_types.LIMITS]
)
def test_a_number_is_written_in_plain_digits(kind: ValueType, text: str) -> None:
    prefixes = ("keys_max:", "handshake_timeout:") if kind is value_types.LIMITS else ("", "1-")
    for prefix in prefixes[: 1 + (kind in {value_types.LIMITS, value_types.PORTS})]:
        with pytest.raises(ValueError):
            kind.convert(f"{prefix}{text}")


@pytest.mark.parametrize(("text", "seconds"), [("1e1", 10.0), (".5", 0.5), ("30.", 30.0), ("007", 7.0)])
def test_seconds_may_have_a_point_and_an_exponent(text: str, seconds: float) -> None:
    assert duration().convert(text) == seconds


@pytest.mark.parametrize("raw", [b"30", bytearray(b"30"), True])
def test_bytes_are_no_number_of_seconds(raw: Any) -> None:
    with pytest.raises(TypeError):
        duration().convert(raw)


def test_a_payload_is_copied() -> None:
    given = {"gpus": [1, 2]}
    copy = value_types.PAYLOAD.convert(given)
    given["gpus"].append(3)
    assert copy == {"gpus": [1, 2]}


def test_attributes_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        value_types.ATTRIBUTES.convert({"rack": "r1"})["rack"] = "r2"
