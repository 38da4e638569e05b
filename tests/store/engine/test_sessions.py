"""Replies are kept until they are acknowledged, and sessions until their clients have been away for too long."""

from __future__ import annotations

from store.engine.changeset import SavedSession
from store.engine.sessions import REPLY, Session, Sessions
from store.messages import Written

A, B = b"a" * 16, b"b" * 16


def some(*, ttl: float = 300.0, sessions_max: int = 100) -> Sessions:
    return Sessions(ttl=ttl, sessions_max=sessions_max)


def come(sessions: Sessions, id: bytes, *, peer: int, now: float) -> tuple[Session, int | None] | None:
    """A client says hello; as the engine does, let those sessions go first whose time is over."""
    sessions.expire(now)
    sessions.make_way(id)
    return sessions.open(id, peer=peer)


def opened(sessions: Sessions, id: bytes, *, peer: int, now: float = 0.0) -> Session:
    found = come(sessions, id, peer=peer, now=now)
    assert found is not None
    return found[0]


# ---------------------------------------------------------------------------------------------------- one session


def keep(session: Session, *request_ids: int) -> None:
    for request_id in request_ids:
        session.keep(request_id, Written(revision=request_id))


# ---------------------------------------------------------------------------------------------------- all of them


def test_sessions_expire_in_the_order_in_which_they_were_left() -> None:
    sessions = some(ttl=100.0)
    first, second = opened(sessions, A, peer=1), opened(sessions, B, peer=2)
    sessions.close(second, peer=2, now=10.0)
    sessions.close(first, peer=1, now=50.0)
    sessions.expire(109.0)
    assert len(sessions) == 2
    sessions.expire(110.0)
    assert len(sessions) == 1
    assert come(sessions, A, peer=3, now=110.0) == (first, None)


def test_a_farewell_on_an_older_connection_does_not_end_the_session_of_the_newer() -> None:
    """It used to, and left an abandoned session that did not exist: looking for it stopped the server's timer."""
    sessions = some(ttl=100.0)
    session = opened(sessions, A, peer=1)
    opened(sessions, A, peer=2)
    sessions.end(session, peer=1)
    assert len(sessions) == 1
    sessions.close(session, peer=2, now=0.0)
    sessions.expire(1000.0)
    assert len(sessions) == 0


def test_sessions_without_replies_make_way_for_newcomers_the_longest_abandoned_first() -> None:
    sessions = some(sessions_max=3)
    a, b, c = (opened(sessions, id, peer=peer) for peer, id in enumerate((A, B, b"c" * 16)))
    keep(a, 1)
    for now, (peer, session) in enumerate([(0, a), (2, c), (1, b)]):
        sessions.close(session, peer=peer, now=float(now))
    assert sessions.make_way(A) == [], "who comes back needs no room"
    assert sessions.make_way(b"d" * 16) == [c.id]
    assert sessions.make_way(b"d" * 16) == [], "there is room"
    assert opened(sessions, b"d" * 16, peer=4, now=3.0).number == 4
    assert opened(sessions, B, peer=5, now=3.0) is b, "and is idle no more"
    assert come(sessions, b"e" * 16, peer=6, now=3.0) is None, "the one that is left keeps a reply"
    assert opened(sessions, A, peer=7, now=3.0).replay(1) == Written(revision=1)


# ------------------------------------------------------------------------------------------- what all of them hold


def test_what_all_sessions_hold_is_counted_through_whatever_becomes_of_them() -> None:
    sessions = some(ttl=10.0)
    a, b = opened(sessions, A, peer=1), opened(sessions, B, peer=2)
    keep(a, 1, 2, 3, 4, 5)
    keep(b, 1)
    assert sessions.budget.bytes == 6 * REPLY
    a.acknowledge(2)
    assert sessions.budget.bytes == 4 * REPLY
    sessions.end(a, peer=1)
    assert sessions.budget.bytes == REPLY
    sessions.close(b, peer=2, now=5.0)
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
        sessions.close(opened(sessions, ids[peer], peer=peer), peer=peer, now=float(peer))
    assert sessions.make_room(5 * REPLY) == []
    assert sessions.make_room(3 * REPLY) == [ids[2], ids[0]]
    assert sessions.make_room(1) == [ids[1]], "the one that is connected stays"
    assert (len(sessions), sessions.budget.bytes) == (1, REPLY)
