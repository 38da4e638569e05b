"""Shell: what a store's own process sees of the runs in it: the same answers as `rdzv status`.

A run's record stays for a day after its last node has gone, so that most runs of a busy store are over. Those that are
not are followed; of the others it is only asked whether they have changed, which the store's own account of its runs
says of all at once. The youngest of them are read, a few at a time, to be listed; all of them are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv.core.keys import Keys
from rdzv.core.report import report
from rdzv.display.history import account, describe, losses_by_reason, timeline
from rdzv.node.follower import Follower
from rdzv.node.status import count_keys, read_account, read_history, read_run
from store import Client
from store.messages import KeyGroup
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Self

    from rdzv.core.history import History
    from store.server.server import Server

__all__ = ["NoSuchRun", "Runs", "client_of"]

FRESH = 0.5  # seconds for which an answer serves everybody who asks; reading 1,000 nodes takes some milliseconds
HISTORY_LINES = 40
ENDED_LISTED = 100  # of the runs that are over, the youngest
READ_AT_ONCE = 5  # of those, by one who asks for the list
COUNTED_AT_ONCE = 64  # runs of which it is asked in one go whether anybody is in them


class NoSuchRun(Exception):
    """The store holds nothing of the run."""


@contextlib.asynccontextmanager
async def client_of(server: Server, *, token: bytes | None) -> AsyncIterator[Client]:
    """Connect to a server from within its own process, past its port and the TLS that it demands there."""

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        ours, theirs = _socket_pair()
        await loop.connect_accepted_socket(partial(server.protocol, is_of_ours=True), theirs)
        return await loop.create_connection(factory, sock=ours)

    async with Client(dial, name="its own store", token=token) as client:
        yield client


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, since that is what a server's peers are made for."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listening:
        ours = socket.create_connection(listening.getsockname())
        while True:
            theirs, address = listening.accept()
            if address == ours.getsockname():
                break
            theirs.close()  # somebody else has found the port
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@dataclass(slots=True)
class _Live:
    """A run that somebody is in."""

    follower: Follower
    task: asyncio.Task[None]


@dataclass(slots=True)
class _Ended:
    """A run that nobody is in any more."""

    group: KeyGroup  # what it took when that was last looked at: a change shows there
    since: float  # when there first was anything of it, on the client's clock
    summary: dict[str, Any] | None = None  # how it stood then, if it was read


class Runs:
    """The runs under a prefix of a store; use it as a context.

    Args:
        client: Of the store.
        prefix: What the keys of all runs start with.
    """

    def __init__(self, client: Client, *, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self._followed: dict[str, _Live] = {}
        self._over: dict[str, _Ended] = {}
        self._seen: list[dict[str, Any]] = []
        self._seen_at = -FRESH

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*(one.task for one in self._followed.values()))

    @property
    def ended(self) -> int:
        """How many runs there are that nobody is in any more, as of the last look."""
        return len(self._over)

    async def ping(self) -> float:
        """Measure how long the store takes to answer."""
        return await self._client.ping(timeout=2.0)

    async def live(self) -> list[dict[str, Any]]:
        """Return how each run stands, in numbers, that somebody is in; what is fresh serves several who ask."""
        async with self._looking:
            if self._client.time() - self._seen_at >= FRESH:
                await self._look()
                self._seen_at = self._client.time()
            return self._seen

    async def summaries(self) -> list[dict[str, Any]]:
        """Return the same with the youngest of those that are over, by name."""
        live = await self.live()
        youngest = heapq.nlargest(ENDED_LISTED, self._over.items(), key=lambda one: one[1].since)
        for run_id, over in [one for one in youngest if one[1].summary is None][:READ_AT_ONCE]:
            over.summary, _ = await self._summary(run_id, None)
        listed = [over.summary for _, over in youngest if over.summary is not None]
        return sorted([*live, *listed], key=lambda one: one["run_id"])

    async def _look(self) -> None:
        """Find out which runs somebody is in, and how those stand."""
        now = self._client.time()
        account = await read_account(self._client, self._prefix)
        if account is None:  # its groups are no runs: all keys are listed, and each run is taken for changed
            counted = await count_keys(self._client, self._prefix)
            account = {id: KeyGroup(name=id, keys=keys, bytes=-1, age=0.0) for id, keys in counted.items()}
        for run_id in [id for id in self._followed if id not in account]:
            await cancel_and_wait(self._followed.pop(run_id).task)
        self._over = {id: over for id, over in self._over.items() if id in account}
        unknown = [
            id
            for id, group in account.items()
            if id not in self._followed and not (id in self._over and _is_same(self._over[id].group, group))
        ]
        for at in range(0, len(unknown), COUNTED_AT_ONCE):
            some = unknown[at : at + COUNTED_AT_ONCE]
            nodes = await asyncio.gather(*(self._client.count(self._keys(id).nodes) for id in some))
            for id, count in zip(some, nodes, strict=True):
                self._over.pop(id, None)
                if count:
                    self._follow(id)
                else:
                    self._over[id] = _Ended(account[id], now - account[id].age)
        self._seen = []
        for run_id in sorted(self._followed):
            summary, is_live = await self._summary(run_id, self._followed[run_id].follower)
            if is_live:
                self._seen.append(summary)
            else:
                await cancel_and_wait(self._followed.pop(run_id).task)
                self._over[run_id] = _Ended(account[run_id], now - account[run_id].age, summary)

    def _follow(self, run_id: str) -> None:
        follower = Follower(self._client, self._keys(run_id))
        self._followed[run_id] = _Live(follower, asyncio.create_task(follower.run(), name=f"look at run {run_id}"))

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return how one run stands, as `rdzv status --json` says it, with the last lines of `rdzv history`.

        Raises:
            NoSuchRun: There is none.
        """
        if not await self._client.count(self._keys(run_id).root):
            raise NoSuchRun(run_id)
        told, history = await self._report(run_id)
        cost = account(run_id, history, now=time.time(), waited=told["waited"])
        return {**told, "history": describe(history)[-HISTORY_LINES:], "cost": cost.plain()}

    async def timeline(self, run_id: str) -> dict[str, Any]:
        """Return a run's rounds and nodes as rows of a timeline.

        Raises:
            NoSuchRun: There is none.
        """
        if not await self._client.count(self._keys(run_id).root):
            raise NoSuchRun(run_id)
        return timeline(run_id, await read_history(self._client, self._keys(run_id)), now=time.time())

    async def _summary(self, run_id: str, follower: Follower | None) -> tuple[dict[str, Any], bool]:
        """How a run stands, in numbers, and whether anybody is in it."""
        full, history = await self._report(run_id, follower)
        plain = {name: full[name] for name in ("run_id", "phase", "reason", "round", "world_size", "closed")}
        cost = account(run_id, history, now=time.time(), waited=full["waited"])
        spent = {
            "training": cost.spent.trained,
            "regrouping": cost.spent.regrouped,
            "waiting": cost.spent.waited,
        }
        told = {
            **plain,
            **{name: len(full[name]) for name in ("members", "waiting", "spares", "banned")},
            "steps": {
                one["node_id"]: {
                    "step": one["step"],
                    "step_age_seconds": one["step_age"],
                    "step_rate": one["step_rate"],
                }
                for one in full["members"]
                if one["step"] is not None
            },
            "missing": full["missing_count"],
            "lost": losses_by_reason(history),
            "spent": spent,
            "met": history.chapters[-1].met if history.chapters else None,
        }
        return told, bool(full["members"] or full["waiting"] or full["spares"])

    def _keys(self, run_id: str) -> Keys:
        return Keys(self._prefix, run_id)

    async def _report(self, run_id: str, followed: Follower | None = None) -> tuple[dict[str, Any], History]:
        keys = self._keys(run_id)
        if followed is None and run_id in self._followed:
            followed = self._followed[run_id].follower
        follower = followed or Follower(self._client, keys)
        task = asyncio.create_task(follower.run(), name=f"look at run {run_id}") if followed is None else None
        try:
            await follower.synced.wait()
        finally:
            if task is not None:
                await cancel_and_wait(task)
        if follower.error is not None:
            self._followed.pop(run_id, None)  # it is followed anew at the next look
            raise follower.error
        status, history = await read_run(self._client, keys, follower.head)
        return report(status), history


def _is_same(before: KeyGroup, now: KeyGroup) -> bool:
    """Whether nothing seems to have changed in a group of keys since."""
    return before.bytes >= 0 and (before.keys, before.bytes) == (now.keys, now.bytes) and before.age <= now.age
