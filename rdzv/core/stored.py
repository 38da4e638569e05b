"""The base of the records in a run's keys: it packs and reads them by their declared fields and types.

    class Drain(Stored):
        called = "a drain"
        within: float
        reason: str = ""

A record is packed as a map by name, without fields that have their default. With `by_place`, a record is packed as a
list; this is for records that are many or that every node receives. A later release may add keys to a map, and values
at the end of a list. Nested records are always lists.

Other programs may write under the same prefix, so every read checks the value: see `store.records`. Every write checks
the value, too: an unreadable value is its writer's error.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import msgpack

from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from store.printable import make_logger
from store.records import NormalizedTextKind, Record, UnfitError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import ClassVar

log: Final = make_logger(__name__)

T = TypeVar("T")

PROSE_BYTES_MOST: Final = 2000  # limit of one text, as every node may receive it


def fit_bytes(text: str, *, most: int = PROSE_BYTES_MOST) -> str:
    """Return the text in valid UTF-8, cut to at most `most` bytes."""
    if len(text) <= most and text.isascii():
        return text
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")


def checked_text(name: str, given: object, *, most: int = PROSE_BYTES_MOST) -> str:
    """Return a user's text as `fit_bytes` does; raise `RendezvousSettingsError` if it is no string."""
    if not isinstance(given, str):
        raise RendezvousSettingsError(f"{name}={brief(given)} must be text (str)")
    return fit_bytes(given, most=most)


Prose = Annotated[str, NormalizedTextKind(fit_bytes)]
"""The type of a text field, which `fit_bytes` cuts."""


class Stored(Record):
    """Base of the records in a run's keys."""

    if TYPE_CHECKING:
        called: ClassVar[str]  # the record's name in errors
        by_place: ClassVar[bool]  # True: pack the record as a list
        outside: ClassVar[tuple[str, ...]]  # fields that come from the key or the entry, not from the value
    else:
        called, by_place, outside = "", False, ()

    def pack(self) -> bytes:
        """Return the record as bytes; raise `RendezvousSettingsError` if they could not be read back."""
        return _pack_or_raise(self.called, lambda: _plain_record(self))

    @classmethod
    def unpack(cls, value: bytes, **outside: object) -> Self:
        """Return the record in a value, with these `outside` fields; raise `RendezvousStateError` if invalid."""
        return unpack(cls.called, value, lambda plain: cls.read(_field_values(cls, plain, outside)))

    @classmethod
    def unpack_or_log(cls, key: str, value: bytes, **outside: object) -> Self | None:
        """Return the record as `unpack` does; if the value is invalid, log the key and return None."""
        try:
            return cls.unpack(value, **outside)
        except RendezvousStateError as error:
            log_unreadable(key, error)
            return None

    @classmethod
    def pack_all(cls, nouns: Iterable[Self]) -> bytes:
        """Return several records, of a class with `by_place`, as one value."""
        return _pack_or_raise(cls.called, lambda: [noun.check() for noun in nouns])

    @classmethod
    def unpack_all(cls, value: bytes) -> list[Self]:
        """Return the records in a value of `pack_all`."""
        return unpack(cls.called, value, lambda plain: [cls.read(row) for row in plain])


@functools.cache
def _stored_fields(kind: type[Stored]) -> list[tuple[int, str, object]]:
    fields = enumerate(kind.fields)
    return [(place, name, kind.defaults.get(name, fields)) for place, name in fields if name not in kind.outside]


@functools.cache
def _unstored_field_places(kind: type[Stored]) -> list[tuple[int, str]]:
    return [(place, name) for place, name in enumerate(kind.fields) if name in kind.outside]


def _plain_record(noun: Stored) -> object:
    row: Any = noun.check()
    if not noun.by_place:
        return {name: row[place] for place, name, as_ever in _stored_fields(type(noun)) if row[place] != as_ever}
    return [row[place] for place, _, _ in _stored_fields(type(noun))]


def _field_values(kind: type[Stored], plain: Any, outside: dict[str, object]) -> object:
    if type(plain) is list:
        inside = _stored_fields(kind)
        if not outside:
            return plain
        if len(plain) >= len(inside):
            del plain[len(inside) :]  # values that a later release has added
            for place, name in _unstored_field_places(kind):
                plain.insert(place, outside[name])
            return plain
        plain = {name: one for (_, name, _), one in zip(inside, plain, strict=False)}  # an earlier release writes fewer
    plain.update(outside)
    return [plain[name] if name in plain else kind.defaults[name] for name in kind.fields]


def _pack_or_raise(what: str, plain: Callable[[], object]) -> bytes:
    try:
        return pack(plain())
    except (UnfitError, TypeError, ValueError, OverflowError) as error:  # invalid, or msgpack cannot carry it
        raise RendezvousSettingsError(f"{what} cannot be written: {error}") from error


def log_unreadable(key: str, error: Exception) -> None:
    """Log once that a key cannot be read: the key may be read every second."""
    _warn_once(f"{key} is passed over: {error}")


@functools.lru_cache(maxsize=64)
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def pack(plain: object) -> bytes:
    """Return plain data as msgpack."""
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def unpack(what: str, value: bytes, build: Callable[[Any], T]) -> T:
    """Return the result of `build` for a key's value; raise `RendezvousStateError` about `what` if it fails."""
    try:
        return build(msgpack.unpackb(value, raw=False, strict_map_key=False))
    except Exception as error:  # msgpack and the builders raise many unrelated classes for foreign data
        raise RendezvousStateError(
            f"{what} cannot be read ({type(error).__name__}: {error}): something else writes under this prefix, "
            f"or another release of rdzv"
        ) from error
