"""The loop over the rounds for those who await: real sockets, threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

import rdzv
import store.sync
from tests.rdzv.loop.test_blocking import DIES, WITHIN
from tests.support.processes import require, start_python

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rdzv import Ending


@pytest.fixture
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield server.url


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
async def test_a_body_that_never_yields_to_its_loop_hears_of_a_loss_at_its_next_check(url: str, library: str) -> None:
    """It was cancelled where it awaits next, and went on until it had come to its end."""
    if library == "uvloop":
        require("uvloop")
    run: Callable[[Coroutine[None, None, None]], None] = __import__(library).run
    at = f"{url}/job?min_nodes=2&max_nodes=2&is_host=false&disconnect_ttl=0.3"
    endings: list[Ending | None] = []
    steps, works, killed = [0], threading.Event(), threading.Event()

    async def train() -> None:
        async for round in rdzv.rounds(at, node_id="a"):
            async with round:
                until = time.monotonic() + WITHIN
                while time.monotonic() < until:
                    await round.check(steps[0])
                    steps[0] += not killed.is_set()
                    works.set()
                    time.sleep(0.001)  # noqa: ASYNC251  that is what it does
                return
            endings.append(round.ending)
            return

    training = asyncio.create_task(asyncio.to_thread(run, train()))
    async with start_python("-c", DIES, at) as child:
        await child.line("in")
        assert await asyncio.to_thread(works.wait, WITHIN)
        child.kill()
        killed.set()
    await training
    (ending,) = endings
    assert ending is not None
    assert (ending.kind.value, ending.node_ids) == ("lost", ("killed",))
