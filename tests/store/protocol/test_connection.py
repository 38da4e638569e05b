"""Two ends of a conversation whose bytes are carried by hand, in any pieces, through any number of connections."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import (
    AuthenticationError,
    ConditionFailed,
    ConnectionLost,
    LeaseNotFound,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreUsageError,
    WatchCompacted,
)
from store.messages import (
    Add,
    Added,
    Entry,
    Failed,
    FailureKind,
    Found,
    Get,
    GetMany,
    Grant,
    Ping,
    Pong,
    Put,
    TooLargeRequest,
    Wait,
    Written,
)
from store.protocol import wire
from store.protocol.connection import ClientConnection, ServerConnection, error_of
from store.protocol.frames import FrameReader, frame
from store.protocol.wire import VERSION, Bye, Greeting, Hello, Rejection, Reply, Welcome
from tests.support.by_hand import Post, Town
from tests.support.limits import limits_with


def server(*, token: bytes | None = None, store_id: str = "store-1", **limits: Any) -> ServerConnection:
    return ServerConnection(store_id=store_id, nonce=b"n" * 16, token=token, limits=limits_with(**limits))


def client(*, token: bytes | None = None) -> ClientConnection:
    made = ClientConnection(session_id=b"s" * 16, token=token, name="tcp://there")
    made.start_connection(nonce=b"m" * 16)
    return made


def greeted(**limits: Any) -> ServerConnection:
    """Return a server's side that has received a client's hello."""
    made = server(**limits)
    (hello,) = made.receive(wire.encode_opening(Hello(VERSION, b"s" * 16, b"m" * 16, b"")))
    assert isinstance(hello, Hello)
    return made


def welcomed(
    *, session: int = 1, frame_bytes_max: int = 10**6, made: ClientConnection | None = None
) -> ClientConnection:
    """Return a client's side that has received its welcome."""
    made = made or client()
    list(made.receive(wire.encode_opening(Greeting(VERSION, VERSION, "store-1", b"n" * 16, token_wanted=False))))
    list(made.receive(wire.encode_opening(Welcome(session, "10.0.0.1", 0, frame_bytes_max, b""))))
    return made


def received(connection: ServerConnection, data: bytes) -> list[Any]:
    """Return the items of these bytes, without the pauses."""
    return [item for item in connection.receive(data) if item is not None]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_large_answer_may_come_together_with_the_welcome(pieces: int) -> None:
    """For example the answer to a watch that was requested with the hello. The client hung up: before the welcome it
    read short frames only.
    """
    made = client()
    made.register_request(Get("a"), None)
    list(made.receive(wire.encode_opening(Greeting(VERSION, VERSION, "store-1", b"n" * 16, token_wanted=False))))
    entry = Entry(key="a", value=bytes(10_000), create_revision=1, mod_revision=1, lease=None)
    data = wire.encode_opening(Welcome(1, "10.0.0.1", 0, 10**6, b"")) + wire.encode_response(1, Found(entry=entry))
    size = -(-len(data) // pieces)
    items = [item for at in range(0, len(data), size) for item in made.receive(data[at : at + size])]
    assert [type(item) for item in items] == [Welcome, Reply]


def test_an_opening_of_a_later_version_in_another_shape_is_refused_by_its_version() -> None:
    """Regression: the error was "not one of this protocol", which names no remedy."""
    hello = frame(msgpack.packb(["rdzv", [2, {"session": b"s" * 16}, [1, 2]]]))
    with pytest.raises(
        ProtocolError, match=r"this server speaks version 1 .* the client version 2: upgrade the server"
    ):
        list(server().receive(hello))
    greeting = frame(msgpack.packb(["rdzv", [2, 3, {"store": "s"}]]))
    with pytest.raises(ProtocolError, match=r"this client speaks version 1 .* versions 2 to 3: upgrade the client"):
        list(client().receive(greeting))
    for no_version in (["rdzv", ["2"]], ["rdzv", [True, None]], ["rdzv", [1, 1]], ["rdzv", 1]):
        with pytest.raises(ProtocolError, match="is not one of this protocol"):
            list(server().receive(frame(msgpack.packb(no_version))))


def test_a_request_of_more_elements_than_any_may_hold_is_known_by_its_id_and_not_looked_into() -> None:
    connection = greeted(operations_max=10)
    asked = wire.encode_request(5, 4, GetMany(keys=("long",) * 1300))
    assert received(connection, asked) == [(5, 4, TooLargeRequest(elements_max=1120))]
    asked = wire.encode_request(6, 4, GetMany(keys=("long",) * 1100))
    assert received(connection, asked) == [(6, 4, GetMany(keys=("long",) * 1100))]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("authentication", AuthenticationError),
        ("limit", LimitExceeded),
        ("protocol", ProtocolError),
        ("?", LimitExceeded),  # of a later release: the client tries again
    ],
)
def test_a_refusal_says_why_at_any_time(kind: str, error: type[StoreError]) -> None:
    sorry = wire.encode_rejection(Rejection(kind, "no room"))
    at_once, after_the_greeting, later = client(), client(), welcomed()
    greeting = Greeting(VERSION, VERSION, "store-1", b"n" * 16, token_wanted=False)
    list(after_the_greeting.receive(wire.encode_opening(greeting)))
    for connection in (at_once, after_the_greeting, later):
        with pytest.raises(error, match=r"^tcp://there refused the connection: no room$"):
            list(connection.receive(sorry))


def test_a_single_request_is_returned_at_once() -> None:
    conversation = greeted()
    first, second, third = (wire.encode_request(id, 0, Ping()) for id in (1, 2, 3))
    assert conversation.decode_single_request(first) == (1, 0, Ping())
    for several in (second + third, second[:5], b"", wire.encode_bye("done")):
        assert conversation.decode_single_request(several) is None
    assert list(conversation.receive(second + third[:5])) == [(2, 0, Ping())]
    assert conversation.decode_single_request(third[5:]) is None  # it ends a frame that had begun
    assert list(conversation.receive(third[5:])) == [(3, 0, Ping())]
    with pytest.raises(ProtocolError, match="ids count upwards"):
        conversation.decode_single_request(third)


def test_a_request_that_comes_alone_may_be_as_long_as_the_limits_say() -> None:
    limited = greeted(frame_bytes_max=5000, value_bytes_max=900)
    assert limited.decode_single_request(wire.encode_request(1, 0, Put("k", bytes(6000)))) is None  # `receive` says why
    assert limited.decode_single_request(wire.encode_request(2, 0, Put("k", b"v"))) == (2, 0, Put("k", b"v"))


def acknowledged(frame: bytes) -> int:
    """Return the id up to which a request acknowledges replies."""
    (body,) = FrameReader(10**6).feed(frame)
    decoded = wire.decode_request(body)
    assert not isinstance(decoded, Bye)
    return decoded[1]


def test_a_single_answer_is_returned_at_once() -> None:
    conversation = welcomed()
    asked, put = conversation.register_request(Ping(), None), conversation.register_request(Put("k", b""), None)
    for item in (asked, put):
        conversation.encode(item)
    pong, written = wire.encode_response(1, Pong(revision=7)), wire.encode_response(2, Written(revision=8))
    for other in (written, pong + written, pong[:5], wire.encode_lagged(1, 3)):
        assert conversation.decode_exact_frame(other, asked) is None
    assert conversation.decode_exact_frame(pong, asked) == Pong(revision=7)
    assert conversation.decode_exact_frame(written, put) == Written(revision=8)
    assert not conversation.in_flight
    later = conversation.register_request(Ping(), None)
    assert wire.decode_request(conversation.encode(later)[4:]) == (3, 2, Ping())  # the put needs no reply any more


def test_a_session_is_resumed_only_if_it_is_the_one_of_the_last_welcome() -> None:
    connection = welcomed(session=1)
    for session, resumed in ((1, True), (2, False), (2, True), (1, False)):
        connection.end_connection()
        connection.start_connection(nonce=b"o" * 16)
        welcomed(session=session, made=connection)
        assert connection.resumed is resumed


@pytest.mark.parametrize(
    ("request_", "sent", "is_welcomed", "kept"),
    [
        (Put("a", b""), True, True, (True, False, False)),
        (Put("a", b""), True, False, (False, False, False)),
        (Put("a", b""), False, True, (False, False, False)),
        (Grant(ttl=5.0), True, True, (True, True, True)),  # until its lease can be revoked
        (Grant(ttl=5.0), True, False, (True, True, True)),
        (Grant(ttl=5.0), False, True, (False, False, False)),
    ],
)
def test_what_is_kept_of_a_request_that_no_caller_awaits(
    request_: Any, sent: bool, is_welcomed: bool, kept: tuple[bool, bool, bool]
) -> None:
    connection = welcomed()
    item, awaited = (connection.register_request(request, None) for request in (request_, Grant(ttl=6.0)))
    if sent:
        connection.encode(item)
    if not is_welcomed:
        connection.end_connection()
    connection.abandon_request(item)
    at_once = item.request_id in connection.in_flight, connection.abandoned_grants == [item]
    connection.end_connection()
    assert (*at_once, item.request_id in connection.in_flight) == kept
    assert awaited.request_id in connection.in_flight


def test_a_request_larger_than_the_server_takes_is_refused_and_forgotten() -> None:
    connection = welcomed(frame_bytes_max=1000)
    item = connection.register_request(Put("a", bytes(1000)), None)
    with pytest.raises(LimitExceeded, match="frame_bytes_max"):
        connection.encode(item)
    assert connection.in_flight == {}
    assert acknowledged(connection.encode(connection.register_request(Ping(), None))) == 1


@pytest.mark.parametrize(
    "request_",
    [
        Put("a", "text"),  # type: ignore[arg-type]
        Put("\ud800", b""),
        Add("a", 2**64),
        Put("a", memoryview(b"abcd")[::2]),  # type: ignore[arg-type]
        Wait(keys=("\ud800",)),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(request_: Any) -> None:
    connection = welcomed()
    item = connection.register_request(request_, None)
    try:
        connection.encode(item)
    except StoreUsageError:
        assert connection.in_flight == {}
        assert not item.sent
        assert acknowledged(connection.encode(connection.register_request(Ping(), None))) == 1
    else:
        assert isinstance(request_.value, memoryview)  # some releases of msgpack take it


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.USAGE, StoreUsageError),
        (FailureKind.LIMIT, LimitExceeded),
        (FailureKind.LEASE, LeaseNotFound),
        (FailureKind.CONDITION, ConditionFailed),
        (FailureKind.COMPACTED, WatchCompacted),
        (FailureKind.FORGOTTEN, ConnectionLost),
    ],
)
def test_every_kind_of_failure_is_an_error_with_its_message(kind: FailureKind, error: type[StoreError]) -> None:
    made = error_of(Failed(kind=kind, message="so it is"))
    assert type(made) is error
    assert str(made) == "so it is"
    if isinstance(made, ConnectionLost):
        assert made.maybe_applied


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_the_connection_may_be_cut_after_any_byte(cuts: list[int]) -> None:
    """One request; the connections end after 0, 1, 2, ... bytes of the server, until one carries the whole answer."""
    town, post = Town(), Post()
    item = post.ask(Add("n", 1))
    for count in cuts:
        link = post.dial(town)
        while count and (link.to_server or link.to_client) and item.request_id not in post.outcomes:
            link.carry_to_server()
            carried = min(count, len(link.to_client))
            post.carry_to_client(carried)
            count -= carried
        link.carry_to_server()
        post.cut()
    post.meet(town)
    assert post.outcomes[item.request_id] == Added(value=1, revision=1)
