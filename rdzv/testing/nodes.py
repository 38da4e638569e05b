"""One simulated node of a cluster, and the handlers of its code."""

from __future__ import annotations

import contextvars
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rdzv.backends.builtin import maker_of_handlers
from rdzv.config.endpoint import split_url
from rdzv.config.settings import parse
from rdzv.errors import RendezvousStateError
from rdzv.node.handler import Handler
from rdzv.testing.machines import NODE_THREAD, Process, make_client, make_node_handler
from rdzv.testing.story import where

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from rdzv.interface import RendezvousHandler
    from rdzv.membership import RendezvousInfo

URL = "tcp://store/test"


@dataclass(slots=True)
class ClusterRound:
    """A round of a cluster.

    Attributes:
        run_id: The run's id.
        number: The round's number.
        world_size: The number of members.
        bootstrap_address: Rank 0's host and port.
        at: When the first member received the round, in virtual seconds.
        ranks: Names, by rank, of the members that have received the round.
    """

    run_id: str
    number: int
    world_size: int
    bootstrap_address: tuple[str, int]
    at: float
    ranks: dict[int, str] = field(default_factory=dict)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members that have received the round, by rank."""
        return tuple(self.ranks[rank] for rank in sorted(self.ranks))


class ClusterForNodes(Protocol):
    """The part of `cluster.Cluster` that nodes use."""

    settings: dict[str, Any]

    def say(self, what: str) -> None:
        """Add a line to `Cluster.story`."""

    def record_join(self, info: RendezvousInfo) -> None:
        """Record that a node is in a round."""


class ClusterNode:
    """One node of a cluster; the argument of its body.

    Attributes:
        index: Its number, from 0.
        name: Its default node id, such as `node-0`.
        url: The URL of a run of this cluster.
        rng: Random numbers that depend on the seed alone.
        error: The error that its body has raised, if `may_raise` allows it.
        ended: True once its body has ended.
    """

    def __init__(self, cluster: ClusterForNodes, index: int, process: Process) -> None:
        self._cluster = cluster
        self.index = index
        self.name: str = process.name
        self.url = URL
        self.rng: random.Random = random.Random(f"{self.name} {process.rng.random()}")
        self.process = process
        self.error: Exception | None = None
        self.ended: bool = False
        self.task: asyncio.Task[Any] | None = None
        self.handlers: list[Handler] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def alive(self) -> bool:
        """True until the node's process ends, also while it is stopped."""
        return self.process.alive

    @property
    def is_running(self) -> bool:
        """True while its body runs."""
        return self.alive and self.task is not None and not self.ended

    @property
    def is_idle(self) -> bool:
        """True if its process has no unfinished task."""
        return not any(loop.unfinished() for loop in (self.process.host, *self.process.threads.values()))

    @property
    def connection_names(self) -> tuple[str, str]:
        """The names of the connections of its main loop and of its node thread."""
        return self.process.source, self.process.source + NODE_THREAD

    def say(self, what: str) -> None:
        """Add a line to `Cluster.story`."""
        self._cluster.say(f"{self.name}: {what}")

    def start_body(self, body: Callable[[ClusterNode], Awaitable[object]]) -> asyncio.Task[Any]:
        """Run a body in its process; the cluster calls this."""
        context = contextvars.copy_context()
        context.run(maker_of_handlers.set, self._make_handler)
        self._cluster.say(f"{self.name} starts")
        self.task = self.process.host.create_task(_run_body(body, self), name=self.name, context=context)
        return self.task

    def describe(self) -> str:
        """Return its state, and where it waits, in words."""
        if not self.alive:
            return f"{self.name} is dead"
        if self.task is None or self.ended:
            return f"{self.name} has ended"
        still = ", which stands still" if self.process.host.paused else ""
        waits = "".join(f"; {handler.reason}" for handler in self.handlers[-1:] if handler.node.is_joining)
        others = [task for task in self.process.host.unfinished() if task is not self.task]
        also = sorted(f"\n    and at {line}" for task in others if (line := where(task, of_users=True)))
        return f"{self.name}{still} is at {where(self.task)}{waits}{''.join(also)}"

    def _make_handler(self, url: str, overrides: Mapping[str, Any], *, blocking: bool) -> RendezvousHandler:
        if blocking:
            raise RendezvousStateError(
                "rdzv.sync would hold up the virtual time of rdzv.testing.cluster for ever: use rdzv.connect or "
                "rdzv.rounds there, or test blocking code with rdzv.testing.processes"
            )
        in_url = split_url(url).parameters
        usual = {"node_id": self.name, "address": self.name, **self._cluster.settings}
        usual = {name: value for name, value in usual.items() if name not in in_url}
        given = {name: value for name, value in overrides.items() if value is not None}
        settings = parse(url, {**usual, **given}, {})
        handler = make_node_handler(
            self.process,
            settings,
            open_store=partial(make_client, self.process, thread=NODE_THREAD, connect_timeout=settings.join_timeout),
            open_shared_store=partial(make_client, self.process),
            kind=_RoundNotingHandler,
        )
        assert isinstance(handler, _RoundNotingHandler)
        handler.on_round = self._cluster.record_join
        self.handlers.append(handler)
        return handler


class _RoundNotingHandler(Handler):
    on_round: Callable[[RendezvousInfo], None]

    async def next_rendezvous(self) -> RendezvousInfo:
        info = await super().next_rendezvous()
        self.on_round(info)
        return info


async def _run_body(body: Callable[[ClusterNode], Awaitable[object]], node: ClusterNode) -> None:
    await body(node)
