"""The engine's leases: keys that go with them, and transactions that grant them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import when
from store.engine.engine import Engine
from store.engine.leases import LOOK_AGAIN_AFTER
from store.messages import (
    CHOSEN_LEASE_LEAST,
    CompareAndSet,
    Create,
    Delete,
    FailureKind,
    Get,
    Grant,
    KeepAlive,
    Put,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
)
from tests.support.by_hand import LOOK_EVERY, Desk
from tests.support.stores import process_identity_of

USAGE, *_ = FailureKind


def test_a_key_put_with_ttl_may_keep_its_own_lease_but_lends_it_to_no_other() -> None:
    """Regression: they shared it. A transaction that deleted one and put one failed half done, with the server."""
    desk = Desk()
    desk.ask(Put("a", b"", ttl=1.0))
    lease = desk.ask(Get("a")).entry.lease
    desk.ask(CompareAndSet(key="a", value=b"2", expected_revision=1, lease=lease))
    before = desk.fingerprint()
    for request in (
        Put("b", b"", lease=lease),
        Transact(when=(), then=(Delete("a"), Put("b", b"", lease=lease))),
        CompareAndSet(key="b", value=b"", expected_revision=0, lease=lease),
    ):
        refused = desk.fails(request)
        assert refused.kind is USAGE
        assert "for that one key" in refused.message
    assert desk.fingerprint() == before
    desk.pass_time(2.0)
    assert desk.keys() == []


CHOSEN = CHOSEN_LEASE_LEAST + 7


def test_a_transaction_grants_the_leases_that_it_puts_keys_on_and_no_others() -> None:
    desk = Desk()
    grants = tuple(Grant(ttl=1.0, id=id) for id in (CHOSEN, CHOSEN + 1, CHOSEN + 2))
    then = (Put("a", b"1", lease=CHOSEN), Create("b", b"2", lease=CHOSEN + 1))
    refused = desk.ask(Transact(when=(when.exists("a"),), then=then, otherwise=(Get("a"),), grants=grants))
    assert (refused.succeeded, desk.ask(Stats()).figures["leases"]) == (False, 0)
    done = desk.ask(Transact(when=(), then=then, grants=grants))
    assert done.results == (1, 1)
    assert desk.ask(TimeToLive(lease=CHOSEN)).keys == ("a",)
    assert desk.ask(Stats()).figures["leases"] == 2
    desk.pass_time(0.6)
    again = desk.ask(Transact(when=(), then=(Put("c", b"3", lease=CHOSEN),), grants=grants[:1]))
    assert again.succeeded
    assert desk.ask(TimeToLive(lease=CHOSEN)).remaining == pytest.approx(0.4), "one that is there stays as it is"


def leased(desk: Desk, ttl: float, *, disconnect_ttl: float | None = None, peer: int = 1) -> int:
    """Return a lease with one key on it, named like the lease."""
    lease: int = desk.ask(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer).lease
    desk.ask(Put(f"on {lease}", b"", lease=lease), peer=peer)
    return lease


@given(
    st.floats(0.01, 20.0),
    st.lists(st.tuples(st.sampled_from(["wait", "renew", "stall", "ask"]), st.floats(0.001, 8.0)), max_size=15),
)
def test_a_key_on_a_lease_never_goes_before_its_ttl(ttl: float, steps: list[tuple[str, float]]) -> None:
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


def test_a_lease_whose_keeper_was_not_heard_out_is_looked_at_again() -> None:
    """Keep-alives are read before any lease expires, also from peers that wait for a turn or for the disk."""
    desk = Desk()
    lease = leased(desk, 0.2, peer=1)
    leased(desk, 0.2, peer=2)
    revoked = leased(desk, 0.2, peer=1)
    desk.now += 0.25
    desk.ask(Revoke(lease=revoked), peer=1)
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"]
    due_in = desk.engine.state.leases.seconds_to_next_expiry()
    assert due_in == pytest.approx(LOOK_AGAIN_AFTER, abs=0.001), "and not at once, over and over"
    desk.now += LOOK_AGAIN_AFTER
    desk.take(desk.engine.tick(now=desk.now, unheard={1: 1.0}))
    assert desk.keys() == [f"on {lease}"], "for as long as it waits"
    desk.pass_time(LOOK_AGAIN_AFTER)
    assert desk.keys() == []


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["keep", "close", "wait"])), max_size=30))
def test_the_last_to_keep_a_lease_decides_when_it_goes(steps: list[tuple[int, str]]) -> None:
    """ "The connection that keeps it", against a model that stores only the last keeper."""
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


GONE_TTL, DISCONNECT_TTL = 0.1, 1.0


def test_after_a_restart_it_is_off_until_the_first_keep_alive() -> None:
    """As with `disconnect_ttl`: the lease has no keeper yet, so no peer's death ends it."""
    engine = Engine(store_id="s", durable=True)
    engine.connect(1, session_id=b"s" * 16, process=process_identity_of("a"), now=0.0)
    request: Any = Grant(ttl=10.0, disconnect_ttl=DISCONNECT_TTL, gone_ttl=GONE_TTL)
    engine.apply(request, peer=1, request_id=1, acknowledged=0, now=0.0)
    facts = engine.take_changeset()
    assert facts is not None
    (saved,) = facts.leases.values()
    assert saved is not None
    assert (saved.disconnect_ttl, saved.gone_ttl) == (DISCONNECT_TTL, GONE_TTL)
