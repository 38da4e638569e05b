"""S10: a client knows its store by a random id, and does not go on with another one as if nothing had happened."""

from __future__ import annotations

import pytest

from store.engine.engine import Engine
from store.errors import ConnectionLost, StoreReplaced
from store.messages import Add, Get
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


def test_s10_a_client_can_be_told_which_store_to_expect() -> None:
    """ "A client that reconnects": also one whose earlier connections another object made, as blocking clients do."""
    connection = ClientConnection(session_id=b"s" * 16, token=None, name="there")
    connection.store_id = "the first"
    connection.connected(nonce=b"n" * 16)
    link = Town(Engine(store_id="the second")).accept()
    with pytest.raises(StoreReplaced):
        list(connection.receive(bytes(link.to_client)))
