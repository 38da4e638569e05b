"""Rounds as they are played in virtual time: each request, each event of a watch, each thing that a user is told.

A scenario is a row: settings, and lines of "seconds node: call". A call is one of `Actor`'s, or of its handler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import rdzv
from rdzv.bootstrap_check import WITHIN
from rdzv.config import settings
from rdzv.core import stored
from rdzv.core.report import status_json
from rdzv.core.round import Round
from rdzv.errors import GiveUp
from rdzv.loop.rounds import Round as LoopRound
from rdzv.node.handler import Handler
from rdzv.node.link.followed_runs import FollowedRuns
from rdzv.node.link.node_loop import NodeLoop
from rdzv.node.node import Node
from rdzv.node.run.status import read_history
from rdzv.testing.machines import SimulatedPort, process_identity_of
from rdzv.testing.timeline import START
from store import Event, Limits, StoreError
from store.client.client import Watch
from store.messages import Ping
from tests.recorded.recorder import DAY, QUIET, ROOT, Recorder, flat
from tests.support.faults import FaultyNetwork, FaultyPipe, FaultyWorld
from tests.support.runs import HookedClient, VirtualRun, rounds_of
from tests.support.virtual_time import VirtualTimeLoop

NOT_SHOWN: Final = ("version", "settings", "releases", "since", "addresses", "waits_for", "now")  # others tell the same
STATE: Final = "finished_step known_round times_left_out lapses lapsed_in cut_off unreached given_up refusal is_member"
LOOK_EVERY: Final = 0.7417  # seconds; an odd number, so that nothing else happens at that moment
SCENARIOS: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "rounds.toml").read_text())


class SteadyPipe(FaultyPipe):
    """A direction of a link with one latency, so that no two nodes act at one moment."""

    _network: SteadyNetwork

    def send(self, item: Any) -> None:
        self._network.between(
            str(self.sender.get_extra_info("sockname")[0]), str(self.sender.get_extra_info("peername")[0])
        )
        super().send(item)


class SteadyNetwork(FaultyNetwork):
    """A network in which each pair has its own latency."""

    latency = 0.0

    def between(self, *names: str) -> None:
        self.latency = 0.0005 + zlib.crc32("".join(names).encode()) % 997 * 1e-6

    def draw_latency(self) -> float:
        return self.latency

    async def _delay_dial(self, names: set[str]) -> None:
        self.between(*sorted(names))
        await super()._delay_dial(names)

    def new_one_way_pipe(self) -> SteadyPipe:
        return SteadyPipe(self)


class SteadyWorld(FaultyWorld):
    network_kind = SteadyNetwork


class RecordedWatch(Watch):
    """A watch whose events are written down."""

    client: RecordedClient

    def _buffer_events(self, events: list[Event]) -> None:
        client = self._client
        assert isinstance(client, RecordedClient)
        sign = {"put": "", "delete": "-"}
        seen = [
            f"{sign[one.kind]}{one.key.removeprefix(ROOT)}{f'({one.cause})' if one.cause else ''}"
            if one.key
            else one.kind
            for one in events
        ]
        client.recorder.note(client.who, f"sees {' '.join(seen)}")
        super()._buffer_events(events)


class RecordedClient(HookedClient):
    """A client whose requests, and answers other than yes, are written down."""

    recorder: Recorder
    who: str

    def start_request(self, request: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(request, Ping):
            self.recorder.note(self.who, self.recorder.request(request))
        return super().start_request(request, *arguments, **options)

    def send_and_forget(self, request: Any) -> None:
        self.recorder.note(self.who, f"{type(request).__name__}")
        super().send_and_forget(request)

    async def call(self, request: Any, **options: Any) -> Any:
        try:
            response = await super().call(request, **options)
        except StoreError as error:
            self.recorder.note(self.who, f"  ! {type(error).__name__}: {error}")
            raise
        if getattr(response, "succeeded", True) is False:
            self.recorder.note(self.who, "  no")
        return response

    def watch(self, prefix: str, **options: Any) -> Watch:
        watch = super().watch(prefix, **options)
        return RecordedWatch(self, watch._cursor)


class Play(VirtualRun):
    """One scenario."""

    def __init__(self, recorder: Recorder, hosts: str = "store", **parameters: Any) -> None:
        super().__init__(hosts=hosts, **parameters)
        self.recorder = recorder
        self.actors: dict[str, Actor] = {}
        self.seen: dict[str, list[Any]] = {}  # by node: its own state
        self.unreachable: set[tuple[int, str]] = set()  # ranks, and the addresses that they do not reach
        self.reached: dict[int, set[int]] = {}  # by revision of a round: the ranks that reach rank 0

    async def __aenter__(self) -> Play:
        self._patches = contextlib.ExitStack()
        for name in ("check_rank0_reach", "is_host_reachable"):
            self._patches.enter_context(patch(f"rdzv.node.member.joining.{name}", getattr(self, name)))
        with patch("tests.support.runs.FaultyWorld", SteadyWorld):
            await super().__aenter__()
        self.recorder.now = asyncio.get_running_loop().time
        self.start(self._watch())
        return self

    async def _watch(self) -> None:
        """Note quietly what each node knows of itself, whenever it has changed."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for name in self._handlers:
                self.look_at(name)
            names = sorted(one.get_name() for one in asyncio.all_tasks())
            work = Counter(name for name in names if not name.startswith("Task-"))
            self.recorder.note(QUIET, self.recorder.changed("work", work) or "the same work")

    def look_at(self, name: str, *, if_changed: bool = False) -> None:
        """Note quietly what a node knows; with `if_changed`, only if its own state has changed."""
        if name in self.recorder.dead:
            return
        before, part = self.seen.get(name), self._handlers[name].node.part
        self.seen[name] = [part.wait_reason and "", *(getattr(part, one) for one in STATE.split())]
        if if_changed and before == self.seen[name]:
            return
        if told := self.recorder.changed(f"node {name}", known(self._handlers[name])):
            self.recorder.note(QUIET, f"{name} {told}")

    async def __aexit__(self, *how: Any) -> None:
        with self._patches:
            await super().__aexit__(*how)

    def client(self, source: str, connect_timeout: float = 3600.0) -> RecordedClient:
        async def dial(factory: Any) -> Any:
            return await self.network.dial("store", factory, source=source)

        rng = random.Random(f"client {source}")
        client = RecordedClient(
            dial, name="store", connect_timeout=connect_timeout, rng=rng, process=process_identity_of(source)
        )
        client.recorder, client.who = self.recorder, source
        return client

    def handler(self, name: str, **parameters: Any) -> Handler:
        source = name
        while source in self.recorder.dead:  # another process of this name
            source += "'"
        parsed = settings.parse(f"tcp://{self._hosts}/job", {"node_id": name, **self._parameters, **parameters}, {})
        open_store = partial(self.client, source, parsed.join_timeout)
        rng = random.Random(f"node {source}")
        node = Node(parsed, loop=NodeLoop(), open_store=open_store, rng=rng, port=SimulatedPort())
        self._handlers[source] = handler = Handler(node, open_store=open_store)
        looking: Any = partial(self.look_at, source, if_changed=True)
        looking.notify = looking
        node.listeners.add(looking)
        return handler

    async def check_rank0_reach(self, round: Round, rank: int, read_member_names: Any) -> tuple[str, list[int]]:
        """Stand for sockets between the members."""
        there, began = self.reached.setdefault(round.revision, set()), self.recorder.now()
        if (rank, round.host) not in self.unreachable:
            there.add(rank)
        while self.recorder.now() < began + WITHIN:
            if len(there) == round.size:
                return "", []
            await asyncio.sleep(0.05)
        missing = [one for one in range(round.size) if one not in there]
        return (
            (f"rank 0 at {round.host} does not answer", [])
            if rank
            else (f"{' and '.join(await read_member_names(missing))} did not come", missing)
        )

    async def is_host_reachable(self, host: str, _: int) -> bool:
        await asyncio.sleep(0.01)
        return not any(host == at for _, at in self.unreachable)

    async def put(self, key: str, value: bytes | None = b"") -> None:
        async with super().client("observer") as client:
            await (client.delete(key) if value is None else client.put(key, value))

    def actor(self, name: str) -> Actor:
        if name not in self.actors:
            self.actors[name] = Actor(self, name)
        return self.actors[name]


def known(handler: Handler) -> dict[str, Any]:
    """Return what a node knows of itself, and its answers without a request."""
    node, link, membership = handler.node, handler.node._link, handler.membership
    told: dict[str, Any] = {"changed": handler.num_nodes_changed(), "gone": handler.num_nodes_changed(on_loss=False)}
    told["may host"] = [node.may_host(away) for away in (0.0, 1.0, 2.0, 3.0)]
    told["others"] = [handler.describe_gone_node(one) for one in "abc"]
    told["link"] = link and (link.describe_slowness(), link.no_listener_hint)
    told["draining"] = dict(handler.draining_members())
    for of, names in (
        (node, "is_connected connected_for is_joining needs_store has_lost_store is_draining store_loss"),
        (node.part, f"wait_reason {STATE}"),
        (node.part.arrival, "state began revision"),
        (link, "round_trip reconnect_seconds release_within"),
        (membership, "over lost_ids record_gone expelled"),
    ):
        told |= {name: getattr(of, name) for name in names.split() if of is not None}
    return told | {"next_store_generation": node.least_store_generation}


class Actor:
    """A node, and what its user does."""

    def __init__(self, play: Play, name: str) -> None:
        self.play, self.name = play, name
        self.handler: Handler | None = None
        self.tasks: list[asyncio.Task[Any]] = []

    def say(self, what: str) -> None:
        self.play.recorder.note(self.name, what)

    def made(self, **settings: Any) -> Handler:
        if self.handler is None:
            self.handler = self.play.handler(self.name, **settings)
            self.tasks.insert(0, self.play.start(self._listen()))
        return self.handler

    async def _listen(self) -> None:
        with contextlib.suppress(rdzv.RendezvousError):
            async with self.made().changes() as changes:
                async for change in changes:
                    self.say(f"* hears {change} {getattr(change, 'reasons', None) or ''}".rstrip())

    def begin(self, work: Any) -> None:
        self.tasks.append(self.play.start(self._told(work)))

    async def _told(self, work: Any) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001  the user sees it
            self.say(f"* {type(error).__name__}: {error}")
        else:
            if result is not None:
                self.say(f"* gets {self.shown(result)}")

    def shown(self, result: Any) -> str:
        if isinstance(result, tuple) and result and hasattr(result[0], "phase"):
            return " | ".join(map(self.shown, result))
        if hasattr(result, "phase"):
            told = {name: one for name, one in status_json(result).items() if name not in NOT_SHOWN}
            return self.play.recorder.changed("status", told)
        if hasattr(result, "as_json"):
            return self.play.recorder.changed("cost", result.as_json())
        return ", ".join(f"{name}={one}" if name else one for name, one in flat(result))

    async def join(self, times: int = 1, **settings: Any) -> None:
        """Join rounds: the next one as soon as there is a change."""
        handler = self.made(**settings)
        for _ in range(times):
            info = await handler.next_rendezvous()
            at = "{}:{}".format(*info.bootstrap_address)
            self.say(f"* is in round {info.round}, rank {info.rank} of {info.world_size}, {at}")
            while _ + 1 < times and not handler.num_nodes_changed():  # noqa: ASYNC110  as a user does
                await asyncio.sleep(0.05)

    async def train(self, steps: int = 10, every: float = 0.5, do: dict[int, str] | None = None, **more: Any) -> None:
        """Train by `rounds()`; at some steps, do something else first."""
        together, step = more.pop("together", False), 0
        calls = dict(do or {})
        async for round in self._rounds(more):
            self.say(
                f"* round {round.number}, rank {round.rank} of {round.world_size}, {round.previous}, {round.newest}"
            )
            async with round:
                step = max(step, round.newest[1] + 1 if round.newest else 0)
                while step < steps:
                    await round.check(step)
                    if step in calls:
                        await self._do(calls.pop(step), round)
                    await asyncio.sleep(every)
                    if together and await round.store.add(f"{step}", 1) == round.world_size:
                        await round.store.set(f"{step}/all", b"")
                    if together:
                        await round.store.wait([f"{step}/all"], 60.0)
                    step += 1
            self.say(f"* round {round.number} ends at step {step}: {round.ending}")
        self.say("* rounds() ends")

    def _rounds(self, more: dict[str, Any]) -> AsyncIterator[LoopRound]:
        options = {name: more.pop(name) for name in ("on_waiting", "progress", "no_progress") if name in more}
        return rounds_of(self.made(**more), **options)

    async def _do(self, call: str, round: LoopRound) -> None:
        space = {"round": round, "self": self, "sleep": asyncio.sleep, "GiveUp": GiveUp}
        result = eval(call, space)
        if isinstance(result, Exception):
            raise result
        if hasattr(result, "__await__") and (result := await result) is not None:
            self.say(f"* gets {self.shown(result)}")

    async def busy(self, round: LoopRound, seconds: float, passes: float) -> None:
        async with round.busy(seconds, "a checkpoint"):
            await asyncio.sleep(passes)

    async def body(self, call: str = "None", **settings: Any) -> None:
        """A body that never calls `check`."""
        async for round in self._rounds(settings):
            self.say(f"* round {round.number}, rank {round.rank} of {round.world_size}")
            async with round:
                await self._do(call, round)
            self.say(f"* round {round.number} ends: {round.ending}")
        self.say("* rounds() ends")

    async def look(self) -> None:
        """Look at the run from outside."""
        async with self.play.looked_at() as seen:
            self.say(f"* sees {self.shown(await seen.status_and_cost())}")
            self.say(f"* sees {self.play.recorder.changed('history', await read_history(seen.store, seen.keys))}")

    async def follow(self) -> None:
        """Follow the run as a page does, quietly."""
        recorder = self.play.recorder
        async with self.play.client("observer") as client:
            runs = FollowedRuns(client, "/rdzv")
            while True:
                await asyncio.sleep(LOOK_EVERY)
                with contextlib.suppress(StoreError):
                    run = await runs.follow_and_refresh("job")
                    seen = run.current_report(), run.web_page_state(), run.summary(), sorted(runs.changed)
                    recorder.note(QUIET, recorder.changed("followed", seen))
                runs.changed.clear()
                await runs.drop_unused(3.0)

    async def outside(self, call: str) -> None:
        """Call a method of `Run`, as an operator does."""
        async with self.play.looked_at() as seen:
            self.say(f"* gets {self.shown(await eval(f'seen.{call}', {'seen': seen}))}")

    async def crash(self) -> None:
        source = next(name for name, one in self.play._handlers.items() if one is self.handler)
        self.play.recorder.dead.add(source)
        self.play.crash(source)
        for task in self.tasks:
            task.cancel()
        self.handler, self.tasks = None, []

    async def stop(self) -> None:
        """Cancel what it does."""
        for task in self.tasks[1:]:
            if task is not asyncio.current_task():
                task.cancel()

    async def roster(self) -> Any:
        """Return the members of its round."""
        membership = self.made().membership
        assert membership is not None
        return await self.made()._roster(membership)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)


def play(name: str, *, whole: bool = False) -> list[str]:
    """Play a scenario; return its lines; if `whole`, with all that is said quietly."""
    row = SCENARIOS[name]
    recorder = Recorder()
    recorder.brief = row.get("brief", False)
    recorder.dead.update([] if row.get("observed") else ["observer"])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Play(recorder, limits=Limits(**row.get("limits", {})), **row.get("settings", {})) as play:
            for line in filter(None, map(str.strip, row["play"].splitlines())):
                at, who, call = line.split(" ", 2)
                await asyncio.sleep(max(START + float(at) - loop.time(), 0.0))
                recorder.note(who, f"> {call}")
                if who == "-":
                    patched = play._patches.enter_context
                    result = eval(call, {"run": play, "network": play.network, "patched": patched, "patch": patch})
                    if hasattr(result, "__await__"):
                        await result
                else:
                    for one in who.split(","):
                        actor = play.actor(one)
                        actor.begin(eval(f"actor.{call}", {"actor": actor}))
                        await asyncio.sleep(0.003)
            recorder.over = not row.get("end", True)

    def now() -> float:
        return recorder.now()

    with contextlib.ExitStack() as stack:
        for warned in (stored._warn_once, settings._warn_once):
            warned.cache_clear()  # a warning comes once in a process
        for logger in (logging.getLogger("rdzv"), logging.getLogger("store")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.INFO)
            logger.addHandler(recorder)
            stack.callback(logger.removeHandler, recorder)
        stack.enter_context(patch.object(time, "time", lambda: DAY + now() - START))
        stack.enter_context(patch.object(time, "monotonic", now))
        stack.enter_context(patch("store.calls.perf_counter", now))
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(main())
    return recorder.text(whole=whole)


RECORDINGS: Final[dict[str, Callable[[], Iterable[str]]]] = {name: partial(play, name) for name in SCENARIOS}
