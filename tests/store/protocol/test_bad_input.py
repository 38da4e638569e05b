"""Bytes that make no sense end in one of four errors, and hold no memory (S7).

By default a few seconds' worth of inputs. For a million of each kind, switch the time limits of tests off::

    RDZV_FUZZ_INPUTS=1000000 pytest --timeout=0 -o faulthandler_timeout=0 tests/store/protocol/test_bad_input.py

Each run has a fresh seed, which a failure names; `RDZV_FUZZ_SEED` runs it again.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import (
    Add,
    Append,
    AuthenticationError,
    Condition,
    Delete,
    Entry,
    Event,
    Get,
    Grant,
    LimitExceeded,
    Limits,
    ProtocolError,
    Put,
    StoreReplaced,
    TransactionResult,
)
from store.messages import (
    REQUESTS,
    RESPONSES,
    CompareAndSet,
    Failed,
    FailureKind,
    Figures,
    GetMany,
    Guarded,
    Listing,
    Ping,
    Request,
    Response,
    Target,
    Transact,
    Wait,
    Watch,
    Written,
)
from store.protocol import wire
from store.protocol.connection import ClientConnection, ServerConnection
from store.protocol.frames import FrameReader, frame
from store.protocol.wire import VERSION, Bye, Greeting, Hello, Rejection, Welcome
from tests.support.seeds import FRESH

INPUTS = int(os.environ.get("RDZV_FUZZ_INPUTS", "4000"))
SEED = int(os.environ.get("RDZV_FUZZ_SEED", str(FRESH)))
LIMITS = Limits(frame_bytes_max=20_000, value_bytes_max=10_000)
ALLOWED = (ProtocolError, AuthenticationError, LimitExceeded, StoreReplaced)
Connection = ServerConnection | ClientConnection
GREETING = Greeting(VERSION, VERSION, "store-1", b"n" * 16, token_wanted=False)
WELCOME = Welcome(1, "10.0.0.1", 7, LIMITS.frame_bytes_max, b"")
HELLO = Hello(VERSION, b"s" * 16, b"m" * 16, b"")


def new_server() -> ServerConnection:
    return ServerConnection(store_id="store-1", nonce=b"n" * 16, token=None, limits=LIMITS)


def greeted_server() -> ServerConnection:
    connection = new_server()
    list(connection.receive(wire.encode_opening(HELLO)))
    return connection


def wary_server() -> ServerConnection:
    return ServerConnection(store_id="store-1", nonce=b"n" * 16, token=b"secret", limits=LIMITS)


def new_client() -> ClientConnection:
    connection = ClientConnection(session_id=b"s" * 16, token=None, name="there")
    connection.start_connection(nonce=b"m" * 16)
    return connection


def half_way_client() -> ClientConnection:
    connection = new_client()
    list(connection.receive(wire.encode_opening(GREETING)))
    return connection


def welcomed_client() -> ClientConnection:
    connection = half_way_client()
    list(connection.receive(wire.encode_opening(WELCOME)))
    for request in (Put("a", b""), Get("a"), Watch(prefix="")):
        connection.encode(connection.register_request(request, None))
    return connection


def wary_client() -> ClientConnection:
    """Return a client with a token, which knows a store already."""
    connection = ClientConnection(session_id=b"s" * 16, token=b"secret", name="there")
    connection.store_id = "store-1"
    connection.start_connection(nonce=b"m" * 16)
    return connection


ENDS: list[Callable[[], Connection]] = [
    new_server,
    greeted_server,
    wary_server,
    new_client,
    half_way_client,
    welcomed_client,
    wary_client,
]


def feed(connection: Connection, data: bytes) -> str | None:
    """Let a connection read bytes; return its error if it refuses them."""
    try:
        for item in connection.receive(data):
            if isinstance(item, Hello):
                assert isinstance(connection, ServerConnection)
                connection.encode_welcome(session=1, address="10.0.0.1", revision=7)
    except ALLOWED as error:
        message = str(error)
        assert len(message) < 400, "a log line stays one that can be read"
        return message
    held = len(connection._reader._held)
    assert held <= connection._reader.bytes_max + 4
    assert held <= len(data), "what is announced is not what is held"
    return None


@pytest.fixture
def rng() -> random.Random:
    print(f"RDZV_FUZZ_SEED={SEED}")  # pytest shows it if the test fails
    return random.Random(SEED)


def talk(rng: random.Random) -> list[bytes]:
    """Frames that either side might send."""
    requests: list[Request[Any]] = [
        Put("a", rng.randbytes(rng.randrange(40)), ttl=1.5),
        GetMany(keys=("a", "b")),
        CompareAndSet(key="a", value=b"", expected_revision=3),
        Transact(
            when=(Condition(key="a", target=Target.VALUE, expected=b"x"),),
            then=(Add("n", 1), Delete("a"), Append("s", b"y")),
        ),
        Guarded(when=(Condition(key="a", target=Target.EXISTS, expected=True),), request=Wait(keys=("k",))),
        Grant(ttl=3.0, disconnect_ttl=1.0),
        Watch(prefix="run/", start_revision=5),
        Ping(),
    ]
    entry = Entry(key="a", value=b"1", create_revision=1, mod_revision=2, lease=3)
    responses: list[Response] = [
        Written(revision=5),
        Listing(entries=(entry, None), revision=5),
        TransactionResult(succeeded=True, results=(1, True, None, entry), revision=5),
        Failed(kind=FailureKind.LEASE, message="gone"),
        Figures(figures={"keys": 5, "store_id": "x"}),
    ]
    events = (Event(kind="put", revision=5, key="a", value=b"1", create_revision=5), Event(kind="synced", revision=5))
    encoded = wire.encode_events(events)
    return [
        wire.encode_opening(GREETING),
        wire.encode_opening(HELLO),
        wire.encode_opening(WELCOME),
        wire.encode_rejection(Rejection("limit", "full")),
        wire.encode_bye("done"),
        wire.encode_lagged(3, 7),
        wire.events_head(3, len(encoded)) + encoded,
        *(wire.encode_request(number, number - 1, request) for number, request in enumerate(requests, 1)),
        *(wire.encode_response(number, response) for number, response in enumerate(responses, 1)),
    ]


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    """Some of these frames, with a few bytes changed, lost, doubled, or cut off."""
    data = bytearray(b"".join(rng.choices(frames, k=rng.randint(1, 4))))
    for _ in range(rng.randrange(4)):
        at, size = rng.randrange(len(data)), rng.randint(1, 8)
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + size] = rng.randbytes(rng.randint(0, 8))
            case 3:
                data[at:at] = data[at : at + size]
            case 4:
                del data[at : at + size]
        if not data:
            return b""
    return bytes(data[: rng.randint(1, len(data))]) if rng.random() < 0.2 else bytes(data)


def reframed(rng: random.Random, frames: list[bytes]) -> bytes:
    """A frame with a changed body and the right length, so that the body is decoded."""
    body = bytearray(rng.choice(frames)[4:])
    for _ in range(rng.randint(1, 3)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return frame(bytes(body))


def structured(rng: random.Random, depth: int = 0) -> object:
    """Any value that msgpack can encode."""
    atoms: list[object] = [
        None, True, False, 0, 1, -1, 2, 3, 64, 77, 125, 126, 127, 2**32, 2**64 - 1, -(2**63), 1.5, float("nan"),
        "", "a", "rdzv", "sorry", "limit", "é", b"", b"x", b"s" * 16, rng.randrange(256), rng.randbytes(5),
        msgpack.ExtType(5, b"x"), msgpack.Timestamp(5, 6),
    ]  # fmt: skip
    if depth < 4 and rng.random() < (0.9 if depth == 0 else 0.3):
        return [structured(rng, depth + 1) for _ in range(rng.randrange(8))]
    if depth < 3 and rng.random() < 0.05:
        return {rng.choice(["a", "b", 1]): structured(rng, depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice(atoms)


CODES: list[Any] = [*REQUESTS, *RESPONSES, wire.EVENTS, wire.LAGGED, wire.BYE, "rdzv", "sorry"]


def almost_a_message(rng: random.Random) -> object:
    """An array that begins as messages do."""
    message = [rng.choice(CODES), *(structured(rng, 1) for _ in range(rng.randrange(6)))]
    number = rng.randrange(1, 5)
    beginnings: list[list[object]] = [[number, rng.choice([0, 1])], [number], ["rdzv"], ["bye"], ["sorry"], message]
    return [*rng.choice(beginnings), message]


@pytest.mark.parametrize("kind", ["random bytes", "mutated", "reframed", "structured", "almost a message"])
def test_only_four_errors_come_of_bad_input(kind: str, rng: random.Random) -> None:
    """Bad input ends in an error that costs the sender its connection, with one log line."""
    frames = talk(rng)
    refused = 0
    for number in range(INPUTS):
        match kind:
            case "random bytes":
                data = rng.randbytes(rng.randrange(64))
                if rng.random() < 0.5:
                    data = frame(data)
            case "mutated":
                data = mutated(rng, frames)
            case "reframed":
                data = reframed(rng, frames)
            case "structured":
                data = frame(msgpack.packb(structured(rng)))
            case _:
                data = frame(msgpack.packb(almost_a_message(rng)))
        refused += feed(ENDS[number % len(ENDS)](), data) is not None
    assert refused > INPUTS / 10, "most of it is bad, or this tests nothing"


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=20)
)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
STARTS = st.sampled_from([[1, 0], [5, 4], [1], [3], ["rdzv"], ["bye"], []])


@settings(max_examples=max(INPUTS // 20, 1), print_blob=True)
@given(
    st.sampled_from(ENDS), st.lists(st.tuples(STARTS, st.sampled_from(CODES), st.lists(NESTED, max_size=6)), max_size=3)
)
@pytest.mark.in_ci
def test_only_four_errors_come_of_well_formed_nonsense(
    end: Any, said: list[tuple[list[Any], object, list[Any]]]
) -> None:
    """Bad input ends in an error that costs the sender its connection, with one log line."""
    feed(end(), b"".join(frame(msgpack.packb([*start, [code, *fields]])) for start, code, fields in said))


@settings(max_examples=max(INPUTS // 40, 1))
@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(1, 100))
def test_a_reader_of_frames_holds_no_more_than_one(pieces: list[bytes], bytes_max: int) -> None:
    """A half frame and silence hold no more memory than a frame may have."""
    reader = FrameReader(bytes_max)
    received = 0
    for piece in pieces:
        received += len(piece)
        try:
            bodies = list(reader.feed(piece))
        except ProtocolError:
            return
        assert all(len(body) <= bytes_max for body in bodies)
        received -= sum(len(body) + 4 for body in bodies)
        assert len(reader._held) == received <= bytes_max + 3 + 1


@pytest.mark.parametrize(
    "nested", [b"\x91" * 1000 + b"\xc0", b"\x81\xa1k" * 900 + b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_bodies_that_claim_to_be_deep_or_huge_are_refused(nested: bytes) -> None:
    """Such bytes are bad input as well."""
    for end in (greeted_server, welcomed_client):
        for head in (b"\x93\x05\x04\x94\x04\xa1k", b"\x92\x05\x92\x41", b"\x92\x05\x92\x7e", b""):
            assert feed(end(), frame(head + nested)) is not None


def test_a_client_survives_no_more_than_its_server_may_say() -> None:
    """A farewell or a refusal is text, and stays text: nothing received is ever unpickled or evaluated."""
    assert list(welcomed_client().receive(wire.encode_bye("__import__('os')"))) == [Bye("__import__('os')")]
