"""Pure: a noun says its fields and their types once, and thereby how it is made, compared, packed, checked and read.

    class Put(Record, code=1):
        key: str
        value: bytes
        ttl: float | None = None

A record is a tuple of its fields, in their order: it is made and compared in C, and msgpack packs it as it stands.
Nobody sees that it is one: its fields have names, and type checkers take it for a frozen dataclass. A `code` stands
first in the tuple, and tells records of several kinds apart, when they are read and when they are compared. Records
without a code are equal if their fields are, so those must not meet others of another kind in `==`, sets or keys.

`Put.read` makes a record of a tuple that was received, and `Put.check` looks at one that is to be sent. Both go by the
same rule, so that what cannot be read back is never sent:

- A type stands for itself, and for its subclasses, which become it; but for `bool`, which is no `int` here.
- `float` also takes an `int`, `bytes` what has a buffer, and `tuple[X, ...]` a list.
- A member of an `IntEnum` is its number; an unknown number becomes `OTHER`, if there is one. A `Literal` is any word.
- A member of a `StrEnum` is its word; what an unknown word becomes, its `_missing_` says.
- A `Mapping` is a dict, and `tuple[X, Y]` has an element of each.
- Of a union of records with codes, the code says which it is. `Annotated[X, Y]` is X to type checkers, and takes Y;
  `Annotated[str, TextAs(f)]` takes a text, which becomes f(text).
- What is missing at the end has its default; what follows the last field is of a later release, and is left out.

Fields are therefore only ever added at the end, with a default.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import namedtuple
from collections.abc import Callable, Generator, Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

__all__ = ["CHECKED_AT_ONCE", "AnyOf", "Record", "Steps", "TextAs", "Unfit", "UnknownWord", "shown"]

CHECKED_AT_ONCE = 1024  # elements of an array: about a millisecond
TYPES_NOTED_MOST = 64  # of the fields of one kind of record; whoever sends others has them looked at anew

T = TypeVar("T")
R = TypeVar("R", bound="Record")
Steps = Generator[None, None, T]  # what is done in several steps, so that others can be served in between

_new: Any = tuple.__new__
_ROW = namedtuple("_ROW", [f"at_{place}" for place in range(64)])  # type: ignore[misc]  # whose accessors are written in C


class Unfit(ValueError):
    """A value is none of what its field takes; the message names the field."""


class UnknownWord(Unfit):
    """It is a number of a request, or of a kind of condition, that only later releases know."""


class _NotOf(Unfit):
    """A value is not of this type; where the name of its field is known, the error names that."""


def shown(value: object) -> str:
    """A value as errors show it: they end up in logs, and it may be megabytes long, or deep."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------------------- what a type takes


class _Kind:
    """What a field of one type takes.

    Args:
        read: Returns a value as it is to be; `_NotOf` if it is nothing of the kind.
        plain: Types of which every value is taken as it is.
    """

    def __init__(self, read: Callable[[Any], Any], plain: tuple[type, ...] = ()) -> None:
        self.read = read
        self.plain = plain

    def reader_of(self, type_: type) -> Callable[[Any], Any]:  # noqa: ARG002 - most look themselves
        """Return what reads values of just this type."""
        return self.read

    def read_in_steps(self, value: Any) -> Steps[Any]:
        """Do what `read` does; what may be too long for one step pauses in between."""
        yield from ()
        return self.read(value)


class TextAs(_Kind):
    """A text that becomes another one, when it is sent and when it is read: `Annotated[str, TextAs(shorten)]`."""

    def __init__(self, change: Callable[[str], str]) -> None:
        super().__init__(self._read)
        self._change = change

    def _read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise _NotOf
        return self._change(value)


_ARRAYS: Any = (tuple, list)
_ALSO: dict[type, tuple[type, ...]] = {float: (float, int), bytes: (bytes, bytearray, memoryview), bool: ()}


def _kind_of(type_: Any) -> _Kind:
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return arguments[1] if isinstance(arguments[1], _Kind) else _kind_of(arguments[1])
    if origin in (Union, types.UnionType):
        return AnyOf(arguments)
    if origin is tuple:
        return _Many(_kind_of(arguments[0])) if arguments[1:] == (...,) else _row(list(map(_kind_of, arguments)))
    if origin in (dict, Mapping):
        return _mapping(*map(_kind_of, arguments))
    if origin is Literal:
        return _exactly(type(arguments[0]))
    if _is_record(type_):
        return AnyOf((type_,))
    if type_ is Any:
        return _Kind(lambda value: value)
    if issubclass(type_, IntEnum):
        return _member(type_)
    return _word(type_) if issubclass(type_, StrEnum) else _exactly(type_)


def _is_record(type_: Any) -> bool:
    return isinstance(get_origin(type_) or type_, RecordType)


def _exactly(type_: type) -> _Kind:
    also = _ALSO.get(type_, (type_,))

    def read(value: Any) -> Any:
        if type(value) is type_:
            return value
        if type(value) is bool or not isinstance(value, also):
            raise _NotOf
        return type_(value)

    return _Kind(read, (type_,))


def _member(type_: type[IntEnum]) -> _Kind:
    members = {member.value: member for member in type_}
    other = type_.__members__.get("OTHER")  # what stands for all those that only later releases know

    def read(value: Any) -> Any:
        if type(value) is bool or not isinstance(value, int):
            raise _NotOf
        member = members.get(value, other)
        if member is None:
            raise UnknownWord(f"{type_.__name__.lower()} {int(value)}")
        return member

    return _Kind(read, (type_,))


def _word(type_: type[StrEnum]) -> _Kind:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise _NotOf
        try:
            return type_(value)
        except ValueError:
            raise UnknownWord(f"{type_.__name__.lower()} {shown(value)}") from None

    return _Kind(read, (type_,))


def _row(kinds: list[_Kind]) -> _Kind:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) not in _ARRAYS or len(value) < len(kinds):
            raise _NotOf
        return tuple([kind.read(one) for kind, one in zip(kinds, value, strict=False)])

    return _Kind(read)


def _mapping(name: _Kind, what: _Kind) -> _Kind:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict | types.MappingProxyType):
            raise _NotOf
        return {name.read(each): what.read(held) for each, held in value.items()}

    return _Kind(read)


class _Many(_Kind):
    """An array of any length."""

    def __init__(self, kind: _Kind) -> None:
        super().__init__(self._read)
        self._read_one, self._plain = kind.read, frozenset(kind.plain)

    def _read(self, value: Any) -> tuple[Any, ...]:
        if type(value) not in _ARRAYS:
            raise _NotOf
        if self._plain and self._plain.issuperset(map(type, value)):
            return tuple(value)
        return tuple(map(self._read_one, value))

    def read_in_steps(self, value: Any) -> Steps[Any]:
        """Do what `read` does, and pause after each thousand elements."""
        if type(value) not in _ARRAYS or len(value) <= CHECKED_AT_ONCE:
            return self._read(value)
        checked: list[Any] = []
        for start in range(0, len(value), CHECKED_AT_ONCE):
            checked += self._read(value[start : start + CHECKED_AT_ONCE])
            yield
        return tuple(checked)


class AnyOf(_Kind):
    """A union, also of one: of any other types, and of either one record without a code or of several with codes."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        of = [get_origin(each) or each if _is_record(each) else each for each in kinds]
        self._by_code = {record.code: record for record in of if _is_record(record)}
        self._others = [_kind_of(each) for each in of if not _is_record(each)]
        plain = tuple(itertools.chain.from_iterable(kind.plain for kind in self._others))
        self._read_array = self.reader_of(tuple) if self._by_code else None
        super().__init__(self._read if self._others else self.reader_of(tuple), plain)

    def reader_of(self, type_: type) -> Callable[[Any], Any]:
        """Return what reads values of just this type."""
        if not self._by_code or not issubclass(type_, _ARRAYS):
            return self.read
        if type_ in self._by_code.values():
            return cast("type[Record]", type_).read
        return self._by_code[None].read if None in self._by_code else self._read_coded

    def _read_coded(self, value: Any) -> Any:
        return self._record(value).read(value)

    def _record(self, value: Any) -> Any:
        """Return the kind of record that an array is, by its code."""
        code = value[0] if isinstance(value, _ARRAYS) and value else None
        if type(code) is not int:
            raise _NotOf(f"{shown(value)} does not begin with a code")
        record = self._by_code.get(code)
        if record is None:
            raise UnknownWord(f"request {code}")
        return record

    def _read(self, value: Any) -> Any:
        if type(value) in self.plain:
            return value
        if self._read_array is not None and isinstance(value, _ARRAYS):
            return self._read_array(value)
        for kind in self._others:
            try:
                return kind.read(value)
            except _NotOf:
                continue
        raise _NotOf(f"{shown(value)} is none of what it may be")

    def read_in_steps(self, value: Any) -> Steps[Any]:
        """Do what `read` does, and pause where a record of the union does."""
        if self._by_code and isinstance(value, _ARRAYS):
            record = self._by_code.get(None) or self._record(value)
            return (yield from record.read_in_steps(value))
        return self._read(value)


class _Shape:
    """What a kind of record takes, made of what its class says when it is first needed."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self._length = len(record.fields) + (record.code is not None)
        self._make: Callable[[Any], Any] = self._fit if hasattr(record, "unfit") else functools.partial(_new, record)
        # To compare the types of all fields at once is what the hot path can afford.
        self._makers: dict[tuple[type, ...], Callable[[Any], Any]] = {}

    @functools.cached_property
    def _fields(self) -> list[tuple[str, _Kind]]:
        types_ = get_type_hints(self._record, include_extras=True)
        names = self._record.fields if self._record.code is None else ("code", *self._record.fields)
        return [(name, _kind_of(types_.get(name, int))) for name in names]

    def read(self, values: Any) -> Any:
        """Make a record of an array, or look at one that there is."""
        if not isinstance(values, _ARRAYS):
            raise _NotOf(f"{shown(values)} stands where {self._record.__name__} belongs")
        types_ = tuple(map(type, values))
        make = self._makers.get(types_) or self._maker(types_)
        return make(values)

    def _maker(self, types_: tuple[type, ...]) -> Callable[[Any], Any]:
        """Return what makes a record of values of these types, and note it."""
        fields = enumerate(zip(self._fields, types_, strict=False))
        in_need = [(at, kind.reader_of(type_)) for at, ((_, kind), type_) in fields if type_ not in kind.plain]
        is_plain = not in_need and len(types_) == self._length
        make = self._make if is_plain else functools.partial(self._read_those, in_need)
        if is_plain or len(self._makers) < TYPES_NOTED_MOST:
            self._makers[types_] = make
        return make

    def _read_those(self, in_need: list[tuple[int, Callable[[Any], Any]]], values: Any) -> Any:
        """Make a record of values some of which cannot be taken as they are."""
        checked = list(values)
        for at, read in in_need:
            try:
                checked[at] = read(checked[at])
            except _NotOf:
                raise self._cannot_have(self._fields[at][0], checked[at]) from None
        return self._make(checked) if len(checked) == self._length else self._filled(checked)

    def read_in_steps(self, values: Any) -> Steps[Any]:
        """Do what `read` does, and pause in between."""
        checked = []
        for (name, kind), value in zip(self._fields, values, strict=False):
            try:
                checked.append((yield from kind.read_in_steps(value)))
            except _NotOf:
                raise self._cannot_have(name, value) from None
        return self._filled(checked)

    def _filled(self, values: list[Any]) -> Any:
        """The record of these values, without those that later releases have added, and with the defaults of others."""
        if len(values) < self._length:
            missing = [name for name, _ in self._fields[len(values) :]]
            if any(name not in self._record.defaults for name in missing):
                raise Unfit(f"{self._record.__name__} has {self._length} fields, not {len(values)}")
            values += [self._record.defaults[name] for name in missing]
        return self._make(values[: self._length])

    def _fit(self, values: Any) -> Any:
        """The record of these values, if they fit together."""
        made = _new(self._record, values)
        if (why := made.unfit()) is not None:
            raise Unfit(f"{self._record.__name__} {why}")
        return made

    def _cannot_have(self, name: str, value: Any) -> Unfit:
        given = f"[{', '.join(map(shown, value[:4]))}]" if isinstance(value, _ARRAYS) else shown(value)
        return Unfit(f"{self._record.__name__} cannot have {name}={given}")


# ---------------------------------------------------------------------------------------------------- the records


@dataclass_transform(frozen_default=True)
class RecordType(type):
    """Makes a tuple with named fields of what a class says."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], *, code: int | None = None, **_: bool
    ) -> RecordType:
        """Make the class. `kw_only=True` is for type checkers alone."""
        made: Any = super().__new__(cls, name, bases, {"__slots__": (), **body})
        fields = tuple(each for each, said in made.__annotations__.items() if not str(said).startswith("ClassVar"))
        made.fields, made.code = fields, code
        type.__setattr__(made, "__match_args__", fields)
        made.defaults = {each: body[each] for each in fields if each in body}
        for place, each in enumerate(fields, start=code is not None):
            setattr(made, each, getattr(_ROW, f"at_{place}"))
        taken = "".join(f", {each}=defaults[{each!r}]" if each in body else f", {each}" for each in fields)
        values = "".join(f"{each}, " for each in (fields if code is None else (code, *fields)))
        # As `namedtuple` does it: names of our own sources, and a function that is as quick as one written by hand.
        made.__new__ = eval(f"lambda cls{taken}: new(cls, ({values}))", {"new": _new, "defaults": made.defaults})  # noqa: S307
        shape = _Shape(made)
        made.read, made.read_in_steps = shape.read, shape.read_in_steps
        return cast("RecordType", made)


if TYPE_CHECKING:
    _Base = object
else:
    _Base = tuple


class Record(_Base, metaclass=RecordType):
    """Base of nouns that are said as above.

    Attributes:
        fields: The names of the fields, in their order.
        defaults: What the last of them have if they are not given.
        code: What tells this kind of record from others, if anything does.
    """

    if TYPE_CHECKING:
        fields: ClassVar[tuple[str, ...]]
        defaults: ClassVar[dict[str, Any]]
        code: ClassVar[int | None]

        @classmethod
        def read(cls: type[R], values: object) -> R:
            """Make a record of what was received: a tuple, the first of which is the code, if there is one.

            Raises:
                Unfit: It is none; the message says why.
            """

        @classmethod
        def read_in_steps(cls: type[R], values: object) -> Steps[R]:
            """Do what `read` does, and pause after each thousand elements of an array."""

        def unfit(self) -> str | None:
            """Say what is wrong with the fields together: a noun may have this."""

    else:

        @property
        def count(self) -> None:
            """Hide tuple's own: who asks whether a record has a count means a field of it."""
            raise AttributeError("count")

        @property
        def index(self) -> None:
            """Hide tuple's own, likewise."""
            raise AttributeError("index")

    def check(self: R) -> R:
        """Return this record as it is sent: what is of a subclass of its type becomes that type.

        Raises:
            Unfit: A field has a value that could not be read back.
        """
        return type(self).read(self)

    def replace(self: R, **changes: object) -> R:
        """Return a record like this one, with other values in some fields."""
        made: R = type(self)(**{name: getattr(self, name) for name in self.fields} | changes)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What it is made of anew: copied, or in another process."""
        return tuple(getattr(self, name) for name in self.fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.fields)})"
