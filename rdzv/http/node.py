"""`/metrics` and `/healthz` of a node's own process (`metrics_port`).

The metrics need no request to the store. The port is opened when the node first joins, so commands that do not join
open none.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from aiohttp import web

from rdzv.http.access_rules import access_rules_for
from rdzv.http.listening import health, make_connection_table, serve_routes
from rdzv.http.metrics import CONTENT_TYPE, ProcessMetrics, metric
from rdzv.node.link.wakeup import Wakeup
from store.net.address import join_host_port
from store.printable import make_logger

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from rdzv.membership import Membership
    from rdzv.node.node import Node
    from store.protocol.connection import Secret

log: Final = make_logger(__name__)

IN_ROUND: Final = "in a round"
JOINING: Final = "joining"
OUTSIDE: Final = "outside"

LABELS: Final = ("node", "run")


async def serve_node(
    node: Node, host: str, port: int, *, token: Secret, tls: ssl.SSLContext | None, insecure: bool
) -> None:
    """Serve a node's metrics in the node's loop, from the node's first arrival until cancelled."""
    host, door = access_rules_for(host, token=token, secure=tls is not None, insecure=insecure)
    metrics = _NodeMetrics(node)
    node.listeners.add(metrics)
    try:
        with node.listeners.subscribed(wakeup := Wakeup()):
            while not (node.is_joining or node.membership is not None):
                await wakeup.sleep_until(None)
        async with contextlib.AsyncExitStack() as stack:
            serving = serve_routes(metrics.routes(), door, make_connection_table(), host, port, tls)
            try:
                bound = await stack.enter_async_context(serving)
            except OSError as error:
                log.warning("node %s: metrics_port=%d serves nothing: %s", node.node_id, port, error.strerror or error)
            else:
                at = join_host_port(host or "*", bound)
                log.info("run %s, node %s: its metrics are at %s/metrics", node.run_id, node.node_id, at)
            await metrics.process.measure_loop_lag(then=metrics.add_elapsed_time)
    finally:
        node.listeners.remove(metrics)


class _NodeMetrics:
    """One node's metrics; make an instance in the node's loop."""

    def __init__(self, node: Node) -> None:
        self.process = ProcessMetrics("rdzv_node_loop_lag_seconds")
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._doing = OUTSIDE
        self._spent = dict.fromkeys((IN_ROUND, JOINING, OUTSIDE), 0.0)
        self._membership: Membership | None = None
        self._told_over = False
        self._rounds = self._dropped = self._lost = self._lost_in_round = 0

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/metrics", self._serve_metrics), web.get("/healthz", health)]

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        self.add_elapsed_time()
        return web.Response(body="".join([self.process.text(), *self._metric_lines()]).encode(), headers=CONTENT_TYPE)

    def notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the node's loop has ended
            self._loop.call_soon_threadsafe(self.add_elapsed_time)

    def add_elapsed_time(self) -> None:
        """Add the time since the last call to the activity seen then; call this only in the node's loop."""
        node, membership, now = self._node, self._node.membership, self._loop.time()
        self._spent[self._doing] += now - self._since
        self._since = now
        if membership is not None:
            self._count_round(membership)
        is_member = membership is not None and membership.over is None
        self._doing = JOINING if node.is_joining else IN_ROUND if is_member else OUTSIDE

    def _count_round(self, membership: Membership) -> None:
        if membership is not self._membership:
            self._membership, self._told_over, self._lost_in_round = membership, False, 0
            self._rounds += 1
        if len(membership.lost_ids) > self._lost_in_round:
            self._lost += len(membership.lost_ids) - self._lost_in_round
            self._lost_in_round = len(membership.lost_ids)
        if membership.over is not None and not self._told_over:
            self._told_over = True
            self._dropped += membership.dropped

    def _metric_lines(self) -> Iterator[str]:
        node, head, membership = self._node, self._node.head, self._membership
        is_member = membership is not None and membership.over is None
        progress = head.progress
        if progress is not None and membership is not None and progress.round != membership.round.number:
            progress = None  # the progress is that of another round
        coordinates = head.coordinator is not None and head.coordinator.node_id == node.node_id
        figures: dict[str, tuple[str, float | None]] = {
            "member": ("1 while the node is in a round.", is_member),
            "round": ("The last round that the node was in.", None if membership is None else membership.round.number),
            "rank": ("Its rank there.", None if membership is None else membership.rank),
            "world_size": ("How many members that round had.", None if membership is None else membership.round.size),
            "step": (
                "The last step that it has begun there.",
                None if membership is None else membership.beats.last_step,
            ),
            "waiting_nodes": ("Nodes that a regroup now would admit.", None if progress is None else progress.waiting),
            "missing_nodes": ("Nodes that are missing.", None if progress is None else progress.absent.count),
            "coordinates": ("1 while it decides for the run.", coordinates),
            "hosts_store": ("1 while its process serves the store.", node.hosts_store()),
            "store_in_reach": ("1 while the store is in reach, as far as is known.", node.is_connected),
            "run_closed": ("1 once the run is closed.", head.closed is not None),
            "rounds_total": ("Rounds that the node has been in.", self._rounds),
            "members_lost_total": ("Members that were lost from these, as far as they were named.", self._lost),
            "dropped_total": ("How often it was put out of one.", self._dropped),
        }
        labels = (node.node_id, node.run_id)
        for name, (text, value) in figures.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            yield from metric(f"rdzv_node_{name}", kind, text, LABELS, [] if value is None else [(labels, value)])
        spent = (((doing, *labels), seconds) for doing, seconds in self._spent.items())
        text = "Seconds that this node has spent in each phase."
        yield from metric("rdzv_node_seconds_total", "counter", text, ("doing", *LABELS), spent)
