"""Sans-I/O: messages to bytes and back. Nothing here decides; every byte of the protocol is described here.

A frame is a length and a body::

    4 bytes    length of the body, big-endian
    body       one msgpack array: [code, ...]

The conversation opens with three frames, the server first, so that a client
behind TLS learns at once if it was refused::

    server     ["rdzv", version_min, version_max, store_id, nonce, token_wanted]          the greeting
    client     ["rdzv", version, session_id, nonce, proof, process]                        the hello
    server     ["rdzv", session, address, revision, frame_bytes_max, proof, limits]        the welcome

After that::

    client     [code, request_id, acknowledged, *fields]     a request; `acknowledged`: replies received up to there
    server     [code, request_id, *fields]                   a response
    server     [EVENTS, request_id, [event, ...]]            events for the watch that was opened by that request
    server     [LAGGED, request_id, revision]                that watch has ended after `revision`: too slow a reader
    either     [BYE, reason]                                 hanging up on purpose; a client's session ends with it

A client need not wait for the welcome before it asks what changes nothing, in frames of no more than a hello's bytes:
the answers follow the welcome.

At any time the server may say ``["sorry", kind, message]``, and hangs up then. `session` in the welcome is the number
of the client's session: another one than last time means that the server had forgotten it. `process` in the hello is
16 random bytes, the same on all connections of one process; a process that says none is never taken for dead (R20).

Fields are positional, in the order of the tables in `codec.py`. Two releases with the same major number understand
each other (promise S12): the client takes the highest version that both sides speak, and says it in its hello. Fields
are only ever added at the end: what a peer does not know there it ignores, and what it does not get it takes for the
default. A request with an unknown code, operation or condition is answered with `Failed`; events of an unknown kind,
and frames of the server with an unknown code above that of responses, are passed over. `limits` are those of the
server, by name. msgpack extension types are never accepted, and nothing received is ever evaluated.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgpack

from store.errors import LimitExceeded, ProtocolError, StoreUsageError
from store.messages import Event, Excessive, Request, Response, Unknown
from store.printable import printable
from store.protocol.codec import (
    LAYOUT_OF,
    REQUESTS,
    RESPONSES,
    UnknownWord,
    bytes_of,
    event_from,
    event_to,
    shown,
)
from store.protocol.element_budget import check_all_there, count_elements, elements_claimed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = [
    "HANDSHAKE_BYTES_MAX",
    "STEP_BYTES",
    "VERSION",
    "VERSION_MIN",
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
    "decode_request_in_steps",
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

VERSION_MIN = 1  # the oldest that this release still speaks ...
VERSION = 1  # ... and the newest
MAGIC = "rdzv"
SORRY = "sorry"
EVENTS = 126
LAGGED = 125
BYE = 127
PUSHES = range(100, 125)  # codes of what later releases may send unasked
_EVENTS_HEAD = struct.Struct(">IBBBQ")  # length, array of 3, EVENTS, a 64-bit unsigned, the id of the watch
HANDSHAKE_BYTES_MAX = 4096  # nobody who has not said hello may make us hold more than this
NUMBER_MAX = 2**63 - 1  # of a request: what a journal can keep
SKIPPED_BYTES = 16 * 1024  # one so small holds no more than 1.2 MB once its claims are known to be true
UNCOUNTED_BYTES = 1024  # a body so small is decoded as it is: whatever it claims, that takes no more than 2 MB
OPENING_ELEMENTS_MAX = 512  # of a hello or greeting, of later versions, too
ELEMENTS_PER_OPERATION = 12  # of a transaction: an operation has up to 6, and more in later releases
STEP_BYTES = 16 * 1024  # a request so small is decoded in one step, which takes less than a turn
RESPONSE_BYTES_MAX = 1024 * 1024 * 1024  # a client trusts the server it chose, but not garbage

_length = struct.Struct(">I")


def _packer() -> Callable[[object], bytes]:
    """What makes bytes of an array, from any thread.

    One packer for all is quickest, and is safe where it packs in one step: written in C, under the interpreter lock.
    Elsewhere (PyPy, no wheel, a free-threaded Python) each frame has one of its own.
    """
    in_one_step = "fallback" not in msgpack.Packer.__module__ and getattr(sys, "_is_gil_enabled", lambda: True)()
    if in_one_step:
        return cast("Callable[[object], bytes]", msgpack.Packer(default=bytes_of).pack)
    return lambda message: cast("bytes", msgpack.packb(message, default=bytes_of))


_pack = _packer()
_unpack: Callable[..., Any] = msgpack.unpackb


class Greeting(NamedTuple):
    """The server's first words."""

    version_min: int
    version_max: int
    store_id: str
    nonce: bytes
    token_wanted: bool


class Hello(NamedTuple):
    """The client's first words; `proof` is empty if it has no token, and `process` if it does not say which it is."""

    version: int
    session_id: bytes
    nonce: bytes
    proof: bytes
    process: bytes = b""


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
    limits: dict[str, float] = {}  # noqa: RUF012 - a default of a tuple, which nobody changes
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

    @property
    def held_bytes(self) -> int:
        """How many bytes of it have come."""
        return len(self._held)

    def only_frame(self, data: memoryview) -> memoryview | None:
        """The body of the one frame that these bytes are; None if they are less, or more, and are for `feed`."""
        if self._held or len(data) < 4:
            return None
        size = len(data) - 4
        return data[4:] if _length.unpack_from(data) == (size,) and size <= self.bytes_max else None

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
        fields = _unpack(body, ext_hook=_no_extensions)  # its defaults: lists, text as str, text or bytes as keys
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
            if len(body) <= min(most, SKIPPED_BYTES):
                check_all_there(body)
                return _decode(body)
            count = elements_claimed(body, most)
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
    hello = _decode_opening(body, Hello, (int, bytes, bytes, bytes), (bytes,))
    if not isinstance(hello, Hello):
        raise ProtocolError("the client's first frame is no hello")
    if len(hello.session_id) != 16 or len(hello.nonce) != 16:
        raise ProtocolError("a hello carries a session id and a nonce of 16 bytes each")
    if len(hello.process) not in {0, 16}:
        raise ProtocolError("a hello names its process by 16 bytes, or not at all")
    return hello


def encode_welcome(welcome: Welcome) -> bytes:
    """A welcome as a frame."""
    return _frame(_pack((MAGIC, *welcome[:-1])))  # all but `resumed`


def decode_welcome(body: memoryview | bytes) -> Welcome | Sorry:
    """What a server answered to our hello."""
    said = _decode_opening(body, Welcome, (int, str, int, int, bytes), (dict,))
    if isinstance(said, Welcome):
        known = {name: most for name, most in said.limits.items() if type(name) is str and type(most) in (int, float)}
        return said._replace(limits=known)
    return cast("Sorry", said)


def encode_sorry(sorry: Sorry) -> bytes:
    """A refusal as a frame."""
    return _frame(_pack((SORRY, *sorry)))


def _decode_opening(
    body: memoryview | bytes, kind: type[Any], types: tuple[type, ...], optional: tuple[type, ...] = ()
) -> Any:
    fields = _decode_counted(body, OPENING_ELEMENTS_MAX)
    if fields is None:
        raise ProtocolError(f"the peer's {kind.__name__.lower()} is not one of this protocol: it holds too much")
    sorry = _sorry(fields)
    if sorry is not None:
        return sorry
    del fields[1 + len(types) + len(optional) :]  # what later releases have added
    given = tuple(map(type, fields[1:]))
    if fields[0] != MAGIC or len(given) < len(types) or given != (*types, *optional)[: len(given)]:
        if fields[0] == MAGIC:
            _check_version(fields, kind)
        raise ProtocolError(f"the peer's {kind.__name__.lower()} is not one of this protocol")
    return kind(*fields[1:])


def _check_version(fields: list[Any], kind: type[Any]) -> None:
    """Say of an opening in another shape whether it is that of another version.

    Whatever a later version changes, a hello begins with its version, and a greeting with its oldest and its newest.
    """
    versions = fields[1:2] if kind is Hello else fields[1:3] if kind is Greeting else []
    if (
        versions
        and all(type(version) is int for version in versions)
        and not (versions[0] <= VERSION and versions[-1] >= VERSION_MIN)
    ):
        raise ProtocolError(other_version(versions[0], versions[-1], server=kind is Greeting))


def other_version(oldest: int, newest: int, *, server: bool) -> str:
    """What to say to, or of, a peer that speaks none of our versions; `server` if it is one, and we the client."""
    theirs = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    ours = f"version {VERSION}" if VERSION_MIN == VERSION else f"versions {VERSION_MIN} to {VERSION}"
    if server:
        said = f"this client speaks {ours} of the protocol, the server {theirs}"
    else:
        said = f"this server speaks {ours} of the protocol, the client {theirs}"
    behind = "client" if server == (oldest > VERSION) else "server"
    return f"{said}: upgrade the {behind}, or install the same release of rdzv on both sides"


def _sorry(fields: list[Any]) -> Sorry | None:
    if fields[0] == SORRY and len(fields) >= 3 and type(fields[1]) is str and type(fields[2]) is str:
        return Sorry(fields[1], printable(fields[2]))
    return None


# ----------------------------------------------------------------------------------------------------- messages


def encode_request(request_id: int, acknowledged: int, request: Request[Any]) -> bytes:
    """A request as a frame.

    Raises:
        StoreUsageError: A field is not of its type, so that the server would take us for a stranger and hang up.
    """
    layout = LAYOUT_OF.get(type(request))
    if layout is None:
        raise StoreUsageError(f"{shown(request)} is no request")
    if not layout.plain or tuple(map(type, fields := layout.fields(request))) not in layout.plain:
        layout.verify(request)  # before an encoder stumbles over it
        fields = layout.fields(request)
    body = _pack((layout.code, request_id, acknowledged, *fields))
    return _length.pack(len(body)) + body


def elements_max(operations_max: int) -> int:
    """How many elements a request may hold, which leaves room to go past `operations_max` and be told so."""
    return 1000 + ELEMENTS_PER_OPERATION * operations_max


def decode_request(body: memoryview | bytes, elements_max: int = 2**32) -> tuple[int, int, Request[Any]] | Bye:
    """A client's frame: the request's id, what it acknowledges, and the request; or its farewell.

    A request that holds more than `elements_max` elements is not decoded: what stands for it is `Excessive`.
    """
    fields = _decode(body) if len(body) <= UNCOUNTED_BYTES else _decode_counted(body, elements_max)
    if fields is None:
        return _excessive(body, elements_max)
    code = fields[0]
    layout = REQUESTS.get(code) if type(code) is int else None
    if layout is None:
        return _decode_unknown(fields)
    _check_numbers(fields)
    try:
        return fields[1], fields[2], layout.build(fields[3:])
    except UnknownWord as error:
        return fields[1], fields[2], Unknown(what=str(error))


def _decode_unknown(fields: list[Any]) -> tuple[int, int, Request[Any]] | Bye:
    """A farewell, or what stands for a request that only later releases know."""
    code = fields[0]
    if code == BYE:
        return _decode_bye(fields)
    if type(code) is not int:
        raise ProtocolError(f"a frame has the code {shown(code)}, which no request has")
    _check_numbers(fields)
    return fields[1], fields[2], Unknown(what=f"request {code}")


def decode_request_in_steps(
    body: memoryview | bytes, *, elements_max: int
) -> Generator[None, None, tuple[int, int, Request[Any]] | Bye]:
    """Do what `decode_request` does, pausing after every millisecond or so: thousands of conditions take a hundred."""
    try:
        count = yield from count_elements(body, elements_max)
    except ValueError as error:
        raise ProtocolError(f"a frame is not msgpack, or none of ours: {error}") from None
    if count > elements_max:
        return _excessive(body, elements_max)
    fields = _decode(body)
    yield
    layout = REQUESTS.get(fields[0]) if type(fields[0]) is int else None
    if layout is None:
        return decode_request(body)
    _check_numbers(fields)
    try:
        return fields[1], fields[2], (yield from layout.build_in_steps(fields[3:]))
    except UnknownWord as error:
        return fields[1], fields[2], Unknown(what=str(error))


def _excessive(body: memoryview | bytes, elements_max: int) -> tuple[int, int, Request[Any]]:
    """What stands for a request that holds too much to be decoded."""
    return *_numbers_of(body), Excessive(elements_max=elements_max)


def _check_numbers(fields: list[Any]) -> None:
    """Refuse a request that does not begin with its id, and what it acknowledges."""
    if len(fields) < 3 or type(fields[1]) is not int or type(fields[2]) is not int or fields[1] < 1:
        raise ProtocolError("a request does not begin with its code, its id and what it acknowledges")
    if fields[1] > NUMBER_MAX or fields[2] > NUMBER_MAX:
        raise ProtocolError(f"request {fields[1]} acknowledges {fields[2]}; no number of a request passes {NUMBER_MAX}")


def _numbers_of(body: memoryview | bytes) -> tuple[int, int]:
    """The same of a request that is not looked into further."""
    # Its array's length, and three numbers of up to nine bytes.
    start = msgpack.Unpacker(max_buffer_size=64, max_array_len=0, max_map_len=0, ext_hook=_no_extensions)
    start.feed(body[:64])
    try:
        start.read_array_header()
        numbers = [start.unpack() for _ in range(3)]
        _check_numbers(numbers)
    except ProtocolError:
        raise
    except Exception as error:  # what msgpack raises for garbage, or because 64 bytes did not hold them
        raise ProtocolError("a request does not begin with its code, its id and what it acknowledges") from error
    return numbers[1], numbers[2]


def encode_response(request_id: int, response: Response) -> bytes:
    """A response as a frame."""
    layout = LAYOUT_OF[type(response)]
    body = _pack((layout.code, request_id) + layout.fields(response))  # noqa: RUF005 - a list would be made first
    return _length.pack(len(body)) + body


def decode_server_frame(body: memoryview | bytes) -> Reply | Events | Lagged | Bye | Sorry:
    """A server's frame."""
    fields = _decode(body)
    code = fields[0]
    if type(code) is int and code in RESPONSES and len(fields) >= 2 and type(fields[1]) is int:
        return Reply(fields[1], RESPONSES[code].build(fields[2:]))
    if code == BYE:
        return _decode_bye(fields)
    if code == SORRY and (sorry := _sorry(fields)) is not None:
        return sorry
    if len(fields) < 2 or type(code) is not int or type(fields[1]) is not int:
        raise ProtocolError("a response does not begin with its code and the id of its request")
    if code == EVENTS:
        if len(fields) < 3 or type(fields[2]) is not list:
            raise ProtocolError("a frame of events has no list of events")
        return Events(fields[1], tuple([event for event in map(event_from, fields[2]) if event is not None]))
    if code == LAGGED:
        if len(fields) < 3 or type(fields[2]) is not int:
            raise ProtocolError("a lagging watch is reported without a revision")
        return Lagged(fields[1], fields[2])
    if code in PUSHES:
        return Events(fields[1], ())
    raise ProtocolError(f"a frame has the code {code!r}, which no response has")


def encode_events(events: tuple[Event, ...]) -> bytes:
    """The part of an events frame that is the same for every watch; `frame_events` makes frames of it."""
    return _pack([event_to(event) for event in events])


def decode_events(encoded: bytes) -> tuple[Event, ...]:
    """What `encode_events` made, back again."""
    events = tuple(map(event_from, _decode(encoded)))
    if None in events:
        raise ProtocolError("an event is of a kind that only later releases know")
    return cast("tuple[Event, ...]", events)


def frame_events(watch_id: int, encoded: bytes) -> bytes:
    """A frame of events for one watch, from what `encode_events` made once for all."""
    return events_head(watch_id, len(encoded)) + encoded


def events_head(watch_id: int, size: int) -> bytes:
    """What comes before events that take `size` bytes encoded, in a frame for one watch."""
    return _EVENTS_HEAD.pack(size + _EVENTS_HEAD.size - 4, 0x93, EVENTS, 0xCF, watch_id)


def encode_lagged(watch_id: int, revision: int) -> bytes:
    """A frame that ends a watch whose reader was too slow."""
    return _frame(_pack((LAGGED, watch_id, revision)))


def encode_bye(reason: str) -> bytes:
    """A farewell as a frame."""
    return _frame(_pack((BYE, reason)))


def _decode_bye(fields: list[Any]) -> Bye:
    if len(fields) < 2 or type(fields[1]) is not str:
        raise ProtocolError("a farewell has no reason")
    return Bye(printable(fields[1]))


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
