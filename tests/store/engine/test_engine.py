"""The store as one state machine: it agrees with a plain dictionary that counts revisions, and tells who must know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import when
from store.engine.changeset import Facts, Saved, SavedLease, SavedSession
from store.engine.engine import Engine
from store.engine.processes import Closing
from store.engine.scans import PART_BYTES
from store.limits import Limits
from store.messages import (
    CHOSEN_LEASE_LEAST,
    Add,
    Added,
    Append,
    Cancel,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Create,
    Delete,
    DeletePrefix,
    Done,
    Entry,
    Event,
    Failed,
    FailureKind,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    LeaseState,
    List,
    Listing,
    Operation,
    Ping,
    Pong,
    Put,
    Request,
    Response,
    Revoke,
    Stats,
    Target,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
    Watch,
    Watching,
    Written,
)
from tests.support.by_hand import Desk, Stream

USAGE, LIMIT, LEASE, CONDITION, COMPACTED, FORGOTTEN, *_ = FailureKind


def entry(key: str, value: bytes, created: int, changed: int | None = None, lease: int | None = None) -> Entry:
    return Entry(
        key=key,
        value=value,
        create_revision=created,
        mod_revision=created if changed is None else changed,
        lease=lease,
    )


# ------------------------------------------------------------------------------------------------- reads and writes


def test_a_put_makes_a_revision_and_a_get_shows_it() -> None:
    desk = Desk()
    assert desk.ask(Put("a", b"1")) == Written(revision=1)
    assert desk.ask(Put("a", b"2")) == Written(revision=2)
    assert desk.ask(Get("a")) == Found(entry=entry("a", b"2", 1, 2))
    assert desk.ask(Get("b")) == Found(entry=None)


def test_a_key_that_was_deleted_and_made_again_has_a_new_create_revision() -> None:
    desk = Desk()
    desk.ask(Put("a", b""))
    assert desk.ask(Delete("a")) == Counted(count=1, revision=2)
    assert desk.ask(Delete("a")) == Counted(count=0, revision=2)
    desk.ask(Put("a", b""))
    assert desk.ask(Get("a")) == Found(entry=entry("a", b"", 3))


def test_a_prefix_can_be_listed_counted_and_deleted() -> None:
    desk = Desk()
    for key in ("b/2", "a", "b/1", "c"):
        desk.ask(Put(key, key.encode()))
    assert desk.ask(List(prefix="b/")) == Listing(
        entries=(entry("b/1", b"b/1", 3), entry("b/2", b"b/2", 1)), revision=4
    )
    assert desk.ask(List(prefix="b/2", keys_only=True)) == Listing(entries=(entry("b/2", b"", 1),), revision=4)
    assert desk.ask(Count(prefix="b/")) == Counted(count=2, revision=4)
    assert desk.ask(Count(prefix="")) == Counted(count=4, revision=4)
    assert desk.ask(DeletePrefix(prefix="b/")) == Counted(count=2, revision=5)
    assert desk.ask(DeletePrefix(prefix="b/")) == Counted(count=0, revision=5)
    assert desk.keys() == ["a", "c"]


def test_several_keys_are_read_at_one_revision_in_the_order_asked() -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    found = entry("a", b"1", 1)
    assert desk.ask(GetMany(keys=("b", "a", "a"))) == Listing(entries=(None, found, found), revision=1)


def test_the_loser_of_a_compare_and_set_is_told_what_is_there() -> None:
    desk = Desk()
    won = desk.ask(CompareAndSet(key="a", value=b"1", expected_revision=0))
    assert won == CompareAndSetResult(succeeded=True, entry=entry("a", b"1", 1))
    lost = desk.ask(CompareAndSet(key="a", value=b"2", expected_revision=0))
    assert lost == CompareAndSetResult(succeeded=False, entry=entry("a", b"1", 1))
    assert desk.engine.revision == 1


def test_a_value_may_be_expected_instead_and_no_key_equals_no_value() -> None:
    desk = Desk()
    missing = desk.ask(CompareAndSet(key="a", value=b"1", expected_value=b""))
    assert missing == CompareAndSetResult(succeeded=False, entry=None)
    desk.ask(Put("a", b""))
    assert desk.ask(CompareAndSet(key="a", value=b"1", expected_value=b"")).succeeded
    assert not desk.ask(CompareAndSet(key="a", value=b"2", expected_value=b"")).succeeded


@pytest.mark.parametrize("expected", [{}, {"expected_revision": 1, "expected_value": b""}])
def test_a_compare_and_set_takes_exactly_one_expectation(expected: dict[str, Any]) -> None:
    refused = Desk().fails(CompareAndSet(key="a", value=b"", **expected))
    assert refused.kind is USAGE
    assert "exactly one expectation" in refused.message


def test_adding_counts_from_zero_and_is_kept_as_decimal_ascii() -> None:
    desk = Desk()
    assert desk.ask(Add("a", 5)) == Added(value=5, revision=1)
    assert desk.ask(Add("a", -7)) == Added(value=-2, revision=2)
    assert desk.ask(Get("a")).entry.value == b"-2"


@pytest.mark.parametrize("held", [b"", b"-", b"1_000", b" 1", b"+1", b"1.0", b"\xc2\xb2", b"9" * 21])
def test_adding_to_what_is_no_number_is_refused(held: bytes) -> None:
    desk = Desk()
    desk.ask(Put("a", held))
    refused = desk.fails(Add("a", 1))
    assert refused.kind is USAGE
    assert "no decimal number" in refused.message


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_stays_within_64_bits(sign: int) -> None:
    desk = Desk()
    most = sign * (2**63 - 1)
    assert desk.ask(Add("a", most)).value == most
    assert "passes 64 bits" in desk.fails(Add("a", sign)).message
    assert desk.ask(Get("a")).entry.value == b"%d" % most


def test_appending_begins_with_nothing_and_answers_with_the_length() -> None:
    desk = Desk()
    assert desk.ask(Append("a", b"12")) == Added(value=2, revision=1)
    assert desk.ask(Append("a", b"345")) == Added(value=5, revision=2)
    assert desk.ask(Get("a")).entry.value == b"12345"


def test_a_key_has_at_least_one_character() -> None:
    desk = Desk()
    for request in (Put("", b""), Add("", 1), Append("", b""), CompareAndSet(key="", value=b"", expected_revision=0)):
        assert desk.fails(request).message == "a key has at least one character"
    assert desk.fails(Wait(keys=("",))).message == "a key has at least one character"


def test_what_no_store_knows_is_refused() -> None:
    class Dance(Request[Done]):
        pass

    assert Desk().fails(Dance()).message == "Dance cannot be asked of this store"
    nested = Guarded(when=(), request=Guarded(when=(), request=Get("a")))
    assert Desk().fails(nested).kind is USAGE


def test_ping_and_stats_answer_from_the_revision_there_is() -> None:
    desk = Desk()
    desk.ask(Put("a", b"", ttl=5.0))
    desk.ask(Watch(prefix=""))
    desk.ask(Wait(keys=("b",)))
    assert desk.ask(Ping()) == Pong(revision=1)
    stats = desk.ask(Stats())
    assert isinstance(stats, Figures)
    expected = {"revision": 1, "keys": 1, "leases": 1, "watches": 1, "waits": 1, "sessions": 1, "requests": 5}
    assert expected.items() <= stats.figures.items()
    assert stats.figures["store_id"] == "store-1"


# ----------------------------------------------------------------------------------------------------- transactions


def test_a_transaction_does_one_branch_or_the_other_at_one_revision() -> None:
    desk = Desk()
    request = Transact(
        when=(when.missing("a"),),
        then=(Put("a", b"1"), Get("a"), Delete("b"), Add("n", 2), Append("s", b"xyz")),
        otherwise=(Get("a"), Delete("a")),
    )
    first = desk.ask(request)
    assert first == TransactionResult(succeeded=True, results=(1, entry("a", b"1", 1), False, 2, 3), revision=1)
    second = desk.ask(request)
    assert second == TransactionResult(succeeded=False, results=(entry("a", b"1", 1), True), revision=2)
    assert desk.keys() == ["n", "s"]


def test_a_transaction_that_changes_nothing_makes_no_revision() -> None:
    desk = Desk()
    assert desk.ask(Transact(when=(), then=(Get("a"), Delete("a")))) == TransactionResult(
        succeeded=True, results=(None, False), revision=0
    )


@pytest.mark.parametrize("second", [Put("a", b""), Delete("a"), Add("a", 1), Append("a", b"")])
def test_a_transaction_writes_a_key_once(second: Operation) -> None:
    desk = Desk()
    refused = desk.fails(Transact(when=(), then=(Delete("a"), second)))
    assert refused.kind is USAGE
    assert "writes 'a' twice" in refused.message


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (Put("b", b"", lease=99), LEASE),
        (Put("b", b"", ttl=1.0, lease=99), USAGE),
        (Put("b", b"", ttl=0.0), USAGE),
        (Put("", b""), USAGE),
        (Add("text", 1), USAGE),
        (Add("", 1), USAGE),
        (Append("b", b"12345678901"), LIMIT),
    ],
)
def test_an_operation_that_cannot_be_done_leaves_the_whole_transaction_undone(
    refused: Operation, kind: FailureKind
) -> None:
    desk = Desk(value_bytes_max=10)
    desk.ask(Put("text", b"text"))
    desk.ask(Watch(prefix=""))
    before = desk.fingerprint()
    assert desk.fails(Transact(when=(), then=(Put("a", b""), Delete("a2"), refused))).kind is kind
    assert desk.fingerprint() == before


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (when.mod_revision("a") == 2, True),
        (when.mod_revision("a") == 1, False),
        (when.mod_revision("b") == 0, True),
        (when.create_revision("a") == 1, True),
        (when.create_revision("a") == 2, False),
        (when.create_revision("b") == 0, True),
        (when.value("a") == b"2", True),
        (when.value("a") == b"1", False),
        (when.value("b") == b"", False),
        (when.exists("a"), True),
        (when.exists("b"), False),
        (when.missing("a"), False),
        (when.missing("b"), True),
    ],
)
def test_a_condition_holds_or_it_does_not(condition: Condition, holds: bool) -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    desk.ask(Put("a", b"2"))
    assert desk.ask(Transact(when=(condition,), then=())).succeeded is holds
    guarded = desk.ask(Guarded(when=(condition,), request=Put("c", b"")))
    assert isinstance(guarded, Written if holds else Failed)


def test_a_guarded_write_fails_when_its_condition_does_and_says_which() -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    refused = desk.fails(Guarded(when=(when.exists("a"), when.value("a") == b"2"), request=Delete("a")))
    assert refused == Failed(kind=CONDITION, message="value of 'a' is no longer b'2'")
    assert desk.keys() == ["a"]


def test_messages_show_the_beginning_of_what_is_long() -> None:
    desk = Desk()
    refused = desk.fails(Guarded(when=(when.value("k" * 10**6) == b"v" * 10**6,), request=Delete("a")))
    assert len(refused.message) < 200
    assert "kkk" in refused.message
    assert "vvv" in refused.message
    assert len(desk.fails(CompareAndSet(key="k" * 10**6, value=b"")).message) < 200
    twice = Transact(when=(), then=(Delete("k" * 10**6), Delete("k" * 10**6)))
    assert len(desk.fails(twice).message) < 200


# ----------------------------------------------------------------------------------------------------------- leases


def grant(desk: Desk, ttl: float, *, disconnect_ttl: float | None = None, peer: int = 1) -> int:
    granted = desk.ask(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer)
    assert isinstance(granted, Granted)
    assert granted.ttl == ttl
    return granted.lease


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
    deleted = tuple(Event(kind="delete", revision=4, key=key) for key in ("a", "b"))
    assert desk.told[1, 10] == [deleted]
    assert desk.ask(Stats()).figures["leases_lapsed"] == 1


def test_leases_lapse_each_at_a_revision_of_its_own() -> None:
    desk = Desk()
    for key in ("a", "b"):
        desk.ask(Put(key, b"", lease=grant(desk, 1.0)))
    desk.pass_time(2.0)
    assert desk.engine.revision == 4
    assert desk.engine.next_tick_in() is None


def test_an_entry_names_its_lease_and_a_plain_put_takes_it_off() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    desk.ask(Put("a", b"", lease=lease))
    assert desk.ask(Get("a")).entry.lease == lease
    desk.ask(Put("a", b""))
    assert desk.ask(Get("a")).entry.lease is None
    desk.pass_time(2.0)
    assert desk.keys() == ["a"]


def test_a_put_moves_a_key_from_one_lease_to_another() -> None:
    desk = Desk()
    short, long = grant(desk, 1.0), grant(desk, 10.0)
    desk.ask(Put("a", b"", lease=short))
    desk.ask(CompareAndSet(key="a", value=b"", expected_revision=1, lease=long))
    desk.pass_time(2.0)
    assert desk.keys() == ["a"]
    assert desk.ask(TimeToLive(lease=long)).keys == ("a",)


def test_adding_and_appending_leave_a_key_on_its_lease() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    desk.ask(Put("n", b"1", lease=lease))
    desk.ask(Put("s", b"1", lease=lease))
    desk.ask(Add("n", 1))
    desk.ask(Append("s", b"1"))
    desk.pass_time(2.0)
    assert desk.keys() == []


def test_revoking_a_lease_deletes_its_keys_now() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    desk.ask(Put("a", b"", lease=lease))
    desk.ask(Watch(prefix="a"), request_id=10)
    assert desk.ask(Revoke(lease=lease)) == Done()
    assert desk.told[1, 10] == [(Event(kind="delete", revision=2, key="a"),)]
    assert desk.fails(Revoke(lease=lease)).kind is LEASE


@pytest.mark.parametrize(
    "request_",
    [
        KeepAlive(lease=7),
        Revoke(lease=7),
        TimeToLive(lease=7),
        Put("a", b"", lease=7),
        CompareAndSet(key="a", value=b"", expected_revision=0, lease=7),
    ],
)
def test_a_lease_that_is_not_there_cannot_be_used(request_: Request[Any]) -> None:
    assert Desk().fails(request_) == Failed(kind=LEASE, message="lease 7 has lapsed or was revoked; grant a new one")


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


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_ttl_is_above_zero(ttl: float) -> None:
    for request in (Grant(ttl=ttl), Grant(ttl=1.0, disconnect_ttl=ttl), Put("a", b"", ttl=ttl)):
        refused = Desk().fails(request)
        assert refused.kind is USAGE
        assert "must be above 0" in refused.message


def test_keeping_a_lease_alive_answers_with_its_ttl_and_begins_it_again() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    desk.pass_time(0.75)
    assert desk.ask(KeepAlive(lease=lease)) == Granted(lease=lease, ttl=1.0)
    desk.pass_time(0.75)
    assert desk.ask(TimeToLive(lease=lease)).remaining == pytest.approx(0.25)


def test_a_put_with_ttl_simply_expires() -> None:
    desk = Desk()
    desk.ask(Put("a", b"", ttl=1.0))
    desk.pass_time(0.9)
    assert desk.keys() == ["a"]
    desk.ask(CompareAndSet(key="a", value=b"", expected_revision=1, ttl=1.0))
    desk.pass_time(0.9)
    assert desk.keys() == ["a"]
    desk.pass_time(0.2)
    assert desk.keys() == []


@pytest.mark.parametrize("request_", [Delete("a"), Put("a", b""), Put("a", b"", ttl=50.0), DeletePrefix(prefix="")])
def test_the_lease_of_a_put_with_ttl_ends_with_its_key(request_: Request[Any]) -> None:
    desk = Desk()
    desk.ask(Put("a", b"", ttl=1.0))
    first = desk.ask(Get("a")).entry.lease
    desk.ask(request_)
    assert desk.fails(TimeToLive(lease=first)).kind is LEASE
    desk.pass_time(2.0)
    assert desk.engine.revision == 2


def test_a_lease_that_was_granted_stays_without_keys() -> None:
    desk = Desk()
    lease = grant(desk, 5.0)
    desk.ask(Put("a", b"", lease=lease))
    desk.ask(Delete("a"))
    assert desk.ask(TimeToLive(lease=lease)).keys == ()


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


def test_a_put_takes_a_ttl_or_a_lease() -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    for request in (
        Put("a", b"", ttl=1.0, lease=lease),
        CompareAndSet(key="a", value=b"", expected_revision=0, ttl=1.0, lease=lease),
    ):
        assert "ttl or lease, not both" in desk.fails(request).message


# ---------------------------------------------------------------------------------------------------------- watches


def test_a_watch_hears_of_every_later_change_under_its_prefix() -> None:
    desk = Desk()
    desk.ask(Put("a/1", b"before"))
    assert desk.ask(Watch(prefix="a/"), request_id=5) == Watching(revision=1)
    desk.ask(Put("a/1", b"after"))
    desk.ask(Put("b", b""))
    desk.ask(Delete("a/1"))
    assert desk.told[1, 5] == [
        (Event(kind="put", revision=2, key="a/1", value=b"after", create_revision=1),),
        (Event(kind="delete", revision=4, key="a/1"),),
    ]


def test_a_watch_from_a_revision_on_is_told_the_past_first() -> None:
    desk = Desk()
    lease = grant(desk, 5.0)
    for value in (b"1", b"2", b"3"):
        desk.ask(Put("a", value, lease=lease))
    assert desk.ask(Watch(prefix="a", start_revision=2), request_id=5) == Watching(revision=3)
    desk.ask(Put("a", b"4"))
    (second,), _, (fourth,) = desk.told[1, 5]
    assert second == Event(kind="put", revision=2, key="a", value=b"2", create_revision=1, lease=lease)
    assert (fourth.revision, fourth.lease) == (4, None)


def test_a_watch_from_zero_on_begins_at_the_beginning() -> None:
    desk = Desk()
    assert desk.ask(Watch(prefix="", start_revision=0), request_id=5) == Watching(revision=0)
    desk.ask(Put("a", b""))
    assert desk.ask(Watch(prefix="", start_revision=0), request_id=8) == Watching(revision=1)
    assert desk.told[1, 5] == desk.told[1, 8]


def test_a_watch_may_start_with_the_next_revision_but_no_later() -> None:
    desk = Desk()
    desk.ask(Put("a", b""))
    assert desk.ask(Watch(prefix="", start_revision=2)) == Watching(revision=1)
    refused = desk.fails(Watch(prefix="", start_revision=3))
    assert refused == Failed(kind=USAGE, message="a watch cannot start at revision 3: the store is at 1")


def test_a_watch_with_a_snapshot_is_told_what_is_there_then_that_this_was_all() -> None:
    desk = Desk()
    for key in ("a/2", "a/1", "b"):
        desk.ask(Put(key, b""))
    assert desk.ask(Watch(prefix="a/", snapshot=True), request_id=5) == Watching(revision=3)
    (snapshot,) = desk.told[1, 5]
    assert [(event.kind, event.key, event.revision) for event in snapshot] == [
        ("put", "a/1", 2),
        ("put", "a/2", 1),
        ("synced", "", 3),
    ]


def test_a_large_snapshot_comes_in_pieces_of_which_the_last_ends_in_synced() -> None:
    desk = Desk()
    for key in "abc":
        desk.ask(Put(key, bytes(PART_BYTES)))
    desk.ask(Watch(prefix="", snapshot=True), request_id=5)
    assert [[event.kind for event in piece] for piece in desk.told[1, 5]] == [["put"], ["put"], ["put", "synced"]]


def test_a_snapshot_and_a_start_revision_contradict_each_other() -> None:
    refused = Desk().fails(Watch(prefix="", snapshot=True, start_revision=1))
    assert refused.kind is USAGE


def test_a_watch_of_what_is_no_longer_kept_is_refused_and_not_opened() -> None:
    desk = Desk(history_bytes_max=500)
    for _ in range(5):
        desk.ask(Put("a", b""))
    refused = desk.fails(Watch(prefix="", start_revision=3))
    assert refused.kind is COMPACTED
    assert "history begins at 4" in refused.message
    assert desk.ask(Stats()).figures["watches"] == 0
    assert desk.ask(Watch(prefix="", start_revision=4)) == Watching(revision=5)


def test_a_watch_that_was_cancelled_or_dropped_hears_no_more() -> None:
    desk = Desk()
    desk.ask(Watch(prefix=""), request_id=5)
    desk.ask(Watch(prefix=""), request_id=6)
    assert desk.ask(Cancel(target=5)) == Done()
    assert desk.engine.end_watch(1, 6)
    assert not desk.engine.end_watch(1, 6)
    assert desk.ask(Cancel(target=99)) == Done()
    desk.ask(Put("a", b""))
    assert desk.told == {}


def test_a_closed_connection_hears_no_more() -> None:
    desk = Desk()
    desk.ask(Watch(prefix=""), peer=1)
    desk.ask(Wait(keys=("a",)), peer=1)
    desk.disconnect(1)
    desk.ask(Put("a", b""), peer=2)
    assert (desk.told, desk.answers) == ({}, {})
    figures = desk.ask(Stats(), peer=2).figures
    assert (figures["watches"], figures["waits"]) == (0, 0)


def test_closing_a_connection_that_never_said_hello_is_no_matter() -> None:
    Desk().disconnect(77)


# ------------------------------------------------------------------------------------------------------------ waits


def test_a_wait_for_what_is_there_is_answered_at_once() -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    assert desk.ask(Wait(keys=("a",))) == Listing(entries=(entry("a", b"1", 1),), revision=1)
    assert desk.ask(Wait(keys=())) == Listing(entries=(), revision=1)


def test_a_wait_is_answered_when_the_last_key_comes() -> None:
    desk = Desk()
    assert desk.ask(Wait(keys=("b", "a", "b")), request_id=5) is None
    desk.ask(Put("a", b""))
    assert desk.answers == {}
    desk.ask(Put("b", b""), peer=2)
    b = entry("b", b"", 2)
    assert desk.answers == {(1, 5): Listing(entries=(b, entry("a", b"", 1), b), revision=2)}
    assert desk.ask(Stats()).figures["waits"] == 0


@pytest.mark.parametrize("there_first", [False, True])
def test_a_key_that_goes_while_others_are_missing_is_waited_for_again(there_first: bool) -> None:
    """A key that was there when the wait began, and went, used to be answered as None."""
    desk = Desk()
    if there_first:
        desk.ask(Put("a", b""))
    desk.ask(Wait(keys=("a", "b")), request_id=5)
    if not there_first:
        desk.ask(Put("a", b""))
    desk.ask(Delete("a"))
    desk.ask(Put("b", b""))
    assert desk.answers == {}
    desk.ask(Put("a", b""))
    answer = desk.answers[1, 5]
    assert isinstance(answer, Listing)
    assert None not in answer.entries


def test_a_wait_sees_a_revision_as_a_whole() -> None:
    """One that brought the last key and took another used to be answered between the two."""
    desk = Desk()
    desk.ask(Put("b", b""))
    desk.ask(Wait(keys=("a", "b")), request_id=5)
    desk.ask(Transact(when=(), then=(Put("a", b""), Delete("b"))))
    assert desk.answers == {}
    desk.ask(Put("b", b""))
    assert (1, 5) in desk.answers


def test_a_wait_can_be_cancelled() -> None:
    desk = Desk()
    desk.ask(Wait(keys=("a",)), request_id=5)
    assert desk.ask(Cancel(target=5)) == Done()
    desk.ask(Put("a", b""))
    assert desk.answers == {}


def test_a_guarded_wait_ends_when_its_condition_ceases_to_hold() -> None:
    desk = Desk()
    desk.ask(Put("round", b"1"))
    guarded = Guarded(when=(when.mod_revision("round") == 1,), request=Wait(keys=("a", "b")))
    assert desk.ask(guarded, request_id=5) is None
    desk.ask(Put("a", b""))
    desk.ask(Put("round", b"2"))
    assert desk.answers == {(1, 5): Failed(kind=CONDITION, message="mod_revision of 'round' is no longer 1")}
    assert desk.fails(guarded).kind is CONDITION


def test_a_guarded_wait_ends_when_a_key_it_depends_on_goes() -> None:
    desk = Desk()
    desk.ask(Put("alive", b""))
    desk.ask(Guarded(when=(when.exists("alive"),), request=Wait(keys=("a",))), request_id=5)
    desk.ask(Delete("alive"))
    assert desk.answers == {(1, 5): Failed(kind=CONDITION, message="exists of 'alive' is no longer True")}


def test_a_closed_connection_waits_for_nothing_more() -> None:
    desk = Desk()
    desk.ask(Wait(keys=("a",)))
    desk.ask(Wait(keys=("a", "b")))
    desk.disconnect(1)
    desk.ask(Put("a", b""), peer=2)
    assert desk.answers == {}
    assert desk.ask(Stats(), peer=2).figures["waits"] == 0


def test_a_guarded_wait_that_ends_and_is_fulfilled_at_once_has_ended() -> None:
    desk = Desk()
    desk.ask(Guarded(when=(when.missing("closed"),), request=Wait(keys=("a",))), request_id=5)
    desk.ask(Transact(when=(), then=(Put("a", b""), Put("closed", b""))))
    answer = desk.answers[1, 5]
    assert isinstance(answer, Failed)
    assert answer.kind is CONDITION


def test_nothing_is_kept_of_waits_that_are_over() -> None:
    desk = Desk()
    for number in range(4):
        desk.ask(Guarded(when=(when.missing("x"),), request=Wait(keys=("a", f"b{number}"))), peer=number)
    desk.ask(Put("a", b""), peer=9)
    desk.ask(Put("b0", b""), peer=9)
    desk.ask(Cancel(target=1), peer=1)
    desk.disconnect(2)
    desk.ask(Put("x", b""), peer=9)
    waits = desk.engine._waits
    assert (waits._parked, waits._at, waits._under, waits._by) == ({}, {}, {}, {})


# --------------------------------------------------------------------------------------------------------- sessions


def test_a_mutation_that_comes_again_is_answered_again_and_not_done_again() -> None:
    desk = Desk()
    first = desk.ask(Add("a", 1), request_id=1, acknowledged=0)
    assert desk.ask(Add("a", 1), request_id=1, acknowledged=0) == first == Added(value=1, revision=1)
    assert desk.engine.revision == 1


def test_a_refusal_is_answered_again_too_even_if_it_would_now_succeed() -> None:
    desk = Desk()
    refused = desk.ask(Guarded(when=(when.exists("a"),), request=Put("b", b"")), request_id=1, acknowledged=0)
    desk.ask(Put("a", b""), peer=2)
    again = desk.ask(Guarded(when=(when.exists("a"),), request=Put("b", b"")), request_id=1, acknowledged=0)
    assert again == refused
    assert desk.keys() == ["a"]


def test_a_mutation_whose_reply_is_no_longer_kept_is_answered_with_forgotten() -> None:
    desk = Desk()
    desk.ask(Add("a", 1), request_id=1)
    refused = desk.ask(Add("a", 1), request_id=1, acknowledged=1)
    assert refused.kind is FORGOTTEN
    assert "request 1 was applied" in refused.message
    assert desk.engine.revision == 1


def test_reads_are_not_kept_and_answer_from_what_is_there() -> None:
    desk = Desk()
    desk.ask(Get("a"), request_id=1, acknowledged=0)
    desk.ask(Put("a", b""), peer=2)
    assert desk.ask(Get("a"), request_id=1, acknowledged=0).entry is not None


def test_a_lease_that_is_granted_again_after_a_reconnect_is_kept_by_the_new_connection() -> None:
    """It used to lapse `disconnect_ttl` after the old connection, before its owner had the answer."""
    desk = Desk()
    desk.connect(1, session=b"s" * 16)
    granted = desk.ask(Grant(ttl=10.0, disconnect_ttl=1.0), request_id=1, acknowledged=0)
    desk.disconnect(1)
    desk.pass_time(0.5)
    desk.connect(2, session=b"s" * 16)
    assert desk.ask(Grant(ttl=10.0, disconnect_ttl=1.0), peer=2, request_id=1, acknowledged=0) == granted
    desk.pass_time(5.0)
    assert desk.ask(TimeToLive(lease=granted.lease), peer=2).remaining == pytest.approx(5.0)


def test_a_lease_that_lapsed_before_it_was_granted_again_is_gone() -> None:
    desk = Desk()
    desk.connect(1, session=b"s" * 16)
    granted = desk.ask(Grant(ttl=10.0, disconnect_ttl=1.0), request_id=1, acknowledged=0)
    desk.disconnect(1)
    desk.pass_time(2.0)
    desk.connect(2, session=b"s" * 16)
    assert desk.ask(Grant(ttl=10.0, disconnect_ttl=1.0), peer=2, request_id=1, acknowledged=0) == granted
    assert desk.fails(KeepAlive(lease=granted.lease), peer=2).kind is LEASE


def test_revoking_again_after_a_reconnect_is_answered_as_the_first_time() -> None:
    desk = Desk()
    lease = grant(desk, 5.0)
    assert desk.ask(Revoke(lease=lease), request_id=2, acknowledged=1) == Done()
    assert desk.ask(Revoke(lease=lease), request_id=2, acknowledged=1) == Done()


def test_a_session_is_found_again_by_its_number_unless_its_client_said_goodbye() -> None:
    desk = Desk()
    first = desk.connect(1, session=b"s" * 16)
    assert first is not None
    desk.disconnect(1)
    assert desk.connect(2, session=b"s" * 16) == (first[0], None)
    assert desk.connect(3, session=b"s" * 16) == (first[0], 2)
    desk.disconnect(2, how=Closing.GOODBYE)
    desk.disconnect(3, how=Closing.GOODBYE)
    again = desk.connect(4, session=b"s" * 16)
    assert again is not None
    assert again[0] != first[0]


def test_abandoned_sessions_go_when_leases_are_looked_at() -> None:
    desk = Desk(session_ttl=300.0)
    desk.connect(1)
    desk.disconnect(1)
    desk.engine.tick(now=desk.now + 299.0)
    assert desk.engine.figures()["sessions"] == 1
    desk.engine.tick(now=desk.now + 300.0)
    assert desk.engine.figures()["sessions"] == 0


def test_kept_replies_are_counted_by_what_they_hold_on_to() -> None:
    desk = Desk(session_replies_bytes_max=10_000)
    desk.ask(Put("a", bytes(20_000)), request_id=1, acknowledged=0)
    lost = CompareAndSet(key="a", value=b"", expected_revision=0)
    assert not desk.ask(lost, request_id=2, acknowledged=0).succeeded
    assert desk.ask(lost, request_id=3, acknowledged=0).kind is LIMIT
    assert not desk.ask(lost, request_id=3, acknowledged=2).succeeded
    read = Transact(when=(), then=(Get("a"), Get("b")))
    assert desk.ask(read, request_id=4, acknowledged=3).succeeded
    assert desk.ask(read, request_id=5, acknowledged=3).kind is LIMIT


# ----------------------------------------------------------------------------------------------------------- limits

A = Put("a", b"")


@pytest.mark.parametrize(
    ("limits", "before", "refused"),
    [
        ({"key_bytes_max": 2}, [], Put("abc", b"")),
        ({"value_bytes_max": 2}, [], Put("a", b"abc")),
        ({"keys_max": 1}, [A], Put("b", b"")),
        ({"stored_bytes_max": 310}, [A], Put("a", b"1234567890")),
        ({"operations_max": 1}, [], Wait(keys=("a", "b"))),
        ({"watches_max": 1}, [Watch(prefix="")], Wait(keys=("a",))),
        ({"waits_bytes_max": 300}, [Wait(keys=("a",))], Wait(keys=("b",))),
        ({"leases_max": 1}, [Grant(ttl=1.0)], Put("a", b"", ttl=1.0)),
        ({"lease_ttl_max": 1.0}, [], Grant(ttl=1.5)),
        ({"frame_bytes_max": 5000, "value_bytes_max": 900}, [Put("a", bytes(900))] * 2, GetMany(keys=("a",) * 6)),
        ({"writes_max": 1}, [Put("a", b""), Put("b", b"")], DeletePrefix(prefix="")),
        ({"writes_max": 1}, [], Transact(when=(), then=(Put("a", b""), Put("b", b"")))),
        ({"session_replies_max": 1}, [A], Put("b", b"")),
        ({"session_replies_bytes_max": 1}, [A], Put("b", b"")),
    ],
)
def test_what_passes_a_limit_is_refused_before_anything_has_changed(
    limits: dict[str, Any], before: list[Request[Any]], refused: Request[Any]
) -> None:
    """The exact edges, and the messages, are in `guarantees/test_s6_bounded.py`."""
    desk = Desk(**limits)
    desk.connect()
    for request in before:
        assert not isinstance(desk.ask(request, acknowledged=0), Failed)
    fingerprint = desk.fingerprint()
    response = desk.ask(refused, acknowledged=0)
    assert isinstance(response, Failed)
    assert response.kind is LIMIT
    assert desk.fingerprint() == fingerprint


def test_what_is_there_may_be_rewritten_when_there_is_room_for_no_more() -> None:
    desk = Desk(keys_max=1, stored_bytes_max=310)
    desk.ask(Put("a", b"123456789"))
    assert desk.ask(Put("a", b"987654321")) == Written(revision=2)
    assert desk.ask(Put("a", b"")) == Written(revision=3)


def test_a_store_that_is_fuller_than_its_limits_now_allow_can_be_emptied() -> None:
    """As one is that was started again with lower limits."""
    desk = Desk()
    for key in "abc":
        desk.ask(Put(key, bytes(100)))
    desk.engine._admission._limits = replace(desk.engine.limits, keys_max=1, stored_bytes_max=500)
    assert desk.fails(Put("d", b"")).kind is LIMIT
    assert desk.fails(Put("a", bytes(101))).kind is LIMIT
    assert desk.ask(Put("a", bytes(99))) == Written(revision=4)
    assert desk.ask(Delete("b")).count == 1


def test_a_wait_whose_answer_has_grown_too_large_fails_when_it_would_be_answered() -> None:
    desk = Desk(frame_bytes_max=5000, value_bytes_max=900)
    desk.ask(Wait(keys=("a",) * 6), request_id=5)
    desk.ask(Put("a", bytes(900)))
    answer = desk.answers[1, 5]
    assert isinstance(answer, Failed)
    assert answer.kind is LIMIT


def test_there_are_no_more_sessions_than_agreed() -> None:
    desk = Desk(sessions_max=1)
    assert desk.connect(1) is not None
    assert desk.connect(2) is None


# ---------------------------------------------------------------------------------------- against a plain dictionary


@dataclass
class Model:
    """A dictionary, its revision, and what changed at each: the whole of the store without leases."""

    entries: dict[str, Entry] = field(default_factory=dict)
    revision: int = 0
    log: list[tuple[Event, ...]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def ask(self, request: Request[Any]) -> Response | FailureKind:
        outcome = self.carry_out(request)
        if self.events:
            self.revision += 1
            self.log.append(tuple(self.events))
            self.events = []
        return outcome

    def put(self, key: str, value: bytes) -> int:
        before = self.entries.get(key)
        revision = self.revision + 1
        self.entries[key] = entry(key, value, before.create_revision if before else revision, revision)
        self.events.append(
            Event(
                kind="put",
                revision=revision,
                key=key,
                value=value,
                create_revision=self.entries[key].create_revision,
            )
        )
        return revision

    def delete(self, key: str) -> bool:
        if self.entries.pop(key, None) is None:
            return False
        self.events.append(Event(kind="delete", revision=self.revision + 1, key=key))
        return True

    def under(self, prefix: str) -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def holds(self, condition: Condition) -> bool:
        found = self.entries.get(condition.key)
        seen: object = {
            Target.MOD_REVISION: found.mod_revision if found else 0,
            Target.CREATE_REVISION: found.create_revision if found else 0,
            Target.VALUE: found.value if found else None,
            Target.EXISTS: found is not None,
            Target.VALUE_IF_ANY: found.value if found else condition.expected,
        }[condition.target]
        return seen == condition.expected

    def operate(self, operation: Operation) -> int | bool | Entry | None:
        held = self.entries.get(operation.key)
        match operation:
            case Put(key=key, value=value):
                return self.put(key, value)
            case Get(key=key):
                return held
            case Delete(key=key):
                return self.delete(key)
            case Add(key=key, amount=amount):
                total = int(held.value if held else 0) + amount
                self.put(key, str(total).encode())
                return total
            case Append(key=key, value=value):
                joined = (held.value if held else b"") + value
                self.put(key, joined)
                return len(joined)
            case Create(key=key, value=value):
                return self.put(key, value) if held is None else held

    def possible(self, operation: Operation) -> bool:
        if not isinstance(operation, Add) or operation.key not in self.entries:
            return True
        try:
            int(self.entries[operation.key].value)
        except ValueError:
            return False
        return True

    def carry_out(self, request: Request[Any]) -> Response | FailureKind:
        match request:
            case Guarded(when=conditions, request=inner):
                return self.carry_out(inner) if all(map(self.holds, conditions)) else CONDITION
            case Get(key=key):
                return Found(entry=self.entries.get(key))
            case Put(key=key, value=value):
                return Written(revision=self.put(key, value))
            case Delete(key=key):
                deleted = self.delete(key)
                return Counted(count=deleted, revision=self.revision + deleted)
            case Add() | Append():
                if not self.possible(request):
                    return USAGE
                result = self.operate(request)
                assert isinstance(result, int)
                return Added(value=result, revision=self.revision + 1)
            case GetMany(keys=keys):
                return Listing(entries=tuple(map(self.entries.get, keys)), revision=self.revision)
            case List(prefix=prefix, keys_only=keys_only):
                found = [self.entries[key] for key in self.under(prefix)]
                if keys_only:
                    found = [replace(each, value=b"") for each in found]
                return Listing(entries=tuple(found), revision=self.revision)
            case Count(prefix=prefix):
                return Counted(count=len(self.under(prefix)), revision=self.revision)
            case DeletePrefix(prefix=prefix):
                count = sum(map(self.delete, self.under(prefix)))
                return Counted(count=count, revision=self.revision + bool(count))
            case CompareAndSet(key=key, value=value, expected_revision=revision, expected_value=expected):
                held = self.entries.get(key)
                if revision is not None:
                    succeeded = (held.mod_revision if held else 0) == revision
                else:
                    succeeded = held is not None and held.value == expected
                if succeeded:
                    self.put(key, value)
                return CompareAndSetResult(succeeded=succeeded, entry=self.entries.get(key))
            case Transact(when=conditions, then=then, otherwise=otherwise):
                succeeded = all(map(self.holds, conditions))
                branch = then if succeeded else otherwise
                written = [operation.key for operation in branch if not isinstance(operation, Get)]
                if len(written) > len(set(written)) or not all(map(self.possible, branch)):
                    return USAGE
                results = tuple(map(self.operate, branch))
                changed = bool(self.events)
                return TransactionResult(succeeded=succeeded, results=results, revision=self.revision + changed)
        raise AssertionError(request)

    def since(self, revision: int, prefix: str) -> Stream:
        """What a watch that was opened at a revision must have been told."""
        matching = (tuple(event for event in events if event.key.startswith(prefix)) for events in self.log[revision:])
        return [events for events in matching if events]


KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "b/1"])
PREFIXES = st.sampled_from(["", "a", "a/", "b/1", "c"])
VALUES = st.sampled_from([b"", b"1", b"22", b"text"])
REVISIONS = st.integers(0, 12)
CONDITIONS = st.one_of(
    st.builds(lambda key, n: when.mod_revision(key) == n, KEYS, REVISIONS),
    st.builds(lambda key, n: when.create_revision(key) == n, KEYS, REVISIONS),
    st.builds(lambda key, value: when.value(key) == value, KEYS, VALUES),
    st.builds(when.exists, KEYS),
    st.builds(when.missing, KEYS),
)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, VALUES),
    st.builds(Get, KEYS),
    st.builds(Delete, KEYS),
    st.builds(Add, KEYS, st.integers(-3, 3)),
    st.builds(Append, KEYS, VALUES),
)
SOME_OPERATIONS = st.lists(OPERATIONS, max_size=3).map(tuple)
PLAIN = st.one_of(
    OPERATIONS,
    st.builds(GetMany, keys=st.lists(KEYS, max_size=3).map(tuple)),
    st.builds(List, prefix=PREFIXES, keys_only=st.booleans()),
    st.builds(Count, prefix=PREFIXES),
    st.builds(DeletePrefix, prefix=PREFIXES),
    st.builds(CompareAndSet, key=KEYS, value=VALUES, expected_revision=REVISIONS),
    st.builds(CompareAndSet, key=KEYS, value=VALUES, expected_value=VALUES),
)
REQUESTS = st.one_of(
    PLAIN,
    st.builds(Guarded, when=st.lists(CONDITIONS, max_size=2).map(tuple), request=PLAIN),
    st.builds(
        Transact, when=st.lists(CONDITIONS, max_size=2).map(tuple), then=SOME_OPERATIONS, otherwise=SOME_OPERATIONS
    ),
)
WATCHES = st.one_of(
    st.builds(Watch, prefix=PREFIXES),
    st.builds(Watch, prefix=PREFIXES, snapshot=st.just(value=True)),
    st.builds(Watch, prefix=PREFIXES, start_revision=REVISIONS),
)
AGAIN = "again"  # send the last request once more


@settings(deadline=None)
@given(st.lists(st.one_of(REQUESTS, REQUESTS, WATCHES, st.just(AGAIN)), max_size=40))
def test_the_store_is_a_dictionary_that_counts_its_revisions(steps: list[Request[Any] | str]) -> None:
    desk, model = Desk(), Model()
    expected: dict[int, Stream] = {}
    opened: dict[int, tuple[int, str]] = {}
    last: tuple[Request[Any], Any] | None = None
    for step in steps:
        if isinstance(step, str):
            if last is not None and not isinstance(last[0], Get | GetMany | List | Count):
                again = desk.ask(last[0], request_id=desk.last_id[1], acknowledged=0)
                assert isinstance(last[0], Guarded) or again == last[1]
            continue
        if isinstance(step, Watch):
            last = None
            response = desk.ask(step)
            if (step.start_revision or 0) > model.revision + 1:
                assert response.kind is USAGE
                continue
            assert response == Watching(revision=model.revision)
            watch_id = desk.last_id[1]
            expected[watch_id] = []
            opened[watch_id] = (model.revision, step.prefix)
            if step.start_revision is not None:
                opened[watch_id] = (max(step.start_revision - 1, 0), step.prefix)
            elif step.snapshot:
                puts = [
                    Event(
                        kind="put",
                        revision=each.mod_revision,
                        key=each.key,
                        value=each.value,
                        create_revision=each.create_revision,
                    )
                    for each in map(model.entries.__getitem__, model.under(step.prefix))
                ]
                expected[watch_id] = [(*puts, Event(kind="synced", revision=model.revision))]
            continue
        response, answer = desk.ask(step), model.ask(step)
        last = step, response
        if isinstance(answer, FailureKind):
            assert isinstance(response, Failed)
            assert response.kind is answer
        else:
            assert response == answer
        assert desk.engine.revision == model.revision
    assert list(desk.engine._keys.index.with_prefix("")) == sorted(model.entries)
    assert desk.engine._keys.entries == model.entries
    for watch_id, (revision, prefix) in opened.items():
        assert desk.told[1, watch_id] == expected[watch_id] + model.since(revision, prefix)


@settings(deadline=None)
@given(
    st.lists(st.one_of(OPERATIONS, st.builds(lambda key: Put(key, b"", ttl=0.05), KEYS), st.just(AGAIN)), max_size=40)
)
def test_what_the_store_holds_is_counted_right(steps: list[Request[Any] | str]) -> None:
    desk = Desk()
    for step in steps:
        if isinstance(step, str):
            desk.pass_time(0.06)
        else:
            desk.ask(step)
    recount = Desk()
    for each in desk.engine._keys.entries.values():
        recount.ask(Put(each.key, each.value))
    now, then = desk.engine.figures(), recount.engine.figures()
    assert (now["keys"], now["stored_bytes"]) == (then["keys"], then["stored_bytes"])
    desk.ask(DeletePrefix(prefix=""))
    figures = desk.engine.figures()
    assert (figures["keys"], figures["stored_bytes"], figures["leases"]) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------- what is to survive


@dataclass
class Ledger:
    """All that a durable engine said must survive, put together in the plainest way."""

    revisions: list[tuple[Event, ...]] = field(default_factory=list)
    leases: dict[int, SavedLease] = field(default_factory=dict)
    sessions: dict[bytes, tuple[int, dict[int, Response]]] = field(default_factory=dict)
    last_lease: int = 0
    last_session: int = 0
    compacted: int = 0

    def write(self, facts: Facts | None) -> None:
        if facts is None:
            return
        self.revisions += facts.revisions
        self.compacted = max(self.compacted, facts.compacted)
        self.last_session = max(self.last_session, facts.last_session)
        for lease in facts.granted:
            self.leases[lease.id] = lease
            self.last_lease = max(self.last_lease, lease.id)
        for lease_id in facts.ended:
            del self.leases[lease_id]
        for session_id, number in facts.sessions.items():
            self.sessions.pop(session_id, None)
            if number is not None:
                self.sessions[session_id] = number, {}
        for reply in facts.replies:
            replies = self.sessions[reply.session_id][1]
            replies[reply.request_id] = reply.response
            for request_id in [each for each in replies if each <= reply.acknowledged]:
                del replies[request_id]

    def saved(self) -> Saved:
        entries: dict[str, Entry] = {}
        for event in (event for events in self.revisions for event in events):
            if event.kind == "put":
                entries[event.key] = event.entry
            else:
                del entries[event.key]
        return Saved(
            store_id="store-1",
            revision=len(self.revisions),
            compacted=self.compacted,
            last_lease=self.last_lease,
            last_session=self.last_session,
            entries=tuple(entries.values()),
            leases=tuple(self.leases.values()),
            sessions=tuple(
                SavedSession(id=session_id, number=number, replies=tuple(replies.items()))
                for session_id, (number, replies) in self.sessions.items()
            ),
            history=tuple(self.revisions[self.compacted :]),
        )


LEASED = st.one_of(
    st.builds(lambda key, lease: Put(key, b"", lease=lease), KEYS, st.integers(1, 6)),
    st.builds(lambda key, ttl: Put(key, b"", ttl=ttl), KEYS, st.sampled_from([1.0, 100.0])),
    st.builds(lambda key, lease: Append(key, b"x", lease=lease), KEYS, st.integers(1, 6)),
    st.builds(lambda key, lease: Add(key, 1, lease=lease), KEYS, st.integers(1, 6)),
    st.builds(Grant, ttl=st.sampled_from([1.0, 100.0]), disconnect_ttl=st.none() | st.just(1.0)),
    st.builds(Revoke, lease=st.integers(1, 6)),
)
HAPPENINGS = st.one_of(
    REQUESTS,
    LEASED,
    st.sampled_from(["time passes", "reconnect", "another client", "goodbye", "a long time passes", "full", "free"]),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(HAPPENINGS, max_size=40), st.sampled_from([10**6, 1500]))
def test_a_durable_store_goes_on_as_if_it_had_not_stopped(
    happenings: list[Request[Any] | str], history_bytes_max: int
) -> None:
    limits = Limits(history_bytes_max=history_bytes_max, session_ttl=300.0)
    desk, ledger = Desk(Engine(store_id="store-1", limits=limits, durable=True)), Ledger()
    client, peer = 1, 1
    request_ids = {1: 0}

    def record() -> None:
        """As the server does after each step, unless the disk is full: then no reply is kept, either."""
        if desk.engine.read_only is None:
            ledger.write(desk.engine.take_facts())

    def connect() -> None:
        nonlocal peer
        record()
        peer += 1
        desk.connect(peer, session=b"client %09d" % client)

    connect()
    record()
    for happening in happenings:
        if isinstance(happening, Request):
            request_ids[client] += 1
            desk.ask(happening, peer=peer, request_id=request_ids[client], acknowledged=request_ids[client] - 2)
            record()
            continue
        match happening:
            case "time passes":
                desk.pass_time(0.6)
            case "a long time passes":
                desk.disconnect(peer)
                client = 3 - client
                request_ids.setdefault(client, 0)
                desk.now += 301.0
                desk.engine.tick(now=desk.now)
                connect()
            case "reconnect":
                desk.disconnect(peer)
                connect()
            case "goodbye":
                desk.disconnect(peer, how=Closing.GOODBYE)
                client = 3 - client
                request_ids.setdefault(client, 0)
                connect()
            case "another client":
                client = 3 - client
                request_ids.setdefault(client, 0)
                connect()
            case "full":
                desk.engine.read_only = "the disk is full"
            case "free":
                desk.engine.read_only = None
        record()
    ledger.write(desk.engine.take_facts())
    assert desk.engine.take_facts() is None

    before, after = desk.engine, Engine.restore(ledger.saved(), limits=limits, now=50_000.0)
    assert ledger.compacted == before._history.compacted
    assert after._keys.entries == before._keys.entries
    assert list(after._keys.index.with_prefix("")) == list(before._keys.index.with_prefix(""))
    counted = ("revision", "keys", "stored_bytes", "history_bytes", "compacted_revision", "leases", "sessions")
    figures = before.figures(), after.figures()
    assert [figures[1][name] for name in counted] == [figures[0][name] for name in counted]
    assert after._history.since(before._history.compacted + 1, "") == before._history.since(
        before._history.compacted + 1, ""
    )
    for lease_id, lease in before._leases._leases.items():
        restored = after._leases.get(lease_id)
        assert restored is not None
        assert (restored.ttl, restored.disconnect_ttl, restored.anonymous, restored.keys, restored.keeper) == (
            lease.ttl,
            lease.disconnect_ttl,
            lease.anonymous,
            lease.keys,
            None,
        )
        assert after._leases.remaining(restored) == lease.ttl
    for session_id, session in before._sessions._sessions.items():
        again = after._sessions._sessions[session_id]
        assert again.number == session.number
        for request_id in range(1, max(request_ids.values()) + 2):
            if request_id in session._replies:
                assert again.replay(request_id) == session.replay(request_id)
            assert (again.replay(request_id) is None) == (session.replay(request_id) is None), "applied again, or lost"

    # And it goes on: numbers that were used are not used again.
    assert after.connect(1, session_id=b"somebody else...", now=50_000.0) == (before._sessions.made + 1, None)
    next_lease = after.apply(Grant(ttl=1.0), peer=1, request_id=1, acknowledged=0, now=50_000.0).response
    assert next_lease == Granted(lease=before._leases._last_id + 1, ttl=1.0)


def test_a_store_in_memory_has_nothing_to_make_durable() -> None:
    desk = Desk()
    desk.ask(Put("a", b""))
    assert desk.engine.take_facts() is None


def test_a_store_that_cannot_write_now_says_why_and_can_be_read() -> None:
    desk = Desk()
    desk.ask(Put("a", b"1"))
    desk.engine.read_only = "the disk is full"
    refused = desk.fails(Put("a", b"2"))
    assert refused.kind is LIMIT
    assert "the disk is full; reading goes on" in refused.message
    assert desk.ask(Get("a")).entry.value == b"1"
    desk.engine.read_only = None
    assert desk.ask(Put("a", b"2"), request_id=desk.last_id[1]) == Written(revision=2)  # it may be tried again


@pytest.mark.parametrize("make", [lambda lease: Add("a", 1, lease=lease), lambda lease: Append("a", b"1", lease=lease)])
def test_a_key_that_is_made_by_adding_or_appending_may_be_put_on_a_lease(make: Any) -> None:
    desk = Desk()
    lease = grant(desk, 1.0)
    desk.ask(make(lease))
    assert desk.ask(Get("a")).entry.lease == lease
    desk.ask(make(None))
    assert desk.ask(Get("a")).entry.lease == lease
    assert desk.fails(make(99)).kind is LEASE
    assert desk.fails(Transact(when=(), then=(make(99),))).kind is LEASE
    desk.ask(Put("a", b"1"))
    desk.ask(make(lease))
    assert desk.ask(Get("a")).entry.lease is None  # it keeps what it has, which is none
    desk.pass_time(2.0)
    assert desk.keys() == ["a"]


def test_an_engine_has_limits_without_being_given_any() -> None:
    assert Engine(store_id="x").limits.keys_max > 0


def test_a_lease_that_was_ending_when_its_server_died_goes_on_ending() -> None:
    """Its holder was told that it had lapsed, and half of its keys were gone: it must not be kept again."""
    limits = Limits(writes_max=10)
    desk, ledger = Desk(Engine(store_id="store-1", limits=limits, durable=True)), Ledger()
    lease = desk.ask(Grant(ttl=60.0)).lease
    for number in range(25):
        desk.ask(Put(f"k/{number:02}", b"", lease=lease))
    desk.ask(Revoke(lease=lease))
    ledger.write(desk.engine.take_facts())
    again = Desk(Engine.restore(ledger.saved(), limits=limits, now=desk.now))
    assert len(again.keys()) == 15
    again.fails(KeepAlive(lease=lease))
    assert again.engine.next_tick_in() == 0.0
    again.look()
    again.look()
    assert again.keys() == []
    ledger.write(again.engine.take_facts())
    assert ledger.leases == {}, "and nothing of it is left"


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


def test_a_key_is_created_once_and_who_comes_later_is_told_what_is_there() -> None:
    desk = Desk()
    first = desk.ask(Transact(when=(), then=(Create("role", b"mine"),)))
    second = desk.ask(Transact(when=(), then=(Create("role", b"yours", lease=CHOSEN), Put("x", b"")), grants=()))
    assert first.results == (1,)
    assert second.results == (entry("role", b"mine", 1), 2)
    assert desk.ask(Get("role")).entry == entry("role", b"mine", 1)


def test_a_value_if_any_is_met_by_the_value_and_by_a_missing_key() -> None:
    desk = Desk()
    condition = (when.value_if_any("settings") == b"ours",)
    assert desk.ask(Transact(when=condition, then=(Put("settings", b"ours"),))).succeeded
    assert desk.ask(Transact(when=condition, then=(Put("x", b""),))).succeeded
    desk.ask(Put("settings", b"theirs"))
    assert not desk.ask(Transact(when=condition, then=(Put("x", b""),))).succeeded


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
