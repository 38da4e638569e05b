"""What it costs when all nodes of a run call at the same moment, and that a slow store makes it slow, not stuck."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from store.client import reconnecting
from tests.support.runs import VirtualRun, assert_one_round

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.virtual_time

# Few in the suite, since each of them is a whole node. What counts is how long the server takes for all of them.
MANY = int(os.environ.get("RDZV_TEST_MANY", "40"))


class SlowServer:
    """Has every piece that clients send wait for its turn, and take its time: as a loop does that is too busy.

    Args:
        run: Whose store is slow from now on.
        seconds: That each piece takes; meanwhile all others wait.
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
        """Something has come."""
        self.waiting.append((peer, data))
        self.longest = max(self.longest, len(self.waiting))
        self._come.set()

    async def serve(self) -> None:
        """Carry out one piece after the other."""
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
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """They wait for their turn."""
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
        while server.waiting:  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(1)
        serving.cancel()
        await asyncio.wait([serving])


def requests_of(run: VirtualRun) -> int:
    return int(run.server.figures()["requests"])


async def test_thousands_at_once_meet_at_a_store_that_takes_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms were over before anything was decided, and whoever waited came again: 10,000 nodes never met."""
    monkeypatch.setattr(
        reconnecting, "outstanding", lambda _, buffered: (buffered, False, True)
    )  # as Linux tells of a network that works
    parameters: dict[str, Any] = {"min_nodes": MANY, "join_timeout": 3600, "ttl": 60}
    async with VirtualRun(**parameters) as run, slow_server(run, 4.0 / MANY) as server:
        handlers = [run.handler(f"n{number}") for number in range(MANY)]
        began = asyncio.get_running_loop().time()
        assert_one_round(await run.meet(*handlers))
        took = asyncio.get_running_loop().time() - began
        assert server.longest >= MANY, "it is slow: a request of each waited at a time"
        assert took < 60, "which is three times what the requests of all of them take"
        assert_one_round(await run.meet(*handlers))
