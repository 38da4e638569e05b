"""Every message is decoded as it was encoded, by its layout, and other bytes are refused."""

import gc
import re
import tracemalloc
import types
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import messages, when
from store.errors import LimitExceeded, ProtocolError, StoreUsageError
from store.messages import (
    Add,
    CompareAndSet,
    Condition,
    Entry,
    Event,
    Found,
    Get,
    GetMany,
    Guarded,
    List,
    Listing,
    Ping,
    Put,
    Request,
    Response,
    Target,
    Transact,
    TransactionResult,
    UndecodableRequest,
    Wait,
)
from store.protocol import wire
from store.protocol.frames import FrameReader, frame
from store.protocol.wire import Bye, Events, Greeting, Hello, Lagged, Rejection, Reply, Welcome
from store.records import Record
from tests.support.by_hand import entry

REVISIONS = st.integers(0, 2**63 - 1)
OF_TYPES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bytes: st.binary(max_size=20),
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    float: st.floats(0, 1e6),
    type(None): st.none(),
}


def many(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


def of_type(type_: Any) -> st.SearchStrategy[Any]:
    """All values of a field's type, so that no message and no field is forgotten here."""
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return of_type(arguments[1])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if origin is tuple:
        return many(of_type(arguments[0]))
    if origin is dict:
        return st.dictionaries(*map(of_type, arguments), max_size=3)
    if origin is Literal:
        return st.sampled_from(arguments)
    if type_ is Condition:
        kinds = zip(messages.Target, messages._EXPECTED, strict=True)
        return st.one_of(
            *(
                st.builds(Condition, key=OF_TYPES[str].filter(bool), target=st.just(target), expected=of_type(expected))
                for target, expected in kinds
            )
        )
    if issubclass(type_, Record):
        hints = get_type_hints(type_, include_extras=True)
        made = st.builds(type_, **{name: of_type(hints[name]) for name in type_.fields})
        return made.filter(lambda each: each.why_invalid() is None) if hasattr(type_, "why_invalid") else made
    return st.sampled_from(type_) if issubclass(type_, IntEnum) else OF_TYPES[type_]


REQUESTS: st.SearchStrategy[Any] = st.one_of(*map(of_type, messages.REQUESTS.values()))
RESPONSES: st.SearchStrategy[Any] = st.one_of(*map(of_type, messages.RESPONSES.values()))
EVENTS = of_type(Event)


decode_greeting, decode_hello, decode_welcome = (
    partial(wire.decode_opening, kind=kind) for kind in (Greeting, Hello, Welcome)
)


def body_of(frame: bytes) -> bytes:
    (body,) = FrameReader(10**7).feed(frame)
    return bytes(body)


@given(st.integers(1, wire.NUMBER_MAX), st.integers(0, wire.NUMBER_MAX), REQUESTS)
def test_a_request_comes_out_as_it_went_in(request_id: int, acknowledged: int, request: Request[Any]) -> None:
    frame = wire.encode_request(request_id, acknowledged, request)
    assert wire.decode_request(body_of(frame)) == (request_id, acknowledged, request)


@given(st.integers(1, 2**64 - 1), RESPONSES)
def test_a_response_comes_out_as_it_went_in(request_id: int, response: Response) -> None:
    out = wire.decode_server_frame(body_of(wire.encode_response(request_id, response)))
    assert out == Reply(request_id, response)
    if isinstance(response, TransactionResult):  # True == 1, so look again
        assert isinstance(out, Reply)
        assert isinstance(out.response, TransactionResult)
        assert list(map(type, out.response.results)) == list(map(type, response.results))


@given(st.integers(1, 2**64 - 1), many(EVENTS))
def test_events_come_out_as_they_went_in_for_any_watch(watch_id: int, events: tuple[Event, ...]) -> None:
    encoded = wire.encode_events(events)
    frame = wire.events_head(watch_id, len(encoded)) + encoded
    assert wire.decode_server_frame(body_of(frame)) == Events(watch_id, events)


LARGE = bytes(wire.CHUNK_BYTES)


@given(st.integers(1, wire.NUMBER_MAX), RESPONSES, st.lists(st.sampled_from([b"", b"small", LARGE]), max_size=4))
def test_a_shared_encoding_is_read_like_an_individual_one(number: int, response: Response, values: list[bytes]) -> None:
    entries = [entry(f"k{place}", value, 1) for place, value in enumerate(values)]
    for said in (response, Listing(entries=(None, *entries), revision=3), Found(entry=entry("k", LARGE, 1))):
        chunks = wire.encode_shared_body(said)
        frame = wire.response_head(number, sum(map(len, chunks))) + b"".join(chunks)
        assert wire.decode_server_frame(body_of(frame)) == Reply(number, said)
    events = tuple(entry.event for entry in entries)
    chunks = wire.encode_shared_body(events)
    frame = wire.events_head(number, sum(map(len, chunks))) + b"".join(chunks)
    assert wire.decode_server_frame(body_of(frame)) == Events(number, events)
    assert [chunk for chunk in chunks if chunk is LARGE] == [value for value in values if value is LARGE], (
        "as it stands"
    )


def test_the_handshake_comes_out_as_it_went_in() -> None:
    for said in (
        Greeting(1, 2, "store", b"n" * 16, token_wanted=True),
        Greeting(1, 1, "store", b"n" * 16, token_wanted=True, generation=3),
        Hello(1, b"s" * 16, b"n" * 16, b"proof"),
        Hello(1, b"s" * 16, b"n" * 16, b"proof", b"p" * 16, 4),
        Welcome(3, "10.0.0.1", 7, 1000, b"proof"),
    ):
        body = body_of(wire.encode_opening(said))
        assert wire.decode_opening(body, type(said)) == said
        if getattr(said, "generation", None) == 1:  # left out, so that the bytes are those of earlier releases
            assert len(msgpack.unpackb(body)[1]) == len(tuple(said)) - 1  # type: ignore[arg-type]


def test_a_refusal_is_understood_wherever_it_comes() -> None:
    sorry = Rejection("limit", "full")
    body = body_of(wire.encode_rejection(sorry))
    for decode in (decode_greeting, decode_welcome, wire.decode_server_frame):
        assert decode(body) == sorry


def test_farewells_and_lagging_watches_come_out_as_they_went_in() -> None:
    bye = body_of(wire.encode_bye("done"))
    assert wire.decode_request(bye) == wire.decode_server_frame(bye) == Bye("done")
    assert wire.decode_server_frame(body_of(wire.encode_lagged(5, 7))) == Lagged(5, 7)


@given(st.lists(st.binary(max_size=30), max_size=8), st.data())
def test_frames_come_out_whole_however_the_bytes_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body) for body in bodies)
    reader, out, at = FrameReader(30), list[bytes](), 0
    while at < len(stream):
        size = data.draw(st.integers(1, 12))
        out += map(bytes, reader.feed(stream[at : at + size]))
        at += size
    assert out == bodies
    assert not reader.held_bytes


def test_how_much_has_come_of_a_frame_is_known() -> None:
    reader = FrameReader(100)
    seen = []
    for piece in (b"", b"\0\0", b"\0\2a", b"b"):
        list(reader.feed(piece))
        seen.append(reader.held_bytes)
    assert seen == [0, 2, 5, 0]


def test_a_large_frame_in_small_pieces_is_put_together_once() -> None:
    """Regression: it was copied whole with every piece that arrived."""
    reader = FrameReader(10**6)
    whole = frame(bytes(1000))
    held = []
    for at in range(0, len(whole) - 4, 10):
        list(reader.feed(whole[at : at + 10]))
        held.append(id(reader._held))
    assert len(set(held)) == 1
    assert [len(body) for body in reader.feed(whole[at + 10 :])] == [1000]


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (bytes.fromhex("16030100f8010000"), "a TLS hello on a port without TLS"),
        (bytes.fromhex("1503030002020a"), "a TLS record on a connection without TLS"),
        (b"GET / HTTP/1.1\r\n", "HTTP on a port"),
        (b"HTTP/1.1 400 Bad Request", "HTTP on a port"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "a frame of .* bytes is announced"),
    ],
)
def test_strangers_are_recognized(start: bytes, name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        list(FrameReader(64 * 1024 * 1024).feed(start))


def test_a_message_that_the_peer_would_not_take_is_not_sent() -> None:
    put = Put("k", bytes(100))
    size = len(wire.encode_request(1, 0, put)) - 4
    assert wire.encode_request(1, 0, put, bytes_max=size)
    with pytest.raises(LimitExceeded, match=rf"has {size} bytes; the server takes frames of {size - 1} "):
        wire.encode_request(1, 0, put, bytes_max=size - 1)


def packed(*fields: object) -> bytes:
    return bytes(msgpack.packb(fields))


def asked(code: object, *rest: object) -> bytes:
    """Encode a request: the ids that come first, its code, and its fields."""
    return packed(*rest[:2], (code, *rest[2:]))


def answered(code: object, *rest: object) -> bytes:
    """Encode a response: the id that comes first, its code, and its fields."""
    return packed(*rest[:1], (code, *rest[1:]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91",
        packed()[:0] + b"\x90",
        packed(1, 2) + b"\0",
        msgpack.packb({"a": 1}),
        msgpack.packb("rdzv"),
        b"\x91\xa1\xff",  # no UTF-8
        msgpack.packb([1, {3: 4}]),
        msgpack.packb([1, msgpack.ExtType(5, b"x")]),
        b"\x91" * 2000,
    ],
)
def test_a_body_that_is_no_filled_array_is_refused(body: bytes) -> None:
    for decode in (decode_greeting, decode_hello, decode_welcome, wire.decode_request, wire.decode_server_frame):
        with pytest.raises(ProtocolError):
            decode(body)


REQUEST_DEFECTS = [
    ("no code", ("put", 1, 0, "a", b"", None, None)),
    ("a bool for a code", (True, 1, 0, "a", b"", None, None)),
    ("no id", (20,)),
    ("nothing acknowledged", (20, 1)),
    ("an id of 0", (20, 0, 0)),
    ("a bool for an id", (20, True, 0)),
    ("text acknowledged", (20, 1, "0")),
    ("an id that no journal can keep", (20, wire.NUMBER_MAX + 1, 0)),
    ("an acknowledgement that no journal can keep", (20, 1, wire.NUMBER_MAX + 1)),
    ("a field too few", (2, 1, 0)),
    ("bytes for text", (2, 1, 0, b"a")),
    ("text for bytes", (5, 1, 0, "a", "b", None)),
    ("a float for an int", (4, 1, 0, "a", 1.0, None)),
    ("a bool for an int", (4, 1, 0, "a", True, None)),
    ("an int for a bool", (7, 1, 0, "a", 1)),
    ("text for seconds", (14, 1, 0, "1", None)),
    ("a bool for seconds", (14, 1, 0, True, None)),
    ("text for an array", (6, 1, 0, "ab")),
    ("an int in an array of text", (6, 1, 0, ["a", 1])),
    ("no condition", (13, 1, 0, ["a"], [2, "a"])),
    ("a short condition", (13, 1, 0, [["a", 3]], [2, "a"])),
    ("a condition on bytes", (13, 1, 0, [[b"a", 3, True]], [2, "a"])),
    ("a condition with a bool for a target", (13, 1, 0, [["a", True, 1]], [2, "a"])),
    ("existence as a number", (13, 1, 0, [["a", 3, 1]], [2, "a"])),
    ("a revision as a bool", (13, 1, 0, [["a", 0, True]], [2, "a"])),
    ("guarding nothing", (13, 1, 0, [], [])),
    ("guarding what is no message", (13, 1, 0, [], "get")),
]


@pytest.mark.parametrize(("name", "fields"), REQUEST_DEFECTS, ids=[name for name, _ in REQUEST_DEFECTS])
def test_invalid_requests_are_refused(name: str, fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_request(asked(*fields))
    assert ("fields, not" in str(caught.value)) is name.startswith(("a field too", "a short")), (
        "refused for another reason"
    )


@pytest.mark.parametrize(
    "fields",
    [
        (13, 1, 0, [], [13, [], [2, "a"]]),
        (13, 1, 0, [], [18, "a", None, False]),
        (11, 1, 0, [], [[7, "a", False]], []),
        (11, 1, 0, [["a", 9, True]], [], []),
        (99, 1, 0),
    ],
    ids=["guarding a guard", "guarding a watch", "a list in a transaction", "another condition", "another request"],
)
def test_requests_of_a_later_release_get_an_answer(fields: tuple[Any, ...]) -> None:
    decoded = wire.decode_request(asked(*fields))
    assert not isinstance(decoded, Bye)
    assert type(decoded[2]) is UndecodableRequest


RESPONSE_DEFECTS: list[tuple[str, tuple[Any, ...]]] = [
    ("no code", ("pong", 1, 5)),
    ("no id", (75,)),
    ("text for an id", (75, "1", 5)),
    ("a request", (2, 1, "a")),
    ("an entry of two", (65, 1, ["a", b""])),
    ("an entry of text", (65, 1, ["a", "", 1, 1, None])),
    ("text for a result", (70, 1, True, ["x"], 5)),
    ("a list for a kind of failure", (77, 1, [], "x")),
    ("no figures", (76, 1, [])),
    ("figures of figures", (76, 1, {"a": {}})),
    ("figures named by bytes", (76, 1, {b"a": 1})),
    ("a time among the figures", (76, 1, {"a": msgpack.Timestamp(1, 2)})),
    ("no list of events", (126, 1, "x")),
    ("a put with text", (126, 1, [["put", 1, "a", "v"]])),
    ("an event without a revision", (126, 1, [["put"]])),
    ("lagging without a revision", (125, 1)),
    ("lagging behind text", (125, 1, "x")),
]


@pytest.mark.parametrize(
    "fields", [fields for _, fields in RESPONSE_DEFECTS], ids=[name for name, _ in RESPONSE_DEFECTS]
)
def test_invalid_responses_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_server_frame(answered(*fields))


@pytest.mark.parametrize(
    "fields", [("bye",), ("bye", 5), ("sorry", "limit"), ("sorry", 1, "x"), ("hi", "x"), (1, []), (1, 1)]
)
def test_invalid_farewells_and_refusals_are_refused(fields: tuple[Any, ...]) -> None:
    for decode in (wire.decode_request, wire.decode_server_frame):
        with pytest.raises(ProtocolError):
            decode(packed(*fields))


@pytest.mark.parametrize(
    ("decode", "fields"),
    [
        (decode_greeting, ("rdzw", (1, 1, "s", b"", False))),
        (decode_greeting, ("rdzv", (1, 1, "s", b""))),
        (decode_greeting, ("rdzv", (True, 1, "s", b"", False))),
        (decode_greeting, ("sorry", 1, "x")),
        (decode_hello, ("sorry", "limit", "x")),
        (decode_hello, ("rdzv", (1, b"s" * 15, b"n" * 16, b""))),
        (decode_hello, ("rdzv", (1, b"s" * 16, b"n" * 17, b""))),
        (decode_hello, ("rdzv", (1, "s" * 16, b"n" * 16, b""))),
        (decode_welcome, ("rdzv", (True, "a", 1, 1, b""))),
        (decode_welcome, ("rdzv", (1, "a", 1, 1, b"", True))),
    ],
)
def test_invalid_openings_are_refused(decode: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(packed(*fields))


@pytest.mark.parametrize("absurd", ["k" * 10**6, b"v" * 10**6, [0] * 10**6, {"k": "v" * 10**6}, 1.5, None, True])
def test_errors_stay_short_for_any_input(absurd: object) -> None:
    for decode, fields in (
        (wire.decode_request, (absurd, 1, (20,))),
        (wire.decode_request, (1, 0, (absurd,))),
        (wire.decode_request, (1, 0, (4, "a", absurd if type(absurd) is not int else "x", None))),
        (wire.decode_server_frame, (1, (65, absurd if absurd is not None else "x"))),
    ):
        with pytest.raises(ProtocolError) as caught:
            decode(packed(*fields))
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("depth", [900, 1000, 1020])
def test_deep_nesting_is_no_more_than_a_protocol_error(depth: int) -> None:
    """Formatting the received value ended in RecursionError."""
    deep = b"\x91" * depth + b"\xc0"
    with pytest.raises(ProtocolError, match="cannot have amount="):
        wire.decode_request(b"\x93\x01\x00\x94\x04\xa1k" + deep + b"\xc0")


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (Put("a", "text"), "Put cannot have value='text'"),  # type: ignore[arg-type]
        (Put("a", b"", lease=True), "Put cannot have lease=True"),
        (Add("a", 1.5), "Add cannot have amount=1.5"),  # type: ignore[arg-type]
        (GetMany(keys=("a", 5)), "GetMany cannot have keys=['a', 5]"),  # type: ignore[arg-type]
        (Wait(keys="abc"), "Wait cannot have keys='abc'"),  # type: ignore[arg-type]
        (Transact(when=(), then=(Put("a", "text"),)), "Put cannot have value='text'"),  # type: ignore[arg-type]
        (Transact(when=(), then=(List(prefix=""),)), "request 7"),  # type: ignore[arg-type]
        (
            Guarded(when=(Condition(key="a", target=Target.VALUE, expected="x"),), request=Get("a")),  # type: ignore[arg-type]
            "Condition cannot have expected='x'",
        ),
        (Guarded(when=(), request=Ping()), "request 20"),
        (Guarded(when=(), request=Put("a", "text")), "Put cannot have value='text'"),  # type: ignore[arg-type]
        (
            CompareAndSet(key="a", value=b""),
            "CompareAndSet of 'a' takes exactly one of expected_revision and expected_value",
        ),
        ("put", "'put' is no request"),
    ],
)
def test_messages_that_the_server_would_not_accept_are_not_sent(request_: Any, complaint: str) -> None:
    """Regression: such a message was sent, and cost the client its connection for good."""
    with pytest.raises(StoreUsageError, match=f"^{re.escape(complaint)}$"):
        wire.encode_request(1, 0, request_)


@given(REQUESTS)
def test_the_client_accepts_the_same_arguments_as_the_server(request: Request[Any]) -> None:
    assert type(request).read(msgpack.unpackb(msgpack.packb(request), use_list=False)) == request.check() == request


def test_conditions_that_python_takes_for_equal_are_not() -> None:
    """1 equals True, but a revision is not an existence; the cached encoding of one must not be used for the other."""
    for condition in (when.mod_revision("k") == 1, when.exists("k"), when.create_revision("k") == 1):
        request = Guarded(when=(condition,), request=Get("k"))
        for _ in range(2):
            arrived = wire.decode_request(wire.encode_request(1, 0, request)[4:])
            assert arrived == (1, 0, request)
            assert type(cast("Any", arrived)[2].when[0].expected) is type(condition.expected)


def test_a_garbage_collection_in_the_middle_of_a_frame_leaves_it_whole() -> None:
    """A garbage collector may run while a record is packed; destructors may pack records, or let a thread do so."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            wire.encode_bye("in the middle")

    hello = wire.Hello(1, bytes(30), bytes(16), b"", bytes(8))
    whole = wire.encode_opening(hello)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(500):
            Garbage()
            assert wire.encode_opening(hello) == whole
    finally:
        gc.set_threshold(*before)


def test_a_large_message_leaves_nothing_behind() -> None:
    """A client that had once put 32 MiB kept 64 MiB for good: a packer keeps memory for its largest record."""
    wire.encode_bye("a packer is there")
    tracemalloc.start()
    try:
        wire.encode_response(1, Found(Entry(key="k", value=bytes(4 << 20), create_revision=1, mod_revision=1)))
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
