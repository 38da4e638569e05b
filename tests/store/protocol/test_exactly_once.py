"""A request that is sent again is applied once (S2), and only by the store that the client has met (S10): sessions and
connections alone, whose bytes are carried by hand.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import Add, Append, ConnectionLost, Get, StoreReplaced
from store.engine.engine import Engine
from store.messages import Added, Guarded, Ping, Request, Watch
from store.protocol.connection import InFlight
from tests.support.by_hand import Post, Town


class World:
    """A client that appends letters, and a server that may forget its session."""

    def __init__(self, token: bytes | None = None) -> None:
        self.town = Town(token=token, session_ttl=300.0)
        self.post = Post(token=token)
        self.letters: dict[int, bytes] = {}

    def step(self, what: str, detail: int) -> None:
        post = self.post
        post.notice()
        if what == "append":
            letter = chr(ord("A") + len(self.letters)).encode()
            append = Append("log", letter)
            asked = post.ask(append if detail % 2 else Guarded(when=(), request=append))
            self.letters[asked.request_id] = letter
            post.ask(Get("log"))
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
        """Answer everything; return the appended letters."""
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
@given(STEPS, st.sampled_from([None, b"secret"]))
def test_nothing_is_applied_twice_and_uncertain_outcomes_are_reported(
    steps: list[tuple[str, int]], token: bytes | None
) -> None:
    """If it cannot be known if a request was applied, the caller gets `ConnectionLost` with `maybe_applied=True`."""
    world = World(token)
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
    world.post.ask(Ping())
    world.post.settle()
    assert all(not session.replies for session in world.town.engine._sessions._sessions.values()), "all is acknowledged"


def check_applied_once_and_in_doubt(town: Town, post: Post, item: InFlight) -> None:
    """Assert that the letter was appended once, and that its caller got `maybe_applied=True`."""
    outcome = post.outcomes[item.request_id]
    assert isinstance(outcome, ConnectionLost)
    assert outcome.maybe_applied
    assert town.ask(Get("log"), peer=999).entry.value == b"x"


def test_a_forgotten_session_is_known_as_such_even_if_its_first_welcome_was_lost() -> None:
    """ "A request resent after a dropped connection is applied once."

    The welcome that announced a new session was lost. The next one called the session known, though it was empty, and
    the client sent requests again that had been applied under the old one.
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
    check_applied_once_and_in_doubt(town, post, item)


def test_a_reply_that_was_given_up_on_and_forgotten_is_no_guess() -> None:
    """If it cannot be known if a request was applied, the caller gets `ConnectionLost` with `maybe_applied=True`."""
    town, post = Town(), Post()
    link = post.meet(town)
    item = post.ask(Append("log", b"x"))
    link.carry_to_server()
    (session,) = town.engine._sessions._sessions.values()
    session.acknowledge(item.request_id)  # the reply is no longer kept, for any reason
    post.cut()
    post.meet(town)
    check_applied_once_and_in_doubt(town, post, item)


def test_a_hello_that_comes_late_from_an_older_connection_costs_a_reconnect_and_nothing_else() -> None:
    """A request sent again is applied once. The server takes the latest hello for the client, and hangs up on the newer
    connection; the client opens another.
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


def test_a_store_whose_welcome_never_came_was_not_met() -> None:
    """A client that was never welcomed loses nothing at another store."""
    post = Post()
    post.dial(Town(Engine(store_id="the first")))
    post.carry_to_client()
    post.cut()
    item = post.ask(Get("a"))
    post.meet(Town(Engine(store_id="the second")))
    assert post.failure is None
    assert item.request_id in post.outcomes
    assert post.connection.store_id == "the second"


def as_of(town: Town, revisions: int) -> Town:
    """Return the same store as it was some revisions ago: a backup, or a disk that has lost its end."""
    older = Engine(store_id=town.engine.store_id)
    older._keys.revision = town.engine.revision - revisions
    return Town(older)


@pytest.mark.parametrize("seen_by", [Add("n", 1), Get("n"), Ping()], ids=["a write", "a read", "a ping"])
def test_the_same_store_gone_back_in_time_is_another_one(seen_by: Request[Any]) -> None:
    """Its revision is below that of the client."""
    town, post = Town(Engine(store_id="the first")), Post()
    post.meet(town)
    for _ in range(3):
        town.ask(Add("n", 1), peer=9)
    post.ask(seen_by)
    post.settle()
    post.cut()
    seen = town.engine.revision
    post.dial(as_of(town, 1))
    post.settle()
    assert isinstance(post.failure, StoreReplaced)
    assert f"had come to revision {seen} and is at {seen - 1} now" in str(post.failure)


def test_revisions_of_watch_events_count_too() -> None:
    town, post = Town(Engine(store_id="the first")), Post()
    post.meet(town)
    post.ask(Watch(prefix=""))
    post.settle()
    town.ask(Add("n", 1), peer=9)
    post.settle()
    post.cut()
    post.dial(as_of(town, 1))
    post.settle()
    assert isinstance(post.failure, StoreReplaced)
