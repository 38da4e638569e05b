"""Promise R1: a round completes at once at `max_nodes`, also when hundreds of nodes call at the same moment.

Each node is on a machine of its own, in virtual time, over the real handler, coordinator, client and server. Only round
trips, of 1 to 4 ms, and timers take time, so a timer in the path shows in the result.
"""

from benchmarks.simulated import measure

ROUND_TRIP_MOST = 0.004
ROUND_TRIPS_OF_FIRST = 10  # node: connect, be welcomed, read the run, arrive; coordinator: read, write and commit
ROUND_TRIPS_AGAIN = 5


def test_r1_two_hundred_that_call_at_once_wait_for_round_trips_alone_and_ask_three_times_each() -> None:
    first, again = measure(200)
    assert first.seconds <= ROUND_TRIPS_OF_FIRST * ROUND_TRIP_MOST
    assert again.seconds <= ROUND_TRIPS_AGAIN * ROUND_TRIP_MOST
    assert first.requests < 3.1, "the head, the arrival with its lease, the rank; what a coordinator asks is for all"
    assert again.requests < 2.1
    assert first.term == again.term, "whoever came first has kept the role"
