"""The awaited and the blocking client, on a network and a clock that the recording moves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import store
from store import messages
from store.client import blocking, channel, client
from store.engine.engine import Engine
from store.net.address import Address
from store.server.server import Server
from tests.recorded import store_engine
from tests.recorded.store_engine import Walk
from tests.recorded.store_server import LIMITS, run
from tests.recorded.tables import logged, text
from tests.support.by_hand import Town
from tests.support.faults import FaultyNetwork, Way
from tests.support.limits import limits_with
from tests.support.stores import connect_in_memory

if TYPE_CHECKING:
    from collections.abc import Coroutine


class AwaitedWalk:
    """Clients whose network and server fail; each outcome is written when it comes."""

    def __init__(self, seed: int, lines: list[str]) -> None:
        self.r, self.lines, self.loop = random.Random(seed), lines, asyncio.get_running_loop()
        self.network = FaultyNetwork(latency=0.01)
        self.walk = Walk(seed, self, store_engine.KEYS[::2])  # type: ignore[arg-type]
        self.engine = Engine(store_id="store", limits=limits_with(**LIMITS))
        self.clients: dict[int, store.Client] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.stack = contextlib.AsyncExitStack()
        self.count = 0

    def write(self, said: str) -> None:
        """Write a line."""
        self.lines.append(f"{self.loop.time():.3f} {said}")

    async def serve(self) -> None:
        """Serve the engine; its limits are small, and its stopwatch stands still."""
        clock = self.loop.time
        server = Server(self.engine, clock=clock, stopwatch=clock)
        server.begin()
        scheduler, handshakes = server._scheduler, server._handshakes
        carry_out, accept, lose = scheduler._apply, handshakes.accepted, handshakes.lost

        def apply(peer: Any, asked: Any, *args: Any, **options: Any) -> Any:
            self.write(f"  peer {peer.id} asks {asked[0]}/{asked[1]} {text(asked[2])}")
            return carry_out(peer, asked, *args, **options)

        def accepted(peer: Any) -> None:
            self.write(f"  {peer.name} connects")
            accept(peer)

        def lost(peer: Any) -> None:
            self.write(f"  peer {peer.id} ends: {peer.closing.name}")
            lose(peer)

        for of, name, seen in (
            (scheduler, "_apply", apply),
            (scheduler, "accepted", accepted),
            (handshakes, "lost", lost),
        ):
            setattr(of, name, seen)
        self.stack.push_async_callback(server.leave)
        self.stack.enter_context(contextlib.closing(self.network.listen("store", server.protocol)))

    def start(self, what: str, work: Coroutine[Any, Any, Any]) -> str:
        """Begin something, whose outcome is written."""
        self.count += 1
        number = self.count

        async def play() -> None:
            try:
                told = await work
                self.walk.note(told)
                self.write(f"#{number} -> {text(told)}")
            except asyncio.CancelledError:
                self.write(f"#{number} is cancelled")
            except store.StoreError as error:
                self.write(f"#{number} -> {text(error)}")

        self.tasks[number] = self.loop.create_task(play())
        self.tasks[number].add_done_callback(lambda _: self.tasks.pop(number))
        return f"#{number} {what}"

    async def follow(self, client: store.Client, number: int, **given: Any) -> None:
        """Read a watch."""
        async with client.watch(**given) as watch:
            self.write(f"watch of #{number} is open")
            async for batch in watch.batches():
                self.write(f"watch of #{number}: {text(batch)}")
                await asyncio.sleep(self.r.choice((0.0, 0.5, 4.0)))

    async def connect(self, number: int) -> None:
        """Make a client, which is kept once it is connected."""
        client = connect_in_memory(self.network, source=f"client{number}", timeout=4.0)
        client.on_connection(lambda connected: self.write(f"client {number} is {'' if connected else 'dis'}connected"))
        self.clients[number] = await self.stack.enter_async_context(client)

    async def step(self) -> str:
        """Do one thing, and return its name."""
        r, number, dice = self.r, self.r.randrange(1, 4), self.r.random()
        client = self.clients.get(number)
        if client is None or client.failure is not None:
            self.clients.pop(number, None)
            return self.start(f"client {number}", self.connect(number))
        if dice < 0.5:
            asked = [self.walk.one(r.choice(store_engine.SECTIONS)) for _ in range(r.choice((1, 1, 4)))]
            timeouts = [r.choice((None, 0.5, 2.0, 6.0)) for _ in asked]
            calls = [f"{number} asks {text(each)} {timeout}" for each, timeout in zip(asked, timeouts, strict=True)]
            works = [client.call(each, timeout=timeout) for each, timeout in zip(asked, timeouts, strict=True)]
            return "; ".join(map(self.start, calls, works))
        if dice < 0.6:
            given = r.choice(({}, {"snapshot": True}, {"start_revision": max(self.engine.revision - 3, 0)}))
            given |= {"prefix": r.choice(store_engine.PREFIXES)}
            return self.start(f"{number} watches {given}", self.follow(client, self.count + 1, **given))
        if dice < 0.66 and self.tasks:
            task = r.choice(sorted(self.tasks))
            self.tasks[task].cancel()
            return f"#{task} is to be cancelled"
        if dice < 0.96:
            source = r.choice((f"client{number}", "store"))
            faults: dict[str, Any] = {
                "cut": functools.partial(self.network.cut, source),
                "reset": functools.partial(self.network.reset, source),
                "partition": functools.partial(self.network.partition, source, way=r.choice(list(Way))),
                "refuse": functools.partial(self.network.refuse, source),
                "forget": functools.partial(self.network.forget_flows, source),
            }
            fault = r.choice(sorted(faults))
            faults[fault]()
            self.loop.call_later(r.choice((0.2, 1.0, 3.0, 12.0)), self.heal, source)
            return f"{fault} {source}"
        if dice < 0.98:
            await self.stack.aclose()
            self.engine = Engine(store_id="store", limits=self.engine.limits, first_revision=self.engine.revision)
            await self.serve()
            return "another server of the same store"
        self.engine.state.history._bytes_max = r.choice((300, 2500))
        return "the history has another size"

    def heal(self, source: str) -> None:
        """End a fault."""
        self.network.heal(source)
        self.network.stop_refusing(source)

    async def play(self) -> None:
        """Do many things, then close the clients."""
        await self.serve()
        for _ in range(105):
            self.write(await self.step())
            await asyncio.sleep(self.r.choice((0.0, 0.0, 0.0, 0.01, 0.1, 0.3, 1.0, 7.0)))
        for task in tuple(self.tasks.values()):
            task.cancel()
        self.network.heal()
        await self.stack.aclose()


class Seen(Town):
    """A town that writes down the requests."""

    def __init__(self, lines: list[str], **limits: Any) -> None:
        super().__init__(**limits)
        self.lines = lines

    def _apply(self, peer: int, request_id: int, acknowledged: int, request: Any) -> None:
        self.lines.append(f"  {self.now:.3f} {peer} asks {request_id}/{acknowledged} {text(request)}")
        super()._apply(peer, request_id, acknowledged, request)

    def disconnect(self, peer: int = 1, **how: Any) -> None:
        """Close a peer's connection."""
        self.lines.append(f"  {self.now:.3f} {peer} ends {text(how)}")
        super().disconnect(peer, **how)


class Machine:
    """The clock, the network and the store of blocking clients, which run in the recording's own thread."""

    def __init__(self, seed: int, lines: list[str]) -> None:
        self.r, self.now, self.lines = random.Random(seed), 1000.0, lines
        self.town = Seen(lines, history_bytes_max=2500, value_bytes_max=400, frame_bytes_max=6000)
        self.mute_until = self.refuse_until = self.stuck_until = 0.0
        self.piece = 1 << 20
        self.acknowledged = True
        self.sockets: list[Socket] = []
        self.wanted, self.silent = "", 0  # the key that another client writes after some silent reads

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.town.pass_time(max(self.now - self.town.now, 0.0))

    def connect(self, addresses: Any, deadline: float, check: Any) -> Socket:  # noqa: ARG002 - as `connect_blocking`
        """Make a connection."""
        self.lines.append(f"  {self.now:.3f} connect until {deadline:.3f}")
        if self.now < self.refuse_until:
            self.sleep(0.01)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if self.now < self.stuck_until:
            self.sleep(max(deadline - self.now, 0.0))
            raise TimeoutError
        self.sleep(0.002)
        self.sockets.append(Socket(self))
        return self.sockets[-1]


class Socket:
    """The client's end of a connection to a `Town`."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.link, self.timeout = machine, machine.town.accept(), 0.0
        self.is_over = False

    def settimeout(self, seconds: float) -> None:
        """Limit the next calls."""
        self.timeout = seconds

    def gettimeout(self) -> float:
        """Return the limit."""
        return self.timeout

    def fileno(self) -> Socket:
        """Return what `write` below takes."""
        return self

    def send(self, data: memoryview) -> int:
        """Send a part of the bytes."""
        if self.is_over:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if self.machine.now < self.machine.stuck_until:
            self.machine.sleep(self.timeout)
            raise TimeoutError
        sent = bytes(data[: self.machine.piece])
        self.link.to_server += sent
        if self.machine.now >= self.machine.mute_until:
            self.link.carry_to_server()
        return len(sent)

    sendall = send

    def recv(self, most: int) -> bytes:
        """Return received bytes; time passes until there are some."""
        machine = self.machine
        if machine.now >= machine.mute_until:
            self.link.carry_to_server()
            if self.link.to_client:
                data = bytes(self.link.to_client[: min(most, machine.piece)])
                del self.link.to_client[: len(data)]
                return data
        if self.is_over or not self.link.open:
            return b""
        machine.sleep(self.timeout)
        machine.silent += 1
        if machine.wanted and machine.silent % 8 == 0:
            machine.town.ask(messages.Put(machine.wanted, b"%d" % machine.silent), peer=99)
        raise TimeoutError

    def shutdown(self, how: int) -> None:  # noqa: ARG002 - as of a socket
        """End both directions."""
        self.machine.lines.append(f"  {self.link.peer} is shut down")
        self.is_over = True

    def close(self) -> None:
        """Close the connection."""
        self.machine.lines.append(f"  {self.machine.now:.3f} {self.link.peer} is closed")
        self.is_over = True
        self.link.carry_to_server()
        self.link.close()


def _step(machine: Machine, walk: Walk, client: blocking.Client, watches: list[Any]) -> str:
    r, dice = machine.r, machine.r.random()
    if dice < 0.62:
        request, timeout = walk.one(r.choice(store_engine.SECTIONS)), r.choice((None, 0.3, 2.0, 8.0))
        timeout = 2.0 if messages.waits(request) else timeout
        try:
            told = client.call(request, timeout=timeout)
            walk.note(told)
        except store.StoreError as error:
            told = error
        return f"{text(request)} {timeout} -> {text(told)}"
    if dice < 0.7:
        given = r.choice(({}, {"snapshot": True}, {"start_revision": max(machine.town.engine.revision - 3, 0)}))
        watch: Any = client.watch(r.choice(store_engine.PREFIXES), **given)
        try:
            watches.append((watch.__enter__(), watch.batches()))
        except store.StoreError as error:
            return f"watch {given} -> {text(error)}"
        return f"watch {given} is open"
    if dice < 0.8 and watches:
        watch, batches = r.choice(watches)
        machine.wanted = watch._cursor._prefix + "/r/2/"
        try:
            return f"{text(next(batches))}"
        except store.StoreError as error:
            watches.remove((watch, batches))
            return f"watch -> {text(error)}"
        finally:
            machine.wanted = ""
    if dice < 0.83 and watches:
        watch, _ = watches.pop()
        watch.__exit__(None, None, None)
        return "a watch ends"
    if dice < 0.85:  # as two threads do: two channels are free afterwards
        held = [client._free_channel() for _ in range(r.choice((1, 2)))]
        with contextlib.suppress(store.StoreError):
            walk.note(client.call(messages.Grant(ttl=100.0, disconnect_ttl=r.choice((None, 3.0)))))
        client._free.extend(held)
        return f"{len(client._free)} channels are free, with leases {[text(each.leases) for each in client._free]}"
    if dice < 0.89:
        machine.sleep(seconds := r.choice((0.5, 5.0, 70.0)))
        return f"{seconds} s pass"
    if dice < 0.94:
        machine.piece, machine.acknowledged = r.choice((7, 50, 1 << 20)), r.random() < 0.5
        name = r.choice(("mute_until", "refuse_until", "stuck_until"))
        setattr(machine, name, machine.now + r.choice((0.2, 1.5, 4.0, 20.0)))
        return f"{name} {getattr(machine, name) - machine.now:.1f} s, in pieces of {machine.piece}"
    for each in machine.sockets[-2:]:
        each.link.close()
    return "connections are cut"


async def _awaited(lines: list[str]) -> None:
    await AwaitedWalk(4, lines).play()


def awaited() -> list[str]:
    """Return a walk of awaited clients, with small bounds."""
    small: dict[str, Any] = {"IN_FLIGHT_MAX": 2, "WATCH_BUFFER_BYTES": 500, "LARGE": 100}
    with mock.patch.multiple(client, **small):
        return run(_awaited)


def blocking_client() -> list[str]:
    """Return a walk of a blocking client; in a thread, as our errors would count as those of signal handlers."""
    lines: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_play_blocking, lines).result()
    return lines


def _play_blocking(lines: list[str]) -> None:
    machine = Machine(7, lines)
    clock: Any = SimpleNamespace(monotonic=lambda: machine.now, sleep=machine.sleep)
    patched: dict[str, Any] = {
        "time": clock,
        "connect_blocking": machine.connect,
        "prepare": mock.Mock(),
        "close_in_children": mock.Mock(),
        "unacknowledged": lambda _: (0, False, machine.acknowledged),
        "os": SimpleNamespace(write=Socket.send),
        "socket": SimpleNamespace(socket=Socket, SHUT_RDWR=2),
        "_is_closed": lambda sock: not sock.link.open,
    }
    with (
        mock.patch.multiple(channel, **patched),
        mock.patch.object(blocking, "time", clock),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(logged(lambda line: lines.append(f"  {line}")))
        client = blocking.Client(Address(host="town", port=1), timeout=5.0, rng=random.Random(1))
        walk, watches = Walk(7, machine.town, store_engine.KEYS[::2]), list[Any]()  # type: ignore[arg-type]
        for _ in range(190):
            said = _step(machine, walk, client, watches)
            lines.append(f"{machine.now:.3f} {said}")
        for end in (client.end_waits, client.close):
            end()
            lines.append(f"{end.__name__}: {client.shared.failed!r}")
            for request in (messages.Wait(keys=("no",)), messages.Ping()):
                try:
                    lines.append(text(client.call(request, timeout=1.0)))
                except store.StoreError as error:
                    lines.append(text(error))


RECORDINGS = {"awaited": awaited, "blocking": blocking_client}
