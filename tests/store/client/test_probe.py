"""Whether a server answers newcomers, asked of real servers; and what a client makes of it whose connection is dead."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio
import pytest

import store
from store.client.coming_back import server_answers
from store.client.patience import Patience
from tests.support.proxy import Proxy

TOKEN = b"a token of good length"


def probe(port: int, *, token: bytes | None = None) -> Any:
    """Ask the server at this port, as a client of it would."""

    async def dial(factory: Any) -> Any:
        return await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)

    return server_answers(dial, Patience(random.Random(0)), token=token, name="the store")


async def test_a_server_answers_a_newcomer_of_which_nothing_is_left() -> None:
    async with store.serve(token=TOKEN) as server, store.connect(server.url, token=TOKEN) as client:
        with anyio.fail_after(30):
            await probe(server.port, token=TOKEN)
            while (await client.stats())["connections"] > 1:  # noqa: ASYNC110 - nobody is told of it
                await anyio.sleep(0.01)
        assert (await client.stats())["sessions"] == 1


async def test_who_cannot_prove_the_token_is_no_answer_and_is_tried_again() -> None:
    async with store.serve(token=TOKEN) as server:
        asked = asyncio.ensure_future(probe(server.port, token=b"another token of good length"))
        with anyio.fail_after(30):
            while server.figures()["connections_refused"] < 2:  # noqa: ASYNC110 - nobody is told of it
                await anyio.sleep(0.01)
        assert not asked.done()
        asked.cancel()
        await asyncio.wait([asked])


@pytest.mark.skipif("sys.platform != 'linux'", reason="elsewhere nobody knows what was acknowledged")
async def test_a_client_leaves_a_connection_that_a_proxy_only_pretends_to_carry() -> None:
    """The proxy's system acknowledges all that is sent; it was believed for 30 s, and for most of a lease."""
    async with (
        store.serve() as server,
        Proxy("127.0.0.1", server.port) as proxy,
        store.connect(f"tcp://127.0.0.1:{proxy.port}", timeout=25.0) as client,
    ):
        assert await client.add("count", 1) == 1
        proxy.swallow()
        proxy.pass_new()
        assert await client.add("count", 1) == 2
        assert (await client.stats())["sessions"] == 1, "the session has gone on, on another connection"
