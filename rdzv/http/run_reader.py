"""Reads a store's runs, in the store's own process, for HTTP.

By default, a run's keys stay for a day after its last node left, so most runs of a busy store have ended. One request
returns how many keys and bytes each run has, which shows whether an ended run has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdzv.core.keys import Keys
from rdzv.core.report import status_json
from rdzv.display.history import history_text
from rdzv.node.link.followed_runs import FollowedRuns
from rdzv.node.run.status import read_history, read_run_time, usage_by_run
from store import Client
from store.net.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rdzv.core.history import History
    from rdzv.node.run.status import RunUsage
    from store.protocol.connection import Secret
    from store.server.server import Server

T = TypeVar("T")

FRESH = 0.5  # seconds, at least, for which an answer about unchanged runs is reused
FRESH_FOR = 4  # an answer is reused for this many times its reading's duration, or until a first change
HISTORY_LINES = 40
ENDED_LISTED = 100  # the most ended runs of a list
READ_AT_ONCE = 5  # ended runs whose figures one HTTP request reads for the list
COUNTED_AT_ONCE = 64  # runs whose nodes are counted concurrently
SPACED = 0.1  # seconds, at least, between two reads of a changing run


class NoSuchRun(Exception):
    """The store has no such run."""


@contextlib.asynccontextmanager
async def connect_to_own_store(server: Server, *, token: Secret) -> AsyncIterator[Client]:
    """Connect a client to a store's server in this process, without port and TLS."""

    async def dial_in_process(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        await loop.connect_accepted_socket(partial(server.protocol, is_internal=True), theirs)
        return await loop.create_connection(factory, sock=ours)

    async with Client(dial_in_process, name="its own store", token=token) as client:
        yield client


@dataclass(slots=True)
class _EndedRun:
    usage: RunUsage  # at the last read; if keys or bytes differ, the run has changed
    since: float  # when the run's first key was written, on the client's clock
    summary: dict[str, Any] | None = None  # the run's figures, if they were read


class RunReader:
    """Reads a store's runs whose keys begin with `prefix`."""

    def __init__(self, client: Client, *, prefix: str) -> None:
        self.client = client
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self.over: dict[str, _EndedRun] = {}  # the runs without nodes at the last read
        # By page: until when its answer is reused if the run has changed, and if it has not; and the answer.
        self._answers: dict[str, tuple[float, float, Any]] = {}
        self.followed: FollowedRuns = FollowedRuns(client, prefix)  # the runs read lately, kept current by watches

    async def list_live_runs(self) -> list[dict[str, Any]]:
        """Return the figures of runs with nodes."""
        return await self._cached("", self._read_live_runs)

    async def _cached(self, what: str, look: Callable[[], Awaitable[T]]) -> T:
        """Return the last answer about `what` if it may be reused, else a new answer of `look`."""
        async with self._looking:
            began = self.client.time()
            if_changed, until, told = self._answers.get(what, (0.0, 0.0, None))
            if began >= (if_changed if what in self.followed.changed else until):
                has_changed = what in self.followed.changed
                self.followed.changed.discard(what)
                told, now = await look(), self.client.time()
                self._answers = {one: known for one, known in self._answers.items() if known[1] > now}
                pause = FRESH_FOR * (now - began)
                # If a change has caused this reading, read the next change after `pause`, else almost at once.
                self._answers[what] = now + max(SPACED, has_changed * pause), now + max(FRESH, pause), told
            return cast("T", told)

    def seconds_until_due(self, run_id: str) -> float:
        """Return the seconds until unread changes of a run, or of the runs' list, may be read; infinity if none."""
        unread = [what for what in ("", f"{run_id}/") if what in self.followed.changed and what in self._answers]
        return min((self._answers[one][0] for one in unread), default=math.inf) - self.client.time()

    async def list_live_and_ended(self) -> list[dict[str, Any]]:
        """Return the figures of runs with nodes and of the youngest ended runs, without members' steps."""
        live = await self.list_live_runs()
        youngest = heapq.nlargest(ENDED_LISTED, self.over.items(), key=lambda one: one[1].since)
        for run_id, over in [one for one in youngest if one[1].summary is None][:READ_AT_ONCE]:
            over.summary = await self.followed.summary_of(run_id)
        listed = [over.summary for _, over in youngest if over.summary is not None]
        told = [{name: value for name, value in one.items() if name != "steps"} for one in (*live, *listed)]
        return sorted(told, key=lambda one: one["run_id"])

    async def _read_live_runs(self) -> list[dict[str, Any]]:
        now = self.client.time()
        usages = await usage_by_run(self.client, self._prefix)
        before, self.over = self.over, {}
        await self.followed.drop_unused()
        unknown = []
        for id, usage in usages.items():
            if id in before and _is_usage_unchanged(before[id].usage, usage):
                self.over[id] = before[id]
            else:
                unknown.append(id)
        live = []
        for at in range(0, len(unknown), COUNTED_AT_ONCE):
            some = unknown[at : at + COUNTED_AT_ONCE]
            nodes = await run_to_completion(*(self.client.count(Keys(self._prefix, id).nodes) for id in some))
            for id, count in zip(some, nodes, strict=True):
                summary = (await self.followed.follow_and_refresh(id)).summary() if count else None
                if summary is not None and any(summary[name] for name in ("members", "waiting", "spares")):
                    live.append(summary)
                else:
                    self.over[id] = _EndedRun(usages[id], now - (usages[id].age or 0.0), summary)
        return sorted(live, key=lambda one: str(one["run_id"]))

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return one run as `rdzv status --json` does, with history; raise `NoSuchRun` if it does not exist."""
        await self._check_run_exists(run_id)
        return await self._cached(run_id, partial(self._read_report, run_id))

    async def _read_report(self, run_id: str) -> dict[str, Any]:
        run = await self.followed.follow_and_refresh(run_id)
        status, history = run.current_status()
        return {
            **status_json(status),
            "history": history_text(history)[-HISTORY_LINES:],
            "cost": run.run_cost().as_json(),
        }

    async def web_page_state(self, run_id: str) -> dict[str, Any] | None:
        """Return one run for the page, without values that time alone changes; None if the run does not exist."""
        if not await self._exists(run_id):
            return None
        return await self._cached(f"{run_id}/", partial(self._read_web_page_state, run_id))

    async def _read_web_page_state(self, run_id: str) -> dict[str, Any]:
        return (await self.followed.follow_and_refresh(run_id)).web_page_state()

    async def history(self, run_id: str) -> tuple[History, float]:
        """Return a run's history and the present time on its clock; raise `NoSuchRun` if the run does not exist."""
        await self._check_run_exists(run_id)
        keys = Keys(self._prefix, run_id)
        return await read_history(self.client, keys), await read_run_time(self.client, keys)

    async def _check_run_exists(self, run_id: str) -> None:
        if not await self._exists(run_id):
            raise NoSuchRun(run_id)

    async def _exists(self, run_id: str) -> bool:
        return "/" not in run_id and bool(await self.client.count(Keys(self._prefix, run_id).root))


def _is_usage_unchanged(before: RunUsage, now: RunUsage) -> bool:
    """Return True if a run's usage shows no change; False if the store does not count usage (etcd)."""
    is_counted = before.age is not None and now.age is not None and before.age <= now.age
    return is_counted and (before.keys, before.bytes) == (now.keys, now.bytes)
