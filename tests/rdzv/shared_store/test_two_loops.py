"""The client of a round's store: it belongs to the event loop that used it first, and to the store of the round."""

import asyncio
import threading

import pytest

import store
import store.sync
from rdzv.errors import RendezvousStateError, RoundSupersededError
from rdzv.shared_store.store import LazyClient
from store.messages import Get, Put
from tests.support.runs import real_run


async def test_a_second_event_loop_gets_a_clear_error_and_the_first_still_works() -> None:
    async with real_run(min_nodes=1, max_nodes=1) as make, make("a") as handler:
        info = await handler.next_rendezvous()
        await info.store.set("k", b"v")
        errors: list[BaseException] = []

        def in_another_loop() -> None:
            with pytest.raises(RendezvousStateError, match="run_coroutine_threadsafe") as caught:
                asyncio.run(info.store.get("k"))
            errors.append(caught.value)

        other = threading.Thread(target=in_another_loop)
        other.start()
        await asyncio.to_thread(other.join, 10)
        assert len(errors) == 1
        assert await info.store.get("k") == b"v"


async def test_a_handler_whose_store_was_used_can_be_closed_from_another_event_loop() -> None:
    """Regression: it waited for the client's tasks in the wrong loop, for ever."""
    async with real_run(min_nodes=1, max_nodes=1) as make, make("a") as handler:
        info = await handler.next_rendezvous()
        await info.store.set("k", b"v")
        async with asyncio.timeout(20):
            await asyncio.to_thread(asyncio.run, asyncio.wait_for(handler.aclose(), 15))
        with pytest.raises(RoundSupersededError):
            await info.store.get("k")


async def test_a_round_in_a_store_that_replaces_another_begins_with_a_client_that_knows_the_present_one() -> None:
    """Regression: the first call of the new round's body raised RoundSupersededError, since the client of the rounds
    before had not heard of the replacement yet. The body ended, and all met once more, or waited for it for ever.
    """
    with store.sync.serve() as server:
        client = LazyClient(lambda: store.connect(server.url))
        await client.call(Put("k", b"before"))
    # Nothing is awaited from here to the call: the client cannot hear of the replacement.
    with store.sync.serve(port=server.port) as present:
        client.expect_store(present.store_id)
        assert (await client.call(Get("k"), timeout=20)).entry is None
        await client.call(Put("k", b"now"))
        client.expect_store(present.store_id)
        found = await client.call(Get("k"))
        assert found.entry is not None
        assert found.entry.value == b"now"
        await client.aclose()
