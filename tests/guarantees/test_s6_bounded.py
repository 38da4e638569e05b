"""S6, as far as the pure rooms hold the limits: what is one past each is refused, and nothing else has changed.

`test_s6_every_limit.py` goes past each of them at a real server.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import when
from store.engine.keyspace import ENTRY_OVERHEAD
from store.engine.waits import WAIT_OVERHEAD
from store.engine.watches import EVENT_OVERHEAD, WATCH_OVERHEAD
from store.errors import LimitExceeded, ProtocolError
from store.limits import Limits
from store.messages import (
    Add,
    Append,
    Cancel,
    CompareAndSet,
    Delete,
    DeletePrefix,
    Failed,
    FailureKind,
    Get,
    GetMany,
    Grant,
    Guarded,
    Put,
    Request,
    TimeToLive,
    Transact,
    Wait,
    Watch,
)
from store.protocol import wire
from store.protocol.connection import ClientConnection, ServerConnection
from store.protocol.wire import VERSION, FrameReader, Greeting, Hello, Welcome
from tests.support.by_hand import Desk

K = 1000


@dataclasses.dataclass(frozen=True)
class Case:
    """A limit, what comes up to it, and what goes one past it."""

    limit: str
    most: int | float
    past: Request[Any]
    value: str  # what the message must show of what was too much
    remedy: str
    up_to: tuple[Request[Any], ...] = ()
    others: tuple[tuple[str, int], ...] = ()  # other limits, to make room for this one to be met first


def grants(count: int) -> tuple[Request[Any], ...]:
    return tuple(Grant(ttl=60.0) for _ in range(count))


def filled(size: int, key: str = "a") -> Put:
    """A put after which a store that was empty holds so many bytes."""
    return Put(key, bytes(size - ENTRY_OVERHEAD - (1 if key.isascii() else 4)))


WAITS_OF_TWO = WAIT_OVERHEAD * 2 + 2
BIG, BIG_TOO = Put("big", bytes(5000)), Put("too", bytes(5000))
LITTLE = (("outbox_bytes_max", K), ("frame_bytes_max", 10 * K), ("value_bytes_max", 5 * K), ("history_bytes_max", K))
ROOM = (("frame_bytes_max", 10 * K), ("value_bytes_max", 5 * K))

CASES = [
    Case("key_bytes_max", 8, Put("k" * 9, b""), "9 bytes", "use a shorter one", (Put("k" * 8, b""),)),
    Case("key_bytes_max", 8, Put("é" * 4 + "k", b""), "9 bytes", "use a shorter one", (Put("é" * 4, b""),)),
    Case("key_bytes_max", 8, Add("k" * 9, 1), "9 bytes", "use a shorter one", (Add("k" * 8, 1),)),
    Case("key_bytes_max", 8, Append("k" * 9, b""), "9 bytes", "use a shorter one"),
    Case("key_bytes_max", 8, Wait(keys=("k" * 9,)), "9 bytes", "use a shorter one", (Wait(keys=("k" * 8,)),)),
    Case("key_bytes_max", 8, Watch(prefix="k" * 9), "9 bytes", "use a shorter one", (Watch(prefix="k" * 8),)),
    Case("key_bytes_max", 8, CompareAndSet(key="k" * 9, value=b"", expected_revision=0), "9 bytes", "shorter"),
    Case("key_bytes_max", 8, Transact(when=(), then=(Put("a", b""), Put("k" * 9, b""))), "9 bytes", "shorter"),
    Case("value_bytes_max", 100, Put("a", bytes(101)), "101 bytes", "higher limit", (Put("a", bytes(100)),)),
    Case("value_bytes_max", 100, Append("a", b"x"), "101 bytes", "higher limit", (Put("a", bytes(100)),)),
    Case(
        "value_bytes_max", 100, Transact(when=(), then=(Append("a", bytes(51)),)), "101 bytes", "higher limit",
        (Append("a", bytes(50)),),
    ),
    Case("keys_max", 2, Put("c", b""), "holds 2 keys", "delete some", (Put("a", b""), Put("b", b""))),
    Case("keys_max", 2, Add("c", 1), "holds 2 keys", "delete some", (Put("a", b""), Add("b", 1))),
    Case("keys_max", 2, Transact(when=(), then=(Put("b", b""), Put("c", b""))), "1 keys", "delete", (Put("a", b""),)),
    Case("stored_bytes_max", K, filled(K + 1), "1001 bytes", "delete some", (filled(K),)),
    Case("stored_bytes_max", K, filled(K + 1, "é"), "1001 bytes", "delete some", (filled(K, "é"),)),
    Case("stored_bytes_max", K, Append("a", b"x"), "1001 bytes", "delete some", (filled(K),)),
    Case("writes_max", 3, Transact(when=(), then=tuple(Get("a") for _ in range(4))), "4 operations", "split it"),
    Case("writes_max", 3, Transact(when=(), then=(Get("a"),), otherwise=(Get("a"),) * 3), "4 operations", "split it"),
    Case(
        "lease_keys_max", 1, Put("b", b"", lease=1), "lease 1 has 1 keys", "another lease",
        (Grant(ttl=1.0), Put("a", b"", lease=1)),
    ),
    Case("lease_keys_max", 1, Add("b", 1, 1), "1 keys", "another lease", (Grant(ttl=1.0), Put("a", b"", lease=1))),
    Case("operations_max", 3, Transact(when=(when.missing("a"),) * 4, then=()), "4 conditions", "split it"),
    Case("operations_max", 3, Guarded(when=(when.missing("a"),) * 4, request=Get("a")), "4 conditions", "split it"),
    Case("operations_max", 3, GetMany(keys=("a",) * 4), "4 keys", "split it", (GetMany(keys=("a",) * 3),)),
    Case("operations_max", 3, Wait(keys=("a",) * 4), "4 keys", "split it", (Wait(keys=("a",) * 3),)),
    Case("watches_max", 2, Watch(prefix=""), "2 watches and waits", "end some", (Watch(prefix=""), Wait(keys=("x",)))),
    Case("watches_max", 2, Wait(keys=("x",)), "2 watches and waits", "end some", (Watch(prefix=""), Wait(keys=("x",)))),
    Case("waits_bytes_max", WAITS_OF_TWO, Wait(keys=("x",)), "603 bytes", "fewer keys", (Wait(keys=("x", "y")),)),
    Case(
        "waits_bytes_max", WAITS_OF_TWO,
        Guarded(when=(when.missing("c"),), request=Wait(keys=("a", "b"))), "603 bytes", "fewer keys",
    ),
    Case(
        "waits_bytes_max", 1000,
        Guarded(when=(when.value("v") == bytes(601),), request=Wait(keys=("a",))), "1003 bytes", "fewer keys",
        (Put("v", bytes(601)),),
    ),
    Case("parked_bytes_max", 2 * WATCH_OVERHEAD, Watch(prefix="x"), "1801 bytes", "end some", (Watch(prefix=""),)),
    Case("parked_bytes_max", WATCH_OVERHEAD, Wait(keys=("x",)), "801 bytes", "end some"),
    Case("leases_max", 2, Grant(ttl=1.0), "has 2 leases", "revoke some", grants(2)),
    Case("leases_max", 2, Put("a", b"", ttl=1.0), "has 2 leases", "revoke some", grants(2)),
    Case(
        "leases_max", 2, Transact(when=(), then=(Put("a", b"", ttl=1.0), Put("b", b"", ttl=1.0))), "has 1 leases",
        "revoke some", grants(1),
    ),
    Case("lease_ttl_max", 60.0, Grant(ttl=61.0), "ttl is 61 s", "renew it", (Grant(ttl=60.0),)),
    Case("lease_ttl_max", 60.0, Put("a", b"", ttl=61.0), "ttl is 61 s", "renew it", (Put("a", b"", ttl=60.0),)),
    Case("lease_ttl_max", 60.0, Grant(ttl=1.0, disconnect_ttl=61.0), "disconnect_ttl is 61 s", "renew it"),
    Case("frame_bytes_max", 10 * K, GetMany(keys=("big", "big")), "10086 bytes", "fewer keys", (BIG,), ROOM),
    Case("memory_bytes_max", 13 * K, Put("b", bytes(K)), "bytes in all", "delete some", (Put("a", bytes(K)),), LITTLE),
    Case("memory_bytes_max", 13 * K, Wait(keys=("b",)), "in all", "end watches", (Put("a", bytes(1050)),), LITTLE),
    Case("writes_max", 1, DeletePrefix(prefix=""), "2 keys", "split it", (Put("a", b""), Put("b", b""))),
    Case("writes_max", 1, Transact(when=(), then=(Put("a", b""), Delete("b"))), "2 operations", "split it"),
    Case("frame_bytes_max", 10 * K, Wait(keys=("big", "big")), "10086 bytes", "fewer keys", (BIG,), ROOM),
    Case(
        "frame_bytes_max", 10 * K, Transact(when=(), then=(Put("a", b""), Get("big"), Get("big"))), "10086 bytes",
        "fewer keys", (BIG,), ROOM,
    ),
    Case(
        "frame_bytes_max", 10 * K, Transact(when=(), then=(Put("a", bytes(4999)), Get("a"), Get("a"), Get("a"))),
        "15000 bytes", "fewer keys", (), ROOM,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.limit}, {type(case.past).__name__}")
def test_s6_one_past_a_limit_is_refused_and_nothing_else_changes(case: Case) -> None:
    """ "Frames, values, keys, watches, outboxes, history, sessions, total memory: each has a limit that a client cannot
    pass, and a clear error at it."
    """
    desk = Desk(**{case.limit: case.most, **dict(case.others)})
    desk.connect()
    desk.ask(Watch(prefix=""), peer=2)
    for request in case.up_to:
        assert not isinstance(desk.ask(request), Failed)
    before = desk.fingerprint()
    refused = desk.fails(case.past)
    assert refused.kind is FailureKind.LIMIT
    assert case.value in refused.message
    assert case.limit in refused.message
    assert f"{case.most:g}" in refused.message
    assert case.remedy in refused.message
    assert desk.fingerprint() == before


def test_s6_a_wait_whose_answer_grew_too_large_is_told_so() -> None:
    """ "each has a limit that a client cannot pass, and a clear error at it." """
    desk = Desk(**dict(ROOM))
    desk.ask(Wait(keys=("big", "big")), request_id=5)
    desk.ask(BIG, peer=2)
    answer = desk.answers[1, 5]
    assert isinstance(answer, Failed)
    assert answer.kind is FailureKind.LIMIT
    assert "frame_bytes_max is 10000" in answer.message
    assert desk.engine.figures()["waits"] == 0


def test_s6_asking_about_a_lease_with_too_many_keys_is_refused() -> None:
    """ "each has a limit that a client cannot pass, and a clear error at it." """
    desk = Desk(**dict(ROOM))
    lease = desk.ask(Grant(ttl=60.0)).lease
    for number in range(6):
        desk.ask(Put(f"{number}{'k' * 1999}", b"", lease=lease))
    assert "frame_bytes_max is 10000" in desk.fails(TimeToLive(lease=lease)).message


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"session_replies_max": 3}, "session_replies_max is 3"),
        ({"session_replies_bytes_max": 300}, "session_replies_bytes_max is 300"),
        ({"replies_bytes_max": 300}, "replies_bytes_max is 300"),
    ],
)
def test_s6_replies_that_are_not_acknowledged_are_kept_up_to_a_limit(limits: dict[str, int], limit: str) -> None:
    """ "sessions (...): each has a limit that a client cannot pass, and a clear error at it." """
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
    assert session.replies == 3
    assert desk.ask(Get("a"), acknowledged=0).entry.value == b"3"  # reading goes on
    assert desk.ask(Add("a", 1), acknowledged=1).value == 4


def test_s6_what_others_do_not_read_keeps_nobody_from_working() -> None:
    """ "sessions (...), total memory: each has a limit that a client cannot pass": and it is met by who passes it."""
    desk = Desk(replies_bytes_max=1000)
    for request_id in range(1, 20):
        desk.ask(Add("a", 1), peer=1, request_id=request_id, acknowledged=0)
    assert desk.engine.figures()["replies_bytes"] == 1000
    for number in range(1, 100):
        assert desk.ask(Add("b", 1), peer=2).value == number, "it acknowledges all it gets"
    assert desk.engine.figures()["replies_bytes"] <= 1100
    refused = desk.ask(Add("b", 1), peer=2, acknowledged=0)
    assert "1100 bytes of replies, 100 of them of this client, wait to be acknowledged" in refused.message


@pytest.mark.parametrize(
    "large",
    [
        Transact(when=(), then=(Put("b", b""), Get("large"))),
        Transact(when=(when.missing("x"),), then=(), otherwise=(Get("large"),)),
        Transact(when=(), then=(Append("a", bytes(100_000)), Get("a"))),
        CompareAndSet(key="large", value=b"", expected_revision=77),
        CompareAndSet(key="new", value=bytes(100_000), expected_revision=0),
        Guarded(when=(), request=CompareAndSet(key="large", value=b"", expected_revision=77)),
    ],
)
def test_s6_many_clients_that_each_keep_one_large_reply_meet_the_limit_of_all_replies(large: Request[Any]) -> None:
    """ "sessions (...), total memory": a reply holds on to the values in it, long after their keys are overwritten.

    Each client with nothing unread was let through, whatever it asked for: one reply of a frame's size for each.
    """
    desk = Desk(replies_bytes_max=10_000)
    desk.ask(Put("large", bytes(100_000)), peer=1)
    desk.ask(Transact(when=(), then=(Get("large"),)), peer=1, acknowledged=0)
    for peer in range(2, 10):
        refused = desk.ask(large, peer=peer, acknowledged=0)
        assert refused.kind is FailureKind.LIMIT
        assert "replies_bytes_max is 10000: come again, or ask for no large values" in refused.message
    assert desk.engine.figures()["replies_bytes"] < 110_000
    assert desk.ask(CompareAndSet(key="small", value=b"", expected_revision=0), peer=2).succeeded
    assert desk.ask(Transact(when=(), then=(Put("b", b""), Get("small"))), peer=3).succeeded


def test_s6_sessions_of_clients_that_are_away_make_room_and_their_replies_are_not_guessed() -> None:
    """ "sessions (...), total memory"; S2: "the caller gets `ConnectionLost` (...), never a guess"."""
    desk = Desk(replies_bytes_max=1000)
    first = desk.connect(1)
    for request_id in range(1, 11):
        desk.ask(Add("a", 1), peer=1, request_id=request_id, acknowledged=0)
    desk.disconnect(1)
    for request_id in range(1, 10):
        assert desk.ask(Add("b", 1), peer=2, request_id=request_id, acknowledged=0).value == request_id
    assert desk.engine.figures()["replies_bytes"] == 900
    again = desk.connect(3, session=b"session of %07d" % 1)
    assert first is not None
    assert again is not None
    assert again[0] != first[0], "its client knows by the number that it was forgotten"


def test_s6_there_are_no_more_sessions_than_agreed() -> None:
    """ "sessions (...): each has a limit that a client cannot pass"."""
    desk = Desk(sessions_max=2, session_ttl=300.0)
    assert desk.connect(1) is not None
    assert desk.connect(2) is not None
    assert desk.connect(3) is None
    desk.ask(Put("a", b""), peer=1)
    desk.disconnect(1)
    desk.now += 299.0
    assert desk.connect(3) is None
    desk.now += 1.0
    assert desk.connect(3) is not None


def test_s6_dead_sessions_of_strangers_refuse_nobody() -> None:
    """The table of sessions was full for `session_ttl` after each client that had come and gone without a farewell."""
    desk = Desk(sessions_max=3, session_ttl=300.0)
    for peer in range(1, 50):
        assert desk.connect(peer) is not None
        desk.ask(Get("a"), peer=peer)
        desk.disconnect(peer)
    assert desk.engine.figures()["sessions"] == 3


def test_s6_history_is_bounded_in_bytes() -> None:
    """ "history (...): each has a limit that a client cannot pass"."""
    desk = Desk(history_bytes_max=10 * K)
    for number in range(100):
        desk.ask(Put("a", bytes(number)))
        assert desk.engine.figures()["history_bytes"] <= 10 * K
    desk.ask(Put("a", bytes(10 * K - EVENT_OVERHEAD)))
    assert desk.engine.figures()["history_bytes"] == 0


def test_s6_a_frame_one_byte_too_long_is_refused_by_either_side() -> None:
    """ "Frames (...): each has a limit that a client cannot pass, and a clear error at it." """
    limits = Limits(frame_bytes_max=10 * K, value_bytes_max=5 * K)
    there = ServerConnection(store_id="s", nonce=b"n" * 16, token=None, limits=limits)
    list(there.receive(wire.encode_hello(Hello(VERSION, b"s" * 16, b"m" * 16, b""))))
    longest = wire.encode_request(1, 0, Put("a", bytes(10 * K - 12)))
    assert len(longest) - 4 == 10 * K
    assert list(there.receive(longest))
    with pytest.raises(ProtocolError, match="a frame of 10001 bytes is announced, and 10000 is the limit"):
        list(there.receive(wire.encode_request(2, 0, Put("a", bytes(10 * K - 11)))))
    here = ClientConnection(session_id=b"s" * 16, token=None, name="there")
    here.connected(nonce=b"m" * 16)
    list(here.receive(wire.encode_greeting(Greeting(VERSION, VERSION, "s", b"n" * 16, token_wanted=False))))
    list(here.receive(wire.encode_welcome(Welcome(1, "here", 0, 10 * K, b""))))
    with pytest.raises(
        LimitExceeded, match=r"10001 bytes; the server takes frames of 10000 \(frame_bytes_max\): send less"
    ):
        here.encode(here.ask(Put("a", bytes(10 * K - 11)), None))


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
def test_s6_no_client_passes_any_limit_whatever_it_asks(requests: list[Request[Any]], acknowledges: bool) -> None:
    """ "each has a limit that a client cannot pass"."""
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
        assert all(session.replies <= 20 for session in desk.engine._sessions._sessions.values())


def test_s6_what_waits_for_the_rest_of_a_frame_is_no_more_than_the_frame() -> None:
    """ "Frames (...): each has a limit"."""
    reader = FrameReader(K)
    reader.feed(K.to_bytes(4, "big"))
    for _ in range(K - 1):
        reader.feed(b"x")
        assert len(reader._held) <= K + 4
    reader.feed(b"x")
    assert len(reader._held) == 0
