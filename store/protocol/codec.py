"""Pure: how each message travels: its code, and its fields in their order, with what each may be.

A `Layout` takes a message apart into what msgpack can say, and puts it together from what was received, of which
nothing is believed: each field is checked. Two tables at the end name the layouts of all requests and responses; what
is not in them is not spoken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Generator
from dataclasses import dataclass
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from store.errors import ProtocolError, StoreUsageError
from store.fast_init import constructor
from store.messages import (
    Add,
    Added,
    Append,
    Cancel,
    Cause,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Create,
    Delete,
    DeletePrefix,
    Done,
    Entry,
    Event,
    EventKind,
    Failed,
    FailureKind,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    GroupPage,
    Guarded,
    KeepAlive,
    KeyGroup,
    LeaseState,
    List,
    ListGroups,
    Listing,
    ListingPart,
    ListNotes,
    Note,
    NotePage,
    Operation,
    Ping,
    Pong,
    Put,
    Revoke,
    Stats,
    Target,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
    Watch,
    Watching,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "CHECKED_AT_ONCE",
    "LAYOUT_OF",
    "REQUESTS",
    "RESPONSES",
    "Layout",
    "UnknownWord",
    "bytes_of",
    "event_from",
    "event_to",
    "shown",
]

CHECKED_AT_ONCE = 1024  # conditions, operations or keys: about a millisecond
KEPT_CONDITIONS_MAX = 1024  # conditions that are made once for all who send them, of keys
KEPT_KEY_MAX = 256  # of at most so many characters: half a megabyte in all

T = TypeVar("T")
Steps = Generator[None, None, T]  # what is done in several steps, so that others can be served in between


class UnknownWord(Exception):
    """Something in a request that only later releases know: its sender is told, and keeps its connection."""


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field travels.

    `check` accepts what was received, `encode` prepares what is sent (None: as it is). `takes` says whether a caller's
    value can be sent: what the peer would not accept must not leave, since it would cost the caller the connection.
    Values of the types in `plain` pass all three as they are.
    """

    check: Callable[[Any], Any]
    encode: Callable[[Any], Any] | None = None
    takes: Callable[[Any], bool] = lambda _: True
    plain: tuple[type, ...] = ()
    in_steps: Callable[[Any], Steps[Any]] | None = None  # `check`, for what may be too long for one step


def shown(value: object) -> str:
    """What was received, as errors show it: they end up in logs, and the value may be megabytes long, or deep."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _exactly(type_: type, *also: type) -> _Field:
    """A field of one type; `also` are types that become it on the way."""
    sendable = (type_, *also)

    def check(value: Any) -> Any:
        if type(value) is not type_:
            raise ProtocolError(f"{shown(value)} stands where {type_.__name__} belongs")
        return value

    def takes(value: Any) -> bool:
        # A subclass arrives as its base, except that a bool, which is an int here, arrives as a bool.
        return type(value) is type_ or (isinstance(value, sendable) and type(value) is not bool)

    return _Field(check, takes=takes, plain=(type_,))


def _optional(field: _Field) -> _Field:
    return _Field(
        lambda value: None if value is None else field.check(value),
        None if field.encode is None else lambda value: None if value is None else cast("Any", field.encode)(value),
        lambda value: value is None or field.takes(value),
        (*field.plain, type(None)),
    )


def _check_seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise ProtocolError(f"{shown(value)} stands where seconds belong")
    return float(value)


def _many(
    field: _Field,
    *,
    check_one_of_many: Callable[[Any], Any] | None = None,
    encode_all: Callable[[Any], list[Any]] | None = None,
) -> _Field:
    """An array of fields, as a tuple.

    `check_one_of_many` is for those that are too many for one step; `encode_all` encodes all of them quicker than one
    by one.
    """
    check_one = field.check
    one_of_many = check_one_of_many or check_one
    plain = frozenset(field.plain)

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ProtocolError(f"{shown(value)} stands where an array belongs")
        if plain and plain.issuperset(set(map(type, value))):  # each is looked up once, not each time it is there
            return tuple(value)
        return tuple([check_one(one) for one in value])

    def in_steps(value: Any) -> Steps[tuple[Any, ...]]:
        if type(value) is not list or len(value) <= CHECKED_AT_ONCE:
            return check(value)
        checked: list[Any] = []
        for start in range(0, len(value), CHECKED_AT_ONCE):
            checked += map(one_of_many, value[start : start + CHECKED_AT_ONCE])
            yield
        return tuple(checked)

    encode = field.encode
    return _Field(
        check,
        encode_all or (None if encode is None else lambda values: [encode(value) for value in values]),
        lambda values: type(values) in (tuple, list) and all(map(field.takes, values)),
        in_steps=in_steps,
    )


# Of an entry, as it travels. A value that has grown by appending is none of msgpack's types: its bytes are put together
# only as it is packed, in `bytes_of`.
_entry_to: Callable[[Entry], tuple[Any, ...]] = attrgetter("key", "value", "create_revision", "mod_revision", "lease")


def _maybe_entry_to(entry: Entry | None) -> tuple[Any, ...] | None:
    return None if entry is None else _entry_to(entry)


def _entries_to(entries: Iterable[Entry | None]) -> list[tuple[Any, ...] | None]:
    return [  # not by `_entry_to`, which takes twice as long where there are many
        None if each is None else (each.key, each.value, each.create_revision, each.mod_revision, each.lease)
        for each in entries
    ]


def bytes_of(value: object) -> bytes:
    """Return the bytes of a value that stands for them, as one that has grown does."""
    if hasattr(value, "__bytes__"):
        return bytes(value)
    raise TypeError(f"{shown(value)} cannot be sent")


def _entry_from(value: Any) -> Entry:
    if type(value) is list and len(value) >= 5:
        key, held, created, changed, lease = value if len(value) == 5 else value[:5]
        if (  # not a `match` of classes, which takes three times as long
            type(key) is str
            and type(held) is bytes
            and type(created) is int
            and type(changed) is int
            and (lease is None or type(lease) is int)
        ):
            return _make_entry(key, held, created, changed, lease)
    raise ProtocolError(f"{shown(value)} stands where an entry belongs")


def _maybe_entry_from(value: Any) -> Entry | None:
    return None if value is None else _entry_from(value)


_make_entry, _make_event = constructor(Entry), constructor(Event)


_EVENT_KINDS: tuple[EventKind, ...] = ("put", "delete", "synced", "reset")
_CAUSES: tuple[Cause, ...] = ("", "silent", "disconnected", "gone")
_EVENT_CODES = {kind: code for code, kind in enumerate(_EVENT_KINDS)}


def event_to(event: Event) -> tuple[Any, ...]:
    """An event as it travels."""
    if event.kind == "put":
        return 0, event.revision, event.key, event.value, event.create_revision, event.lease
    if event.cause:
        return _EVENT_CODES[event.kind], event.revision, event.key, _CAUSES.index(event.cause)
    return _EVENT_CODES[event.kind], event.revision, event.key


def event_from(value: Any) -> Event | None:
    """An event that has travelled; None if it is of a kind that only later releases know, and says nothing to us."""
    if type(value) is list and len(value) >= 6 and value[0] == 0:
        _, revision, key, held, created, lease = value if len(value) == 6 else value[:6]
        if (  # not in the `match` below, which takes three times as long, since nearly all events are puts
            type(revision) is int
            and type(key) is str
            and type(held) is bytes
            and type(created) is int
            and (lease is None or type(lease) is int)
        ):
            return _make_event("put", revision, key, held, created, lease, "")
    match value:
        case [1, int(revision), str(key), int(cause), *_]:  # a cause that only later releases know says nothing to us
            known = _CAUSES[cause] if 0 <= cause < len(_CAUSES) else ""
            return Event(kind="delete", revision=revision, key=key, cause=known)
        case [1 | 2 | 3 as code, int(revision), str(key), *_]:
            return Event(kind=_EVENT_KINDS[code], revision=revision, key=key)
        case [int(code), *_] if code >= len(_EVENT_KINDS):
            return None
    raise ProtocolError(f"{shown(value)} stands where an event belongs")


def _condition_to(condition: Condition) -> tuple[Any, ...]:
    return condition.key, condition.target.value, condition.expected


_EXPECTED_TYPE: dict[int, type[int | bytes | bool]] = {
    Target.MOD_REVISION: int,
    Target.CREATE_REVISION: int,
    Target.VALUE: bytes,
    Target.EXISTS: bool,
    Target.VALUE_IF_ANY: bytes,
}


def _condition_from(value: Any, *, keep: bool = True) -> Condition:
    if type(value) is list and len(value) >= 3 and type(value[0]) is str and type(value[1]) is int:
        key, number, expected = value if len(value) == 3 else value[:3]
        wanted = _EXPECTED_TYPE.get(number)
        if wanted is None:
            raise UnknownWord(f"conditions of kind {number}")
        if type(expected) is wanted:
            # The members of a round send the same few fences with every request. A value may be large: not kept.
            if keep and wanted is not bytes and len(key) <= KEPT_KEY_MAX:
                return _kept_condition(key, number, expected)
            return _make_condition(key, _TARGETS[number], expected)
    raise ProtocolError(f"{shown(value)} stands where a condition belongs")


_make_condition = constructor(Condition)


@functools.lru_cache(KEPT_CONDITIONS_MAX)  # not by type: conditions of one kind expect values of one type
def _kept_condition(key: str, number: int, expected: int | bool) -> Condition:
    return _make_condition(key, _TARGETS[number], expected)


def _takes_condition(value: Any) -> bool:
    return (
        type(value) is Condition and _STR.takes(value.key) and type(value.expected) is _EXPECTED_TYPE.get(value.target)
    )


_TARGETS = {target.value: target for target in Target}


def _conditions() -> _Field:
    """An array of conditions. A fence is the same tuple in each request of a round: the last one is encoded once."""
    each = _many(
        _Field(_condition_from, _condition_to, _takes_condition),
        check_one_of_many=lambda value: _condition_from(value, keep=False),
    )
    last: tuple[Any, Any] = (), []

    def encode(conditions: Any) -> Any:
        nonlocal last
        fence, encoded = last  # in one step: other threads encode, too
        if conditions is not fence:
            encoded = cast("Any", each.encode)(conditions)
            if type(conditions) is tuple:
                last = conditions, encoded
        return encoded

    def takes(conditions: Any) -> bool:
        return conditions is last[0] or each.takes(conditions)

    return _Field(each.check, encode, takes, in_steps=each.in_steps)


def _message_to(message: Any) -> tuple[Any, ...]:
    layout = LAYOUT_OF[type(message)]
    return (layout.code, *layout.fields(message))


def _one_of(allowed: tuple[type, ...]) -> _Field:
    """A message within a message."""
    kinds = frozenset(allowed)
    layouts: dict[int, Layout[Any]] = {}  # of those allowed, as far as they have come: the table is made after this

    def layout_in(value: Any) -> Layout[Any]:
        if type(value) is list and value and type(value[0]) is int:
            layout = REQUESTS.get(value[0])
            if layout is None:
                raise UnknownWord(f"operation {value[0]}")
            if layout.message in allowed:
                layouts[layout.code] = layout
                return layout
        raise ProtocolError(f"{shown(value)} stands where {' or '.join(kind.__name__ for kind in allowed)} belongs")

    def check(value: Any) -> Any:
        layout = layouts.get(value[0]) if type(value) is list and value and type(value[0]) is int else None
        return (layout or layout_in(value)).build(value[1:])

    def takes(value: Any) -> bool:
        if type(value) not in kinds:
            return False
        LAYOUT_OF[type(value)].verify(value)
        return True

    def in_steps(value: Any) -> Steps[Any]:
        return (yield from layout_in(value).build_in_steps(value[1:]))

    return _Field(check, _message_to, takes, in_steps=in_steps)


def _results_to(results: Iterable[int | bool | Entry | None]) -> list[Any]:
    return [_entry_to(result) if type(result) is Entry else result for result in results]


def _result_from(value: Any) -> int | bool | Entry | None:
    if value is None or type(value) in (int, bool):
        return cast("int | bool | None", value)
    return _entry_from(value)


def _check_figures(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(
        type(name) is str and type(figure) in (str, int, float, bool) for name, figure in value.items()
    ):
        raise ProtocolError(f"{shown(value)} stands where figures belong")
    return value


def _group_from(value: Any) -> KeyGroup:
    match value:
        case [str(name), int(keys), int(size), int() | float() as age, *_]:
            return KeyGroup(name=name, keys=keys, bytes=size, age=float(age))
    raise ProtocolError(f"{shown(value)} stands where a group of keys belongs")


def _note_from(value: Any) -> Note:
    match value:
        case [str(key), bytes(note), int() | float() as age, *_]:
            return Note(key=key, note=note, age=float(age))
    raise ProtocolError(f"{shown(value)} stands where a note belongs")


def _enumerated(kind: type[FailureKind]) -> _Field:
    def check(value: Any) -> FailureKind:
        if type(value) is not int:
            raise ProtocolError(f"{shown(value)} is no kind of failure")
        try:
            return kind(value)
        except ValueError:
            return FailureKind.OTHER

    return _Field(check, int)


_STR = _exactly(str)
_BYTES = _exactly(bytes, bytearray, memoryview)
_INT = _exactly(int)
_BOOL = _exactly(bool)
_SECONDS = _Field(
    _check_seconds, takes=lambda value: isinstance(value, int | float) and type(value) is not bool, plain=(float,)
)
_MAYBE_ENTRY = _Field(_maybe_entry_from, _maybe_entry_to)
_ENTRIES = _many(_MAYBE_ENTRY, encode_all=_entries_to)
_GROUP = _Field(_group_from, lambda group: (group.name, group.keys, group.bytes, group.age))
_NOTE = _Field(_note_from, lambda note: (note.key, note.note, note.age))
_RESULTS = _many(_Field(_result_from, plain=(int, bool, type(None))), encode_all=_results_to)
_CONDITIONS = _conditions()
_OPERATIONS = _many(_one_of(Operation.__args__))
_GRANTS = _many(_one_of((Grant,)))
_GUARDABLE = _one_of((*Operation.__args__, GetMany, List, Count, DeletePrefix, CompareAndSet, Wait))

M = TypeVar("M")


class Layout(Generic[M]):
    """How one kind of message travels."""

    __slots__ = ("_checks", "_defaults", "_in_steps", "_make", "_takes", "code", "fields", "message", "plain")

    def __init__(self, code: int, message: type[M], /, **fields: _Field) -> None:
        self.code: int = code
        self.message: type[M] = message
        self._make = constructor(message)
        assert list(fields) == [each.name for each in dataclasses.fields(message)], "makers go by the order of fields"  # type: ignore[arg-type]  # mypy has no word for "any dataclass"
        defaults = [each.default for each in dataclasses.fields(message)]  # type: ignore[arg-type]  # as above
        last_without = max((at for at, each in enumerate(defaults) if each is dataclasses.MISSING), default=-1)
        self._defaults = tuple(defaults[last_without + 1 :])
        # To compare the types of all fields at once is what the hot path can afford.
        self.plain: frozenset[tuple[type, ...]] = frozenset(
            itertools.product(*(field.plain for field in fields.values()))
        )
        self._checks = tuple(field.check for field in fields.values())
        self._in_steps = tuple(field.in_steps for field in fields.values())
        self._takes = tuple((attrgetter(name), field.takes, name) for name, field in fields.items())
        self.fields: Callable[[Any], tuple[Any, ...]] = _reader(fields)

    def verify(self, message: M) -> None:
        """Refuse a message that a caller gave fields of the wrong types."""
        if self.plain and tuple(map(type, self.fields(message))) in self.plain:
            return
        for get, takes, name in self._takes:
            value = get(message)
            if not takes(value):
                several = isinstance(value, tuple | list)
                given = f"[{', '.join(map(shown, value[:4]))}]" if several else shown(value)
                raise StoreUsageError(f"{self.message.__name__} cannot have {name}={given}")

    def build(self, values: list[Any]) -> M:
        """The message of these field values."""
        if self.plain and tuple(map(type, values)) in self.plain:
            return self._make(*values)
        # A later release may have added fields, which are not for us; an earlier one did not know our last ones.
        checked = map(call, self._checks, values)
        if len(values) >= len(self._checks):
            return self._make(*checked)
        return self._make(*checked, *self._not_given(values))

    def build_in_steps(self, values: list[Any]) -> Steps[M]:
        """Do what `build` does, and pause after each thousand conditions, operations or keys."""
        not_given = self._not_given(values)
        checked = []
        for check, in_steps, value in zip(self._checks, self._in_steps, values, strict=False):
            checked.append(check(value) if in_steps is None else (yield from in_steps(value)))
        return self._make(*checked, *not_given)

    def _not_given(self, values: list[Any]) -> tuple[Any, ...]:
        """The defaults of the last fields, which these values are too few for."""
        given, known = len(values), len(self._checks)
        if given < known - len(self._defaults):
            raise ProtocolError(f"{self.message.__name__} has {known} fields, not {given}")
        return self._defaults[given - known :] if given < known else ()


def _reader(fields: dict[str, _Field]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a message to what is sent of it, as quick as its fields allow: this is the hot path."""
    encoders = [(place, field.encode) for place, field in enumerate(fields.values()) if field.encode is not None]
    if not fields:
        return lambda _: ()
    get: Callable[[Any], Any] = attrgetter(*fields)
    if len(fields) == 1:
        encode_only = encoders[0][1] if encoders else None
        return (
            (lambda message: (get(message),)) if encode_only is None else lambda message: (encode_only(get(message)),)
        )
    if not encoders:
        return get

    def read(message: Any) -> tuple[Any, ...]:
        values = [*get(message)]
        for place, encode in encoders:
            values[place] = encode(values[place])
        return tuple(values)

    return read


# ------------------------------------------------------------------------------------------------ codes and order

REQUESTS: dict[int, Layout[Any]] = {
    layout.code: layout
    for layout in (
        Layout(1, Put, key=_STR, value=_BYTES, ttl=_optional(_SECONDS), lease=_optional(_INT)),
        Layout(2, Get, key=_STR),
        Layout(3, Delete, key=_STR),
        Layout(4, Add, key=_STR, amount=_INT, lease=_optional(_INT)),
        Layout(5, Append, key=_STR, value=_BYTES, lease=_optional(_INT)),
        Layout(6, GetMany, keys=_many(_STR)),
        Layout(7, List, prefix=_STR, keys_only=_BOOL),
        Layout(8, Count, prefix=_STR),
        Layout(9, DeletePrefix, prefix=_STR, at_most=_optional(_INT)),
        Layout(
            10,
            CompareAndSet,
            key=_STR,
            value=_BYTES,
            expected_revision=_optional(_INT),
            expected_value=_optional(_BYTES),
            ttl=_optional(_SECONDS),
            lease=_optional(_INT),
        ),
        Layout(11, Transact, when=_CONDITIONS, then=_OPERATIONS, otherwise=_OPERATIONS, grants=_GRANTS),
        Layout(12, Wait, keys=_many(_STR)),
        Layout(13, Guarded, when=_CONDITIONS, request=_GUARDABLE),
        Layout(
            14,
            Grant,
            ttl=_SECONDS,
            disconnect_ttl=_optional(_SECONDS),
            gone_ttl=_optional(_SECONDS),
            id=_optional(_INT),
        ),
        Layout(15, KeepAlive, lease=_INT, note=_BYTES),
        Layout(16, Revoke, lease=_INT),
        Layout(17, TimeToLive, lease=_INT),
        Layout(18, Watch, prefix=_STR, start_revision=_optional(_INT), snapshot=_BOOL),
        Layout(19, Cancel, target=_INT),
        Layout(20, Ping),
        Layout(21, Stats),
        Layout(22, ListGroups, after=_STR),
        Layout(23, Create, key=_STR, value=_BYTES, lease=_optional(_INT)),
        Layout(24, ListNotes, prefix=_STR, after=_STR),
    )
}

RESPONSES: dict[int, Layout[Any]] = {
    layout.code: layout
    for layout in (
        Layout(64, Written, revision=_INT),
        Layout(65, Found, entry=_MAYBE_ENTRY),
        Layout(66, Listing, entries=_ENTRIES, revision=_INT),
        Layout(67, Counted, count=_INT, revision=_INT),
        Layout(68, CompareAndSetResult, succeeded=_BOOL, entry=_MAYBE_ENTRY),
        Layout(69, Added, value=_INT, revision=_INT),
        Layout(70, TransactionResult, succeeded=_BOOL, results=_RESULTS, revision=_INT),
        Layout(71, Granted, lease=_INT, ttl=_SECONDS),
        Layout(72, LeaseState, remaining=_SECONDS, ttl=_SECONDS, keys=_many(_STR)),
        Layout(73, Watching, revision=_INT),
        Layout(74, Done),
        Layout(75, Pong, revision=_INT),
        Layout(76, Figures, figures=_Field(_check_figures)),
        Layout(77, Failed, kind=_enumerated(FailureKind), message=_STR),
        Layout(78, ListingPart, entries=_ENTRIES),
        Layout(79, GroupPage, groups=_many(_GROUP), more=_BOOL),
        Layout(80, NotePage, notes=_many(_NOTE), more=_BOOL),
    )
}

LAYOUT_OF: dict[type, Layout[Any]] = {layout.message: layout for layout in (*REQUESTS.values(), *RESPONSES.values())}
