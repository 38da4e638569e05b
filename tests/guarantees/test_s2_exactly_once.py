"""S2: "A request resent after a dropped connection is applied once", first as sessions and connections alone show it.

`RDZV_ADDITIONS` says how many are made through connections that keep being cut: 20,000 if nothing else is said;
`.ci/run` says 100,000.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import store
from store import Append, ConnectionLost, Get
from store.messages import Added, Guarded, Ping
from store.net.address import Address
from tests.support.by_hand import Post, Town
from tests.support.proxy import Proxy
from tests.support.seeds import FRESH


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
@given(STEPS, st.sampled_from([None, b"secret"]))
def test_s2_nothing_is_applied_twice_and_what_is_uncertain_is_said_to_be(
    steps: list[tuple[str, int]], token: bytes | None
) -> None:
    """ "Where nobody can know (...), the caller gets `ConnectionLost` with `maybe_applied=True`, never a guess." """
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


ADDITIONS = int(os.environ.get("RDZV_ADDITIONS", "20000"))


async def keep_cutting(proxy: Proxy, rng: random.Random, bytes_most: int) -> None:
    """Cut at a random byte, again and again, as soon as somebody has come back."""
    while True:
        proxy.cut_after(rng.randrange(1, bytes_most))
        cut = proxy.connections
        await proxy.until(lambda cut=cut: proxy.connections > cut, timeout=60.0)  # type: ignore[misc]


@pytest.mark.parametrize("seed", [2, FRESH])
async def test_s2_additions_through_cut_connections_count_exactly(seed: int) -> None:
    additions = 800
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        async with store.connect(f"tcp://127.0.0.1:{proxy.port}") as client:
            cutting = asyncio.create_task(keep_cutting(proxy, random.Random(seed), 2000))
            room = asyncio.Semaphore(20)

            async def add() -> int:
                async with room:
                    return await client.add("count", 1)

            sums = await asyncio.gather(*[add() for _ in range(additions)])
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)
        assert proxy.connections > 3, "nothing was cut"
        assert sorted(sums) == list(range(1, additions + 1)), "each was applied once, and its own answer came back"


async def test_s2_all_additions_of_eight_clients_through_cut_connections_end_at_exactly_their_number() -> None:
    clients, at_once = 8, 250
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        cutting = asyncio.create_task(keep_cutting(proxy, random.Random(5), 200_000))
        numbers = iter(range(ADDITIONS))
        sums: list[int] = []

        async def caller(client: store.Client) -> None:
            sums.extend([await client.add("count", 1) for _ in numbers])

        async def use_a_client() -> None:
            async with store.connect(f"tcp://127.0.0.1:{proxy.port}", timeout=60.0) as client:
                await asyncio.gather(*[caller(client) for _ in range(at_once)])

        await asyncio.gather(*[use_a_client() for _ in range(clients)])
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        assert proxy.connections > clients, "nothing was cut"
        assert sorted(sums) == list(range(1, ADDITIONS + 1))
        async with store.connect(server.url) as client:
            assert await client.add("count", 0) == ADDITIONS


async def test_s2_additions_of_blocking_threads_through_cut_connections_count_exactly() -> None:
    additions, threads = 100, 4
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:
        client = store.sync.Client(Address(host="127.0.0.1", port=proxy.port))
        cutting = asyncio.create_task(keep_cutting(proxy, random.Random(3), 1500))

        def add() -> list[int]:
            return [client.add("count", 1) for _ in range(additions)]

        sums = await asyncio.gather(*[asyncio.to_thread(add) for _ in range(threads)])
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        await asyncio.to_thread(client.close)
        assert proxy.connections > 10, "nothing was cut"
        assert sorted(itertools.chain.from_iterable(sums)) == list(range(1, additions * threads + 1))


async def test_s2_where_nobody_can_know_the_caller_is_told_that_it_may_have_been_applied() -> None:
    """ "Where nobody can know (a server without a data directory died), the caller gets `ConnectionLost` ..." """
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(f"tcp://127.0.0.1:{proxy.port}", timeout=0.3) as client,
    ):
        proxy.black_hole()
        call = asyncio.create_task(client.put("a", b""))
        await asyncio.sleep(0)
        await proxy.refuse()
        proxy.cut()
        proxy.heal()
        with pytest.raises(ConnectionLost) as caught:
            await call
        assert caught.value.maybe_applied
