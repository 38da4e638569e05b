"""Pure: what stands in the keys of a run: nouns that say their fields and types once, and are packed and read by that.

    class Drain(Stored):
        called = "a drain"
        within: float
        reason: str = ""

A noun is packed as a map by name, without what is as ever; or, `by_place`, as the list of its fields: what every node
is sent, and what there are many of. To a map, a later release may add anything, to a list at its end. Nouns inside of
others always go by place.

Something else may write under the same prefix, so nothing that is read is believed: see `store.records`. And what could
not be read back is not packed: whoever wants to write it gets the error, and nobody else.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import msgpack

from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from store.printable import escaping
from store.records import Record, TextAs, Unfit, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import ClassVar

__all__ = ["PROSE_BYTES_MOST", "Prose", "Stored", "check_prose", "pack", "pass_over", "prose", "unpack"]

log: logging.Logger = escaping(logging.getLogger(__name__))

T = TypeVar("T")

PROSE_BYTES_MOST: Final = 2000  # of one text: every node may be sent it


def prose(text: str, *, most: int = PROSE_BYTES_MOST) -> str:
    """Return a text that UTF-8 can hold, in at most so many bytes."""
    if len(text) <= most and text.isascii():
        return text
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")


def check_prose(name: str, given: object, *, most: int = PROSE_BYTES_MOST) -> str:
    """Return what a user gave as a text, made fit.

    Raises:
        RendezvousSettingsError: It is no text.
    """
    if not isinstance(given, str):
        raise RendezvousSettingsError(f"{name}={shown(given)} must be text (str)")
    return prose(given, most=most)


Prose = Annotated[str, TextAs(prose)]
"""The type of a record's field that holds such a text."""


class Stored(Record):
    """Base of what stands in a key.

    Attributes:
        called: What it is called in errors.
        by_place: Whether it is packed as a list.
        outside: Which of its fields do not stand in the value, but are known from the key or the entry.
    """

    if TYPE_CHECKING:
        called: ClassVar[str]
        by_place: ClassVar[bool]
        outside: ClassVar[tuple[str, ...]]
    else:
        by_place, outside = False, ()

    def pack(self) -> bytes:
        """Pack it into bytes.

        Raises:
            RendezvousSettingsError: A field has a value that nobody could read.
        """
        return _packed(self.called, lambda: _plain_of(self))

    @classmethod
    def unpack(cls, value: bytes, **outside: object) -> Self:
        """Make one of what a key holds, and of what is known of it otherwise.

        Raises:
            RendezvousStateError: It is none.
        """
        return unpack(cls.called, value, lambda plain: cls.read(_row_of(cls, plain, outside)))

    @classmethod
    def unpack_at(cls, key: str, value: bytes, **outside: object) -> Self | None:
        """Do the same for who goes on without it: None, if it is none, and the log names the key."""
        try:
            return cls.unpack(value, **outside)
        except RendezvousStateError as error:
            pass_over(key, error)
            return None

    @classmethod
    def pack_all(cls, nouns: Iterable[Self]) -> bytes:
        """Pack several into one value; they are to be in it by place."""
        return _packed(cls.called, lambda: [noun.check() for noun in nouns])

    @classmethod
    def unpack_all(cls, value: bytes) -> list[Self]:
        """Unpack several from one value."""
        return unpack(cls.called, value, lambda plain: [cls.read(row) for row in plain])


@functools.cache
def _inside(kind: type[Stored]) -> list[tuple[int, str, object]]:
    """Which fields stand in the value: the place of each, its name, and what it is as ever."""
    fields = enumerate(kind.fields)
    return [(place, name, kind.defaults.get(name, fields)) for place, name in fields if name not in kind.outside]


@functools.cache
def _outside(kind: type[Stored]) -> list[tuple[int, str]]:
    """Which ones do not, upwards."""
    return [(place, name) for place, name in enumerate(kind.fields) if name in kind.outside]


def _plain_of(noun: Stored) -> object:
    row: Any = noun.check()
    if not noun.by_place:
        return {name: row[place] for place, name, as_ever in _inside(type(noun)) if row[place] != as_ever}
    return [row[place] for place, _, _ in _inside(type(noun))] if noun.outside else row


def _row_of(kind: type[Stored], plain: Any, outside: dict[str, object]) -> object:
    if type(plain) is list:
        inside = _inside(kind)
        if not outside:
            return plain
        if len(plain) >= len(inside):
            del plain[len(inside) :]  # of a later release
            for place, name in _outside(kind):
                plain.insert(place, outside[name])
            return plain
        plain = {name: one for (_, name, _), one in zip(inside, plain, strict=False)}  # of an earlier one
    plain.update(outside)
    return [plain[name] if name in plain else kind.defaults[name] for name in kind.fields]


def _packed(what: str, plain: Callable[[], object]) -> bytes:
    try:
        return pack(plain())
    except (Unfit, TypeError, ValueError, OverflowError) as error:  # or the value is one that msgpack cannot carry
        raise RendezvousSettingsError(f"{what} cannot be written: {error}") from error


def pass_over(key: str, error: RendezvousStateError) -> None:
    """Name a key that cannot be read, once in a while: it may be looked at every second."""
    _warn(f"{key} is passed over: {error}")


@functools.lru_cache(maxsize=64)
def _warn(sentence: str) -> None:
    log.warning("%s", sentence)


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
