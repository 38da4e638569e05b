"""What may be taken by those who have connected and proved nothing yet."""

from __future__ import annotations

from store.server.entry.strangers import (
    ADDRESSES_MOST,
    GUESSES_AT_ONCE,
    GUESSES_PER_SECOND,
    LATE_ANSWER,
    LATELY,
    YIELD_AFTER,
    YIELD_FACTOR,
    YIELD_MOST,
    Strangers,
)


class Someone:
    def abort(self) -> None:
        raise AssertionError("whoever asks does that")


def test_who_proves_himself_makes_room() -> None:
    strangers = Strangers(most=2, per_address_max=10, within=10.0)
    first, second = Someone(), Someone()
    fullness = []
    for who in (first, second):
        strangers.came(who, "10.0.0.1", 0.0)
        fullness.append(strangers.is_full())
    assert fullness == [False, True]
    strangers.went(first)
    strangers.went(first)
    assert len(strangers) == 1


def test_the_longest_silent_of_the_address_that_has_most_makes_way_and_nobody_before_his_time() -> None:
    strangers = Strangers(most=4, per_address_max=10, within=10.0)
    alone, oldest, other, newest = (Someone() for _ in range(4))
    strangers.came(alone, "10.0.0.1", 0.0)
    strangers.came(oldest, "10.0.0.2", 0.1)
    strangers.came(other, "10.0.0.2", 0.2)
    assert strangers.to_make_way(60.0) is None, "there is room"
    strangers.came(newest, "10.0.0.2", 59.9)
    assert strangers.to_make_way(60.0) is oldest
    strangers.went(oldest)
    assert strangers.to_make_way(60.0) is None
    hasty = Strangers(most=1, per_address_max=10, within=10.0)
    hasty.came(newest, "10.0.0.2", 0.0)
    assert hasty.to_make_way(YIELD_AFTER / 2) is None
    assert hasty.to_make_way(YIELD_AFTER) is newest


def test_where_honest_clients_take_long_all_are_given_longer() -> None:
    """On a machine that is busy a client may take seconds to say hello; turned away, it comes again, and takes more."""
    strangers = Strangers(most=2, per_address_max=10, within=10.0)
    slow, silent, newest = Someone(), Someone(), Someone()
    strangers.came(slow, "10.0.0.1", 0.0)
    strangers.proved(slow, 2.0)
    assert len(strangers) == 0
    strangers.came(silent, "10.0.0.1", 10.0)
    strangers.came(newest, "10.0.0.1", 10.0)
    assert strangers.to_make_way(10.0 + YIELD_AFTER) is None
    assert strangers.to_make_way(10.0 + 2.0 * YIELD_FACTOR) is silent
    assert strangers.to_make_way(2.0 + LATELY + YIELD_AFTER) is silent, "that was long ago"
    strangers.went(silent)
    strangers.came(slow, "10.0.0.1", 100.0)
    strangers.proved(slow, 200.0)
    strangers.came(silent, "10.0.0.1", 200.0)
    strangers.went(newest)
    strangers.came(newest, "10.0.0.1", 200.0)
    assert strangers.to_make_way(200.0 + YIELD_MOST) is silent, "there is an end to it"


def test_one_address_has_so_many_connections_and_loopback_any() -> None:
    strangers = Strangers(most=10, per_address_max=2, within=10.0)
    there = {address: [Someone(), Someone()] for address in ("10.0.0.1", "127.0.0.1", "::1")}
    for address, ones in there.items():
        for one in ones:
            assert strangers.refusal(address) is None
            strangers.came(one, address, 0.0)
            strangers.proved(one, 0.0)
    assert "address_connections_max" in (strangers.refusal("10.0.0.1") or "")
    for address in ("10.0.0.2", "127.0.0.1", "::1"):
        assert strangers.refusal(address) is None
    strangers.went(there["10.0.0.1"][0])
    assert strangers.refusal("10.0.0.1") is None


def test_wrong_guesses_are_told_late_to_their_address_alone_and_nobody_is_refused_for_them() -> None:
    strangers = Strangers(most=10, per_address_max=2, within=10.0)
    at_once = 0
    for step in range(10_000):  # 10 s of trying as quickly as can be
        at_once += not strangers.guessed_wrong("10.0.0.1", step / 1000)
    assert GUESSES_AT_ONCE <= at_once <= GUESSES_AT_ONCE + 10 * GUESSES_PER_SECOND
    assert strangers.guessed_wrong("10.0.0.1", 10.0) == LATE_ANSWER
    assert strangers.guessed_wrong("10.0.0.2", 10.0) == 0.0
    assert strangers.refusal("10.0.0.1") is None
    assert strangers.guessed_wrong("10.0.0.1", 12.0) == 0.0


def test_the_memory_of_wrong_guesses_is_bounded() -> None:
    strangers = Strangers(most=10, per_address_max=2, within=10.0)
    for number in range(ADDRESSES_MOST + 50):
        strangers.guessed_wrong(f"fd00::{number:x}", 0.0)
    assert len(strangers._guesses) == ADDRESSES_MOST


def test_who_has_had_its_time_is_given_more_where_all_take_long_but_not_for_ever() -> None:
    strangers = Strangers(most=9, per_address_max=10, within=5.0)
    first, second = Someone(), Someone()
    strangers.came(first, "10.0.0.1", 0.0)
    strangers.came(second, "10.0.0.1", 1.0)
    assert strangers.time_left(second, 11.0) <= 0
    strangers.proved(first, 9.0)
    assert strangers.time_left(second, 11.0) == 9.0 * YIELD_FACTOR - 10.0
    assert strangers.time_left(second, 31.0) <= 0, "six times its time"
    assert strangers.time_left(first, 11.0) == 0.0, "it has said hello"
