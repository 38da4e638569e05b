"""S5, as far as the engine alone can show it: the server's loop, which reads before it lets lapse, is not here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.engine.leases import LOOK_AGAIN_AFTER, STALL_AFTER
from store.messages import FailureKind, Grant, KeepAlive, Put, Revoke, TimeToLive, Watch
from tests.support.by_hand import LOOK_EVERY, Desk


def leased(desk: Desk, ttl: float, *, disconnect_ttl: float | None = None, peer: int = 1) -> int:
    """A lease with one key on it, named like the lease."""
    lease: int = desk.ask(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer).lease
    desk.ask(Put(f"on {lease}", b"", lease=lease), peer=peer)
    return lease


@given(
    st.floats(0.01, 20.0),
    st.lists(st.tuples(st.sampled_from(["wait", "renew", "stall", "ask"]), st.floats(0.001, 8.0)), max_size=15),
)
def test_s5_a_key_on_a_lease_never_goes_before_its_ttl(ttl: float, steps: list[tuple[str, float]]) -> None:
    """ "A key on a lease never goes before its TTL"."""
    desk = Desk()
    renewed_at = desk.now
    lease = leased(desk, ttl)
    for step, seconds in steps:
        if step == "wait":
            desk.pass_time(seconds)
        elif step == "stall":
            desk.stand_still(seconds)
        elif step == "ask":
            desk.now += seconds
            desk.ask(TimeToLive(lease=lease))
        if step == "renew" and desk.ask(KeepAlive(lease=lease)).__class__.__name__ == "Granted":
            renewed_at = desk.now
        if not desk.keys():
            assert desk.now - renewed_at >= ttl - 1e-6
            return


@given(st.floats(0.01, 20.0))
def test_s5_a_key_on_a_lease_goes_within_a_tenth_of_a_second_after_its_ttl(ttl: float) -> None:
    """ "and goes within 100 ms after it on an idle server"."""
    desk = Desk()
    leased(desk, ttl)
    desk.pass_time(ttl + LOOK_EVERY)
    assert desk.keys() == []


def test_s5_its_watchers_are_told_when_it_goes() -> None:
    """ "goes within 100 ms after it": and whoever watches hears of it then, and not before."""
    desk = Desk()
    desk.ask(Watch(prefix=""), request_id=1, peer=2)
    leased(desk, 1.0)
    desk.pass_time(0.999)
    assert [event.kind for events in desk.told[2, 1] for event in events] == ["put"]
    desk.pass_time(LOOK_EVERY)
    assert [event.kind for events in desk.told[2, 1] for event in events] == ["put", "delete"]


@pytest.mark.parametrize("stall", [1.0, 60.0, 86_400.0])
def test_s5_time_in_which_the_server_stood_still_is_not_counted(stall: float) -> None:
    """ "time in which the server itself stood still is not counted against leases"."""
    desk = Desk()
    lease = leased(desk, 1.0)
    desk.stand_still(stall)
    assert desk.keys() == [f"on {lease}"]
    desk.pass_time(1.0 - STALL_AFTER - 0.01)
    assert desk.keys() == [f"on {lease}"]
    desk.pass_time(0.01 + LOOK_EVERY)
    assert desk.keys() == []


def test_s5_a_stall_is_not_counted_either_if_a_request_is_what_comes_first_after_it() -> None:
    """ "time in which the server itself stood still is not counted against leases"."""
    desk = Desk()
    lease = leased(desk, 1.0)
    desk.now += 60.0
    assert desk.ask(TimeToLive(lease=lease)).remaining == pytest.approx(1.0 - STALL_AFTER)


def test_s5_a_keep_alive_that_is_read_before_the_lease_lapses_counts() -> None:
    """ "queued keep-alives are read before any lease lapses": the engine lets none lapse while it is being asked."""
    desk = Desk()
    lease = leased(desk, 0.2)
    other = leased(desk, 0.2)
    desk.now += 0.25
    assert desk.engine.look(now=desk.now)  # due, and now the server reads what waits in its sockets
    desk.ask(KeepAlive(lease=lease))
    desk.take(desk.engine.tick(now=desk.now))
    assert desk.keys() == [f"on {lease}"]
    assert desk.fails(KeepAlive(lease=other)).kind is FailureKind.LEASE


def test_s5_a_lease_whose_keeper_was_not_heard_out_is_looked_at_again() -> None:
    """ "queued keep-alives are read before any lease lapses": also of who waits for a turn, or for the disk."""
    desk = Desk()
    lease = leased(desk, 0.2, peer=1)
    leased(desk, 0.2, peer=2)
    revoked = leased(desk, 0.2, peer=1)
    desk.now += 0.25
    desk.ask(Revoke(lease=revoked), peer=1)
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"]
    assert desk.engine.next_tick_in() == pytest.approx(LOOK_AGAIN_AFTER, abs=0.001), "and not at once, over and over"
    desk.now += LOOK_AGAIN_AFTER
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"], "for as long as it waits"
    desk.pass_time(LOOK_AGAIN_AFTER)
    assert desk.keys() == []


def test_s5_a_lease_lapses_sooner_once_its_connection_has_closed_and_not_come_back() -> None:
    """ "A lease may ask to lapse sooner (`disconnect_ttl`) once the connection that keeps it has closed and not come
    back".
    """
    desk = Desk()
    kept = leased(desk, 10.0, peer=1)
    asked = leased(desk, 10.0, disconnect_ttl=1.0, peer=1)
    elsewhere = leased(desk, 10.0, disconnect_ttl=1.0, peer=2)
    desk.disconnect(1)
    desk.pass_time(0.99)
    assert desk.keys() == [f"on {kept}", f"on {asked}", f"on {elsewhere}"]
    desk.pass_time(0.01 + LOOK_EVERY)
    assert desk.keys() == [f"on {kept}", f"on {elsewhere}"]


@pytest.mark.parametrize("first", ["the old connection closes", "the new one renews"])
def test_s5_a_lease_whose_keeper_came_back_has_its_full_ttl(first: str) -> None:
    """ "closed and not come back": in whichever order the server hears of it."""
    desk = Desk()
    lease = leased(desk, 10.0, disconnect_ttl=1.0, peer=1)
    steps = [lambda: desk.disconnect(1), lambda: desk.ask(KeepAlive(lease=lease), peer=2)]
    for step in steps if first == "the old connection closes" else reversed(steps):
        step()
        desk.pass_time(0.5)
    desk.pass_time(8.0)
    assert desk.keys() == [f"on {lease}"]


def test_s5_reading_a_lease_does_not_keep_it() -> None:
    """ "the connection that keeps it": asking what is left is not keeping."""
    desk = Desk()
    lease = leased(desk, 10.0, disconnect_ttl=1.0, peer=1)
    desk.disconnect(1)
    for _ in range(5):
        desk.ask(TimeToLive(lease=lease), peer=2)
        desk.pass_time(0.25)
    assert desk.keys() == []


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["keep", "close", "wait"])), max_size=30))
def test_s5_the_last_to_keep_a_lease_decides_when_it_goes(steps: list[tuple[int, str]]) -> None:
    """ "the connection that keeps it": against a model that knows only who kept it last."""
    ttl, disconnect_ttl = 2.0, 0.5
    desk = Desk()
    lease = leased(desk, ttl, disconnect_ttl=disconnect_ttl, peer=1)
    keeper: int | None = 1
    until = desk.now + ttl
    peers = {1: 1}  # several connections of each client, one after the other
    for client, step in steps:
        peer: Any = peers.get(client, client)
        if step == "wait":
            desk.pass_time(0.25)
        elif step == "close":
            if peer in desk.last_id:
                desk.disconnect(peer)
                peers[client] = peer + 10
                if keeper == peer:
                    keeper, until = None, min(until, desk.now + disconnect_ttl)
        elif desk.keys():
            desk.ask(KeepAlive(lease=lease), peer=peer)
            keeper, until = peer, desk.now + ttl
        if desk.now < until - 1e-3:
            assert desk.keys()
        elif desk.now > until + LOOK_EVERY:
            assert not desk.keys()
