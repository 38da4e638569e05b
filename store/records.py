"""Records declare their fields and types once, for construction, comparison, packing, checks and reading.

    class Put(Record, code=1):
        key: str
        value: bytes
        ttl: float | None = None

A record is a tuple of its fields: it is made and compared in C, and msgpack packs it directly. A `code`
comes first in the tuple, and tells kinds of records apart. Records without a code are equal if their fields are, so do
not mix their kinds in `==`, sets or keys.

`Put.read` makes a record of a received tuple, and `Put.check` checks a record before sending, by the same rules:

- A type accepts its own values, and converts those of subclasses; but `bool` is no `int`.
- `float` also takes an `int`, `bytes` any buffer, and `tuple[X, ...]` a list.
- An `IntEnum` takes a member's number; an unknown number becomes `OTHER`, if defined. A `Literal` takes any text.
- A `StrEnum` takes a member's word; its `_missing_` converts unknown words.
- The code selects the record of a union. `Annotated[X, Y]` is X to type checkers, and takes what Y takes;
  `Annotated[str, NormalizedTextKind(f)]` takes a text, which becomes f(text).
- A field missing at the end has its default, and extra fields (of a later release) are ignored. So a new field goes to
  the end of its record, with a default.
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

CHECKED_AT_ONCE = 1024  # elements of an array between two pauses: about a millisecond
TYPES_NOTED_MOST = 64  # combinations of field types, besides plain ones, cached per kind of record

T = TypeVar("T")
R = TypeVar("R", bound="Record")
Steps = Generator[None, None, T]  # work with pauses, in which the caller serves other peers

_new: Any = tuple.__new__
_ROW = namedtuple("_ROW", [f"at_{place}" for place in range(64)])  # type: ignore[misc]  # accessors written in C


class UnfitError(ValueError):
    """A value does not fit its field; the message names the field."""


class UnknownValueError(UnfitError):
    """A number or a word that only a later release knows."""


class _WrongType(UnfitError):
    """A value is not of the expected type. The caller, which knows the field's name, raises `UnfitError` instead."""


def brief(value: object) -> str:
    """Return a value for errors and logs, shortened: it may be megabytes long, or deeply nested."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 128):
        return repr(value)
    return f"a {type(value).__name__}"


class _FieldKind:
    """The values that a field of one type accepts: `read` converts a value or raises; `plain` types need no `read`."""

    def __init__(self, read: Callable[[Any], Any], plain: tuple[type, ...] = ()) -> None:
        self.read = read
        self.plain = plain

    def reader_of(self, type_: type) -> Callable[[Any], Any]:  # noqa: ARG002 - `UnionKind` uses the type
        return self.read

    def read_in_steps(self, value: Any) -> Steps[Any]:
        yield from ()
        return self.read(value)


class NormalizedTextKind(_FieldKind):
    """A text that is converted when sent and read: `Annotated[str, NormalizedTextKind(shorten)]`."""

    def __init__(self, change: Callable[[str], str]) -> None:
        super().__init__(self._read_value)
        self._change = change

    def _read_value(self, value: Any) -> str:
        if not isinstance(value, str):
            raise _WrongType
        return self._change(value)


_ARRAYS: Any = (tuple, list)
_ALSO: dict[type, tuple[type, ...]] = {float: (float, int), bytes: (bytes, bytearray, memoryview), bool: ()}


def _kind_of(type_: Any) -> _FieldKind:
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return arguments[1] if isinstance(arguments[1], _FieldKind) else _kind_of(arguments[1])
    if origin in (Union, types.UnionType):
        return UnionKind(arguments)
    if origin is tuple:
        return (
            _Array(_kind_of(arguments[0])) if arguments[1:] == (...,) else _tuple_kind(list(map(_kind_of, arguments)))
        )
    if origin in (dict, Mapping):
        return _mapping_field_kind(*map(_kind_of, arguments))
    if origin is Literal:
        return _exact_type_kind(type(arguments[0]))
    if _is_record(type_):
        return UnionKind((type_,))
    if type_ is Any:
        return _FieldKind(lambda value: value)
    if issubclass(type_, IntEnum):
        return _int_enum_kind(type_)
    return _text_enum_kind(type_) if issubclass(type_, StrEnum) else _exact_type_kind(type_)


def _is_record(type_: Any) -> bool:
    return isinstance(get_origin(type_) or type_, RecordMetaclass)


def _exact_type_kind(type_: type) -> _FieldKind:
    also = _ALSO.get(type_, (type_,))

    def read_value(value: Any) -> Any:
        if type(value) is type_:
            return value
        if type(value) is bool or not isinstance(value, also):
            raise _WrongType
        try:
            return type_(value)
        except OverflowError:  # an int that no float can hold
            raise _WrongType from None

    return _FieldKind(read_value, (type_,))


def _int_enum_kind(type_: type[IntEnum]) -> _FieldKind:
    members = {member.value: member for member in type_}
    other = type_.__members__.get("OTHER")  # stands for all members of later releases

    def read_value(value: Any) -> Any:
        if type(value) is bool or not isinstance(value, int):
            raise _WrongType
        member = members.get(value, other)
        if member is None:
            raise UnknownValueError(f"{type_.__name__.lower()} {int(value)}")
        return member

    return _FieldKind(read_value, (type_,))


def _text_enum_kind(type_: type[StrEnum]) -> _FieldKind:
    def read_value(value: Any) -> Any:
        if not isinstance(value, str):
            raise _WrongType
        try:
            return type_(value)
        except ValueError:
            raise UnknownValueError(f"{type_.__name__.lower()} {brief(value)}") from None

    return _FieldKind(read_value, (type_,))


def _tuple_kind(kinds: list[_FieldKind]) -> _FieldKind:
    def read_value(value: Any) -> tuple[Any, ...]:
        if type(value) not in _ARRAYS or len(value) < len(kinds):
            raise _WrongType
        return tuple([kind.read(one) for kind, one in zip(kinds, value, strict=False)])

    return _FieldKind(read_value)


def _mapping_field_kind(name: _FieldKind, what: _FieldKind) -> _FieldKind:
    def read_value(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict | types.MappingProxyType):
            raise _WrongType
        return {name.read(each): what.read(held) for each, held in value.items()}

    return _FieldKind(read_value)


class _Array(_FieldKind):
    def __init__(self, kind: _FieldKind) -> None:
        super().__init__(self._read_value)
        self._read_one, self._plain = kind.read, frozenset(kind.plain)

    def _read_value(self, value: Any) -> tuple[Any, ...]:
        if type(value) not in _ARRAYS:
            raise _WrongType
        if self._plain and self._plain.issuperset(map(type, value)):
            return tuple(value)
        return tuple(map(self._read_one, value))

    def read_in_steps(self, value: Any) -> Steps[Any]:
        if type(value) not in _ARRAYS or len(value) <= CHECKED_AT_ONCE:
            return self._read_value(value)
        checked: list[Any] = []
        for start in range(0, len(value), CHECKED_AT_ONCE):
            checked += self._read_value(value[start : start + CHECKED_AT_ONCE])
            yield
        return tuple(checked)


class UnionKind(_FieldKind):
    """The values of a union: of plain types, and of either one record without a code or several records with codes."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        of = [get_origin(each) or each if _is_record(each) else each for each in kinds]
        self._by_code = {record.code: record for record in of if _is_record(record)}
        self._others = [_kind_of(each) for each in of if not _is_record(each)]
        plain = tuple(itertools.chain.from_iterable(kind.plain for kind in self._others))
        self._read_array = self.reader_of(tuple) if self._by_code else None
        super().__init__(self._read_value if self._others else self.reader_of(tuple), plain)

    def reader_of(self, type_: type) -> Callable[[Any], Any]:
        """Return the function that reads a value of the union if `type(value)` is this type."""
        if not self._by_code or not issubclass(type_, _ARRAYS):
            return self.read
        if type_ in self._by_code.values():
            return cast("type[Record]", type_).read
        return self._by_code[None].read if None in self._by_code else lambda value: self._record_of(value).read(value)

    def _record_of(self, value: Any) -> Any:
        code = value[0] if isinstance(value, _ARRAYS) and value else None
        if type(code) is not int:
            raise _WrongType(f"{brief(value)} does not begin with a code")
        record = self._by_code.get(code)
        if record is None:
            raise UnknownValueError(f"request {code}")
        return record

    def _read_value(self, value: Any) -> Any:
        if type(value) in self.plain:
            return value
        if self._read_array is not None and isinstance(value, _ARRAYS):
            return self._read_array(value)
        for kind in self._others:
            try:
                return kind.read(value)
            except _WrongType:
                continue
        raise _WrongType(f"{brief(value)} is of none of the allowed types")

    def read_in_steps(self, value: Any) -> Steps[Any]:
        """Do the same as `read`, with the pauses of the records in the union."""
        if self._by_code and isinstance(value, _ARRAYS):
            record = self._by_code.get(None) or self._record_of(value)
            return (yield from record.read_in_steps(value))
        return self._read_value(value)


class _RecordFields:
    """The fields of a kind of record, built from its class at first use."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self._length = len(record.fields) + (record.code is not None)
        checks = hasattr(record, "why_invalid")
        self._make: Callable[[Any], Any] = self._make_checked if checks else functools.partial(_new, record)
        # Maps the types of all fields to the function that makes such a record: one lookup per record is fast.
        self._makers: dict[tuple[type, ...], Callable[[Any], Any]] = {}

    @functools.cached_property
    def _fields(self) -> list[tuple[str, _FieldKind]]:
        types_ = get_type_hints(self._record, include_extras=True)
        names = self._record.fields if self._record.code is None else ("code", *self._record.fields)
        return [(name, _kind_of(types_.get(name, int))) for name in names]

    def read(self, values: Any) -> Any:
        if not isinstance(values, _ARRAYS):
            raise _WrongType(f"{brief(values)} stands where {self._record.__name__} belongs")
        types_ = tuple(map(type, values))
        make = self._makers.get(types_) or self._choose_maker(types_)
        return make(values)

    def _choose_maker(self, types_: tuple[type, ...]) -> Callable[[Any], Any]:
        fields = enumerate(zip(self._fields, types_, strict=False))
        in_need = [(at, kind.reader_of(type_)) for at, ((_, kind), type_) in fields if type_ not in kind.plain]
        is_plain = not in_need and len(types_) == self._length
        make = self._make if is_plain else functools.partial(self._read_fields, in_need)
        if is_plain or len(self._makers) < TYPES_NOTED_MOST:
            self._makers[types_] = make
        return make

    def _read_fields(self, in_need: list[tuple[int, Callable[[Any], Any]]], values: Any) -> Any:
        checked = list(values)
        for at, read in in_need:
            try:
                checked[at] = read(checked[at])
            except _WrongType:
                raise self._bad_value_error(self._fields[at][0], checked[at]) from None
        return self._make(checked) if len(checked) == self._length else self._with_defaults(checked)

    def read_in_steps(self, values: Any) -> Steps[Any]:
        checked = []
        for (name, kind), value in zip(self._fields, values, strict=False):
            try:
                checked.append((yield from kind.read_in_steps(value)))
            except _WrongType:
                raise self._bad_value_error(name, value) from None
        return self._with_defaults(checked)

    def _with_defaults(self, values: list[Any]) -> Any:
        if len(values) < self._length:
            missing = [name for name, _ in self._fields[len(values) :]]
            if any(name not in self._record.defaults for name in missing):
                raise UnfitError(f"{self._record.__name__} has {self._length} fields, not {len(values)}")
            values += [self._record.defaults[name] for name in missing]
        return self._make(values[: self._length])

    def _make_checked(self, values: Any) -> Any:
        made = _new(self._record, values)
        if (why := made.why_invalid()) is not None:
            raise UnfitError(f"{self._record.__name__} {why}")
        return made

    def _bad_value_error(self, name: str, value: Any) -> UnfitError:
        given = f"[{', '.join(map(brief, value[:4]))}]" if isinstance(value, _ARRAYS) else brief(value)
        return UnfitError(f"{self._record.__name__} cannot have {name}={given}")


@dataclass_transform(frozen_default=True)
class RecordMetaclass(type):
    """Makes a tuple with named fields from a class."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], *, code: int | None = None, **_: bool
    ) -> RecordMetaclass:
        """Make the class; `kw_only=True` is for type checkers."""
        made: Any = super().__new__(cls, name, bases, {"__slots__": (), **body})
        fields = tuple(each for each, said in made.__annotations__.items() if not str(said).startswith("ClassVar"))
        made.fields, made.code = fields, code
        type.__setattr__(made, "__match_args__", fields)
        made.defaults = {each: body[each] for each in fields if each in body}
        for place, each in enumerate(fields, start=code is not None):
            setattr(made, each, getattr(_ROW, f"at_{place}"))
        taken = "".join(f", {each}=defaults[{each!r}]" if each in body else f", {each}" for each in fields)
        values = "".join(f"{each}, " for each in (fields if code is None else (code, *fields)))
        # `eval` makes a function as fast as a written one; the names are from this package's sources.
        made.__new__ = eval(f"lambda cls{taken}: new(cls, ({values}))", {"new": _new, "defaults": made.defaults})  # noqa: S307
        shape = _RecordFields(made)
        made.read, made.read_in_steps = shape.read, shape.read_in_steps
        return cast("RecordMetaclass", made)

    def __dir__(cls) -> list[str]:
        """Return the names that callers use, without the methods that read, check and pack records."""
        machinery = {"why_invalid"}
        for base in cls.__mro__:
            if isinstance(base, RecordMetaclass) and not cast("type[Record]", base).fields:
                machinery |= vars(base).keys()
        machinery -= {"replace", *cast("type[Record]", cls).fields}
        return [name for name in super().__dir__() if name.startswith("_") or name not in machinery]


if TYPE_CHECKING:
    _Base = object
else:
    _Base = tuple


class Record(_Base, metaclass=RecordMetaclass):
    """Base of records, with the names of the fields, the defaults of the last fields, and the code, or None."""

    if TYPE_CHECKING:
        fields: ClassVar[tuple[str, ...]]
        defaults: ClassVar[dict[str, Any]]
        code: ClassVar[int | None]

        @classmethod
        def read(cls: type[R], values: object) -> R:
            """Make a record of a received tuple, which begins with the code, if any. Raise `UnfitError`."""

        @classmethod
        def read_in_steps(cls: type[R], values: object) -> Steps[R]:
            """Do the same as `read`, with a pause after each thousand elements of an array."""

        def why_invalid(self) -> str | None:
            """Return an error if the fields do not fit together; subclasses may define this."""

    else:

        @property
        def count(self) -> None:
            """Hide tuple's method."""
            raise AttributeError("count")

        @property
        def index(self) -> None:
            """Hide tuple's method."""
            raise AttributeError("index")

    def check(self: R) -> R:
        """Return a copy whose values have exactly the fields' types, as a receiver reads it. Raise `UnfitError`."""
        return type(self).read(self)

    def replace(self: R, **changes: object) -> R:
        """Return a copy with other values in some fields."""
        made: R = type(self)(**{name: getattr(self, name) for name in self.fields} | changes)
        return made

    def __dir__(self) -> list[str]:
        return dir(type(self))

    def __getnewargs__(self) -> tuple[Any, ...]:
        # used by copy and pickle
        return tuple(getattr(self, name) for name in self.fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.fields)})"
