"""Shell: what a store's own process sees of the runs in it: the same answers as `rdzv status`.

A run's record stays for a day after its last node has gone, so that most runs of a busy store are over. Of those it is
only asked whether they have changed, which the store's own account of its runs says of all at once. The youngest of
them are read, a few at a time, to be listed; all of them are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdzv.core.keys import Keys
from rdzv.core.report import account, report
from rdzv.display.history import as_json, describe, timeline
from rdzv.node.link.follower import following
from rdzv.node.run.run import Run
from rdzv.node.run.status import count_keys, read_account
from store import Client
from store.messages import KeyGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rdzv.core.history import History
    from rdzv.core.report import Account
    from store.server.server import Server

__all__ = ["NoSuchRun", "Runs", "client_of"]

T = TypeVar("T")

FRESH = 0.5  # seconds for which an answer serves everybody who asks, at least ...
FRESH_FOR = 4  # ... and so many times as long as it took: looking takes the store a fifth of its time at most
HISTORY_LINES = 40
ENDED_LISTED = 100  # of the runs that are over, the youngest
READ_AT_ONCE = 5  # of those, by one who asks for the list
COUNTED_AT_ONCE = 64  # runs of which it is asked in one go whether anybody is in them
SUMMED = (
    *("run_id", "phase", "phase_since", "state", "reason", "waits_for", "waited", "waiting_since"),
    *("round", "world_size", "closed", "closing", "pace"),
)
"""What the numbers of a run take over from its report."""
STEPS = {"step": "step", "step_age_seconds": "step_age", "step_rate": "step_rate"}
"""What the metrics say of a member's steps, and what the report calls it."""


class NoSuchRun(Exception):
    """The store holds nothing of the run."""


@contextlib.asynccontextmanager
async def client_of(server: Server, *, token: bytes | None) -> AsyncIterator[Client]:
    """Connect to a server from within its own process, past its port and the TLS that it demands there."""

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        await loop.connect_accepted_socket(partial(server.protocol, is_of_ours=True), theirs)
        return await loop.create_connection(factory, sock=ours)

    async with Client(dial, name="its own store", token=token) as client:
        yield client


@dataclass(slots=True)
class _Ended:
    """A run that nobody is in any more."""

    group: KeyGroup  # what it took when that was last looked at: a change shows there
    since: float  # when there first was anything of it, on the client's clock
    summary: dict[str, Any] | None = None  # how it stood then, if it was read


class Runs:
    """The runs under a prefix of a store.

    Args:
        client: Of the store.
        prefix: What the keys of all runs start with.
    """

    def __init__(self, client: Client, *, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self._over: dict[str, _Ended] = {}
        self._told: dict[str, tuple[float, Any]] = {}  # by run, or "" of all: until when it is fresh, and what it is

    @property
    def ended(self) -> int:
        """How many runs there are that nobody is in any more, as of the last look."""
        return len(self._over)

    async def ping(self) -> float:
        """Measure how long the store takes to answer."""
        return await self._client.ping(timeout=2.0)

    async def live(self) -> list[dict[str, Any]]:
        """Return how each run stands, in numbers, that somebody is in."""
        return await self._fresh("", self._look)

    async def _fresh(self, what: str, look: Callable[[], Awaitable[T]]) -> T:
        """Look, unless somebody has just done so: what is fresh serves several who ask."""
        async with self._looking:
            began = self._client.time()
            until, told = self._told.get(what, (0.0, None))
            if began >= until:
                told, now = await look(), self._client.time()
                self._told = {one: known for one, known in self._told.items() if known[0] > now}
                self._told[what] = now + max(FRESH, FRESH_FOR * (now - began)), told
            return cast("T", told)

    async def summaries(self) -> list[dict[str, Any]]:
        """Return the same with the youngest of those that are over, by name."""
        live = await self.live()
        youngest = heapq.nlargest(ENDED_LISTED, self._over.items(), key=lambda one: one[1].since)
        for run_id, over in [one for one in youngest if one[1].summary is None][:READ_AT_ONCE]:
            over.summary, _ = await self._summary(run_id)
        listed = [over.summary for _, over in youngest if over.summary is not None]
        return sorted([*live, *listed], key=lambda one: one["run_id"])

    async def _look(self) -> list[dict[str, Any]]:
        """Find out which runs somebody is in, and how those stand."""
        now = self._client.time()
        account = await read_account(self._client, self._prefix)
        if account is None:  # its groups are no runs: all keys are listed, and each run is taken for changed
            counted = await count_keys(self._client, self._prefix)
            account = {id: KeyGroup(name=id, keys=keys, bytes=-1, age=0.0) for id, keys in counted.items()}
        before, self._over = self._over, {}
        unknown = []
        for id, group in account.items():
            if id in before and _is_same(before[id].group, group):
                self._over[id] = before[id]
            else:
                unknown.append(id)
        live = []
        for at in range(0, len(unknown), COUNTED_AT_ONCE):
            some = unknown[at : at + COUNTED_AT_ONCE]
            nodes = await asyncio.gather(*(self._client.count(self._keys(id).nodes) for id in some))
            for id, count in zip(some, nodes, strict=True):
                summary, is_live = await self._summary(id) if count else (None, False)
                if summary is not None and is_live:
                    live.append(summary)
                else:
                    self._over[id] = _Ended(account[id], now - account[id].age, summary)
        return sorted(live, key=lambda one: str(one["run_id"]))

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return how one run stands, as `rdzv status --json` says it, with the last lines of `rdzv history`.

        Raises:
            NoSuchRun: There is none.
        """
        if not await self._client.count(self._keys(run_id).root):
            raise NoSuchRun(run_id)
        return await self._fresh(run_id, partial(self._report, run_id))

    async def _report(self, run_id: str) -> dict[str, Any]:
        told, history, cost = await self._read(run_id)
        return {**told, "history": describe(history)[-HISTORY_LINES:], "cost": cost.plain()}

    async def timeline(self, run_id: str) -> dict[str, Any]:
        """Return a run's rounds and nodes as rows of a timeline.

        Raises:
            NoSuchRun: There is none.
        """
        history, hour = await self._history(run_id)
        return timeline(run_id, history, now=hour)

    async def history(self, run_id: str) -> dict[str, Any]:
        """Return the history of a run as data, as `rdzv history --json` says it.

        Raises:
            NoSuchRun: There is none.
        """
        history, hour = await self._history(run_id)
        return as_json(run_id, history, account(run_id, history, now=hour))

    async def _history(self, run_id: str) -> tuple[History, float]:
        if not await self._client.count(self._keys(run_id).root):
            raise NoSuchRun(run_id)
        run = Run(self._client, self._keys(run_id))
        return await run.whole_history(), await run.hour()

    async def _summary(self, run_id: str) -> tuple[dict[str, Any], bool]:
        """How a run stands, in numbers, and whether anybody is in it."""
        full, history, cost = await self._read(run_id)
        told = {
            **{name: full[name] for name in SUMMED},
            **full["counts"],
            **{name: full["settings"].get(name) for name in ("min_nodes", "max_nodes")},
            "steps": {
                one["node_id"]: {name: one[key] for name, key in STEPS.items()}
                for one in full["members"]
                if one["step"] is not None
            },
            "lost": cost.reasons,
            "spent": {"training": cost.spent.trained, "regrouping": cost.spent.regrouped, "waiting": cost.spent.waited},
            "met": history.chapters[-1].met if history.chapters else None,
        }
        return told, bool(full["members"] or full["waiting"] or full["spares"])

    def _keys(self, run_id: str) -> Keys:
        return Keys(self._prefix, run_id)

    async def _read(self, run_id: str) -> tuple[dict[str, Any], History, Account]:
        async with following(self._client, self._keys(run_id)) as follower:
            run = Run(self._client, self._keys(run_id), head=lambda: follower.head)
            status, history, cost = await run.account()
        return report(status), history, cost


def _is_same(before: KeyGroup, now: KeyGroup) -> bool:
    """Whether nothing seems to have changed in a group of keys since."""
    return before.bytes >= 0 and (before.keys, before.bytes) == (now.keys, now.bytes) and before.age <= now.age
