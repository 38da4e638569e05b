"""Pure: what is kept in the store, to plain data and back: msgpack, with every field checked on its way in.

Nothing that is read is believed: something else may write under the same prefix. The wire has its own tables
(`store.protocol.codec`): its fields go by position, and these by name, so that a later release can add to them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["attributes_of", "maybe", "names_of", "of", "pack", "row_of", "unpack"]

T = TypeVar("T")


def pack(plain: object) -> bytes:
    """Return plain data as bytes."""
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def unpack(what: str, value: bytes, build: Callable[[Any], T]) -> T:
    """Build something from what a key holds; `what` names it in the error.

    Raises:
        RendezvousStateError: It cannot be built from that.
    """
    try:
        return build(msgpack.unpackb(value, raw=False, strict_map_key=False))
    except Exception as error:  # msgpack and the builders raise many unrelated classes for foreign data
        raise RendezvousStateError(
            f"{what} cannot be read ({type(error).__name__}: {error}): something else writes under this prefix, "
            f"or another release of rdzv"
        ) from error


def of(kind: type[T], value: object) -> T:
    """Return a value if it is of this very type.

    Raises:
        TypeError: It is not.
    """
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def row_of(kinds: tuple[type, ...], row: Sequence[Any]) -> Sequence[Any]:
    """Return a row if each of its columns is of its very type: all at once, since every node reads many of them."""
    if tuple(map(type, row)) != kinds:
        for kind, value in zip(kinds, row, strict=True):
            of(kind, value)
    return row


def maybe(kind: type[T], value: object) -> T | None:
    """Return None, or a value of this very type."""
    return None if value is None else of(kind, value)


def names_of(value: object) -> tuple[str, ...]:
    """Return a list of strings as a tuple."""
    return tuple([of(str, name) for name in of(list, value)])


def attributes_of(value: object) -> Mapping[str, str]:
    """Return a mapping of strings that nobody can change."""
    return MappingProxyType({of(str, name): of(str, said) for name, said in of(dict, value).items()})
