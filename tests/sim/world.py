"""The world that a simulated run lives in: one clock, one die, one store, and the wires to it.

Nothing here knows of rendezvous. A process is a generator that yields what it waits for (`Ask`, `Sleep`) and is resumed
with what came of it. A machine is a few processes behind one connection, which may be paused, cut off and crash between
any two of its steps. Messages take their time, but stay in order on one connection; when it breaks, what was on its way
is lost from some message on, and the client comes back with the same session and sends again what was not answered.

Everything happens in one order that the seed alone decides.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from store.engine.engine import Answer, Delivery, Engine
from store.messages import Cancel, Failed, FailureKind, Watching
from store.protocol.connection import WatchCursor

if TYPE_CHECKING:
    from store.messages import Event, Request, Response

__all__ = ["Ask", "Link", "Machine", "Process", "Script", "Sleep", "World"]

LOOK_EVERY = 0.25  # seconds between two looks of the server; below its notion of a stall
TICK = 1e-6  # seconds; what a timer is late, so that it is never early by a rounding
DELAY_MOST = 0.02  # seconds that a message travels


@dataclass(frozen=True, slots=True)
class Ask:
    """Wait for the answer to a request. `peril`: how many requests it counts for when a fault is drawn."""

    request: Request[Any]
    peril: int = 1


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait until a moment on the machine's clock (None: for ever), or until poked."""

    until: float | None = None


Script = Generator[Ask | Sleep, Any, None]


class World:
    """One clock, one die, one store."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.replay = f"python -m tests.sim --seed {seed}"
        self.rng = Random(seed)
        self.now = 1000.0
        self.engine = Engine(store_id="simulated")
        self.calm = True  # no faults but those that somebody orders
        self.faults = 0
        self.disturbed_until = 0.0  # when what went wrong last may still be felt
        self.links: dict[int, Link] = {}
        self.observer: tuple[int, Callable[[tuple[Event, ...]], None]] | None = None
        self._peers = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._steps = 0
        self._ready: deque[Callable[[], None]] = deque()
        self._trace = trace
        self._fault_in = 0
        self.fault_every = 40  # requests, on average
        self.at(self.now, self._look)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a moment."""
        self._steps += 1
        heapq.heappush(self._heap, (time, self._steps, action))

    def soon(self, action: Callable[[], None]) -> None:
        """Do something now, but after what is being done."""
        self._ready.append(action)

    def run(self, until: float) -> None:
        """Let time pass."""
        ready, heap = self._ready, self._heap
        while True:
            while ready:
                ready.popleft()()
            if not heap or heap[0][0] > until:
                break
            time, _, action = heapq.heappop(heap)
            self.now = max(self.now, time)
            action()
        self.now = max(self.now, until)

    def say(self, what: str) -> None:
        """One line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now - 1000:8.3f}  {what}")

    def new_peer(self) -> int:
        """A number for a connection."""
        self._peers += 1
        return self._peers

    def route(self, deliveries: tuple[Delivery | Answer, ...]) -> None:
        """What the store has to say, on its way to whom it is for."""
        for delivery in deliveries:
            if isinstance(delivery, Delivery):
                for peer, watch_id in delivery.watchers:
                    if self.observer is not None and peer == self.observer[0]:
                        self.observer[1](delivery.events)  # at once: it sees the store as it is
                        continue
                    self.links[peer].down(peer, watch_id, delivery.events)

    def fault_due(self, peril: int) -> bool:
        """Whether a fault strikes at this request; those of more peril draw more of them."""
        if self.calm:
            return False
        self._fault_in -= peril
        if self._fault_in > 0:
            return False
        self._fault_in = int(self.rng.expovariate(1 / self.fault_every)) + 1
        return True

    def disturbed(self, what: str, *, lasting: float) -> None:
        """Something has gone wrong, on purpose, and its consequences may be felt for so long."""
        self.disturbed_until = max(self.disturbed_until, self.now + lasting)
        self.faults += 1
        self.say(what)

    def _look(self) -> None:
        self.route(self.engine.tick(now=self.now))
        due = self.engine.next_tick_in()
        self.at(self.now + min(LOOK_EVERY, 0.001 + due if due is not None else LOOK_EVERY), self._look)


class Link:
    """One client's session with the store, over as many connections as it takes."""

    def __init__(self, world: World, machine: Machine, session: bytes) -> None:
        self._world, self._machine, self._session = world, machine, session
        self._peer: int | None = None
        self._up_at = self._down_at = 0.0
        self._requests = 0
        self._unanswered: dict[int, tuple[Request[Any], Callable[[Response], None]]] = {}
        self._watches: dict[int, tuple[WatchCursor, Callable[[tuple[Event, ...]], None]]] = {}
        self._for_good = False
        self._up = False  # whether the server has had our hello
        self.on_reconnect: Callable[[], None] | None = None
        self._connect()

    def ask(self, request: Request[Any], answered: Callable[[Response], None]) -> None:
        """Send a request, as often as it takes."""
        if self._for_good:
            return
        self._requests += 1
        self._unanswered[self._requests] = (request, answered)
        if self._up:
            self._send(self._requests)

    def watch(self, prefix: str, heard: Callable[[tuple[Event, ...]], None]) -> Callable[[], None]:
        """Watch a prefix, across connections, until what is returned is called."""
        cursor = WatchCursor(prefix, start_revision=None, snapshot=True)
        self._open(cursor, heard)

        def end() -> None:
            for watch_id, (watched, _) in list(self._watches.items()):
                if watched is cursor:
                    del self._watches[watch_id]
                    self.ask(Cancel(target=watch_id), lambda _: None)

        return end

    def cut(self, *, for_good: bool = False, noticed: bool = True) -> None:
        """Break the connection; the server notices a moment later, if it does."""
        peer, self._peer, self._up = self._peer, None, False
        world = self._world
        self._for_good = self._for_good or for_good
        if peer is not None and noticed:
            world.at(world.now + world.rng.uniform(0, DELAY_MOST), lambda: self._closed(peer))
        if not self._for_good:
            world.at(world.now + world.rng.uniform(0.01, 0.3), self._connect)

    def down(self, peer: int, request_id: int, events: tuple[Event, ...]) -> None:
        """Events for a watch leave the server."""
        self._downwards(peer, lambda: self._heard(request_id, events))

    def _connect(self) -> None:
        if self._for_good or self._peer is not None:
            return
        peer = self._peer = self._world.new_peer()
        self._up_at = self._down_at = self._world.now
        self._upwards(lambda: self._hello(peer))

    def _hello(self, peer: int) -> None:
        world = self._world
        if peer != self._peer:
            return  # cut before the server had it
        opened = world.engine.connect(peer, session_id=self._session, now=world.now)
        assert opened is not None
        if opened[1] is not None:
            self._closed(opened[1])
        world.links[peer] = self
        self._downwards(peer, self._resume)

    def _resume(self) -> None:
        self._up = True
        for request_id, (request, _) in list(self._unanswered.items()):
            if type(request).__name__ in ("Watch", "Cancel"):
                del self._unanswered[request_id]  # those were of the connection that is gone
        for request_id in self._unanswered:
            self._send(request_id)
        watches, self._watches = self._watches, {}
        for cursor, heard in watches.values():
            self._open(cursor, heard)
        if self.on_reconnect is not None:
            self.on_reconnect()

    def _open(self, cursor: WatchCursor, heard: Callable[[tuple[Event, ...]], None]) -> None:
        request, reset = cursor.opening()
        if reset is not None:
            heard((reset,))

        def answered(response: Response) -> None:
            if isinstance(response, Watching):
                cursor.opened(response.revision)

        self._watches[self._requests + 1] = (cursor, heard)
        self.ask(request, answered)

    def _send(self, request_id: int) -> None:
        peer, (request, _) = self._peer, self._unanswered[request_id]
        assert peer is not None
        acknowledged = next(iter(self._unanswered)) - 1
        self._upwards(lambda: self._arrive(peer, request_id, request, acknowledged))

    def _arrive(self, peer: int, request_id: int, request: Request[Any], acknowledged: int) -> None:
        world = self._world
        if peer not in world.links:
            return  # the server has closed this connection: what was on its way is lost
        applied = world.engine.apply(
            request, peer=peer, request_id=request_id, acknowledged=acknowledged, now=world.now
        )
        assert not (isinstance(applied.response, Failed) and applied.response.kind is FailureKind.FORGOTTEN)
        world.route(applied.deliveries)
        response = applied.response
        if response is not None:
            self._downwards(peer, lambda: self._answered(request_id, response))

    def _answered(self, request_id: int, response: Response) -> None:
        waiting = self._unanswered.pop(request_id, None)
        if waiting is not None:
            waiting[1](response)

    def _heard(self, request_id: int, events: tuple[Event, ...]) -> None:
        watch = self._watches.get(request_id)
        if watch is not None:
            watch[0].delivered(events)
            watch[1](events)

    def _closed(self, peer: int) -> None:
        world = self._world
        if world.links.pop(peer, None) is not None:
            world.engine.disconnect(peer, now=world.now)

    def _upwards(self, action: Callable[[], None]) -> None:
        world = self._world
        self._up_at = max(self._up_at, world.now + world.rng.random() * DELAY_MOST)
        world.at(self._up_at, action)

    def _downwards(self, peer: int, action: Callable[[], None]) -> None:
        world = self._world
        self._down_at = max(self._down_at, world.now + world.rng.random() * DELAY_MOST)

        def deliver() -> None:
            if peer == self._peer:  # else it was lost with its connection
                action()

        world.at(self._down_at, lambda: self._machine.when_awake(deliver))


class Process:
    """One line of execution on a machine."""

    def __init__(self, machine: Machine, script: Script) -> None:
        self._machine, self._script = machine, script
        self._sleeping = 0  # which sleep it is in; 0: none
        self._sleeps = 0
        self._poked = False
        self.over = False

    def poke(self) -> None:
        """Wake it, or let its next sleep be over at once."""
        if self._sleeping:
            self._wake(self._sleeping)
        else:
            self._poked = True

    def kill(self) -> None:
        """End it where it stands."""
        self.over = True

    def resume(self, value: object) -> None:
        """Go on, with what came of what it waited for."""
        if self.over:
            return
        try:
            waits_for = self._script.send(value)
        except StopIteration:
            self.over = True
            return
        if not self._goes_on():
            return  # killed by what it has just done
        if isinstance(waits_for, Ask):
            self._machine.ask(waits_for.request, self.resume, peril=waits_for.peril)
        elif self._poked:
            self._poked = False
            self._machine.world.soon(lambda: self.resume(None))
        else:
            self._sleeps += 1
            sleep = self._sleeping = self._sleeps
            if waits_for.until is not None:
                machine = self._machine
                machine.world.at(
                    max(waits_for.until - machine.clock_offset, machine.world.now) + TICK,
                    lambda: machine.when_awake(lambda: self._wake(sleep)),
                )

    def _goes_on(self) -> bool:
        return not self.over

    def _wake(self, sleep: int) -> None:
        if sleep == self._sleeping:
            self._sleeping = 0
            self._poked = False
            self._machine.world.soon(lambda: self.resume(None))


class Machine:
    """A few processes behind one connection, with a clock of their own."""

    pauses: tuple[tuple[float, float], ...] = ((0.05, 0.5),)  # from how many to how many seconds; one is drawn

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.clock_offset = world.rng.uniform(-500, 500)
        self.alive = True
        self._pauses = 0
        self._asleep = False
        self._deferred: deque[Callable[[], None]] = deque()
        self._processes: list[Process] = []
        self.link = Link(world, self, session=f"{name}/{world.rng.getrandbits(32)}".encode())

    def time(self) -> float:
        """Seconds on this machine's clock."""
        return self.world.now + self.clock_offset

    @property
    def asleep(self) -> bool:
        """Whether it stands still."""
        return self._asleep

    def run(self, script: Script) -> Process:
        """Begin a process."""
        process = Process(self, script)
        self._processes.append(process)
        self.world.soon(lambda: process.resume(None))
        return process

    def ask(self, request: Request[Any], answered: Callable[[Response], None], *, peril: int = 1) -> None:
        """Send a request, unless a fault strikes before it is sent, or just after."""
        world = self.world
        if not world.fault_due(peril):
            self.link.ask(request, answered)
            return
        before = world.rng.random() < 0.5
        if before:
            self.strike()
        if self.alive:
            self.when_awake(lambda: self.link.ask(request, answered))
        if not before:
            self.strike()

    def strike(self) -> None:
        """Let something bad happen to this machine."""
        match self.world.rng.choice(("crash", "pause", "pause", "cut", "cut")):
            case "crash":
                self.crash()
            case "pause":
                self.pause(self.world.rng.uniform(*self.world.rng.choice(self.pauses)))
            case _:
                self.world.disturbed(f"{self.name} loses its connection", lasting=2.0)
                self.link.cut()

    def pause(self, seconds: float) -> None:
        """Stand still for a while, then go on as if nothing had happened."""
        self.world.disturbed(f"{self.name} stands still for {seconds:.2f} s", lasting=seconds + 3.0)
        self._pauses += 1
        pause = self._pauses
        self._asleep = True
        self.world.at(self.world.now + seconds, lambda: self.resume() if pause == self._pauses else None)

    def resume(self) -> None:
        """End a pause."""
        self._asleep = False
        while self._deferred:
            self._deferred.popleft()()
            if self.asleep:  # what it has just done was its last step for a while
                return

    def crash(self) -> None:
        """Be gone; the store notices at once, or not before the leases lapse."""
        self.stop(noticed=self.world.rng.random() < 0.7, why="crashes")

    def stop(self, *, noticed: bool = True, why: str = "ends") -> None:
        """End all processes and hang up."""
        self.world.disturbed(f"{self.name} {why}", lasting=3.0)
        self.alive = False
        for process in self._processes:
            process.kill()
        self._deferred.clear()
        self.link.cut(for_good=True, noticed=noticed)

    def when_awake(self, action: Callable[[], None]) -> None:
        """Do something now, or at the end of a pause; never after a crash."""
        if self._asleep or self._deferred:
            self._deferred.append(action)
        elif self.alive:
            action()
