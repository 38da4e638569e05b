"""Shell: what a store's own process sees of the runs in it: the same answers as `rdzv status`, and the same acts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from rdzv.core.keys import Keys
from rdzv.core.report import report
from rdzv.core.state import Ban, Closed
from rdzv.display.history import account, describe, losses_by_reason, timeline
from rdzv.node.admission import attribute_ban, check_node_id, put_ban, put_ban_where, take_run_lease
from rdzv.node.follower import Follower
from rdzv.node.status import read_history, read_run, run_ids
from store import Client
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rdzv.core.history import History
    from store.server.server import Server

__all__ = ["NoSuchRun", "Runs", "client_of"]

BY = "an operator, over HTTP"
FRESH = 0.5  # seconds for which an answer serves everybody who asks; reading 1,000 nodes takes some milliseconds
HISTORY_LINES = 40


class NoSuchRun(Exception):
    """The store holds nothing of the run."""


@contextlib.asynccontextmanager
async def client_of(server: Server, *, token: bytes | None) -> AsyncIterator[Client]:
    """Connect to a server from within its own process, past its port and the TLS that it demands there."""

    async def dial(factory: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Transport, asyncio.Protocol]:
        loop = asyncio.get_running_loop()
        ours, theirs = _socket_pair()
        await loop.connect_accepted_socket(server.protocol_beside, theirs)
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


class Runs:
    """The runs under a prefix of a store.

    Args:
        client: Of the store.
        prefix: What the keys of all runs start with.
        closed_ttl: Seconds for which a closing or a ban outlives the run's last node.
    """

    def __init__(self, client: Client, *, prefix: str, closed_ttl: float) -> None:
        self._client = client
        self._prefix = prefix
        self._closed_ttl = closed_ttl
        self._looking = asyncio.Lock()
        self._seen: list[dict[str, Any]] = []
        self._seen_at = -FRESH

    async def ping(self) -> float:
        """Measure how long the store takes to answer."""
        return await self._client.ping(timeout=2.0)

    async def summaries(self) -> list[dict[str, Any]]:
        """Return how each run stands in numbers, by name; an answer that is fresh serves several who ask."""
        async with self._looking:
            if self._client.time() - self._seen_at >= FRESH:
                self._seen = [await self._summary(run_id) for run_id in await run_ids(self._client, self._prefix)]
                self._seen_at = self._client.time()
            return self._seen

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
        return timeline(run_id, await read_history(self._client, self._keys(run_id)), now=time.time()).plain()

    async def close(self, run_id: str, reason: str) -> None:
        """Close a run for all its nodes; the first reason given counts."""
        keys = self._keys(run_id)
        if not await self._client.count(keys.root):
            raise NoSuchRun(run_id)
        lease = await take_run_lease(self._client, keys, self._closed_ttl)
        closed = Closed(reason=reason, by=BY).pack()
        await self._client.compare_and_set(keys.closed, closed, expected_revision=0, lease=lease)

    async def ban(self, run_id: str, node_id: str, ban: Ban) -> None:
        """Keep a node out of the next rounds of a run, and out of this one if the ban says so."""
        check_node_id(node_id)
        keys = self._keys(run_id)
        if not await self._client.count(keys.root):
            raise NoSuchRun(run_id)
        await put_ban(self._client, keys, node_id, ban, keep=self._closed_ttl)

    async def ban_where(self, run_id: str, where: str, ban: Ban) -> tuple[str, ...]:
        """Keep all nodes with an attribute out of the next rounds of a run; which of them are here."""
        attribute, _, value = where.partition("=")
        ban = ban.replace(where=attribute_ban(attribute, value))
        keys = self._keys(run_id)
        if not await self._client.count(keys.root):
            raise NoSuchRun(run_id)
        return await put_ban_where(self._client, keys, ban, keep=self._closed_ttl)

    async def _summary(self, run_id: str) -> dict[str, Any]:
        full, history = await self._report(run_id)
        plain = {name: full[name] for name in ("run_id", "phase", "reason", "round", "world_size", "closed")}
        cost = account(run_id, history, now=time.time(), waited=full["waited"])
        spent = {
            "training": cost.spent.trained,
            "regrouping": cost.spent.regrouped,
            "waiting": cost.spent.waited,
        }
        return {
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

    def _keys(self, run_id: str) -> Keys:
        return Keys(self._prefix, run_id)

    async def _report(self, run_id: str) -> tuple[dict[str, Any], History]:
        keys = self._keys(run_id)
        follower = Follower(self._client, keys)
        task = asyncio.create_task(follower.run(), name=f"look at run {run_id}")
        try:
            await follower.synced.wait()
        finally:
            await cancel_and_wait(task)
        if follower.error is not None:
            raise follower.error
        status, history = await read_run(self._client, keys, follower.head)
        return report(status), history
