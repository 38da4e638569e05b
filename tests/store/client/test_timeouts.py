"""The timeouts of a client, which depend on the answers that it has seen."""

import math
import random

import pytest

from store.client.timeouts import (
    BACKOFF_RECENT,
    BUSY_FACTOR,
    FIRST_ATTEMPT,
    HEARTBEAT,
    LEAST,
    SILENCE,
    SILENCE_MOST,
    Timeouts,
)


class Longest(random.Random):
    """A source of randomness that returns the largest value of every range."""

    def uniform(self, a: float, b: float) -> float:  # noqa: ARG002
        return b


def patience(*, remaining: float = math.inf, round_trip: float | None = 0.001) -> Timeouts:
    made = Timeouts(Longest())
    made.limit_by_leases(lambda: remaining)
    if round_trip is not None:
        made.note_connect_time(round_trip)
    return made


def test_pauses_double_up_to_a_limit_and_are_short_at_first() -> None:
    made = patience()
    assert [made.retry_pause(attempt) for attempt in (0, 1, 4, 5, 10**6)] == [0.1, 0.2, 1.6, 2.0, 2.0]
    assert [made.retry_pause(attempt, away=0.9) for attempt in (0, 1, 2, 9)] == [0.1, 0.2, 0.25, 0.25]
    assert [made.retry_pause(attempt, away=29.0) for attempt in (0, 2, 3, 9)] == [0.1, 0.4, 0.5, 0.5]


def test_pauses_are_bounded_by_the_time_left_of_a_lease() -> None:
    left = (math.inf, 1000.0, 1.0, -5.0)
    assert [patience(remaining=remaining).retry_pause(10) for remaining in left] == [2.0, BACKOFF_RECENT, 0.25, LEAST]


def test_the_lease_that_ends_first_counts() -> None:
    made = patience(remaining=100.0)
    made.limit_by_leases(lambda: 0.8)
    assert made.answer_timeout(0.0) == made.connect_timeout() == pytest.approx(0.2)


def test_after_silent_fresh_connections_the_client_waits_longer_until_an_answer() -> None:
    made = patience()
    waits = []
    for _ in range(6):
        waits.append(made.answer_timeout(0.0))
        made.note_connection_replaced()
    assert waits[0] == SILENCE
    assert waits == sorted(waits)
    assert waits[-1] == SILENCE_MOST
    made.note_answer()
    assert made.answer_timeout(0.0) == SILENCE


def test_a_server_that_takes_connections_has_longer_each_time_to_say_a_word() -> None:
    made = patience(round_trip=None)
    assert (made.connect_timeout(), made.first_bytes_timeout()) == (FIRST_ATTEMPT, 2 * HEARTBEAT)
    made = patience()
    words = []
    for _ in range(9):
        words.append(made.first_bytes_timeout())
        made.note_connection_replaced()
    assert words == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert made.connect_timeout() == 0.5
    assert patience(remaining=0.1).first_bytes_timeout() == SILENCE, "a lease that ends does not make it come in vain"


@pytest.mark.parametrize("remaining", [math.inf, 0.5, -1.0])
def test_no_connection_is_given_up_before_an_answer_could_arrive(remaining: float) -> None:
    made = patience(remaining=remaining, round_trip=1.5)
    made.note_connect_time(3.0)  # the quickest counts
    assert made.connect_timeout() >= 2 * 1.5
    assert made.answer_timeout(0.0) >= 2 * 1.5


def test_a_server_whose_system_acknowledges_data_gets_more_time_within_the_lease() -> None:
    made = patience()
    assert made.answer_timeout(0.0, acknowledged=True) == BUSY_FACTOR * SILENCE
    made = patience(remaining=4.0)
    assert made.answer_timeout(0.0, acknowledged=True) == pytest.approx(3.0)
    assert made.answer_timeout(0.0) == pytest.approx(1.0)


def test_large_packets_seem_lost_where_one_is_greeted_and_then_hears_nothing() -> None:
    """The greeting and all packets of TCP are small; those of TLS are not."""
    made = patience()
    seemed = []
    for happened in (made.note_answer, made.note_connection_replaced, made.note_answer):
        happened()
        seemed.append(made.large_packets_seem_lost)
    assert seemed == [False, True, False]
