"""Whether to look for a moment before going to sleep, and what is learned from that (`store.net.spinning`)."""

from __future__ import annotations

import random
import socket
import ssl
from typing import TYPE_CHECKING, Any, cast

import pytest

from store.net.spinning import SPIN, Spin, receive_soon

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def passed(spin: Spin) -> int:
    """How many waits pass without spinning before the next one spins."""
    count = 0
    while not spin.is_due():
        count += 1
    return count


class ComesAtTheSecondLook:
    """A socket on which something comes while one looks."""

    def __init__(self) -> None:
        self.looks = 0

    def recv_into(self, buffer: memoryview, size: int, flags: int) -> int:
        assert (size, flags) == (0, socket.MSG_DONTWAIT)
        self.looks += 1
        if self.looks == 1:
            raise BlockingIOError
        buffer[:2] = b"it"
        return 2


def test_each_failure_doubles_how_many_waits_pass_and_each_success_makes_up_for_two() -> None:
    spin = Spin()
    assert passed(spin) == 0
    for expected in (1, 3, 7, 15):
        spin.failed()
        assert passed(spin) == expected
    spin.paid()
    assert passed(spin) == 0, "as long as it pays, each wait begins with it"
    spin.failed()
    assert passed(spin) == 7, "15, less two failures, was 3"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.006), (0.3, 0.0, 0.02), (0.95, 0.9, 1.0)])
def test_only_what_pays_in_most_cases_is_tried_much(share: float, least: float, most: float) -> None:
    """Of requests that come at random, 3,000 a second, 15 % come within 50 us of the one before."""
    rng = random.Random(15)
    spin = Spin()
    tried = 0
    for _ in range(20_000):
        if spin.is_due():
            tried += 1
            if rng.random() < share:
                spin.paid()
            else:
                spin.failed()
    assert least <= tried / 20_000 <= most


def test_what_has_come_is_read_and_teaches_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    spin, buffer = Spin(), memoryview(bytearray(8))
    spin.failed()
    assert not spin.is_due()
    theirs.send(b"abc")
    assert receive_soon(ours, buffer, spin) == 3
    assert bytes(buffer[:3]) == b"abc"
    spin.failed()
    assert passed(spin) == 3, "it would be 1 if it had been taken for a success"


@pytest.mark.parametrize(("at", "passes"), [(SPIN / 2, 0), (SPIN * 2, 3)], ids=["in time", "late"])
def test_what_comes_meanwhile_is_read_and_pays_if_it_was_in_time(at: float, passes: int) -> None:
    """With other threads, or on a busy core, a look may last longer than all of the looking is to take."""
    spin, buffer, times = Spin(), memoryview(bytearray(8)), iter([1.0, 1.0 + at])
    spin.failed()
    assert not spin.is_due()
    assert receive_soon(cast("Any", ComesAtTheSecondLook()), buffer, spin, lambda: next(times)) == 2
    assert bytes(buffer[:2]) == b"it"
    assert passed(spin) == passes


def test_after_a_failure_the_next_wait_does_not_even_look(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    spin, buffer = Spin(), memoryview(bytearray(8))
    assert receive_soon(ours, buffer, spin) == 0
    theirs.send(b"abc")
    assert receive_soon(ours, buffer, spin) == 0, "whoever calls sleeps now, until it is there"
    assert receive_soon(ours, buffer, spin) == 3


def test_the_end_of_a_connection_is_seen(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    assert receive_soon(ours, memoryview(bytearray(8)), Spin()) == 0
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        receive_soon(ours, memoryview(bytearray(8)), Spin())


def test_over_tls_nobody_spins(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    context = ssl.create_default_context()
    with context.wrap_socket(ours, server_hostname="it", do_handshake_on_connect=False) as secured:
        theirs.send(b"abc")
        assert receive_soon(secured, memoryview(bytearray(8)), Spin()) == 0
