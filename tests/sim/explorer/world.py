"""A run of three nodes in which no event happens by itself: every message waits until the explorer lets it pass.

Real are: the handler and its node with all its modules (arrival, joining, following, candidacy, coordinator, the fence
of the shared store), the pure modules below them (decision, view, state), and the store's engine with its leases.
Simulated are: the connection of each node, as two queues, and the clock. A connection keeps the order of its messages
in both directions, as TCP does.

A step is one of these, and is atomic:

    take n     the store takes the next request of node n, and queues the messages that follow, to n and to the others
    read n     node n reads all messages that are queued for it, and runs until it waits
    crash n    the process of n is gone; the store sees its connection close
    cut n      no message passes between n and the store
    heal n     the messages that were queued meanwhile pass
    lose n     another store, without data, takes the store's place; node n is cut off, and so learns of it late
    time       the clock advances to the next timer, of a node or of a lease

An event that is not listed happens at once: a keep-alive, and a request that commutes with all possible steps of others
(`_commutes`). docs/protocol.md says why other orders of these need no test, and which differences between two states
are ignored.

Random pauses always have their maximum here. So all nodes act at the same moment, and the explorer tries every order,
where in reality random pauses keep them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import anyio
import msgpack

from rdzv.config.settings import Settings, parse
from rdzv.core.absent import AbsenceReport
from rdzv.core.history import History, HistoryWriter
from rdzv.core.keys import Keys
from rdzv.core.state import Progress
from rdzv.errors import RoundSupersededError
from rdzv.membership import RendezvousInfo
from rdzv.node.handler import Handler
from rdzv.node.link.node_loop import NodeLoop
from rdzv.node.node import Node
from rdzv.node.run.run_settings import RunSettings
from rdzv.testing.machines import SimulatedPort
from rdzv.testing.timeline import START, SimulatedLoop, SimulatedTime
from store import interface, messages
from store.engine.applied import EventBatch, WaitEnd
from store.engine.engine import Engine
from store.engine.processes import DisconnectKind
from store.errors import StoreReplaced, StoreTimeoutError, unsent_error
from store.messages import Cancel, Entry, Event, Get, Guarded, KeepAlive, Listing, ListingPart, Put, Request, Transact
from store.protocol.connection import error_of
from tests.sim.checker import Checker
from tests.sim.explorer.likeness import LEASES, REQUESTS, REVISIONS, digest, written
from tests.support.virtual_time import next_timer, timers_of

__all__ = ["Scenario", "Step", "World", "as_it_is", "spell"]

Step = tuple[str, int]
"""A kind of step and the index of its node; -1 for none."""

NODES = 3
TTL = 6.0  # longer than the role's: a node that is cut off loses the role first
DISCONNECT_TTL = 0.5
LAST_CALL = 1.0
ROUNDS = 2  # the rounds that are explored, and the beginning of another
LOOK_EVERY = 0.1  # seconds between two looks of the server
HORIZON = 60.0  # seconds; a node without a round and without an obstacle by then is stuck
PER_NODE = 100_000  # ids that belong to one node
OBSERVER = 99  # the peer that gets every revision as it is made
OWN_CLOCK_GRAIN = 0.01  # seconds
URL = f"tcp://store,next/job?min_nodes=2&max_nodes=3&last_call_timeout={LAST_CALL}&ttl={TTL}&disconnect_ttl={DISCONNECT_TTL}"
KEYS = Keys(parse(URL, {}, {}).prefix, "job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario to explore.

    Attributes:
        name: Its name.
        faults: The faults, of which one may hit one node, once, at any point: "crash", "cut", "lose".
        victims: The nodes that may be hit.
        at: A fault is possible only while a write to a key with this part is under way; empty: at any time.
        again: Node 0 joins again by itself, so that there is a second round also without a fault.
        eager: Nodes read their queued messages at once; otherwise reading is a step.
        joined: An eager node reads all its queued messages in one turn, as from one packet; otherwise each in a turn.
        connected: All nodes follow the run from the beginning; otherwise they connect one by one.
        standing: All nodes are in round 0 at the beginning, which they reached on one fixed path.
    """

    name: str
    faults: tuple[str, ...] = ()
    victims: tuple[int, ...] = tuple(range(NODES))
    at: str = ""
    again: bool = False
    eager: bool = True
    joined: bool = False
    connected: bool = True
    standing: bool = False


def as_it_is(request: Request[Any]) -> Request[Any]:
    """Return the request unchanged."""
    return request


class _NoLuck(random.Random):
    """Draws the longest of all pauses. Ids still differ."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self._next = LEASES + PER_NODE * index

    def uniform(self, _: float, b: float) -> float:
        return b

    def getrandbits(self, _: int) -> int:
        self._next += 1
        return self._next


class _Connection(interface.Store):
    """A node's client of the store. Its requests and the store's messages wait in two queues."""

    def __init__(self, world: World, peer: int, host: SimulatedLoop) -> None:
        self._world, self._host, self._store_id = world, host, f"store {world.stores}"
        self.peer = peer
        self.closed = False
        self.up: deque[tuple[int, Request[Any]]] = deque()
        self.down: deque[tuple[int, Any]] = deque()
        self.taken = 0  # requests that the store has taken
        self.has_read = 0  # messages
        self.sent_at: dict[int, float] = {}  # by lease: the time when its last acknowledged keep-alive was sent
        self._asked = REQUESTS + PER_NODE * peer
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._watches: dict[int, _Watch] = {}

    @property
    def state(self) -> tuple[object, ...]:
        """The parts of the connection that belong to the state of the world."""
        return bool(self.taken), self.up, self.down, self._answers, self._watches

    @property
    def store_id(self) -> str:
        return self._store_id

    def send(self, request: Request[Any]) -> tuple[int, asyncio.Future[Any]]:
        """Queue a request. Return its id and the future of its answer."""
        self._asked += 1
        answer = self._answers[self._asked] = self._host.create_future()
        if not self.closed:
            self.up.append((self._asked, request))
        return self._asked, answer

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        self.check_not_lost()
        request = self._world.mend(request)
        sent_at = self.time()
        _, answer = self.send(request)
        with anyio.move_on_after(timeout) as limit:
            response = await answer
        if limit.cancelled_caught:
            raise StoreTimeoutError(f"no answer within {timeout} s")
        error = error_of(response)
        if error is not None:
            raise error
        if isinstance(request, KeepAlive):
            self.sent_at[request.lease] = sent_at
        if isinstance(request, Transact) and response.succeeded:
            self.sent_at |= {grant.id: sent_at for grant in request.grants if grant.id is not None}
        return response

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> _Watch:
        return _Watch(self, messages.Watch(prefix=prefix, start_revision=start_revision, snapshot=snapshot))

    def opened(self, id: int, watch: _Watch) -> None:
        """Register a watch, whose events carry this id."""
        self._watches[id] = watch

    def ended(self, id: int) -> None:
        """Unregister a watch, and cancel it at the store."""
        self._watches.pop(id, None)
        self.send(Cancel(target=id))

    def lose(self) -> None:
        """Lose the store. The next message says so, and no other follows."""
        self.closed = True
        self.up.clear()
        self.down = deque([(0, StoreReplaced("another store has taken its place", maybe_applied=True))])

    def check_not_lost(self) -> None:
        """Raise an error if the node has read that the store is lost."""
        if self._failed is not None:
            raise unsent_error(self._failed)

    @property
    def is_lost(self) -> bool:
        """True if the node is to read next that the store is lost."""
        return bool(self.down) and isinstance(self.down[0][1], StoreReplaced)

    def read(self) -> None:
        """Read the first queued message."""
        self.has_read += 1
        id, item = self.down.popleft()
        if isinstance(item, StoreReplaced):
            self._failed = item
            for asked in self._answers.values():
                if not asked.done():
                    asked.set_exception(unsent_error(item))
            for watch in self._watches.values():
                watch.deliver(())
        elif type(item) is tuple:  # events; an answer is a record, which is a subclass of tuple
            if id in self._watches:
                self._watches[id].deliver(item)
        else:
            answer = self._answers.pop(id, None)
            if answer is not None and not answer.done():
                answer.set_result(item)

    def time(self) -> float:
        return self._host.time()

    async def aclose(self) -> None:
        pass


class _Watch(interface.Watch):
    def __init__(self, connection: _Connection, request: messages.Watch) -> None:
        self._connection, self._request = connection, request
        self._batches: deque[list[Event]] = deque()
        self._news = asyncio.Event()
        self._id = 0

    async def __aenter__(self) -> Self:
        self._connection.check_not_lost()
        self._id, answer = self._connection.send(self._request)
        self._connection.opened(self._id, self)
        await answer
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.ended(self._id)

    def deliver(self, events: tuple[Event, ...]) -> None:
        self._batches += [list(events)] * bool(events)
        self._news.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        while True:
            while self._batches:
                yield self._batches.popleft()
            self._connection.check_not_lost()
            self._news.clear()
            await self._news.wait()


class _Member:
    """One node and its job: it joins, writes to the round's store, and joins again."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index, self.name = world, index, f"n{index}"
        self.host = world.timeline.new_host(self.name)
        self.connection = _Connection(world, index, self.host)
        settings = parse(URL, {"node_id": self.name, "address": f"at-{self.name}"}, {})
        rng = _NoLuck(index)
        node = Node(settings, loop=NodeLoop(self.host), open_store=self._open, rng=rng, port=SimulatedPort())
        self.node = node
        self.handler = Handler(node, open_store=self._open)
        self.alive, self.cut = True, False
        self.stale = 0  # requests queued before it was cut off, which the store has not taken yet
        self.led = False  # whether it was the coordinator when it was cut off
        self._written: tuple[object, list[str]] | None = None
        self.rounds = 0
        self.ended_by: Exception | None = None
        self.life = self.host.start_task(self._live())

    def _open(self) -> _Connection:
        lost = self.connection
        if lost.failure is not None:
            self.connection = _Connection(self.world, self.index, self.host)
            self.connection.sent_at = lost.sent_at
            # A number for each message that was read: see `written`. Nodes have been numbered before.
            self.connection.has_read, self.connection.taken = lost.has_read, 1
            self.world.connect(self)
        return self.connection

    async def _live(self) -> None:
        scenario = self.world.scenario
        await self.handler.__aenter__()
        while True:
            info = await self.handler.next_rendezvous()
            self.rounds += 1
            self.world.joined(self, info)
            await self._write(info)
            if self.index == 0 and scenario.again and info.round == 0:
                continue
            await self._until_something_changes()

    async def _write(self, info: RendezvousInfo) -> None:
        """Write to the round's store. The write is refused if the node is no longer in the round (R9)."""
        value = msgpack.packb((self.name, info._membership.arrival, info.round))
        with contextlib.suppress(RoundSupersededError):
            await info.store.set(f"of {info.rank}", value)

    async def _until_something_changes(self) -> None:
        async with self.handler.changes() as changes:
            async for _ in changes:
                return

    def written(self, now: float) -> list[str]:
        """Write down its state. The result is cached until the node does something."""
        connection = self.connection
        version = (now, self.cut, connection.has_read, len(connection.up), len(connection.down))
        if self._written is None or self._written[0] != version:
            timers = timers_of(self.host)
            state = (
                self.cut,
                self.stale,
                self.led,
                connection.state,
                (self.renewed_at or 0.0) + TTL,
                self.handler,
                timers,
            )
            self._written = version, written((state,), now=now, instead=self.world.instead)
        return self._written[1]

    @property
    def in_reach(self) -> bool:
        """True if the node can reach the store."""
        return self.alive and not self.cut

    @property
    def renewed_at(self) -> float | None:
        """The time when the last acknowledged keep-alive of its lease was sent."""
        lease = self.node.part.arrival.lease
        return None if lease is None else self.connection.sent_at.get(lease.id)

    @property
    def is_at_work(self) -> bool:
        """True if the node takes itself for a member, and its lease has not ended by its own clock."""
        renewed_at = self.renewed_at
        return (
            self.alive
            and self.membership is not None
            and renewed_at is not None
            and self.host.time() - renewed_at < TTL - OWN_CLOCK_GRAIN
        )

    @property
    def membership(self) -> Any:
        """Its membership of the round that it believes to be in, or None."""
        membership = self.node.membership
        return membership if membership is not None and membership.over is None else None


class World:
    """The run, the store and the clock, in one state.

    Args:
        scenario: The scenario.
        mend: Changes each request that nodes make, for example to plant a bug.

    Attributes:
        path: The steps so far.
        replay: The command that takes the same steps.
        faults_left: The number of faults that may still happen.
    """

    disturbed_until = float("inf")  # rounds are never overdue, since the explorer delays messages for any time

    def __init__(self, scenario: Scenario, *, mend: Callable[[Request[Any]], Request[Any]] = as_it_is) -> None:
        self.scenario = scenario
        self.mend = mend
        self.path: list[Step] = []
        self.timeline = SimulatedTime(0)
        self.stores = 0
        self.story: list[str] = []
        self.revisions: dict[int, str] = {}
        agreed = RunSettings(parse(URL, {}, {}))
        self.replay = ""
        self.checker = Checker(self, KEYS, agreed.rules, grain=0.01)
        self.faults_left = 1 if scenario.faults else 0
        self._begin_store()
        self.members = [_Member(self, index) for index in range(NODES)]
        for member in self.members:
            self.connect(member)
        self._go_on()
        if scenario.connected:
            for member in self.members:
                self.take(("take", member.index))
            for member in self.members:
                self.take(("read", member.index))
            for member in self.members:
                member.connection.taken = 0
        if scenario.standing:
            self._stand()
        self.path.clear()

    def _begin_store(self) -> None:
        self.stores += 1
        self.engine = Engine(store_id=f"store {self.stores}")
        self.began_at = self.engine._keys.revision = REVISIONS + PER_NODE * self.stores
        self.engine._leases._last_id = LEASES + PER_NODE * (NODES + self.stores)
        self.engine.connect(OBSERVER, session_id=b"observer", now=self.now)
        self._apply(OBSERVER, 1, messages.Watch(prefix=""))

    def connect(self, one: _Member) -> None:
        """Connect a node to the present store."""
        process = b"process %08d" % one.index
        self.engine.connect(one.index, session_id=process, process=process, now=self.now)

    def _stand(self) -> None:
        """Take one path until all are in round 0, and no message is under way but those of node 0's next arrival."""
        while ready := [one for one in self.members if one.connection.up and not self._goes_on_again(one)]:
            self.take(("take", ready[0].index))
        assert all(one.rounds for one in self.members), "it takes no more than this"

    def _goes_on_again(self, one: _Member) -> bool:
        return one.rounds > 0 and one.index == 0 and isinstance(one.connection.up[0][1], Transact)

    @property
    def now(self) -> float:
        """True time."""
        return self.timeline.now

    def say(self, what: str) -> None:
        """Write one line of the story."""
        self.story.append(f"{self.now - START:8.3f}  {what}")

    def end(self) -> None:
        """End all nodes, so that the interpreter's exit finds no tasks of theirs."""
        for one in self.members:
            one.connection.closed = True
        self.timeline.end_processes()

    def steps(self) -> list[Step]:
        """Return the possible steps; an empty list if everything has ended."""
        steps: list[Step] = []
        if self._has_seen_enough():
            return steps
        first = next((one for one in self.members if one.alive and not one.connection.taken), None)
        for one in self.members:
            if one.alive and not one.cut:
                # Nodes are numbered by their first request to the store. Otherwise each path would be explored six
                # times.
                if one.connection.up and (one.connection.taken or one is first):
                    steps.append(("take", one.index))
                if one.connection.down:
                    steps.append(("read", one.index))
        troubled = [one for one in self.members if not one.alive or one.cut]
        settled = self._settled()
        if not settled and (not steps or any(one.name in self.checker.records for one in troubled)):
            steps.append(("time", -1))
        for one in self.members:
            if self.faults_left and one.index in self.scenario.victims and self._is_time():
                steps += [(fault, one.index) for fault in self.scenario.faults]
            if one.cut and (settled or one.name not in self.checker.records or (one.led and not self._leads(one))):
                steps.append(("heal", one.index))
        return steps

    def _has_seen_enough(self) -> bool:
        """Return True if a later round than the explored ones has completed, and no older message is under way."""
        last = self.checker.last
        return (
            last is not None and last.round.number >= ROUNDS and not any(one.cut or one.stale for one in self.members)
        )

    def _leads(self, one: _Member) -> bool:
        """Return True if this node is the coordinator, as far as the store knows."""
        entry = self.engine._keys.entries.get(KEYS.coordinator)
        return entry is not None and entry.value == one.name.encode()

    def _is_time(self) -> bool:
        """Return True if a fault is possible now."""
        under_way = [key for one in self.members for _, request in one.connection.up for key in _puts(request)]
        return not self.scenario.at or any(self.scenario.at in key for key in under_way)

    def take(self, step: Step) -> None:
        what, index = step
        self.path.append(step)
        self.replay = f"python -m tests.sim explore {self.scenario.name} --steps '{spell(self.path)}'"
        one = self.members[index]
        match what:
            case "take":
                self._take_request(one)
            case "read":
                while one.connection.down:
                    one.connection.read()
            case "crash":
                self.faults_left = 0
                one.alive = False
                one.connection.closed = True
                one.connection.up.clear()
                one.connection.down.clear()
                one.host.die()
                self.engine.disconnect(index, now=self.now, how=DisconnectKind.DROPPED)
            case "cut":
                self.faults_left = 0
                one.cut, one.led = True, self._leads(one)
            case "lose":
                self.faults_left, one.cut = 0, True
                # Nodes tell the new store the last revision that they have seen: each counts.
                seen = range(self.began_at, self.engine._keys.revision + 1)
                self.revisions = dict.fromkeys(seen, "lost") | self.revisions
                self.checker.replaced()
                for other in self.members:
                    other.connection.lose()
                self._begin_store()
            case "heal":
                one.cut, one.stale = False, len(one.connection.up)
            case "time":
                self._pass_time()
        self._go_on()
        self._look()

    def _go_on(self) -> None:
        """Run the nodes until each of them waits."""
        self.timeline.run_until_time(self.now)
        while self._read_at_once() or self._take_at_once():
            self.timeline.run_until_time(self.now)

    def _read_at_once(self) -> bool:
        """Let a node read a queued message. Return False if there was none."""
        for one in self.members:
            if self.scenario.eager and one.in_reach and one.connection.down and not one.connection.is_lost:
                one.connection.read()
                while self.scenario.joined and one.connection.down:
                    one.connection.read()
                return True
        return False

    def _take_at_once(self) -> bool:
        """Take a request that commutes with every possible step. Return False if there was none."""
        commuting = not self.faults_left or self.scenario.faults == ("crash",)
        for one in self.members:
            up = one.connection.up
            if not one.in_reach or not up:
                continue
            alive = [index for index, (_, request) in enumerate(up) if isinstance(request, KeepAlive)]
            if alive and (not alive[0] or not one.stale):
                self._take_request(one, alive[0])
                return True
            if not one.stale and commuting and one.connection.taken and _commutes(up[0][1]):
                self._take_request(one)
                return True
        return False

    def _take_request(self, one: _Member, index: int = 0) -> None:
        id, request = one.connection.up[index]
        del one.connection.up[index]
        one.connection.taken += 1
        one.stale = max(one.stale - 1, 0)
        self._apply(one.index, id, request)

    def _pass_time(self) -> None:
        """Advance to the next timer; while messages are under way, to the next loss of a node with a fault."""
        waits = not any(one.in_reach and one.connection.up for one in self.members)
        before = self._losses()
        while True:
            self._pass_to_next_timer()
            if waits or self._losses() != before:
                return
            self._go_on()

    def _losses(self) -> object:
        return [
            (one.name in self.checker.records, self._leads(one), one.alive and one.membership is not None)
            for one in self.members
            if not one.alive or one.cut
        ]

    def _pass_to_next_timer(self) -> None:
        timeline = self.timeline
        due_in = self.engine.state.leases.seconds_to_next_expiry()
        lease_at = self.now + due_in if due_in is not None else float("inf")
        until = min(lease_at, next_timer(timeline))
        while self.now < until - LOOK_EVERY:
            timeline.now += LOOK_EVERY
            self.engine.advance_lease_clock(now=self.now)
        timeline.now = max(until, self.now)
        if self.engine.advance_lease_clock(now=self.now):
            self._deliver(self.engine.tick(now=self.now))

    def _apply(self, peer: int, id: int, request: Request[Any]) -> None:
        """Apply a request as the server does: queue the answer first, then the events for all watches."""
        applied = self.engine.apply(request, peer=peer, request_id=id, acknowledged=id - 1, now=self.now)
        entries: list[Any] = []
        while True:
            response = applied.response
            if isinstance(response, ListingPart):
                entries += response.entries
            elif response is not None and peer != OBSERVER:
                if isinstance(response, Listing) and entries:
                    response = Listing(entries=(*entries, *response.entries), revision=response.revision)
                self.members[peer].connection.down.append((id, response))
            self._deliver(applied.deliveries)
            if applied.work is None:
                return
            applied = self.engine.continue_long_request(applied.work)

    def _deliver(self, deliveries: Any) -> None:
        for one in deliveries:
            match one:
                case WaitEnd(peer=peer, request_id=id, response=response):
                    self._queue(peer, id, response)
                case EventBatch(watches=watches, events=events):
                    if OBSERVER in watches:
                        self.checker.take(events)
                        self.revisions |= {one.revision: kind for one in events if (kind := _compared_as(one.key))}
                    for peer, ids in watches.items():
                        for id in ids:
                            self._queue(peer, id, events)

    def _queue(self, peer: int, id: int, item: Any) -> None:
        if peer != OBSERVER and self.members[peer].alive:
            self.members[peer].connection.down.append((id, item))

    def joined(self, one: _Member, info: RendezvousInfo) -> None:
        """Check the round that a node believes to be in."""
        membership = info._membership
        self.say(f"{one.name} is in round {info.round}, rank {info.rank} of {info.world_size}")
        self.checker.learned(one.name, membership.round, info.rank, membership.arrival)

    def _look(self) -> None:
        require = self.checker.require
        require(self.now < START + HORIZON, f"no round for {HORIZON:g} s, and nothing in its way (R7)")
        for one in self.members:
            if one.alive and one.life.done():
                error = one.life.exception()
                require(False, f"{one.name} has ended with {error!r}")
            if one.alive and one.membership is not None and one.renewed_at is not None:
                silence = one.host.time() - one.renewed_at
                require(
                    silence <= TTL + OWN_CLOCK_GRAIN,
                    f"{one.name} believes to be in round {one.membership.round.number}, and has renewed nothing for "
                    f"{silence:.2f} s (R9)",
                )

        at_work = [one.membership.round for one in self.members if one.is_at_work]
        require(
            self.checker.last is None or all(round.revision > self.began_at for round in at_work),
            f"round {self.checker.last and self.checker.last.round.number} has begun, and a member of a lost store's "
            f"round may be at work (R2)",
        )

    def _settled(self) -> bool:
        """Return True if all nodes that can reach the store are in the last round, and no message is under way."""
        last = self.checker.last
        here = [one for one in self.members if one.alive and not one.cut]
        return (
            last is not None
            and last.round.size == len(here)
            and not any(one.connection.up or one.connection.down for one in here)
            and all(one.membership is not None and one.membership.round.revision == last.round.revision for one in here)
            and (last.round.number > 0 or not self.scenario.again)
        )

    @property
    def instead(self) -> dict[type, Callable[[Any], Iterable[Any] | None]]:
        """For some types, the function that returns the parts of an object to write down."""
        told = (Put, Entry, Event)
        return {
            **dict.fromkeys(_PASSED_OVER, _nothing),
            **dict.fromkeys(told, self._relevant_parts),
            Progress: self._of_progress,
        }

    def _relevant_parts(self, one: Put | Entry | Event) -> Iterable[Any] | None:
        if one.key == KEYS.history:
            return (one.key,)
        if one.key == KEYS.progress and one.value:
            return one.key, getattr(one, "revision", None), Progress.unpack(one.value)
        return None

    def _of_progress(self, one: Progress) -> Iterable[Any]:
        known = [name for name, record in self.checker.records.items() if record.arrival <= one.last_arrival]
        left = one.last_call_left, one.spares_after, one.left_early, one.standstill, one.problem
        return one.phase, one.round, one.joined, one.live, one.waiting, one.lost, one.departed, sorted(known), left

    def fingerprint(self) -> bytes:
        """Return a hash, equal for two states with the same future."""
        texts = [repr((self.faults_left, self.stores))]
        for one in self.members:
            if one.alive:
                texts += one.written(self.now)
        engine = self.engine
        served = engine._leases._served
        leases = [
            (record.id, record.ends_at - served, record.lapses_at - served, record.keeper)
            for record in sorted(engine._leases._leases.values(), key=lambda record: record.id)
        ]
        alive = {one.index for one in self.members if one.alive}
        watches = {peer: found for peer, found in engine._watches._prefixes.items() if peer in alive}
        entries = [
            # The revisions of members' writes to the round's store are never used.
            (key, entry.value, entry.lease) if key.startswith(KEYS.stores) else entry
            for key, entry in sorted(engine._keys.entries.items())
            if key != KEYS.history
        ]
        last = self.checker.last
        newcomers = [
            one.node_id
            for one in sorted(self.checker.records.values(), key=lambda one: one.arrival)
            if last is None or one.node_id not in last.ranks
        ]
        rest = (
            newcomers,
            entries,
            leases,
            watches,
            last and (last.round, last.ranks, last.arrivals),
            self.checker.enough_at,
        )
        texts += written((rest,), now=self.now, instead=self.instead)
        return digest(texts, self.revisions)


def _puts(request: Request[Any]) -> list[str]:
    """Return the keys that a request writes."""
    request = request.request if isinstance(request, Guarded) else request
    puts = request.then if isinstance(request, Transact) else (request,)
    return [one.key for one in puts if isinstance(one, Put)]


def _compared_as(key: str) -> str:
    if key.startswith(KEYS.nodes):
        return key.removeprefix(KEYS.nodes)
    return {KEYS.round: "round", KEYS.coordinator: "term"}.get(key, "")


def _commutes(request: Request[Any]) -> bool:
    """Return True if this request of a healthy node has the same effect before and after every step of others.

    It reads the node's rank in a round that it is still in, or writes to the round's store. Both exist until the node
    has left the round, which is a later message of its own.
    """
    request = request.request if isinstance(request, Guarded) else request
    reads = isinstance(request, Get) and request.key.startswith(KEYS.rounds)
    return reads or (isinstance(request, Put) and request.key.startswith(KEYS.stores))


def _nothing(_: object) -> tuple[()]:
    return ()


_PASSED_OVER = (
    *(AbsenceReport, HistoryWriter, History),
    *(World, Checker, SimulatedTime, SimulatedLoop, _Member, _Connection, _NoLuck),
    *(Settings, Keys, contextvars.Context),
)
"""Types that are walked as roots, never change, or are only displayed."""


def spell(path: list[Step]) -> str:
    """Write steps in a compact form."""
    return " ".join(f"{what[0]}{index if index >= 0 else ''}" for what, index in path)
