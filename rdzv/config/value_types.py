"""The types of parameters: a `ValueType` converts a parameter's text or value, and states the limit."""

from __future__ import annotations

import ipaddress
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

import msgpack

from rdzv.config.config_errors import brief, suggest
from store.limits import Limits

PAYLOAD_BYTES_MAX: Final = 4096  # as msgpack; the coordinator holds all nodes' payloads: 10,000 take 40 MB
PAYLOAD_LEVELS_MAX: Final = 32  # levels of nested lists and maps; JSON readers have limits, too
ATTRIBUTES_BYTES_MAX: Final = 1024  # as msgpack; a rack, a zone and a host take a tenth of it
NAMES_MOST: Final = 20_000  # expected nodes: twice the largest tested run
NAME_LENGTH_MAX: Final = 255  # characters of a run id, node id or address
NODES_MAX: Final = 1_000_000  # the largest whole number accepted by default: 100 times the largest measured run
DURATION_MAX: Final = 1e9  # seconds, below the limits of threads (`threading.TIMEOUT_MAX`) and etcd's leases, 9e9 each
RANK_ORDERS: Final = ("survivors", "in_place", "arrival", "name", "requested", "topology", "survivors_then_name")
PORT_MAX: Final = 65535
TORCH_STORES: Final = ("rdzv", "tcp")
HOSTS: Final = ("inside", "process")
UNSPECIFIED: Final = ("0.0.0.0", "::")  # addresses to listen on, not to connect to  # noqa: S104
WORDS_FOR_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
WORDS_FOR_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})


class InvalidValue(ValueError):
    """Raised by `ValueType.convert` to add a detail to the error."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a parameter. `convert` accepts its own results, and returns them unchanged."""

    limit: str  # completes the error "it must be ..."
    convert: Callable[[Any], Any]  # returns the canonical value; raises `ValueError` or `TypeError` for a wrong one
    example: str  # a valid value as text, for errors


_NUMBER: Final = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)


def plain_number(text: str, kind: type[int] | type[float]) -> Any:
    """Return the number in a text; raise `ValueError` also for `1_0`, `+1` and ` 1`, which Python accepts."""
    if not _NUMBER.fullmatch(text):
        raise ValueError
    return kind(text)


def whole_number(at_least: int, at_most: int = NODES_MAX, *, limit: str = "", example: str = "") -> ValueType:
    """Return the type of whole numbers in a range; `limit` describes the range in errors."""

    def convert(raw: Any) -> int:
        if isinstance(raw, bool):
            raise TypeError
        number = plain_number(raw, int) if isinstance(raw, str) else operator.index(raw)
        if not at_least <= number <= at_most:
            raise ValueError
        return number

    return ValueType(limit or f"a whole number from {at_least} to {at_most}", convert, example or f"{at_least}")


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WITH_UNITS: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+", re.ASCII)
_WITH_UNIT: Final = re.compile(r"([0-9.]+)(ms|s|m|h|d)", re.ASCII)


def _parse_seconds(raw: Any) -> float:
    if isinstance(raw, (bool, bytes, bytearray)):
        raise TypeError
    if not isinstance(raw, str):
        return float(raw)
    if _WITH_UNITS.fullmatch(raw):
        return sum(float(number) * _UNITS[unit] for number, unit in _WITH_UNIT.findall(raw))
    seconds: float = plain_number(raw, float)
    return seconds


def duration(at_least: float = 0.0, *, because: str = "", example: str = "30") -> ValueType:
    """Return the type of durations in seconds; `because` explains the minimum in errors."""

    def convert(raw: Any) -> float:
        seconds = _parse_seconds(raw)
        if not at_least <= seconds <= DURATION_MAX:  # NaN is rejected, too
            raise ValueError
        return seconds

    limit = f"a number of seconds from {at_least:g} to {DURATION_MAX:.0f}{because} (5m or 1h30m will do)"
    return ValueType(limit, convert, example)


def _parse_flag(raw: Any) -> bool:
    word = str(raw).lower()
    if word not in WORDS_FOR_TRUE | WORDS_FOR_FALSE:
        raise ValueError
    return word in WORDS_FOR_TRUE


def _check_text(raw: Any) -> str:
    """Return a text; raise an error if it is empty, or has control characters or lone surrogates."""
    if not isinstance(raw, str):
        raise TypeError
    if not raw or not raw.isprintable():
        raise ValueError
    return raw


def _parse_name(raw: Any) -> str:
    name = _check_text(raw)
    if "/" in name or len(name) > NAME_LENGTH_MAX:
        raise ValueError
    return name


def _parse_names(raw: Any) -> tuple[str, ...]:
    listed = [name.strip() for name in raw.split(",")] if isinstance(raw, str) else raw
    names = tuple(dict.fromkeys(map(_parse_name, listed)))
    if len(names) > NAMES_MOST:
        raise InvalidValue(f"these are {len(names)}")
    return names


def _parse_path(raw: Any) -> str:
    return _check_text(str(raw) if isinstance(raw, PurePath) else raw)


def _parse_prefix(raw: Any) -> str:
    # Outer slashes make no difference: nodes with prefix `a`, `/a` and `a/` use the same keys.
    return "/" + _check_text(_check_text(raw).strip("/"))


def _parse_host(raw: Any) -> str:
    address = _check_text(raw)
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    if ":" in address:
        ipaddress.IPv6Address(address)  # raises a ValueError if the address is invalid
    elif not re.fullmatch(r"[\w.%-]+", address):
        raise ValueError
    if len(address) > NAME_LENGTH_MAX or address in UNSPECIFIED:
        raise ValueError
    return address


def _is_nested_deeper(value: Any, levels: int) -> bool:
    inside = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ()
    return bool(inside) and (levels == 0 or any(_is_nested_deeper(one, levels - 1) for one in inside))


def _copy_payload(raw: Any) -> Any:
    # Pack and unpack the payload, so that later changes of the object have no effect, and all nodes read the same.
    try:
        packed = msgpack.packb(raw)
        copy = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidValue(f"msgpack cannot carry it ({error})") from error
    if len(packed) > PAYLOAD_BYTES_MAX:
        raise InvalidValue(f"it has {len(packed)}")
    if _is_nested_deeper(copy, PAYLOAD_LEVELS_MAX):
        raise InvalidValue("it is nested more deeply")
    return copy


def _parse_pairs(raw: Any) -> dict[Any, Any]:
    """Return the pairs of a mapping, or of text such as rack:r1,zone:z2."""
    if not isinstance(raw, str):
        return dict(Mapping.items(raw))
    pairs: dict[str, str] = {}
    for item in raw.split(","):
        name, colon, value = item.partition(":")
        if not colon:
            raise ValueError
        if name in pairs:
            raise InvalidValue(f"{brief(name)} is there twice")
        pairs[name] = value
    return pairs


def _parse_attributes(raw: Any) -> Mapping[str, str]:
    attributes = {_check_text(name): _check_text(value) for name, value in _parse_pairs(raw).items()}
    if len(msgpack.packb(attributes)) > ATTRIBUTES_BYTES_MAX:
        raise InvalidValue("these are more")
    return MappingProxyType(attributes)


def _read_limits(raw: Any) -> Limits:
    if isinstance(raw, Limits):
        return raw
    types: dict[str, Any] = {limit.name: type(limit.default) for limit in fields(Limits)}
    pairs = _parse_pairs(raw)
    for name in pairs:
        if name not in types:
            raise InvalidValue(f"there is no limit {brief(name)}{suggest(str(name), types)}")
    chosen = {
        name: plain_number(value, types[name]) if isinstance(value, str) else types[name](value)
        for name, value in pairs.items()
    }
    try:
        return Limits(**chosen)
    except ValueError as error:
        raise InvalidValue(str(error)) from error


def _parse_rank_order(raw: Any) -> Any:
    is_named = isinstance(raw, str) and (raw in RANK_ORDERS or re.fullmatch("topology:.+", raw, re.DOTALL))
    if not is_named and not callable(raw):
        raise ValueError
    return raw


def _parse_ports(raw: Any) -> str:
    text = raw if isinstance(raw, str) else str(operator.index(raw))
    first, dash, last = text.partition("-")
    low, high = (plain_number(one, int) for one in (first, last if dash else first))
    if not 1 <= low <= high <= PORT_MAX or isinstance(raw, bool):
        raise ValueError
    return f"{low}-{high}" if dash else f"{low}"


def _accept_if(is_one: Callable[[Any], object]) -> Callable[[Any], Any]:
    def convert(raw: Any) -> Any:
        if not is_one(raw):
            raise TypeError
        return raw

    return convert


FLAG: Final = ValueType("one of 1, 0, true, false, yes, no, on, off", _parse_flag, "true")
FLAG_OR_AUTO: Final = ValueType(
    "one of auto, 1, 0, true, false, yes, no, on, off", lambda raw: None if raw == "auto" else _parse_flag(raw), "true"
)
_IN_A_NAME: Final = f'1 to {NAME_LENGTH_MAX} printable characters without "/"'
NAME: Final = ValueType(f"{_IN_A_NAME}, which separates the parts of a key", _parse_name, "host10")
NAMES: Final = ValueType(
    f"at most {NAMES_MOST} names of nodes, a list or separated by commas, each of {_IN_A_NAME}",
    _parse_names,
    "gpu-001,gpu-002",
)
TEXT: Final = ValueType("text that is not empty, in printable characters", _check_text, "rack")
PATH: Final = ValueType("the path of a file or directory, not empty", _parse_path, "/run/secrets/rdzv")
PREFIX: Final = ValueType(
    "the beginning of a key, in printable characters and more than slashes", _parse_prefix, "/rdzv"
)
ADDRESS: Final = ValueType("a host name or an IP address of this machine, without a port", _parse_host, "10.0.0.7")
SECRET: Final = ValueType(
    "text or bytes, not empty", _accept_if(lambda raw: isinstance(raw, str | bytes) and raw), "..."
)
PAYLOAD: Final = ValueType(
    f"at most {PAYLOAD_BYTES_MAX} bytes of msgpack, nested at most {PAYLOAD_LEVELS_MAX} deep", _copy_payload, "8xH100"
)
ATTRIBUTES: Final = ValueType(
    f"names and values, both text and not empty, in at most {ATTRIBUTES_BYTES_MAX} bytes of msgpack",
    _parse_attributes,
    "rack:r1,zone:z2",
)
LIMITS: Final = ValueType("a store.Limits, or names of its fields with numbers", _read_limits, "keys_max:100000")
RANK_ORDER: Final = ValueType(
    f"one of {', '.join(RANK_ORDERS)}, topology:ATTRIBUTE, or a function", _parse_rank_order, "topology:rack"
)
HOST: Final = ValueType(f"one of {', '.join(HOSTS)}", _accept_if(HOSTS.__contains__), "process")
TORCH_STORE: Final = ValueType(f"one of {', '.join(TORCH_STORES)}", _accept_if(TORCH_STORES.__contains__), "tcp")
PORTS: Final = ValueType(f"a port or a range of them, from 1 to {PORT_MAX}", _parse_ports, "29500-29599")
HTTP_PORT: Final = whole_number(
    0, PORT_MAX, limit=f"a port from 1 to {PORT_MAX}, or 0 for any free one", example="29401"
)
FUNCTION: Final = ValueType("a function", _accept_if(callable), "check_gpus")
# An SSLContext is recognized by its method, as a pure module does not import `ssl`.
TLS: Final = ValueType(
    "an ssl.SSLContext", _accept_if(lambda raw: hasattr(raw, "wrap_bio")), "ssl.create_default_context()"
)
