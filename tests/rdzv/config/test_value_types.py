"""Kinds: what each accepts and makes of it, what it refuses, and that reading twice changes nothing."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from rdzv.config import value_types
from rdzv.config.value_types import Kind, Unfit, duration, whole_number

CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

ACCEPTED: list[tuple[Kind, Any, Any]] = [
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
def test_a_value_is_read_and_reading_it_again_changes_nothing(kind: Kind, raw: Any, value: Any) -> None:
    assert kind.convert(raw) == value
    assert value is None or kind.convert(kind.convert(raw)) == value


REFUSED: list[tuple[Kind, Any]] = [
    *((whole_number(1), raw) for raw in (0, "two", 2.5, True, 1_000_001)),
    *(
        (duration(0.5), raw)
        for raw in (0.4, "nan", float("inf"), 10**400, "soon", True, [0], "m", "5 m", "100ms", "5x", "1m2")
    ),
    (value_types.FLAG, "auto"),
    (value_types.FLAG_OR_AUTO, 2),
    *((value_types.NAME, raw) for raw in ("", "a/b", "x" * 256, "a\x07", "\ud800", 7)),
    *((value_types.PATH, raw) for raw in ("", 7)),
    *((value_types.PREFIX, raw) for raw in ("", "//")),
    *((value_types.ADDRESS, raw) for raw in ("head:29400", "x" * 256, "")),
    *((value_types.SECRET, raw) for raw in ("", b"", 7)),
    *((value_types.PAYLOAD, raw) for raw in (bytes(4094), object(), {(1, 2): 3}, 2**70)),
    *(
        (value_types.ATTRIBUTES, raw)
        for raw in ({"rack": 1}, {1: "r1"}, "rack", "rack:", "a:b,a:c", {"a": "x" * 1024}, 7)
    ),
    *((value_types.RANK_ORDER, raw) for raw in ("random", "topology:", 7)),
    (value_types.FUNCTION, "x"),
    (value_types.TLS, True),
]


@pytest.mark.parametrize(("kind", "raw"), REFUSED)
def test_anything_else_is_refused_as_a_value_or_a_type(kind: Kind, raw: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        kind.convert(raw)


@pytest.mark.parametrize(
    ("kind", "raw", "said"),
    [
        (value_types.PAYLOAD, bytes(4094), "it has 4097"),
        (value_types.PAYLOAD, object(), "msgpack cannot carry it"),
        (value_types.ATTRIBUTES, "rack:a,rack:b", "'rack' is there twice"),
        (value_types.ATTRIBUTES, {"rack": "x" * 1024}, "these are more"),
    ],
)
def test_a_kind_says_more_than_its_limit_where_it_can(kind: Kind, raw: Any, said: str) -> None:
    with pytest.raises(Unfit, match=said):
        kind.convert(raw)


def test_a_payload_is_a_copy_of_what_was_given() -> None:
    given = {"gpus": [1, 2]}
    copy = value_types.PAYLOAD.convert(given)
    given["gpus"].append(3)
    assert copy == {"gpus": [1, 2]}


def test_attributes_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        value_types.ATTRIBUTES.convert({"rack": "r1"})["rack"] = "r2"
