"""Pure: what a caller may pass. What it may not is an error of the caller's, and so a plain Python one."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from rdzv.config.config_errors import shown

__all__ = ["key_of", "keys_of", "many_of", "utf8_of", "value_of", "whole_of"]


def key_of(key: object) -> str:
    """Return a key as a caller may pass it."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {shown(key)}")
    utf8_of(key, "a key")
    return key


def keys_of(keys: object) -> tuple[str, ...]:
    """Return several keys as a caller may pass them."""
    return tuple(map(key_of, many_of(keys, "keys")))


def many_of(items: object, name: str) -> tuple[Any, ...]:
    """Return any list as a caller may pass it."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise TypeError(f"{name} is a list, not {shown(items)}; for a single one write {name}=[...]")
    return tuple(items)


def value_of(value: object) -> bytes:
    """Return a value as a caller may pass it."""
    if isinstance(value, str):
        return utf8_of(value, "a value")
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a value is str or bytes, not {shown(value)}")


def utf8_of(text: str, name: str) -> bytes:
    """Return text as bytes, if UTF-8 can hold it."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is text that UTF-8 can hold, not {shown(text)}") from None


def whole_of(number: object, name: str) -> int:
    """Return a whole number as a caller may pass it."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {shown(number)}") from None
