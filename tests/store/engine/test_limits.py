"""A request that is one past a limit is refused and changes nothing (S6), for the limits that pure modules enforce."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import Add, Append, Delete, Get, Grant, Put, when
from store.engine.keyspace import ENTRY_OVERHEAD
from store.engine.sessions import AWAY_LEAST, REPLY
from store.engine.waits import WAIT_OVERHEAD
from store.messages import (
    Cancel,
    CompareAndSet,
    DeletePrefix,
    Failed,
    FailureKind,
    GetMany,
    Granted,
    Guarded,
    KeepAlive,
    Request,
    Revoke,
    TimeToLive,
    Transact,
    Wait,
    Watch,
    Written,
)
from tests.support.by_hand import Desk

K = 1000


@dataclasses.dataclass(frozen=True)
class Case:
    """A limit, requests that just reach it, and one that goes past it."""

    limit: str
    most: int | float
    past: Request[Any]
    up_to: tuple[Request[Any], ...] = ()
    others: tuple[tuple[str, int], ...] = ()  # other limits, raised so that this one is met first


def grants(count: int) -> tuple[Request[Any], ...]:
    return tuple(Grant(ttl=60.0) for _ in range(count))


def filled(size: int, key: str = "a") -> Put:
    """Return a put after which a store that was empty holds so many bytes."""
    return Put(key, bytes(size - ENTRY_OVERHEAD - (1 if key.isascii() else 4)))


WAITS_OF_TWO = WAIT_OVERHEAD * 2 + 2
BIG, BIG_TOO = Put("big", bytes(5000)), Put("too", bytes(5000))
HALVES = Put("a", bytes(5 * K)), Put("b", bytes(5 * K))
THIRD = Put("c", b"1")
LITTLE = (("outbox_bytes_max", K), ("frame_bytes_max", 10 * K), ("value_bytes_max", 5 * K), ("history_bytes_max", K))
ROOM = (("frame_bytes_max", 10 * K), ("value_bytes_max", 5 * K))

CASES = [
    Case("key_bytes_max", 8, Put("k" * 9, b""), (Put("k" * 8, b""),)),
    Case("key_bytes_max", 8, Put("é" * 4 + "k", b""), (Put("é" * 4, b""),)),
    Case("key_bytes_max", 8, Add("k" * 9, 1), (Add("k" * 8, 1),)),
    Case("key_bytes_max", 8, Append("k" * 9, b"")),
    Case("key_bytes_max", 8, Wait(keys=("k" * 9,)), (Wait(keys=("k" * 8,)),)),
    Case("key_bytes_max", 8, Watch(prefix="k" * 9), (Watch(prefix="k" * 8),)),
    Case("key_bytes_max", 8, CompareAndSet(key="k" * 9, value=b"", expected_revision=0)),
    Case("key_bytes_max", 8, Transact(when=(), then=(Put("a", b""), Put("k" * 9, b"")))),
    Case("value_bytes_max", 100, Put("a", bytes(101)), (Put("a", bytes(100)),)),
    Case("value_bytes_max", 100, Append("a", b"x"), (Put("a", bytes(100)),)),
    Case("value_bytes_max", 100, Transact(when=(), then=(Append("a", bytes(51)),)), (Append("a", bytes(50)),)),
    Case("append_bytes_max", 100, Append("a", b"x"), (Put("a", bytes(101)), Put("a", bytes(99)), Append("a", b"x"))),
    Case("append_bytes_max", 100, Append("a", bytes(101))),
    Case("append_bytes_max", 100, Transact(when=(), then=(Append("a", bytes(51)),)), (Append("a", bytes(50)),)),
    Case("keys_max", 2, Put("c", b""), (Put("a", b""), Put("b", b""))),
    Case("keys_max", 2, Add("c", 1), (Put("a", b""), Add("b", 1))),
    Case("keys_max", 2, Transact(when=(), then=(Put("b", b""), Put("c", b""))), (Put("a", b""),)),
    Case("stored_bytes_max", K, filled(K + 1), (filled(K),)),
    Case("stored_bytes_max", K, filled(K + 1, "é"), (filled(K, "é"),)),
    Case("stored_bytes_max", K, Append("a", b"x"), (filled(K),)),
    Case(
        "group_keys_max",
        2,
        Put("/rdzv/1/c", b""),
        (Transact(when=(), then=(Put("/rdzv/1/a", b""), Put("/rdzv/1/b", b""))),),
    ),
    Case("group_bytes_max", K, Append("/rdzv/1/a", b"x"), (Put("/rdzv/1/a", bytes(K - ENTRY_OVERHEAD - 9)),)),
    Case("writes_max", 3, Transact(when=(), then=tuple(Get("a") for _ in range(4)))),
    Case("writes_max", 3, Transact(when=(), then=(Get("a"),), otherwise=(Get("a"),) * 3)),
    Case("operations_max", 3, Transact(when=(when.missing("a"),) * 4, then=())),
    Case("operations_max", 3, Guarded(when=(when.missing("a"),) * 4, request=Get("a"))),
    Case("operations_max", 3, GetMany(keys=("a",) * 4), (GetMany(keys=("a",) * 3),)),
    Case("operations_max", 3, Wait(keys=("a",) * 4), (Wait(keys=("a",) * 3),)),
    Case("watches_max", 2, Watch(prefix=""), (Watch(prefix=""), Wait(keys=("x",)))),
    Case("watches_max", 2, Wait(keys=("x",)), (Watch(prefix=""), Wait(keys=("x",)))),
    Case("waits_bytes_max", WAITS_OF_TWO, Wait(keys=("x",)), (Wait(keys=("x", "y")),)),
    Case("waits_bytes_max", WAITS_OF_TWO, Guarded(when=(when.missing("c"),), request=Wait(keys=("a", "b")))),
    Case(
        "waits_bytes_max",
        1000,
        Guarded(when=(when.value("v") == bytes(601),), request=Wait(keys=("a",))),
        (Put("v", bytes(601)),),
    ),
    Case("leases_max", 2, Grant(ttl=1.0), grants(2)),
    Case("leases_max", 2, Put("a", b"", ttl=1.0), grants(2)),
    Case("leases_max", 2, Transact(when=(), then=(Put("a", b"", ttl=1.0), Put("b", b"", ttl=1.0))), grants(1)),
    Case("lease_ttl_max", 60.0, Grant(ttl=61.0), (Grant(ttl=60.0),)),
    Case("lease_ttl_max", 60.0, Put("a", b"", ttl=61.0), (Put("a", b"", ttl=60.0),)),
    Case("lease_ttl_max", 60.0, Grant(ttl=1.0, disconnect_ttl=61.0)),
    Case("frame_bytes_max", 10 * K, GetMany(keys=("big", "big")), (BIG,), ROOM),
    Case(
        "frame_bytes_max",
        10 * K,
        Transact(when=(), then=(*HALVES, Put("c", b"1"))),
        (Transact(when=(), then=HALVES),),
        ROOM,
    ),
    Case("memory_bytes_max", 16 * K, Put("b", bytes(K)), (Put("a", bytes(K)),), LITTLE),
    Case("memory_bytes_max", 16 * K, Wait(keys=("b",)), (Put("a", bytes(1050)),), LITTLE),
    Case("writes_max", 1, DeletePrefix(prefix=""), (Put("a", b""), Put("b", b""))),
    Case("writes_max", 1, Transact(when=(), then=(Put("a", b""), Delete("b")))),
    Case("frame_bytes_max", 10 * K, Wait(keys=("big", "big")), (BIG,), ROOM),
    Case("frame_bytes_max", 10 * K, Transact(when=(), then=(Put("a", b""), Get("big"), Get("big"))), (BIG,), ROOM),
    Case(
        "frame_bytes_max",
        10 * K,
        Transact(when=(), then=(Put("a", bytes(4999)), Get("a"), Get("a"), Get("a"))),
        (),
        ROOM,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.limit}, {type(case.past).__name__}")
def test_one_past_a_limit_is_refused_and_nothing_else_changes(case: Case) -> None:
    """Each limit has a clear error, and no client can pass it."""
    desk = Desk(**{case.limit: case.most, **dict(case.others)})
    desk.connect()
    desk.ask(Watch(prefix=""), peer=2)
    for request in case.up_to:
        assert not isinstance(desk.ask(request), Failed)
    before = desk.fingerprint()
    refused = desk.fails(case.past)
    assert refused.kind is FailureKind.LIMIT
    assert f"{case.limit} is {case.most:g}" in refused.message
    assert desk.fingerprint() == before


def test_a_wait_whose_answer_grew_too_large_gets_an_error() -> None:
    """Each limit has a clear error, and no client can pass it."""
    desk = Desk(**dict(ROOM))
    desk.ask(Wait(keys=("big", "big")), request_id=5)
    desk.ask(BIG, peer=2)
    answer = desk.answers[1, 5]
    assert isinstance(answer, Failed)
    assert answer.kind is FailureKind.LIMIT
    assert "frame_bytes_max is 10000" in answer.message
    assert desk.engine.figures()["waits"] == 0


def test_asking_about_a_lease_with_too_many_keys_is_refused() -> None:
    """Each limit has a clear error, and no client can pass it."""
    desk = Desk(**dict(ROOM))
    lease = desk.ask(Grant(ttl=60.0)).lease
    for number in range(6):
        desk.ask(Put(f"{number}{'k' * 1999}", b"", lease=lease))
    assert "frame_bytes_max is 10000" in desk.fails(TimeToLive(lease=lease)).message


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"session_replies_max": 3}, "session_replies_max is 3"),
        ({"session_replies_bytes_max": 3 * REPLY}, f"session_replies_bytes_max is {3 * REPLY}"),
        ({"replies_bytes_max": 3 * REPLY}, f"replies_bytes_max is {3 * REPLY}"),
    ],
)
def test_replies_that_are_not_acknowledged_are_kept_up_to_a_limit(limits: dict[str, int], limit: str) -> None:
    """Sessions have a limit that no client can pass, with a clear error."""
    desk = Desk(**limits)
    for request_id in range(1, 4):
        desk.ask(Add("a", 1), request_id=request_id, acknowledged=0)
    before = desk.fingerprint()
    for request_id in range(4, 50):
        refused = desk.ask(Add("a", 1), request_id=request_id, acknowledged=0)
        assert refused.kind is FailureKind.LIMIT
        assert limit in refused.message
        assert "read replies" in refused.message
    assert desk.fingerprint() == before
    (session,) = desk.engine._sessions._sessions.values()
    assert len(session.replies) == 3
    assert desk.ask(Get("a"), acknowledged=0).entry.value == b"3"  # reads are still possible
    assert desk.ask(Add("a", 1), acknowledged=1).value == 4


def test_unread_replies_of_other_clients_do_not_block_a_client() -> None:
    """Sessions and total memory have limits, and only the client that goes past one gets the error."""
    desk = Desk(replies_bytes_max=10 * REPLY)
    for request_id in range(1, 20):
        desk.ask(Add("a", 1), peer=1, request_id=request_id, acknowledged=0)
    assert desk.engine.figures()["replies_bytes"] == 10 * REPLY
    for number in range(1, 100):
        assert desk.ask(Add("b", 1), peer=2).value == number, "it acknowledges all it gets"
    assert desk.engine.figures()["replies_bytes"] <= 11 * REPLY
    assert f"replies_bytes_max is {10 * REPLY}" in desk.ask(Add("b", 1), peer=2, acknowledged=0).message


@pytest.mark.parametrize(
    "large",
    [
        Transact(when=(), then=(Put("b", b""), Get("large"))),
        Transact(when=(when.missing("x"),), then=(Delete("b"),), otherwise=(Get("large"),)),
        Transact(when=(), then=(Append("a", bytes(100_000)), Get("a"))),
        CompareAndSet(key="large", value=b"", expected_revision=77),
        CompareAndSet(key="new", value=bytes(100_000), expected_revision=0),
        Guarded(when=(), request=CompareAndSet(key="large", value=b"", expected_revision=77)),
    ],
)
def test_many_clients_that_each_keep_one_large_reply_meet_the_limit_of_all_replies(large: Request[Any]) -> None:
    """A kept reply still holds the values in it, long after their keys are overwritten.

    A client that had no other kept reply was always admitted: one reply of a frame's size for each.
    """
    desk = Desk(replies_bytes_max=10_000)
    desk.ask(Put("large", bytes(100_000)), peer=1)
    desk.ask(Transact(when=(), then=(Get("large"), Delete("b"))), peer=1, acknowledged=0)
    for peer in range(2, 10):
        refused = desk.ask(large, peer=peer, acknowledged=0)
        assert refused.kind is FailureKind.LIMIT
        assert "replies_bytes_max is 10000: " in refused.message
    assert desk.engine.figures()["replies_bytes"] < 110_000
    assert desk.ask(CompareAndSet(key="small", value=b"", expected_revision=0), peer=2).succeeded
    assert desk.ask(Transact(when=(), then=(Put("b", b""), Get("small"))), peer=3).succeeded


def test_sessions_of_clients_that_are_away_make_room_and_their_replies_are_not_guessed() -> None:
    """A lost reply gives `ConnectionLost`, never a guess (S2)."""
    desk = Desk(replies_bytes_max=10 * REPLY)
    first = desk.connect(1)
    for request_id in range(1, 11):
        desk.ask(Add("a", 1), peer=1, request_id=request_id, acknowledged=0)
    desk.disconnect(1)
    for request_id in range(1, 10):
        assert desk.ask(Add("b", 1), peer=2, request_id=request_id, acknowledged=0).value == request_id
    assert desk.engine.figures()["replies_bytes"] == 9 * REPLY
    again = desk.connect(3, session=b"session of %07d" % 1)
    assert first is not None
    assert again is not None
    assert again[0] != first[0], "its client knows by the number that it was forgotten"


@pytest.mark.parametrize("request_", [Get("a"), Add("a", 1)])
def test_sessions_of_the_dead_keep_a_newcomer_out_for_seconds(request_: Request[Any]) -> None:
    """After clients that had written and were killed, the table of sessions was full for `session_ttl`."""
    desk = Desk(sessions_max=3, session_ttl=300.0)
    for peer in range(1, 50):
        assert desk.connect(peer) is not None
        desk.ask(request_, peer=peer)
        desk.disconnect(peer)
        desk.now += AWAY_LEAST / 2.9
    assert desk.engine.figures()["sessions"] == 3


REQUESTS: st.SearchStrategy[Request[Any]] = st.one_of(
    st.builds(lambda n: Put(f"k{n}", bytes(40 * n)), st.integers(0, 9)),
    st.builds(lambda n: Put(f"k{n}", b"", ttl=60.0), st.integers(0, 9)),
    st.builds(lambda n: Put("k" * 4 * n, b""), st.integers(1, 9)),
    st.builds(lambda n: Append(f"k{n}", bytes(40 * n)), st.integers(0, 9)),
    st.builds(lambda n: Delete(f"k{n}"), st.integers(0, 9)),
    st.builds(lambda n: Grant(ttl=10.0 * n), st.integers(1, 9)),
    st.builds(lambda n: Wait(keys=("missing",) * n), st.integers(1, 9)),
    st.builds(lambda n: Watch(prefix="k" * n), st.integers(1, 40)),
    st.builds(lambda n: Cancel(target=n), st.integers(1, 60)),
    st.builds(
        lambda ns: Transact(when=(), then=tuple(Put(f"k{n}", b"x" * n, ttl=9.0) for n in ns)),
        st.lists(st.integers(0, 9), max_size=6),
    ),
)


@given(st.lists(REQUESTS, max_size=60), st.booleans())
def test_no_client_passes_any_limit_with_any_requests(requests: list[Request[Any]], acknowledges: bool) -> None:
    limits = {
        "key_bytes_max": 32,
        "value_bytes_max": 300,
        "keys_max": 6,
        "stored_bytes_max": 2500,
        "history_bytes_max": 2000,
        "operations_max": 5,
        "watches_max": 4,
        "waits_bytes_max": 1500,
        "leases_max": 5,
        "lease_ttl_max": 60.0,
        "session_replies_max": 20,
    }
    desk = Desk(**limits)
    refusals = 0
    for request in requests:
        response = desk.ask(request, acknowledged=None if acknowledges else 0)
        refusals += isinstance(response, Failed)
        figures = desk.engine.figures()
        assert figures["keys"] <= 6
        assert figures["stored_bytes"] <= 2500
        assert figures["history_bytes"] <= 2000
        assert figures["watches"] + figures["waits"] <= 4
        assert figures["leases"] <= 5
        assert all(len(each.key.encode()) <= 32 for each in desk.engine._keys.entries.values())
        assert all(len(each.value) <= 300 for each in desk.engine._keys.entries.values())
        assert desk.engine._waits.bytes_of(1) <= 1500
        assert all(len(session.replies) <= 20 for session in desk.engine._sessions._sessions.values())


def test_leases_count_in_the_memory_and_are_granted_no_further_than_it_reaches_but_always_renewed() -> None:
    """Regression: they counted nowhere: 200,000 took 190 MiB."""
    mib = 2**20
    desk = Desk(
        value_bytes_max=mib // 2,
        frame_bytes_max=mib,
        outbox_bytes_max=mib,
        history_bytes_max=mib // 10,
        memory_bytes_max=4 * mib,
    )
    leases = []
    while isinstance(granted := desk.ask(Grant(ttl=10.0)), Granted):
        leases.append(granted.lease)
    assert isinstance(granted, Failed)
    assert granted.kind is FailureKind.LIMIT
    assert "memory_bytes_max is 4194304" in granted.message
    assert len(leases) * 1024 == pytest.approx(1.9 * mib, rel=0.01), "but for what is kept back, and for the history"
    asked = [Put("k", b"", ttl=9.0), Transact(when=(), then=(Put("k", b"", ttl=9.0),))]
    asked.append(Transact(when=(), then=(Put("k", b"", lease=2**62),), grants=(Grant(ttl=9.0, id=2**62),)))
    for request in asked:
        assert desk.fails(request).kind is FailureKind.LIMIT
    before = desk.engine._leases.bytes
    for lease in leases:
        assert isinstance(desk.ask(KeepAlive(lease=lease, note=b"n" * 128)), Granted), "a renewal is never refused"
    assert desk.engine._leases.bytes == before + 128 * len(leases), "and what it keeps is counted"
    for lease in leases:
        desk.ask(Revoke(lease=lease))
    assert desk.engine.state.memory_bytes < mib // 10
    assert isinstance(desk.ask(Grant(ttl=10.0)), Granted)


def test_keys_that_steer_pass_each_limit_of_room_by_an_eighth_and_no_further() -> None:
    """Regression: users' keys filled the store, and no loss of a node could be reported."""
    small: dict[str, Any] = {
        "value_bytes_max": 4 * K,
        "frame_bytes_max": 64 * K,
        "outbox_bytes_max": 64 * K,
        "history_bytes_max": K,
    }
    for limit, most in {
        "keys_max": 80,
        "group_keys_max": 80,
        "stored_bytes_max": 80 * K,
        "group_bytes_max": 80 * K,
        "memory_bytes_max": 209 * K,
        "leases_max": 80,
    }.items():
        desk = Desk(**{**small, limit: most})
        ttl = 9.0 if limit == "leases_max" else None

        def put(name: str, size: int, desk: Desk = desk, ttl: float | None = ttl) -> bool:
            return isinstance(desk.ask(Put(f"/rdzv/job/{name}", bytes(size), ttl=ttl)), Written)

        def fill(name: str, put: Any = put) -> int:
            sizes = [600] * 300 + [1] * 40
            return sum(put(f"{name}/{number}", size) for number, size in enumerate(sizes))

        assert fill("store/0/1/k") in range(60, 100), limit
        assert not put("kept/a", 1)
        assert fill("nodes") in range(8, 30), limit
        assert not put("head/progress", 1)
        if limit == "memory_bytes_max":
            assert desk.fails(Watch(prefix="users/")).kind is FailureKind.LIMIT


def test_a_key_that_steers_may_have_a_longer_value_than_others() -> None:
    desk = Desk(value_bytes_max=K)
    assert isinstance(desk.ask(Put("/rdzv/job/history", bytes(4 * K))), Written)
    for key in ("/rdzv/job/kept/history", "/rdzv/history", "history"):
        assert desk.fails(Put(key, bytes(K + 1))).kind is FailureKind.LIMIT
