"""Announced changes to real processes that loop over `rounds()`, with kills and outages in between.

Nodes are drained, one or several at a time, and started again. The run is resized. Now and then a process is killed, or
its connections are reset, or the store is restarted. Each node makes steps that need all members
(`tests.chaos.looping`). Besides the checks of `tests.chaos.checker`, no round may have two steps at which members stop,
and no announced change may interrupt a step.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

import rdzv
from rdzv.node.handler import Handler
from tests.chaos.checker import check_stops
from tests.chaos.runner import QUIET_WITHIN, Chaos, Outcome, Seat, Store, lines_of
from tests.support.processes import ChildError

__all__ = ["announced_chaos"]

FEWEST = 2  # nodes in a round
AT_ONCE = (1, 1, 2, 3)  # number of changes that are announced at the same moment
UNANNOUNCED = ("kill", "cut", "store")
LEAVES_WITHIN = 120.0  # seconds that a drained node has to leave; a round trip would be enough


@dataclass(slots=True)
class _Announced(Chaos):
    """One run."""

    announced: Counter[str] = field(default_factory=Counter)
    unannounced: Sequence[str] = UNANNOUNCED

    async def trouble(self, seconds: float, observer: rdzv.Handler) -> None:
        """Announce changes, and now and then strike a node or the store."""
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
        """Strike a node or the store without an announcement."""
        if kind == "store":
            if self.store.ours and not self.restarting:
                group.create_task(self.restart_store())
        elif (seat := await self.choose(observer)) is not None:
            seat.busy = True
            group.create_task(self.meddle(kind, seat))

    async def drain(self, seat: Seat, observer: Handler) -> None:
        """Drain a node, and start it again as a new process."""
        assert seat.life is not None
        child = seat.life.child
        async with asyncio.timeout(LEAVES_WITHIN):
            while child.returncode is None:
                await self.announce("drain", lambda: observer.drain(within=LEAVES_WITHIN, node_id=seat.node))
                self.say(f"drain {seat.node}")
                # The drain may have gone to an earlier process of this name, whose lease still exists in the store.
                with contextlib.suppress(ChildError):
                    await child.wait(timeout=self.ttl)
        assert child.returncode == 0, child.written()
        await seat.life.stack.aclose()
        await self.start(seat)
        seat.busy = False

    async def resize(self, observer: Handler, most: int) -> None:
        """Change the maximum number of nodes."""
        await self.announce("resize", lambda: observer.resize(max_nodes=most))
        self.say(f"resize to {most}")

    async def announce(self, kind: str, call: Callable[[], Coroutine[None, None, object]]) -> None:
        """Make a call, and repeat it until it succeeds."""
        async with asyncio.timeout(QUIET_WITHIN):
            while True:
                try:
                    await call()
                    break
                except (rdzv.RendezvousConnectionError, rdzv.RendezvousStateError):  # or the node is not back yet
                    await asyncio.sleep(0.1)
        self.announced[kind] += 1

    async def quiet(self, observer: rdzv.Handler) -> None:  # noqa: ARG002
        """Wait until all nodes are back in one round."""
        await self.until(self.in_one_round, within=2 * QUIET_WITHIN, what="come to one round")
        await self.nothing_is_left_behind()

    def judge(self) -> Outcome:
        """Check the lines of the nodes against the promises."""
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
    """Play one run. Arguments and errors are those of `tests.chaos.runner.chaos`.

    After a restart, the store keeps the leases of nodes that died meanwhile for a whole TTL, so a run takes longer.

    Args:
        unannounced: The kinds of faults without an announcement.
    """
    async with Store(url) as store:
        run_id = f"announced-{seed}-{random.Random().getrandbits(32):08x}"
        run = _Announced(store, run_id, nodes, random.Random(seed), say, module="tests.chaos.looping", ttl=10.0)
        run.unannounced = unannounced
        return await run.play(seconds)
