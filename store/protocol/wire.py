"""Sans-I/O: encodes and decodes messages; each frame's body is one msgpack array.

docs/protocol.md describes the messages' order, and how a peer handles unknown messages (promise S12).
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

import msgpack

from store.errors import ProtocolError, StoreUsageError
from store.messages import (
    REQUESTS,
    RESPONSES,
    Event,
    EventKind,
    Request,
    Response,
    TooLargeRequest,
    UndecodableRequest,
    validate_request,
)
from store.printable import printable
from store.protocol.element_budget import count_elements
from store.protocol.frames import frame
from store.records import Record, UnfitError, UnionKind, UnknownValueError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

VERSION_MIN = 1
VERSION = 1
MAGIC = "rdzv"
SORRY = "sorry"
CANDIDATE, ENDED = "candidate", "ended"  # kinds of `Rejection`
BYE = "bye"
EVENTS = 126
LAGGED = 125
PUSHES = range(100, 125)  # codes reserved for pushes of later releases
EVENT_KINDS = frozenset(get_args(EventKind))
_HEAD = struct.Struct(">IBBQ")  # the start of a response's frame: its length, array of 2, request id of 64 bits
_EVENTS_HEAD = struct.Struct(">IBBQBB")  # for events: length, array of 2, watch id, array of 2, EVENTS
HANDSHAKE_BYTES_MAX = 4096  # the largest frame up to the welcome
NUMBER_MAX = 2**63 - 1  # the largest request id: SQLite's largest integer
OPENING_ELEMENTS_MAX = 512  # the most elements of an array or map in a handshake's frame, also in later versions
ELEMENTS_PER_OPERATION = 12  # an operation has up to 6 msgpack elements, and may have more in later releases
# A request of up to this many bytes is decoded in one step, its elements uncounted. The worst one (nested arrays that
# each claim as many elements as there are bytes) takes a few milliseconds, and 27 MB.
STEP_BYTES = 4096
RESPONSE_BYTES_MAX = 1024 * 1024 * 1024  # a client accepts no larger frame, even from a server that it trusts

O = TypeVar("O", bound=Record)  # noqa: E741 - an opening message

CHUNK_BYTES = 256 * 1024  # values of at least this size are sent without a copy
PACKER_BYTES = 256 * 1024  # a packer's buffer at its creation
_idle_packers: list[msgpack.Packer] = []


def _pack(fields: object) -> bytes:
    """Pack an array, in any thread; packers are reused, as making one takes longer than packing."""
    # Take the packer out of the list: during packing, a garbage collection may let another thread run.
    try:
        packer = _idle_packers.pop()
    except IndexError:
        packer = msgpack.Packer()
    packed: bytes = packer.pack(fields)
    if len(packed) <= PACKER_BYTES:  # reuse the packer only if its buffer has not grown
        _idle_packers.append(packer)  # not after an error: it may hold part of an array
    return packed


_asked: UnionKind = UnionKind(REQUESTS.values())


class Greeting(Record):
    """The server's first message."""

    version_min: int
    version_max: int
    store_id: str
    nonce: bytes
    token_wanted: bool
    generation: int = 1


class Hello(Record):
    """The client's first message. docs/protocol.md describes the fields of greeting, hello and welcome."""

    version: int
    session_id: bytes
    nonce: bytes
    proof: bytes
    process: bytes = b""
    generation: int = 1

    def why_invalid(self) -> str | None:
        """Return an error if an id has the wrong length."""
        if len(self.session_id) != 16 or len(self.nonce) != 16:
            return "carries a session id and a nonce of 16 bytes each"
        return None if len(self.process) in {0, 16} else "names its process by 16 bytes, or not at all"


class Welcome(Record):
    """The server's acceptance of a client. `session` is a new number if the server has forgotten the old session."""

    session: int
    address: str
    revision: int
    frame_bytes_max: int
    proof: bytes
    limits: dict[str, Any] = {}  # noqa: RUF012 - the default of a tuple, never changed
    durable: bool = True


class Rejection(NamedTuple):
    """The server's rejection of a client; docs/protocol.md lists each `kind`."""

    kind: str
    message: str


class Reply(NamedTuple):
    """A response, and its request's id."""

    request_id: int
    response: Response


class Events(NamedTuple):
    """Events for a watch."""

    request_id: int
    events: tuple[Event, ...]


class Lagged(NamedTuple):
    """The end of a slow reader's watch; the server has sent it all events up to `revision`."""

    request_id: int
    revision: int


class Bye(NamedTuple):
    """The peer's goodbye before it closes the connection."""

    reason: str


def _reject_extension(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code} is not part of the protocol")


_unpack: Callable[..., Any] = functools.partial(msgpack.unpackb, use_list=False, ext_hook=_reject_extension)
_unpack_opening = functools.partial(_unpack, max_array_len=OPENING_ELEMENTS_MAX, max_map_len=OPENING_ELEMENTS_MAX)


def _unpack_frame(body: memoryview | bytes, unpack: Callable[..., Any] = _unpack) -> tuple[Any, ...]:
    try:
        fields = unpack(body)  # text becomes `str`; keys of maps may be text or bytes
    except Exception as error:  # msgpack raises several unrelated classes for garbage
        raise ProtocolError(f"a frame is not msgpack: {type(error).__name__}: {error}") from error
    if type(fields) is not tuple or len(fields) < 2:
        raise ProtocolError(f"a frame holds {brief(fields)}, not an array of two or more")
    return fields


def encode_opening(said: Greeting | Hello | Welcome) -> bytes:
    """Return a greeting, a hello or a welcome as a frame; a generation of 1 is left out."""
    fields = cast("Any", said)[: -1 if getattr(said, "generation", 0) == 1 else None]
    return frame(_pack((MAGIC, fields)))


def encode_rejection(rejection: Rejection) -> bytes:
    """Return a rejection as a frame."""
    return frame(_pack((SORRY, *rejection)))


def decode_opening(body: memoryview | bytes, kind: type[O]) -> O | Rejection:
    """Decode a greeting, hello or welcome, as `kind` says, or a server's rejection."""
    fields = _unpack_frame(body, _unpack_opening)
    if fields[0] == SORRY and kind is not Hello:
        return _decode_rejection(fields)
    why = "it does not begin as one"
    if fields[0] == MAGIC:
        try:
            return kind.read(fields[1])
        except UnfitError as error:
            _check_version(fields[1], kind)
            why = str(error)
    raise ProtocolError(f"the peer's {kind.__name__.lower()} is not one of this protocol: {why}")


def _check_version(fields: Any, kind: type[Record]) -> None:
    versions = fields[: {Hello: 1, Greeting: 2}.get(kind, 0)] if type(fields) is tuple else ()
    told = bool(versions) and all(type(version) is int for version in versions)
    if told and not (versions[0] <= VERSION and versions[-1] >= VERSION_MIN):
        raise ProtocolError(version_error_text(versions[0], versions[-1], server=kind is Greeting))


def version_error_text(oldest: int, newest: int, *, server: bool) -> str:
    """Return the error message for a peer (the `server`, or a client) that shares no version with this release."""
    theirs = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    ours = f"version {VERSION}" if VERSION_MIN == VERSION else f"versions {VERSION_MIN} to {VERSION}"
    here, there = ("client", "server") if server else ("server", "client")
    said = f"this {here} speaks {ours} of the protocol, the {there} {theirs}"
    behind = "client" if server == (oldest > VERSION) else "server"
    return f"{said}: upgrade the {behind}, or install the same release of rdzv on both sides"


def _decode_rejection(fields: tuple[Any, ...]) -> Rejection:
    if len(fields) < 3 or type(fields[1]) is not str or type(fields[2]) is not str:
        raise ProtocolError("a refusal has no kind or no reason")
    return Rejection(fields[1], printable(fields[2]))


def encode_request(request_id: int, acknowledged: int, request: Request[Any], *, bytes_max: int | None = None) -> bytes:
    """Return a request as a frame; `LimitExceeded` above `bytes_max`, `StoreUsageError` if it cannot be encoded."""
    checked_request = validate_request(request)
    try:
        return frame(_pack((request_id, acknowledged, checked_request)), bytes_max)
    except (TypeError, ValueError, OverflowError, BufferError) as error:  # an int of 65 bits, half a surrogate pair
        raise StoreUsageError(f"{type(request).__name__} cannot be sent: {error}") from None


def elements_max(operations_max: int) -> int:
    """Return the limit of elements per request. Requests reach `operations_max` first, whose error says more."""
    return 1000 + ELEMENTS_PER_OPERATION * operations_max


def decode_request(body: memoryview | bytes) -> tuple[int, int, Request[Any]] | Bye:
    """Decode a body of at most `STEP_BYTES`: return a request with its id and the id it acknowledges, or a goodbye."""
    fields = _unpack_frame(body)
    if fields[0] == BYE:
        return _decode_bye(fields)
    _check_request_ids(fields)
    try:
        return fields[0], fields[1], _asked.read(fields[2])
    except UnknownValueError as error:
        return fields[0], fields[1], UndecodableRequest(str(error))
    except UnfitError as error:
        raise ProtocolError(str(error)) from None


def decode_request_in_steps(
    body: memoryview | bytes, *, elements_max: int
) -> Generator[None, None, tuple[int, int, Request[Any]] | Bye]:
    """Do the same as `decode_request`, with pauses; return `TooLargeRequest` for too many elements."""
    try:
        count = yield from count_elements(body, elements_max)
    except ValueError as error:
        raise ProtocolError(f"a frame is not msgpack, or none of ours: {error}") from None
    if count > elements_max:
        return *_read_request_ids(body), TooLargeRequest(elements_max=elements_max)
    fields = _unpack_frame(body)
    yield
    if fields[0] == BYE:
        return _decode_bye(fields)
    _check_request_ids(fields)
    try:
        return fields[0], fields[1], (yield from _asked.read_in_steps(fields[2]))
    except UnknownValueError as error:
        return fields[0], fields[1], UndecodableRequest(str(error))
    except UnfitError as error:
        raise ProtocolError(str(error)) from None


def _check_request_ids(fields: Sequence[Any]) -> None:
    if len(fields) < 3 or type(fields[0]) is not int or type(fields[1]) is not int or fields[0] < 1:
        raise ProtocolError("a request does not begin with its id and the acknowledged one")
    if fields[0] > NUMBER_MAX or fields[1] > NUMBER_MAX:
        raise ProtocolError(f"request {fields[0]} acknowledges {fields[1]}; no number of a request passes {NUMBER_MAX}")


def _read_request_ids(body: memoryview | bytes) -> tuple[int, int]:
    start = msgpack.Unpacker(max_buffer_size=64, max_array_len=0, max_map_len=0, ext_hook=_reject_extension)
    start.feed(body[:64])
    try:
        start.read_array_header()
        numbers = start.unpack(), start.unpack()
    except Exception as error:
        raise ProtocolError("a request does not begin with its id and the acknowledged one") from error
    _check_request_ids((*numbers, None))
    return numbers


def encode_response(request_id: int, response: Response) -> bytes:
    """Return a response as a frame."""
    return frame(_pack((request_id, response)))


def encode_shared_body(said: Response | tuple[Event, ...]) -> tuple[bytes, ...]:
    """Encode a response or events once for all readers, without a head; a large value is a chunk of its own."""
    chunks: list[bytes] = []
    small: list[bytes] = []
    for part in _split_at_large_values(said):
        if len(part) < CHUNK_BYTES:
            small.append(part)
        else:
            chunks += [b"".join(small), part]
            small = []
    return (*chunks, b"".join(small))


def _split_at_large_values(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes) and len(value) >= CHUNK_BYTES:
        yield b"\xc6" + len(value).to_bytes(4, "big")
        yield value
    elif isinstance(value, tuple) and _has_large_value(value):
        yield b"\xdd" + len(value).to_bytes(4, "big")
        for each in value:
            yield from _split_at_large_values(each)
    else:
        yield _pack(value)


def _has_large_value(fields: tuple[Any, ...]) -> bool:
    return any(
        _has_large_value(field) if isinstance(field, tuple) else isinstance(field, bytes) and len(field) >= CHUNK_BYTES
        for field in fields
    )


def response_head(request_id: int, size: int) -> bytes:
    """Return the head of a frame for a response of `size` bytes."""
    return _HEAD.pack(size + _HEAD.size - 4, 0x92, 0xCF, request_id)


def decode_server_frame(body: memoryview | bytes) -> Reply | Events | Lagged | Bye | Rejection:
    """Decode a server's frame."""
    fields = _unpack_frame(body)
    request_id, said = fields[0], fields[1]
    if type(request_id) is not int:
        if request_id == BYE:
            return _decode_bye(fields)
        if request_id == SORRY:
            return _decode_rejection(fields)
        raise ProtocolError("a response does not begin with the id of its request")
    if type(said) is not tuple or not said or type(said[0]) is not int:
        raise ProtocolError("a response does not begin with its code")
    kind = RESPONSES.get(said[0])
    try:
        return _decode_push(request_id, said) if kind is None else Reply(request_id, kind.read(said))
    except UnfitError as error:
        raise ProtocolError(str(error)) from None


def _decode_push(watch_id: int, said: tuple[Any, ...]) -> Events | Lagged:
    match said:
        case (code, tuple(events), *_) if code == EVENTS:
            return Events(watch_id, tuple(_known_events(events)))
        case (code, int(revision), *_) if code == LAGGED:
            return Lagged(watch_id, revision)
        case (code, *_) if code in PUSHES:
            return Events(watch_id, ())
    raise ProtocolError(f"a frame has the code {said[0]}, which no response has, or the wrong fields")


def _known_events(events: tuple[Any, ...]) -> Iterator[Event]:
    for event in events:
        if type(event) is not tuple or not event or type(event[0]) is not str:
            raise ProtocolError(f"{brief(event)} stands where an event belongs")
        if event[0] in EVENT_KINDS:
            yield Event.read(event)


def encode_events(events: tuple[Event, ...]) -> bytes:
    """Return events as bytes, which follow `events_head` in a frame."""
    return _pack(events)


def decode_events(encoded: bytes) -> tuple[Event, ...]:
    """Decode the result of `encode_events`."""
    return tuple(map(Event.read, _unpack(encoded)))


def events_head(watch_id: int, size: int) -> bytes:
    """Return the head of a frame for one watch, with events of `size` bytes."""
    return _EVENTS_HEAD.pack(size + _EVENTS_HEAD.size - 4, 0x92, 0xCF, watch_id, 0x92, EVENTS)


def encode_lagged(watch_id: int, revision: int) -> bytes:
    """Return a frame that ends the watch of a slow reader."""
    return frame(_pack((watch_id, (LAGGED, revision))))


def encode_bye(reason: str) -> bytes:
    """Return a goodbye as a frame."""
    return frame(_pack((BYE, reason)))


def _decode_bye(fields: tuple[Any, ...]) -> Bye:
    if type(fields[1]) is not str:
        raise ProtocolError("a farewell has no reason")
    return Bye(printable(fields[1]))
