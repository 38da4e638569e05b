"""A node of a run as a process of its own: the real handler, its node in a second thread, and a job.

It joins a round, writes to the shared store, reads the values of others and the changes, and joins again when a member
has gone or a node waits. Now and then it leaves, or closes the run. It keeps the changes that it was told for the
checks of `full_story.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.core.state import Closed, Dropped
from rdzv.errors import (
    MembersLostError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    RoundSupersededError,
    SharedStoreTimeoutError,
)
from rdzv.testing.machines import NODE_THREAD, make_node_handler
from store.errors import LimitExceeded
from store.messages import Put, Transact

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.state import Change
    from rdzv.membership import Membership, RendezvousInfo
    from rdzv.node.handler import Handler
    from store.messages import Request
    from tests.sim.full_story import FullStory
    from tests.sim.machines import HeardProcess
    from tests.sim.truth import HeardClient

__all__ = ["DISCONNECT_TTL", "KEYS", "NOTICED_WITHIN", "TTL", "Fuse", "Node", "commits"]

KEYS = Keys(prefix="/rdzv", run_id="job")
TTL = 3.0
DISCONNECT_TTL = 0.6
NOTICED_WITHIN = 16.0  # seconds until a client has noticed a dead connection and reconnected


@dataclass(slots=True)
class Fuse:
    """Counts down at requests, before each is sent and after it was answered, and strikes a node at the end.

    Attributes:
        left: The number of requests that are left.
        burns_at: Returns True for the requests that count.
        then: Called with the node whose request was the last.
    """

    left: int
    burns_at: Callable[[Request[Any]], bool]
    then: Callable[[Node], object]


def commits(request: Request[Any]) -> bool:
    """Return True if this request commits a round."""
    return isinstance(request, Transact) and any(
        isinstance(one, Put) and one.key.endswith("/head/round") for one in request.then
    )


class Node:
    """One process of one node.

    Attributes:
        refused: The error with which it stopped joining, since the run is closed.
        heard: The changes of its round.
        fuse: A fault to come, if any.
    """

    def __init__(self, story: FullStory, process: HeardProcess, **settings: Any) -> None:
        self.story, self.process = story, process
        self.name = process.name
        self.rng = process.rng
        self.refused: Exception | None = None
        self.heard: list[Change] = []
        self.heard_for: Membership | None = None
        self.fuse: Fuse | None = None
        self.stays = False  # ignores all changes
        self.client: HeardClient | None = None
        self.shared_client: HeardClient | None = None
        self.handler = self._new_handler(settings)
        self._life = process.host.start_task(self._live())
        self._life.add_done_callback(self._ended)

    def _new_handler(self, settings: dict[str, Any]) -> Handler:
        parsed = parse(self.story.url, {"node_id": self.name, "address": f"at-{self.name}", **settings}, {})

        def open_store() -> HeardClient:
            self.client = self.process.client(thread=NODE_THREAD, connect_timeout=parsed.join_timeout)
            self.client.hook = self._before_and_after
            return self.client

        def open_shared_store() -> HeardClient:
            self.shared_client = self.process.client()
            self.shared_client.hook = self._before_and_after
            return self.shared_client

        handler = make_node_handler(self.process, parsed, open_store=open_store, open_shared_store=open_shared_store)
        self.node = handler.node
        return handler

    @property
    def alive(self) -> bool:
        """True until the process is killed."""
        return self.process.alive

    @property
    def awake(self) -> bool:
        """True if the process lives and its main loop runs."""
        return self.alive and not self.process.host.paused

    @property
    def connected(self) -> bool:
        """True if its client is connected to the store."""
        return self.client is not None and self.client.connected

    def quit(self) -> None:
        """Let the node leave and end."""
        if self.awake:
            self.process.host.call_soon(self._life.cancel)

    def close_run(self) -> None:
        """Close the run at once, also in the middle of other calls."""
        if self.awake:
            self.process.host.start_task(self._close())

    async def _before_and_after(self, request: Request[Any], at: str) -> None:
        """Count down this node's fuse and that of the story. Requests that a dead process still makes do not count."""
        if self.process.host.dead:
            return
        for owner in (self, self.story.troubles):
            fuse = owner.fuse
            if fuse is None or not fuse.burns_at(request):
                continue
            fuse.left -= 1
            if fuse.left < 0:
                owner.fuse = None
                self.story.truth.say(f"{at} {type(request).__name__}:")
                fuse.then(self)
                if not self.alive:
                    await asyncio.get_running_loop().create_future()  # a dead process does nothing more
                await asyncio.sleep(0)  # a paused process stops here

    async def _live(self) -> None:
        story = self.story
        try:
            async with self.handler:
                while True:
                    info = await self.handler.next_rendezvous()
                    story.joined(self, info)
                    await self._take_part(info)
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            self.refused = error
            story.truth.require(story.checker.closed, f"{self.name} was refused, and the run is not closed: {error}")
        except (RendezvousTimeoutError, RendezvousConnectionError) as error:
            story.gave_up(self, error)

    def _ended(self, life: asyncio.Task[None]) -> None:
        if self.alive and not life.cancelled() and (error := life.exception()) is not None:
            self.story.truth.fail(f"{self.name} has ended with {error!r}")

    async def _take_part(self, info: RendezvousInfo) -> None:
        """Work until there is a reason to meet again."""
        host, rng = self.process.host, self.rng
        work = [host.start_task(self._train(info)), host.start_task(self._listen())]
        try:
            # A story lasts about a minute, so a node that leaves earlier does it by itself.
            fate = rng.choice(("stay", "stay", "stay", "leave", "go", "close"))
            patience = rng.uniform(0.5, 6.0) if fate != "stay" and not self.story.calm else None
            await asyncio.wait([work[1]], timeout=patience)
            if not work[1].done() and not self.story.calm:
                await self._turn_away(fate)
            else:
                await work[1]
        finally:
            for task in work:
                task.cancel()
            await asyncio.wait(work)
        for task in work:
            if not task.cancelled():
                task.result()
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3)))

    async def _turn_away(self, fate: str) -> None:
        """Leave, or close the run, or just stop working. Then the node joins again."""
        self.story.disturbed(f"{self.name} decides to {fate}", lasting=1.0)
        match fate:
            case "leave":
                await self.handler.leave()
                await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            case "close" if self.rng.random() < 0.4:
                await self._close()

    async def _close(self) -> None:
        # The store may be disconnected, or the process may be ending and have closed its handler.
        with contextlib.suppress(RendezvousConnectionError, RendezvousStateError):
            await self.handler.set_closed("enough")

    async def _listen(self) -> None:
        """Listen until there is a reason to meet again. Changes ignored during faults count once it is calm."""
        hearing = self.process.host.start_task(self._hear())
        try:
            while not hearing.done() and not (self.story.calm and self.handler.num_nodes_changed() and not self.stays):
                await asyncio.wait([hearing], timeout=0.5)
        finally:
            hearing.cancel()
            await asyncio.wait([hearing])
        if not hearing.cancelled():
            hearing.result()

    async def _hear(self) -> None:
        async with self.handler.changes() as changes:
            async for change in changes:
                if self.heard_for is not self.node.membership:
                    self.heard_for, self.heard = self.node.membership, []
                self.heard.append(change)
                self.story.truth.say(f"{self.name} hears {change}")
                minds = self.rng.random() < 0.8 or self.story.calm
                if isinstance(change, Dropped | Closed) or (minds and not self.stays):
                    return

    async def _train(self, info: RendezvousInfo) -> None:
        """Write to the shared store, and read the values of others, while the round lasts."""
        membership, rng = info._membership, self.rng
        step = 0
        try:
            if rng.random() < 0.3:
                self.story.check_roster(info, await info.participants())
            while True:
                ours = msgpack.packb((self.name, membership.arrival, info.round))
                await self._written(info, f"{info.rank}/{step % 3}", ours)
                with contextlib.suppress(SharedStoreTimeoutError):
                    other = rng.randrange(info.world_size)
                    await info.store.wait([f"{other}/{step % 3}"], 0.5)
                    _, _, number = msgpack.unpackb(await info.store.get(f"{other}/{step % 3}"))
                    self.story.truth.require(
                        number == info.round, f"{self.name} read of round {number} in {info} (R10)"
                    )
                step += 1
                await asyncio.sleep(rng.uniform(0.2, 1.2))
        except (RoundSupersededError, MembersLostError, RendezvousConnectionError):
            pass

    async def _written(self, info: RendezvousInfo, key: str, value: bytes) -> None:
        membership, checker = info._membership, self.story.checker
        try:
            await info.store.set(key, value)
        except RoundSupersededError:
            checker.refused_write(self.name, membership.round, membership.arrival, refused=True)
            raise
        except (SharedStoreTimeoutError, LimitExceeded):
            pass  # for example because the disk is full
        else:
            checker.refused_write(self.name, membership.round, membership.arrival, refused=False)
