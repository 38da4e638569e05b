"""Announced changes to real processes that go from round to round by `rounds()`, with kills and outages between them.

Nodes are drained, one or several at a time, and come again; the run is made smaller and larger; now and then a process
is killed, has its connections reset, or the store is restarted. Each node makes steps that need all members
(`tests.chaos.looping`). Beside all else that `tests.chaos.checker` looks at, no round may have two steps at which
members stop, and no step may be cut short by what was announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import rdzv
from rdzv.node.handler import Handler
from tests.chaos.checker import check_stops
from tests.chaos.runner import QUIET_WITHIN, Chaos, Outcome, Seat, Store, lines_of
from tests.support.processes import ChildError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["announced_chaos"]

FEWEST = 2  # nodes in a round
AT_ONCE = (1, 1, 2, 3)  # changes that are announced at the same moment
UNANNOUNCED = ("kill", "cut", "store")
LEAVES_WITHIN = 120.0  # seconds that a node has which is to leave; a round trip would do


@dataclass(slots=True)
class _Announced(Chaos):
    """One run."""

    announced: Counter[str] = field(default_factory=Counter)
    unannounced: Sequence[str] = UNANNOUNCED

    async def trouble(self, seconds: float, observer: rdzv.Handler) -> None:
        """Announce changes, and do other things to nodes and to the store now and then."""
        assert isinstance(observer, Handler)
        await self.until(lambda: len(self.stays()) >= self.nodes, within=QUIET_WITHIN, what="come to a first round")
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                for _ in range(self.rng.choice(AT_ONCE)):
                    seat = await self.choose(observer) if self.rng.random() < 1 / 2 else None
                    if seat is not None:
                        seat.busy = True
                        group.create_task(self.drain(seat, observer))
                    else:
                        most = self.rng.randint(FEWEST, self.nodes)
                        group.create_task(self.resize(observer, most))
                if self.rng.random() < 1 / 3:
                    await self.do_unannounced(self.rng.choice(self.unannounced), observer, group)
                await asyncio.sleep(self.rng.uniform(0, 1))
        await self.resize(observer, self.nodes)

    async def do_unannounced(self, kind: str, observer: Handler, group: asyncio.TaskGroup) -> None:
        """Do what nobody is told of before."""
        if kind == "store":
            if self.store.ours and not self.restarting:
                group.create_task(self.restart_store())
        elif (seat := await self.choose(observer)) is not None:
            seat.busy = True
            group.create_task(self.meddle(kind, seat))

    async def drain(self, seat: Seat, observer: Handler) -> None:
        """Let a node leave, and come again as a new process."""
        assert seat.life is not None
        child = seat.life.child
        async with asyncio.timeout(LEAVES_WITHIN):
            while child.returncode is None:
                await self.announce("drain", lambda: observer.drain(within=LEAVES_WITHIN, node_id=seat.node))
                self.say(f"drain {seat.node}")
                # It may have been announced of an earlier process of its name, whose lease the store has kept.
                with contextlib.suppress(ChildError):
                    await child.wait(timeout=self.ttl)
        assert child.returncode == 0, child.written()
        await seat.life.stack.aclose()
        await self.start(seat)
        seat.busy = False

    async def resize(self, observer: Handler, most: int) -> None:
        """Give the run another maximum."""
        await self.announce("resize", lambda: observer.resize(max_nodes=most))
        self.say(f"resize to {most}")

    async def announce(self, kind: str, call: Callable[[], Coroutine[None, None, object]]) -> None:
        """Make a call until it can be made."""
        async with asyncio.timeout(QUIET_WITHIN):
            while True:
                try:
                    await call()
                    break
                except (rdzv.RendezvousConnectionError, rdzv.RendezvousStateError):  # or the node is not back yet
                    await asyncio.sleep(0.1)
        self.announced[kind] += 1

    async def quiet(self, observer: rdzv.Handler) -> None:  # noqa: ARG002
        """Whoever has left is back, and there is room for all."""
        await self.until(self.in_one_round, within=2 * QUIET_WITHIN, what="come to one round")
        await self.nothing_is_left_behind()

    def judge(self) -> Outcome:
        """Hold what was written down against the promises."""
        outcome = Chaos.judge(self)
        check_stops([(life.node, line) for life in self.lives for line in lines_of(life.child)], self.faults)
        return replace(outcome, announced=self.announced)


async def announced_chaos(
    *,
    seconds: float,
    seed: int,
    nodes: int = 4,
    url: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    unannounced: Sequence[str] = UNANNOUNCED,
) -> Outcome:
    """Play one run; arguments and errors are those of `tests.chaos.runner.chaos`.

    After a restart the store keeps the leases of who has died meanwhile for a whole TTL, so that a run takes longer.

    Args:
        unannounced: What else is done, of which nobody is told before.
    """
    async with Store(url) as store:
        run_id = f"announced-{seed}-{random.Random().getrandbits(32):08x}"
        run = _Announced(store, run_id, nodes, random.Random(seed), say, module="tests.chaos.looping", ttl=10.0)
        run.unannounced = unannounced
        return await run.play(seconds)
