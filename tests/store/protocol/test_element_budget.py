"""The elements that a body claims to hold are counted without making any of them, and false claims are detected."""

import struct
import tracemalloc
from collections.abc import Callable, Generator
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import ProtocolError
from store.limits import Limits
from store.messages import Put, TooLargeRequest, Transact
from store.protocol import wire
from store.protocol.element_budget import count_elements
from store.protocol.wire import Greeting, Hello, Welcome
from tests.store.protocol.test_wire import REQUESTS

MOST = wire.elements_max(Limits().operations_max)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(1, 100), st.sampled_from([bytes(n) for n in (1, 2, 3, 4, 8, 16)]))
)
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=18) | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=4)
    ),
    max_leaves=30,
)
LONG = [
    *(of * count for of in (b"x", "x", [1], ["x" * 40]) for count in (15, 16, 31, 32, 255, 256, 65_535, 65_536)),
    *({str(key): key for key in range(count)} for count in (15, 16, 65_535, 65_536)),
    *(msgpack.ExtType(5, bytes(count)) for count in (5, 255, 256, 65_535, 65_536)),
]


def elements_claimed(body: bytes, most: int) -> int:
    return cast("int", ended(count_elements(memoryview(body), most)))


def decoded(body: bytes) -> Any:
    return ended(wire.decode_request_in_steps(memoryview(body), elements_max=MOST))


def ended(steps: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def elements(value: Any) -> int:
    """Count the elements of a decoded value in the same way."""
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    if isinstance(value, dict):
        return 1 + sum(1 + elements(inside) for inside in value.values())
    return 1


@given(NESTED, st.integers(1, 50), st.data())
def test_the_count_is_that_of_the_decoded_elements_unless_past_the_limit_or_truncated(
    value: Any, most: int, data: st.DataObject
) -> None:
    body = msgpack.packb(value)
    count = elements(value)
    assert elements_claimed(body, count) == elements_claimed(body, 10**9) == count
    assert (elements_claimed(body, most) > most) is (count > most)
    with pytest.raises(ValueError, match="more than it has bytes for"):
        elements_claimed(body[: data.draw(st.integers(0, len(body) - 1))], 10**9)


@pytest.mark.parametrize("value", LONG, ids=lambda value: f"{type(value).__name__} of {len(value)}")
def test_the_count_is_right_of_every_width(value: Any) -> None:
    body = msgpack.packb([value, value])
    assert elements_claimed(body, 10**9) == 1 + 2 * elements(value)
    with pytest.raises(ValueError, match="more than it has bytes for"):
        elements_claimed(body[:-1], 10**9)


@pytest.mark.parametrize("empty", [[], {}])
def test_more_empty_arrays_than_any_message_has_are_refused_as_soon_as_they_are_met(empty: Any) -> None:
    assert elements_claimed(msgpack.packb([empty] * 8), 10**9) == 9
    with pytest.raises(ValueError, match="too many empty arrays"):
        elements_claimed(msgpack.packb([empty] * 9), 10**9)


def peak_of(what: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak memory of a call, and its result or error."""
    tracemalloc.start()
    try:
        try:
            said: Any = what()
        except ProtocolError as error:
            said = error
        return tracemalloc.get_traced_memory()[1], said
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [b"\xdd\x00\x00\x0f\xff" * 819, b"\xdf\xff\xff\xff\xff" * 300, b"\x91" * 4000 + b"\xc0", b"\xc1" * 2000],
    ids=["arrays in arrays", "maps in maps", "too deep", "no msgpack"],
)
def test_false_claims_of_a_small_body_cost_its_sender_the_connection_and_take_no_memory(body: bytes) -> None:
    assert len(body) <= wire.STEP_BYTES, "so it is decoded as it is"
    peak, said = peak_of(lambda: wire.decode_request(body))
    assert isinstance(said, ProtocolError)
    assert peak < 28_000_000
    peak, _ = peak_of(lambda: wire.decode_opening(body, Hello))
    assert peak < 4_000_000, "of a stranger"


@given(REQUESTS)
def test_no_request_of_a_client_is_taken_for_too_much(request: Any) -> None:
    body = wire.encode_request(1, 0, request)[4:]
    assert decoded(body) == wire.decode_request(body)


def test_a_transaction_may_go_past_its_limit_and_be_told_so() -> None:
    """The engine refuses a transaction that has a few operations too many, with an error that names the number."""
    most = Limits().operations_max + 1
    condition_and_put = wire.encode_request(
        1, 0, Transact(when=(), then=tuple(Put(f"k{number}", b"", ttl=1.0) for number in range(most)))
    )
    assert not isinstance(decoded(condition_and_put[4:])[2], TooLargeRequest)


def long_array(count: int, element: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + element * count


MANY = {
    "maps of one": long_array(500_000, b"\x81\xa1k\xc0"),
    "short text": long_array(700_000, b"\xa2ab"),
    "nothing": long_array(2_000_000, b"\xc0"),
    "an array that claims to be huge": b"\xdd\xff\xff\xff\xff" + bytes(60_000),
    "arrays of arrays": long_array(100_000, b"\x9f" + b"\x91\xc0" * 15),
}
NEVER = {
    "empty arrays": b"\xdc\xff\xff" + b"\x90" * 0xFFFF,
    "empty maps": b"\xdc\xff\xff" + b"\x80" * 0xFFFF,
    "arrays in arrays that claim to be long": (b"\xdd" + struct.pack(">I", 60_000)) * 1000 + bytes(60_000),
    "maps in maps": (b"\xdf" + struct.pack(">I", 30_000)) * 1000 + bytes(60_000),
}


@pytest.mark.parametrize("what", MANY)
def test_a_frame_full_of_small_things_costs_no_more_than_it_has_bytes(what: str) -> None:
    """One frame of 64 MB cost gigabytes."""
    body = b"\x93\x05\x04\x92\x06" + MANY[what]
    peak, said = peak_of(lambda: decoded(body))
    assert peak < 100_000
    assert said == (5, 4, TooLargeRequest(elements_max=MOST))


@pytest.mark.parametrize("what", NEVER)
def test_claims_beyond_any_message_reserve_no_memory(what: str) -> None:
    """For a thousand nested arrays, each of which claimed to be long, memory was reserved for all the claims. Empty
    arrays took seventy times their bytes.
    """
    peak, said = peak_of(lambda: decoded(b"\x93\x05\x04\x92\x06" + NEVER[what]))
    assert peak < 100_000
    assert isinstance(said, ProtocolError)
    assert ("too many empty arrays" if what.startswith("empty") else "more than it has bytes for") in str(said)


@pytest.mark.parametrize("body", [b"\x93\x90\x04", b"\x93\x05\xc4\xff", b"\x91", b"\xdf"])
def test_an_oversized_body_without_an_id_is_no_request(body: bytes) -> None:
    body += MANY["nothing"]
    with pytest.raises(ProtocolError):
        decoded(body)


def test_an_opening_holds_a_few_elements() -> None:
    """An unauthenticated peer may send a few kilobytes, and costs no more memory than that."""
    body = b"\xdc\x08\x00" + b"\xc0" * 2048
    for kind in (Hello, Greeting, Welcome):
        with pytest.raises(ProtocolError, match="max_array_len"):
            wire.decode_opening(body, kind)
    for one in (Hello(1, bytes(16), bytes(16), bytes(900)), Hello(1, bytes(16), bytes(16), bytes(2000))):
        assert wire.decode_opening(wire.encode_opening(one)[4:], Hello) == one
    greeting = Greeting(1, 1, "s" * 2000, bytes(16), token_wanted=True)
    assert wire.decode_opening(wire.encode_opening(greeting)[4:], Greeting) == greeting
