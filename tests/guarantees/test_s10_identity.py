"""S10: a client knows its store by a random id, and does not go on with another one as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from store.engine.engine import Engine
from store.errors import ConnectionLost, StoreReplaced
from store.messages import Add, Get, Ping, Request
from store.protocol.connection import ClientConnection
from tests.support.by_hand import Post, Town


def test_s10_a_client_that_meets_another_store_is_told_so_and_sends_it_nothing() -> None:
    """ "A client that reconnects and meets another id gets `StoreReplaced`; it never goes on as if nothing had
    happened."
    """
    post = Post()
    link = post.meet(Town(Engine(store_id="the first")))
    post.ask(Add("n", 1))
    link.carry_to_server()
    post.cut()
    town = Town(Engine(store_id="the second"))
    link = post.dial(town)
    post.settle()
    assert isinstance(post.failure, StoreReplaced)
    assert isinstance(post.failure, ConnectionLost)
    assert post.failure.maybe_applied
    assert "the first has been replaced by the second" in str(post.failure)
    assert not link.to_server
    assert town.engine.figures()["requests"] == 0
    assert not post.ready


def test_s10_the_same_store_is_met_again_and_again() -> None:
    """ "A store has a random id, kept with its data." """
    town, post = Town(Engine(store_id="the first")), Post()
    for _ in range(3):
        post.meet(town)
        assert post.connection.store_id == "the first"
        post.cut()
    assert post.failure is None


def test_s10_a_store_whose_welcome_never_came_was_not_met() -> None:
    """ "meets another id": a client that was never taken in has nothing to lose with another store."""
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
    """The same store as it was some revisions ago: a backup, or a disk that has lost its end."""
    older = Engine(store_id=town.engine.store_id)
    older._keys.revision = town.engine.revision - revisions
    return Town(older)


@pytest.mark.parametrize("seen_by", [Add("n", 1), Get("n"), Ping()], ids=["a write", "a read", "a ping"])
def test_s10_the_same_store_gone_back_in_time_is_another_one(seen_by: Request[Any]) -> None:
    """ "nor if the same store has gone back in time (a revision below what the client has seen)"."""
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


def test_s10_what_a_watch_has_seen_counts_too() -> None:
    """ "a revision below what the client has seen": not only what it was answered."""
    town, post = Town(Engine(store_id="the first")), Post()
    post.meet(town)
    post.watch("")
    post.settle()
    town.ask(Add("n", 1), peer=9)
    post.settle()
    post.cut()
    post.dial(as_of(town, 1))
    post.settle()
    assert isinstance(post.failure, StoreReplaced)


def test_s10_a_client_can_be_told_which_store_to_expect() -> None:
    """ "A client that reconnects": also one whose earlier connections another object made, as blocking clients do."""
    connection = ClientConnection(session_id=b"s" * 16, token=None, name="there")
    connection.store_id = "the first"
    connection.connected(nonce=b"n" * 16)
    town = Town(Engine(store_id="the second"))
    link = town.accept()
    (hello,) = connection.receive(bytes(link.to_client))
    assert isinstance(hello, bytes), "anybody can send a greeting: it is answered, and not believed yet"
    link.to_client.clear()
    town.received(link, hello)
    with pytest.raises(StoreReplaced):
        list(connection.receive(bytes(link.to_client)))
