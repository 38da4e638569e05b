"""Sans-I/O: messages to bytes and back. Nothing here decides; every byte of the protocol is described here.

A frame is a length and a body::

    4 bytes    length of the body, big-endian
    body       one msgpack array: [code, ...]

The conversation opens with three frames, the server first, so that a client
behind TLS learns at once if it was refused::

    server     ["rdzv", version_min, version_max, store_id, nonce, token_wanted]          the greeting
    client     ["rdzv", version, session_id, nonce, proof]                                 the hello
    server     ["rdzv", session, address, revision, frame_bytes_max, proof]                the welcome

After that::

    client     [code, request_id, acknowledged, *fields]     a request; `acknowledged`: replies received up to there
    server     [code, request_id, *fields]                   a response
    server     [EVENTS, request_id, [event, ...]]            events for the watch that was opened by that request
    server     [LAGGED, request_id, revision]                that watch has ended after `revision`: too slow a reader
    either     [BYE, reason]                                 hanging up on purpose; a client's session ends with it

At any time the server may say ``["sorry", kind, message]``, and hangs up then. `session` in the welcome is the number
of the client's session: another one than last time means that the server had forgotten it.

Fields are positional, in the order of the tables at the end of this file. msgpack extension types are never accepted,
and nothing received is ever evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import msgpack

from store.elements import claimed
from store.errors import LimitExceeded, ProtocolError, StoreUsageError
from store.messages import (
    Add,
    Added,
    Append,
    Cancel,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Delete,
    DeletePrefix,
    Done,
    Entry,
    Event,
    EventKind,
    Excessive,
    Failed,
    FailureKind,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    LeaseState,
    List,
    Listing,
    Operation,
    Ping,
    Pong,
    Put,
    Request,
    Response,
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
from store.quick import maker

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HANDSHAKE_BYTES_MAX",
    "VERSION",
    "Bye",
    "Events",
    "FrameReader",
    "Greeting",
    "Hello",
    "Lagged",
    "Reply",
    "Sorry",
    "Welcome",
    "decode_events",
    "decode_greeting",
    "decode_hello",
    "decode_request",
    "decode_server_frame",
    "decode_welcome",
    "elements_max",
    "encode_bye",
    "encode_events",
    "encode_greeting",
    "encode_hello",
    "encode_lagged",
    "encode_request",
    "encode_response",
    "encode_sorry",
    "encode_welcome",
    "frame_events",
    "other_version",
]

VERSION = 1
MAGIC = "rdzv"
SORRY = "sorry"
HANDSHAKE_BYTES_MAX = 4096  # nobody who has not said hello may make us hold more than this
NUMBER_MAX = 2**63 - 1  # of a request: what a journal can keep
UNCOUNTED_BYTES = 1024  # a body so small is decoded as it is: whatever it claims, that takes no more than 2 MB
OPENING_ELEMENTS_MAX = 64  # of a hello or greeting, of later versions, too
ELEMENTS_PER_OPERATION = 24  # of a transaction: a condition has 4, and each of its two branches an operation of up to 7
KEPT_CONDITIONS_MAX = 1024  # conditions that are made once for all who send them, of keys
KEPT_KEY_MAX = 256  # of at most so many characters: half a megabyte in all
RESPONSE_BYTES_MAX = 1024 * 1024 * 1024  # a client trusts the server it chose, but not garbage

_length = struct.Struct(">I")
_pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack


class Greeting(NamedTuple):
    """The server's first words."""

    version_min: int
    version_max: int
    store_id: str
    nonce: bytes
    token_wanted: bool


class Hello(NamedTuple):
    """The client's first words; `proof` is empty if it has no token."""

    version: int
    session_id: bytes
    nonce: bytes
    proof: bytes


class Welcome(NamedTuple):
    """The server takes the client in.

    `session` is the number of the client's session, and `address` where the server sees it come from. `resumed` does
    not travel: the client works it out from the number.
    """

    session: int
    address: str
    revision: int
    frame_bytes_max: int
    proof: bytes
    resumed: bool = False


class Sorry(NamedTuple):
    """The server does not take the client in: `kind` names the error that it should raise."""

    kind: str
    message: str


class Reply(NamedTuple):
    """A response, and the request it belongs to."""

    request_id: int
    response: Response


class Events(NamedTuple):
    """Events for a watch."""

    request_id: int
    events: tuple[Event, ...]


class Lagged(NamedTuple):
    """A watch was ended by the server; everything up to `revision` was sent."""

    request_id: int
    revision: int


class Bye(NamedTuple):
    """The peer hangs up on purpose."""

    reason: str


# ------------------------------------------------------------------------------------------------------ frames


class FrameReader:
    """Cuts a stream of bytes into frame bodies, none longer than `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._held = bytearray()
        self._wanted = 0  # how many bytes must be held before there is anything to look at

    @property
    def half_a_frame(self) -> bool:
        """Whether a frame has begun but not ended."""
        return bool(self._held)

    def only_frame(self, data: memoryview) -> memoryview | None:
        """The body of the one frame that these bytes are; None if they are less, or more, and are for `feed`."""
        if self._held or len(data) < 4:
            return None
        (size,) = _length.unpack_from(data)
        return data[4:] if size == len(data) - 4 and size <= self.bytes_max else None

    def feed(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        """Take in bytes; give back the bodies that are complete. They are valid until the next call.

        Raises:
            ProtocolError: A frame is announced that is longer than allowed, which is also how strangers are recognized.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:  # else each piece of a large frame would copy all that came before it
                return []
            data, self._held = self._held, bytearray()
        view = memoryview(data)
        bodies = []
        at, end = 0, len(view)
        self._wanted = 4
        while end - at >= 4:
            (size,) = _length.unpack_from(view, at)
            if size > self.bytes_max:
                raise ProtocolError(_what_is_this(bytes(view[at : at + 8]), size, self.bytes_max))
            if end - at - 4 < size:
                self._wanted = 4 + size
                break
            bodies.append(view[at + 4 : at + 4 + size])
            at += 4 + size
        if at < end:
            self._held = bytearray(view[at:])
        return bodies


def _what_is_this(start: bytes, size: int, bytes_max: int) -> str:
    """Name what knocks, from the first bytes of what should have been a frame."""
    if start[:2] == b"\x16\x03":
        return "a TLS hello on a port without TLS: use tcp:// for this server, or start it with a certificate"
    if start[:1] in (b"\x15", b"\x14") and start[1:2] == b"\x03":
        return "a TLS record on a connection without TLS: use tcps:// for this server"
    if start[:4] in (b"GET ", b"POST", b"HEAD", b"PUT ", b"HTTP", b"OPTI"):
        return "HTTP on a port that speaks the rdzv protocol"
    return f"a frame of {size} bytes is announced, and {bytes_max} is the limit: not the protocol, or too much of it"


def _frame(body: bytes) -> bytes:
    return _length.pack(len(body)) + body


def _decode(body: memoryview | bytes) -> list[Any]:
    """The array in a frame body. Lengths are bounded by the body's own, which the frame limit bounds."""
    try:
        fields = msgpack.unpackb(body, use_list=True, raw=False, strict_map_key=True, ext_hook=_no_extensions)
    except RecursionError as error:  # pragma: no cover - msgpack bounds its own depth
        raise ProtocolError("a frame is nested too deeply") from error
    except Exception as error:  # msgpack raises several unrelated classes for garbage
        raise ProtocolError(f"a frame is not msgpack: {type(error).__name__}: {error}") from error
    if type(fields) is not list or not fields:
        raise ProtocolError(f"a frame holds {type(fields).__name__}, not a filled array")
    return fields


def _decode_counted(body: memoryview | bytes, most: int) -> list[Any] | None:
    """The array in the frame body of a stranger, or of a client; None if it holds more than so many elements."""
    if len(body) > UNCOUNTED_BYTES:
        try:
            count = claimed(body, most)
        except ValueError as error:
            raise ProtocolError(f"a frame is not msgpack, or none of ours: {error}") from None
        if count > most:
            return None
    return _decode(body)


def _no_extensions(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code} is not part of the protocol")


# --------------------------------------------------------------------------------------------------- handshake


def encode_greeting(greeting: Greeting) -> bytes:
    """A greeting as a frame."""
    return _frame(_pack((MAGIC, *greeting)))


def decode_greeting(body: memoryview | bytes) -> Greeting | Sorry:
    """What a server said first."""
    return cast("Greeting | Sorry", _decode_opening(body, Greeting, (int, int, str, bytes, bool)))


def encode_hello(hello: Hello) -> bytes:
    """A hello as a frame."""
    return _frame(_pack((MAGIC, *hello)))


def decode_hello(body: memoryview | bytes) -> Hello:
    """What a client said first."""
    hello = _decode_opening(body, Hello, (int, bytes, bytes, bytes))
    if not isinstance(hello, Hello):
        raise ProtocolError("the client's first frame is no hello")
    if len(hello.session_id) != 16 or len(hello.nonce) != 16:
        raise ProtocolError("a hello carries a session id and a nonce of 16 bytes each")
    return hello


def encode_welcome(welcome: Welcome) -> bytes:
    """A welcome as a frame."""
    return _frame(_pack((MAGIC, *welcome[:-1])))  # all but `resumed`


def decode_welcome(body: memoryview | bytes) -> Welcome | Sorry:
    """What a server answered to our hello."""
    return cast("Welcome | Sorry", _decode_opening(body, Welcome, (int, str, int, int, bytes)))


def encode_sorry(sorry: Sorry) -> bytes:
    """A refusal as a frame."""
    return _frame(_pack((SORRY, *sorry)))


def _decode_opening(body: memoryview | bytes, kind: type[Any], types: tuple[type, ...]) -> Any:
    fields = _decode_counted(body, OPENING_ELEMENTS_MAX)
    if fields is None:
        raise ProtocolError(f"the peer's {kind.__name__.lower()} is not one of this protocol: it holds too much")
    sorry = _sorry(fields)
    if sorry is not None:
        return sorry
    if fields[0] != MAGIC or tuple(map(type, fields[1:])) != types:
        if fields[0] == MAGIC:
            _check_version(fields, kind)
        raise ProtocolError(f"the peer's {kind.__name__.lower()} is not one of this protocol")
    return kind(*fields[1:])


def _check_version(fields: list[Any], kind: type[Any]) -> None:
    """Say of an opening in another shape whether it is that of another version.

    Whatever a later version changes, a hello begins with its version, and a greeting with its oldest and its newest.
    """
    versions = fields[1:2] if kind is Hello else fields[1:3] if kind is Greeting else []
    if versions and all(type(version) is int for version in versions) and not versions[0] <= VERSION <= versions[-1]:
        raise ProtocolError(other_version(versions[0], versions[-1], server=kind is Greeting))


def other_version(oldest: int, newest: int, *, server: bool) -> str:
    """What to say to, or of, a peer that speaks none of our versions; `server` if it is one, and we the client."""
    theirs = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    ours = f"version {VERSION}"
    if server:
        said = f"this client speaks {ours} of the protocol, the server {theirs}"
    else:
        said = f"this server speaks {ours} of the protocol, the client {theirs}"
    behind = "client" if server == (oldest > VERSION) else "server"
    return f"{said}: upgrade the {behind}, or install the same release of rdzv on both sides"


def _sorry(fields: list[Any]) -> Sorry | None:
    if fields[0] == SORRY and len(fields) == 3 and type(fields[1]) is str and type(fields[2]) is str:
        return Sorry(fields[1], fields[2])
    return None


# ----------------------------------------------------------------------------------------------------- messages


def encode_request(request_id: int, acknowledged: int, request: Request[Any]) -> bytes:
    """A request as a frame.

    Raises:
        StoreUsageError: A field is not of its type, so that the server would take us for a stranger and hang up.
    """
    layout = _LAYOUT_OF.get(type(request))
    if layout is None:
        raise StoreUsageError(f"{_shown(request)} is no request")
    fields = layout.fields(request) if layout.plain else ()
    if tuple(map(type, fields)) not in layout.plain:
        layout.verify(request)  # before an encoder stumbles over it
        fields = layout.fields(request)
    body = _pack((layout.code, request_id, acknowledged, *fields))
    return _length.pack(len(body)) + body


def elements_max(operations_max: int) -> int:
    """How many elements a request may hold, which leaves room to go past `operations_max` and be told so."""
    return 1000 + ELEMENTS_PER_OPERATION * operations_max


def decode_request(body: memoryview | bytes, *, elements_max: int = 2**32) -> tuple[int, int, Request[Any]] | Bye:
    """A client's frame: the request's id, what it acknowledges, and the request; or its farewell.

    A request that holds more than `elements_max` elements is not decoded: what stands for it is `Excessive`.
    """
    fields = _decode_counted(body, elements_max)
    if fields is None:
        request_id, acknowledged = _numbers_of(body)
        return request_id, acknowledged, Excessive(elements_max=elements_max)
    if fields[0] == BYE:
        return _decode_bye(fields)
    layout = _REQUESTS.get(fields[0]) if type(fields[0]) is int else None
    if layout is None:
        raise ProtocolError(f"a frame has the code {_shown(fields[0])}, which no request has")
    request_id, acknowledged = _check_numbers(fields)
    return request_id, acknowledged, layout.build(fields[3:])


def _check_numbers(fields: list[Any]) -> tuple[int, int]:
    """The id of a request, and what it acknowledges."""
    if len(fields) < 3 or type(fields[1]) is not int or type(fields[2]) is not int or fields[1] < 1:
        raise ProtocolError("a request does not begin with its code, its id and what it acknowledges")
    if fields[1] > NUMBER_MAX or fields[2] > NUMBER_MAX:
        raise ProtocolError(f"request {fields[1]} acknowledges {fields[2]}; no number of a request passes {NUMBER_MAX}")
    return fields[1], fields[2]


def _numbers_of(body: memoryview | bytes) -> tuple[int, int]:
    """The same of a request that is not looked into further."""
    # Its array's length, and three numbers of up to nine bytes.
    start = msgpack.Unpacker(max_buffer_size=64, max_array_len=0, max_map_len=0, ext_hook=_no_extensions)
    start.feed(body[:64])
    try:
        start.read_array_header()
        return _check_numbers([start.unpack() for _ in range(3)])
    except ProtocolError:
        raise
    except Exception as error:  # what msgpack raises for garbage, or because 64 bytes did not hold them
        raise ProtocolError("a request does not begin with its code, its id and what it acknowledges") from error


def encode_response(request_id: int, response: Response) -> bytes:
    """A response as a frame."""
    layout = _LAYOUT_OF[type(response)]
    body = _pack((layout.code, request_id, *layout.fields(response)))
    return _length.pack(len(body)) + body


def decode_server_frame(body: memoryview | bytes) -> Reply | Events | Lagged | Bye | Sorry:
    """A server's frame."""
    fields = _decode(body)
    code = fields[0]
    if code == BYE:
        return _decode_bye(fields)
    sorry = _sorry(fields)
    if sorry is not None:
        return sorry
    if len(fields) < 2 or type(code) is not int or type(fields[1]) is not int:
        raise ProtocolError("a response does not begin with its code and the id of its request")
    if code == EVENTS:
        if len(fields) != 3 or type(fields[2]) is not list:
            raise ProtocolError("a frame of events has no list of events")
        return Events(fields[1], tuple(map(_event_from, fields[2])))
    if code == LAGGED:
        if len(fields) != 3 or type(fields[2]) is not int:
            raise ProtocolError("a lagging watch is reported without a revision")
        return Lagged(fields[1], fields[2])
    layout = _RESPONSES.get(code)
    if layout is None:
        raise ProtocolError(f"a frame has the code {code!r}, which no response has")
    return Reply(fields[1], layout.build(fields[2:]))


def encode_events(events: tuple[Event, ...]) -> bytes:
    """The part of an events frame that is the same for every watch; `frame_events` makes frames of it."""
    return _pack([_event_to(event) for event in events])


def decode_events(encoded: bytes) -> tuple[Event, ...]:
    """What `encode_events` made, back again."""
    return tuple(map(_event_from, _decode(encoded)))


def frame_events(watch_id: int, encoded: bytes) -> bytes:
    """A frame of events for one watch, from what `encode_events` made once for all."""
    head = _EVENTS_HEAD.pack(len(encoded) + _EVENTS_HEAD.size - 4, 0x93, EVENTS, 0xCF, watch_id)
    return head + encoded


def encode_lagged(watch_id: int, revision: int) -> bytes:
    """A frame that ends a watch whose reader was too slow."""
    return _frame(_pack((LAGGED, watch_id, revision)))


def encode_bye(reason: str) -> bytes:
    """A farewell as a frame."""
    return _frame(_pack((BYE, reason)))


def _decode_bye(fields: list[Any]) -> Bye:
    if len(fields) != 2 or type(fields[1]) is not str:
        raise ProtocolError("a farewell has no reason")
    return Bye(fields[1])


def check_frame(frame: bytes, bytes_max: int) -> None:
    """Refuse to send what the peer would hang up on.

    Raises:
        LimitExceeded: The frame is longer than the peer takes.
    """
    if len(frame) - 4 > bytes_max:
        raise LimitExceeded(
            f"the message has {len(frame) - 4} bytes; the server takes frames of {bytes_max} (frame_bytes_max): "
            f"send less at once, or start the server with a higher limit"
        )


# ------------------------------------------------------------------------------------------------------- fields

T = TypeVar("T")


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


def _shown(value: object) -> str:
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
            raise ProtocolError(f"{_shown(value)} stands where {type_.__name__} belongs")
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
        raise ProtocolError(f"{_shown(value)} stands where seconds belong")
    return float(value)


def _many(field: _Field) -> _Field:
    """An array of fields, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ProtocolError(f"{_shown(value)} stands where an array belongs")
        return tuple(map(field.check, value))

    encode = field.encode
    return _Field(
        check,
        None if encode is None else lambda values: [encode(value) for value in values],
        lambda values: type(values) in (tuple, list) and all(map(field.takes, values)),
    )


def _entry_to(entry: Entry) -> tuple[Any, ...]:
    return entry.key, entry.value, entry.create_revision, entry.mod_revision, entry.lease


def _entry_from(value: Any) -> Entry:
    if type(value) is list and len(value) == 5:
        key, held, created, changed, lease = value
        if (  # not a `match` of classes, which takes three times as long
            type(key) is str
            and type(held) is bytes
            and type(created) is int
            and type(changed) is int
            and (lease is None or type(lease) is int)
        ):
            return _make_entry(key, held, created, changed, lease)
    raise ProtocolError(f"{_shown(value)} stands where an entry belongs")


_make_entry = maker(Entry)


_EVENT_KINDS: tuple[EventKind, ...] = ("put", "delete", "synced", "reset")
_EVENT_CODES = {kind: code for code, kind in enumerate(_EVENT_KINDS)}


def _event_to(event: Event) -> tuple[Any, ...]:
    if event.kind == "put":
        return 0, event.revision, event.key, event.value, event.create_revision, event.lease
    return _EVENT_CODES[event.kind], event.revision, event.key


def _event_from(value: Any) -> Event:
    match value:
        case [0, int(revision), str(key), bytes(held), int(created), int() | None as lease]:
            return Event(kind="put", revision=revision, key=key, value=held, create_revision=created, lease=lease)
        case [1 | 2 | 3 as code, int(revision), str(key)]:
            return Event(kind=_EVENT_KINDS[code], revision=revision, key=key)
    raise ProtocolError(f"{_shown(value)} stands where an event belongs")


def _condition_to(condition: Condition) -> tuple[Any, ...]:
    return condition.key, condition.target.value, condition.expected


_EXPECTED_TYPE: dict[Target, type[int | bytes | bool]] = {
    Target.MOD_REVISION: int,
    Target.CREATE_REVISION: int,
    Target.VALUE: bytes,
    Target.EXISTS: bool,
}


def _condition_from(value: Any) -> Condition:
    if (
        type(value) is list
        and len(value) == 3
        and type(value[0]) is str
        and type(value[1]) is int
        and value[1] in _TARGETS
    ):
        key, number, expected = value
        if type(expected) is _EXPECTED_TYPE[_TARGETS[number]]:
            # The members of a round send the same few fences with every request. A value may be large: not kept.
            if type(expected) is not bytes and len(key) <= KEPT_KEY_MAX:
                return _kept_condition(key, number, expected)
            return _make_condition(key, _TARGETS[number], expected)
    raise ProtocolError(f"{_shown(value)} stands where a condition belongs")


_make_condition = maker(Condition)


@functools.lru_cache(KEPT_CONDITIONS_MAX, typed=True)
def _kept_condition(key: str, number: int, expected: int | bool) -> Condition:
    return _make_condition(key, _TARGETS[number], expected)


def _takes_condition(value: Any) -> bool:
    return (
        type(value) is Condition and _STR.takes(value.key) and type(value.expected) is _EXPECTED_TYPE.get(value.target)
    )


_TARGETS = {target.value: target for target in Target}


def _conditions() -> _Field:
    """An array of conditions. A fence is the same tuple in each request of a round: the last one is encoded once."""
    each = _many(_Field(_condition_from, _condition_to, _takes_condition))
    last: tuple[Any, Any] = (), []

    def encode(conditions: Any) -> Any:
        nonlocal last
        fence, encoded = last  # in one step: other threads encode, too
        if conditions is not fence:
            encoded = cast("Any", each.encode)(conditions)
            if type(conditions) is tuple:
                last = conditions, encoded
        return encoded

    return _Field(each.check, encode, lambda conditions: conditions is last[0] or each.takes(conditions))


def _message_to(message: Any) -> tuple[Any, ...]:
    layout = _LAYOUT_OF[type(message)]
    return (layout.code, *layout.fields(message))


def _message_from(value: Any, allowed: tuple[type, ...]) -> Any:
    if type(value) is list and value and type(value[0]) is int:
        layout = _REQUESTS.get(value[0])
        if layout is not None and layout.message in allowed:
            return layout.build(value[1:])
    raise ProtocolError(f"{_shown(value)} stands where {' or '.join(kind.__name__ for kind in allowed)} belongs")


def _one_of(allowed: tuple[type, ...]) -> _Field:
    """A message within a message."""

    def takes(value: Any) -> bool:
        if type(value) not in allowed:
            return False
        _LAYOUT_OF[type(value)].verify(value)
        return True

    return _Field(lambda value: _message_from(value, allowed), _message_to, takes)


def _result_to(result: int | bool | Entry | None) -> Any:
    return _entry_to(result) if isinstance(result, Entry) else result


def _result_from(value: Any) -> int | bool | Entry | None:
    if value is None or type(value) in (int, bool):
        return cast("int | bool | None", value)
    return _entry_from(value)


def _check_figures(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(
        type(name) is str and type(figure) in (str, int, float, bool) for name, figure in value.items()
    ):
        raise ProtocolError(f"{_shown(value)} stands where figures belong")
    return value


def _enumerated(kind: type[FailureKind]) -> _Field:
    def check(value: Any) -> FailureKind:
        try:
            return kind(value)
        except ValueError:
            raise ProtocolError(f"{_shown(value)} is no kind of failure") from None

    return _Field(check, int)


_STR = _exactly(str)
_BYTES = _exactly(bytes, bytearray, memoryview)
_INT = _exactly(int)
_BOOL = _exactly(bool)
_SECONDS = _Field(
    _check_seconds, takes=lambda value: isinstance(value, int | float) and type(value) is not bool, plain=(float,)
)
_ENTRY = _Field(_entry_from, _entry_to)
_MAYBE_ENTRY = _optional(_ENTRY)
_CONDITIONS = _conditions()
_OPERATIONS = _many(_one_of(Operation.__args__))
_GUARDABLE = _one_of((*Operation.__args__, GetMany, List, Count, DeletePrefix, CompareAndSet, Wait))

M = TypeVar("M")


class _Layout(Generic[M]):
    """How one kind of message travels."""

    __slots__ = ("_checks", "_make", "_takes", "code", "fields", "message", "plain")

    def __init__(self, code: int, message: type[M], /, **fields: _Field) -> None:
        self.code, self.message = code, message
        self._make = maker(message)
        assert list(fields) == [each.name for each in dataclasses.fields(message)], "makers go by the order of fields"  # type: ignore[arg-type]  # mypy has no word for "any dataclass"
        # To compare the types of all fields at once is what the hot path can afford.
        self.plain = frozenset(itertools.product(*(field.plain for field in fields.values())))
        self._checks = tuple(field.check for field in fields.values())
        self._takes = tuple((attrgetter(name), field.takes, name) for name, field in fields.items())
        self.fields = _reader(fields)

    def verify(self, message: M) -> None:
        """Refuse a message that a caller gave fields of the wrong types."""
        if self.plain and tuple(map(type, self.fields(message))) in self.plain:
            return
        for get, takes, name in self._takes:
            value = get(message)
            if not takes(value):
                several = isinstance(value, tuple | list)
                shown = f"[{', '.join(map(_shown, value[:4]))}]" if several else _shown(value)
                raise StoreUsageError(f"{self.message.__name__} cannot have {name}={shown}")

    def build(self, values: list[Any]) -> M:
        """The message of these field values."""
        if tuple(map(type, values)) in self.plain:
            return self._make(*values)
        if len(values) != len(self._checks):
            raise ProtocolError(f"{self.message.__name__} has {len(self._checks)} fields, not {len(values)}")
        return self._make(*[check(value) for check, value in zip(self._checks, values, strict=True)])


def _reader(fields: dict[str, _Field]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a message to what is sent of it, as quick as its fields allow: this is the hot path."""
    names = tuple(fields)
    encoders = tuple((attrgetter(name), field.encode) for name, field in fields.items())
    if any(encode is not None for _, encode in encoders):
        return lambda message: tuple(
            [get(message) if encode is None else encode(get(message)) for get, encode in encoders]
        )
    if not names:
        return lambda _: ()
    if len(names) == 1:
        (name,) = names
        return lambda message: (getattr(message, name),)
    return cast("Callable[[Any], tuple[Any, ...]]", attrgetter(*names))


# ------------------------------------------------------------------------------------------------ codes and order

EVENTS = 126
LAGGED = 125
BYE = 127
_EVENTS_HEAD = struct.Struct(">IBBBQ")  # length, array of 3, EVENTS, a 64-bit unsigned, the id of the watch

_REQUESTS: dict[int, _Layout[Any]] = {
    layout.code: layout
    for layout in (
        _Layout(1, Put, key=_STR, value=_BYTES, ttl=_optional(_SECONDS), lease=_optional(_INT)),
        _Layout(2, Get, key=_STR),
        _Layout(3, Delete, key=_STR),
        _Layout(4, Add, key=_STR, amount=_INT, lease=_optional(_INT)),
        _Layout(5, Append, key=_STR, value=_BYTES, lease=_optional(_INT)),
        _Layout(6, GetMany, keys=_many(_STR)),
        _Layout(7, List, prefix=_STR, keys_only=_BOOL),
        _Layout(8, Count, prefix=_STR),
        _Layout(9, DeletePrefix, prefix=_STR),
        _Layout(
            10,
            CompareAndSet,
            key=_STR,
            value=_BYTES,
            expected_revision=_optional(_INT),
            expected_value=_optional(_BYTES),
            ttl=_optional(_SECONDS),
            lease=_optional(_INT),
        ),
        _Layout(11, Transact, when=_CONDITIONS, then=_OPERATIONS, otherwise=_OPERATIONS),
        _Layout(12, Wait, keys=_many(_STR)),
        _Layout(13, Guarded, when=_CONDITIONS, request=_GUARDABLE),
        _Layout(14, Grant, ttl=_SECONDS, disconnect_ttl=_optional(_SECONDS)),
        _Layout(15, KeepAlive, lease=_INT),
        _Layout(16, Revoke, lease=_INT),
        _Layout(17, TimeToLive, lease=_INT),
        _Layout(18, Watch, prefix=_STR, start_revision=_optional(_INT), snapshot=_BOOL),
        _Layout(19, Cancel, target=_INT),
        _Layout(20, Ping),
        _Layout(21, Stats),
    )
}

_RESPONSES: dict[int, _Layout[Any]] = {
    layout.code: layout
    for layout in (
        _Layout(64, Written, revision=_INT),
        _Layout(65, Found, entry=_MAYBE_ENTRY),
        _Layout(66, Listing, entries=_many(_MAYBE_ENTRY), revision=_INT),
        _Layout(67, Counted, count=_INT, revision=_INT),
        _Layout(68, CompareAndSetResult, succeeded=_BOOL, entry=_MAYBE_ENTRY),
        _Layout(69, Added, value=_INT, revision=_INT),
        _Layout(70, TransactionResult, succeeded=_BOOL, results=_many(_Field(_result_from, _result_to)), revision=_INT),
        _Layout(71, Granted, lease=_INT, ttl=_SECONDS),
        _Layout(72, LeaseState, remaining=_SECONDS, ttl=_SECONDS, keys=_many(_STR)),
        _Layout(73, Watching, revision=_INT),
        _Layout(74, Done),
        _Layout(75, Pong, revision=_INT),
        _Layout(76, Figures, figures=_Field(_check_figures)),
        _Layout(77, Failed, kind=_enumerated(FailureKind), message=_STR),
    )
}

_LAYOUT_OF: dict[type, _Layout[Any]] = {
    layout.message: layout for layout in (*_REQUESTS.values(), *_RESPONSES.values())
}
