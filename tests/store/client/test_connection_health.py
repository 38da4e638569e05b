"""A silent connection is slow at first, then broken; an idle one is pinged."""

import asyncio
import random
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store.client.connection_health import (
    HEARTBEATS_OF_BUSY,
    WATCHES_HEAR_EVERY,
    ConnectionHealth,
    ConnectionState,
    HealthAction,
)
from store.client.reconnecting import Connection
from store.client.timeouts import BUSY_FACTOR, HEARTBEAT, SILENCE, SLOW_FOR, Timeouts
from tests.support.processes import require
from tests.support.stores import connect_in_memory, serve_in_memory

QUIET, BUSY = ConnectionState(), ConnectionState(acknowledged=True)
BUSY_SILENCE = BUSY_FACTOR * SILENCE


def health() -> ConnectionHealth:
    timeouts = Timeouts(random.Random(0))
    timeouts.note_connect_time(0.001)
    return ConnectionHealth(timeouts, 0.0)


def said(
    one: ConnectionHealth, line: ConnectionState = QUIET, *, since: float = 0.0, until: float = 1000.0
) -> list[tuple[HealthAction, Any]]:
    """Return the messages that it sends with their times, until it hangs up, if nothing is received."""
    found: list[tuple[HealthAction, Any]] = []
    now = one.first_check_at(since)
    while now < until and HealthAction.HANG_UP not in [say for say, _ in found]:
        say, now_next = one.check(now, line)
        if say is not HealthAction.NOTHING:
            found.append((say, pytest.approx(now, abs=0.01)))
        now = max(now_next, now)
    return found


@pytest.mark.parametrize(
    ("line", "silence", "patient"), [(ConnectionState(), SILENCE, 1.0), (BUSY, BUSY_SILENCE, HEARTBEATS_OF_BUSY)]
)
def test_a_server_that_owes_an_answer_is_pinged_then_replaced_and_finally_closed(
    line: ConnectionState, silence: float, patient: float
) -> None:
    one = health()
    one.expect_answer(0.0)
    expected = [
        (HealthAction.PING, silence / 2),
        (HealthAction.SEEK, silence),
        (HealthAction.HANG_UP, 2 * patient * HEARTBEAT),
    ]
    assert said(one, line) == expected


@pytest.mark.parametrize(("line", "patient"), [(ConnectionState(), 1.0), (BUSY, HEARTBEATS_OF_BUSY)])
def test_a_server_that_owes_nothing_is_asked_after_a_heartbeat(line: ConnectionState, patient: float) -> None:
    first, second, *_, last = said(health(), line)
    assert first == (HealthAction.PING, HEARTBEAT)
    assert second[0] is HealthAction.SEEK
    assert last == (HealthAction.HANG_UP, max(2 * patient, 1 + patient) * HEARTBEAT)


def test_one_that_answers_is_asked_again_a_heartbeat_later() -> None:
    one = health()
    assert one.check(HEARTBEAT, ConnectionState())[0] is HealthAction.PING
    one.note_received(HEARTBEAT + 0.1, expecting=False)
    assert said(one, since=HEARTBEAT + 0.1, until=2 * HEARTBEAT + 0.2) == [(HealthAction.PING, 2 * HEARTBEAT + 0.1)]


def test_a_server_that_answers_is_not_replaced_until_it_falls_silent_again() -> None:
    one = health()
    one.expect_answer(0.0)
    assert said(one, until=2.0)[-1][0] is HealthAction.SEEK
    one.note_received(2.0, expecting=True)
    assert not one.seeking
    assert said(one, since=2.0, until=4.0) == [
        (HealthAction.PING, 2.0 + SILENCE / 2),
        (HealthAction.SEEK, 2.0 + SILENCE),
    ]


def test_a_server_that_accepts_data_is_alive() -> None:
    one = health()
    one.expect_answer(0.0)
    for tenth in range(200):
        assert one.check(tenth / 10, ConnectionState(unsent_bytes=1000 - tenth))[0] is HealthAction.NOTHING
        assert (
            one.check(tenth / 10, ConnectionState(unsent_bytes=1000 - tenth, held_back=True))[0] is HealthAction.NOTHING
        )


def test_a_server_that_was_slow_lately_is_given_more_time() -> None:
    """Thousands of waiting clients opened new connections, which made the server slower: none was served."""
    one = health()
    one.expect_answer(0.0)
    one.note_received(4.0, expecting=True)
    assert HealthAction.SEEK not in dict(said(one, BUSY, since=4.0, until=4.0 + 2 * 4.0))
    one.note_received(14.0, expecting=False)
    later = 14.0 + 10 * SLOW_FOR
    one.expect_answer(later)
    assert (HealthAction.SEEK, later + BUSY_SILENCE) in said(one, BUSY, since=later), "that was long ago"


def test_time_in_which_the_loop_was_held_up_is_not_the_servers_silence() -> None:
    """With thousands of clients in one loop, answers that had arrived but were not read yet counted as silence."""
    one = health()
    one.expect_answer(0.0)
    assert one.check(30.0, ConnectionState(), late=29.5) == (HealthAction.NOTHING, 30.0), "first what has come is read"
    assert said(one, since=30.0, until=32.0) == [(HealthAction.SEEK, 30.5)]


def test_watches_hear_how_far_the_store_has_come_also_on_a_connection_that_is_busy() -> None:
    one, pings = health(), 0
    for second in range(int(WATCHES_HEAR_EVERY + HEARTBEAT)):
        one.expect_answer(second)
        one.note_received(second, expecting=True)
        pings += one.check(second, ConnectionState(has_watches=True))[0] is HealthAction.PING
    assert pings == 1


def test_no_ping_is_sent_before_the_welcome() -> None:
    one = health()
    one.expect_answer(0.0)
    assert [say for say, _ in said(one, ConnectionState(welcomed=False))] == [HealthAction.SEEK, HealthAction.HANG_UP]


@pytest.mark.virtual_time
async def test_an_answer_that_a_busy_loop_has_not_read_yet_costs_no_ping() -> None:
    """In a loop that was busy with thousands of clients each request caused a ping as well, which added load."""
    network = MemoryNetwork(latency=SILENCE / 3)
    loop: Any = asyncio.get_running_loop()
    async with serve_in_memory(network) as server, connect_in_memory(network) as client:
        before = server.figures()["requests"]
        asking = asyncio.create_task(client.get("a", timeout=100.0))
        await asyncio.sleep(SILENCE / 4)
        loop.timeline.now += 30.0  # one callback that takes half a minute
        await asking
        assert server.figures()["requests"] == before + 1
        assert len(network.links("client")) == 1


def test_on_uvloop_a_look_that_is_due_at_once_is_one_that_can_be_hastened() -> None:
    """uvloop returns a handle without a due time for it, and the first request after it failed."""
    require("uvloop")
    import uvloop

    async def ask() -> None:
        client: Any = type("Owner", (), {"timeouts": Timeouts(random.Random(0)), "met": False})
        link = Connection(client)
        link._schedule_check(asyncio.get_running_loop().time() - 1.0)
        link.expect_answer()
        link.stop_checks()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
