"""The server and its clients in virtual time: seeded walks on a network in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import store
from store.engine.engine import Engine
from store.messages import Watch
from store.server.server import Server
from tests.recorded import store_engine
from tests.recorded.recorder import shortened
from tests.recorded.store_engine import Walk
from tests.recorded.tables import constants, evaluated, logged, sections, text
from tests.support.faults import FaultyDisk, FaultyJournal, FaultyNetwork
from tests.support.limits import limits_with
from tests.support.stores import Peer
from tests.support.virtual_time import VirtualTimeLoop

TABLES = sections(__file__)
SMALL = constants(TABLES, "store.server")
LIMITS: dict[str, Any] = eval(TABLES["limits"])
FIXED: dict[str, Any] = eval(TABLES["fixed"])


def run(play: Callable[[list[str]], Coroutine[Any, Any, Any]]) -> list[str]:
    """Return the lines that something writes in virtual time, with small constants and the store's log."""
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(store_engine.steps_of(store_engine.SMALL))
        for name, value in {**SMALL, **FIXED}.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(logged(lambda line: lines.append(f"  {line}")))
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(play(lines))
    return [shortened(line, 70) for line in lines]


async def in_this_thread(function: Callable[[], Any]) -> Any:
    """Run a function that would block, as in a thread that takes a moment."""
    await asyncio.sleep(0.01)
    return function()


class NotingPeer(Peer):
    """A peer that notes the size of each piece that it reads, among those of the other peers."""

    arrivals: list[str]
    number: int

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.arrivals.append(f"{self.number}:{len(data)}")
        super().data_received(data)


class ServedWalk:
    """Peers that speak the protocol by hand, well or badly, to a server that may have a disk with faults."""

    def __init__(self, seed: int, lines: list[str], *, durable: bool, brief: bool = False, **limits: int) -> None:
        self.seed, self.r, self.lines, self.loop = seed, random.Random(seed), lines, asyncio.get_running_loop()
        self.network = FaultyNetwork(latency=0.001, socket_buffer_bytes=300, joins=seed % 3 / 4 if brief else 0)
        self.brief, self.token = brief, b"secret" if brief else None
        self.disk = FaultyDisk(random.Random(seed), store_id="store", on_commit=lambda _: None, now=self.loop.time)
        engine = Engine(store_id="store", limits=limits_with(**{**LIMITS, **limits}), durable=durable)
        journal = self.disk.open_journal(self.loop, kind=FaultyJournal) if durable else None
        if journal is not None:
            engine = Engine.restore(journal.load(), limits=engine.limits, now=self.loop.time())
        self.ticks, self.r_ticks, self.durable = 0, random.Random(seed), durable
        clock = self.loop.time
        options: dict[str, Any] = {"clock": clock, "stopwatch": self.tick, "in_thread": in_this_thread}
        self.server = Server(engine, journal=journal, token=self.token, **options)
        self.walk = Walk(seed, self, store_engine.KEYS[::2])  # type: ignore[arg-type]
        self.peers: dict[int, Peer] = {}
        self.heard: dict[int, int] = {}
        self.arrivals: list[str] = []
        self.figures: dict[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The server's engine."""
        return self.server._engine

    def tick(self) -> float:
        """Return the time of a clock that goes on by 0.25 ms at most times, at times by just a turn or a pass."""
        self.ticks += self.r_ticks.choice((1, 1, 1, 2, 8, 16, 17))
        return self.ticks / 4096

    def write_news(self, what: str) -> None:
        """Write what was done, what peers have heard, and the figures that have changed."""
        figures = {
            name: each for name, each in self.server.figures().items() if name not in ("uptime", "commit_seconds")
        }
        figures["waiting"] = self.server._scheduler.seconds_waiting_by_peer(self.loop.time())
        figures |= {f"unsent_{number}": peer.transport.get_write_buffer_size() for number, peer in self.peers.items()}
        new = " ".join(f"{name}={text(each)}" for name, each in figures.items() if each != self.figures.get(name, 0))
        self.lines.append(f"{self.loop.time():.3f} {what} {new if self.figures else ''}".rstrip())
        self.figures = figures
        self.lines += [f"  {' '.join(self.arrivals)}"] if self.arrivals else []
        self.arrivals.clear()
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
                "token": b"wrong" if self.brief and dice > 0.95 else self.token,
            }
            made = NotingPeer(**options, hello=not silent)
            made.arrivals, made.number = self.arrivals, number
            with contextlib.suppress(OSError):
                await self.network.dial("store", lambda: made, source=f"peer {number}")
                self.peers[number] = made
            return f"{number} connects{' silently' if silent else ''}"
        if peer.connection.welcomed is None and dice < 0.7:
            return "wait"
        if peer.connection.welcomed is not None and (dice < 0.6 or (dice > 0.9 and not self.durable)):
            asked = [self.walk.one(r.choice(store_engine.SECTIONS)) for _ in range(r.choice((1, 1, 2, 5)))]
            asked += [Watch(prefix="")] * 9 * (self.brief and r.random() < self.seed % 4 / 10)
            with contextlib.suppress(store.StoreError):
                peer.ask(*asked)
            return f"{number} asks {' & '.join(map(text, asked))}"
        if dice < 0.7 - 0.04 * self.brief:
            peer.transport.pause_reading()
            return f"{number} does not read"
        if dice < 0.82 - 0.06 * self.brief:
            peer.transport.resume_reading()
            return f"{number} reads"
        if dice < 0.85 + 0.03 * self.brief:
            data = r.choice(eval(TABLES["damaged"])[: None if self.brief else 5])
            peer.transport.write(data)
            return f"{number} writes {text(data)}"
        if dice < 0.9:
            r.choice((peer.transport.close, peer.transport.abort, partial(self.network.reset, f"peer {number}")))()
            return f"{number} hangs up"
        if dice < 0.95 - 0.04 * self.brief:
            self.disk.fail_next = r.choice((0, 1, 2))
            r.choice((self.disk.make_room, self.disk.fill))()
            return f"the disk fails {self.disk.fail_next} times, room: {self.disk.reserve.has_room}"
        self.disk.stalled_until = self.loop.time() + r.choice((0.0, 0.3, 1.0, 4.0))
        return "the disk stalls"

    async def play(self) -> None:
        """Do many things, then end the server."""
        self.server.start()
        if self.seed != 3:
            self.server.add_request_callback(lambda *done: self.lines.append(f"  done: {text(done)}"))
        with contextlib.closing(self.network.listen("store", self.server.protocol)):
            for _ in range(140):
                what = await self.step()
                await asyncio.sleep(self.r.choice((0.0, 0.0, 0.0, 0.01, 0.01, 0.1, 0.3, 1.5)))
                self.write_news(what)
            await self.server.shut_down()
            self.write_news("the server leaves")
        self.disk.close()


async def _walk(seed: int, lines: list[str], **options: Any) -> None:
    await ServedWalk(seed, lines, **options).play()


def walks_in_brief() -> Iterator[str]:
    """Yield other walks; of each fifty lines the first, and a checksum."""
    for seed in range(3, 11):
        most: Any = {"memory_bytes_max": (66_000, 120_000, 58_000)[seed % 3], "sessions_max": 9 - seed % 5}
        lines = run(partial(_walk, seed, durable=not seed % 2, brief=True, journal_bytes_max=5000 // seed, **most))
        for at in range(0, len(lines), 50):
            yield f"{seed} {shortened(lines[at], 60)} {zlib.crc32(' '.join(lines[at : at + 50]).encode()):08x}"


def parts() -> list[str]:
    """Return what parts of the server do by themselves, at the bounds that they really have."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), logged(lines.append):
        for line in evaluated(TABLES["parts"], {}):
            row, *value = line.replace(os.path.realpath(folder), "FOLDER").split(" -> ", 1)
            if value:
                lines.append(f"{shortened(row, 40)} -> {value[0]}")
    return [line for line in lines if ": debug: " not in line]


RECORDINGS: dict[str, Callable[[], Iterable[str]]] = {
    "in_memory": partial(run, partial(_walk, 1, durable=False)),
    "on_disk": partial(run, partial(_walk, 2, durable=True)),
    "in_brief": walks_in_brief,
    "parts": parts,
}
