"""A round's store belongs to the event loop that used it first; use from another loop is an error."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rdzv.errors import RendezvousStateError, RoundSupersededError
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
