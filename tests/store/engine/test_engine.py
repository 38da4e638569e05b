"""The store as one state machine: it agrees with a plain dictionary with revisions, and notifies the right peers."""

from dataclasses import replace
from typing import Any

import pytest

from store import when
from store.messages import (
    Add,
    Append,
    CompareAndSet,
    Delete,
    Done,
    FailureKind,
    Get,
    Grant,
    Guarded,
    KeepAlive,
    Put,
    Request,
    Revoke,
    TimeToLive,
    Transact,
    Wait,
    Watch,
    Written,
)
from tests.support.by_hand import Desk

USAGE, LIMIT, LEASE, *_ = FailureKind


class Dance(Request[Done]):
    """A request that no store knows."""


NO_NUMBERS = [b"", b"-", b"1_000", b" 1", b"+1", b"1.0", b"\xc2\xb2", b"9" * 21]
REFUSED: list[tuple[Request[Any], FailureKind]] = [
    *((request, USAGE) for request in (Put("", b""), Add("", 1), Append("", b""), Wait(keys=("",)))),
    (CompareAndSet(key="", value=b"", expected_revision=0), USAGE),
    *((Add(f"no number {place}", 1), USAGE) for place in range(len(NO_NUMBERS))),
    *((Dance(), USAGE), (Guarded(when=(), request=Guarded(when=(), request=Get("a"))), USAGE)),
    *((Grant(ttl=ttl), USAGE) for ttl in (0.0, -1.0, float("nan"))),
    *((Grant(ttl=1.0, disconnect_ttl=0.0), USAGE), (Grant(ttl=1.0, gone_ttl=-1.0), USAGE)),
    *((Put("a", b"", ttl=0.0), USAGE), (Put("a", b"", ttl=1.0, lease=7), USAGE)),
    *((request, LEASE) for request in (KeepAlive(lease=7), Revoke(lease=7), TimeToLive(lease=7))),
    *((Put("a", b"", lease=7), LEASE), (Add("b", 1, lease=7), LEASE), (Append("b", b"", lease=7), LEASE)),
    (CompareAndSet(key="a", value=b"", expected_revision=0, lease=7), LEASE),
    (Watch(prefix="", snapshot=True, start_revision=1), USAGE),
]


@pytest.mark.parametrize(("request_", "kind"), REFUSED)
def test_invalid_requests_are_refused_and_change_nothing(request_: Request[Any], kind: FailureKind) -> None:
    desk = Desk()
    for place, held in enumerate(NO_NUMBERS):
        desk.ask(Put(f"no number {place}", held))
    before = desk.fingerprint()
    assert desk.fails(request_).kind is kind
    assert desk.fingerprint() == before


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_stays_within_64_bits(sign: int) -> None:
    desk = Desk()
    most = sign * (2**63 - 1)
    assert desk.ask(Add("a", most)).value == most
    assert "gives a number of more than 64 bits" in desk.fails(Add("a", sign)).message
    assert desk.ask(Get("a")).entry.value == b"%d" % most


def test_messages_show_the_beginning_of_long_values() -> None:
    desk = Desk()
    refused = desk.fails(Guarded(when=(when.value("k" * 10**6) == b"v" * 10**6,), request=Delete("a")))
    assert len(refused.message) < 200
    assert "kkk" in refused.message
    assert "vvv" in refused.message
    assert len(desk.fails(CompareAndSet(key="k" * 10**6, value=b"")).message) < 200
    twice = Transact(when=(), then=(Delete("k" * 10**6), Delete("k" * 10**6)))
    assert len(desk.fails(twice).message) < 200


def test_a_lease_that_is_granted_again_after_a_reconnect_is_kept_by_the_new_connection() -> None:
    """Regression: it expired `disconnect_ttl` after the end of the old connection, before its owner had the answer."""
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


def test_existing_keys_may_be_rewritten_in_a_full_store() -> None:
    desk = Desk(keys_max=1, stored_bytes_max=310)
    desk.ask(Put("a", b"123456789"))
    assert desk.ask(Put("a", b"987654321")) == Written(revision=2)
    assert desk.ask(Put("a", b"")) == Written(revision=3)


def test_a_store_that_is_fuller_than_its_limits_now_allow_can_be_emptied() -> None:
    """For example a store that was started again with lower limits."""
    desk = Desk()
    for key in "abc":
        desk.ask(Put(key, bytes(100)))
    desk.engine.state.limits = replace(desk.engine.limits, keys_max=1, stored_bytes_max=500)
    assert desk.fails(Put("d", b"")).kind is LIMIT
    assert desk.fails(Put("a", bytes(101))).kind is LIMIT
    assert desk.ask(Put("a", bytes(99))) == Written(revision=4)
    assert desk.ask(Delete("b")).count == 1
