"""The token is proven both ways, and never sent (S8)."""

import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import AuthenticationError, Limits
from store.protocol import wire
from store.protocol.connection import ClientConnection, ServerConnection
from store.protocol.frames import FrameReader
from store.protocol.wire import VERSION, Hello, Welcome

TOKEN = b"a very secret token"


def server(
    token: bytes | None = TOKEN, *, nonce: bytes = b"server nonce 001", store_id: str = "store-1"
) -> ServerConnection:
    return ServerConnection(store_id=store_id, nonce=nonce, token=token, limits=Limits())


def client(
    token: bytes | None = TOKEN, *, nonce: bytes = b"client nonce 001", session: bytes = b"the same session"
) -> ClientConnection:
    made = ClientConnection(session_id=session, token=token, name="tcp://there")
    made.start_connection(nonce=nonce)
    return made


def hello_to(here: ClientConnection, there: ServerConnection) -> bytes:
    (said,) = here.receive(there.encode_greeting())
    assert isinstance(said, bytes)
    return said


def decoded(hello: bytes) -> Hello:
    (body,) = FrameReader(4096).feed(hello)
    said = wire.decode_opening(body, Hello)
    assert isinstance(said, Hello)
    return said


def meet(here: ClientConnection, there: ServerConnection) -> bytes:
    """Let both sides talk, and return all bytes that were sent."""
    said = there.encode_greeting()
    hello = hello_to(here, there)
    list(there.receive(hello))
    welcome = there.encode_welcome(session=1, address="10.0.0.1", revision=0)
    list(here.receive(welcome))
    return said + hello + welcome


@given(st.binary(min_size=1, max_size=100))
def test_both_sides_prove_that_they_know_the_token_and_neither_says_it(token: bytes) -> None:
    here, there = client(token), server(token)
    said = meet(here, there)
    assert there.is_welcomed
    assert here.welcomed is not None
    if len(token) > 4:  # a shorter one may be there by chance
        assert token not in said


@pytest.mark.parametrize("proof", [b"", b"x", bytes(32), b"\xff" * 32, bytes(31), TOKEN])
def test_an_invalid_proof_is_refused(proof: bytes) -> None:
    """Other proofs do not count."""
    there = server()
    with pytest.raises(AuthenticationError):
        list(there.receive(wire.encode_opening(Hello(VERSION, b"s" * 16, b"n" * 16, proof))))


def test_a_recorded_hello_is_worth_nothing_to_another_connection() -> None:
    """The server's challenge is fresh each time."""
    recorded = hello_to(client(), server())
    with pytest.raises(AuthenticationError):
        list(server(nonce=b"server nonce 002").receive(recorded))


def test_a_recorded_hello_is_worth_nothing_at_another_store() -> None:
    """A store that relays another store's challenge does not get in there."""
    recorded = hello_to(client(), server(store_id="store-1"))
    with pytest.raises(AuthenticationError):
        list(server(store_id="store-2").receive(recorded))


@pytest.mark.parametrize("change", [{"session_id": b"another session!"}, {"nonce": b"client nonce 002"}])
def test_a_proof_holds_for_the_hello_it_came_with_only(change: dict[str, Any]) -> None:
    """A peer cannot take over a session with the proof of another client."""
    there = server()
    hello = decoded(hello_to(client(), there))
    with pytest.raises(AuthenticationError):
        list(there.receive(wire.encode_opening(hello.replace(**change))))


def test_the_servers_proof_is_not_the_clients_sent_back() -> None:
    """An impostor without the token cannot send the client's proof back to it."""
    here, there = client(), server()
    hello = decoded(hello_to(here, there))
    impostor = wire.encode_opening(Welcome(1, "10.0.0.1", 0, 10**6, hello.proof))
    with pytest.raises(AuthenticationError):
        list(here.receive(impostor))
    assert here.welcomed is None


@pytest.mark.parametrize("proof", [b"", bytes(32), b"x" * 32])
def test_a_server_that_cannot_prove_the_token_is_refused(proof: bytes) -> None:
    here = client()
    hello_to(here, server(b"another token"))
    with pytest.raises(AuthenticationError):
        list(here.receive(wire.encode_opening(Welcome(1, "10.0.0.1", 0, 10**6, proof))))


def test_a_server_that_knows_another_token_is_refused() -> None:
    """A client with a token refuses a server that cannot prove the same token."""
    impostor = server(b"another token")
    here = client()
    hello = decoded(hello_to(here, impostor))
    list(impostor.receive(hello_to(client(b"another token"), impostor)))
    assert decoded(hello_to(client(), impostor)) == hello
    with pytest.raises(AuthenticationError):
        list(here.receive(impostor.encode_welcome(session=1, address="10.0.0.1", revision=0)))


def test_a_recorded_welcome_is_worth_nothing_to_another_connection() -> None:
    """The client's challenge is fresh each time, too."""
    first, there = client(), server()
    list(there.receive(hello_to(first, there)))
    recorded = there.encode_welcome(session=1, address="10.0.0.1", revision=0)
    list(first.receive(recorded))
    second = client(nonce=b"client nonce 002")
    hello_to(second, server())
    with pytest.raises(AuthenticationError):
        list(second.receive(recorded))


def test_no_error_shows_the_token() -> None:
    errors: list[AuthenticationError] = []
    for here, there in ((client(b"wrong token"), server()), (client(), server(b"wrong token"))):
        with pytest.raises(AuthenticationError) as caught:
            list(there.receive(hello_to(here, there)))
        errors.append(caught.value)
    for error in errors:
        assert "secret" not in str(error)
        assert "wrong" not in str(error)


def test_a_hello_of_a_stranger_is_not_answered_with_the_proof() -> None:
    """The server proves its knowledge only to a client that has proven its own first."""
    there = server()
    with pytest.raises(AuthenticationError):
        list(there.receive(hello_to(client(b"wrong token"), there)))
    with pytest.raises(AssertionError):
        there.encode_welcome(session=1, address="10.0.0.1", revision=0)


def test_a_proof_holds_for_the_version_it_was_made_for_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker that rewrites a hello cannot make both sides speak another version."""
    there = server()
    hello = decoded(hello_to(client(), there))
    monkeypatch.setattr("store.protocol.wire.VERSION", VERSION + 1)
    with pytest.raises(AuthenticationError):
        list(there.receive(wire.encode_opening(hello.replace(version=VERSION + 1))))


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that ends early would reveal the right proof byte by byte."""
    compared: list[bytes] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    here, there = client(), server()
    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    said = meet(here, there)
    assert len(compared) == 2
    assert all(len(proof) == 32 and proof in said for proof in compared), "the client's, and the server's"
    with pytest.raises(AuthenticationError):
        meet(client(b"another token"), server())
    assert len(compared) == 3
