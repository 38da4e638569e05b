"""The cost if all nodes of a run call at once; and a slow store only delays them."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from store.client import reconnecting
from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.virtual_time

# Few in the test suite, since each is a whole node. The server's time for all of them together is what matters.
MANY = int(os.environ.get("RDZV_TEST_MANY", "40"))


class SlowServer:
    """Delays the pieces that clients send: one at a time, each takes a while, as in a busy loop.

    Args:
        run: The run whose store is slow from now on.
        seconds: The time for each piece, in which all others wait.
    """

    def __init__(self, run: VirtualRun, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[tuple[asyncio.BufferedProtocol, bytes]] = deque()
        self.longest = 0
        self._come = asyncio.Event()
        listener = run.machine._listener
        assert listener is not None
        make = listener.protocol_factory
        listener.protocol_factory = lambda: _Queued(self, make())  # type: ignore[arg-type]

    def take(self, peer: asyncio.BufferedProtocol, data: bytes) -> None:
        """Wake the server: a piece has come."""
        self.waiting.append((peer, data))
        self.longest = max(self.longest, len(self.waiting))
        self._come.set()

    async def serve(self) -> None:
        """Deliver one piece after the other."""
        while True:
            while self.waiting:
                await asyncio.sleep(self.seconds)
                peer, data = self.waiting.popleft()
                peer.get_buffer(-1)[: len(data)] = data  # type: ignore[index]
                peer.buffer_updated(len(data))
            self._come.clear()
            await self._come.wait()


class _Queued(asyncio.BufferedProtocol):
    """One connection of a slow server."""

    def __init__(self, server: SlowServer, peer: asyncio.BufferedProtocol) -> None:
        self._server, self._peer = server, peer
        self._buffer = bytearray(64 * 1024)
        for name in ("connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(peer, name))

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Enqueue the bytes."""
        self._server.take(self._peer, bytes(self._buffer[:nbytes]))


@contextlib.asynccontextmanager
async def slow_server(run: VirtualRun, seconds: float) -> AsyncIterator[SlowServer]:
    server = SlowServer(run, seconds)
    serving = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        server.seconds = 0.0
        await asyncio.sleep(1)
        while server.waiting:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(1)
        serving.cancel()
        await asyncio.wait([serving])


def requests_of(run: VirtualRun) -> int:
    return int(run.server.figures()["requests"])


@pytest.mark.in_ci
async def test_thousands_of_nodes_meet_at_a_store_that_takes_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: terms expired before a decision, and waiting nodes arrived again, so 10,000 nodes never met."""
    monkeypatch.setattr(
        reconnecting, "unacknowledged", lambda _, buffered: (buffered, False, True)
    )  # as on Linux with a working network
    parameters: dict[str, Any] = {"min_nodes": MANY, "join_timeout": 3600, "ttl": 60}
    async with VirtualRun(**parameters) as run, slow_server(run, 4.0 / MANY) as server:
        handlers = [run.handler(f"n{number}") for number in range(MANY)]
        began = asyncio.get_running_loop().time()
        assert_one_round(await run.meet(*handlers))
        took = asyncio.get_running_loop().time() - began
        assert server.longest >= MANY, "it is slow: a request of each waited at a time"
        assert took < 60, "three times the time of all their requests"
        assert_one_round(await run.meet(*handlers))
