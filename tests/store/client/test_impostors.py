"""Promise S2: if it cannot be known whether a request was applied, the caller gets maybe_applied=True. Every error of a
request that was sent says so. A program that takes the store's port for a while ends no client that knows the store
(S10).
"""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdzv.testing.network import MemoryNetwork
from store import AuthenticationError, Client, ConnectionLost, ProtocolError, Put, StoreError, StoreReplaced
from store.client.reconnecting import Connection
from store.net.dialing import silent_close_error
from store.protocol import wire
from store.protocol.wire import Greeting, Rejection
from tests.support.stores import connect_in_memory, serve_in_memory

pytestmark = pytest.mark.virtual_time

CLOSED_SILENTLY = str(silent_close_error(secure=False, met=False))
GARBAGE = b"\x00\x00\x00\x02\x91\x01"
IMPOSTORS = {
    "a proxy without its backend": b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
    "another service": b"SSH-2.0-OpenSSH_9.6\r\n",
    "another store that proved nothing": wire.encode_opening(Greeting(1, 1, "another", b"n" * 16, True)),
    "a refusal": wire.encode_rejection(Rejection("authentication", "go away")),
    "an unknown refusal": wire.encode_rejection(Rejection("fashion", "go away")),
    "another version": wire.encode_opening(Greeting(700, 701, "another", b"n" * 16, True)),
    "garbage": GARBAGE,
}


class Impostor(asyncio.Protocol):
    """A server that sends the same bytes to every client."""

    def __init__(self, words: bytes) -> None:
        self._words = words

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._words)


def make_client(network: MemoryNetwork, names: list[str], token: bytes | None) -> Client:
    """Return a client that dials the first of these names. The names may change later."""

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await network.dial(names[0], factory)

    return Client(dial, name="store", token=token, rng=random.Random(0))


@pytest.mark.parametrize("token", [None, b"t" * 32])
@pytest.mark.parametrize("who", IMPOSTORS)
async def test_an_impostor_at_the_port_of_a_known_store_ends_no_client(who: str, token: bytes | None) -> None:
    network = MemoryNetwork(latency=0.001)
    names = ["store"]
    async with serve_in_memory(network, token=token), make_client(network, names, token) as client:
        assert await client.put("a", b"") == 1
        network.listen("impostor", lambda: Impostor(IMPOSTORS[who]))
        names[0] = "impostor"
        network.reset("store")
        await asyncio.sleep(0.01)  # it is noticed
        with pytest.raises(ConnectionLost) as caught:
            await client.put("a", b"", timeout=3.0)
        assert not caught.value.maybe_applied, "it was never sent"
        names[0] = "store"
        assert await client.put("a", b"") == 2
        assert client.failure is None


async def test_another_store_is_reported_once_it_has_sent_its_welcome() -> None:
    network = MemoryNetwork(latency=0.001)
    names = ["store"]
    token = b"t" * 32
    async with (
        serve_in_memory(network, token=token),
        serve_in_memory(network, name="other", token=token),
        make_client(network, names, token) as client,
    ):
        names[0] = "other"
        network.reset("store")
        with pytest.raises(StoreReplaced):
            await client.put("a", b"", timeout=3.0)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (GARBAGE, ProtocolError),
        (wire.encode_rejection(Rejection("authentication", "go away")), AuthenticationError),
        (wire.encode_rejection(Rejection("protocol", "what is this")), ProtocolError),
    ],
)
async def test_every_error_of_a_write_that_was_sent_says_that_it_may_have_been_applied(
    words: bytes, kind: type[StoreError]
) -> None:
    network = MemoryNetwork(latency=0.001)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        (link,) = network.links("client")
        network.partition("store")
        sent = asyncio.create_task(client.call(Put("a", b"")))
        read = asyncio.create_task(client.get("a"))
        await asyncio.sleep(0.01)
        link.client.receive(memoryview(words))
        with pytest.raises(kind) as caught:
            await sent
        assert caught.value.maybe_applied
        with pytest.raises(kind) as caught:
            await read
        assert not caught.value.maybe_applied, "a read changes nothing"
        with pytest.raises(kind) as caught:
            await client.put("b", b"")
        assert not caught.value.maybe_applied, "it was never sent"
        network.heal("store")


@pytest.mark.parametrize(
    ("error", "spoken", "words"),
    [
        (None, True, ""),
        (ConnectionResetError("reset"), True, "reset"),
        (ConnectionResetError("reset"), False, CLOSED_SILENTLY),
        (ConnectionResetError("reset"), None, CLOSED_SILENTLY),  # it is not known yet
        (OSError("no route"), False, "no route"),
    ],
)
async def test_only_a_server_that_has_said_nothing_is_told_of_as_silent(
    error: OSError | None, spoken: bool | None, words: str
) -> None:
    connection = Connection(cast("Any", SimpleNamespace(_secure=False, has_met_store=False, timeouts=None)))
    connection._error = error
    if spoken is not None:
        connection.spoken.set_result(spoken)
    assert str(connection.error) == words
