"""Promise R16: every wait is explained: why a round was given up, and which members were lost."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import rdzv
import store
from rdzv import NodesLost, SharedStore
from tests.support.runs import VirtualRun, listen


@pytest.mark.virtual_time
async def test_r16_why_the_coordinator_itself_was_lost_is_said_too() -> None:
    """R16: its successor had seen nothing of its death, and gave no reason."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        await run.meet(*handlers.values())
        coordinator = (await handlers["a"].status()).coordinator
        assert coordinator is not None
        rest = [handler for name, handler in handlers.items() if name != coordinator]
        run.crash(coordinator)
        await (await listen(run, rest[0])).until(NodesLost(1, (coordinator,)))
        status = await rest[0].status()
        assert {one.node_id: one.why for one in status.missing} == {coordinator: "its process ended"}
        (chapter,) = await rest[0].history()
        assert [(one.kind, one.node_ids, one.reason) for one in chapter.incidents] == [
            ("lost", (coordinator,), "its process ended")
        ]


SAID_WITHIN = 3.0  # seconds
WAITS: dict[str, tuple[Callable[[SharedStore], Coroutine[Any, Any, object]], str]] = {
    "get": (lambda shared: shared.get("never"), "key 'never'"),
    "wait": (lambda shared: shared.wait(["never", "ever"]), "keys 'never', 'ever'"),
    "multi_get": (lambda shared: shared.multi_get(["never"]), "key 'never'"),
    "queue_pop": (lambda shared: shared.queue_pop("jobs"), "key 'jobs'"),
    "barrier": (lambda shared: shared.barrier("all", 2), "key 'all/last_member'"),
}


@pytest.mark.some_of(8)
@pytest.mark.virtual_time
@pytest.mark.parametrize("ttl", [3, 10, 60])
@pytest.mark.parametrize("says_steps", [False, True])
@pytest.mark.parametrize("how", WAITS)
async def test_r16_a_wait_in_the_rounds_store_is_in_the_log_and_in_the_status(
    how: str, says_steps: bool, ttl: int, caplog: pytest.LogCaptureFixture
) -> None:
    """For 300 s neither log nor status said that a member waited there, nor for which key."""
    caplog.set_level(logging.INFO, "rdzv")
    wait, key = WAITS[how]
    async with VirtualRun(min_nodes=2, stall_timeout=1000, ttl=ttl) as run, run.looked_at() as seen:
        a, b = run.handler("a"), run.handler("b")
        info, _ = await run.meet(a, b)
        if says_steps:
            assert a.node.membership is not None
            a.node.membership.beats.beat(7)
        await asyncio.sleep(20)
        waiting = run.start(wait(info.store))
        await asyncio.sleep(SAID_WITHIN)
        line = f"node a has waited 2 s in the round's store, for {key}"
        assert [line in record.getMessage() for record in caplog.records].count(True) == 1, caplog.text
        status = await seen.status()
        assert list(status.awaits) == ["a"]
        said, seconds = status.awaits["a"]
        assert said == key
        assert seconds == pytest.approx(SAID_WITHIN, abs=0.2)
        waiting.cancel()
        await asyncio.sleep(5)
        assert (await seen.status()).awaits == {}


def test_r16_a_blocking_wait_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    """With real sockets, and a thread that waits."""
    caplog.set_level(logging.INFO, "rdzv")
    with store.sync.serve() as server, rdzv.sync.connect(f"{server.url}/job", min_nodes=1, node_id="a") as handler:
        shared = handler.next_rendezvous().store
        waiting = threading.Thread(target=lambda: shared.wait(["never", "set"], 8.0), daemon=True)
        waiting.start()
        until = time.monotonic() + 8.0
        while not handler.status().awaits and time.monotonic() < until:
            time.sleep(0.05)
        assert handler.status().awaits["a"][0] == "keys 'never', 'set'"
        shared.multi_set(["never", "set"], [b"", b""])
        waiting.join()
