"""Checks of arguments; an invalid argument raises TypeError or ValueError."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from rdzv.config.config_errors import brief


def valid_key(key: object) -> str:
    """Return a valid key."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {brief(key)}")
    encode_utf8(key, "a key")
    return key


def valid_keys(keys: object) -> tuple[str, ...]:
    """Return several valid keys."""
    return tuple(map(valid_key, iterable_as_tuple(keys, "keys")))


def iterable_as_tuple(items: object, name: str) -> tuple[Any, ...]:
    """Return an iterable of arguments as a tuple; raise TypeError for a single string, or if it is no iterable."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise TypeError(f"{name} is a list, not {brief(items)}; for a single one write {name}=[...]")
    return tuple(items)


def valid_value(value: object) -> bytes:
    """Return a valid value."""
    if isinstance(value, str):
        return encode_utf8(value, "a value")
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a value is str or bytes, not {brief(value)}")


def encode_utf8(text: str, name: str) -> bytes:
    """Return text in UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is text that UTF-8 can hold, not {brief(text)}") from None


def valid_int(number: object, name: str) -> int:
    """Return a valid whole number."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {brief(number)}") from None
