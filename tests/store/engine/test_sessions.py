"""Replies are kept until they are acknowledged, and sessions until their clients have been away for too long."""

from __future__ import annotations

from store.engine.changeset import SavedSession
from store.engine.sessions import REPLY, Session, Sessions, Tally
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


def test_a_reply_is_kept_until_it_is_acknowledged_and_then_frees_what_it_held() -> None:
    session = Session(A, 1, Tally())
    keep(session, 1, 3)
    assert (session.highest, session.replies, session.held_bytes) == (3, 2, 2 * REPLY)
    assert session.replay(1) == Written(revision=1)
    assert session.replay(2) is None, "it may have been applied, or not: nobody can know"
    session.acknowledge(2)
    assert session.replay(1) is None
    assert session.replay(3) == Written(revision=3)
    session.acknowledge(10**18)
    session.acknowledge(0)
    assert session.replay(3) is None
    assert (session.highest, session.replies, session.held_bytes) == (3, 0, 0)


# ---------------------------------------------------------------------------------------------------- all of them


def test_a_session_outlives_its_connection_and_keeps_its_number() -> None:
    sessions = some()
    session = opened(sessions, A, peer=1)
    sessions.close(session, peer=1, now=10.0)
    assert come(sessions, A, peer=2, now=309.0) == (session, None)
    assert session.peer == 2


def test_a_connection_that_takes_a_session_over_is_told_who_had_it() -> None:
    sessions = some()
    session = opened(sessions, A, peer=1)
    assert come(sessions, A, peer=2, now=0.0) == (session, 1)
    sessions.close(session, peer=1, now=5.0)  # no news: it is the other's now
    sessions.expire(1000.0)
    assert len(sessions) == 1


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


def test_restored_sessions_wait_for_their_clients_from_now_on() -> None:
    sessions = some(ttl=100.0)
    saved = [
        SavedSession(id=A, number=4, replies=((7, Written(revision=1)), (9, Written(revision=2)))),
        SavedSession(id=B, number=6, replies=()),
    ]
    sessions.restore(saved, last=8, now=5000.0)
    assert sessions.expire(5099.0) == []
    session = opened(sessions, A, peer=1)
    assert (session.number, session.replies, session.held_bytes) == (4, 2, 2 * REPLY)
    assert session.replay(9) == Written(revision=2)
    assert session.replay(8) is None
    assert session.highest == 9
    assert sessions.expire(5100.0) == [B]
    assert opened(sessions, B, peer=2).number == 9
    assert sessions.made == 9


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
    assert sessions.tally.bytes == 6 * REPLY
    a.acknowledge(2)
    assert sessions.tally.bytes == 4 * REPLY
    sessions.end(a, peer=1)
    assert sessions.tally.bytes == REPLY
    sessions.close(b, peer=2, now=5.0)
    assert sessions.tally.bytes == REPLY
    sessions.expire(15.0)
    assert sessions.tally.bytes == 0
    sessions.restore([SavedSession(id=A, number=7, replies=((1, Written(revision=1)),))], last=7, now=0.0)
    assert sessions.tally.bytes == REPLY


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
    assert (len(sessions), sessions.tally.bytes) == (1, REPLY)
