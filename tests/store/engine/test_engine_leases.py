"""The engine's leases: keys that go with them, and transactions that grant them."""

from __future__ import annotations

from typing import Any

import pytest

from store import when
from store.messages import (
    CHOSEN_LEASE_LEAST,
    Add,
    Append,
    CompareAndSet,
    Create,
    Delete,
    DeletePrefix,
    Done,
    Event,
    Failed,
    FailureKind,
    Get,
    Grant,
    LeaseState,
    Put,
    Request,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
    TransactionResult,
    Watch,
)
from tests.support.by_hand import Desk, entry, grant

USAGE, LIMIT, LEASE, CONDITION, COMPACTED, FORGOTTEN, *_ = FailureKind


# ----------------------------------------------------------------------------------------------------------- leases


def test_keys_on_a_lease_go_when_it_lapses_all_at_one_revision() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    for key in ("b", "a"):
        desk.ask(Put(key, b"", lease=lease))
    desk.ask(Put("c", b""))
    desk.ask(Watch(prefix=""), request_id=10)
    desk.pass_time(0.99)
    assert desk.keys() == ["b", "a", "c"]
    desk.pass_time(0.02)
    assert desk.keys() == ["c"]
    deleted = tuple(Event(kind="delete", revision=4, key=key, cause="silent") for key in ("a", "b"))
    assert desk.told[1, 10] == [deleted]
    assert desk.ask(Stats()).figures["leases_lapsed"] == 1


def test_leases_lapse_each_at_a_revision_of_its_own() -> None:
    desk = Desk()
    for key in ("a", "b"):
        desk.ask(Put(key, b"", lease=grant(desk, 1.0)))
    desk.pass_time(2.0)
    assert desk.engine.revision == 4
    assert desk.engine.next_tick_in() is None


def test_a_put_moves_a_key_from_one_lease_to_another() -> None:
    desk = Desk()
    short, long = grant(desk, 1.0), grant(desk, 10.0)
    desk.ask(Put("a", b"", lease=short))
    desk.ask(CompareAndSet(key="a", value=b"", expected_revision=1, lease=long))
    desk.pass_time(2.0)
    assert desk.keys() == ["a"]
    assert desk.ask(TimeToLive(lease=long)).keys == ("a",)


def test_time_to_live_tells_what_is_left_and_what_hangs_on_it() -> None:
    desk = Desk()
    lease = grant(desk, 4.0)
    for key in ("b", "a"):
        desk.ask(Put(key, b"", lease=lease))
    desk.pass_time(0.25)
    state = desk.ask(TimeToLive(lease=lease))
    assert isinstance(state, LeaseState)
    assert state.remaining == pytest.approx(3.75)
    assert (state.ttl, state.keys) == (4.0, ("a", "b"))


@pytest.mark.parametrize("request_", [Delete("a"), Put("a", b""), Put("a", b"", ttl=50.0), DeletePrefix(prefix="")])
def test_the_lease_of_a_put_with_ttl_ends_with_its_key(request_: Request[Any]) -> None:
    desk = Desk()
    desk.ask(Put("a", b"", ttl=1.0))
    first = desk.ask(Get("a")).entry.lease
    desk.ask(request_)
    assert desk.fails(TimeToLive(lease=first)).kind is LEASE
    desk.pass_time(2.0)
    assert desk.engine.revision == 2


def test_a_key_put_with_ttl_may_keep_its_own_lease_but_lends_it_to_no_other() -> None:
    """It used to; a transaction that deleted the one and put the other failed half done, and the server with it."""
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


def test_revoking_the_lease_of_a_put_with_ttl_deletes_its_key() -> None:
    desk = Desk()
    desk.ask(Put("a", b"", ttl=1.0))
    assert desk.ask(Revoke(lease=desk.ask(Get("a")).entry.lease)) == Done()
    assert desk.keys() == []


# ------------------------------------------------------------------------------------- leases made by a transaction

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


@pytest.mark.parametrize("rewrite", [Add("a", 2, lease=CHOSEN), Append("a", b"2", lease=CHOSEN)])
def test_a_lease_for_a_key_that_is_there_already_is_neither_granted_nor_missed(rewrite: Add | Append) -> None:
    """The key stays on the lease it is on; the transaction failed, for want of the lease that it had not granted."""
    desk = Desk()
    desk.ask(Put("a", b"1"))
    done = desk.ask(Transact(when=(), then=(rewrite,), grants=(Grant(ttl=1.0, id=CHOSEN),)))
    assert isinstance(done, TransactionResult)
    assert desk.ask(Stats()).figures["leases"] == 0
    assert desk.ask(Get("a")).entry == entry("a", b"3" if isinstance(rewrite, Add) else b"12", 1, 2)
    assert desk.ask(rewrite).revision == 3, "nor is it missed outside a transaction"


@pytest.mark.parametrize(
    ("transact", "kind"),
    [
        (Transact(when=(), then=(Put("a", b"", lease=CHOSEN),)), LEASE),
        (Transact(when=(), then=(Put("a", b"", lease=7),), grants=(Grant(ttl=1.0, id=7),)), USAGE),
        (Transact(when=(), then=(Put("a", b"", lease=CHOSEN),), grants=(Grant(ttl=-1.0, id=CHOSEN),)), USAGE),
        (Transact(when=(), then=(Put("a", b"", lease=CHOSEN),), grants=(Grant(ttl=1.0, id=CHOSEN),) * 2), USAGE),
        (
            Transact(
                when=(),
                then=(Put("a", b"", lease=CHOSEN), Put("", b"")),
                grants=(Grant(ttl=1.0, id=CHOSEN),),
            ),
            USAGE,
        ),
        (Create("a", b""), USAGE),
        (Grant(ttl=1.0, id=CHOSEN), USAGE),
    ],
)
def test_a_grant_that_makes_no_sense_is_refused_and_leaves_nothing(transact: Request[Any], kind: FailureKind) -> None:
    desk = Desk()
    failed = desk.ask(transact)
    assert isinstance(failed, Failed)
    assert failed.kind is kind
    figures = desk.ask(Stats()).figures
    assert (figures["leases"], figures["keys"], figures["revision"]) == (0, 0, 0)
