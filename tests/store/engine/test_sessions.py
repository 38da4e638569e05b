"""Replies are kept until they are acknowledged, and sessions until their clients have been away for too long."""

import math
import random
from typing import Any

import pytest

from store.engine.changeset import SavedSession
from store.engine.sessions import REPLY, Session, Sessions
from store.messages import Added, CompareAndSetResult, Entry, Granted, Written

A, B = b"a" * 16, b"b" * 16


def some(*, ttl: float = 300.0, sessions_max: int = 100) -> Sessions:
    return Sessions(ttl=ttl, sessions_max=sessions_max)


def come(sessions: Sessions, id: bytes, *, peer: int, now: float) -> tuple[Session, int | None] | None:
    """Let a client say hello. As in the engine, sessions whose time is over are removed first."""
    sessions.expire(now)
    sessions.evict_for_session(id, now)
    return sessions.open_session(id, peer=peer)


def opened(sessions: Sessions, id: bytes, *, peer: int, now: float = 0.0) -> Session:
    found = come(sessions, id, peer=peer, now=now)
    assert found is not None
    return found[0]


def keep(session: Session, *request_ids: int) -> None:
    for request_id in request_ids:
        session.keep_reply(request_id, Written(revision=request_id))


def test_sessions_expire_in_the_order_in_which_they_were_left() -> None:
    sessions = some(ttl=100.0)
    first, second = opened(sessions, A, peer=1), opened(sessions, B, peer=2)
    sessions.keep_for_reconnect(second, peer=2, now=10.0)
    sessions.keep_for_reconnect(first, peer=1, now=50.0)
    sessions.expire(109.0)
    assert len(sessions) == 2
    sessions.expire(110.0)
    assert len(sessions) == 1
    assert come(sessions, A, peer=3, now=110.0) == (first, None)


def test_a_farewell_on_an_older_connection_does_not_end_the_session_of_the_newer() -> None:
    """Regression: it ended it, and left an abandoned one that did not exist: the server's timer failed."""
    sessions = some(ttl=100.0)
    session = opened(sessions, A, peer=1)
    opened(sessions, A, peer=2)
    sessions.end(session, peer=1)
    assert len(sessions) == 1
    sessions.keep_for_reconnect(session, peer=2, now=0.0)
    sessions.expire(1000.0)
    assert len(sessions) == 0


def test_the_session_longest_away_makes_way_for_a_newcomer_with_or_without_replies() -> None:
    sessions = some(sessions_max=4)
    a, b, c, d = (opened(sessions, bytes([name]) * 16, peer=name) for name in b"abcd")
    keep(a, 1)
    for now, session in enumerate((a, c, b)):  # the fourth stays connected
        sessions.keep_for_reconnect(session, peer=session.id[0], now=float(now))
    assert sessions.evict_for_session(A, 100.0) == [], "a client that comes back needs no room"
    assert come(sessions, b"e" * 16, peer=5, now=9.9) is None, "none has been away for so long that it makes way"
    assert sessions.seconds_until_room(9.5) == 0.5
    assert sessions.evict_for_session(b"e" * 16, 10.0) == [a.id]
    assert opened(sessions, b"e" * 16, peer=5, now=10.0).number == 5
    assert opened(sessions, B, peer=6, now=12.0) is b, "and is not away any more"
    again, _ = come(sessions, A, peer=7, now=12.0) or (None, None)
    assert again is not None
    assert (again.number, again.kept_reply(1)) == (6, None), "the server has forgotten it, and says so by its number"
    assert sessions.evict_for_session(b"f" * 16, 1000.0) == [], "clients that are connected keep their sessions"
    assert sessions.seconds_until_room(1000.0) == math.inf
    assert len({a, c, d}) == 3


@pytest.mark.parametrize("seed", range(5))
def test_of_restored_sessions_those_that_wrote_last_make_way_last(seed: int) -> None:
    replies: list[tuple[int, Any]] = [
        (1, Granted(lease=1, ttl=1.0)),
        (1, Written(revision=7)),
        (1, CompareAndSetResult(True, Entry(key="k", value=b"", create_revision=8, mod_revision=8, lease=None))),
        (1, Added(value=1, revision=9)),
    ]
    saved = [
        SavedSession(id=bytes([9 - number]) * 16, number=number, replies=(replies[number],) if number < 4 else ())
        for number in range(6)
    ]
    order = [0, 4, 5, 1, 2, 3]
    random.Random(seed).shuffle(saved)
    sessions = some(sessions_max=6)
    sessions.restore(saved, last=6, now=0.0)
    went = [sessions.evict_for_session(bytes(16), 9.9)]
    for newcomer in range(100, 106):
        id = bytes([newcomer]) * 16
        went.append(sessions.evict_for_session(id, 10.0))
        sessions.open_session(id, peer=newcomer)
    assert went == [[], *([bytes([9 - number]) * 16] for number in order)]


def test_the_memory_of_all_sessions_is_counted_through_every_change() -> None:
    sessions = some(ttl=10.0)
    a, b = opened(sessions, A, peer=1), opened(sessions, B, peer=2)
    keep(a, 1, 2, 3, 4, 5)
    keep(b, 1)
    assert sessions.budget.bytes == 6 * REPLY
    a.acknowledge(2)
    assert sessions.budget.bytes == 4 * REPLY
    sessions.end(a, peer=1)
    assert sessions.budget.bytes == REPLY
    sessions.keep_for_reconnect(b, peer=2, now=5.0)
    assert sessions.budget.bytes == REPLY
    sessions.expire(15.0)
    assert sessions.budget.bytes == 0
    sessions.restore([SavedSession(id=A, number=7, replies=((1, Written(revision=1)),))], last=7, now=0.0)
    assert sessions.budget.bytes == REPLY


def test_room_is_made_by_the_sessions_whose_clients_have_been_away_for_longest() -> None:
    sessions = some()
    ids = [bytes([number]) * 16 for number in range(4)]
    for peer, id in enumerate(ids):
        keep(opened(sessions, id, peer=peer), 1)
    for peer in (2, 0, 1):
        sessions.keep_for_reconnect(opened(sessions, ids[peer], peer=peer), peer=peer, now=float(peer))
    assert sessions.evict_for_replies(5 * REPLY) == []
    assert sessions.evict_for_replies(3 * REPLY) == [ids[2], ids[0]]
    assert sessions.evict_for_replies(1) == [ids[1]], "the one that is connected stays"
    assert (len(sessions), sessions.budget.bytes) == (1, REPLY)
