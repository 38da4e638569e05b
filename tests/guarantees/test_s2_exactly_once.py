"""S2, as far as sessions and connections alone can show it, without sockets."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from store.errors import ConnectionLost
from store.messages import Add, Added, Append, CompareAndSet, Delete, Get, Grant, Put, Revoke, TimeToLive, Transact
from tests.support.by_hand import Post, Town


def test_s2_a_request_resent_after_a_dropped_connection_is_applied_once() -> None:
    """ "A request resent after a dropped connection is applied once: the server keeps a session's replies until they
    are acknowledged."
    """
    town, post = Town(), Post()
    link = post.meet(town)
    items = [
        post.ask(request)
        for request in (
            Put("a", b""),
            Add("n", 1),
            Append("s", b"x"),
            CompareAndSet(key="c", value=b"", expected_revision=0),
            Transact(when=(), then=(Add("m", 1),)),
            Delete("a"),
            Grant(ttl=60.0),
        )
    ]
    link.carry_to_server()
    revision = town.engine.revision
    assert revision == 6  # all but the grant
    post.cut()  # with every reply still under way
    post.meet(town)
    assert town.engine.revision == revision
    assert len(post.outcomes) == len(items)
    assert post.outcomes[items[1].request_id] == Added(value=1, revision=2)
    assert post.outcomes[items[2].request_id] == Added(value=1, revision=3)
    assert town.engine.figures()["leases"] == 1


def test_s2_a_lease_is_revoked_once_and_the_answer_says_so() -> None:
    """ "A request resent after a dropped connection is applied once." """
    town, post = Town(), Post()
    link = post.meet(town)
    grant = post.ask(Grant(ttl=60.0))
    post.settle()
    lease = post.outcomes[grant.request_id].lease  # type: ignore[union-attr]
    revoke = post.ask(Revoke(lease=lease))
    link.carry_to_server()
    post.cut()
    post.meet(town)
    assert not isinstance(post.outcomes[revoke.request_id], Exception)
    gone = post.ask(TimeToLive(lease=lease))
    post.settle()
    assert isinstance(post.outcomes[gone.request_id], Exception)


class World:
    """A client that appends letters, and a server that may forget its session."""

    def __init__(self) -> None:
        self.town = Town(session_ttl=300.0)
        self.post = Post()
        self.letters: dict[int, bytes] = {}

    def step(self, what: str, detail: int) -> None:
        post = self.post
        post.notice()
        if what == "append":
            letter = chr(ord("A") + len(self.letters)).encode()
            self.letters[post.ask(Append("log", letter)).request_id] = letter
        elif what == "away":
            self.town.now += detail * 100.0
        elif what == "late" and post.lost is not None:
            post.lost.carry_to_server(detail)
        elif what == "dial" and post.link is None:
            post.dial(self.town)
        elif post.link is not None:
            if what == "to server":
                post.link.carry_to_server(detail)
            elif what == "to client":
                post.carry_to_client(detail)
            elif what == "settle":
                post.settle()
            elif what == "cut":
                post.cut(unnoticed=detail % 2 == 0)

    def settle(self) -> bytes:
        """Answer everything; what was appended."""
        self.post.finish(self.town)
        assert self.post.failure is None
        assert self.post.connection.in_flight == {}
        log = self.town.ask(Get("log"), peer=999).entry
        return log.value if log else b""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "to server", "to client", "settle", "cut", "late", "dial", "dial", "away"]
        ),
        st.integers(1, 80),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_s2_nothing_is_applied_twice_and_what_is_uncertain_is_said_to_be(steps: list[tuple[str, int]]) -> None:
    """ "Where nobody can know (...), the caller gets `ConnectionLost` with `maybe_applied=True`, never a guess." """
    world = World()
    for what, detail in steps:
        world.step(what, detail)
    log = world.settle()
    assert len(set(log)) == len(log), "applied twice"
    for request_id, letter in world.letters.items():
        outcome: Any = world.post.outcomes[request_id]
        if isinstance(outcome, ConnectionLost):
            assert outcome.maybe_applied
        else:
            assert log[outcome.value - 1 : outcome.value] == letter, "acknowledged, and not applied"


def test_s2_a_forgotten_session_is_known_as_such_even_if_its_first_welcome_was_lost() -> None:
    """ "A request resent after a dropped connection is applied once."

    The welcome that says that the session is new was lost; the next one used to say that it was known, though it was
    empty, and the client sent again what had been applied under the old one.
    """
    town, post = Town(session_ttl=300.0), Post()
    link = post.meet(town)
    item = post.ask(Append("log", b"x"))
    link.carry_to_server()  # applied; the reply is lost
    post.cut()
    town.now += 301.0
    for _ in range(2):
        link = post.dial(town)
        post.carry_to_client()
        link.carry_to_server()  # the hello; the welcome is lost
        post.cut()
    post.meet(town)
    outcome = post.outcomes[item.request_id]
    assert isinstance(outcome, ConnectionLost)
    assert outcome.maybe_applied
    assert town.ask(Get("log"), peer=999).entry.value == b"x"


def test_s2_a_reply_that_was_given_up_on_and_forgotten_is_no_guess() -> None:
    """ "Where nobody can know (...), the caller gets `ConnectionLost` with `maybe_applied=True`, never a guess." """
    town, post = Town(), Post()
    link = post.meet(town)
    item = post.ask(Append("log", b"x"))
    link.carry_to_server()
    (session,) = town.engine._sessions._sessions.values()
    session.acknowledge(item.request_id)  # the reply is no longer kept, for whatever reason
    post.cut()
    post.meet(town)
    outcome = post.outcomes[item.request_id]
    assert isinstance(outcome, ConnectionLost)
    assert outcome.maybe_applied
    assert town.ask(Get("log"), peer=999).entry.value == b"x"


def test_s2_a_hello_that_comes_late_from_an_older_connection_costs_a_reconnect_and_nothing_else() -> None:
    """ "A request resent after a dropped connection is applied once": the server takes the latest hello for the client,
    and hangs up on the newer connection; the client makes another.
    """
    town, post = Town(), Post()
    post.dial(town)
    post.carry_to_client()
    post.cut(unnoticed=True)  # its hello is still under way
    post.meet(town)
    item = post.ask(Append("log", b"x"))
    assert post.link is not None
    post.link.carry_to_server()
    assert post.lost is not None
    post.lost.carry_to_server()
    assert not post.link.open
    post.finish(town)
    assert post.outcomes[item.request_id] == Added(value=1, revision=1)
    assert town.engine.revision == 1


def test_s2_what_was_never_sent_is_not_said_to_be_uncertain() -> None:
    """ "never a guess": a request that waited for the connection is simply made on the next one."""
    town, post = Town(session_ttl=300.0), Post()
    post.meet(town)
    post.cut()
    town.now += 301.0
    item = post.ask(Append("log", b"x"))
    post.meet(town)
    assert not post.connection.resumed
    assert post.outcomes[item.request_id] == Added(value=1, revision=1)
