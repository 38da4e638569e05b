"""The server and its clients in virtual time: seeded walks on a network in memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from unittest import mock

import store
from store.engine.engine import Engine
from store.server.server import Server
from tests.recorded import store_engine
from tests.recorded.store_engine import Walk
from tests.recorded.tables import constants, logged, sections, text
from tests.support.faults import FaultyDisk, FaultyJournal, FaultyNetwork
from tests.support.limits import limits_with
from tests.support.stores import Peer
from tests.support.virtual_time import VirtualTimeLoop

TABLES = sections(__file__)
SMALL = constants(TABLES, "store.server")
LIMITS: dict[str, Any] = eval(TABLES["limits"])


def run(play: Callable[[list[str]], Coroutine[Any, Any, Any]]) -> list[str]:
    """Return the lines that something writes in virtual time, with small constants and the store's log."""
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(store_engine.steps_of(store_engine.SMALL))
        for name, value in SMALL.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(logged(lambda line: lines.append(f"  {line}")))
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(play(lines))
    return lines


async def in_this_thread(function: Callable[[], Any]) -> Any:
    """Run a function that would block, as in a thread that takes a moment."""
    await asyncio.sleep(0.01)
    return function()


class ServedWalk:
    """Peers that speak the protocol by hand, well or badly, to a server that may have a disk with faults."""

    def __init__(self, seed: int, lines: list[str], *, durable: bool) -> None:
        self.r, self.lines, self.loop = random.Random(seed), lines, asyncio.get_running_loop()
        self.network = FaultyNetwork(latency=0.001, socket_buffer_bytes=300)
        self.disk = FaultyDisk(random.Random(seed), store_id="store", on_commit=lambda _: None, now=self.loop.time)
        engine = Engine(store_id="store", limits=limits_with(**LIMITS), durable=durable)
        journal = self.disk.open_journal(self.loop, kind=FaultyJournal) if durable else None
        if journal is not None:
            engine = Engine.restore(journal.load(), limits=engine.limits, now=self.loop.time())
        self.ticks, self.durable = 0, durable
        clock = self.loop.time
        self.server = Server(engine, clock=clock, stopwatch=self.tick, journal=journal, in_thread=in_this_thread)
        self.walk = Walk(seed, self, store_engine.KEYS[::2])  # type: ignore[arg-type]
        self.peers: dict[int, Peer] = {}
        self.heard: dict[int, int] = {}
        self.figures: dict[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The server's engine."""
        return self.server._engine

    def tick(self) -> float:
        """Return the time of a clock that goes on by 0.3 ms each time."""
        self.ticks += 1
        return self.ticks * 0.0003

    def write_news(self, what: str) -> None:
        """Write what was done, what peers have heard, and the figures that have changed."""
        figures = {
            name: each for name, each in self.server.figures().items() if name not in ("uptime", "commit_seconds")
        }
        new = " ".join(f"{name}={text(each)}" for name, each in figures.items() if each != self.figures.get(name, 0))
        self.lines.append(f"{self.loop.time():.3f} {what} {new if self.figures else ''}".rstrip())
        self.figures = figures
        for number, peer in tuple(self.peers.items()):
            said = [*peer.said[self.heard.get(number, 0) :], *([peer.problem] if peer.problem else [])]
            self.heard[number], peer.problem = len(peer.said), None
            self.lines += [f"  {number} hears {text(each)}" for each in said]
            for each in said:
                self.walk.note(getattr(each, "response", None))
            if peer.lost.is_set():
                self.lines.append(f"  {number} is disconnected")
                del self.peers[number], self.heard[number]

    async def step(self) -> str:
        """Do one thing, and return its name."""
        r, number, dice = self.r, self.r.randrange(1, 7), self.r.random()
        peer = self.peers.get(number)
        if peer is None:
            silent = dice < 0.1
            options: dict[str, Any] = {
                "session_id": b"session %08d" % number,
                "process": b"process %08d" % (number // 2),
            }
            made = Peer(**options, hello=not silent)
            with contextlib.suppress(OSError):
                await self.network.dial("store", lambda: made, source=f"peer {number}")
                self.peers[number] = made
            return f"{number} connects{' silently' if silent else ''}"
        if peer.connection.welcomed is None and dice < 0.7:
            return "wait"
        if peer.connection.welcomed is not None and (dice < 0.6 or (dice > 0.9 and not self.durable)):
            asked = [self.walk.one(r.choice(store_engine.SECTIONS)) for _ in range(r.choice((1, 1, 2, 5)))]
            with contextlib.suppress(store.StoreError):
                peer.ask(*asked)
            return f"{number} asks {' & '.join(map(text, asked))}"
        if dice < 0.7:
            peer.transport.pause_reading()
            return f"{number} does not read"
        if dice < 0.82:
            peer.transport.resume_reading()
            return f"{number} reads"
        if dice < 0.85:
            data = r.choice(
                (b"\0\0\1\0\x93", b"\0\0\0\2\x91\1", b"\xff" * 4, b"\0\0\0\6\x92\xa3bye\xa0", b"\0\0\0\5\x93\0\1\x91\2")
            )
            peer.transport.write(data)
            return f"{number} writes {data!r}"
        if dice < 0.9:
            r.choice((peer.transport.close, peer.transport.abort, self.network.links(f"peer {number}")[0].reset))()
            return f"{number} hangs up"
        if dice < 0.97:
            self.disk.fail_next = r.choice((0, 1, 2))
            r.choice((self.disk.make_room, self.disk.fill))()
            return f"the disk fails {self.disk.fail_next} times, room: {self.disk.reserve.has_room}"
        self.disk.stalled_until = self.loop.time() + r.choice((0.0, 0.3, 1.0))
        return "the disk stalls"

    async def play(self) -> None:
        """Do many things, then end the server."""
        self.server.start()
        self.server.on_request(lambda kind, outcome, _: self.lines.append(f"  done: {kind} {outcome}"))
        with contextlib.closing(self.network.listen("store", self.server.protocol)):
            for _ in range(135):
                what = await self.step()
                await asyncio.sleep(self.r.choice((0.0, 0.0, 0.0, 0.01, 0.01, 0.1, 0.3, 1.5)))
                self.write_news(what)
            await self.server.shut_down()
            self.write_news("the server leaves")


async def _walk(seed: int, lines: list[str], *, durable: bool) -> None:
    await ServedWalk(seed, lines, durable=durable).play()


def walk_in_memory() -> list[str]:
    """Return a walk with a store in memory."""
    return run(partial(_walk, 1, durable=False))


def walk_on_disk() -> list[str]:
    """Return a walk with a store on a disk."""
    return run(partial(_walk, 2, durable=True))


RECORDINGS = {"in_memory": walk_in_memory, "on_disk": walk_on_disk}
