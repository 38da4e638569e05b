"""The store as one state machine: it agrees with a plain dictionary that counts revisions, and tells who must know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from store import when
from store.engine.processes import Closing
from store.messages import (
    Add,
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Count,
    Counted,
    Delete,
    DeletePrefix,
    Done,
    Failed,
    FailureKind,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Guarded,
    KeepAlive,
    List,
    Listing,
    Operation,
    Ping,
    Pong,
    Put,
    Request,
    Revoke,
    Stats,
    TimeToLive,
    Transact,
    TransactionResult,
    Wait,
    Watch,
    Written,
)
from tests.support.by_hand import Desk, entry, grant

USAGE, LIMIT, LEASE, CONDITION, COMPACTED, FORGOTTEN, *_ = FailureKind


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
